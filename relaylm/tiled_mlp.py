r"""The MLP's products in training with GELU inside, on the copy engine of Hopper GPUs.

For narrow networks GELU costs more than the product before it: it is a pass over (tokens, 4 width) forward and a longer
one backward. Here a product's tiles pass through GELU on their way out,

    up             before = h W',  after = gelu(before + b)                       both are kept for the backward pass
    down_gradient  dbefore = (dy W) gelu'(before + b),  and its sums over tokens, tile by tile

by a fixed number of programs that go from tile to tile, whose tiles the copy engine loads while the one before is
finished. What is computed is, rounding included, what cuBLAS and the kernels of `fused_kernels` do one after the other.

Shapes: M tokens, D width, H hidden units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relaylm.fused_kernels import triton

if triton is not None:
    import triton.language as tl

    from relaylm.fused_kernels import _share, _slope

    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # a Triton that is too old for it
        TensorDescriptor = None

UP = {"M": 128, "N": 256, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
DOWN = {"M": 128, "N": 128, "K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
WIDEST = 512  # from here on products are bound by arithmetic, and cuBLAS is better at that

if triton is not None:

    @triton.jit
    def _corner(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
        """Which tile comes next: columns of GROUP tiles, so that what neighbours share stays in the cache."""
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        return first + tile % (GROUP * tiles_n) % size, tile % (GROUP * tiles_n) // size

    @triton.jit
    def _halves(x, M: tl.constexpr, N: tl.constexpr):
        """The left and the right half of a tile, each to be stored from half the room."""
        return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))

    @triton.jit
    def _activated(before, bias, column, columns, OUT: tl.constexpr):
        x = before.to(tl.float32) + tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
        x = x.to(OUT).to(tl.float32)
        return (x * _share(x)).to(OUT)

    @triton.jit
    def _up_kernel(
        h_desc, weight_desc, bias, before_desc, after_desc, rows, columns, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
        OUT: tl.constexpr,
    ):  # fmt: skip
        tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(columns, N)
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
            m, n = _corner(tile, tiles_m, tiles_n, GROUP)
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([m * M, k * K])
                product = tl.dot(part, weight_desc.load([n * N, k * K]).T, product)
            left, right = _halves(product, M, N)
            left, right = left.to(OUT), right.to(OUT)
            column = n * N + tl.arange(0, N // 2)
            before_desc.store([m * M, n * N], left)
            after_desc.store([m * M, n * N], _activated(left, bias, column, columns, OUT))
            before_desc.store([m * M, n * N + N // 2], right)
            after_desc.store([m * M, n * N + N // 2], _activated(right, bias, column + N // 2, columns, OUT))

    @triton.jit
    def _down_gradient_kernel(
        dy_desc, weight_desc, bias, before_desc, out_desc, sums, rows, columns, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
        OUT: tl.constexpr,
    ):  # fmt: skip
        tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(columns, N)
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
            m, n = _corner(tile, tiles_m, tiles_n, GROUP)
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = dy_desc.load([m * M, k * K])
                product = tl.dot(part, weight_desc.load([k * K, n * N]), product)
            column = n * N + tl.arange(0, N)
            x = before_desc.load([m * M, n * N]).to(tl.float32)
            x += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
            # Rounded where two kernels would have rounded. Rows beyond the last have no gradient: their product is 0.
            result = product.to(OUT).to(tl.float32) * _slope(x.to(OUT).to(tl.float32))
            tl.store(sums + m * columns + column, tl.sum(result, axis=0), mask=column < columns)
            out_desc.store([m * M, n * N], result.to(OUT))


def applies(h_MD: Tensor, hidden: int) -> bool:
    """Is this worth it, and possible: a narrow network on a Hopper GPU (or in Triton's interpreter)?"""
    if triton is None or TensorDescriptor is None or h_MD.shape[1] >= WIDEST or h_MD.shape[1] % 8 or hidden % 8:
        return False
    return not h_MD.is_cuda or torch.cuda.get_device_capability(h_MD.device) >= (9, 0)


def up(h_MD: Tensor, weight_HD: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """h W' without the bias, and gelu(h W' + b)."""
    rows, hidden = len(h_MD), len(weight_HD)
    before = torch.empty((rows, hidden), dtype=h_MD.dtype, device=h_MD.device)
    after = torch.empty_like(before)
    m, n, k = UP["M"], UP["N"], UP["K"]
    programs = _programs(h_MD, triton.cdiv(rows, m) * triton.cdiv(hidden, n))
    _up_kernel[(programs,)](
        TensorDescriptor.from_tensor(h_MD, [m, k]),
        TensorDescriptor.from_tensor(weight_HD, [n, k]),
        bias_H,
        TensorDescriptor.from_tensor(before, [m, n // 2]),
        TensorDescriptor.from_tensor(after, [m, n // 2]),
        rows, hidden, h_MD.shape[1], PROGRAMS=programs, OUT=_out(h_MD), **UP,
    )  # fmt: skip
    return before, after


def down_gradient(dy_MD: Tensor, weight_DH: Tensor, bias_H: Tensor, before_MH: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of what GELU was given, and that of its bias."""
    rows, hidden = before_MH.shape
    out = torch.empty_like(before_MH)
    m, n, k = DOWN["M"], DOWN["N"], DOWN["K"]
    sums = torch.empty((triton.cdiv(rows, m), hidden), dtype=torch.float32, device=out.device)
    programs = _programs(dy_MD, len(sums) * triton.cdiv(hidden, n))
    _down_gradient_kernel[(programs,)](
        TensorDescriptor.from_tensor(dy_MD, [m, k]),
        TensorDescriptor.from_tensor(weight_DH, [k, n]),
        bias_H,
        TensorDescriptor.from_tensor(before_MH, [m, n]),
        TensorDescriptor.from_tensor(out, [m, n]),
        sums, rows, hidden, dy_MD.shape[1], PROGRAMS=programs, OUT=_out(dy_MD), **DOWN,
    )  # fmt: skip
    return out, sums.sum(0)


def _programs(like: Tensor, tiles: int) -> int:
    count = torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 2
    return min(count, tiles)


def _out(like: Tensor) -> object:
    return tl.bfloat16 if like.dtype == torch.bfloat16 else tl.float32
