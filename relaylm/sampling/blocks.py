r"""Rows written in parts, one after the other, each by the sampler as it is: blocks, and windows of long texts.

**Block diffusion** (BD3-LM, SDAR, Fast-dLLM v2). The network lets a position see its own block of b positions and the
blocks before it, so with x^k for block k of a row

    p(x) = prod_k  p(x^k | x^1, ..., x^{k-1}),

and each factor is masked diffusion over b positions: the T steps, the spacing or the decoding rule, and the model
schedule all run inside a block, from its first call to its last, and then again in the next. Blocks lie at multiples of
b, whatever the prompt's length; what is given inside a block stands there from the start, and what is given in a later
block is not seen.

**Exact cache.** A finished block is one call more (`Transformer.extend`), which leaves its keys and values; every later
call runs on its own block's tokens and looks at those. Every model of the schedule needs its own, since keys of another
network are another function: that call is part of the cost. A denoiser that has no `extend` is given all tokens up to
its block instead (`Recomputed`): the same law, computed again in each call.

Rows go through in groups of one batch, so that the keys and values of no more rows are in memory. A row's noise is
keyed by the seed, the number of the block, the row and the position in the block.

**Windows** (MDLM's semi-autoregressive continuation). For texts longer than a network was trained on, the first window
is as long as the network allows; then again and again the last tokens are kept as the beginning of a new window whose
other `stride` positions are free.

Shapes: n rows, B of a call, L positions, b of a block, P finished ones, K asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm.core.cost import Cost
from relaylm.errors import UserError
from relaylm.models.family import Family
from relaylm.models.layers import Past, TrunkAndHead
from relaylm.sampling.result import Samples, Trace, joined_rows, total_cost

CPU_CACHE = 1 << 30  # bytes of keys and values, at most
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: what separates the seeds of windows


class Cached(TrunkAndHead):
    """A network inside one block, as a denoiser of that block: what is finished is there as keys and values."""

    def __init__(self, network: Any, past: Past | None = None, before: int = 0) -> None:
        self.network, self.past, self.before = network, past, before
        self.head = network.head
        self.vocab_size, self.depth = network.vocab_size, network.depth

    def of_rows(self, rows_B: Tensor) -> Cached:
        """For some rows alone, in this order."""
        return self if self.past is None else Cached(self.network, self.past.rows(rows_B), self.before)

    def flops(self, length: int, positions: int | None = None) -> float:
        """Operations of one call on one row, after `before` finished positions."""
        return float(self.network.flops(length, positions, self.before))

    def hidden_at(self, tokens_Bb: Tensor, t_B: Tensor, positions_BK: Tensor | None) -> Tensor:
        """The trunk's output (B, K, D) at positions of the block."""
        x_BKD: Tensor = self.network.hidden_at(tokens_Bb, t_B, positions_BK, self.past)
        return x_BKD

    def after(self, tokens_nX: Tensor, writes: bool) -> Cached:
        """The same network in the block after these tokens. One that does not write only counts them."""
        past = self.network.extend(tokens_nX, self.past) if writes else None
        return Cached(self.network, past, self.before + tokens_nX.shape[1])


