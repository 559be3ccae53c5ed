r"""Speed against MDLM's own sampler, measured in one run on one machine: `relaylm bench`.

On the same weights (random ones, or a family's):

- **reference**: MDLM's network and sampler as published (`published`), at the batch that is fastest for it. Timed over
  consecutive steps at three noise levels, and over one trajectory from end to end as a check. Also with its cache, and
  under `torch.compile`, which separates the engine's gain from the compiler's.
- **engine**: `denoise` from end to end, plan and queue included, on the folded network.
- **spaced**, **latency**, **rules**: `denoise` on spaced plans, one row from end to end beside the others, and rules
  that look at entropies.
- **autoregressive**: a causal network of the same size with a static key/value cache. At large T and batch it wins.

Times are in milliseconds per row-step: one row (sample), one of its T steps. Parts that fail leave null and a line in
`errors`; Ctrl-C ends the measuring, and what was measured until then is shown and written.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relaylm.console import Bar, progress_bar, table
from relaylm.errors import UserError
from relaylm.measure.estimate import say
from relaylm.measure.provenance import how_made
from relaylm.studies.bench import engine_parts, reference_parts, spaced_parts
from relaylm.studies.bench.autoregressive import rival
from relaylm.studies.bench.job import Job
from relaylm.studies.bench.published import Side, best_batch, dtype_of, free_memory

PARTS = (
    *("cache", "compiled", "trajectory", "shares", "memory", "breakdown", "kl", "rival", "growth", "bound"),
    *("spaced", "latency", "rules"),
)
ALWAYS = 4  # parts that are measured whatever is asked for: both references, the warm-up, the two samplers in turn
# What a result always has; null where it was not measured.
FIGURES = """reference_ms_per_row_step reference_cache_ms_per_row_step reference_compiled_ms_per_row_step
reference_cache_batch reference_compiled_batch engine_ms_per_row_step speedup speedup_light speedup_over_cache
speedup_over_compiled peak_memory_reference peak_memory_engine peak_memory_batch matmul_tflops fraction_of_limit
kl_to_fp32 kl breakdown breakdown_light ar_tokens_per_s engine_tokens_per_s shares slope shares_measured_on alpha
bound_1_over_alpha paper_slip_1_over_1_minus_alpha growth trajectory_check spaced latency rules""".split()  # noqa: SIM905


@dataclass
class Runner:
    """Runs one part after the other; what goes wrong in one is written down and the others go on."""

    wanted: set[str]
    device: torch.device
    progress: bool
    bar: Bar
    errors: dict[str, str] = field(default_factory=dict)

    def __call__(self, name: str, measure: Callable[[], dict[str, Any] | None], kind: str = "") -> dict[str, Any]:
        """What a part measured; nothing if it is not wanted or fails."""
        if (kind and kind not in self.wanted) or "stopped" in self.errors:
            return {}
        self.bar.what = name
        began = time.perf_counter()
        try:
            return measure() or {}
        except UserError as error:
            self.errors[name] = str(error)
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        except KeyboardInterrupt:
            self.errors["stopped"] = f"during {name}, so nothing that comes after it was measured"
        finally:
            if self.progress:
                seconds = time.perf_counter() - began
                print(f"{name}: {seconds:.1f} s {self.errors.get(name, '')}".rstrip(), file=sys.stderr)
            self.bar.update()
            free_memory(self.device)
        return {}


def bench(progress: bool = True, parts: Sequence[str] | None = None, **sizes: Any) -> dict[str, Any]:
    """Measure everything and return it, ready for JSON; `render` makes a table of it.

    `parts` names those of PARTS to measure besides the main one, reference against engine; None is all of them. The
    other arguments are those of `Job.of`."""
    began = time.perf_counter()
    wanted = set(PARTS if parts is None else parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise UserError(f"bench has no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    job = Job.of(**sizes)
    with progress_bar("bench", ALWAYS + len(wanted), "part", progress) as bar:
        run = Runner(wanted, job.device, progress, bar)
        found = _measured(job, run)
    return {
        "device": str(job.device),
        **dict.fromkeys(FIGURES),
        **found,
        "settings": _settings(job, wanted),
        "seed": job.seed,
        **how_made(job.device),
        "errors": run.errors,
        "seconds_total": time.perf_counter() - began,
    }


def _measured(job: Job, run: Runner) -> dict[str, Any]:
    """Every part in turn."""

    def sweep(side: Side) -> dict[str, Any]:
        batches = (1, 2, 4, 8, 16, 32, 64, 128) if job.cuda else (1, 2, 4)
        with torch.inference_mode():
            return best_batch(side, batches, job.steps, job.length, job.effort.sweep, job.seed)

    def warm_up() -> None:
        for share in (0, 100):
            job.engine(job.plan(job.rows, min(4, job.length)), share)

    def windows(kind: str, measured: tuple[float, int]) -> dict[str, Any]:
        ms, batch = measured
        over = {f"speedup_over_{kind}": ms / engine_ms} if engine_ms else {}
        return {f"reference_{kind}_ms_per_row_step": ms, f"reference_{kind}_batch": batch, **over}

    sides = {"heavy": job.heavy, "light": job.light}
    sweeps = {}
    for name, side in sides.items():
        sweeps[name] = run(f"batch of the reference, {name}", lambda s=side: sweep(s))  # type: ignore[misc]
        if name == "heavy" and run.progress and sweeps[name]:
            seconds = _seconds(job, run.wanted, sweeps[name])
            say("the rest of the benchmark", seconds, "--quick and --parts make it shorter")
    best = {name: found.get("best", 1) for name, found in sweeps.items()}
    run("warm-up of the engine", warm_up)
    found = run("reference and engine", lambda: reference_parts.against_reference(job, best))
    found["reference_batch"] = {name: sweep or None for name, sweep in sweeps.items()}
    drawn, engine_ms = found.pop("_samples", None), found.get("engine_ms_per_row_step")
    if engine_ms:
        found["engine_tokens_per_s"] = job.length * 1e3 / (engine_ms * job.steps)
        if run.progress:
            print(f"speedup {found['speedup']:.2f}, light {found['speedup_light']:.2f}", file=sys.stderr)
    heavy, size = best["heavy"], job.heavy.published.architecture
    batches = (1, 128, 512) if job.cuda else (1, 8, 32, 128)
    step_ms, call_ms = (found.get(f"{side}_ms_per_row_step") or math.nan for side in ("reference", "engine"))
    ours, theirs = engine_parts, reference_parts
    found |= run("cached reference", lambda: windows("cache", theirs.cached_windows(job, heavy)), "cache")
    found |= run("compiled reference", lambda: windows("compiled", theirs.other_windows(job, heavy, True)), "compiled")
    found |= run("full trajectory of the reference", lambda: theirs.trajectory(job, sweeps["heavy"]), "trajectory")
    found |= run("light shares", lambda: ours.shares(job, call_ms / 1e3), "shares")
    found |= run("memory", lambda: ours.memory(job, 32), "memory")
    found |= run("breakdown", lambda: ours.breakdowns(job, found["engine_runs"]), "breakdown")
    if drawn is not None:
        states = 16 if job.quick else 128
        found |= run("KL", lambda: {"kl": ours.kl_to_fp32(job.heavy, drawn, states, job.seed)}, "kl")
        found |= {"kl_to_fp32": found["kl"]["mean"]} if "kl" in found else {}
    causal = lambda: rival(size, batches[:2] if job.quick else batches, job.length, job.device, job.seed)  # noqa: E731
    found |= run("autoregressive rival", lambda: {"ar_tokens_per_s": causal()}, "rival")
    found |= run("growth", lambda: {"growth": ours.growth(job)}, "growth")
    rate, alone = found.get("matmul_tflops"), (sweeps["heavy"].get("ms_per_row_step") or {}).get("1")
    found |= run(
        "spaced plans", lambda: spaced_parts.spaced(job, found.get("reference_ms_per_row_step"), rate), "spaced"
    )
    causal_rate = (found.get("ar_tokens_per_s") or {}).get("batch_1")
    compiled = found.get("reference_compiled_ms_per_row_step") is not None
    one_row = lambda: spaced_parts.latency(job, alone, causal_rate, compiled)  # noqa: E731
    found |= run("latency of one row", one_row, "latency")
    found |= run("rules", lambda: spaced_parts.rules(job), "rules")
    return found | run("bound", lambda: theirs.bound(job, heavy, step_ms), "bound")


def _seconds(job: Job, wanted: set[str], sweep: dict[str, Any]) -> float:
    """About how long all parts take: twice as long as the reference's own steps, whose time the first part found."""
    effort, batch, each = job.effort, sweep["best"], sweep["ms_per_row_step"]
    steps = 2 * (effort.sweep + 1) * sum(map(int, each)) + 6 * effort.window * batch
    steps += 6 * effort.window_other * batch * len(wanted & {"cache", "compiled"})
    steps += effort.trajectory * min(map(int, each)) * ("trajectory" in wanted)
    return 2e-3 * each[str(batch)] * steps + effort.share_seconds * ("shares" in wanted)


