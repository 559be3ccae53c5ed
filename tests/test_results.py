"""Numbers in the README and the documents are those of the recorded results."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaylm import compose, compose_view, metrics, paper
from relaylm.bound import spread_rows
from relaylm.cost import call_flops
from relaylm.decoding import RULES, parse_rule
from relaylm.diffusion import LINEAR
from relaylm.event_queue import Queue, call_shapes
from relaylm.family import Family
from relaylm.judge import load_judge, score
from relaylm.ladder import more_is_no_worse
from relaylm.plan import Plan, make_events, make_plan
from relaylm.reproduce_figures import against, difference
from relaylm.sampler import _static_models
from relaylm.schedule import sandwich
from relaylm.sections import left_open
from relaylm.text import read_text

ROOT = Path(__file__).parent.parent


def test_speed_table_of_the_readme() -> None:
    found = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())
    readme = (ROOT / "README.md").read_text()
    heavy, light = found["reference_ms_per_row_step"], found["reference_light_ms_per_row_step"]
    engine, engine_light = found["engine_ms_per_row_step"], found["engine_light_ms_per_row_step"]
    assert f"| MDLM's sampler | {heavy:.2f} | {light:.2f} |" in readme
    assert f"| relaylm | {engine:.3f} | {engine_light:.4f} |" in readme
    assert f"| times faster | {heavy / engine:.1f} | {light / engine_light:.1f} |" in readme
    assert f"costs {100 * engine_light / engine:.1f}% of the heavy one" in readme
    assert f"(MDLM's sampler: {100 * light / heavy:.1f}%)" in readme
    assert f"| the same under `torch.compile` | {found['reference_compiled_ms_per_row_step']:.2f} | |" in readme
    plain = " ".join(readme.split())
    low, high = found["slope"]["ci"]
    value = f"{found['slope']['value']:.2f}% of the time ({low:.3f} to {high:.3f})"
    assert f"goes to the light model saves {value}, and at no share is that significantly less than the" in plain
    assert all(entry["p_below_computed"] > 0.05 for entry in found["shares"])
    off = max(abs(row["flops_saved"] - row["flops_saved_with_empty_places"]) for row in found["whole_rows"])
    assert "the schedule's own to within 0.05%" in plain and off < 0.0005
    assert f"computes at {100 * found['fraction_of_limit']:.0f}% of the rate" in plain
    memory = found["peak_memory_engine"] / found["peak_memory_reference"]
    assert f"batch 32 is {100 * memory:.1f}% of the reference's" in plain and found["peak_memory_batch"] == 32
    assert f"is {found['kl_to_fp32']:.1e} nats" in plain
    rival = found["ar_tokens_per_s"]["best"] / found["engine_tokens_per_s"]
    assert f"KV cache writes {rival:.0f} times as many tokens a second" in plain
    laptop = json.loads((ROOT / "results" / "bench" / "cpu.json").read_text())
    assert f"is {laptop['speedup']:.1f} times as fast as MDLM's sampler with 12 blocks" in plain
    assert f"and {laptop['speedup_light']:.1f} times with 4, and each per cent of light calls saves" in plain
    assert f"saves {laptop['slope']['value']:.2f}% of the time ([" in plain
    assert laptop["settings"]["precision"]["engine"].startswith("blocks bfloat16")


def test_how_near_the_limit_the_engine_is() -> None:
    """docs/concepts.md: what each kernel of a call does, from the profile and the network's size."""
    found = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())
    text = (ROOT / "docs" / "concepts.md").read_text()
    plain, parts = " ".join(text.split()), found["breakdown"]
    assert f"at {100 * found['fraction_of_limit']:.0f}% of the rate" in plain
    assert f"in the same run, {found['matmul_tflops']:.0f} TFLOP/s" in plain
    assert f"{parts['blocks']:.1%} is in the blocks, {parts['head']:.1%} in the head" in plain
    assert f"{parts['drawing']:.1%} in the draw and {parts['host']:.1%} on the host" in plain
    length, width = (found["settings"][name] for name in ("length", "width"))
    square = 2 * length * width**2  # operations of a row's product with a square matrix
    # In 11 blocks; the first one's queries, keys and values are a table's and its attention's output is not added in
    # place; of the last one only keys are made.
    flops = {
        "nvjet_sm90_tss_192x192": ("products that add to the residual stream (cuBLAS)", (10 + 11 * 4) * square),
        "_twice_gelu": ("MLP up, with GELU (Triton)", 11 * 4 * square),
        "cudnn": ("attention, heads of 64 (cuDNN)", 11 * 4 * length**2 * width),
        "_rotated": ("queries, keys and values, with rotation (Triton)", (10 * 3 + 1) * square),
    }
    beyond = {}
    for start, (what, operations) in flops.items():
        kernel = next(kernel for kernel in parts["kernels"] if kernel["name"].startswith(start))
        us = kernel["microseconds"] / parts["kernels_rows"]
        assert f"| {what} | {us:.0f} | {operations / us / 1e6:.0f} |" in text
        beyond[start] = us - operations / found["matmul_tflops"] / 1e6
    norm = next(kernel for kernel in parts["kernels"] if kernel["name"].startswith("_norm"))
    norms = norm["microseconds"] / parts["kernels_rows"]
    assert f"| norms | {norms:.0f} | |" in text
    assert f"({beyond['cudnn']:.0f} µs beyond the limit)" in plain
    assert f"at the speed of memory ({norms:.0f})" in plain
    assert f"no product runs ({beyond['_twice_gelu']:.0f} and {beyond['_rotated']:.0f})" in plain


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_operations_with_empty_places_are_those_of_the_queue(share: float) -> None:
    """What was recorded beside the bench's light shares, replayed on the host: which rows go into which call does not
    depend on the GPU. For the short runs that were timed, and for whole rows."""
    found = json.loads((ROOT / "results" / "bench" / "h200.json").read_text())
    size = found["settings"]
    steps, length, depths = size["steps"], size["length"], size["depth"][::-1]
    times = [k / steps for k in range(steps, -1, -1)]

    def flops(depth: int, positions: int) -> float:
        return call_flops(depth, size["width"], size["vocab_size"], length, positions)

    def replayed(share: float, plan: Plan, batch: int) -> tuple[float, float, int]:
        """Operations of the calls, with the empty places too, and how many of these there are."""
        events = make_events(plan, times)
        shapes, shapes_E = call_shapes(events, times, LINEAR, length, batch)
        queue = Queue(plan, events, shapes_E, shapes, in_flight=32 * batch)
        names = ("light", "heavy")
        model_E = _static_models(sandwich(share).bind(*names).timetable(steps), events, names)
        assert model_E is not None
        queue.foresee(model_E)
        empty = [0, 0]
        while True:
            queue.model_n[queue.pool] = model_E[queue.next_n[queue.pool]]
            if (call := queue.take()) is None:
                break
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


def searched(family: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "search" / f"{family}.json").read_text())
    return found


def budget_line(family: str, budget: dict[str, Any]) -> str:
    """A saving's line of the README: the sandwich, the best other mixture, the heavy model and the best other alone."""

    def cell(row: dict[str, Any]) -> str:
        low, high = row["against_heavy"]["ci"]
        return f"{100 * row['against_heavy']['difference']:+.1f} ({100 * low:.1f} to {100 * high:.1f})"

    rows = sorted(budget["rows"], key=lambda row: row["against_heavy"]["difference"])
    alone = [row for row in rows if row["kind"] == "rival" and row["what"] != "sandwich"]
    sandwich = next(row for row in rows if row["what"] == "sandwich")
    mixed = next(row for row in rows if row["kind"] == "mixed")
    heavy = next(row for row in alone if row["schedule"].startswith("12b:"))
    other = next(row for row in alone if row is not heavy)
    cheaper = f" ({other['saved']:.0%} saved)" if other["saved"] > budget["saved"] + 0.03 else ""
    names = [f"{heavy['schedule'].removeprefix('12b:')} steps", other["what"].replace("b alone", " blocks") + cheaper]
    cells = [f"`{family}`", f"{budget['saved']:.0%}", cell(sandwich), cell(mixed), f"{names[0]}: {cell(heavy)}"]
    return f"| {' | '.join([*cells, f'{names[1]}: {cell(other)}'])} |"


