r"""Decoding rules at work: a plan, a family, a policy and a rule in; samples out.

A planned rule is handed to the event queue of `sampler`. Confidence and remasking rules go through the loop here, which
keeps its habits: each row goes at its own pace and calls a network only at steps that write something; rows that want
the same model and the same number of places run together in batches of fixed shape; the head runs at open places alone
(where a rule looks at all masked positions, at all of those, and they are charged); nothing about a row depends on its
mates. The i-th token drawn at a position has draw index i - 1, whatever became of the earlier ones, and a remasking
rule's chance at the k-th step (k = 0, 1, ...) the draw index k + 1 of the plan's generator.

Rules that find their own number of steps go by time: a row with a share t of its free positions masked is at time t.

Shapes: n rows in all, B in a call, R of them real, L positions, K places of a row, N = B K, V vocabulary, T steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm import cost as costs
from relaylm.decoding import Rule, blocks_of, counts_of, expected_writes, most_sure, planned, remask, uniforms_at
from relaylm.diffusion import LINEAR, Alpha
from relaylm.engine import Law, settings
from relaylm.errors import UserError
from relaylm.plan import Plan, race
from relaylm.sampler import Event, Samples, Trace, _depths, _named, _resolve, denoise
from relaylm.schedule import Policy, RowState, Schedule, Timetable

CELLS = 1 << 26  # logits made at once, at most; a larger call's head goes over its places in slices


def decode(
    models: Mapping[str, Any],
    policy: Policy | Schedule,
    plan: Plan,
    rule: Rule,
    *,
    mask_id: int,
    steps: float | None = None,
    alpha: Alpha = LINEAR,
    law: Law | None = None,
    greedy: bool = False,
    batch_size: int | None = None,
    heavy: str | None = None,
    device: torch.device | str = "cpu",
    callback: Callable[[Event], None] | None = None,
    on_calls: Callable[[int, int], None] | None = None,
) -> Samples:
    """`sampler.denoise` under a decoding rule. `greedy` takes the likeliest token everywhere (temperature 0). The trace
    tells of the step and the model that wrote a position last; a rule that finds its own number of steps counts each
    row's down to 1, and `steps` is then the longest row's."""
    if alpha != LINEAR:
        raise UserError("decoding rules are defined for the linear noise schedule: leave alpha out")
    names = tuple(models)
    law = law or Law()
    walk, times = resolve(policy, rule, steps)
    if getattr(policy, "wants_logits", False) and not rule.planned:
        raise UserError("a policy that wants logits does not go with a rule that looks at logits itself")
    if rule.planned:
        assert times is not None
        samples = denoise(
            models,
            walk,
            planned(rule, plan, times),
            mask_id=mask_id,
            steps=len(times) - 1,
            law=replace(law, top_k=1) if greedy else law,
            batch_size=batch_size,
            heavy=heavy,
            device=device,
            callback=callback,
            on_calls=on_calls,
        )
        return replace(samples, schedule=_named(policy), changes_law=_changes(law, greedy))
    _check(models, plan, mask_id, heavy)
    unknown = [name for name in getattr(walk, "models", ()) if name not in names]
    if unknown:
        raise UserError(f"the schedule asks for model {unknown[0]!r}; the models are {', '.join(names)}")
    began = time.perf_counter()
    rows = _Rows(models, walk, plan, rule, times, mask_id, law, greedy, batch_size or plan.n, device)
    with settings(device):
        rows.settle(np.arange(plan.n))
        while (call := rows.take()) is not None:
            try:
                look = rows.look(call)
            except torch.OutOfMemoryError:
                if rows.batch == 1:
                    raise
                rows.batch //= 2  # nothing was written by the call that failed
                torch.cuda.empty_cache()
                continue
            written = rows.write(call, look)
            if callback is not None:
                for event in rows.told(call, written):
                    callback(event)
            rows.advance(call)
            if on_calls is not None:
                on_calls(*rows.progress())
    return rows.samples(policy, heavy or names[-1], began)


def resolve(policy: Policy | Schedule, rule: Rule, steps: float | None) -> tuple[Policy, tuple[float, ...] | None]:
    """What to follow and its grid of times, None if the rule finds its own steps. Refuses what does not go together."""
    if not rule.adaptive:
        if steps is not None and math.isinf(steps):
            raise UserError(f"{rule.name} needs a finite number of steps")
        timed = isinstance(policy, Schedule) and any(segment.time is not None for segment in policy.segments)
        if timed and rule.rates is None and rule.name != "ancestral":
            raise UserError(
                f"{rule.name} has its own step grid: a schedule with shares of time (@) does not go with it"
            )
        return _resolve(policy, steps)
    own = f"{rule.name} finds its own number of steps"
    if steps is not None:
        raise UserError(f"{own}: leave out the number of steps")
    if isinstance(policy, Timetable):
        raise UserError(f"{own}: a timetable does not go with it")
    if isinstance(policy, Schedule):
        if policy.steps is not None:
            raise UserError(f"{own}: write the schedule in shares (L50% H50%), not in counts ({policy})")
        _ = policy.ends  # there are none where single steps are placed, which is refused
    return policy, None


def _changes(law: Law, greedy: bool) -> tuple[str, ...]:
    return (*law.changes, *(["temperature=0"] if greedy else []))


def _check(models: Mapping[str, Any], plan: Plan, mask_id: int, heavy: str | None) -> None:
    if heavy is not None and heavy not in models:
        raise UserError(f"there is no model {heavy!r} to count savings against; the models are {', '.join(models)}")
    if (plan.given_nL == mask_id).any():
        raise UserError(f"the mask ({mask_id}) cannot be given as a token: write -1 where a position is free")
    for name, model in models.items():
        if (size := getattr(model, "vocab_size", None)) is not None and plan.given_nL.max() >= size:
            raise UserError(f"token {plan.given_nL.max()} is given, but {name} knows ids 0 to {size - 1} only")


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
    """What a call gave, and what the rule chose of it."""

    rows_B: Tensor
    t_B: Tensor
    open_BL: Tensor  # positions that were asked for
    place_BK: Tensor  # where the K places are, open ones first
    chosen_BK: Tensor
    drawn_BK: Tensor  # tokens
    sure_BK: Tensor
    logprob_BK: Tensor


class _Rows:
    """Rows on their way: tokens and trace on the device, what the choice of the next batch needs on the host."""

    def __init__(
        self,
        models: Mapping[str, Any],
        policy: Policy | Schedule,
        plan: Plan,
        rule: Rule,
        times: tuple[float, ...] | None,
        mask_id: int,
        law: Law,
        greedy: bool,
        batch: int,
        device: torch.device | str,
    ) -> None:
        if batch < 1:
            raise UserError(f"the batch size must be at least 1, not {batch}")
        self.models, self.policy, self.plan, self.rule = models, policy, plan, rule
        self.mask_id, self.law, self.greedy, self.batch = mask_id, law, greedy, batch
        self.names, self.device = tuple(models), torch.device(device)
        self.exact = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        # Log-probabilities, of all tokens at all open places, are at least in this: elsewhere float64 takes longer than
        # the blocks, whose rounding hides what it adds.
        self.least = torch.float64 if self.device.type == "cpu" else torch.float32
        n, length = plan.n, plan.length
        free_nL = plan.given_nL < 0
        block_nL, blocks = blocks_of(rule, plan.given_nL)

        # On the device, with a scratch row at the end for the empty places of a batch.
        def put(array: np.ndarray, scratch: Any) -> Tensor:
            return torch.from_numpy(np.concatenate([array, np.full((1, *array.shape[1:]), scratch)])).to(self.device)

        self.token_nL = put(np.where(free_nL, mask_id, plan.given_nL), mask_id)
        self.free_nL = put(free_nL, False)
        self.block_nL = put(block_nL, 0)
        self.row_n = put(plan.rows_n, 0)
        self.draw_nL = torch.zeros_like(self.token_nL)
        self.step_nL = torch.zeros_like(self.token_nL)  # the call that wrote a position last, from 1 up
        self.model_nL = torch.full_like(self.token_nL, -1)
        self.time_nL = torch.zeros(n + 1, length, dtype=self.exact, device=self.device)
        self.sure_nL = torch.full_like(self.time_nL, -torch.inf)  # of tokens that stand; for ReMDM-conf
        self.due_nL = torch.zeros_like(self.free_nL)  # what a remasking rule has decided to write
        self.forget_nL = torch.zeros_like(self.free_nL)  # and, in the same step, to mask again
        self.again_nL = torch.zeros_like(self.free_nL)  # masked again since a callback last heard of the row
        self.broken = torch.zeros((), dtype=torch.bool, device=self.device)

        # On the host.
        self.widest = min(length, rule.block or length)
        self.free_n = free_nL.sum(axis=1)
        self.masked_n = self.free_n.copy()
        self.steps = 0 if times is None else len(times) - 1
        self.time_T = np.array([1.0] if times is None else times)
        self.at_n = np.zeros(n, dtype=np.int64)  # each row's next step, from the masked end
        self.asked_n = (free_nL & (block_nL == 0)).sum(axis=1)  # positions whose logits its next call is to give
        self.places_n = np.full(n, self.widest)  # adaptive rules keep to one shape, or their batches would fall apart
        self.next_n = np.zeros(n, dtype=np.int64)  # the model its next call goes to
        self.waits_n = np.ones(n, dtype=bool)
        self.calls_n = np.zeros(n, dtype=np.int64)
        self.last: dict[int, tuple[str, float, float]] = {}
        self.spent: Counter[tuple[int, int]] = Counter()  # (model, positions asked for) of row-calls made
        self.network_calls = self.padded = 0
        self.dynamic = not isinstance(policy, (Schedule, Timetable))
        if rule.counts is not None:
            self.count_nT = counts_of(rule, plan.given_nL, self.steps)
            per_block = self.steps // blocks
            ends_nT = self.count_nT.cumsum(axis=1)
            block_end_nT = ends_nT[:, (np.arange(self.steps) // per_block + 1) * per_block - 1]
            self.open_nT = block_end_nT - ends_nT + self.count_nT  # masked positions of the step's block, before it
        if isinstance(policy, Timetable):
            self.by_step_T = np.array([self.names.index(name) for name in policy.models])

    # -------------------------------------------------------------------------------- where each row goes next

    def settle(self, rows_R: np.ndarray) -> None:
        """Bring rows to their next call: skip the steps that write nothing, settle the model and the places."""
        if self.rule.rates is not None:
            self._decide(rows_R)
        elif self.rule.counts is not None:
            # The next step with something to write; the count beyond the last step stands for the end.
            ahead_RT = (self.count_nT[rows_R] > 0) & (np.arange(self.steps) >= self.at_n[rows_R, None])
            self.at_n[rows_R] = np.where(ahead_RT.any(axis=1), ahead_RT.argmax(axis=1), self.steps)
            rows_R = rows_R[self.at_n[rows_R] < self.steps]
            self.asked_n[rows_R] = self.open_nT[rows_R, self.at_n[rows_R]]
            grain = -(-self.widest // 8)  # eight shapes, by what the row itself has open
            self.places_n[rows_R] = np.minimum(-(-self.asked_n[rows_R] // grain) * grain, self.widest)
        alive_R = self.masked_n[rows_R] > 0 if self.rule.adaptive else self.at_n[rows_R] < self.steps
        rows_R = rows_R[alive_R]
        if isinstance(self.policy, Timetable):
            self.next_n[rows_R] = self.by_step_T[self.at_n[rows_R]]
        elif isinstance(self.policy, Schedule):
            # From the masked end, segment j owns the times in (ends[j], ends[j-1]].
            owner_R = np.searchsorted(-np.asarray(self.policy.ends), -self._times(rows_R), side="right")
            order = np.array([self.names.index(segment.model) for segment in self.policy.segments])
            self.next_n[rows_R] = order[owner_R]
        else:
            self.next_n[rows_R] = [self._choose(int(row)) for row in rows_R]
        self.waits_n &= self.masked_n > 0 if self.rule.adaptive else self.at_n < self.steps

    def _times(self, rows_R: np.ndarray) -> np.ndarray:
        """The time before each row's next step."""
        return self.time_T[self.at_n[rows_R]] if self.steps else self.masked_n[rows_R] / self.free_n[rows_R]

    def _decide(self, rows_R: np.ndarray) -> None:
        """Remasking rules: go on by chance alone to the next step that writes something."""
        assert self.rule.rates is not None
        while len(rows_R := rows_R[self.at_n[rows_R] < self.steps]):
            at = torch.from_numpy(rows_R).to(self.device)
            k_R = self.at_n[rows_R]
            t_R1, s_R1 = (torch.from_numpy(self.time_T[k]).to(self.device, self.exact)[:, None] for k in (k_R, k_R + 1))
            token_RL, free_RL, sure_RL = self.token_nL[at], self.free_nL[at], self.sure_nL[at]
            masked_RL = token_RL == self.mask_id
            u_RL = uniforms_at(
                self.plan.seed, self.row_n[at], self.plan.length, torch.from_numpy(k_R + 1).to(at.device)
            )
            rates = self.rule.rates(t_R1, s_R1, sure_RL, *self.rule.numbers)
            due_RL, again_RL = remask(rates, masked_RL & free_RL, ~masked_RL & free_RL, u_RL)
            usual_R = expected_writes(rates, free_RL)
            facts = [due_RL.sum(dim=1), masked_RL.sum(dim=1), usual_R + 5 * usual_R.sqrt() + 1]
            found = torch.stack([fact.to(self.exact) for fact in facts]).cpu().numpy()
            self.asked_n[rows_R], self.masked_n[rows_R] = found[:2].astype(np.int64)
            # The network sees the row as it is before the step; where it is not asked, the step is over at once.
            self.due_nL[at], self.forget_nL[at] = due_RL, again_RL
            self.again_nL[at] |= again_RL
            now_RL = again_RL & torch.from_numpy(found[0] == 0).to(self.device)[:, None]
            self.token_nL[at] = token_RL.masked_fill(now_RL, self.mask_id)
            self.sure_nL[at] = sure_RL.masked_fill(now_RL, -torch.inf)
            room_R = np.exp2(np.ceil(np.log2(np.maximum(found[0], found[2])))).astype(np.int64)
            self.places_n[rows_R] = np.minimum(room_R, self.plan.length)
            idle_R = found[0] == 0
            self.at_n[rows_R[idle_R]] += 1
            rows_R = rows_R[idle_R]

    def _choose(self, row: int) -> int:
        model, mean, least = self.last.get(row, (None, None, None))
        name = self.policy(
            RowState(
                step=self.steps - int(self.at_n[row]) if self.steps else 0,
                steps=self.steps,
                t=float(self._times(np.array([row]))[0]),
                masked=int(self.masked_n[row]),
                length=self.plan.length,
                free=int(self.free_n[row]),
                calls=int(self.calls_n[row]),
                model=model,
                mean_logprob=mean,
                min_logprob=least,
            )
        )
        if name not in self.names:
            raise UserError(f"the policy asked for model {name!r}; the models are {', '.join(self.names)}")
        return self.names.index(name)

    def take(self) -> _Call | None:
        """The next batch: of two batches' worth of waiting rows, those that want what the one furthest behind wants."""
        pool = np.flatnonzero(self.waits_n)[: 2 * self.batch]
        if not len(pool):
            return None
        left = self.masked_n[pool] if self.rule.adaptive else self.steps - self.at_n[pool]
        key = self.next_n[pool] * (self.plan.length + 1) + self.places_n[pool]
        group = key[left.argmax()]
        ready, left = pool[key == group], left[key == group]
        ready = ready[np.argsort(-left, kind="stable")[: self.batch]]
        model, places = int(self.next_n[ready[0]]), int(self.places_n[ready[0]])
        return _Call(model, places, ready, self.asked_n[ready], self._times(ready))

    # -------------------------------------------------------------------------------- a call

    def look(self, call: _Call) -> _Look:
        """Make a call and let the rule choose. Nothing is written yet."""
        rows, count, t = np.full(self.batch, self.plan.n), np.zeros(self.batch, dtype=np.int64), np.ones(self.batch)
        real = slice(len(call.rows_R))
        rows[real], t[real] = call.rows_R, call.t_R
        if self.rule.counts is not None:
            count[real] = self.count_nT[call.rows_R, self.at_n[call.rows_R]]
        rows_B, count_B = (torch.from_numpy(x).to(self.device) for x in (rows, count))
        t_B = torch.from_numpy(t).to(self.device, self.exact)

        token_BL = self.token_nL[rows_B]
        open_BL = self.due_nL[rows_B] if self.rule.rates is not None else self._open(rows_B, token_BL)
        place_BK = open_BL.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : call.places]
        open_BK = open_BL.gather(1, place_BK)
        drawn_BK, sure_BK, logprob_BK = self._draw(call, rows_B, token_BL, t_B, place_BK)
        if self.rule.which is not None:
            chosen_BK = self.rule.which(sure_BK, open_BK, self.rule.numbers[0])
        elif self.rule.counts is not None:
            chosen_BK = most_sure(sure_BK, open_BK, count_B)
        else:
            chosen_BK = open_BK
        return _Look(rows_B, t_B, open_BL, place_BK, chosen_BK, drawn_BK, sure_BK, logprob_BK)

    def _open(self, rows_B: Tensor, token_BL: Tensor) -> Tensor:
        """Masked positions of each row's first block that has any."""
        masked_BL = (token_BL == self.mask_id) & self.free_nL[rows_B]
        if self.rule.block is None:
            return masked_BL
        block_BL = self.block_nL[rows_B]
        beyond = self.plan.length + 1
        return masked_BL & (block_BL == block_BL.masked_fill(~masked_BL, beyond).amin(dim=1, keepdim=True))

    def _draw(
        self, call: _Call, rows_B: Tensor, token_BL: Tensor, t_B: Tensor, place_BK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token at each place, how sure the rule is of it, and its log-probability."""
        model, k = self.models[self.names[call.model]], call.places
        has_head = hasattr(model, "hidden_at")
        features = (model.hidden_at if has_head else model.logits_at)(token_BL, t_B, place_BK).flatten(0, 1)
        draw_N = self.draw_nL[rows_B].gather(1, place_BK).view(-1)
        position_N, row_N = place_BK.reshape(-1), self.row_n[rows_B][:, None].expand(-1, k).reshape(-1)
        t_N = t_B[:, None].expand(-1, k).reshape(-1)
        size = getattr(model, "vocab_size", features.shape[-1])
        drawn, sure, logprob = [], [], []
        for part in torch.arange(len(draw_N), device=self.device).split(max(1, CELLS // int(size))):
            logits_NV = model.head(features[part], t_N[part]) if has_head else features[part]
            lawful_NV = self.law.apply(logits_NV, self.mask_id)
            self.broken |= ~torch.isfinite(lawful_NV.amax(dim=-1)).all()
            if self.greedy:
                token_N = lawful_NV.argmax(dim=-1)
            else:
                token_N = race(lawful_NV, self.plan.seed, row_N[part], position_N[part], draw_N[part])
            token_N = token_N.clamp_max(lawful_NV.shape[-1] - 1)  # a race among NaNs has no winner
            kind = torch.promote_types(lawful_NV.dtype, self.least)
            log_p_NV = lawful_NV.to(kind).log_softmax(dim=-1)
            own_NV = log_p_NV if not self.law.changes else logits_NV.to(kind).log_softmax(dim=-1)
            logprob.append(log_p_NV.gather(1, token_N[:, None])[:, 0].to(self.exact))
            certain_N = logprob[-1].exp() if self.rule.sure is None else self.rule.sure(log_p_NV, own_NV, token_N)
            sure.append(certain_N.to(self.exact))
            drawn.append(token_N)
        return tuple(torch.cat(parts).view(place_BK.shape) for parts in (drawn, sure, logprob))  # type: ignore[return-value]

    def write(self, call: _Call, look: _Look) -> Tensor:
        """Write what was chosen; which positions that was comes back."""
        rows_B, place_BK, chosen_BK = look.rows_B, look.place_BK, look.chosen_BK
        calls = np.zeros(len(rows_B), dtype=np.int64)  # a fixed number of steps is known by step, else by call
        calls[: len(call.rows_R)] = self.at_n[call.rows_R] + 1 if self.steps else self.calls_n[call.rows_R] + 1
        calls_B1 = torch.from_numpy(calls).to(self.device)[:, None]

        def put(into_nL: Tensor, values_BK: Tensor) -> None:
            old_BL = into_nL[rows_B]
            kept_BK = old_BL.gather(1, place_BK)
            into_nL[rows_B] = old_BL.scatter(1, place_BK, torch.where(chosen_BK, values_BK.to(kept_BK.dtype), kept_BK))

        put(self.token_nL, look.drawn_BK)
        put(self.step_nL, calls_B1.expand_as(place_BK))
        put(self.model_nL, torch.full_like(place_BK, call.model))
        put(self.time_nL, look.t_B[:, None].expand_as(look.sure_BK))
        put(self.sure_nL, look.sure_BK)
        self.draw_nL[rows_B] += look.open_BL
        if self.rule.rates is not None:
            forget_BL = self.forget_nL[rows_B]
            self.token_nL[rows_B] = self.token_nL[rows_B].masked_fill(forget_BL, self.mask_id)
            self.sure_nL[rows_B] = self.sure_nL[rows_B].masked_fill(forget_BL, -torch.inf)
        if self.rule.adaptive or self.dynamic:
            self._report(call, look)
        return torch.zeros_like(look.open_BL).scatter(1, place_BK, chosen_BK)

    def _report(self, call: _Call, look: _Look) -> None:
        """What the host must know before it can go on: masked and open positions, and how likely the tokens were."""
        rows_B, chosen_BK, logprob_BK = look.rows_B, look.chosen_BK, look.logprob_BK
        token_BL = self.token_nL[rows_B]
        masked_B = ((token_BL == self.mask_id) & self.free_nL[rows_B]).sum(dim=1)
        written_B = chosen_BK.sum(dim=1).clamp_min(1)
        mean_B = torch.where(chosen_BK, logprob_BK, 0.0).sum(dim=1) / written_B
        least_B = torch.where(chosen_BK, logprob_BK, 0.0).amin(dim=1)
        facts = [masked_B, self._open(rows_B, token_BL).sum(dim=1), mean_B, least_B]
        found = torch.stack([fact.to(self.exact) for fact in facts]).cpu().numpy()[:, : len(call.rows_R)]
        self.masked_n[call.rows_R] = found[0].astype(np.int64)
        if self.rule.adaptive:
            self.asked_n[call.rows_R] = found[1].astype(np.int64)
        if self.dynamic:
            name = self.names[call.model]
            for row, mean, least in zip(call.rows_R.tolist(), found[2], found[3], strict=True):
                self.last[row] = (name, float(mean), float(least))

    def advance(self, call: _Call) -> None:
        self.spent.update((call.model, int(asked)) for asked in call.asked_R)
        self.network_calls += 1
        self.padded += self.batch - len(call.rows_R)
        self.calls_n[call.rows_R] += 1
        self.at_n[call.rows_R] += 1
        if not self.rule.adaptive and not self.dynamic and self.rule.counts is not None:
            self.masked_n[call.rows_R] -= self.count_nT[call.rows_R, self.at_n[call.rows_R] - 1]
        self.settle(call.rows_R)

    # -------------------------------------------------------------------------------- what is told

    def told(self, call: _Call, written_BL: Tensor) -> list[Event]:
        """One event for each row of a call; what was masked again since the last one is in it, as a mask."""
        written = written_BL.cpu().numpy()
        rows = torch.from_numpy(call.rows_R).to(self.device)
        tokens, again = self.token_nL[rows].cpu().numpy(), self.again_nL[rows].cpu().numpy()
        self.again_nL[rows] = False
        events = []
        for j, row in enumerate(call.rows_R.tolist()):
            changed = np.flatnonzero(written[j] | again[j])
            step = self.steps - int(self.at_n[row]) if self.steps else 0
            t = float(call.t_R[j])
            events.append(Event(row, step, t, self.names[call.model], changed.tolist(), tokens[j, changed].tolist()))
        return events

    def progress(self) -> tuple[int, int]:
        """Steps done, or positions written where the steps are not known."""
        if self.rule.adaptive:
            return int((self.free_n - self.masked_n).sum()), int(self.free_n.sum())
        return int(self.at_n.sum()), self.steps * self.plan.n

    def samples(self, policy: Policy | Schedule, heavy: str, began: float) -> Samples:
        if bool(self.broken):
            raise UserError(
                "a model gave logits that are not finite: its weights are damaged or overflow this precision"
            )
        tokens, call_nL, model_nL, time_nL = (
            x[:-1].cpu().numpy() for x in (self.token_nL, self.step_nL, self.model_nL, self.time_nL)
        )
        assert not (tokens == self.mask_id).any(), "a masked position was left"
        steps = self.steps or int(self.calls_n.max())
        last_n = np.full(self.plan.n, self.steps) if self.steps else self.calls_n
        step_nL = np.where(call_nL > 0, last_n[:, None] + 1 - call_nL, 0).astype(np.int32)
        cost = self._cost(heavy)
        if isinstance(self.policy, Timetable) and (depths := _depths(self.models)):
            cost.blocks_saved = costs.blocks_saved(depths, self.policy.models, heavy)
        cost.seconds = time.perf_counter() - began
        changes = _changes(self.law, self.greedy)
        if not self.rule.exact:
            changes = (f"rule={self.rule}", *changes)
        trace = Trace(step_nL, time_nL.astype(np.float64), model_nL.astype(np.int16), self.names)
        return Samples(tokens, trace, cost, _named(policy), steps, self.plan.seed, changes_law=changes)

    def _cost(self, heavy: str) -> costs.Cost:
        """Charge every row-call: the trunk, and the logits at all positions that the rule asked for."""
        calls = dict.fromkeys(self.names, 0)
        for (model, _), times in self.spent.items():
            calls[self.names[model]] += times
        cost = costs.Cost(calls=calls, network_calls=self.network_calls, padded_calls=self.padded)
        cost.batch_size = self.batch
        known = all(hasattr(model, "flops") for model in self.models.values())
        cost.flops = cost.flops_all_heavy = 0.0 if known else None
        if known:
            length = self.plan.length
            each = [(self.names[model], asked, times) for (model, asked), times in sorted(self.spent.items())]
            cost.flops = float(sum(times * self.models[name].flops(length, asked) for name, asked, times in each))
            cost.flops_all_heavy = float(
                sum(times * self.models[heavy].flops(length, asked) for _, asked, times in each)
            )
        return cost
