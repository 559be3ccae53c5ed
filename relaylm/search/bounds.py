r"""What the likelihood bound alone says of schedules within a budget, without samples and without a judge.

**Step by step.** The bound is a sum over steps, so the best schedule of T steps with few runs of one model is found
exactly (`allocated`).

**Spaced.** A spaced schedule chooses a model for each of S segments of time, and one distance D for all of them. Its
predicted loss against all-heavy in T uniform steps, in nats a position, has two parts that hardly depend on each other:

    loss(c, D)  =  [bound of c, one position at a time]  +  pairs(D)  -  [bound of all-heavy in T steps].

The first is a sum over segments, from the table of likelihood bounds by model and masked share. The second is what the
family's table of pairs says of writing positions together (`core.pairs`). For each distance of a ladder the segments
are allocated exactly (`space.best`); the best of all distances are candidates, to be measured like any other.

Shapes: S segments or schedules, N rows of text, K models, D distances, E calls of the plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from relaylm.core.cost import kinds_of_rows, spaced_sizes
from relaylm.core.pairs import spacing_loss
from relaylm.core.schedule import Schedule, Segment, Spacing
from relaylm.measure.metrics import paired_difference as paired
from relaylm.measure.schedule_likelihood import BoundTable, ScheduleBound, schedule_bound, step_costs
from relaylm.search.space import SLACK, Problem, best
from relaylm.search.tournament import Candidate, about, difference, recommended, use

FINE = 4  # steps for each position of the grid on which one position at a time is priced
KEPT = 3  # schedules of several models that are proposed
MOST_RUNS = 5  # of one model, in schedules allocated step by step


def allocated(problem: Problem, table: BoundTable | None, limit: float, models: Sequence[str]) -> Schedule | None:
    """The schedule of least likelihood bound on the uniform grid, step by step, with at most MOST_RUNS runs."""
    if table is None:
        return None
    steps = problem.steps
    loss_KT = step_costs(table, [(steps - k) / steps for k in range(steps + 1)])
    loss_TK = loss_KT[[table.models.index(name) for name in models]].T
    price_TK = np.tile([problem.price(problem.alone(name)) / steps for name in models], (steps, 1))
    choice = best(price_TK, loss_TK, None, limit, runs=MOST_RUNS)
    runs = [(models[k], len(list(run))) for k, run in groupby(choice or ())]
    return Schedule(tuple(Segment(name, count) for name, count in runs)) if runs else None


def ladder(length: int) -> list[int]:
    """Distances in steps of about a fifth, all below the length."""
    found = [1]
    while (after := max(found[-1] + 1, round(found[-1] * 1.2))) < length:
        found.append(after)
    return found


def spaced_mixed(problem: Problem, table: BoundTable | None, limit: float) -> list[Schedule]:
    """The best allocations of several models to segments within a limit, over all distances, by predicted loss."""
    if table is None or problem.pairs is None or not problem.spaced or len(problem.models) < 2:
        return []
    loss_SK = _segment_losses(problem, table)
    found: list[tuple[float, Schedule]] = []
    for distance in ladder(problem.length):
        spacing = Spacing(distance)
        choice = best(_segment_prices(problem, spacing), loss_SK, None, limit)
        if choice is not None and len(set(choice)) > 1:
            loss = loss_SK[np.arange(len(choice)), list(choice)].sum()
            runs = [(problem.models[k], Fraction(len(list(run)), problem.segments)) for k, run in groupby(choice)]
            schedule = Schedule(tuple(Segment(name, share) for name, share in runs), spacing=spacing)
            found.append((float(loss) + spacing_loss(problem.pairs, spacing, problem.length), schedule))
    return [schedule for _, schedule in sorted(found, key=lambda item: item[0])[:KEPT]]


def predicted_bound(problem: Problem, table: BoundTable, schedule: Schedule) -> ScheduleBound:
    """The likelihood bound of a schedule: of a spaced one as predicted, each row with the same loss by pairs."""
    if schedule.spacing is None:
        return schedule_bound(table, schedule)
    assert problem.pairs is not None
    single = schedule_bound(table, replace(schedule, spacing=None), math.inf)
    nats = table.length * spacing_loss(problem.pairs, schedule.spacing, problem.length)
    return replace(single, bits=single.bits + nats / table.length / math.log(2), nats_N=single.nats_N + nats)


def by_the_bound(
    problem: Problem,
    table: BoundTable,
    candidates: Sequence[Candidate],
    limits: Sequence[float],
    max_loss: float | None,
) -> dict[str, Any]:
    """The choice by the likelihood bound alone, where an allowed loss is one of the bound, in nats for a token.
    All-heavy comes first."""
    bounds = [predicted_bound(problem, table, c.schedule) for c in candidates]
    nats_SN = np.stack([bound.nats_N for bound in bounds]) / table.length
    rows = [
        {**about(problem, c), "bits": bound.bits, "against_heavy": paired(nats_N, nats_SN[0])}
        for c, bound, nats_N in zip(candidates, bounds, nats_SN, strict=True)
    ]

    def within(limit: float) -> list[int]:
        return [s for s, row in enumerate(rows) if row["price"] <= limit * (1 + SLACK)]

    if max_loss is None:
        best = [min(within(limit), key=lambda s: rows[s]["bits"]) for limit in limits]
        chosen = best[len(limits) // 2]
    else:
        best = []
        small = [s for s, row in enumerate(rows) if row["against_heavy"]["difference"] <= max_loss]
        chosen = min(small, key=lambda s: rows[s]["price"])
    front = [{"limit": limit, **rows[s]} for limit, s in zip(limits, best, strict=False) if len(limits) > 1]
    for s, row in enumerate(rows):
        row["recommended"] = s == chosen
    row, others = rows[chosen], [s for s in within(rows[chosen]["price"]) if s != chosen]
    alike = sum(not paired(nats_SN[s], nats_SN[chosen])["differs"] for s in others)
    line = (
        f"{use(problem, row)}, by the likelihood bound alone: {row['saved']:.1%} saved, "
        f"{difference(row['against_heavy'], ' nats a token against all-heavy')}; "
        f"{alike} of {len(others)} others that cost no more do not differ significantly. Sampling may disagree."
    )
    rows.sort(key=lambda row: row["bits"])
    words = {"basis": "the likelihood bound alone", "verdict": line}
    return {**recommended(problem, candidates[chosen]), "bounds": rows, "front": front, "confirmed": [], **words}


def _segment_losses(problem: Problem, table: BoundTable) -> np.ndarray:
    """(S, K): nats a position of a segment under each model above the heavy one, one position at a time."""
    order, rows = [table.models.index(name) for name in problem.models], []
    for a, b in pairwise(_edges(problem)):
        times = np.linspace(a, b, max(2, math.ceil(FINE * problem.length * (a - b)) + 1)).tolist()
        rows.append(step_costs(table, times).sum(axis=1)[order] / table.length)
    loss_SK = np.array(rows)
    return loss_SK - loss_SK[:, -1:]


def _edges(problem: Problem) -> list[float]:
    """The times between segments, each the float that `Schedule.ends` has: calls begin exactly there."""
    return [k / problem.segments for k in range(problem.segments, -1, -1)]


def _segment_prices(problem: Problem, spacing: Spacing) -> np.ndarray:
    """(S, K): the mean price of a segment's calls under each model."""
    t_E, count_E, weight_E = spaced_sizes(kinds_of_rows(problem.free_n), spacing)
    owner_E = np.searchsorted(-np.array(_edges(problem)), -t_E, side="right") - 1
    calls_S, asked_S = (np.bincount(owner_E, w, problem.segments) for w in (weight_E, weight_E * count_E))
    price_K = [problem.prices[name] for name in problem.models]
    return np.stack([price.base * calls_S + price.slope * asked_S for price in price_K], axis=1)
