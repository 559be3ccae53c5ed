"""MDLM's sampler: its formulas one by one, its cache, its last step, and what float32 does to rare tokens.
(Its law in float64 is in test_law.)"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import TableDenoiser
from torch import Tensor

from relaylm.core.schedule import Schedule, Timetable
from relaylm.errors import UserError
from relaylm.models.denoiser import FromLogits
from relaylm.sampling import reference
from relaylm.sampling.reference import (
    Reference,
    ddpm_cache_step,
    ddpm_step,
    draw,
    kept_mass,
    log_p_x0,
    sample_reference,
    truncation_weight,
)

MASK = 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Recording:
    """A table that notes every pass: which model, how many rows, at what time."""

    def __init__(self, seed: int, log: list[tuple[int, int, float]], time_conditioning: bool = False) -> None:
        self.table, self.seed, self.log = TableDenoiser(seed), seed, log
        self.time_conditioning = time_conditioning

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        self.log.append((self.seed, len(tokens_BL), float(t_B[0])))
        return self.table.logits(tokens_BL, t_B)

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        raise AssertionError("the published sampler knows no positions")


def pair(log: list[tuple[int, int, float]], **options: Any) -> dict[str, Recording]:
    return {"a": Recording(1, log, **options), "b": Recording(2, log, **options)}


def test_subs_parameterisation() -> None:
    model = TableDenoiser(1)
    x_BL = torch.tensor([[MASK, 1, MASK], [0, MASK, 2]])
    log_p = log_p_x0(model, x_BL, torch.ones(2), MASK, torch.float64)
    raw = model.logits(x_BL, torch.ones(2))
    for b in range(2):
        for j in range(3):
            if x_BL[b, j] == MASK:
                assert torch.allclose(log_p[b, j, :3], raw[b, j, :3].log_softmax(-1), atol=1e-12)
                assert log_p[b, j, MASK] < -9e5
            else:
                expected = torch.full((4,), -1e6, dtype=torch.float64)
                expected[x_BL[b, j]] = 0
                assert torch.equal(log_p[b, j], expected)


def test_logits_keep_the_networks_precision_in_fp32() -> None:
    """bfloat16 log-probabilities, as published; double only where double was asked for."""
    model = FromLogits(lambda x_BL, t_B: torch.randn(*x_BL.shape, 4, generator=generator()).bfloat16())
    x_BL, t_B = torch.full((2, 3), MASK), torch.ones(2)
    assert log_p_x0(model, x_BL, t_B, MASK).dtype == torch.bfloat16
    assert log_p_x0(model, x_BL, t_B, MASK, torch.float64).dtype == torch.float64
    double = FromLogits(lambda x_BL, t_B: torch.zeros(*x_BL.shape, 4, dtype=torch.float64))
    assert log_p_x0(double, x_BL, t_B, MASK).dtype == torch.float32


def test_draw_is_the_published_formula() -> None:
    q_BLV = torch.rand(50, 7, 11, generator=generator(1))
    u_BLV = torch.rand(50, 7, 11, generator=generator(2))
    expected = (q_BLV / (1e-10 - (u_BLV + 1e-10).log())).argmax(-1)
    assert torch.equal(draw(q_BLV, generator(2)), expected)
    assert draw(torch.zeros(1, 1, 4), generator()).shape == (1, 1)


@pytest.mark.parametrize("kind", ["ddpm", "ddpm_cache"])
def test_one_step_by_hand(kind: str) -> None:
    """From t to t - dt: weights p (move_t - move_s), the mask's move_s, and the same uniforms."""
    model, t, dt = TableDenoiser(1), 0.6, 0.25
    x_BL = torch.randint(0, 4, (500, 3), generator=generator(3))
    t_B = torch.full((500,), t, dtype=torch.float64)
    p_BLV = log_p_x0(model, x_BL, t_B, MASK, torch.float64).exp()
    scale = 0.999 if kind == "ddpm" else 1.0
    q_BLV = p_BLV * scale * dt
    q_BLV[..., MASK] = scale * (t - dt)
    noise = 1e-10 - (torch.rand(500, 3, 4, generator=generator(4), dtype=torch.float64) + 1e-10).log()
    expected = torch.where(x_BL == MASK, (q_BLV / noise).argmax(-1), x_BL)
    if kind == "ddpm":
        got = ddpm_step(model, x_BL, t, dt, MASK, generator(4), torch.float64)
    else:
        got, p_used = ddpm_cache_step(model, x_BL, t, dt, MASK, generator(4), dtype=torch.float64)
        assert torch.equal(p_used, p_BLV)
        again, _ = ddpm_cache_step(model, x_BL, t, dt, MASK, generator(4), p_used, torch.float64)
        assert torch.equal(again, got)  # handing the probabilities back changes nothing
    assert torch.equal(got, expected)
    assert (got == MASK).any() and (got[x_BL == MASK] != MASK).any()


