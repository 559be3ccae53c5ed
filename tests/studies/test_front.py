"""The front of quality over cost: parameters within their levels, resumed, drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from search_oracle import network

from relaylm.errors import UserError
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.sample import sample
from relaylm.search.search import search
from relaylm.studies.record import front

LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("front")
    models = {f"{depth}b": network(depth, depth, LENGTH) for depth in (1, 2, 4)}
    about = {"name": "tiny", "judge": network(1, 1, LENGTH, causal=True)}
    made = save_family(root / "tiny", models, Text8Tokenizer(), length=LENGTH, **about)
    (made / "heldout.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
    return Path(made)


def test_the_largest_within_a_limit() -> None:
    assert front.largest(lambda d: 3 * d + 1, 40, 5, True) == 13
    assert front.largest(lambda d: 3 * d + 1, 2, 5, True) is None
    found = front.largest(lambda x: x**0.4, 7.0, 1.0, False)
    assert found is not None and 0.95 * 7 <= found**0.4 <= 7


def test_costs_of_rules_without_chance_are_those_of_samples(folder: Path) -> None:
    family = Family.load(folder, device="cpu")
    study = front.Study(family, 2, None, None)
    for rule, steps, flops in (
        ("dus:8", None, front.dus_flops(study, 8)),
        ("low-confidence", 6, front.llada_flops(study, 6)),
    ):
        made = sample(family, "heavy", 2, rule=rule, steps=steps, length=LENGTH).cost.flops
        assert made is not None and made / 2 == pytest.approx(flops)


def test_a_front_is_within_its_levels_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tiny.json"

    def run(*words: str) -> dict[str, Any]:
        usual = ["front", str(folder), str(out), "--n", "8", "--bound-rows", "3", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [*usual, *words])
        front.main()
        return dict(json.loads(out.read_text())) if out.exists() else {}

    levels = ["--levels", "50,80"]
    first = run(*levels)
    cells = {(cell["kind"], cell["level"]): cell for cell in first["cells"]}
    assert cells["reference", None]["samples"]["loss"] == 0 == cells["reference", None]["saved"]
    assert cells["inf", None]["calls"] == LENGTH and cells["inf", None]["n"] == 2
    for kind in front.KINDS:
        for level in (0.5, 0.8) if kind not in ("inf", "tuner") else ():
            if (cell := cells.get((kind, level))) is None:
                assert level == 0.8 and kind in ("prefix", "dus")  # too few positions to be so cheap
                continue
            assert level - 0.05 < cell["saved"] < 1  # as expected over plans or tried on rows; few differ from many
            assert (cell["bound"] is None) == (kind == "low-confidence")
    assert cells["middle", 0.5]["models"] == "2b:100%" == cells["smaller", 0.8]["models"].partition(" ")[0]
    assert cells["uniform", 0.8]["against_sets"]["label"] == cells["sets", 0.8]["label"]
    with monkeypatch.context() as patch:
        patch.setattr("relaylm.measure.evaluate.sample_rows", None)  # everything is in the store
        patch.setattr(front, "plan_bound", None)
        assert [timeless(cell) for cell in run(*levels)["cells"]] == [timeless(cell) for cell in first["cells"]]
    more = run("--kinds", "none", "--also", "L25% H75% spaced:4")
    assert len(more["cells"]) == len(first["cells"]) + 1 and more["cells"][-1]["kind"] == "also"
    family, found = Family.load(folder, device="cpu"), tmp_path / "search.json"
    chosen = search(family, budget="0.5:0.8:0.15", quick=True, segments=4, progress=False)
    found.write_text(json.dumps(chosen))
    more = run(*levels, "--kinds", "sets", "--also", f"@{found}")
    tuned = [cell for cell in more["cells"] if cell["kind"] == "tuner"]
    assert [cell["level"] for cell in tuned] == [0.5, 0.8]  # 65% is no level here
    assert [cell["label"] for cell in tuned] == [chosen["front"][k]["schedule"] for k in (0, 2)]
    assert tuned[1]["against_sets"]["label"] == cells["sets", 0.8]["label"]
    found.write_text(json.dumps({**chosen, "steps": 8}))
    with pytest.raises(UserError, match="T = 32"):
        run("--kinds", "none", "--also", f"@{found}")
    drawn = [out.with_suffix(".svg"), out.with_name("calls.svg")]
    run("--draw")
    once = [figure.read_bytes() for figure in drawn]
    run("--draw")
    assert [figure.read_bytes() for figure in drawn] == once and min(map(len, once)) > 1000


def timeless(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cell.items() if key != "seconds"}
