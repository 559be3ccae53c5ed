"""The recorded results: how they were made, whether they agree with themselves, and what follows from raw values."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaylm.core.cost import call_flops
from relaylm.core.plan import Plan, make_events, make_plan
from relaylm.core.schedule import Schedule
from relaylm.measure import metrics
from relaylm.measure.judge import load_judge, score
from relaylm.measure.likelihood import spread_rows
from relaylm.models.family import Family
from relaylm.models.text import read_text
from relaylm.sampling.policy import static_models
from relaylm.sampling.queue import Queue
from relaylm.search.tournament import more_is_no_worse
from relaylm.studies.bench.engine_parts import below_zero, fit
from relaylm.studies.compose import compose
from relaylm.studies.paper.contrasts import against, difference, sign
from relaylm.studies.paper.reproduce import NAMES, load_all

RESULTS = Path(__file__).parents[2] / "results"
FAMILIES = ("wiki-char", "books-char", "wiki-bpe")


def record(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def experiment(name: str) -> dict[str, Any]:
    return dict(record(f"reproduce/data/{name}")["result"])


def test_every_result_says_how_it_was_made() -> None:
    files = sorted(RESULTS.rglob("*.json"))
    assert len(files) > 30
    for file in files:
        found = json.loads(file.read_text())
        assert {"command", "machine", "versions", "seed", "commit"} <= set(found), file.name
    assert tuple(load_all(RESULTS / "reproduce")) == NAMES  # every experiment is there, in a format that can be read


# ------------------------------------------------------------------------------------------------ speed


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_figures_of_the_bench_follow_from_its_raw_values(name: str) -> None:
    found = record(f"bench/{name}")
    for which, end in (("heavy", ""), ("light", "_light")):
        run, windows = found["engine_runs"][which], found["windows_ms_per_row_step"][which]
        engine_ms = np.mean(run["seconds"]) * 1e3 / (run["rows"] * found["settings"]["steps"])
        assert found[f"engine{end}_ms_per_row_step"] == pytest.approx(engine_ms)
        assert found[f"reference{end}_ms_per_row_step"] == pytest.approx(np.mean(list(windows.values())))
        assert found[f"speedup{end}"] == pytest.approx(np.mean(list(windows.values())) / engine_ms)
        rate = run["executed_tflop"] / np.mean(run["seconds"]) / np.median(found["matmul"]["all"])
        assert found[f"fraction_of_limit{end}"] == pytest.approx(rate)
    shares = found["shares"]
    assert [entry["light_share"] for entry in shares] == [k / 10 for k in range(11)]
    for entry in shares:
        assert entry["wall_saved"] == pytest.approx(np.mean(entry["wall_saved_all"]))
    for kind in ("flops", "computed"):
        p = below_zero([entry[f"wall_minus_{kind}_all"] for entry in shares[1:]])
        assert [entry[f"p_below_{kind}"] for entry in shares[1:]] == pytest.approx(p)
    line = fit([e["light_share_of_calls"] for e in shares], [e["wall_saved"] for e in shares])
    assert found["slope"]["value"] == pytest.approx(line["value"], rel=1e-2)  # over passes, not their means
    assert name == "cpu" or all(entry["p_below_computed"] > 0.05 for entry in shares)  # operations saved are time saved
    assert found["kl_to_fp32"] == found["kl"]["mean"] < 1e-3


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_operations_with_empty_places_are_those_of_the_queue(share: float) -> None:
    """What was recorded beside the bench's light shares, replayed on the host: which rows go into which call does not
    depend on the GPU. For the short runs that were timed, and for whole rows."""
    found = record("bench/h200")
    size = found["settings"]
    steps, length, depths = size["steps"], size["length"], size["depth"][::-1]
    times = [k / steps for k in range(steps, -1, -1)]

    def flops(depth: int, positions: int) -> float:
        return call_flops(depth, size["width"], size["vocab_size"], length, positions)

    def replayed(share: float, plan: Plan, batch: int) -> tuple[float, float, int]:
        """Operations of the calls, with the empty places too, and how many of these there are."""
        events = make_events(plan, times)
        names = ("light", "heavy")
        lookup = static_models(Schedule.parse(f"sandwich:{100 * share:g}%").bind(*names).timetable(steps), names)
        assert lookup is not None
        model_E = lookup(events.step_E, events.t_E)
        queue = Queue(events, model_E, length, batch)
        queue.foresee()
        empty = [0, 0]
        while (call := queue.take()) is not None:
            empty[call.model] += call.shape.rows - len(call.rows_R)
            queue.advance(call)
        pairs, number = np.unique(np.stack([model_E, events.count_E]), axis=1, return_counts=True)
        made = sum(n * flops(depths[model], int(due)) for (model, due), n in zip(pairs.T, number, strict=True))
        return made, made + sum(n * flops(depth, 1) for n, depth in zip(empty, depths, strict=True)), sum(empty)

    def saved(plan: Plan, batch: int) -> tuple[float, float, int]:
        (base, base_with, _), (own, own_with, empty) = (replayed(s, plan, batch) for s in (0, share))
        return 1 - own / base, 1 - own_with / base_with, empty

    rows, batch, free = map(int, re.findall(r"\d+", found["shares_measured_on"])[:3])
    given_nL = np.zeros((rows, length), dtype=np.int64)
    given_nL[:, length - free :] = -1
    short = saved(make_plan(rows, length, found["seed"], given_nL), batch)
    entry = next(entry for entry in found["shares"] if entry["light_share"] == share)
    apart = [entry["wall_saved_all"][0] - entry[f"wall_minus_{kind}_all"][0] for kind in ("flops", "computed")]
    assert [*short] == pytest.approx([*apart, entry["padded_calls"][0]])
    whole = saved(make_plan(size["samples"], length, found["seed"]), size["batch_size"])
    row = next(row for row in found["whole_rows"] if row["light_share"] == share)
    assert [*whole] == pytest.approx(
        [row[key] for key in ("flops_saved", "flops_saved_with_empty_places", "padded_calls")]
    )


# ------------------------------------------------------------------------------------------------ searches


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tuner_against_exhaustive_search(family: str) -> None:
    found = record(f"search/{family}")["two"]
    assert found["calls"]["ratio"] <= 0.38 and found["tree_check"]["equal"]
    spread = found["worst_against_winner"]["difference"]
    assert len(found["tune"]) == (1 if family == "wiki-bpe" else 5)
    for run in found["tune"]:
        assert run["calls_of_naive_search"] <= 0.1
        assert run["against_winner"]["ci"][1] <= 0.01 and run["recovered_of_spread"] >= 0.9
        assert run["recovered_of_spread"] == pytest.approx(1 - run["against_winner"]["difference"] / spread)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_costs_more_than_its_budget(family: str) -> None:
    for budget in record(f"search/{family}")["all"]:
        rows = budget["rows"]
        assert all(row["saved"] >= budget["saved"] - 1e-9 for row in rows)
        assert sum(row["recommended"] for row in rows) == 1
        losses = [row["against_heavy"]["difference"] for row in rows]
        assert losses == sorted(losses)
        chosen = next(row["against_heavy"]["difference"] for row in rows if row["recommended"])
        for row, loss in zip(rows, losses, strict=True):
            assert row["against_recommended"]["difference"] == pytest.approx(loss - chosen, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_210_placements_are_there(family: str) -> None:
    found = record(f"search/{family}-210")
    names = [row["name"] for row in found["schedules"]]
    assert len(set(names)) == found["schedules_tried"] == 210 and all(name.count("1") == 4 for name in names)
    logs = [row["log_ppl"] for row in found["schedules"]]
    assert logs == sorted(logs) and names[:5] == [row["name"] for row in found["top"]]
    (light,) = found["influence"]
    ppl = {row["name"]: row["ppl"] for row in found["schedules"]}
    for j, influence in enumerate(found["influence"][light]):
        own = np.mean([value for name, value in ppl.items() if name[j] == "1"])
        assert influence == pytest.approx(own - np.mean(list(ppl.values())), abs=1e-9)


def test_fewer_steps_cost_half_with_twice_the_positions_and_a_sandwich_the_same() -> None:
    found = record("search/wiki-char-lengths")["lengths"]
    for row, longer in pairwise(found):
        assert 1.8 < row["steps"]["loss"] / longer["steps"]["loss"] < 2.2
        assert row["sandwich"]["ci"][0] < longer["sandwich"]["loss"] < row["sandwich"]["ci"][1]


def test_pooling_is_worth_twice_the_rows() -> None:
    """What a choice on few rows loses against the best within its budget, with
    and without `more_is_no_worse`, on draws with the recorded means and covariances of the tuner's schedules."""
    fresh = experiment("tuner")["fresh"]
    rows = {row["schedule"]: row for row in fresh["rows"]}
    names, heavy = list(rows), fresh["heavy"]
    truth = np.array([difference(fresh["contrasts"], name, heavy)[0] for name in names])
    saved = np.array([rows[name]["saved"] for name in names])
    ways = [
        re.sub("^([0-9]+b) alone in.*", r"\1 fewer", re.sub(".*alone$", "alone", rows[name]["what"])) for name in names
    ]
    own = np.array([difference(fresh["contrasts"], name, heavy)[1] ** 2 for name in names])
    between = np.array(
        [[difference(fresh["contrasts"], a, b)[1] ** 2 if a != b else 0.0 for b in names] for a in names]
    )
    root = np.linalg.cholesky((own[:, None] + own - between) / 2 * fresh["n"])  # of a single row's differences
    rng = np.random.default_rng(0)

    def lost(n: int, pooled: bool) -> float:
        total = 0.0
        for _ in range(400):
            mean = truth + root @ rng.normal(size=len(names)) / math.sqrt(n)
            mean = more_is_no_worse(ways, -saved, mean) if pooled else mean
            for budget in (0.1, 0.2, 0.3, 0.4, 0.5):
                within = [s for s in range(len(names)) if saved[s] > budget - 0.01]
                total += truth[min(within, key=lambda s: (mean[s], saved[s]))] - truth[within].min()
        return total / 2000

    assert lost(31, pooled=True) < lost(62, pooled=False) < lost(31, pooled=False)


