r"""How well a model predicts held-out text: a likelihood bound, with its interval.

**Denoisers.** The continuous-time bound on -log p(x) of one row is

    L(x) = E_t E_z  w(t)  sum_{masked l} -log p_theta(x_l | z_t, t),        t ~ U(0, 1).

Give each position a u_l ~ U(0, 1), and let the row be masked where u_l <= t. Under the weight w(t) = 1/t the number of
masked positions m is then uniform on 1..L, and given m the time has the law of the m-th smallest u (a Beta(m, L-m+1)):
the integral of C(L, m) t^(m-1) (1-t)^(L-m) is 1/m. So, exactly,

    L(x) = L * E_{m ~ U{1..L}}  mean over the m masked positions of  -log p_theta(x_l | z_t, t = u_(m)).

This is the same number with a far smaller variance: weights of 1/t are gone, and with them the need to cut t off near
0, which would make the bound too good. The m of a row's draws are stratified (antithetic), rows are independent; the
95% interval is over rows.

**Schedules.** With T steps the state changes at grid times only: a position is written from the state at the smallest
grid time at or above its u. Rounding t up to the grid, with the model that the schedule has there, therefore gives
the bound of the T-step sampler itself, models taking turns included (the same argument: given the masked positions of
a step, those that are due are a uniform choice among them).

**Causal models** (judges): the mean of -log p(x_l | x_<l) over all positions but the first, which they are given.

Everything is in bits for one symbol (token); perplexity is 2^bits.

Shapes: N rows, B of them in a call, L positions, M scored positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.corpus import wrap_marks, wrapped_rows
from relaylm.errors import UserError
from relaylm.plan import uniforms
from relaylm.schedule import Timetable
from relaylm.text import read_text
from relaylm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from relaylm.family import Family


@dataclass(frozen=True)
class Bound:
    """Bits for one symbol and their 95% interval over rows."""

    bits: float
    low: float
    high: float
    rows: int
    symbols: int  # scored, each counted once
    draws: int  # times drawn for each row; 1 for a causal model

    @property
    def perplexity(self) -> float:
        return 2.0**self.bits

    def __str__(self) -> str:
        return in_words(self.bits, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity, "perplexity_interval": [2.0**self.low, 2.0**self.high]}


def in_words(bits: float, low: float, high: float) -> str:
    return f"{bits:.4f} bits per symbol (95%: {low:.4f} to {high:.4f}), perplexity {2.0**bits:.4g}"


def held_out(family: Family | None, text: str | Path | None = None) -> np.ndarray | None:
    """Tokens of the held-out text, if there is one. Where rows were packed between marks (`corpus`, wrap), whole rows
    alone, so that what is cut every so many tokens is what the networks learned from."""
    if family is None or family.tokenizer is None:
        return None
    file = text if text is not None else family.heldout
    if file is None:
        return None
    tokens_N = np.asarray(family.tokenizer.encode(read_text(file), strict=False))
    rows_RL = wrapped_rows(tokens_N, family.length, *wrap_marks(family.tokenizer))
    return tokens_N if rows_RL is None else rows_RL.ravel()


def spread_rows(tokens_N: np.ndarray | Sequence[int], length: int, rows: int | None = None) -> np.ndarray:
    """Rows of `length` tokens, spread evenly over a text and not overlapping; all that fit if `rows` is None."""
    tokens_N = np.asanyarray(tokens_N)  # a memory map stays one
    fit = len(tokens_N) // length
    if fit < 1:
        raise UserError(f"the text has {len(tokens_N)} tokens, less than one row of {length}")
    count = fit if rows is None else max(1, min(rows, fit))
    starts = (np.arange(count) * fit // count) * length
    return np.asarray(tokens_N[starts[:, None] + np.arange(length)]).astype(np.int64)


def bound(
    denoiser: Any,
    tokens_NL: np.ndarray,
    *,
    timetable: Timetable | None = None,
    mask_id: int | None = None,
    real_N: np.ndarray | None = None,
    draws: int = 4,
    seed: int = 0,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    precision: str = "fp32",
    on_rows: Callable[[int, int], None] | None = None,
) -> Bound:
    """The likelihood bound of one denoiser on rows of tokens, in continuous time; or, with a timetable, of a T-step
    sampler whose steps go to the denoisers of a mapping by name. `real_N` is how many positions of each row count
    (padding does not); `precision="bf16"` runs the network under autocast; `on_rows(done, total)` hears of progress."""
    if draws < 1:
        raise UserError(f"the number of draws must be at least 1, not {draws}")
    models = {"": denoiser} if timetable is None else dict(denoiser)
    if timetable is not None and (missing := sorted(set(timetable.models) - set(models))):
        raise UserError(f"there is no model {missing[0]!r} for this schedule: there are {', '.join(models)}")
    first = next(iter(models.values()))
    mask = first.mask_id if mask_id is None else mask_id
    where = _place(first, device)
    n, length = tokens_NL.shape
    rows_N = np.arange(n)
    shift_N = uniforms(seed, rows_N, 1, draw=draws)[:, 0]
    total_N = np.zeros(n)
    for start, stop in _batches(n, length, batch_size, first):
        tokens_BL = torch.from_numpy(tokens_NL[start:stop].astype(np.int64)).to(where)
        scored_BL = _real(tokens_BL, None if real_N is None else real_N[start:stop])
        for draw in range(draws):
            u_BL = uniforms(seed, rows_N[start:stop], length, draw)
            m_B = np.ceil((draw + shift_N[start:stop]) / draws * length).clip(1, length).astype(np.int64)
            t_B = np.take_along_axis(np.sort(u_BL, axis=1), m_B[:, None] - 1, axis=1)[:, 0]
            t_B, name_B = _on_grid(t_B, timetable)
            masked = u_BL <= t_B[:, None]
            masked_BL = torch.from_numpy(masked).to(where)
            noisy_BL = torch.where(masked_BL, mask, tokens_BL)
            time_B = torch.from_numpy(t_B.astype(np.float32)).to(where)
            sums_B = torch.zeros(stop - start, dtype=torch.float64, device=where)
            for name in sorted(set(name_B)):
                mine = torch.from_numpy(np.flatnonzero(name_B == name)).to(where)
                index_M = (masked_BL & scored_BL)[mine].reshape(-1).nonzero()[:, 0]
                nll_M = _nll_at(models[name], noisy_BL[mine], time_B[mine], tokens_BL[mine], index_M, mask, precision)
                sums_B.index_add_(0, mine[index_M // length], nll_M)
            total_N[start:stop] += sums_B.cpu().numpy() * (length / masked.sum(axis=1)) / draws
        if on_rows is not None:
            on_rows(stop, n)
    return _interval(total_N, np.full(n, length) if real_N is None else real_N, draws)


def bound_text(
    denoiser: Any,
    tokenizer: Tokenizer,
    text: str,
    *,
    length: int,
    rows: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`bound` (or, for a causal model, `causal_bound`) on a text, as JSON: rows of `length` tokens spread over it,
    all that fit unless `rows` says how many. Adds bits per character of the text; options as for those functions."""
    ids = np.asarray(tokenizer.encode(text, strict=False), dtype=np.int64)
    tokens_NL = spread_rows(ids, length, rows)
    causal = bool(getattr(getattr(denoiser, "architecture", None), "causal", False))
    found = causal_bound(denoiser, tokens_NL, **options) if causal else bound(denoiser, tokens_NL, **options)
    return {**found.to_json(), "bits_per_character": found.bits * len(ids) / len(text), "tokens": len(ids)}


