"""Results that show themselves, and the notebooks that show them."""

from __future__ import annotations

import html
import json
import os
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaylm
from relaylm.console import html_table
from relaylm.measure.compare import Comparison, render
from relaylm.models.tokenizer import ByteTokenizer
from relaylm.show.colours import GIVEN, colour_of

ROOT = Path(__file__).parents[2]
NOTEBOOKS = [ROOT / "examples" / f"{name}.ipynb" for name in ("schedules-in-ten-minutes", "bring-your-own-models")]


class Shown(HTMLParser):
    """The text of HTML, with the colours of its spans; tags that are not ours are remembered."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.pieces: list[tuple[str, str]] = []
        self.colour = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)
        if tag == "span":
            self.colour = dict(attributes)["style"].removeprefix("color:")

    def handle_endtag(self, tag: str) -> None:
        self.colour = ""

    def handle_data(self, data: str) -> None:
        self.pieces.append((data, self.colour))


def family_of(text: str) -> relaylm.Family:
    """A family that always writes one text."""
    import torch

    ids = torch.tensor(ByteTokenizer().encode(text))
    logits = torch.nn.functional.one_hot(ids, 257) * 50.0
    models = {name: relaylm.FromLogits(lambda x, t: logits.expand(len(x), -1, -1)) for name in ("small", "large")}
    return relaylm.Family(models, mask_id=256, vocab_size=257, length=len(ids), tokenizer=ByteTokenizer())


def test_a_text_is_coloured_by_who_wrote_it_and_never_read_as_html() -> None:
    text = "<b>x</b><script>alert(1)</script> & so on"
    samples = relaylm.sample(family_of(text), "sandwich:50%", steps=8, prompt="<b>", seed=2)
    found = Shown(samples._repr_html_())
    assert found.tags == {"div", "p", "span", "small"}
    count = len([piece for piece, colour in found.pieces if colour])
    assert "".join(piece for piece, colour in found.pieces[:count] if not piece.startswith("■")).startswith(text)
    assert found.pieces[0] == ("<b>", colour_of(GIVEN))
    position, colours = 0, {}
    for piece, colour in found.pieces:
        for _ in piece if position < len(text) else "":
            colours[position] = colour
            position += 1
    for place, model in enumerate(samples.trace.model_nL[0].tolist()):
        assert colours[place] == colour_of(
            GIVEN if model < 0 else ("small", "large").index(samples.trace.models[model])
        )


def test_a_console_shows_texts_and_what_they_cost() -> None:
    samples = relaylm.sample(family_of("the sea"), "heavy", n=6, steps=4)
    shown = repr(samples)
    assert shown.count("the sea") == 4 and "and 2 more" in shown
    assert f"{samples.cost.total_calls} of large" in shown.splitlines()[-1]
    assert "and 2 more" in samples._repr_html_()


def test_samples_travel_without_their_family() -> None:
    samples = relaylm.sample(family_of("the sea"), "heavy", n=2, steps=4)
    again = pickle.loads(pickle.dumps(samples))
    assert again.family is None and again.texts == samples.texts and samples.family is not None
    np.testing.assert_array_equal(again.tokens, samples.tokens)
    assert "the sea" in again._repr_html_()


def test_a_comparison_is_a_table_and_still_plain_json() -> None:
    family = relaylm.Family.load("wiki-char")
    found = relaylm.compare(family, ["light", "4b spaced:4"], n=2, length=8, steps=4, rivals=False, progress=False)
    assert isinstance(found, Comparison) and json.loads(json.dumps(found))["n"] == 2
    assert repr(found) == render(found)
    shown = found._repr_html_()
    assert "<table>" in shown and html.escape(found["verdict"]) in shown
    rows = re.findall(r"<tr>(.*?)</tr>", shown)
    assert len(rows) == 1 + len(found["rows"]) and "4b spaced:4" in shown


def test_cells_of_html_tables_are_escaped() -> None:
    assert "<td" in html_table(["a"], [["<i>"]]) and "<i>" not in html_table(["a<i>"], [["<i>"]])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("RELAYLM_NOTEBOOK_LENGTH", "24")
    monkeypatch.setenv("RELAYLM_NOTEBOOK_ROWS", "2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not stored
    done = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in done.cells for output in cell.get("outputs", [])]
    pages = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})]
    assert any("relaylm-samples" in page for page in pages)
