r"""The mathematics of masked diffusion, on one page.

**Forward process.** A clean sequence x is corrupted to z_t by replacing each token, independently, with the mask:

    q(z_t = x) = alpha(t),    q(z_t = mask) = 1 - alpha(t),    t in [0, 1],  alpha(0) = 1,  alpha(1) = 0.

All of relaylm couples the times: a position has one u ~ U(0, 1) and is masked while u <= 1 - alpha(t). The same u
serves every t, so a position is masked at one time and stays masked for all later t.

**Reverse process.** Going from t to s < t, a masked position is unmasked with probability

    (alpha(s) - alpha(t)) / (1 - alpha(t)),

independently of the network, and then takes a token from p_theta(. | z_t, t). With alpha(t) = 1 - t and the grid
t_i = i/T the step at which a position is written is therefore uniform on 1..T.

**Objective.** The negative evidence lower bound in continuous time is

    L(x) = E_t E_{z_t}  w(t)  sum_{masked l}  -log p_theta(x_l | z_t, t),      w(t) = -alpha'(t) / (1 - alpha(t)),

which for the linear schedule is w(t) = 1/t. (Equation 2 of the paper prints alpha'/(1 - alpha), which is negative: a
slip of sign.) On a grid of T steps the weight of step i is (alpha(t_{i-1}) - alpha(t_i)) / (1 - alpha(t_i)) and the
sum over steps is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaylm.errors import UserError


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
