"""`relaylm reproduce`: every experiment at toy size, resumed and reported; verdicts and costs with known answers."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from search_oracle import network

import relaylm
from relaylm.cli import main as cli
from relaylm.errors import UserError
from relaylm.files import write_json
from relaylm.measure.compare import compare
from relaylm.measure.rivals import expected_flops, one_model
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.denoise import denoise
from relaylm.sampling.reference import truncation_weight
from relaylm.studies.paper import document, experiments, figures, mdlm_experiments, reproduce
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.claims import CLAIMS, Claim, Finding, above_twin, judge, verdicts
from relaylm.studies.paper.contrasts import against, contrasts
from relaylm.studies.paper.experiments import SCALES, Setup
from relaylm.studies.paper.figures import segments, tuned_rows
from relaylm.studies.paper.model_sections import precision, where_it_peaks
from relaylm.studies.paper.schedule_sections import in_words, tuner

ROOT = Path(__file__).parents[2]
LENGTH = 16
TOY = replace(
    SCALES["paper"],
    samples=4,
    search_samples=2,
    confirm=2,
    sequences=4,
    timesteps=4,
    shares=(0, 50, 100),
    timed_rows=2,
    precision_samples=3,
    precision_steps=(8,),
    stride_samples=3,
)
QUICK = [name for name in reproduce.NAMES if name != "tuner"]  # which takes no fewer than 229 rows


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    root = tmp_path_factory.mktemp("families")
    judged = {"judge": network(1, 50, causal=True)}
    found = {}
    for k, (name, depths) in enumerate({"main": (1, 2, 3), "second": (1, 2), "early": (1, 2), "late": (1, 2)}.items()):
        models = {f"{d}b": network(d, d + 10 * k) for d in depths}
        heavy = f"{max(depths)}b"
        meta = {"training": {heavy: {"tokens": 1000 * (k + 1)}}}
        twins = {heavy: network(max(depths), 99)}
        folder = save_family(
            root / name, models, Text8Tokenizer(), length=LENGTH, name=name, twins=twins, meta=meta, **judged
        )
        (folder / "heldout.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
        found[name] = Family.load(folder)
    return found


def run(families: dict[str, Family], out: Path, only: list[str] | None = None, **options: Any) -> dict[str, Any]:
    others = {"second": families["second"], "bpe": families["main"], "stages": [families["late"], families["early"]]}
    return reproduce.reproduce(families["main"], options.pop("scale", TOY), out, only=only, **{**others, **options})


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A report without the project's records, whose figures take seconds."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(families: dict[str, Family], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, run(families, out, QUICK, records=ROOT / "results")


def data_of(out: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((out / "data" / f"{name}.json").read_text()))


def timeless(value: Any) -> Any:
    """Data without what a clock, a date or a folder decides."""
    if isinstance(value, dict):
        clock = ("seconds", "engine_seconds", "published_seconds", "command", "date")
        return {k: timeless(v) for k, v in value.items() if k not in clock}
    return [timeless(v) for v in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------ the paper's numbers


def test_slips_are_what_the_tables_say() -> None:
    found = {slip.where: slip.found for slip in paper.slips()}
    lm1b = found[f"caption of {paper.LM1B}"]
    assert {slip.found for slip in paper.slips() if slip.where == f"caption of {paper.LM1B}"} == {
        "the sandwich (210.5) is number 3 of 5, behind quarter:1 (207.9) and quarter:4 (209.1)",
        "by 0.09 (4.21 to 4.30)",
    }
    assert lm1b and found["abstract and conclusion"] == "11.5% on LM1B"
    assert found[f"caption of {paper.OWT}"] == "by 0.03, not less"
    assert found[paper.PREFIX_256] == "quarter:1 and sandwich are level at 40.9"
    assert "1/α = 1.67" in found["Section 'Wall-clock vs. FLOPs', a simple model"]
    assert found["eq:saved_flops"].endswith("12.1%")
    assert "129% of the gap on OpenWebText and 168%" in found["Section on the fixed light-step ratio"]


def test_the_papers_numbers_agree_with_each_other_where_they_should() -> None:
    owt = paper.TABLES[paper.OWT]
    assert paper.order(owt) == ["sandwich", "quarter:1", "quarter:4", "quarter:3", "quarter:2"]
    assert round(paper.gap_paid(owt, "sandwich"), 2) == 0.13
    for depth, (ppl, _, saved, drop) in paper.DEPTHS.items():
        assert saved == pytest.approx(25 * (12 - depth) / 12, abs=0.005)
        assert depth == 6 or drop == pytest.approx(100 * (ppl / paper.DEPTHS[12][0] - 1), abs=0.006)  # 6: a slip
    for share, (_, saved, seconds, speedup) in paper.SHARES.items():
        assert saved == pytest.approx(share * 8 / 12, abs=0.051)
        assert speedup == pytest.approx(100 * (1 - seconds / paper.SHARES[0][2]), abs=0.06)
    assert paper.SHARES[0][0] == owt["heavy"].ppl and paper.SHARES[100][0] == owt["light"].ppl


LABELS = {
    "light": "L1000",
    "quarter:1": "L250 → H750",
    "quarter:2": "H250 → L250 → H500",
    "quarter:3": "H500 → L250 → H250",
    "quarter:4": "H750 → L250",
    "sandwich": "L125 → H750 → L125",
    "heavy": "H1000",
}
LM1B_LABELS = {
    "light": "L128",
    "quarter:1": "L32 → H96",
    "quarter:2": "H32 → L32 → H64",
    "quarter:3": "H64 → L32 → H32",
    "quarter:4": "H96 → L32",
    "sandwich": "L16 → H96 → L16",
    "heavy": "H128",
}


def test_bars_are_labelled_as_in_the_paper() -> None:
    for steps, labels in ((1000, LABELS), (128, LM1B_LABELS)):
        for name, label in labels.items():
            assert segments(name, steps) == label.split(" → ")


# ------------------------------------------------------------------------------------------------ verdicts


def fake(shift: dict[str, float], n: int = 200, noise: float = 0.01, seed: int = 0) -> dict[str, Any]:
    """A comparison whose schedules lie at known distances from all-heavy."""
    rng = np.random.default_rng(seed)
    base = rng.normal(2.0, 0.3, n)
    rows = []
    for name in paper.SCHEDULES:
        log = base + shift.get(name, 0.0) + rng.normal(0, noise, n)
        entropy = {"entropy": 2.8, "entropy_ci": [2.79, 2.81]}
        rows.append({"schedule": name, "kind": "asked", "log_ppls": log.tolist(), **entropy})
    return {"rivals": [], **contrasts({"rows": rows})}


PAPERLIKE = {"light": 0.2, "quarter:1": 0.04, "quarter:2": 0.11, "quarter:3": 0.09, "quarter:4": 0.06, "sandwich": 0.03}


def verdict_of(name: str, data: dict[str, Any]) -> str:
    return next(v.verdict for v in verdicts(data) if v.claim.name.startswith(name))


def test_stretches_stand_at_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(kind: str, stretch: int) -> dict[str, Any]:
        return {"kind": kind, "stretch": stretch, "loss": 0.1, "ci": [0.0, 0.2]}

    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    light, stride = ([row(kind, j) for j in range(3)] for kind in ("light", "stride"))
    for rows in (light, light + stride):
        figures.stretches({"rows": rows, "stretches": 3, "sparse": 4}, tmp_path / "x.png")
    (alone,), both = ([list(c.lines[0].get_xdata()) for c in f.axes[0].containers] for f in drawn)
    assert alone == [0, 1, 2] and np.allclose(both, [[-0.1, 0.9, 1.9], [0.1, 1.1, 2.1]])


def test_contrasts_find_known_differences() -> None:
    result = fake(PAPERLIKE)
    for name, shift in PAPERLIKE.items():
        value, low, high = against(result["contrasts"], name, "heavy")
        assert abs(value - shift) < 0.003 and low < value < high and high - low < 0.01
        assert against(result["contrasts"], "heavy", name) == pytest.approx((-value, -high, -low))
        pair = next(p for p in result["contrasts"] if {p["first"], p["second"]} == {name, "heavy"})
        assert sorted(map(abs, pair["ci"])) == pytest.approx(sorted([abs(low), abs(high)]))
        assert against(result["contrasts"], name, "heavy", among=10)[1] < low
    middle = result["middle_minus_ends"]
    assert middle["difference"] == pytest.approx(0.05, abs=0.003) and middle["ci"][0] > 0.04
    assert all("log_ppls" not in row for row in result["rows"])


def test_data_like_the_papers_is_confirmed_and_its_reverse_is_not() -> None:
    data = {"schedules": {"by_light": {"4b": fake(PAPERLIKE)}}}
    for claim in ("Middle", "The sandwich", "The degradation"):
        assert verdict_of(claim, data) == "confirmed"
    turned = {**PAPERLIKE, "quarter:1": 0.11, "quarter:4": 0.1, "quarter:2": 0.04, "quarter:3": 0.02, "sandwich": 0.12}
    data = {"schedules": {"by_light": {"4b": fake(turned)}}}
    for claim in ("Middle", "The sandwich", "The degradation"):
        assert verdict_of(claim, data) == "not confirmed"
    data = {"schedules": {"by_light": {"4b": fake(PAPERLIKE), "8b": fake(turned)}}}
    assert verdict_of("Middle", data) == "depends"
    data = {"schedules": {"by_light": {"4b": fake({}, noise=0.3)}}}
    assert verdict_of("Middle", data) == verdict_of("The sandwich", data) == "open"


def test_spaced_plans_have_verdicts_of_their_own() -> None:
    """Left out where nothing was measured; else from the seven schedules and the eighths on spaced plans."""
    assert not [v for v in verdicts({}) if v.claim.ours]
    by = {"family": "a", "spacing": "spaced:8", "stretches_middle_minus_ends": {"difference": 0.02, "ci": [0.01, 0.03]}}
    data: dict[str, Any] = {"spaced": {"families": [{**by, **fake(PAPERLIKE)}]}}
    assert verdict_of("The sandwich is still", data) == verdict_of("Middle steps still", data) == "confirmed"
    data["spaced"]["families"][0]["stretches_middle_minus_ends"] = {"difference": -0.02, "ci": [-0.03, -0.01]}
    assert verdict_of("Middle steps still", data) == "depends"
    turned = {**PAPERLIKE, "quarter:1": 0.0}
    assert verdict_of("The sandwich is still", {"spaced": {"families": [{**by, **fake(turned)}]}}) == "not confirmed"


def test_a_level_rival_of_the_sandwich_leaves_it_open() -> None:
    level = {**PAPERLIKE, "quarter:1": PAPERLIKE["sandwich"]}
    assert verdict_of("The sandwich", {"schedules": {"by_light": {"4b": fake(level, noise=0.05)}}}) == "open"


def test_order_in_two_places() -> None:
    data = {
        "schedules": {"by_light": {"4b": fake(PAPERLIKE)}},
        "prefixes": {"by_prefix": {"8": fake(PAPERLIKE, seed=1)}},
    }
    assert verdict_of("The ranking", data) == "confirmed"
    swapped = {**PAPERLIKE, "quarter:1": PAPERLIKE["quarter:2"], "quarter:2": PAPERLIKE["quarter:1"]}
    data["prefixes"] = {"by_prefix": {"8": fake(swapped)}}
    assert verdict_of("The ranking", data) == "not confirmed"


def test_the_order_is_compared_with_that_of_the_same_light_model() -> None:
    swapped = {**PAPERLIKE, "quarter:1": PAPERLIKE["quarter:2"], "quarter:2": PAPERLIKE["quarter:1"]}
    data = {
        "schedules": {"by_light": {"4b": fake(PAPERLIKE), "8b": fake(swapped)}},
        "bpe": {"schedules": {"by_light": {"8b": fake(swapped, seed=1)}}},
    }
    assert verdict_of("The ranking", data) == "confirmed"
    data["bpe"] = {"schedules": {"by_light": {"4b": fake(swapped, seed=1)}}}
    assert verdict_of("The ranking", data) == "not confirmed"
    data["bpe"] = {"schedules": {"by_light": {"6b": fake(PAPERLIKE, seed=1)}}}  # no such light model: the first one
    assert verdict_of("The ranking", data) == "confirmed"


def on_fresh_rows(shift: dict[str, float], n: int = 200, noise: float = 0.05) -> dict[str, Any]:
    """A tuner's result whose schedules lie at known distances from all-heavy on fresh rows: two budgets, the rivals
    `whole` and `fewer` beside a sandwich at each, a mixture at the first."""
    rng = np.random.default_rng(0)
    base = rng.normal(2.0, 0.3, n)  # shared by all schedules, and much wider than what sets them apart
    kinds = {"whole": "8b alone", "fewer": "12b alone in 9 steps", "sandwich": "sandwich", "mix": "all models"}
    names = ["heavy", *shift]
    logs = [{"schedule": name, "kind": "asked", "log_ppls": base + rng.normal(0, noise, n)} for name in names]
    for row in logs:
        row["log_ppls"] = (row["log_ppls"] + shift.get(row["schedule"], 0.0)).tolist()
    rows = []
    for name in shift:
        what, _, budget = name.partition(" ")
        about = {"kind": "mixed" if what == "mix" else "rival", "what": kinds[what], "saved": float(budget) + 0.01}
        about |= {"gen_ppl": 7.0, "gen_ppl_ci": [6.9, 7.1], "recommended": what == "fewer", "steps": 9}
        rows.append({"schedule": name, "budget": float(budget), **about})
    fresh = {"n": n, "seed": 1000, "heavy": "heavy", "rows": rows, "contrasts": contrasts({"rows": logs})["contrasts"]}
    front = [{"schedule": "fewer 0.2", "what": kinds["fewer"], "saved_at_least": 0.2}]
    return {"verdict": "Found.", "front": front, "calls": {"calls_made": 1, "calls_naive": 2}, "fresh": fresh}


def of_the_tuner(data: dict[str, Any]) -> dict[tuple[str, str], Finding]:
    """What is found of the tuner's rivals, by budget and by the words that come before the numbers."""
    claim = next(v for v in verdicts(data) if v.claim.name.startswith("Nothing simpler"))
    return {(f.where, re.split(r" [-+]\d|nan", f.evidence)[0]): f for f in claim.findings}


