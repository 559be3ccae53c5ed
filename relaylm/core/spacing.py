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

Shapes: n rows, L positions, R rows of a piece, W words of 64 bits.
"""

from __future__ import annotations

import math

import numpy as np

from relaylm.core.plan import Events, Plan, sort_by_key
from relaylm.core.schedule import Spacing
from relaylm.errors import UserError

_PIECE = 1 << 21  # positions of the rows that are worked on at once, so that they stay in the cache


def spaced_calls(u_nL: np.ndarray, free_nL: np.ndarray, spacing: Spacing) -> np.ndarray:
    """The call that writes each position, (n, L) int32: 1 for the first, 0 where the position is not free."""
    n, length = u_nL.shape
    near = min(spacing.distance, length) - 1  # positions up to this far away do not go together
    call_nL = np.zeros((n, length), dtype=np.int32)
    if near == 0:
        return free_nL.astype(np.int32)
    step = max(1, _PIECE // (length + 2 * near))
    fill = _fill_sets if spacing.form == "sets" else _fill_prefix
    for start in range(0, n, step):
        piece = slice(start, start + step)
        # Positions that are not free sort last and are left out rank by rank.
        key_RL = np.where(free_nL[piece], u_nL[piece], -1.0)
        order_RL = np.argsort(-key_RL, axis=1, kind="stable")
        fill(call_nL[piece], order_RL, free_nL[piece].sum(axis=1), near)
    return call_nL


def _fill_sets(call_RL: np.ndarray, order_RL: np.ndarray, free_R: np.ndarray, near: int) -> None:
    """First-fit colouring. `used` holds for each position the calls within reach of it, as a set of bits."""
    rows, length = call_RL.shape
    most = min(2 * near + 1, length)  # calls that a row can need
    words = -(-most // 63)  # 63 bits a word: the lowest zero of a full one is then still a bit
    used = np.zeros((rows, length + 2 * near, words), dtype=np.int64)
    window = np.lib.stride_tricks.sliding_window_view(used, 2 * near + 1, axis=1, writeable=True)
    window = window.transpose(0, 1, 3, 2)
    row_R = np.arange(rows)
    for rank in range(int(free_R.max(initial=0))):
        live_R = row_R if rank < free_R.min() else row_R[rank < free_R]
        at_R = order_RL[live_R, rank]
        seen_RW = used[live_R, at_R + near]
        word_R = (seen_RW != (1 << 63) - 1).argmax(axis=1)
        seen_R = seen_RW[np.arange(len(live_R)), word_R]
        bit_R = ~seen_R & (seen_R + 1)
        call_RL[live_R, at_R] = 63 * word_R + np.log2(bit_R).astype(np.int64) + 1
        if words == 1:
            window[live_R, at_R, :, 0] |= bit_R[:, None]
        else:
            window[live_R, at_R, :, word_R] |= bit_R[:, None]


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
    return events_of_calls(plan, call_nL, positions_per_call(plan.length, spacing))


def events_of_calls(plan: Plan, call_nL: np.ndarray, expected: float | None = None) -> Events:
    """Events from the call, 1 and up, that writes each free position. They are counted down to 1; an event's time is
    the share of its row's free positions that are masked before it. `expected` positions are written by a call; None:
    exactly as many in all rows."""
    free_nL = plan.given_nL < 0
    step_nL = np.where(free_nL, call_nL.max(axis=1, keepdims=True) + 1 - call_nL, 0).astype(np.int32)
    row_ptr_n1, start_E, count_E, positions_F, step_E = sort_by_key(step_nL)
    free_n = free_nL.sum(axis=1)
    row_E = np.repeat(np.arange(plan.n), np.diff(row_ptr_n1))
    written_E = start_E - (np.cumsum(free_n) - free_n)[row_E]
    t_E = (free_n[row_E] - written_E) / free_n[row_E]
    expected_E = count_E.astype(np.float64) if expected is None else np.full(len(step_E), expected)
    return Events(row_ptr_n1, step_E, t_E, start_E, count_E, expected_E, positions_F, step_nL)


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
