r"""Many schedules under common random numbers, each stretch of trajectory run once.

What a model makes of a row between two times depends on the row's number (which keys its noise), on its tokens before,
and on nothing else. So work is keyed by exactly that, and two schedules share it

- as long as they agree from the start: a prefix tree. All C(10, 4) placements of four light cells in ten take 790
  cells' worth of work instead of 2,100;
- and also where they disagreed before, for those rows whose tokens came out the same all the same: with common noise
  two models that nearly agree mostly write the same tokens (see `plan`). Their futures have the same noise, so this
  is exact, too.

Schedules on spaced plans share with those of the same spacing alone, since others write other positions at each call.
For them time is the share of a row's free positions that are masked, and their grid is where any of them changes model.

The time axis is cut where any schedule changes its model and where grids begin or cease to agree. From one cut to the
next (a *level*) all distinct (row, tokens, steps, model) of all schedules run together, through the sampler's own queue
and in the call shapes that a run of each schedule by itself would use: the results are the bits of independent runs in
batches of the same size. A level is run in pieces, and each can be kept (`save`) and taken back (`load`), so a run that
was interrupted continues after its last finished piece.

Shapes: S schedules, n rows, L positions, K models, T steps, E events of all grids; U distinct states (a row's number
and its tokens), M of them at work in a level, m in a piece, F positions written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.core.plan import Events, Plan, make_events, make_plan, spaced_events
from relaylm.core.schedule import Schedule, Spacing, Timetable
from relaylm.errors import UserError
from relaylm.sampling.policy import check_request
from relaylm.sampling.result import flops_of_calls
from relaylm.sampling.sample import checked_given
from relaylm.search.stretches import Engines, Runner, Stretch, kept_engine

if TYPE_CHECKING:
    from relaylm.models.family import Family

PIECE = 64  # batches' worth of rows that are run and kept together


@dataclass(frozen=True)
class Grown:
    """The samples of all schedules, and what they took."""

    models: tuple[str, ...]  # the family's, in its order
    final_UL: np.ndarray  # the distinct rows that came out, so that each need be judged only once
    which_Sn: np.ndarray  # for each schedule and row an index into them
    calls_SK: np.ndarray  # row-calls of each schedule, had it been run by itself
    calls_tree_K: np.ndarray  # if only common prefixes are shared
    calls_made_K: np.ndarray  # with rows merged where their tokens coincide: these were made, now or when saved
    flops_S: np.ndarray | None  # of each schedule by itself; None if a denoiser does not say
    flops_made: float | None
    merged: int  # stretches of rows that were not run because another one led to the same tokens
    network_calls: int  # batches sent to networks in this run
    padded_calls: int  # empty places in them
    batch_size: int  # at the end: smaller than asked for if memory ran out
    seconds: float

    @property
    def tokens_SnL(self) -> np.ndarray:
        """The tokens of every schedule's rows."""
        return np.asarray(self.final_UL[self.which_Sn].astype(np.int64))