def test_on_fresh_rows_every_model_alone_meets_the_sandwich_of_its_budget() -> None:
    losses = {"sandwich 0.2": 0.05, "whole 0.2": 0.10, "fewer 0.2": 0.05, "mix 0.2": 0.0}
    losses |= {"sandwich 0.4": 0.15, "whole 0.4": 0.15, "fewer 0.4": 0.10}
    found = of_the_tuner({"tuner": on_fresh_rows(losses)})
    fewer, whole = "12b alone in 9 steps", "8b alone"
    assert {key: finding.says for key, finding in found.items()} == {
        ("tuner, 20% saved", whole): True,
        ("tuner, 20% saved", fewer): None,
        ("tuner, 40% saved", whole): None,
        ("tuner, 40% saved", fewer): False,
    }
    evidence = found["tuner, 40% saved", fewer].evidence
    value, low, high = map(float, re.findall(r"[-+]\d\.\d+", evidence))
    assert abs(value + 0.05) < 0.015 and high < 0 and high - low < 0.03  # 0.6 and more without the pairing
    assert "200 fresh rows" in evidence and "widest" not in evidence


def test_a_recommendation_that_costs_less_than_it_might_is_no_contest_of_its_own() -> None:
    losses = {"sandwich 0.2": 0.05, "whole 0.2": 0.10, "fewer 0.2": 0.05, "sandwich 0.4": 0.15, "fewer 0.4": 0.30}
    result = on_fresh_rows(losses)
    cheaper = [{**row, "budget": 0.2} for row in result["fresh"]["rows"] if row["budget"] == 0.4]
    result["fresh"]["rows"] = [*cheaper, *result["fresh"]["rows"]]
    found = of_the_tuner({"tuner": result})
    by_budget = [(where, finding.says) for (where, _), finding in found.items()]
    assert sorted(by_budget, key=str) == [
        ("tuner, 20% saved", None),
        ("tuner, 20% saved", True),
        ("tuner, 40% saved", True),
    ]


