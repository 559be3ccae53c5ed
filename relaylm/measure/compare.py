r"""Schedules side by side: what each writes and what it costs, in one table, and which of them really differ.

Every schedule gets the same rows: row r has the same plan (the same order of positions, the same token noise) under all
of them, so differences are paired, row by row, and need far fewer samples than separate means would. `rivals` decides
what is compared, the equal-compute rivals included; `evaluate` samples, judges and keeps the rows. If an equal-compute
rival wins, the first line says so. The share of the quality gap that a row pays is counted between the heavy (H) and
the light model (L) alone:

    gap_paid = (ppl - ppl_H) / (ppl_L - ppl_H).

Shapes: n rows, L positions, S schedules, R bootstrap resamples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.console import html_table, table, terminal_width, wrapped
from relaylm.core.cost import mean_price
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError, checked
from relaylm.measure import metrics
from relaylm.measure.estimate import announce
from relaylm.measure.evaluate import (
    LEAST_PIECE,
    Drawn,
    Evaluator,
    SampleSpec,
    Workers,
    figures,
    given_rows,
    steps_json,
    texts_of,
)
from relaylm.measure.judge import Judge, Scores, features, load_judge, log_perplexity
from relaylm.measure.likelihood import text_rows
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.prices import prices
from relaylm.measure.rivals import Entry, base_steps, contenders, expected_flops, one_model
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound
from relaylm.measure.store import Store, open_store
from relaylm.measure.timing import energy_counter
from relaylm.models.family import Family
from relaylm.sampling.result import reference_flops


@checked
def compare(
    family: Family,
    schedules: str | Sequence[str | Schedule],
    n: int = 400,
    *,
    steps: float | None = None,
    length: int | None = None,
    seed: int = 0,
    prompts: Sequence[str] | np.ndarray | None = None,
    judge: Any = None,
    recipe: str = "plain",
    rivals: bool = True,
    bound: bool = False,
    text: np.ndarray | None = None,
    mauve: np.ndarray | None = None,
    timing: bool = False,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    store: Store | str | Path | None = None,
    fresh: bool = False,
    any_device: bool = False,
    cluster: Workers | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Sample n rows under each schedule, judge them, and compare. Returns plain JSON values that show
    themselves as a table; a perplexity may be infinite, which `--json` and the store write as "inf".

    `prompts` are texts (row r gets prompt r mod their number) or an array of token ids with -1 where free; perplexity
    is then that of the continuation, with `*_everything` beside it. `judge` and `recipe` as in `judge`. `bound` adds
    each schedule's likelihood bound on `text` (rows of held-out token ids). `mauve` are such rows too, and adds
    MAUVE against them on the judge's states. `timing` adds the milliseconds and joules of the calls by the device's
    table (`relaylm.measure.timing`), which is measured where it lacks them. With a `store` what is there already
    is not computed again (`fresh`: it is, and replaced); `any_device` also takes samples that were drawn on another
    device, in another batch size or under another version of PyTorch, which have the same law but not always the same
    bits. With a `cluster` (`relaylm.cluster`) its workers sample; this process judges and stores.
    """
    schedules = [schedules] if isinstance(schedules, str) and schedules else schedules
    if not schedules:
        raise UserError("there is nothing to compare: name at least one schedule")
    if n < 2:
        raise UserError(f"a comparison needs at least 2 samples of each schedule, not {n}")
    light, heavy = family.roles(light, heavy)
    given_nL, prompt_texts = given_rows(family, prompts, n, length)
    length, free_nL = int(given_nL.shape[1]), given_nL < 0
    text, mauve = (None if rows is None else text_rows(family, rows, 1, family.length) for rows in (text, mauve))
    entries = contenders(family, schedules, steps, given_nL, light, heavy, rivals)
    referee, kept = load_judge(judge, family), open_store(store)
    batch = min(n, batch_size or family.batch_size(n, length))
    piece = max(LEAST_PIECE, 4 * batch)
    keeping: dict[str, Any] = {"store": kept, "fresh": fresh, "any_device": any_device}
    evaluator = Evaluator(family, referee, given_nL, heavy, prompt_texts, seed, recipe, batch, piece, **keeping)
    bounds = _bounds(family, entries, text, seed) if bound else [None] * len(entries)
    human_mD = None
    if mauve is not None:
        metrics.mauve_package()  # before the work is done, not after
        human_mD = _features(referee, family, mauve)
    models: Any = family.models
    if progress and cluster is None and all(hasattr(model, "flops") for model in models.values()):
        flops = n * sum(expected_flops(models, e.schedule, e.steps, free_nL, length) for e in entries)
        work = f"{len(entries)} schedules, {n} samples each"
        announce(family, work, flops, length, batch, "-n and --length make it shorter")

    def measured(entry: Entry) -> dict[str, float | None]:
        return _measured(family, entry, free_nL, batch) if timing else {}

    rows: list[dict[str, Any]] = []
    specs = [(entry.label, SampleSpec(entry.schedule, entry.steps)) for entry in entries]
    evaluated = evaluator.evaluate(specs, progress, cluster)
    for entry, likelihood, (drawn, scores) in zip(entries, bounds, evaluated, strict=True):
        row = _row(evaluator, entry, drawn, scores)
        if human_mD is not None:
            row["mauve"] = metrics.mauve(_features(referee, family, drawn.tokens_nL), human_mD)
        rows.append({**row, "bound": likelihood, **measured(entry)})
    log_Sn = np.array([[math.nan if x is None else x for x in row["log_ppls"]] for row in rows])
    alone = Entry(heavy, one_model(heavy), length, "anchor")  # what savings are counted against
    reference = {"flops": reference_flops(family[heavy], make_plan(n, length, seed, given_nL)), **measured(alone)}
    relate(rows, log_Sn, family, entries, light, heavy, reference, length)
    result: dict[str, Any] = {
        "kind": "compare",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": length,
        "steps": steps_json(base_steps(entries)),
        "seed": seed,
        "light": light,
        "heavy": heavy,
        "parameters": family.parameters,
        "judge": referee.name,
        "recipe": recipe,
        "conditional": bool((given_nL >= 0).any()),
        "device": str(family.device),
        "batch_size": batch,
        "rows": rows,
        **comparisons(rows, log_Sn),
    }
    if kept is not None and (kept.damage or kept.repaired):
        result["store_notes"] = [*kept.damage, *kept.repaired]
    result["verdict"] = verdict(result)
    return Comparison(result)


