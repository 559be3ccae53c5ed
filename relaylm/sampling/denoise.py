r"""The event loop: a plan, models and a policy in; samples out.

**Events, not steps.** A row needs a network only at the steps where one of its positions is due. Each row goes at its
own pace: rows whose next event asks for the same model go through it together, in batches of one fixed shape, and a
waiting row takes the place of a finished one. A row's tokens do not depend on the other rows: its noise is keyed by its
own number, and the shape of its calls by its own events.

With a static schedule the sequence of calls is known before the first one runs, so the host never waits for the
device. A dynamic policy looks at each row between its calls, and does wait.

Shapes: n rows in all, R in a call, L positions, N due positions of a call, E events, F free positions, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from relaylm.core.plan import LINEAR, Alpha, Events, Plan, make_events
from relaylm.core.schedule import Policy, Schedule
from relaylm.core.spacing import events_of_calls, spaced_events
from relaylm.errors import UserError, checked, reason
from relaylm.sampling.engine import Call, Engine, out_of_memory, settings
from relaylm.sampling.law import Law
from relaylm.sampling.policy import Grid, RowStates, check_request, policy_text, resolve, static_models
from relaylm.sampling.queue import Queue
from relaylm.sampling.result import Event, Samples, Trace, cost_of_calls

CallT = TypeVar("CallT")
CallT_co = TypeVar("CallT_co", covariant=True)
ResultT = TypeVar("ResultT")


@checked
def denoise(
    models: Mapping[str, Any],
    policy: str | Schedule | Policy,
    plan: Plan,
    *,
    mask_id: int,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    law: Law | None = None,
    batch_size: int | None = None,
    heavy: str | None = None,
    device: torch.device | str = "cpu",
    callback: Callable[[Event], None] | None = None,
    on_calls: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
    call_nL: np.ndarray | None = None,
) -> Samples:
    """Run a plan to its end. The lower of two levels: no tokenizer, no defaults taken from a family.

    `policy` is a Schedule with model names in it (roles already bound) or its text, a Timetable, or any function of a
    RowState; `steps` is T, or infinity. `heavy` names the model that savings are counted against (default: the last).
    `batch_size` is the number of rows in every call, short batches being padded, so that a row's calls always have the
    same shapes; it is halved only if memory runs out, and bounded where rows are few (the cost says what was used).
    `callback` receives every event, `on_calls(done, total)` the number of row-calls. An `engine` of an earlier run with
    the same models, law, seed and as many rows brings what it captured on the device. `call_nL` says which call writes
    each position, from 1 up (0: given), where that is no grid of steps."""
    began = time.perf_counter()
    policy = Schedule.parse(policy) if isinstance(policy, str) else policy
    options = Options(mask_id, law or Law(), batch_size, heavy, device, callback, on_calls)
    run, finish = begin(models, policy, plan, options, steps, alpha, engine, call_nL)
    try:
        with settings(device):
            run.share_first_calls()
            while run.step():
                pass
        return finish(began)
    finally:
        if engine is None:
            run.engine.runner.close()


def begin(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    options: Options,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    engine: Engine | None = None,
    call_nL: np.ndarray | None = None,
) -> tuple[Run, Callable[[float], Samples]]:
    """A run that has made no call, and the function that gives its samples once nothing is left to do (of the time at
    which it began). `denoise` takes it to its end; who wants to see several runs side by side makes their calls in
    turn, under `engine.settings`."""
    check_request(models, plan, options.mask_id, options.batch_size, options.heavy)
    followed, times, events = follow(policy, steps, plan, alpha, call_nL)
    run = Run(models, followed, plan, events, options, 0 if times is None else len(times) - 1, engine)
    spaced = call_nL is not None or (isinstance(policy, Schedule) and policy.spacing is not None)
    calls = int(events.per_row_n.max(initial=0)) if spaced else math.inf
    return run, partial(run.samples, policy_text(policy), calls if times is None else len(times) - 1)


def follow(
    policy: Policy | Schedule, steps: float | None, plan: Plan, alpha: Alpha = LINEAR, call_nL: np.ndarray | None = None
) -> tuple[Policy, Grid, Events]:
    """The policy resolved for its steps, their grid of times, and the events of every row of the plan."""
    followed, times = resolve(policy, steps)
    spacing = policy.spacing if isinstance(policy, Schedule) else None
    if spacing is not None and alpha != LINEAR:
        raise UserError(f"{spacing} is defined for the linear noise schedule: leave alpha out")
    if call_nL is not None:
        return followed, times, events_of_calls(plan, call_nL)
    return followed, times, make_events(plan, times, alpha) if spacing is None else spaced_events(plan, spacing)


class _Batches(Protocol[CallT_co]):
    """Calls of `batch` rows, one after the other: a queue, or the rows under a decoding rule."""

    batch: int

    def take(self) -> CallT_co | None: ...

    def resize(self, batch: int) -> None: ...


def next_call(
    source: _Batches[CallT], run: Callable[[CallT], ResultT], release: Callable[[], None]
) -> tuple[CallT, ResultT] | None:
    """Take a call and run it; None if nothing is left. If memory runs out, `run` has written nothing: the batch is
    halved and taken again, after `release` has given memory back."""
    while (call := source.take()) is not None:
        try:
            return call, run(call)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if source.batch == 1:
                raise UserError(f"memory does not hold one row of this length ({reason(error)})") from None
            release()
            source.resize(source.batch // 2)
    return None


def rows_in_call(batch_size: int | None, n: int, length: int, device: torch.device | str) -> int:
    """Rows in every call: as asked for (all without a number), but where there are fewer rows, padding ends at a large
    batch's worth of positions: a million rows that are not there would only take memory."""
    most = (1 << 18 if torch.device(device).type == "cuda" else 1 << 15) // length
    return min(batch_size or n, max(n, most))


