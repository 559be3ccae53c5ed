r"""What is compared: the schedules asked for, the light and the heavy model alone, and equal-compute rivals.

**Rivals.** A mixed schedule is worthwhile only if nothing simpler does as well at the same cost. So each is compared at
its number of floating-point operations with one model of middle depth at every step, the heavy model in fewer steps,
the heavy model on spaced plans, and the same number of light steps spread evenly or at random. The light and the heavy
model alone are always compared too, since each row's share of the quality gap is counted between them (`compare`).

Operations are compared in expectation over plans, which is exact and does not depend on the seed (`cost.mean_price`).

Shapes: n rows, L positions, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from relaylm.core.cost import mean_price
from relaylm.core.schedule import Schedule, Segment, Spacing
from relaylm.measure.prices import flops_price
from relaylm.models.family import Family

RANDOM_SEED = 1  # of the rival with randomly placed light steps
SLACK = 1e-9  # relative; expected operations are exact but for rounding


@dataclass
class Entry:
    """One row of the table."""

    label: str
    schedule: Schedule  # bound: models' names, no roles
    steps: float | None  # None for a spaced schedule
    kind: str  # "asked", "anchor" or "rival"
    rival: str | None = None  # what kind of rival
    rival_of: list[str] = field(default_factory=list)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Entries that would give the same samples are one."""
        if self.steps is None or math.isinf(self.steps):
            return (self.steps, self.schedule)
        table = self.schedule.timetable(int(self.steps))
        return table.models, table.times


def contenders(
    family: Family,
    schedules: Sequence[str | Schedule],
    steps: float | None,
    given_nL: np.ndarray,
    light: str,
    heavy: str,
    rivals: bool,
) -> list[Entry]:
    """What was asked for, in order; then the light and the heavy model; then the rivals of each mixed schedule."""
    asked = []
    for item in schedules:
        asked.append((str(item), family.bind(item, light, heavy)))
    counts = [schedule.steps for _, schedule in asked if schedule.steps is not None]
    base = steps if steps is not None else counts[0] if counts else given_nL.shape[1]
    entries: list[Entry] = []

    def add(entry: Entry) -> None:
        for other in entries:
            if other.identity == entry.identity:
                other.rival = other.rival or entry.rival  # what was asked for may be another's rival, too
                other.rival_of += [name for name in entry.rival_of if name not in other.rival_of]
                return
        entries.append(entry)

    for label, schedule in asked:
        own = schedule.steps if schedule.steps is not None and steps is None else base
        add(Entry(label, schedule, own if schedule.spacing is None else None, "asked"))
    names = {entry.label for entry in entries}
    for label, model in (("heavy", heavy), ("light", light)):
        add(Entry(label if label not in names else model, one_model(model), base, "anchor"))
    if rivals:
        free_nL = given_nL < 0
        for entry in [entry for entry in entries if entry.kind == "asked" and len(entry.schedule.models) > 1]:
            for rival in _rivals(family, entry, free_nL, heavy):
                add(rival)
    return entries


def one_model(model: str, spacing: Spacing | None = None) -> Schedule:
    """One model at every step, or on spaced plans."""
    return Schedule((Segment(model, Fraction(1)),), spacing=spacing)


def _rivals(family: Family, entry: Entry, free_nL: np.ndarray, heavy: str) -> list[Entry]:
    """The equal-compute rivals of a mixed schedule; of one on spaced plans, the heavy model with a smaller spacing."""
    found: list[Entry] = []
    length = free_nL.shape[1]
    models: Mapping[str, Any] = family.models
    mixed, steps, spacing = entry.schedule, entry.steps, entry.schedule.spacing

    def add(label: str, schedule: Schedule, steps: float | None, what: str) -> None:
        found.append(Entry(label, schedule, steps, "rival", what, [entry.label]))

    def flops(model: str, steps: float | None, spacing: Spacing | None = None) -> float:
        return expected_flops(models, one_model(model, spacing), steps, free_nL, length)

    if all(hasattr(model, "flops") for model in models.values()):
        budget = expected_flops(models, mixed, steps, free_nL, length) * (1 + SLACK)
        if steps is not None:
            # Of the models that this schedule does not use already; those it does use are in the table anyway.
            others = {name: flops(name, steps) for name in family.names if name not in mixed.models}
            if within := [name for name in others if others[name] <= budget]:
                best = max(within, key=others.__getitem__)
                add(best, one_model(best), steps, "one model of middle depth")
            fewer = steps_within(lambda count: flops(heavy, count), budget)
            if fewer is not None and fewer < steps:
                add(f"H{fewer}", one_model(heavy), fewer, "heavy in fewer steps")
        most = spacing or Spacing(max(1, length - 1))
        far = steps_within(lambda d: flops(heavy, None, replace(most, distance=d)), budget, most=most.distance)
        if far is not None and (largest := replace(most, distance=far)) != spacing:
            what = "heavy, spaced" if spacing is None else "heavy with a smaller spacing"
            add(f"heavy {largest}", one_model(heavy, largest), None, what)
    if len(mixed.models) == 2 and steps is not None and not math.isinf(steps):
        table = mixed.timetable(int(steps))
        order = [name for name in family.names if name in mixed.models]
        pair = tuple(Segment(name, count) for name in order if (count := table.models.count(name)))
        if len(pair) == 2:
            for placement, what in (("interleaved", "spread evenly"), (f"random:{RANDOM_SEED}", "placed at random")):
                schedule = Schedule(pair, placement)
                add(str(schedule), schedule, steps, f"light steps {what}")
    return found


def expected_flops(
    models: Mapping[str, Any], schedule: Schedule, steps: float | None, free_n: np.ndarray, length: int
) -> float:
    """Mean operations for a row, over all plans; `free_n` are the free positions of the rows there are, as for
    `mean_price`."""
    return mean_price({name: flops_price(models[name], length) for name in schedule.models}, schedule, steps, free_n)


def steps_within(price: Callable[[int], float], limit: float, least: int = 1, most: int = 1 << 20) -> int | None:
    """The largest number of steps from `least` to `most` whose price, which rises with it, is within the limit; None if
    not even the least is."""
    if price(least) > limit:
        return None
    low, high = least, least + 1
    while high <= most and price(high) <= limit:
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if price(middle) <= limit else (low, middle)
    return low


def base_steps(entries: Sequence[Entry]) -> float | None:
    """The number of steps of the light and the heavy model alone."""
    return next((entry.steps for entry in entries if entry.kind == "anchor"), entries[0].steps)
