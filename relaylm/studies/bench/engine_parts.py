r"""What the benchmark measures of the engine: its shares of time, its operations, its precision, its memory.

Light shares take turns, so that a machine whose speed drifts favours none of them.

Shapes: n rows in all, B in a call, L positions, K places for due positions in a row, N kept for the head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from relaylm.core.plan import Events, Plan, make_events
from relaylm.errors import UserError
from relaylm.kernels import trunk as kernels
from relaylm.kernels.draw import race
from relaylm.measure import metrics
from relaylm.measure.likelihood import kl, log_probabilities
from relaylm.models.denoiser import Architecture, Transformer, build
from relaylm.sampling.engine import Call, Engine, Shape, settings
from relaylm.sampling.law import Law
from relaylm.sampling.queue import call_shapes
from relaylm.sampling.result import Samples
from relaylm.studies.bench.job import HEAVY, Job
from relaylm.studies.bench.published import Side, corrupted, device_seconds_of, free_memory, kernels_of

SHARES = tuple(range(0, 101, 10))  # per cent of light steps


def executed_flops(model: Transformer, plan: Plan, samples: Samples, batch: int, events: Events | None = None) -> float:
    """Operations that one model's run really did: empty places, padded positions and the head's spare places included;
    the queries, keys and values that a table replaced are not, nor the last block's values where none are made,
    and the head's three pieces count as one product. `events` are those of the run, if it was not in uniform steps."""
    a = model.architecture
    if events is None:
        events = make_events(plan, [k / samples.steps for k in range(int(samples.steps), -1, -1)])
    shapes, shape_E = call_shapes(events, plan.length, min(batch, plan.n))
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


