"""The Triton kernels behind `train`, and the functions that launch them; `train` has the mathematics.

Block sizes are constants, chosen by measurement: nothing is tuned while a run trains. Every sum has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relaylm.kernels import tl, triton

# Set by measurement on an H200 at 65,536 tokens of width 256; SUMS by calculation.
NORM = {"ELEMENTS": 1024, "PROGRAMS": 528, "AHEAD": 4, "num_warps": 2}
POINTWISE = {"BLOCK_M": 4, "BLOCK_N": 256, "PROGRAMS": 1056, "AHEAD": 1, "num_warps": 8}
PACK = {"ELEMENTS": 4096, "num_warps": 4}
SUMS = {"COLUMNS": 8, "ROWS": 2048, "num_warps": 8}  # the columns fill one memory sector; all rows are loaded at once

if triton is not None:

    @triton.jit
    def _add_norm_kernel(
        x, branch, bias, weight, x_out, h, rows, width,
        HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, SIZE)
        wide = column < width
        inside = (row < rows)[:, None] & wide[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                value += tl.load(bias + column, mask=wide, other=0.0)[None, :]
            rounded = value.to(x_out.dtype.element_ty)
            tl.store(x_out + at, rounded, mask=inside)
            value = rounded.to(tl.float32)  # what the backward pass will see
        mean = tl.sum(value, axis=1) / width
        centred = tl.where(inside, value - mean[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / width
        scaled = centred * tl.rsqrt(variance + 1e-5)[:, None] * tl.load(weight + column, mask=wide, other=0.0)[None, :]
        tl.store(h + at, scaled.to(h.dtype.element_ty), mask=inside)

    @triton.jit
    def _add_norm_gradient_kernel(
        x, weight, dh, dx_after, dx, dbranch, sums, rows, width,
        HAS_AFTER: tl.constexpr, BOTH: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
        AHEAD: tl.constexpr,
    ):  # fmt: skip
        """Each program takes every num_programs-th group of rows and leaves its share of the gradients of weight and
        bias (if any): sums (programs, 1 or 2, width). AHEAD - 1 groups are loaded while one is computed."""
        column = tl.arange(0, SIZE)
        wide = column < width
        w = tl.load(weight + column, mask=wide, other=0.0)[None, :]
        dweight = tl.zeros((ROWS, SIZE), tl.float32)
        dbias = tl.zeros((ROWS, SIZE), tl.float32)
        for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=AHEAD):
            row = (first + tl.arange(0, ROWS)).to(tl.int64)
            inside = (row < rows)[:, None] & wide[None, :]
            at = row[:, None] * width + column[None, :]
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            gradient = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
            if HAS_AFTER:  # loaded with the others, though it is used last
                after = tl.load(dx_after + at, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(value, axis=1) / width
            centred = tl.where(inside, value - mean[:, None], 0.0)
            inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / width + 1e-5)[:, None]
            normal = centred * inverse
            dweight += gradient * normal
            scaled = gradient * w
            along = tl.sum(scaled * normal, axis=1)[:, None] / width
            result = inverse * (scaled - tl.sum(scaled, axis=1)[:, None] / width - normal * along)
            if HAS_AFTER:
                result += after
            result = tl.where(inside, result, 0.0)
            if HAS_BIAS:
                dbias += result
            tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
            if BOTH:
                tl.store(dbranch + at, result.to(dbranch.dtype.element_ty), mask=inside)
        to = sums + tl.program_id(0) * width * (2 if HAS_BIAS else 1) + column
        tl.store(to, tl.sum(dweight, axis=0), mask=wide)
        if HAS_BIAS:
            tl.store(to + width, tl.sum(dbias, axis=0), mask=wide)

    @triton.jit
    def _sums_kernel(partial, total, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        result = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            result += tl.load(partial + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        tl.store(total + column, tl.sum(result, axis=0), mask=column < columns)

    @triton.jit
    def _rows_at_kernel(
        x, h, position, x_out, h_out, rows, limit, width,
        BOTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, SIZE)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        source = tl.load(position + row, mask=row < rows, other=-1)
        there = ((source >= 0) & (source < limit))[:, None] & (column < width)[None, :]
        at = source[:, None] * width + column[None, :]
        to = row[:, None] * width + column[None, :]
        x_rows = tl.load(x + at, mask=there, other=0.0)
        if BOTH:
            h_rows = tl.load(h + at, mask=there, other=0.0)
            tl.store(h_out + to, h_rows, mask=inside)
        tl.store(x_out + to, x_rows, mask=inside)

    @triton.jit
    def _pack_kernel(
        dq, dk, dv, out, cos, sin, total, length,
        q_row, q_head, q_position, k_row, k_head, k_position, v_row, v_head, v_position,
        HEADS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """Gradients of rotated queries and keys, and of values, to the gradient of the matrix they came from."""
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        head = tl.arange(0, TILE)
        pair = tl.arange(0, HALF)
        row, position = token // length, token % length
        real = (token < total)[:, None, None] & (head < HEADS)[None, :, None] & (pair >= 0)[None, None, :]
        within = head[None, :, None] * (2 * HALF) + pair[None, None, :]
        to = out + (token * (6 * HEADS * HALF))[:, None, None] + within
        if tl.program_id(1) == 2:
            at = (row * v_row + position * v_position)[:, None, None] + head[None, :, None] * v_head + pair
            tl.store(to + 4 * HEADS * HALF, tl.load(dv + at, mask=real, other=0.0), mask=real)
            tl.store(to + (4 * HEADS + 1) * HALF, tl.load(dv + at + HALF, mask=real, other=0.0), mask=real)
        else:
            if tl.program_id(1) == 0:
                source = dq + (row * q_row + position * q_position)[:, None, None] + head[None, :, None] * q_head
            else:
                source = dk + (row * k_row + position * k_position)[:, None, None] + head[None, :, None] * k_head
                to += 2 * HEADS * HALF
            angle = (position * HALF)[:, None, None] + pair[None, None, :]
            in_range = (token < total)[:, None, None] & (pair >= 0)[None, None, :]
            c = tl.load(cos + angle, mask=in_range, other=0.0)
            s = tl.load(sin + angle, mask=in_range, other=0.0)
            first = tl.load(source + pair, mask=real, other=0.0).to(tl.float32)
            second = tl.load(source + pair + HALF, mask=real, other=0.0).to(tl.float32)
            tl.store(to, (first * c + second * s).to(out.dtype.element_ty), mask=real)
            tl.store(to + HALF, (second * c - first * s).to(out.dtype.element_ty), mask=real)

    @triton.jit
    def _share(x):
        """s(x), the share of x that GELU lets through."""
        return 1.0 / (1.0 + tl.exp2(x * (-2.302208198144325 - 0.10294323958002 * x * x)))  # -2u / ln 2

    @triton.jit
    def _slope(x):
        s = _share(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.2140644488 * x * x)  # 2 sqrt(2/pi) (1, 3 * 0.044715)

    @triton.jit
    def _gelu_kernel(
        before, bias, value, sums, rows, N: tl.constexpr,
        GRADIENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        """value = gelu(before + bias), or value *= slope(before + bias) and its sums over rows."""
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        b = tl.load(bias + column, mask=column < N, other=0.0)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in tl.range(tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M, num_stages=AHEAD):
            row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
            inside = (row < rows)[:, None] & (column < N)[None, :]
            at = row[:, None] * N + column[None, :]
            x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32) + b
            if GRADIENT:
                result = tl.load(value + at, mask=inside, other=0.0).to(tl.float32) * _slope(x)
                total += result
            else:
                result = x * _share(x)
            tl.store(value + at, result.to(value.dtype.element_ty), mask=inside)
        if GRADIENT:
            tl.store(sums + tl.program_id(0) * N + column, tl.sum(total, axis=0), mask=column < N)


def _tile(width: int) -> tuple[int, int]:
    """Columns (a power of two) and rows that a program takes at a time."""
    size = triton.next_power_of_2(width)
    return size, max(1, NORM["ELEMENTS"] // size)


def add_norm(
    x_MD: Tensor, branch_MD: Tensor | None, bias_D: Tensor | None, weight_D: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + branch + bias in x's precision (x itself without a branch), and its LayerNorm in `dtype`."""
    rows, width = x_MD.shape
    size, together = _tile(width)
    added = x_MD if branch_MD is None else torch.empty_like(x_MD)
    h = torch.empty(x_MD.shape, dtype=dtype, device=x_MD.device)
    _add_norm_kernel[(triton.cdiv(rows, together),)](
        x_MD, branch_MD, bias_D, weight_D, added, h, rows, width, num_warps=NORM["num_warps"],
        HAS_BRANCH=branch_MD is not None, HAS_BIAS=bias_D is not None, SIZE=size, ROWS=together,
    )  # fmt: skip
    return added, h


