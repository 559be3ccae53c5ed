"""The engine against MDLM's sampler, in milliseconds per row-step: one row (sample), one of its T steps.

The reference and the engine take turns, so that a machine whose speed drifts favours neither side; the cached and the
compiled reference are measured after them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from relaylm.sampling import reference
from relaylm.sampling.result import Samples
from relaylm.studies.bench.engine_parts import executed_flops
from relaylm.studies.bench.job import HEAVY, Job
from relaylm.studies.bench.published import compiled_step, dtype_of, free_memory, seconds_of

LEVELS = (0.9, 0.5, 0.1)  # noise levels t at which the reference is timed


def _products(job: Job, count: int) -> list[float]:
    """TFLOP/s of square matrix products: 8192^3 on CUDA, 1024^3 elsewhere. On CUDA each figure is that of a burst of a
    tenth of a second: a single product after a pause runs at a clock that the chip cannot hold, and the engine's runs
    are long."""
    size, burst = (8192, 64) if job.cuda else (1024, 1)
    dtype = dtype_of(job.heavy.engine)
    a, b = (torch.randn(size, size, device=job.device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(burst):
            torch.mm(a, b, out=out)

    products()
    return [burst * 2 * size**3 / seconds_of(products, job.device) / 1e12 for _ in range(count)]


def against_reference(job: Job, batch: dict[str, int]) -> dict[str, Any]:
    """Windows of the published sampler, at its best `batch` for each model, and end-to-end runs of the engine, in ABBA
    order. `_samples` are the heavy model's."""
    effort, sides = job.effort, {"heavy": job.heavy, "light": job.light}
    windows: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    samples: dict[str, Samples] = {}
    products: list[float] = []
    plan = job.plan(job.rows, job.length)
    each = -(-effort.products // (2 * effort.runs))
    for i in range(max(len(LEVELS), effort.runs)):
        for name in ["heavy", "light"] if i % 2 == 0 else ["light", "heavy"]:
            if i < len(LEVELS):
                with torch.inference_mode():
                    window = job.window(sides[name], LEVELS[i], effort.window, batch[name])
                    window.ddpm(1)
                    windows[name].append(window.ms(window.ddpm))
                del window
            if i < effort.runs:
                free_memory(job.device)
                products += _products(job, each)
                took, samples[name] = job.engine(plan, 100 if name == "light" else 0)
                seconds[name].append(took)
    rate = float(np.median(products))
    found: dict[str, Any] = {"matmul_tflops": rate, "_samples": samples["heavy"], "engine_runs": {}}
    dtype = str(dtype_of(job.heavy.engine)).removeprefix("torch.")
    found["matmul"] = {"dtype": dtype, "products": len(products), "all": products}
    found["windows_ms_per_row_step"] = {name: dict(zip(map(str, LEVELS), windows[name])) for name in sides}
    for name, end in (("heavy", ""), ("light", "_light")):
        took, cost = float(np.mean(seconds[name])), samples[name].cost
        flops = executed_flops(sides[name].engine, plan, samples[name], job.batch)
        reference_ms, engine_ms = float(np.mean(windows[name])), took * 1e3 / (job.rows * job.steps)
        found |= {f"reference{end}_ms_per_row_step": reference_ms, f"engine{end}_ms_per_row_step": engine_ms}
        found |= {f"speedup{end}": reference_ms / engine_ms, f"fraction_of_limit{end}": flops / took / 1e12 / rate}
        found["engine_runs"][name] = {
            "rows": job.rows,
            "seconds": seconds[name],
            "rows_per_second": job.rows / took,
            "calls_per_row": cost.total_calls / job.rows,
            "network_calls": cost.network_calls,
            "padded_calls": cost.padded_calls,
            "executed_tflop": flops / 1e12,
        }
    return found


def other_windows(job: Job, batch: int, compiled: bool) -> tuple[float, int]:
    """Milliseconds per row-step of the cached or the compiled reference, heavy model, mean over the levels. At the
    plain reference's best batch, or at half of it where that takes too much memory (the cache keeps probabilities);
    the batch is returned too."""
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
    free_memory(job.device)
    return other_windows(job, batch // 2, compiled)


def cached_windows(job: Job, batch: int) -> tuple[float, int]:
    """The cached reference at its own best batch: it saves a call only where no row of the batch changes, so small
    batches are tried beside the plain reference's best one."""
    return min(other_windows(job, size, compiled=False) for size in sorted({1, 2, batch}))


def trajectory(job: Job, sweep: dict[str, Any]) -> dict[str, Any]:
    """`ddpm` from pure mask to the end, as a check of the windows; noise removal is one more pass. At the smallest
    batch that was tried, compared with its own window: a whole trajectory at the best one takes minutes."""
    steps = min(job.steps, job.effort.trajectory)
    options: dict[str, Any] = {"mask_id": job.heavy.published.mask_id, "steps": steps, "device": job.device}
    batch, window_ms = min((int(batch), ms) for batch, ms in sweep["ms_per_row_step"].items())
    run = reference.sample_reference({"heavy": job.heavy}, HEAVY, batch, job.length, seed=job.seed, **options)
    ms = run.seconds * 1e3 / (batch * (steps + 1))
    check = {"steps": steps, "batch": batch, "ms_per_row_step": ms, "relative_to_windows": ms / window_ms}
    return {"trajectory_check": check}


def bound(job: Job, batch: int, step_ms: float) -> dict[str, float]:
    """Amdahl's bound on what smaller blocks alone can give the published sampler. alpha is the share of its time that
    is not spent in blocks; the bound is 1 / alpha (the paper prints 1 / (1 - alpha))."""
    with torch.inference_mode():
        blocks_ms = job.window(job.heavy, 0.5, 1, batch).blocks_ms()
    alpha = min(1.0, max(1e-9, 1 - blocks_ms / step_ms))
    slip = 1 / max(1 - alpha, 1e-9)
    return {"alpha": alpha, "bound_1_over_alpha": 1 / alpha, "paper_slip_1_over_1_minus_alpha": slip}
