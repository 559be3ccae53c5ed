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
was interrupted continues after its last finished piece. A *stretch* is what one model does to a row from one cut to the
next.

Shapes: S schedules, n rows, L positions, K models, T steps, E events of all grids; U distinct states (a row's number
and its tokens), M of them at work in a level, m in a piece, F positions written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from relaylm.core.plan import Events, Plan, make_events, make_plan
from relaylm.core.schedule import Schedule, Spacing, Timetable
from relaylm.core.spacing import spaced_events
from relaylm.measure.store import content_key
from relaylm.models.family import Family
from relaylm.sampling.denoise import next_call
from relaylm.sampling.engine import Call, Engine, settings
from relaylm.sampling.law import Law
from relaylm.sampling.policy import check_request
from relaylm.sampling.queue import Queue
from relaylm.sampling.result import flops_of_calls
from relaylm.sampling.sample import checked_given

Engines = dict[tuple[int, int, int], Engine]  # by rows, length and seed
PIECE = 64  # batches' worth of rows that are run and kept together


class Stopped(Exception):
    """Sampling was asked to stop. What was saved until then is not lost."""


@dataclass(frozen=True)
class Grown:
    """The samples of all schedules, and what they took."""

    models: tuple[str, ...]  # the family's, in its order
    final_UL: np.ndarray  # the distinct rows that came out, so that each need be judged only once
    which_Sn: np.ndarray  # for each schedule and row an index into them
    calls_tree_K: np.ndarray  # row-calls by model if only common prefixes are shared
    calls_made_K: np.ndarray  # with rows merged where their tokens coincide: these were made, now or when saved
    flops_made: float | None  # of these; None if a denoiser does not say
    merged: int  # stretches of rows that were not run because another one led to the same tokens
    network_calls: int  # batches sent to networks in this run
    padded_calls: int  # empty places in them
    batch_size: int  # at the end: smaller than asked for if memory ran out

    @property
    def tokens_SnL(self) -> np.ndarray:
        """The tokens of every schedule's rows."""
        return np.asarray(self.final_UL[self.which_Sn].astype(np.int64))


def grow(
    family: Family,
    schedules: Sequence[Schedule],
    n: int,
    *,
    seed: int = 0,
    given: np.ndarray | None = None,
    first_row: int = 0,
    batch_size: int | None = None,
    on_calls: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    load: Callable[[str], dict[str, Any] | None] | None = None,
    save: Callable[[str, dict[str, Any]], object] | None = None,
    engines: Engines | None = None,
) -> Grown:
    """Rows first_row to first_row + n - 1 under every schedule, as `sample` would give them in batches of that size.

    Schedules have models' names in them, and are in counts of steps or spaced; `given` as in `sample`.
    `on_calls(done, total)` receives row-calls of the prefix tree; rows that merge count as done. `stop` is asked
    before each network call; if it returns True, Stopped is raised. `save(key, record)` receives each finished piece of
    work as plain JSON values, and `load(key)` is asked for it first (None: not there). The key covers the rows, their
    tokens and noise, the steps, models' names and the batch size; a store must add the models' weights, and the device
    and versions that fix the bits. `engines` keeps engines, and what they captured on the device, from one call to the
    next. Memory goes with the number of distinct states, at most S x n x L numbers of the smallest type that holds a
    token: for large n go by ranges of rows."""
    given = np.full(family.length, -1) if given is None else checked_given(given, n, family.length)
    plan = make_plan(n, given.shape[-1], seed, given, first_row)
    grids = [_grid(schedule, schedules) for schedule in schedules]
    used = {name: family[name] for grid in grids for name in grid.models}
    check_request(used, plan, family.mask_id, batch_size)
    batch = batch_size or family.batch_size(n * len(grids), plan.length)
    tree = _Tree(family, grids, plan)
    most = PIECE * batch  # rows of a piece; an engine that is kept has places for as many
    if engines is None:
        most, engines = min(n * len(grids), most), {}
    runner = Runner(family, plan, tree.events, kept_engine(family, plan, most, engines), batch, stop, load, save)
    final_UL, which_Sn = tree.climb(runner, on_calls)
    return Grown(
        family.names,
        final_UL,
        which_Sn,
        tree.calls_tree_K,
        runner.calls_made_K,
        runner.flops_made,
        tree.merged,
        runner.network_calls,
        runner.padded_calls,
        runner.batch,
    )


def grow_rows(
    family: Family, schedules: Sequence[Schedule], first_row: int, rows: int, options: dict[str, Any]
) -> Grown:
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


def _grid(schedule: Schedule, others: Sequence[Schedule]) -> _Grid:
    """The grid of a schedule; of a spaced one it has all ends of segments of the others with its spacing."""
    if schedule.spacing is None:
        table = schedule.timetable()
        return _Grid(table.models, table.times)
    ends = {end for other in others if other.spacing == schedule.spacing for end in other.ends}
    times = (1.0, *sorted(ends, reverse=True))
    return _Grid(tuple(schedule.model_at(t) for t in times[:-1]), times, schedule.spacing)