def _row(evaluator: Evaluator, entry: Entry, drawn: Drawn, scores: Scores) -> dict[str, Any]:
    """One row of the table, but for what it is only in relation to others."""
    family = evaluator.family
    return {
        "schedule": entry.label,
        "kind": entry.kind,
        "rival": entry.rival,
        "rival_of": entry.rival_of,
        "models": str(entry.schedule),
        "steps": steps_json(entry.steps),
        **figures(family, drawn.tokens_nL, scores, evaluator.given_nL, evaluator.prompts),
        "cut_tokens": int(scores.cut_n.sum()),
        **drawn.costs(family.names),
        "log_ppls": [None if math.isnan(value) else value for value in log_perplexity(scores).tolist()],
    }


def _bounds(
    family: Family, entries: Sequence[Entry], text: np.ndarray | None, seed: int
) -> list[dict[str, Any] | None]:
    if text is None:
        raise UserError("a likelihood bound needs held-out text: give rows of token ids as `text`")
    names = {name for entry in entries for name in entry.schedule.models}
    models = {name: family.models[name] for name in family.names if name in names}
    table = measure_table(models, text, family.mask_id, seed=seed)

    def one(entry: Entry) -> dict[str, Any]:
        if entry.schedule.spacing is None:
            return schedule_bound(table, entry.schedule, entry.steps).to_json()
        own = {name: models[name] for name in entry.schedule.models}
        return plan_bound(own, entry.schedule, text, family.mask_id, seed=seed, device=family.device).to_json()

    return [one(entry) for entry in entries]


def _features(judge: Judge, family: Family, tokens_nL: np.ndarray) -> np.ndarray:
    """Rows as vectors, whole: what was given counts as text, too."""
    return features(judge, tokens_nL, texts_of(family, tokens_nL))


