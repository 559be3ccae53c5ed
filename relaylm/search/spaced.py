r"""Schedules on spaced plans that fit a budget, by their predicted likelihood.

A spaced schedule chooses a model for each of S segments of time, and one distance D for all of them. Its predicted
loss against all-heavy in T uniform steps, in nats a position, has two parts that hardly depend on each other:

    loss(c, D)  =  [bound of c, one position at a time]  +  pairs(D)  -  [bound of all-heavy in T steps].

The first is a sum over segments, from the table of likelihood bounds by model and masked share. The second is what the
family's table of pairs says of writing positions together (`core.pairs`). For each distance of a ladder the segments
are allocated exactly (`space.best`); the best of all distances are candidates, to be measured like any other.

Shapes: S segments, K models, D distances, E calls of the plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from relaylm.core.cost import SPACED_PLANS, spaced_sizes
from relaylm.core.pairs import spacing_loss
from relaylm.core.schedule import Schedule, Segment, Spacing
from relaylm.measure.rivals import one_model, steps_within
from relaylm.measure.schedule_likelihood import BoundTable, ScheduleBound, schedule_bound, step_costs
from relaylm.search.space import SLACK, Problem, best

FINE = 4  # steps for each position of the grid on which one position at a time is priced
KEPT = 3  # schedules of several models that are proposed


def ladder(length: int) -> list[int]:
    """Distances in steps of about a fifth, all below the length."""
    found = [1]
    while (after := max(found[-1] + 1, round(found[-1] * 1.2))) < length:
        found.append(after)
    return found


def spaced_alone(problem: Problem, model: str, limit: float) -> Schedule | None:
    """One model with the largest spacing below the length that is within a limit; None if no spacing is."""
    if not problem.spaced:
        return None

    def at(distance: int) -> Schedule:
        return replace(one_model(model), spacing=Spacing(distance))

    most = max(1, problem.length - 1)
    distance = steps_within(lambda d: problem.price(at(d)), limit * (1 + SLACK), most=most)
    return None if distance is None else at(distance)


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
            schedule = _schedule(problem, choice, spacing)
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


def _segment_losses(problem: Problem, table: BoundTable) -> np.ndarray:
    """(S, K): nats a position of a segment under each model above the heavy one, one position at a time."""
    edges, rows = np.linspace(1, 0, problem.segments + 1), []
    order = [table.models.index(name) for name in problem.models]
    for a, b in pairwise(edges.tolist()):
        times = np.linspace(a, b, max(2, math.ceil(FINE * problem.length * (a - b)) + 1)).tolist()
        rows.append(step_costs(table, times).sum(axis=1)[order] / table.length)
    loss_SK = np.array(rows)
    return loss_SK - loss_SK[:, -1:]


def _segment_prices(problem: Problem, spacing: Spacing) -> np.ndarray:
    """(S, K): the mean price of a segment's calls under each model."""
    free, rows = np.unique(problem.free_n, return_counts=True)
    edges = -np.linspace(1, 0, problem.segments + 1)
    out_SK = np.zeros((problem.segments, len(problem.models)))
    for f, weight in zip(free.tolist(), rows / rows.sum(), strict=True):
        t_E, count_E = spaced_sizes(f, spacing)
        owner_E = np.searchsorted(edges, -t_E, side="right") - 1
        calls_S, asked_S = (np.bincount(owner_E, w, problem.segments) / SPACED_PLANS for w in (None, count_E))
        for k, price in enumerate(problem.prices[name] for name in problem.models):
            out_SK[:, k] += weight * (price.base * calls_S + price.slope * asked_S)
    return out_SK


def _schedule(problem: Problem, choice: Sequence[int], spacing: Spacing) -> Schedule:
    runs: list[tuple[str, int]] = []
    for k in choice:
        name = problem.models[k]
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    segments = tuple(Segment(name, Fraction(count, problem.segments)) for name, count in runs)
    return Schedule(segments, spacing=spacing)
