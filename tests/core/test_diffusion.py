"""The mathematics: derivatives, inverses, unmasking probabilities and times."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from relaylm.core.plan import LINEAR, Alpha, unmask_probability
from relaylm.errors import UserError
from relaylm.train.objective import low_discrepancy_times

ALPHAS = [LINEAR, Alpha("cosine"), Alpha("polynomial", 2.0), Alpha("polynomial", 0.7)]
TIMES = np.linspace(0.02, 0.98, 49)


def test_formulas() -> None:
    assert np.allclose(LINEAR(TIMES), 1 - TIMES)
    assert np.allclose(Alpha("cosine")(TIMES), 1 - np.sin(math.pi / 2 * TIMES))
    assert np.allclose(Alpha("polynomial", 3.0)(TIMES), 1 - TIMES**3)
    assert np.allclose(LINEAR.weight(TIMES), 1 / TIMES)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_ends_are_exact_and_alpha_falls(alpha: Alpha) -> None:
    """Exactly: a position left masked at t = 0 by a rounding error would never be written."""
    for one, zero in ((0.0, 1.0), (np.array([0.0]), np.array([1.0]))):
        assert alpha(one) == 1 and alpha(zero) == 0
    assert (np.diff(alpha(np.linspace(0, 1, 1001))) < 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_prime_is_the_derivative(alpha: Alpha) -> None:
    h = 1e-6
    slope = (alpha(TIMES + h) - alpha(TIMES - h)) / (2 * h)
    assert np.allclose(alpha.prime(TIMES), slope, rtol=1e-7, atol=1e-8)
    assert (alpha.weight(TIMES) > 0).all()  # the paper's Equation 2 has the other sign
    # The weight is minus the derivative of log(1 - alpha), up to sign: d/dt log(share masked).
    growth = (np.log(1 - alpha(TIMES + h)) - np.log(1 - alpha(TIMES - h))) / (2 * h)
    assert np.allclose(alpha.weight(TIMES), growth, rtol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_time_of_is_the_inverse(alpha: Alpha) -> None:
    assert np.allclose(alpha.time_of(1 - alpha(TIMES)), TIMES, atol=1e-12)
    assert alpha.time_of(1.0) == 1.0 and abs(alpha.time_of(0.0)) < 1e-15


@pytest.mark.parametrize("alpha", ALPHAS)
def test_kinds_of_numbers_agree(alpha: Alpha) -> None:
    for function in (alpha, alpha.prime, alpha.weight):
        assert np.allclose([function(float(t)) for t in TIMES], function(TIMES), atol=1e-14)


@pytest.mark.parametrize(
    "bad", [("quadratic", 1.0), ("polynomial", 0.0), ("polynomial", -1.0), ("polynomial", math.nan)]
)
def test_bad_alphas(bad: tuple[str, float]) -> None:
    with pytest.raises(UserError):
        Alpha(*bad)


@given(st.lists(st.floats(0.001, 0.999), min_size=0, max_size=8, unique=True), st.sampled_from(ALPHAS))
def test_unmask_probabilities_telescope(inner: list[float], alpha: Alpha) -> None:
    """Staying masked from 1 to s has probability 1 - alpha(s), by whatever steps one goes, and nothing stays at 0."""
    times = [1.0, *sorted(inner, reverse=True)]
    masked = 1.0
    for t, s in itertools.pairwise(times):
        masked *= 1 - unmask_probability(t, s, alpha)
        assert math.isclose(masked, 1 - alpha(s), rel_tol=1e-9)
    assert unmask_probability(times[-1], 0.0, alpha) == 1


def test_low_discrepancy_times() -> None:
    rng = np.random.default_rng(0)
    draws = np.stack([low_discrepancy_times(u, 8, floor=1e-3) for u in rng.random(20_000)])
    assert draws.min() > 1e-3 and draws.max() <= 1 and low_discrepancy_times(0.0, 4)[0] == 1.0
    for k in range(8):  # each is uniform on its own
        assert scipy.stats.kstest(draws[:, k], scipy.stats.uniform(1e-3, 1 - 1e-3).cdf).pvalue > 1e-6
    cells = np.sort(np.floor((1 - (draws - 1e-3) / (1 - 1e-3)) * 8 % 8), axis=1)
    shares = np.mean(cells == np.arange(8), axis=0)
    assert (shares > 0.999).all()  # one in each eighth, up to rounding on an edge


@pytest.mark.parametrize("alpha", ALPHAS[:3])
def test_bound_of_the_uniform_model_is_log_v(alpha: Alpha) -> None:
    """The objective of a model that knows nothing is exactly log V per token, whatever alpha: E[w(t) 1[masked]] = 1."""
    t = (np.arange(200_000) + 0.5) / 200_000
    assert math.isclose(np.mean(alpha.weight(t) * (1 - alpha(t))), 1.0, rel_tol=1e-6)
