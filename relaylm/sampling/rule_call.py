r"""The device's part of a call under a decoding rule: look, choose, write (`confidence` has the host's part).

`RuleState.call` is a function of fixed shape that never waits for the host, so on CUDA it is captured as a graph
(`graphs`); eagerly it is the same function. What the host must know afterwards is in one small tensor.

A remasking rule's chance at the k-th step (k = 0, 1, ...) has the draw index k + 1 of the plan's generator; the i-th
token drawn at a position has draw index i - 1, whatever became of the earlier ones.

Shapes: n rows in all, B in a call, L positions, K places of a row, N = B K, V vocabulary, T steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from relaylm.core.noise import split_seed
from relaylm.core.plan import Plan
from relaylm.kernels import may_stop
from relaylm.kernels.draw import philox
from relaylm.models.denoiser import features_at
from relaylm.sampling.engine import at_rows
from relaylm.sampling.law import Drawer, log_probability, widest_float
from relaylm.sampling.rules import Rule, most_sure, rank, remask, spaced_sets

CELLS, CELLS_CPU = 1 << 26, 1 << 21  # logits made at once, at most, on a device and (so that caches hold them) a CPU
ROUNDS = 64  # of rules with sets: more rounds than that for a set, and calls are not captured


class Wrote(NamedTuple):
    """What a call did to its rows, for reports: positions it wrote or that were masked again since the last report,
    the rows after it, and the log-probabilities of the written tokens (0 elsewhere)."""

    changed_BL: Tensor
    token_BL: Tensor
    logprob_BL: Tensor


class RuleState:
    """Rows under a rule on the device, with a scratch row at the end for the empty places of a batch.

    `asks`: the host wants to know what a call did; `reports`: the caller wants to see all of it."""

    def __init__(
        self,
        models: Sequence[Any],
        plan: Plan,
        rule: Rule,
        times: np.ndarray,
        block_nL: np.ndarray,
        drawer: Drawer,
        device: torch.device,
        asks: bool,
        reports: bool,
        truth_nL: np.ndarray | None = None,
    ) -> None:
        self.models, self.rule, self.seed, self.length = models, rule, plan.seed, plan.length
        self.device, self.drawer, self.mask_id, self.asks, self.reports = device, drawer, drawer.mask_id, asks, reports
        self.exact = widest_float(device)
        # Log-probabilities of draws are at least in this type: elsewhere float64 takes longer than the blocks, whose
        # rounding is larger than what it adds.
        self.least = torch.float64 if device.type == "cpu" else torch.float32
        self.drawn = (torch.int64, self.exact, self.exact)  # a token, how sure the rule is of it, its log-probability

        def put(array: np.ndarray, scratch: Any) -> Tensor:
            return torch.from_numpy(np.concatenate([array, np.full((1, *array.shape[1:]), scratch)])).to(device)

        free_nL = plan.given_nL < 0
        self.token_nL = put(np.where(free_nL, self.mask_id, plan.given_nL), self.mask_id)
        self.free_nL, self.block_nL, self.row_n = put(free_nL, False), put(block_nL, 0), put(plan.rows_n, 0)
        self.draw_nL = torch.zeros_like(self.token_nL)
        self.call_nL = torch.full_like(self.token_nL, -1)  # the call that wrote a position last, among all
        self.sure_nL = torch.full_like(self.token_nL, -torch.inf, dtype=self.exact)  # of tokens in place; -inf at masks
        # Of remasking rules: what the next call writes, what is masked again in the same step, and what was masked
        # again since the last report of the row.
        self.due_nL, self.forget_nL, self.again_nL = (torch.zeros_like(self.free_nL) for _ in range(3))
        self.turn_nL = torch.zeros_like(self.token_nL)  # of rules with sets: calls until a position is written
        self.truth_nL = None if truth_nL is None else put(truth_nL.astype(np.int64), 0)  # what is written, if known
        self.nats_n = torch.zeros(plan.n + 1, dtype=self.exact, device=device)  # of what was written, with `truth`
        self.most = -(-plan.length // int(rule.numbers[0])) if rule.spaced else plan.length  # positions a call writes
        self.steps = len(times) - 1
        self.time_T = torch.from_numpy(np.append(times, 0.0)).to(device, self.exact)  # a finished row is at k = T
        # Steps that a captured call looks ahead for one that writes something; few are needed where steps are few.
        self.tries = min(4, 1 + 8 * self.steps // self.length)

    @property
    def fixed(self) -> bool:
        """Does a call take the same work whatever it finds, so that it can be captured?"""
        return not self.rule.spaced or self.rule.numbers[1] * (self.length // self.rule.numbers[0] + 1) <= ROUNDS

    def call(self, model: int, places: int, index: Tensor, t_B: Tensor) -> tuple[Tensor | None, Wrote | None]:
        """One call for the rows that `index` names, with K places each: draw, choose, write.

        `index` holds, B numbers each: rows; of rules with counts how many to write, of remasking rules the next step;
        numbers of these calls. Returns, if the host asks, (4, B): positions left masked, open positions, mean and least
        log-probability of what was written; and of remasking rules what `decide` returns, below."""
        rows_B, count_B, number_B = index.view(3, -1)
        token_BL, open_BL = self.token_nL[rows_B], self._open(rows_B)
        place_BK = open_BL.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :places]
        open_BK = open_BL.gather(1, place_BK)
        asked = self._ask(at_rows(self.models[model], rows_B), rows_B, token_BL, t_B, place_BK)
        looks, turn_BL = self.looks(places), None
        if looks:
            sure_BK = self._sure(asked)
        else:
            drawn_BK, sure_BK, logprob_BK = self._draw(asked)
        if self.rule.spaced:
            turn_BL = self._turns(rows_B, sure_BK, open_BK, place_BK)
            chosen_BK = turn_BL.gather(1, place_BK) == 1
        elif self.rule.which is not None:
            chosen_BK = self.rule.which(sure_BK, open_BK, self.rule.numbers[0])
        elif self.rule.counts is not None:
            chosen_BK = most_sure(sure_BK, open_BK, count_B)
        else:
            chosen_BK = open_BK
        if looks:
            first_BJ = chosen_BK.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : self.most]
            drawn_BK, _, logprob_BK = self._draw(asked.at(first_BJ))
            place_BK, chosen_BK, sure_BK = (x_BK.gather(1, first_BJ) for x_BK in (place_BK, chosen_BK, sure_BK))
        logprob_BK = logprob_BK.masked_fill(~chosen_BK, 0.0)

        # From here on things are written.
        for into_nL, values_BK in (
            (self.token_nL, drawn_BK),
            (self.call_nL, number_B[:, None].expand_as(place_BK)),
            (self.sure_nL, sure_BK),
        ):
            old_BL = into_nL[rows_B]
            new_BK = torch.where(chosen_BK, values_BK.to(old_BL.dtype), old_BL.gather(1, place_BK))
            into_nL[rows_B] = old_BL.scatter(1, place_BK, new_BK)
        if turn_BL is not None:
            self.turn_nL[rows_B] = (turn_BL - 1).clamp_min(0)
        if self.truth_nL is not None:
            self.nats_n[rows_B] -= logprob_BK.sum(dim=1)
        if not self.rule.own_order:  # draws that were not kept decided nothing there, so the first draw is as good
            self.draw_nL[rows_B] += open_BL
        if self.rule.rates is not None:
            forget_BL = self.forget_nL[rows_B]
            self.token_nL[rows_B] = self.token_nL[rows_B].masked_fill(forget_BL, self.mask_id)
            self.sure_nL[rows_B] = self.sure_nL[rows_B].masked_fill(forget_BL, -torch.inf)
        return self._outcome(rows_B, count_B, place_BK, chosen_BK, logprob_BK)

    def _outcome(
        self, rows_B: Tensor, next_B: Tensor, place_BK: Tensor, chosen_BK: Tensor, logprob_BK: Tensor
    ) -> tuple[Tensor | None, Wrote | None]:
        """What `call` returns."""
        token_BL, wrote = self.token_nL[rows_B], None
        if self.reports:
            zero_BL = torch.zeros_like(self.sure_nL[rows_B])
            written_BL = torch.zeros_like(token_BL, dtype=torch.bool).scatter(1, place_BK, chosen_BK)
            changed_BL, logprob_BL = written_BL | self.again_nL[rows_B], zero_BL.scatter(1, place_BK, logprob_BK)
            wrote = Wrote(changed_BL, token_BL, logprob_BL)
            self.again_nL[rows_B] = torch.zeros_like(written_BL)
        if not self.asks:
            return None, wrote
        masked_B = ((token_BL == self.mask_id) & self.free_nL[rows_B]).sum(dim=1)
        mean_B = logprob_BK.sum(dim=1) / chosen_BK.sum(dim=1).clamp_min(1)
        facts = [masked_B, self._open(rows_B).sum(dim=1), mean_B, logprob_BK.amin(dim=1)]
        outcome = torch.stack([fact_B.to(self.exact) for fact_B in facts])
        if self.rule.rates is not None:
            outcome = torch.cat([outcome, self.decide(rows_B, next_B, self.tries)])
        return outcome, wrote

    def decide(self, rows_B: Tensor, k_B: Tensor, tries: int) -> Tensor:
        """Remasking rules: from step k go on by chance alone to a step that writes something, at most so many steps.
        Returns (4, B): the step reached, the positions it writes (none: the row is not there yet, or finished), masked
        positions before it, and how many a step like it hardly ever writes."""
        assert self.rule.rates is not None
        token_BL, free_BL, sure_BL = self.token_nL[rows_B], self.free_nL[rows_B], self.sure_nL[rows_B]
        due_BL, forget_BL = torch.zeros_like(free_BL), torch.zeros_like(free_BL)
        facts_2B = torch.zeros((2, len(rows_B)), dtype=self.exact, device=self.device)
        for _ in range(tries):
            looks_B = ~due_BL.any(dim=1) & (k_B < self.steps)
            if may_stop(~looks_B):
                break
            t_B1, s_B1 = self.time_T[k_B][:, None], self.time_T[k_B + 1][:, None]
            masked_BL = token_BL == self.mask_id
            u_BL = uniforms_at(self.seed, self.row_n[rows_B], self.length, k_B + 1)
            rates = self.rule.rates(t_B1, s_B1, sure_BL, *self.rule.numbers)
            write_BL, again_BL = remask(rates, masked_BL & free_BL, ~masked_BL & free_BL, u_BL)
            write_BL, again_BL = write_BL & looks_B[:, None], again_BL & looks_B[:, None]
            # The network sees the row as it is before the step; where it is not asked, the step is over at once.
            idle_B = looks_B & ~write_BL.any(dim=1)
            due_BL, forget_BL = due_BL | write_BL, forget_BL | (again_BL & ~idle_B[:, None])
            now_BL = again_BL & idle_B[:, None]
            token_BL, sure_BL = token_BL.masked_fill(now_BL, self.mask_id), sure_BL.masked_fill(now_BL, -torch.inf)
            if self.reports:
                self.again_nL[rows_B] |= again_BL
            # What such a step writes on average: what the masks lose, and what is masked again.
            alpha_t, alpha_s, sigma = rates
            usual_B = ((alpha_s - alpha_t + sigma * alpha_t).expand(free_BL.shape) * free_BL).sum(dim=1)
            found_2B = torch.stack([masked_BL.sum(dim=1).to(self.exact), usual_B + 5 * usual_B.sqrt() + 1])
            facts_2B, k_B = torch.where(looks_B, found_2B, facts_2B), k_B + idle_B
        self.due_nL[rows_B], self.forget_nL[rows_B] = due_BL, forget_BL
        self.token_nL[rows_B], self.sure_nL[rows_B] = token_BL, sure_BL
        return torch.cat([torch.stack([k_B, due_BL.sum(dim=1)]).to(self.exact), facts_2B])

    def _turns(self, rows_B: Tensor, sure_BK: Tensor, open_BK: Tensor, place_BK: Tensor) -> Tensor:
        """In how many calls each position is written, (B, L): as was settled earlier, or by this call's entropies."""
        turn_BL = self.turn_nL[rows_B]
        looks_B1 = ~(turn_BL > 0).any(dim=1, keepdim=True)
        score_BK = (place_BK.shape[1] - rank(sure_BK, open_BK)).float().masked_fill(~(open_BK & looks_B1), 0.0)
        score_BL = torch.zeros(turn_BL.shape, device=self.device).scatter(1, place_BK, score_BK)
        distance, sets = map(int, self.rule.numbers)
        return torch.where(looks_B1, spaced_sets(score_BL, distance, sets), turn_BL)

    def _open(self, rows_B: Tensor) -> Tensor:
        """Positions whose logits are wanted: those due, those of the set whose turn it is, else masked ones, of the
        first block that has any."""
        if self.rule.rates is not None:
            return self.due_nL[rows_B]
        masked_BL = (self.token_nL[rows_B] == self.mask_id) & self.free_nL[rows_B]
        if self.rule.spaced:
            turn_BL = self.turn_nL[rows_B]
            return torch.where((turn_BL > 0).any(dim=1, keepdim=True), turn_BL == 1, masked_BL)
        if self.rule.block is None:
            return masked_BL
        block_BL = self.block_nL[rows_B]
        return masked_BL & (block_BL == block_BL.masked_fill(~masked_BL, self.length + 1).amin(dim=1, keepdim=True))

    def looks(self, places: int) -> bool:
        """Does a call with so many places of a row first look at all of them, and then draw where it writes? A set
        holds few of the positions that are masked, and the noise of a whole vocabulary takes longer than its entropy.
        The head then runs twice where the call writes, which is charged."""
        return self.rule.spaced and places > self.most

    def _ask(self, model: Any, rows_B: Tensor, token_BL: Tensor, t_B: Tensor, place_BK: Tensor) -> _Asked:
        """The blocks, and what else is known of these places."""
        features_NX, head = features_at(model, token_BL, t_B, place_BK)
        truth_BK = None if self.truth_nL is None else self.truth_nL[rows_B].gather(1, place_BK)
        row_BK, t_BK = (x_B[:, None].expand_as(place_BK) for x_B in (self.row_n[rows_B], t_B))
        vocab_size = int(getattr(model, "vocab_size", features_NX.shape[-1]))
        draw_BK = self.draw_nL[rows_B].gather(1, place_BK)
        return _Asked(features_NX, head, vocab_size, place_BK, row_BK, draw_BK, t_BK, truth_BK)

    def _sure(self, asked: _Asked) -> Tensor:
        """How sure a rule that looks at no draw is of each place."""
        assert self.rule.sure is not None
        sure_N = torch.empty(asked.place_BK.numel(), dtype=self.exact, device=self.device)
        for part, logits_NV in asked.logits():
            lawful_NV = self.drawer.law.apply(logits_NV, self.mask_id)
            sure_N[part] = self.rule.sure(lawful_NV, logits_NV, None).to(self.exact)
        self.drawer.refuse(~sure_N.isfinite().all())
        return sure_N.view(asked.place_BK.shape)

    def _draw(self, asked: _Asked) -> tuple[Tensor, Tensor, Tensor]:
        """A token at each place, how sure the rule is of it, and its log-probability."""
        token_N, sure_N, logprob_N = (torch.empty_like(asked.place_BK, dtype=kind).view(-1) for kind in self.drawn)
        for part, logits_NV in asked.logits():
            keyed_by = asked.row_BK, asked.place_BK, asked.draw_BK
            row_N, position_N, draw_N = (x_BK.reshape(-1)[part] for x_BK in keyed_by)
            drawn_N, lawful_NV, _ = self.drawer(logits_NV, row_N, position_N, draw_N)
            token_N[part] = drawn_N if asked.truth_BK is None else asked.truth_BK.reshape(-1)[part]
            kind = torch.promote_types(lawful_NV.dtype, self.least)
            lawful_NV, own_NV = lawful_NV.to(kind), logits_NV.to(kind)
            log_p_N = log_probability(lawful_NV, token_N[part]).to(self.exact)
            sure = self.rule.sure
            sure_N[part] = log_p_N.exp() if sure is None else sure(lawful_NV, own_NV, token_N[part]).to(self.exact)
            logprob_N[part] = log_p_N
        token_BK, sure_BK, logprob_BK = (x_N.view(asked.place_BK.shape) for x_N in (token_N, sure_N, logprob_N))
        return token_BK, sure_BK, logprob_BK


