"""Spaced plans against a literal reading of their definition, and their limits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm.core.cost import SPACED_PLANS, Price, mean_price
from relaylm.core.plan import make_plan
from relaylm.core.schedule import SPACING_FORMS as FORMS
from relaylm.core.schedule import Schedule, Spacing
from relaylm.core.spacing import expected_calls, positions_per_call, spaced_calls, spaced_events, spread_over
from relaylm.errors import UserError


def by_definition(u_L: np.ndarray, free_L: np.ndarray, spacing: Spacing) -> list[int]:
    """One row's calls, position by position as the definition reads."""
    left = [int(p) for p in np.argsort(-u_L, kind="stable") if free_L[p]]
    calls: list[list[int]] = []
    while left:
        taken: list[int] = []
        rest: list[int] = []
        for p in left:
            fits = all(abs(p - q) >= spacing.distance for q in taken)
            closed = spacing.form == "prefix" and bool(rest)
            (taken if fits and not closed else rest).append(p)
        calls.append(taken)
        left = rest
    number = {p: c for c, taken in enumerate(calls, 1) for p in taken}
    return [number.get(p, 0) for p in range(len(u_L))]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 3, 20]),
    length=st.integers(1, 90),
    distance=st.integers(1, 100),
    share=st.floats(0, 1),
    form=st.sampled_from(FORMS),
    alike=st.sampled_from([2**53, 2000, 20]),
)
def test_calls_are_those_of_the_definition(
    seed: int, rows: int, length: int, distance: int, share: float, form: str, alike: int
) -> None:
    """Also where many of u are equal, or differ in their last bits only."""
    rng = np.random.default_rng(seed)
    u, free = rng.integers(1, alike, (rows, length)) * 2.0**-53, rng.random((rows, length)) < share
    u, spacing = np.where(free, u if alike == 2**53 else 0.5 + u, 0.0), Spacing(distance, form)
    found = spaced_calls(u, free, spacing)
    assert found.tolist() == [by_definition(u[r], free[r], spacing) for r in range(rows)]


