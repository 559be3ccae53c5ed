r"""How well models predict held-out text: masked rows evaluated, and likelihood bounds with their intervals.

**Denoisers.** The continuous-time bound on -log p(x) of one row is

    L(x) = E_t E_z  w(t)  sum_{masked l} -log p_theta(x_l | z_t, t),        t ~ U(0, 1).

Give each position a u_l ~ U(0, 1), and let the row be masked where u_l <= t. Under the weight w(t) = 1/t the number of
masked positions m is then uniform on 1..L, and given m the time has the law of the m-th smallest u (a Beta(m, L-m+1)):
the integral of C(L, m) t^(m-1) (1-t)^(L-m) is 1/m. So, exactly,

    L(x) = L * E_{m ~ U{1..L}}  mean over the m masked positions of  -log p_theta(x_l | z_t, t = u_(m)).

This is the same number with a far smaller variance: the weights 1/t are gone, and with them the need to cut t off near
0, which would make the bound too good. The m of a row's draws are stratified, rows are independent; the 95% interval is
over rows.

**Schedules.** With T steps the state changes at grid times only: a position is written from the state at the smallest
grid time at or above its u. Rounding t up to the grid, with the model that the schedule has there, therefore gives
the bound of the T-step sampler itself (the same argument: given the masked positions of a step, those that are due are
a uniform choice among them). `schedule_likelihood` computes it for many schedules at once.

**Causal models** (judges): the mean of -log p(x_l | x_<l) over all positions but the first, which is given.

Everything is in bits per symbol (token); perplexity is 2^bits. Where a model gives a token of the text no probability
the bound is infinite, and has no interval. A loss that is not a number is refused.

**Memory.** Networks run a batch at a time. There is never a B x L x V tensor of a model that has a trunk and a head.

Shapes: N rows, B of them in a call, L positions, D draws, M scored positions, V vocabulary, K models, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.core.noise import uniforms
from relaylm.core.schedule import Timetable
from relaylm.errors import UserError, checked
from relaylm.measure import metrics
from relaylm.models.family import Family
from relaylm.models.text import read_text, wrap_marks, wrapped_rows
from relaylm.sampling.engine import settings
from relaylm.sampling.policy import check_whole

# ------------------------------------------------------------------------------------------------ rows of text


def held_out(family: Family | None, text: str | Path | None = None) -> np.ndarray | None:
    """Tokens of a text file, or of the family's held-out text; None if there is none. Where rows are packed between
    marks (`corpus`, wrap) only whole rows are kept, since the networks learned from such rows."""
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


def text_rows(family: Family, text: Any, least: int, most: int) -> np.ndarray:
    """Rows of a family's token ids, `least` to `most` in a row, as an array; anything else is refused."""
    rows, size = np.asarray(text), family.vocab_size
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or not len(rows) or not least <= rows.shape[1] <= most:
        wanted = f"{least} to {most}" if most < 2**32 else f"at least {least}"
        raise UserError(f"held-out text must be rows of {wanted} token ids, not {rows.dtype} in shape {rows.shape}")
    if rows.min() < 0 or rows.max() >= size:
        raise UserError(f"held-out text must hold token ids from 0 to {size - 1}, not {rows.min()} to {rows.max()}")
    return rows


def mask_counts(n: int, length: int, draws: int, seed: int) -> np.ndarray:
    """(N, D) numbers of masked positions, uniform on 1 .. L and stratified over the draws of each row."""
    if draws < 1:
        raise UserError(f"the number of draws must be at least 1, not {draws}")
    shift_N1 = uniforms(seed, np.arange(n), 1, draw=draws)
    return np.ceil((np.arange(draws) + shift_N1) / draws * length).clip(1, length).astype(np.int64)


# ------------------------------------------------------------------------------------------------ masked rows


@dataclass(frozen=True)
class MaskedSums:
    """Sums over the masked positions of each row."""

    count_N: np.ndarray  # masked positions
    nll_KN: np.ndarray  # -log p of the true tokens, by model
    kl_PN: np.ndarray  # KL(heavy || light), by pair