def test_a_rival_that_costs_far_less_is_said_to() -> None:
    result = on_fresh_rows({"sandwich 0.2": 0.0, "whole 0.2": 0.1, "fewer 0.2": 0.1})
    saved = {"sandwich 0.2": 0.2, "whole 0.2": 0.6, "fewer 0.2": 0.23}
    result["fresh"]["rows"] = [{**row, "saved": saved[row["schedule"]]} for row in result["fresh"]["rows"]]
    found = of_the_tuner({"tuner": result})
    evidence = {what: finding.evidence for (_, what), finding in found.items()}
    assert "against the sandwich at 50% of its FLOPs on" in evidence["8b alone"]
    assert "FLOPs" not in evidence["12b alone in 9 steps"]  # 0.77 / 0.8


def test_an_outcome_on_fresh_rows_stands_the_number_of_contests() -> None:
    """Two rivals exactly as far below the sandwich as a lone contest would need and a little more."""
    rng = np.random.default_rng(1)
    noise = rng.normal(size=50)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    shift, p = -2.2 / math.sqrt(50), 2 * scipy.stats.t(49).cdf(-2.2)
    assert 0.025 < p < 0.05
    logs = {"heavy": np.zeros(50), "sandwich 0.2": np.zeros(50), "whole 0.2": noise + shift, "fewer 0.2": noise + shift}
    item = on_fresh_rows({"sandwich 0.2": 0.0, "whole 0.2": 0.0, "fewer 0.2": 0.0})
    rows = [{"schedule": name, "kind": "asked", "log_ppls": log.tolist()} for name, log in logs.items()]
    item["fresh"]["contrasts"] = contrasts({"rows": rows})["contrasts"]
    both = of_the_tuner({"tuner": item}).values()
    assert [finding.says for finding in both] == [None, None]
    assert all(f"among 2 contests p = {2 * p:.2f} (Holm)" in finding.evidence for finding in both)
    del item["fresh"]["rows"][-1]
    (alone,) = of_the_tuner({"tuner": item}).values()
    assert alone.says is False and "Holm" not in alone.evidence
    item["fresh"]["contrasts"] = contrasts({"rows": [{**row, "log_ppls": [None] * 50} for row in rows]})["contrasts"]
    (alone,) = of_the_tuner({"tuner": item}).values()
    assert alone.says is None  # nothing had a score


def test_the_tuners_section_shows_fresh_rows_where_there_are_any(tmp_path: Path) -> None:
    losses = {"sandwich 0.2": 0.05, "whole 0.2": 0.10, "fewer 0.2": 0.03, "mix 0.2": 0.0, "sandwich 0.4": 0.1}
    result = on_fresh_rows(losses, noise=0.001)
    text, best, figure, table = tuner(result, tmp_path)
    assert isinstance(text, str) and "200 rows that the search has not seen (seed 1000)" in text
    assert isinstance(best, str) and isinstance(table, document.Table) and isinstance(figure, document.Figure)
    first, second = best.split("\n")
    assert first.startswith("- to save 20%: all models, mixed; the next, 12b alone in 9 steps, +0.0")
    assert second == "- to save 40%: sandwich" and "not significant" not in first and figure.file.stat().st_size > 0
    assert [(row[1], row[3]) for row in table.rows] == [(name, "yes" if "fewer" in name else "") for name in losses]
    for row, loss in zip(table.rows, losses.values(), strict=True):
        assert float(row[6].split()[0]) == pytest.approx(loss, abs=0.001)
    against_sandwich = [row[7] and round(float(row[7].split()[0]), 2) for row in table.rows]
    assert against_sandwich == ["", 0.05, -0.02, -0.05, ""]
    shown = {row["what"]: row["on_front"] for row in tuned_rows(result) if row["saved"] < 0.3}
    # The mixture loses as little as all-heavy (which of the two is better is noise), so nothing else saves 21% better.
    assert {what for what, front in shown.items() if front} - {"all-heavy"} == {"all models"}


def test_searches_of_the_same_tokens_count(tmp_path: Path) -> None:
    """Records of the very same models add findings: where light segments harm, and what meets the sandwich."""
    about = {"name": "tokens", "digest": "d"}
    harm = [-0.4, -0.3, 0, 0.3, 0.4, 0.3, 0, 0, -0.1, -0.2]
    whole = {"family": about, "steps": 64, "influence": {"d4": harm}}
    whole |= {"influence_ci": {"d4": [[value - 0.1, value + 0.1] for value in harm]}}
    beside = {"difference": -0.05, "ci": [-0.07, -0.03], "error": 0.01, "rows": 200}
    kinds = {"d12 alone in 53 steps": "rival", "mixed": "mixed", "sandwich": "rival"}
    rows = [{"what": what, "kind": kind, "saved": 0.2, "against_sandwich": beside} for what, kind in kinds.items()]
    write_json(tmp_path / "search" / "tokens-210.json", whole)
    tuned = {"family": about, "steps": 64, "all": [{"saved": 1 / 6, "rows": rows}]}
    write_json(tmp_path / "search" / "tokens.json", tuned)
    result = experiments.with_searches({"disagreement": {"family": about}}, tmp_path)
    found = {v.claim.name: v.findings for v in verdicts({"bpe": result})}
    (middle,), (rival,) = found["Middle steps matter most"], found["Nothing simpler does as well for the same compute"]
    assert (middle.where, middle.says) == ("BPE, search of 210", True)
    assert (rival.where, rival.says) == ("BPE, tuner, 17% saved", False)
    other = {"disagreement": {"family": {**about, "digest": "e"}}}
    assert experiments.with_searches(other, tmp_path) == other


