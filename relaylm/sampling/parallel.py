r"""The same samples in fewer rounds, for few rows: fixed-point iteration over a window of events.

All noise is fixed by the plan, so a row is a deterministic function of its own start, found one event after the other.
The next W events can also be found together. Each has a state of its own, the row with what the events before it write;
those tokens are guessed, the W states go through the network as one batch, and every event draws. The first draw is
right, since its state was known. A draw is right if all guesses in its state were; so the longest run of events whose
guesses were drawn again is kept, with the draw after it. The other draws are the next guesses (Jacobi's iteration).
Calls also draw for the W events that follow their own, so that the events behind the window have guesses, too.

The tokens are those of the sequential run. As with another batch size, calls of another shape may round differently:
these have n W rows (unless a batch size is given) and places for W + 1 events. Rounds are fewer, calls are more, and
each asks for more positions; all of that is counted in the cost.

Shapes: n rows, W events of a window, L positions, E events, F positions written, M states of a round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from relaylm.core.plan import LINEAR, Alpha, Plan
from relaylm.core.schedule import Policy, Schedule
from relaylm.errors import UserError
from relaylm.sampling.denoise import Options, Run, begin, engine_for, next_call
from relaylm.sampling.engine import Engine, settings
from relaylm.sampling.law import Law
from relaylm.sampling.queue import Queue
from relaylm.sampling.result import Event, Samples, cost_of_calls


def denoise_ahead(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    window: int,
    *,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    law: Law | None = None,
    batch_size: int | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Samples:
    """What `denoise` returns at a batch size of rows times window, found in windows of so many events. An `engine`
    of the rows `states_of` the plan keeps what it captures on the device from run to run."""
    began = time.perf_counter()
    if window < 1:
        raise UserError(f"the number of events in parallel must be at least 1, not {window}")
    asked = Options(law=law or Law(), batch_size=batch_size or plan.n * window, **options)
    run, finish = begin(models, policy, plan, asked, steps, alpha)
    if run.states is not None:
        raise UserError("events run in parallel under a schedule, not under a policy that looks at the row")
    ahead = _Ahead(run, plan, asked, window, engine)
    try:
        with settings(asked.device):
            while ahead.round():
                pass
    finally:
        if engine is None:
            ahead.engine.runner.close()
    ahead.engine.drawer.check()
    run.engine.state_nL[: plan.n] = torch.from_numpy(ahead.token_nL).to(run.engine.device)
    run.done = len(run.events.step_E)
    samples = finish(began)
    made_C = np.concatenate([*ahead.made, np.zeros(0, dtype=np.int64)])
    heavy = asked.heavy or run.names[-1]
    count_C, model_C = ahead.asked.count_E[made_C], run.queue.model_E[made_C]
    cost = cost_of_calls(models, model_C, count_C, plan.length, heavy, run.policy, plan)
    cost.network_calls, cost.padded_calls, cost.batch_size = ahead.network_calls, ahead.padded_calls, ahead.queue.batch
    return replace(samples, cost=replace(cost, seconds=time.perf_counter() - began))


def states_of(plan: Plan, window: int) -> Plan:
    """The states of a window as rows. Each has its row's number, which keys the noise."""
    return Plan(plan.seed, *(np.repeat(x, window, axis=0) for x in (plan.rows_n, plan.given_nL, plan.u_nL)))