@dataclass(frozen=True)
class Options:
    """What a run takes beside models, policy and plan; see `denoise`."""

    mask_id: int
    law: Law
    batch_size: int | None = None
    heavy: str | None = None
    device: torch.device | str = "cpu"
    callback: Callable[[Event], None] | None = None
    on_calls: Callable[[int, int], None] | None = None


def engine_for(models: Sequence[Any], plan: Plan, options: Options, scored: bool, kept: Engine | None) -> Engine:
    """An engine for the rows of a plan: one that was kept from an earlier run, with what it captured, or a new one."""
    if kept is None:
        return Engine(models, plan, options.mask_id, options.law, options.device, scored)
    if not kept.serves(models, plan, options.mask_id, options.law, scored):
        raise UserError("this engine served other models, rows, noise or another law: leave it out")
    kept.load(plan.rows_n, np.where(plan.given_nL < 0, options.mask_id, plan.given_nL))
    return kept


class Run:
    """Rows on their way through the networks, one call at a time; `steps` is T, 0 at infinity."""

    def __init__(
        self,
        models: Mapping[str, Any],
        policy: Policy,
        plan: Plan,
        events: Events,
        options: Options,
        steps: int,
        engine: Engine | None = None,
    ) -> None:
        self.models, self.policy, self.plan, self.events, self.options = models, policy, plan, events, options
        self.names, each = tuple(models), list(models.values())
        lookup = static_models(policy, self.names)
        self.states = None if lookup is not None else RowStates(policy, self.names, plan.given_nL, steps)
        model_E = np.full(len(events.step_E), -1) if lookup is None else lookup(events.step_E, events.t_E)
        rows = rows_in_call(options.batch_size, plan.n, plan.length, options.device)
        self.queue = Queue(events, model_E, plan.length, rows)
        self.engine = engine_for(each, plan, options, scored=lookup is None, kept=engine)
        self.done = self.network_calls = self.padded_calls = self.shared_calls = 0
        if self.states is None:
            self.queue.foresee()
        else:
            self._choose(self.queue.todo)

    def share_first_calls(self) -> None:
        """Make the first calls of rows that are still alike: the blocks once for all of them, the head for each."""
        if self.plan.n < 2 or self.states is not None:
            return
        from relaylm.sampling.first_calls import share  # one row has nothing to share

        self.network_calls = share(self.queue, self.engine, self.plan.given_nL, self._passed)
        # The network calls above were made, with all their places.
        self.shared_calls = max(0, self.done - self.network_calls * self.queue.batch)
        self.queue.line_up()

    def step(self) -> bool:
        """Make the next call; False if nothing was left to do."""
        everywhere = self.states is not None and self.states.wants_logits
        made = next_call(self.queue, lambda call: self.engine.run(call, everywhere), self.engine.release)
        if made is None:
            return False
        call, (token_N, logprob_N, logits_BLV) = made
        if self.states is not None:
            self._record(call, logprob_N, logits_BLV)
        self._passed(call, token_N)
        self.network_calls += 1
        self.padded_calls += call.shape.rows - len(call.rows_R)
        return True

    def _passed(self, call: Call, token_N: Tensor) -> None:
        """Move the rows of a call that was made to their next events, and report it."""
        self.queue.advance(call)
        if self.states is not None:
            self._choose(call.rows_R[self.queue.next_n[call.rows_R] < self.queue.end_n[call.rows_R]])
        if self.options.callback is not None:
            for event in self._reported(call, token_N):
                self.options.callback(event)
        self.done += len(call.rows_R)
        if self.options.on_calls is not None:
            self.options.on_calls(self.done, len(self.events.step_E))

    def _choose(self, rows_R: np.ndarray) -> None:
        """Ask a dynamic policy for the models of these rows' next events."""
        assert self.states is not None
        for row, event in zip(rows_R.tolist(), self.queue.next_n[rows_R].tolist(), strict=True):
            step, t = int(self.events.step_E[event]), float(self.events.t_E[event])
            self.queue.model_E[event] = self.states.choose(row, step, t)

    def _record(self, call: Call, logprob_N: Tensor, logits_BLV: Tensor | None) -> None:
        assert self.states is not None
        ends_R = np.cumsum(call.counts_R)
        parts = np.split(logprob_N.cpu().numpy()[: ends_R[-1]], ends_R[:-1])
        self.states.masked_n[call.rows_R] -= call.counts_R
        self.states.record(call.rows_R, call.model, [(float(part.mean()), float(part.min())) for part in parts])
        if logits_BLV is not None:
            for place, row in enumerate(call.rows_R.tolist()):
                self.states.logits[row] = logits_BLV[place][self.engine.state_nL[row] == self.options.mask_id]

    def _reported(self, call: Call, token_N: Tensor) -> Iterator[Event]:
        tokens, end = token_N.tolist(), 0
        for row, event, count in zip(call.rows_R.tolist(), call.events_R.tolist(), call.counts_R.tolist(), strict=True):
            positions = call.due_F[end : end + count].tolist()
            step, t = int(self.events.step_E[event]), float(self.events.t_E[event])
            yield Event(row, step, t, self.names[call.model], positions, tokens[end : end + count])
            end += count

    def samples(self, schedule: str, steps: float, began: float) -> Samples:
        """What came out, once nothing is left to do; `began` by time.perf_counter()."""
        plan, events, model_E, options = self.plan, self.events, self.queue.model_E, self.options
        everywhere = self.states is not None and self.states.wants_logits
        heavy = options.heavy or self.names[-1]
        cost = cost_of_calls(self.models, model_E, events.count_E, plan.length, heavy, self.policy, plan, everywhere)
        cost.network_calls, cost.padded_calls = self.network_calls, self.padded_calls
        cost.shared_calls, cost.batch_size = self.shared_calls, self.queue.batch
        model_nL = np.full(plan.given_nL.shape, -1, dtype=np.int16)
        row_F = np.repeat(np.arange(plan.n), (plan.given_nL < 0).sum(axis=1))
        model_nL[row_F, events.positions_F] = np.repeat(model_E, events.count_E)
        trace = Trace(events.step_nL, plan.u_nL, model_nL, self.names)
        tokens_nL = self.engine.state_nL[: plan.n].cpu().numpy().copy()  # waits for the device; the engine may be kept
        self.engine.drawer.check()
        assert self.done == len(model_E) and not (tokens_nL == options.mask_id).any(), "a planned event was not run"
        cost.seconds = time.perf_counter() - began
        return Samples(tokens_nL, trace, cost, schedule, steps, plan.seed, changes_law=options.law.changes)
