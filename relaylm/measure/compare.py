r"""Schedules side by side: what each writes and what it costs, in one table.

Every schedule gets the same rows: row r has the same plan (the same order of positions, the same token noise) under all
of them, so differences are paired and need far fewer samples than separate means would. `rivals` decides what is
compared, the equal-compute rivals included; `evaluate` samples, judges and keeps the rows; `verdict` says which
schedules differ and renders the table.

Shapes: n rows, L positions, S schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
    open_store,
    steps_json,
    texts_of,
)
from relaylm.measure.judge import Judge, Scores, features, load_judge, log_perplexity
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.prices import prices
from relaylm.measure.rivals import Entry, base_steps, contenders, expected_flops, one_model
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound
from relaylm.measure.store import Store
from relaylm.measure.timing import energy_counter
from relaylm.measure.verdict import Comparison, comparisons, relate, verdict
from relaylm.measure.verdict import render as render
from relaylm.sampling.result import reference_flops

if TYPE_CHECKING:
    from relaylm.models.family import Family


@checked
def compare(
    family: Family,
    schedules: Sequence[str | Schedule],
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
    themselves as a table.

    `prompts` are texts (row r gets prompt r mod their number) or an array of token ids with -1 where free; perplexity
    is then that of the continuation, with `*_everything` beside it. `judge` and `recipe` as in `judge`. `bound` adds
    each schedule's likelihood bound on `text` (rows of held-out token ids). `mauve` are such rows too, and adds
    MAUVE against them on the judge's states. `timing` adds the milliseconds and joules of the calls by the device's
    table (`relaylm.measure.timing`), which is measured where it lacks them. With a `store` what is there already
    is not computed again (`fresh`: it is, and replaced); `any_device` also takes samples that were drawn on another
    device, in another batch size or under another version of PyTorch, which have the same law but not always the same
    bits. With a `cluster` (`relaylm.cluster`) its workers sample; this process judges and stores.
    """
    if not schedules:
        raise UserError("there is nothing to compare: name at least one schedule")
    if n < 2:
        raise UserError(f"a comparison needs at least 2 samples of each schedule, not {n}")
    light, heavy = family.roles(light, heavy)
    given_nL, prompt_texts = given_rows(family, prompts, n, length)
    entries = contenders(family, schedules, steps, given_nL, light, heavy, rivals)
    referee = load_judge(judge, family)
    kept = open_store(store)
    batch = min(n, batch_size or family.batch_size(n, given_nL.shape[1]))
    evaluator = Evaluator(
        family,
        referee,
        given_nL,
        heavy,
        prompts=prompt_texts,
        seed=seed,
        recipe=recipe,
        batch=batch,
        piece=max(LEAST_PIECE, 4 * batch),
        store=kept,
        fresh=fresh,
        any_device=any_device,
    )
    bounds = _bounds(family, entries, text, seed) if bound else [None] * len(entries)
    human_mD = None
    if mauve is not None:
        metrics.mauve_package()  # before the work is done, not after
        human_mD = _features(referee, family, mauve)
    if progress and cluster is None and all(hasattr(model, "flops") for model in family.models.values()):
        free_n = (given_nL < 0).sum(axis=1)
        used: Any = family.models
        each = [expected_flops(used, e.schedule, e.steps, free_n, given_nL.shape[1]) for e in entries]
        work = f"{len(entries)} schedules, {n} samples each"
        announce(family, work, n * sum(each), given_nL.shape[1], batch, "-n and --length make it shorter")
    rows: list[dict[str, Any]] = []
    specs = [(entry.label, SampleSpec(entry.schedule, entry.steps)) for entry in entries]
    evaluated = evaluator.evaluate(specs, progress, cluster)
    for entry, likelihood, (drawn, scores) in zip(entries, bounds, evaluated, strict=True):
        row = _row(evaluator, entry, drawn, scores)
        if human_mD is not None:
            row["mauve"] = metrics.mauve(_features(referee, family, drawn.tokens_nL), human_mD)
        rows.append({**row, "bound": likelihood, **(_measured(family, entry, given_nL, batch) if timing else {})})
    log_Sn = np.array([[math.nan if x is None else x for x in row["log_ppls"]] for row in rows])
    reference = Entry(heavy, one_model(heavy), given_nL.shape[1], "anchor")  # what savings are counted against
    flops = reference_flops(family[heavy], make_plan(n, given_nL.shape[1], seed, given_nL))
    measured = _measured(family, reference, given_nL, batch) if timing else {}
    relate(rows, log_Sn, family, entries, light, heavy, {"flops": flops, **measured}, given_nL.shape[1])
    result: dict[str, Any] = {
        "kind": "compare",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": int(given_nL.shape[1]),
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
        "log_ppls": [metrics.finite(value) for value in log_perplexity(scores)],
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


def _measured(family: Family, entry: Entry, given_nL: np.ndarray, batch: int) -> dict[str, float | None]:
    """What the samples of an entry take by the device's table of timings, in expectation over plans."""
    free_n, used = (given_nL < 0).sum(axis=1), entry.schedule.models
    out: dict[str, float | None] = {"milliseconds": None, "joules": None}
    for name, unit in (("milliseconds", "ms"), ("joules", "J")):
        if unit == "ms" or not energy_counter(family.device)[1]:
            known = prices(family, unit, given_nL.shape[1], entry.steps, models=used, batch_size=batch)
            out[name] = len(free_n) * mean_price(known, entry.schedule, entry.steps, free_n)
    return out
