"""Does it draw from the right distribution? Known answers, a million draws each, at alpha = 1e-6; and wrong samplers
that such a test must catch.

Rows have three positions and three symbols, networks are tables of random logits, and the law of the finished row is
enumerated exactly in `helpers`. Seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import State, TableDenoiser, g_test, law_of_events, law_of_steps, p_value

from relaylm.core.noise import race
from relaylm.core.plan import LINEAR, Alpha, Events, Plan, make_events, make_plan
from relaylm.core.schedule import Schedule, Timetable
from relaylm.sampling import denoise as sampler
from relaylm.sampling.denoise import denoise
from relaylm.sampling.policy import SwitchByMaskFraction
from relaylm.sampling.reference import sample_reference

ALPHA = 1e-6
DRAWS = 1_000_000
SYMBOLS = MASK = 3
BLANK: State = (MASK, MASK, MASK)
UNIFORM = (1.0, 0.75, 0.5, 0.25, 0.0)
MODELS = {"a": TableDenoiser(1), "b": TableDenoiser(2), "c": TableDenoiser(3)}
# One table for each step of T = 4: a sampler that hands the network the wrong time is caught.
TIMED = {"a": TableDenoiser(4, edges=UNIFORM), "b": TableDenoiser(5, edges=UNIFORM)}


@dataclass(frozen=True)
class Case:
    """A way to sample, and the law it must have."""

    policy: Any
    law: dict[State, float]
    models: dict[str, TableDenoiser]
    steps: float | None = None
    given: State = (-1, -1, -1)
    alpha: Alpha = LINEAR


def stepwise(names: str, models: dict[str, TableDenoiser] = MODELS, **more: Any) -> dict[State, float]:
    """The law of a schedule spelt out: one letter for each step."""
    return law_of_steps(
        more.pop("start", BLANK),
        more.pop("times", UNIFORM),
        lambda k, state: models[names[k]],
        MASK,
        more.pop("kind", "linear"),
    )


def by_mask_count(k: int, state: State) -> TableDenoiser:
    return MODELS["b" if state.count(MASK) == 2 else "a"]


def parse(text: str) -> Schedule:
    return Schedule.parse(text)


CASES = {
    "one model": Case(parse("a"), stepwise("aaaa"), MODELS, 4),
    "two models": Case(parse("a:1 b:2 a:1"), stepwise("abba"), MODELS),
    "three models": Case(parse("c:1 a:2 b:1"), stepwise("caab"), MODELS),
    "infill": Case(parse("a:2 b:2"), stepwise("aabb", start=(MASK, 1, MASK)), MODELS, given=(-1, 1, -1)),
    "time-conditioned": Case(parse("a:2 b:2"), stepwise("aabb", TIMED), TIMED),
    "dynamic policy": Case(
        SwitchByMaskFraction("a", "b", 0.5, 0.9), law_of_steps(BLANK, UNIFORM, by_mask_count, MASK), MODELS, 4
    ),
    "non-uniform grid": Case(parse("a:1@50% b:3@50%"), stepwise("abbb", times=(1.0, 0.5, 1 / 3, 1 / 6, 0.0)), MODELS),
    "cosine": Case(parse("a:3 b:1"), stepwise("aaab", kind="cosine"), MODELS, alpha=Alpha("cosine")),
    "infinite": Case(
        parse("a:25% b:50% c:25%"),
        law_of_events(BLANK, (1.0, 0.75, 0.25, 0.0), [MODELS[name] for name in "abc"], MASK),
        MODELS,
        float("inf"),
    ),
    "infinite, cosine, infill, time-conditioned": Case(
        parse("a:50% b:50%"),
        law_of_events((2, MASK, MASK), UNIFORM, [TIMED[name] for name in "aabb"], MASK, "cosine"),
        TIMED,
        float("inf"),
        (2, -1, -1),
        Alpha("cosine"),
    ),
}


def exact(case: Case, n: int, seed: int = 0, **changes: Any) -> np.ndarray:
    options = {"models": case.models, "policy": case.policy, **changes}
    plan = make_plan(n, 3, seed, np.array(case.given))
    return denoise(
        **options, plan=plan, mask_id=MASK, steps=case.steps, alpha=case.alpha, batch_size=min(n, 1 << 17)
    ).tokens


@pytest.mark.parametrize("name", CASES)
def test_exact_sampler(name: str) -> None:
    case = CASES[name]
    assert p_value(exact(case, DRAWS), case.law, SYMBOLS) > ALPHA


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("three models", "ddpm"),
        ("time-conditioned", "ddpm"),
        ("three models", "ddpm_cache"),
        ("infill", "ddpm_cache"),
        ("non-uniform grid", "ddpm_cache"),
    ],
)
def test_reference_in_float64(name: str, algorithm: str) -> None:
    """The published sampler agrees with the enumeration too, hence with the exact one."""
    case = CASES[name]
    tokens = sample_reference(
        case.models,
        case.policy,
        DRAWS,
        3,
        mask_id=MASK,
        sampler=algorithm,
        precision="fp64",
        eps=0.0,
        noise_removal=False,
        given=np.array(case.given),
        seed=1,
    ).tokens
    assert p_value(tokens, case.law, SYMBOLS) > ALPHA


def test_cache_has_the_law_when_it_is_used() -> None:
    """With a million rows no cache ever survives a step; one row at a time, it does, across a change of model too."""
    case, grid = CASES["three models"], Timetable(tuple("ccaaaabb"), tuple(np.linspace(1, 0, 9)))
    law = stepwise("ccaaaabb", times=grid.times)
    rows, calls = [], 0
    for seed in range(3000):
        result = sample_reference(
            case.models, grid, 1, 3, mask_id=MASK, sampler="ddpm_cache", precision="fp64", eps=0.0,
            noise_removal=False, seed=seed,
        )  # fmt: skip
        rows.append(result.tokens[0])
        calls += sum(result.calls.values())
    assert calls < 0.8 * 8 * 3000  # of 8 steps with 3 positions, many change nothing
    assert p_value(np.array(rows), law, SYMBOLS) > ALPHA


# ------------------------------------------------------------------------------------------- samplers that are wrong

SEEDS = range(20)
FEW = 10_000  # enough to reject each of these


def rejected(case: Case, tokens: np.ndarray) -> bool:
    return p_value(tokens, case.law, SYMBOLS) < ALPHA


@pytest.mark.parametrize("name", ["two models", "three models"])
def test_schedule_off_by_one_step_is_rejected(name: str) -> None:
    case = CASES[name]
    table = case.policy.timetable()
    late = Timetable(table.models[:1] + table.models[:-1], table.times)
    early = Timetable(table.models[1:] + table.models[-1:], table.times)
    for seed, wrong in itertools.product(SEEDS, (late, early)):
        assert rejected(case, exact(case, FEW, seed, policy=wrong)), (seed, wrong.models)


def test_floor_for_ceiling_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps floor(u T), with 0 counted as 1, in place of ceil(u T): written one step late."""

    def off_by_one(plan: Plan, times: Any, alpha: Alpha = LINEAR) -> Events:
        late = np.where(plan.given_nL < 0, np.maximum(plan.u_nL - 0.25, 1e-9), 0.0)
        return make_events(Plan(plan.seed, plan.rows_n, plan.given_nL, late), times, alpha)

    monkeypatch.setattr(sampler, "make_events", off_by_one)
    for seed in SEEDS:
        assert rejected(CASES["two models"], exact(CASES["two models"], FEW, seed)), seed


