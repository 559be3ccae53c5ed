r"""The diffusion process, and all the randomness of a sample, drawn before any network runs.

**Forward process.** A clean sequence x is corrupted to z_t by replacing each token, independently, with the mask:

    q(z_t = x) = alpha(t),    q(z_t = mask) = 1 - alpha(t),    t in [0, 1],  alpha(0) = 1,  alpha(1) = 0.

All of relaylm couples the times: a position has one u ~ U(0, 1) and is masked while u <= 1 - alpha(t), so it is masked
at one time and stays masked for all later t.

**Reverse process.** Going from t to s < t, a masked position is unmasked with probability

    (alpha(s) - alpha(t)) / (1 - alpha(t)),

independently of the network, and then takes a token from p_theta(. | z_t, t).

**Objective.** The negative evidence lower bound in continuous time is

    L(x) = E_t E_{z_t}  w(t)  sum_{masked l}  -log p_theta(x_l | z_t, t),      w(t) = -alpha'(t) / (1 - alpha(t)),

which for the linear schedule is w(t) = 1/t. (Equation 2 of the paper prints alpha'/(1 - alpha), which is negative: a
slip of sign.) On a grid of T steps the weight of step i is the probability above, from t_i to t_{i-1}, and the sum over
steps is exact.

**Plan.** Without remasking, *when* a position is written does not depend on the network, so a plan is one u for each
free position of every row, and a supply of token noise (`relaylm.core.noise`). Both are a pure function of (seed, row,
position, draw index): the same seed gives the same plan for any batch size, device, number of steps and models. That
makes comparisons of schedules paired, and lets schedules that begin alike share their trajectories.

**Steps.** On a grid of times 1 = t_T > ... > t_0 = 0 a position is written at the step i with
1 - alpha(t_{i-1}) < u <= 1 - alpha(t_i): ceil(u T), uniform on 1..T, for the linear schedule and the uniform grid. At
T = infinity every position has its own event, at time u.

Shapes: n rows, L positions, E events, F free positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaylm.core.noise import uniforms
from relaylm.errors import UserError, checked, token_rows


@dataclass(frozen=True)
class Alpha:
    """A noise schedule: the share of tokens kept at time t, and its derivative.

    `Alpha()` is linear, `Alpha("cosine")` is 1 - cos(pi/2 (1 - t)), `Alpha("polynomial", 2)` is 1 - t^2.
    All functions take a float or a numpy array and return the same kind.
    """

    kind: str = "linear"
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "cosine", "polynomial"):
            raise UserError(f"unknown noise schedule {self.kind!r}: choose linear, cosine or polynomial")
        if not self.power > 0:
            raise UserError(f"the power of a polynomial noise schedule must be above 0, not {self.power}")

    def __call__(self, t: Any) -> Any:
        """alpha(t), falling from 1 at t = 0 to 0 at t = 1."""
        if self.kind == "cosine":
            kept = 1 - np.cos((1 - t) * (math.pi / 2))
            # cos(pi/2) is 6e-17 in floating point; alpha(0) = 1 must be exact so that no position stays masked.
            return np.where(t == 0, 1.0, kept)[()]
        return 1 - t if self.kind == "linear" else 1 - t**self.power

    def prime(self, t: Any) -> Any:
        """alpha'(t), never positive."""
        if self.kind == "cosine":
            return -(math.pi / 2) * np.sin((1 - t) * (math.pi / 2))
        if self.kind == "polynomial":
            return -self.power * t ** (self.power - 1)
        return t * 0 - 1.0

    def time_of(self, masked_share: Any) -> Any:
        """The time t at which a share 1 - alpha(t) is masked: the inverse of 1 - alpha."""
        if self.kind == "cosine":
            return 1 - np.arccos(masked_share) * (2 / math.pi)
        return masked_share if self.kind == "linear" else masked_share ** (1 / self.power)

    def weight(self, t: Any) -> Any:
        """w(t) = -alpha'(t) / (1 - alpha(t)), the weight of the masked cross-entropy at time t."""
        return -self.prime(t) / (1 - self(t))


LINEAR = Alpha()


def unmask_probability(t: Any, s: Any, alpha: Alpha = LINEAR) -> Any:
    """Chance that a position masked at time t is written on the way to s < t."""
    return (alpha(s) - alpha(t)) / (1 - alpha(t))


@dataclass(frozen=True)
class Plan:
    """n rows of L positions: which are given, and when the others are written."""

    seed: int
    rows_n: np.ndarray  # row numbers, which key the noise: row 7 is the same row in any batch
    given_nL: np.ndarray  # token ids, -1 where the position is free
    u_nL: np.ndarray  # in (0, 1) where free, 0 where given

    @property
    def n(self) -> int:
        """Rows."""
        return int(self.given_nL.shape[0])

    @property
    def length(self) -> int:
        """Positions in a row."""
        return int(self.given_nL.shape[1])