def test_equal_compute_table_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for family in ("wiki-char", "books-char", "wiki-bpe"):
        budgets = searched(family)["all"]
        assert len(budgets) == 3
        for budget in budgets:
            assert budget_line(family, budget) in readme
    # What the text around it says.
    found = searched("wiki-char")
    for budget in found["all"]:
        rows = {row["what"]: row["against_heavy"]["difference"] for row in budget["rows"]}
        simple = [loss for what, loss in rows.items() if "alone" in what]
        assert min(simple) <= min(rows.values())
    top, bottom = ([row["name"] for row in found["two"][end]] for end in ("top", "bottom"))
    assert all(name.startswith("1") and name.endswith("1") and "1" not in name[4:6] for name in top)
    assert all("1" in name[4:6] for name in bottom)


def hundredths(item: dict[str, Any], sign: int = 1) -> str:
    ends = sorted(100 * sign * end for end in item["ci"])
    return f"{100 * sign * item['difference']:.1f} ({ends[0]:.1f} to {ends[1]:.1f})"


def test_what_is_said_of_books_and_bpe() -> None:
    """README and docs/search.md: where schedules win, where they do not."""
    readme, text = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/search.md"))
    books, bpe = searched("books-char"), searched("wiki-bpe")
    by = [{row["schedule"]: row for row in budget["rows"]} for budget in books["all"]]
    shorter = hundredths(by[0]["12b:87"]["against_sandwich"])
    value, interval = shorter.split(" ", 1)
    assert by[0]["12b:87"]["against_sandwich"]["ci"][0] > 0
    assert f"beats 12 blocks in 87 steps by {value} hundredths {interval}" in readme
    assert f"beats 12 blocks in 87 steps by {value} hundredths {interval}" in text
    chosen = next(row for row in by[1].values() if row["recommended"])
    assert chosen["kind"] == "mixed" and chosen is min(by[1].values(), key=lambda r: r["against_heavy"]["difference"])
    sandwich = next(row for row in by[1].values() if row["what"] == "sandwich")
    losers = [sandwich, by[1]["8b:128"], by[1]["12b:61"]]
    assert all(row["against_recommended"]["ci"][0] > 0 for row in losers)
    first, second, third = (hundredths(row["against_recommended"]) for row in losers)
    assert f"beats the sandwich by {first}, 8 blocks alone by {second} and 12 blocks in 61 steps by {third}" in text
    for rival in ("against_sandwich", "against_recommended"):
        low, high = by[2]["8b:78"][rival]["ci"]
        assert low < 0 < high
    assert not any(
        row["kind"] == "mixed" and row["against_recommended"]["ci"][1] < 0
        for budget in bpe["all"]
        for row in budget["rows"]
    )
    tuned = {run["schedule"]: run for run in books["two"]["tune"]}
    value, interval = hundredths(tuned["4b:25 12b:78 4b:25"]["against_winner"], -1).split(" ", 1)
    assert f"is {value} hundredths better than that winner {interval}" in text
    names = json.loads((ROOT / "results" / "search" / "books-char-210.json").read_text())
    assert names["top_frequency"]["4b"][0] == 1 and names["bottom_frequency"]["4b"][0] == 0
    shares = {family: searched(family)["two"]["calls"]["ratio"] for family in ("books-char", "wiki-bpe")}
    assert f"tree took {shares['books-char']:.0%} of the calls" in text
    assert f"sharing, {shares['wiki-bpe']:.0%} of the calls" in text
    spread = hundredths(bpe["two"]["worst_against_winner"])
    assert f"worst of the 210 it is {spread.replace(' (', ' hundredths (')}" in text
    assert all(low < 0 < high for low, high in bpe["two"]["influence_ci"]["4b"])
    behind = next(row for row in bpe["all"][1]["rows"] if row["what"] == "sandwich")["against_recommended"]
    assert f"the sandwich is {hundredths(behind)} behind 12 blocks in 123 steps" in text and behind["ci"][0] > 0
    level = bpe["all"][0]["rows"][:3]
    assert all(row["against_recommended"]["ci"][0] <= 0 <= row["against_recommended"]["ci"][1] for row in level)


def test_what_is_said_of_the_number_of_steps() -> None:
    """docs/search.md: fewer steps cost half with twice the steps, the sandwich the same; light first is no worse."""
    found = json.loads((ROOT / "results" / "search" / "wiki-char-lengths.json").read_text())["lengths"]
    text = (ROOT / "docs" / "search.md").read_text()
    for row in found:
        cells = [
            f"{100 * row[kind]['loss']:+.2f} ({100 * row[kind]['ci'][0]:.2f} to {100 * row[kind]['ci'][1]:.2f})"
            for kind in ("steps", "sandwich", "first")
        ]
        assert f"| {row['length']} | {' | '.join(cells)} |" in text
        assert row["first"]["loss"] < 1.02 * min(row["steps"]["loss"], row["sandwich"]["loss"])
    plain = " ".join(text.split())
    for family in ("books-char", "wiki-bpe"):
        other = json.loads((ROOT / "results" / "search" / f"{family}-lengths.json").read_text())["lengths"]
        *before, last = (f"{100 * row['steps']['loss']:.2f}" for row in other)
        assert f"{', '.join(before)} and {last} on [{family}]" in plain
        shorter = other if family == "books-char" else other[:-1]
        assert all(row["first"]["loss"] < min(row["steps"]["loss"], row["sandwich"]["loss"]) for row in shorter)
        if family == "wiki-bpe":
            costs = [100 * row["sandwich"]["loss"] for row in other]
            assert f"the sandwich costs {min(costs):.2f} to {max(costs):.2f}" in plain
            last_row = other[-1]
            against = f"{100 * last_row['first']['loss']:.2f} against {100 * last_row['steps']['loss']:.2f}"
            assert last_row["length"] == 256 and f"256 positions of wiki-bpe ({against}, not told apart)" in plain
            assert last_row["first"]["ci"][0] < last_row["steps"]["loss"] < last_row["first"]["loss"]
    for row, longer in pairwise(found):
        assert 1.8 < row["steps"]["loss"] / longer["steps"]["loss"] < 2.2
        assert row["sandwich"]["ci"][0] < longer["sandwich"]["loss"] < row["sandwich"]["ci"][1]


def test_the_evidence_at_17_per_cent_is_mixed() -> None:
    """As the README says: told apart on one seed's samples, not on the other's."""
    searched = json.loads((ROOT / "results" / "search" / "wiki-char.json").read_text())["all"][0]["rows"]
    sandwich = next(row for row in searched if row["what"] == "sandwich")
    assert sandwich["against_recommended"]["ci"][0] > 0
    report = (ROOT / "results" / "reproduce" / "tables" / "schedules-4b.csv").read_text()
    for rival in ("10b (rival", "H171 (rival"):
        line = next(line for line in report.splitlines() if line.startswith(rival))
        low, high = re.findall(r"\(([-+][0-9.]+) to ([-+][0-9.]+)\)", line)[0]
        assert float(low) < 0 < float(high)


