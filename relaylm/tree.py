r"""Many schedules under common random numbers, each stretch of trajectory run once.

What a model makes of a row between two times depends on the row's number (which keys its noise), on its tokens before,
and on nothing else. So work is keyed by exactly that, and two schedules share it

- as long as they agree from the start: a prefix tree. All C(10, 4) placements of four light cells in ten take 790
  cells' worth of work instead of 2,100;
- and also where they disagreed before, for those rows whose tokens came out the same all the same: with common noise
  two models that nearly agree mostly write the same tokens (see `plan`). Their futures hold the same noise, so this
  too is exact.

The time axis is cut where any schedule changes its model and where grids begin or cease to agree. From one cut to the
next (a *level*) all distinct (row, tokens, steps, model) of all schedules run together, through the sampler's own queue
and in the call shapes that a run of each schedule by itself would use: the results are the bits of independent runs in
batches of the same size. A level is done in pieces, and each can be kept (`save`) and taken back (`load`): whoever was
interrupted goes on from the last piece that was finished.

Shapes: S schedules, n rows, L positions, K models, T steps; U distinct states (a row's number and its tokens),
M of them at work at once, F positions written.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm.diffusion import LINEAR
from relaylm.engine import Engine, Law, Shape, settings
from relaylm.errors import UserError
from relaylm.event_queue import Queue, call_shapes
from relaylm.plan import Events, Plan, make_events, make_plan
from relaylm.sampler import check_plan, checked_given
from relaylm.schedule import Schedule, Timetable
from relaylm.store import content_key

if TYPE_CHECKING:
    from relaylm.family import Family

PIECE = 64  # batches' worth of rows that are run and kept together


class Stopped(Exception):
    """Somebody asked to stop. What was saved until then is not lost."""


@dataclass(frozen=True)
class Grown:
    """The samples of all schedules, and what they took."""

    models: tuple[str, ...]  # the family's, in its order
    final_UL: np.ndarray  # the distinct rows that came out: what is said of one need not be found out twice
    which_Sn: np.ndarray  # for each schedule and row an index into them
    calls_SK: np.ndarray  # row-calls of each schedule, had it been run by itself
    calls_tree_K: np.ndarray  # if only common prefixes are shared
    calls_made_K: np.ndarray  # with rows merged where their tokens coincide: these were made, now or when saved
    flops_S: np.ndarray | None  # of each schedule by itself; None if a denoiser does not say
    flops_made: float | None
    merged: int  # stretches of rows that were not run because another way led to the same tokens
    network_calls: int  # batches sent to networks this time
    padded_calls: int  # empty places in them
    batch_size: int  # at the end: smaller than asked for if memory ran out
    seconds: float

    @property
    def tokens_SnL(self) -> np.ndarray:
        return self.final_UL[self.which_Sn].astype(np.int64)

    @property
    def calls_naive_K(self) -> np.ndarray:
        return self.calls_SK.sum(axis=0)

    @property
    def flops_naive(self) -> float | None:
        return None if self.flops_S is None else float(self.flops_S.sum())


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
    engines: dict[tuple[int, int, int], Engine] | None = None,
) -> Grown:
    """Rows first_row to first_row + n - 1 under every schedule, as `sample` would give them in batches of that size.

    `steps` is T for all schedules or one for each (None: its own count, else the length); `given` as in `sample`.
    `on_calls(done, total)` hears of progress in row-calls of the prefix tree; rows that merge count as done.
    `stop` is asked between network calls; if it says yes, Stopped is raised. `save(key, record)` is handed each piece
    of finished work as plain JSON values, and `load(key)` asked for it first (None: not there). The key covers the
    rows, their tokens and noise, the steps, models' names and the batch size; whoever stores must add what it does not:
    the models' weights, and the device and versions that fix the bits. `engines` keeps engines, and what they captured
    on the device, from one call to the next with the same family. Memory goes with the number of distinct states,
    at most S x n x L numbers of the smallest type that holds a token: for large n go by ranges of rows.
    """
    began = time.perf_counter()
    if not schedules:
        raise UserError("there is nothing to grow: name at least one schedule")
    light, heavy = family.roles(light, heavy)
    given = np.full(family.length, -1) if given is None else checked_given(given, n, family.length)
    plan = make_plan(n, given.shape[-1], seed, given, first_row)
    tables = [_table(family, item, light, heavy, T, plan.length) for item, T in _paired(schedules, steps)]
    used = {name for table in tables for name in table.models}
    check_plan({name: family.models[name] for name in used}, plan, family.mask_id)
    if batch_size is not None and batch_size < 1:
        raise UserError(f"the batch size must be at least 1, not {batch_size}")
    batch = batch_size or family.batch_size(n * len(tables), plan.length)
    trunk = _trunk(family, tables, plan)
    levels = _levels(tables, trunk, family.names)
    costs = _Costs(family.names, trunk, levels, len(tables))
    runner = _Runner(family, plan, trunk, batch, n * len(tables), stop, load, save, engines)
    final_UL, which_Sn = _climb(family, plan, trunk, levels, runner, costs, on_calls)
    return Grown(
        family.names,
        final_UL,
        which_Sn,
        costs.calls_SK,
        costs.tree_K,
        costs.made_K,
        costs.flops_S if trunk.flops_KE is not None else None,
        costs.flops_made if trunk.flops_KE is not None else None,
        costs.merged,
        runner.network_calls,
        runner.padded_calls,
        runner.batch,
        time.perf_counter() - began,
    )


def _paired(
    schedules: Sequence[str | Schedule], steps: float | Sequence[float | None] | None
) -> list[tuple[str | Schedule, float | None]]:
    each = [steps] * len(schedules) if steps is None or isinstance(steps, int | float) else list(steps)
    if len(each) != len(schedules):
        raise UserError(f"there are {len(schedules)} schedules but {len(each)} numbers of steps")
    return list(zip(schedules, each, strict=True))


def _table(
    family: Family, schedule: str | Schedule, light: str, heavy: str, steps: float | None, length: int
) -> Timetable:
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    schedule = schedule.bind(light, heavy)
    family.check_names(schedule.models)
    if steps is None:
        steps = length if schedule.steps is None else schedule.steps
    if math.isinf(steps) or steps != int(steps):
        raise UserError(f"shared trajectories need a whole number of steps, not {steps}")
    return schedule.timetable(int(steps))


# ------------------------------------------------------------------------------------------------ levels


@dataclass(frozen=True)
class _Grid:
    """One grid of times. Steps are counted from the masked end, k = 0 .. T - 1."""

    times: tuple[float, ...]
    events: Events
    first_nT: np.ndarray  # (n, T + 1): index among all grids' events of a row's first at step k or later
    cuts: list[int]  # steps at which a level begins or ends, 0 and T among them


@dataclass(frozen=True)
class _Trunk:
    """All grids, and their events side by side."""

    grids: dict[tuple[float, ...], _Grid]
    events: Events
    flops_KE: np.ndarray | None  # (K, E + 1): operations of all events before, had model k made them


def _trunk(family: Family, tables: Sequence[Timetable], plan: Plan) -> _Trunk:
    """Every grid there is, cut at all times where a schedule changes its model or grids begin or cease to agree."""
    all_times = list(dict.fromkeys(table.times for table in tables))
    cuts = {1.0, 0.0}
    for table in tables:
        cuts.update(table.times[k] for k in range(1, table.steps) if table.models[k] != table.models[k - 1])
    owners: dict[tuple[float, float], set[int]] = {}
    for g, times in enumerate(all_times):
        for step in pairwise(times):
            owners.setdefault(step, set()).add(g)
    for times in all_times:
        shared = [owners[step] for step in pairwise(times)]
        cuts.update(times[k] for k in range(1, len(shared)) if shared[k] != shared[k - 1])
    grids: dict[tuple[float, ...], _Grid] = {}
    number = positions = 0
    for times in all_times:
        own = make_events(plan, times, LINEAR)
        count_nT = np.zeros((plan.n, len(times)), dtype=np.int64)
        np.add.at(count_nT, (np.repeat(np.arange(plan.n), own.per_row_n), len(times) - own.step_E), 1)
        first_nT = number + own.row_ptr_n1[:-1, None] + np.cumsum(count_nT, axis=1)
        own = replace(own, start_E=own.start_E + positions)
        grids[times] = _Grid(times, own, first_nT, [k for k, t in enumerate(times) if t in cuts])
        number, positions = number + len(own.step_E), positions + len(own.positions_F)
    together = [grid.events for grid in grids.values()]
    names = ("step_E", "t_E", "start_E", "count_E", "positions_F")
    arrays = {name: np.concatenate([getattr(events, name) for events in together]) for name in names}
    events = Events(np.zeros(1, dtype=np.int64), **arrays, step_nL=np.zeros((0, plan.length), dtype=np.int32))
    return _Trunk(grids, events, _flops(family, events.count_E, plan.length))


def _flops(family: Family, count_E: np.ndarray, length: int) -> np.ndarray | None:
    models: list[Any] = list(family.models.values())
    if not all(hasattr(model, "flops") for model in models):
        return None
    counts, which_E = np.unique(count_E, return_inverse=True)
    each = np.array([[model.flops(length, int(count)) for count in counts] for model in models])
    flops_KE = np.zeros((len(models), len(count_E) + 1))
    np.cumsum(each.reshape(len(models), -1)[:, which_E.reshape(-1)], axis=1, out=flops_KE[:, 1:])
    return flops_KE


@dataclass(frozen=True)
class _Stretch:
    """Steps of a grid from one cut to the next, under one model; whoever wants it, and how they got there."""

    grid: _Grid
    first: int
    last: int  # not included
    model: int
    members: list[int]  # schedules
    prefixes: int  # ways that these schedules have come: nodes of the prefix tree

    @property
    def times(self) -> tuple[float, ...]:
        return self.grid.times[self.first : self.last + 1]

    def events(self, rows_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's first event, and the one after its last."""
        return self.grid.first_nT[rows_M, self.first], self.grid.first_nT[rows_M, self.last]


