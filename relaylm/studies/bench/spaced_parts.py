"""The engine on spaced plans: rows a second at full batches, and the milliseconds of one row from end to end.

A spaced row takes about 1.5 D calls whatever its length, each with L / (1.34 D) due positions. The distances measured
are 40 at L = 1024 and in proportion at other lengths, a quarter and four times of that.

**Latency** is that of one row, plan and queue included, with what an earlier row captured. MDLM's sampler takes T steps
of its window's time at batch 1, plain and compiled; the causal rival writes L tokens at batch 1 with its cache.

**Rules** that look at entropies need the head at every masked position, where a spaced plan needs it at due ones only:
`rules` has both in the same run, and what every second or fourth look costs.

Shapes: L positions, T steps, D distance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from relaylm.core.plan import Plan, make_plan
from relaylm.core.schedule import Schedule, Spacing
from relaylm.core.spacing import positions_per_call, spaced_events
from relaylm.sampling.confidence import decode
from relaylm.sampling.denoise import denoise
from relaylm.sampling.engine import Engine
from relaylm.sampling.law import Law
from relaylm.sampling.parallel import denoise_ahead, states_of
from relaylm.sampling.queue import call_shapes
from relaylm.sampling.result import Samples
from relaylm.sampling.rules import parse_rule
from relaylm.studies.bench.engine_parts import executed_flops
from relaylm.studies.bench.job import HEAVY, Job
from relaylm.studies.bench.published import timed
from relaylm.studies.bench.reference_parts import other_windows

AT = 40 / 1024  # the middle distance, as a share of the length
WINDOW = 8  # events in parallel


def distances(length: int) -> list[int]:
    """The three distances, from the smallest."""
    middle = max(2, round(AT * length))
    return sorted({max(2, middle // 4), middle, min(max(2, length - 1), 4 * middle)})


def _spaced(distance: int) -> Schedule:
    return replace(HEAVY, spacing=Spacing(distance))


def spaced(job: Job, reference_ms: float | None, tflops: float | None) -> dict[str, Any]:
    """Rows a second of the heavy model by distance: against MDLM's sampler at T steps, as a share of the matmul rate,
    and the shapes of the calls."""
    found = []
    for distance in distances(job.length):
        plan = make_plan(job.rows, job.length, job.seed)
        kept = _engine(job, plan)
        seconds, samples = _fastest(job, plan, distance, job.batch, kept, 1 + job.effort.runs)
        kept.release()
        events = spaced_events(plan, Spacing(distance))
        flops = executed_flops(job.heavy.engine, plan, samples, job.batch, events)
        shapes, _ = call_shapes(events, plan.length, job.batch)
        each = seconds / job.rows
        found.append(
            {
                "distance": distance,
                "calls_per_row": samples.cost.total_calls / job.rows,
                "rows_per_second": 1 / each,
                "tokens_per_second": job.length / each,
                "ms_per_row": 1e3 * each,
                "ms_per_call": 1e3 * seconds / samples.cost.total_calls,
                "speedup": reference_ms * job.steps / (1e3 * each) if reference_ms else None,
                "fraction_of_limit": flops / seconds / 1e12 / tflops if tflops else None,
                "padded_calls": samples.cost.padded_calls,
                "shapes": [[shape.rows, shape.per_row, shape.kept] for shape in shapes],
            }
        )
    return {"spaced": found}


def rules(job: Job) -> dict[str, Any]:
    """Rows a second of the heavy model on the spaced plan of the middle distance and under rules that look at
    entropies, capture included, with the operations that are counted. EB-Sampler's bound allows about as many positions
    a call as the plan has, with entropies as large as random weights give."""
    distance, models = max(2, round(AT * job.length)), {"heavy": job.heavy.engine}
    plan, found = make_plan(job.rows, job.length, job.seed), {}
    options: dict[str, Any] = {"batch_size": job.batch, "device": job.device, "mask_id": job.heavy.engine.mask_id}
    gamma = (positions_per_call(job.length, Spacing(distance)) - 1) * math.log(job.heavy.engine.architecture.vocab_size)
    for text in (None, *(f"surest:{distance}{every}" for every in ("", ":2", ":4")), f"eb:{gamma:.3g}"):
        planned = partial(denoise, models, _spaced(distance), plan, **options)
        run = partial(decode, models, HEAVY, plan, parse_rule(text), **options) if text else planned
        runs = [timed(run, job.device) for _ in range(1 + job.effort.runs)]
        seconds, samples = min(runs, key=lambda one: one[0])
        each = {"calls_per_row": samples.cost.total_calls / job.rows, "rows_per_second": job.rows / seconds}
        found[text or f"spaced:{distance}"] = {**each, "gflop_per_row": samples.cost.flops / job.rows / 1e9}
    return {"rules": found}


def latency(job: Job, reference_ms: float | None, causal_tokens_per_s: float | None, compiled: bool) -> dict[str, Any]:
    """Milliseconds of one row: the engine on spaced plans, one position at a time and in parallel windows, and the
    others. `reference_ms` is a row-step of MDLM's sampler at batch 1."""
    model = {"heavy": job.heavy.engine}
    found: dict[str, Any] = {}
    plan = make_plan(1, job.length, job.seed)
    kept = _engine(job, plan)
    for distance in distances(job.length):
        best, samples = _fastest(job, plan, distance, 1, kept, 1 + 2 * job.effort.runs)
        found[f"spaced:{distance}"] = {"ms": 1e3 * best, "calls": samples.cost.total_calls}
    runs = [job.timed(model, HEAVY, plan, steps=math.inf, batch_size=1, engine=kept) for _ in range(2)]
    found["one position at a time"] = {"ms": 1e3 * runs[1][0], "calls": runs[1][1].cost.total_calls}
    kept.release()
    kept = _engine(job, states_of(plan, WINDOW))
    options: dict[str, Any] = {"mask_id": job.heavy.engine.mask_id, "device": job.device, "steps": math.inf}
    options |= {"engine": kept}
    runs = [timed(lambda: denoise_ahead(model, HEAVY, plan, WINDOW, **options), job.device) for _ in range(2)]
    kept.release()
    seconds, samples = runs[1]  # the first one captures, as above
    rounds = {"rounds": samples.cost.network_calls, "calls": samples.cost.total_calls}
    found[f"one position at a time, {WINDOW} in parallel"] = {"ms": 1e3 * seconds, **rounds}
    if reference_ms:
        found["MDLM's sampler"] = {"ms": reference_ms * job.steps, "calls": job.steps}
    if compiled:
        found["MDLM's sampler, compiled"] = {"ms": other_windows(job, 1, True)[0] * job.steps, "calls": job.steps}
    if causal_tokens_per_s:
        found["causal, with a cache"] = {"ms": 1e3 * job.length / causal_tokens_per_s, "calls": job.length}
    return {"latency": found}


def _engine(job: Job, plan: Plan) -> Engine:
    """An engine whose captured calls serve run after run."""
    return Engine([job.heavy.engine], plan, job.heavy.engine.mask_id, Law(), job.device)


def _fastest(job: Job, plan: Plan, distance: int, batch: int, kept: Engine, runs: int) -> tuple[float, Samples]:
    """The fastest of a few runs on a spaced plan, but for the first, which captures."""
    options: dict[str, Any] = {"steps": None, "batch_size": batch, "engine": kept}
    model = {"heavy": job.heavy.engine}
    found = [job.timed(model, _spaced(distance), plan, **options) for _ in range(runs)]
    return min(found[1:], key=lambda run: run[0])