@checked
def make_plan(n: int, length: int, seed: int = 0, given: np.ndarray | None = None, first_row: int = 0) -> Plan:
    """A plan for n rows. `given` (n x length, or one row for all) holds token ids and -1 where a position is free."""
    if not 0 <= first_row <= 2**32 - n:
        raise UserError(f"row numbers must lie between 0 and 2^32 - 1, not {first_row} to {first_row + n - 1}")
    given_nL = np.full((n, length), -1, dtype=np.int64)
    if given is not None:
        given_nL[:] = token_rows(given, n, length)
    rows_n = np.arange(first_row, first_row + n, dtype=np.int64)
    u_nL = np.where(given_nL < 0, uniforms(seed, rows_n, length), 0.0)
    return Plan(seed, rows_n, given_nL, u_nL)


@dataclass(frozen=True)
class Events:
    """A plan on a grid: each row's network calls in order, as flat arrays.

    Row r has events row_ptr[r] .. row_ptr[r+1]-1; event e writes positions[start[e] : start[e] + count[e]] of its row.
    """

    row_ptr_n1: np.ndarray
    step_E: np.ndarray  # the paper's i, T down to 1; 0 at T = infinity
    t_E: np.ndarray  # time before the step; at T = infinity the event's own time, u for the linear schedule
    start_E: np.ndarray
    count_E: np.ndarray
    expected_E: np.ndarray  # positions that the event's step writes on average; with the count it sets a call's shape
    positions_F: np.ndarray  # all free positions, row by row, in the order they are written
    step_nL: np.ndarray  # for each position the step that writes it; 0 where given (and everywhere at T = infinity)
    most_E: np.ndarray  # positions that the event could write at most

    @property
    def per_row_n(self) -> np.ndarray:
        """Events of each row."""
        return np.diff(self.row_ptr_n1)


def make_events(plan: Plan, times: Sequence[float] | None, alpha: Alpha = LINEAR) -> Events:
    """Sort a plan's positions into events, on a grid of times from 1 down to 0, or one by one (None: T = infinity)."""
    step_nL: np.ndarray
    if times is None:
        row_ptr_n1, start_E, count_E, positions_F, u_E = sort_by_key(plan.u_nL)
        step_E, t_E, expected_E = np.zeros(len(u_E), dtype=np.int32), alpha.time_of(u_E), np.zeros(len(u_E))
        step_nL = np.zeros_like(plan.given_nL, dtype=np.int32)
    else:
        masked_share = 1 - np.asarray(alpha(np.asarray(times[::-1], dtype=np.float64)))  # ascending, 0 .. 1
        step_nL = np.searchsorted(masked_share, plan.u_nL.ravel(), side="left").reshape(plan.u_nL.shape)
        step_nL = np.where(plan.given_nL < 0, step_nL, 0).astype(np.int32)
        row_ptr_n1, start_E, count_E, positions_F, step_E = sort_by_key(step_nL)
        t_E = np.asarray(times, dtype=np.float64)[len(times) - 1 - step_E]
        expected_E = plan.length * np.diff(masked_share)[step_E - 1]
    most_E = np.full(len(step_E), plan.length if times is not None else 1)
    return Events(row_ptr_n1, step_E, t_E, start_E, count_E, expected_E, positions_F, step_nL, most_E)


def sort_by_key(key_nL: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Events from keys: positions of a row with one key are one event, larger keys go first, and key 0 is in none.
    Returns row_ptr, start, count and positions as `Events` holds them, and each event's key."""
    order_nL = np.argsort(-key_nL, axis=1, kind="stable")
    sorted_key_nL = np.take_along_axis(key_nL, order_nL, axis=1)
    is_free_nL = sorted_key_nL > 0
    first_nL = is_free_nL.copy()  # does an event start here?
    if key_nL.shape[1] > 1:
        first_nL[:, 1:] &= sorted_key_nL[:, 1:] != sorted_key_nL[:, :-1]
    row_ptr_n1 = np.concatenate([[0], np.cumsum(first_nL.sum(axis=1))])
    flat_first = first_nL[is_free_nL]
    start_E = np.flatnonzero(flat_first)
    count_E = np.diff(np.concatenate([start_E, [flat_first.size]]))
    positions_F = order_nL[is_free_nL].astype(np.int64)
    return row_ptr_n1, start_E, count_E, positions_F, sorted_key_nL[is_free_nL][start_E]
