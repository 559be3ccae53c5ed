"""What a call and a row cost with a family's models: operations and blocks computed, time and energy measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relaylm.console import table, terminal_width, wrapped
from relaylm.core.cost import UNITS, Budget, Price, mean_price
from relaylm.core.schedule import Schedule, Timetable
from relaylm.errors import UserError
from relaylm.measure import timing
from relaylm.measure.estimate import say
from relaylm.models.family import Family

# By denoisers themselves: the attribute, and what it says.
SAID = {"flops": ("flops", "FLOPs a call takes"), "blocks": ("depth", "blocks it has")}


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
) -> dict[str, Price]:
    """What a call of each model (of `models`) costs in a unit. Milliseconds and joules come from the device's table
    and are measured where it lacks them, in the call shape of `steps` steps and `batch_size` rows; the other units need
    neither."""
    length = length or family.length
    names = family.names if models is None else tuple(models)
    family.check_names(names)
    if unit not in UNITS:
        raise UserError(f"{unit!r} is no unit of cost: choose {', '.join(UNITS)}")
    if unit in SAID:
        chosen: dict[str, Any] = {name: family[name] for name in names}
        attribute, what = SAID[unit]
        if unknown := [name for name, model in chosen.items() if getattr(model, attribute, None) is None]:
            raise UserError(f"{unknown[0]} does not say how many {what}: choose ms")
        if unit == "flops":
            return {name: flops_price(model, length) for name, model in chosen.items()}
        return {name: Price(float(model.depth), every_step=True) for name, model in chosen.items()}
    steps = float(length) if steps is None else steps
    found = {name: timing.measured_price(family, name, unit, length, steps, batch_size) for name in names}
    return {name: price for name, price in found.items() if price is not None}


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


def cost_table(
    family: Family,
    schedules: Sequence[str | Schedule] = (),
    *,
    length: int | None = None,
    steps: float | None = None,
    batch_size: int | None = None,
    light: str | None = None,
    heavy: str | None = None,
    budget: Budget | None = None,
    fresh: bool = False,
    on_models: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What `relaylm cost` shows, in plain JSON: a call of each model and a row under each schedule, in every unit.
    A unit that is not known (a denoiser that does not say its depth, no energy counter) is None. `on_models(done,
    total)` receives progress."""
    light, heavy = family.roles(light, heavy)
    bound = [family.bind(schedule, light, heavy) for schedule in schedules]
    length = length or family.length
    if not 1 <= length <= family.length:
        raise UserError(f"length {length} is not from 1 to the family's {family.length}")
    batch = batch_size or family.batch_size(1 << 20, length)
    steps = float(length) if steps is None else steps
    began, sizes = time.perf_counter(), [getattr(model, "depth", 1) for model in family.models.values()]
    for done, name in enumerate(family.names):  # each is in the device's table after this
        timing.measured_price(family, name, "ms", length, steps, batch, fresh=fresh)
        if on_models is not None:
            on_models(done + 1, len(family.names))
            if done == 0:
                seconds = (time.perf_counter() - began) * sum(sizes) / sizes[0]
                say("timing the models", seconds, "--length makes it shorter")
    why = timing.energy_counter(family.device)[1]
    known = {
        unit: prices(family, unit, length, steps, batch_size=batch)
        for unit in (UNITS[:-1] if why else UNITS)
        if unit not in SAID or all(hasattr(model, SAID[unit][0]) for model in family.models.values())
    }
    positions = timing.usual_shape(length, steps, batch)[1]
    calls = {unit: {name: p.base + p.slope * positions for name, p in each.items()} for unit, each in known.items()}
    all_heavy = _row(known, Schedule.parse("heavy").bind(light, heavy), length, length)  # savings are against this
    listed = []
    for asked, schedule in zip(schedules, bound, strict=True):
        row = _row(known, schedule, steps, length)
        item: dict[str, Any] = {"schedule": str(asked), "models": str(schedule), "steps": schedule.steps or steps}
        item |= {"row": row, "saved": {unit: _saved(row[unit], all_heavy[unit]) for unit in UNITS}}
        if budget is not None:
            spent, most = row[budget.unit], all_heavy[budget.unit]
            if spent is None or most is None:
                raise UserError(f"the budget is in {budget.unit}, which is not known here{f' ({why})' if why else ''}")
            item["within"] = spent <= budget.limit(most) * (1 + 1e-9)
        listed.append(item)
    return {
        "kind": "cost",
        "family": {"name": family.name, "digest": family.digest},
        "device": timing.device_name(family.device),
        "length": length,
        "steps": steps,
        "batch_size": batch,
        "positions": positions,
        "heavy": heavy,
        "parameters": family.parameters,
        "call": {name: {unit: calls[unit][name] if unit in calls else None for unit in UNITS} for name in family.names},
        "all_heavy": all_heavy,
        "schedules": listed,
        "budget": None if budget is None else str(budget),
        "no_joules": why or None,
        "table": str(timing.table_path(family.device)),
    }


def _row(
    known: Mapping[str, dict[str, Price]], schedule: Schedule, steps: float, length: int
) -> dict[str, float | None]:
    """What a row costs in each unit; None where that is unknown, or endless."""
    own, row = schedule.steps or steps, dict.fromkeys(UNITS)
    for unit, each in known.items():
        endless = math.isinf(own) or schedule.spacing is not None
        if not (endless and any(price.every_step for price in each.values())):
            row[unit] = mean_price(each, schedule, own, np.array([length]))
    return row


def _saved(spent: float | None, all_heavy: float | None) -> float | None:
    return None if spent is None or not all_heavy else 1 - spent / all_heavy


def render(result: Mapping[str, Any]) -> str:
    """The table as text."""
    forms = {"blocks": ".0f", "flops": ".3g", "ms": ".3f", "J": ".4g"}
    units = [unit for unit in forms if result["all_heavy"][unit] is not None]
    sizes = {name: f"{count / 1e6:.3g}M" for name, count in result["parameters"].items()}
    calls = [
        [name, sizes.get(name, ""), *(f"{price[u]:{forms[u]}}" for u in units)]
        for name, price in result["call"].items()
    ]
    lines = [table(["one call of", "parameters", *units], calls)]
    if result["schedules"]:
        head, rows = ["one row under", *(text for unit in units for text in (unit, "saved")), ""], []
        for item in result["schedules"]:
            both = ((item["row"][u], item["saved"][u], forms[u]) for u in units)
            pairs = (("", "") if spent is None else (f"{spent:{form}}", f"{saved:.1%}") for spent, saved, form in both)
            over = "" if item.get("within", True) else "over the budget"
            rows.append([item["schedule"], *(text for pair in pairs for text in pair), over])
        lines += ["", table(head, rows)]
    steps = "infinitely many" if math.isinf(result["steps"]) else int(result["steps"])
    about = (
        f"{result['device']}: length {result['length']}, {steps} steps, {result['batch_size']} rows in a batch, "
        f"{result['positions']:.2f} positions a call; a row of a full batch. Saved: against {result['heavy']} alone in "
        f"{result['length']} steps"
    )
    notes = [f"no joules: {result['no_joules']}"] if result["no_joules"] else []
    notes += [f"budget: {result['budget']}"] if result["budget"] else []
    return "\n".join([*lines, "", *wrapped([about, *notes], terminal_width()), f"kept in {result['table']}"])