class _Ahead:
    """Rows on their way, a window of events at a time. State r W + j is that of row r before its j-th event."""

    def __init__(self, run: Run, plan: Plan, options: Options, window: int, kept: Engine | None) -> None:
        self.run, self.window, self.options, self.events = run, window, options, run.events
        self.token_nL = np.where(plan.given_nL < 0, options.mask_id, plan.given_nL)
        self.next_n, self.end_n = self.events.row_ptr_n1[:-1].copy(), self.events.row_ptr_n1[1:]
        self.guess_F = np.full(len(self.events.positions_F), -1)
        self.made: list[np.ndarray] = []  # events of each call
        self.network_calls = self.padded_calls = 0
        states = plan.n * window
        self.engine = engine_for(run.engine.models, states_of(plan, window), options, scored=False, kept=kept)
        # Positions are in the order of events: a call asks for those of its own event and of the next W of its row.
        last_E = np.repeat(self.end_n, self.events.per_row_n) - 1
        until_E = np.minimum(np.arange(len(last_E)) + window, last_E)
        count_E = (self.events.start_E + self.events.count_E)[until_E] - self.events.start_E
        pointers = np.zeros(states + 1, dtype=np.int64)
        most_E = np.full_like(count_E, count_E.max(initial=1))  # one shape for all, so that a window is one call
        expected_E = most_E.astype(np.float64)
        self.asked = replace(self.events, row_ptr_n1=pointers, count_E=count_E, expected_E=expected_E, most_E=most_E)
        batch = options.batch_size or states
        self.queue = Queue(self.asked, run.queue.model_E, plan.length, batch, in_flight=states)

    def round(self) -> bool:
        """Run a window of every row that is not done; False if there is none."""
        rows_R = np.flatnonzero(self.next_n < self.end_n)
        if not len(rows_R):
            return False
        ahead_R = np.minimum(self.window, self.end_n[rows_R] - self.next_n[rows_R])
        states = self._states(rows_R, ahead_R)
        drawn: dict[int, np.ndarray] = {}  # by event: its own tokens and those of the next
        self.queue.next_n, self.queue.end_n = np.zeros((2, len(self.queue.next_n)), dtype=np.int64)
        self.queue.next_n[states] = np.concatenate(
            [np.arange(self.next_n[r], self.next_n[r] + w) for r, w in zip(rows_R, ahead_R, strict=True)]
        )
        self.queue.end_n[states] = self.queue.next_n[states] + 1
        self.queue.line_up()
        while (made := next_call(self.queue, self.engine.run, self.engine.release)) is not None:
            call, (token_N, _, _) = made
            parts = np.split(token_N.cpu().numpy(), np.cumsum(call.counts_R))
            drawn |= dict(zip(call.events_R.tolist(), parts, strict=False))
            self.made.append(call.events_R)
            self.network_calls += 1
            self.padded_calls += call.shape.rows - len(call.rows_R)
            self.queue.advance(call)
        for row, w in zip(rows_R.tolist(), ahead_R.tolist(), strict=True):
            self._keep(row, w, drawn)
        if self.options.on_calls is not None:
            self.options.on_calls(int((self.next_n - self.events.row_ptr_n1[:-1]).sum()), len(self.events.step_E))
        return True

    def _part(self, event: int) -> slice:
        """Where an event's positions are among all."""
        start = int(self.events.start_E[event])
        return slice(start, start + int(self.events.count_E[event]))

    def _states(self, rows_R: np.ndarray, ahead_R: np.ndarray) -> np.ndarray:
        """Put the states of this round on the device; returns their numbers."""
        tokens, numbers = [], []
        for row, w in zip(rows_R.tolist(), ahead_R.tolist(), strict=True):
            state_L = self.token_nL[row].copy()
            for j in range(w):
                tokens.append(state_L.copy())
                numbers.append(row * self.window + j)
                part = self._part(int(self.next_n[row]) + j)
                guess = self.guess_F[part]
                state_L[self.events.positions_F[part]] = np.where(guess < 0, self.options.mask_id, guess)
        states, device = np.array(numbers), self.engine.device
        self.engine.state_nL[torch.from_numpy(states).to(device)] = torch.from_numpy(np.stack(tokens)).to(device)
        return states

    def _keep(self, row: int, w: int, drawn: Mapping[int, np.ndarray]) -> None:
        """Write the draws that are right. The others are the next guesses, and those of the last call for what follows
        the window."""
        first = int(self.next_n[row])
        for event in range(first, first + w):
            part = self._part(event)
            positions, tokens = self.events.positions_F[part], drawn[event][: part.stop - part.start]
            self.token_nL[row, positions] = tokens
            self.next_n[row] += 1
            if self.options.callback is not None:
                step, t = int(self.events.step_E[event]), float(self.events.t_E[event])
                model = self.run.names[self.run.queue.model_E[event]]
                self.options.callback(Event(row, step, t, model, positions.tolist(), tokens.tolist()))
            if (self.guess_F[part] != tokens).any():
                break
        for event in [first + w - 1, *range(int(self.next_n[row]), first + w)]:
            part, tokens = self._part(event), drawn[event]
            end = part.start + len(tokens) if event == first + w - 1 else part.stop
            self.guess_F[part.start : end] = tokens[: end - part.start]
