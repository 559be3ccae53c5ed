"""Muon: orthogonal updates with known answers, matrices taken one by one, and exact resumption."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relaylm.models.denoiser import Architecture
from relaylm.train.muon import ROUNDS, A, B, C, Muon, orthogonalise
from relaylm.train.recipe import Recipe
from relaylm.train.step import Trainer, World


def scalar(sigma: float) -> float:
    """What the iteration does to one singular value."""
    for _ in range(ROUNDS):
        sigma = A * sigma + B * sigma**3 + C * sigma**5
    return sigma


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 32), (5, 7)])
def test_singular_vectors_stay_and_values_follow_the_polynomial(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(3, rows, columns, dtype=torch.float64, generator=generator)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    values = torch.tensor([[scalar(float(value)) for value in row] for row in s], dtype=torch.float64)
    want = u @ torch.diag_embed(values) @ v
    assert torch.allclose(orthogonalise(x), want, atol=1e-10)
    assert (values[s > 0.01] > 0.6).all() and (values < 1.3).all()


def update(weight: Tensor, grad: Tensor, lr: float = 0.1) -> Tensor:
    """The change that one step makes."""
    p = torch.nn.Parameter(weight.clone())
    p.grad = grad
    Muon([p], lr).step()
    return (weight - p.detach()) / lr


def test_queries_keys_and_values_are_three_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    weight = torch.zeros(12, 4, dtype=torch.float64)
    apart = [update(weight[:4], part) for part in grad.split(4)]
    assert torch.allclose(update(weight, grad), torch.cat(apart))


def test_tall_matrices_are_done_lying_down_and_scaled_by_their_longer_side() -> None:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(16, 4, dtype=torch.float64, generator=generator)
    tall = update(torch.zeros(16, 4, dtype=torch.float64), grad)
    flat = update(torch.zeros(4, 16, dtype=torch.float64), grad.mT.contiguous())
    assert torch.allclose(tall, flat.mT)
    assert 0.6 < float(tall.norm() / (0.2 * 16**0.5 * 4**0.5)) < 1.3  # four singular values of about 1, times the scale


def test_the_size_of_the_gradient_does_not_matter() -> None:
    grad = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.zeros(6, 6, dtype=torch.float64)
    assert torch.allclose(update(weight, grad), update(weight, 1e4 * grad))


def test_momentum_is_nesterovs() -> None:
    """Two steps by hand: the moment is 0.05 of one gradient, then 0.95 of that and 0.05 of the other; the direction is
    what comes a step later still, 0.95 of the moment and 0.05 of the gradient."""
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
    p = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    optimizer = Muon([p], 0.1)
    for grad in (first, second):
        before, p.grad = p.detach().clone(), grad
        optimizer.step()
    moment = 0.95 * 0.05 * first + 0.05 * second
    way = orthogonalise((0.95 * moment + 0.05 * second)[None])[0]
    assert torch.allclose(before - p.detach(), 0.1 * 0.2 * 6**0.5 * way)


def parts(step: int, batch: int = 8, length: int = 12) -> list[dict[str, Tensor]]:
    t = (torch.arange(batch) + 0.5) / batch
    generator = torch.Generator().manual_seed(step)
    return [
        {
            "tokens": torch.randint(0, 6, (batch, length), generator=generator),
            "sample": step * batch + torch.arange(batch),
            "threshold": (t * 2.0**32).long(),
            "weight": (1 / t / (batch * length)).float(),
            "t": t.float(),
        }
    ]


def test_a_restored_trainer_goes_on_as_if_nothing_had_happened() -> None:
    recipe = Recipe(steps=8, batch=8, optimizer="muon", lr=5e-3, warmup=2, dropout=0.0)
    shape = Architecture(7, 12, width=16, depth=2, heads=2)
    straight = Trainer(shape, recipe, 0, World(torch.device("cpu")))
    for step in range(4):
        straight.step(parts(step))
    saved = straight.tensors()
    resumed = Trainer(shape, recipe, 0, World(torch.device("cpu")))
    resumed.restore(saved, 4)
    for step in range(4, 8):
        assert torch.equal(straight.step(parts(step)), resumed.step(parts(step)))
    for name, value in straight.tensors().items():
        assert torch.equal(value, resumed.tensors()[name]), name
    momentum = {name for name in saved if name.startswith("exp_avg_sq/")}
    assert "exp_avg_sq/vocab_embed.embedding" in momentum and "exp_avg_sq/blocks.0.attn_qkv.weight" not in momentum
