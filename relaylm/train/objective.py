r"""What training minimises, and the batches it sees: both as functions, with no state of their own.

**The loss** is the continuous-time objective of `core.plan`, for each token

    loss = 1/(B L)  sum_b 1/t_b  sum_{l masked in row b}  -log p_theta(x_l | z_t),        masked iff u_bl <= t_b,

with antithetic times t: one even grid over the whole batch, shifted by one uniform number. A judge is the same network
with a causal mask and loss = mean -log p(x_l | x_<l), l from the second position on; its vocabulary keeps the mask's
column, which never occurs in text and so learns to have no probability.

**Noise is keyed, not drawn.** Which rows a step reads, their times and their masks are functions of (seed, step,
number of the sample in the whole batch): they do not depend on the number of processes, on the micro-batch, or on
where a run was interrupted. Sample k of a batch goes to process k mod W, so that every process sees the whole range
of times. Rows are read in a new random order in every pass over the text; windows of running text also start at a new
phase.

**Masked positions only.** Only masked positions (about half) are scored. They are gathered into a fixed number of
places, so that shapes are static and the host never waits to hear how many there are. Places = (expected number at the
worst shift of the grid) + 9 standard deviations; by Bernstein's inequality the chance that a step needs more is below
1e-17, and if one ever did training stops with an error. The fused trunk gathers right after the last block's attention,
so that block's output projection and MLP run at these places only, and the head with them. Elsewhere positions are
gathered before the head, and only from 512 tokens of vocabulary on: a smaller head is so cheap (28 tokens, 12 blocks:
0.03% of the operations) that gathering costs more than it saves, so it runs everywhere, and unmasked positions have
weight 0. The result is always the same.

Shapes: B rows, L positions, N = B L, M gathered positions (or all N), D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaylm.core.noise import philox, split_seed
from relaylm.core.plan import LINEAR
from relaylm.errors import UserError
from relaylm.kernels import draw
from relaylm.kernels import loss as head_loss
from relaylm.kernels import train as fused
from relaylm.measure.likelihood import kl
from relaylm.models.denoiser import Transformer
from relaylm.train.corpus import TokenFile
from relaylm.train.recipe import Recipe

GATHER_FROM = 512  # vocabulary size from which the head, even by itself, is worth gathering masked positions for

# What a Philox counter is used for (its last word); plan.py has the small numbers.
_SHIFT, _MASK = 16, 17
_LOW = 0xFFFFFFFF

# ----------------------------------------------------------------------------------------------------------- batches


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit words that scatters them."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(index_n: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where the index-th row of an endless sequence of shuffled passes over `size` rows lies. Stateless: a Feistel
    network on the smallest even number of bits that holds the size, walked until it lands inside."""
    epoch_n, position_n = (index_n // size).astype(np.uint64), (index_n % size).astype(np.uint64)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    with np.errstate(over="ignore"):
        key_n = mix(mix(np.full(len(index_n), seed, dtype=np.uint64)) + epoch_n)
        result, walking = position_n.copy(), np.arange(len(index_n))
        while len(walking):
            left, right = result[walking] >> half, result[walking] & low
            for turn in range(6):
                scattered = mix(right + key_n[walking] + np.uint64(turn) * np.uint64(0x9E3779B97F4A7C15))
                left, right = right, left ^ (scattered & low)
            result[walking] = (left << half) | right
            walking = walking[result[walking] >= size]
    return result.astype(np.int64)


def low_discrepancy_times(u: float, n: int, floor: float = 1e-3) -> np.ndarray:
    """n times in (floor, 1], antithetic: one uniform u shifts an even grid of n points. Each is uniform; together they
    cover the axis, which reduces the variance of the loss."""
    grid = (np.arange(n) / n + u) % 1.0
    return floor + (1 - floor) * (1.0 - grid)  # 1 - grid is in (0, 1], so t = 1 can occur and t = 0 cannot


def _shift(seed: int, step: int) -> float:
    """The uniform number that shifts the grid of times of a step."""
    words = philox([np.array([x], dtype=np.int64) for x in (step & _LOW, step >> 32, 0, _SHIFT)], split_seed(seed))
    return float((int(words[0][0]) << 21 | int(words[1][0]) >> 11) * 2.0**-53)


@dataclass(frozen=True)
class Batches:
    """The batches of one process, as a function of the step."""

    corpus: TokenFile
    recipe: Recipe
    length: int
    seed: int
    causal: bool
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.recipe.batch % self.size:
            raise UserError(f"the batch ({self.recipe.batch}) must be a multiple of the {self.size} processes")
        if self.share % self.micro:
            raise UserError(f"the micro-batch ({self.micro}) must divide each process's share of {self.share} rows")

    @property
    def share(self) -> int:
        """Rows of a batch for this process."""
        return self.recipe.batch // self.size

    @property
    def micro(self) -> int:
        """Rows of them at a time."""
        return min(self.recipe.micro_batch or self.share, self.share)

    def at(self, step: int) -> list[dict[str, Tensor]]:
        """The micro-batches of a step, on the host. Sample k goes to process k mod W, and within it in the same
        manner to a micro-batch, so that each has times from the whole range."""
        batch, corpus = self.recipe.batch, self.corpus
        windows, phases = corpus.windows(self.length), corpus.phases(self.length)
        times = low_discrepancy_times(_shift(self.seed, step), batch, floor=self.recipe.floor)
        turns = self.share // self.micro
        symbols = batch * (self.length - self.causal)
        if corpus.train_real is not None:  # all processes must divide by the same number
            everyone = shuffled(step * batch + np.arange(batch), windows, self.seed)
            symbols = int((corpus.train_real[everyone] - int(self.causal)).sum())
        result = []
        for turn in range(turns):
            k = self.rank + self.size * (turn + turns * np.arange(self.micro))
            sample, t = step * batch + k, times[k]
            with np.errstate(over="ignore"):
                phase = mix((sample // windows).astype(np.uint64) + np.uint64(self.seed)) % np.uint64(phases)
            tokens, real = corpus.batch(shuffled(sample, windows, self.seed), self.length, phase.astype(np.int64))
            if tokens.dtype != np.uint8:
                tokens = tokens.astype(np.int32)  # PyTorch can do little with uint16 and uint32
            weight = (np.ones(self.micro) if self.causal else LINEAR.weight(t)) * (self.size / symbols)
            made = {
                "tokens": np.ascontiguousarray(tokens),
                "sample": sample,
                # A 32-bit word below this masks: the share 1 - alpha(t) of all words.
                "threshold": np.ceil((1 - LINEAR(t)) * 2.0**32).astype(np.int64),
                "weight": weight.astype(np.float32),
                "t": t.astype(np.float32),
            }
            if real is not None:
                made["real"] = real.astype(np.int64)
            result.append({key: torch.from_numpy(value) for key, value in made.items()})
        return result


# -------------------------------------------------------------------------------------------------------------- loss


@torch.compiler.disable  # Inductor takes the products of 32-bit words for indices, and fails
def mask_words(seed: int, sample_B: Tensor, length: int) -> Tensor:
    """A 32-bit word for each position of each sample, (B, L) int64: a position is masked while its word is below
    (1 - alpha(t)) 2^32. Integer arithmetic, the same on every device."""
    quad = torch.arange(-(-length // 4), device=sample_B.device)[None, :]
    zero = torch.zeros_like(quad + sample_B[:, None])
    counter = (zero + quad, zero + (sample_B & _LOW)[:, None], zero + (sample_B >> 32)[:, None], zero + _MASK)
    words = draw.philox(counter, split_seed(seed))
    return torch.stack(words, dim=-1).flatten(1)[:, :length]


def places(rows: int, length: int, floor: float = 1e-3) -> int:
    """Room for the masked positions of a batch with antithetic times, in multiples of 128.

    The times of b rows are an even grid of spacing 1/b, so they add up to at most (b + 1) / 2; the number of masked
    positions has a variance of at most L (b/6 + 1/4), since the sum of t (1 - t) over such a grid is within 1/4 of
    b/6."""
    expected = length * ((rows + 1) / 2 + floor * rows)
    deviation = math.sqrt(length * (rows / 6 + 0.25))
    return min(rows * length, -(-int(expected + 9 * deviation + 30) // 128) * 128)


class Objective(nn.Module):
    """The loss as a module, so that it can be compiled, replicated and sharded as a whole. With a `teacher` it is the
    divergence KL(teacher || model) instead of -log p, at the same positions with the same weights."""

    def __init__(
        self,
        model: Transformer,
        recipe: Recipe,
        seed: int,
        bf16: bool,
        rows: int,
        gather: bool | None = None,
        teacher: Transformer | None = None,
    ) -> None:
        super().__init__()
        self.model, self.seed, self.bf16, self.gather = model, seed, bf16, gather
        self.teacher = (teacher,)  # in a tuple: not a part of what is trained, replicated or sharded
        self.room = places(rows, model.architecture.length, recipe.floor)
        step = 64 if model.vocab_size >= GATHER_FROM else 8
        self.padding = -model.vocab_size % step if bf16 else 0  # tensor cores want round numbers of columns
        self.fused = False  # the trunk, final norm included, by the kernels of `fused`

    @property
    def places(self) -> int | None:
        """Into how many places positions are gathered, None if all are scored where they are."""
        worth_it = self.fused or self.model.vocab_size >= GATHER_FROM if self.gather is None else self.gather
        return self.room if worth_it and not self.model.architecture.causal else None

    def compile_parts(self) -> None:
        """The trunk by the kernels of `fused` where they apply, otherwise the block compiled, once for all depths; and
        the loss compiled, where `weighted_loss` does not apply. What lies between is a handful of small kernels. (The
        whole network compiled as one takes a minute longer and gains little.)"""
        self.fused = self.bf16 and fused.applies(self.model)
        for block in [] if self.fused else self.model.blocks:
            block.compile(dynamic=False)
        self._nll = torch.compile(self._nll, dynamic=False)  # type: ignore[method-assign]

    def forward(
        self, tokens: Tensor, sample: Tensor, threshold: Tensor, weight: Tensor, t: Tensor, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(sum of weighted losses, [positions scored, positions that did not find a place])."""
        tokens_BL = tokens.long()
        length = tokens_BL.shape[1]
        scored_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        if real is not None:
            scored_BL = torch.arange(length, device=tokens.device) < real[:, None]
        if self.model.architecture.causal:
            seen_BL, target_BL = tokens_BL, tokens_BL.roll(-1, dims=1)  # position l is to predict the token at l + 1
            scored_BL = scored_BL.roll(-1, dims=1) & (torch.arange(length, device=tokens.device) < length - 1)
        else:
            masked_BL = mask_words(self.seed, sample, length) < threshold[:, None]
            seen_BL, target_BL = torch.where(masked_BL, self.model.mask_id, tokens_BL), tokens_BL
            scored_BL = scored_BL & masked_BL
        target_M, weight_M = target_BL.flatten(), torch.where(scored_BL, weight[:, None], 0.0).flatten()
        t_M = t.repeat_interleave(length) if self.model.architecture.adaln else None
        count = scored_BL.sum()
        lost, where = torch.zeros_like(count), None
        if self.places is not None:
            where = _places_of(scored_BL.flatten(), self.places)
            lost, target_M = where.lost, target_M[where.index_M]
            weight_M = torch.where(where.kept_M, weight_M[where.index_M], 0.0)
            t_M = None if t_M is None else t_M[where.index_M]
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            x_MD = self._hidden(seen_BL, t, where)
            if self.teacher[0] is not None:
                loss = (self._kl(x_MD, seen_BL, t, t_M, where) * weight_M).sum()
            elif self.fused and GATHER_FROM <= self.model.vocab_size <= head_loss.LARGEST_VOCABULARY:
                head = self.model.output_layer.linear
                mask_id = -1 if self.model.architecture.causal else self.model.mask_id
                loss = head_loss.weighted_loss(x_MD, head.weight, head.bias, target_M, weight_M, mask_id)
            else:
                loss = (self._nll(x_MD, target_M, t_M) * weight_M).sum()
        return loss, torch.stack([count, lost])

    def _hidden(self, tokens_BL: Tensor, t_B: Tensor, where: _Places | None) -> Tensor:
        """The residual stream (M, D), or, fused, its final norm."""
        if self.fused:
            return fused.trunk(self.model, tokens_BL, scored=None if where is None else (where.index_M, where.place_N))
        x_ND = self.model.hidden_at(tokens_BL, t_B, None).flatten(0, 1)
        return x_ND if where is None else x_ND[where.index_M]

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """The network's logits: what evaluation calls when weights are sharded, since they are gathered on entry
        here."""
        return self.model.logits(tokens_BL, t_B)

    def _logits(self, model: Transformer, x_MD: Tensor, t_M: Tensor | None, normed: bool) -> Tensor:
        """Logits in float32. A denoiser gives the mask no probability (its column's bias is -infinity here)."""
        out = model.output_layer
        is_mask_V = torch.arange(model.vocab_size, device=x_MD.device) == model.mask_id
        if out.adaLN_modulation is not None:
            return model.head(x_MD, t_M).float().masked_fill(is_mask_V, -torch.inf)
        weight: Tensor = out.linear.weight
        bias: Tensor = out.linear.bias
        if not model.architecture.causal:
            bias = bias.masked_fill(is_mask_V, -torch.inf)
        if self.padding:
            weight, bias = F.pad(weight, (0, 0, 0, self.padding)), F.pad(bias, (0, self.padding), value=-torch.inf)
        return F.linear(x_MD if normed else out.norm_final(x_MD), weight, bias).float()

    def _nll(self, x_MD: Tensor, target_M: Tensor, t_M: Tensor | None) -> Tensor:
        """-log p of the text."""
        return F.cross_entropy(self._logits(self.model, x_MD, t_M, self.fused), target_M, reduction="none")

    def _kl(self, x_MD: Tensor, seen_BL: Tensor, t_B: Tensor, t_M: Tensor | None, where: _Places | None) -> Tensor:
        """KL(teacher || model), in nats."""
        teacher = self.teacher[0]
        assert teacher is not None
        with torch.no_grad():
            h_ND = teacher.hidden_at(seen_BL, t_B, None).flatten(0, 1)
            h_MD = h_ND if where is None else h_ND[where.index_M]
            log_p = self._logits(teacher, h_MD, t_M, normed=False).log_softmax(-1)
        log_q = self._logits(self.model, x_MD, t_M, self.fused).log_softmax(-1)
        return kl(log_p, log_q)


@dataclass(frozen=True)
class _Places:
    index_M: Tensor  # the position whose row a place holds; of an empty place, any
    kept_M: Tensor  # is the place taken?
    place_N: Tensor  # the place of a position, M if it has none
    lost: Tensor  # how many positions wanted one and found none


def _places_of(flag_N: Tensor, room: int) -> _Places:
    """Places for the first `room` set flags: torch.nonzero with a fixed size, without asking the host."""
    rank_N = flag_N.cumsum(0) - 1
    place_N = torch.where(flag_N & (rank_N < room), rank_N, room)
    index = torch.zeros(room + 1, dtype=torch.int64, device=flag_N.device)
    index = index.scatter(0, place_N, torch.arange(len(flag_N), device=flag_N.device))[:room]
    count = rank_N[-1] + 1
    place_M = torch.arange(room, device=flag_N.device)
    kept_M = place_M < count
    # Empty places point at different positions, so that their (zero) gradients do not all queue for one.
    return _Places(torch.where(kept_M, index, place_M), kept_M, place_N, (count - room).clamp_min(0))