def test_what_the_measuring_document_says_of_importance() -> None:
    """Peaks on text and on trajectories, and models that are closer to the heavy one than its twin is."""
    text = " ".join((ROOT / "docs" / "measuring.md").read_text().split())
    curves = {
        states: json.loads((ROOT / "results" / "importance" / f"wiki-char-{states}.json").read_text())["pairs"]
        for states in ("data", "trajectory")
    }
    peaks = [pair["peak_t"] for pair in curves["data"]]
    assert f"at t = {min(peaks):.2f} to {max(peaks):.2f}" in text
    four, six, eight, ten = curves["data"]
    assert f"({four['peak_t_relative']:.2f} and {six['peak_t_relative']:.2f})" in text
    for pair in curves["trajectory"]:
        flat = [kl for t, kl in zip(pair["t"], pair["kl"], strict=True) if t < 0.36]
        assert "flat from t = 0.05 to 0.35" in text and max(flat) < 1.08 * min(flat)
        assert pair["kl"][pair["t"].index(1.0)] < 0.01 * max(flat)
    assert all(min(pair["kl_relative"]) < 0 and max(pair["kl_relative"]) <= 0.001 for pair in (eight, ten))


def test_what_the_search_document_says_was_found() -> None:
    found = json.loads((ROOT / "results" / "search" / "wiki-char.json").read_text())
    text = " ".join((ROOT / "docs" / "search.md").read_text().split())

    sandwiches = [next(row for row in budget["rows"] if row["what"] == "sandwich") for budget in found["all"]]
    first, second, third = (hundredths(row["against_recommended"]) for row in sandwiches)
    assert f"by {first}, {second} and {third} hundredths" in text
    better = found["all"][2]["rows"][0]
    value, interval = hundredths(better["against_recommended"], -1).split(" ", 1)
    assert better["schedule"] == "8b:156" and f"are {value} hundredths better {interval}" in text
    tuned = found["two"]["tune"]
    assert {run["schedule"] for run in tuned} == {"12b:138"}
    value, interval = hundredths(tuned[0]["against_winner"], -1).split(" ", 1)
    assert f"is {value} hundredths of log-perplexity better than the winner of the 210 {interval}" in text
    assert f"took {found['two']['calls']['ratio']:.0%} of the calls" in text
    assert found["two"]["winner"]["schedule"] == "4b:51 12b:154 4b:51" and "`L51 H154 L51`" in text


def test_the_tuner_against_exhaustive_search() -> None:
    """What the files in results/search are there to show."""
    for family, seeds in (("wiki-char", 5), ("books-char", 5), ("wiki-bpe", 2)):
        found = searched(family)["two"]
        assert found["calls"]["ratio"] <= 0.38 and found["tree_check"]["equal"]
        assert len(found["tune"]) == seeds
        for run in found["tune"]:
            assert run["calls_of_naive_search"] <= 0.1
            assert run["against_winner"]["ci"][1] <= 0.01 and run["recovered_of_spread"] >= 0.9


def test_quality_table_of_the_readme() -> None:
    found = json.loads((ROOT / "results" / "compose" / "wiki-char.json").read_text())
    readme = (ROOT / "README.md").read_text()
    names = {
        "heavy": "12 blocks",
        "sandwich:25%": "sandwich, 25% of the steps by 4 blocks",
        "sandwich:50%": "sandwich, 50% of the steps by 4 blocks",
        "8b": "8 blocks",
        "light": "4 blocks",
    }
    rows = {row["schedule"]: row for row in found["rows"] if row["line"] == "ancestral" and row["dial"] == "T=256"}
    assert found["n"] == 1600 and rows.keys() == names.keys()
    for schedule, row in rows.items():
        cells = [names[schedule], f"{row['flops'] / found['n'] / 1e9:.0f}", f"{row['gen_ppl']:.2f}"]
        assert f"| {' | '.join(cells)} | {row['word_entropy']:.3f} |" in readme
    assert rows["8b"]["gen_ppl_ci"][1] < rows["sandwich:50%"]["gen_ppl"]  # what the text below the table says


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "results" / "reproduce" / "data" / f"{name}.json").read_text())["result"])


def test_what_the_reproduction_says_of_sandwich_strides_and_tuner() -> None:
    text = " ".join((ROOT / "docs" / "reproduce.md").read_text().split())

    def said(value: float, low: float, high: float) -> str:
        return f"({value:+.4f}, {low:+.4f} to {high:+.4f}"

    books, tokens = recorded("second-corpus")["schedules"], recorded("bpe")["schedules"]["by_light"]["4b"]
    for result in (books, tokens):
        assert said(*against(result["contrasts"], "sandwich", "quarter:1")) in text
    contest = next(c for c in tokens["rivals"] if (c["schedule"], c["rival"]) == ("sandwich", "H171"))
    low, high = contest["ci"]
    assert f"is {-contest['difference']:.4f} better there ({-high:.4f} to {-low:.4f})" in text
    assert contest["outcome"] == "level" and f"(p = {contest['p_holm']:.2f})" in text and len(tokens["rivals"]) == 20
    beats = [*recorded("prefixes")["by_prefix"].values(), recorded("schedules")["by_light"]["4b"]]
    assert all(against(r["contrasts"], "sandwich", f"quarter:{k}")[2] < 0 for r in beats for k in (1, 2, 3, 4))
    assert "In 1,024 and 2,048 steps the third quarter costs more there than the second" in text
    assert against(recorded("schedules")["by_light"]["4b"]["contrasts"], "quarter:3", "quarter:2")[2] < 0
    for steps in ("1024", "2048"):
        exact = recorded("precision")["by_steps"][steps]["exact"]["contrasts"]
        assert against(exact, "quarter:3", "quarter:2", 10)[1] > 0
    rows = {(row["kind"], row["stretch"]): (row["loss"], *row["ci"]) for row in recorded("strides")["rows"]}
    assert said(*rows["light", 0]) in text and said(*rows["stride", 0]) in text and said(*rows["light", 7]) in text
    assert f"against {said(*rows['stride', 7])[1:]}" in text
    worst = max((row for row in rows if row[0] == "light"), key=lambda row: rows[row][0])
    assert worst[1] in (3, 4) and f"up to {rows[worst][0]:+.4f}" in text
    front, fresh = recorded("tuner")["front"], recorded("tuner")["fresh"]
    names = [*["8b alone"] * 3, "12b alone in 106 steps", "12b alone in 85 steps"]
    assert [goal["what"] for goal in front] == names and [goal["rows"] for goal in front] == [31] * 5
    assert fresh["n"] == 1600
    value, low, high = against(fresh["contrasts"], "8b:256", "12b:203")
    assert (
        f"are {value:.4f} better than its 8 blocks ({low:.4f} to {high:.4f}), which save {front[0]['saved']:.0%}"
        in text
    )
    gains = []
    for row in fresh["rows"]:
        if row["budget"] > 0.25 and "alone" in row["what"]:
            sandwich = next(r for r in fresh["rows"] if r["budget"] == row["budget"] and r["what"] == "sandwich")
            value, low, high = against(fresh["contrasts"], row["schedule"], sandwich["schedule"])
            assert high < 0 or (row["schedule"] == "6b:256" and row["budget"] == pytest.approx(0.4))
            gains += [-value] if high < 0 else []
    assert f"by {min(gains):.2f} to {max(gains):.2f}, and" in text
    heavy = {0.1: "12b:203", 0.2: "12b:163", 0.3: "12b:132", 0.4: "12b:106", 0.5: "12b:85"}
    behind = {}
    for row in fresh["rows"]:
        if row["what"].startswith("light first") and (rival := heavy.get(round(row["budget"], 2))):
            behind[rival] = against(fresh["contrasts"], row["schedule"], rival)
    pair = [behind.pop(name) for name in ("12b:203", "12b:163")]
    assert "behind at 10% ({:.4f}, {:.4f} to {:.4f}) and".format(*pair[0]) in text and pair[0][1] > 0
    assert "at 20% ({:.4f}, {:.4f} to {:.4f}, with 30% saved)".format(*pair[1]) in text and pair[1][1] > 0
    assert len(behind) == 3 and all(low < 0 < high for _, low, high in behind.values())
    search = " ".join((ROOT / "docs" / "search.md").read_text().split())
    *first, last = (f"{100 * value:+.2f}" for value, _, _ in behind.values())
    assert f"({', '.join(first)} and {last} hundredths)" in search
    first, second = (f"{100 * value:+.2f}, {100 * low:.2f} to {100 * high:.2f}" for value, low, high in pair)
    assert f"({first}, and {second})" in search
    time, shares = recorded("time"), recorded("shares")
    mean = {
        kind: {share: sum(seconds) / len(seconds) for share, seconds in shares[f"{kind}_seconds"].items()}
        for kind in ("engine", "published")
    }
    ours, theirs = (1 - mean[kind]["100"] / mean[kind]["0"] for kind in mean)
    assert f"saves {ours:.1%} of the engine's time on this family" in text and f"and {theirs:.1%} of MDLM's" in text
    size = time["paper_size"]
    saved = [
        1 - size[f"{kind}_light_ms_per_row_step"] / size[f"{kind}_ms_per_row_step"] for kind in ("engine", "reference")
    ]
    assert f"it saves {saved[0]:.1%} of the engine's and {saved[1]:.1%} of MDLM's" in text


