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

**How sets are found.** In plan order each position joins the first call that has no position nearer than D. The calls
are the colours of a first-fit colouring, so one pass finds all of them.

Shapes: n rows, L positions, R rows of a piece, W words of bits, X places of all its rows.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch

from relaylm.core.plan import Events, Plan, sort_by_key
from relaylm.core.schedule import Spacing
from relaylm.errors import UserError

_PIECE = 1 << 20  # positions of the rows that are worked on at once, so that they stay in the cache
_FEW = 16  # rows up to which one after the other is faster than rank by rank
_LONG = 4096  # positions from which it is not


def spaced_calls(u_nL: np.ndarray, free_nL: np.ndarray, spacing: Spacing) -> np.ndarray:
    """The call that writes each position, (n, L) int32: 1 for the first, 0 where the position is not free."""
    n, length = u_nL.shape
    near = min(spacing.distance, length) - 1  # positions up to this far away do not go together
    call_nL = np.zeros((n, length), dtype=np.int32)
    if near == 0:
        return free_nL.astype(np.int32)

    def fill(piece: slice) -> None:
        # Positions that are not free sort last and are left out.
        order_RL = np.argsort(-np.where(free_nL[piece], u_nL[piece], -1.0), axis=1, kind="stable")
        free_R = free_nL[piece].sum(axis=1)
        if len(free_R) > _FEW or length >= _LONG:
            (_fill_sets if spacing.form == "sets" else _fill_prefix)(call_nL[piece], order_RL, free_R, near)
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


def _fill_sets(call_RL: np.ndarray, order_RL: np.ndarray, free_R: np.ndarray, near: int) -> None:
    """First-fit colouring, rank by rank. A position's call is a bit; what is set within reach is taken."""
    rows, length = call_RL.shape
    most = min(2 * near + 1, length)  # calls that a row can need
    bits = 31 if most <= 31 else 63  # in a word: the lowest zero of a full one is then still a bit
    wide = length + 2 * near
    own_WX = np.zeros((-(-most // bits), rows * wide), dtype=np.int32 if bits == 31 else np.int64)
    reach_WX = np.lib.stride_tricks.sliding_window_view(own_WX, 2 * near + 1, axis=1)
    every_R, fewest, order_LR = np.arange(rows), free_R.min(), np.ascontiguousarray(order_RL.T)
    call_LR = np.zeros((length, rows), dtype=np.int32)
    for rank in range(int(free_R.max(initial=0))):
        live_R = every_R if rank < fewest else np.flatnonzero(rank < free_R)
        at_R = order_LR[rank, live_R]
        place_R, word_R = live_R * wide + at_R, 0
        seen_WR = np.array([np.bitwise_or.reduce(reach_X[place_R], axis=1) for reach_X in reach_WX])
        if len(seen_WR) > 1:
            word_R = (seen_WR != (1 << bits) - 1).argmax(axis=0)
        seen_R = seen_WR[word_R, np.arange(len(at_R))]
        bit_R = ~seen_R & (seen_R + 1)
        own_WX[word_R, place_R + near] = bit_R
        call_LR[rank, live_R] = bits * word_R + np.frexp(bit_R)[1]
    np.put_along_axis(call_RL, order_RL, call_LR.T, axis=1)


def _fill_prefix(call_RL: np.ndarray, order_RL: np.ndarray, free_R: np.ndarray, near: int) -> None:
    """`reach` holds for each position the last call that has a position within reach of it."""
    rows, length = call_RL.shape
    reach = np.zeros((rows, length + 2 * near), dtype=np.int32)
    window = np.lib.stride_tricks.sliding_window_view(reach, 2 * near + 1, axis=1, writeable=True)
    row_R, now_R = np.arange(rows), np.ones(rows, dtype=np.int32)
    for rank in range(int(free_R.max(initial=0))):
        live_R = row_R if rank < free_R.min() else row_R[rank < free_R]
        at_R = order_RL[live_R, rank]
        now_R[live_R] += reach[live_R, at_R + near] == now_R[live_R]
        call_RL[live_R, at_R] = now_R[live_R]
        window[live_R, at_R] = now_R[live_R, None]


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
    low, high = 1, length  # calls(low) <= calls: one call; the number of calls rises with the distance
    if calls < 1:
        raise UserError(f"at least one call is needed, not {calls:g}")
    while low < high:
        middle = (low + high + 1) // 2
        if expected_calls(length, Spacing(middle)) <= calls:
            low = middle
        else:
            high = middle - 1
    return Spacing(low)