# ------------------------------------------------------------------------------------------------ the paper


def pairs_of(value: Any) -> list[Any]:
    """Every kept difference of two schedules, wherever it is in a result."""
    if isinstance(value, dict):
        own = value.get("contrasts", [])
        return own + [pair for item in value.values() if item is not own for pair in pairs_of(item)]
    return [pair for item in value for pair in pairs_of(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", ["schedules", "depths", "shares", "prefixes", "second-corpus", "bpe", "tuner"])
def test_intervals_of_differences_follow_from_their_errors(name: str) -> None:
    pairs = pairs_of(experiment(name))
    assert pairs
    for pair in pairs:
        value, low, high = against([pair], pair["first"], pair["second"])
        assert value == pair["difference"] and [low, high] == pytest.approx(pair["ci"], abs=1e-6)


def test_float32_draws_lower_perplexity_and_entropy() -> None:
    for found in experiment("precision")["by_steps"].values():
        exact, cut = (next(r for r in found[k]["rows"] if r["schedule"] == "heavy") for k in ("exact", "published"))
        for key in ("log_ppl", "entropy"):
            half = math.hypot(*(row[f"{key}_ci"][1] - row[f"{key}_ci"][0] for row in (exact, cut))) / 2
            assert cut[key] - exact[key] + half < 0


def test_two_judges_on_the_same_samples() -> None:
    found = record("judges/wiki-char")
    logs = {row["schedule"]: row for row in found["schedules"]}
    assert len(found["pairs"]) == 21
    for pair in found["pairs"]:
        for judge in ("own", "other"):
            apart = logs[pair["first"]][judge]["log_ppl"] - logs[pair["second"]][judge]["log_ppl"]
            assert pair[judge] == pytest.approx(apart)
    opposite = [pair for pair in found["pairs"] if {sign(*pair[f"{j}_ci"]) for j in ("own", "other")} == {True, False}]
    assert found["differ"] == opposite == []


# ------------------------------------------------------------------------------------------------ decoding rules


def test_the_grid_of_rules() -> None:
    """All cells, their front and what both together save and lose, from the cells themselves."""
    found = record("compose/wiki-char")
    cells = {(row["line"], row["dial"], row["schedule"]): row for row in found["rows"]}
    assert len(cells) == 70 == sum(run["cells"] for run in found["runs"]) and found["missing"] == []
    assert found["answer"] == compose.answer(found["combinations"])
    assert [row["front"] for row in found["rows"]] == compose.pareto(found["rows"], found["heldout"])
    for item in found["combinations"]:
        line, dial, schedule, neither = (item[key] for key in ("line", "dial", "schedule", "neither"))
        base = cells[line, neither, "heavy"]
        both, alone, steps = (cells[line, *cell] for cell in ((dial, schedule), (neither, schedule), (dial, "heavy")))
        for row, key in ((both, "both"), (alone, "schedule"), (steps, "steps")):
            assert item["flops"][key] == pytest.approx(row["flops"] / base["flops"])
            assert item["loss"][key]["value"] == pytest.approx(row["log_ppl"] - base["log_ppl"], abs=1e-6)


def test_seconds_are_left_out_where_other_work_shared_the_gpu() -> None:
    for row in record("compose/wiki-char")["rows"]:
        assert (row["seconds"] is None) == ("seconds_beside_other_work" in row)
        assert len(row["commit"]) == 7


@pytest.mark.slow
def test_the_held_out_text_of_the_grid() -> None:
    """A minute on one core: the text that came with the family, judged again."""
    found = record("compose/wiki-char")
    family = Family.from_pretrained("wiki-char")
    assert family.tokenizer is not None and family.heldout is not None
    tokens_nL = spread_rows(family.tokenizer.encode(read_text(family.heldout)), found["length"], found["n"])
    texts = [family.tokenizer.decode(row) for row in tokens_nL]
    scores = score(load_judge("own", family), tokens_nL, texts)
    again = metrics.perplexity(scores.written_nll_n, scores.written_count_n)
    assert abs(again["log_ppl"] - found["heldout"]["log_ppl"]) < 1e-4
    assert abs(metrics.describe_texts(list(tokens_nL), texts)["word_entropy"] - found["heldout"]["word_entropy"]) < 1e-9


# ------------------------------------------------------------------------------------------------ training


def test_the_trainer_is_as_fast_as_it_should_be() -> None:
    """4.5M characters a second at 12 x 256, 40% of the peak at 12 x 768."""
    entries = record("train/throughput")["entries"]
    assert max(e["tokens_per_s"] for e in entries if e["shape"].startswith("12 x 256, L=256, V=28")) >= 4.5e6
    assert max(e["mfu"] for e in entries if e["shape"].startswith("12 x 768, L=1024, V=50258")) >= 0.4


@pytest.mark.parametrize("family", ["wiki-char", "books-char"])
def test_deeper_models_are_better(family: str) -> None:
    models = record(f"train/{family}")["models"]
    depths = sorted(int(name[:-1]) for name in models if name[-1] == "b")
    bits = [models[f"{depth}b"]["heldout"]["bits"] for depth in depths]
    assert bits == sorted(bits, reverse=True) and len(bits) >= 3


def test_the_bundled_heavy_model_is_better_beyond_chance() -> None:
    training = Family.load("wiki-bpe").meta["training"]
    assert training["d12"]["heldout"]["high"] < training["d4"]["heldout"]["low"]
