r"""What an optimizer's step does to many weights at once, each in one pass over memory.

- `ahead_`: Muon's momentum, and where it is about to go, matrices of one shape in a stack;
- `subtract_`: those matrices' updates, from such a stack;
- `lerp_`: the moving average.

PyTorch's own operations on lists of tensors, which the first two use elsewhere, take two to four passes for each of
these, and a number that is only known on the device (the rate, since a step is captured) makes them one more.

Shapes: P matrices of one shape, R rows and C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relaylm.kernels import available, tl, triton

TILE = {"ROWS": 32, "COLUMNS": 128, "num_warps": 4}
LERP = {"SIZE": 4096, "num_warps": 8}

if triton is not None:

    @triton.jit
    def _chosen(tensors, which):
        """One of a tuple of tensors."""
        found = tensors[0]
        for i in tl.static_range(1, len(tensors)):
            found = tl.where(which == i, tensors[i], found)
        return found

    @triton.jit
    def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        """A program's rows and columns of a matrix, and which of their pairs are real."""
        across = tl.cdiv(columns, COLUMNS)
        row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        return row, column, (row < rows) & (column < columns)

    @triton.jit
    def _ahead_kernel(
        grads, moments, stack, kept, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        row, column, inside = _tile(rows, columns, ROWS, COLUMNS)
        at = row * columns + column
        moment_at = _chosen(moments, tl.program_id(1)) + at
        grad = tl.load(_chosen(grads, tl.program_id(1)) + at, mask=inside, other=0.0)
        moment = tl.load(moment_at, mask=inside, other=0.0)
        moment = grad + kept * (moment - grad)
        tl.store(moment_at, moment, mask=inside)
        to = stack + tl.program_id(1).to(tl.int64) * rows * columns + row * row_stride + column * column_stride
        tl.store(to, (grad + kept * (moment - grad)).to(stack.dtype.element_ty), mask=inside)

    @triton.jit
    def _subtract_kernel(
        weights, stack, rate, times, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):  # no argument may be called `params`: Triton's launcher has a variable of that name
        row, column, inside = _tile(rows, columns, ROWS, COLUMNS)
        param_at = _chosen(weights, tl.program_id(1)) + row * columns + column
        source = stack + tl.program_id(1).to(tl.int64) * rows * columns + row * row_stride + column * column_stride
        change = tl.load(source, mask=inside, other=0.0).to(tl.float32) * (tl.load(rate) * times)
        tl.store(param_at, tl.load(param_at, mask=inside, other=0.0) - change, mask=inside)

    @triton.jit
    def _lerp_kernel(average, now, rate, size, SIZE: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        inside = at < size
        value = tl.load(average + at, mask=inside, other=0.0)
        value += tl.load(rate) * (tl.load(now + at, mask=inside, other=0.0) - value)
        tl.store(average + at, value, mask=inside)


def applies(tensors: list[Tensor]) -> bool:
    """Whether the kernels take these: float32 on CUDA, without gaps."""
    return available() and all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for x in tensors)


def ahead_(grads: list[Tensor], moments: list[Tensor], momentum: float, stack_PRC: Tensor) -> None:
    """moment <- momentum moment + (1 - momentum) grad; and where Nesterov's momentum is about to go, the same once more
    from the new moment, into the stack, which may be a transposed view."""
    if not applies([*grads, *moments]):
        torch._foreach_lerp_(moments, grads, 1 - momentum)
        torch._foreach_copy_(stack_PRC.unbind(), torch._foreach_lerp(grads, moments, momentum))
        return
    rows, columns = grads[0].shape
    _ahead_kernel[(_tiles(rows, columns), len(grads))](
        tuple(grads), tuple(moments), stack_PRC, momentum, rows, columns, *stack_PRC.stride()[1:], **TILE
    )


def subtract_(params: list[Tensor], stack_PRC: Tensor, rate: float | Tensor, times: float) -> None:
    """param -= times rate stack, with a rate that the kernel needs on the device."""
    if not (isinstance(rate, Tensor) and applies(params)):
        torch._foreach_sub_(params, (stack_PRC.to(params[0].dtype) * (times * rate)).unbind())
        return
    rows, columns = params[0].shape
    _subtract_kernel[(_tiles(rows, columns), len(params))](
        tuple(params), stack_PRC, rate, times, rows, columns, *stack_PRC.stride()[1:], **TILE
    )


def lerp_(average: Tensor, now: Tensor, rate: Tensor) -> None:
    """average += rate (now - average), with a rate on the device."""
    _lerp_kernel[(triton.cdiv(average.numel(), LERP["SIZE"]),)](average, now, rate, average.numel(), **LERP)


def _tiles(rows: int, columns: int) -> int:
    return int(triton.cdiv(rows, TILE["ROWS"]) * triton.cdiv(columns, TILE["COLUMNS"]))