def causal_bound(
    model: Any,
    tokens_NL: np.ndarray,
    *,
    real_N: np.ndarray | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    precision: str = "fp32",
) -> Bound:
    """Bits for one symbol under a left-to-right model, the first symbol of each row given."""
    where = _place(model, device)
    n, length = tokens_NL.shape
    total_N = np.zeros(n)
    for start, stop in _batches(n, length, batch_size, model):
        tokens_BL = torch.from_numpy(tokens_NL[start:stop].astype(np.int64)).to(where)
        scored_BL = _real(tokens_BL, None if real_N is None else real_N[start:stop])[:, 1:]
        time_B = torch.ones(stop - start, device=where)
        with torch.no_grad(), _autocast(where, precision):
            logits_BLV = model.logits(tokens_BL, time_B)[:, :-1]
        nll_BL = F.cross_entropy(logits_BLV.float().transpose(1, 2), tokens_BL[:, 1:], reduction="none").double()
        total_N[start:stop] = (nll_BL * scored_BL).sum(dim=1).cpu().numpy()
    return _interval(total_N, (np.full(n, length) if real_N is None else real_N) - 1, 1)


def _on_grid(t_B: np.ndarray, timetable: Timetable | None) -> tuple[np.ndarray, np.ndarray]:
    """Times rounded up to the grid, and the names of the models that run there."""
    if timetable is None:
        return t_B, np.full(len(t_B), "")
    rising = np.asarray(timetable.times[::-1])
    i_B = np.searchsorted(rising, t_B, side="left")  # the paper's step: rising[i - 1] < t <= rising[i]
    return rising[i_B], np.asarray([timetable.s(int(i)) for i in i_B])