def curve(peak: float, ratio: float, relative: list[float] | None = None) -> dict[str, Any]:
    found = {"light": "4b", "heavy": "12b", "t": [0.05, 0.5, 1.0], "loss_heavy": [3 * ratio, 2.0, 3.0]}
    found |= {"kl": [0.1, 0.2, 0.0], "peak_t": peak, "peak_t_ci": [peak, peak]}
    return {**found, "kl_relative_ci": None if relative is None else [[v, v + 0.1] for v in relative]}


def test_no_peak_is_named_where_a_model_is_as_close_as_the_twin() -> None:
    assert above_twin(curve(0.5, 0.1, [0.01, 0.03, 0.0]))
    assert not above_twin(curve(0.5, 0.1, [-0.1, -0.01, 0.001]))  # a hundredth of the KL is 0.002


def test_peaks_of_families_and_stages_side_by_side() -> None:
    def family(name: str, *numbers: float) -> dict[str, Any]:
        return {"states": "data", "family": {"name": name}, "pairs": [curve(*numbers)]}

    stages = {"stages": [{"family": "early", "pair": curve(0.05, 0.9)}, {"family": "late", "pair": curve(0.4, 0.2)}]}
    data: dict[str, Any] = {"disagreement": family("chars", 0.5, 0.1), "training": stages}
    data["bpe"] = {"disagreement": family("tokens", 0.1, 0.4)}
    text, table = where_it_peaks(data)
    assert isinstance(text, str) and isinstance(table, document.Table)
    assert [row[0] for row in table.rows] == ["chars", "late", "tokens", "early"]
    assert [row[4] for row in table.rows] == ["0.100", "0.200", "0.400", "0.900"]
    assert "4 curves" in text and "rank correlation of -1.00" in text
    assert where_it_peaks({"disagreement": family("chars", 0.5, 0.1)}) == []  # nothing to compare


def test_entropy_is_the_same_only_if_its_interval_says_so() -> None:
    result = fake(PAPERLIKE)
    rows = {row["schedule"]: row for row in result["rows"]}
    data = {"schedules": {"by_light": {"4b": result}}}
    assert verdict_of("Entropy", data) == "confirmed"
    rows["quarter:2"]["entropy"] = 2.8 * 1.02
    assert verdict_of("Entropy", data) == "not confirmed"
    rows["quarter:2"]["entropy_ci"] = [2.6, 3.1]
    assert verdict_of("Entropy", data) == "open"


def test_early_steps_are_robust_if_both_middle_quarters_cost_more() -> None:
    def both(shift: dict[str, float], noise: float = 0.01) -> dict[str, Any]:
        return {"precision": {"by_steps": {"8": {kind: fake(shift, noise=noise) for kind in ("exact", "published")}}}}

    assert verdict_of("Early steps", both(PAPERLIKE)) == "confirmed"
    assert verdict_of("Early steps", both(PAPERLIKE, noise=1.0)) == "open"
    assert verdict_of("Early steps", both({**PAPERLIKE, "quarter:2": PAPERLIKE["quarter:1"]})) == "open"
    assert verdict_of("Early steps", both({**PAPERLIKE, "quarter:2": 0.01})) == "not confirmed"
    mixed = both(PAPERLIKE)
    mixed["precision"]["by_steps"]["8"]["exact"] = fake({**PAPERLIKE, "quarter:3": 0.01})
    assert verdict_of("Early steps", mixed) == "depends"


def sampled_both_ways(n: int, steps: int = 256, seed: int = 0, **about: Any) -> dict[str, Any]:
    """A result of `precision` at one number of steps: float32 takes 0.3 off the log-perplexity and 0.05 off the
    entropy of every schedule, and leaves its costs as they are."""
    exact, cut = fake(PAPERLIKE, n=n, noise=0.1, seed=seed), fake(PAPERLIKE, n=n, noise=0.1, seed=seed + 1)
    for result, log, entropy in ((exact, 2.0, 3.0), (cut, 1.7, 2.95)):
        for row in result["rows"]:
            value = log + PAPERLIKE.get(row["schedule"], 0.0)
            row |= {"gen_ppl": math.exp(value), "gen_ppl_ci": [math.exp(value) - 1, math.exp(value) + 1]}
            row |= {"log_ppl": value, "log_ppl_ci": [value - 0.03, value + 0.03]}
            row |= {"entropy": entropy, "entropy_ci": [entropy - 0.04, entropy + 0.04]}
    settings = {"family": {"name": "x", "digest": "abc"}, "light": "4b", "heavy": "12b", "length": 256, "judge": "own"}
    exact |= {"n": n, "steps": steps, "recipe": "plain", "conditional": False, **settings, **about}
    kept = {name: {"t": [1.0, 0.1], "mean": [0.8, 0.99], "low": [0.7, 0.98]} for name in ("4b", "12b")}
    by_steps = {str(steps): {"exact": exact, "published": cut, "kept_mass": kept}}
    return {"by_steps": by_steps, "family": {"name": "x"}, "vocabulary": 8193, "n": n, "length": 256}


def test_time_saved_decides_only_where_it_is_further_from_the_edge_than_clocks_are_good_for() -> None:
    def says(light_ms: float) -> bool | None:
        times = {"reference_ms_per_row_step": 1.0, "reference_light_ms_per_row_step": light_ms}
        times |= {"engine_ms_per_row_step": 1.0, "engine_light_ms_per_row_step": 0.3}
        family = {**times, "settings": {"depth": [12, 4]}}
        found = next(v for v in verdicts({"time": {"family": family}}) if v.claim.name.startswith("Wall-clock"))
        assert [f.where for f in found.findings] == ["this family, MDLM's sampler", "this family, the engine"]
        assert found.findings[1].says is False  # 70% of the time where blocks save two thirds
        return found.findings[0].says

    # The edge is 60% of the time saved.
    assert (
        says(0.72) is True and says(0.44) is True and says(0.42) is None and says(0.38) is None and says(0.36) is False
    )


def test_more_steps_on_tokens_are_places_too_but_not_those_that_bpe_has() -> None:
    data = {"precision": sampled_both_ways(400, steps=1024)}
    data["precision"]["by_steps"] |= sampled_both_ways(400, steps=256)["by_steps"]
    data["bpe"] = {"schedules": {"by_light": {"4b": {**fake(PAPERLIKE), "steps": 256}}}}
    found = next(v for v in verdicts(data) if v.claim.name.startswith("The degradation"))
    assert [f.where for f in found.findings] == ["BPE, light 4b", "BPE, T = 1024"]


def test_a_light_depth_stands_beside_the_papers_number_for_it() -> None:
    result = sampled_both_ways(200)["by_steps"]["256"]["exact"]
    eight, four, five = (in_words(result, None, depth) for depth in (8, 4, 5))
    assert "(paper: +1.4%)." in eight and "(paper: +3.4%)." in four and "paper" not in five
    assert "the same order as in the paper" in in_words(result, paper.PREFIX_256)  # which has a tie
    next(row for row in result["rows"] if row["schedule"] == "quarter:4")["gen_ppl"] = 1.0
    assert "(quarter:1 = sandwich, quarter:4," in in_words(result, paper.PREFIX_256)


