r"""Which rows of a comparison really differ, in numbers and in words.

Differences in log-perplexity are paired, row by row. If an equal-compute rival wins, the first line says so. The
share of the quality gap that a row pays is counted between the heavy (H) and the light model (L) alone:

    gap_paid = (ppl - ppl_H) / (ppl_L - ppl_H).

Shapes: n rows, S schedules, R bootstrap resamples.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm import metrics
from relaylm.contenders import Entry, base_steps, one_model

if TYPE_CHECKING:
    from relaylm.family import Family


def relate(
    rows: list[dict[str, Any]], log_Sn: np.ndarray, family: Family, entries: Sequence[Entry], light: str, heavy: str
) -> None:
    """What a row is only in relation to others: savings against all-heavy, the share of the gap it pays."""
    anchors = {}
    for name in (heavy, light):
        alone = Entry(name, one_model(name), base_steps(entries), "anchor").identity
        anchors[name] = next(s for s, entry in enumerate(entries) if entry.identity == alone)
    h, l = anchors[heavy], anchors[light]
    ppl_Sn = np.exp(log_Sn)
    shared_n = np.isfinite(ppl_Sn).all(axis=0)
    weights_Rn = metrics.resampling_weights(int(shared_n.sum()))
    mean_RS = weights_Rn @ ppl_Sn[:, shared_n].T
    depths = {name: getattr(model, "depth", None) for name, model in family.models.items()}
    for s, (row, entry) in enumerate(zip(rows, entries, strict=True)):
        gap = rows[l]["gen_ppl"] - rows[h]["gen_ppl"]
        row["gap_paid"] = row["gap_paid_ci"] = None
        if h != l and gap > 0:
            row["gap_paid"] = (row["gen_ppl"] - rows[h]["gen_ppl"]) / gap
            with np.errstate(divide="ignore", invalid="ignore"):
                paid_R = (mean_RS[:, s] - mean_RS[:, h]) / (mean_RS[:, l] - mean_RS[:, h])
            clear = bool((mean_RS[:, l] > mean_RS[:, h]).mean() > 0.975)  # else the gap itself is in doubt
            ends = np.quantile(paid_R, [0.025, 0.975]) if clear else (math.nan, math.nan)
            row["gap_paid_ci"] = [metrics.finite(float(v)) for v in ends]
        flops, most = row["flops"], rows[h]["flops"]
        row["flops_saved"] = None if flops is None or not most else 1 - flops / most
        if "milliseconds" in row:
            row["ms_saved"] = 1 - row["milliseconds"] / rows[h]["milliseconds"]
        row["blocks_saved"] = None
        if None not in depths.values() and not math.isinf(entry.steps) and not math.isinf(entries[h].steps):
            blocks = sum(depths[name] or 0 for name in entry.schedule.timetable(int(entry.steps)).models)
            row["blocks_saved"] = 1 - blocks / (entries[h].steps * (depths[heavy] or 1))


def comparisons(rows: Sequence[dict[str, Any]], log_Sn: np.ndarray) -> dict[str, Any]:
    """Paired differences to the first row, places, and the samples it takes to tell any two rows apart."""
    weights_Rn = metrics.resampling_weights(log_Sn.shape[1])
    paired = []
    for row, log_n in zip(rows[1:], log_Sn[1:], strict=True):
        difference = metrics.paired_difference(log_n, log_Sn[0], weights_Rn)
        paired.append({"schedule": row["schedule"], "reference": rows[0]["schedule"], **difference})
    for item, p in zip(paired, metrics.holm([item["p"] for item in paired]), strict=True):
        item["p_holm"] = p
    for row, place in zip(rows, metrics.ranks(log_Sn, weights_Rn), strict=True):
        row |= place
    needed = []
    for i, a_n in enumerate(log_Sn):
        d = [(a_n - b_n)[np.isfinite(a_n) & np.isfinite(b_n)] for b_n in log_Sn]
        needed.append(
            [None if i == j else metrics.samples_needed(float(x.mean()), float(x.std(ddof=1))) for j, x in enumerate(d)]
        )
    contests = []
    for s, row in enumerate(rows):
        for r, other in enumerate(rows):
            if row["schedule"] in other["rival_of"]:
                difference = metrics.paired_difference(log_Sn[r], log_Sn[s], weights_Rn)
                ratio = None if not row["flops"] or other["flops"] is None else other["flops"] / row["flops"]
                contests.append(
                    {
                        "schedule": row["schedule"],
                        "rival": other["schedule"],
                        "what": other["rival"],
                        "outcome": "level",
                        "flops_ratio": ratio,
                        "entropy_difference": other["entropy"] - row["entropy"],
                        **difference,
                    }
                )
    # Of many contests one in twenty goes astray by chance: an outcome must stand the adjustment for their number.
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
        margin = (item["ci"][1] - item["ci"][0]) / 2
        flops = "" if item["flops_ratio"] is None else f" at {item['flops_ratio']:.1%} of its FLOPs"
        return (
            f"{item['rival']} ({item['what']}) against {item['schedule']}: {item['difference']:+.4f} +- {margin:.4f} "
            f"in log-perplexity{flops}, entropy {item['entropy_difference']:+.3f}"
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


# ------------------------------------------------------------------------------------------------ showing


# What a narrow terminal goes without, the first to go first. Perplexity never stands without entropy beside it.
DISPENSABLE = (
    *("s", "calls/row", "corpus", "distinct-4", "J/row", "blocks saved", "rank", "ms/row", "ms saved", "words"),
    *("gap paid", "bound", "MAUVE"),
)
SHORT_NAME = 20  # a schedule's name is cut down to this before a column is left out


def render(result: Mapping[str, Any], width: int | None = None) -> str:
    """The comparison as text: the verdict on the rivals first, then the table in `width` columns (the terminal's)."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    rows, n = result["rows"], result["n"]
    paired = {item["schedule"]: item for item in result["paired"]}
    table: dict[str, list[str]] = {}

    def column(head: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
        cells = [cell(row) for row in rows]
        if any(cells):  # one that is empty all the way down only takes room
            table[head] = cells

    def difference(row: Mapping[str, Any]) -> str:
        item = paired.get(row["schedule"])
        return (
            "reference"
            if item is None
            else _plus_minus(item["difference"], item["ci"], "+.4f", item["p_holm"] < 1 - metrics.LEVEL)
        )

    marks = {"asked": " ", "anchor": "·", "rival": "≈"}
    column("schedule", lambda row: f"{marks[row['kind']]} {row['schedule']}")
    column("gen ppl", lambda row: _plus_minus(row["gen_ppl"], row["gen_ppl_ci"], ".2f"))
    column("corpus", lambda row: f"{row['corpus_ppl']:.2f}")
    column("entropy", lambda row: _plus_minus(row["entropy"], row["entropy_ci"], ".3f"))
    if "word_entropy" in rows[0]:
        column("words", lambda row: f"{row['word_entropy']:.3f}")
    column("distinct-4", lambda row: "" if row["distinct_4"] is None else f"{row['distinct_4']:.3f}")
    if "mauve" in rows[0]:
        column("MAUVE", lambda row: f"{row['mauve']:.3f}")
    column("log-ppl diff", difference)
    column("gap paid", lambda row: _percent(row["gap_paid"]))
    column("blocks saved", lambda row: _percent(row["blocks_saved"]))
    column("FLOPs saved", lambda row: _percent(row["flops_saved"]))
    if "milliseconds" in rows[0]:
        column("ms/row", lambda row: f"{row['milliseconds'] / n:.3g}")
        column("ms saved", lambda row: _percent(row["ms_saved"]))
    if rows[0].get("joules") is not None:
        column("J/row", lambda row: f"{row['joules'] / n:.3g}")
    column("calls/row", lambda row: f"{row['calls'] / n:.1f}")
    column("s", lambda row: f"{row['seconds']:.1f}")
    column("rank", lambda row: f"{row['rank']} ({row['rank_ci'][0]}-{row['rank_ci'][1]})")
    if any(row["bound"] is not None for row in rows):
        column("bound", lambda row: "" if row["bound"] is None else f"{row['bound']['bits']:.4f}")
    lines, left_out = _fitted(table, width)
    about = (
        f"{n} samples a row, length {result['length']}, T = {result['steps']}, judge {result['judge']}"
        f"{' (MDLM recipe)' if result['recipe'] == 'mdlm' else ''}; 95% intervals; differences are paired, to "
        f"{rows[0]['schedule']}, * where it is not chance; ≈ an equal-compute rival, · for the gap"
    )
    notes = [f"left out for want of room: {', '.join(left_out)} (--json has all)"] if left_out else []
    notes += [f"note: {note}" for note in result.get("store_notes", [])]
    unscored = sum(row["unscored"] for row in rows)
    notes += [f"note: {unscored} samples have a single token and so no perplexity"] if unscored else []
    wrapped = [line for text in (about, *notes) for line in textwrap.wrap(text, width)]
    return "\n".join([result["verdict"], "", *lines, "", *wrapped])


def _fitted(table: Mapping[str, Sequence[str]], width: int) -> tuple[list[str], list[str]]:
    """A table's lines in so many columns, heads in two lines where one is wider than its column, and the heads of what
    was left out. Names are cut short before a column goes."""
    heads = {
        head: [head, ""] if max(map(len, cells)) >= len(head) else [*head.rsplit(" ", 1), ""][:2]
        for head, cells in table.items()
    }
    sizes = {head: max(map(len, [*heads[head], *cells])) for head, cells in table.items()}
    kept = list(table)
    names = kept[0]

    def room() -> int:
        """What is left for the names."""
        return width - sum(sizes[head] + 2 for head in kept[1:])

    for head in DISPENSABLE:
        if room() < min(sizes[names], SHORT_NAME) and head in kept:
            kept.remove(head)
    sizes[names] = max(12, min(sizes[names], room()))
    lines = []
    for line in zip(*([*heads[head], *table[head]] for head in kept), strict=True):
        name = line[0] if len(line[0]) <= sizes[names] else line[0][: sizes[names] - 1] + "…"
        cells = [cell.rjust(sizes[head]) for head, cell in zip(kept[1:], line[1:], strict=True)]
        lines.append("  ".join([name.ljust(sizes[names]), *cells]).rstrip())
    return lines, [head for head in table if head not in kept]


def _plus_minus(value: float, ci: Sequence[float | None], form: str, star: bool = False) -> str:
    low, high = ci
    margin = "" if low is None or high is None else f"±{(high - low) / 2:{form.lstrip('+')}}"
    return f"{value:{form}}{margin}{'*' if star else ''}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
