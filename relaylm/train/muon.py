r"""Muon: momentum, made orthogonal, for the matrices inside the blocks.

An update of a matrix by momentum is dominated by a few directions. Muon (Jordan et al., 2024) replaces the momentum
M = U S V^T by U V^T, so that all directions are learned at one pace (what that gained on our own text is in
results/train/throughput.json). U V^T is found without a decomposition: the iteration

    X <- a X + (b A + c A^2) X,      A = X X^T,      (a, b, c) = (3.4445, -4.7750, 2.0315),

started from M / |M| drives all singular values to about 1 (0.7 to 1.2, which is near enough) in five rounds of matrix
products. The update is scaled by 0.2 sqrt(max(rows, columns)), which gives its entries the size that AdamW's usually
have, so one learning rate serves both; embedding, head, norms and biases stay with AdamW.

Queries, keys and values are three matrices, not one. Matrices of one shape are done together, as one batched product.

Shapes: G matrices of one shape, M rows, N columns, M <= N.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from relaylm.kernels import update

ROUNDS, A, B, C = 5, 3.4445, -4.7750, 2.0315


def orthogonalise(x_GMN: Tensor) -> Tensor:
    """U V^T of each matrix, nearly; bfloat16 is enough."""
    x = x_GMN / x_GMN.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


class Muon(torch.optim.Optimizer):
    """For square-ish matrices alone. A matrix with three times as many rows as columns (queries, keys, values on top of
    each other) is taken as three. The state is called `exp_avg` as AdamW's is, so that checkpoints hold both alike."""

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            for (short, long), alike in _by_shape(params).items():
                first = alike[0][0]
                dtype = torch.bfloat16 if first.is_cuda else first.dtype
                counts = [sum(p.numel() for p in members) // (short * long) for members in alike]
                x_GMN = torch.empty((sum(counts), short, long), dtype=dtype, device=first.device)
                for members, part in zip(alike, x_GMN.split(counts), strict=True):
                    grads: list[Any] = [p.grad for p in members]
                    moments = [self.state[p]["exp_avg"] for p in members]
                    update.ahead_(grads, moments, group["momentum"], _stack_of(members[0], part))
                for members, part in zip(alike, orthogonalise(x_GMN).split(counts), strict=True):
                    update.subtract_(members, _stack_of(members[0], part), group["lr"], 0.2 * long**0.5)


def _stack_of(p: Tensor, part_GMN: Tensor) -> Tensor:
    """The pieces of parameters like this one as a stack of whole matrices: a view, transposed where pieces lie down."""
    rows, columns = p.shape
    return part_GMN.view(-1, rows, columns) if part_GMN.shape[2] == columns else part_GMN.mT


def _by_shape(params: list[Tensor]) -> dict[tuple[int, int], list[list[Tensor]]]:
    """Parameters of one shape together, by the shape of their pieces lying down: at most as many rows as columns."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        alike.setdefault(p.shape, []).append(p)
    found: dict[tuple[int, int], list[list[Tensor]]] = {}
    for (rows, columns), members in alike.items():
        height = columns if rows == 3 * columns else rows
        found.setdefault((min(height, columns), max(height, columns)), []).append(members)
    return found