def add_norm_gradient(
    x_MD: Tensor, weight_D: Tensor, dh_MD: Tensor, dx_MD: Tensor | None, branch: torch.dtype | None, has_bias: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of x, of the branch (in its precision; the same tensor if it is x's), of the bias, of the weight."""
    rows, width = x_MD.shape
    size, together = _tile(width)
    programs = min(NORM["PROGRAMS"], triton.cdiv(rows, together))
    dx = torch.empty_like(x_MD)
    dbranch = None if branch is None else dx if branch == dx.dtype else torch.empty_like(x_MD, dtype=branch)
    sums = torch.empty((programs, 2 if has_bias else 1, width), dtype=torch.float32, device=x_MD.device)
    _add_norm_gradient_kernel[(programs,)](
        x_MD, weight_D, dh_MD, dx_MD, dx, dbranch, sums, rows, width,
        HAS_AFTER=dx_MD is not None, BOTH=dbranch is not None and dbranch is not dx, HAS_BIAS=has_bias,
        SIZE=size, ROWS=together, AHEAD=NORM["AHEAD"], num_warps=NORM["num_warps"],
    )  # fmt: skip
    total = column_sums(sums)
    return dx, dbranch, total[1] if has_bias else None, total[0]


def column_sums(partial: Tensor) -> Tensor:
    """Sums over the first dimension of what programs left, float32, in one launch and a fixed order. A program loads
    all rows of a few columns at once, in the time of one load where torch.sum takes that of several."""
    rows, columns = len(partial), partial[0].numel()
    total = torch.empty(partial.shape[1:], dtype=torch.float32, device=partial.device)
    _sums_kernel[(triton.cdiv(columns, SUMS["COLUMNS"]),)](
        partial, total, rows, columns, ROWS=min(SUMS["ROWS"], triton.next_power_of_2(rows)), COLUMNS=SUMS["COLUMNS"],
        num_warps=SUMS["num_warps"],
    )  # fmt: skip
    return total


def rows_at(x_MD: Tensor, h_MD: Tensor | None, position_K: Tensor) -> tuple[Tensor, ...]:
    """The matrix's, or both matrices', rows at these positions, (K, D); zeros for a position outside of the matrix."""
    rows, (limit, width) = len(position_K), x_MD.shape
    size, together = _tile(width)
    x_KD = torch.empty((rows, width), dtype=x_MD.dtype, device=x_MD.device)
    h_KD = None if h_MD is None else torch.empty((rows, width), dtype=h_MD.dtype, device=h_MD.device)
    _rows_at_kernel[(triton.cdiv(rows, together),)](
        x_MD, h_MD, position_K, x_KD, h_KD, rows, limit, width,
        BOTH=h_MD is not None, SIZE=size, ROWS=together, num_warps=NORM["num_warps"],
    )  # fmt: skip
    return (x_KD,) if h_KD is None else (x_KD, h_KD)


def pack_rotated(dq: Tensor, dk: Tensor, dv: Tensor, cos_LR: Tensor, sin_LR: Tensor) -> Tensor:
    """Gradients (B, heads, L, d) of rotated queries and keys and of values -> gradient (M, 3D) of the matrix."""
    b, heads, length, dim = dq.shape
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    out = torch.empty((b * length, 3 * heads * dim), dtype=dq.dtype, device=dq.device)
    tile = triton.next_power_of_2(heads)
    together = max(1, PACK["ELEMENTS"] // (tile * dim))
    _pack_kernel[(triton.cdiv(b * length, together), 3)](
        dq, dk, dv, out, cos_LR, sin_LR, b * length, length, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
        HEADS=heads, HALF=dim // 2, TOKENS=together, TILE=tile, num_warps=PACK["num_warps"],
    )  # fmt: skip
    return out


def gelu(before_MH: Tensor, bias_H: Tensor) -> Tensor:
    """GELU(before + bias)."""
    value = torch.empty_like(before_MH)
    _gelu(before_MH, bias_H, value, gradient=False)
    return value


def gelu_gradient_(value_MH: Tensor, before_MH: Tensor, bias_H: Tensor) -> Tensor:
    """Multiplies by GELU's slope at before + bias, in place, and returns the sum over tokens."""
    return column_sums(_gelu(before_MH, bias_H, value_MH, gradient=True))


def _gelu(before: Tensor, bias: Tensor, value: Tensor, gradient: bool) -> Tensor:
    rows, hidden = before.shape
    across = triton.cdiv(hidden, POINTWISE["BLOCK_N"])
    down = min(triton.cdiv(POINTWISE["PROGRAMS"], across), triton.cdiv(rows, POINTWISE["BLOCK_M"]))
    sums = torch.empty((down if gradient else 0, hidden), dtype=torch.float32, device=value.device)
    _gelu_kernel[(down, across)](
        before, bias, value, sums, rows, N=hidden, GRADIENT=gradient, BLOCK_M=POINTWISE["BLOCK_M"],
        BLOCK_N=POINTWISE["BLOCK_N"], AHEAD=POINTWISE["AHEAD"], num_warps=POINTWISE["num_warps"],
    )  # fmt: skip
    return sums
