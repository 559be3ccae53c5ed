r"""The parts of `relaylm bench`: each measures one thing of a `Job`, and returns it ready for JSON.

The reference and the engine take turns, and so do light shares and batch sizes, so that a machine whose speed drifts
favours neither side; the cached and the compiled reference and the rival are measured after them. Times are in
milliseconds per row-step: one row (sample), one of its T steps.

Shapes: n rows in all, B in a call, L positions, K places for due positions in a row, N kept for the head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm import kernels, metrics, reference
from relaylm.denoiser import Architecture, Transformer, build
from relaylm.diffusion import LINEAR
from relaylm.engine import Call, Engine, Law, Shape, settings
from relaylm.event_queue import call_shapes
from relaylm.plan import Plan, make_events, make_plan, race
from relaylm.published import (
    Side,
    Window,
    compiled_step,
    corrupted,
    device_seconds_of,
    dtype_of,
    kernels_of,
    seconds_of,
)
from relaylm.sampler import Samples, denoise
from relaylm.schedule import sandwich

LEVELS = (0.9, 0.5, 0.1)  # noise levels t at which the reference is timed
SHARES = tuple(range(0, 101, 10))  # per cent of light steps


@dataclass(frozen=True)
class Effort:
    """How long to measure. Steps for each noise level, repeats of each light share, seconds to aim at."""

    window: int  # steps of the published reference at each level
    window_other: int  # of the cached and the compiled one
    sweep: int  # steps for each batch size that is tried
    trajectory: int  # steps of the full trajectory of the check, at most T
    runs: int  # end-to-end runs of the engine, each heavy and light
    repeats: int  # of each light share
    share_seconds: float  # for all of the light shares together
    products: int  # matrix products whose median is the machine's rate

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> Effort:
        if quick:
            return cls(4, 3, 2, 8, 1, 2, 10.0, 4)
        if device.type == "cuda":
            return cls(100, 20, 6, 1000, 1, 3, 90.0, 20)
        return cls(100, 34, 6, 256, 2, 3, 240.0, 20)


@dataclass
class Job:
    """What is measured: two models and the size of the problem."""

    heavy: Side
    light: Side
    device: torch.device
    length: int
    steps: int
    batch: int  # rows in an engine call
    rows: int  # rows of an end-to-end run
    seed: int
    effort: Effort

    def engine(
        self, plan: Plan, share: float, batch: int | None = None, kept: Engine | None = None
    ) -> tuple[float, Samples]:
        """Wall seconds and samples of one run of the engine under a sandwich with a share of light steps; with what an
        earlier run captured, if that was `kept`."""
        models = {"light": self.light.engine, "heavy": self.heavy.engine}
        schedule = sandwich(f"{share:g}%").bind("light", "heavy")
        mask_id, out = self.heavy.engine.mask_id, []
        options: dict[str, Any] = {"steps": self.steps, "batch_size": batch or self.batch, "device": self.device}
        options["engine"] = kept
        seconds = seconds_of(
            lambda: out.append(denoise(models, schedule, plan, mask_id=mask_id, heavy="heavy", **options)), self.device
        )
        return seconds, out[0]

    @property
    def times(self) -> list[float]:
        return [k / self.steps for k in range(self.steps, -1, -1)]

    def plan(self, rows: int, free: int, first_row: int = 0) -> Plan:
        """A plan whose positions are given, random tokens, but for the last `free`: fewer calls of the same cost."""
        if free >= self.length:
            return make_plan(rows, self.length, self.seed, first_row=first_row)
        a = self.heavy.engine.architecture
        given = corrupted((rows, self.length), 0.0, a.mask_id, a.vocab_size, self.seed).numpy()
        given[given == a.mask_id] = 0
        given[:, self.length - free :] = -1
        return make_plan(rows, self.length, self.seed, given, first_row)

    def window(self, side: Side, level: float, count: int, batch: int) -> Window:
        return Window(side, level, self.steps, count, batch, self.length, self.seed)


# ------------------------------------------------------------------------------------------------ against the reference


def _products(device: torch.device, dtype: torch.dtype, count: int) -> list[float]:
    """TFLOP/s of square matrix products: 8192^3 on CUDA, 1024^3 elsewhere. On CUDA each figure is that of a burst of a
    tenth of a second: a single product after a pause runs at a clock that the chip cannot hold, and the engine's runs
    are long."""
    size, burst = (8192, 64) if device.type == "cuda" else (1024, 1)
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(burst):
            torch.mm(a, b, out=out)

    products()
    return [burst * 2 * size**3 / seconds_of(products, device) / 1e12 for _ in range(count)]


def against_reference(job: Job, batch: dict[str, int]) -> dict[str, Any]:
    """The heart: windows of the published sampler and end-to-end runs of the engine, in ABBA order."""
    effort, device = job.effort, job.device
    dtype = dtype_of(job.heavy.engine)
    sides = {"heavy": job.heavy, "light": job.light}
    windows: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    samples: dict[str, Samples] = {}
    products: list[float] = []
    plan = job.plan(job.rows, job.length)
    each = -(-effort.products // (2 * effort.runs))
    for i in range(max(len(LEVELS), effort.runs)):
        order = ["heavy", "light"] if i % 2 == 0 else ["light", "heavy"]
        for name in order:
            if i < len(LEVELS):
                with torch.inference_mode():
                    window = job.window(sides[name], LEVELS[i], effort.window, batch[name])
                    window.ddpm(1)
                    windows[name].append(window.ms(window.ddpm))
                del window
            if i < effort.runs:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                products += _products(device, dtype, each)
                took, samples[name] = job.engine(plan, 100 if name == "light" else 0)
                seconds[name].append(took)
    rate = float(np.median(products))
    engine_ms = {name: float(np.mean(seconds[name])) * 1e3 / (job.rows * job.steps) for name in sides}
    reference_ms = {name: float(np.mean(windows[name])) for name in sides}
    flops = {name: executed_flops(sides[name].engine, plan, samples[name], job.batch) for name in sides}
    limit = {name: flops[name] / float(np.mean(seconds[name])) / 1e12 / rate for name in sides}
    calls = {name: samples[name].cost.total_calls / job.rows for name in sides}
    return {
        "reference_ms_per_row_step": reference_ms["heavy"],
        "reference_light_ms_per_row_step": reference_ms["light"],
        "engine_ms_per_row_step": engine_ms["heavy"],
        "engine_light_ms_per_row_step": engine_ms["light"],
        "speedup": reference_ms["heavy"] / engine_ms["heavy"],
        "speedup_light": reference_ms["light"] / engine_ms["light"],
        "matmul_tflops": rate,
        "matmul": {"dtype": str(dtype).removeprefix("torch."), "products": len(products), "all": products},
        "fraction_of_limit": limit["heavy"],
        "fraction_of_limit_light": limit["light"],
        "windows_ms_per_row_step": {name: dict(zip(map(str, LEVELS), windows[name])) for name in sides},
        "engine_runs": {
            name: {
                "rows": job.rows,
                "seconds": seconds[name],
                "rows_per_second": job.rows / float(np.mean(seconds[name])),
                "calls_per_row": calls[name],
                "network_calls": samples[name].cost.network_calls,
                "padded_calls": samples[name].cost.padded_calls,
                "executed_tflop": flops[name] / 1e12,
            }
            for name in sides
        },
        "_samples": samples["heavy"],
    }


def other_windows(job: Job, batch: int, compiled: bool) -> tuple[float, int]:
    """Milliseconds per row-step of the cached or the compiled reference, heavy model, mean over the levels. At the
    plain reference's best batch, or at half of it where that takes too much memory (the cache keeps probabilities);
    which it was comes back too."""
    step = compiled_step(job.heavy) if compiled else None
    values = []
    try:
        with torch.inference_mode():
            for level in LEVELS:
                window = job.window(job.heavy, level, job.effort.window_other, batch)
                if step is None:
                    window.ddpm(1)
                    values.append(window.ms(window.ddpm_cache))
                else:
                    window.compiled(step, 3)  # compiles
                    values.append(window.ms(lambda w=window: w.compiled(step)))  # type: ignore[misc]
        return float(np.mean(values)), batch
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return other_windows(job, batch // 2, compiled)


def cached_windows(job: Job, batch: int) -> tuple[float, int]:
    """The cached reference at its own best batch: it saves a call only where no row of the batch changes, so small
    batches are tried beside the plain reference's best one."""
    found = [other_windows(job, size, compiled=False) for size in sorted({1, 2, batch})]
    return min(found)


