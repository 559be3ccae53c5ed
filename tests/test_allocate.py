"""Allocation against brute force, budgets in exact arithmetic, and what cannot be allocated."""

from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm.allocate import allocate
from relaylm.errors import UserError


def runs(path: tuple[int, ...]) -> int:
    return 1 + sum(a != b for a, b in itertools.pairwise(path))


def price_of(price_KT: np.ndarray, path: tuple[int, ...]) -> Fraction:
    return sum((Fraction(price_KT[k, t]) for t, k in enumerate(path)), Fraction(0))


def brute_force(
    loss_KT: np.ndarray, price_KT: np.ndarray, budget: float, segments: int | None
) -> tuple[float, Fraction] | None:
    """The least loss within the budget, and the least price that buys the least loss of all; None if nothing fits."""
    models, steps = loss_KT.shape
    best = None
    for path in itertools.product(range(models), repeat=steps):
        if segments is not None and runs(path) > segments:
            continue
        loss = math.fsum(loss_KT[k, t] for t, k in enumerate(path))
        price = price_of(price_KT, path)
        if math.isfinite(loss) and (math.isinf(budget) or price <= Fraction(budget)):
            best = min(best, (loss, price)) if best else (loss, price)
    return best


def check(loss_KT: np.ndarray, price_KT: np.ndarray, budget: float, segments: int | None) -> None:
    expected = brute_force(loss_KT, price_KT, budget, segments)
    if expected is None:
        with pytest.raises(UserError, match=r"least possible price|no schedule to allocate"):
            allocate(loss_KT, price_KT, budget, segments=segments)
        return
    path = tuple(allocate(loss_KT, price_KT, budget, segments=segments).tolist())
    assert len(path) == loss_KT.shape[1]
    assert math.isinf(budget) or price_of(price_KT, path) <= Fraction(budget)
    assert segments is None or runs(path) <= segments
    loss = math.fsum(loss_KT[k, t] for t, k in enumerate(path))
    scale = np.abs(np.where(np.isfinite(loss_KT), loss_KT, 0)).max(axis=0).sum()
    assert loss <= expected[0] + 1.1e-9 * scale


numbers = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 1.1, 2.0, 3.3, -0.4]) | st.floats(-2, 2)
prices = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0, 4.0, 6.0, 12.0]) | st.floats(0, 3)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, float, int | None]:
    models, steps = draw(st.sampled_from([(1, 4), (2, 7), (3, 5), (4, 4), (5, 3), (2, 1)]))
    cells = models * steps
    loss_KT = np.array(draw(st.lists(numbers, min_size=cells, max_size=cells))).reshape(models, steps)
    if draw(st.booleans()):  # one price for a model, as on a uniform grid
        price_KT = np.repeat(np.array(draw(st.lists(prices, min_size=models, max_size=models)))[:, None], steps, 1)
    else:
        price_KT = np.array(draw(st.lists(prices, min_size=cells, max_size=cells))).reshape(models, steps)
    if draw(st.booleans()):
        forbidden = np.array(draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).reshape(models, steps)
        loss_KT = np.where(forbidden, math.inf, loss_KT)
    if draw(st.booleans()):  # a budget that some schedule meets exactly
        path = draw(st.lists(st.integers(0, models - 1), min_size=steps, max_size=steps))
        budget = float(sum(price_KT[k, t] for t, k in enumerate(path)))
    else:
        budget = draw(st.floats(0, float(price_KT.max(axis=0).sum()) * 1.1 + 0.1) | st.just(math.inf))
    return loss_KT, price_KT, budget, draw(st.none() | st.integers(1, 4))


@settings(max_examples=400, deadline=None)
@given(problems())
def test_equal_to_brute_force(problem: tuple[np.ndarray, np.ndarray, float, int | None]) -> None:
    check(*problem)


@pytest.mark.parametrize("segments", [None, 1, 2, 3])
def test_equal_to_brute_force_on_hard_cases(segments: int | None) -> None:
    """Losses in proportion to prices, and fine-grained prices where the bound alone decides little."""
    rng = np.random.default_rng(0)
    for _ in range(25):
        price_KT = rng.integers(1, 1000, (3, 6)) + rng.random((3, 6))
        budget = float(rng.uniform(price_KT.min(axis=0).sum() * 0.9, price_KT.max(axis=0).sum()))
        check(-price_KT + rng.normal(size=(3, 6)) * rng.choice([0, 10]), price_KT, budget, segments)


@pytest.mark.filterwarnings("error")
def test_prices_that_differ_by_next_to_nothing() -> None:
    """A gain divided by such a difference is infinite, and infinity times a price of 0 is nothing at all."""
    loss_KT = np.array([[1.0, 0.5, 0.0], [1.0, 1e6, 0.5]])
    price_KT = np.array([[5e-324, 5e-324, 1e-310], [1e-300, 0.0, 2.0]])
    for segments in (None, 2):
        check(loss_KT, price_KT, float(price_KT.min(axis=0).sum()), segments)
        check(loss_KT, price_KT, 1.00000000000005e-310, segments)


def test_prices_too_fine_for_64_bits() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        price_KT = rng.random((3, 6)) * 10.0 ** rng.integers(-30, 3, (3, 6))
        check(rng.normal(size=(3, 6)), price_KT, float(np.median(price_KT, axis=0).sum()), rng.choice([None, 2]))