def grow(
    family: Family,
    schedules: Sequence[str | Schedule],
    n: int,
    *,
    steps: float | Sequence[float | None] | None = None,
    seed: int = 0,
    given: np.ndarray | None = None,
    first_row: int = 0,
    batch_size: int | None = None,
    light: str | None = None,
    heavy: str | None = None,
    on_calls: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    load: Callable[[str], dict[str, Any] | None] | None = None,
    save: Callable[[str, dict[str, Any]], object] | None = None,
    engines: Engines | None = None,
) -> Grown:
    """Rows first_row to first_row + n - 1 under every schedule, as `sample` would give them in batches of that size.

    `steps` is T for all schedules or one for each (None: its own count, else the length; none for a spaced schedule);
    `given` as in `sample`.
    `on_calls(done, total)` receives row-calls of the prefix tree; rows that merge count as done. `stop` is asked
    before each network call; if it returns True, Stopped is raised. `save(key, record)` receives each finished piece of
    work as plain JSON values, and `load(key)` is asked for it first (None: not there). The key covers the rows, their
    tokens and noise, the steps, models' names and the batch size; a store must add the models' weights, and the device
    and versions that fix the bits. `engines` keeps engines, and what they captured on the device, from one call to the
    next with the same family. Memory goes with the number of distinct states, at most S x n x L numbers of the smallest
    type that holds a token: for large n go by ranges of rows."""
    began = time.perf_counter()
    if not schedules:
        raise UserError("there is nothing to grow: name at least one schedule")
    light, heavy = family.roles(light, heavy)
    given = np.full(family.length, -1) if given is None else checked_given(given, n, family.length)
    plan = make_plan(n, given.shape[-1], seed, given, first_row)
    each = [steps] * len(schedules) if steps is None or isinstance(steps, int | float) else list(steps)
    if len(each) != len(schedules):
        raise UserError(f"there are {len(schedules)} schedules but {len(each)} numbers of steps")
    bound = [family.bind(item, light, heavy) for item in schedules]
    tables = [_grid(item, T, plan.length, bound) for item, T in zip(bound, each, strict=True)]
    used = {name for table in tables for name in table.models}
    check_request({name: family.models[name] for name in used}, plan, family.mask_id, batch_size)
    batch = batch_size or family.batch_size(n * len(tables), plan.length)
    tree = _Tree(family, tables, plan)
    most = PIECE * batch  # rows of a piece; an engine that is kept has places for as many
    engine = kept_engine(family, plan, min(n * len(tables), most) if engines is None else most, engines)
    runner = Runner(family, plan, tree.events, engine, batch, stop, load, save)
    final_UL, which_Sn = tree.climb(runner, on_calls)
    known = tree.flops_KE is not None
    return Grown(
        family.names,
        final_UL,
        which_Sn,
        tree.calls_SK,
        tree.calls_tree_K,
        tree.calls_made_K,
        tree.flops_S if known else None,
        tree.flops_made if known else None,
        tree.merged,
        runner.network_calls,
        runner.padded_calls,
        runner.batch,
        time.perf_counter() - began,
    )


def grow_rows(family: Family, schedules: Sequence[Any], first_row: int, rows: int, options: dict[str, Any]) -> Grown:
    """A range of rows under many schedules that share their work, as `grow` gives them: the task of a worker."""
    return grow(family, schedules, rows, first_row=first_row, **options)


