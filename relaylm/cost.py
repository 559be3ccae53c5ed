r"""What a sample costs: blocks as the paper counts them, true floating-point operations, calls, seconds.

One call of a Transformer of depth n and width d on a row of L positions, with logits asked for at k of them, does
(counting a multiply-add as two operations, and leaving out norms and other element-wise work)

    full block     2 L (4 + 2r) d^2  +  4 L^2 d            q, k, v, out: 4 d^2; MLP of ratio r: 2 r d^2; attention
    last block     2 L 2 d^2  +  2 k (2 + 2r) d^2  +  4 k L d     k and v everywhere, the rest at k positions only
    head           2 k d V

The paper counts blocks alone, p (B_H - B_L) / B_H, which leaves out the head: with a full head (k = L) a sandwich of
4 and 12 blocks at L = 1024, d = 768, V = 50258 saves 12.1%, not 16.7%. Run where it is needed the head is nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def call_flops(
    depth: int, width: int, vocab_size: int, length: int, positions: int | None = None, mlp_ratio: int = 4
) -> float:
    """Operations of one call on one row; `positions` asked for, None for every position and no pruning."""
    linear = (4 + 2 * mlp_ratio) * width**2
    full_block = 2 * length * linear + 4 * length**2 * width
    if positions is None:
        return float(depth * full_block + 2 * length * width * vocab_size)
    keys_and_values = 2 * length * 2 * width**2
    queries_and_mlp = 2 * positions * (2 + 2 * mlp_ratio) * width**2
    last_block = keys_and_values + queries_and_mlp + 4 * positions * length * width
    return float((depth - 1) * full_block + last_block + 2 * positions * width * vocab_size)


@dataclass
class Cost:
    """The calls that were made, and what they came to. A call is one row through one network once."""

    calls: dict[str, int] = field(default_factory=dict)  # by model
    flops: float | None = 0.0  # of those calls; None if a denoiser does not say
    flops_all_heavy: float | None = 0.0  # the same calls, all made by the heavy model
    blocks_saved: float | None = None  # the paper's count, over steps: 1 - mean depth(s(i)) / depth(heavy)
    padded_calls: int = 0  # empty places in batches, computed and thrown away; not part of `calls` or `flops`
    network_calls: int = 0  # batches sent to a network
    batch_size: int = 0  # rows in a batch, at the end
    seconds: float = 0.0

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def flops_saved(self) -> float | None:
        """Share of operations saved against the heavy model making the same calls."""
        if self.flops is None or not self.flops_all_heavy:
            return None
        return 1 - self.flops / self.flops_all_heavy

    def to_json(self) -> dict[str, Any]:
        return {
            "calls": dict(self.calls),
            "flops": self.flops,
            "flops_saved": self.flops_saved,
            "blocks_saved": self.blocks_saved,
            "network_calls": self.network_calls,
            "padded_calls": self.padded_calls,
            "batch_size": self.batch_size,
            "seconds": self.seconds,
        }


def blocks_saved(models: Mapping[str, int], steps: list[str] | tuple[str, ...], heavy: str) -> float:
    """The paper's saved FLOPs of a timetable: depths by model, the model of each step, the heavy model's name."""
    return 1 - sum(models[name] for name in steps) / (len(steps) * models[heavy])
