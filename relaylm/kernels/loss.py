r"""The vocabulary head and its loss in training: -log p of the target, weighted, summed over places.

The logits z are written once, in bfloat16, by the product with the head's matrix. One pass over them then gives the
loss of each place and, in their stead, the gradient of the sum,

    dz = weight (softmax(z + b) - [token = target]),

which two more products turn into the gradients of the matrix and of what went in. The bias's gradient, the sum of dz
over places, is made on the way: each program adds up the places it had, in their order.

Shapes: M places, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.kernels import gemm, tl, train_kernels, triton
from relaylm.kernels.attention import LOG2_E

# By calculation: two programs of 8,192 tokens share a multiprocessor; each loads two rows while it computes one.
LOSS = {"PROGRAMS": 264, "AHEAD": 3, "maxnreg": 128}
TOKENS_OF_A_WARP = 1024
LARGEST_VOCABULARY = 16_384  # of `weighted_loss`: a row of logits is held in registers

if triton is not None:
    from relaylm.kernels.attention import exp2

    @triton.jit
    def _loss_kernel(
        logits, bias, target, weight, loss, sums, rows, stride, vocab, mask_id,
        GRADIENT: tl.constexpr, LOG2_E: tl.constexpr, SIZE: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        """Each program takes every num_programs-th row: its loss, and with GRADIENT its gradient in place and, at the
        end, the sums over these rows (programs, stride). The mask, and what fills up the rows, has no probability."""
        column = tl.arange(0, SIZE)
        wide = column < stride
        known = (column < vocab) & (column != mask_id)
        added = tl.load(bias + column, mask=known, other=-float("inf"))
        total = tl.zeros((SIZE,), tl.float32)
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=AHEAD):
            base = logits + tl.cast(row, tl.int64) * stride
            value = tl.load(base + column, mask=wide, other=0.0).to(tl.float32) + added
            token = tl.load(target + row).to(tl.int32)
            wanted = tl.load(base + token).to(tl.float32) + tl.load(bias + token)  # before the row is written over
            largest = tl.max(value, axis=0)
            share = exp2(value * LOG2_E - largest * LOG2_E)
            whole = tl.sum(share, axis=0)
            tl.store(loss + row, largest + tl.log(whole) - wanted)
            if GRADIENT:
                factor = tl.load(weight + row)
                gradient = share * (factor / whole) - tl.where(column == token, factor, 0.0)
                total += gradient
                tl.store(base + column, gradient.to(logits.dtype.element_ty), mask=wide)
        if GRADIENT:
            tl.store(sums + tl.program_id(0) * stride + column, total, mask=wide)


def weighted_loss(
    h_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, target_M: Tensor, weight_M: Tensor, mask_id: int
) -> Tensor:
    """sum over places of weight * -log p(target), with logits h W' + b, in h's precision, and p(mask) = 0 (mask_id -1:
    no token is the mask)."""
    with torch.autocast(h_MD.device.type, enabled=False):
        return _WeightedLoss.apply(h_MD, weight_VD, bias_V, target_M, weight_M, mask_id)


def loss_(
    logits_MV: Tensor, bias_V: Tensor, target_M: Tensor, weight_M: Tensor, mask_id: int, gradient: bool
) -> tuple[Tensor, Tensor]:
    """The loss (M,) of each place, unweighted, and the gradient of the weighted sum: that of the logits in place, that
    of the bias as sums that programs left (programs, columns of the logits), for `column_sums`."""
    rows, stride = logits_MV.shape
    size, programs = triton.next_power_of_2(stride), min(LOSS["PROGRAMS"], rows)
    loss_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    sums = torch.empty((programs if gradient else 0, stride), dtype=torch.float32, device=logits_MV.device)
    _loss_kernel[(programs,)](
        logits_MV, bias_V, target_M, weight_M, loss_M, sums, rows, stride, len(bias_V), mask_id,
        GRADIENT=gradient, LOG2_E=LOG2_E, SIZE=size, AHEAD=LOSS["AHEAD"], maxnreg=LOSS["maxnreg"],
        num_warps=max(4, size // TOKENS_OF_A_WARP),
    )  # fmt: skip
    return loss_M, sums


class _WeightedLoss(torch.autograd.Function):
    """`weighted_loss`; its gradients are those of a sum that nothing multiplies, scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, target: Tensor, weight_M: Tensor, mask_id: int
    ) -> Tensor:
        rows = -(-len(weight) // 64) * 64  # tensor cores want round numbers of columns
        copy = F.pad(weight.to(h.dtype), (0, 0, 0, rows - len(weight)))
        logits = h @ copy.t()
        gradient = any(ctx.needs_input_grad)
        loss_M, sums = loss_(logits, bias, target, weight_M, mask_id, gradient)
        ctx.save_for_backward(h, copy, logits, sums)
        ctx.vocab = len(weight)
        return (loss_M * weight_M).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        h, copy, dlogits, sums = ctx.saved_tensors
        dh = (dlogits @ copy).mul_(dloss)
        dweight = gemm.weight_gradient(dlogits, h)[: ctx.vocab].mul_(dloss)
        dbias = train_kernels.column_sums(sums)[: ctx.vocab].mul_(dloss)
        return dh, dweight, dbias, None, None, None
