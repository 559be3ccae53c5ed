"""Curves of disagreement: known answers, and the identity that gives them their meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import State, TableDenoiser, _subsets, _write, law_of_steps, masked_share

from relaylm.core.schedule import Schedule, Timetable
from relaylm.errors import UserError
from relaylm.measure.importance import _means, importance, path_kl, render, second_seeds
from relaylm.measure.likelihood import masked_sums
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family

LENGTH, SYMBOLS = 3, 3
START = (SYMBOLS,) * LENGTH
HEAVY, LIGHT = TableDenoiser(1), TableDenoiser(2)


def network(depth: int, seed: int, vocab: int = 9) -> Transformer:
    model = Transformer(Architecture(vocab, 16, width=16, depth=depth, heads=2))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed + 1))
    return model


def family(twin: bool = True) -> Family:
    made = Family({"1b": network(1, 0), "2b": network(2, 1), "3b": network(3, 2)}, 8, 9, 16)
    made.twins = {"3b": network(3, 5)} if twin else {}
    return made


def text(n: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 8, n)


# ------------------------------------------------------------------------------------------------ known answers


def test_measure_by_hand() -> None:
    """Losses and divergences from the tables, position by position; a row with nothing masked adds nothing."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SYMBOLS, (40, LENGTH))
    masked = rng.random((40, LENGTH)) < 0.5
    models = {"l": LIGHT, "h": HEAVY}
    found = masked_sums(models, [("l", "h"), ("h", "l")], tokens, masked, np.full(40, 0.5), SYMBOLS, batch_size=7)
    assert (found.count_N == masked.sum(axis=1)).all() and (found.count_N == 0).any()
    for r in range(40):
        state = tuple(int(x) for x in np.where(masked[r], SYMBOLS, tokens[r]))
        p, q = HEAVY(state, 0.5), LIGHT(state, 0.5)
        at = np.flatnonzero(masked[r])
        assert found.nll_KN[1, r] == pytest.approx(-np.log(p[at, tokens[r, at]]).sum(), abs=1e-12)
        assert found.nll_KN[0, r] == pytest.approx(-np.log(q[at, tokens[r, at]]).sum(), abs=1e-12)
        assert found.kl_PN[0, r] == pytest.approx((p[at] * np.log(p[at] / q[at])).sum(), abs=1e-12)
        assert found.kl_PN[1, r] == pytest.approx((q[at] * np.log(q[at] / p[at])).sum(), abs=1e-12)


