"""Numbers in the README are those of the recorded results."""

from __future__ import annotations

import json
from pathlib import Path

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
    memory = found["peak_memory_engine"] / found["peak_memory_reference"]
    assert f"batch 32 is {100 * memory:.1f}% of the reference's" in readme and found["peak_memory_batch"] == 32
    assert f"is {found['kl_to_fp32']:.1e} nats" in readme


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


def test_every_result_says_how_it_was_made() -> None:
    files = sorted((ROOT / "results").rglob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        assert {"command", "machine", "versions", "seed", "commit"} <= set(found), file.name