def _nll_at(
    denoiser: Any, noisy_BL: Tensor, time_B: Tensor, tokens_BL: Tensor, index_M: Tensor, mask: int, precision: str
) -> Tensor:
    """-log p of the true token at flat positions, float64; the mask itself has no probability."""
    length = tokens_BL.shape[1]
    with torch.no_grad(), _autocast(tokens_BL.device, precision):
        if hasattr(denoiser, "hidden_at") and hasattr(denoiser, "head"):  # the head where it is needed only
            x_BLD = denoiser.hidden_at(noisy_BL, time_B, None)
            logits_MV = denoiser.head(x_BLD.flatten(0, 1)[index_M], time_B[index_M // length])
        else:
            logits_MV = denoiser.logits(noisy_BL, time_B).flatten(0, 1)[index_M]
    logits_MV = logits_MV.to(torch.float64 if logits_MV.dtype == torch.float64 else torch.float32)
    if mask < logits_MV.shape[-1]:
        logits_MV = logits_MV.index_fill(-1, torch.tensor([mask], device=logits_MV.device), -torch.inf)
    return F.cross_entropy(logits_MV, tokens_BL.reshape(-1)[index_M], reduction="none").double()


def _place(model: Any, device: torch.device | str | None) -> torch.device:
    return torch.device(getattr(model, "device", "cpu") if device is None else device)


def _batches(n: int, length: int, batch_size: int | None, model: Any) -> list[tuple[int, int]]:
    """Slices of rows whose logits take at most about a gigabyte."""
    if batch_size is None:
        cells = length * max(int(getattr(model, "vocab_size", 32)), 256)
        batch_size = max(1, min(128, 2**28 // cells))
    return [(start, min(n, start + batch_size)) for start in range(0, n, batch_size)]


def _real(tokens_BL: Tensor, real_B: np.ndarray | None) -> Tensor:
    if real_B is None:
        return torch.ones_like(tokens_BL, dtype=torch.bool)
    real = torch.from_numpy(np.asarray(real_B).astype(np.int64)).to(tokens_BL.device)
    return torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < real[:, None]


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _interval(nats_N: np.ndarray, symbols_N: np.ndarray, draws: int) -> Bound:
    """Total over total (rows may differ in length), and the ratio's standard error."""
    symbols = int(symbols_N.sum())
    mean = nats_N.sum() / symbols
    n = len(nats_N)
    spread = math.sqrt(((nats_N - mean * symbols_N) ** 2).sum() / (n - 1) * n) / symbols if n > 1 else math.inf
    bits, margin = mean / math.log(2), 1.96 * spread / math.log(2)
    return Bound(float(bits), float(bits - margin), float(bits + margin), n, symbols, draws)