def _measured(family: Family, entry: Entry, free_nL: np.ndarray, batch: int) -> dict[str, float | None]:
    """What the samples of an entry take by the device's table of timings, in expectation over plans."""
    out: dict[str, float | None] = {"milliseconds": None, "joules": None}
    length = free_nL.shape[1]
    for name, unit in (("milliseconds", "ms"), ("joules", "J")):
        if unit == "ms" or not energy_counter(family.device)[1]:
            known = prices(family, unit, length, entry.steps, models=entry.schedule.models, batch_size=batch)
            out[name] = len(free_nL) * mean_price(known, entry.schedule, entry.steps, free_nL)
    return out


# ------------------------------------------------------------------------------------------------ what differs


def relate(
    rows: list[dict[str, Any]],
    log_Sn: np.ndarray,
    family: Family,
    entries: Sequence[Entry],
    light: str,
    heavy: str,
    reference: Mapping[str, float | None],
    length: int,
) -> None:
    """Add to each row what it is in relation to others: savings against the reference (the heavy model alone in as many
    steps as positions, whose costs these are), the share of the gap it pays. Blocks are counted as in the paper,
    against as many steps as the heavy model makes in this table."""
    alone = [Entry(name, one_model(name), base_steps(entries), "anchor").identity for name in (heavy, light)]
    identities = [entry.identity for entry in entries]
    h, l = (identities.index(identity) for identity in alone)
    ppl_Sn = metrics.exponential(log_Sn)
    shared_n = np.isfinite(ppl_Sn).all(axis=0)
    some = shared_n if shared_n.any() else np.ones_like(shared_n)
    mean_RS = metrics.resampling_weights(int(some.sum())) @ np.where(shared_n, ppl_Sn, 0.0)[:, some].T
    own, gap_R = [row["gen_ppl"] for row in rows], mean_RS[:, l] - mean_RS[:, h]
    gap = own[l] - own[h] if math.isfinite(own[l]) and math.isfinite(own[h]) else 0.0  # of infinities there is none
    depths = {name: getattr(model, "depth", None) for name, model in family.models.items()}
    for s, (row, entry) in enumerate(zip(rows, entries, strict=True)):
        row["gap_paid"] = row["gap_paid_ci"] = None
        if h != l and gap > 0 and math.isfinite(own[s]):
            row["gap_paid"] = (own[s] - own[h]) / gap
            with np.errstate(divide="ignore", invalid="ignore"):
                paid_R = (mean_RS[:, s] - mean_RS[:, h]) / gap_R
            clear = (gap_R > 0).mean() > 0.975  # else the gap itself is in doubt
            ends = np.quantile(paid_R, [0.025, 0.975]).tolist() if clear else [None, None]
            row["gap_paid_ci"] = [metrics.finite(end) for end in ends]
        against = rows[h] if base_steps(entries) == length else reference
        flops, most = row["flops"], against["flops"]
        row["flops_saved"] = None if flops is None or not most else 1 - flops / most
        if "milliseconds" in row:
            row["ms_saved"] = 1 - row["milliseconds"] / against["milliseconds"]
        row["blocks_saved"] = None
        steps, all_steps = entry.steps or math.inf, entries[h].steps or math.inf
        if None not in depths.values() and math.isfinite(steps) and math.isfinite(all_steps):
            blocks = sum(depths[name] or 0 for name in entry.schedule.timetable(int(steps)).models)
            row["blocks_saved"] = 1 - blocks / (all_steps * (depths[heavy] or 1))


