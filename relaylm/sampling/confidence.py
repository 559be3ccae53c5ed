r"""The loop of decoding rules that look at the network or mask positions again (`rules` defines them).

A planned rule is a plan, so it goes through `denoise`. Confidence and remasking rules go through the loop here, which
works alike: each row goes at its own pace and calls a network only at steps that write something; rows that want the
same model and the same number of places run together in batches of fixed shape; the head runs at open places alone
(where a rule looks at all masked positions, at all of those, and they are charged); a row's tokens do not depend on the
other rows. `rule_call` has what a call does on the device.

Rules that find their own number of steps go by time: a row with a share t of its free positions masked is at time t.

Shapes: n rows in all, B in a call, R of them real, L positions, K places of a row, T steps, C calls
of single rows that were made.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm.core.plan import LINEAR, Alpha, Plan
from relaylm.core.schedule import Policy, Schedule
from relaylm.errors import UserError, checked
from relaylm.sampling.denoise import Options, denoise, next_call, rows_in_call
from relaylm.sampling.engine import SCRATCH, calls_on, settings
from relaylm.sampling.law import Drawer, Law
from relaylm.sampling.policy import Grid, RowStates, check_request, policy_text, resolve, static_models
from relaylm.sampling.result import Event, Samples, Trace, cost_of_calls, reference_flops
from relaylm.sampling.rule_call import RuleState, Wrote
from relaylm.sampling.rules import Rule, blocks_of, counts_of, level_calls, planned


@checked
def decode(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    rule: Rule,
    *,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    greedy: bool = False,
    **options: Any,
) -> Samples:
    """`denoise` under a decoding rule, with its options. `greedy` takes the likeliest token everywhere (temperature 0).
    The trace holds the step and the model that wrote a position last; a rule that finds its own number of steps counts
    each row's down to 1, and `steps` is then the longest row's. `on_calls` receives steps, or positions of such a
    rule."""
    began, law = time.perf_counter(), options.pop("law", None) or Law()
    if alpha != LINEAR:
        raise UserError("decoding rules are defined for the linear noise schedule: leave alpha out")
    followed, times = resolve(policy, steps, rule)
    changes = changes_of(rule, law, greedy)
    if rule.planned:
        options["law"] = replace(law, top_k=1) if greedy else law
        laid, steps, call_nL = as_plan(rule, plan, times)
        samples = denoise(models, followed, laid, steps=steps, call_nL=call_nL, **options)
        heavy = options.get("heavy") or list(models)[-1]
        cost = replace(samples.cost, flops_reference=reference_flops(models[heavy], plan))
        return replace(samples, schedule=policy_text(policy), changes_law=changes, cost=cost)
    if getattr(policy, "wants_logits", False):
        raise UserError("a policy that wants logits does not go with a rule that looks at logits itself")
    run = RuleRun(models, followed, plan, rule, times, Options(law=law, **options), greedy).finish()
    return replace(run.samples(began), schedule=policy_text(policy), changes_law=changes)


def forced(
    models: Mapping[str, Any], policy: Policy, plan: Plan, rule: Rule, times: Grid, truth_nL: np.ndarray, **options: Any
) -> tuple[np.ndarray, Samples]:
    """A rule that looks at no draw, on its way to these rows: each token it writes is the row's own. Returns minus the
    log-probability of each row, in nats, and the run. Without chance in the rule that is exactly the probability that
    it writes the row, since the row fixes the order. `policy` and `times` are those of `resolve`."""
    assert rule.bounded and not rule.planned
    began = time.perf_counter()
    run = RuleRun(models, policy, plan, rule, times, Options(law=Law(), **options), False, truth_nL).finish()
    return run.state.nats_n[:-1].cpu().numpy(), run.samples(began)


def changes_of(rule: Rule, law: Law, greedy: bool) -> tuple[str, ...]:
    """What `Samples.changes_law` says of a rule."""
    named = not rule.exact or rule.own_order
    return (*([f"rule={rule}"] if named else []), *law.changes, *(["temperature=0"] if greedy else []))


def as_plan(rule: Rule, plan: Plan, times: Grid) -> tuple[Plan, float, np.ndarray | None]:
    """A planned rule as `denoise` takes it: the plan, T, and the call of each position where there is no grid."""
    if rule.levels is not None:
        return plan, math.inf, level_calls(rule, plan.given_nL)
    assert times is not None
    return planned(rule, plan, times), len(times) - 1, None


@dataclass(frozen=True)
class _Call:
    """One batch for one network."""

    model: int
    places: int  # K
    rows_R: np.ndarray
    asked_R: np.ndarray  # positions of each row whose logits are wanted
    t_R: np.ndarray


@dataclass(frozen=True)
class _Sent:
    """A call that was started, and what will be known of it once the event has passed; see `RuleState.call`."""

    call: _Call
    made_4R: np.ndarray  # what the cost is made of; see `RuleRun.made`
    outcome: Tensor | None
    event: Any
    wrote: Wrote | None


class RuleRun:
    """Rows on their way under a rule: `state` has them on the device; here is what the choice of the next batch needs.

    Where that depends on what a call did, the host reads it while the next one runs: on CUDA a second full batch of
    other rows, if there is one, is sent before the first one's outcome is looked at."""

    def __init__(
        self,
        models: Mapping[str, Any],
        policy: Policy,
        plan: Plan,
        rule: Rule,
        times: Grid,
        options: Options,
        greedy: bool,
        truth_nL: np.ndarray | None = None,
    ) -> None:
        check_request(models, plan, options.mask_id, options.batch_size, options.heavy)
        self.models, self.policy, self.plan, self.rule, self.options = models, policy, plan, rule, options
        self.names, self.device = tuple(models), torch.device(options.device)
        n, length, free_nL = plan.n, plan.length, plan.given_nL < 0
        block_nL, blocks = blocks_of(rule, plan.given_nL)
        self.batch = rows_in_call(options.batch_size, n, length, options.device)
        self.widest = min(length, rule.block or length)
        self.steps = 0 if times is None else len(times) - 1
        self.time_T = np.array([1.0] if times is None else times)
        self.lookup = static_models(policy, self.names)
        self.states = RowStates(policy, self.names, plan.given_nL, self.steps)
        self.at_n = np.zeros(n, dtype=np.int64)  # each row's next step, from the masked end
        self.asked_n = (free_nL & (block_nL == 0)).sum(axis=1)  # positions whose logits its next call is to give
        self.places_n = np.full(n, self.widest)  # rules that find their own steps keep to one shape, for full batches
        self.model_n = np.zeros(n, dtype=np.int64)  # the model of its next call
        self.away_n = np.zeros(n, dtype=bool)  # in a call whose outcome was not looked at
        self.made: list[np.ndarray] = []  # of each call (4, R): model, positions asked for, time, step
        self.calls = self.padded_calls = 0  # C, and empty places
        if rule.counts is not None:
            self.count_nT = counts_of(rule, plan.given_nL, self.steps)
            per_block = self.steps // blocks
            ends_nT = self.count_nT.cumsum(axis=1)
            block_end_nT = ends_nT[:, (np.arange(self.steps) // per_block + 1) * per_block - 1]
            self.open_nT = block_end_nT - ends_nT + self.count_nT  # masked positions of the step's block, before it
        drawer = Drawer(options.law, plan.seed, options.mask_id, self.device, greedy)
        asks, reports = rule.counts is None or self.lookup is None, options.callback is not None
        each = list(models.values())
        self.state = RuleState(each, plan, rule, self.time_T, block_nL, drawer, self.device, asks, reports, truth_nL)
        self.runner = calls_on(self.device)
        self.under_way: deque[_Sent] = deque()
        self.ahead = 2 if asks and not reports and self.device.type == "cuda" else 1
        rows_n = np.arange(n)
        self._settle(rows_n if rule.rates is None else self._decided(rows_n, np.zeros((4, n))))

    def step(self) -> bool:
        """Make the next call, or look at the outcome of an earlier one; False if nothing was left to do."""
        if (made := next_call(self, self._send, self.runner.release)) is not None:
            self.under_way.append(made[1])
        elif not self.under_way:
            return False
        if made is None or len(self.under_way) >= self.ahead:
            self._receive(self.under_way.popleft())
        return True

    def finish(self) -> RuleRun:
        """Make all calls."""
        with settings(self.device), contextlib.closing(self.runner):
            while self.step():
                pass
        return self

    # -------------------------------------------------------------------------------- where each row goes next

    def _unfinished(self, rows_R: np.ndarray) -> np.ndarray:
        """Those of these rows that have something to do."""
        alive_R = self.states.masked_n[rows_R] > 0 if self.rule.adaptive else self.at_n[rows_R] < self.steps
        return np.asarray(rows_R[alive_R])

    def _times(self, rows_R: np.ndarray) -> np.ndarray:
        """The time before each row's next step."""
        if self.steps:
            return np.asarray(self.time_T[self.at_n[rows_R]])
        return np.asarray(self.states.masked_n[rows_R] / self.states.free_n[rows_R])

    def _settle(self, rows_R: np.ndarray) -> None:
        """Bring rows to their next call: skip the steps that write nothing, settle the model and the places."""
        if self.rule.counts is not None:
            # The next step with something to write; the count beyond the last step stands for the end.
            ahead_RT = (self.count_nT[rows_R] > 0) & (np.arange(self.steps) >= self.at_n[rows_R, None])
            self.at_n[rows_R] = np.where(ahead_RT.any(axis=1), ahead_RT.argmax(axis=1), self.steps)
            rows_R = self._unfinished(rows_R)
            self.asked_n[rows_R] = self.open_nT[rows_R, self.at_n[rows_R]]
        if self.rule.counts is not None or self.rule.own_order:
            grain, asked_R = -(-self.widest // 8), self.asked_n[rows_R]  # eight shapes, by what the row itself has open
            places_R = np.minimum(-(-asked_R // grain) * grain, self.widest)
            # And one for what a set holds, which needs no look: of two places at least, as in `call_shapes`.
            few = max(2, self.state.most) if self.rule.spaced else 0
            self.places_n[rows_R] = np.where(asked_R <= few, np.minimum(places_R, few), places_R)
        rows_R = self._unfinished(rows_R)
        step_R, t_R = self.steps - self.at_n[rows_R] if self.steps else 0 * rows_R, self._times(rows_R)
        if self.lookup is not None:
            self.model_n[rows_R] = self.lookup(step_R, t_R)
        else:
            each = zip(rows_R.tolist(), step_R.tolist(), t_R.tolist(), strict=True)
            self.model_n[rows_R] = [self.states.choose(row, step, t) for row, step, t in each]

    def _decided(self, rows_R: np.ndarray, found_4R: np.ndarray) -> np.ndarray:
        """Remasking rules: take note of what `RuleState.decide` found for rows; those still at a step that writes
        nothing go on. Returns the rows."""
        left_R, found = rows_R, found_4R
        while True:
            self.at_n[left_R], self.asked_n[left_R], self.states.masked_n[left_R] = found[:3].astype(np.int64)
            places_R = np.exp2(np.ceil(np.log2(np.maximum(np.maximum(found[1], found[3]), 1)))).astype(np.int64)
            self.places_n[left_R] = np.minimum(places_R, self.plan.length)
            left_R = self._unfinished(left_R[found[1] == 0])
            if not len(left_R):
                return rows_R
            rows, k = (torch.from_numpy(x).to(self.device) for x in (left_R, self.at_n[left_R]))
            found = self.state.decide(rows, k, self.state.tries).cpu().numpy()

    def take(self) -> _Call | None:
        """The next batch: of two batches' worth of unfinished rows, those that want what the one furthest behind wants.
        Not if it has empty places that rows under way could fill."""
        pool = self._unfinished(np.flatnonzero(~self.away_n))[: 2 * self.batch]
        if not len(pool):
            return None
        left = self.states.masked_n[pool] if self.rule.adaptive else self.steps - self.at_n[pool]
        kind = self.model_n[pool] * (self.plan.length + 1) + self.places_n[pool]
        wanted = kind == kind[left.argmax()]
        ready = pool[wanted][np.argsort(-left[wanted], kind="stable")[: self.batch]]
        if self.under_way and len(ready) < self.batch:
            return None
        model, places = int(self.model_n[ready[0]]), int(self.places_n[ready[0]])
        return _Call(model, places, ready, self.asked_n[ready], self._times(ready))

    def resize(self, batch: int) -> None:
        """Make calls of so many rows from here on."""
        self.batch = batch

    # -------------------------------------------------------------------------------- a call

    def _send(self, call: _Call) -> _Sent:
        """Start a call."""
        real, b, k_R = slice(len(call.rows_R)), self.batch, self.at_n[call.rows_R]
        index, t_B = np.stack([np.full(b, SCRATCH), np.full(b, self.steps), self.calls + np.arange(b)]), np.ones(b)
        index[0, real], t_B[real] = call.rows_R, call.t_R
        index[1, real] = self.count_nT[call.rows_R, k_R] if self.rule.counts is not None else k_R + 1
        model = self.state.models[call.model] if self.state.fixed else None
        make, blank = partial(self.state.call, call.model, call.places), ((b, SCRATCH), (2 * b, 0))
        outcome, wrote = self.runner.run((call.model, call.places, b), model, make, index.reshape(-1), t_B, blank)
        event = None
        if outcome is not None and self.device.type == "cuda":
            outcome, event = outcome.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self.made.append(np.stack([np.full(len(k_R), call.model), call.asked_R, call.t_R, k_R]))
        self.calls += len(call.rows_R)
        self.padded_calls += b - len(call.rows_R)
        self.away_n[call.rows_R] = True
        return _Sent(call, self.made[-1], outcome, event, wrote)

    def _receive(self, sent: _Sent) -> None:
        """Take note of what a call did, and move its rows to their next ones."""
        rows_R = sent.call.rows_R
        self.away_n[rows_R] = False
        if self.options.callback is not None:
            for event in self._reported(sent):
                self.options.callback(event)
        self.at_n[rows_R] += 1
        if sent.outcome is not None:
            if sent.event is not None:
                sent.event.synchronize()
            found = sent.outcome.cpu().numpy()[:, : len(rows_R)]
            masked_R = found[0].astype(np.int64)
            if self.rule.adaptive and (masked_R >= self.states.masked_n[rows_R]).any():
                self.state.drawer.check()  # only logits that are not finite write nothing, and it would never end
            if self.state.looks(sent.call.places):  # the head ran once more for what was written
                sent.made_4R[1] += self.states.masked_n[rows_R] - masked_R
            self.states.masked_n[rows_R] = masked_R
            if self.rule.adaptive:
                self.asked_n[rows_R] = found[1].astype(np.int64)
            if self.lookup is None:
                self.states.record(rows_R, sent.call.model, [(float(mean), float(low)) for mean, low in found[2:4].T])
            if self.rule.rates is not None:
                self._decided(rows_R, found[4:])
        self._settle(rows_R)
        if self.options.on_calls is not None:
            masked_n, free_n = self.states.masked_n, self.states.free_n
            done = (free_n - masked_n).sum() if self.rule.adaptive else self.at_n.sum()
            self.options.on_calls(int(done), int(free_n.sum()) if self.rule.adaptive else self.steps * self.plan.n)

    # -------------------------------------------------------------------------------- results

    def _reported(self, sent: _Sent) -> Iterator[Event]:
        """One event for each row of a call; what was masked again since the last one is in it, as a mask."""
        assert sent.wrote is not None
        changed_BL, tokens_BL, logprob_BL = (x_BL.cpu().numpy() for x_BL in sent.wrote)
        for j, row in enumerate(sent.call.rows_R.tolist()):
            at = np.flatnonzero(changed_BL[j])
            step, t = self.steps - int(self.at_n[row]) if self.steps else 0, float(sent.call.t_R[j])
            tokens, logprobs = tokens_BL[j, at].tolist(), logprob_BL[j, at].tolist()
            yield Event(row, step, t, self.names[sent.call.model], at.tolist(), tokens, logprobs)

    def samples(self, began: float) -> Samples:
        """What came out, once nothing is left to do; `began` by time.perf_counter()."""
        self.state.drawer.check()
        tokens_nL, call_nL = (x[:-1].cpu().numpy() for x in (self.state.token_nL, self.state.call_nL))
        assert not (tokens_nL == self.options.mask_id).any(), "a masked position was left"
        # The last column is for positions that no call wrote, whose call is -1.
        made_4C = np.concatenate([*self.made, [[-1], [0], [0], [0]]], axis=1)
        model_C, asked_C, at_C = made_4C[[0, 1, 3]].astype(np.int64)
        heavy = self.options.heavy or self.names[-1]
        cost = cost_of_calls(self.models, model_C[:-1], asked_C[:-1], self.plan.length, heavy, self.policy, self.plan)
        cost.network_calls, cost.padded_calls, cost.batch_size = len(self.made), self.padded_calls, self.batch
        cost.seconds = time.perf_counter() - began
        steps_n = np.full(self.plan.n, self.steps) if self.steps else self.at_n
        step_nL = np.where(call_nL >= 0, steps_n[:, None] - at_C[call_nL], 0).astype(np.int32)
        trace = Trace(step_nL, made_4C[2][call_nL], model_C[call_nL].astype(np.int16), self.names)
        return Samples(tokens_nL, trace, cost, "", int(steps_n.max()), self.plan.seed)