class Recomputed:
    """The same for any denoiser: what is finished is there as tokens, which are part of every call."""

    def __init__(self, network: Any, past_nP: Tensor | None = None) -> None:
        self.network, self.past_nP = network, past_nP
        if hasattr(network, "flops"):
            before = 0 if past_nP is None else past_nP.shape[1]
            self.flops = lambda length, positions=None: network.flops(before + length, positions)

    def of_rows(self, rows_B: Tensor) -> Recomputed:
        """For some rows alone, in this order."""
        return Recomputed(self.network, None if self.past_nP is None else self.past_nP[rows_B])

    def logits(self, tokens_Bb: Tensor, t_B: Tensor) -> Tensor:
        """Logits (B, b, V) at every position of the block."""
        logits_BLV: Tensor = self.network.logits(self._whole(tokens_Bb), t_B)
        return logits_BLV[:, -tokens_Bb.shape[1] :]

    def logits_at(self, tokens_Bb: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Logits (B, K, V) at positions of the block."""
        whole_BL = self._whole(tokens_Bb)
        before = whole_BL.shape[1] - tokens_Bb.shape[1]
        logits_BKV: Tensor = self.network.logits_at(whole_BL, t_B, positions_BK + before)
        return logits_BKV

    def after(self, tokens_nX: Tensor, writes: bool) -> Recomputed:
        """The same network in the block after these tokens."""
        return Recomputed(self.network, self._whole(tokens_nX))

    def _whole(self, tokens_nX: Tensor) -> Tensor:
        return tokens_nX if self.past_nP is None else torch.cat([self.past_nP, tokens_nX], dim=1)


def inside(network: Any) -> Cached | Recomputed:
    """A network in blocks as a denoiser of the first block; `after` makes one of the next."""
    return Cached(network) if hasattr(network, "extend") else Recomputed(network)


def rows_at_once(family: Family, rows: int, length: int) -> int:
    """At most `rows`, as many as the memory for keys and values of whole rows holds: half of what a GPU has free."""
    shapes: list[Any] = [getattr(model, "architecture", None) for model in family.models.values()]
    each = sum(8 * length * int(shape.width * shape.depth) for shape in shapes if shape is not None)
    cuda = family.device.type == "cuda"
    most = int(torch.cuda.mem_get_info(family.device)[0]) // 2 if cuda else CPU_CACHE
    return max(1, min(rows, most // max(1, each)))


@dataclass(frozen=True)
class Writing:
    """What all blocks of all rows have in common. `run(models, given_nb, first, k)` samples block k of the rows from
    number `first` on, by models inside the block; `writers` are the models that the schedule can name, and savings are
    counted against `heavy`; `rows` go at once."""

    run: Callable[[Mapping[str, Any], np.ndarray, int, int], Samples]
    models: Mapping[str, Any]
    writers: tuple[str, ...]
    heavy: str
    block: int
    rows: int
    device: torch.device

    def samples(self, given_nL: np.ndarray) -> Samples:
        """All rows, of whole blocks each."""
        starts = range(0, len(given_nL), self.rows)
        with torch.inference_mode():
            return joined_rows([self._group(given_nL[first : first + self.rows], first) for first in starts])

    def _group(self, given_nL: np.ndarray, first: int) -> Samples:
        within = {name: inside(model) for name, model in self.models.items()}
        length, block, parts, costs = given_nL.shape[1], self.block, [], []
        free_L = (given_nL < 0).any(axis=0)
        k = (int(free_L.argmax()) if free_L.any() else length - 1) // block  # the first block with anything to write
        done_nX = given_nL[:, : k * block]  # those before it, in one call
        while True:
            if done_nX.size:
                costs.append(self._finish(within, done_nX))
            parts.append(self.run(within, given_nL[:, k * block : (k + 1) * block], first, k))
            costs.append(parts[-1].cost)
            k, done_nX = k + 1, parts[-1].tokens
            if k * block >= length:
                return _side_by_side(parts, given_nL, total_cost(costs))

    def _finish(self, within: dict[str, Cached | Recomputed], tokens_nX: np.ndarray) -> Cost:
        """Put finished blocks into the past of every model that may write; returns what that cost."""
        n, length = tokens_nX.shape
        padded = np.concatenate([tokens_nX, np.repeat(tokens_nX[-1:], self.rows - n, axis=0)])  # one shape for all
        tokens = torch.from_numpy(padded.astype(np.int64)).to(self.device)
        began = time.perf_counter()
        flops = {name: n * one.flops(length, 0) for name, one in within.items() if isinstance(one, Cached)}
        made = [name for name in self.writers if name in flops]
        for name, one in within.items():
            within[name] = one.after(tokens, name in self.writers)
        return Cost(
            calls={name: n * (name in made) for name in within},
            flops=sum(flops[name] for name in made),
            flops_all_heavy=flops.get(self.heavy, 0.0),
            flops_reference=flops.get(self.heavy, 0.0),
            padded_calls=len(made) * (self.rows - n),
            network_calls=len(made),
            batch_size=self.rows,
            seconds=time.perf_counter() - began,
        )


def _side_by_side(parts: Sequence[Samples], given_nL: np.ndarray, cost: Cost) -> Samples:
    """Blocks of the same rows, after what was given before them. A row's steps are counted down over all of them."""
    n, before = len(given_nL), given_nL.shape[1] - sum(part.tokens.shape[1] for part in parts)
    step_nL, u_nL, model_nL = [], [], []
    left_n1 = np.zeros((n, 1), dtype=np.int32)
    for later, trace in enumerate(part.trace for part in reversed(parts)):
        free = trace.model_nL >= 0
        step_nL.append(np.where(trace.step_nL > 0, trace.step_nL + left_n1, 0))
        u_nL.append(np.where(free, (trace.u_nL + later) / len(parts), 0.0))
        model_nL.append(trace.model_nL)
        left_n1 = np.maximum(left_n1, step_nL[-1].max(axis=1, keepdims=True))

    def joined(first: Any, blocks: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.full((n, before), first, dtype=blocks[0].dtype), *reversed(blocks)], axis=1)

    trace = Trace(joined(0, step_nL), joined(0, u_nL), joined(-1, model_nL), parts[0].trace.models)
    tokens_nL = np.concatenate([given_nL[:, :before], *(part.tokens for part in parts)], axis=1)
    return replace(parts[0], tokens=tokens_nL, trace=trace, cost=cost, steps=sum(part.steps for part in parts))


# ------------------------------------------------------------------------------------------------ windows


def window_seed(seed: int, window: int) -> int:
    """The seed of a window or block; the first one's is the sample's own."""
    return (seed + window * GOLDEN) % 2**64 if window else seed


def continued(
    run: Callable[[np.ndarray, int], Samples], given: np.ndarray, width: int, length: int, stride: int, seed: int
) -> Samples:
    """`length` positions in windows of `width`, each after the first keeping the last width - stride tokens.

    `run(given, seed)` samples a window; `given` (L, or n x L) is what stands in the first. Each window has noise of
    its own, keyed by `window_seed`: a position of the window before is another position of the text."""
    if not 1 <= stride < width:
        raise UserError(f"the stride must be from 1 to {width - 1}, one less than the family's length, not {stride}")
    if length <= width:
        raise UserError(f"a stride is for texts longer than the family's length ({width}), but length is {length}")
    parts = [run(given, window_seed(seed, 0))]
    tokens_nL, new = parts[0].tokens, [width]
    while (have := tokens_nL.shape[1]) < length:
        fresh = min(stride, length - have)
        kept = tokens_nL[:, have - (width - fresh) :]
        window = np.concatenate([kept, np.full((len(kept), fresh), -1, dtype=kept.dtype)], axis=1)
        parts.append(run(window, window_seed(seed, len(parts))))
        tokens_nL = np.concatenate([tokens_nL, parts[-1].tokens[:, -fresh:]], axis=1)
        new.append(fresh)

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p.trace, name)[:, -count:] for p, count in zip(parts, new, strict=True)], axis=1)

    trace = Trace(join("step_nL"), join("u_nL"), join("model_nL"), parts[0].trace.models)
    steps = max(part.steps for part in parts)  # a rule may find another number of them in each window
    return replace(parts[0], tokens=tokens_nL, trace=trace, cost=total_cost([part.cost for part in parts]), steps=steps)
