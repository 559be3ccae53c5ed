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

**Values in, values out.** `Rows` come ready to be computed, perhaps from another process, and `Event` and `Ended` say
what became of them: texts, plans and costs are made elsewhere (`relaylm.serve.host`).

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
from typing import Any

import numpy as np
import torch

from relaylm.core.cost import Cost
from relaylm.errors import UserError
from relaylm.sampling.confidence import RuleRun
from relaylm.sampling.engine import Call, Engine, settings
from relaylm.sampling.graphs import Copies, Copy
from relaylm.sampling.queue import pack
from relaylm.sampling.result import Event
from relaylm.serve.request import Refused
from relaylm.serve.rows import Ended, LaneKey, Made, Planned, Rows

log = logging.getLogger("relaylm.serve")
PATIENCE = 4  # calls that full ones may take before the row that has waited longest
LANES = 16  # engines kept for rows to come; more only while they have rows


@dataclass(eq=False)
class Job:
    """Rows on their way. `put` receives what calls write, if the lane is scored, and the end; it is called by the
    scheduler's thread."""

    rows: Rows
    put: Callable[[Event | Ended], None]
    cancelled: bool = False
    over: bool = False
    submitted: float = 0.0
    began: float = math.inf
    deadline: float = math.inf
    cost: Cost | None = None

    def __post_init__(self) -> None:
        self.planned = self.rows.calls if isinstance(self.rows.calls, Planned) else None
        self.left = 1 if self.planned is None else self.rows.plan.n  # that are not written
        self.tokens_nL = None if self.rows.lane.scored else self.rows.plan.given_nL.copy()

    def write(self, event: Event) -> None:
        """Pass on what a row's call wrote."""
        if self.tokens_nL is None:
            self.put(event)
        else:
            self.tokens_nL[event.row, event.positions] = event.tokens


@dataclass(eq=False)
class _Lane:
    engine: Engine
    free: list[int]  # places
    tokens_PL: np.ndarray  # of each place, as far as calls were fetched
    used: int = 0  # the number of its last call


@dataclass(eq=False)
class _Row:
    """One row in flight or waiting; a rule's whole request is one, too."""

    job: Job
    number: int
    weight: int = 1
    lane: _Lane | None = None
    place: int = -1
    calls: list[list[int]] = field(default_factory=list)  # its own of `Planned.each_E5`; lists are read faster
    times: list[float] = field(default_factory=list)  # of those calls
    next: int = 0
    since: int = 0  # the call before its wait began
    joined: float = 0.0
    run: RuleRun | None = None
    wrote: list[Event] = field(default_factory=list)  # by a rule's last call
    kind: tuple[Any, ...] = ()

    def settle(self) -> None:
        """Note which call the row wants next."""
        if (planned := self.job.planned) is not None:
            model, shape, *_ = self.calls[self.next]
            self.kind = self.lane, model, planned.shapes[shape]
        else:
            self.kind = (id(self),)

    def leave(self) -> None:
        """Give back the row's place, or what its rule has captured."""
        if self.run is not None:
            self.run.runner.close()
        if self.lane is not None:
            self.lane.free.append(self.place)
        self.run = self.lane = None


@dataclass(eq=False)
class _Launched:
    """A call of rows that want the same, and what it will have written."""

    rows: list[_Row]
    call: Call
    lane: _Lane
    wrote: Copy  # tokens, and log-probabilities or what else is finite if all is well
    began: float


