r"""Random numbers as a pure function of where they are used, and the draw of a token from them.

Philox4x32-10 is a counter-based generator: a number depends on (seed, row, position, draw index) and nothing else.

**Tokens.** A token is the winner of an exponential race: argmin_v E_v / p_v with E_v ~ Exp(1) independent is
distributed as p, exactly. Two models that nearly agree pick the same token most of the time, because they race with
the same E. The E_v come in blocks of 64 so that a CPU need not draw all of a large vocabulary: the smallest of 64
exponentials is Exp(64), it falls on a uniformly random one of them, and the others are that minimum plus fresh Exp(1)
(the exponential has no memory). A block whose best possible score is below a score already known is never opened.
Drawing lazily or in full gives the same E_v, bit for bit, so laziness cannot change the law.

Shapes: n rows, L positions, N drawn positions, V vocabulary, G blocks of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from relaylm.errors import UserError

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox multipliers and Weyl constants (Salmon et al., 2011)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
BLOCK = 64  # tokens that share one block minimum
_PIECE = 1 << 16  # uniforms that are made at once, so that they stay in the cache

# What a counter is used for; the low byte of its last word. The draw index fills the rest of that word.
_TIME, _BLOCK_MINIMUM, _TOKEN = 0, 1, 2


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32 with ten rounds. Counter words are int64 arrays or tensors that hold 32-bit values; so are the four
    words returned. Words that only broadcast to one shape save work in the first rounds. (A signed 64-bit product
    wraps, but its bits are those of the unsigned one, and the mask after the arithmetic shift removes the copies of the
    sign.)"""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ k0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """A seed as Philox's two key words."""
    if not 0 <= seed < 2**64:
        raise UserError(f"the seed must be between 0 and 2^64 - 1, not {seed}")
    return seed & _LOW, seed >> 32