def comparisons(rows: Sequence[dict[str, Any]], log_Sn: np.ndarray) -> dict[str, Any]:
    """Paired differences to the first row, ranks (added to the rows), the samples needed to detect each difference, and
    the outcome of each rival's contest."""
    pairs = zip(rows[1:], log_Sn[1:], strict=True)
    paired = [{"schedule": row["schedule"], **metrics.paired_difference(log_n, log_Sn[0])} for row, log_n in pairs]
    for item, p in zip(paired, metrics.holm([item["p"] for item in paired]), strict=True):
        item |= {"reference": rows[0]["schedule"], "p_holm": p}
    for row, place in zip(rows, metrics.ranks(log_Sn), strict=True):
        row |= place
    finite_Sn, infinite_S = np.where(np.isinf(log_Sn), math.nan, log_Sn), np.isinf(log_Sn).sum(axis=1)
    needed: list[list[int | None]] = [[None] * len(rows) for _ in rows]
    for i, j in itertools.permutations(range(len(rows)), 2):
        d = finite_Sn[i] - finite_Sn[j]
        d = d[np.isfinite(d)]
        if len(d) > 1 and infinite_S[i] == infinite_S[j]:
            needed[i][j] = metrics.samples_needed(float(d.mean()), float(d.std(ddof=1)))
    contests = []
    for (s, row), (r, other) in itertools.product(enumerate(rows), enumerate(rows)):
        if row["schedule"] in other["rival_of"]:
            ratio = None if not row["flops"] or other["flops"] is None else other["flops"] / row["flops"]
            about = {"schedule": row["schedule"], "rival": other["schedule"], "what": other["rival"]}
            about |= {"outcome": "level", "flops_ratio": ratio}
            about["entropy_difference"] = other["entropy"] - row["entropy"]
            contests.append({**about, **metrics.paired_difference(log_Sn[r], log_Sn[s])})
    # One in twenty comparisons differs by chance, so outcomes are adjusted for the number of contests.
    for item, p in zip(contests, metrics.holm([item["p"] for item in contests]), strict=True):
        item["p_holm"] = p
        if p < 1 - metrics.LEVEL:
            item["outcome"] = "wins" if item["difference"] < 0 else "loses"
    return {"paired": paired, "samples_needed": needed, "rivals": contests}


def verdict(result: Mapping[str, Any]) -> str:
    """The first line."""
    contests = result["rivals"]
    if not contests:
        mixed = any(row["kind"] == "asked" and len(row["calls_by_model"]) > 1 for row in result["rows"])
        return "The equal-compute rivals were left out." if mixed else "No mixed schedule, so no equal-compute rival."

    def show(item: Mapping[str, Any]) -> str:
        flops = "" if item["flops_ratio"] is None else f" at {item['flops_ratio']:.1%} of its FLOPs"
        return (
            f"{item['rival']} ({item['what']}) against {item['schedule']}: "
            f"{_plus_minus(item['difference'], item['ci'], '+.4f', ' ± ')} in log-perplexity{flops}, "
            f"entropy {item['entropy_difference']:+.3f}"
        )

    winners = sorted((item for item in contests if item["outcome"] == "wins"), key=lambda item: item["difference"])
    if winners:
        beaten = {item["schedule"] for item in winners}
        return f"AN EQUAL-COMPUTE RIVAL WINS against {', '.join(sorted(beaten))}. {show(winners[0])}."
    level = [item for item in contests if item["outcome"] == "level"]
    if level:
        best = min(level, key=lambda item: item["difference"])
        known = f"No equal-compute rival is shown to win, but {len(level)} of {len(contests)} cannot be told apart"
        return f"{known}. {show(best)}."
    return f"Every equal-compute rival loses ({len(contests)} of them)."


# The columns that a narrow terminal leaves out, the first of them first. Perplexity is never shown without entropy.
SPARE = (
    *("s", "calls/row", "corpus", "distinct-4", "J/row", "blocks saved", "rank", "ms/row", "ms saved", "words"),
    *("gap paid", "bound", "MAUVE"),
)
MARKS = {"asked": " ", "anchor": "·", "rival": "≈"}


class Comparison(dict[str, Any]):
    """What `compare` returns: plain JSON values that show themselves as a table in a console or a notebook."""

    def __repr__(self) -> str:
        """The verdict and the table."""
        return render(self)

    def _repr_html_(self) -> str:
        cells = _columns(self)
        rows = list(zip(*cells.values(), strict=True))
        notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in _notes(self))
        return f"<p>{escape(self['verdict'])}</p>{html_table(list(cells), rows, text=(0, 1))}{notes}"


