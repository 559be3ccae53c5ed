"""Spaced plans in searches: what is proposed fits the budget and is the best by prediction, and scores are those of
independent runs."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from search_oracle import small_family

from relaylm.core.pairs import PairTable, default_spacing, spacing_loss
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError
from relaylm.measure.judge import load_judge, log_perplexity, score
from relaylm.measure.pairs import keep_pairs
from relaylm.measure.prices import prices
from relaylm.measure.schedule_likelihood import BoundTable, measure_table, schedule_bound
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.sampling.sample import sample
from relaylm.search.bounds import _segment_prices, predicted_bound, spaced_mixed
from relaylm.search.search import limits, search
from relaylm.search.space import SLACK, Problem
from relaylm.search.tournament import rivals_within
from relaylm.search.trials import Trials

LENGTH, SEGMENTS = 16, 3
TABLE = PairTable(
    np.array([0.1, 0.9]), np.array([1, 2, 4]), np.array([[0.3, 0.1, 0.01], [0.2, 0.05, 0.0]]), np.zeros((2, 3)), 2,
    "3b",
    "text",
)  # fmt: skip


@pytest.fixture(scope="module")
def family() -> Family:
    return small_family()


@pytest.fixture(scope="module")
def problem(family: Family) -> Problem:
    trials = Trials(family, load_judge(None, family), np.full((1, LENGTH), -1), "3b", seed=5, batch=8)
    known = prices(family, "flops", LENGTH, LENGTH)
    names = family.names
    return Problem(
        family, trials, names[0], names[-1], names, LENGTH, SEGMENTS, (), "flops", known, np.array([LENGTH]),
        pairs=TABLE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bounds(family: Family) -> BoundTable:
    rows = np.random.default_rng(0).integers(0, 27, (6, LENGTH))
    return measure_table(dict(family.models), rows, family.mask_id, draws=2)


def test_one_model_has_the_largest_spacing_that_fits(problem: Problem) -> None:
    for share in (0.2, 0.5, 0.8):
        limit = (1 - share) * problem.all_heavy
        fits = [d for d in range(1, LENGTH) if problem.price(Schedule.parse(f"3b:100% spaced:{d}")) <= limit]
        found = [c.schedule for c in rivals_within(problem, limit) if c.what.startswith("3b alone, spaced")]
        assert found == [Schedule.parse(f"3b:100% spaced:{max(fits)}")]
    assert rivals_within(problem, 1.0) == []


def test_budgets_that_only_spaced_plans_meet(problem: Problem) -> None:
    """All positions in one call of the lightest model is the least there is; without spaced plans all of its steps."""
    problem = dataclasses.replace(problem, densities=(Fraction(1),), notes=[])
    least = problem.price(Schedule.parse(f"{problem.models[0]}:100% spaced:1")) / problem.all_heavy
    met = limits(problem, [0.5, 1 - 1.01 * least, 1 - 0.99 * least], None)
    assert met == pytest.approx([0.5 * problem.all_heavy, 1.01 * least * problem.all_heavy])
    plain = dataclasses.replace(problem, pairs=None, notes=[])
    assert limits(plain, [0.5, 1 - 1.01 * least], None) == pytest.approx([0.5 * problem.all_heavy])
    assert len(plain.notes) == 1


def test_the_mixture_of_least_predicted_loss_is_found(problem: Problem, bounds: BoundTable) -> None:
    """Among all assignments of models to segments at all distances that are tried."""
    limit = 0.35 * problem.all_heavy
    found = spaced_mixed(problem, bounds, limit)
    assert found and all(problem.price(s) <= limit * (1 + 2 * SLACK) for s in found)
    tried = [
        Schedule.parse(f"cells({' '.join(models)}) spaced:{d}")
        for models in itertools.product(problem.models, repeat=SEGMENTS)
        for d in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
        if len(set(models)) > 1
    ]
    within = [s for s in tried if problem.price(s) <= limit]
    best = min(predicted_bound(problem, bounds, s).nats_N.mean() for s in within)
    assert predicted_bound(problem, bounds, found[0]).nats_N.mean() == pytest.approx(best, abs=0.02)


@pytest.mark.parametrize("distance", [1, 3, 19])
def test_segments_cost_what_their_schedules_cost(problem: Problem, distance: int) -> None:
    """Of 20 positions in 10 segments many calls begin where a segment ends, and the model may change. (Every second
    position is free in one of the rows.)"""
    free_nL = np.zeros((3, 40), dtype=bool)
    free_nL[0, :20] = free_nL[1, ::2] = free_nL[2, 10:20] = True
    problem = dataclasses.replace(problem, segments=10, free_n=free_nL)
    price_SK = _segment_prices(problem, Spacing(distance))
    for choice in np.random.default_rng(distance).integers(0, 2, (20, 10)):
        cells = " ".join(problem.models[k] for k in choice)
        schedule = Schedule.parse(f"cells({cells}) spaced:{distance}")
        assert price_SK[np.arange(10), choice].sum() == pytest.approx(problem.price(schedule), rel=1e-12)


def test_a_prediction_is_the_bound_of_single_positions_and_the_pairs(problem: Problem, bounds: BoundTable) -> None:
    spaced = predicted_bound(problem, bounds, Schedule.parse("1b:50% 3b:50% spaced:4"))
    single = schedule_bound(bounds, Schedule.parse("1b:50% 3b:50%"), float("inf"))
    np.testing.assert_allclose(spaced.nats_N - single.nats_N, LENGTH * spacing_loss(TABLE, Spacing(4), LENGTH))
    assert spaced.bits == pytest.approx(spaced.nats_N.mean() / LENGTH / np.log(2))


def test_scores_of_spaced_schedules_are_those_of_independent_runs(problem: Problem, family: Family) -> None:
    schedules = [Schedule.parse(text) for text in ("1b:40% 3b:60% spaced:4", "3b:100% spaced:4", "1b:4 3b:12")]
    trials = problem.trials
    found = trials.scores(schedules, 6)
    for schedule, log_n in zip(schedules, found, strict=True):
        alone = sample(family, schedule, 6, seed=5, batch_size=8)
        wanted = log_perplexity(score(load_judge(None, family), alone.tokens))
        np.testing.assert_allclose(log_n, wanted, rtol=1e-12)
        assert trials.needed(schedule, 0, 6) == {name: c for name, c in alone.cost.calls.items() if c}
    together = trials.expected_calls(schedules[:2])
    each = sum(trials.expected_calls([s]) for s in schedules[:2])
    assert together == pytest.approx(each)  # their first calls go to different models
    assert trials.expected_calls(schedules[1:2]) == pytest.approx(
        sum(trials.needed(schedules[1], 0, 64).values()) / 64, abs=0.3
    )


def test_a_family_keeps_its_table_and_a_search_uses_it(family: Family, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    save_family(folder, family.models, family.tokenizer, length=LENGTH, judge=family.judge)  # type: ignore[arg-type]
    assert Family.load(folder).pairs is None
    spacing = keep_pairs(folder, TABLE)
    stored = Family.load(folder)
    kept = stored.pairs
    assert kept is not None and kept.to_json() == TABLE.to_json()
    assert spacing == default_spacing(TABLE, LENGTH) and stored.meta["spacing"] == str(spacing)
    text = np.random.default_rng(0).integers(0, 27, (8, LENGTH))
    found = search(stored, budget="60%", quick=True, text=text, segments=SEGMENTS, progress=False)
    spaced = [row for row in found["bounds"] if "spaced" in row["schedule"]]
    assert {"rival"} <= {row["kind"] for row in spaced} <= {"rival", "mixed"}
    assert all(row["saved"] >= 0.6 - 1e-9 for row in spaced)


def test_a_kept_table_is_relaylms_own_file(family: Family, tmp_path: Path) -> None:
    """A family with a kept table may be replaced; saved again as it was it keeps the table; hand edits stay."""
    folder = tmp_path / "f"

    def save(length: int) -> None:
        models = family.models
        save_family(folder, models, family.tokenizer, length=length, overwrite=True)  # type: ignore[arg-type]

    save(LENGTH)
    keep_pairs(folder, TABLE)
    keep_pairs(folder, dataclasses.replace(TABLE, rows=3))
    save(LENGTH)
    assert Family.load(folder).meta["spacing"] == str(default_spacing(TABLE, LENGTH))
    save(LENGTH // 2)
    assert not (folder / "pairs.json").exists()
    manifest = folder / "family.json"
    manifest.write_text(manifest.read_text().replace('"name": "f"', '"name": "mine"'))
    keep_pairs(folder, TABLE)
    with pytest.raises(UserError, match=r"family\.json in it is not as relaylm wrote it"):
        save(LENGTH)
    assert Family.load(folder).name == "mine"


def test_blocks_do_not_price_spaced_plans(family: Family, problem: Problem) -> None:
    with pytest.raises(UserError, match="blocks"):
        counted = prices(family, "blocks", LENGTH, LENGTH)
        problem_in_blocks = Problem(
            family, problem.trials, "1b", "3b", family.names, LENGTH, SEGMENTS, (), "blocks", counted,
            np.array([LENGTH]), pairs=TABLE,
        )  # fmt: skip
        assert not problem_in_blocks.spaced
        problem_in_blocks.price(Schedule.parse("3b:100% spaced:4"))


def test_calls_are_foreseen_where_the_free_positions_are(family: Family) -> None:
    """Every fourth position free: spaced:4 takes one call, and spaced:8 as many as its plans say."""
    given = np.zeros((1, LENGTH), dtype=np.int64)
    given[0, ::4] = -1
    trials = Trials(family, None, given, "3b", seed=5)
    one, two = (Schedule.parse(f"3b:100% spaced:{distance}") for distance in (4, 8))
    assert trials.expected_calls([one]) == 1
    assert trials.expected_calls([two]) == pytest.approx(trials.needed(two, 0, 2000)["3b"] / 2000, rel=0.1)
