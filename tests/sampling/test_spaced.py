"""Spaced sampling: its law against enumeration, its limits bit for bit, and what it refuses."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

import relaylm
from relaylm import Family, FromLogits, Schedule, UserError, denoise, make_plan
from relaylm.core.plan import Plan
from relaylm.core.schedule import Spacing
from relaylm.core.spacing import spaced_calls, spaced_events

V, MASK = 3, 3


def toy(seed: int) -> FromLogits:
    """Logits that depend on every token of the row and on the position."""
    rng = np.random.default_rng(seed)

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(length, V + 1, length, V)))
        seen = weight[torch.arange(length), tokens].sum(dim=1)
        return torch.cat([seen, torch.full((*seen.shape[:2], 1), -torch.inf, dtype=seen.dtype)], dim=-1)

    assert rng is not None
    return FromLogits(logits)


def law_of(models: dict[str, FromLogits], schedule: Schedule, plan: Plan) -> dict[tuple[int, ...], float]:
    """The distribution of one row, enumerated call by call from the definition."""
    assert schedule.spacing is not None
    given = plan.given_nL[0]
    free = given < 0
    call = spaced_calls(plan.u_nL[:1], free[None], schedule.spacing)[0]
    states = {tuple(np.where(free, MASK, given).tolist()): 1.0}
    for c in range(1, call.max() + 1):
        due = np.flatnonzero(call == c)
        share = (free & (call >= c)).sum() / free.sum()
        model = models[schedule.model_at(float(share))]
        after: dict[tuple[int, ...], float] = {}
        for state, chance in states.items():
            tokens = torch.tensor([state])
            p = model.logits_at(tokens, torch.ones(1), torch.from_numpy(due)[None])[0].softmax(-1)
            for drawn in itertools.product(range(V), repeat=len(due)):
                new = list(state)
                for position, token in zip(due, drawn, strict=True):
                    new[position] = token
                key = tuple(new)
                each = float(np.prod([float(p[k, token]) for k, token in enumerate(drawn)]))
                after[key] = after.get(key, 0.0) + chance * each
        states = after
    return states


@pytest.mark.parametrize(
    "text", ["a:100% spaced:2", "a:100% spaced:3", "a:100% spaced:2:prefix", "a:50% b:50% spaced:2"]
)
@pytest.mark.parametrize("given", [[-1] * 5, [-1, 1, -1, -1, 0]])
def test_the_law_is_that_of_enumeration(text: str, given: list[int]) -> None:
    """A fixed plan, fresh token noise for each row: row numbers key the noise, so the plan is copied over them."""
    n, schedule, models = 40_000, Schedule.parse(text), {"a": toy(1), "b": toy(2)}
    one = make_plan(1, 5, seed=7, given=np.array(given))
    rows = np.arange(n)
    plan = Plan(7, rows, np.repeat(one.given_nL, n, axis=0), np.repeat(one.u_nL, n, axis=0))
    tokens = denoise(models, schedule, plan, mask_id=MASK, batch_size=4096).tokens
    law = law_of(models, schedule, one)
    keys = sorted(law, key=lambda key: -law[key])
    code = {key: k for k, key in enumerate(keys)}
    found = np.bincount([code[tuple(row)] for row in tokens.tolist()], minlength=len(keys))
    expected = n * np.array([law[key] for key in keys])
    common = expected >= 5
    observed = np.append(found[common], found[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_the_largest_distance_is_one_position_a_call_bit_for_bit() -> None:
    family = Family.load("wiki-char")
    options = {"n": 2, "length": 20, "seed": 3, "prompt": "the "}
    apart = relaylm.sample(family, "light spaced:20", **options)
    single = relaylm.sample(family, "light", steps=float("inf"), **options)
    np.testing.assert_array_equal(apart.tokens, single.tokens)
    assert apart.cost.calls == single.cost.calls and apart.cost.flops == single.cost.flops
    assert apart.law == "spaced:20" and single.law == "uniform:inf"


def test_distance_one_writes_everything_in_one_call() -> None:
    samples = relaylm.sample(Family.load("wiki-char"), "light", 3, spacing=1, length=24)
    assert samples.cost.calls == {"4b": 3, "12b": 0} and samples.steps == 1


def test_rows_do_not_depend_on_the_batch_and_given_tokens_stay() -> None:
    family = Family.load("wiki-char")
    whole = relaylm.sample(family, "L25% H75% spaced:5", 5, infill="a ____ of the ______ and", batch_size=2)
    alone = relaylm.sample(
        family, "L25% H75% spaced:5", 1, infill="a ____ of the ______ and", batch_size=2, first_row=4
    )
    np.testing.assert_array_equal(whole.tokens[4], alone.tokens[0])
    assert all(text.startswith("a ") and text.endswith(" and") and text[6:14] == " of the " for text in whole.texts)


def test_events_report_calls_counted_down_and_masked_shares() -> None:
    plan = make_plan(3, 30, seed=1, given=np.array([-1] * 25 + [2] * 5))
    events = spaced_events(plan, Spacing(4))
    for row in range(3):
        part = slice(events.row_ptr_n1[row], events.row_ptr_n1[row + 1])
        steps, counts = events.step_E[part], events.count_E[part]
        assert steps.tolist() == list(range(len(steps), 0, -1)) and counts.sum() == 25
        np.testing.assert_allclose(events.t_E[part] * 25, 25 - np.cumsum(counts) + counts)


def test_spread_takes_about_the_steps_asked_for() -> None:
    samples = relaylm.sample(Family.load("wiki-char"), "light", 2, steps=12, spread=True, length=128)
    assert samples.law.startswith("spaced:") and 9 <= samples.cost.total_calls / 2 <= 14


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("heavy spaced:4", {"steps": 8}),
        ("heavy spaced:4", {"spacing": 4}),
        ("heavy", {"spacing": 4, "spread": True, "steps": 4}),
        ("heavy", {"spread": True}),
        ("L4 H4", {"spacing": 4}),
        ("heavy spaced:4", {"rule": "low-confidence"}),
        ("heavy", {"spacing": "x"}),
    ],
)
def test_what_does_not_go_together_is_refused(schedule: str, options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        relaylm.sample(Family.load("wiki-char"), schedule, length=16, **options)  # type: ignore[arg-type]
