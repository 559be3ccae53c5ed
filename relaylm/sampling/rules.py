r"""Decoding rules: which positions a step writes, and which it masks again.

The sampler of `denoise` writes positions at random times. Large masked diffusion models are decoded in other ways: the
surest positions first, several at once, or some again. Each published rule is here as plain functions.

**Planned** rules know before any network runs when each position is written, so they are a `Plan` for `denoise`, or,
where they number their own calls, events.
**Confidence** rules draw a token at every open position and keep the surest: one function says how sure (of the
distribution at a position and the token drawn there), another which (of a row's open positions).
**Remasking** rules (ReMDM) decide by chance alone, or by how sure earlier calls were, so they know before a call which
positions it must write. `confidence` runs both kinds.

**Exact in law.** A rule is exact if what it writes or masks next depends on chance and on tokens already in place,
never on the token just drawn. Then, for a denoiser whose conditionals are those of one law and with one position at a
time, samples follow that law: by the chain rule for any order chosen from the past (entropy and margin too, which look
at a distribution and not at its draw), and for remasking because forgetting a token by chance leaves the others' law
unchanged. (Dream's counts always leave two positions for the last step.) Rules that look at the drawn token's
probability prefer likely tokens: their samples are sharper than the model.

**Likelihood.** A rule that looks at distributions or at chance, never at draws, and masks nothing again has a
likelihood that can be computed (`measure.plan_likelihood`). Where it writes several positions at once, or the denoiser
is not exactly right, an order of its own is another law than MDLM's: samples by `surest`, `eb` and `dus` say so.

Notation: t to s < t is a step; alpha(t) = 1 - t is the share of tokens kept; p a distribution over tokens.

**The rules as published.** A step, with a token drawn wherever it is needed:

    ancestral       MDLM: each masked position is written with chance 1 - s/t; at the last step s = 0, so all are.
    random          LLaDA, remasking='random': of m masked positions in T steps every step writes m // T, the first
                    m % T steps one more; which, is chance alone. With blocks: block after block from the left, each
                    with its share of the steps.
    low-confidence  LLaDA, remasking='low_confidence': as many as `random`, blocks too: a token is drawn at every
                    masked position (of the block), and those whose token is likeliest under the model stay.
    dream-origin    Dream, alg='origin': each masked position with chance 1 - s/t on Dream's grid, T + 1 even times
                    from 1 to 0.001; the last step writes all that is left.
    dream-maskgit   Dream, alg='maskgit_plus': floor(m (1 - s/t)) of m masked positions on that grid, at the last step
                    all; those whose drawn token is likeliest under the law it was drawn from.
    dream-entropy   Dream, alg='entropy': as many; those whose distribution has the least entropy.
    dream-margin    Dream, alg='topk_margin': as many; those whose likeliest token leads the second by most.
    threshold       Fast-dLLM: every masked position (of the block) whose drawn token has probability C or more under
                    the model, and the likeliest one in any case, until nothing is masked.
    factor          Fast-dLLM: with the drawn tokens' probabilities c_1 >= c_2 >= ..., the first n positions for which
                    (j + 1) (1 - c_j) <= F for all j = 2..n, at least one, until nothing is masked.
    surest          relaylm: masked positions by rising entropy of their distributions, skipping what is nearer than D
                    to one taken in this call. With N > 1 (`surest:D:N`) entropies are taken at every N-th call only;
                    calls between write the next such sets of the same order, and the head runs at those alone.
    eb              EB-Sampler: masked positions (of the block) by rising entropy H_1 <= H_2 <= ..., the first n with
                    H_1 + ... + H_n - max(H_1, ..., H_n) <= GAMMA in nats, at least one.
    dus             DUS: blocks of B from the left; a block's k-th call writes what is left of its offsets 0, s, 2s, ...
                    with s = B // 2^k, down to s = 1; a last call that would write fewer than the one before joins it.
    remdm-cap       ReMDM: each written position is masked again with chance sigma = min(ETA, sigma_max), each masked
                    one written with chance (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), where sigma_max =
                    min(1, (1 - alpha_s) / alpha_t). That leaves the share of masks what it is without remasking.
    remdm-rescale   ReMDM: the same with sigma = ETA sigma_max.
    remdm-conf      ReMDM: sigma = sigma_max softmax(-psi) over the row's written positions, psi the probability a
                    token had when it was drawn; masked positions are written as by `ancestral`.
    remdm-loop      ReMDM: without remasking down to time ON, where alpha reaches ALPHA; from ON to OFF alpha stays
                    there and sigma = ETA; from OFF on without remasking to alpha = 1.

Where published code is not followed, the function concerned says so. One thing concerns all: here the mask is never
written and has no part in any distribution. The code of LLaDA, Dream and Fast-dLLM leaves its logit in the softmax, so
a network that gives the mask weight is a little less sure of everything there.

Shapes: n rows, B in a call, L positions, K open places of a row, N listed places, V vocabulary, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from relaylm.core.plan import Plan
from relaylm.errors import UserError, meant
from relaylm.kernels import may_stop
from relaylm.sampling.law import log_probability

DREAM_EPS = 1e-3  # Dream's last time before 0


# ---------------------------------------------------------------------------------------------- how sure is a place?
# Each takes logits (N, V) of the law that tokens are drawn from (temperature, nucleus applied) and the model's own, and
# the drawn tokens; larger is surer. The mask has probability 0 in both.


def own_probability(drawn_NV: Tensor, own_NV: Tensor, token_N: Tensor) -> Tensor:
    """LLaDA and Fast-dLLM: the drawn token's probability under the model's own distribution, at any temperature."""
    return log_probability(own_NV, token_N).exp()


def drawn_probability(drawn_NV: Tensor, own_NV: Tensor, token_N: Tensor) -> Tensor:
    """Dream's `maskgit_plus`: the drawn token's probability under the law it was drawn from."""
    return log_probability(drawn_NV, token_N).exp()


def margin(drawn_NV: Tensor, own_NV: Tensor, token_N: Tensor | None) -> Tensor:
    """Dream's `topk_margin`: the largest probability less the second largest."""
    top_N2 = (drawn_NV.topk(min(2, drawn_NV.shape[1]), dim=1).values - drawn_NV.logsumexp(dim=1, keepdim=True)).exp()
    return top_N2[:, 0] - top_N2[:, 1:].sum(dim=1)