def _levels(tables: Sequence[Timetable], trunk: _Trunk, names: tuple[str, ...]) -> list[list[_Stretch]]:
    """The distinct stretches that begin at each cut, from the masked end. Schedules on different grids share one if its
    times are the same."""
    begins: dict[float, list[tuple[int, _Grid, int, int]]] = {}
    for s, table in enumerate(tables):
        grid = trunk.grids[table.times]
        for first, last in pairwise(grid.cuts):
            begins.setdefault(grid.times[first], []).append((s, grid, first, last))
    node_S = [0] * len(tables)  # schedules with the same number have agreed so far
    nodes: dict[tuple[int, Any], int] = {}
    levels = []
    for t in sorted(begins, reverse=True):
        found: dict[Any, tuple[_Grid, int, int, int, list[int]]] = {}
        for s, grid, first, last in begins[t]:
            model = names.index(tables[s].models[first])
            key = grid.times[first : last + 1], model
            found.setdefault(key, (grid, first, last, model, []))[-1].append(s)
        level = []
        for key, (grid, first, last, model, members) in found.items():
            level.append(_Stretch(grid, first, last, model, members, len({node_S[s] for s in members})))
            for s in members:
                node_S[s] = nodes.setdefault((node_S[s], key), len(nodes) + 1)
        levels.append(level)
    return levels


