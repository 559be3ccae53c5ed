r"""Speed against MDLM's own sampler, measured in one run on one machine: `relaylm bench`.

Three rivals on the same weights (random ones, or a family's):

- **reference**: `reference.ddpm_step` and `ddpm_cache_step` as MDLM publishes them. adaLN with a constant conditioning
  vector, not folded; on CUDA under bfloat16 autocast with a float32 residual stream, so logits are bfloat16 (on other
  devices everything is float32); SDPA in place of flash-attn. At the batch that is fastest for it. Timed over
  consecutive steps at three noise levels, and over one trajectory from end to end as a check. Once more under
  `torch.compile`, in a form without data-dependent shapes, so that nobody can say that the gain is the compiler.
- **engine**: `sampler.denoise` from end to end, plan and queue included, on the folded network.
- **autoregressive**: a causal network of the same size with a static key/value cache. At large T and batch it wins.

Everything that is compared is interleaved, so that a machine whose speed drifts does not favour either side. Times are
in milliseconds per row-step: one row (sample), one of its T steps. Parts that fail leave null and a line in `errors`.

Shapes: n rows in all, B in a call, L positions, K places for due positions in a row, N kept for the head, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import relaylm
from relaylm import reference
from relaylm.denoiser import Architecture, Transformer, build, rotate
from relaylm.diffusion import LINEAR
from relaylm.engine import Shape, settings
from relaylm.errors import UserError
from relaylm.family import DTYPES, Family, pick_device
from relaylm.plan import Plan, make_events, make_plan, race
from relaylm.sampler import Samples, call_shapes, denoise
from relaylm.schedule import sandwich

PARTS = ("cache", "compiled", "trajectory", "shares", "memory", "breakdown", "kl", "rival", "growth", "bound")
LEVELS = (0.9, 0.5, 0.1)  # noise levels t at which the reference is timed
SHARES = tuple(range(0, 101, 10))  # per cent of light steps
X = TypeVar("X")


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


@dataclass(frozen=True)
class Side:
    """One model as each rival runs it: the published network, its float32 self, and the engine's."""

    published: Transformer
    engine: Transformer
    device: torch.device

    @property
    def time_conditioning(self) -> bool:
        return self.published.time_conditioning

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """As MDLM's forward: bfloat16 autocast around blocks and output layer, on CUDA."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.published.logits(tokens_BL, t_B)

    def blocks(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """The same without the output layer."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.published.hidden_at(tokens_BL, t_B, None)

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        raise NotImplementedError("the reference knows no such thing")


# ------------------------------------------------------------------------------------------------ weights and clocks


def random_network(architecture: Architecture, seed: int) -> Transformer:
    """Random weights on the CPU: logits of deviation about 2, and with adaLN small shifts and scales and gates of about
    1, so that folding is not trivial."""
    generator = torch.Generator().manual_seed(seed)
    network = Transformer(architecture).initialise(generator).eval().requires_grad_(False)
    width = architecture.width
    out = network.output_layer
    out.linear.weight.copy_(torch.randn(out.linear.weight.shape, generator=generator) * 2 / math.sqrt(width))
    for name, parameter in network.named_parameters():
        if "adaLN" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            if "blocks" in name and name.endswith("bias"):
                parameter.view(6, width)[2] += 1
                parameter.view(6, width)[5] += 1
    return network


def _dtype(network: Transformer) -> torch.dtype:
    """What the blocks compute in."""
    return cast(list[Any], network.blocks)[0].attn_qkv.weight.dtype


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    _sync(device)
    began = time.perf_counter()
    function()
    _sync(device)
    return time.perf_counter() - began