def test_a_row_does_not_depend_on_the_rows_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on how many there are: few are worked on one by one, many rank by rank, in pieces."""
    rng = np.random.default_rng(0)
    u, free = rng.random((60, 64)), rng.random((60, 64)) < 0.7
    monkeypatch.setattr("relaylm.core.spacing._PIECE", 2000)
    for form in FORMS:
        together = spaced_calls(u, free, Spacing(6, form))
        alone = [spaced_calls(u[r : r + 1], free[r : r + 1], Spacing(6, form))[0] for r in range(60)]
        np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("form", FORMS)
def test_limits(form: str) -> None:
    u = np.random.default_rng(1).random((3, 40))
    free = np.ones_like(u, dtype=bool)
    assert (spaced_calls(u, free, Spacing(1, form)) == 1).all()
    one_by_one = spaced_calls(u, free, Spacing(40, form))
    np.testing.assert_array_equal(np.argsort(one_by_one, axis=1), np.argsort(-u, axis=1))
    np.testing.assert_array_equal(one_by_one, spaced_calls(u, free, Spacing(1000, form)))


def test_sets_take_about_one_and_a_half_d_calls_whatever_the_length() -> None:
    short, long = (expected_calls(length, Spacing(16), rows=200) for length in (256, 2048))
    assert 22 < short < 25 and 23 < long < 26


@pytest.mark.parametrize("spacing", [Spacing(64), Spacing(9, "prefix")])
def test_positions_of_a_call_on_a_long_row(spacing: Spacing) -> None:
    """The parking constant, and the birthday problem; a call shape has room for them and no more than can be."""
    plan = make_plan(200, 4096, 3)
    events = spaced_events(plan, spacing)
    first = events.count_E[events.row_ptr_n1[:-1]].mean()
    expected = positions_per_call(4096, spacing)
    assert first == pytest.approx(expected, rel=0.02 if spacing.form == "sets" else 0.12)
    assert (events.expected_E == expected).all()


@pytest.mark.parametrize(
    ("length", "distance", "most"), [(5, 2, 3), (6, 2, 3), (7, 3, 3), (5, 5, 1), (5, 9, 1), (4, 1, 4)]
)
def test_a_call_has_room_for_all_that_keep_the_distance(length: int, distance: int, most: int) -> None:
    events = spaced_events(make_plan(300, length, 1), Spacing(distance))
    assert (events.most_E == most).all() and events.count_E.max() == most
    assert positions_per_call(length, Spacing(length)) == 0


def test_spread_over_fits_the_number_of_calls() -> None:
    for calls in (1, 2, 16, 60, 255):
        found = spread_over(calls, 256)
        assert expected_calls(256, found) <= calls < expected_calls(256, Spacing(found.distance + 1))
    assert spread_over(256, 256) == Spacing(256)


def test_text_round_trips_and_slips_are_refused() -> None:
    for spacing in (Spacing(1), Spacing(16), Spacing(7, "prefix")):
        assert Spacing.parse(str(spacing)) == spacing
    assert Spacing.parse("16:prefix") == Spacing(16, "prefix") and Spacing.parse(16) == Spacing(16)
    for bad in ("", "0", "-1", "1.5", "spaced", "spaced:", "16:lattice", "spaced:16:prefix:2", 0, True, 10**9):
        with pytest.raises(UserError, match="spacing"):
            Spacing.parse(bad)  # type: ignore[arg-type]


def test_a_schedule_carries_its_spacing() -> None:
    for text in ("heavy spaced:16", "L12.5% H75% L12.5% spaced:11", "1000000111 spaced:7:prefix", "12b:100% spaced:1"):
        schedule = Schedule.parse(text)
        assert schedule.spacing is not None
        assert Schedule.parse(str(schedule)) == schedule == Schedule.from_json(schedule.to_json())
        assert schedule.bind("a", "b").spacing == schedule.spacing
        assert schedule.digest != Schedule.parse(text.rpartition(" ")[0]).digest
    assert str(Schedule.parse("sandwich:25%, spaced:8")) == "L12.5% H75% L12.5% spaced:8"
    assert Schedule.parse("cells(4b 12b) spaced:3").model_at(0.4) == "12b"


@pytest.mark.parametrize(
    "text",
    ["L8 H8 spaced:4", "L50%@25% H50%@75% spaced:4", "interleaved:25% spaced:4", "heavy spaced", "heavy spaced:0"],
)
def test_what_does_not_go_with_a_spacing(text: str) -> None:
    with pytest.raises(UserError):
        Schedule.parse(text)


def test_a_spaced_schedule_has_no_steps() -> None:
    for ask in (Schedule.timetable, Schedule.resample):
        with pytest.raises(UserError, match="no steps"):
            ask(Schedule.parse("heavy spaced:4"), 8)


def test_the_mean_price_counts_calls_and_positions_by_model() -> None:
    prices = {"a": Price(10.0, 1.0), "b": Price(100.0, 2.0)}
    free = np.array([32, 32, 16])
    calls = {f: expected_calls_of(f) for f in (32, 16)}
    alone = mean_price(prices, Schedule.parse("a:100% spaced:4"), None, free)
    assert alone == pytest.approx((2 * (10 * calls[32] + 32) + 10 * calls[16] + 16) / 3)
    mixed = mean_price(prices, Schedule.parse("a:50% b:50% spaced:4"), None, free)
    assert alone < mixed < mean_price(prices, Schedule.parse("b:100% spaced:4"), None, free)
    with pytest.raises(UserError, match="blocks"):
        mean_price({"a": Price(4.0, every_step=True)}, Schedule.parse("a:100% spaced:4"), None, free)


def expected_calls_of(free: int) -> float:
    plan = make_plan(SPACED_PLANS, free)
    return float(spaced_calls(plan.u_nL, plan.given_nL < 0, Spacing(4)).max(axis=1).mean())
