r"""Rows of many requests through one engine: which go into the next network call, and who has to wait.

**Continuous batching.** Every row goes at its own pace through its own events (`relaylm.core.plan`). Between two calls
rows join and leave; a call takes rows that want the same model in the same shape, whatever request they belong to.

**The same text as alone.** A row's noise is keyed by its own request's seed and its number in the request. Its calls
always have the shapes that `relaylm.sample` gives them at the same batch size, empty places being padded, so neither
the other rows nor how many there are can change a bit.

**Bounded unfairness.** The row that has waited longest leads the next call. Only a full call may go first, and only
until that row has waited for `PATIENCE` calls. So with R rows in flight a row is passed over at most PATIENCE + R
times between two of its calls. Rows wait for a place in order of their tags: the i-th row of a request counts as if it
had arrived i rows later, so a request of one row does not wait for all of a large one, and a request that arrives after
a row's turn cannot overtake it.

**Ahead of the device.** What a call writes is fetched once the next `ahead` calls are launched, so a GPU does not wait
for the host. Which rows come next is known from their plans.

**Decoding rules** that look at the network choose what to write after each call, in a loop of their own
(`relaylm.sampling.confidence`). Such a request is one unit here: its calls take turns with those of others.

A scheduler runs in one thread (`step`); `submit` and `cancel` may be called from any other.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from relaylm.core.cost import Cost
from relaylm.core.plan import Events, Plan
from relaylm.errors import UserError
from relaylm.sampling.engine import Engine, Shape, settings
from relaylm.sampling.graphs import wait_for
from relaylm.sampling.law import Law
from relaylm.sampling.queue import call_shapes, pack
from relaylm.sampling.result import Event
from relaylm.serve.request import Refused

log = logging.getLogger("relaylm.serve")
PATIENCE = 4  # calls that full ones may take before the row that has waited longest
LANES = 16  # engines kept for rows to come; more only while they have rows


class LaneKey(NamedTuple):
    """Rows with the same of these share an engine, and so may share calls."""

    family: str
    length: int
    law: Law
    scored: bool  # whether log-probabilities are wanted


@dataclass(eq=False)
class Job:
    """Rows of one plan on their way. `emit` receives what is written, `ended` the end: None, or what went wrong. Both
    are called by the scheduler's thread. With `tokens_nL` what planned events write goes there, and not to `emit`."""

    lane: LaneKey
    names: tuple[str, ...]  # of the engine's models
    plan: Plan
    batch: int  # rows in a call
    emit: Callable[[Event], None]
    ended: Callable[[Refused | None], None]
    events: Events | None = None  # None for a rule that chooses on the way
    model_E: np.ndarray | None = None
    rule: Callable[[Callable[[Event], None]], Any] | None = None  # makes the loop of such a rule
    tokens_nL: np.ndarray | None = None
    deadline: float = math.inf
    cost: Cost | None = None  # of a rule's calls, at the end
    cancelled: bool = False
    over: bool = False
    left: int = 0  # rows that are not written
    submitted: float = 0.0
    began: float = math.inf  # when its first call began
    finished: float = math.inf

    def __post_init__(self) -> None:
        self.left = self.plan.n if self.events is not None else 1
        if self.events is not None:
            assert self.model_E is not None
            self.shapes, shape_E = call_shapes(self.events, self.plan.length, self.batch)
            # Lists: the scheduler reads one number at a time.
            each = (shape_E, self.model_E, self.events.count_E, self.events.start_E, self.events.t_E)
            self.shape_of, self.model_of, self.count_of, self.start_of, self.t_of = (x_E.tolist() for x_E in each)
            self.positions_F, self.step_E = self.events.positions_F, self.events.step_E


@dataclass(eq=False)
class _Lane:
    engine: Engine
    free: list[int]  # places
    used: int = 0  # the number of its last call