@pytest.mark.parametrize("kind", ["ddpm", "ddpm_cache"])
def test_unmasking_rate(kind: str) -> None:
    """A step writes dt / t of what is masked, whichever the precision (tokens here are not rare)."""
    x_BL = torch.full((100_000, 3), MASK)
    for dtype in (torch.float32, torch.float64):
        if kind == "ddpm":
            new = ddpm_step(TableDenoiser(1), x_BL, 0.8, 0.1, MASK, generator(), dtype)
        else:
            new, _ = ddpm_cache_step(TableDenoiser(1), x_BL, 0.8, 0.1, MASK, generator(), dtype=dtype)
        assert scipy.stats.binomtest(int((new != MASK).sum()), 300_000, 1 / 8).pvalue > 1e-6


def sample(schedule: Any = "a:2 b:2", n: int = 5, log: Any = None, **options: Any) -> Reference:
    models = options.pop("models", None) or pair([] if log is None else log)
    schedule = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    return sample_reference(models, schedule, n, 3, mask_id=MASK, **options)


def test_ddpm_passes_and_times() -> None:
    """T + 1 passes at linspace(1, eps, T + 1): the schedule's models, and the last one again for the noise removal."""
    log: list[tuple[int, int, float]] = []
    result = sample(log=log, eps=1e-2, precision="fp64")
    assert [(model, rows) for model, rows, _ in log] == [(1, 5), (1, 5), (2, 5), (2, 5), (2, 5)]
    assert np.allclose([t for _, _, t in log], np.linspace(1, 1e-2, 5))
    assert result.calls == {"a": 10, "b": 15} and result.seconds > 0
    log.clear()
    assert sample(log=log, noise_removal=False).calls == {"a": 10, "b": 10} and len(log) == 4


def test_times_of_a_grid_that_is_not_uniform() -> None:
    log: list[tuple[int, int, float]] = []
    sample("a:1@50% b:2@50%", log=log, eps=0.0, noise_removal=False, precision="fp64")
    assert np.allclose([t for _, _, t in log], [1, 0.5, 0.25])


def test_everything_is_written_and_what_is_given_stays() -> None:
    given = np.array([-1, 2, -1])
    for sampler in ("ddpm", "ddpm_cache"):
        for precision in ("fp32", "fp64"):
            for options in ({"eps": 0.0, "noise_removal": False}, {}):
                result = sample(n=2000, given=given, sampler=sampler, precision=precision, **options)
                assert (result.tokens < MASK).all() and (result.tokens[:, 1] == 2).all()
    rows = np.array([[0, -1, -1], [-1, 1, -1]])
    assert (sample(n=2, given=rows).tokens[rows >= 0] == [0, 1]).all()


def test_noise_removal_is_greedy() -> None:
    """With eps near 1 the steps write nearly nothing, and the last pass takes the likeliest token everywhere."""
    result = sample("a:1", n=2000, eps=1 - 1e-9, precision="fp64", models={"a": TableDenoiser(1)})
    blank = torch.full((1, 3), MASK)
    best = TableDenoiser(1).logits(blank, torch.ones(1))[0, :, :3].argmax(-1).numpy()
    assert (result.tokens == best).all()
    left = sample("a:1", n=2000, eps=0.5, precision="fp64", noise_removal=False)
    assert scipy.stats.binomtest(int((left.tokens == MASK).sum()), 6000, 0.5).pvalue > 1e-6


def passes(log: list[tuple[int, int, float]], schedule: Timetable, n: int, **options: Any) -> list[int]:
    """At which steps k the network was asked."""
    log.clear()
    sample(schedule, n=n, log=log, sampler="ddpm_cache", eps=0.0, noise_removal=False, precision="fp64", **options)
    times = [t for _, _, t in log]
    return [min(range(schedule.steps), key=lambda k: abs(schedule.times[k] - t)) for t in times]


def even(models: str) -> Timetable:
    return Timetable(tuple(models), tuple((len(models) - k) / len(models) for k in range(len(models) + 1)))


@pytest.mark.parametrize("seed", range(5))
def test_cache_holds_while_nothing_changes_and_the_model_stays(seed: int) -> None:
    """The network runs at step k exactly if something was written at k - 1, or the model is another one, or k = 0."""
    schedule, states, log = even("a" * 20 + "b" * 20 + "a" * 20), [], []
    asked = passes(log, schedule, 1, seed=seed, on_step=lambda i, x: states.append((i, x.clone())))
    assert [i for i, _ in states] == list(range(60, 0, -1))
    before = [torch.full((1, 3), MASK), *(x for _, x in states)]
    changed = [not torch.equal(before[k], before[k + 1]) for k in range(60)]
    assert asked == [k for k in range(60) if k in (0, 20, 40) or changed[k - 1]]
    assert 3 <= len(asked) <= 6
    assert sum(rows for _, rows, _ in log) == len(asked)


def test_cache_is_for_the_whole_batch() -> None:
    """One row that changes costs every row a pass: at batch 64 hardly a step is spared, at 1 nearly all are."""
    log: list[tuple[int, int, float]] = []
    assert len(passes(log, even("a" * 30), 1)) <= 4
    assert len(passes(log, even("a" * 30), 64)) >= 28


