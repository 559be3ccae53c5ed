r"""Which positions one call writes, by distance: spaced plans.

Positions that one call writes are drawn independently of each other, so what they know of each other is lost. That
depends on how far apart they are. A *spacing* of distance D lets a call write only positions that are pairwise at least
D apart. It is a function of the plan alone: no network is asked, and a row's calls depend on its own u only.

With the free positions of a row in plan order, that is by falling u:

- **sets**: a call takes, in plan order, every remaining position that is at least D from those it has taken. A row
  needs about 1.5 D calls whatever its length, and at most 2 D - 1.
- **prefix**: a call takes the next positions in plan order up to the first that is nearer than D to one of them. The
  order in which positions are written is that of the plan, uniformly random; the calls are more.

**Law.** Let the calls of a row write the sets S_1, ..., S_C. Given the plan, the tokens have probability

    p(x) = prod_c  prod_{l in S_c}  p_{s(c)}( x_l | x_{S_1}, ..., x_{S_{c-1}}, given ),

where s(c) is the model of the call, which the schedule names by the share of free positions that are masked before it.
D = 1 writes everything in one call; D = L writes one position a call, the law of T = infinity.

Shapes: n rows, L positions, R rows of a piece, W words of bits, X places of all its rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from relaylm.core.plan import Events, Plan, sort_by_key
from relaylm.core.schedule import Spacing
from relaylm.errors import UserError

_PIECE = 1 << 19  # positions of the rows that are worked on at once, so that they stay in the cache
_FEW = 16  # rows up to which one after the other is faster than rank by rank


def spaced_calls(u_nL: np.ndarray, free_nL: np.ndarray, spacing: Spacing) -> np.ndarray:
    """The call that writes each position, (n, L) int32: 1 for the first, 0 where the position is not free."""
    n, length = u_nL.shape
    near = min(spacing.distance, length) - 1  # positions up to this far away do not go together
    call_nL = np.zeros((n, length), dtype=np.int32)
    if near == 0:
        return free_nL.astype(np.int32)

    def fill(piece: slice) -> None:
        free_R, order_RL = free_nL[piece].sum(axis=1), _plan_order(u_nL[piece], free_nL[piece])
        if len(free_R) > _FEW:
            order_LR = np.ascontiguousarray(order_RL.T)
            call_LR = (_sets if spacing.form == "sets" else _prefix)(order_LR, free_R, length, near)
            call_nL[piece].ravel()[order_LR + length * np.arange(len(free_R))] = call_LR
        else:
            for call_L, order_L, free in zip(call_nL[piece], order_RL.tolist(), free_R.tolist(), strict=True):
                call_L[:] = _row(order_L[:free], length, near, spacing.form == "prefix")

    size = max(1, _PIECE // (length + 2 * near))
    pieces = [slice(start, start + size) for start in range(0, n, size)]
    if len(pieces) == 1:
        fill(pieces[0])
    else:  # numpy lets other threads work meanwhile
        with ThreadPoolExecutor(min(len(pieces), torch.get_num_threads())) as pool:
            list(pool.map(fill, pieces))
    return call_nL


def _plan_order(u_RL: np.ndarray, free_RL: np.ndarray) -> np.ndarray:
    """The positions of each row by falling u, those that are not free last. Sorting whole numbers, the leading bits of
    u with the position below them, is several times faster than `argsort`, which is left to rows where two of u
    differ in lower bits only."""
    at_L = np.arange(u_RL.shape[1])
    shift = len(at_L).bit_length()

    def falls(u_RL: np.ndarray, free_RL: np.ndarray) -> np.ndarray:
        return np.where(free_RL, ~u_RL.view(np.int64), at_L << shift)  # bits of positive floats are in their order

    key_RL = falls(u_RL, free_RL)
    key_RL >>= shift
    key_RL <<= shift
    key_RL |= at_L
    key_RL.sort(axis=1)
    alike_R = ((key_RL[:, 1:] ^ key_RL[:, :-1]) >> shift == 0).any(axis=1)
    key_RL &= (1 << shift) - 1
    if alike_R.any():
        key_RL[alike_R] = np.argsort(falls(u_RL[alike_R], free_RL[alike_R]), axis=1, kind="stable")
    return key_RL


def _row(order: list[int], length: int, near: int, prefix: bool) -> list[int]:
    """One row's calls. Sets of positions are whole numbers with a bit for each, the highest for the first in plan
    order, so the highest bit of what may still join a call is the next that does."""
    call, number, bit = [0] * length, 0, [0] * length
    order = order[::-1]
    for rank, position in enumerate(order):
        bit[position] = 1 << rank
    left = (1 << len(order)) - 1
    before = [*[left] * near, *accumulate(bit, initial=left)]  # all, and again those before each position - near
    after = [*accumulate(bit), *[left] * near][near:]
    far_L = [low - high for low, high in zip(before, after, strict=False)]
    while left:
        number, open_ = number + 1, left
        while open_:
            if prefix and open_.bit_length() != left.bit_length():
                break
            position = order[open_.bit_length() - 1]
            call[position] = number
            left ^= bit[position]
            open_ &= far_L[position]
    return call


def _sets(order_KR: np.ndarray, count_R: np.ndarray, length: int, near: int) -> np.ndarray:
    """The call (K, R) of each row's first `count_R` positions in plan order: first-fit colouring, rank by rank.

    A call is a bit of a word, and the bits of positions within reach are taken. With the row in blocks of D positions
    these are all of the position's own block, of the block before it those that lie further on in theirs than it does
    in its own, and of the block after it those that lie less far: D - 1 neighbours if even blocks are stored together,
    and odd ones. Positions that find all bits taken belong to later calls and are coloured in turn."""
    rows, far = len(count_R), near + 1
    word = np.dtype(np.int32 if min(2 * near + 1, length) <= 32 else np.int64)
    block_L, offset_L = np.divmod(np.arange(length) + far, far)  # block 0 is empty, and so is the last
    half = ((block_L[-1] + 1) // 2 + 1) * far
    own_L = block_L % 2 * half + block_L // 2 * far + offset_L
    first_L = (block_L - 1) % 2 * half + (block_L - 1) // 2 * far + offset_L + 1
    own_X, used_X = np.zeros(2 * rows * half, dtype=word), np.zeros(2 * rows * half // far, dtype=word)
    reach_X = as_strided(own_X[:near].view(f"V{near * word.itemsize}"), (len(own_X) - near + 1,), (word.itemsize,))
    row_R, row_block_R, each_R = (step * np.arange(rows) for step in (2 * half, 2 * half // far, near))
    fewest = count_R.min(initial=0)
    bit_KR = np.zeros(order_KR.shape, dtype=word)
    for rank in range(int(count_R.max(initial=0))):
        at_R = order_KR[rank]
        block_R = block_L[at_R] + row_block_R
        used_R = used_X[block_R]
        seen_R = used_R | np.bitwise_or.reduceat(reach_X[first_L[at_R] + row_R].view(word), each_R)
        bit_R = np.bitwise_and(~seen_R, seen_R + 1, out=bit_KR[rank])  # 0 if all are taken
        if rank >= fewest:
            bit_R[rank >= count_R] = 0
        own_X[own_L[at_R] + row_R] = bit_R
        used_X[block_R] = used_R | bit_R
    call_KR = np.frexp(bit_KR)[1]
    later_R = count_R - (bit_KR != 0).sum(axis=0)
    if later_R.any():
        row_r = np.flatnonzero(later_R)
        rank_Kr = np.argsort(bit_KR[:, row_r] != 0, axis=0, kind="stable")[: later_R.max()]
        call_Kr = _sets(order_KR[rank_Kr, row_r], later_R[row_r], length, near)
        call_KR[rank_Kr, row_r] += call_Kr + 8 * word.itemsize * (call_Kr > 0)
    return call_KR


def _prefix(order_LR: np.ndarray, free_R: np.ndarray, length: int, near: int) -> np.ndarray:
    """The call (L, R) of each row's positions in plan order. `back` says how many ranks ago the last position within
    reach came; a call ends where that is not before it began. (Differences wrap around: those to later ranks are too
    large to matter.)"""
    rows = len(free_R)
    kind = np.uint16 if length <= 1 << 15 else np.uint32
    rank_LR = np.empty((length, rows), dtype=kind)
    np.put_along_axis(rank_LR, order_LR, np.arange(length, dtype=kind)[:, None], axis=0)
    back_LR = np.full((length, rows), np.iinfo(kind).max, dtype=kind)
    for d in range(1, near + 1):
        since_XR = rank_LR[d:] - rank_LR[:-d]
        np.minimum(back_LR[d:], since_XR, out=back_LR[d:])
        np.minimum(back_LR[:-d], -since_XR, out=back_LR[:-d])
    back_LR = np.take_along_axis(back_LR, order_LR, axis=0)
    call_LR = np.zeros((length, rows), dtype=np.int32)
    call_R: np.ndarray = np.ones(rows, dtype=np.int32)
    age_R: np.ndarray = np.zeros(rows, dtype=kind)
    for rank in range(int(free_R.max(initial=0))):
        ends_R = back_LR[rank] <= age_R
        call_R += ends_R
        age_R[ends_R] = 0
        age_R += 1
        call_LR[rank] = call_R * (rank < free_R)
    return call_LR


def spaced_events(plan: Plan, spacing: Spacing) -> Events:
    """The calls of every row of a plan under a spacing."""
    call_nL = spaced_calls(plan.u_nL, plan.given_nL < 0, spacing)
    most = -(-plan.length // spacing.distance)
    return events_of_calls(plan, call_nL, positions_per_call(plan.length, spacing), most)


def events_of_calls(plan: Plan, call_nL: np.ndarray, expected: float | None = None, most: int | None = None) -> Events:
    """Events from the call, 1 and up, that writes each free position. They are counted down to 1; an event's time is
    the share of its row's free positions that are masked before it. `expected` positions are written by a call, and
    `most` at most; None: exactly as many in all rows."""
    free_nL = plan.given_nL < 0
    step_nL = np.where(free_nL, call_nL.max(axis=1, keepdims=True) + 1 - call_nL, 0).astype(np.int32)
    row_ptr_n1, start_E, count_E, positions_F, step_E = sort_by_key(step_nL)
    free_n = free_nL.sum(axis=1)
    row_E = np.repeat(np.arange(plan.n), np.diff(row_ptr_n1))
    written_E = start_E - (np.cumsum(free_n) - free_n)[row_E]
    t_E = (free_n[row_E] - written_E) / free_n[row_E]
    expected_E = count_E.astype(np.float64) if expected is None else np.full(len(step_E), expected)
    most_E = count_E if most is None else np.full(len(step_E), most)
    return Events(row_ptr_n1, step_E, t_E, start_E, count_E, expected_E, positions_F, step_nL, most_E)


def positions_per_call(length: int, spacing: Spacing) -> float:
    """About how many positions a call writes while most of a row of `length` is masked; 0 if it is one at a time.

    Sets fill a line at random up to 0.748 of what is possible (Renyi's parking constant). A prefix ends at the first
    collision: as in the birthday problem with L / (2 D - 1) days, it has about sqrt(pi / 2 days) members."""
    if spacing.distance >= length:
        return 0.0
    if spacing.form == "sets":
        return 0.748 * length / spacing.distance
    return math.sqrt(math.pi / 2 * length / (2 * spacing.distance - 1))


def expected_calls(length: int, spacing: Spacing, rows: int = 64) -> float:
    """Calls that a fully masked row of `length` positions takes on average, over plans drawn with a fixed seed."""
    u_nL = np.random.default_rng(0).random((rows, length))
    return float(spaced_calls(u_nL, np.ones_like(u_nL, dtype=bool), spacing).max(axis=1).mean())


def spread_over(calls: float, length: int) -> Spacing:
    """The largest spacing (sets) whose mean number of calls is at most `calls`."""
    if calls < 1:
        raise UserError(f"at least one call is needed, not {calls:g}")
    found = bisect_right(range(2, length + 1), calls, key=lambda distance: expected_calls(length, Spacing(distance)))
    return Spacing(1 + found)  # a distance of 1 takes one call