def uniforms(seed: int, rows_n: np.ndarray, length: int, draw: int = 0) -> np.ndarray:
    """u in (0, 1) for each (row, position), float64 with 52 random bits (with 53, adding 1/2 could round to 1)."""
    key, position_1L = split_seed(seed), np.arange(length, dtype=np.int64)[None, :]
    u_nL, size = np.empty((len(rows_n), length)), max(1, _PIECE // max(1, length))
    for piece in (slice(start, start + size) for start in range(0, len(rows_n), size)):
        row_r1 = rows_n[piece].astype(np.int64)[:, None]
        words = philox((0, position_1L, row_r1, draw << 8 | _TIME), key)
        u_nL[piece] = (((words[0] << 20) | (words[1] >> 12)) + 0.5) * 2.0**-52
    return u_nL


Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Row numbers, positions and draw indices (N,) that key the noise of N tokens."""
Seed = int | tuple[torch.Tensor, torch.Tensor]
"""One seed for all places, or the two words (N,) of each place's own, as `split_seed` gives them."""


def _words(seed: Seed, places: Places, index_NX: torch.Tensor, use: int) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words (N, X) for each place and index."""
    row_N1, position_N1, draw_N1 = (x_N[:, None] for x_N in places)
    key: Any = split_seed(seed) if isinstance(seed, int) else tuple(word_N[:, None] for word_N in seed)
    return philox((index_NX, position_N1, row_N1, draw_N1 * 256 + use), key)


def _exponential(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Exp(1) from two 32-bit words, float64. v is fine-grained near 0, where E = -log(1 - v) is small and races are
    won: E can be as small as 2^-65, so tokens of any probability that a float64 softmax can hold keep their chance."""
    v = high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64
    return -torch.log1p(-v.clamp_max(1 - 2.0**-53))


def _block_minima(seed: Seed, places: Places, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest exponential (N, G) of each block, and the slot it falls on."""
    words = _words(seed, places, torch.arange(blocks, device=places[0].device)[None, :], _BLOCK_MINIMUM)
    return _exponential(words[0], words[1]) / BLOCK, words[2] & (BLOCK - 1)


def _open_blocks(
    seed: Seed, places: Places, block_M: torch.Tensor, minimum_M: torch.Tensor, slot_M: torch.Tensor, slots: int
) -> torch.Tensor:
    """The exponentials (M, S) of the first `slots` tokens of each listed block. Two tokens share a counter, since each
    takes two words."""
    pair_1P = torch.arange((slots + 1) // 2, device=block_M.device)[None, :]
    words = _words(seed, places, block_M[:, None] * (BLOCK // 2) + pair_1P, _TOKEN)
    extra_MPs = torch.stack([_exponential(words[0], words[1]), _exponential(words[2], words[3])], dim=-1)
    is_minimum_MS = slot_M[:, None] == torch.arange(slots, device=block_M.device)[None, :]
    return minimum_M[:, None] + extra_MPs.flatten(1)[:, :slots].masked_fill(is_minimum_MS, 0.0)


def token_noise(
    seed: int, row_N: torch.Tensor, position_N: torch.Tensor, draw_N: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """E_v ~ Exp(1) (N, V) for every token of every listed position, in full: the definition of what `race` draws."""
    n, blocks = len(row_N), -(-vocab_size // BLOCK)
    minimum_NG, slot_NG = _block_minima(seed, (row_N, position_N, draw_N), blocks)
    row_M, position_M, draw_M = (x_N.repeat_interleave(blocks) for x_N in (row_N, position_N, draw_N))
    block_M = torch.arange(blocks, device=row_N.device).repeat(n)
    noise_MS = _open_blocks(
        seed, (row_M, position_M, draw_M), block_M, minimum_NG.flatten(), slot_NG.flatten(), slots=BLOCK
    )
    return noise_MS.view(n, blocks * BLOCK)[:, :vocab_size]


def race(
    logits_NV: torch.Tensor, seed: Seed, row_N: torch.Tensor, position_N: torch.Tensor, draw_N: torch.Tensor
) -> torch.Tensor:
    """One token for each listed position from softmax(logits), exactly: argmax_v logit_v - log E_v.

    What all logits of a position have in common does not change the law, and is taken off first: beside 1e15 the noise
    would be rounded away. Opens only the blocks that could still win: a block's score is at most (its largest logit) -
    log(its minimum).
    """
    n, vocab_size = logits_NV.shape
    blocks = -(-vocab_size // BLOCK)
    largest_N = logits_NV.amax(dim=1)
    near_NV = logits_NV.double() - largest_N.where(largest_N.isfinite(), 0)[:, None].double()
    padded_NV = torch.nn.functional.pad(near_NV, (0, blocks * BLOCK - vocab_size), value=-torch.inf)
    logits_NGS = padded_NV.view(n, blocks, BLOCK)
    minimum_NG, slot_NG = _block_minima(seed, (row_N, position_N, draw_N), blocks)
    log_minimum_NG = minimum_NG.log()

    # The token that a block's minimum falls on has a known score; the best of these rules out most blocks.
    score_NG = logits_NGS.gather(2, slot_NG[..., None]).squeeze(2) - log_minimum_NG
    best_N, best_block_N = score_NG.max(dim=1)
    token_N = best_block_N * BLOCK + slot_NG.gather(1, best_block_N[:, None]).squeeze(1)
    ceiling_NG = logits_NGS.amax(dim=2) - log_minimum_NG
    which_M, block_M = torch.nonzero(ceiling_NG > best_N[:, None], as_tuple=True)
    if len(which_M):
        slots = min(BLOCK, vocab_size)
        places = row_N[which_M], position_N[which_M], draw_N[which_M]
        closed = minimum_NG[which_M, block_M], slot_NG[which_M, block_M]
        seed_M = seed if isinstance(seed, int) else (seed[0][which_M], seed[1][which_M])
        noise_MS = _open_blocks(seed_M, places, block_M, *closed, slots)
        opened_M, opened_slot_M = (logits_NGS[which_M, block_M, :slots] - noise_MS.log()).max(dim=1)
        # Scatter each opened block's winner back to its position; ties (probability zero) go to the larger id.
        top_N = best_N.scatter_reduce(0, which_M, opened_M, "amax")
        wins_M = (opened_M == top_N[which_M]) & (opened_M > best_N[which_M])
        token_N = token_N.scatter(0, which_M[wins_M], (block_M * BLOCK + opened_slot_M)[wins_M])
    return token_N


def race_and_largest(
    logits_NV: torch.Tensor,
    seed: Seed,
    row_N: torch.Tensor,
    position_N: torch.Tensor,
    draw_N: torch.Tensor,
    spoilt: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of `race` and the largest logits (N,), which are NaN if any logit is, and infinite if any is or if no
    token is possible. Then `spoilt`, of one integer, becomes 1, and any token is given."""
    largest_N = logits_NV.amax(dim=-1)
    spoilt |= (~largest_N.isfinite()).any()
    return race(logits_NV, seed, row_N, position_N, draw_N).clamp_max(logits_NV.shape[-1] - 1), largest_N
