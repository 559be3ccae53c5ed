"""The generated parts of the documents are what the records and the code give."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate
import paper_cost
import pytest

from relaylm.core.cost import call_flops
from relaylm.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", generate.documents(ROOT), ids=lambda path: path.name)
def test_generated_parts_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.refreshed(text, ROOT / "results") == text, "run `python docs/generate.py`"


def test_the_reference_is_that_of_the_package_beside_the_documents(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    package = tmp_path / "relaylm"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the package of this checkout')\n", encoding="utf-8")
    elsewhere = {**os.environ, "PYTHONPATH": str(ROOT)}  # where an installed package would be
    command = [sys.executable, str(tmp_path / "docs" / "generate.py")]
    done = subprocess.run(command, env=elsewhere, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "the package of this checkout" in done.stderr


def test_modules_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)+\.py)\b", text))
    assert len(named) > 25
    missing = [name for name in named if not (ROOT / "relaylm" / name).exists() and not (ROOT / name).exists()]
    assert not missing


def test_what_stands_between_markers_is_replaced() -> None:
    text = "a\n<!-- begin: judges -->\nold\n<!-- end -->\nb\n"
    found = generate.refreshed(text, ROOT / "results")
    assert found.startswith("a\n<!-- begin: judges -->\n\nOn 400 samples") and found.endswith("\n\n<!-- end -->\nb\n")
    assert generate.refreshed(found, ROOT / "results") == found
    with pytest.raises(UserError, match="under the name 'nothing': speed, "):
        generate.refreshed("<!-- begin: nothing -->\n<!-- end -->", ROOT / "results")


def test_costs_by_hand() -> None:
    bench = {"reference_ms_per_row_step": 3.0, "reference_light_ms_per_row_step": 2.0}
    bench |= {"engine_ms_per_row_step": 0.3, "engine_light_ms_per_row_step": 0.1}
    hours = paper_cost.sampling_hours(bench)
    ms = 5 * 1600 * (250 * 2.0 + 750 * 3.0) + 1600 * 1000 * (2.0 + 3.0)
    assert hours["seven schedules, light 4"]["mdlm"] == pytest.approx(ms / 3.6e6)
    search = 210 * 160 * (400 * 0.1 + 600 * 0.3) / 3.6e6
    assert hours["search of 210"]["engine"] == pytest.approx(search * 790 / 2100)
    assert paper_cost.work(8, 1, 1) == {8: 1000.0}
    mlp_and_attention = 24 * 1024 * 768**2 + 4 * 1024**2 * 768
    head = 2 * 512 * 768 * 50258
    rows = 1_000_000 * 512
    unscored = 18 * 512 * 768**2  # the last block's output projection and MLP, where nothing is masked
    flops = sum(3 * (d * mlp_and_attention - unscored + head) for d in (4, 6, 8, 10, 12, 12))
    expected = flops * rows / (0.4 * 989e12) / 3600
    found = paper_cost.training_hours("owt", [])
    assert found["total"] == pytest.approx(expected) and found["source"] == "assumed, not measured"
    shapes = [("12 x 768, L=1024, V=50258", 0.5), ("12 x 768, L=256, V=9", 0.9), ("12 x 224, L=256, V=28", 0.1)]
    entries = [{"shape": shape, "mfu": mfu} for shape, mfu in shapes]
    found = paper_cost.training_hours("owt", entries)
    assert found["total"] == pytest.approx(expected * 0.8) and "measured at 12 x 768, L=1024" in found["source"]
    assert paper_cost.utilisation(224, 128, entries)[0] == 0.1
    assert paper_cost.utilisation(512, 128, entries)[0] == 0.4
    assert math.isclose(call_flops(12, 768, 50258, 1024), 12 * mlp_and_attention + 2 * head, rel_tol=1e-12)