def masked_sums(
    models: Mapping[str, Any],
    pairs: Sequence[tuple[str, str]],
    tokens_NL: np.ndarray,
    masked_NL: np.ndarray,
    t_N: np.ndarray,
    mask_id: int,
    *,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> MaskedSums:
    """All models on the same masked rows: cross-entropy of each, KL(heavy || light) of each pair (light, heavy)."""
    check_whole(models)
    names = list(models)
    where = _device(models[names[0]], device)
    index_P = [(names.index(light), names.index(heavy)) for light, heavy in pairs]
    rows, length = tokens_NL.shape
    batch = batch_size or max(1, (32_768 if where.type == "cuda" else 4096) // length)
    vocab = max(int(getattr(model, "vocab_size", 256)) for model in models.values())
    size = max(1, (2**28 if where.type == "cuda" else 2**22) // (vocab * len(names)))  # positions in a piece
    nll_KN, kl_PN = np.zeros((len(names), rows)), np.zeros((len(pairs), rows))
    exact = torch.float32 if where.type == "mps" else torch.float64  # which MPS does not have
    with settings(where):
        for start in range(0, rows, batch):
            part = slice(start, min(rows, start + batch))
            tokens_BL = torch.from_numpy(tokens_NL[part].astype(np.int64)).to(where)
            masked_BL = torch.from_numpy(masked_NL[part]).to(where)
            t_B = torch.from_numpy(t_N[part].astype(np.float64 if where.type == "cpu" else np.float32)).to(where)
            noisy_BL = torch.where(masked_BL, mask_id, tokens_BL)
            heads = [_logits_at(model, noisy_BL, t_B) for model in models.values()]
            flat_F = masked_BL.flatten().nonzero()[:, 0]
            nll_KB = torch.zeros(len(names), len(tokens_BL), dtype=exact, device=where)
            kl_PB = torch.zeros(len(pairs), len(tokens_BL), dtype=exact, device=where)
            for flat_M in flat_F.split(size):
                row_M, target_M = flat_M // length, tokens_BL.flatten()[flat_M]
                log_p = [without_mask(head(flat_M).to(exact), mask_id).log_softmax(dim=-1) for head in heads]
                for k, log_p_MV in enumerate(log_p):
                    nll_KB[k].index_add_(0, row_M, -log_p_MV.gather(1, target_M[:, None])[:, 0])
                for p, (light, heavy) in enumerate(index_P):
                    kl_PB[p].index_add_(0, row_M, kl(log_p[heavy], log_p[light]))
            nll_KN[:, part], kl_PN[:, part] = nll_KB.cpu().numpy(), kl_PB.cpu().numpy()
            if on_rows is not None:
                on_rows(part.stop, rows)
    return MaskedSums(masked_NL.sum(axis=1), check_losses(nll_KN), kl_PN)


def _logits_at(model: Any, noisy_BL: Tensor, t_B: Tensor) -> Callable[[Tensor], Tensor]:
    """Run a model's trunk, and return a function from flat positions to their logits."""
    length = noisy_BL.shape[1]
    if hasattr(model, "hidden_at") and hasattr(model, "head"):
        hidden_FD = model.hidden_at(noisy_BL, t_B, None).flatten(0, 1)
        return lambda flat_M: model.head(hidden_FD[flat_M], t_B[flat_M // length])
    logits_FV = model.logits(noisy_BL, t_B).flatten(0, 1)
    return lambda flat_M: logits_FV[flat_M]


def without_mask(logits_MV: Tensor, mask_id: int) -> Tensor:
    """Logits under which the mask has no probability."""
    if mask_id >= logits_MV.shape[-1]:
        return logits_MV
    return logits_MV.index_fill(-1, torch.tensor([mask_id], device=logits_MV.device), -torch.inf)


def log_probabilities(model: Any, tokens_BL: Tensor, t_B: Tensor, places_BK: Tensor, mask_id: int) -> Tensor:
    """Log-probabilities (B, K, V) of the clean token at places of each row, in float64."""
    return without_mask(model.logits_at(tokens_BL, t_B, places_BK).double(), mask_id).log_softmax(dim=-1)


def kl(log_p_XV: Tensor, log_q_XV: Tensor) -> Tensor:
    """KL(p || q) in nats; where p is 0 nothing is added, also if q is 0 too."""
    p_XV = log_p_XV.exp()
    return torch.where(p_XV > 0, p_XV * (log_p_XV - log_q_XV), 0.0).sum(dim=-1)


# ------------------------------------------------------------------------------------------------ bounds


@dataclass(frozen=True)
class Bound:
    """Bits per symbol and their 95% interval over rows."""

    bits: float
    low: float
    high: float
    rows: int
    symbols: int  # scored, each counted once
    draws: int  # times drawn for each row; 1 for a causal model

    def __str__(self) -> str:
        return in_words(self.bits, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """All of it, with the perplexity and its interval."""
        interval = [perplexity_of(self.low), perplexity_of(self.high)]
        return {**asdict(self), "perplexity": perplexity_of(self.bits), "perplexity_interval": interval}


def perplexity_of(bits: float) -> float:
    """2^bits, infinite where no float64 holds it."""
    return 2.0**bits if bits < 1024 else math.inf


def in_words(bits: float, low: float, high: float) -> str:
    """A bound as a line of text."""
    if math.isinf(bits):
        return "infinitely many bits per symbol: a token of the text has no probability, so the perplexity is infinite"
    interval = f"95%: {low:.4f} to {high:.4f}" if math.isfinite(high - low) else "one row has no interval"
    return f"{bits:.4f} bits per symbol ({interval}), perplexity {perplexity_of(bits):.4g}"


def check_losses(nats: np.ndarray) -> np.ndarray:
    """Losses, of which none may be NaN; infinity is a loss."""
    if np.isnan(nats).any():
        raise UserError("a model gave logits that are not finite: its weights are damaged or overflow this precision")
    return nats


@checked
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
    (padding does not); `precision="bf16"` runs the network under autocast; `on_rows(done, total)` receives progress."""
    models = {"": denoiser} if timetable is None else dict(denoiser)
    check_whole({name or "the model": model for name, model in models.items()})
    if timetable is not None and (missing := sorted(set(timetable.models) - set(models))):
        raise UserError(f"there is no model {missing[0]!r} for this schedule: there are {', '.join(models)}")
    first = next(iter(models.values()))
    mask = first.mask_id if mask_id is None else mask_id
    where = _device(first, device)
    n, length = tokens_NL.shape
    real_N = np.full(n, length) if real_N is None else real_N
    m_ND = mask_counts(n, length, draws, seed)
    rising = np.asarray([] if timetable is None else timetable.times[::-1])
    total_N = np.zeros(n)
    for start, stop in _batches(n, length, batch_size, first):
        tokens_BL = torch.from_numpy(tokens_NL[start:stop].astype(np.int64)).to(where)
        scored_BL = _real(tokens_BL, real_N[start:stop])
        for draw in range(draws):
            u_BL = uniforms(seed, np.arange(start, stop), length, draw)
            t_B = np.take_along_axis(np.sort(u_BL, axis=1), m_ND[start:stop, draw, None] - 1, axis=1)[:, 0]
            name_B = np.full(len(t_B), "")
            if timetable is not None:  # rounded up: rising[i - 1] < t <= rising[i] at the paper's step i
                i_B = np.searchsorted(rising, t_B, side="left")
                t_B, name_B = rising[i_B], np.asarray([timetable.s(int(i)) for i in i_B])
            masked = u_BL <= t_B[:, None]
            masked_BL = torch.from_numpy(masked).to(where)
            noisy_BL = torch.where(masked_BL, mask, tokens_BL)
            time_B = torch.from_numpy(t_B.astype(np.float32)).to(where)
            sums_B = torch.zeros(stop - start, dtype=torch.float64, device=where)
            for name in sorted(set(name_B)):
                mine = torch.from_numpy(np.flatnonzero(name_B == name)).to(where)
                index_M = (masked_BL & scored_BL)[mine].reshape(-1).nonzero()[:, 0]
                with torch.no_grad(), _autocast(where, precision):
                    logits_MV = _logits_at(models[name], noisy_BL[mine], time_B[mine])(index_M)
                logits_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
                target_M = tokens_BL[mine].reshape(-1)[index_M]
                nll_M = F.cross_entropy(without_mask(logits_MV, mask), target_M, reduction="none").double()
                sums_B.index_add_(0, mine[index_M // length], nll_M)
            total_N[start:stop] += sums_B.cpu().numpy() * (length / masked.sum(axis=1)) / draws
        if on_rows is not None:
            on_rows(stop, n)
    return _interval(total_N, real_N, draws)


def causal_bound(
    model: Any,
    tokens_NL: np.ndarray,
    *,
    real_N: np.ndarray | None = None,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    precision: str = "fp32",
) -> Bound:
    """Bits per symbol under a left-to-right model, the first symbol of each row given."""
    where = _device(model, device)
    n, length = tokens_NL.shape
    real_N = np.full(n, length) if real_N is None else real_N
    total_N = np.zeros(n)
    for start, stop in _batches(n, length, batch_size, model):
        tokens_BL = torch.from_numpy(tokens_NL[start:stop].astype(np.int64)).to(where)
        scored_BL = _real(tokens_BL, real_N[start:stop])[:, 1:]
        with torch.no_grad(), _autocast(where, precision):
            logits_BLV = model.logits(tokens_BL, torch.ones(stop - start, device=where))[:, :-1]
        nll_BL = F.cross_entropy(logits_BLV.float().transpose(1, 2), tokens_BL[:, 1:], reduction="none").double()
        total_N[start:stop] = (nll_BL * scored_BL).sum(dim=1).cpu().numpy()
    return _interval(total_N, real_N - 1, 1)


def _device(model: Any, device: torch.device | str | None) -> torch.device:
    return torch.device(getattr(model, "device", None) or "cpu" if device is None else device)


def _batches(n: int, length: int, batch_size: int | None, model: Any) -> list[tuple[int, int]]:
    """Slices of rows whose logits take at most about a gigabyte."""
    if batch_size is None:
        cells = length * max(int(getattr(model, "vocab_size", 32)), 256)
        batch_size = max(1, min(128, 2**28 // cells))
    return [(start, min(n, start + batch_size)) for start in range(0, n, batch_size)]


def _real(tokens_BL: Tensor, real_B: np.ndarray) -> Tensor:
    real = torch.from_numpy(np.asarray(real_B).astype(np.int64)).to(tokens_BL.device)
    return torch.arange(tokens_BL.shape[1], device=tokens_BL.device) < real[:, None]


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def _interval(nats_N: np.ndarray, symbols_N: np.ndarray, draws: int) -> Bound:
    """Total over total (rows may differ in length), with the interval of a ratio of sums."""
    found = metrics.ratio_estimate(check_losses(nats_N), symbols_N)
    bits, low, high = (float(x) / math.log(2) for x in (found.value, found.low, found.high))
    return Bound(bits, low, high, len(nats_N), int(symbols_N.sum()), draws)
