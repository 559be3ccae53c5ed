r"""MDLM's published sampler, literally: the oracle in tests, the baseline in `bench`, never the default.

All n rows go through one network at every step, all L x V logits are computed, and one categorical draw over V with the
mask decides for every position at once whether it is written and with what. Going from t to s = t - dt, a masked
position has unnormalised weights

    q_v = p_theta(v | z_t) (move(t) - move(s)),      q_mask = move(s),

and takes argmax_v q_v / E_v with E_v = 1e-10 - log(u_v + 1e-10), u uniform. `ddpm` uses move(t) = 0.999 t (log-linear
noise), `ddpm_cache` uses t itself (the same ratio) and keeps the network's answer while *no* row changed; here it is
also dropped when the model changes. A last "noise removal" pass at t = eps fills what is left, greedily.

**What float32 does to it.** `torch.rand` in float32 lies on a grid of 2^-24, so E_v is never below 2^-24, and a token
whose weight is small against q_mask cannot win whatever the draw. With q_v = p dt and small E_v = j 2^-24,

    P(v is written) = sum_j 2^-24 P(E_mask > j a) = 2^-24 / (e^a - 1),      a = s / (p dt 2^24) = s T / (p 2^24),

where p dt / s = 1 / (a 2^24) would be right: a token of probability p is written with w(p) = a / (e^a - 1) of its
chance, least at the start (s near 1) and with many steps. `precision="fp32"` is that sampler as published; "fp64" has
the intended law.

Shapes: B rows, L positions, V vocabulary with the mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm.core.schedule import Schedule, Timetable, timetable_of
from relaylm.errors import UserError
from relaylm.models.denoiser import Denoiser

NEVER = -1e6  # MDLM's log-probability of the impossible
GUARD = 1e-10  # MDLM's guard around its logarithm
PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Reference:
    """What the reference sampler returns."""

    tokens: np.ndarray  # (n, L)
    calls: dict[str, int]  # row-calls by model: n for each pass through a network
    seconds: float


def log_p_x0(model: Denoiser, x_BL: Tensor, t_B: Tensor, mask_id: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The SUBS parameterisation: log-probabilities (B, L, V) of the clean token, the mask impossible, and what is
    already written certain. In float32 the logits keep the (narrower) type that the network gives, as published. The
    network's own tensor may be overwritten."""
    logits_BLV = model.logits(x_BL, t_B)
    if mask_id >= logits_BLV.shape[-1]:
        raise UserError(
            f"the reference sampler needs a logit for the mask ({mask_id}); there are {logits_BLV.shape[-1]}"
        )
    if torch.float64 in (dtype, logits_BLV.dtype):
        logits_BLV = logits_BLV.to(dtype)
    logits_BLV[..., mask_id] += NEVER
    logits_BLV = logits_BLV - torch.logsumexp(logits_BLV, dim=-1, keepdim=True)
    written_BL = x_BL != mask_id
    logits_BLV[written_BL] = NEVER
    logits_BLV[written_BL, x_BL[written_BL]] = 0
    return logits_BLV


def draw(q_BLV: Tensor, generator: torch.Generator) -> Tensor:
    """One categorical draw per position from unnormalised weights, as MDLM does it, in the precision of the weights."""
    u_BLV = torch.rand(q_BLV.shape, dtype=q_BLV.dtype, device=q_BLV.device, generator=generator)
    return (q_BLV / (GUARD - (u_BLV + GUARD).log())).argmax(dim=-1)


def _update(
    x_BL: Tensor, p_BLV: Tensor, move_t: Tensor, move_s: Tensor, mask_id: int, generator: torch.Generator
) -> Tensor:
    q_BLV = p_BLV * (move_t - move_s)[:, None, None]
    q_BLV[..., mask_id] = move_s[:, None]
    return torch.where(x_BL != mask_id, x_BL, draw(q_BLV, generator))