@dataclass(frozen=True)
class _Asked:
    """Places of a call after the blocks: features that `head` makes logits of, or (head None) logits; the row's number,
    the draw index, the time and, if known, the token of each."""

    features_NX: Tensor
    head: Any
    vocab_size: int
    place_BK: Tensor
    row_BK: Tensor
    draw_BK: Tensor
    t_BK: Tensor
    truth_BK: Tensor | None

    def at(self, first_BJ: Tensor) -> _Asked:
        """Some of each row's places."""
        b, k = self.place_BK.shape
        start_B1 = torch.arange(0, b * k, k, device=first_BJ.device)[:, None]
        features = self.features_NX[(start_B1 + first_BJ).view(-1)]
        each = (self.place_BK, self.row_BK, self.draw_BK, self.t_BK, self.truth_BK)
        rest = (None if x_BK is None else x_BK.gather(1, first_BJ) for x_BK in each)
        return _Asked(features, self.head, self.vocab_size, *rest)  # type: ignore[arg-type]

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of the places with their logits, which the caller may write into. All slices have one size, so that
        what is computed for a place does not depend on which of them it is in; the last begins within the one before
        it."""
        n = len(self.features_NX)
        cells = CELLS if self.features_NX.is_cuda else CELLS_CPU
        size = min(n, max(1, cells // self.vocab_size))
        for start in range(0, n, size):
            part = slice(min(start, n - size), min(start, n - size) + size)
            features = self.features_NX[part]
            yield part, features.clone() if self.head is None else self.head(features, self.t_BK.reshape(-1)[part])


def uniforms_at(seed: int, row_B: Tensor, length: int, draw_B: Tensor) -> Tensor:
    """`plan.uniforms` with a draw index for each row, on the rows' device: (B, L) in (0, 1)."""
    if row_B.device.type == "mps":  # no float64 there
        return uniforms_at(seed, row_B.cpu(), length, draw_B.cpu()).float().to(row_B.device)
    position_1L = torch.arange(length, device=row_B.device)[None, :]
    counter = (torch.zeros_like(position_1L), position_1L, row_B[:, None], (draw_B * 256)[:, None])
    words = philox(counter, split_seed(seed))
    return (((words[0] << 20) | (words[1] >> 12)).double() + 0.5) * 2.0**-52
