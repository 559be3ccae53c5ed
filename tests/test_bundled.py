"""The family that comes with the package: whole, small enough, and as good as its card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relaylm.bound import bound, causal_bound, spread_rows
from relaylm.family import Family
from relaylm.family_folder import BUNDLED, bundled

ROOT = Path(__file__).parent.parent
NAME = "wiki-char"


@pytest.fixture(scope="module")
def family() -> Family:
    return Family.load(NAME)


def test_it_is_the_default_and_has_its_parts(family: Family) -> None:
    assert bundled()[0] == NAME and family.names == ("4b", "8b", "12b")
    assert family.judge is not None and family.length == 256 and family.vocab_size == 28
    sizes = [file.stat().st_size for file in (BUNDLED / NAME).rglob("*.safetensors")]
    assert sum(sizes) <= 38_000_000 and max(sizes) <= 16_000_000
    assert family.heldout is not None
    text = family.heldout.read_text()
    assert len(text) <= 1_000_000 and set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    card = (BUNDLED / NAME / "README.md").read_text()
    assert "Wikipedia contributors" in card and "relaylm train" in card


def test_bits_are_those_of_the_record(family: Family) -> None:
    """On a few rows of the held-out text, with the same noise for all: deeper is better, and each is about as good as
    recorded (a row's own bits scatter by 0.4)."""
    assert family.heldout is not None and family.tokenizer is not None
    recorded = json.loads((ROOT / "results" / "train" / "wiki-char.json").read_text())["models"]
    rows = spread_rows(family.tokenizer.encode(family.heldout.read_text()), 256, 24)
    found = {name: bound(family[name], rows, mask_id=family.mask_id, draws=2).bits for name in family.names}
    assert found["12b"] < found["8b"] < found["4b"]
    judged = causal_bound(family.judge, rows).bits
    for name, bits in {**found, "judge": judged}.items():
        assert abs(bits - recorded[name]["heldout"]["bits"]) < 4 * 0.4 / np.sqrt(len(rows)), (name, bits)
