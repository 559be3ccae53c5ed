"""Schedules side by side: the rivals are there, the costs are the calls' own, and nothing is computed twice."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relaylm.core.cost import mean_price
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import evaluate as module
from relaylm.measure.compare import compare, comparisons, relate, render, verdict
from relaylm.measure.evaluate import row_costs
from relaylm.measure.judge import features, from_logits, load_judge, score
from relaylm.measure.metrics import holm
from relaylm.measure.prices import prices
from relaylm.measure.rivals import contenders, expected_flops, steps_within
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.sample import sample

VOCAB, LENGTH = 28, 16
ROW = "schedule gen_ppl gen_ppl_ci corpus_ppl entropy bound gap_paid blocks_saved flops_saved calls seconds"


def network(depth: int, seed: int, causal: bool = False) -> Transformer:
    model = Transformer(Architecture(VOCAB, LENGTH, width=16, depth=depth, heads=2, causal=causal))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed + 100))
    return model


def make_family() -> Family:
    family = Family({f"{d}b": network(d, d) for d in (4, 10, 12)}, VOCAB - 1, VOCAB, LENGTH, Text8Tokenizer(), "toy")
    family.judge = network(2, 50, causal=True)
    return family


@pytest.fixture(scope="module")
def family() -> Family:
    return make_family()


@pytest.fixture(scope="module")
def result(family: Family) -> dict[str, Any]:
    return compare(family, ["sandwich", "heavy", "L4 H12"], n=12, progress=False)


# ------------------------------------------------------------------------------------------------ what comes back


def test_what_comes_back(result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    rows = result["rows"]
    assert all(set(ROW.split()) <= set(row) for row in rows)
    assert [row["schedule"] for row in rows[:4]] == ["sandwich", "heavy", "L4 H12", "light"]
    assert [row["kind"] for row in rows[:4]] == ["asked", "asked", "asked", "anchor"]
    assert result["steps"] == 16 and result["judge"] == "own"
    for row in rows:
        assert len(row["log_ppls"]) == 12
        ppl = np.exp(row["log_ppls"])
        assert row["gen_ppl"] == pytest.approx(ppl.mean())
        assert row["gen_ppl_ci"][0] <= row["gen_ppl"] <= row["gen_ppl_ci"][1]
        assert row["unscored"] == 0 and row["seconds"] > 0
        assert row["rank_ci"][0] <= row["rank"] <= row["rank_ci"][1]
        assert 0 < row["entropy"] <= math.log(LENGTH)
        assert {"word_entropy", "distinct_4", "repetition_4"} <= set(row)


def test_paired_differences_are_to_the_first_row(result: dict[str, Any]) -> None:
    rows = {row["schedule"]: np.array(row["log_ppls"]) for row in result["rows"]}
    assert len(result["paired"]) == len(rows) - 1
    for item in result["paired"]:
        assert item["reference"] == "sandwich"
        assert item["difference"] == pytest.approx((rows[item["schedule"]] - rows["sandwich"]).mean())
        assert item["ci"][0] <= item["difference"] <= item["ci"][1]
    assert [item["p_holm"] for item in result["paired"]] == holm([item["p"] for item in result["paired"]])


def test_gap_paid(result: dict[str, Any]) -> None:
    rows = {row["schedule"]: row for row in result["rows"]}
    heavy, light = rows["heavy"]["gen_ppl"], rows["light"]["gen_ppl"]
    if light > heavy:
        assert rows["heavy"]["gap_paid"] == 0 and rows["light"]["gap_paid"] == 1
        assert rows["sandwich"]["gap_paid"] == pytest.approx((rows["sandwich"]["gen_ppl"] - heavy) / (light - heavy))
    else:
        assert all(row["gap_paid"] is None for row in rows.values())


def related(family: Family, mean: dict[str, float], spread: float, steps: int = 16) -> dict[str, dict[str, Any]]:
    """The rows of a sandwich, the heavy and the light model whose 400 perplexities have these means, each with an error
    of its own, and whose costs are 3, 4 and 1; the reference costs 8."""
    entries = contenders(family, ["sandwich"], steps, np.full((1, LENGTH), -1), "4b", "12b", False)
    noise = np.random.default_rng(0).normal(0, spread, (3, 400))
    noise -= noise.mean(axis=1, keepdims=True)
    ppl_Sn = np.array([[mean[entry.label]] for entry in entries]) + noise
    rows = [{"schedule": e.label, "gen_ppl": mean[e.label], "flops": 2.0 + mean[e.label]} for e in entries]
    for row, flops in zip(rows, (3.0, 4.0, 1.0), strict=True):
        row["flops"] = flops
    relate(rows, np.log(ppl_Sn), family, entries, "4b", "12b", {"flops": 8.0}, LENGTH)
    return {str(row["schedule"]): row for row in rows}


def test_gap_paid_by_hand(family: Family) -> None:
    """From 10 to 20 the sandwich at 12.5 pays a quarter, give or take 1.6% by the errors of three means. Where the gap
    may be chance it has no interval, and where light is no worse there is no gap."""
    clear = related(family, {"sandwich": 12.5, "heavy": 10.0, "light": 20.0}, 5 / math.sqrt(20))
    assert [clear[name]["gap_paid"] for name in ("sandwich", "heavy", "light")] == pytest.approx([0.25, 0.0, 1.0])
    low, high = clear["sandwich"]["gap_paid_ci"]
    assert 0.23 < low + 0.01 < 0.25 < high - 0.01 < 0.28
    doubtful = related(family, {"sandwich": 12.5, "heavy": 10.0, "light": 10.05}, 2.0)
    assert doubtful["light"]["gap_paid"] == 1 and doubtful["light"]["gap_paid_ci"] == [None, None]
    none = related(family, {"sandwich": 12.5, "heavy": 10.0, "light": 9.0}, 0.1)
    assert all(row["gap_paid"] is None and row["gap_paid_ci"] is None for row in none.values())


def test_savings_are_against_as_many_steps_as_positions(family: Family) -> None:
    mean = {"sandwich": 12.5, "heavy": 10.0, "light": 20.0}
    full, few = (related(family, mean, 0.1, steps) for steps in (LENGTH, 8))
    assert full["sandwich"]["flops_saved"] == 1 - 3 / 4  # the row of the heavy model itself
    assert few["sandwich"]["flops_saved"] == 1 - 3 / 8 and few["heavy"]["flops_saved"] == 1 - 4 / 8


def test_savings(result: dict[str, Any]) -> None:
    rows = {row["schedule"]: row for row in result["rows"]}
    assert rows["heavy"]["flops_saved"] == rows["heavy"]["blocks_saved"] == 0
    assert rows["sandwich"]["blocks_saved"] == pytest.approx(1 / 6)
    assert rows["10b"]["blocks_saved"] == pytest.approx(1 / 6)
    assert rows["10b"]["flops_saved"] == pytest.approx(rows["sandwich"]["flops_saved"], abs=0.05)
    fewer = next(row for row in result["rows"] if row["rival"] == "heavy in fewer steps")
    assert 0 < fewer["flops_saved"] < 1 and fewer["steps"] < 16
    assert fewer["blocks_saved"] == pytest.approx(1 - fewer["steps"] / 16)


def test_all_rivals_are_there(result: dict[str, Any]) -> None:
    rivals = {row["rival"]: row for row in result["rows"] if row["kind"] == "rival"}
    assert set(rivals) == {
        "one model of middle depth",
        "heavy in fewer steps",
        "heavy, spaced",
        "light steps spread evenly",
        "light steps placed at random",
    }
    # Both mixed schedules have 4 light steps of 16, so they share their rivals.
    assert all(row["rival_of"] == ["sandwich", "L4 H12"] for row in rivals.values())
    assert len(result["rivals"]) == 10
    assert rivals["heavy, spaced"]["flops"] < 1.05 * result["rows"][0]["flops"]
    for name in ("light steps spread evenly", "light steps placed at random"):
        table = Schedule.parse(rivals[name]["models"]).timetable(16)
        assert table.models.count("4b") == 4


def test_the_middle_model_is_the_dearest_that_costs_no_more() -> None:
    """40% light steps of 4 and 12 blocks cost as much as 8.8 blocks: 8 may stand against them, 10 and 6 may not."""
    models = {f"{d}b": network(d, d) for d in (4, 6, 8, 10, 12)}
    family = Family(models, VOCAB - 1, VOCAB, LENGTH)  # type: ignore[arg-type]
    family.judge = network(1, 50, causal=True)
    out = compare(family, ["sandwich:40%"], n=2, progress=False)
    found = [row["schedule"] for row in out["rows"] if row["rival"] == "one model of middle depth"]
    assert found == ["8b"]


def test_what_was_asked_for_may_be_a_rival(family: Family) -> None:
    out = compare(family, ["sandwich", "10b"], n=3, progress=False)
    assert out["rows"][1]["kind"] == "asked" and out["rows"][1]["rival_of"] == ["sandwich"]
    assert len(out["rivals"]) == 5 and all(item["what"] for item in out["rivals"])


def test_rivals_can_be_left_out(family: Family) -> None:
    out = compare(family, ["sandwich"], n=3, rivals=False, progress=False)
    assert [row["schedule"] for row in out["rows"]] == ["sandwich", "heavy", "light"]
    assert "left out" in out["verdict"]
    alone = compare(family, ["10b"], n=3, progress=False)
    assert "No mixed schedule" in alone["verdict"]


def test_the_first_line_names_the_winner() -> None:
    """From made-up log-perplexities: a rival that is better, level, or worse."""
    rng = np.random.default_rng(0)
    base = rng.normal(2, 0.2, 200)

    def line(shift: float) -> str:
        logs = np.stack([base, base + shift + rng.normal(0, 0.05, 200)])
        rows = [
            {"schedule": name, "kind": kind, "rival": what, "rival_of": of, "flops": flops, "entropy": 3.0}
            for flops, name, kind, what, of in (
                (2e9, "mix", "asked", None, []),
                (1e9, "10b", "rival", "one model", ["mix"]),
            )
        ]
        return verdict({"rows": rows, **comparisons(rows, logs)})

    assert line(-0.1).startswith("AN EQUAL-COMPUTE RIVAL WINS against mix. 10b (one model) against mix: -0.1")
    assert "50.0% of its FLOPs" in line(-0.1)
    assert "cannot be told apart" in line(0.0)
    assert line(0.1).startswith("Every equal-compute rival loses")


def test_a_win_must_stand_the_number_of_contests() -> None:
    """A rival whose lead has p of about 0.03 wins alone, and not among ten of which nine are level."""
    rng = np.random.default_rng(1)
    base, n = rng.normal(2, 0.2, 200), 200
    noise = rng.normal(0, 0.05, (10, n))
    noise -= noise.mean(axis=1, keepdims=True)
    noise[0] -= 2.2 * noise[0].std(ddof=1) / np.sqrt(n)

    def contests(rivals: int) -> list[dict[str, Any]]:
        names = [("mix", "asked", None, []), *((f"r{k}", "rival", "a rival", ["mix"]) for k in range(rivals))]
        rows = [
            {"schedule": name, "kind": kind, "rival": what, "rival_of": of, "flops": 1e9, "entropy": 3.0}
            for name, kind, what, of in names
        ]
        return comparisons(rows, np.stack([base, *(base + noise[k] for k in range(rivals))]))["rivals"]

    assert 0.02 < contests(1)[0]["p"] < 0.04 and contests(1)[0]["outcome"] == "wins"
    assert [item["outcome"] for item in contests(10)] == ["level"] * 10


def test_render(result: dict[str, Any]) -> None:
    text = render(result, 200)
    lines = text.split("\n")
    assert lines[0] == result["verdict"]
    assert sum(line.startswith("≈") for line in lines) == 5
    assert "entropy" in lines[2] and "gen ppl" in lines[2]


@pytest.mark.parametrize("width", [70, 80, 100, 120, 200])
def test_the_table_fits_the_terminal(result: dict[str, Any], width: int) -> None:
    lines = render(result, width).split("\n")
    assert max(len(line) for line in lines) <= width
    rows = [line for line in lines if line[:1] in "≈·" or line.startswith("  ")]
    assert sum(line.startswith("≈") for line in lines) == 5 and len(rows) >= len(result["rows"])
    start = lines.index("") + 1  # after the verdict
    heading = lines[start] + lines[start + 1]
    assert all(word in heading for word in ("schedule", "gen ppl", "entropy", "log-ppl diff", "FLOPs"))
    told = re.search(r"left out at this width: (.*) \(--json", " ".join(lines))
    left_out = told.group(1).split(", ") if told else []
    assert (left_out or width >= 120) and not (left_out and width == 200)
    assert ("corpus" in heading) == ("corpus" not in left_out)
    assert {"calls/row", "s"} <= set(left_out) or width >= 100


def test_the_terminals_own_width(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert render(result) == render(result, 80) != render(result, 120)


# ------------------------------------------------------------------------------------------------ cost


def test_measured_time_of_each_row(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = compare(family, ["sandwich", "heavy"], n=6, timing=True, progress=False, batch_size=2)
    for row in out["rows"]:
        schedule = Schedule.parse(row["models"])
        known = prices(family, "ms", steps=row["steps"], models=schedule.models, batch_size=2)  # from the table
        assert row["milliseconds"] == pytest.approx(6 * mean_price(known, schedule, row["steps"], np.array([LENGTH])))
    sandwich, heavy = out["rows"][:2]
    assert sandwich["ms_saved"] == pytest.approx(1 - sandwich["milliseconds"] / heavy["milliseconds"])
    assert sandwich["joules"] is None and "ms/row" in render(out, 200) and "J/row" not in render(out, 200)
    json.dumps(out, allow_nan=False)


@pytest.mark.parametrize("steps", [5, 16, 100, math.inf])
@pytest.mark.parametrize("schedule", ["L25% H75%", "L25% 10b:50% H25%"])
def test_row_costs_are_the_samplers_own(family: Family, schedule: str, steps: float) -> None:
    given = np.full((7, LENGTH), -1)
    for r in range(7):
        given[r, :r] = 1
    samples = sample(family, schedule, 7, steps=steps, seed=3, given=given)
    drawn = row_costs(samples, family)
    assert drawn.by_row
    costs = drawn.costs(family.names)
    assert costs["calls_by_model"] == {k: c for k, c in samples.cost.calls.items() if c}
    assert costs["flops"] == pytest.approx(samples.cost.flops) and costs["seconds"] == pytest.approx(
        samples.cost.seconds
    )


@pytest.mark.parametrize("steps", [4, 16, 60, math.inf])
def test_expected_flops(family: Family, steps: float) -> None:
    schedule = Schedule.parse("4b:25% 12b:75%")
    samples = sample(family, schedule, 400, steps=steps, seed=1)
    flops = row_costs(samples, family).costs(family.names)["flops"]
    expected = expected_flops(family.models, schedule, steps, np.full(400, LENGTH), LENGTH)
    assert expected == pytest.approx(flops / 400, rel=0.02)


def test_steps_within_a_budget(family: Family) -> None:
    free = np.full(1, LENGTH)

    def cost(steps: int) -> float:
        return expected_flops(family.models, Schedule.parse("12b"), steps, free, LENGTH)

    for steps in (1, 2, 13, 50):
        assert steps_within(cost, cost(steps) * (1 + 1e-9)) == steps
        assert steps_within(cost, cost(steps) * 0.999) in (steps - 1, None)
    assert steps_within(float, 20.5, 0, 13) == 13 and steps_within(float, 7.5, 0, 13) == 7
    assert steps_within(float, 0.5, 0) == 0 and steps_within(float, 0.5) is None


def test_the_spaced_rival_of_gaps_spends_what_it_may(family: Family) -> None:
    """Of every second position the schedule makes 4 calls of the light model or the heavy one. The heavy model's spaced
    plan has the largest distance within that by its own calls, which are fewer than those of positions side by side."""
    given = np.zeros((1, LENGTH), dtype=np.int64)
    given[0, ::2] = -1
    entries = contenders(family, ["L2 H6"], None, given, "4b", "12b", True)
    (rival,) = (entry.schedule for entry in entries if entry.rival == "heavy, spaced")
    assert rival.spacing is not None
    asked = sample(family, entries[0].schedule, 400, given=given[0], seed=1).cost.flops or 0.0

    def flops(distance: int) -> float:
        spaced = f"12b:100% spaced:{distance}"
        return sample(family, spaced, 400, given=given[0], seed=1).cost.flops or 0.0

    assert flops(rival.spacing.distance) < 1.02 * asked < 1.04 * flops(rival.spacing.distance + 1)


# ------------------------------------------------------------------------------------------------ conditions


def test_prompts(family: Family) -> None:
    out = compare(family, ["sandwich"], n=5, prompts=["the ", "history of "], rivals=False, progress=False)
    assert out["conditional"]
    assert {"gen_ppl_everything", "corpus_ppl_everything"} <= set(out["rows"][0])
    given = np.full((1, LENGTH), -1)
    given[0, :4] = family.tokenizer.encode("the ")  # type: ignore[union-attr]
    ids = compare(family, ["sandwich"], n=5, prompts=given, rivals=False, progress=False)
    text = compare(family, ["sandwich"], n=5, prompts=["the "], rivals=False, progress=False)
    assert ids["rows"][0]["log_ppls"] == text["rows"][0]["log_ppls"]


def test_an_infinite_perplexity_is_shown_and_ends_nothing(family: Family) -> None:
    class Never:
        """A judge that gives one symbol no probability: some rows of each schedule have it."""

        def logits(self, tokens: torch.Tensor, t: Any) -> torch.Tensor:
            logits = torch.zeros(*tokens.shape, VOCAB)
            logits[..., 10] = -torch.inf
            return logits

    judge = from_logits(Never(), "never", device=torch.device("cpu"))
    out = compare(family, ["heavy", "sandwich"], n=8, steps=8, judge=judge, rivals=False, progress=False)
    assert any(row["gen_ppl"] == math.inf for row in out["rows"]) and "inf" in render(out)


def test_infinitely_many_steps(family: Family) -> None:
    out = compare(family, ["sandwich", "heavy"], n=4, steps=math.inf, progress=False)
    assert out["steps"] == "inf" and out["rows"][0]["blocks_saved"] is None
    assert out["rows"][0]["calls"] == 4 * LENGTH
    assert {row["rival"] for row in out["rows"]} >= {"one model of middle depth", "heavy in fewer steps"}


def test_common_random_numbers(family: Family) -> None:
    """A schedule against itself under two names differs nowhere; equal schedules are one row."""
    out = compare(family, ["L4 H12", "L25% H75%", "H16"], n=4, rivals=False, progress=False)
    assert [row["schedule"] for row in out["rows"]] == ["L4 H12", "H16", "light"]
    again = compare(family, ["H16"], n=8, rivals=False, progress=False, batch_size=3)
    assert again["rows"][0]["log_ppls"][:4] == pytest.approx(out["rows"][1]["log_ppls"], rel=1e-4)


def test_bounds_in_the_table(family: Family) -> None:
    text = np.random.default_rng(0).integers(0, 27, (10, LENGTH))
    out = compare(family, ["sandwich"], n=3, rivals=False, bound=True, text=text, progress=False)
    assert all(row["bound"]["bits"] > 0 for row in out["rows"])
    assert "bound" in render(out)
    with pytest.raises(UserError, match="held-out text"):
        compare(family, ["sandwich"], n=3, bound=True, progress=False)


def test_mauve_against_held_out_rows(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Human text is read once, each schedule's samples once; the package gets the judge's states of both."""
    human = np.random.default_rng(0).integers(0, 27, (5, LENGTH))
    seen = []

    def compute_mauve(p_features: np.ndarray, q_features: np.ndarray, verbose: bool) -> SimpleNamespace:
        seen.append((p_features, q_features))
        return SimpleNamespace(mauve=len(seen) / 10)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    out = compare(family, ["sandwich"], n=3, rivals=False, mauve=human, progress=False)
    assert [row["mauve"] for row in out["rows"]] == [0.1, 0.2, 0.3] and "MAUVE" in render(out)
    judge = load_judge(None, family)
    samples = sample(family, "sandwich", 3)
    assert np.array_equal(seen[0][0], features(judge, human))
    assert seen[0][1] == pytest.approx(features(judge, samples.tokens), abs=1e-5)

    monkeypatch.setitem(sys.modules, "mauve", None)  # not installed: said before anything is sampled
    monkeypatch.setattr(module, "sample", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(UserError, match="mauve"):
        compare(family, ["sandwich"], n=3, rivals=False, mauve=human, progress=False)


def test_messages(family: Family) -> None:
    for schedules, n, word in (([], 4, "nothing to compare"), (["heavy"], 1, "at least 2"), (["9b"], 4, "9b")):
        with pytest.raises(UserError, match=word):
            compare(family, schedules, n, progress=False)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"prompts": "the "}, "a list of texts"),
        ({"text": np.zeros(64, dtype=int)}, "rows of 1 to 16"),
        ({"text": np.zeros((2, 17), dtype=int)}, "rows of 1 to 16"),
        ({"text": np.zeros((2, 16))}, "not float64"),
        ({"text": np.full((2, 16), -1)}, "from 0 to 27"),
        ({"mauve": np.full((2, 16), 28)}, "from 0 to 27"),
    ],
)
def test_what_is_no_text_is_refused_before_anything_runs(
    family: Family, options: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "sample", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(UserError, match=word):
        compare(family, ["heavy"], 4, bound=True, progress=False, **options)


# ------------------------------------------------------------------------------------------------ the store


class Counting:
    """`sample` and `score` of the module, with a list of the rows that each was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sampled: list[tuple[int, int]] = []
        self.scored: list[int] = []
        patch.setattr(module, "sample", self.sample)
        patch.setattr(module, "score", self.score)

    def sample(self, *arguments: Any, **options: Any) -> Any:
        self.sampled.append((options["first_row"], arguments[2]))
        return sample(*arguments, **options)

    def score(self, *arguments: Any, **options: Any) -> Any:
        self.scored.append(len(arguments[1]))
        return score(*arguments, **options)

    def take(self) -> tuple[list[tuple[int, int]], list[int]]:
        seen, self.sampled, self.scored = (self.sampled, self.scored), [], []
        return seen


@pytest.mark.parametrize("prompts", [None, ["a ", "of ", "the "]])
def test_nothing_is_computed_twice(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[str] | None
) -> None:
    counting = Counting(monkeypatch)

    def run(n: int, batch_size: int = 2, **options: Any) -> dict[str, Any]:
        return compare(
            family,
            ["sandwich", "10b"],  # and light and heavy: four rows
            n,
            rivals=False,
            store=tmp_path,
            prompts=prompts,
            batch_size=batch_size,
            progress=False,
            **options,
        )

    first = run(6)
    assert counting.take() == ([(0, 6)] * 4, [6] * 4)
    assert run(6) == first
    assert counting.take() == ([], [])
    more = run(9)
    assert counting.take() == ([(6, 3)] * 4, [3] * 4)
    assert more["rows"][0]["log_ppls"][:6] == first["rows"][0]["log_ppls"]
    assert more["rows"][0]["calls"] > first["rows"][0]["calls"]
    fewer = run(4)
    # Where every row has the same beginning, four of six rows are those of a run of four.
    assert counting.take() == (([], []) if prompts is None else ([(0, 4)] * 4, [4] * 4))
    assert fewer["rows"][0]["log_ppls"] == pytest.approx(first["rows"][0]["log_ppls"][:4], rel=1e-5)
    run(6, seed=1)
    assert counting.take() == ([(0, 6)] * 4, [6] * 4)  # another seed, another result
    run(6, batch_size=3)
    assert counting.take()[0] == [(0, 6)] * 4  # another call shape: other bits, perhaps
    run(6, batch_size=1, any_device=True)
    assert counting.take() == ([], [])
    run(6, judge=network(1, 70, causal=True))
    assert counting.take() == ([], [6] * 4)  # a second judge reads the same samples
    run(6, fresh=True)
    assert counting.take() == ([(0, 6)] * 4, [6] * 4)
    prompts = ["b "]  # other prompts, another result
    run(6)
    assert counting.take() == ([(0, 6)] * 4, [6] * 4)


def test_with_and_without_a_store(family: Family, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n": 5, "progress": False, "rivals": False}
    stored = compare(family, ["sandwich"], store=tmp_path, **options)
    plain = compare(family, ["sandwich"], **options)
    assert [row["log_ppls"] for row in stored["rows"]] == [row["log_ppls"] for row in plain["rows"]]
    assert [row["flops"] for row in stored["rows"]] == [row["flops"] for row in plain["rows"]]


def test_damage_is_passed_on(family: Family, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n": 3, "progress": False, "rivals": False, "store": tmp_path}
    first = compare(family, ["sandwich"], **options)
    connection = sqlite3.connect(tmp_path / "store.sqlite")
    connection.execute("UPDATE records SET body = replace(body, '1', '2') WHERE number = 1")
    connection.commit()
    again = compare(family, ["sandwich"], **options)
    assert "record 1" in again["store_notes"][0] and "note: " in render(again)
    assert again["rows"][0]["log_ppls"] == first["rows"][0]["log_ppls"]


def test_other_weights_are_another_family(tmp_path: Path) -> None:
    options: dict[str, Any] = {"n": 3, "progress": False, "rivals": False, "store": tmp_path}
    family = make_family()
    first = compare(family, ["heavy"], **options)
    family.models["12b"].output_layer.linear.bias.data += (
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 5
    )  # type: ignore[attr-defined]
    assert compare(family, ["heavy"], **options)["rows"][0]["log_ppls"] != first["rows"][0]["log_ppls"]


def test_figures(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from relaylm.show.figures import plot_compare

    assert plot_compare(result, tmp_path / "compare.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="cannot"):
        plot_compare(result, tmp_path / "compare.png" / "in-a-file.png")


def test_a_judge_without_a_name_cannot_be_stored(family: Family, tmp_path: Path) -> None:
    class Uniform:
        def logits(self, tokens_BL: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*tokens_BL.shape, VOCAB)

    out = compare(family, ["heavy"], n=3, judge=Uniform(), rivals=False, progress=False)
    assert out["rows"][0]["gen_ppl"] == pytest.approx(VOCAB)
    with pytest.raises(UserError, match="cannot be stored"):
        compare(family, ["heavy"], n=3, judge=Uniform(), store=tmp_path, progress=False)
