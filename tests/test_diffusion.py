"""The mathematics: derivatives, inverses, frequencies, and the objective against a straight formula."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm.diffusion import LINEAR, Alpha, corrupt, low_discrepancy_times, unmask_probability, weighted_loss
from relaylm.errors import UserError

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
    for one, zero in ((0.0, 1.0), (np.array([0.0]), np.array([1.0])), (torch.tensor([0.0]), torch.tensor([1.0]))):
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
        by_numpy = function(TIMES)
        by_torch = function(torch.from_numpy(TIMES))
        assert isinstance(by_torch, torch.Tensor) and by_torch.dtype == torch.float64
        assert np.allclose(by_torch.numpy(), by_numpy, atol=1e-14)
        assert np.allclose([function(float(t)) for t in TIMES], by_numpy, atol=1e-14)
        assert function(torch.from_numpy(TIMES).float()).dtype == torch.float32


@pytest.mark.parametrize(
    "bad", [("quadratic", 1.0), ("polynomial", 0.0), ("polynomial", -1.0), ("polynomial", math.nan)]
)
def test_bad_alphas(bad: tuple[str, float]) -> None:
    with pytest.raises(UserError):
        Alpha(*bad)


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 0.999), min_size=0, max_size=8, unique=True), st.sampled_from(ALPHAS))
def test_unmask_probabilities_telescope(inner: list[float], alpha: Alpha) -> None:
    """Staying masked from 1 to s has probability 1 - alpha(s), by whatever steps one goes, and nothing stays at 0."""
    times = [1.0, *sorted(inner, reverse=True)]
    masked = 1.0
    for t, s in itertools.pairwise(times):
        masked *= 1 - unmask_probability(t, s, alpha)
        assert math.isclose(masked, 1 - alpha(s), rel_tol=1e-9)
    assert unmask_probability(times[-1], 0.0, alpha) == 1


@pytest.mark.parametrize("alpha", ALPHAS)
def test_corruption_frequencies(alpha: Alpha) -> None:
    generator = torch.Generator().manual_seed(0)
    t_B = torch.tensor([0.05, 0.5, 0.93])
    tokens_BL = torch.randint(0, 9, (3, 200_000), generator=generator)
    masked_BL = corrupt(tokens_BL, t_B, torch.rand(3, 200_000, generator=generator), 9, alpha)
    kept_BL = masked_BL != 9
    assert torch.equal(masked_BL[kept_BL], tokens_BL[kept_BL])
    for b, t in enumerate([0.05, 0.5, 0.93]):
        test = scipy.stats.binomtest(int((~kept_BL[b]).sum()), 200_000, 1 - float(alpha(t)))
        assert test.pvalue > 1e-6


def test_corruption_is_nested_and_complete() -> None:
    """One u for all times: what is masked at t is masked at every later time; all at 1, nothing at 0."""
    tokens_BL, u_BL = torch.zeros(1, 1000, dtype=torch.long), torch.rand(1, 1000).clamp(1e-9, 1 - 1e-7)
    masked = [(corrupt(tokens_BL, torch.tensor([t]), u_BL, 5) == 5) for t in (0.0, 0.2, 0.6, 1.0)]
    assert not masked[0].any() and masked[3].all()
    assert all((early <= late).all() for early, late in itertools.pairwise(masked))


def test_low_discrepancy_times() -> None:
    rng = np.random.default_rng(0)
    draws = np.stack([low_discrepancy_times(u, 8, floor=1e-3) for u in rng.random(20_000)])
    assert draws.min() > 1e-3 and draws.max() <= 1
    for k in range(8):  # each is uniform on its own
        assert scipy.stats.kstest(draws[:, k], scipy.stats.uniform(1e-3, 1 - 1e-3).cdf).pvalue > 1e-6
    cells = np.sort(np.floor((1 - (draws - 1e-3) / (1 - 1e-3)) * 8 % 8), axis=1)
    shares = np.mean(cells == np.arange(8), axis=0)
    assert (shares > 0.999).all()  # one in each eighth, up to rounding on an edge


def test_low_discrepancy_times_in_parts() -> None:
    """A batch cut in pieces covers the same grid as the whole."""
    whole = low_discrepancy_times(0.3, 12)
    parts = [low_discrepancy_times(0.3, 4, start, 12) for start in (0, 4, 8)]
    assert np.allclose(np.concatenate(parts), whole)
    assert low_discrepancy_times(0.0, 4)[0] == 1.0


def test_weighted_loss_is_the_objective() -> None:
    """Against loops over rows and positions, from the definition."""
    generator = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(0, 6, (4, 11), generator=generator)
    t_B = torch.tensor([0.1, 0.4, 0.7, 1.0], dtype=torch.float64)
    alpha = Alpha("cosine")
    z_BL = corrupt(tokens_BL, t_B, torch.rand(4, 11, generator=generator, dtype=torch.float64), 6, alpha)
    logp_BLV = torch.randn(4, 11, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    total = 0.0
    for b in range(4):
        weight = (math.pi / 2) * math.cos(math.pi / 2 * float(t_B[b])) / math.sin(math.pi / 2 * float(t_B[b]))
        for j in range(11):
            if z_BL[b, j] == 6:
                total -= weight * float(logp_BLV[b, j, tokens_BL[b, j]])
    b_M, j_M = torch.nonzero(z_BL == 6, as_tuple=True)
    loss = weighted_loss(-logp_BLV[b_M, j_M, tokens_BL[b_M, j_M]], alpha.weight(t_B)[b_M], 44)
    assert len(b_M) > 5 and math.isclose(float(loss), total / 44, rel_tol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS[:3])
def test_bound_of_the_uniform_model_is_log_v(alpha: Alpha) -> None:
    """The objective of a model that knows nothing is exactly log V per token, whatever alpha: E[w(t) 1[masked]] = 1."""
    t = (np.arange(200_000) + 0.5) / 200_000
    assert math.isclose(np.mean(alpha.weight(t) * (1 - alpha(t))), 1.0, rel_tol=1e-6)
