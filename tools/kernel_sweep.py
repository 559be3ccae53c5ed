"""Block sizes of the kernels in `fused_kernels` and `attention_kernels`, timed on this GPU: how they were chosen.

    python tools/kernel_sweep.py [WIDTH HEADS]

Prints microseconds for 65,536 tokens in rows of 256, the best setting of each kernel first. Compiling takes far longer
than timing, so all kernels are compiled first, by as many processes as there are cores, into Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from relaylm import attention_kernels, fused_kernels
from relaylm.denoiser import Architecture, Transformer

TOKENS, LENGTH = 65_536, 256


def microseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Of one call, by replaying it as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def settings() -> Iterator[tuple[str, dict[str, int]]]:
    for elements, programs, ahead, warps in itertools.product((1024, 2048), (528, 1056, 2112), (1, 2, 3, 4), (2, 4)):
        yield "NORM", {"ELEMENTS": elements, "PROGRAMS": programs, "AHEAD": ahead, "num_warps": warps}
    for rows, columns, warps in itertools.product((512, 2048), (4, 8, 16), (4, 8)):
        yield "SUMS", {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    shapes = itertools.product((4, 8, 16), (256, 512), (528, 1056, 4224), (1, 2, 3), (4, 8))
    for rows, columns, programs, ahead, warps in shapes:
        base = {"BLOCK_M": rows, "BLOCK_N": columns, "PROGRAMS": programs}
        yield "POINTWISE", {**base, "AHEAD": ahead, "num_warps": warps}
    for block, stages in itertools.product((64, 128), (2, 3, 4)):
        yield "ATTENTION", {"BLOCK_Q": 64, "BLOCK_K": block, "num_warps": 4, "num_stages": stages}
    for step, stages, registers in itertools.product((32, 64), (1, 2, 3), (128, 168, 255)):
        base = {"BLOCK": 64, "STEP": step, "num_warps": 4, "num_stages": stages}
        yield "ATTENTION_GRADIENT", {**base, "maxnreg": registers}
    for step, warps, stages in itertools.product((32, 64), (8, 16), (1, 2)):  # wider, or of 4 warps: registers spill
        yield "WHOLE_ROW", {"STEP": step, "num_warps": warps, "num_stages": stages}


def launches(width: int, heads: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """What each setting is used for."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    x, branch, dh, dx = (random(TOKENS, width) for _ in range(4))
    weight, bias = random(width, dtype=torch.float32), random(width, dtype=torch.float32)
    before, value, bias_up = (
        random(TOKENS, 4 * width),
        random(TOKENS, 4 * width),
        random(4 * width, dtype=torch.float32),
    )
    from_norm, from_gelu = random(1056, 2, width, dtype=torch.float32), random(264, 4 * width, dtype=torch.float32)
    cos, sin = Transformer(Architecture(28, LENGTH, width, 1, heads)).cuda().angles(LENGTH)
    qkv = random(TOKENS // LENGTH, LENGTH, 3 * width)
    out, normaliser = attention_kernels.attention(qkv, heads, False)
    return {
        "NORM": {
            "forward": lambda: fused_kernels.add_norm(x, branch, bias, weight, torch.bfloat16),
            "backward": lambda: fused_kernels.add_norm_gradient(x, weight, dh, dx, torch.bfloat16, True),
        },
        "POINTWISE": {
            "forward": lambda: fused_kernels.gelu(before, bias_up),
            "backward": lambda: fused_kernels.gelu_gradient_(value, before, bias_up),
        },
        "ATTENTION": {"forward": lambda: attention_kernels.attention(qkv, heads, False)},
        "SUMS": {
            "after a norm": lambda: fused_kernels.column_sums(from_norm),
            "after GELU": lambda: fused_kernels.column_sums(from_gelu),
        },
        "ATTENTION_GRADIENT": {
            "backward": lambda: attention_kernels.two_pass_gradient(qkv, out, normaliser, dh, cos, sin, heads, False)
        },
        "WHOLE_ROW": {
            "backward": lambda: attention_kernels.whole_row_gradient(qkv, out, normaliser, dh, cos, sin, heads, False)
        },
    }


@contextlib.contextmanager
def set_to(name: str, values: dict[str, int]) -> Iterator[None]:
    room = fused_kernels if hasattr(fused_kernels, name) else attention_kernels
    usual = getattr(room, name)
    setattr(room, name, values)
    try:
        yield
    finally:
        setattr(room, name, usual)


def compile_share(which: int, of: int, width: int, heads: int) -> None:
    uses = launches(width, heads)
    for name, values in itertools.islice(settings(), which, None, of):
        with set_to(name, values):
            for function in uses[name].values():
                with contextlib.suppress(Exception):  # the sweep says which of them cannot be launched
                    function()
    torch.cuda.synchronize()


def sweep(width: int, heads: int) -> dict[tuple[str, str], list[tuple[float, dict[str, int]]]]:
    """Microseconds and settings of each kernel, the best first."""
    found: dict[tuple[str, str], list[tuple[float, dict[str, int]]]] = {}
    uses = launches(width, heads)
    for name, values in settings():
        for which, function in uses[name].items():
            with set_to(name, values):
                try:
                    found.setdefault((name, which), []).append((microseconds(function), values))
                except Exception as error:  # too many registers or too much shared memory: not a candidate
                    print(f"{name} {values}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
    return {key: sorted(times, key=lambda entry: entry[0]) for key, times in found.items()}


def main() -> None:
    width, heads = (int(text) for text in sys.argv[1:3]) if len(sys.argv) > 2 else (256, 4)
    processes = max(1, (os.cpu_count() or 1) - 1)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(compile_share, [(k, processes, width, heads) for k in range(processes)])
    for (name, which), times in sweep(width, heads).items():
        print(f"{name} {which}, width {width}")
        for us, values in times[:5]:
            print(f"  {us:7.1f}  {values}")


if __name__ == "__main__":
    main()