def test_time_off_by_one_step_is_rejected() -> None:
    """The network is told the time after the step, not before it."""

    class Early:
        def __init__(self, model: TableDenoiser) -> None:
            self.model = model

        def logits(self, tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return self.model.logits(tokens_BL, t_B - 0.25)

        def logits_at(self, tokens_BL: torch.Tensor, t_B: torch.Tensor, positions_BK: torch.Tensor) -> torch.Tensor:
            return self.model.logits_at(tokens_BL, (t_B - 0.25).clamp_min(0.25), positions_BK)

    case = CASES["time-conditioned"]
    for seed in SEEDS:
        wrong = {name: Early(model) for name, model in case.models.items()}
        assert rejected(case, exact(case, FEW, seed, models=wrong)), seed


@pytest.mark.parametrize("name", ["two models", "infinite", "dynamic policy"])
def test_swapped_models_are_rejected(name: str) -> None:
    case = CASES[name]
    swapped = {**case.models, "a": case.models["b"], "b": case.models["a"]}
    for seed in SEEDS:
        assert rejected(case, exact(case, FEW // 3, seed, models=swapped)), seed


def test_rejections_are_not_of_everything() -> None:
    """The right sampler, with the same draws and seeds, passes."""
    for seed in SEEDS:
        assert not rejected(CASES["two models"], exact(CASES["two models"], FEW, seed))


# ------------------------------------------------------------------------------------- drawing a position a second time

REDRAW_P = np.array([0.5, 0.3, 0.2])


def redraw(n: int, seed: int, second_draw: int) -> np.ndarray:
    """A remasking process: write a token, and if it is 0, mask it again and write a second one. The code (first, last)
    as 3 first + last."""
    logits = torch.from_numpy(np.log(REDRAW_P)).expand(n, -1).contiguous()
    row, position = torch.arange(n), torch.full((n,), 5)
    first = race(logits, seed, row, position, torch.zeros_like(row))
    second = race(logits, seed, row, position, torch.full_like(row, second_draw))
    return (3 * first + torch.where(first == 0, second, first)).numpy()


def redraw_law() -> np.ndarray:
    law = np.zeros((3, 3))
    law[0] = REDRAW_P[0] * REDRAW_P
    law[1, 1], law[2, 2] = REDRAW_P[1], REDRAW_P[2]
    return law.ravel()


def test_second_draws_are_fresh() -> None:
    for draw in (1, 2, 77):
        counts = np.bincount(redraw(DRAWS, 0, draw), minlength=9)
        assert g_test(counts, redraw_law()) > ALPHA


def test_noise_reused_on_a_redraw_is_rejected() -> None:
    for seed in SEEDS:
        counts = np.bincount(redraw(200, seed, 0), minlength=9)
        assert g_test(counts, redraw_law()) < ALPHA, seed