def test_the_section_on_precision_sets_both_samplers_side_by_side(tmp_path: Path) -> None:
    result = sampled_both_ways(400)
    blocks = precision(result, tmp_path)
    text = " ".join(block for block in blocks if isinstance(block, str))
    half = math.hypot(0.03, 0.03)
    assert f"-0.3000 ({-0.3 - half:+.4f} to {-0.3 + half:+.4f}) in log-perplexity (-26% of perplexity)" in text
    half = math.hypot(0.04, 0.04)
    assert f"entropy 3.000 and 2.950, -0.0500 ({-0.05 - half:+.4f} to {-0.05 + half:+.4f})" in text
    assert "leaves 80.0% of the probability in play at t = 1.0, 99.0% at t = 0.1" in text
    assert "yes at T = 256, exact (400 samples); yes at T = 256, MDLM's float32 (400 samples)" in text
    assert "quarters 1 to 4 cost +0.039, +0.112, +0.093, +0.057" in text
    assert "Of 5 costs against heavy (mixed schedules at each T) 0 differ" in text
    cut = fake({**PAPERLIKE, "quarter:1": 0.5}, n=400, noise=0.1)["contrasts"]
    result["by_steps"]["256"]["published"]["contrasts"] = cut
    result["n"] = 399
    blocks = precision(result, tmp_path)
    text = " ".join(block for block in blocks if isinstance(block, str))
    assert "1 differ between the samplers" in text and "no at T = 256, MDLM's float32 (400 samples)" in text
    assert "399 samples of each schedule from MDLM's sampler, in exact sampling 400 at T = 256." in text
    table = next(block for block in blocks if isinstance(block, document.Table) and block.name == "precision")
    assert [row[:2] for row in table.rows] == [["256", name] for name in paper.SCHEDULES]
    assert all(len(row) == len(table.head) for row in table.rows) and table.rows[-1][-3:] == ["", "", ""]
    assert table.rows[1][-1] == "+0.0389" and float(table.rows[1][-2].split()[0]) == pytest.approx(0.5, abs=0.02)


def test_the_rule_of_verdicts() -> None:
    def claim(*says: bool | None) -> Claim:
        return Claim("x", "", "", lambda data: [Finding(str(k), s, "") for k, s in enumerate(says)])

    cases = {(): "not measured", (None,): "open", (True, None): "partly", (False, None): "not confirmed"}
    cases |= {(True, False): "depends", (True, True): "confirmed"}
    for says, expected in cases.items():
        assert judge(claim(*says), {}).verdict == expected
    assert all(verdict.verdict == "not measured" for verdict in verdicts({}))


# ------------------------------------------------------------------------------------------------ a whole run


def test_every_experiment_runs_at_toy_size_and_says_how_it_was_made(whole: tuple[Path, dict[str, Any]]) -> None:
    out, result = whole
    assert {name: item["status"] for name, item in result["experiments"].items()} == dict.fromkeys(QUICK, "ran")
    for name in QUICK:
        data = data_of(out, name)
        assert {"command", "machine", "versions", "seed", "commit", "date", "scale", "family"} <= set(data)
        assert data["experiment"] == name
    assert [claim["claim"] for claim in result["claims"]] == [claim.name for claim in CLAIMS]
    assert all(claim["verdict"] != "not measured" for claim in result["claims"])