# ------------------------------------------------------------------------------------------------ levels


@dataclass(frozen=True)
class Stretch:
    """Steps of a grid from one cut to the next, under one model."""

    times: tuple[float, ...]
    spacing: Spacing | None
    model: int
    begin_n: np.ndarray  # each row's first event, among those of all grids
    end_n: np.ndarray  # the one after its last
    members: list[int]  # schedules that make these steps
    prefixes: int  # nodes of the prefix tree that these schedules are at before

    @property
    def calls_n(self) -> np.ndarray:
        """Calls of each row."""
        return self.end_n - self.begin_n


class _Tree:
    """The levels of all schedules, and the calls that they take as a prefix tree."""

    def __init__(self, family: Family, tables: Sequence[_Grid], plan: Plan) -> None:
        self.family, self.tables, self.plan = family, tables, plan
        grids = list({table.key: table for table in tables}.values())
        parts = [calls_by_step(plan, *grid.key) for grid in grids]
        self.events = _side_by_side([events for events, _ in parts])
        # For each grid (n, T + 1): a row's first event at step k or later, steps counted from the masked end.
        self.first: dict[tuple[Any, ...], np.ndarray] = {}
        number = 0
        for grid, (own, count_nT) in zip(grids, parts, strict=True):
            self.first[grid.key] = number + own.row_ptr_n1[:-1, None] + np.cumsum(count_nT, axis=1)
            number += len(own.step_E)
        self.calls_tree_K, self.merged = np.zeros(len(family.names), dtype=np.int64), 0
        self.levels = self._levels()

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
                members = [s for s, _, _ in users]
                prefixes = len({node_S[s] for s in members})
                level.append(Stretch(times, spacing, model, begin_n, end_n, members, prefixes))
                self.calls_tree_K[model] += level[-1].calls_n.sum() * prefixes
                for s in members:
                    node_S[s] = nodes.setdefault((node_S[s], (times, spacing, model)), len(nodes) + 1)
            levels.append(level)
        return levels

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
                self.merged += stretch.prefixes * plan.n - len(states_M)
                report(int(stretch.prefixes * stretch.calls_n.sum() - stretch.calls_n[row_U[states_M]].sum()))
            written_ML = runner.run(work, row_U, tokens_UL, report)
            # Schedules on other grids may be in the middle of a stretch. Other states are dropped, equal ones merged.
            kept, inverse = np.unique(state_Sn[idle_S], return_inverse=True)
            new_Sn[idle_S] = size + inverse.reshape(-1, plan.n)
            rows = np.concatenate([row_U[states_M] for _, states_M in work] + [row_U[kept]])
            row_U, tokens_UL, same = _distinct(rows, np.concatenate([written_ML, tokens_UL[kept]]))
            state_Sn = same[new_Sn]
        assert not (tokens_UL == mask_id).any(), "a planned event was not run"
        return tokens_UL, state_Sn


def calls_by_step(plan: Plan, times: Sequence[float], spacing: Spacing | None) -> tuple[Events, np.ndarray]:
    """The calls of a plan on a grid of times or under a spacing; and how many of each row's come at times from
    times[k - 1], included, down to times[k], (n, T + 1) with 0 at k = 0."""
    events = make_events(plan, times) if spacing is None else spaced_events(plan, spacing)
    count_nT = np.zeros((plan.n, len(times)), dtype=np.int64)
    after_E = np.searchsorted(-np.array(times), -events.t_E, side="right")
    np.add.at(count_nT, (np.repeat(np.arange(plan.n), events.per_row_n), after_E), 1)
    return events, count_nT


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


# ------------------------------------------------------------------------------------------------ running stretches


