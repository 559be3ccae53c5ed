"""How logits become tokens: the law that tokens are drawn from, and the draw.

Shapes: N places, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relaylm.core import noise
from relaylm.errors import UserError

COLDEST, HOTTEST = 1e-30, 1e30  # temperatures; beyond them float32 cannot hold logits over them, or they themselves


def widest_float(device: torch.device) -> torch.dtype:
    """float64; float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Law:
    """How logits become a distribution. The default is the model's own law; each option changes it."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            zero = ": 0 goes with a decoding rule" if self.temperature == 0 else ""
            raise UserError(f"temperature must be above 0, not {self.temperature}{zero}")
        if not COLDEST <= self.temperature <= HOTTEST:
            allowed = f"from {COLDEST:g} to {HOTTEST:g}, so that float32 holds logits divided by it"
            raise UserError(f"temperature must lie {allowed}, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")

    @property
    def changes(self) -> tuple[str, ...]:
        """The options in force, as text; empty if samples follow the models' own law."""
        top_p = None if self.top_p == 1 else self.top_p
        pairs = (("temperature", self.temperature, 1.0), ("top_k", self.top_k, None), ("top_p", top_p, None))
        return tuple(f"{name}={value}" for name, value, off in pairs if value != off)

    def apply(self, logits_NV: Tensor, mask_id: int) -> Tensor:
        """Logits of the law. The mask gets -inf in place; then temperature, top-k, top-p, in that order."""
        if mask_id < logits_NV.shape[-1]:
            logits_NV[:, mask_id] = -torch.inf
        if self.temperature != 1.0:
            logits_NV = logits_NV / self.temperature
        if self.top_k is not None and self.top_k < logits_NV.shape[-1]:
            kth = logits_NV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = logits_NV.sort(dim=-1, descending=True)
            p = ordered.to(widest_float(logits_NV.device)).softmax(dim=-1)
            beyond = p.cumsum(dim=-1) - p >= self.top_p  # the smallest set whose mass reaches top_p; never empty
            logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
        return logits_NV


def log_probability(logits_NV: Tensor, token_N: Tensor) -> Tensor:
    """Of a token at each place, (N,), in nats."""
    return logits_NV.gather(1, token_N[:, None])[:, 0] - logits_NV.logsumexp(dim=1)


class Drawer:
    """Draws tokens from logits under a law, by the noise of a plan's seed. `greedy` takes the likeliest token."""

    def __init__(self, law: Law, seed: int, mask_id: int, device: torch.device, greedy: bool = False) -> None:
        self.law, self.seed, self.mask_id, self.greedy = law, seed, mask_id, greedy
        self._race = noise.race_and_largest
        if device.type != "cpu":
            from relaylm.kernels.draw import race

            self._race = race
        self._spoilt = torch.zeros(1, dtype=torch.int32, device=device)  # 1 once logits were not finite

    def __call__(
        self, logits_NV: Tensor, row_N: Tensor, position_N: Tensor, draw_N: Tensor, seed: noise.Seed | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A token for each place, the logits (N, V) of the law that it was drawn from, and the largest of them; `seed`
        for places that have their own."""
        if not logits_NV.is_floating_point():
            raise UserError(f"a model must give logits in floating-point numbers, not {logits_NV.dtype}")
        lawful_NV = self.law.apply(logits_NV, self.mask_id)
        if self.greedy:
            largest_N, token_N = lawful_NV.max(dim=-1)
            self.refuse(~largest_N.isfinite().all())
        else:
            key = self.seed if seed is None else seed
            token_N, largest_N = self._race(lawful_NV, key, row_N, position_N, draw_N, self._spoilt)
        return token_N, lawful_NV, largest_N

    def refuse(self, spoilt: Tensor) -> None:
        """Take note, if `spoilt`, that logits were not finite."""
        self._spoilt |= spoilt

    def check(self) -> None:
        """Refuse what was drawn if any logits were not finite. Call it once at the end: it waits for the device."""
        spoilt = bool(self._spoilt)
        self._spoilt.zero_()
        if spoilt:
            raise UserError(
                "a model gave logits that are not finite: its weights are damaged or overflow this precision"
            )