def test_how_long_the_reproduction_took() -> None:
    folder = ROOT / "results" / "reproduce" / "data"
    seconds = {file.stem: json.loads(file.read_text())["seconds"] for file in folder.glob("*.json")}
    others = sum(seconds.pop(name) for name in ("second-corpus", "bpe", "precision"))
    text = " ".join((ROOT / "docs" / "reproduce.md").read_text().split())
    assert f"took {sum(seconds.values()) / 60:.0f} minutes of the GPU, those on the other two families" in text
    assert f"families {others / 60:.0f} more" in text and len(seconds) == 10


def test_pooling_is_worth_twice_the_rows() -> None:
    """relaylm/ladder.py and docs/reproduce.md: what a choice on few rows loses against the best within its budget, with
    and without `more_is_no_worse`, on draws with the recorded means and covariances of the tuner's schedules."""
    fresh = recorded("tuner")["fresh"]
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


def test_what_is_said_of_float32_draws() -> None:
    """docs/reproduce.md and README.md: perplexity and entropy in both samplers, and whether early steps are robust."""
    text, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/reproduce.md", "README.md"))
    found = recorded("precision")["by_steps"]
    compared = {steps: (found[steps]["exact"], found[steps]["published"]) for steps in ("256", "1024", "2048")}
    assert found.keys() == compared.keys() and all(exact["n"] == 1600 for exact, _ in compared.values())

    def heavy(result: dict[str, Any]) -> dict[str, Any]:
        return dict(next(row for row in result["rows"] if row["schedule"] == "heavy"))

    def moved(one: dict[str, Any], other: dict[str, Any], key: str) -> tuple[float, float, float]:
        value = other[key] - one[key]
        half = sum((row[f"{key}_ci"][1] - row[f"{key}_ci"][0]) ** 2 for row in (one, other)) ** 0.5 / 2
        return value, value - half, value + half

    rows = {steps: [heavy(result) for result in both] for steps, both in compared.items()}
    exact, cut = ([f"{both[k]['gen_ppl']:.0f}" for both in rows.values()] for k in (0, 1))
    assert f"a perplexity of {exact[0]}, {exact[1]} and {exact[2]} in 256, 1,024 and 2,048 steps" in text
    assert f"float32 sampler {cut[0]}, {cut[1]} and {cut[2]}, with" in text
    assert all(moved(*both, key)[2] < 0 for both in rows.values() for key in ("log_ppl", "entropy"))
    less = [f"{-moved(*both, 'entropy')[0]:.3f}" for both in rows.values()]
    assert f"with {less[0]}, {less[1]} and {less[2]} nats less entropy" in text
    kept = [f"{found[steps]['kept_mass']['12b']['mean'][0]:.1%}" for steps in rows]
    assert f"at t = 1 it leaves {kept[0]}, {kept[1]} and {kept[2]} of the probability" in text
    assert all(both["kept_mass"]["12b"]["t"][0] == 1 for both in found.values())
    (value, low, high), gained = (moved(rows["256"][k], rows["2048"][k], "log_ppl") for k in (0, 1))
    assert low < 0 < high and f"({value:+.3f}, {low:+.3f} to {high:+.3f} in log-perplexity from 256 to 2,048)" in text
    assert "what float32 gains ({:+.3f}, {:+.3f} to {:+.3f})".format(*gained) in text and gained[2] < 0
    one, other = rows["1024"]
    off = f"{1 - other['gen_ppl'] / one['gen_ppl']:.0%} off the perplexity and {one['entropy'] - other['entropy']:.2f}"
    assert f"in 1,024 steps that [takes](docs/reproduce.md#recorded) {off} nats off the entropy" in readme

    def middle(result: dict[str, Any]) -> list[tuple[float, float, float]]:
        return [against(result["contrasts"], f"quarter:{k}", "quarter:1") for k in (2, 3)]

    short, longer, longest = (middle(exact) for exact, _ in compared.values())
    second, third = ("{:+.4f}, {:+.4f} to {:+.4f}".format(*item) for item in short)
    assert f"than in the first ({second}, and {third})" in text and all(low > 0 for _, low, _ in short)
    assert f"than the first again ({longer[1][0]:+.4f} and {longest[1][0]:+.4f})" in text
    assert all(third[1] > 0 and second[1] < 0 < second[2] for second, third in (longer, longest))
    one, other = ("{:+.4f}, {:+.4f} to {:+.4f}".format(*item[0]) for item in (longer, longest))
    assert f"the second is not told from it ({one}, and {other})" in text
    few = [item for _, published in compared.values() for item in middle(published)]
    assert len(few) == 6 and all(low < 0 < high for _, low, high in few) and recorded("precision")["n"] == 64
    widths = [(high - low) / 2 for _, low, high in few]
    assert f"(± {min(widths):.2f} to {max(widths):.2f}) are wider" in text
    owt = paper.TABLES[paper.OWT]
    theirs = [math.log(owt[f"quarter:{k}"].ppl / owt["quarter:1"].ppl) for k in (2, 3)]
    assert f"own differences ({theirs[0]:.3f} and {theirs[1]:.3f}): open" in text and max(theirs) < min(widths)