def _ranges(begin_m: np.ndarray, end_m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers from begin up to end of each item, one item after the other, and the item that each belongs to."""
    count_m = end_m - begin_m
    item = np.repeat(np.arange(len(begin_m)), count_m)
    return item, np.arange(len(item)) + np.repeat(begin_m - np.cumsum(count_m) + count_m, count_m)


def kept_engine(family: Family, plan: Plan, places: int, engines: Engines) -> Engine:
    """An engine with so many rows, from `engines` if it is there."""
    key = (places, plan.length, plan.seed)
    if key not in engines:
        masked = np.full((places, plan.length), -1)
        empty = Plan(plan.seed, np.zeros(places, dtype=np.int64), masked, np.zeros(masked.shape))
        engines[key] = Engine(list(family.models.values()), empty, family.mask_id, Law(), family.device)
    return engines[key]


@dataclass
class Runner:
    """Runs stretches of rows through the networks, piece by piece, on one engine."""

    family: Family
    plan: Plan
    events: Events
    engine: Engine
    batch: int
    stop: Callable[[], bool] | None
    load: Callable[[str], dict[str, Any] | None] | None
    save: Callable[[str, dict[str, Any]], object] | None
    network_calls: int = 0
    padded_calls: int = 0

    def __post_init__(self) -> None:
        self.calls_made_K = np.zeros(len(self.family.names), dtype=np.int64)
        self.flops_made: float | None = 0.0

    def run(
        self,
        work: list[tuple[Stretch, np.ndarray]],
        row_U: np.ndarray,
        tokens_UL: np.ndarray,
        report: Callable[[int], None],
    ) -> np.ndarray:
        """The tokens of each of these states at the end of its stretch."""
        stretches = [stretch for stretch, _ in work]
        states_M = np.concatenate([states for _, states in work])
        which_M = np.repeat(np.arange(len(work)), [len(states) for _, states in work])
        begin_M = np.concatenate([stretch.begin_n[row_U[states]] for stretch, states in work])
        end_M = np.concatenate([stretch.end_n[row_U[states]] for stretch, states in work])
        rows_M, tokens_ML = self.plan.rows_n[row_U[states_M]], tokens_UL[states_M]
        model_M = np.array([stretch.model for stretch in stretches])[which_M]
        start_E1 = np.append(self.events.start_E, len(self.events.positions_F))
        places = len(self.engine.state_nL) - 1
        for start in range(0, len(states_M), places):
            piece = slice(start, start + places)
            rows_m, tokens_mL, begin_m, end_m = rows_M[piece], tokens_ML[piece], begin_M[piece], end_M[piece]
            item_F, at_F = _ranges(start_E1[begin_m], start_E1[end_m])
            position_F = self.events.positions_F[at_F]
            own, model_E = self._events(begin_m, end_m, model_M[piece])
            content = (stretches, which_M[piece], rows_m, tokens_mL)
            record = None if self.load is None else self.load(self._key(*content))
            if record is None:
                self._run(rows_m, tokens_mL, own, model_E, report)
                index = (torch.from_numpy(x).to(self.engine.device) for x in (item_F, position_F))
                token_F = self.engine.state_nL[tuple(index)].cpu().numpy().astype("<u4")
                if self.save is not None:  # the batch, which is in the key, may have become smaller
                    packed = base64.b64encode(token_F.tobytes()).decode()
                    self.save(self._key(*content), {"kind": "tree", "tokens": packed})
            else:
                token_F = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<u4")
                report(len(model_E))
            tokens_ML[start + item_F, position_F] = token_F
        return tokens_ML

    def _key(self, stretches: list[Stretch], which_m: np.ndarray, rows_m: np.ndarray, tokens_mL: np.ndarray) -> str:
        content = hashlib.sha256()
        for array in (which_m - which_m[0], rows_m, tokens_mL):
            content.update(np.ascontiguousarray(array).astype("<i8").tobytes())
        what: list[list[Any]] = []
        for stretch in (stretches[j] for j in np.unique(which_m)):
            spacing = [] if stretch.spacing is None else [str(stretch.spacing)]
            what.append([list(stretch.times), self.family.names[stretch.model], *spacing])
        return content_key("tree", what, content.hexdigest(), self.plan.seed, list(tokens_mL.shape), self.batch)

    def _events(self, begin_m: np.ndarray, end_m: np.ndarray, model_m: np.ndarray) -> tuple[Events, np.ndarray]:
        """The events of a piece and their models, which count as made."""
        item_E, index_E = _ranges(begin_m, end_m)
        ptr_m1 = np.concatenate([[0], np.cumsum(end_m - begin_m)])
        flat = [field.name for field in fields(Events) if field.name.endswith("_E")]
        own = replace(self.events, row_ptr_n1=ptr_m1, **{name: getattr(self.events, name)[index_E] for name in flat})
        model_E = model_m[item_E]
        self.calls_made_K += np.bincount(model_E, minlength=len(self.calls_made_K))
        flops_E = flops_of_calls(self.engine.models, model_E, own.count_E, self.plan.length)
        self.flops_made = None if flops_E is None else (self.flops_made or 0.0) + float(flops_E.sum())
        return own, model_E

    def _run(
        self,
        rows_m: np.ndarray,
        tokens_mL: np.ndarray,
        own: Events,
        model_E: np.ndarray,
        report: Callable[[int], None],
    ) -> None:
        """Make the calls of a piece. What comes out is in the engine's first rows."""
        queue = Queue(own, model_E, self.plan.length, self.batch)
        self.engine.load(rows_m, tokens_mL)

        def make(call: Call) -> None:
            if self.stop is not None and self.stop():
                raise Stopped
            self.engine.run(call)

        with settings(self.engine.device):
            while (made := next_call(queue, make, self.engine.release)) is not None:
                call, _ = made
                queue.advance(call)
                self.network_calls += 1
                self.padded_calls += call.shape.rows - len(call.rows_R)
                report(len(call.rows_R))
        self.batch = queue.batch
        self.engine.drawer.check()