def trajectory(job: Job, sweep: dict[str, Any]) -> dict[str, Any]:
    """`ddpm` from pure mask to the end, as a check of the windows; noise removal is one more pass. At the smallest
    batch that was tried, compared with its own window: a whole trajectory at the best one takes minutes."""
    steps = min(job.steps, job.effort.trajectory)
    schedule = sandwich("0%").bind("light", "heavy")
    options: dict[str, Any] = {"mask_id": job.heavy.published.mask_id, "steps": steps, "device": job.device}
    batch, window_ms = min((int(batch), ms) for batch, ms in sweep["ms_per_row_step"].items())
    run = reference.sample_reference({"heavy": job.heavy}, schedule, batch, job.length, seed=job.seed, **options)
    ms = run.seconds * 1e3 / (batch * (steps + 1))
    return {"steps": steps, "batch": batch, "ms_per_row_step": ms, "relative_to_windows": ms / window_ms}


def bound(job: Job, batch: int, step_ms: float) -> dict[str, float]:
    """Amdahl's bound on what smaller blocks alone can give the published sampler. alpha is the share of its time that
    is not spent in blocks; the bound is 1 / alpha (the paper prints 1 / (1 - alpha))."""
    window = job.window(job.heavy, 0.5, 1, batch)
    t_B = torch.ones(batch, device=job.device)
    with torch.inference_mode():
        job.heavy.blocks(window.x_BL, t_B)
        blocks = [seconds_of(lambda: job.heavy.blocks(window.x_BL, t_B), job.device) for _ in range(5)]
    alpha = min(1.0, max(1e-9, 1 - float(np.median(blocks)) * 1e3 / batch / step_ms))
    return {
        "alpha": alpha,
        "bound_1_over_alpha": 1 / alpha,
        "paper_slip_1_over_1_minus_alpha": 1 / max(1 - alpha, 1e-9),
    }


