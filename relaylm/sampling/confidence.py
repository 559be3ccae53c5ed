r"""The loop of decoding rules that look at the network or mask positions again (`rules` defines them).

A planned rule is a plan, so it goes through `denoise`. Confidence and remasking rules go through the loop here, which
works alike: each row goes at its own pace and calls a network only at steps that write something; rows that want the
same model and the same number of places run together in batches of fixed shape; the head runs at open places alone
(where a rule looks at all masked positions, at all of those, and they are charged); a row's tokens do not depend on the
other rows. The i-th token drawn at a position has draw index i - 1, whatever became of the earlier ones, and a
remasking rule's chance at the k-th step (k = 0, 1, ...) the draw index k + 1 of the plan's generator.

Rules that find their own number of steps go by time: a row with a share t of its free positions masked is at time t.

Shapes: n rows in all, B in a call, R of them real, L positions, K places of a row, N = B K, V vocabulary, T steps,
C calls of single rows that were made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm.core.arguments import checked
from relaylm.core.diffusion import LINEAR, Alpha
from relaylm.core.plan import Plan
from relaylm.core.schedule import Policy, Schedule
from relaylm.errors import UserError
from relaylm.sampling.denoise import Options, check_request, denoise, next_call, rows_in_call
from relaylm.sampling.engine import SCRATCH, at_rows, features_at, settings
from relaylm.sampling.law import Drawer, Law, widest_float
from relaylm.sampling.policy import Grid, RowStates, policy_text, resolve, static_models
from relaylm.sampling.result import Event, Samples, Trace, cost_of_calls, reference_flops
from relaylm.sampling.rules import (
    Rule,
    blocks_of,
    counts_of,
    expected_writes,
    level_calls,
    most_sure,
    planned,
    rank,
    remask,
    spaced_sets,
    uniforms_at,
)

CELLS = 1 << 26  # logits made at once, at most; a larger call's head goes over its places in slices


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
    run = _finished(models, policy, plan, rule, steps, Options(law=law, **options), greedy)
    return replace(run.samples(began), schedule=policy_text(policy), changes_law=changes)


def forced(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    rule: Rule,
    truth_nL: np.ndarray,
    *,
    steps: float | None = None,
    **options: Any,
) -> tuple[np.ndarray, Samples]:
    """A rule that looks at no draw, on its way to these rows: each token it writes is the row's own. Returns minus the
    log-probability of each row, in nats, and the run. Without chance in the rule that is exactly the probability that
    it writes the row, since the row fixes the order."""
    assert rule.bounded and not rule.planned
    began, options = time.perf_counter(), {"law": Law(), **options}
    run = _finished(models, policy, plan, rule, steps, Options(**options), False, truth_nL)
    return run.nats_n[:-1].cpu().numpy(), run.samples(began)


def _finished(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    rule: Rule,
    steps: float | None,
    options: Options,
    greedy: bool,
    truth_nL: np.ndarray | None = None,
) -> RuleRun:
    followed, times = resolve(policy, steps, rule)
    if getattr(policy, "wants_logits", False):
        raise UserError("a policy that wants logits does not go with a rule that looks at logits itself")
    run = RuleRun(models, followed, plan, rule, times, options, greedy, truth_nL)
    with settings(run.device):
        while run.step():
            pass
    return run


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
class _Look:
    """What a call returned, and what the rule chose of it."""

    rows_B: Tensor
    open_BL: Tensor  # positions that were asked for
    turn_BL: Tensor | None  # of rules with sets: in how many calls a position is written, 1 for this one, 0 for unknown
    place_BK: Tensor  # where the K places are, open ones first
    chosen_BK: Tensor
    drawn_BK: Tensor  # tokens
    sure_BK: Tensor
    logprob_BK: Tensor


class RuleRun:
    """Rows on their way under a rule: tokens on the device, what the choice of the next batch needs on the host."""

    def __init__(
        self,
        models: Mapping[str, Any],
        policy: Policy,
        plan: Plan,
        rule: Rule,
        times: tuple[float, ...] | None,
        options: Options,
        greedy: bool,
        truth_nL: np.ndarray | None = None,
    ) -> None:
        check_request(models, plan, options.mask_id, options.batch_size, options.heavy)
        self.models, self.policy, self.plan, self.rule, self.options = models, policy, plan, rule, options
        self.names, self.device, self.mask_id = tuple(models), torch.device(options.device), options.mask_id
        self.exact = widest_float(self.device)
        # Log-probabilities, of all tokens at all open places, are at least in this type: elsewhere float64 takes longer
        # than the blocks, whose rounding is larger than what it adds.
        self.least = torch.float64 if self.device.type == "cpu" else torch.float32
        self.drawer = Drawer(options.law, plan.seed, self.mask_id, self.device, greedy)
        n, length, free_nL = plan.n, plan.length, plan.given_nL < 0
        block_nL, blocks = blocks_of(rule, plan.given_nL)

        # On the device, with a scratch row at the end for the empty places of a batch.
        def put(array: np.ndarray, scratch: Any) -> Tensor:
            return torch.from_numpy(np.concatenate([array, np.full((1, *array.shape[1:]), scratch)])).to(self.device)

        self.token_nL = put(np.where(free_nL, self.mask_id, plan.given_nL), self.mask_id)
        self.free_nL, self.block_nL, self.row_n = put(free_nL, False), put(block_nL, 0), put(plan.rows_n, 0)
        self.draw_nL = torch.zeros_like(self.token_nL)
        self.call_nL = torch.full_like(self.token_nL, -1)  # the call that wrote a position last, among all C
        self.sure_nL = torch.full_like(self.token_nL, -torch.inf, dtype=self.exact)  # of tokens in place; -inf at masks
        # Of remasking rules: what the next call writes, what is masked again in the same step, and what was masked
        # again since the last event of the row.
        self.due_nL, self.forget_nL, self.again_nL = (torch.zeros_like(self.free_nL) for _ in range(3))
        self.turn_nL = torch.zeros_like(self.token_nL)  # of rules with sets: calls until a position is written
        self.truth_nL = None if truth_nL is None else put(truth_nL.astype(np.int64), 0)  # what is written, if known
        self.nats_n = torch.zeros(n + 1, dtype=self.exact, device=self.device)  # of what was written, with `truth`

        # On the host.
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
        self.made: list[np.ndarray] = []  # of each call (4, R): model, positions asked for, time, step
        self.calls = self.padded_calls = 0  # C, and empty places
        if rule.counts is not None:
            self.count_nT = counts_of(rule, plan.given_nL, self.steps)
            per_block = self.steps // blocks
            ends_nT = self.count_nT.cumsum(axis=1)
            block_end_nT = ends_nT[:, (np.arange(self.steps) // per_block + 1) * per_block - 1]
            self.open_nT = block_end_nT - ends_nT + self.count_nT  # masked positions of the step's block, before it
        self._settle(np.arange(n))

    def step(self) -> bool:
        """Make the next call; False if nothing was left to do."""
        if (made := next_call(self, self._look, torch.cuda.empty_cache)) is None:
            return False
        call, look = made
        self._write(call, look)
        if self.options.callback is not None:
            for event in self._reported(call, look):
                self.options.callback(event)
        self._advance(call)
        if self.options.on_calls is not None:
            masked_n, free_n = self.states.masked_n, self.states.free_n
            done = (free_n - masked_n).sum() if self.rule.adaptive else self.at_n.sum()
            self.options.on_calls(int(done), int(free_n.sum()) if self.rule.adaptive else self.steps * self.plan.n)
        return True

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
        if self.rule.rates is not None:
            self._decide(rows_R)
        elif self.rule.counts is not None:
            # The next step with something to write; the count beyond the last step stands for the end.
            ahead_RT = (self.count_nT[rows_R] > 0) & (np.arange(self.steps) >= self.at_n[rows_R, None])
            self.at_n[rows_R] = np.where(ahead_RT.any(axis=1), ahead_RT.argmax(axis=1), self.steps)
            rows_R = self._unfinished(rows_R)
            self.asked_n[rows_R] = self.open_nT[rows_R, self.at_n[rows_R]]
        if self.rule.counts is not None or self.rule.own_order:
            grain = -(-self.widest // 8)  # eight shapes, by what the row itself has open
            self.places_n[rows_R] = np.minimum(-(-self.asked_n[rows_R] // grain) * grain, self.widest)
        rows_R = self._unfinished(rows_R)
        step_R, t_R = self.steps - self.at_n[rows_R] if self.steps else 0 * rows_R, self._times(rows_R)
        if self.lookup is not None:
            self.model_n[rows_R] = self.lookup(step_R, t_R)
        else:
            each = zip(rows_R.tolist(), step_R.tolist(), t_R.tolist(), strict=True)
            self.model_n[rows_R] = [self.states.choose(row, step, t) for row, step, t in each]

    def _decide(self, rows_R: np.ndarray) -> None:
        """Remasking rules: go on by chance alone to the next step that writes something."""
        assert self.rule.rates is not None
        while len(rows_R := self._unfinished(rows_R)):
            at = torch.from_numpy(rows_R).to(self.device)
            k_R = self.at_n[rows_R]
            t_R1, s_R1 = (torch.from_numpy(self.time_T[k]).to(self.device, self.exact)[:, None] for k in (k_R, k_R + 1))
            token_RL, free_RL, sure_RL = self.token_nL[at], self.free_nL[at], self.sure_nL[at]
            masked_RL, draw_R = token_RL == self.mask_id, torch.from_numpy(k_R + 1).to(self.device)
            u_RL = uniforms_at(self.plan.seed, self.row_n[at], self.plan.length, draw_R)
            rates = self.rule.rates(t_R1, s_R1, sure_RL, *self.rule.numbers)
            due_RL, again_RL = remask(rates, masked_RL & free_RL, ~masked_RL & free_RL, u_RL)
            usual_R = expected_writes(rates, free_RL)
            facts = [due_RL.sum(dim=1), masked_RL.sum(dim=1), usual_R + 5 * usual_R.sqrt() + 1]
            due_R, masked_R, most_R = self._to_host(facts)
            self.asked_n[rows_R], self.states.masked_n[rows_R] = due_R.astype(np.int64), masked_R.astype(np.int64)
            places_R = np.exp2(np.ceil(np.log2(np.maximum(due_R, most_R)))).astype(np.int64)
            self.places_n[rows_R] = np.minimum(places_R, self.plan.length)
            # The network sees the row as it is before the step; where it is not asked, the step is over at once.
            self.due_nL[at], self.forget_nL[at] = due_RL, again_RL
            self.again_nL[at] |= again_RL
            idle_R = due_R == 0
            now_RL = again_RL & torch.from_numpy(idle_R).to(self.device)[:, None]
            self.token_nL[at] = token_RL.masked_fill(now_RL, self.mask_id)
            self.sure_nL[at] = sure_RL.masked_fill(now_RL, -torch.inf)
            rows_R = rows_R[idle_R]
            self.at_n[rows_R] += 1

    def take(self) -> _Call | None:
        """The next batch: of two batches' worth of unfinished rows, those that want what the one furthest behind
        wants."""
        pool = self._unfinished(np.arange(self.plan.n))[: 2 * self.batch]
        if not len(pool):
            return None
        left = self.states.masked_n[pool] if self.rule.adaptive else self.steps - self.at_n[pool]
        kind = self.model_n[pool] * (self.plan.length + 1) + self.places_n[pool]
        wanted = kind == kind[left.argmax()]
        ready = pool[wanted][np.argsort(-left[wanted], kind="stable")[: self.batch]]
        model, places = int(self.model_n[ready[0]]), int(self.places_n[ready[0]])
        return _Call(model, places, ready, self.asked_n[ready], self._times(ready))

    def resize(self, batch: int) -> None:
        """Make calls of so many rows from here on."""
        self.batch = batch

    def _advance(self, call: _Call) -> None:
        model_R = np.full(len(call.rows_R), call.model)
        self.made.append(np.stack([model_R, call.asked_R, call.t_R, self.at_n[call.rows_R]]))
        self.calls += len(call.rows_R)
        self.padded_calls += self.batch - len(call.rows_R)
        self.at_n[call.rows_R] += 1
        self._settle(call.rows_R)

    def _to_host(self, facts: list[Tensor]) -> np.ndarray:
        """Numbers for each row, in one transfer."""
        return torch.stack([fact.to(self.exact) for fact in facts]).cpu().numpy()

    # -------------------------------------------------------------------------------- a call

    def _look(self, call: _Call) -> _Look:
        """Make a call and let the rule choose. Nothing is written yet."""
        real = slice(len(call.rows_R))
        rows, count, t = np.full(self.batch, SCRATCH), np.zeros(self.batch, dtype=np.int64), np.ones(self.batch)
        rows[real], t[real] = call.rows_R, call.t_R
        if self.rule.counts is not None:
            count[real] = self.count_nT[call.rows_R, self.at_n[call.rows_R]]
        rows_B, count_B = (torch.from_numpy(x).to(self.device) for x in (rows, count))
        t_B = torch.from_numpy(t).to(self.device, self.exact)
        token_BL = self.token_nL[rows_B]
        open_BL = self.due_nL[rows_B] if self.rule.rates is not None else self._open(rows_B)
        place_BK = open_BL.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : call.places]
        open_BK = open_BL.gather(1, place_BK)
        drawn_BK, sure_BK, logprob_BK = self._draw(call.model, rows_B, token_BL, t_B, place_BK)
        turn_BL = None
        if self.rule.spaced:
            turn_BL = self._turns(rows_B, sure_BK, open_BK, place_BK)
            chosen_BK = turn_BL.gather(1, place_BK) == 1
        elif self.rule.which is not None:
            chosen_BK = self.rule.which(sure_BK, open_BK, self.rule.numbers[0])
        elif self.rule.counts is not None:
            chosen_BK = most_sure(sure_BK, open_BK, count_B)
        else:
            chosen_BK = open_BK
        return _Look(rows_B, open_BL, turn_BL, place_BK, chosen_BK, drawn_BK, sure_BK, logprob_BK)

    def _turns(self, rows_B: Tensor, sure_BK: Tensor, open_BK: Tensor, place_BK: Tensor) -> Tensor:
        """In how many calls each position is written, (B, L): as was settled earlier, or by this call's entropies."""
        turn_BL = self.turn_nL[rows_B]
        looks_B1 = ~(turn_BL > 0).any(dim=1, keepdim=True)
        score_BK = (place_BK.shape[1] - rank(sure_BK, open_BK)).float().masked_fill(~(open_BK & looks_B1), 0.0)
        score_BL = torch.zeros(turn_BL.shape, device=self.device).scatter(1, place_BK, score_BK)
        distance, sets = map(int, self.rule.numbers)
        return torch.where(looks_B1, spaced_sets(score_BL, distance, sets), turn_BL)

    def _open(self, rows_B: Tensor) -> Tensor:
        """Positions whose logits are wanted: of the set whose turn it is, else masked ones, of the first block that has
        any."""
        masked_BL = (self.token_nL[rows_B] == self.mask_id) & self.free_nL[rows_B]
        if self.rule.spaced:
            turn_BL = self.turn_nL[rows_B]
            return torch.where((turn_BL > 0).any(dim=1, keepdim=True), turn_BL == 1, masked_BL)
        if self.rule.block is None:
            return masked_BL
        block_BL = self.block_nL[rows_B]
        beyond = self.plan.length + 1
        return masked_BL & (block_BL == block_BL.masked_fill(~masked_BL, beyond).amin(dim=1, keepdim=True))

    def _draw(
        self, model_index: int, rows_B: Tensor, token_BL: Tensor, t_B: Tensor, place_BK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token at each place, how sure the rule is of it, and its log-probability."""
        model = at_rows(self.models[self.names[model_index]], rows_B)
        features, head = features_at(model, token_BL, t_B, place_BK)
        draw_N, position_N = self.draw_nL[rows_B].gather(1, place_BK).view(-1), place_BK.reshape(-1)
        row_N, t_N = (x_B.repeat_interleave(place_BK.shape[1]) for x_B in (self.row_n[rows_B], t_B))
        if self.truth_nL is not None:
            truth_N = self.truth_nL[rows_B].gather(1, place_BK).view(-1)
        size = int(getattr(model, "vocab_size", features.shape[-1]))
        drawn, sure, logprob = [], [], []
        for part in torch.split(torch.arange(len(draw_N), device=self.device), max(1, CELLS // size)):
            logits_NV = features[part] if head is None else head(features[part], t_N[part])
            token_N, lawful_NV = self.drawer(logits_NV, row_N[part], position_N[part], draw_N[part])
            token_N = token_N if self.truth_nL is None else truth_N[part]
            kind = torch.promote_types(lawful_NV.dtype, self.least)
            log_p_NV = lawful_NV.to(kind).log_softmax(dim=-1)
            own_NV = logits_NV.to(kind).log_softmax(dim=-1) if self.options.law.changes else log_p_NV
            logprob.append(log_p_NV.gather(1, token_N[:, None])[:, 0].to(self.exact))
            certain_N = logprob[-1].exp() if self.rule.sure is None else self.rule.sure(log_p_NV, own_NV, token_N)
            sure.append(certain_N.to(self.exact))
            drawn.append(token_N)
        drawn_BK, sure_BK, logprob_BK = (torch.cat(parts).view(place_BK.shape) for parts in (drawn, sure, logprob))
        return drawn_BK, sure_BK, logprob_BK

    def _write(self, call: _Call, look: _Look) -> None:
        """Write what was chosen, and tell the host what it needs to go on."""
        rows_B, place_BK = look.rows_B, look.place_BK
        number_B1 = torch.arange(self.calls, self.calls + len(rows_B), device=self.device)[:, None]
        for into_nL, values_BK in (
            (self.token_nL, look.drawn_BK),
            (self.call_nL, number_B1.expand_as(place_BK)),
            (self.sure_nL, look.sure_BK),
        ):
            old_BL = into_nL[rows_B]
            new_BK = torch.where(look.chosen_BK, values_BK.to(old_BL.dtype), old_BL.gather(1, place_BK))
            into_nL[rows_B] = old_BL.scatter(1, place_BK, new_BK)
        if look.turn_BL is not None:
            self.turn_nL[rows_B] = (look.turn_BL - 1).clamp_min(0)
        if self.truth_nL is not None:
            self.nats_n[rows_B] -= torch.where(look.chosen_BK, look.logprob_BK, 0.0).sum(dim=1)
        if not self.rule.own_order:  # draws that were not kept decided nothing there, so the first draw is as good
            self.draw_nL[rows_B] += look.open_BL
        if self.rule.rates is not None:
            forget_BL = self.forget_nL[rows_B]
            self.token_nL[rows_B] = self.token_nL[rows_B].masked_fill(forget_BL, self.mask_id)
            self.sure_nL[rows_B] = self.sure_nL[rows_B].masked_fill(forget_BL, -torch.inf)
        if self.rule.adaptive or self.lookup is None:
            self._record(call, look)

    def _record(self, call: _Call, look: _Look) -> None:
        """Masked and open positions of the call's rows, and how likely the tokens were."""
        masked_BL = (self.token_nL[look.rows_B] == self.mask_id) & self.free_nL[look.rows_B]
        logprob_BK = torch.where(look.chosen_BK, look.logprob_BK, 0.0)
        mean_B = logprob_BK.sum(dim=1) / look.chosen_BK.sum(dim=1).clamp_min(1)
        facts = [masked_BL.sum(dim=1), self._open(look.rows_B).sum(dim=1), mean_B, logprob_BK.amin(dim=1)]
        found = self._to_host(facts)[:, : len(call.rows_R)]
        self.states.masked_n[call.rows_R] = found[0].astype(np.int64)
        if self.rule.adaptive:
            self.asked_n[call.rows_R] = found[1].astype(np.int64)
        if self.lookup is None:
            self.states.record(call.rows_R, call.model, [(float(mean), float(least)) for mean, least in found[2:].T])

    # -------------------------------------------------------------------------------- results

    def _reported(self, call: _Call, look: _Look) -> Iterator[Event]:
        """One event for each row of a call; what was masked again since the last one is in it, as a mask."""
        written_BL = torch.zeros_like(look.open_BL).scatter(1, look.place_BK, look.chosen_BK)
        rows = torch.from_numpy(call.rows_R).to(self.device)
        changed_RL = (written_BL[: len(rows)] | self.again_nL[rows]).cpu().numpy()
        tokens_RL = self.token_nL[rows].cpu().numpy()
        logprob_BL = torch.zeros_like(self.sure_nL[look.rows_B]).scatter(1, look.place_BK, look.logprob_BK)
        logprob_RL = logprob_BL[: len(rows)].cpu().numpy()
        self.again_nL[rows] = False
        for j, row in enumerate(call.rows_R.tolist()):
            changed = np.flatnonzero(changed_RL[j])
            step, tokens = self.steps - int(self.at_n[row]) if self.steps else 0, tokens_RL[j, changed].tolist()
            logprobs = logprob_RL[j, changed].tolist()
            yield Event(row, step, float(call.t_R[j]), self.names[call.model], changed.tolist(), tokens, logprobs)

    def samples(self, began: float) -> Samples:
        """What came out, once nothing is left to do; `began` by time.perf_counter()."""
        self.drawer.check()
        tokens_nL, call_nL = (x[:-1].cpu().numpy() for x in (self.token_nL, self.call_nL))
        assert not (tokens_nL == self.mask_id).any(), "a masked position was left"
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
