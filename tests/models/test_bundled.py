"""The family that comes with the package: whole, small enough, and as good as its card says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from relaylm.cli.sample import splits_words
from relaylm.cli.tools import default_family
from relaylm.core.pairs import default_spacing
from relaylm.core.schedule import Spacing
from relaylm.measure.likelihood import bound, causal_bound, held_out, spread_rows
from relaylm.models.family import BUNDLED, Family, bundled
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.sample import sample

ROOT = Path(__file__).parents[2]
NAME = "wiki-char"


@pytest.fixture(scope="module")
def family() -> Family:
    return Family.load(NAME)


def test_it_has_its_parts(family: Family) -> None:
    assert bundled() == ["wiki-bpe", NAME] and family.names == ("4b", "8b", "12b")
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


def test_wiki_bpe_is_the_default_and_writes_with_its_own_spacing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAYLM_FAMILY", raising=False)
    family = Family.load(default_family(None))
    assert family.name == "wiki-bpe" and family.names == ("d4", "d12") and family.judge is not None
    assert family.length == 512 and family.vocab_size == 8193 and family.stored is not None
    assert family.parameters == {name: entry["parameters"] for name, entry in family.stored.manifest["models"].items()}
    sizes = [file.stat().st_size for file in (BUNDLED / "wiki-bpe").rglob("*.safetensors")]
    assert sum(sizes) <= 92_000_000 and max(sizes) <= 16_000_000
    assert family.heldout is not None and family.heldout.stat().st_size <= 1_000_000
    assert family.pairs is not None and family.spacing(512) == Spacing(40)
    assert default_spacing(family.pairs, family.length).distance >= 40
    short = default_spacing(family.pairs, 24)  # for short rows, what the table says
    assert family.spacing(24) == short and short.distance < 10 and family.spacing(384) == Spacing(40)
    assert splits_words(family.tokenizer, "The history of ") and not splits_words(family.tokenizer, "The history of")
    assert not splits_words(Text8Tokenizer(), "the history of ")
    samples = sample(family, "light", prompt="The history of", length=24)
    assert samples.law == str(short) and samples.texts[0].startswith("The history of")


def test_wiki_bpe_is_as_good_as_its_card_says() -> None:
    """On two rows of the held-out text; a row's own bits scatter by half a bit."""
    family = Family.load("wiki-bpe")
    text = held_out(family)
    assert text is not None
    rows = spread_rows(text, family.length, 2)
    light, heavy = (bound(family[name], rows, mask_id=family.mask_id, draws=4, seed=0).bits for name in family.names)
    assert heavy < light and abs(heavy - 5.349) < 1 and abs(light - 5.812) < 1
