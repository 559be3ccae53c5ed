"""Choices among candidates with given scores: what is dropped, preferred, reported, and shown to be within a loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
from search_oracle import oracle_problem

from relaylm.core.schedule import Schedule
from relaylm.search.space import Problem
from relaylm.search.tournament import ALPHA, FIRST_ROUND, RACE_ROUNDS, Candidate, all_heavy, confirmed, ladder, race

MIXED, OTHER, FEWER = (Schedule.parse(text) for text in ("4b:20 12b:20", "12b:20 4b:20", "12b:26"))


def spread(p: float, rows: int) -> np.ndarray:
    """Differences of rows whose paired t-test has this one-sided p-value: of mean 1."""
    noise = np.resize([1.0, -1.0], rows)
    t = scipy.stats.t.ppf(1 - p, rows - 1)
    return 1 + noise * math.sqrt(rows) / t / noise.std(ddof=1)


class OneRound:
    """Rows that are enough for the first round of a race, with scores by schedule."""

    left = math.inf

    def __init__(self, scores: dict[Schedule, np.ndarray]) -> None:
        self.scores, self.given = scores, 0

    def affordable(self, schedules: Sequence[Schedule], calls: float) -> int:
        return FIRST_ROUND - self.given

    def take(self, schedules: Sequence[Schedule], n: int, what: str) -> np.ndarray:
        rows = slice(self.given, self.given + n)
        self.given += n
        return np.stack([self.scores[schedule][rows] for schedule in schedules])


@pytest.mark.parametrize(("share", "drops"), [(0.97, True), (1.03, False)])
@pytest.mark.parametrize("runners", [2, 5])
def test_a_race_drops_at_the_level_of_all_its_tests(runners: int, share: float, drops: bool) -> None:
    """One-sided, at 0.05 / (others x rounds): a runner just beyond that against the leader goes, one just short of it
    stays."""
    level = ALPHA / ((runners - 1) * RACE_ROUNDS)
    worse = spread(share * level, FIRST_ROUND)
    schedules = [Schedule.parse(f"12b:{10 + k}") for k in range(runners)]
    scores = {schedule: np.zeros(FIRST_ROUND) if k == 0 else worse for k, schedule in enumerate(schedules)}
    heavy = Schedule.parse("12b:40")
    rows: Any = OneRound({**scores, heavy: np.zeros(FIRST_ROUND)})
    found = race(rows, [Candidate(schedule, "", "mixed") for schedule in schedules], heavy, 0.0)
    assert found.alive == ([0] if drops else list(range(runners))) and found.rounds == 1
    assert len(found.dropped) == (runners - 1 if drops else 0)


def candidates(problem: Problem) -> list[Candidate]:
    """Two mixed schedules and a single model that cost about as much, and all-heavy."""
    mixed = [Candidate(schedule, "mixed", "mixed") for schedule in (MIXED, OTHER)]
    return [*mixed, Candidate(FEWER, "12b alone", "rival"), all_heavy(problem)]


@pytest.mark.parametrize(
    ("rival", "other", "chosen"),
    [
        (-0.1, 1.0, FEWER),  # no worse, and simpler
        (0.1, 1.0, MIXED),  # worse, however little
        (0.1, -1.0, MIXED),  # another mixed one that is better, which may be chance
        (0.1, -50.0, OTHER),  # and is not chance
        (-0.1, -50.0, OTHER),  # better than the simpler one, too
    ],
)
def test_the_first_is_recommended_unless_another_is_better_or_simpler(
    rival: float, other: float, chosen: Schedule
) -> None:
    problem = oracle_problem()
    noise = np.random.default_rng(0).normal(size=(4, 40))
    noise -= noise.mean(axis=1, keepdims=True)
    log_Sn = 3 + 0.1 * (noise + np.array([0.0, other / 10, rival / 10, -9.0])[:, None])
    found = confirmed(problem, candidates(problem), log_Sn, problem.price(FEWER) * 1.001)
    assert found["schedule"] == str(chosen)
    assert [row["schedule"] for row in found["confirmed"] if not row["within_budget"]] == ["12b:40"]
    assert found["verdict"].startswith("NOT SIGNIFICANT") == (chosen == MIXED)


def test_a_front_chooses_on_one_half_and_reports_the_other() -> None:
    problem = oracle_problem()
    heavy, one, two, single = np.zeros(40), *(np.repeat(halves, 20) for halves in ([0.1, 0.5], [0.3, 0.2], [0.2, 0.4]))
    mixed, other, fewer, _ = candidates(problem)
    runners = [all_heavy(problem), mixed, dataclasses.replace(other, what="in another way"), fewer]
    noise = 0.01 * np.random.default_rng(1).normal(size=(4, 40))
    limits = [problem.price(FEWER) * 1.001, problem.price(FEWER) * 1.0005]
    found = ladder(problem, runners, np.stack([heavy, one, two, single]) + noise, limits, None)
    for goal in found["front"]:
        assert goal["schedule"] == str(MIXED) and goal["rows"] == 20
        assert goal["against_heavy"]["difference"] == pytest.approx(0.5, abs=0.02)
        assert goal["best_rival"]["against"]["difference"] == pytest.approx(0.1, abs=0.02)
    assert " at 2 of 2 " in found["verdict"] and " at 0 " in found["verdict"]  # chosen, but shown to be worse


@pytest.mark.parametrize(("slack", "chosen"), [(1.001, MIXED), (0.999, FEWER)])
def test_an_allowed_loss_is_shown_for_all_candidates_together(slack: float, chosen: Schedule) -> None:
    """The upper end of a one-sided interval at 0.05 over the number of the others: written out here."""
    problem = oracle_problem()
    rng, n = np.random.default_rng(2), 20
    loss = 0.1 + 0.05 * rng.normal(size=n)
    log_Sn = np.stack([np.zeros(n), loss, np.full(n, 0.0), np.full(n, 9.0)])
    most = loss.mean() + scipy.stats.t.ppf(1 - ALPHA / 3, n - 1) * loss.std(ddof=1) / math.sqrt(n)
    mixed, other, fewer, heavy = candidates(problem)
    found = ladder(problem, [heavy, mixed, fewer, other], log_Sn, [], slack * most)
    assert problem.price(MIXED) < problem.price(FEWER) and found["schedule"] == str(chosen)
    at_most = {row["schedule"]: row["loss_at_most"] for row in found["confirmed"]}
    assert at_most["4b:20 12b:20"] == pytest.approx(most) and at_most["12b:40"] == at_most["12b:26"] == 0