@dataclass(eq=False)
class _Row:
    """One row in flight or waiting; a rule's whole request is one, too."""

    job: Job
    number: int
    weight: int = 1
    lane: _Lane | None = None
    place: int = -1
    next: int = 0
    end: int = 0
    since: int = 0  # the call before its wait began
    joined: float = 0.0
    run: Any = None
    wrote: list[Event] = field(default_factory=list)  # by a rule's last call
    kind: tuple[Any, ...] = ()

    def settle(self) -> None:
        """Note which call the row wants next."""
        job, at = self.job, self.next
        self.kind = (id(self),) if job.events is None else (self.lane, job.model_of[at], job.shapes[job.shape_of[at]])


@dataclass(eq=False)
class _Launched:
    """A call of rows that want the same, and what it will have written."""

    rows: list[_Row]
    events: list[int]  # of each row
    positions: list[np.ndarray]
    model: int
    shape: Shape
    lane: _Lane
    written: Tensor  # tokens, and log-probabilities or what else is finite if all is well
    ready: Any  # an event of the device, or None
    began: float


@dataclass
class Made:
    """A call that was made, for the metrics."""

    lane: LaneKey
    model: str
    shape: str  # rows x length : places for the head
    rows: int
    padded: int
    tokens: int
    seconds: float
    waited: float = 0.0  # of these the host did nothing but wait for the device


