r"""Speed against MDLM's own sampler, measured in one run on one machine: `relaylm bench`.

Three rivals on the same weights (random ones, or a family's):

- **reference**: MDLM's network and sampler as published (`published`), at the batch that is fastest for it. Timed over
  consecutive steps at three noise levels, and over one trajectory from end to end as a check. Once more under
  `torch.compile`, so that nobody can say that the gain is the compiler.
- **engine**: `sampler.denoise` from end to end, plan and queue included, on the folded network.
- **autoregressive**: a causal network of the same size with a static key/value cache (`rival`). At large T and batch it
  wins.

What is measured is in `bench_parts`; here it is put in order and shown. Times are in milliseconds per row-step: one row
(sample), one of its T steps. Parts that fail leave null and a line in `errors`; Ctrl-C ends the measuring, and what was
measured until then is shown and written.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from relaylm import bench_parts as measure
from relaylm.bench_parts import Effort, Job
from relaylm.denoiser import Architecture, Transformer
from relaylm.errors import UserError
from relaylm.family import Family
from relaylm.members import DTYPES, cpu_has_bfloat16, pick_device
from relaylm.progress import progress_bar
from relaylm.provenance import how_made
from relaylm.published import Side, best_batch, random_network
from relaylm.rival import rival
from relaylm.sampler import Samples

PARTS = ("cache", "compiled", "trajectory", "shares", "memory", "breakdown", "kl", "rival", "growth", "bound")
X = TypeVar("X")


def _sides(
    family: Family | None, depth: tuple[int, int], base: dict[str, Any], seed: int, device: torch.device, dtype: Any
) -> list[Side]:
    """The heavy and the light model, as the reference and as the engine run them."""
    sides = []
    for i in range(2):
        if family is None:
            network = random_network(Architecture(depth=depth[i], adaln=True, **base), seed + i)
        else:
            model = family.models[family.roles(None, None)[1 - i]]
            if not isinstance(model, Transformer):
                raise UserError("bench needs a family of Transformers")
            network = copy.deepcopy(model).to("cpu", torch.float32)
        engine = copy.deepcopy(network).fold() if not network.time_conditioning else copy.deepcopy(network)
        engine = engine.to(device)
        sides.append(Side(network.to(device), engine if dtype == torch.float32 else engine.cast(dtype), device))
    return sides


def bench(
    device: str | torch.device = "auto",
    depth: tuple[int, int] = (12, 4),
    width: int | None = None,
    heads: int | None = None,
    vocab_size: int = 50258,
    length: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    family: Family | str | None = None,
    samples: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
    progress: bool = True,
    quick: bool = False,
    parts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure everything and return it, ready for JSON; `render` makes a table of it.

    `depth` is heavy and light. Sizes left out: 768 wide, L = 1024, T = 1000 on CUDA; 256 wide with 4 heads, L = 256,
    T = 256 elsewhere; heads of 64. A `family` brings its own sizes. `batch_size` is the engine's rows per call,
    `samples` the rows of an end-to-end run, `dtype` what the engine's blocks compute in (bfloat16 on CUDA and on a CPU
    that has it, float32 elsewhere). `quick` shortens every measurement and is good for a look, not for a record.
    `parts` names those of PARTS to measure besides the main one, reference against engine; None is all of them.
    """
    began = time.perf_counter()
    wanted = set(PARTS if parts is None else parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise UserError(f"bench has no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    where = pick_device(device)
    cuda = where.type == "cuda"
    if isinstance(family, str):
        family = Family.load(family, device="cpu", dtype="float32")
    if family is not None:
        length, vocab_size = length or family.length, family.vocab_size
    length, width = length or (1024 if cuda else 256), width or (768 if cuda else 256)
    steps = steps or (1000 if cuda and family is None else length)
    if heads is None and width > 64 and width % 64:
        raise UserError(f"heads are 64 wide, so the width must be a multiple of 64, not {width}")
    heads = heads or max(1, width // 64)
    chosen = torch.bfloat16 if cuda or (where.type == "cpu" and cpu_has_bfloat16()) else torch.float32
    if dtype is not None:
        if dtype not in DTYPES or dtype == "float64":
            raise UserError(f"the engine's blocks cannot compute in {dtype}: write float32, bfloat16 or float16")
        chosen = DTYPES[dtype]
    base = {"vocab_size": vocab_size, "length": length, "width": width, "heads": heads}
    heavy, light = _sides(family, depth, base, seed, where, chosen)
    a = heavy.published.architecture
    pair = Family({"small": light.engine, "large": heavy.engine}, a.mask_id, a.vocab_size, length)
    batch = batch_size or pair.batch_size(1 << 20, length)
    rows = samples or (2 * batch if cuda else batch)
    effort = Effort.of(where, quick)
    job = Job(heavy, light, where, length, steps, min(batch, rows), rows, seed, effort)
    errors: dict[str, str] = {}
    bar = progress_bar("bench", 13, "part", progress, leave=False)

    def part(name: str, function: Callable[[], X], kind: str = "") -> X | None:
        """One measurement, if it is wanted; what goes wrong in it is written down and the others go on."""
        if (kind and kind not in wanted) or "stopped" in errors:
            return None
        bar.set_description(name)
        started = time.perf_counter()
        try:
            return function()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return None
        except KeyboardInterrupt:
            errors["stopped"] = f"during {name}, so nothing that comes after it was measured"
            return None
        finally:
            if progress:
                bar.write(f"{name}: {time.perf_counter() - started:.1f} s {errors.get(name, '')}", file=sys.stderr)
            bar.update()
            if cuda:
                torch.cuda.empty_cache()

    def sweep(side: Side) -> dict[str, Any]:
        batches = (1, 2, 4, 8, 16, 32, 64, 128) if cuda else (1, 2, 4)
        with torch.inference_mode():
            return best_batch(side, batches, job.steps, job.length, effort.sweep, seed)

    def warm_up() -> None:
        for share in (0, 100):
            job.engine(job.plan(job.rows, min(4, job.length)), share)

    sweeps = {
        "heavy": part("batch of the reference, heavy", lambda: sweep(heavy)),
        "light": part("batch of the reference, light", lambda: sweep(light)),
    }
    best = {name: value["best"] if value else 1 for name, value in sweeps.items()}
    part("warm-up of the engine", warm_up)
    main = part("reference and engine", lambda: measure.against_reference(job, best)) or {}
    drawn: Samples | None = main.pop("_samples", None)
    if progress and main:
        bar.write(f"speedup {main['speedup']:.2f}, light {main['speedup_light']:.2f}", file=sys.stderr)
    heavy_ms, engine_ms = main.get("reference_ms_per_row_step"), main.get("engine_ms_per_row_step")
    others = [
        part("cached reference", lambda: measure.cached_windows(job, best["heavy"]), "cache"),
        part("compiled reference", lambda: measure.other_windows(job, best["heavy"], True), "compiled"),
    ]
    (cache_ms, cache_batch), (compiled_ms, compiled_batch) = (found or (None, None) for found in others)
    check = part(
        "full trajectory of the reference", lambda: measure.trajectory(job, sweeps["heavy"] or {}), "trajectory"
    )
    shares = part("light shares", lambda: measure.shares(job, (engine_ms or math.nan) / 1e3), "shares") or {}
    memory = part("memory", lambda: measure.memory(job, 32), "memory") or {}
    if not cuda and "memory" in wanted:
        errors["memory"] = f"peak memory is measured on CUDA alone, not on {where.type}"
    where_time_goes = part("breakdown", lambda: measure.breakdowns(job, main["engine_runs"]), "breakdown") or {}
    kl = None
    if drawn is not None:
        kl = part("KL", lambda: measure.kl_to_fp32(heavy, drawn, 16 if quick else 128, seed), "kl")
    ar_batches = (1, 128, 512) if cuda else (1, 8, 32, 128)
    ar = part(
        "autoregressive rival", lambda: rival(a, ar_batches[:2] if quick else ar_batches, length, where, seed), "rival"
    )
    growth = part("growth", lambda: measure.growth(job), "growth")
    bound = part("bound", lambda: measure.bound(job, best["heavy"], heavy_ms or math.nan), "bound") or {}
    bar.close()
    kinds = {
        "reference": "bf16 autocast, fp32 residual, bf16 logits" if cuda else "fp32 (as published it needs CUDA)",
        "engine": f"blocks {str(chosen).removeprefix('torch.')}, fp32 residual, head and draw fp32/fp64",
    }
    return {
        "device": str(where),
        "reference_ms_per_row_step": heavy_ms,
        "reference_cache_ms_per_row_step": cache_ms,
        "reference_compiled_ms_per_row_step": compiled_ms,
        "reference_cache_batch": cache_batch,
        "reference_compiled_batch": compiled_batch,
        "engine_ms_per_row_step": engine_ms,
        "speedup": main.get("speedup"),
        "speedup_light": main.get("speedup_light"),
        "speedup_over_cache": cache_ms / engine_ms if cache_ms and engine_ms else None,
        "speedup_over_compiled": compiled_ms / engine_ms if compiled_ms and engine_ms else None,
        "peak_memory_reference": memory.get("peak_memory_reference"),
        "peak_memory_engine": memory.get("peak_memory_engine"),
        "peak_memory_batch": memory.get("batch"),
        "matmul_tflops": main.get("matmul_tflops"),
        "fraction_of_limit": main.get("fraction_of_limit"),
        "kl_to_fp32": kl and kl["mean"],
        "kl": kl,
        "breakdown": where_time_goes.get("breakdown"),
        "breakdown_light": where_time_goes.get("breakdown_light"),
        "ar_tokens_per_s": ar,
        "engine_tokens_per_s": length * 1e3 / (engine_ms * steps) if engine_ms else None,
        "shares": shares.get("shares"),
        "slope": shares.get("slope"),
        "shares_measured_on": shares.get("shares_measured_on"),
        "alpha": bound.get("alpha"),
        "bound_1_over_alpha": bound.get("bound_1_over_alpha"),
        "paper_slip_1_over_1_minus_alpha": bound.get("paper_slip_1_over_1_minus_alpha"),
        "growth": growth,
        "trajectory_check": check,
        "reference_batch": sweeps,
        **{k: v for k, v in main.items() if k not in ("speedup", "speedup_light")},
        "settings": {
            "depth": [heavy.published.depth, light.published.depth],
            "width": a.width,
            "heads": a.heads,
            "vocab_size": a.vocab_size,
            "length": length,
            "steps": steps,
            "batch_size": job.batch,
            "samples": rows,
            "quick": quick,
            "parts": sorted(wanted),
            "effort": vars(effort),
            "weights": "random" if family is None else family.name or "family",
            "adaln_in_reference": a.adaln,
            "precision": kinds,
        },
        "seed": seed,
        **how_made(where),
        "errors": errors,
        "seconds_total": time.perf_counter() - began,
    }


def _show(value: float | None, form: str = ".3g", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def render(result: dict[str, Any]) -> str:
    """A table for people. A dash stands where a measurement is missing; the reasons are at the end."""
    s, machine = result["settings"], result["machine"]
    runs, ar = result.get("engine_runs") or {}, result["ar_tokens_per_s"] or {}
    light_ms = (result.get("reference_light_ms_per_row_step"), result.get("engine_light_ms_per_row_step"))
    lines = [
        f"{machine['gpu'] or machine['cpu']}, {s['depth'][0]} against {s['depth'][1]} blocks, {s['width']} wide, "
        f"L={s['length']}, V={s['vocab_size']}, T={s['steps']}, {s['weights']} weights",
        "",
        "milliseconds per row-step            heavy       light",
        f"  MDLM's sampler (ddpm)         {_show(result['reference_ms_per_row_step']):>10}  {_show(light_ms[0]):>10}",
        f"  with its cache                {_show(result['reference_cache_ms_per_row_step']):>10}",
        f"  compiled                      {_show(result['reference_compiled_ms_per_row_step']):>10}",
        f"  engine                        {_show(result['engine_ms_per_row_step']):>10}  {_show(light_ms[1]):>10}",
        f"  times faster                  {_show(result['speedup'], '.1f'):>10}  "
        f"{_show(result['speedup_light'], '.1f'):>10}",
        f"  fraction of the limit         {_show(result['fraction_of_limit'], '.1%'):>10}  "
        f"{_show(result.get('fraction_of_limit_light'), '.1%'):>10}   ({_show(result['matmul_tflops'])} TFLOP/s)",
        f"  calls per row (T={s['steps']})" + f"{_show((runs.get('heavy') or {}).get('calls_per_row'), '.1f'):>22}",
    ]
    for name, key in (("heavy", "breakdown"), ("light", "breakdown_light")):
        if result[key]:
            shown = ", ".join(f"{part} {result[key][part]:.1%}" for part in ("blocks", "head", "drawing", "host"))
            lines.append(f"  where the {name} engine's time goes: {shown}")
    if result["shares"]:
        lines += ["", "light share   FLOPs saved   blocks saved   time saved"]
        for e in result["shares"]:
            lines.append(
                f"{e['light_share']:>10.0%} {_show(e['flops_saved'], '.1%'):>13} {_show(e['blocks_saved'], '.1%'):>14} "
                f"{e['wall_saved']:>12.1%} ± {e['wall_saved_sd']:.1%}"
            )
        if told := [e for e in result["shares"] if e["p_below_computed"] < 0.05]:
            shown = ", ".join(f"{e['light_share']:.0%}" for e in told)
            lines.append(f"less time than operations saved (p < 0.05) at {shown}")
        low, high = result["slope"]["ci"]
        lines.append(f"slope of time saved over light share {result['slope']['value']:.3f} [{low:.3f}, {high:.3f}]")
    lines += [
        "",
        f"smaller blocks alone could make MDLM's sampler {_show(result['bound_1_over_alpha'], '.2f')} times faster: "
        f"1/alpha, alpha = {_show(result['alpha'], '.3f')} (the paper's 1/(1-alpha) is a slip: "
        f"{_show(result['paper_slip_1_over_1_minus_alpha'], '.2f')})",
        f"KL of the engine to the fp32 network: {_show(result['kl_to_fp32'], '.2e')} nats",
    ]
    if result["peak_memory_engine"]:
        mine, theirs = result["peak_memory_engine"] / 2**30, result["peak_memory_reference"] / 2**30
        at = f"at batch {result['peak_memory_batch']}"
        lines.append(f"peak memory {at}: {mine:.2f} GiB against {theirs:.2f} GiB, {mine / theirs:.1%}")
    if ar:
        ours = result["engine_tokens_per_s"]
        times = "" if not ours else f": {ar['best'] / ours:.2g} times the engine's {ours:,.0f}"
        times += ". It wins by a lot at large T" if ours and ar["best"] > 2 * ours else ""
        lines.append(
            f"a causal model of the same size with a KV cache: {ar['batch_1']:,.0f} tokens/s at batch 1, "
            f"{ar['best']:,.0f} at batch {ar['best_batch']}{times}"
        )
    lines += [f"not measured: {name}: {reason}" for name, reason in result["errors"].items()]
    return "\n".join(lines)