def test_the_report_is_whole_and_self_contained(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    images = re.findall(r'<img [^>]*src="([^"]{0,30})', page)
    assert len(images) == text.count("](figures/") >= 13
    assert all(source.startswith("data:image/png;base64,") for source in images)
    words = re.sub(r'src="data:image/png;base64,[^"]*"', "", page)  # four letters of a picture may spell anything
    assert not re.search(r'(src|href)="(?!data:|#)', page) and not re.search("https?:", words)
    for file in re.findall(r"\]\(((?:figures|tables)/[^)]+)\)", text):
        assert (out / file).stat().st_size > 0
    for experiment in reproduce.EXPERIMENTS:
        assert f"## {experiment.title}" in text
        assert all(paper.named(label) in text and paper.named(label) != label for label in experiment.paper.split())
        assert f'<h2 id="{document.slug(experiment.title)}">' in page
        assert f'<a href="#{document.slug(experiment.title)}">' in page
    assert not re.search(r"\b(fig|tab|app|sec|eq):\w", words + text)  # LaTeX's labels
    links = set(re.findall(r'href="#([^"]*)"', page))
    assert links == set(re.findall(r'<h2 id="([^"]*)"', page))
    for what, shown in (
        ("Figure", re.findall(r"<figcaption><b>Figure (\d+)", page)),
        ("Table", re.findall(r"<b>Table (\d+)", page)),
    ):
        assert sorted(map(int, shown)) == list(range(1, text.count(f"\n*{what} ") + text.count(f"\n{what} ") + 1)), what
    assert len(re.findall('class="badge', page)) == len(CLAIMS)
    assert "**From the results kept with the project.**" in text.split("## What the tuner finds")[1].split("##")[0]
    for slip in paper.slips():
        assert slip.found in text
    rows = list(csv.reader((out / "tables" / "claims.csv").open()))
    assert len(rows) == 1 + len(CLAIMS) and all(f"| {row[0]} | {row[1]} |" in text for row in rows[1:])


def test_depths_are_the_sandwiches_of_schedules(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    by_light = data_of(out, "schedules")["result"]["by_light"]
    rows = {row["light"]: row for row in data_of(out, "depths")["result"]["rows"]}
    assert set(rows) == {"1b", "2b", "3b"} and rows["3b"]["depth"] == 3
    for light, result in by_light.items():
        sandwich = next(row for row in result["rows"] if row["schedule"] == "sandwich")
        assert rows[light]["gen_ppl"] == sandwich["gen_ppl"] and rows[light]["entropy"] == sandwich["entropy"]


def test_the_numbers_are_those_of_a_comparison_by_hand(
    whole: tuple[Path, dict[str, Any]], families: dict[str, Family]
) -> None:
    out, _ = whole
    found = data_of(out, "schedules")["result"]["by_light"]["1b"]
    direct = compare(
        families["main"], list(paper.SCHEDULES), 4, steps=LENGTH, recipe="mdlm", light="1b", progress=False
    )
    for row, other in zip(found["rows"], direct["rows"], strict=True):
        assert row["gen_ppl"] == pytest.approx(other["gen_ppl"], rel=1e-6)
    logs = {row["schedule"]: np.array(row["log_ppls"]) for row in direct["rows"]}
    value, _, _ = against(found["contrasts"], "quarter:2", "heavy")
    assert value == pytest.approx((logs["quarter:2"] - logs["heavy"]).mean(), rel=1e-5)
    strides = data_of(out, "strides")["result"]
    first = next(row for row in strides["rows"] if row["kind"] == "light" and row["stretch"] == 0)
    pair = compare(families["main"], ["H16", "L2 H14"], 3, recipe="mdlm", rivals=False, progress=False)
    assert first["loss"] == pytest.approx(pair["paired"][0]["difference"], rel=1e-5, abs=1e-9)
    assert (first["from"], first["to"]) == (1.0, 0.875)


def test_the_family_of_tokens_has_the_experiments_of_the_first(
    whole: tuple[Path, dict[str, Any]], families: dict[str, Family]
) -> None:
    """`--bpe` and `--family` are the same here, so both find the same; which family comes first is no matter."""
    out, _ = whole
    found = data_of(out, "bpe")["result"]
    for name in ("schedules", "disagreement"):
        assert timeless(found[name]) == timeless(data_of(out, name)["result"])
    assert found["shares"]["n"] == TOY.samples // 2 and found["shares"]["shares"] == [0, 50, 100]
    names = ["bpe", "precision"]
    again = reproduce.reproduce(families["second"], TOY, out, only=names, bpe=families["main"])
    for name in names:
        assert again["experiments"][name]["status"] == "kept" and data_of(out, name)["family"]["name"] == "main"
    assert data_of(out, "precision")["result"]["family"]["name"] == "main"


def test_prefixes_continue_held_out_text(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    result = data_of(out, "prefixes")["result"]
    assert result["source"] == "held-out text" and set(result["by_prefix"]) == {"2", "4"}
    assert all(found["conditional"] for found in result["by_prefix"].values())


def test_spaced_plans_write_positions_apart(whole: tuple[Path, dict[str, Any]]) -> None:
    """At a quarter of the length, and every call is light in one of the stretches."""
    (found,) = data_of(whole[0], "spaced")["result"]["families"]  # the family of tokens is the first one here
    assert found["spacing"] == f"spaced:{LENGTH // 4}" and found["calls"] <= LENGTH // 2
    assert [row["stretch"] for row in found["by_stretch"]] == list(range(8))
    by = {row["schedule"]: row for row in found["rows"]}
    saved = {name: by[name]["flops_saved"] for name in ("heavy", "light")}
    each = [row["flops_saved"] for row in found["by_stretch"]]  # each call is light in one of them
    assert sum(each) - 8 * saved["heavy"] == pytest.approx(saved["light"] - saved["heavy"], rel=1e-4)


def test_stages_are_in_order_of_training(whole: tuple[Path, dict[str, Any]]) -> None:
    out, _ = whole
    stages = data_of(out, "training")["result"]["stages"]
    assert [(stage["family"], stage["tokens"]) for stage in stages] == [("early", 3000), ("late", 4000)]


# ------------------------------------------------------------------------------------------------ resuming


def test_what_is_there_is_not_run_again(
    whole: tuple[Path, dict[str, Any]], families: dict[str, Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = whole
    before = {name: (out / "data" / f"{name}.json").read_bytes() for name in QUICK}
    text = (out / "report.md").read_text()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was computed again")

    monkeypatch.setattr("relaylm.sampling.engine.Engine.run", refuse)
    again = run(families, out, QUICK, records=ROOT / "results")
    assert {item["status"] for item in again["experiments"].values()} == {"kept"}
    assert {name: (out / "data" / f"{name}.json").read_bytes() for name in QUICK} == before
    assert (out / "report.md").read_text() == text


@pytest.mark.usefixtures("alone")
def test_an_interrupted_run_goes_on_where_it_was(
    whole: tuple[Path, dict[str, Any]], families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = whole
    names = ["schedules", "depths", "prefixes"]

    def stop(text: str) -> None:
        if text == "prefixes of 4":  # after the first of two
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(families, tmp_path, names, note=stop)
    assert "## Claims and verdicts" in (tmp_path / "report.md").read_text()
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == ["depths.json", "schedules.json"]
    drawn = []
    original = experiments.compare

    def counting(family: Family, schedules: Any, n: int, **options: Any) -> Any:
        found = original(family, schedules, n, **options)
        drawn.append(len(found["rows"]))
        return found

    calls = []
    engine_run = denoise
    monkeypatch.setattr("relaylm.sampling.sample.denoise", lambda *a, **k: calls.append(1) or engine_run(*a, **k))
    monkeypatch.setattr(experiments, "compare", counting)
    again = run(families, tmp_path, names)
    assert [item["status"] for item in again["experiments"].values()] == ["kept", "kept", "ran"]
    assert drawn == [7, 7] and len(calls) == 7  # the first prefix's samples came from the store
    for name in names:
        assert timeless(data_of(tmp_path, name)["result"]) == timeless(data_of(out, name)["result"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("early", [True, False])
def test_a_search_that_is_stopped_is_not_taken_for_a_whole_one(
    families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    from relaylm.search.trials import Trials

    original, asked = Trials.scores, []

    def stop(self: Trials, *args: Any, **options: Any) -> Any:
        asked.append(1)
        if early or len(asked) == 2:  # at once, or while the best are confirmed
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(Trials, "scores", stop)
    with pytest.raises(KeyboardInterrupt):
        run(families, tmp_path, ["search", "depths"])
    assert len(asked) == (1 if early else 2) and not list((tmp_path / "data").iterdir())


@pytest.mark.usefixtures("alone")
def test_other_settings_are_run_anew(families: dict[str, Family], tmp_path: Path) -> None:
    for options, status in (
        ({}, "ran"),
        ({}, "kept"),
        ({"seed": 1}, "ran"),
        ({"scale": replace(TOY, sequences=3)}, "ran"),
    ):
        found = run(families, tmp_path, ["disagreement"], **options)
        assert found["experiments"]["disagreement"]["status"] == status


def test_an_experiment_depends_on_the_texts_that_it_reads(families: dict[str, Family]) -> None:
    text, other = (np.arange(k, k + 50) % 27 for k in (0, 1))
    setup = reproduce.Setup(families["main"], TOY, text=text, second=families["second"], second_text=text)
    keys = {e.name: reproduce._key(e, setup) for e in reproduce.EXPERIMENTS}
    changed = {e.name for e in reproduce.EXPERIMENTS if reproduce._key(e, replace(setup, text=other)) != keys[e.name]}
    assert changed == set(reproduce.NAMES)
    elsewhere = replace(setup, second_text=other)
    changed = {e.name for e in reproduce.EXPERIMENTS if reproduce._key(e, elsewhere) != keys[e.name]}
    assert changed == {"second-corpus"}


@pytest.mark.usefixtures("alone")
def test_another_edition_of_an_experiment_is_run_anew(
    families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for edition, status in ((1, "ran"), (1, "kept"), (2, "ran"), (2, "kept")):
        changed = tuple(replace(e, edition=edition) for e in reproduce.EXPERIMENTS if e.name == "disagreement")
        monkeypatch.setattr(reproduce, "EXPERIMENTS", changed)
        assert run(families, tmp_path, ["disagreement"])["experiments"]["disagreement"]["status"] == status


@pytest.mark.usefixtures("alone")
def test_damaged_data_is_made_again(families: dict[str, Family], tmp_path: Path) -> None:
    run(families, tmp_path, ["disagreement"])
    (tmp_path / "data" / "disagreement.json").write_text('{"format": 1, "result": ')
    assert run(families, tmp_path, ["disagreement"])["experiments"]["disagreement"]["status"] == "ran"


# ------------------------------------------------------------------------------------------------ what is not there


def test_what_a_family_cannot_show_comes_from_kept_results_and_is_marked(
    whole: tuple[Path, dict[str, Any]], families: dict[str, Family], tmp_path: Path
) -> None:
    out, _ = whole
    options: dict[str, Any] = {"second": None, "bpe": None, "stages": ()}
    names = ["second-corpus", "precision", "training", "disagreement"]
    found = run(families, tmp_path / "a", names, records=tmp_path / "nothing", **options)
    text = (tmp_path / "a" / "report.md").read_text()
    assert found["experiments"]["second-corpus"]["status"] == "not run" and "(--second)" in text
    assert "(--bpe)" in text and "(--stages)" in text and found["shown"] == {"disagreement": "own"}
    assert "it was not asked for" in text.split("## What the tuner finds")[1].split("##")[0]

    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "reproduce").symlink_to(out)
    found = run(families, tmp_path / "b", names, records=tmp_path / "records", **options)
    text = (tmp_path / "b" / "report.md").read_text()
    assert found["shown"]["precision"] == "committed" and found["shown"]["disagreement"] == "own"
    part = text.split("## Exact sampling against")[1].split("\n## ")[0]
    assert "**From the results kept with the project.**" in part and "Remake it: `" in part
    assert "(figures/committed/precision.png)" in part and "(tables/committed-precision.csv)" in part
    assert "From the results kept" not in text.split("## Disagreement of models")[1].split("\n## ")[0]


def test_a_failure_is_reported_and_raised_and_the_rest_is_done(
    families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setup: Setup) -> dict[str, Any]:
        raise ZeroDivisionError("seven")

    changed = tuple(replace(e, run=broken) if e.name == "depths" else e for e in reproduce.EXPERIMENTS)
    monkeypatch.setattr(reproduce, "EXPERIMENTS", changed)
    with pytest.raises(RuntimeError, match=r"depths .ZeroDivisionError: seven"):
        run(families, tmp_path, ["depths", "disagreement"], records=ROOT / "results")
    assert (tmp_path / "data" / "disagreement.json").is_file()
    assert "Not run here: ZeroDivisionError: seven. **From the results kept" in (tmp_path / "report.md").read_text()
    with pytest.raises(RuntimeError):
        run(families, tmp_path, ["depths"], records=tmp_path / "nothing")
    assert "Not shown: ZeroDivisionError: seven" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("alone")
def test_a_family_in_memory_needs_no_store_and_no_text(tmp_path: Path) -> None:
    family = Family({"1b": network(1, 1), "2b": network(2, 2)}, 27, 28, LENGTH, Text8Tokenizer(), "memory")
    family.judge = network(1, 50, causal=True)
    found = reproduce.reproduce(family, TOY, tmp_path, only=["disagreement", "prefixes"])
    assert {item["status"] for item in found["experiments"].values()} == {"ran"}
    assert data_of(tmp_path, "disagreement")["result"]["states"] == "trajectory"
    assert data_of(tmp_path, "prefixes")["result"]["source"].startswith("samples of the heavy model")
    assert not (tmp_path / "store").exists()


# ------------------------------------------------------------------------------------------------ the tuner


def searched(family: Family, seed: int = 0) -> dict[str, Any]:
    """What a search with one budget might say: half of the cost to be saved."""

    def price(name: str, steps: int) -> float:
        return expected_flops(family.models, one_model(name), steps, np.array([LENGTH]), LENGTH)

    most = price("3b", LENGTH)

    def row(what: str, schedule: str, steps: int, kind: str, cost: float, loss: float) -> dict[str, Any]:
        about = {"what": what, "schedule": schedule, "steps": steps, "kind": kind}
        return {**about, "price": cost, "saved": 1 - cost / most, "against_heavy": {"difference": loss}}

    confirmed = [
        row("1b alone", "1b:16", 16, "rival", price("1b", 16), 0.2),
        row("sandwich", "1b:7 3b:2 1b:7", 16, "rival", 0.4 * most, 0.15),
        row("sandwich", "1b:6 3b:4 1b:6", 16, "rival", 0.49 * most, 0.16),  # spends more, so this one
        row("all models", "1b:8 2b:8", 16, "mixed", 0.45 * most, 0.12),
        row("models and steps together", "3b:3@50% 2b:4@50%", 7, "mixed", 0.44 * most, 0.11),  # the best mixture
        row("all models", "2b:16", 16, "mixed", 0.9 * most, 0.0),  # too expensive
        row("all-heavy", "3b:16", 16, "anchor", most, 0.0),
    ]
    goal = {"limit": 0.5 * most, "saved_at_least": 0.5, **confirmed[3]}
    about = {"steps": LENGTH, "length": LENGTH, "models": ["1b", "2b", "3b"], "heavy": "3b", "all_heavy_price": most}
    return {**about, "seed": seed, "front": [goal], "confirmed": confirmed, "stopped": None}


def test_what_is_judged_on_fresh_rows(families: dict[str, Family]) -> None:
    family = families["main"]
    found = searched(family)
    rows = experiments.finalists(Setup(family, TOY), found)
    assert [row["what"] for row in rows if row["recommended"]] == ["all models"]
    assert len({row["schedule"] for row in rows}) == len(rows) == 6 and {row["budget"] for row in rows} == {0.5}
    known = {"1b:8 2b:8": "mixed", "1b:6 3b:4 1b:6": "rival", "3b:3@50% 2b:4@50%": "mixed"}
    assert {row["schedule"]: row["kind"] for row in rows if "alone" not in row["what"]} == known
    single = {row["schedule"].partition(":")[0]: row for row in rows if "alone" in row["what"]}
    assert set(single) == {"3b", "2b", "1b"} and single["1b"]["what"] == "1b alone"  # the first that may take all steps
    limit = found["front"][0]["limit"]
    for name, row in single.items():
        costs = [expected_flops(family.models, one_model(name), t, np.array([16]), 16) for t in range(1, 17)]
        assert row["steps"] == sum(cost <= limit for cost in costs) and row["kind"] == "rival"
        assert row["saved"] == pytest.approx(1 - costs[row["steps"] - 1] / found["all_heavy_price"])
        assert name == "1b" or row["what"] == f"{name} alone in {row['steps']} steps"
    few = experiments.finalists(Setup(family, replace(TOY, rivals=False)), found)
    assert [row["schedule"] for row in few] == ["1b:8 2b:8", "1b:6 3b:4 1b:6", "1b:16"]
    # A single model stands there once, whatever it is called: here as the best mixture and as the recommendation.
    assert single["3b"]["steps"] == 5
    alias = "3b:1@20% 3b:4@80%"
    found["confirmed"][4] |= {"schedule": alias, "steps": 5}
    again = experiments.finalists(
        Setup(family, TOY), {**found, "front": [{**found["front"][0], **found["confirmed"][4]}]}
    )
    assert [row["schedule"] for row in again if row["recommended"]] == [alias] and len(again) == 4
    assert experiments.finalists(Setup(family, TOY), {**found, "front": []}) == []


def test_the_tuners_choice_is_judged_on_rows_that_the_search_has_not_seen(
    families: dict[str, Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaylm.measure.store import Store

    family, seed = families["main"], 3
    monkeypatch.setattr(experiments, "_search", lambda setup, method, **options: searched(family, setup.seed))
    setup = Setup(family, TOY, Store(tmp_path), seed=seed)
    fresh = experiments.tuner(setup)["fresh"]
    assert fresh["seed"] == seed + experiments.FRESH != seed and fresh["n"] == TOY.samples
    names = list(dict.fromkeys(row["schedule"] for row in fresh["rows"]))
    options: dict[str, Any] = {"recipe": "mdlm", "rivals": False, "progress": False}
    direct = compare(family, ["3b:16", *names], 4, seed=seed + experiments.FRESH, **options)
    logs = {row["schedule"]: np.array(row["log_ppls"]) for row in direct["rows"]}
    for name in names:
        for other in ("3b:16", "1b:6 3b:4 1b:6"):
            if name != other:
                expected = (logs[name] - logs[other]).mean()
                assert against(fresh["contrasts"], name, other)[0] == pytest.approx(expected)
    seen = compare(family, ["3b:16", *names], 4, seed=seed, **options)
    before = {row["schedule"]: row["gen_ppl"] for row in seen["rows"]}
    assert all(row["gen_ppl"] != before[row["schedule"]] for row in fresh["rows"])

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was drawn again")

    monkeypatch.setattr("relaylm.measure.evaluate.sample", refuse)
    assert experiments.tuner(setup)["fresh"] == fresh  # all from the store
    monkeypatch.setattr(experiments, "_search", lambda *a, **k: {"front": [], "confirmed": [], "stopped": None})
    assert "fresh" not in experiments.tuner(setup)


# ------------------------------------------------------------------------------------------------ MDLM's sampler


def test_kept_mass_of_a_uniform_model_is_that_of_the_formula() -> None:
    uniform = network(1, 1)
    uniform.output_layer.linear.weight.data.zero_()
    family = Family({"1b": uniform, "2b": network(2, 2)}, 27, 28, LENGTH, Text8Tokenizer(), "uniform")
    rows_nL = np.zeros((4, LENGTH), dtype=np.int64)
    steps = 2**22
    kept = mdlm_experiments.kept_mass(family, "1b", steps, rows_nL, seed=0)
    for t, mean, low in zip(kept["t"], kept["mean"], kept["low"], strict=True):
        expected = truncation_weight(1 / 27, t - 1 / steps, steps)
        assert mean == pytest.approx(expected, rel=1e-6) and low == pytest.approx(expected, rel=1e-6)
    assert kept["mean"][0] < 0.1 < kept["mean"][-1]


def test_the_published_sampler_is_run_on_the_same_random_numbers(families: dict[str, Family]) -> None:
    family = families["main"]
    setup = Setup(family, TOY)
    sides = mdlm_experiments.published_sides(family)
    first, again = (mdlm_experiments._published_scores(setup, sides, "sandwich", 8, 3) for _ in range(2))
    other = mdlm_experiments._published_scores(setup, sides, "heavy", 8, 3)
    assert first == again and first["log_ppl"] != other["log_ppl"]


# ------------------------------------------------------------------------------------------------ document, cost, docs


def test_a_document_escapes_what_it_shows(tmp_path: Path) -> None:
    nasty = "<script>x</script> | a & b"
    blocks: list[document.Block] = [
        f"## {nasty}",
        nasty + " `code` **bold**",
        "- one\n- two",
        document.Table("t", nasty, ["a"], [[nasty]]),
        document.Folded("more", nasty),
    ]
    document.write(blocks, nasty, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page and page.count("&lt;script&gt;x&lt;/script&gt; | a &amp; b") == 7
    assert "<code>code</code> <strong>bold</strong>" in page and "<ul><li>one</li><li>two</li></ul>" in page
    assert "| <script>x</script> \\| a & b |" in (tmp_path / "report.md").read_text()
    assert list(csv.reader((tmp_path / "tables" / "t.csv").open())) == [["a"], [nasty]]


def test_the_recorded_report_is_that_of_the_recorded_data(whole: tuple[Path, dict[str, Any]]) -> None:
    """Verdicts that are committed come from the data that is committed beside them. A run's, checked as well, come from
    the project's where it has made none."""
    records = ROOT / "results"
    kept = reproduce.load_all(records / "reproduce")
    for folder in (whole[0], records / "reproduce"):
        rows = list(csv.reader((folder / "tables" / "claims.csv").open()))[1:]
        judged = reproduce.judge_all({**kept, **reproduce.load_all(folder)}, records)
        assert [(v.claim.name, f"**{v.verdict}**") for v in judged] == [(row[0], row[1]) for row in rows]


# ------------------------------------------------------------------------------------------------ command line


def test_from_the_command_line(
    families: dict[str, Family], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "cpu", replace(TOY, name="cpu"))
    family = str(families["main"].folder)
    words = ["reproduce", "--family", family, "--scale", "cpu", "--out", str(tmp_path / "out"), "--seed", "3"]
    assert cli.main([*words, "--only", "disagreement", "depths", "--json", str(tmp_path / "r.json")]) == 0
    assert "the report is" in capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result["experiments"]) == {"disagreement", "depths"} and result["scale"]["samples"] == 4
    assert data_of(tmp_path / "out", "depths")["seed"] == 3
    monkeypatch.setenv("HOME", str(tmp_path))
    words[words.index("--out") + 1] = "~/out"  # what a file of flags says
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--only", "depths", "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["experiments"]["depths"]["status"] == "kept" and not any(c["recorded"] for c in result["claims"])
    assert cli.main([*words, "--only", "precision"]) == 0
    assert "precision was not run: it needs a family with a large vocabulary (--bpe)" in capsys.readouterr().err
    assert cli.main([*words, "--only", "nothing", "--records", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main([*words, "--only", "depths", "--records", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.main([*words, "--only", "depths", "--samples", "1"]) == 2
    assert cli.main(["reproduce", "--family", family, "--scale", "huge"]) == 2
    with pytest.raises(UserError, match="cpu, gpu, paper"):
        reproduce.reproduce(families["main"], "huge", tmp_path)


def test_the_package_alone_needs_no_records(families: dict[str, Family], tmp_path: Path) -> None:
    """As from a wheel: nothing but the package's own files, in another folder."""
    ignored = shutil.ignore_patterns("families", "__pycache__")
    shutil.copytree(Path(relaylm.__file__).parent, tmp_path / "site" / "relaylm", ignore=ignored)
    words = ["reproduce", "--family", str(families["second"].folder), "--scale", "cpu", "--only", "disagreement"]
    done = subprocess.run(
        [sys.executable, "-m", "relaylm", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "records" in line]
    assert said == ["no records of earlier results (--records): what this family cannot show is left out of the report"]
    report = (tmp_path / "reproduce" / "report.md").read_text()
    assert "13 not shown" in report and "kept with the project" not in report and "The KL peaks at" in report


@pytest.mark.slow
def test_the_tuner_at_toy_size(families: dict[str, Family], tmp_path: Path) -> None:
    found = run(families, tmp_path, ["tuner", "search"], scale=replace(TOY, search_samples=12, budgets=(0.2, 0.4)))
    assert {item["status"] for item in found["experiments"].values()} == {"ran"}
    front = data_of(tmp_path, "tuner")["result"]["front"]
    assert [round(goal["saved_at_least"], 6) for goal in front] == [0.2, 0.4]
    assert all(goal["saved"] >= goal["saved_at_least"] - 1e-9 for goal in front)
    assert (tmp_path / "figures" / "tuner.png").is_file()
    fresh = data_of(tmp_path, "tuner")["result"]["fresh"]
    assert fresh["n"] == TOY.samples and fresh["seed"] == experiments.FRESH
    for goal in front:
        rows = [row for row in fresh["rows"] if row["budget"] == goal["saved_at_least"]]
        assert [row["schedule"] for row in rows if row["recommended"]] == [goal["schedule"]]
        assert "sandwich" in {row["what"] for row in rows} and all(row["saved"] >= 0.199 for row in rows)
        heavy = next(row for row in rows if row["what"].startswith("3b alone"))  # the same as the search would take
        assert heavy["schedule"] in {row["schedule"] for row in data_of(tmp_path, "tuner")["result"]["confirmed"]}
    findings = next(c["findings"] for c in found["claims"] if c["claim"].startswith("Nothing simpler"))
    assert any("4 fresh rows" in finding["evidence"] for finding in findings)


def test_every_experiment_has_an_estimate(families: dict[str, Family]) -> None:
    assert set(reproduce._samples(Setup(families["main"], TOY))) == set(reproduce.NAMES)
