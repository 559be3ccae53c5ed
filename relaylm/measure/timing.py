r"""What a call takes on this device, in milliseconds and joules: measured once, and kept in a table.

What is timed is the sampler's own loop (queue, engine, on CUDA the captured graph) on full batches, with one model at
every step: warm-up first, then the median of several. A row's share of a batch is the price of its call. The call's
shape, and with it the price, follows from the grid: with T steps a call asks for k = (L/T) / (1 - (1 - 1/T)^L)
positions on average. Two grids, T and T/8, give two points of the line base + slope * k that `prices` prices schedules
by; it is exact at T, where both ends come from the measurement itself.

Energy is the graphics card's own counter (NVML; the whole card, all its users), read before and after a second of
calls. No other device has such a counter; where joules are asked for, an error says so.

The table is one JSON file for each device in `$XDG_CACHE_HOME/relaylm/timings`. An entry is keyed by all that the
time depends on: device and threads, versions of PyTorch and relaylm, the network's architecture and number types (not
its weights, which take no time), length and call shape. A damaged table counts as empty.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import relaylm
from relaylm.core.cost import Cost, Price
from relaylm.core.plan import Plan, make_events, make_plan
from relaylm.errors import UserError
from relaylm.files import read_json, write_json
from relaylm.models.family import Family
from relaylm.sampling.engine import Call, Engine, Shape, settings
from relaylm.sampling.law import Law
from relaylm.sampling.queue import Queue, call_shapes
from relaylm.sampling.result import Samples

REPEATS = 7  # of which the median counts
LEAST_SECONDS = 0.02  # of one repeat on CUDA, where starting and waiting cost too
ENERGY_SECONDS = 1.0  # the counter moves about ten times a second
DENSER = 8  # the line's second point has this many times fewer, larger steps


@dataclass(frozen=True)
class Timing:
    """One row through one network once, as part of a full batch."""

    ms: float
    joules: float | None
    positions: float  # asked for on average
    shape: Shape


def time_call(
    family: Family,
    name: str,
    length: int | None = None,
    steps: float | None = None,
    batch_size: int | None = None,
    *,
    fresh: bool = False,
    measure: bool = True,
) -> Timing | None:
    """The time of a call of one model in the shape that `steps` steps and `batch_size` rows give it: from the table,
    or measured and put there. With `measure` off what the table lacks is None; `fresh` measures in any case."""
    length = length or family.length
    steps = float(length) if steps is None else steps
    batch = batch_size or family.batch_size(1 << 20, length)
    shape, positions = usual_shape(length, steps, batch)
    path, key = table_path(family.device), _key(family, name, length, shape)
    found = None if fresh or key is None else _read(path).get(_digest(key))
    if found is None:
        if not measure:
            return None
        ms, joules = _measure(family, name, length, steps, batch)
        found = {"ms": ms, "joules": joules}
        if key is not None:
            today = time.strftime("%Y-%m-%d", time.gmtime())
            write_json(path, {**_read(path), _digest(key): {**found, "measured": today, **key}})
    return Timing(found["ms"], found["joules"], positions, shape)


def measured_price(
    family: Family,
    name: str,
    unit: str,
    length: int,
    steps: float,
    batch_size: int | None = None,
    *,
    fresh: bool = False,
    measure: bool = True,
) -> Price | None:
    """The price of a call in "ms" or "J"; None where the table lacks it and `measure` is off."""
    if unit == "J" and (why := energy_counter(family.device)[1]):
        raise UserError(f"joules cannot be measured here ({why}): choose flops, blocks or ms")
    dense = DENSER if steps == 1 else max(1, round((length if math.isinf(steps) else steps) / DENSER))
    near, other = (
        time_call(family, name, length, each, batch_size, fresh=fresh, measure=measure) for each in (steps, dense)
    )
    if near is None or other is None:
        return None
    amount, apart = (near.ms, other.ms) if unit == "ms" else (near.joules or 0.0, other.joules or 0.0)
    slope = 0.0
    if other.shape != near.shape:
        # Timings are noisy: more positions cost no less, and a call for none no less than nothing.
        slope = min(max((apart - amount) / (other.positions - near.positions), 0.0), amount / near.positions)
    return Price(amount - slope * near.positions, slope)


def with_measured(samples: Samples, family: Family) -> Cost:
    """The cost of samples, with the milliseconds and joules of their calls where the table has them. Measures
    nothing."""
    cost, trace, length = samples.cost, samples.trace, samples.tokens.shape[1]
    totals: dict[str, float | None] = {"ms": None, "J": None}
    for unit in totals if not energy_counter(family.device)[1] else ("ms",):
        parts = []
        for name, calls in cost.calls.items():
            if calls:
                price = measured_price(family, name, unit, length, samples.steps, cost.batch_size, measure=False)
                written = int((trace.model_nL == trace.models.index(name)).sum())
                parts.append(None if price is None else price.base * calls + price.slope * written)
        totals[unit] = None if None in parts else sum(part for part in parts if part is not None)
    return replace(cost, milliseconds=totals["ms"], joules=totals["J"])


# ------------------------------------------------------------------------------------------------ measuring


def usual_shape(length: int, steps: float, batch: int) -> tuple[Shape, float]:
    """The shape of nearly all calls on an even grid, and the positions that one asks for on average."""
    events = make_events(make_plan(1, length, 0), _times(steps))
    shapes, index_E = call_shapes(events, length, batch)
    mean = 1.0 if math.isinf(steps) else length / steps / -math.expm1(length * math.log1p(-min(1 / steps, 1 - 1e-15)))
    return shapes[statistics.mode(index_E.tolist())], mean


def _times(steps: float) -> tuple[float, ...] | None:
    return None if math.isinf(steps) else tuple(1 - k / int(steps) for k in range(int(steps) + 1))


def _full_calls(plan: Plan, steps: float) -> Iterator[tuple[Queue, Call]]:
    """Calls of a plan as the sampler makes them, without end: when rows begin to finish, from the start."""
    events = make_events(plan, _times(steps))
    model_E = np.zeros(len(events.step_E), dtype=np.int64)
    while True:
        queue, first = Queue(events, model_E, plan.length, plan.n, in_flight=plan.n), True
        while (call := queue.take()) is not None and (first or len(call.rows_R) == plan.n):
            yield queue, call
            first = False


def _measure(family: Family, name: str, length: int, steps: float, batch: int) -> tuple[float, float | None]:
    """Milliseconds and joules of a row's call."""
    device = family.device
    cuda = device.type == "cuda"
    plan = make_plan(batch, length, 0)
    calls, engine = _full_calls(plan, steps), Engine([family[name]], plan, family.mask_id, Law(), device)

    def run(count: int) -> tuple[float, int]:
        """Seconds and row-calls of so many calls, the device done with them."""
        wait(device)
        began, rows = time.perf_counter(), 0
        for _ in range(count):
            queue, call = next(calls)
            engine.run(call)
            queue.advance(call)
            rows += len(call.rows_R)
        wait(device)
        return time.perf_counter() - began, rows

    with settings(device):
        run(4 if cuda else 2)  # on CUDA: eagerly, captured, replayed
        count = max(4, math.ceil(LEAST_SECONDS / (run(4)[0] / 4))) if cuda else 1
        ms = statistics.median(1000 * seconds / rows for seconds, rows in (run(count) for _ in range(REPEATS)))
        joules = None
        counter, _ = energy_counter(device)
        if counter is not None:
            before, began, total = counter(), time.perf_counter(), 0
            while time.perf_counter() - began < ENERGY_SECONDS:
                total += run(count)[1]
            joules = (counter() - before) / total
    engine.drawer.check()
    engine.release()
    return ms, joules


