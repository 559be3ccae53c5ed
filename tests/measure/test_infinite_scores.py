"""Infinite perplexities and bounds: they are kept, compared and shown, without a NaN or a warning on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from search_oracle import VOCAB, Never, network, never, small_family

from relaylm.cli import main as cli
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.files import plain, with_infinities, write_json
from relaylm.measure import metrics
from relaylm.measure.compare import compare, render
from relaylm.measure.importance import difference as importance_difference
from relaylm.measure.judge import from_logits, score
from relaylm.measure.likelihood import bound, causal_bound, masked_sums
from relaylm.measure.plan_likelihood import continuation_bound, plan_bound
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound, step_costs
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.show.figures import plot_compare
from relaylm.studies.compose.compose import compose
from relaylm.studies.compose.view import markdown
from relaylm.studies.compose.view import render as render_compose

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
INF = math.inf


@pytest.fixture(scope="module")
def family() -> Family:
    return small_family((1, 2, 3))


# ------------------------------------------------------------------------------------------------ figures


def test_means_of_infinite_rows() -> None:
    for interval in (metrics.mean_interval, metrics.skewed_mean_interval):
        rows = np.array([[1.0, 2.0, INF, 3.0], [1.0, 2.0, 3.0, 4.0]])
        mean, low, high = interval(rows)
        assert (mean[0], low[0], high[0]) == (INF, -INF, INF)
        assert [float(x[1]) for x in (mean, low, high)] == [float(x) for x in interval(rows[1])]
    assert metrics.mean_estimate(np.array([INF, INF, INF])).ci == [None, None]
    assert metrics.ratio_estimate(np.array([3.0, INF]), np.array([2.0, 2.0])) == metrics.Estimate(INF, -INF, INF)


@pytest.mark.parametrize("power", [200, 700, 1023])
def test_means_of_huge_rows(power: int) -> None:
    """The interval of a multiple is the multiple of the interval, up to where no float64 holds it."""
    rows = np.array([0.25, 0.5, 0.75, 0.3, 0.4])
    for interval in (metrics.mean_interval, metrics.skewed_mean_interval):
        small, large = interval(rows), interval(rows * 2.0**power)
        assert [float(x) for x in large] == pytest.approx([float(x) * 2.0**power for x in small], rel=1e-12)
    top = metrics.mean_estimate(np.array([1.7e308, 1.7e308, 1e300]))
    assert top.value == pytest.approx(3.4 / 3 * 1e308) and top.high == INF


def test_perplexity_of_rows_that_cannot_be() -> None:
    count = np.array([2, 2, 0, 2])
    out = metrics.perplexity(np.array([4.0, INF, 0.0, 6.0]), count)
    assert out["gen_ppl"] == out["corpus_ppl"] == out["log_ppl"] == INF and out["unscored"] == 1
    assert out["gen_ppl_ci"] == out["corpus_ppl_ci"] == out["log_ppl_ci"] == [None, None]
    far = metrics.perplexity(np.array([4000.0, 4002.0, 0.0, 4000.0]), count)  # e^2000 is no float64
    assert far["gen_ppl"] == far["corpus_ppl"] == INF and far["log_ppl"] == pytest.approx(12002 / 6)
    assert None not in far["log_ppl_ci"]


def test_differences_of_infinite_rows() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(2, 0.3, 50)
    other = base + rng.normal(0.1, 0.1, 50)
    plainly = metrics.paired_difference(other[5:], base[5:])
    mine, its = other.copy(), base.copy()
    mine[:5] = its[:5] = INF
    assert metrics.paired_difference(mine, its) == plainly  # two infinities have no difference
    its[:5] = base[:5]
    worse = metrics.paired_difference(mine, its)
    assert worse["difference"] == INF and worse["p"] == 2 / 2**5 and not worse["differs"] and worse["rows"] == 50
    assert worse["ci"] == worse["bootstrap_ci"] == [None, None] and worse["samples_needed"] is None
    mine[5] = INF
    worse, better = metrics.paired_difference(mine, its), metrics.paired_difference(its, mine)
    assert worse["p"] == better["p"] == 2 / 2**6 and worse["differs"] and better["difference"] == -INF
    its[6:12] = INF  # six rows each, and others: the finite rows decide
    assert metrics.paired_difference(mine, its) == metrics.paired_difference(other[12:], base[12:])
    nothing = metrics.paired_difference(np.full(4, INF), np.full(4, INF))
    assert (nothing["difference"], nothing["p"], nothing["rows"], nothing["differs"]) == (0.0, 1.0, 0, False)
    json.dumps(nothing, allow_nan=False)
    with pytest.raises(UserError, match="cannot be compared"):
        metrics.paired_difference(np.array([math.nan, INF]), np.array([INF, math.nan]))


def test_ranks_of_infinite_rows() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(2, 0.3, 100)
    rows = np.stack([base + 1, base, base + 0.5, base + 2])
    rows[1, :50] = rows[2, :50] = INF
    places = metrics.ranks(rows)
    assert [place["rank"] for place in places] == [1, 3, 4, 2]
    assert all(place["rank_ci"] == [place["rank"]] * 2 for place in places)
    rows[:, 0] = math.nan
    assert [place["rank"] for place in metrics.ranks(rows)] == [1, 3, 4, 2]
    assert [place["rank"] for place in metrics.ranks(np.full((3, 5), INF))] == [1, 1, 1]
    order = sorted(range(4), key=lambda s: metrics.standing(rows[s]))
    assert order == [0, 3, 1, 2]
    assert metrics.standing(np.full(3, INF)) > metrics.standing(np.array([INF, 9.0, 9.0]))


def test_equal_numbers_of_infinite_rows_are_ranked_by_rows_that_are_finite_under_all() -> None:
    """Each has one infinite row; where both are finite the second is better, and its other row is left out."""
    rows = np.stack([np.full(40, 3.0), np.full(40, 2.0)])
    rows[0, 0], rows[1, 0], rows[1, 1] = INF, 1000.0, INF
    assert [place["rank"] for place in metrics.ranks(rows)] == [2, 1]


def test_differences_by_time() -> None:
    x, y = np.array([[INF, INF, 1.0, math.nan]]), np.array([[INF, 2.0, INF, 1.0]])
    assert np.array_equal(importance_difference(x, y), [[math.nan, INF, -INF, math.nan]], equal_nan=True)


# ------------------------------------------------------------------------------------------------ JSON


def test_infinity_in_json(tmp_path: Path) -> None:
    value = {"a": [1.5, INF, {"b": -INF}], "c": "text", "d": None, "e": np.float64(INF)}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)
    assert plain(value)["a"] == [1.5, "inf", {"b": "-inf"}] and plain([math.nan]) == [None]
    assert with_infinities(plain(value)) == value
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
    assert "Infinity" not in text and with_infinities(json.loads(text)) == value


# ------------------------------------------------------------------------------------------------ commands


def test_compare_keeps_what_is_infinite(family: Family, tmp_path: Path) -> None:
    options: dict[str, Any] = {"n": 12, "steps": 8, "judge": never(10), "progress": False}
    asked = ["heavy", "sandwich", "2b"]
    first = compare(family, asked, store=tmp_path / "s", **options)
    again = compare(family, asked, store=tmp_path / "s", **options)
    for other in (again, compare(family, asked, **options)):
        assert [row["log_ppls"] for row in other["rows"]] == [row["log_ppls"] for row in first["rows"]]
        assert other["paired"] == first["paired"] and other["samples_needed"] == first["samples_needed"]
    assert any(INF in row["log_ppls"] for row in first["rows"]) and any(row["gen_ppl"] == INF for row in first["rows"])
    for row in first["rows"]:
        found = np.array(row["log_ppls"])
        assert row["log_ppl"] == found.mean() or row["log_ppl"] == pytest.approx(found.mean())
    text = render(first, 200) + first["verdict"] + json.dumps(plain(first), allow_nan=False)
    assert "nan" not in text.lower() and "infinite perplexity" in text
    plot_compare(first, tmp_path / "compare.png")


@pytest.mark.parametrize("symbols", [(), tuple(range(27))])
def test_compare_where_all_or_nothing_can_be(family: Family, tmp_path: Path, symbols: tuple[int, ...]) -> None:
    if symbols:
        symbols = symbols[:-1]  # all symbols but one
    out = compare(family, ["sandwich", "heavy"], n=4, steps=4, judge=never(*symbols), store=tmp_path, progress=False)
    assert {row["gen_ppl"] == INF for row in out["rows"]} == {bool(symbols)}
    if symbols:
        assert {item["difference"] for item in out["paired"]} == {0.0} and {row["rank"] for row in out["rows"]} == {1}
        assert all(row["gap_paid"] is None for row in out["rows"])
        assert "level" in {item["outcome"] for item in out["rivals"]}
    assert "nan" not in render(out, 200)


def test_compose_keeps_what_is_infinite(family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (["ancestral", "low-confidence"], (2, 8), ["heavy", "light"], 8)
    options: dict[str, Any] = {"judge": never(10), "progress": False, "store": tmp_path / "s"}
    out = compose(family, *asked, **options)
    assert any(row["gen_ppl"] == INF for row in out["rows"])
    assert compose(family, *asked, **options)["rows"] == out["rows"]
    shown = render_compose(out) + markdown(out) + out["answer"]
    assert "nan" not in shown
    write_json(tmp_path / "out.json", out)
    words = ["compose", "--recorded", str(tmp_path / "out.json"), "--plot", str(tmp_path / "c.png"), "--json", "-"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == plain(out)["rows"]


def test_a_judge_without_numbers_is_refused(family: Family) -> None:
    class Spoilt(Never):
        def logits(self, tokens: torch.Tensor, t: Any) -> torch.Tensor:
            return super().logits(tokens, t).masked_fill((tokens == tokens[0, 0])[..., None], math.nan)

    spoilt = from_logits(Spoilt(), "spoilt")
    with pytest.raises(UserError, match="the judge spoilt gave a score that is not a number"):
        score(spoilt, np.zeros((2, 5), dtype=np.int64))
    with pytest.raises(UserError, match="the judge spoilt gave a score that is not a number"):
        compare(family, ["heavy"], n=2, steps=2, judge=spoilt, progress=False)


# ------------------------------------------------------------------------------------------------ bounds


class Denoiser(Never):
    """A denoiser of the same kind; NaN on request."""

    mask_id, vocab_size, time_conditioning = VOCAB - 1, VOCAB, False

    def __init__(self, *symbols: int, spoilt: bool = False) -> None:
        super().__init__(*symbols)
        self.spoilt = spoilt

    def logits(self, tokens: torch.Tensor, t: Any) -> torch.Tensor:
        return super().logits(tokens, t) * (math.nan if self.spoilt else 1.0)

    def logits_at(self, tokens: torch.Tensor, t: Any, places: torch.Tensor) -> torch.Tensor:
        return self.logits(places, t)


ROWS = np.random.default_rng(0).integers(0, 9, (6, 8))
MASK = VOCAB - 1


def both(*symbols: int, spoilt: bool = False) -> dict[str, Any]:
    return {"a": Denoiser(*symbols, spoilt=spoilt), "b": Denoiser()}


@pytest.mark.parametrize("text", ["a:100%", "a:50% b:50%", "b:50% a:50%"])
@pytest.mark.parametrize("steps", [4, INF])
def test_infinite_bounds_of_schedules(text: str, steps: float) -> None:
    schedule = Schedule.parse(text)
    for found in (
        schedule_bound(measure_table(both(*range(9)), ROWS, MASK), schedule, steps),
        plan_bound(both(*range(9)), schedule, ROWS, MASK, steps=steps),
    ):
        assert (found.bits, found.low, found.high) == (INF, -INF, INF) and not np.isnan(found.nats_N).any()
        assert str(found).startswith("infinitely many bits") and "nan" not in str(found)
        assert json.dumps(plain(found.to_json()), allow_nan=False)
        assert found.to_json()["perplexity"] == INF and found.to_json()["ci"] == [None, None]


def test_a_model_that_is_not_asked_may_know_nothing() -> None:
    table = measure_table(both(*range(9)), ROWS, MASK)
    expected = math.log2(VOCAB - 1)
    assert schedule_bound(table, Schedule.parse("b:100%"), 4).bits == pytest.approx(expected)
    cost_KT = step_costs(table, [1.0, 0.5, 0.0])
    assert (cost_KT[0] == INF).all() and cost_KT[1].sum() / 8 == pytest.approx(math.log(VOCAB - 1))


def test_infinite_bounds_of_models() -> None:
    for found in (bound(Denoiser(3), ROWS, mask_id=MASK), causal_bound(Never(3), ROWS)):
        assert (found.bits, found.low, found.high) == (INF, -INF, INF)
        assert str(found).startswith("infinitely many bits") and json.dumps(plain(found.to_json()), allow_nan=False)
    one = bound(Denoiser(), ROWS[:1], mask_id=MASK)
    assert "inf" not in str(one) and one.bits == pytest.approx(math.log2(VOCAB - 1))


def test_infinite_bounds_of_continuations() -> None:
    free = np.ones(ROWS.shape, dtype=bool)
    free[:, :4] = False
    rows = ROWS.copy()
    rows[0] = 20  # which the model can write
    found = continuation_bound({"a": Denoiser(*range(9))}, Schedule.parse("a:100%"), rows, free, MASK, steps=8)
    assert found.nats_N[0] == pytest.approx(4 * math.log(VOCAB - 10)) and (found.nats_N[1:] == INF).all()
    assert math.isfinite(found.error_N[0]) and np.isnan(found.error_N[1:]).all()


def test_bounds_that_are_not_numbers_are_refused() -> None:
    spoilt, everything = both(spoilt=True), np.ones(ROWS.shape, dtype=bool)
    for attempt in (
        lambda: bound(spoilt["a"], ROWS, mask_id=MASK),
        lambda: masked_sums(spoilt, [], ROWS, everything, np.ones(6), MASK),
        lambda: plan_bound(spoilt, Schedule.parse("a:100%"), ROWS, MASK, steps=4),
        lambda: measure_table(spoilt, ROWS, MASK),
    ):
        with pytest.raises(UserError, match="a model gave logits that are not finite"):
            attempt()


def test_the_command_says_that_a_bound_is_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(1, 1)
    model.output_layer.linear.bias.data[4] = -torch.inf
    save_family(tmp_path / "odd", {"1b": model, "2b": network(2, 2)}, Text8Tokenizer(), length=16)
    (tmp_path / "text.txt").write_text("the history of the world " * 40)
    for more in ([], ["--schedule", "light"], ["--schedule", "L50% H50%"], ["--schedule", "light spaced:4"]):
        words = ["bound", "--family", str(tmp_path / "odd"), "--text", str(tmp_path / "text.txt"), "--rows", "8"]
        assert cli.main([*words, *more]) == 0
        shown = capsys.readouterr().out
        assert "infinitely many bits per symbol: a token of the text has no probability" in shown and "nan" not in shown
        assert cli.main([*words, *more, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["bounds"]
        assert next(entry["bits"] for entry in found.values()) == "inf"
