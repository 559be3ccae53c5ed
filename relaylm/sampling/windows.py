r"""Texts longer than a network was trained on: MDLM's semi-autoregressive continuation.

The first window, as long as the network allows, is sampled as usual; then again and again the last tokens are kept as
the beginning of a new window whose other `stride` positions are free. Any rule and any schedule run inside a window.

Shapes: n rows, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from relaylm.errors import UserError
from relaylm.sampling.result import Samples, Trace, total_cost

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: what separates the seeds of windows


def window_seed(seed: int, window: int) -> int:
    """The seed of a window of a continuation; the first window's is the sample's own."""
    return (seed + window * GOLDEN) % 2**64 if window else seed


def continued(
    run: Callable[[np.ndarray, int], Samples], given: np.ndarray, width: int, length: int, stride: int, seed: int
) -> Samples:
    """`length` positions in windows of `width`, each after the first keeping the last width - stride tokens.

    `run(given, seed)` samples a window; `given` (L, or n x L) is what stands in the first. Each window has noise of
    its own, keyed by `window_seed`: a position of the window before is another position of the text."""
    if not 1 <= stride < width:
        raise UserError(f"the stride must be from 1 to {width - 1}, one less than the family's length, not {stride}")
    if length <= width:
        raise UserError(f"a stride is for texts longer than the family's length ({width}), but length is {length}")
    parts = [run(given, window_seed(seed, 0))]
    tokens_nL, new = parts[0].tokens, [width]
    while (have := tokens_nL.shape[1]) < length:
        fresh = min(stride, length - have)
        kept = tokens_nL[:, have - (width - fresh) :]
        window = np.concatenate([kept, np.full((len(kept), fresh), -1, dtype=kept.dtype)], axis=1)
        parts.append(run(window, window_seed(seed, len(parts))))
        tokens_nL = np.concatenate([tokens_nL, parts[-1].tokens[:, -fresh:]], axis=1)
        new.append(fresh)

    def join(name: str) -> np.ndarray:
        return np.concatenate([getattr(p.trace, name)[:, -count:] for p, count in zip(parts, new, strict=True)], axis=1)

    trace = Trace(join("step_nL"), join("u_nL"), join("model_nL"), parts[0].trace.models)
    steps = max(part.steps for part in parts)  # a rule may find another number of them in each window
    return replace(parts[0], tokens=tokens_nL, trace=trace, cost=total_cost([part.cost for part in parts]), steps=steps)