def ddpm_step(
    model: Denoiser,
    x_BL: Tensor,
    t: float,
    dt: float,
    mask_id: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """One step of `ddpm`, from t to t - dt."""
    t_B = torch.full((len(x_BL),), t, dtype=dtype, device=x_BL.device)
    p_BLV = log_p_x0(model, x_BL, t_B, mask_id, dtype).exp()
    # Log-linear noise sigma(t) = -log(1 - 0.999 t) has move(t) = 1 - exp(-sigma(t)); sigma itself goes to the network.
    move_t, move_s = (1 - torch.exp(torch.log1p(-(1 - 1e-3) * time_B)) for time_B in (t_B, t_B - dt))
    return _update(x_BL, p_BLV, move_t, move_s, mask_id, generator)


def ddpm_cache_step(
    model: Denoiser,
    x_BL: Tensor,
    t: float,
    dt: float,
    mask_id: int,
    generator: torch.Generator,
    p_BLV: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """One step of `ddpm_cache`: the new tokens and the probabilities used, which the caller hands back at the next step
    if they still hold (see `still_holds`)."""
    t_B = torch.full((len(x_BL),), t, dtype=dtype, device=x_BL.device)
    if p_BLV is None:
        p_BLV = log_p_x0(model, x_BL, t_B, mask_id, dtype).exp()
    return _update(x_BL, p_BLV, t_B, t_B - dt, mask_id, generator), p_BLV


def still_holds(model: Denoiser, x_BL: Tensor, next_BL: Tensor) -> bool:
    """MDLM's rule for its cache: not one row of the batch changed, and the network does not look at the time. (One that
    does not say whether it does is taken to.)"""
    return not getattr(model, "time_conditioning", True) and bool(torch.equal(x_BL, next_BL))


def sample_reference(
    models: Mapping[str, Denoiser],
    schedule: str | Schedule | Timetable,
    n: int,
    length: int,
    *,
    mask_id: int,
    steps: int | None = None,
    sampler: str = "ddpm",
    precision: str = "fp32",
    eps: float = 1e-5,
    noise_removal: bool = True,
    given: np.ndarray | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Reference:
    """n rows, all in one batch. Times run from 1 to `eps`; at eps = 0 the last step writes all that is left. The model
    of the last step also does the noise removal. `on_step(i, tokens)` is called after step i = T..1."""
    if sampler not in ("ddpm", "ddpm_cache"):
        raise UserError(f"the reference samplers are ddpm and ddpm_cache, not {sampler!r}")
    if precision not in PRECISIONS:
        raise UserError(f"the precision is fp32 (as published) or fp64, not {precision!r}")
    if n < 1 or length < 1:
        raise UserError(f"the number of samples and the length must be at least 1, not {n} and {length}")
    if not 0 <= eps < 1:
        raise UserError(f"eps must be at least 0 and below 1, not {eps}")
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    if (table := timetable_of(parsed, steps)) is None:
        raise UserError("the reference samplers take a finite number of steps")
    unknown = [name for name in table.models if name not in models]
    if unknown:
        raise UserError(f"the schedule asks for model {unknown[0]!r}; the models are {', '.join(models)}")

    began = time.perf_counter()
    dtype = PRECISIONS[precision]
    generator = torch.Generator(device=device).manual_seed(seed)
    x_BL = torch.full((n, length), mask_id, dtype=torch.int64, device=device)
    if given is not None:
        given_BL = torch.from_numpy(np.broadcast_to(given, (n, length)).astype(np.int64)).to(device)
        x_BL = torch.where(given_BL >= 0, given_BL, x_BL)
    times = [eps + (1 - eps) * t for t in table.times]  # linspace(1, eps, T + 1) if the grid is uniform
    calls = dict.fromkeys(models, 0)
    p_BLV: Tensor | None = None
    holder = None  # whose answer p_BLV is
    with torch.inference_mode():
        for k, name in enumerate(table.models):
            model, t, dt = models[name], times[k], times[k] - times[k + 1]
            if sampler == "ddpm":
                calls[name] += n
                x_BL = ddpm_step(model, x_BL, t, dt, mask_id, generator, dtype)
            else:
                p_BLV = p_BLV if holder == name else None
                calls[name] += n if p_BLV is None else 0
                next_BL, p_BLV = ddpm_cache_step(model, x_BL, t, dt, mask_id, generator, p_BLV, dtype)
                holder = name if still_holds(model, x_BL, next_BL) else None
                x_BL = next_BL
            if on_step is not None:
                on_step(table.steps - k, x_BL)
        if noise_removal:
            name = table.models[-1]
            calls[name] += n
            t_B = torch.full((n,), times[-1], dtype=dtype, device=device)
            x_BL = log_p_x0(models[name], x_BL, t_B, mask_id, dtype).argmax(dim=-1)
    return Reference(x_BL.cpu().numpy(), calls, time.perf_counter() - began)


def truncation_weight(p: Any, s: float, steps: int) -> Any:
    """w(p) = a / (e^a - 1), a = s T / (p 2^24): the share of its probability with which a token of probability p is
    written by the float32 sampler at a step that ends at time s, of T uniform ones. 1 means untouched."""
    a = np.asarray(s * steps / 2**24) / np.asarray(p, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(a == 0, 1.0, a / np.expm1(a))[()]


def kept_mass(p_V: np.ndarray, s: float, steps: int) -> float:
    """sum_v p_v w(p_v): by how much the float32 sampler slows the writing of a position down, at time s of T steps."""
    p_V = np.asarray(p_V, dtype=np.float64)
    return float((p_V[p_V > 0] * truncation_weight(p_V[p_V > 0], s, steps)).sum())