def test_two_models_are_sorted_by_gain() -> None:
    rng = np.random.default_rng(2)
    gain_T = rng.random(200)
    loss_KT, price_KT = np.stack([gain_T, 0 * gain_T]), np.repeat([[0.1], [0.3]], 200, axis=1)
    path = allocate(loss_KT, price_KT, 200 * 0.1 + 77.5 * 0.2)
    assert path.sum() == 77
    assert set(np.flatnonzero(path)) == set(np.argsort(-gain_T)[:77])


def test_equal_gains_fill_the_budget() -> None:
    loss_KT = np.repeat([[1.0], [0.0]], 50, axis=1)
    assert allocate(loss_KT, np.repeat([[1.0], [3.0]], 50, axis=1), 50 + 2 * 20 + 1.9).sum() == 20


def test_equal_losses_take_the_cheapest() -> None:
    price_KT = np.array([[3.0, 1, 2, 2], [1, 2, 1, 3], [2, 3, 2, 1]])
    assert allocate(np.ones((3, 4)), price_KT, 100).tolist() == [1, 0, 1, 2]
    assert allocate(np.ones((3, 4)), price_KT, 100, segments=1).tolist() == [1, 1, 1, 1]


def test_a_budget_is_not_exceeded_by_rounding() -> None:
    """Ten times 0.1 in floats is less than 1, the exact sum of the floats is more: ten heavy steps do not fit."""
    loss_KT = np.repeat([[1.0], [0.0]], 10, axis=1)
    price_KT = np.repeat([[0.05], [0.1]], 10, axis=1)
    assert sum([0.1] * 10) < 1.0 < sum([Fraction(0.1)] * 10)
    assert allocate(loss_KT, price_KT, 1.0).sum() == 9
    assert allocate(loss_KT, price_KT, sum([Fraction(0.1)] * 10)).sum() == 10


def test_the_same_every_time() -> None:
    rng = np.random.default_rng(3)
    loss_KT, price_KT = rng.integers(0, 3, (4, 30)).astype(float), rng.integers(1, 4, (4, 30)).astype(float)
    assert len({tuple(allocate(loss_KT, price_KT, 45, segments=9)) for _ in range(3)}) == 1


def curves(models: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Something like a family's table: light models lose most in the middle, and noise."""
    rng = np.random.default_rng(4)
    t = np.linspace(1, 0, steps)
    gain_T = (0.2 + np.exp(-(((t - 0.4) / 0.2) ** 2))) / steps
    loss_KT = gain_T * np.linspace(1, 0, models)[:, None] ** 2 + rng.normal(size=(models, steps)) * 0.05 / steps
    return loss_KT, np.repeat(np.linspace(4, 12, models)[:, None] ** 1.1 * 1.2345e9 / 7, steps, axis=1)


@pytest.mark.parametrize(("steps", "segments"), [(1000, None), (256, 5)])
def test_large_tables_take_seconds(steps: int, segments: int | None) -> None:
    """And are within the bound that any multiplier gives."""
    loss_KT, price_KT = curves(5, steps)
    budget = float(price_KT[-1].sum() * 0.7)
    began = time.perf_counter()
    path_T = allocate(loss_KT, price_KT, budget, segments=segments)
    assert time.perf_counter() - began < 10  # under two on an idle machine
    every = np.arange(steps)
    loss = loss_KT[path_T, every].sum()
    assert sum(map(Fraction, price_KT[path_T, every].tolist())) <= Fraction(budget)
    if segments is None:
        best = max(
            (loss_KT + m * price_KT).min(axis=0).sum() - m * budget for m in np.linspace(0, 5e-11 / steps * 256, 2001)
        )
        assert best - 1e-9 <= loss <= best + 1e-3 * abs(best)
    else:
        assert runs(tuple(path_T)) <= segments
        # No schedule of so many runs that differs by moving one boundary, or one run's model, is better.
        edges = [0, *(np.flatnonzero(np.diff(path_T)) + 1), steps]
        for start, end in itertools.pairwise(edges):
            for low, high, k in itertools.product(
                {start, max(0, start - 1), start + 1}, {end, end - 1, min(steps, end + 1)}, range(5)
            ):
                other = path_T.copy()
                other[low:high] = k
                if runs(tuple(other)) <= segments and price_KT[other, every].sum() <= budget:
                    assert loss_KT[other, every].sum() >= loss - 1e-9


def test_messages() -> None:
    table = np.ones((2, 3))
    with pytest.raises(UserError, match=r"no schedule fits a budget of 2\.5: the least possible price is 3"):
        allocate(table, table, 2.5)
    with pytest.raises(UserError, match="every model is forbidden at step 2"):
        allocate(np.array([[0, math.inf, 0], [1, math.inf, 1]]), table, 9)
    with pytest.raises(UserError, match="it takes over 1 run"):
        allocate(np.array([[0, math.inf, 0], [math.inf, 0, 1]]), table, 9, segments=1)
    with pytest.raises(UserError, match="tables of one shape"):
        allocate(np.ones((2, 3)), np.ones((2, 4)), 1)
    with pytest.raises(UserError, match="a loss must be a number"):
        allocate(table * math.nan, table, 1)
    with pytest.raises(UserError, match="a price must be a finite number"):
        allocate(table, -table, 1)
    with pytest.raises(UserError, match="at least one segment"):
        allocate(table, table, 9, segments=0)
    with pytest.raises(UserError, match="budget must be a number"):
        allocate(table, table, math.nan)
