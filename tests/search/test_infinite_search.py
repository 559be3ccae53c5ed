"""Searches by a judge that rules out what some schedules write: a choice, without a NaN or a warning on the way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from search_oracle import VOCAB, network, never, small_family

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.files import plain
from relaylm.models.family import Family
from relaylm.search.search import search
from relaylm.search.tournament import by_standing, difference, more_is_no_worse
from relaylm.show.search import plot_search, render, to_csv

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
INF = math.inf


@pytest.fixture(scope="module")
def family() -> Family:
    return small_family((1, 3))


ASKED: dict[str, dict[str, Any]] = {
    "exhaustive": {"segments": 3, "light_segments": 1, "n": 8, "confirm": 8},
    "evolve": {"segments": 2, "budget": "25%", "n": 6, "confirm": 6},
    "tune": {"segments": 2, "budget": "25%", "rows": 120, "confirm": 8},
}
FRONTS: dict[str, dict[str, Any]] = {
    "front": {"segments": 2, "budget": [0.2, 0.4], "rows": 120},
    "loss": {"segments": 2, "max_loss": "50%", "rows": 120},
}


@pytest.mark.parametrize("symbols", [(10,), tuple(range(26))])
@pytest.mark.parametrize("name", [*ASKED, *FRONTS])
def test_a_choice_where_perplexity_is_infinite(
    family: Family, tmp_path: Path, name: str, symbols: tuple[int, ...]
) -> None:
    asked: dict[str, Any] = {**{**ASKED, **FRONTS}[name], "densities": [1], "judge": never(*symbols), "steps": 4}
    method = name if name in ASKED else "tune"
    if len(symbols) > 1 and method == "tune":  # all rows of all schedules
        with pytest.raises(UserError, match="too few rows have a finite perplexity to learn from"):
            search(family, method, **asked, progress=False)
        return
    out = search(family, method, **asked, store=tmp_path / "s", progress=False)
    again = search(family, method, **asked, store=tmp_path / "s", progress=False)
    assert again["schedule"] == out["schedule"] and again["calls"]["calls_made_in_this_run"] == 0
    assert again["confirmed"] == out["confirmed"]
    assert any(row["log_ppl"] == INF for row in out["confirmed"])
    shown = render(out, 200) + to_csv(out) + out["verdict"] + json.dumps(plain(out), allow_nan=False)
    assert "nan" not in shown
    plot_search(out, tmp_path / "found.png")


def test_an_infinite_bound_is_no_prior(family: Family) -> None:
    model = network(1, 1)
    model.output_layer.linear.bias.data[4] = -torch.inf
    odd = Family({"1b": model, "3b": network(3, 3)}, VOCAB - 1, VOCAB, 16, family.tokenizer, "odd")
    odd.judge = family.judge
    text = np.random.default_rng(0).integers(0, 26, (8, 16))
    asked: dict[str, Any] = {"budget": "25%", "segments": 2, "densities": [1], "text": text, "progress": False}
    out = search(odd, "tune", rows=120, confirm=8, steps=4, **asked)
    assert any("the likelihood bound is infinite" in note for note in out["notes"]) and out["confirmed"]
    with pytest.raises(UserError, match="the likelihood bound is infinite"):
        search(odd, "tune", quick=True, **asked)


def test_the_order_of_infinite_means() -> None:
    log_Sn = np.array([[1.0, INF, INF], [9.0, 9.0, 9.0], [2.0, 5.0, INF], [1.0, 5.0, INF]])
    assert by_standing(log_Sn) == [1, 3, 2, 0]
    price, mean = np.array([4.0, 3.0, 2.0, 1.0]), np.array([2.0, INF, 1.0, 3.0])
    assert more_is_no_worse(["a"] * 4, price, mean).tolist() == [1.5, INF, 1.5, 3.0]
    assert difference({"difference": INF, "ci": [None, None]}) == "+inf"


def test_the_schedule_that_can_be_is_chosen(family: Family) -> None:
    """Of two, one writes nothing but what the judge rules out."""
    model = network(1, 1)
    model.output_layer.linear.bias.data[:] = 0
    model.output_layer.linear.bias.data[4] = 1e4  # always the same symbol
    other = network(3, 3)
    other.output_layer.linear.bias.data[4] = -1e4
    odd = Family({"1b": model, "3b": other}, VOCAB - 1, VOCAB, 16, family.tokenizer, "odd")
    asked: dict[str, Any] = {"densities": [1], "segments": 2, "judge": never(4), "steps": 4, "progress": False}
    out = search(odd, "evolve", budget="25%", n=6, confirm=12, **asked)
    assert Schedule.parse(out["schedule"]).models == ("3b",) and "nan" not in out["verdict"]
    row = next(row for row in out["confirmed"] if row["schedule"] == out["schedule"])
    assert math.isfinite(row["log_ppl"]) and row["against_heavy"]["difference"] == pytest.approx(0, abs=1e-6)