@dataclass
class Scheduler:
    """See the head of the module. `engine_for` makes the engine of a lane, with `max_rows` places."""

    engine_for: Callable[[LaneKey, int], Engine]
    max_rows: int = 64
    max_queue: int = 256
    device: torch.device | str = "cpu"
    clock: Callable[[], float] = time.monotonic
    on_call: Callable[[Made], None] = lambda made: None
    ahead: int = 0  # calls that are launched before what one wrote is fetched
    lanes: dict[LaneKey, _Lane] = field(default_factory=dict)
    active: list[_Row] = field(default_factory=list)
    waiting: list[tuple[int, int, _Row]] = field(default_factory=list)  # a heap by tag
    calls: int = 0
    admitted: int = 0
    closing: bool = False
    stay: float = 1.0  # seconds that a row is in flight, on average

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._order = count()
        self._launched: deque[_Launched] = deque()

    @property
    def rows_waiting(self) -> int:
        """Rows without a place."""
        return sum(row.job.plan.n if row.job.events is None else 1 for _, _, row in self.waiting)

    @property
    def rows_in_flight(self) -> int:
        """Rows with a place; of a rule's request those that a call takes."""
        return sum(row.weight for row in self.active)

    def submit(self, jobs: list[Job]) -> None:
        """Queue all rows of the jobs, or refuse them."""
        rows = sum(job.plan.n for job in jobs)
        with self.changed:
            if self.closing:
                raise Refused(503, "the server is shutting down", "shutting_down", retry_after=10)
            waiting = self.rows_waiting
            room = self.max_rows - self.rows_in_flight if not waiting else 0
            if waiting + rows > self.max_queue + room:
                after = self.stay * (waiting + self.rows_in_flight) / self.max_rows
                raise Refused(429, f"{waiting} rows are waiting already: try again later", "busy", retry_after=after)
            tag = self.admitted
            for job in jobs:
                job.submitted = self.clock()
                for number in range(job.left):
                    weight = 1 if job.events is not None else min(job.plan.n, job.batch, self.max_rows)
                    heapq.heappush(self.waiting, (tag, next(self._order), _Row(job, number, weight)))
                    tag += 1
            self.changed.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Take the rows of these jobs out before the next call."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
            self.changed.notify()

    def close(self) -> None:
        """Refuse what comes from now on; `work` returns once everything is written."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    def work(self) -> None:
        """Make calls as long as there is something to do; wait for more until closed."""
        with settings(self.device):
            while True:
                if not self.step():
                    with self.changed:
                        self.changed.wait_for(lambda: self.waiting or self.closing)
                        if not self.waiting:
                            return

    def step(self) -> bool:
        """Let rows leave and join, then make one call; False if there was nothing to do. Under `engine.settings`."""
        self._leave()
        self._join()
        if not self.active:
            return self._fetch(0)
        self.calls += 1
        rows = self._choose()
        try:
            if rows[0].job.events is None:
                self._run_rule(rows[0])
            else:
                self._launch(rows)
        except Exception as error:
            self._fail(rows, error)
        self._fetch(self.ahead)
        return True

    def _fetch(self, most: int) -> bool:
        """Pass on what calls wrote until at most so many are under way; False if there were none."""
        any_there = bool(self._launched)
        while len(self._launched) > most:
            call = self._launched.popleft()
            try:
                self._deliver(call)
            except Exception as error:
                self._fail(call.rows, error)
                call.lane.engine.release()
        return any_there

    def _fail(self, rows: list[_Row], error: Exception) -> None:
        """A call that fails ends its own requests and nothing else."""
        bad_input, lane = isinstance(error, UserError), rows[0].lane
        if not bad_input:
            log.error("a call failed", exc_info=error)
        message = str(error) if bad_input else f"a network call failed ({type(error).__name__})"
        for job in {row.job for row in rows}:
            self._end(job, Refused(400 if bad_input else 503, message, "call_failed"))
        if lane is not None:
            lane.engine.release()

    def _leave(self) -> None:
        now = self.clock()
        with self.changed:
            jobs = {row.job for row in self.active} | {row.job for _, _, row in self.waiting}
        for job in jobs:
            if job.cancelled:
                self._end(job, Refused(499, "the client has disconnected", "cancelled"))
            elif now > job.deadline:
                self._end(job, Refused(504, "the request took longer than the server allows", "timeout"))

    def _join(self) -> None:
        joined = []
        with self.changed:
            while self.waiting and self.rows_in_flight + self.waiting[0][2].weight <= self.max_rows:
                row = heapq.heappop(self.waiting)[2]
                row.since, row.joined = self.calls, self.clock()
                self.active.append(row)
                joined.append(row)
                self.admitted += row.weight
        for row in joined:
            try:
                if not row.job.over:
                    self._seat(row)
            except Exception as error:
                self._fail([row], error)

    def _seat(self, row: _Row) -> None:
        """Give a row its place in the engine of its lane."""
        job = row.job
        if job.events is not None:
            if job.lane not in self.lanes:
                self._forget()
                engine = self.engine_for(job.lane, self.max_rows)
                self.lanes[job.lane] = _Lane(engine, list(range(self.max_rows)))
            row.lane = self.lanes[job.lane]
            row.place = row.lane.free.pop()
            row.lane.engine.seat(row.place, job.plan, row.number)
            row.next, row.end = job.events.row_ptr_n1[row.number : row.number + 2].tolist()
        row.settle()

    def _forget(self) -> None:
        """Drop the engines that were not used for longest."""
        idle = [key for key, lane in self.lanes.items() if len(lane.free) == self.max_rows]
        for key in sorted(idle, key=lambda key: self.lanes[key].used)[: max(0, len(self.lanes) + 1 - LANES)]:
            self.lanes.pop(key).engine.release()

    def _choose(self) -> list[_Row]:
        """The rows of the next call, longest wait first."""
        groups: dict[tuple[Any, ...], list[_Row]] = {}
        for row in sorted(self.active, key=lambda row: row.since):  # stable: those that came first
            groups.setdefault(row.kind, []).append(row)
        first = next(iter(groups.values()))
        full = next((group for group in groups.values() if len(group) >= group[0].job.batch), None)
        if full is not None and self.calls - first[0].since <= PATIENCE:
            first = full
        return first[: first[0].job.batch]

    def _launch(self, rows: list[_Row]) -> None:
        """One call of rows that want the same. They go on to their next events at once."""
        lane, first = rows[0].lane, rows[0].job
        model, shape = first.model_of[rows[0].next], first.shapes[first.shape_of[rows[0].next]]
        assert lane is not None
        counts, parts, times, total = [], [], [], 0
        for row in rows:
            job = row.job
            due, start = job.count_of[row.next], job.start_of[row.next]
            if (total := total + due) > shape.kept:  # the head's places are taken; the first row always fits
                break
            counts.append(due)
            parts.append(job.positions_F[start : start + due])
            times.append(job.t_of[row.next])
        rows = rows[: len(counts)]
        places_R, events_R = (np.array([getattr(row, name) for row in rows]) for name in ("place", "next"))
        call = pack(model, shape, places_R, events_R, np.array(counts), np.concatenate(parts), np.array(times))
        began, lane.used = self.clock(), self.calls
        token_N, logprob_N, _ = lane.engine.run(call)
        written, ready = _copied(token_N, logprob_N)
        self._launched.append(_Launched(rows, events_R.tolist(), parts, model, shape, lane, written, ready, began))
        for row in rows:
            row.next, row.since, row.job.began = row.next + 1, self.calls, min(row.job.began, began)
            if row.next == row.end:
                self._remove([row])  # what comes into its place is written after this call
            else:
                row.settle()

    def _deliver(self, call: _Launched) -> None:
        """Wait for a call, and pass on what it wrote."""
        reached = self.clock()
        wait_for(call.ready)
        waited = self.clock() - reached
        written_N, logprob_N = call.written.numpy()
        token_N, finite = written_N.astype(np.int64), bool(np.isfinite(logprob_N).all())
        end, model = 0, call.rows[0].job.names[call.model]
        for row, number, positions in zip(call.rows, call.events, call.positions, strict=True):
            job, mine = row.job, slice(end, end + len(positions))
            end += len(positions)
            if job.over:
                continue
            if not finite and not np.isfinite(logprob_N[mine]).all():
                self._end(job, Refused(503, "a model gave logits that are not finite", "model_failed"))
                continue
            if job.tokens_nL is not None:
                job.tokens_nL[row.number, positions] = token_N[mine]
            else:
                step, written = int(job.step_E[number]), (token_N[mine].tolist(), logprob_N[mine].tolist())
                job.emit(Event(row.number, step, job.t_of[number], model, positions.tolist(), *written))
            if number + 1 == row.end:
                self._written(row)
        first, rows, padded = call.rows[0].job, len(call.rows), call.shape.rows - len(call.rows)
        shape_text = f"{call.shape.rows}x{first.plan.length}:{call.shape.kept}"
        self.on_call(Made(first.lane, model, shape_text, rows, padded, end, self.clock() - call.began, waited))

    def _run_rule(self, row: _Row) -> None:
        """One call of a request under a rule."""
        job, began = row.job, self.clock()
        job.began = min(job.began, began)
        assert job.rule is not None
        row.run = row.run or job.rule(row.wrote.append)
        more = row.run.step()
        row.since = self.calls
        if row.wrote:
            rows, tokens = len(row.wrote), sum(len(event.tokens) for event in row.wrote)
            for event in row.wrote:
                job.emit(event)
            facts = row.wrote[0].model, f"{job.batch}x{job.plan.length}:rule", rows, job.batch - rows, tokens
            self.on_call(Made(job.lane, *facts, self.clock() - began))
            row.wrote.clear()
        if not more:
            job.cost = row.run.samples(time.perf_counter()).cost
            self._remove([row])
            self._written(row)

    def _written(self, row: _Row) -> None:
        """A row is written; with the last one its job is done."""
        self.stay += 0.1 * (self.clock() - row.joined - self.stay)
        row.job.left -= 1
        if row.job.left == 0:
            self._end(row.job, None)

    def _end(self, job: Job, error: Refused | None) -> None:
        """Take out what is left of a job, and say how it ended."""
        if job.over:
            return
        self._remove([row for row in self.active if row.job is job])
        with self.changed:
            if any(row.job is job for _, _, row in self.waiting):
                self.waiting = [entry for entry in self.waiting if entry[2].job is not job]
                heapq.heapify(self.waiting)
        job.over, job.finished = True, self.clock()
        job.ended(error)

    def _remove(self, rows: list[_Row]) -> None:
        for row in rows:
            self.active.remove(row)
            if row.run is not None:
                row.run.graphs.close()
                row.run = None
            if row.lane is not None:
                row.lane.free.append(row.place)
                row.lane = None


def _copied(token_N: Tensor, logprob_N: Tensor) -> tuple[Tensor, Any]:
    """What a call wrote, on the host once the event is over; the next call may overwrite the call's own. Each
    operation on a device gives other threads the interpreter, so there are few: a float64 holds a token's number."""
    written = torch.stack((token_N, logprob_N))
    if written.device.type != "cuda":
        return written, None
    host = torch.empty(written.shape, dtype=written.dtype, pin_memory=True)
    host.copy_(written, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