def wait(device: torch.device) -> None:
    """Wait until a device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def energy_counter(device: torch.device) -> tuple[Callable[[], float] | None, str]:
    """A function that reads the joules a device has used so far, and "" ; or None, and why there is none. NVML comes
    with the driver, so nothing needs to be installed."""
    if device.type != "cuda":
        return None, f"a {device.type} has no energy counter that relaylm reads"
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return None, "the driver's NVML library is not there"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle, used = ctypes.c_void_p(), ctypes.c_ulonglong()
    steps = (
        nvml.nvmlInit_v2(),
        nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.byref(handle)),
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)),
    )
    if any(steps):
        return None, f"NVML does not give this device's energy (error {next(code for code in steps if code)})"

    def joules() -> float:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used))
        return used.value / 1000

    return joules, ""


# ------------------------------------------------------------------------------------------------ the table


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()
    return f"{device.type} {platform.machine()}"


def table_path(device: torch.device) -> Path:
    """Where a device's table is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device)).strip("-").lower()
    return cache / "relaylm" / "timings" / f"{slug}.json"


def _read(path: Path) -> dict[str, Any]:
    """The sound entries of a table: those with a time, and joules or none."""

    def sound(entry: Any) -> bool:
        if not isinstance(entry, dict):
            return False
        numbers = [entry.get("ms"), *([] if entry.get("joules") is None else [entry["joules"]])]
        return all(isinstance(x, int | float) and math.isfinite(x) and x > 0 for x in numbers)

    try:
        table = read_json(path)
    except UserError:  # damaged: it can be measured again
        return {}
    return {key: entry for key, entry in table.items() if sound(entry)} if isinstance(table, dict) else {}


def _key(family: Family, name: str, length: int, shape: Shape) -> dict[str, Any] | None:
    """All that a call's time depends on; None for a denoiser without weights, which has no identity."""
    model: Any = family[name]
    if not isinstance(model, torch.nn.Module):
        return None
    tensors = [(key, list(value.shape), str(value.dtype)) for key, value in sorted(model.state_dict().items())]
    numbers = getattr(getattr(model, "architecture", None), "to_json", None)
    return {
        "device": device_name(family.device),
        "threads": torch.get_num_threads() if family.device.type == "cpu" else None,
        "torch": str(torch.__version__),
        "relaylm": relaylm.__version__,
        "network": type(model).__qualname__,
        "architecture": None if numbers is None else numbers(),
        "dtypes": sorted({dtype for _, _, dtype in tensors}),
        "narrow": bool(getattr(model, "narrow", False)),
        "tensors": hashlib.sha256(json.dumps(tensors).encode()).hexdigest()[:16],
        "length": length,
        "shape": shape._asdict(),
    }


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