def _device_seconds(function: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median time of one call without the host's share: on CUDA from replays of a graph."""
    function()
    if device.type != "cuda":
        return float(np.median([_seconds(function, device) for _ in range(repeats)]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()

    def ten() -> None:
        for _ in range(10):
            graph.replay()

    return float(np.median([_seconds(ten, device) for _ in range(repeats)])) / 10


# ------------------------------------------------------------------------------------------------ the reference


def _corrupted(shape: tuple[int, int], t: float, mask_id: int, vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(0, vocab_size, shape, generator=generator)
    hidden_BL = (torch.rand(shape, generator=generator) < t) | (tokens_BL == mask_id)
    return tokens_BL.masked_fill(hidden_BL, mask_id)


class Window:
    """Consecutive steps of a reference sampler around one noise level, from a corrupted random state."""

    def __init__(self, side: Side, level: float, steps: int, count: int, batch: int, length: int, seed: int) -> None:
        self.side, self.dt = side, 1 / steps
        self.count = min(count, steps)
        self.start = min(1.0, max(level + self.count / 2 * self.dt, self.count * self.dt))
        a = side.published.architecture
        self.mask_id, self.batch = a.mask_id, batch
        self.x_BL = _corrupted((batch, length), self.start, a.mask_id, a.vocab_size, seed).to(side.device)
        self.generator = torch.Generator(device=side.device).manual_seed(seed)

    def ddpm(self, count: int | None = None) -> None:
        x_BL, dt = self.x_BL, self.dt
        for k in range(count or self.count):
            x_BL = reference.ddpm_step(self.side, x_BL, self.start - k * dt, dt, self.mask_id, self.generator)

    def ddpm_cache(self) -> None:
        x_BL, p_BLV = self.x_BL, None
        for k in range(self.count):
            t = self.start - k * self.dt
            next_BL, p = reference.ddpm_cache_step(self.side, x_BL, t, self.dt, self.mask_id, self.generator, p_BLV)
            p_BLV = p if reference.still_holds(self.side, x_BL, next_BL) else None
            x_BL = next_BL

    def compiled(self, step: Callable[[Tensor, Tensor, Tensor], Tensor], count: int | None = None) -> None:
        x_BL = self.x_BL
        for k in range(count or self.count):
            t_B = torch.full((self.batch,), self.start - k * self.dt, device=x_BL.device)
            x_BL = step(x_BL, t_B, t_B - self.dt)

    def ms(self, run: Callable[[], None]) -> float:
        """Milliseconds per row-step."""
        return _seconds(run, self.side.device) * 1e3 / (self.batch * self.count)


def _compiled_step(side: Side) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`ddpm_step` for a compiler: the same numbers, boolean indices written as masks so that it can be fused whole."""
    mask_id, vocab_size = side.published.mask_id, side.published.vocab_size

    def step(x_BL: Tensor, t_B: Tensor, s_B: Tensor) -> Tensor:
        logits_BLV = side.logits(x_BL, t_B)
        id_V = torch.arange(vocab_size, device=x_BL.device)
        logits_BLV = torch.where(id_V == mask_id, logits_BLV + reference.NEVER, logits_BLV)
        log_p_BLV = logits_BLV - torch.logsumexp(logits_BLV, dim=-1, keepdim=True)
        written_BL1 = (x_BL != mask_id)[..., None]
        certain_BLV = torch.where(id_V == x_BL[..., None], 0.0, reference.NEVER).to(log_p_BLV.dtype)
        p_BLV = torch.where(written_BL1, certain_BLV, log_p_BLV).exp()
        move_t, move_s = (1 - torch.exp(torch.log1p(-(1 - 1e-3) * time_B)) for time_B in (t_B, s_B))
        q_BLV = torch.where(id_V == mask_id, move_s[:, None, None], p_BLV * (move_t - move_s)[:, None, None])
        noise_BLV = reference.GUARD - (torch.rand_like(q_BLV) + reference.GUARD).log()
        return torch.where(x_BL != mask_id, x_BL, (q_BLV / noise_BLV).argmax(dim=-1))

    return torch.compile(step)


def _best_batch(side: Side, batches: Sequence[int], steps: int, length: int, count: int, seed: int) -> dict[str, Any]:
    """Milliseconds per row-step of `ddpm` by batch size, until memory ends or two sizes bring nothing. The best is the
    smallest within half a per cent of the fastest."""
    ms: dict[int, float] = {}
    for batch in batches:
        try:
            window = Window(side, 0.5, steps, count, batch, length, seed)
            window.ddpm(1)
            ms[batch] = window.ms(window.ddpm)
            del window
        except torch.OutOfMemoryError:
            break
        finally:
            if side.device.type == "cuda":
                torch.cuda.empty_cache()
        if len(ms) > 2 and min(list(ms.values())[:-2]) <= min(list(ms.values())[-2:]):
            break
    if not ms:
        raise UserError(f"there is not enough memory for the reference at batch {batches[0]}")
    best = next(batch for batch, value in ms.items() if value <= 1.005 * min(ms.values()))
    return {"best": best, "ms_per_row_step": {str(batch): value for batch, value in ms.items()}}


# ------------------------------------------------------------------------------------------------ the engine


def _plan(rows: int, length: int, free: int, seed: int, vocab_size: int, mask_id: int) -> Plan:
    """A plan whose positions are given, random tokens, but for the last `free`: fewer calls, each of the same cost."""
    if free >= length:
        return make_plan(rows, length, seed)
    given = _corrupted((rows, length), 0.0, mask_id, vocab_size, seed).numpy()
    given[given == mask_id] = 0
    given[:, length - free :] = -1
    return make_plan(rows, length, seed, given)


def executed_flops(model: Transformer, plan: Plan, samples: Samples, batch: int) -> float:
    """Operations that one model's run really did: empty places, padded positions and the head's spare room included;
    the queries, keys and values that a table replaced are not, and the head's three pieces count as one product."""
    a = model.architecture
    times = [k / samples.steps for k in range(int(samples.steps), -1, -1)]
    events = make_events(plan, times)
    shapes, shape_E = call_shapes(events, times, LINEAR, plan.length, min(batch, plan.n))
    per_head = 2.0 * a.width * a.vocab_size
    with torch.no_grad():
        from_table = 6.0 * plan.length * a.width**2 if model._has_kernels() and a.depth > 1 else 0.0
    total = 0.0
    for shape, number in zip(shapes, np.bincount(shape_E, minlength=len(shapes)), strict=True):
        trunk = model.flops(plan.length, shape.per_row) - shape.per_row * per_head - from_table
        total += number * (trunk + per_head * shape.kept / shape.rows)
    return total * (1 + samples.cost.padded_calls / samples.cost.total_calls)


def _breakdown(model: Transformer, shape: Shape, length: int, seed: int) -> dict[str, float]:
    """Seconds of one call's parts on the device: the blocks, the head, the draw."""
    device, a = model.device, model.architecture
    x_BL = _corrupted((shape.rows, length), 0.5, a.mask_id, a.vocab_size, seed).to(device)
    t_B = torch.ones(shape.rows, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    positions_BK = torch.randint(0, length, (shape.rows, shape.per_row), generator=generator).to(device)
    row_N = torch.arange(shape.kept, device=device)
    with settings(device):
        hidden_BKD = model.hidden_at(x_BL, t_B, positions_BK)
        hidden_ND = hidden_BKD.flatten(0, 1)[: shape.kept]
        logits_NV = model.head(hidden_ND)
        logits_NV[:, a.mask_id] = -torch.inf
        return {
            "blocks": _device_seconds(lambda: model.hidden_at(x_BL, t_B, positions_BK), device),
            "head": _device_seconds(lambda: model.head(hidden_ND), device),
            "drawing": _device_seconds(lambda: race(logits_NV, seed, row_N, row_N, torch.zeros_like(row_N)), device),
        }


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


# ------------------------------------------------------------------------------------------------ the honest rival


class Decoder:
    """A causal network that writes one token of each of B rows at a time, with keys and values in buffers of fixed
    size."""

    def __init__(self, network: Transformer, batch: int, length: int) -> None:
        a = network.architecture
        if not a.causal or a.adaln:
            raise UserError("only a plain causal network decodes from left to right")
        self.network, self.batch, self.length = network, batch, length
        dtype, device = _dtype(network), network.device
        shape = (a.depth, 2, batch, a.heads, length, a.width // a.heads)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.token_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.index_L = torch.arange(length, device=device)
        out = network.output_layer.linear
        half = device.type == "cuda"  # the head in bfloat16, as anyone would run it
        self.head = [tensor.to(torch.bfloat16) if half else tensor for tensor in (out.weight, out.bias)]

    def logits(self, upto: int) -> Tensor:
        """Logits (B, V) after `token_B` at position `at` (below `upto`), which enters the cache."""
        a, network = self.network.architecture, self.network
        cos, sin = (table[self.at] for table in network.angles(self.length))
        seen = (self.index_L[:upto] <= self.at)[None, None, None]
        x = network.vocab_embed(self.token_B)
        for cache, block in zip(self.cache, cast(list[Any], network.blocks), strict=True):
            h = block.norm1(x).to(self.cache.dtype)
            qkv = F.linear(h, block.attn_qkv.weight, block.attn_qkv.bias).view(self.batch, 3, a.heads, 1, -1)
            cache[0].index_copy_(2, self.at, rotate(qkv[:, 1], cos, sin))
            cache[1].index_copy_(2, self.at, qkv[:, 2])
            q = rotate(qkv[:, 0], cos, sin)
            out = F.scaled_dot_product_attention(q, cache[0, :, :, :upto], cache[1, :, :, :upto], attn_mask=seen)
            x = x + F.linear(out.flatten(1), block.attn_out.weight)
            h = F.linear(block.norm2(x).to(self.cache.dtype), block.mlp[0].weight, block.mlp[0].bias)
            x = x + F.linear(F.gelu(h, approximate="tanh"), block.mlp[2].weight, block.mlp[2].bias)
        h = network.output_layer.norm_final(x)
        return F.linear(h.to(self.head[0].dtype), *self.head)

    def _step(self, upto: int) -> None:
        p_BV = self.logits(upto).float().softmax(dim=-1)
        self.token_B.copy_((p_BV / torch.empty_like(p_BV).exponential_()).argmax(dim=-1))
        self.at += 1

    def generate(self, repeats: int = 2) -> float:
        """Tokens per second over whole rows, the fastest of a few."""
        device, reach = self.network.device, max(1, -(-self.length // 4))  # attention over quarters of the length
        quarters = [min(self.length, reach * (i + 1)) for i in range(-(-self.length // reach))]
        steps: dict[int, Callable[[], None]] = {upto: lambda upto=upto: self._step(upto) for upto in quarters}  # type: ignore[misc]
        with torch.inference_mode():
            if device.type == "cuda":
                for upto in quarters:
                    self.at.zero_()
                    stream = torch.cuda.Stream()
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        self._step(upto)
                    torch.cuda.current_stream().wait_stream(stream)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        self._step(upto)
                    steps[upto] = graph.replay

            def whole() -> None:
                self.at.zero_()
                for position in range(self.length):
                    steps[quarters[position // reach]]()

            return self.batch * self.length / min(_seconds(whole, device) for _ in range(repeats))


def _rival(architecture: Architecture, batches: Sequence[int], length: int, device: torch.device, seed: int) -> Any:
    plain = {**architecture.to_json(), "causal": True, "adaln": False, "time_conditioning": False, "qkv_bias": False}
    network = random_network(Architecture(**plain), seed).to(device)
    network = network.cast(torch.bfloat16) if device.type == "cuda" else network
    rate: dict[int, float] = {}
    for batch in batches:
        try:
            rate[batch] = Decoder(network, batch, length).generate(2 if device.type == "cuda" else 1)
        except torch.OutOfMemoryError:
            break
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if len(rate) > 1 and rate[batch] < 1.02 * max(list(rate.values())[:-1]):
            break
    best = max(rate, key=lambda batch: rate[batch])
    by_batch = {str(batch): value for batch, value in rate.items()}
    return {"batch_1": rate[1], "best": rate[best], "best_batch": best, "by_batch": by_batch}


# ------------------------------------------------------------------------------------------------ the parts of a run


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

    def engine(self, plan: Plan, share: float, batch: int | None = None) -> tuple[float, Samples]:
        """Wall seconds and samples of one run of the engine under a sandwich with a share of light steps."""
        models = {"light": self.light.engine, "heavy": self.heavy.engine}
        schedule = sandwich(f"{share:g}%").bind("light", "heavy")
        mask_id, out = self.heavy.engine.mask_id, []
        options: dict[str, Any] = {"steps": self.steps, "batch_size": batch or self.batch, "device": self.device}
        seconds = _seconds(
            lambda: out.append(denoise(models, schedule, plan, mask_id=mask_id, heavy="heavy", **options)), self.device
        )
        return seconds, out[0]

    def plan(self, rows: int, free: int) -> Plan:
        a = self.heavy.engine.architecture
        return _plan(rows, self.length, free, self.seed, a.vocab_size, a.mask_id)

    def window(self, side: Side, level: float, count: int, batch: int) -> Window:
        return Window(side, level, self.steps, count, batch, self.length, self.seed)


def _products(device: torch.device, dtype: torch.dtype, count: int) -> list[float]:
    """TFLOP/s of single square matrix products: 8192^3 on CUDA, 1024^3 elsewhere."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    return [2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device) / 1e12 for _ in range(count)]


def _against_reference(job: Job, batch: dict[str, int]) -> dict[str, Any]:
    """The heart: windows of the published sampler and end-to-end runs of the engine, in ABBA order."""
    effort, device = job.effort, job.device
    dtype = _dtype(job.heavy.engine)
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


def _other_windows(job: Job, batch: int, compiled: bool) -> float:
    """Milliseconds per row-step of the cached or the compiled reference, heavy model, mean over the levels."""
    step = _compiled_step(job.heavy) if compiled else None
    values = []
    with torch.inference_mode():
        for level in LEVELS:
            window = job.window(job.heavy, level, job.effort.window_other, batch)
            if step is None:
                values.append(window.ms(window.ddpm_cache))
            else:
                window.compiled(step, 3)  # compiles
                values.append(window.ms(lambda w=window: w.compiled(step)))  # type: ignore[misc]
    return float(np.mean(values))


def _trajectory(job: Job, sweep: dict[str, Any]) -> dict[str, Any]:
    """`ddpm` from pure mask to the end, as a check of the windows; noise removal is one more pass. At the smallest
    batch that was tried, compared with its own window: a whole trajectory at the best one takes minutes."""
    steps = min(job.steps, job.effort.trajectory)
    schedule = sandwich("0%").bind("light", "heavy")
    options: dict[str, Any] = {"mask_id": job.heavy.published.mask_id, "steps": steps, "device": job.device}
    batch, window_ms = min((int(batch), ms) for batch, ms in sweep["ms_per_row_step"].items())
    run = reference.sample_reference({"heavy": job.heavy}, schedule, batch, job.length, seed=job.seed, **options)
    ms = run.seconds * 1e3 / (batch * (steps + 1))
    return {"steps": steps, "batch": batch, "ms_per_row_step": ms, "relative_to_windows": ms / window_ms}


def _shares(job: Job, row_step_seconds: float) -> dict[str, Any]:
    """Time and operations saved by light share. Passes go up and down the shares, all-heavy at both ends of each."""
    repeats = job.effort.repeats
    rows = 2 * job.batch
    runs = repeats * (len(SHARES) * 0.7 + 1)
    full = row_step_seconds * job.steps * rows  # seconds of an all-heavy run of whole rows
    free = int(np.clip(job.length * job.effort.share_seconds / (runs * full), min(4, job.length), job.length))
    plan = job.plan(rows, free)
    for share in (0, 50, 100):
        job.engine(job.plan(rows, min(free, 4)), share)
    saved: dict[int, list[float]] = {share: [] for share in SHARES}
    done: dict[int, Samples] = {}
    for i in range(repeats):
        order = [*SHARES, 0] if i % 2 == 0 else [0, *SHARES[::-1]]
        times: dict[int, list[float]] = {}
        for share in order:
            seconds, done[share] = job.engine(plan, share)
            times.setdefault(share, []).append(seconds)
        base = float(np.mean(times[0]))
        for share in SHARES:
            saved[share] += [1 - seconds / base for seconds in times[share]]
    entries, x, y = [], [], []
    for share in SHARES:
        cost = done[share].cost
        sd = float(np.std(saved[share], ddof=1)) if repeats > 1 else 0.0
        mean, light = float(np.mean(saved[share])), cost.calls["light"] / cost.total_calls
        entries.append(
            {
                "light_share": share / 100,
                "light_share_of_calls": light,
                "flops_saved": cost.flops_saved,
                "blocks_saved": cost.blocks_saved,
                "wall_saved": mean,
                "wall_saved_sd": sd,
                "wall_saved_all": saved[share],
                "padded_calls": cost.padded_calls,
                "significantly_below_flops": bool(mean + 2 * sd / math.sqrt(repeats) < (cost.flops_saved or 0.0)),
            }
        )
        x += [light] * len(saved[share])
        y += saved[share]
    how = f"{rows} rows, {free} of {job.length} positions free (the rest given), {repeats} passes"
    return {"shares": entries, "slope": {**_fit(x, y), "over": "light share of calls"}, "shares_measured_on": how}


def _memory(job: Job, batch: int) -> dict[str, Any]:
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


def _growth(job: Job) -> dict[str, Any]:
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
            _seconds(lambda: runs.append(denoise(models, schedule, plan, **options)), job.device) for _ in range(2)
        )
        cost, per_row_n = runs[0].cost, make_events(plan, [k / job.steps for k in range(job.steps, -1, -1)]).per_row_n
        return {
            "rows": rows,
            "depth": models["heavy"].depth,
            "calls": cost.total_calls,
            "most_calls_of_a_row": int(per_row_n.max()),
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


def _bound(job: Job, batch: int, step_ms: float) -> dict[str, float]:
    """Amdahl's bound on what smaller blocks alone can give the published sampler. alpha is the share of its time that
    is not spent in blocks; the bound is 1 / alpha (the paper prints 1 / (1 - alpha))."""
    window = job.window(job.heavy, 0.5, 1, batch)
    t_B = torch.ones(batch, device=job.device)
    with torch.inference_mode():
        job.heavy.blocks(window.x_BL, t_B)
        blocks = [_seconds(lambda: job.heavy.blocks(window.x_BL, t_B), job.device) for _ in range(5)]
    alpha = min(1.0, max(1e-9, 1 - float(np.median(blocks)) * 1e3 / batch / step_ms))
    return {
        "alpha": alpha,
        "bound_1_over_alpha": 1 / alpha,
        "paper_slip_1_over_1_minus_alpha": 1 / max(1 - alpha, 1e-9),
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "relaylm": relaylm.__version__}


def _machine(device: torch.device) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"platform": platform.platform(), "cpu": cpu, "threads": torch.get_num_threads(), "gpu": gpu}


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _effort(device: torch.device, quick: bool) -> Effort:
    if quick:
        return Effort(4, 3, 2, 8, 1, 2, 10.0, 4)
    if device.type == "cuda":
        return Effort(100, 20, 6, 1000, 1, 3, 40.0, 20)
    return Effort(100, 34, 3, 64, 2, 3, 240.0, 20)


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
    `samples` the rows of an end-to-end run, `dtype` what the engine's blocks compute in (bfloat16 on CUDA, float32
    elsewhere). `quick` shortens every measurement and is good for a look, not for a record. `parts` names those of
    PARTS to measure besides the main one, reference against engine; None is all of them.
    """
    from tqdm import tqdm

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
    heads = heads or max(1, width // 64)
    chosen = torch.bfloat16 if cuda else torch.float32
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
    effort = _effort(where, quick)
    job = Job(heavy, light, where, length, steps, min(batch, rows), rows, seed, effort)
    errors: dict[str, str] = {}
    bar = tqdm(total=13, disable=not progress, file=sys.stderr, desc="bench", leave=False)

    def part(name: str, function: Callable[[], X], kind: str = "") -> X | None:
        """One measurement, if it is wanted; what goes wrong in it is written down and the others go on."""
        if kind and kind not in wanted:
            return None
        bar.set_description(name)
        started = time.perf_counter()
        try:
            return function()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return None
        finally:
            if progress:
                bar.write(f"{name}: {time.perf_counter() - started:.1f} s {errors.get(name, '')}", file=sys.stderr)
            bar.update()
            if cuda:
                torch.cuda.empty_cache()

    def sweep(side: Side) -> dict[str, Any]:
        with torch.inference_mode():
            return _best_batch(side, (8, 16, 32, 64) if cuda else (1, 2, 4), job.steps, job.length, effort.sweep, seed)

    def warm_up() -> None:
        for share in (0, 100):
            job.engine(job.plan(job.rows, min(4, job.length)), share)

    sweeps = {
        "heavy": part("batch of the reference, heavy", lambda: sweep(heavy)),
        "light": part("batch of the reference, light", lambda: sweep(light)),
    }
    best = {name: value["best"] if value else 1 for name, value in sweeps.items()}
    part("warm-up of the engine", warm_up)
    main = part("reference and engine", lambda: _against_reference(job, best)) or {}
    drawn: Samples | None = main.pop("_samples", None)
    if progress and main:
        bar.write(f"speedup {main['speedup']:.2f}, light {main['speedup_light']:.2f}", file=sys.stderr)
    heavy_ms, engine_ms = main.get("reference_ms_per_row_step"), main.get("engine_ms_per_row_step")
    cache_ms = part("cached reference", lambda: _other_windows(job, best["heavy"], False), "cache")
    compiled_ms = part("compiled reference", lambda: _other_windows(job, best["heavy"], True), "compiled")
    check = part("full trajectory of the reference", lambda: _trajectory(job, sweeps["heavy"] or {}), "trajectory")
    shares = part("light shares", lambda: _shares(job, (engine_ms or math.nan) / 1e3), "shares") or {}
    memory = part("memory", lambda: _memory(job, 32), "memory") or {}
    if not cuda:
        errors["memory"] = f"peak memory is measured on CUDA alone, not on {where.type}"

    def rest() -> dict[str, Any]:
        found: dict[str, Any] = {}
        events = make_events(job.plan(job.rows, length), [k / steps for k in range(steps, -1, -1)])
        times = [k / steps for k in range(steps, -1, -1)]
        shapes, shape_E = call_shapes(events, times, LINEAR, length, job.batch)
        shape = shapes[int(np.bincount(shape_E).argmax())]
        for name, side in (("", heavy), ("_light", light)):
            run = main["engine_runs"]["light" if name else "heavy"]
            wall = float(np.mean(run["seconds"])) / run["network_calls"]
            parts = _breakdown(side.engine, shape, length, seed)
            found[f"breakdown{name}"] = {k: v / wall for k, v in parts.items()} | {
                "host": 1 - sum(parts.values()) / wall,
                "ms_per_call": wall * 1e3,
                "rows_per_call": shape.rows,
            }
        return found

    where_time_goes = part("breakdown", rest, "breakdown") or {}
    kl = None if drawn is None else part("KL", lambda: kl_to_fp32(heavy, drawn, 16 if quick else 128, seed), "kl")
    ar_batches = (1, 128, 512) if cuda else (1, 8, 32, 128)
    ar = part(
        "autoregressive rival", lambda: _rival(a, ar_batches[:2] if quick else ar_batches, length, where, seed), "rival"
    )
    growth = part("growth", lambda: _growth(job), "growth")
    bound = part("bound", lambda: _bound(job, best["heavy"], heavy_ms or math.nan), "bound") or {}
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
            **{"width": a.width, "heads": a.heads, "vocab_size": a.vocab_size, "length": length, "steps": steps},
            **{
                "batch_size": job.batch,
                "samples": rows,
                "quick": quick,
                "parts": sorted(wanted),
                "effort": vars(effort),
            },
            "weights": "random" if family is None else family.name or "family",
            "adaln_in_reference": a.adaln,
            "precision": kinds,
        },
        "machine": _machine(where),
        "versions": _versions(),
        "seed": seed,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
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
        times = (
            "" if not ours else f": {ar['best'] / ours:.0f} times the engine's {ours:,.0f}. It wins by a lot at large T"
        )
        lines.append(
            f"a causal model of the same size with a KV cache: {ar['batch_1']:,.0f} tokens/s at batch 1, "
            f"{ar['best']:,.0f} at batch {ar['best_batch']}{times}"
        )
    lines += [f"not measured: {name}: {reason}" for name, reason in result["errors"].items()]
    return "\n".join(lines)
