r"""Every schedule there is, on the same rows; the best of them once more on fresh ones; what it says about segments.

All schedules with so many light segments are measured (210 for 4 of 10), or, with more models or a budget, every
assignment of models to segments that is within the budget and in which no single segment could have a dearer model.
With ppl(s) a schedule's mean perplexity, the influence of a segment j is, as in the paper,

    I(j) = mean of ppl(s) over the s that are light in j  -  mean of ppl(s) over all s.

So a positive I(j) says that a light model does more than average harm in segment j, a negative one that it is
comparatively safe there. Intervals are bootstrap intervals over rows, which all schedules share. The best of many
means is too good to be true (winner's curse), so the winner is chosen again among the best 20, on rows that none of
them has seen. A few schedules are also run by themselves, to see that the tree gave what independent runs give.

Shapes: S schedules, n rows, J segments, R bootstrap resamples, A all assignments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm import metrics
from relaylm.errors import UserError
from relaylm.schedule import Schedule, all_placements, sandwich
from relaylm.surrogate import SLACK, Choice, Space
from relaylm.tree import Stopped
from relaylm.trials import Trials, counted, paired, shared_rows

if TYPE_CHECKING:
    from relaylm.schedule_search import Problem

MOST_SCHEDULES = 20_000
TOP = 20  # schedules among which the winner is chosen again
CHECKED = 3  # schedules that are run by themselves, too


def assignments(problem: Problem, light_segments: int | None, limit: float | None) -> tuple[Space, list[Choice]]:
    """All choices of models for segments with so many light ones, or within a limit and not to be bettered in a
    single segment."""
    space = problem.space([Fraction(1)])
    options, segments = len(space.options), problem.segments
    if limit is None:
        light = light_segments if light_segments is not None else min(4, segments)
        if math.comb(segments, light) > MOST_SCHEDULES:
            raise UserError(f"{math.comb(segments, light)} schedules are too many to try: take fewer segments")
        # Option 0 is the heavy model, 1 the light one: as in the bits of a schedule.
        return space, [tuple(int(bit) for bit in str(schedule)) for schedule in all_placements(segments, light)]
    if options**segments > 10_000_000:
        raise UserError(f"{options} models in {segments} segments are too many to try: take fewer of them, or tune")
    index_AS = np.array(list(product(range(options), repeat=segments)), dtype=np.int8)
    price_AS = space.price_SO[np.arange(segments), index_AS]
    total_A = price_AS.sum(axis=1)
    room = limit * (1 + SLACK)
    # Options go from dear to cheap; the next dearer model in segment j would cost so much more.
    dearer_AS = np.where(
        index_AS > 0, space.price_SO[np.arange(segments), np.maximum(index_AS - 1, 0)] - price_AS, np.inf
    )
    keep_A = (total_A <= room) & (total_A[:, None] + dearer_AS > room).all(axis=1)
    if not keep_A.any():
        raise UserError(f"no assignment of {', '.join(problem.models)} to {segments} segments fits the budget")
    if keep_A.sum() > MOST_SCHEDULES:
        raise UserError(f"{int(keep_A.sum())} schedules are too many to try: take fewer segments or models, or tune")
    return space, [tuple(int(o) for o in row) for row in index_AS[keep_A]]


def exhaustive(
    problem: Problem, light_segments: int | None = 4, limit: float | None = None, n: int = 160, confirm: int = 1600
) -> dict[str, Any]:
    """Every schedule on n rows, the best 20 on fresh ones, and what that says about segments."""
    trials = problem.trials
    space, choices = assignments(problem, light_segments, limit)
    schedules = [space.schedule(choice) for choice in choices]
    names = [space.show(choice) for choice in choices]
    result: dict[str, Any] = {"schedules_tried": len(schedules), "stopped": None}
    try:
        log_Sn = trials.scores(schedules, n, what=f"{len(schedules)} schedules")
    except (Stopped, KeyboardInterrupt) as stop:
        result["stopped"] = _why(stop)
        done = set.intersection(*(set(trials.known(schedule)) for schedule in schedules)) & set(range(n))
        if len(done) < 2:
            raise UserError(
                "the search was stopped before its first rows were done: there is nothing to show"
            ) from None
        log_Sn = trials.scores(schedules, len(done))  # chunks are done in order, so these are the first rows
    result |= {"n": log_Sn.shape[1], "search_calls": trials.spent.to_json()}
    order = np.argsort(np.nanmean(log_Sn, axis=1), kind="stable")
    rows = [_row(problem, names[s], schedules[s], log_Sn[s]) for s in order]
    result["schedules"] = rows
    result["top"], result["bottom"] = rows[:5], rows[::-1][:5]
    result |= segment_figures(space, choices, log_Sn)
    result |= {"confirmed": [], "tree_check": None}
    winner = schedules[order[0]]
    try:
        if result["stopped"] is None:
            result["tree_check"] = _tree_check(trials, [schedules[s] for s in order])
            best = {names[s]: schedules[s] for s in order[:TOP].tolist()}
            result["confirmed"] = confirm_best(problem, best, log_Sn.shape[1], confirm)
            winner = best[next(row["name"] for row in result["confirmed"] if row["kind"] == "candidate")]
    except (Stopped, KeyboardInterrupt) as stop:
        result["stopped"] = _why(stop)
    result |= {"schedule": str(winner), "recommendation": problem.about(winner)}
    result["verdict"] = _verdict(result)
    return result


def _row(problem: Problem, name: str, schedule: Schedule, log_n: np.ndarray) -> dict[str, Any]:
    log_n = log_n[np.isfinite(log_n)]
    ppl, low, high = (float(v) for v in metrics.skewed_mean_interval(np.exp(log_n)))
    log = metrics.mean_estimate(log_n)
    about = problem.about(schedule)
    return {
        "name": name,
        **about,
        "ppl": ppl,
        "ppl_ci": [metrics.finite(low), metrics.finite(high)],
        "log_ppl": log.value,
        "log_ppl_ci": log.ci,
    }


def segment_figures(space: Space, choices: Sequence[Choice], log_Sn: np.ndarray) -> dict[str, Any]:
    """How often each segment is light in the best and worst 20, and each segment's influence with its interval, for
    every model but the heavy one."""
    ppl_Sn = np.exp(shared_rows(log_Sn))
    index_SJ = np.array(choices)
    order = np.argsort(np.log(ppl_Sn).mean(axis=1), kind="stable")
    top, bottom = order[:TOP], order[::-1][:TOP]
    weights_Rn = metrics.resampling_weights(ppl_Sn.shape[1])
    mean_S, mean_RS = ppl_Sn.mean(axis=1), weights_Rn @ ppl_Sn.T
    out: dict[str, Any] = {"top_frequency": {}, "bottom_frequency": {}, "influence": {}, "influence_ci": {}}
    for o, (model, _) in enumerate(space.options):
        if o == 0:
            continue
        light_SJ = index_SJ == o
        with np.errstate(invalid="ignore"):
            contrast_SJ = light_SJ / light_SJ.sum(axis=0) - 1 / len(choices)  # nan where no schedule has it
        out["top_frequency"][model] = light_SJ[top].mean(axis=0).tolist()
        out["bottom_frequency"][model] = light_SJ[bottom].mean(axis=0).tolist()
        out["influence"][model] = [metrics.finite(v) for v in mean_S @ contrast_SJ]
        ends_2J = np.quantile(mean_RS @ contrast_SJ, [0.025, 0.975], axis=0)
        out["influence_ci"][model] = [[metrics.finite(low), metrics.finite(high)] for low, high in ends_2J.T]
    return out


def _tree_check(trials: Trials, ranked: Sequence[Schedule]) -> dict[str, Any]:
    """A few schedules (the best, the worst, the middle one) run by themselves on one chunk's rows."""
    checked = []
    for schedule in [ranked[0], ranked[-1], ranked[len(ranked) // 2]][:CHECKED]:
        law = trials.law(schedule)
        first, rows = next((f, r) for known, f, r in trials.hashes if known == law)
        same = trials.check(schedule, first, rows)
        checked.append({"schedule": str(schedule), "first_row": first, "rows": rows, "same_tokens": same})
    return {"equal": all(item["same_tokens"] for item in checked), "schedules": checked}


def confirm_best(problem: Problem, candidates: Mapping[str, Schedule], first: int, n: int) -> list[dict[str, Any]]:
    """Candidates on rows that they were not chosen by, best first, with paired differences to all-heavy and to the
    first of them; all-heavy, all-light and the sandwich of the same number of light steps stand beside them."""
    named = dict(candidates)
    anchors = {"heavy": problem.alone(problem.heavy), "light": problem.alone(problem.light)}
    light_steps = next(iter(named.values())).timetable().models.count(problem.light)
    if 0 < light_steps < problem.steps and len(problem.models) == 2:
        share = Fraction(light_steps, problem.steps)
        anchors["sandwich"] = counted(sandwich(share), problem.steps, problem.light, problem.heavy)
    known = {problem.trials.law(schedule) for schedule in named.values()}
    named |= {k: s for k, s in anchors.items() if problem.trials.law(s) not in known}
    log_Sn = problem.trials.scores(list(named.values()), n, first, what="confirming")
    rows = paired_rows(problem, named, log_Sn)
    for row in rows:
        row["kind"] = "anchor" if row["name"] in anchors else "candidate"
    best_n = log_Sn[list(named).index(next(row["name"] for row in rows if row["kind"] == "candidate"))]
    for row in rows:
        row["against_best"] = paired(log_Sn[list(named).index(row["name"])], best_n)
    return rows


def paired_rows(problem: Problem, named: Mapping[str, Schedule], log_Sn: np.ndarray) -> list[dict[str, Any]]:
    """A row for each schedule, best first, with its paired difference to all-heavy (which must be among them, or
    something that does the same)."""
    laws = [problem.trials.law(schedule) for schedule in named.values()]
    heavy_n = log_Sn[laws.index(problem.trials.law(problem.alone(problem.heavy)))]
    rows = []
    for s in np.argsort(np.nanmean(log_Sn, axis=1), kind="stable").tolist():
        name, schedule = list(named.items())[s]
        row = _row(problem, name, schedule, log_Sn[s])
        rows.append({**row, "rows": log_Sn.shape[1], "against_heavy": paired(log_Sn[s], heavy_n)})
    return rows


def _verdict(result: dict[str, Any]) -> str:
    best = result["schedules"][0]
    if not result["confirmed"]:
        return (
            f"Best of {result['schedules_tried']} on {result['n']} rows (not confirmed on fresh ones): {best['name']}, "
            f"perplexity {best['ppl']:.3f}."
        )
    row = next(row for row in result["confirmed"] if row["kind"] == "candidate")
    low, high = row["against_heavy"]["ci"]
    return (
        f"Best of {result['schedules_tried']}, chosen again on {row['rows']} fresh rows: {row['name']} "
        f"({row['schedule']}), {row['saved']:.1%} saved, {row['against_heavy']['difference']:+.4f} in log-perplexity "
        f"against all-heavy ({low:+.4f} to {high:+.4f})."
    )


def _why(stop: BaseException) -> str:
    return "time limit" if isinstance(stop, Stopped) else "interrupted"