def negative_entropy(drawn_NV: Tensor, own_NV: Tensor, token_N: Tensor | None) -> Tensor:
    """Dream's `entropy`: sum_v p_v log p_v. (Dream adds 1e-10 inside the logarithm; 0 log 0 is 0 here.)"""
    below_NV = drawn_NV - drawn_NV.amax(dim=1, keepdim=True)
    weight_NV = below_NV.exp()
    below_NV.clamp_min_(torch.finfo(below_NV.dtype).min)  # a probability of 0 times -inf is no number
    total_N, sum_N = weight_NV.sum(dim=1), torch.linalg.vecdot(weight_NV, below_NV)
    return torch.sub(sum_N / total_N, total_N.log())


# ---------------------------------------------------------------------------------------------- which are written?
# Each takes how sure (B, K) and which places are open (B, K), and returns those to write. Ties go to the first place.


def most_sure(sure_BK: Tensor, open_BK: Tensor, count_B: Tensor) -> Tensor:
    """LLaDA and Dream: the `count` surest open places of each row."""
    return (rank(sure_BK, open_BK) < count_B[:, None]) & open_BK


def at_least(sure_BK: Tensor, open_BK: Tensor, threshold: float) -> Tensor:
    """Fast-dLLM's threshold: every open place at least so sure, and the surest one in any case."""
    return ((sure_BK >= threshold) | (rank(sure_BK, open_BK) == 0)) & open_BK


def within_factor(sure_BK: Tensor, open_BK: Tensor, factor: float) -> Tensor:
    """Fast-dLLM's factor. (The published code also writes the last open place if only that one fails the condition;
    that slip is not repeated.)"""
    rank_BK = rank(sure_BK, open_BK)
    sorted_BK = torch.empty_like(sure_BK).scatter(1, rank_BK, sure_BK.masked_fill(~open_BK, -torch.inf))
    j_K = torch.arange(1, sure_BK.shape[1] + 1, device=sure_BK.device)
    holds_BK = (sorted_BK >= 1 - factor / (j_K + 1)) | (j_K == 1)
    return (rank_BK < holds_BK.long().cumprod(dim=1).sum(dim=1, keepdim=True)) & open_BK