def render(result: Mapping[str, Any], width: int | None = None) -> str:
    """The comparison as text: the verdict on the rivals first, then the table in `width` columns (the terminal's)."""
    width = width or terminal_width()
    shown = _columns(result)
    lines = table(list(shown), list(zip(*shown.values(), strict=True)), width, text=(0, 1), spare=SPARE)
    return "\n".join([*wrapped([result["verdict"]], width), "", lines, "", *wrapped(_notes(result), width)])


def _columns(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """The cells of the table, by column; columns that are empty are left out."""
    rows, n = result["rows"], result["n"]
    paired = {item["schedule"]: item for item in result["paired"]}

    def difference(row: Mapping[str, Any]) -> str:
        item = paired.get(row["schedule"])
        if item is None:
            return "reference"
        star = "*" if item["p_holm"] < 1 - metrics.LEVEL else ""
        return _plus_minus(item["difference"], item["ci"], "+.4f") + star

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "": lambda row: MARKS[row["kind"]],
        "schedule": lambda row: row["schedule"],
        "gen ppl": lambda row: _plus_minus(row["gen_ppl"], row["gen_ppl_ci"], ".2f"),
        "corpus": lambda row: f"{row['corpus_ppl']:.2f}",
        "entropy": lambda row: _plus_minus(row["entropy"], row["entropy_ci"], ".3f"),
        "words": lambda row: _number(row.get("word_entropy"), ".3f"),
        "distinct-4": lambda row: _number(row["distinct_4"], ".3f"),
        "MAUVE": lambda row: _number(row.get("mauve"), ".3f"),
        "log-ppl diff": difference,
        "gap paid": lambda row: "" if (row["gap_paid_ci"] or [None])[0] is None else f"{row['gap_paid']:.1%}",
        "blocks saved": lambda row: _number(row["blocks_saved"], ".1%"),
        "FLOPs saved": lambda row: _number(row["flops_saved"], ".1%"),
        "ms/row": lambda row: _number(row.get("milliseconds"), ".3g", n),
        "ms saved": lambda row: _number(row.get("ms_saved"), ".1%"),
        "J/row": lambda row: _number(row.get("joules"), ".3g", n),
        "calls/row": lambda row: f"{row['calls'] / n:.1f}",
        "s": lambda row: f"{row['seconds']:.1f}",
        "rank": lambda row: f"{row['rank']} ({row['rank_ci'][0]}-{row['rank_ci'][1]})",
        "bound": lambda row: "" if row["bound"] is None else f"{row['bound']['bits']:.4f}",
    }
    shown = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    return {head: cells for head, cells in shown.items() if any(cells)}


def _notes(result: Mapping[str, Any]) -> list[str]:
    """What the table does not say itself."""
    rows, n = result["rows"], result["n"]
    about = (
        f"{n} samples a row, length {result['length']}, T = {result['steps']}, judge {result['judge']}"
        f"{' (MDLM recipe)' if result['recipe'] == 'mdlm' else ''}; 95% intervals; differences are paired, to "
        f"{rows[0]['schedule']}, * where it is not chance; ≈ an equal-compute rival, · for the gap; saved: against "
        f"{result['heavy']} alone in {result['length']} steps"
    )
    sizes = ", ".join(f"{name} {count / 1e6:.3g}M" for name, count in result.get("parameters", {}).items())
    about += f"; parameters: {sizes}" if sizes else ""
    notes = [f"note: {note}" for note in result.get("store_notes", [])]
    infinite = sum(x == math.inf for row in rows for x in row.get("log_ppls", []))
    if infinite:
        notes += [f"note: {infinite} samples have infinite perplexity: the judge says that they cannot be"]
    unscored = sum(row["unscored"] for row in rows)
    notes += [f"note: {unscored} samples have a single token and so no perplexity"] if unscored else []
    return [about, *notes]


def _plus_minus(value: float, ci: Sequence[float | None], form: str, sign: str = "±") -> str:
    low, high = ci
    margin = "" if low is None or high is None else f"{sign}{(high - low) / 2:{form.lstrip('+')}}"
    return f"{value:{form}}{margin}"


def _number(value: float | None, form: str, rows: int = 1) -> str:
    """A number, per row if it is a sum over rows; empty where there is none."""
    return "" if value is None else f"{value / rows:{form}}"
