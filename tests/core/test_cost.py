"""Mean prices against plans counted call by call, and budgets as text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaylm.core.cost import UNITS, Budget, Cost, Price, call_flops, mean_price, parse_budget
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule, Spacing
from relaylm.core.spacing import spaced_calls
from relaylm.errors import UserError


def brute_force(prices: dict[str, Price], schedule: Schedule, steps: int, free: int, rng: np.random.Generator) -> float:
    """The mean over many plans, counted call by call."""
    table, total, rows = schedule.timetable(steps), 0.0, 4000
    times = np.asarray(table.times)
    for _ in range(rows):
        step_F = np.searchsorted(-times, -rng.random(free), side="right") - 1  # from the masked end
        for step, count in zip(*np.unique(step_F, return_counts=True), strict=True):
            price = prices[table.models[step]]
            total += price.base + price.slope * count
    return total / rows


@pytest.mark.parametrize("text", ["a:50% b:50%", "a:2@50% b:6@50%", "b:100%"])
@pytest.mark.parametrize(("steps", "free"), [(8, 16), (8, 1), (8, 5)])
def test_mean_price_is_the_mean_over_plans(text: str, steps: int, free: int) -> None:
    known = {"a": Price(3.0, 0.5), "b": Price(10.0, 2.0)}
    schedule = Schedule.parse(text)
    counted = brute_force(known, schedule, steps, free, np.random.default_rng(0))
    assert mean_price(known, schedule, steps, np.array([free])) == pytest.approx(counted, rel=0.02)
    assert mean_price(known, schedule.timetable(steps), None, np.array([free])) == pytest.approx(
        mean_price(known, schedule, steps, np.array([free]))
    )


def test_a_share_at_the_end_of_a_segment_belongs_to_the_next() -> None:
    """One position at a time, ten of them: a makes the calls at shares 1, ..., 0.6 and b those at 0.5, ..., 0.1."""
    prices = {"a": Price(10.0, 1.0), "b": Price(1000.0, 3.0)}
    for text, price in (("a:50% b:50%", 5 * 11 + 5 * 1003), ("a:30% b:70%", 3 * 11 + 7 * 1003), ("cells(b a)", 5070)):
        assert mean_price(prices, Schedule.parse(f"{text} spaced:10"), None, np.array([10])) == pytest.approx(price)


def test_spaced_plans_are_priced_where_the_free_positions_are() -> None:
    """Every fourth of 29 positions: with spaced:4 all 8 are in one call, and with spaced:9 those 8 away or more; 8 next
    to each other take as many calls as 8 alone. Counted with other plans than those of the price."""
    prices, every = {"a": Price(10.0, 1.0)}, np.zeros(40, dtype=bool)
    every[3:32:4] = True

    def price(spacing: int, free: np.ndarray) -> float:
        return mean_price(prices, Schedule.parse(f"a:100% spaced:{spacing}"), None, free)

    assert price(4, every[None]) == 10 + 8
    plan = make_plan(4000, 40, 1, np.where(every, -1, 0))
    calls = spaced_calls(plan.u_nL, plan.given_nL < 0, Spacing(9)).max(axis=1)
    assert price(9, every[None]) == pytest.approx(10 * calls.mean() + 8, rel=0.03)
    together = np.arange(40) // 8 == 2
    assert price(5, together[None]) == price(5, np.array([8]))
    both = np.stack([every, together, together])
    assert price(5, both) == pytest.approx((price(5, every[None]) + 2 * price(5, np.array([8]))) / 3)
    assert mean_price(prices, Schedule.parse("a:100%"), 4, both) == mean_price(
        prices, Schedule.parse("a:100%"), 4, np.array([8])
    )


def test_operations_of_a_call_by_hand() -> None:
    """Depth 2, width 8, MLP ratio 4, length 4, vocabulary 10, one position: a full block 4 * 2 * 12 * 64 + 4 * 16 * 8,
    of the last keys and values 2 * 4 * 2 * 64, the rest 2 * 10 * 64, attention 4 * 4 * 8, and the head 2 * 8 * 10."""
    full = 6144 + 512
    assert call_flops(2, 8, 10, 4, 1) == full + 1024 + 1280 + 128 + 160
    assert call_flops(2, 8, 10, 4, 3) == full + 1024 + 3 * (1280 + 128 + 160)
    assert call_flops(2, 8, 10, 4) == 2 * full + 4 * 160
    assert call_flops(1, 8, 10, 4, 1, mlp_ratio=2) == 1024 + 2 * 6 * 64 + 128 + 160


def test_rows_with_other_prompts_are_averaged() -> None:
    known = {"a": Price(3.0, 0.5)}
    one, two = (mean_price(known, Schedule.parse("a:100%"), 4, np.array([f])) for f in (2, 9))
    assert mean_price(known, Schedule.parse("a:100%"), 4, np.array([2, 9, 9])) == pytest.approx((one + 2 * two) / 3)
    endless = mean_price(known, Schedule.parse("a:100%"), math.inf, np.array([2, 4]))
    assert endless == pytest.approx(3 * 3.5)  # every position has a call of its own


def test_cost_json_has_what_is_known() -> None:
    assert not {"milliseconds", "joules"} & set(Cost().to_json())
    assert Cost(milliseconds=3.0).to_json()["milliseconds"] == 3.0 and "joules" not in Cost(milliseconds=3.0).to_json()


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("25%", Budget(0.25, "flops", share=True)),
        ("0.25", Budget(0.25, "flops", share=True)),
        ("0", Budget(0.0, "flops", share=True)),
        ("12.5% ms", Budget(0.125, "ms", share=True)),
        ("ms:12.5%", Budget(0.125, "ms", share=True)),
        ("3.1e12 flops", Budget(3.1e12, "flops")),
        ("3.1E+12FLOPs", Budget(3.1e12, "flops")),
        (" 40ms ", Budget(40.0, "ms")),
        ("12J", Budget(12.0, "J")),
        ("0.5 joules", Budget(0.5, "J")),
        ("blocks:1536", Budget(1536.0, "blocks")),
        ("1536 blocks", Budget(1536.0, "blocks")),
    ],
)
def test_budgets_as_text(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("40 parsecs", "'parsecs' in the budget '40 parsecs' is no unit of cost: choose flops, blocks, ms, J"),
        ("s:3", "no unit"),
        ("25", "not a share from 0 to 1"),
        ("120%", "not a share from 0 to 1"),
        ("-5%", "not a share"),
        ("-5ms", "above 0"),
        ("0 flops", "above 0"),
        ("1e999 flops", "above 0"),
        ("", "no budget"),
        ("ms", "no budget"),
        ("1.2.3ms", "no budget"),
        ("ms:4ms", "no budget"),
        ("nan", "no budget"),
        ("25%%", "no budget"),
    ],
)
def test_what_is_no_budget(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_budget(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@given(st.floats(1e-6, 1e18), st.sampled_from(UNITS))
def test_an_amount_is_kept_to_the_last_digit(amount: float, unit: str) -> None:
    for text in (f"{amount!r}{unit}", f"{amount!r} {unit.upper()}", f"{unit}:{amount!r}"):
        assert parse_budget(text) == Budget(amount, unit)


def test_what_a_budget_leaves() -> None:
    assert parse_budget("25%").limit(80.0) == 60.0
    assert parse_budget("40ms").limit(80.0) == 40.0
    assert str(parse_budget("25% ms")) == "25% saved in ms" and str(parse_budget("40ms")) == "40 ms a row"


@pytest.mark.parametrize("text", ["1" + " " * 20_000 + "!", "3" * 20_000 + "!", "a" * 20_000 + ":", " " * 10**6])
def test_long_input_is_refused_at_once(text: str) -> None:
    """A pattern that tries every way to share out blanks or digits would take hours over these."""
    with pytest.raises(UserError, match="is no budget"):
        parse_budget(text)


def test_blanks_in_a_budget_do_not_matter() -> None:
    assert parse_budget("  ms :  25  %  ") == parse_budget("ms:25%")
    assert parse_budget(" 40 \t ms ") == parse_budget("40ms")
