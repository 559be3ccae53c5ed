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


def orthogonalise(x_GMN: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of each matrix, nearly; computed in `dtype`, bfloat16 being enough."""
    x = x_GMN.to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.to(x_GMN.dtype)


class Muon(torch.optim.Optimizer):
    """For square-ish matrices alone. A matrix with `pieces` = 3 (queries, keys, values on top of each other) is taken
    as three. The state is called `exp_avg` as AdamW's is, so that checkpoints hold both alike."""

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
            grads, moments = [p.grad for p in params], [self.state[p]["exp_avg"] for p in params]
            if isinstance(group["lr"], Tensor) and update.applies([*params, *grads, *moments]):
                self._step_in_passes(params, grads, moments, group["lr"], group["momentum"])
                continue
            torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
            ahead = torch._foreach_lerp(grads, moments, group["momentum"])  # Nesterov: where momentum is about to go
            for members in _by_shape(params).values():
                pieces = [piece for i in members for piece in _pieces(params[i], ahead[i])]
                x_GMN = torch.stack(pieces)
                dtype = torch.bfloat16 if x_GMN.is_cuda else x_GMN.dtype
                made = orthogonalise(x_GMN, dtype) * (0.2 * x_GMN.shape[2] ** 0.5 * group["lr"])
                updates, at = [], 0
                for i in members:
                    count = len(_pieces(params[i], ahead[i]))
                    updates.append(_whole(params[i], made[at : at + count]))
                    at += count
                torch._foreach_sub_([params[i] for i in members], updates)

    @staticmethod
    def _step_in_passes(
        params: list[Tensor], grads: list[Tensor], moments: list[Tensor], lr: Tensor, momentum: float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        """The same on CUDA, in one pass before the orthogonal matrices and one after them."""
        for (short, long), members in _by_shape(params).items():
            alike: dict[torch.Size, list[int]] = {}
            for i in members:
                alike.setdefault(params[i].shape, []).append(i)
            counts = [sum(params[i].numel() for i in group) // (short * long) for group in alike.values()]
            x_GMN = torch.empty((sum(counts), short, long), dtype=dtype, device=lr.device)
            for group, part in zip(alike.values(), x_GMN.split(counts), strict=True):
                stack = _stack_of(params[group[0]], part)
                update.ahead_([grads[i] for i in group], [moments[i] for i in group], momentum, stack)
            made_GMN = orthogonalise(x_GMN, dtype)
            for group, part in zip(alike.values(), made_GMN.split(counts), strict=True):
                stack = _stack_of(params[group[0]], part)
                update.subtract_([params[i] for i in group], stack, lr, 0.2 * long**0.5)


def _stack_of(p: Tensor, part_GMN: Tensor) -> Tensor:
    """The pieces of parameters like this one as a stack of whole matrices: a view, transposed where pieces lie down."""
    rows, columns = p.shape
    return part_GMN.view(-1, rows, columns) if part_GMN.shape[2] == columns else part_GMN.mT


def _pieces(p: Tensor, value: Tensor) -> list[Tensor]:
    """The matrices that a parameter holds, lying down: at most as many rows as columns."""
    rows, columns = p.shape
    count = 3 if rows == 3 * columns else 1
    parts = value.view(count, rows // count, columns)
    return list(parts if rows // count <= columns else parts.mT)


def _whole(p: Tensor, parts_GMN: Tensor) -> Tensor:
    rows, columns = p.shape
    count = 3 if rows == 3 * columns else 1
    parts = parts_GMN if rows // count <= columns else parts_GMN.mT
    return parts.reshape(rows, columns)


def _by_shape(params: list[Tensor]) -> dict[tuple[int, int], list[int]]:
    """Which parameters' pieces have one shape."""
    found: dict[tuple[int, int], list[int]] = {}
    for i, p in enumerate(params):
        found.setdefault(tuple(_pieces(p, p)[0].shape), []).append(i)  # type: ignore[arg-type]
    return found