# ------------------------------------------------------------------------------------------------ the engine


def executed_flops(model: Transformer, plan: Plan, samples: Samples, batch: int) -> float:
    """Operations that one model's run really did: empty places, padded positions and the head's spare room included;
    the queries, keys and values that a table replaced are not, nor the last block's values where none are made,
    and the head's three pieces count as one product."""
    a = model.architecture
    times = [k / samples.steps for k in range(int(samples.steps), -1, -1)]
    events = make_events(plan, times)
    shapes, shape_E = call_shapes(events, times, LINEAR, plan.length, min(batch, plan.n))
    per_head = 2.0 * a.width * a.vocab_size
    with torch.no_grad():
        own = model._has_kernels()
    from_table = 6.0 * plan.length * a.width**2 if own and a.depth > 1 else 0.0
    trunks = heads = 0.0
    for shape, number in zip(shapes, np.bincount(shape_E, minlength=len(shapes)), strict=True):
        k, unmade = shape.per_row, 0.0
        if own and kernels.pools(k, a.width // a.heads):  # W h everywhere against p h and W (p h) for each head
            unmade = 2.0 * a.width * (plan.length * a.width - k * ((a.heads - 1) * plan.length + a.width))
        trunks += number * (model.flops(plan.length, k) - k * per_head - from_table - unmade)
        heads += number * per_head * shape.kept / shape.rows
    cost = samples.cost  # what is shared are trunks, each row has a head of its own
    padded, shared = cost.padded_calls / cost.total_calls, cost.shared_calls / cost.total_calls
    return trunks * (1 + padded - shared) + heads * (1 + padded)


def _call_parts(
    model: Transformer, shape: Shape, length: int, seed: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds of one call's parts on the device (the blocks, the head, the draw), and the blocks' kernels."""
    device, a = model.device, model.architecture
    x_BL = corrupted((shape.rows, length), 0.5, a.mask_id, a.vocab_size, seed).to(device)
    t_B = torch.ones(shape.rows, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    positions_BK = torch.randint(0, length, (shape.rows, shape.per_row), generator=generator).to(device)
    row_N = torch.arange(shape.kept, device=device)
    with settings(device):
        hidden_BKD = model.hidden_at(x_BL, t_B, positions_BK)
        hidden_ND = hidden_BKD.flatten(0, 1)[: shape.kept]
        logits_NV = model.head(hidden_ND)
        logits_NV[:, a.mask_id] = -torch.inf
        parts: dict[str, Callable[[], Tensor | tuple[Tensor, Tensor]]] = {
            "blocks": lambda: model.hidden_at(x_BL, t_B, positions_BK),
            "head": lambda: model.head(hidden_ND),
            "drawing": lambda: race(logits_NV, seed, row_N, row_N, torch.zeros_like(row_N)),
        }
        seconds = {name: device_seconds_of(part, device) for name, part in parts.items()}
        return seconds, kernels_of(parts["blocks"], device) if device.type == "cuda" else []


def breakdowns(job: Job, runs: dict[str, Any]) -> dict[str, Any]:
    """Shares of a call's wall time in the engine's own `runs`, for the shape of call that is most common."""
    events = make_events(job.plan(job.rows, job.length), job.times)
    shapes, shape_E = call_shapes(events, job.times, LINEAR, job.length, job.batch)
    shape = shapes[int(np.bincount(shape_E).argmax())]
    found: dict[str, Any] = {}
    for key, name, side in (("breakdown", "heavy", job.heavy), ("breakdown_light", "light", job.light)):
        wall = float(np.mean(runs[name]["seconds"])) / runs[name]["network_calls"]
        parts, kernels_us = _call_parts(side.engine, shape, job.length, job.seed)
        whole = max(wall, sum(parts.values()))  # on a CPU the parts alone may take as long, but for noise
        found[key] = {part: seconds / whole for part, seconds in parts.items()} | {
            "host": 1 - sum(parts.values()) / whole,
            "ms_per_call": wall * 1e3,
            "rows_per_call": shape.rows,
            "kernels": kernels_us,
            "kernels_rows": shape.rows,
        }
    return found


def kl_to_fp32(side: Side, samples: Samples, states: int, seed: int) -> dict[str, float]:
    """KL(float32 network || engine) in nats at due positions of states on the engine's own trajectories, the
    distributions in float64."""
    rng = np.random.default_rng(seed)
    step_nL, a = samples.trace.step_nL, side.published.architecture
    values: list[float] = []
    with settings(side.device):
        for _ in range(-(-states // 8)):
            row_B = rng.integers(len(step_nL), size=8)
            position_B = np.array([rng.choice(np.flatnonzero(step_nL[row] > 0)) for row in row_B])
            now_B1 = step_nL[row_B, position_B][:, None]
            state_BL = np.where((step_nL[row_B] > now_B1) | (step_nL[row_B] == 0), samples.tokens[row_B], a.mask_id)
            x_BL, t_B = torch.from_numpy(state_BL).to(side.device), torch.ones(8, device=side.device)
            positions_B1 = torch.from_numpy(position_B[:, None]).to(side.device)
            log_p = []
            for model in (side.published, side.engine):
                logits_BV = model.head(model.hidden_at(x_BL, t_B, positions_B1)[:, 0], t_B).double()
                logits_BV[:, a.mask_id] = -torch.inf
                log_p.append(logits_BV.log_softmax(-1))
            p_BV = log_p[0].exp()
            values += torch.where(p_BV > 0, p_BV * (log_p[0] - log_p[1]), 0.0).sum(-1).tolist()
    return {"mean": float(np.mean(values)), "max": float(np.max(values)), "states": len(values)}


def _fit(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Least squares y = intercept + value x, with a 95% interval of the slope."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    dx, freedom = xs - xs.mean(), len(xs) - 2
    slope = float((dx * ys).sum() / (dx**2).sum())
    residual = ys - ys.mean() - slope * dx
    error = math.sqrt(float((residual**2).sum()) / max(freedom, 1) / float((dx**2).sum()))
    half = (1.96 + 2.4 / max(freedom, 1)) * error  # Student's t, near enough
    intercept = float(ys.mean() - slope * xs.mean())
    return {"value": slope, "ci": [slope - half, slope + half], "intercept": intercept}


class _Counting(Engine):
    """An engine that counts the empty places of its calls by model: they are computed too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty = [0 for _ in self.models]

    def run(self, call: Call, everywhere: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        self.empty[call.model] += call.shape.rows - len(call.rows_R)
        return super().run(call, everywhere)


def shares(job: Job, row_step_seconds: float) -> dict[str, Any]:
    """Time and operations saved by light share. Passes go up and down the shares, all-heavy at both ends of each.

    `flops_saved` counts the calls, `flops_saved_with_empty_places` what was computed. In runs this short they differ by
    up to half a per cent, a partly filled call more or less; in runs of whole rows they agree. Time is compared with
    both: `p_below_flops`, and `p_below_computed`, which is whether operations saved become time saved."""
    repeats = job.effort.repeats
    batch = max(1, job.batch // 2) if job.device.type == "cuda" else job.batch  # in short runs whole ones are coarse
    rows = 8 * batch  # many rows with few free positions: then mixed batches are full, as in long runs
    runs = repeats * (len(SHARES) * 0.7 + 1) + 1
    full = row_step_seconds * job.steps * rows  # seconds of an all-heavy run of whole rows
    free = int(np.clip(job.length * job.effort.share_seconds / (runs * full), min(4, job.length), job.length))
    plan = job.plan(rows, free)
    # These runs are short: capturing calls anew in each would weigh on those that need both models.
    models = [job.light.engine, job.heavy.engine]
    kept = _Counting(models, plan, job.heavy.engine.mask_id, Law(), job.device)
    warm = plan if job.device.type == "cuda" else job.plan(rows, min(free, 4))  # all shapes where they are captured
    for share in (0, 100):
        job.engine(warm, share, batch, kept)
    saved: dict[int, list[float]] = {share: [] for share in SHARES}
    counted: dict[int, list[float]] = {share: [] for share in SHARES}
    done: dict[int, list[Samples]] = {share: [] for share in SHARES}
    for i in range(repeats):
        order = [*SHARES, 0] if i % 2 == 0 else [0, *SHARES[::-1]]
        times: dict[int, list[float]] = {}
        flops: dict[int, list[float]] = {}
        # Other rows in each pass: how far each model's calls are from a whole number of batches is chance.
        plan = job.plan(rows, free, first_row=i * rows)
        for share in order:
            kept.empty = [0 for _ in models]
            seconds, samples = job.engine(plan, share, batch, kept)
            wasted = sum(empty * model.flops(job.length, 1) for empty, model in zip(kept.empty, models))
            times.setdefault(share, []).append(seconds)
            flops.setdefault(share, []).append((samples.cost.flops or 0.0) + wasted)
            done[share].append(samples)
        for share in SHARES:
            saved[share] += [1 - seconds / float(np.mean(times[0])) for seconds in times[share]]
            counted[share] += [1 - executed / flops[0][0] for executed in flops[share]]
    entries: list[dict[str, Any]] = []
    x: list[float] = []
    y: list[float] = []
    for share in SHARES:
        costs = [samples.cost for samples in done[share]]
        light = [cost.calls["light"] / cost.total_calls for cost in costs]
        entries.append(
            {
                "light_share": share / 100,
                "light_share_of_calls": float(np.mean(light)),
                "flops_saved": float(np.mean([cost.flops_saved or 0.0 for cost in costs])),
                "flops_saved_with_empty_places": float(np.mean(counted[share])),
                "blocks_saved": costs[0].blocks_saved,
                "wall_saved": float(np.mean(saved[share])),
                "wall_saved_sd": float(np.std(saved[share], ddof=1)) if repeats > 1 else 0.0,
                "wall_saved_all": saved[share],
                "wall_minus_flops_all": [s - (cost.flops_saved or 0.0) for s, cost in zip(saved[share], costs)],
                "wall_minus_computed_all": [s - flops for s, flops in zip(saved[share], counted[share])],
                "padded_calls": [cost.padded_calls for cost in costs],
            }
        )
        x += light
        y += saved[share]
    for against in ("flops", "computed"):
        told = below_zero([entry[f"wall_minus_{against}_all"] for entry in entries[1:]])
        for entry, p in zip(entries, [1.0, *told]):  # all-heavy is what they are against
            entry[f"p_below_{against}"] = p
    how = f"{rows} rows in batches of {batch}, {free} of {job.length} positions free (the rest given), {repeats} passes"
    return {"shares": entries, "slope": {**_fit(x, y), "over": "light share of calls"}, "shares_measured_on": how}


def below_zero(passes: Sequence[Sequence[float]]) -> list[float]:
    """The p-value of each mean being below zero: one-sided, by Student's t with the spread of the passes that all have
    in common, adjusted for their number (Holm). With one pass nothing is told: 1."""
    freedom = sum(len(values) - 1 for values in passes)
    if freedom == 0:
        return [1.0] * len(passes)
    spread = math.sqrt(sum(float(np.var(values)) * len(values) for values in passes) / freedom)
    means = [float(np.mean(values)) for values in passes]
    if spread == 0:
        return [float(mean >= 0) for mean in means]
    t = [mean / spread * math.sqrt(len(values)) for mean, values in zip(means, passes)]
    return metrics.holm([metrics.student_cdf(value, freedom) for value in t])


def memory(job: Job, batch: int) -> dict[str, Any]:
    """Peak bytes on the device with one model in memory, its weights and tables included."""
    if job.device.type != "cuda":
        return {"peak_memory_reference": None, "peak_memory_engine": None, "batch": batch}

    def weights(network: Transformer) -> int:
        tensors: list[Any] = [*network.parameters(), *(table for _, table in network._tables.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def peak(network: Transformer, run: Callable[[], Any]) -> int:
        torch.cuda.empty_cache()
        own, before = weights(network), torch.cuda.memory_allocated(job.device)
        torch.cuda.reset_peak_memory_stats(job.device)
        run()
        return int(torch.cuda.max_memory_allocated(job.device)) - before + own

    def published() -> None:
        with torch.inference_mode():
            job.window(job.heavy, 0.5, 2, batch).ddpm()

    plan = job.plan(2 * batch, min(8, job.length))
    return {
        "peak_memory_reference": peak(job.heavy.published, published),
        "peak_memory_engine": peak(job.heavy.engine, lambda: job.engine(plan, 0, batch)),
        "batch": batch,
    }


def growth(job: Job) -> dict[str, Any]:
    """Calls and seconds over the number of rows, and over depth (the heavy model cut short)."""
    free = min(32 if job.device.type == "cuda" else 4, job.length)
    models = {"heavy": job.heavy.engine}
    schedule = sandwich("0%").bind("light", "heavy")
    options: dict[str, Any] = {
        "mask_id": job.heavy.engine.mask_id,
        "steps": job.steps,
        "batch_size": job.batch,
        "device": job.device,
    }

    def measure(models: dict[str, Transformer], rows: int) -> dict[str, Any]:
        plan, runs = job.plan(rows, free), []
        seconds = min(
            seconds_of(lambda: runs.append(denoise(models, schedule, plan, **options)), job.device) for _ in range(2)
        )
        cost, step_nL = runs[0].cost, runs[0].trace.step_nL
        return {
            "rows": rows,
            "depth": models["heavy"].depth,
            "calls": cost.total_calls,
            "most_calls_of_a_row": max(len(set(row_L[row_L > 0].tolist())) for row_L in step_nL),
            "at_most": min(job.steps, free),
            "network_calls": cost.network_calls,
            "seconds": seconds,
        }

    over_rows = [measure(models, job.batch * k) for k in (1, 2, 3)]
    full = job.heavy.engine.architecture
    state, depths = job.heavy.engine.state_dict(), []
    for depth in sorted({max(1, full.depth // 3), max(1, full.depth * 2 // 3), full.depth}):
        short = {k: v for k, v in state.items() if not k.startswith("blocks.") or int(k.split(".")[1]) < depth}
        depths.append(
            measure({"heavy": build(Architecture(**{**full.to_json(), "depth": depth}), short)}, 2 * job.batch)
        )
    bounded = all(entry["most_calls_of_a_row"] <= entry["at_most"] for entry in over_rows + depths)
    result = {"over_rows": over_rows, "over_depth": depths, "calls_within_bound": bounded, "free": free}
    for name, key in (("over_rows", "rows"), ("over_depth", "depth")):
        x, y = [entry[key] for entry in result[name]], [entry["seconds"] for entry in result[name]]  # type: ignore[attr-defined]
        result[f"linear_{name}"] = float(np.corrcoef(x, y)[0, 1] ** 2) if len(x) > 1 else None
    return result