def test_what_the_reproduction_says_of_peaks() -> None:
    text = " ".join((ROOT / "docs" / "reproduce.md").read_text().split())
    first = {name: recorded(name)["pairs"][0] for name in ("disagreement",)}
    first |= {name: recorded(name)["disagreement"]["pairs"][0] for name in ("second-corpus", "bpe")}
    stages = [stage["pair"] for stage in recorded("training")["stages"]]
    assert f"`wiki-char` {left_open(first['disagreement']):.3f} and t = {first['disagreement']['peak_t']:.2f}" in text
    assert (
        f"`books-char` {left_open(first['second-corpus']):.3f} and t = {first['second-corpus']['peak_t']:.2f}" in text
    )
    kl = first["bpe"]["kl"]
    said = "and the KL grows until t = 0.15 and stays there"
    assert f"On `wiki-bpe` it leaves {left_open(first['bpe']):.3f} open, {said}" in text
    assert kl == sorted(kl, reverse=True) and first["bpe"]["t"][2] == 0.15 and kl[0] - kl[2] < 0.01 < kl[2] - kl[4]
    assert f"{left_open(stages[1]):.3f} and t = {stages[1]['peak_t']:.2f} after 260 steps" in text
    assert f"{left_open(stages[2]):.3f} and {stages[2]['peak_t']:.2f} after 1,040" in text
    assert f"{left_open(stages[4]):.3f} and {stages[4]['peak_t']:.2f} at the end" in text
    report = (ROOT / "results" / "reproduce" / "report.md").read_text()
    assert "over these 8 curves the two have a rank correlation of -0.90" in report and "correlation is -0.90" in text
    tokens = recorded("bpe")["schedules"]["by_light"]["4b"]["contrasts"]
    costs = [f"{against(tokens, f'quarter:{k}', 'heavy')[0]:+.3f}" for k in (1, 2, 3, 4)]
    assert f"in the first quarter cost {costs[0]}, less than in each of the others ({', '.join(costs[1:])})" in text
    assert all(against(tokens, f"quarter:{k}", "quarter:1")[1] > 0 for k in (2, 3, 4))
    for a, b in ((2, 3), (2, 4), (3, 4)):
        _, low, high = against(tokens, f"quarter:{a}", f"quarter:{b}")
        assert low < 0 < high


def composed(
    family: str = "wiki-char",
) -> tuple[dict[str, Any], dict[tuple[str, str, str], Any], dict[tuple[str, str, str], Any], str]:
    """The grid, its cells and its combinations by rule, dial and schedule, and what the document says of them (what
    stands before the section that was written from them)."""
    found = json.loads((ROOT / "results" / "compose" / f"{family}.json").read_text())
    cells, both = (
        {(item["line"], item["dial"], item["schedule"]): item for item in found[name]}
        for name in ("rows", "combinations")
    )
    text = (ROOT / "docs" / "decoding.md").read_text().split(f"<!-- compose {family}: begin -->")[0]
    return found, cells, both, " ".join(text.split(": end -->")[-1].split())


def test_what_the_decoding_document_says_of_rules() -> None:
    found, cells, _, text = composed()

    def ppl(line: str, dial: str, schedule: str = "heavy") -> str:
        return f"{cells[line, dial, schedule]['gen_ppl']:.2f}"

    def words(line: str, dial: str) -> str:
        return f"{cells[line, dial, 'heavy']['word_entropy']:.3f}"

    def share(one: tuple[str, str, str], other: tuple[str, str, str], what: str = "flops") -> float:
        return float(cells[one][what] / cells[other][what])

    def apart(one: tuple[str, str, str], other: tuple[str, str, str]) -> bool:
        """Do two cells' log-perplexities differ by more than the 95% interval of the difference?"""
        low, high = zip(*(cells[cell]["log_ppl_ci"] for cell in (one, other)), strict=True)
        margin = sum(((b - a) / 2) ** 2 for a, b in zip(low, high, strict=True)) ** 0.5
        return bool(abs(cells[one]["log_ppl"] - cells[other]["log_ppl"]) > margin)

    plain, cut, again = "ancestral", "ancestral@0.9", "remdm-cap:0.008"
    real = found["heldout"]
    assert f"Held-out text has {real['gen_ppl']:.2f} and {real['word_entropy']:.3f}" in text

    dials = ("T=256", "T=32", "T=8")
    first, second, third = (f"{ppl(plain, dial)} and {words(plain, dial)}" for dial in dials)
    assert f"have {first} in 256 steps, {second} in 32, {third} in 8" in text
    few = (plain, "T=8", "light"), (plain, "T=8", "heavy")
    assert f"({ppl(*few[0])}) for {share(*few):.0%} of the FLOPs" in text and not apart(*few)

    first, second, third = (f"from {ppl(plain, dial)} to {ppl(cut, dial)}" for dial in dials)
    assert f"{first} in 256 steps, {second} in 32 and {third} in 8" in text
    assert all(share((cut, dial, "heavy"), (plain, dial, "heavy")) == 1 for dial in dials)
    cheaper = (cut, "T=32", "heavy"), (plain, "T=256", "heavy")
    assert f"below 256 without it for {share(*cheaper):.0%} of the FLOPs" in text and apart(*cheaper)
    assert f"of words from {words(plain, 'T=256')} to {words(cut, 'T=256')} in 256 steps" in text
    letters = [cells[line, "T=256", "heavy"]["entropy"] for line in (plain, cut)]
    assert f"from {letters[0]:.3f} to {letters[1]:.3f}, past the text's {real['entropy']:.3f}" in text
    assert letters[1] < real["entropy"] < letters[0] and real["word_entropy"] < float(words(cut, "T=256"))
    assert f"four blocks have {ppl(cut, 'T=8', 'light')}" in text
    assert apart((cut, "T=8", "light"), (cut, "T=8", "heavy"))

    end = (again, "T=256", "heavy"), (plain, "T=256", "heavy")
    margins = [(cells[cell]["gen_ppl_ci"][1] - cells[cell]["gen_ppl_ci"][0]) / 2 for cell in end]
    assert f"has {ppl(*end[0])} ± {margins[0]:.2f} where `ancestral` has {ppl(*end[1])} ± {margins[1]:.2f}" in text
    assert f"({words(again, 'T=256')}) and for {share(*end, 'calls') - 1:.0%} more calls" in text
    assert apart(*end) and float(words(again, "T=256")) > float(words(plain, "T=256"))
    eight = (again, "T=256", "8b"), (plain, "T=256", "8b")
    assert f"go from {ppl(*eight[1])} to {ppl(*eight[0])}" in text and apart(*eight) and not apart(eight[0], end[1])
    assert f"({ppl(*end[1])}), as far as can be told, for {share(eight[0], end[1]):.0%} of their FLOPs" in text
    four = (again, "T=256", "light"), (plain, "T=256", "light")
    more = f"{share(*four) - 1:.0%} more FLOPs"
    assert f"go from {ppl(*four[1])} to {ppl(*four[0])} for {more}" in text and apart(*four)
    mixed = (again, "T=256", "sandwich:50%"), (plain, "T=256", "sandwich:25%")
    assert f"{ppl(*mixed[0])} with half of the steps light, against {ppl(*mixed[1])} without" in text
    assert share(*mixed) > 1 and apart(*mixed)
    assert f"nothing that could be told ({ppl(again, 'T=32')}, {ppl(again, 'T=8')})" in text
    for dial in ("T=32", "T=8"):
        for schedule in ("heavy", "sandwich:25%", "sandwich:50%", "8b", "light"):
            assert not apart((again, dial, schedule), (plain, dial, schedule))

    sure, bold = ("low-confidence", "T=256"), ("threshold", "0.9")
    assert f"in 256 steps has {ppl(*sure)} and {words(*sure)}, `threshold:0.9` {ppl(*bold)} and {words(*bold)}" in text
    assert all(cells[cell]["gen_ppl"] < real["gen_ppl"] for cell in cells if cell[0] == "threshold" or cell[:2] == sure)
    calls = [cells[cell]["calls"] / found["n"] for cell in (("threshold", "0.6", "heavy"), (plain, "T=256", "heavy"))]
    assert f"still needs {calls[0]:.0f} calls" in text and f"the {calls[1]:.0f} of `ancestral`" in text


