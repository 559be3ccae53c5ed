"""Numbers in the README are those of the recorded results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
    assert f"goes to the light model saves {found['slope']['value']:.2f}% of the time" in plain
    memory = found["peak_memory_engine"] / found["peak_memory_reference"]
    assert f"batch 32 is {100 * memory:.1f}% of the reference's" in plain and found["peak_memory_batch"] == 32
    assert f"is {found['kl_to_fp32']:.1e} nats" in plain
    rival = found["ar_tokens_per_s"]["best"] / found["engine_tokens_per_s"]
    assert f"KV cache writes {rival:.0f} times as many tokens a second" in plain


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
    half = by[2]["8b:78"]["against_sandwich"]["ci"]
    assert half[0] < 0 < half[1]
    tuned = {run["schedule"]: run for run in books["two"]["tune"]}
    value, interval = hundredths(tuned["4b:25 12b:78 4b:25"]["against_winner"], -1).split(" ", 1)
    assert f"is {value} hundredths better than that winner {interval}" in text
    names = json.loads((ROOT / "results" / "search" / "books-char-210.json").read_text())
    assert names["top_frequency"]["4b"][0] == 1 and names["bottom_frequency"]["4b"][0] == 0
    spread = hundredths(bpe["two"]["worst_against_winner"])
    assert f"worst of the 210 it is {spread.replace(' (', ' hundredths (')}" in text
    assert all(low < 0 < high for low, high in bpe["two"]["influence_ci"]["4b"])
    behind = next(row for row in bpe["all"][1]["rows"] if row["what"] == "sandwich")["against_recommended"]
    assert f"the sandwich is {hundredths(behind)} behind 12 blocks in 123 steps" in text and behind["ci"][0] > 0
    level = bpe["all"][0]["rows"][:3]
    assert all(row["against_recommended"]["ci"][0] <= 0 <= row["against_recommended"]["ci"][1] for row in level)


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


def test_time_of_the_small_reproduction() -> None:
    seconds = json.loads((ROOT / "results" / "reproduce-cpu.json").read_text())["seconds_total"]
    assert f"{seconds / 60:.0f} minutes on two" in (ROOT / "docs" / "reproduce.md").read_text()


def test_the_trainer_is_as_fast_as_it_should_be() -> None:
    """4.5M characters a second at 12 x 256, 40% of the peak at 12 x 768."""
    entries = json.loads((ROOT / "results" / "train" / "throughput.json").read_text())["entries"]
    assert max(e["tokens_per_s"] for e in entries if e["shape"].startswith("12 x 256, L=256, V=28")) >= 4.5e6
    assert max(e["mfu"] for e in entries if e["shape"].startswith("12 x 768, L=1024, V=50258")) >= 0.4


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