@dataclass
class Scheduler:
    """See the head of the module. `engine_for` makes the engine of a lane, with `max_rows` places, `loop_for` the loop
    of rows under a rule; `after_step` is called after each `step` of `work`."""

    engine_for: Callable[[LaneKey, int], Engine]
    loop_for: Callable[[Rows, Callable[[Event], None]], RuleRun]
    max_rows: int = 64
    max_queue: int = 256
    device: torch.device | str = "cpu"
    clock: Callable[[], float] = time.monotonic
    on_call: Callable[[Made], None] = lambda made: None
    after_step: Callable[[], None] = lambda: None
    ahead: int = 0  # calls that are launched before what one wrote is fetched
    lanes: dict[LaneKey, _Lane] = field(default_factory=dict)
    jobs: dict[Job, None] = field(default_factory=dict)  # that are not over
    active: list[_Row] = field(default_factory=list)  # first those that have waited longest
    waiting: list[tuple[int, int, _Row]] = field(default_factory=list)  # a heap by tag
    calls: int = 0
    admitted: int = 0
    closing: bool = False
    stay: float = 1.0  # seconds that a row is in flight, on average

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self._order = count()
        self._launched: deque[_Launched] = deque()
        self._copies = Copies()

    @property
    def rows_waiting(self) -> int:
        """Rows without a place."""
        return sum(row.job.rows.plan.n if row.job.planned is None else 1 for _, _, row in self.waiting)

    @property
    def rows_in_flight(self) -> int:
        """Rows with a place; of a rule's request those that a call takes."""
        return sum(row.weight for row in self.active)

    def submit(self, jobs: list[Job]) -> None:
        """Queue all rows of the jobs, or refuse them."""
        rows = sum(job.rows.plan.n for job in jobs)
        with self.changed:
            if self.closing:
                raise Refused(503, "the server is shutting down", "shutting_down", retry_after=10)
            waiting, room = self.rows_waiting, max(0, self.max_rows - self.rows_in_flight)
            if waiting + rows > self.max_queue + room:
                after = self.stay * (waiting + self.rows_in_flight) / self.max_rows
                raise Refused(429, f"{waiting} rows are waiting already: try again later", "busy", retry_after=after)
            tag = self.admitted
            for job in jobs:
                self.jobs[job], job.submitted = None, self.clock()
                job.deadline = job.submitted + job.rows.timeout
                for number in range(job.left):
                    weight = 1 if job.planned is not None else min(job.rows.plan.n, job.rows.batch, self.max_rows)
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
                busy = self.step()
                self.after_step()
                if not busy:
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
            if rows[0].job.planned is None:
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
            jobs = [job for job in self.jobs if job.cancelled or now > job.deadline]
        for job in jobs:
            if job.cancelled:
                self._end(job, Refused(499, "the client has disconnected", "cancelled"))
            else:
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
        rows, planned = row.job.rows, row.job.planned
        if planned is not None:
            if rows.lane not in self.lanes:
                self._forget()
                engine = self.engine_for(rows.lane, self.max_rows)
                nothing = np.zeros((self.max_rows, rows.lane.length), dtype=np.int64)
                self.lanes[rows.lane] = _Lane(engine, list(range(self.max_rows)), nothing)
            row.lane = self.lanes[rows.lane]
            row.place = row.lane.free.pop()
            row.lane.engine.seat(row.place, rows.plan, row.number)
            own = slice(*planned.row_ptr_n1[row.number : row.number + 2])
            row.calls, row.times = planned.each_E5[own].tolist(), planned.t_E[own].tolist()
        row.settle()

    def _forget(self) -> None:
        """Drop the engines that were not used for longest."""
        idle = [key for key, lane in self.lanes.items() if len(lane.free) == self.max_rows]
        for key in sorted(idle, key=lambda key: self.lanes[key].used)[: max(0, len(self.lanes) + 1 - LANES)]:
            self.lanes.pop(key).engine.release()

    def _choose(self) -> list[_Row]:
        """The rows of the next call, longest wait first."""
        groups: dict[tuple[Any, ...], list[_Row]] = {}
        for row in self.active:
            groups.setdefault(row.kind, []).append(row)
        first = next(iter(groups.values()))
        full = next((group for group in groups.values() if len(group) >= group[0].job.rows.batch), None)
        if full is not None and self.calls - first[0].since <= PATIENCE:
            first = full
        return first[: first[0].job.rows.batch]

    def _launch(self, rows: list[_Row]) -> None:
        """One call of rows that want the same. They go on to their next events at once."""
        lane, (_, model, shape) = rows[0].lane, rows[0].kind
        assert lane is not None
        places, counts, times, parts, total = [], [], [], [], 0
        for row in rows:
            planned, (_, _, due, start, _) = row.job.planned, row.calls[row.next]
            assert planned is not None
            if (total := total + due) > shape.kept:  # the head's places are taken; the first row always fits
                break
            places.append(row.place)
            counts.append(due)
            times.append(row.times[row.next])
            parts.append(planned.positions_F[start : start + due])
        rows = rows[: len(counts)]
        each = (places, [row.next for row in rows], counts, times)
        rows_R, events_R, counts_R, t_R = (np.array(values) for values in each)
        call = pack(model, shape, rows_R, events_R, counts_R, np.concatenate(parts), t_R)
        began, lane.used = self.clock(), self.calls
        wrote = self._copies.of(lane.engine.send(call))
        self._launched.append(_Launched(rows, call, lane, wrote, began))
        gone = set(rows)
        self.active = [row for row in self.active if row not in gone]
        for row in rows:
            row.next, row.since, row.job.began = row.next + 1, self.calls, min(row.job.began, began)
            if row.next == len(row.calls):
                row.leave()  # what comes into its place is written after this call
            else:
                row.settle()
                self.active.append(row)

    def _deliver(self, launched: _Launched) -> None:
        """Wait for a call, and pass on what it wrote."""
        call, lane, reached = launched.call, launched.lane, self.clock()
        wrote_2N = launched.wrote.read()
        waited, total = self.clock() - reached, len(call.due_F)
        token_F, score_F = wrote_2N[0, :total].astype(np.int64), wrote_2N[1, :total]
        lane.tokens_PL[np.repeat(call.rows_R, call.counts_R), call.due_F] = token_F
        finite, first, end = bool(np.isfinite(score_F).all()), launched.rows[0].job, 0
        assert first.planned is not None
        model = first.planned.names[call.model]
        for row, at, due in zip(launched.rows, call.events_R.tolist(), call.counts_R.tolist(), strict=True):
            job, mine = row.job, slice(end, end := end + due)
            if job.over:
                continue
            if not finite and not np.isfinite(score_F[mine]).all():
                self._end(job, Refused(503, "a model gave logits that are not finite", "model_failed"))
                continue
            if job.tokens_nL is None:
                wrote = (x_F[mine].tolist() for x_F in (call.due_F, token_F, score_F))
                job.put(Event(row.number, row.calls[at][-1], row.times[at], model, *wrote))
            if at + 1 == len(row.calls):
                if job.tokens_nL is not None:
                    tokens_L = job.tokens_nL[row.number]
                    np.copyto(tokens_L, lane.tokens_PL[row.place], where=tokens_L < 0)
                self._written(row)
        self._copies.keep(launched.wrote)
        key, rows, b = first.rows.lane, len(launched.rows), call.shape.rows
        text, seconds = f"{b}x{key.length}:{call.shape.kept}", self.clock() - launched.began
        self.on_call(Made(key.family, model, text, rows, b - rows, total, seconds, waited))

    def _run_rule(self, row: _Row) -> None:
        """One call of a request under a rule."""
        job, began = row.job, self.clock()
        job.began = min(job.began, began)
        row.run = row.run or self.loop_for(job.rows, row.wrote.append)
        more = row.run.step()
        row.since = self.calls
        self.active.remove(row)
        self.active.append(row)
        if row.wrote:
            rows, tokens = len(row.wrote), sum(len(event.tokens) for event in row.wrote)
            for event in row.wrote:
                job.write(event)
            key, b = job.rows.lane, job.rows.batch
            facts = row.wrote[0].model, f"{b}x{key.length}:rule", rows, b - rows, tokens
            self.on_call(Made(key.family, *facts, self.clock() - began))
            row.wrote.clear()
        if not more:
            job.cost = row.run.samples(time.perf_counter()).cost
            self.active.remove(row)
            row.leave()
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
        job.over = True
        for row in [row for row in self.active if row.job is job] if job.left else []:
            self.active.remove(row)
            row.leave()
        with self.changed:
            del self.jobs[job]
            if any(row.job is job for _, _, row in self.waiting):
                self.waiting = [entry for entry in self.waiting if entry[2].job is not job]
                heapq.heapify(self.waiting)
        job.put(Ended(error, job.submitted, job.began, self.clock(), job.tokens_nL, job.cost))