def test_what_the_decoding_document_says_of_composing() -> None:
    found, cells, both, text = composed()
    plain, cut, again = lines = ("ancestral", "ancestral@0.9", "remdm-cap:0.008")
    of = {
        line: [item for item in both.values() if item["line"] == line]
        for line in (*lines, "low-confidence", "threshold")
    }
    ratios = {line: [item["flops"]["both"] / item["flops"]["product"] for item in items] for line, items in of.items()}
    off = {line: f"{max(abs(ratio - 1) for ratio in here):.1%}" for line, here in ratios.items()}
    assert f"to within {off[plain]} for `ancestral` with and without the nucleus" in text and off[plain] == off[cut]
    assert f"{off['low-confidence']} for `low-confidence` and {off[again]} for `remdm-cap`" in text
    low, high = min(ratios["threshold"]) - 1, max(ratios["threshold"]) - 1
    assert low > 0 and f"by {low:.1%} to {high:.1%}" in text
    calls = {cell[1:]: row["calls"] for cell, row in cells.items() if cell[0] == "threshold"}
    heavy, light = (1 - calls["0.6", schedule] / calls["0.9", schedule] for schedule in ("heavy", "light"))
    assert f"takes {heavy:.0%} of the calls from twelve blocks, but {light:.0%} from four" in text

    kinds = {line: [compose.kind_of(item) for item in items] for line, items in of.items()}
    first, second, third = (f"{kinds[line].count('overlap')} of {len(kinds[line])}" for line in lines)
    assert f"overlap in {first}, {second} and {third} combinations" in text
    assert not any("compound" in kinds[line] for line in lines) and set(kinds["threshold"]) == {"add"}

    def losses(line: str, dial: str, schedule: str, of: str = "") -> str:
        loss = {name: f"{value['value']:.3f}" for name, value in both[line, dial, schedule]["loss"].items()}
        return f"{loss['both']}{of} ({loss['schedule']} and {loss['steps']}"

    assert f"loses {losses(plain, 'T=32', 'sandwich:25%', ' of log-perplexity')} alone) under `ancestral`" in text
    second, third = (losses(line, "T=32", "sandwich:25%") for line in (cut, again))
    assert f"{second}) with the nucleus and {third}) under `remdm-cap`" in text
    first, second, third = (losses(line, "T=8", "light") for line in (plain, cut, again))
    assert f"lose {first}) under `ancestral`, {second}) with the nucleus and {third}) under `remdm-cap`" in text
    for line in lines:
        assert min(of[line], key=lambda item: item["interaction"]["value"]) is both[line, "T=8", "light"]

    dial = [both[line, "T=8", "8b"]["loss"]["steps"]["value"] for line in (plain, again, cut)]
    assert f"loses {dial[0]:.3f}, {dial[1]:.3f} and {dial[2]:.3f} under" in text
    alone = max(item["loss"]["schedule"]["value"] for line in lines for item in of[line])
    assert f"no schedule under the three more than {alone:.3f}" in text and alone < min(dial)
    four, nucleus = (both[line, "T=32", "light"] for line in (plain, cut))
    assert f"leave {four['flops']['both']:.1%} of the FLOPs and lose {four['loss']['both']['value']:.3f}" in text
    assert f"and {nucleus['loss']['both']['value']:.3f} with the nucleus" in text
    cheap, dear = cells[cut, "T=32", "light"], cells[plain, "T=256", "heavy"]
    assert f"a perplexity of {cheap['gen_ppl']:.2f}, near the {dear['gen_ppl']:.2f}" in text
    assert f"for 1/{dear['flops'] / cheap['flops']:.0f} of the FLOPs" in text

    interaction = [item["interaction"]["value"] for item in of["low-confidence"]]
    assert f"from {min(interaction):+.3f} to {max(interaction):+.3f}" in text
    assert f"words {cells['low-confidence', 'T=8', 'heavy']['word_entropy']:.3f} for twelve blocks in 8 steps" in text
    assert found["missing"] == [] and f"All {len(cells)} cells are measured" in text


def test_what_the_decoding_document_says_of_seconds() -> None:
    _, cells, _, text = composed()

    def left(line: str, dial: str) -> tuple[float, float, str]:
        """The light model's share of the heavy one's FLOPs and seconds, and the seconds themselves."""
        light, heavy = (cells[line, dial, schedule] for schedule in ("light", "heavy"))
        took = f"({light['seconds']:.1f} s of {heavy['seconds']:.1f} s)"
        return light["flops"] / heavy["flops"], light["seconds"] / heavy["seconds"], took

    flops, seconds, took = left("ancestral", "T=256")
    assert f"four blocks take {flops:.2f} of the FLOPs of twelve and {seconds:.2f} of the seconds {took}" in text
    assert seconds < flops + 0.05
    flops, seconds, took = left("low-confidence", "T=256")
    assert f"`low-confidence` leaves {flops:.2f} of the FLOPs and {seconds:.2f} of the seconds {took}" in text
    flops, seconds, _ = left("threshold", "0.9")
    assert f"`threshold:0.9` {flops:.2f} and {seconds:.2f}." in text
    tokens = composed("wiki-bpe")[1]
    again, plain = (tokens[line, "T=256", "light"] for line in ("remdm-cap:0.008", "ancestral"))
    assert f"take {again['seconds']:.1f} s with `remdm-cap` and {plain['seconds']:.1f} s without" in text
    assert f"without, for {again['flops'] / plain['flops'] - 1:.0%} more FLOPs" in text


def test_what_the_decoding_document_says_of_the_front() -> None:
    _, cells, _, text = composed()
    front = {cell: row for cell, row in cells.items() if row["front"]}
    cut = [cell for cell in front if cell[0] == "ancestral@0.9"]
    others = [row for cell, row in front.items() if cell not in cut]
    assert f"Of {len(cells)} cells {len(front)} are on it: {len(cut)} of `ancestral` with the nucleus" in text
    assert f"and {len(others)} of `low-confidence` and `threshold`" in text
    assert {row["line"] for row in others} == {"low-confidence", "threshold"}
    assert all({("ancestral@0.9", f"T={T}", name) for name in ("sandwich:25%", "8b")} <= set(cut) for T in (8, 32, 256))
    assert f"({max(row['word_entropy'] for row in others):.3f} and less)" in text
    assert not any(row["exact"] for row in front.values()) and "None has the model's own law" in text
    _, tokens, _, text = composed("wiki-bpe")
    front = {cell: row for cell, row in tokens.items() if row["front"]}
    cut = [cell for cell in front if cell[0] == "ancestral@0.9"]
    assert f"{len(cut)} of its {len(front)} cells; the other {len(front) - len(cut)} are `low-confidence` in 8" in text
    assert {cell[:2] for cell in front if cell not in cut} == {("low-confidence", "T=8")}


def test_what_the_grid_did_not_measure() -> None:
    _, cells, _, text = composed()
    assert composed("wiki-bpe")[1].keys() == cells.keys()
    rules = {parse_rule(row["rule"]) for row in cells.values()}
    left_out = {rule.name for rule in RULES} - {rule.name for rule in rules}
    remdm = {"remdm-rescale", "remdm-conf", "remdm-loop"}
    assert left_out == {"random", "factor", *remdm, *(rule.name for rule in RULES if rule.source == "Dream")}
    said = "The grid has no `random`, no Dream order, no `factor`, no `remdm-rescale`, `remdm-conf` or `remdm-loop`"
    assert f"{said}, no blocks, a nucleus with `ancestral` only" in text and all(rule.block is None for rule in rules)
    assert {row["rule"] for row in cells.values() if row["top_p"] is not None} == {"ancestral"}
    dials = {cell[1] for cell in cells}
    assert dials == {"T=8", "T=32", "T=256", "0.9", "0.6"}
    assert "no T but 8, 32 and 256 and no threshold but 0.9 and 0.6" in text


