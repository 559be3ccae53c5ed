"""Events in parallel give the sequential sample in fewer rounds; every call is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import LinearDenoiser

import relaylm
from relaylm import Family, Schedule, UserError, denoise, make_plan
from relaylm.sampling.engine import Engine
from relaylm.sampling.law import Law
from relaylm.sampling.parallel import denoise_ahead, states_of

MODELS = {"a": LinearDenoiser(1, 12, 9), "b": LinearDenoiser(2, 12, 9)}
GIVEN = np.array([[1] + [-1] * 11, [-1] * 12, [2] * 12, [-1, 3] * 6])


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("a:100%", float("inf")), ("a:50% b:50%", float("inf")), ("a:3 b:5", None), ("a:30% b:70% spaced:3", None)],
)
@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("batch", [None, 3])
def test_it_is_the_sequential_sample(schedule: str, steps: float | None, window: int, batch: int | None) -> None:
    plan, seen = make_plan(4, 12, 3, GIVEN), []
    options: dict[str, Any] = {"mask_id": 8, "steps": steps, "batch_size": batch}
    wanted = denoise(MODELS, Schedule.parse(schedule), plan, **options)
    found = denoise_ahead(MODELS, Schedule.parse(schedule), plan, window, callback=seen.append, **options)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.trace.model_nL, wanted.trace.model_nL)
    assert len(seen) == wanted.cost.total_calls <= found.cost.total_calls
    if window == 1:
        assert found.cost.calls == wanted.cost.calls
    for row in range(4):  # events arrive in order, each once
        written = [p for event in seen if event.row == row for p in event.positions]
        assert sorted(written) == np.flatnonzero(GIVEN[row] < 0).tolist()


def test_the_cost_counts_all_positions_that_are_asked_for() -> None:
    """A call asks for those of its own event and of the next W: with W = 1 for two, at the last event for one."""
    found = denoise_ahead(MODELS, Schedule.parse("a:100%"), make_plan(1, 12, 3), 1, mask_id=8, steps=float("inf"))
    assert found.cost.calls["a"] == 12 and found.cost.flops == 12 * 1000 + 11 * 2 + 1


def test_a_network_in_fewer_rounds() -> None:
    family, options = Family.load("wiki-char"), {"length": 40, "steps": float("inf"), "prompt": "the ", "seed": 2}
    one = relaylm.sample(family, "light", 2, batch_size=16, **options)
    ahead = relaylm.sample(family, "light", 2, parallel=8, **options)
    np.testing.assert_array_equal(ahead.tokens, one.tokens)
    assert ahead.texts == one.texts and ahead.cost.batch_size == 16
    assert ahead.cost.network_calls < 0.6 * 36 and ahead.cost.total_calls > one.cost.total_calls


def test_a_kept_engine_writes_the_same_again() -> None:
    schedule, plan, options = Schedule.parse("a:100%"), make_plan(2, 12, 3), {"mask_id": 8, "steps": float("inf")}
    kept = Engine(list(MODELS.values()), states_of(plan, 4), 8, Law(), "cpu")
    wanted = denoise_ahead(MODELS, schedule, plan, 4, **options)
    for _ in range(2):  # the second finds the first one's rows in the engine
        found = denoise_ahead(MODELS, schedule, plan, 4, engine=kept, **options)
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        assert found.cost.calls == wanted.cost.calls
    with pytest.raises(UserError, match="engine"):
        denoise_ahead(MODELS, schedule, make_plan(2, 12, 4), 4, engine=kept, **options)


@pytest.mark.parametrize("options", [{"parallel": 0}, {"rule": "low-confidence"}, {"stride": 4, "length": 300}])
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        relaylm.sample(Family.load("wiki-char"), "light", 1, **{"parallel": 4, **options})


def test_a_policy_that_looks_is_refused() -> None:
    with pytest.raises(UserError, match="schedule"):
        denoise_ahead(MODELS, lambda state: "a", make_plan(1, 12), 4, mask_id=8, steps=4)