@dataclass(frozen=True)
class _Grid(Timetable):
    """A timetable; of a spaced schedule one with a step for each stretch of one model."""

    spacing: Spacing | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What fixes the calls: grids with the same key have the same events."""
        return self.times, self.spacing


def _grid(schedule: Schedule, steps: float | None, length: int, others: Sequence[Schedule]) -> _Grid:
    """The grid of a schedule; of a spaced one it has all ends of segments of the others with its spacing."""
    if schedule.spacing is not None:
        if steps is not None:
            raise UserError(f"{schedule.spacing} decides what each call writes: leave out the number of steps")
        ends = {end for other in others if other.spacing == schedule.spacing for end in other.ends}
        times = (1.0, *sorted(ends, reverse=True))
        return _Grid(tuple(schedule.model_at(t) for t in times[:-1]), times, schedule.spacing)
    if steps is None:
        steps = length if schedule.steps is None else schedule.steps
    if math.isinf(steps) or steps != int(steps):
        raise UserError(f"shared trajectories need a whole number of steps, not {steps}")
    table = schedule.timetable(int(steps))
    return _Grid(table.models, table.times)


# ------------------------------------------------------------------------------------------------ levels


class _Tree:
    """The levels of all schedules, and what they cost: by themselves, as a prefix tree, and as they were run."""

    def __init__(self, family: Family, tables: Sequence[_Grid], plan: Plan) -> None:
        self.family, self.tables, self.plan = family, tables, plan
        grids = list({table.key: table for table in tables}.values())
        parts = [
            make_events(plan, grid.times) if grid.spacing is None else spaced_events(plan, grid.spacing)
            for grid in grids
        ]
        self.events = _side_by_side(parts)
        self.flops_KE = self._flops()
        # For each grid (n, T + 1): a row's first event at step k or later, steps counted from the masked end.
        self.first: dict[tuple[Any, ...], np.ndarray] = {}
        number = 0
        for grid, own in zip(grids, parts, strict=True):
            count_nT = np.zeros((plan.n, len(grid.times)), dtype=np.int64)
            # A step owns the times from its own, included, down to the next: an event's time is one of the grid's, or
            # of a spaced plan between two of them.
            after_E = np.searchsorted(-np.array(grid.times), -own.t_E, side="right")
            np.add.at(count_nT, (np.repeat(np.arange(plan.n), own.per_row_n), after_E), 1)
            self.first[grid.key] = number + own.row_ptr_n1[:-1, None] + np.cumsum(count_nT, axis=1)
            number += len(own.step_E)
        models = len(family.names)
        self.calls_SK, self.flops_S = np.zeros((len(tables), models), dtype=np.int64), np.zeros(len(tables))
        self.calls_tree_K, self.calls_made_K = np.zeros((2, models), dtype=np.int64)
        self.flops_made, self.merged = 0.0, 0
        self.levels = self._levels()

    def _flops(self) -> np.ndarray | None:
        """(K, E + 1): operations of all events before one, had model k made them; None if a denoiser does not say."""
        models, count_E = list(self.family.models.values()), self.events.count_E
        flops_KE = np.zeros((len(models), len(count_E) + 1))
        for k in range(len(models)):
            flops_E = flops_of_calls(models, np.full(len(count_E), k), count_E, self.plan.length)
            if flops_E is None:
                return None
            np.cumsum(flops_E, out=flops_KE[k, 1:])
        return flops_KE

    def _levels(self) -> list[list[Stretch]]:
        """The distinct stretches that begin at each cut, from the masked end. Schedules on different grids share one if
        its times are the same."""
        cuts = _cuts(self.tables)
        begins: dict[float, dict[Any, list[tuple[int, int, int]]]] = {}  # time -> times and model -> schedules, steps
        for s, table in enumerate(self.tables):
            for first, last in pairwise(k for k, t in enumerate(table.times) if t in cuts):
                key = table.times[first : last + 1], table.spacing, self.family.names.index(table.models[first])
                begins.setdefault(table.times[first], {}).setdefault(key, []).append((s, first, last))
        node_S = [0] * len(self.tables)  # schedules with the same number have agreed so far
        nodes: dict[tuple[int, Any], int] = {}
        levels = []
        for t in sorted(begins, reverse=True):
            level = []
            for (times, spacing, model), users in begins[t].items():
                s, first, last = users[0]
                begin_n, end_n = (self.first[self.tables[s].key][:, k] for k in (first, last))
                flops_n = np.zeros(self.plan.n)
                if self.flops_KE is not None:
                    flops_n = self.flops_KE[model, end_n] - self.flops_KE[model, begin_n]
                members = [s for s, _, _ in users]
                prefixes = len({node_S[s] for s in members})
                level.append(Stretch(times, spacing, model, begin_n, end_n, flops_n, members, prefixes))
                calls = level[-1].calls_n.sum()
                self.calls_SK[members, model] += calls
                self.calls_tree_K[model] += calls * prefixes
                self.flops_S[members] += flops_n.sum()
                for s in members:
                    node_S[s] = nodes.setdefault((node_S[s], (times, spacing, model)), len(nodes) + 1)
            levels.append(level)
        return levels

    def _charge(self, stretch: Stretch, rows_M: np.ndarray) -> int:
        """Count a stretch as made for these rows; returns how many calls merging saved."""
        calls = int(stretch.calls_n[rows_M].sum())
        self.calls_made_K[stretch.model] += calls
        self.flops_made += float(stretch.flops_n[rows_M].sum())
        self.merged += stretch.prefixes * self.plan.n - len(rows_M)
        return stretch.prefixes * int(stretch.calls_n.sum()) - calls

    def climb(self, runner: Runner, on_calls: Callable[[int, int], None] | None) -> tuple[np.ndarray, np.ndarray]:
        """From masks to text, level by level: the distinct rows at the end, and which of them each schedule's rows
        are."""
        plan, mask_id = self.plan, self.family.mask_id
        row_U = np.arange(plan.n)
        tokens_UL = np.where(plan.given_nL < 0, mask_id, plan.given_nL)
        tokens_UL = tokens_UL.astype(np.min_scalar_type(max(self.family.vocab_size - 1, int(tokens_UL.max()))))
        state_Sn = np.tile(np.arange(plan.n), (len(self.tables), 1))
        done, total = 0, int(self.calls_tree_K.sum())

        def report(calls: int) -> None:
            nonlocal done
            done += calls
            if on_calls is not None and calls:
                on_calls(done, total)

        for level in self.levels:
            work, size = [], 0
            idle_S = np.ones(len(state_Sn), dtype=bool)
            new_Sn = np.empty_like(state_Sn)
            for stretch in level:
                states_M, inverse = np.unique(state_Sn[stretch.members], return_inverse=True)
                new_Sn[stretch.members] = size + inverse.reshape(-1, plan.n)
                work.append((stretch, states_M))
                size += len(states_M)
                idle_S[stretch.members] = False
                report(self._charge(stretch, row_U[states_M]))
            written_ML = runner.run(work, row_U, tokens_UL, report)
            # Schedules on other grids may be in the middle of a stretch. Other states are dropped, equal ones merged.
            kept, inverse = np.unique(state_Sn[idle_S], return_inverse=True)
            new_Sn[idle_S] = size + inverse.reshape(-1, plan.n)
            rows = np.concatenate([row_U[states_M] for _, states_M in work] + [row_U[kept]])
            row_U, tokens_UL, same = _distinct(rows, np.concatenate([written_ML, tokens_UL[kept]]))
            state_Sn = same[new_Sn]
        assert not (tokens_UL == mask_id).any(), "a planned event was not run"
        return tokens_UL, state_Sn


def _cuts(tables: Sequence[_Grid]) -> set[float]:
    """All times where a schedule changes its model or grids begin or cease to agree; 1 and 0."""
    cuts = {1.0, 0.0}
    for table in tables:
        cuts.update(table.times[k] for k in range(1, table.steps) if table.models[k] != table.models[k - 1])
    grids = {table.key for table in tables}
    owners: dict[tuple[Any, ...], set[int]] = {}  # the grids that have a step
    for g, (times, spacing) in enumerate(grids):
        for step in pairwise(times):
            owners.setdefault((step, spacing), set()).add(g)
    for times, spacing in grids:
        shared = [owners[step, spacing] for step in pairwise(times)]
        cuts.update(times[k] for k in range(1, len(shared)) if shared[k] != shared[k - 1])
    return cuts


def _side_by_side(parts: Sequence[Events]) -> Events:
    """The events of several grids in one value, without rows."""
    before = np.cumsum([0, *(len(part.positions_F) for part in parts)])
    parts = [replace(part, start_E=part.start_E + start) for part, start in zip(parts, before, strict=False)]
    flat = [field.name for field in fields(Events) if field.name.endswith(("_E", "_F"))]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in flat}
    return replace(parts[0], **arrays, row_ptr_n1=np.zeros(1, dtype=np.int64), step_nL=parts[0].step_nL[:0])


def _distinct(row_M: np.ndarray, tokens_ML: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs of row and tokens, and where each one went."""
    parts = [row_M.astype("<i8")[:, None].view(np.uint8), np.ascontiguousarray(tokens_ML).view(np.uint8)]
    together = np.concatenate(parts, axis=1)
    keys_M = together.view(np.dtype((np.void, together.shape[1]))).reshape(-1)
    _, first_U, same_M = np.unique(keys_M, return_index=True, return_inverse=True)
    return row_M[first_U], tokens_ML[first_U], same_M.reshape(-1)