class _Costs:
    """What the schedules would take by themselves and what the tree takes is known beforehand; what merging leaves of
    it is counted on the way."""

    def __init__(self, names: tuple[str, ...], trunk: _Trunk, levels: list[list[_Stretch]], schedules: int) -> None:
        self.trunk = trunk
        self.calls_SK = np.zeros((schedules, len(names)), dtype=np.int64)
        self.tree_K, self.made_K = np.zeros(len(names), dtype=np.int64), np.zeros(len(names), dtype=np.int64)
        self.flops_S, self.flops_made, self.merged = np.zeros(schedules), 0.0, 0
        for stretch in (stretch for level in levels for stretch in level):
            calls, flops = self.of(stretch, np.arange(len(stretch.grid.first_nT)))
            self.calls_SK[stretch.members, stretch.model] += calls
            self.flops_S[stretch.members] += flops
            self.tree_K[stretch.model] += calls * stretch.prefixes

    def of(self, stretch: _Stretch, rows_M: np.ndarray) -> tuple[int, float]:
        """Calls and operations of one stretch for these rows."""
        begin_M, end_M = stretch.events(rows_M)
        flops_KE = self.trunk.flops_KE
        flops = 0.0 if flops_KE is None else (flops_KE[stretch.model, end_M] - flops_KE[stretch.model, begin_M]).sum()
        return int((end_M - begin_M).sum()), float(flops)

    def make(self, stretch: _Stretch, rows_M: np.ndarray) -> int:
        """Charge a stretch for these rows; returns how many calls merging saved."""
        calls, flops = self.of(stretch, rows_M)
        self.made_K[stretch.model] += calls
        self.flops_made += flops
        every = np.arange(len(stretch.grid.first_nT))
        self.merged += stretch.prefixes * len(every) - len(rows_M)
        return stretch.prefixes * self.of(stretch, every)[0] - calls


# ------------------------------------------------------------------------------------------------ states


