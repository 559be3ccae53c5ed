"""How long work will take on this machine, said before it begins.

The rate is that of one timed call of the heavy model, so the estimate holds for work that is made of such calls. Work
that is made of something else (training, timing) is estimated from its own first pieces.
"""

from __future__ import annotations

import time

import torch

from relaylm.console import note
from relaylm.models.family import Family
from relaylm.sampling.engine import settings

SHORT = 30.0  # seconds, below which nothing is said
SLOWEST = 2e9  # operations a second that any machine makes: less work than SHORT times this needs no timing


def estimate(family: Family, flops: float, length: int, rows: int, everywhere: bool = False) -> float | None:
    """Seconds that so many operations take, from the second of two calls of the heavy model on `rows` rows
    (`everywhere`: with all logits); None if the model does not say what it costs."""
    model = family[family.heavy]
    if not hasattr(model, "flops"):
        return None
    tokens_BL = torch.full((rows, length), family.mask_id, device=family.device)
    t_B = torch.ones(rows, device=family.device)
    places_BK = torch.zeros((rows, 1), dtype=torch.int64, device=family.device)
    spent = 0.0
    with settings(family.device):
        for _ in range(2):  # the first call of a shape is slow
            began = time.perf_counter()
            out = model.logits(tokens_BL, t_B) if everywhere else model.logits_at(tokens_BL, t_B, places_BK)
            float(out.flatten()[0])  # waits for the device
            spent = time.perf_counter() - began
    return flops / (rows * model.flops(length, None if everywhere else 1)) * spent


def in_words(seconds: float) -> str:
    """A duration, roughly: `about 40 seconds`, `about 3 minutes`, `about 2.5 hours`."""
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def say(what: str, seconds: float | None, hint: str = "") -> None:
    """Write on standard error how long work will take, if that is over half a minute, and how to make it shorter."""
    if seconds is not None and seconds >= SHORT:
        note(f"{what}: {in_words(seconds)} on this machine{hint and f'; {hint}'}", prose=True)


def announce(
    family: Family, what: str, flops: float | None, length: int, rows: int, hint: str = "", everywhere: bool = False
) -> None:
    """`say` how long so many operations take."""
    if flops is not None and flops >= SHORT * SLOWEST:
        say(what, estimate(family, flops, length, rows, everywhere), hint)


def announce_calls(family: Family, what: str, calls: int, length: int, hint: str = "") -> None:
    """`announce` of calls of the heavy model with all logits, as measurements on text make them."""
    model = family[family.heavy]
    flops = calls * model.flops(length, None) if hasattr(model, "flops") else None
    announce(family, what, flops, length, min(calls, 4), hint, everywhere=True)


def announce_samples(
    family: Family,
    samples: int,
    length: int,
    hint: str = "",
    calls: float | None = None,
    everywhere: bool = False,
) -> None:
    """`announce` of samples, each counted as one by the heavy model in so many calls (None: those of as many steps as
    positions), if it is `everywhere` with all logits."""
    model = family[family.heavy]
    calls = length * (1 - (1 - 1 / length) ** length) if calls is None else calls
    flops = samples * calls * model.flops(length, None if everywhere else 1) if hasattr(model, "flops") else None
    batch = family.batch_size(samples, length)
    what = f"at most {samples:,} samples" if samples > 1 else "one sample"
    announce(family, what, flops, length, batch, hint, everywhere)
