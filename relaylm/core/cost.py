r"""What a sample costs: blocks as the paper counts them, true floating-point operations, measured time and energy.

One call of a Transformer of depth n and width d on a row of L positions, with logits asked for at k of them, does
(counting a multiply-add as two operations, and leaving out norms and other element-wise work)

    full block     2 L (4 + 2r) d^2  +  4 L^2 d            q, k, v, out: 4 d^2; MLP of ratio r: 2 r d^2; attention
    last block     2 L 2 d^2  +  2 k (2 + 2r) d^2  +  4 k L d     k and v everywhere, the rest at k positions only
    head           2 k d V

The paper counts blocks alone, p (B_H - B_L) / B_H, which leaves out the head: with a full head (k = L) a sandwich of
4 and 12 blocks at L = 1024, d = 768, V = 50258 saves 12.1%, not 16.7%. At the few positions a step writes, the head
costs next to nothing.

**Prices.** In every unit a call costs base + slope * k (`Price`): exactly so in operations, by measurement in
milliseconds and joules (`relaylm.measure.timing`), and its depth in blocks. So the cost of a row under a schedule, as
a mean over all plans, is known in closed form: with F free positions a step that writes a share w of the masked axis
makes a call with probability 1 - (1 - w)^F and asks for F w positions. The paper's blocks are counted at every step,
whether it makes a call or not.

**Budgets** are in any of these units for one row (one sample), or a share of what all-heavy costs that is to be saved.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from relaylm.core.schedule import Schedule, Spacing, Timetable, timetable_of
from relaylm.errors import UserError

SPACED_PLANS, MOST_PLANS = 64, 4096  # over which the cost of a spaced schedule is averaged: of one kind of row, of all
UNITS = ("flops", "blocks", "ms", "J")
_SPELLED = {"flop": "flops", "block": "blocks", "j": "J", "joule": "J", "joules": "J"}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_budget_re = re.compile(rf"(?:([a-z]+) ?:)? ?({_NUMBER}) ?(%?) ?([a-z]*)", re.IGNORECASE)
_BUDGET_HELP = f"write a share to be saved (25% or 0.25), or an amount for one row in {', '.join(UNITS)} (40ms)"


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
    flops: float | None = 0.0  # of those calls; None if a denoiser does not state them
    flops_all_heavy: float | None = 0.0  # the same calls, all made by the heavy model
    flops_reference: float | None = 0.0  # the heavy model alone, in as many uniform steps as a row has positions
    blocks_saved: float | None = None  # the paper's count, over steps: 1 - mean depth(s(i)) / depth(heavy)
    padded_calls: int = 0  # empty places in batches, computed and thrown away; not part of `calls` or `flops`
    shared_calls: int = 0  # of `calls`: not made, since rows that begin alike have their first one in common
    network_calls: int = 0  # batches sent to a network
    batch_size: int = 0  # rows in a batch, at the end
    seconds: float = 0.0
    milliseconds: float | None = None  # of those calls by the table of `relaylm.measure.timing`, where it has them
    joules: float | None = None  # of those calls by the same table

    @property
    def total_calls(self) -> int:
        """Calls of all models together."""
        return sum(self.calls.values())

    @property
    def flops_saved(self) -> float | None:
        """Share of operations saved against the reference: the heavy model alone, in as many uniform steps as a row has
        positions, on the same plans. Savings are counted against it everywhere, by who computes and by fewer calls."""
        if self.flops is None or not self.flops_reference:
            return None
        return 1 - self.flops / self.flops_reference

    def to_json(self) -> dict[str, Any]:
        """Plain data; milliseconds and joules only where they are known."""
        measured = {"milliseconds": self.milliseconds, "joules": self.joules}
        return {
            "calls": dict(self.calls),
            "flops": self.flops,
            "flops_saved": self.flops_saved,
            "blocks_saved": self.blocks_saved,
            "network_calls": self.network_calls,
            "padded_calls": self.padded_calls,
            "shared_calls": self.shared_calls,
            "batch_size": self.batch_size,
            "seconds": self.seconds,
            **{name: value for name, value in measured.items() if value is not None},
        }


def blocks_saved(models: Mapping[str, int], steps: list[str] | tuple[str, ...], heavy: str) -> float:
    """The paper's saved FLOPs of a timetable: depths by model, the model of each step, the heavy model's name."""
    return 1 - sum(models[name] for name in steps) / (len(steps) * models[heavy])


# ------------------------------------------------------------------------------------------------ prices


@dataclass(frozen=True)
class Price:
    """The price of one call on one row, base + slope * positions asked for; with `every_step`, of each step."""

    base: float
    slope: float = 0.0
    every_step: bool = False


def mean_price(
    prices: Mapping[str, Price], schedule: Schedule | Timetable, steps: float | None, free_n: np.ndarray
) -> float:
    """What a row costs on average over all plans; `free_n` is the number of free positions of each row, or says of each
    position whether it is free (n, L). The schedule has models' names in it (no roles); `steps` is T, possibly
    infinite, or None for the schedule's own."""
    if isinstance(schedule, Schedule) and schedule.spacing is not None:
        return _mean_spaced_price(prices, schedule, kinds_of_rows(free_n))
    free, rows = np.unique(free_counts(free_n), return_counts=True)
    if (table := timetable_of(schedule, steps)) is None:
        assert isinstance(schedule, Schedule)
        if any(prices[name].every_step for name in schedule.models):
            raise UserError("blocks are counted by step, and there are infinitely many: choose flops, ms or J")
        spans = -np.diff([1.0, *schedule.ends])
        each = sum(
            span * (prices[segment.model].base + prices[segment.model].slope)
            for span, segment in zip(spans, schedule.segments, strict=True)
        )
        return float(each * (free * rows).sum() / rows.sum())
    share_T = -np.diff(np.asarray(table.times))
    price_T = [prices[name] for name in table.models]
    base_T, slope_T = np.array([price.base for price in price_T]), np.array([price.slope for price in price_T])
    always_T = np.array([price.every_step for price in price_T])
    log_stay_T = np.log1p(-np.minimum(share_T, 1 - 1e-15))  # of a position's chance not to be due
    each_f = [(base_T * np.where(always_T, 1.0, -np.expm1(f * log_stay_T)) + slope_T * share_T * f).sum() for f in free]
    return float((np.array(each_f) * rows).sum() / rows.sum())