def _climb(
    family: Family,
    plan: Plan,
    trunk: _Trunk,
    levels: list[list[_Stretch]],
    runner: _Runner,
    costs: _Costs,
    on_calls: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """From masks to text, level by level: the distinct rows at the end, and which of them each schedule's rows are."""
    row_U = np.arange(plan.n)
    tokens_UL = np.where(plan.given_nL < 0, family.mask_id, plan.given_nL)
    tokens_UL = tokens_UL.astype(np.min_scalar_type(max(family.vocab_size - 1, int(tokens_UL.max()))))
    state_Sn = np.tile(np.arange(plan.n), (len(costs.calls_SK), 1))
    done, total = 0, int(costs.tree_K.sum())

    def told(calls: int) -> None:
        nonlocal done
        done += calls
        if on_calls is not None and calls:
            on_calls(done, total)

    for level in levels:
        work, size = [], 0
        idle_S = np.ones(len(state_Sn), dtype=bool)
        new_Sn = np.empty_like(state_Sn)
        for stretch in level:
            states_M, inverse = np.unique(state_Sn[stretch.members], return_inverse=True)
            new_Sn[stretch.members] = size + inverse.reshape(-1, plan.n)
            work.append((stretch, states_M))
            size += len(states_M)
            idle_S[stretch.members] = False
            told(costs.make(stretch, row_U[states_M]))
        written_ML = runner.run(work, row_U, tokens_UL, told)
        # Schedules on other grids may still be under way; the states of the rest are forgotten, and equal ones are one.
        kept, inverse = np.unique(state_Sn[idle_S], return_inverse=True)
        new_Sn[idle_S] = size + inverse.reshape(-1, plan.n)
        rows = np.concatenate([row_U[states_M] for _, states_M in work] + [row_U[kept]])
        row_U, tokens_UL, same = _distinct(rows, np.concatenate([written_ML, tokens_UL[kept]]))
        state_Sn = same[new_Sn]
    assert not (tokens_UL == family.mask_id).any(), "a planned event was not run"
    return tokens_UL, state_Sn


def _distinct(row_M: np.ndarray, tokens_ML: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs of row and tokens, and where each one went."""
    parts = [row_M.astype("<i8")[:, None].view(np.uint8), np.ascontiguousarray(tokens_ML).view(np.uint8)]
    together = np.concatenate(parts, axis=1)
    keys_M = together.view(np.dtype((np.void, together.shape[1]))).reshape(-1)
    _, first_U, same_M = np.unique(keys_M, return_index=True, return_inverse=True)
    return row_M[first_U], tokens_ML[first_U], same_M.reshape(-1)


class _Runner:
    """Runs stretches of rows through the networks, piece by piece. The device's memory and what was captured on it stay
    the same from one piece to the next."""

    def __init__(
        self,
        family: Family,
        plan: Plan,
        trunk: _Trunk,
        batch: int,
        most: int,
        stop: Callable[[], bool] | None,
        load: Callable[[str], dict[str, Any] | None] | None,
        save: Callable[[str, dict[str, Any]], object] | None,
        engines: dict[tuple[int, int, int], Engine] | None,
    ) -> None:
        self.family, self.plan, self.trunk, self.batch = family, plan, trunk, batch
        self.stop, self.load, self.save = stop, load, save
        self.network_calls = self.padded_calls = 0
        places = PIECE * batch if engines is not None else min(most, PIECE * batch)
        masked = np.full((places, plan.length), -1)
        self.places = Plan(plan.seed, np.zeros(places, dtype=np.int64), masked, np.zeros(masked.shape))
        key = (places, plan.length, plan.seed)
        engine = None if engines is None else engines.get(key)
        self.engine = engine or Engine(list(family.models.values()), self.places, family.mask_id, Law(), family.device)
        if engines is not None:
            engines[key] = self.engine
        self._shape()

    def _shape(self) -> None:
        """The shape of every event's call, as a run on its grid alone would have it."""
        index: dict[Shape, int] = {}
        parts = []
        for times, grid in self.trunk.grids.items():
            shapes, shapes_E = call_shapes(grid.events, times, LINEAR, self.plan.length, self.batch)
            numbers = np.array([index.setdefault(shape, len(index)) for shape in shapes], dtype=np.int64)
            parts.append(numbers[shapes_E])
        self.shapes, self.shapes_E = list(index), np.concatenate(parts)

    def run(
        self,
        work: list[tuple[_Stretch, np.ndarray]],
        row_U: np.ndarray,
        tokens_UL: np.ndarray,
        told: Callable[[int], None],
    ) -> np.ndarray:
        """The tokens of each of these states at the end of its stretch."""
        states_M = np.concatenate([states for _, states in work])
        which_M = np.repeat(np.arange(len(work)), [len(states) for _, states in work])
        bounds = [stretch.events(row_U[states]) for stretch, states in work]
        begin_M, end_M = (np.concatenate(side) for side in zip(*bounds, strict=True))
        rows_M, tokens_ML = self.plan.rows_n[row_U[states_M]], tokens_UL[states_M]
        for start in range(0, len(states_M), self.places.n):
            piece = slice(start, start + self.places.n)
            stretches = [work[j][0] for j in np.unique(which_M[piece])]
            model_m = np.array([stretch.model for stretch, _ in work])[which_M[piece]]
            item_F, position_F = self._positions(begin_M[piece], end_M[piece])

            def key(stretches: list[_Stretch] = stretches, piece: slice = piece) -> str:
                return self._key(stretches, which_M[piece], rows_M[piece], tokens_ML[piece])

            record = None if self.load is None else self.load(key())
            if record is None:
                self._run(rows_M[piece], tokens_ML[piece], begin_M[piece], end_M[piece], model_m, told)
                index = (torch.from_numpy(x).to(self.engine.device) for x in (item_F, position_F))
                token_F = self.engine.state_nL[tuple(index)].cpu().numpy().astype(tokens_ML.dtype)
                if self.save is not None:
                    packed = base64.b64encode(token_F.astype("<u4").tobytes()).decode()
                    self.save(key(), {"kind": "tree", "tokens": packed})
            else:
                token_F = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<u4").astype(tokens_ML.dtype)
                told(int((end_M[piece] - begin_M[piece]).sum()))
            tokens_ML[start + item_F, position_F] = token_F
        return tokens_ML

    def _positions(self, begin_m: np.ndarray, end_m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Every position that these rows' events write, and the place of its row."""
        events = self.trunk.events
        written_E1 = np.concatenate([[0], np.cumsum(events.count_E)])
        count_m = written_E1[end_m] - written_E1[begin_m]
        within_F = np.arange(count_m.sum()) - np.repeat(np.cumsum(count_m) - count_m, count_m)
        # A row's events write one stretch of the list of positions, and so do all rows' together.
        return np.repeat(np.arange(len(begin_m)), count_m), events.positions_F[
            np.repeat(written_E1[begin_m], count_m) + within_F
        ]

    def _key(self, stretches: list[_Stretch], which_m: np.ndarray, rows_m: np.ndarray, tokens_mL: np.ndarray) -> str:
        content = hashlib.sha256()
        for array in (which_m - which_m[0], rows_m, tokens_mL):
            content.update(np.ascontiguousarray(array).astype("<i8").tobytes())
        names = self.family.names
        what = [[list(stretch.times), names[stretch.model]] for stretch in stretches]
        return content_key("tree", what, content.hexdigest(), self.plan.seed, list(tokens_mL.shape), self.batch)

    def _run(
        self,
        rows_m: np.ndarray,
        tokens_mL: np.ndarray,
        begin_m: np.ndarray,
        end_m: np.ndarray,
        model_m: np.ndarray,
        told: Callable[[int], None],
    ) -> None:
        """Make the calls. What comes out is in the engine's first places."""
        events, count_m = self.trunk.events, end_m - begin_m
        ptr_m1 = np.concatenate([[0], np.cumsum(count_m)])
        index_E = np.repeat(begin_m - ptr_m1[:-1], count_m) + np.arange(ptr_m1[-1])
        names = ("step_E", "t_E", "start_E", "count_E")
        own = replace(events, row_ptr_n1=ptr_m1, **{name: getattr(events, name)[index_E] for name in names})
        queue = Queue(self.places, own, self.shapes_E[index_E], self.shapes, in_flight=32 * self.batch)
        queue.model_n[: len(model_m)] = model_m
        self.engine.load(rows_m, tokens_mL)
        with settings(self.engine.device):
            while (call := queue.take()) is not None:
                if self.stop is not None and self.stop():
                    raise Stopped
                try:
                    self.engine.run(call)
                except torch.OutOfMemoryError:
                    if self.batch == 1:
                        raise
                    self.engine.release()
                    self.batch //= 2
                    self._shape()
                    queue.shapes, queue.shapes_E = self.shapes, self.shapes_E[index_E]
                    continue
                queue.advance(call)
                self.network_calls += 1
                self.padded_calls += call.shape.rows - len(call.rows_R)
                told(len(call.rows_R))
        self.engine.check()