def _settings(job: Job, wanted: set[str]) -> dict[str, Any]:
    a = job.heavy.published.architecture
    blocks = str(dtype_of(job.heavy.engine)).removeprefix("torch.")
    return {
        "depth": [job.heavy.published.depth, job.light.published.depth],
        "width": a.width,
        "heads": a.heads,
        "vocab_size": a.vocab_size,
        "length": job.length,
        "steps": job.steps,
        "batch_size": job.batch,
        "samples": job.rows,
        "quick": job.quick,
        "parts": sorted(wanted),
        "effort": vars(job.effort),
        "weights": job.weights,
        "adaln_in_reference": a.adaln,
        "precision": {
            "reference": "bf16 autocast, fp32 residual, bf16 logits"
            if job.cuda
            else "fp32 (as published it needs CUDA)",
            "engine": f"blocks {blocks}, fp32 residual, head and draw fp32/fp64",
        },
    }


# ------------------------------------------------------------------------------------------------ showing it


def _show(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else f"{value:{form}}"


def render(result: dict[str, Any]) -> str:
    """A table for people. A dash stands where a measurement is missing; the reasons are at the end."""
    s, machine, get = result["settings"], result["machine"], result.get
    calls = ((get("engine_runs") or {}).get("heavy") or {}).get("calls_per_row")
    rows = [
        ("MDLM's sampler (ddpm)", "reference_ms_per_row_step", "reference_light_ms_per_row_step", ".3g"),
        ("with its cache", "reference_cache_ms_per_row_step", "", ".3g"),
        ("compiled", "reference_compiled_ms_per_row_step", "", ".3g"),
        ("engine", "engine_ms_per_row_step", "engine_light_ms_per_row_step", ".3g"),
        ("times faster", "speedup", "speedup_light", ".1f"),
        ("fraction of the limit", "fraction_of_limit", "fraction_of_limit_light", ".1%"),
    ]
    cells = [(title, _show(get(a), form), _show(get(b), form) if b else "") for title, a, b, form in rows]
    cells.append((f"calls per row (T={s['steps']})", _show(calls, ".1f"), ""))
    lines = [
        f"{machine['gpu'] or machine['cpu']}, {s['depth'][0]} against {s['depth'][1]} blocks, {s['width']} wide, "
        f"L={s['length']}, V={s['vocab_size']}, T={s['steps']}, {s['weights']} weights",
        "",
        table(["milliseconds per row-step", "heavy", "light"], cells),
        f"the limit is {_show(get('matmul_tflops'))} TFLOP/s",
    ]
    for name, key in (("heavy", "breakdown"), ("light", "breakdown_light")):
        if found := get(key):
            shown = ", ".join(f"{part} {found[part]:.1%}" for part in ("blocks", "head", "drawing", "host"))
            lines.append(f"where the {name} engine's time goes: {shown}")
    lines += [*_shares(result), ""]
    if (alpha := get("alpha")) is not None:
        lines.append(
            f"smaller blocks alone could make MDLM's sampler {result['bound_1_over_alpha']:.2f} times faster: 1/alpha, "
            f"alpha = {alpha:.3f} (the paper's 1/(1-alpha) is a slip: {result['paper_slip_1_over_1_minus_alpha']:.2f})"
        )
    if (kl := get("kl_to_fp32")) is not None:
        lines.append(f"KL of the engine to the fp32 network: {kl:.2e} nats")
    if get("peak_memory_engine"):
        mine, theirs = result["peak_memory_engine"] / 2**30, result["peak_memory_reference"] / 2**30
        at = f"at batch {result['peak_memory_batch']}"
        lines.append(f"peak memory {at}: {mine:.2f} GiB against {theirs:.2f} GiB, {mine / theirs:.1%}")
    if ar := get("ar_tokens_per_s"):
        ours = get("engine_tokens_per_s")
        times = "" if not ours else f": {ar['best'] / ours:.2g} times the engine's {ours:,.0f}"
        best = f"{ar['batch_1']:,.0f} tokens/s at batch 1, {ar['best']:,.0f} at batch {ar['best_batch']}"
        lines.append(f"a causal model of the same size with a KV cache: {best}{times}")
    if entries := get("spaced"):
        head = ["spaced", "calls a row", "rows a second", "ms a row", "times MDLM's sampler", "fraction of the limit"]
        forms = (("calls_per_row", ".1f"), ("rows_per_second", ".3g"), ("ms_per_row", ".3g"), ("speedup", ".1f"))
        by_distance = [
            (f"D = {e['distance']}", *(_show(e[k], f) for k, f in forms), _show(e["fraction_of_limit"], ".1%"))
            for e in entries
        ]
        lines += ["", table(head, by_distance)]
    if found := get("rules"):
        columns = {"calls_per_row": ".1f", "rows_per_second": ".3g", "gflop_per_row": ",.4g"}
        of_rules = [(name, *(_show(e[k], form) for k, form in columns.items())) for name, e in found.items()]
        lines += ["", table(["plan or rule", "calls a row", "rows a second", "GFLOP a row"], of_rules)]
    if found := get("latency"):
        rows_of = [(name, f"{e['ms']:.4g}", f"{e['calls']}") for name, e in found.items()]
        lines += ["", table([f"one row of {s['length']}", "milliseconds", "calls"], rows_of)]
    lines += [f"not measured: {name}: {reason}" for name, reason in result["errors"].items()]
    return "\n".join(lines)


def _shares(result: dict[str, Any]) -> list[str]:
    if not (entries := result["shares"]):
        return []
    rows = [
        (f"{e['light_share']:.0%}", _show(e["flops_saved"], ".1%"), _show(e["blocks_saved"], ".1%"))
        + (f"{e['wall_saved']:.1%} ± {e['wall_saved_sd']:.1%}",)
        for e in entries
    ]
    lines = ["", table(["light share", "FLOPs saved", "blocks saved", "time saved"], rows, text=())]
    if less := [f"{e['light_share']:.0%}" for e in entries if e["p_below_computed"] < 0.05]:
        lines.append(f"less time than operations saved (p < 0.05) at {', '.join(less)}")
    low, high = result["slope"]["ci"]
    return [*lines, f"slope of time saved over light share {result['slope']['value']:.3f} [{low:.3f}, {high:.3f}]"]
