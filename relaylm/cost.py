r"""What a sample costs: blocks as the paper counts them, true floating-point operations, measured time and energy.

One call of a Transformer of depth n and width d on a row of L positions, with logits asked for at k of them, does
(counting a multiply-add as two operations, and leaving out norms and other element-wise work)

    full block     2 L (4 + 2r) d^2  +  4 L^2 d            q, k, v, out: 4 d^2; MLP of ratio r: 2 r d^2; attention
    last block     2 L 2 d^2  +  2 k (2 + 2r) d^2  +  4 k L d     k and v everywhere, the rest at k positions only
    head           2 k d V

The paper counts blocks alone, p (B_H - B_L) / B_H, which leaves out the head: with a full head (k = L) a sandwich of
4 and 12 blocks at L = 1024, d = 768, V = 50258 saves 12.1%, not 16.7%. Run where it is needed the head is nothing.

**Prices.** In every unit a call costs base + slope * k (`Price`): exactly so in operations, by measurement in
milliseconds and joules (`timing`), and its depth in blocks. So the mean cost of a row under a schedule is known in
closed form, over all plans and whatever the seed: with F free positions a step that writes a share w of the masked axis
makes a call with probability 1 - (1 - w)^F and asks for F w positions. The paper's blocks are counted at every step,
whether it makes a call or not.

**Budgets** are in any of these units for one row (one sample), or a share of what all-heavy costs that is to be saved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.errors import UserError
from relaylm.schedule import Schedule, Timetable

if TYPE_CHECKING:
    from relaylm.family import Family

UNITS = ("flops", "blocks", "ms", "J")
_SPELLED = {"flop": "flops", "block": "blocks", "j": "J", "joule": "J", "joules": "J"}
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
    flops: float | None = 0.0  # of those calls; None if a denoiser does not say
    flops_all_heavy: float | None = 0.0  # the same calls, all made by the heavy model
    blocks_saved: float | None = None  # the paper's count, over steps: 1 - mean depth(s(i)) / depth(heavy)
    padded_calls: int = 0  # empty places in batches, computed and thrown away; not part of `calls` or `flops`
    shared_calls: int = 0  # of `calls`: not made, since rows that begin alike have their first one in common
    network_calls: int = 0  # batches sent to a network
    batch_size: int = 0  # rows in a batch, at the end
    seconds: float = 0.0
    milliseconds: float | None = None  # of those calls by the table of `timing`, where it has them
    joules: float | None = None  # likewise

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
    """Of one call on one row: base + slope * positions asked for. Blocks are paid at every step, call or no call."""

    base: float
    slope: float = 0.0
    every_step: bool = False


def flops_price(model: Any, length: int) -> Price:
    """The operations of a denoiser that says what it costs."""
    slope = float(model.flops(length, 2) - model.flops(length, 1))
    return Price(float(model.flops(length, 1)) - slope, slope)


def prices(
    family: Family,
    unit: str = "flops",
    length: int | None = None,
    steps: float | None = None,
    *,
    models: Sequence[str] | None = None,
    batch_size: int | None = None,
    fresh: bool = False,
) -> dict[str, Price]:
    """What a call of each model (of `models`) costs in a unit. Milliseconds and joules come from the device's table
    and are measured where it lacks them (or always, if `fresh`), in the call shape of `steps` steps and `batch_size`
    rows; the other units need neither."""
    length = length or family.length
    names = family.names if models is None else tuple(models)
    family.check_names(names)
    chosen: dict[str, Any] = {name: family[name] for name in names}
    if unit == "flops":
        if unknown := [name for name, model in chosen.items() if not hasattr(model, "flops")]:
            raise UserError(f"{unknown[0]} does not say how many FLOPs a call takes: choose ms")
        return {name: flops_price(model, length) for name, model in chosen.items()}
    if unit == "blocks":
        if unknown := [name for name, model in chosen.items() if getattr(model, "depth", None) is None]:
            raise UserError(f"{unknown[0]} does not say how many blocks it has: choose ms")
        return {name: Price(float(model.depth), every_step=True) for name, model in chosen.items()}
    if unit not in UNITS:
        raise UserError(f"{unit!r} is no unit of cost: choose {', '.join(UNITS)}")
    from relaylm.timing import measured_price

    steps = float(length) if steps is None else steps
    found = {name: measured_price(family, name, unit, length, steps, batch_size, fresh=fresh) for name in names}
    return {name: price for name, price in found.items() if price is not None}


def mean_price(
    prices: Mapping[str, Price], schedule: Schedule | Timetable, steps: float | None, free_n: np.ndarray
) -> float:
    """What a row costs on average over all plans; `free_n` are the free positions of the rows there are. The schedule
    has models' names in it (no roles); `steps` is T, possibly infinite, or None for the schedule's own."""
    free, rows = np.unique(np.asarray(free_n), return_counts=True)
    if steps is not None and math.isinf(steps):
        if isinstance(schedule, Timetable):
            raise UserError(f"the timetable has {schedule.steps} steps, but T is infinite")
        if any(prices[name].every_step for name in schedule.models):
            raise UserError("blocks are counted by step, and there are infinitely many: choose flops, ms or J")
        spans = -np.diff([1.0, *schedule.ends])
        each = sum(
            span * (prices[segment.model].base + prices[segment.model].slope)
            for span, segment in zip(spans, schedule.segments, strict=True)
        )
        return float(each * (free * rows).sum() / rows.sum())
    table = schedule if isinstance(schedule, Timetable) else schedule.timetable(None if steps is None else int(steps))
    share_T = -np.diff(np.asarray(table.times))
    price_T = [prices[name] for name in table.models]
    base_T, slope_T = np.array([price.base for price in price_T]), np.array([price.slope for price in price_T])
    always_T = np.array([price.every_step for price in price_T])
    log_stay_T = np.log1p(-np.minimum(share_T, 1 - 1e-15))  # of a position's chance not to be due
    each_f = [(base_T * np.where(always_T, 1.0, -np.expm1(f * log_stay_T)) + slope_T * share_T * f).sum() for f in free]
    return float((np.array(each_f) * rows).sum() / rows.sum())


def expected_price(
    family: Family,
    schedule: Schedule | Timetable,
    steps: float | None,
    free_n: np.ndarray,
    length: int | None = None,
    unit: str = "flops",
) -> float:
    """`mean_price` of a row in a unit, straight from a family. For many schedules take `prices` once."""
    known = prices(family, unit, length, steps, models=tuple(dict.fromkeys(schedule.models)))
    return mean_price(known, schedule, steps, free_n)


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
    found = re.fullmatch(
        r"\s*(?:([a-z]+)\s*:)?\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(%?)\s*([a-z]*)\s*", text, re.IGNORECASE
    )
    if found is None or (found[1] and found[4]):
        raise UserError(f"{text!r} is no budget: {_BUDGET_HELP}")
    try:
        amount = float(found[2])
    except ValueError:
        raise UserError(f"{text!r} is no budget: {_BUDGET_HELP}") from None
    word = (found[1] or found[4]).lower()
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