def _call_parts(model: Transformer, shape: Shape, length: int, seed: int) -> tuple[dict[str, float], list[Any]]:
    """Seconds of one call's parts on the device (the blocks, the head, the draw), and the blocks' kernels."""
    device, a = model.device, model.architecture
    x_BL = corrupted((shape.rows, length), 0.5, a.mask_id, a.vocab_size, seed).to(device)
    t_B = torch.ones(shape.rows, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    positions_BK = torch.randint(0, length, (shape.rows, shape.per_row), generator=generator).to(device)
    row_N, spoilt = torch.arange(shape.kept, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with settings(device):
        hidden_ND = model.hidden_at(x_BL, t_B, positions_BK).flatten(0, 1)[: shape.kept]
        logits_NV = model.head(hidden_ND)
        logits_NV[:, a.mask_id] = -torch.inf
        parts: dict[str, Callable[[], Any]] = {
            "blocks": lambda: model.hidden_at(x_BL, t_B, positions_BK),
            "head": lambda: model.head(hidden_ND),
            "drawing": lambda: race(logits_NV, seed, row_N, row_N, torch.zeros_like(row_N), spoilt),
        }
        seconds = {name: device_seconds_of(part, device) for name, part in parts.items()}
        return seconds, kernels_of(parts["blocks"], device) if device.type == "cuda" else []


def breakdowns(job: Job, runs: dict[str, Any]) -> dict[str, Any]:
    """Shares of a call's wall time in the engine's own `runs`, for the shape of call that is most common."""
    events = make_events(job.plan(job.rows, job.length), job.times)
    shapes, shape_E = call_shapes(events, job.length, job.batch)
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
            both = (side.published, side.engine)
            log_p, log_q = (log_probabilities(model, x_BL, t_B, positions_B1, a.mask_id)[:, 0] for model in both)
            values += kl(log_p, log_q).tolist()
    return {"mean": float(np.mean(values)), "max": float(np.max(values)), "states": len(values)}


def fit(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Least squares y = intercept + value x, with a 95% interval of the slope."""
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, max(1, len(x) - 2)) * line.stderr)
    slope = float(line.slope)
    return {"value": slope, "ci": [slope - half, slope + half], "intercept": float(line.intercept)}


class Counting(Engine):
    """An engine that counts the empty places of its calls by model: they are computed too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty = [0 for _ in self.models]

    def run(self, call: Call, everywhere: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """A call, counted."""
        self.empty[call.model] += call.shape.rows - len(call.rows_R)
        return super().run(call, everywhere)


def shares(job: Job, row_step_seconds: float) -> dict[str, Any]:
    """Time and operations saved by light share. Passes go up and down the shares, all-heavy at both ends of each.

    `flops_saved` counts the calls, `flops_saved_with_empty_places` what was computed. In runs this short they differ by
    up to half a per cent, a partly filled call more or less; in runs of whole rows they agree. Time is compared with
    both: `p_below_flops`, and `p_below_computed`, which is whether operations saved become time saved."""
    repeats = job.effort.repeats
    batch = max(1, job.batch // 2) if job.cuda else job.batch  # in short runs whole ones are coarse
    rows = 8 * batch  # many rows with few free positions: then mixed batches are full, as in long runs
    runs = repeats * (len(SHARES) * 0.7 + 1) + 1
    full = row_step_seconds * job.steps * rows  # seconds of an all-heavy run of whole rows
    free = int(np.clip(job.length * job.effort.share_seconds / (runs * full), min(4, job.length), job.length))
    plan = job.plan(rows, free)
    # These runs are short: capturing calls again in each would weigh on those that need both models.
    models = [job.light.engine, job.heavy.engine]
    kept = Counting(models, plan, job.heavy.engine.mask_id, Law(), job.device)
    warm = plan if job.cuda else job.plan(rows, min(free, 4))  # all shapes where they are captured
    for share in (0, 100):
        job.engine(warm, share, batch, kept)
    found: dict[int, list[dict[str, float]]] = {share: [] for share in SHARES}
    for i in range(repeats):
        # Other rows in each pass: how far each model's calls are from a whole number of batches is chance.
        plan, done = job.plan(rows, free, first_row=i * rows), []
        for share in [*SHARES, 0] if i % 2 == 0 else [0, *SHARES[::-1]]:
            kept.empty = [0 for _ in models]
            seconds, samples = job.engine(plan, share, batch, kept)
            wasted = sum(empty * model.flops(job.length, 1) for empty, model in zip(kept.empty, models))
            done.append((share, seconds, (samples.cost.flops or 0.0) + wasted, samples.cost))
        base = float(np.mean([seconds for share, seconds, _, _ in done if share == 0]))
        base_flops = next(flops for share, _, flops, _ in done if share == 0)
        for share, seconds, flops, cost in done:
            one = {"wall": 1 - seconds / base, "computed": 1 - flops / base_flops}
            one["flops"] = 1 - cost.flops / cost.flops_all_heavy if cost.flops and cost.flops_all_heavy else 0.0
            one |= {"light": cost.calls["light"] / cost.total_calls, "blocks": cost.blocks_saved or 0.0}
            found[share].append({**one, "padded": cost.padded_calls})
    entries = [_entry(share, found[share]) for share in SHARES]
    for against in ("flops", "computed"):
        p_values = below_zero([entry[f"wall_minus_{against}_all"] for entry in entries[1:]])
        for entry, p in zip(entries, [1.0, *p_values]):  # all-heavy is what they are against
            entry[f"p_below_{against}"] = p
    passes = [one for share in SHARES for one in found[share]]
    slope = {**fit([one["light"] for one in passes], [one["wall"] for one in passes]), "over": "light share of calls"}
    how = f"{rows} rows in batches of {batch}, {free} of {job.length} positions free (the rest given), {repeats} passes"
    return {"shares": entries, "slope": slope, "shares_measured_on": how}


def _entry(share: int, passes: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What all passes of a light share come to."""
    column = {key: [one[key] for one in passes] for key in passes[0]}
    mean = {key: float(np.mean(values)) for key, values in column.items()}
    return {
        "light_share": share / 100,
        "light_share_of_calls": mean["light"],
        "flops_saved": mean["flops"],
        "flops_saved_with_empty_places": mean["computed"],
        "blocks_saved": column["blocks"][0],
        "wall_saved": mean["wall"],
        "wall_saved_sd": float(np.std(column["wall"], ddof=1)) if len(passes) > 1 else 0.0,
        "wall_saved_all": column["wall"],
        "wall_minus_flops_all": [one["wall"] - one["flops"] for one in passes],
        "wall_minus_computed_all": [one["wall"] - one["computed"] for one in passes],
        "padded_calls": column["padded"],
    }


def below_zero(passes: Sequence[Sequence[float]]) -> list[float]:
    """The p-value of each mean being below zero: one-sided, by Student's t with the spread of the passes that all have
    in common, adjusted for their number (Holm). With one pass it is 1."""
    freedom = sum(len(values) - 1 for values in passes)
    if freedom == 0:
        return [1.0] * len(passes)
    spread = math.sqrt(sum(float(np.var(values)) * len(values) for values in passes) / freedom)
    means = [float(np.mean(values)) for values in passes]
    if spread == 0:
        return [float(mean >= 0) for mean in means]
    t = [mean / spread * math.sqrt(len(values)) for mean, values in zip(means, passes)]
    return metrics.holm([float(stats.t.cdf(value, freedom)) for value in t])


def memory(job: Job, batch: int) -> dict[str, Any]:
    """Peak bytes on a GPU with one model in memory, its weights and tables included."""
    if not job.cuda:
        raise UserError(f"peak memory is measured on CUDA alone, not on {job.device.type}")

    def weights(network: Transformer) -> int:
        tensors: list[Any] = [*network.parameters(), *(table for _, table in network._tables.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def peak(network: Transformer, run: Callable[[], Any]) -> int:
        free_memory(job.device)
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
        "peak_memory_batch": batch,
    }


def growth(job: Job) -> dict[str, Any]:
    """Calls and seconds over the number of rows, and over depth (the heavy model cut short)."""
    free = min(32 if job.cuda else 4, job.length)

    def measured(model: Transformer, rows: int) -> dict[str, Any]:
        plan = job.plan(rows, free)
        runs = [job.timed({"heavy": model}, HEAVY, plan, batch_size=job.batch) for _ in range(2)]
        cost, step_nL = runs[0][1].cost, runs[0][1].trace.step_nL
        return {
            "rows": rows,
            "depth": model.depth,
            "calls": cost.total_calls,
            "most_calls_of_a_row": max(len(set(row_L[row_L > 0].tolist())) for row_L in step_nL),
            "at_most": min(job.steps, free),
            "network_calls": cost.network_calls,
            "seconds": min(seconds for seconds, _ in runs),
        }

    heavy = job.heavy.engine
    full, state, over_depth = heavy.architecture, heavy.state_dict(), []
    over_rows = [measured(heavy, job.batch * k) for k in (1, 2, 3)]
    for depth in sorted({max(1, full.depth // 3), max(1, full.depth * 2 // 3), full.depth}):
        short = {k: v for k, v in state.items() if not k.startswith("blocks.") or int(k.split(".")[1]) < depth}
        over_depth.append(measured(build(Architecture(**{**full.to_json(), "depth": depth}), short), 2 * job.batch))
    bounded = all(entry["most_calls_of_a_row"] <= entry["at_most"] for entry in over_rows + over_depth)
    result = {"over_rows": over_rows, "over_depth": over_depth, "calls_within_bound": bounded, "free": free}
    for entries, key in ((over_rows, "rows"), (over_depth, "depth")):
        x, y = ([entry[name] for entry in entries] for name in (key, "seconds"))
        result[f"linear_over_{key}"] = float(np.corrcoef(x, y)[0, 1] ** 2) if len(x) > 1 else None
    return result