def test_the_grid_says_which_run_made_what() -> None:
    """Each cell's commit, and no seconds where other work shared the GPU."""
    found, cells, _, text = composed()
    assert sum(run["cells"] for run in found["runs"]) == len(cells) == 70
    for cell, row in cells.items():
        later = cell == ("remdm-cap:0.008", "T=256", "light")
        first = "04c026c" if cell[0] in ("remdm-cap:0.008", "ancestral@0.9") else "6bc3852"
        assert row["commit"] == ("134108c" if later else first)
        shared = cell[:2] == ("remdm-cap:0.008", "T=256") and not later
        assert (row["seconds"] is None) == shared == ("seconds_beside_other_work" in row)
    assert "remdm-cap T=256 light was sampled later by 134108c" in found["note"]
    assert "`remdm-cap` with four blocks in 256 steps was sampled later than its line, with other kernels" in text


def test_which_run_made_what_of_the_grid_on_tokens() -> None:
    found, cells, _, _ = composed("wiki-bpe")
    assert cells.keys() == composed()[1].keys() and found["missing"] == []
    assert [run["cells"] for run in found["runs"]] == [33, 17, 20] and found["family"]["name"] == "wiki-bpe"
    commits = [row["commit"] for row in cells.values()]
    assert (commits.count("134108c"), commits.count("df4eac1")) == (33, 37)
    for cell, row in cells.items():
        shared = cell[0] == "ancestral@0.9" or cell[:2] == ("remdm-cap:0.008", "T=8")
        assert (row["seconds"] is None) == shared == ("seconds_beside_other_work" in row)
    trained = json.loads((ROOT / "results" / "train" / "wiki-bpe.json").read_text())["models"]["judge"]["heldout"]
    real = found["heldout"]
    assert f"the {real['rows']} rows" in found["note"]
    low, high = trained["perplexity_interval"]  # the end of the text that the judge was tested on after training
    assert low < real["corpus_ppl"] < high


def test_what_the_decoding_document_says_of_tokens() -> None:
    found, cells, both, text = composed("wiki-bpe")
    lines = ("ancestral", "ancestral@0.9", "remdm-cap:0.008")
    of = {
        line: [item for item in both.values() if item["line"] == line]
        for line in (*lines, "low-confidence", "threshold")
    }
    plain, sure = of["ancestral"], of["low-confidence"]
    assert [len(items) for items in of.values()] == [8, 8, 8, 8, 4]

    def off(items: list[Any]) -> str:
        return f"{max(abs(item['flops']['both'] / item['flops']['product'] - 1) for item in items):.1%}"

    last = [both[line, "T=8", "light"] for line in lines]
    rest = off([item for line in lines for item in of[line] if item not in last])
    within = f"to within {rest} for `ancestral` with and without the nucleus and for `remdm-cap`"
    assert f"{within}, but for four blocks in 8 steps ({off(last)})" in text
    assert f"to within {off(sure)} for `low-confidence`" in text

    def paid(schedule: str, dial: str, what: str = "flops") -> float:
        return float(cells["ancestral", dial, schedule][what] / found["n"])

    once = []
    for schedule in ("heavy", "8b", "light"):
        calls, flops = ([paid(schedule, f"T={steps}", what) for steps in (256, 32, 8)] for what in ("calls", "flops"))
        by_call = (flops[0] - flops[2]) / (calls[0] - calls[2])
        once += [total - count * by_call for count, total in zip(calls, flops, strict=True)]
    assert max(once) - min(once) < 1e-3 * once[0] and f"a sample pays {once[0] / 1e9:.2f} GFLOPs for" in text
    assert f"That is {once[0] / paid('light', 'T=8'):.0%} of what four blocks in 8 steps cost" in text
    for item in plain:
        left = {
            (schedule, dial): paid(schedule, dial) - once[0]
            for schedule in ("heavy", item["schedule"])
            for dial in ("T=256", item["dial"])
        }
        cheap, dear = left[item["schedule"], item["dial"]], left["heavy", "T=256"]
        assert abs(cheap * dear / (left[item["schedule"], "T=256"] * left["heavy", item["dial"]]) - 1) < 0.001

    kinds = {line: [compose.kind_of(item) for item in items] for line, items in of.items()}
    first, second, third = (f"{kinds[line].count('overlap')} of {len(kinds[line])}" for line in lines)
    assert f"they overlap in {first}, {second} and {third} combinations" in text
    assert not any("compound" in kinds[line] for line in lines)

    def losses(line: str) -> str:
        loss = {name: f"{value['value']:.3f}" for name, value in both[line, "T=32", "sandwich:25%"]["loss"].items()}
        return f"{loss['both']} ({loss['schedule']} and {loss['steps']}"

    first, second, third = (losses(line) for line in lines)
    left = both["ancestral", "T=32", "sandwich:25%"]["flops"]["both"]
    assert f"leaves {left:.0%} of the FLOPs and loses {first} alone) under `ancestral`" in text
    assert f"{second}) with the nucleus and {third}) under `remdm-cap`" in text

    assert {compose.kind_of(item) for item in sure} == {"compound"} and "they compound in 8 of 8" in text
    size = [item["interaction"]["value"] for item in sure]
    assert f"by {min(size):.3f} to {max(size):.3f}" in text
    there = [compose.kind_of(item) for cell, item in composed()[2].items() if cell[0] == "low-confidence"]
    assert there.count("overlap") > len(there) / 2 and "on `wiki-char` most overlapped" in text
    dull, real = cells["low-confidence", "T=256", "heavy"], found["heldout"]
    first, second = (f"{item['gen_ppl']:.2f} and {item['word_entropy']:.3f}" for item in (dull, real))
    assert f"in 256 steps {first}, where held-out text has {second}" in text
    gain = both["low-confidence", "T=8", "sandwich:50%"]["loss"]["schedule"]
    assert f"even gain {-gain['value']:.3f}" in text and gain["ci"][1] < 0

    bold = cells["threshold", "0.9", "heavy"]
    assert f"as collapsed** ({bold['gen_ppl']:.2f} and {bold['word_entropy']:.3f})" in text
    calls = {cell[1:]: row["calls"] for cell, row in cells.items() if cell[0] == "threshold"}
    fewer = [1 - calls["0.6", schedule] / calls["0.9", schedule] for schedule in ("heavy", "sandwich:50%")]
    assert f"takes only {fewer[0]:.0%} of the calls from twelve blocks" in text and f"and {fewer[1]:.0%} from a" in text
    more = max(1 - item["flops"]["both"] / item["flops"]["product"] for item in of["threshold"])
    assert f"both save up to {more:.0%} more than the product" in text
    most = max(item["interaction"]["value"] for item in of["threshold"])
    assert f"compound in {kinds['threshold'].count('compound')} of 4 combinations, by up to {most:.3f}" in text

    def apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
        margin = sum(((row["log_ppl_ci"][1] - row["log_ppl_ci"][0]) / 2) ** 2 for row in (one, other)) ** 0.5
        return bool(abs(one["log_ppl"] - other["log_ppl"]) > margin)

    for (line, dial, schedule), row in cells.items():
        if line == "remdm-cap:0.008":
            assert apart(row, cells["ancestral", dial, schedule]) == (dial == "T=256")
    without, remasked = ([cells[line, "T=256", name] for name in ("heavy", "8b")] for line in (lines[0], lines[2]))
    pairs = [f"{one['gen_ppl']:.2f} to {other['gen_ppl']:.2f}" for one, other in zip(without, remasked, strict=True)]
    assert f"lowers {pairs[0]} with twelve blocks and {pairs[1]} with eight" in text
    assert all(two["word_entropy"] >= one["word_entropy"] for one, two in zip(without, remasked, strict=True))
    assert f"for {remasked[0]['calls'] / without[0]['calls'] - 1:.0%} more calls" in text
    assert not apart(remasked[1], without[0])
    assert f"twelve without, for {remasked[1]['flops'] / without[0]['flops']:.0%} of the FLOPs" in text
    cut = cells["ancestral@0.9", "T=256", "heavy"]
    assert f"lowers {without[0]['gen_ppl']:.2f} to {cut['gen_ppl']:.2f} and the entropy of words from" in text
    assert f"from {without[0]['word_entropy']:.3f} to {cut['word_entropy']:.3f}" in text
    full = [row for row in cells.values() if row["word_entropy"] > real["word_entropy"]]
    assert min(row["gen_ppl"] for row in full) > 6 * real["gen_ppl"]  # nothing with the text's entropy comes near it