def test_pieces_of_the_vocabulary_head_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"1b": network(1, 0, 33), "2b": network(2, 1, 33)}
    tokens = np.random.default_rng(0).integers(0, 32, (10, 16))
    masked = np.random.default_rng(1).random((10, 16)) < 0.4
    whole = masked_sums(models, [("1b", "2b")], tokens, masked, np.full(10, 0.4), 32)
    seen = []
    for model in models.values():
        head = model.head

        def spy(x: torch.Tensor, t: torch.Tensor, head: Callable[..., torch.Tensor] = head) -> torch.Tensor:
            seen.append(len(x))
            return head(x, t)

        monkeypatch.setattr(model, "head", spy)
        # 4 million cells on a CPU: make the vocabulary look so large that three positions fill them.
        monkeypatch.setattr(model, "vocab_size", 2**22 // 6)
    pieces = masked_sums(models, [("1b", "2b")], tokens, masked, np.full(10, 0.4), 32)
    assert max(seen) == 3 and len(seen) > 20
    assert pieces.kl_PN == pytest.approx(whole.kl_PN, abs=1e-6)
    assert pieces.nll_KN == pytest.approx(whole.nll_KN, abs=1e-5)


def test_curves_in_full() -> None:
    made = family()
    out = importance(made, text(), timesteps=[0.02, 0.3, 1.0], sequences=50, progress=False)
    json.dumps(out, allow_nan=False)
    assert [(pair["light"], pair["heavy"]) for pair in out["pairs"]] == [("1b", "3b"), ("2b", "3b")]
    pair = out["pairs"][0]
    needed = "light heavy states n t loss_light loss_heavy abs_loss_diff kl kl_ci kl_relative peak_t"
    assert set(needed.split()) <= set(pair)
    assert pair["t"] == [0.02, 0.3, 1.0] and pair["n"] == 50
    assert pair["rows"][0] < 50 and pair["rows"][0] + pair["rows_without_mask"][0] == 50
    assert pair["rows"][2] == 50 and pair["masked"][2] == 16
    for k in range(3):
        low, high = pair["kl_ci"][k]
        assert low <= pair["kl"][k] <= high
        assert pair["kl_relative"][k] == pytest.approx(pair["kl"][k] - pair["kl_base"][k])
        relative = pair["abs_loss_diff"][k] - pair["abs_loss_diff_base"][k]
        assert pair["abs_loss_diff_relative"][k] == pytest.approx(relative)
        assert pair["loss_diff"][k] == pytest.approx(pair["loss_light"][k] - pair["loss_heavy"][k])
        assert pair["abs_loss_diff"][k] >= abs(pair["loss_diff"][k])
    # At t = 1 every row is the same: no spread, and the mean over rows is the row's.
    assert pair["kl_ci"][2] == pytest.approx([pair["kl"][2]] * 2, rel=1e-6)
    assert pair["peak_t"] == pair["t"][int(np.argmax(pair["kl"]))]
    low, high = pair["peak_t_ci"]
    assert low <= high and {low, high} <= set(pair["t"])
    assert "peak of the KL" in render(out)


@pytest.mark.parametrize("twin", [True, False])
def test_figures(tmp_path: Path, twin: bool) -> None:
    pytest.importorskip("matplotlib")
    from relaylm.show.figures import plot_importance

    out = importance(family(twin), text(), timesteps=[0.02, 0.5, 1.0], sequences=10, progress=False)
    assert plot_importance(out, tmp_path / "curves.svg").stat().st_size > 10_000


def test_a_model_against_itself_and_its_twin() -> None:
    made = family()
    made.models["2b"] = made.twins["3b"]  # a "light" model that is the heavy one's twin
    out = importance(made, text(), pairs=[("2b", "3b"), ("3b", "3b")], timesteps=4, sequences=20, progress=False)
    twin, same = out["pairs"]
    assert twin["kl_relative"] == pytest.approx([0] * 4, abs=1e-9)
    assert twin["abs_loss_diff_relative"] == pytest.approx([0] * 4, abs=1e-9)
    assert same["kl"] == pytest.approx([0] * 4, abs=1e-9)
    assert same["abs_loss_diff"] == [0] * 4


def test_a_twin_of_the_light_model_stands_beside_the_curve() -> None:
    """Its KL is that of the pair it makes with the light model, and nothing is taken off."""
    made, other = family(twin=False), Family({"1b": network(1, 7)}, 8, 9, 16)
    options: dict[str, Any] = {"timesteps": 4, "sequences": 20, "progress": False}
    out = importance(made, text(), pairs=[("1b", "3b")], twins=second_seeds(made, other), **options)
    made.models["2b"] = other.models["1b"]
    by_hand = importance(made, text(), pairs=[("2b", "1b")], **options)
    (pair,), (seeds,) = out["pairs"], by_hand["pairs"]
    assert pair["kl_light_base"] == pytest.approx(seeds["kl"]) and min(seeds["kl"]) > 0
    assert pair["abs_loss_diff_light_base"] == pytest.approx(seeds["abs_loss_diff"])
    assert pair["kl_relative"] is None and "two seeds of 1b" in render(out)
    with pytest.raises(UserError, match="none of 1b, 2b, 3b"):
        second_seeds(made, Family({"4b": network(1, 7)}, 8, 9, 16))


def test_without_a_twin_there_is_nothing_relative() -> None:
    out = importance(family(twin=False), text(), pairs="all", timesteps=2, sequences=8, progress=False)
    assert len(out["pairs"]) == 3
    assert out["pairs"][0]["kl_relative"] is None and out["pairs"][0]["peak_t_relative"] is None
    assert render(out)


def test_rows_and_runs_of_text() -> None:
    rows = text(1600).reshape(100, 16)
    a = importance(family(), rows, timesteps=2, sequences=10, progress=False)
    assert a["sequences"] == 10
    with pytest.raises(UserError, match="held-out text"):
        importance(family(), timesteps=2)
    with pytest.raises(UserError, match="rows of at least 16"):
        importance(family(), rows[:, :8], timesteps=2)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"states": "dreams"}, "states"),
        ({"timesteps": 0}, "timesteps"),
        ({"timesteps": [0.0, 0.5]}, "times"),
        ({"pairs": "some"}, "pairs"),
        ({"pairs": [("1b", "9b")]}, "9b"),
        ({"sequences": 1}, "sequences"),
        ({"sequences": 0}, "sequences"),
        ({"length": 0}, "length"),
        ({"length": 17}, "length"),
    ],
)
def test_messages(options: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        importance(family(), text(), progress=False, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ trajectories


def paths(times: Sequence[float], model_of: Callable[[int], TableDenoiser]) -> dict[tuple[State, ...], float]:
    """Every path from the masked row to a text, and its probability."""
    found = {(START,): 1.0}
    for k, (t, s) in enumerate(pairwise(times)):
        hazard = 1 - masked_share("linear", s) / masked_share("linear", t)
        longer: dict[tuple[State, ...], float] = {}
        for path, weight in found.items():
            state = path[-1]
            masked = [j for j, token in enumerate(state) if token == SYMBOLS]
            p_LV = model_of(k)(state, t)
            for due, chance in _subsets(masked, hazard):
                for new, p in _write(state, SYMBOLS, due, p_LV).items():
                    longer[(*path, new)] = weight * chance * p
        found = {path: weight for path, weight in longer.items() if weight > 0}
    return found


def exact_curve(times: Sequence[float]) -> dict[str, object]:
    """E over the heavy model's own states of the summed masked KL, at each step, by `measure` on every state."""
    law = paths(times, lambda k: HEAVY)
    kl_sum = []
    for k, t in enumerate(times[:-1]):
        weights: dict[State, float] = {}
        for path, weight in law.items():
            weights[path[k]] = weights.get(path[k], 0.0) + weight
        states = np.array(list(weights))
        found = masked_sums(
            {"l": LIGHT, "h": HEAVY},
            [("l", "h")],
            np.where(states == SYMBOLS, 0, states),
            states == SYMBOLS,
            np.full(len(states), t),
            SYMBOLS,
        )
        kl_sum.append(float(found.kl_PN[0] @ np.array(list(weights.values()))))
    return {"light": "l", "heavy": "h", "t": list(times[:-1])[::-1], "kl_sum": kl_sum[::-1]}


@pytest.mark.parametrize("schedule", ["h:2 l:1", "l:1 h:2", "h:1 l:1 h:1", "l:3", "l:1@20% h:1@50% l:1@30%"])
def test_path_kl_identity(schedule: str) -> None:
    """The sum over steps of unmask probability times masked KL on heavy trajectories is the divergence of the paths, by
    enumeration of every path; and the final samples cannot differ by more."""
    table = Schedule.parse(schedule).timetable()
    models = {"l": LIGHT, "h": HEAVY}
    heavy = paths(table.times, lambda k: HEAVY)
    mixed = paths(table.times, lambda k: models[table.models[k]])
    divergence = sum(p * math.log(p / mixed[path]) for path, p in heavy.items())
    assert path_kl(exact_curve(table.times), table) == pytest.approx(divergence, rel=1e-12)

    final = law_of_steps(START, table.times, lambda k, state: HEAVY, SYMBOLS)
    other = law_of_steps(START, table.times, lambda k, state: models[table.models[k]], SYMBOLS)
    samples = sum(p * math.log(p / other[x]) for x, p in final.items() if p > 0)
    assert 0 < samples <= divergence + 1e-12


def test_trajectories_estimate_the_exact_curve() -> None:
    made = Family({"l": LIGHT, "h": HEAVY}, SYMBOLS, SYMBOLS + 1, LENGTH, light="l", heavy="h")  # type: ignore[dict-item]
    out = importance(
        made, pairs=[("l", "h")], states="trajectory", timesteps=4, steps=4, sequences=3000, progress=False
    )
    exact = exact_curve((1.0, 0.75, 0.5, 0.25, 0.0))
    pair = out["pairs"][0]
    assert pair["t"] == exact["t"] and out["steps"] == 4
    assert pair["kl_sum"] == pytest.approx(exact["kl_sum"], rel=0.06)
    table = Schedule.parse("l:2 h:2").timetable()
    assert path_kl(pair, table) == pytest.approx(path_kl(exact, table), rel=0.05)


def test_trajectory_times_move_to_the_grid() -> None:
    out = importance(family(), states="trajectory", timesteps=[0.01, 0.26, 1.0], steps=8, sequences=4, progress=False)
    assert out["pairs"][0]["t"] == [0.125, 0.25, 1.0]
    assert out["pairs"][0]["masked"][2] == 16


def test_path_kl_refuses_other_models() -> None:
    curve = {"light": "a", "heavy": "b", "t": [1.0], "kl_sum": [1.0]}
    with pytest.raises(UserError, match="but the schedule has"):
        path_kl(curve, Timetable(("a", "c"), (1.0, 0.5, 0.0)))


def test_intervals_of_what_cannot_be_negative_do_not_go_below_zero() -> None:
    few = np.array([[0.001, 0.002, 0.9, 0.001]])
    found = _means("kl", few, skewed=True)
    assert found["kl_ci"][0][0] == 0.0 < found["kl"][0]
    assert _means("loss_diff", few)["loss_diff_ci"][0][0] < 0