def free_counts(free_n: np.ndarray) -> np.ndarray:
    """The number of free positions of each row, given that or which positions are free (n, L)."""
    free_n = np.asarray(free_n)
    return free_n if free_n.ndim == 1 else free_n.sum(axis=1)


Kinds = tuple[tuple[bytes, float], ...]
"""Which positions of a row are free, from its first free one to its last, a byte for each, 1 if it is; and the share of
rows of which that is so."""


def kinds_of_rows(free_n: np.ndarray) -> Kinds:
    """The kinds of rows. Where only numbers of free positions are given, these are next to each other."""
    free_n, found = np.asarray(free_n), Counter[bytes]()
    if free_n.ndim == 1:
        found.update(b"\1" * int(free) for free in free_n)
    else:
        for row, count in Counter(row.tobytes() for row in free_n.astype(np.uint8)).items():
            found[row.strip(b"\0")] += count
    return tuple((kind, count / len(free_n)) for kind, count in sorted(found.items()))


def _mean_spaced_price(prices: Mapping[str, Price], schedule: Schedule, kinds: Kinds) -> float:
    """`mean_price` of a spaced schedule, over plans of a fixed seed: there is no closed form."""
    if any(prices[name].every_step for name in schedule.models):
        raise UserError("blocks are counted by step, and a spaced schedule has none: choose flops, ms or J")
    assert schedule.spacing is not None
    t_E, count_E, weight_E = spaced_sizes(kinds, schedule.spacing)
    owner_E = np.searchsorted(-np.asarray(schedule.ends), -t_E, side="right")
    price_S = [prices[segment.model] for segment in schedule.segments]
    base_S, slope_S = (np.array([getattr(price, name) for price in price_S]) for name in ("base", "slope"))
    return float(((base_S[owner_E] + slope_S[owner_E] * count_E) * weight_E).sum())


@lru_cache(256)
def spaced_sizes(kinds: Kinds, spacing: Spacing) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Calls of plans of these kinds of rows: the share masked before each, how many positions it writes, and how many
    such calls a row makes on average. Each kind has SPACED_PLANS plans, or where there are many kinds fewer."""
    from relaylm.core.plan import make_plan  # which imports torch
    from relaylm.core.spacing import spaced_events

    plans, parts = min(SPACED_PLANS, max(1, MOST_PLANS // len(kinds))), []
    for kind, share in kinds:
        given = np.where(np.frombuffer(kind, dtype=np.uint8), -1, 0)
        if kind:
            events = spaced_events(make_plan(plans, len(kind), given=given), spacing)
            parts.append((events.t_E, events.count_E, np.full(len(events.t_E), share / plans)))
    empty = np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0)
    t_E, count_E, weight_E = (np.concatenate(each) for each in zip(empty, *parts))
    return t_E, count_E, weight_E


# ------------------------------------------------------------------------------------------------ budgets


@dataclass(frozen=True)
class Budget:
    """What a row may cost: an amount of a unit, or a share of the all-heavy cost (in that unit) to be saved."""

    amount: float
    unit: str = "flops"
    share: bool = False

    def limit(self, all_heavy: float) -> float:
        """The most that a row may cost, given what it costs all-heavy."""
        return (1 - self.amount) * all_heavy if self.share else self.amount

    def __str__(self) -> str:
        saved = f"{100 * self.amount:g}% saved" + ("" if self.unit == "flops" else f" in {self.unit}")
        return saved if self.share else f"{self.amount:g} {self.unit} a row"


def parse_budget(text: str) -> Budget:
    """A budget from text. "25%" and "0.25" are the share of the all-heavy FLOPs to be saved, "25% ms" of its time;
    "3.1e12 flops", "40ms", "12J", "1536 blocks" are the most that one row may cost. The unit may also come first:
    "blocks:1536", "ms:25%"."""
    plain = " ".join(text.split())
    found = _budget_re.fullmatch(plain) if len(plain) < 200 else None  # a long one would take long to match
    if found is None or (found[1] and found[4]):
        raise UserError(f"{text!r} is no budget: {_BUDGET_HELP}")
    amount, word = float(found[2]), (found[1] or found[4]).lower()
    unit = _SPELLED.get(word, word)
    if word and unit not in UNITS:
        raise UserError(f"{word!r} in the budget {text!r} is no unit of cost: choose {', '.join(UNITS)}")
    if found[3] or not word:
        share = amount / 100 if found[3] else amount
        if not 0 <= share <= 1:
            raise UserError(f"the budget {text!r} is not a share from 0 to 1: {_BUDGET_HELP}")
        return Budget(share, unit or "flops", share=True)
    if not (amount > 0 and math.isfinite(amount)):
        raise UserError(f"the budget {text!r} must be a number above 0")
    return Budget(amount, unit)