@pytest.mark.parametrize("family", ["wiki-char", "wiki-bpe"])
def test_the_sections_are_those_of_the_grids(family: str) -> None:
    """The tables in the document are what the recorded file gives, and the answer what its combinations give."""
    found, _, both, _ = composed(family)
    begin, end = compose_view.marks(found)
    written = (ROOT / "docs" / "decoding.md").read_text().split(begin)[1].split(end)[0]
    assert written.strip() == compose_view.markdown(found) and found["answer"] == compose.answer(list(both.values()))
    assert [row["front"] for row in found["rows"]] == compose.pareto(found["rows"], found["heldout"])


@pytest.mark.slow
def test_the_held_out_text_of_the_grid() -> None:
    """A minute on one core: the text that came with the family, judged again."""
    found = json.loads((ROOT / "results" / "compose" / "wiki-char.json").read_text())
    family = Family.from_pretrained("wiki-char")
    assert family.tokenizer is not None and family.heldout is not None
    tokens_nL = spread_rows(family.tokenizer.encode(read_text(family.heldout)), found["length"], found["n"])
    texts = [family.tokenizer.decode(row) for row in tokens_nL]
    scores = score(load_judge("own", family), tokens_nL, texts)
    again = metrics.perplexity(scores.written_nll_n, scores.written_count_n)
    assert abs(again["log_ppl"] - found["heldout"]["log_ppl"]) < 1e-4
    assert abs(metrics.describe_texts(list(tokens_nL), texts)["word_entropy"] - found["heldout"]["word_entropy"]) < 1e-9


def test_what_the_readme_says_of_composing() -> None:
    found = json.loads((ROOT / "results" / "compose" / "wiki-char.json").read_text())
    readme = " ".join((ROOT / "README.md").read_text().split())
    off: dict[str, float] = {}
    for item in found["combinations"]:
        ratio = item["flops"]["both"] / item["flops"]["product"]
        off[item["line"]] = max(off.get(item["line"], 0.0), abs(ratio - 1))
        assert item["line"] == "low-confidence" or item["interaction"]["ci"][0] <= 0  # nothing is shown to compound
    ancestral, remdm = max(off["ancestral"], off["ancestral@0.9"]), off["remdm-cap:0.008"]
    text = f"to within {ancestral:.1%} for ancestral sampling, with a nucleus or without, and {remdm:.1%} for ReMDM"
    assert f"{text}; {off['threshold']:.0%} under a confidence threshold" in readme
    first = found["combinations"][0]
    assert (first["line"], first["dial"], first["schedule"]) == ("ancestral", "T=32", "sandwich:25%")
    both, schedule, steps = (first["loss"][key]["value"] for key in ("both", "schedule", "steps"))
    text = f"leaves {first['flops']['both']:.0%} of the FLOPs at {both:+.3f} of log-perplexity, where its parts cost"
    assert f"{text} {schedule:+.3f} and {steps:+.3f}" in readme
    tokens = json.loads((ROOT / "results" / "compose" / "wiki-bpe.json").read_text())
    law = [item for item in tokens["combinations"] if item["line"] in ("ancestral", "ancestral@0.9", "remdm-cap:0.008")]
    worst = max(abs(item["flops"]["both"] / item["flops"]["product"] - 1) for item in law)
    assert f"the nucleus and ReMDM do the same (to within {worst:.1%}); under low-confidence decoding and the" in readme
    kinds = [compose.kind_of(item) for item in tokens["combinations"] if item not in law]
    assert len(law) == 24 and not any(compose.kind_of(item) == "compound" for item in law)
    assert (kinds.count("compound"), len(kinds)) == (11, 12)


def test_time_of_the_small_reproduction() -> None:
    seconds = json.loads((ROOT / "results" / "reproduce-cpu.json").read_text())["seconds_total"]
    assert f"{seconds / 60:.0f} minutes on two" in (ROOT / "docs" / "reproduce.md").read_text()


def test_the_trainer_is_as_fast_as_it_should_be() -> None:
    """4.5M characters a second at 12 x 256, 40% of the peak at 12 x 768."""
    entries = json.loads((ROOT / "results" / "train" / "throughput.json").read_text())["entries"]
    assert max(e["tokens_per_s"] for e in entries if e["shape"].startswith("12 x 256, L=256, V=28")) >= 4.5e6
    assert max(e["mfu"] for e in entries if e["shape"].startswith("12 x 768, L=1024, V=50258")) >= 0.4


def test_what_the_howto_says_of_training() -> None:
    text = (ROOT / "docs" / "howto.md").read_text()
    for family in ("wiki-char", "books-char", "wiki-bpe"):
        models = json.loads((ROOT / "results" / "train" / f"{family}.json").read_text())["models"]
        bits = [f"{models[name]['heldout']['bits']:.3f}" for name in ("4b", "8b", "12b", "judge")]
        symbols = f"{models['12b']['tokens'] / 1e6:.0f}M"
        line = next(line for line in text.splitlines() if line.startswith(f"| `{family}` "))
        assert line.endswith(f"| {symbols} | {' | '.join(bits)} |")
    entries = json.loads((ROOT / "results" / "train" / "throughput.json").read_text())["entries"]
    fast = next(e for e in reversed(entries) if e["shape"].startswith("12 x 256") and e["set"]["batch"] == 512)
    wide = next(e for e in reversed(entries) if e["shape"].startswith("12 x 768") and e["set"]["batch"] == 64)
    plain = " ".join(text.split())
    assert f"does {fast['tokens_per_s'] / 1e6:.2f}M characters a second" in plain
    assert f"and {wide['mfu']:.0%} of the peak" in plain


def test_deeper_models_are_better() -> None:
    for family in ("wiki-char", "books-char", "wiki-bpe"):
        models = json.loads((ROOT / "results" / "train" / f"{family}.json").read_text())["models"]
        depths = sorted(int(name[:-1]) for name in models if name[-1] == "b")
        bits = [models[f"{depth}b"]["heldout"]["bits"] for depth in depths]
        assert bits == sorted(bits, reverse=True) and len(bits) >= 3


def test_every_result_says_how_it_was_made() -> None:
    files = sorted((ROOT / "results").rglob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert {"command", "machine", "versions", "seed", "commit"} <= set(found), file.name


def test_what_the_measuring_document_says_of_two_judges() -> None:
    found = json.loads((ROOT / "results" / "judges" / "wiki-char.json").read_text())
    text = " ".join((ROOT / "docs" / "measuring.md").read_text().split())
    tau = found["kendall_tau"]
    assert f"tau of {tau['value']:.2f} ({tau['ci'][0]:.2f} to {tau['ci'][1]:.2f};" in text
    assert found["differ"] == [] and found["n"] == 400
    for judge in ("own", "other"):
        log = {row["schedule"]: row[judge]["log_ppl"] for row in found["schedules"]}
        quarters = [log[f"quarter:{k}"] for k in (1, 2, 3, 4)]
        assert log["sandwich"] < min(quarters) and max(log.values()) == log["light"]
        assert max(quarters[0], quarters[3]) < min(quarters[1:3])
