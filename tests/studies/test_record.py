"""What the recorded studies take out of searches and comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from search_oracle import small_family

from relaylm.core.schedule import Schedule
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound
from relaylm.search.search import search
from relaylm.studies.paper import numbers as paper
from relaylm.studies.record.judges import agreement, kendall_tau
from relaylm.studies.record.lengths import KINDS, SAVED, picked
from relaylm.studies.record.texts import kinds, shuffled


def test_what_saving_costs_by_length() -> None:
    """The three kinds that are compared come out of a quick search."""
    family = small_family()
    text = np.random.default_rng(3).integers(0, 27, (6, 16))
    found = picked(search(family, budget=SAVED, quick=True, text=text, segments=4, progress=False))
    assert found.keys() == KINDS.keys() and all(row["saved"] >= SAVED for row in found.values())
    table = measure_table(family.models, text, family.mask_id, draws=8)
    heavy = schedule_bound(table, Schedule.parse("3b:16")).nats_N
    for row in found.values():
        nats_N = schedule_bound(table, Schedule.parse(row["schedule"])).nats_N
        assert row["loss"] == pytest.approx(float((nats_N - heavy).mean()) / 16, abs=1e-9)


def test_agreement_of_two_judges() -> None:
    """Judges that agree on every schedule but two, which they put in opposite orders; one row has no score."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, (2, 7, 40))
    shift = {"own": [0, 1, 2, 3, 4, 5, 6], "other": [1, 0, 2, 3, 4, 5, 6]}

    def table(name: str, noise_Sn: np.ndarray) -> dict[str, Any]:
        logs = [(s + noise_n).tolist() for s, noise_n in zip(shift[name], noise_Sn, strict=True)]
        logs[2][5] = None if name == "other" else logs[2][5]
        rows = [{"log_ppls": log, "gen_ppl": 1.0, "entropy": 2.0} for log in logs]
        return {"judge": name, "rows": rows}

    found = agreement({name: table(name, noise_Sn) for name, noise_Sn in zip(shift, noise, strict=True)})
    assert found["rows_scored_by_both"] == 39 and found["only_one_tells_apart"] == []
    assert [(pair["first"], pair["second"]) for pair in found["differ"]] == [paper.SCHEDULES[:2]]
    assert found["kendall_tau"]["value"] == pytest.approx(19 / 21)  # 21 pairs, one reversed
    assert [row["schedule"] for row in found["schedules"]] == list(paper.SCHEDULES)


def test_kendall_tau() -> None:
    rng = np.random.default_rng(0)
    means = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])[:, None]
    other = np.array([0, 0.2, 0.1, 0.3, 0.4, 0.6, 0.5])[:, None]
    noise = rng.normal(0, 0.02, (7, 300))
    tau = kendall_tau(means + noise, other + noise)
    assert tau.value == pytest.approx(scipy.stats.kendalltau(means.ravel(), other.ravel()).statistic)
    assert tau.low <= tau.value <= tau.high
    assert kendall_tau(means + noise, means + noise).low == 1


def test_kinds_of_text() -> None:
    """Shuffled rows keep their words; samples come at the family's spacing and in T = L steps, as many as asked for."""
    family = small_family()
    assert family.tokenizer is not None
    real_nL = np.array([family.tokenizer.encode("a bc def a b ccc"), family.tokenizer.encode("one two  three  ")])
    mixed = [family.tokenizer.decode(row) for row in shuffled(family, real_nL[:1])]
    assert sorted(mixed[0].split()) == sorted(["a", "bc", "def", "a", "b", "ccc"]) and mixed != ["a bc def a b ccc"]
    family.meta["spacing"] = "spaced:5"
    found = {
        label: (len(tokens_nL), calls) for label, tokens_nL, calls in kinds(family, np.repeat(real_nL, 4, axis=0), 7)
    }
    assert [n for n, _ in found.values()] == [8, 8, 8, 8, 7]
    light, heavy = family.roles()
    assert list(found)[2:] == [f"{heavy}, spaced:5", f"{light}, spaced:5", f"{heavy}, T = 16"]
    assert found[f"{heavy}, spaced:5"][1] < found[f"{heavy}, T = 16"][1] <= 16
