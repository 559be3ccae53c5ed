"""The criteria of single claims, each on both sides of the edge where its answer changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

from relaylm.studies.paper import claims
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import against, contrasts, paired

ROWS = 10_001  # so many that Student's t is nearly normal
Z = 1.96


def pairs_of(
    means: Mapping[str, float], error: float | Mapping[tuple[str, str], float] = 0.001
) -> list[dict[str, Any]]:
    """Contrasts of schedules with these means, whose differences have these standard errors."""
    found = []
    for first, second in combinations(means, 2):
        of_pair = error if isinstance(error, float) else error.get((first, second), 0.001)
        about = {"first": first, "second": second, "error": of_pair, "rows": ROWS}
        found.append({**about, "difference": means[first] - means[second]})
    return found


def schedules(means: Mapping[str, float], error: Any = 0.001) -> dict[str, Any]:
    rows = [{"schedule": name} for name in paper.SCHEDULES]
    return {"contrasts": pairs_of({name: means.get(name, 0.0) for name in paper.SCHEDULES}, error), "rows": rows}


def says(find: Any, data: Mapping[str, Any]) -> list[bool | None]:
    return [finding.says for finding in find(data)]


def test_the_search_needs_its_worst_inside_its_best_outside_and_both_apart() -> None:
    def found(value: list[float], half: float) -> list[bool | None]:
        ci = [[v - half, v + half] for v in value]
        return says(claims.middle_matters, {"search": {"influence": {"4b": value}, "influence_ci": {"4b": ci}}})

    value = [-0.4, 0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert found(value, 0.39) == [True] and found(value, 0.41) == [None]  # their intervals meet at 0
    assert found([-v for v in value], 0.1) == [False]
    assert found([0.0, 0.0, 0.0, -0.4, 0.4, *[0.0] * 5], 0.1) == [False]  # the safest lies inside, too
    assert found([-0.4, 0.4, *[0.0] * 8], 0.1) == [False]


@pytest.mark.parametrize(
    ("low", "t", "high", "answer"),
    [(0.25, 0.5, 0.75, True), (0.2, 0.3, 0.5, None), (0.2, 0.2, 0.3, None), (0.7, 0.8, 0.8, None)]
    + [(0.1, 0.2, 0.2, False), (0.8, 0.8, 0.9, False), (0.2, 0.5, 0.8, None)],
)
def test_a_peak_is_inside_or_outside_with_all_of_its_interval(
    low: float, t: float, high: float, answer: bool | None
) -> None:
    pair = {"light": "4b", "peak_t": t, "peak_t_ci": [low, high], "peak_t_relative": None, "kl": [1.0]}
    assert says(claims.middle_matters, {"disagreement": {"pairs": [pair]}}) == [answer]


def test_the_sandwich_is_set_beside_the_quarter_that_comes_nearest() -> None:
    means = {"quarter:1": 0.05, "quarter:2": 0.2, "quarter:3": 0.2, "quarter:4": 0.06, "sandwich": 0.03}
    (finding,) = claims.sandwich_best({"schedules": {"by_light": {"4b": schedules(means)}}})
    assert finding.says is True and finding.evidence.startswith("against quarter:1 -0.0200 (")


def test_an_order_is_reversed_or_kept_only_beyond_the_chance_of_ten_pairs() -> None:
    means = {name: 0.1 * k for k, name in enumerate(paper.MIXED)}

    def found(other: Mapping[str, float], error: Any = 0.001) -> bool | None:
        both = {
            "schedules": {"by_light": {"4b": schedules(means)}},
            "second-corpus": {"schedules": schedules(other, error)},
        }
        (answer,) = says(claims.same_order, both)
        return answer

    assert found(means) is True
    turned = {**means, "quarter:1": 0.1, "quarter:2": 0.0}
    ten = stats.norm.ppf(1 - 0.025 / 10)  # 2.8: of ten pairs one is 1.96 errors off by chance in half of all cases
    assert found(turned, {("quarter:1", "quarter:2"): 0.1 / (ten + 0.1)}) is False
    assert found(turned, {("quarter:1", "quarter:2"): 0.1 / (ten - 0.1)}) is True
    unclear = list(combinations(paper.MIXED, 2))
    assert found(means, dict.fromkeys(unclear[:4], 9.0)) is True
    assert found(means, dict.fromkeys(unclear[:5], 9.0)) is None  # half is not most


@pytest.mark.parametrize(
    ("shift", "half", "answer"),
    [(0.005, 0.003, True), (0.007, 0.0025, None), (-0.007, 0.0025, None), (-0.02, 0.003, False), (0.02, 0.003, False)],
)
def test_entropy_is_the_same_within_a_hundredth_of_it(shift: float, half: float, answer: bool | None) -> None:
    """The interval is that of a difference of two means with this half width, sqrt(2) times as wide."""
    result = schedules({})
    for row in result["rows"]:
        value = 1.0 + (shift if row["schedule"] == "quarter:3" else 0.001)
        value = 1.0 if row["schedule"] == "heavy" else value
        row |= {"entropy": value, "entropy_ci": [value - half, value + half]}
    (finding,) = claims.entropy_unchanged({"schedules": {"by_light": {"4b": result}}})
    assert finding.says is answer and finding.evidence.startswith(
        f"quarter:3: {shift:+.2%} ± {half * math.sqrt(2):.2%}"
    )


def test_a_trade_off_is_continuous_without_steps_down_and_without_a_cliff() -> None:
    def found(losses: list[float], error: float = 1e-6) -> claims.Finding:
        labels = [f"sandwich:{share}%" for share in range(0, 101, 10)]
        result = {"contrasts": pairs_of(dict(zip(labels, losses, strict=True)), error), "labels": labels}
        (finding,) = claims.continuous({"shares": {**result, "shares": list(range(0, 101, 10))}})
        return finding

    even = [k / 10 for k in range(11)]
    assert found(even).says is True and "steepest pays 1.0 times" in found(even).evidence
    jump = np.cumsum([0.0, 0.29, *[0.71 / 9] * 9]).tolist()
    assert found(jump).says is True and "pays 2.9 times" in found(jump).evidence
    assert found(np.cumsum([0.0, 0.31, *[0.69 / 9] * 9]).tolist()).says is False
    down = [0.0, 0.1, 0.2, 0.3, 0.28, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    ten = stats.norm.ppf(1 - 0.025 / 10)
    assert found(down, 0.02 / (ten + 0.1)).says is False and "1 of 10 steps go down" in found(down, 0.001).evidence
    assert found(down, 0.02 / (ten - 0.1)).says is True
    assert found(even, 1.0).says is None  # no gap is shown at all


def test_each_light_depth_is_set_against_the_next_and_none_against_the_heavy_one() -> None:
    rows = [{"schedule": f"s{d}", "light": f"{d}b", "depth": d} for d in (4, 6, 8, 12)]
    result = {"rows": rows[::-1], "contrasts": pairs_of({"s4": 0.03, "s6": 0.01, "s8": 0.02, "s12": 0.0})}
    found = list(claims.deeper_loses_less({"depths": result}))
    assert [(f.where, f.says) for f in found] == [("4b to 6b", True), ("6b to 8b", False)]


def test_modest_is_at_most_five_per_cent() -> None:
    edge = math.log(1.05)
    for mean, answer in ((edge - 0.003, True), (edge, None), (edge + 0.003, False)):
        result = schedules({"sandwich": mean, "light": 0.2})
        assert says(claims.modest, {"schedules": {"by_light": {"4b": result}}}) == [answer]


def test_more_steps_are_another_place_unless_they_are_those_of_bpe() -> None:
    same = {**schedules({"sandwich": 0.0}), "steps": 256}
    data = {"bpe": {"schedules": {"by_light": {"d4": same}}}}
    data |= {"precision": {"by_steps": {str(steps): {"exact": same} for steps in (256, 1024)}}}
    assert [finding.where for finding in claims.modest(data)] == ["BPE, light d4", "BPE, T = 1024"]


def test_intervals_are_students_and_bonferronis() -> None:
    pairs = [{"first": "a", "second": "b", "difference": 0.5, "error": 0.1, "rows": 5}]
    for among, quantile in ((1, 2.7764), (2, 3.4954), (4, 4.3147)):  # of Student's t with 4 degrees of freedom
        assert against(pairs, "a", "b", among) == pytest.approx(
            (0.5, 0.5 - 0.1 * quantile, 0.5 + 0.1 * quantile), abs=1e-4
        )
        assert against(pairs, "b", "a", among) == pytest.approx(
            (-0.5, -0.5 - 0.1 * quantile, -0.5 + 0.1 * quantile), abs=1e-4
        )
    found = paired(np.array([1.0, 2.0, 3.0, math.nan, math.inf]))
    assert (found["difference"], found["rows"]) == (2.0, 3) and found["error"] == pytest.approx(1 / math.sqrt(3))
    assert claims._chance(0.1 * 2.7764, 0.1, 5) == pytest.approx(0.05, abs=1e-5) and claims._chance(1.0, 0.0, 5) == 0.0


def test_the_middle_is_set_against_as_many_at_the_ends() -> None:
    """Quarters: 2 against 2; eighths: 4 against 4."""
    rng = np.random.default_rng(0)
    logs = {name: rng.normal(size=6) for name in [*paper.SCHEDULES, *(f"e{j}" for j in range(8))]}
    rows = [{"schedule": name, "kind": "asked", "log_ppls": log.tolist()} for name, log in logs.items()]
    found = contrasts({"rows": rows}, {"eighths": [f"e{j}" for j in range(8)]})
    quarters = [logs[f"quarter:{k}"].mean() for k in (1, 2, 3, 4)]
    expected = (quarters[1] + quarters[2] - quarters[0] - quarters[3]) / 2
    assert found["middle_minus_ends"]["difference"] == pytest.approx(expected)
    eighths = [logs[f"e{j}"].mean() for j in range(8)]
    expected = np.mean(eighths[2:6]) - np.mean(eighths[:2] + eighths[6:])
    assert found["eighths"]["difference"] == pytest.approx(expected)


@pytest.mark.parametrize(("outcome", "answer"), [("wins", False), ("loses", True), ("level", None)])
def test_a_rivals_outcome_is_that_of_the_comparison(outcome: str, answer: bool | None) -> None:
    item = {"schedule": "sandwich", "rival": "H9", "what": "fewer", "flops_ratio": 0.7, "p_holm": 0.2}
    item |= {"difference": 0.01, "ci": [0.005, 0.015], "outcome": outcome}
    result = {**schedules({}), "rivals": [item, {**item, "schedule": "quarter:1"}]}
    (finding,) = claims.no_rival_wins({"schedules": {"by_light": {"4b": result}}})
    assert finding.says is answer and "against the sandwich at 70% of its FLOPs" in finding.evidence
    assert ("among 2 contests p = 0.20" in finding.evidence) == (answer is None)


def test_contests_have_students_intervals() -> None:
    (finding,) = claims._contests([("here", "10b alone", 1.0, -0.1, 0.05, 5)])
    assert finding.says is None and finding.evidence.startswith("10b alone -0.1000 (-0.2388 to +0.0388)")


def test_early_steps_are_not_robust_only_beyond_the_chance_of_two_quarters() -> None:
    two = stats.norm.ppf(1 - 0.025 / 2)  # 2.24
    for factor, answer in ((two + 0.05, False), (two - 0.05, None)):
        pairs = pairs_of({"quarter:1": 0.1, "quarter:2": 0.0, "quarter:3": 0.2}, 0.1 / factor)
        assert claims.early_is_robust(pairs) is answer
