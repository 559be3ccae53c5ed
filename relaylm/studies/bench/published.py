r"""MDLM's network and steps as published, and the clock: what `bench` measures against.

`reference.ddpm_step` and `ddpm_cache_step` run as MDLM publishes them: adaLN with a constant conditioning vector, not
folded; on CUDA under bfloat16 autocast with a float32 residual stream, so logits are bfloat16 (on other devices
everything is float32); SDPA in place of flash-attn. They are timed over consecutive steps around a noise level
(`Window`), at the batch that is fastest for them (`best_batch`), and once more under `torch.compile`, in a form without
data-dependent shapes. Weights may be random.

Shapes: B rows in a call, L positions, V vocabulary with the mask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from relaylm.errors import UserError
from relaylm.measure.timing import wait
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.sampling import reference


@dataclass(frozen=True)
class Side:
    """One model as both sides run it: the published network in float32, and the engine's."""

    published: Transformer
    engine: Transformer
    device: torch.device

    @property
    def time_conditioning(self) -> bool:
        """As a denoiser says it."""
        return self.published.time_conditioning

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """As MDLM's forward: bfloat16 autocast around blocks and output layer, on CUDA."""
        with self._autocast():
            return self.published.logits(tokens_BL, t_B)

    def blocks(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """The same without the output layer."""
        with self._autocast():
            return self.published.hidden_at(tokens_BL, t_B, None)

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Not a part of MDLM's sampler."""
        raise NotImplementedError("the reference computes logits at every position")


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


def dtype_of(network: Transformer) -> torch.dtype:
    """What the blocks compute in."""
    return cast(list[Any], network.blocks)[0].attn_qkv.weight.dtype


def free_memory(device: torch.device) -> None:
    """Return cached memory to the device: the largest batches need all there is."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall seconds of one call, until the device has finished it, and what it returned."""
    wait(device)
    began = time.perf_counter()
    result = function()
    wait(device)
    return time.perf_counter() - began, result


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """The seconds alone."""
    return timed(function, device)[0]


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """The function as a CUDA graph that is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def device_seconds_of(function: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Median time of one call without the host's share: on CUDA from replays of a graph."""
    function()
    times = 10 if device.type == "cuda" else 1
    run = captured(function) if device.type == "cuda" else function
    run()
    return float(np.median([seconds_of(lambda: [run() for _ in range(times)], device) for _ in range(repeats)])) / times


def kernels_of(function: Callable[[], object], device: torch.device, most: int = 12) -> list[dict[str, Any]]:
    """What a call runs, by its own time on the device, the longest first: CUDA kernels, elsewhere PyTorch's operations.
    Each has its name, how often it ran, and microseconds in all."""
    cuda = device.type == "cuda"
    calls = 5 if cuda else 1
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(calls):
            function()
        wait(device)
    found = []
    for item in seen.key_averages():
        microseconds = item.self_device_time_total if cuda else item.self_cpu_time_total
        found.append({"name": item.key[:100], "times": item.count / calls, "microseconds": microseconds / calls})
    return sorted(found, key=lambda item: -float(item["microseconds"]))[:most]


def corrupted(shape: tuple[int, int], t: float, mask_id: int, vocab_size: int, seed: int) -> Tensor:
    """Random tokens, each masked with probability t."""
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
        self.x_BL = corrupted((batch, length), self.start, a.mask_id, a.vocab_size, seed).to(side.device)
        self.generator = torch.Generator(device=side.device).manual_seed(seed)

    def ddpm(self, count: int | None = None) -> None:
        """Run MDLM's plain steps."""
        x_BL, dt = self.x_BL, self.dt
        for k in range(count or self.count):
            x_BL = reference.ddpm_step(self.side, x_BL, self.start - k * dt, dt, self.mask_id, self.generator)

    def ddpm_cache(self) -> None:
        """Run MDLM's steps with its cache of probabilities."""
        x_BL, p_BLV = self.x_BL, None
        for k in range(self.count):
            t = self.start - k * self.dt
            next_BL, p = reference.ddpm_cache_step(self.side, x_BL, t, self.dt, self.mask_id, self.generator, p_BLV)
            p_BLV = p if reference.still_holds(self.side, x_BL, next_BL) else None
            x_BL = next_BL

    def compiled(self, step: Callable[[Tensor, Tensor, Tensor], Tensor], count: int | None = None) -> None:
        """Run compiled steps."""
        x_BL = self.x_BL
        for k in range(count or self.count):
            t_B = torch.full((self.batch,), self.start - k * self.dt, device=x_BL.device)
            x_BL = step(x_BL, t_B, t_B - self.dt)

    def ms(self, run: Callable[[], None]) -> float:
        """Milliseconds per row-step."""
        return seconds_of(run, self.side.device) * 1e3 / (self.batch * self.count)

    def blocks_ms(self) -> float:
        """Milliseconds per row of the blocks alone, the median of five calls."""
        run = partial(self.side.blocks, self.x_BL, torch.ones(self.batch, device=self.side.device))
        run()
        return float(np.median([seconds_of(run, self.side.device) for _ in range(5)])) * 1e3 / self.batch


def compiled_step(side: Side) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
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


def best_batch(side: Side, batches: Sequence[int], steps: int, length: int, count: int, seed: int) -> dict[str, Any]:
    """Milliseconds per row-step of `ddpm` by batch size, until memory ends or two sizes bring nothing; then once more
    from the last to the first, so that a drift of the machine affects all alike. The best is the smallest within half a
    per cent of the fastest."""
    ms: dict[int, float] = {}

    def measured(batch: int) -> float:
        free_memory(side.device)
        window = Window(side, 0.5, steps, count, batch, length, seed)
        window.ddpm(1)
        return window.ms(window.ddpm)

    for batch in batches:
        try:
            ms[batch] = measured(batch)
        except torch.OutOfMemoryError:
            break
        if len(ms) > 2 and min(list(ms.values())[:-2]) <= min(list(ms.values())[-2:]):
            break
    for batch in list(ms)[::-1]:
        ms[batch] = (ms[batch] + measured(batch)) / 2
    if not ms:
        raise UserError(f"there is not enough memory for the reference at batch {batches[0]}")
    best = next(batch for batch, value in ms.items() if value <= 1.005 * min(ms.values()))
    return {"best": best, "ms_per_row_step": {str(batch): value for batch, value in ms.items()}}