def test_cache_is_not_used_by_a_network_that_looks_at_the_time() -> None:
    for models in (pair([], time_conditioning=True), {"a": FromLogits(TableDenoiser(1).logits)}):
        result = sample(
            even("a" * 30), n=1, models=models, sampler="ddpm_cache", noise_removal=False, eps=0.0, precision="fp64"
        )
        assert result.calls["a"] == 30


def test_seeds() -> None:
    one, two, three = (sample(n=50, seed=seed, models=pair([])).tokens for seed in (0, 0, 1))
    assert (one == two).all() and (one != three).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "analytic"}, "ddpm and ddpm_cache"),
        ({"precision": "bf16"}, "fp32"),
        ({"n": 0}, "at least 1"),
        ({"eps": 1.0}, "eps"),
        ({"steps": 9}, "4 steps"),
        ({"schedule": "x:4"}, "asks for model 'x'"),
        ({"schedule": "a:100%"}, "how many steps"),
        ({"schedule": even("ab"), "steps": 3}, "2 steps"),
        ({"models": {"a": FromLogits(lambda x, t: torch.zeros(*x.shape, 3))}, "schedule": "a:1"}, "logit for the mask"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sample(**options)


# ------------------------------------------------------------------------------------------- what float32 does to it


def test_float32_noise_lies_on_a_grid() -> None:
    """The premise: u is a multiple of 2^-24 below 1, so that E is never below 2^-24; in float64 it is."""
    u = torch.rand(2_000_000, generator=generator())
    assert torch.equal((u * 2**24).round(), u * 2**24) and u.max() < 1
    best = torch.tensor(1 - 2**-24)
    assert math.isclose(float(reference.GUARD - (best + reference.GUARD).log()), 2**-24, rel_tol=0.01)
    assert 1 - torch.rand(40_000_000, generator=generator(), dtype=torch.float64).max() < 2**-24


@pytest.mark.parametrize(
    ("p", "s", "steps"), [(1e-3, 0.5, 1000), (1e-4, 0.5, 1000), (3e-5, 0.5, 1000), (1e-5, 0.5, 1000), (1e-5, 0.9, 128)]
)
def test_truncation_weight_by_monte_carlo(p: float, s: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's own race of one token against the mask, in float32, with the token's uniform drawn from the top of
    the grid (any other loses, and is counted as a loss): how often it wins, against p dt / s."""
    draws, dt = 4_000_000, 1 / steps
    top = min(2**24, math.ceil(25 * p * dt / s * 2**24) + 5)  # E_mask above 25 happens once in 7e10
    j = torch.randint(1, top + 1, (draws,), generator=generator(1))
    u_token = (1 - j.double() * 2.0**-24).float()
    u_BLV = torch.stack([u_token, torch.rand(draws, generator=generator(2))], dim=-1)[:, None]
    q_BLV = torch.tensor([p * dt, s]).expand(draws, 1, 2)
    monkeypatch.setattr(torch, "rand", lambda shape, **options: u_BLV)
    wins = int((draw(q_BLV, generator()) == 0).sum())
    right = (p * dt / s) / (1 + p * dt / s)
    measured = wins / draws * (top / 2**24) / right
    error = measured / math.sqrt(wins)
    assert abs(measured - truncation_weight(p, s, steps)) < 5 * error + 1e-3, (measured, error)
    assert error < 0.01


def test_truncation_weight_against_the_published_figures() -> None:
    """mdlm.md 0.2, at s = 0.5."""
    figures = [(1e-3, 1000, 0.985), (1e-4, 1000, 0.858), (3e-5, 1000, 0.584), (1e-5, 1000, 0.159), (1e-5, 128, 0.821)]
    for p, steps, weight in figures:
        assert abs(truncation_weight(p, 0.5, steps) - weight) < 2e-3


def test_truncation_weight_has_its_limits() -> None:
    assert truncation_weight(0.5, 0.0, 1000) == 1.0  # the last step is untouched
    assert truncation_weight(1e-12, 1.0, 1000) == 0.0  # and no overflow
    w = truncation_weight(np.array([1e-6, 1e-5, 1e-4, 1e-2]), 0.5, 1000)
    assert (np.diff(w) > 0).all() and 0 < w[0] < w[-1] < 1
    assert truncation_weight(1e-5, 0.9, 1000) < truncation_weight(1e-5, 0.1, 1000)  # strongest at early steps


def test_kept_mass() -> None:
    zipf = 1 / np.arange(1, 50_258)
    zipf /= zipf.sum()
    by_hand = sum(p * truncation_weight(p, 0.5, 1000) for p in zipf[::97])
    assert math.isclose(kept_mass(zipf[::97], 0.5, 1000), by_hand)
    assert 0.7 < kept_mass(zipf, 0.5, 1000) < 0.96
    assert kept_mass(np.array([1.0, 0.0]), 0.5, 1000) > 0.9999
    assert kept_mass(zipf, 0.9, 1000) < kept_mass(zipf, 0.5, 1000) < kept_mass(zipf, 0.1, 1000)