def within_entropy(sure_BK: Tensor, open_BK: Tensor, gamma: float) -> Tensor:
    """EB-Sampler's bound, for `sure` the negative entropy: the largest of the first n is the n-th, so what counts is
    the sum of those before it."""
    rank_BK = rank(sure_BK, open_BK)
    sorted_BK = torch.zeros_like(sure_BK).scatter(1, rank_BK, (-sure_BK).clamp_min(0).masked_fill(~open_BK, 0.0))
    before_BK = sorted_BK.cumsum(dim=1) - sorted_BK
    return (before_BK.gather(1, rank_BK) <= gamma) & open_BK


def spaced_sets(score_BL: Tensor, distance: int, sets: int) -> Tensor:
    """The number of the set, from 1, that each position is in, and 0 if it is in none of the first `sets`. A set takes,
    from the largest score down, every position left that is at least `distance` from those it has. A score of 0 is not
    open; the others of a row differ. The largest within reach is always taken, so many are taken at once, and at least
    one in each round."""
    near = min(distance, score_BL.shape[1]) - 1
    turn_BL = torch.zeros_like(score_BL, dtype=torch.int64)

    def around(x_BL: Tensor) -> Tensor:
        return torch.nn.functional.max_pool1d(x_BL[:, None], 2 * near + 1, stride=1, padding=near)[:, 0]

    for number in range(1, sets + 1):
        left_BL = score_BL.masked_fill(turn_BL > 0, 0.0)
        for _ in range(-(-score_BL.shape[1] // (near + 1))):
            if may_stop(left_BL == 0):
                break
            taken_BL = (left_BL == around(left_BL)) & (left_BL > 0)
            turn_BL = turn_BL.masked_fill(taken_BL, number)
            left_BL = left_BL.masked_fill(around(taken_BL.to(left_BL.dtype)) > 0, 0.0)
    return turn_BL


def rank(sure_BK: Tensor, open_BK: Tensor) -> Tensor:
    """0 for the surest open place of a row, then 1, ...; places that are not open come last."""
    order_BK = sure_BK.masked_fill(~open_BK, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank_K = torch.arange(order_BK.shape[1], device=order_BK.device)
    return torch.empty_like(order_BK).scatter_(1, order_BK, rank_K.expand_as(order_BK))


# ---------------------------------------------------------------------------------------------- how many at a step?


def llada_counts(masked: int, steps: int) -> np.ndarray:
    """LLaDA: `masked` positions over `steps` steps as evenly as whole numbers allow, the larger counts first."""
    return masked // steps + (np.arange(steps) < masked % steps)


def dream_times(steps: int) -> np.ndarray:
    """Dream's grid: T + 1 even times from 1 to 0.001. The last step writes all that is left."""
    return 1 - np.arange(steps + 1) * ((1 - DREAM_EPS) / steps)


def dream_counts(masked: int, steps: int) -> np.ndarray:
    """Dream: of m masked positions a step from t to s writes floor(m (1 - s/t)), the last one all."""
    times, left, counts = dream_times(steps), masked, []
    for k in range(steps):
        counts.append(left if k == steps - 1 else int(left * (1 - times[k + 1] / times[k])))
        left -= counts[-1]
    return np.array(counts)


def dus_levels(block: int) -> np.ndarray:
    """DUS with base 2: the call, from 0, that writes each offset of a block."""
    level_B, stride, k = np.full(block, -1), block // 2, 0
    while stride >= 1:
        level_B[(np.arange(block) % stride == 0) & (level_B < 0)] = k
        stride, k = stride // 2, k + 1
    level_B[level_B < 0] = k  # a block of one position
    sizes = np.bincount(level_B)
    return np.minimum(level_B, len(sizes) - 2) if len(sizes) > 1 and sizes[-1] < sizes[-2] else level_B


# ---------------------------------------------------------------------------------------------- masking again: ReMDM
# Each function takes t and s (B, 1), how sure the tokens in place were when they were written (B, L; -inf at masks) and
# the rule's numbers; it returns alpha_t, alpha_s and sigma. The network sees the row as it is before the step.
# (A captured call has no scalar in torch.where: it would be copied to the device.)

Rates = tuple[Tensor, Tensor, Tensor]


def _sigma_max(alpha_t: Tensor, alpha_s: Tensor) -> Tensor:
    return ((1 - alpha_s) / alpha_t.clamp_min(1e-300)).masked_fill(alpha_t <= 0, 1.0).clamp_max(1.0)


def cap(t: Tensor, s: Tensor, sure_BL: Tensor, eta: float) -> Rates:
    """ReMDM-cap: sigma = min(eta, sigma_max)."""
    return 1 - t, 1 - s, _sigma_max(1 - t, 1 - s).clamp_max(eta)


def rescale(t: Tensor, s: Tensor, sure_BL: Tensor, eta: float) -> Rates:
    """ReMDM-rescale: sigma = eta sigma_max."""
    return 1 - t, 1 - s, eta * _sigma_max(1 - t, 1 - s)


def conf(t: Tensor, s: Tensor, sure_BL: Tensor) -> Rates:
    """ReMDM-conf: sigma = sigma_max softmax(-psi) over the written positions of a row, 0 at masked ones."""
    weight_BL = (-sure_BL).exp().masked_fill(~torch.isfinite(sure_BL), 0.0)
    share_BL = weight_BL / weight_BL.sum(dim=1, keepdim=True).clamp_min(1e-300)
    return 1 - t, 1 - s, share_BL * _sigma_max(1 - t, 1 - s)


def loop(t: Tensor, s: Tensor, sure_BL: Tensor, eta: float, t_on: float, t_off: float, alpha_on: float) -> Rates:
    """ReMDM-loop. (So that no mask is left, the last step is always an ordinary one towards alpha = 1; the published
    sampler fills what is left with the likeliest tokens.)"""

    def alpha(x: Tensor) -> Tensor:
        rising = (1 - x) * alpha_on / (1 - t_on)
        ending = 1 - x * (1 - alpha_on) / t_off
        return torch.where(first, rising, ending.masked_fill(~last, alpha_on)).clamp(0, 1)

    last = (t <= t_off) | (s == 0)
    first = (t > t_on) & ~last
    return alpha(t), alpha(s), eta * (~(first | last)).to(t.dtype)


def remask(rates: Rates, masked_BL: Tensor, written_BL: Tensor, u_BL: Tensor) -> tuple[Tensor, Tensor]:
    """The positions to write and the positions to mask again, where u ~ U(0, 1) falls below their chance."""
    alpha_t, alpha_s, sigma = rates
    chance = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t).clamp_min(1e-300)
    return masked_BL & (u_BL < chance), written_BL & (u_BL < sigma)


# ---------------------------------------------------------------------------------------------- the rules by name


@dataclass(frozen=True)
class Rule:
    """A decoding rule: its name, its numbers, its functions, and whether it is exact in law; the head of the module
    says what it does."""

    name: str
    exact: bool
    source: str
    numbers: tuple[float, ...] = ()
    limits: tuple[tuple[float, float], ...] = ()  # each number is above the first, at most the second
    block: int | None = None  # semi-autoregressive: blocks of so many positions, one after the other
    takes_block: bool = False
    counts: Callable[[int, int], np.ndarray] | None = None  # positions that each step writes, where that is fixed
    sure: Callable[..., Tensor] | None = None
    which: Callable[[Tensor, Tensor, float], Tensor] | None = None  # of adaptive rules; the others take the surest
    rates: Callable[..., Rates] | None = None
    spaced: bool = False  # the surest that keep a distance, in sets
    levels: Callable[[int], np.ndarray] | None = None  # of a block: the call that writes each offset
    own_order: bool = False  # named in `changes_law` though it looks at no draw

    @property
    def planned(self) -> bool:
        """Is it known before any network runs when each position is written, and that once only?"""
        return self.sure is None and self.rates is None

    @property
    def adaptive(self) -> bool:
        """Does the rule find its own number of steps?"""
        return self.which is not None or self.spaced or self.levels is not None

    @property
    def bounded(self) -> bool:
        """Can its likelihood be computed: does it look at no draw, and mask nothing again?"""
        return self.rates is None and self.sure in (None, negative_entropy, margin)

    def __str__(self) -> str:
        shown = self.numbers[:1] if self.spaced and self.numbers[1] == 1 else self.numbers
        numbers = [*map(number_text, shown), *([] if self.block is None else [str(self.block)])]
        return ":".join([self.name, *numbers])

    def check(self) -> Rule:
        """The rule itself, unless a number of it is out of bounds."""
        limits = self.limits or ((0.0, 1e6),) * len(self.numbers)
        for value, (low, high) in zip(self.numbers, limits, strict=True):
            if not low < value <= high:
                raise UserError(f"the numbers of {self.name} must be above {low:g} and at most {int(high)}: {self}")
        if self.spaced and any(value != int(value) for value in self.numbers):
            raise UserError(f"{self.name}:D:N takes whole numbers, not {self}")
        if self.block is not None and self.block < 1:
            raise UserError(f"the block length must be at least 1, not {self.block}")
        if self.block is not None and not self.takes_block:
            allowed = ", ".join(rule.name for rule in RULES if rule.takes_block)
            raise UserError(f"{self.name} has no blocks: a block length goes with {allowed}")
        if self.rates is loop:
            eta, t_on, t_off, alpha_on = self.numbers
            if not (t_off < t_on < 1 and eta * alpha_on <= 1 - alpha_on):
                need = "OFF < ON < 1 and ETA at most (1 - ALPHA) / ALPHA"
                raise UserError(f"remdm-loop:ETA:ON:OFF:ALPHA needs {need}, not {self}")
        return self


def number_text(x: float) -> str:
    """0.9, 1, 1e-06: short, and the same number when it is read again."""
    return f"{x:g}" if float(f"{x:g}") == x else repr(x)


_unit = (0.0, 1.0)
RULES = (
    Rule("ancestral", True, "MDLM"),
    Rule("random", True, "LLaDA", takes_block=True, counts=llada_counts),
    Rule("low-confidence", False, "LLaDA", takes_block=True, counts=llada_counts, sure=own_probability),
    Rule("dream-origin", True, "Dream"),
    Rule("dream-maskgit", False, "Dream", counts=dream_counts, sure=drawn_probability),
    Rule("dream-entropy", True, "Dream", counts=dream_counts, sure=negative_entropy),
    Rule("dream-margin", True, "Dream", counts=dream_counts, sure=margin),
    Rule("threshold", False, "Fast-dLLM", (0.9,), (_unit,), takes_block=True, sure=own_probability, which=at_least),
    Rule("factor", False, "Fast-dLLM", (1.0,), takes_block=True, sure=own_probability, which=within_factor),
    Rule("surest", True, "relaylm", (16, 1), sure=negative_entropy, spaced=True, own_order=True),
    Rule(
        "eb", True, "EB-Sampler", (0.1,), takes_block=True, sure=negative_entropy, which=within_entropy, own_order=True
    ),
    Rule("dus", True, "DUS", block=32, takes_block=True, levels=dus_levels, own_order=True),
    Rule("remdm-cap", True, "ReMDM", (0.008,), (_unit,), rates=cap),
    Rule("remdm-rescale", True, "ReMDM", (0.015,), (_unit,), rates=rescale),
    Rule("remdm-conf", False, "ReMDM", rates=conf),
    Rule("remdm-loop", True, "ReMDM", (0.02, 0.55, 0.05, 0.9), (_unit,) * 4, rates=loop),
)

NOTATION = (
    "ancestral, random[:BLOCK], low-confidence[:BLOCK], dream-origin, dream-maskgit, dream-entropy, dream-margin, "
    "threshold[:C[:BLOCK]], factor[:F[:BLOCK]], surest[:D[:N]], eb[:GAMMA[:BLOCK]], dus[:BLOCK], "
    "remdm-cap[:ETA], remdm-rescale[:ETA], remdm-conf, remdm-loop[:ETA:ON:OFF:ALPHA]"
)


def parse_rule(text: str, block_length: int | None = None) -> Rule:
    """`name:number:...` -> Rule. Numbers left out have their published values."""
    name, *words = text.strip().split(":")
    rule = next((rule for rule in RULES if rule.name == name), None)
    if rule is None:
        hint = meant(name, [rule.name for rule in RULES]) or ";"
        raise UserError(f"there is no decoding rule {name!r}{hint} the rules are {NOTATION}")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise UserError(f"{text!r} is not a decoding rule; the rules are {NOTATION}") from None
    if not all(map(math.isfinite, numbers)):
        raise UserError(f"{text!r} has a number that is not finite; the rules are {NOTATION}")
    numbers, extra = numbers[: len(rule.numbers)], numbers[len(rule.numbers) :]
    if extra and not (rule.takes_block and len(extra) == 1 and extra[0] == int(extra[0])):
        raise UserError(f"{text!r} has too many numbers or a broken one; the rules are {NOTATION}")
    if extra and block_length is not None:
        raise UserError(f"the block length is given twice: {extra[0]:g} in {text!r} and {block_length}")
    block = int(extra[0]) if extra else rule.block if block_length is None else block_length
    return replace(rule, numbers=(*numbers, *rule.numbers[len(numbers) :]), block=block).check()


# ---------------------------------------------------------------------------------------------- blocks, counts, plans


def blocks_of(rule: Rule, given_nL: np.ndarray) -> tuple[np.ndarray, int]:
    """The block of each position, counted from its row's first free one, and how many there are (in every row). The
    last block may be shorter."""
    n, length = given_nL.shape
    if rule.block is None:
        return np.zeros((n, length), dtype=np.int64), 1
    first_n1 = (given_nL < 0).argmax(axis=1)[:, None]
    block_nL = np.maximum(np.arange(length)[None, :] - first_n1, 0) // min(rule.block, length)
    per_row_n = block_nL.max(axis=1) + 1
    if (per_row_n != per_row_n[0]).any():
        raise UserError(
            f"with blocks of {rule.block} the rows would have from {per_row_n.min()} to {per_row_n.max()} blocks: give "
            "all of them prompts of about one length"
        )
    return block_nL, int(per_row_n[0])


def counts_of(rule: Rule, given_nL: np.ndarray, steps: int) -> np.ndarray:
    """(n, T): how many positions of each row each step writes. Every block gets the same number of steps."""
    assert rule.counts is not None
    block_nL, blocks = blocks_of(rule, given_nL)
    if steps % blocks:
        raise UserError(
            f"{blocks} blocks of {rule.block} share the steps evenly, but {steps} is no multiple of {blocks}: change "
            "the number of steps or the block length"
        )
    free_nb = np.stack([((block_nL == b) & (given_nL < 0)).sum(axis=1) for b in range(blocks)], axis=1)
    known = {int(free): rule.counts(int(free), steps // blocks) for free in np.unique(free_nb)}
    return np.stack([np.concatenate([known[int(free)] for free in row]) for row in free_nb])


def level_calls(rule: Rule, given_nL: np.ndarray) -> np.ndarray:
    """The call that writes each position, (n, L) from 1 up, 0 where given: block after block, by its levels. Calls that
    would write nothing are left out."""
    assert rule.levels is not None and rule.block is not None
    free_nL, length = given_nL < 0, given_nL.shape[1]
    size = min(rule.block, length)
    after_nL = np.maximum(np.arange(length)[None, :] - free_nL.argmax(axis=1)[:, None], 0)
    key_nL = np.where(free_nL, after_nL // size * size + rule.levels(size)[after_nL % size] + 1, 0)
    there_nk = np.zeros((len(key_nL), int(key_nL.max(initial=0)) + 1), dtype=np.int64)
    np.put_along_axis(there_nk, key_nL, 1, axis=1)
    there_nk[:, 0] = 0
    return np.take_along_axis(there_nk.cumsum(axis=1), key_nL, axis=1) * free_nL


def planned(rule: Rule, plan: Plan, times: tuple[float, ...]) -> Plan:
    """The plan of a planned rule on a grid of times: the same rows, their positions' steps set by the rule.

    `random` writes the positions of a block in the order of their u, the largest first, as many at a step as LLaDA
    does. `dream-origin` writes a masked position at a step from t to s of Dream's grid with chance 1 - s/t, at the last
    step in any case: position by position the same as one u for each and the step whose times it lies between."""
    free_nL, steps = plan.given_nL < 0, len(times) - 1
    if rule.name == "ancestral":
        return plan
    if rule.name == "dream-origin":
        edges = dream_times(steps)[:-1]
        step_nL = np.searchsorted(-edges, -plan.u_nL, side="right") - 1  # edges[k] >= u > edges[k + 1]
    else:
        block_nL, _ = blocks_of(rule, plan.given_nL)
        ends_nT = counts_of(rule, plan.given_nL, steps).cumsum(axis=1)
        # Free positions first, by block, then from the largest u down.
        order_nL = np.lexsort((-plan.u_nL, block_nL, ~free_nL), axis=1)
        place_nL = np.empty_like(order_nL)
        np.put_along_axis(place_nL, order_nL, np.arange(plan.length)[None, :], axis=1)
        step_nL = np.stack([np.searchsorted(e, p, side="right") for e, p in zip(ends_nT, place_nL, strict=True)])
    step_nL = np.clip(step_nL, 0, steps - 1)
    middle = np.add(times[:-1], times[1:]) / 2
    return replace(plan, u_nL=np.where(free_nL, middle[step_nL], 0.0))
