"""`sample --html`: the page knows what was sampled, nothing in it is read as HTML, and it plays in a browser."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from relaylm.cli import main as cli
from relaylm.core.schedule import Schedule
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import ByteTokenizer, Text8Tokenizer
from relaylm.sampling.result import Samples
from relaylm.sampling.sample import sample
from relaylm.show.colours import colour_of, row_pieces
from relaylm.show.player import contents, page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "</script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)> & $DATA $TITLE \u2028"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = {}
    for depth, name in enumerate(("1b", "2b", "3b"), 1):
        a = Architecture(vocab_size=28, length=24, width=16, depth=depth, heads=2)
        network = Transformer(a).initialise(torch.Generator().manual_seed(depth))
        network.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(9))
        models[name] = network.eval()
    return save_family(tmp_path_factory.mktemp("player") / "tiny", models, Text8Tokenizer(), length=24, name="tiny")


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    return Family.load(folder)


def drawn(family: Family, text: str = "1b:6 3b:12 1b:6", **options: Any) -> tuple[Samples, Schedule]:
    schedule = Schedule.parse(text).bind("1b", "3b")
    return sample(family, schedule, 3, seed=4, prompt="the ", **options), schedule


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        elif self.inside == "title":
            self.title += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


@pytest.mark.parametrize("steps", [24, 10, math.inf])
def test_the_page_holds_what_was_sampled(family: Family, steps: float) -> None:
    samples, schedule = drawn(family, "L25% H50% L25%", steps=steps)
    data = json.loads(read(page(family, samples, schedule, "3b")).scripts[0])
    names = [model["name"] for model in data["models"]]
    assert names == ["1b", "3b"]
    assert [model["colour"] for model in data["models"]] == [colour_of(0), colour_of(2)]
    made = dict.fromkeys(names, 0)
    spent = heavy = 0.0
    for row, one in enumerate(data["lanes"][0]["samples"]):
        assert "".join(one["pieces"]) == samples.texts[row]
        calls, call_L = one["calls"], np.array(one["call"])
        assert (call_L == 0).tolist() == [True] * 4 + [False] * 20 and call_L.max() == len(calls)
        times = [call["t"] for call in calls]
        assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
        for k, call in enumerate(calls, 1):
            positions = np.flatnonzero(call_L == k)
            made[names[call["model"]]] += 1
            written_by = {samples.trace.models[m] for m in samples.trace.model_nL[row][positions]}
            assert written_by == {names[call["model"]]} == {schedule.bind("1b", "3b").model_at(call["t"])}
            assert all(one["writer"][p] == call["model"] for p in positions)
            if steps == math.inf:
                assert call["step"] is None and samples.trace.u_nL[row][positions].tolist() == [call["t"]]
            else:
                assert set(samples.trace.step_nL[row][positions].tolist()) == {call["step"]}
                assert call["t"] == call["step"] / steps
        spent, heavy = spent + calls[-1]["flops"][0], heavy + calls[-1]["flops"][1]
    assert made == {name: samples.cost.calls[name] for name in names}
    assert spent == pytest.approx(samples.cost.flops) and heavy == pytest.approx(samples.cost.flops_all_heavy)


def test_the_strip_is_the_schedule_along_time(family: Family) -> None:
    samples, schedule = drawn(family, "L2@25% H20@50% L2@25%")
    assert contents(family, samples, schedule)["lanes"][0]["strip"] == [(0, 1.0, 0.75), (1, 0.75, 0.25), (0, 0.25, 0.0)]
    samples, schedule = drawn(family, "L25% H75%", steps=math.inf)
    assert contents(family, samples, schedule)["lanes"][0]["strip"] == [(0, 1.0, 0.75), (1, 0.75, 0.0)]
    assert contents(family, samples, None)["lanes"][0]["strip"] == []


def test_under_a_spacing_time_is_the_share_that_is_masked(family: Family) -> None:
    samples, schedule = drawn(family, "L25% H75%", spacing=5)
    (lane,) = contents(family, samples, schedule)["lanes"]
    assert lane["strip"] == [(0, 1.0, 0.75), (1, 0.75, 0.0)]
    for one in lane["samples"]:
        call_L = np.array(one["call"])
        for k, call in enumerate(one["calls"], 1):
            assert call["t"] == (call_L >= k).sum() / 20 and call["model"] == (0 if call["t"] > 0.75 else 1)


def test_what_the_trace_does_not_explain_is_not_counted(family: Family) -> None:
    """A decoding rule may write a position over, or ask for logits that it does not use."""
    samples, schedule = drawn(family)
    more = replace(samples.cost, calls={**samples.cost.calls, "3b": samples.cost.calls["3b"] + 2})
    found = contents(family, replace(samples, cost=more), schedule)
    total = sum(more.calls.values())
    assert f"{total} calls in all" in found["about"]
    costlier = replace(samples, cost=replace(samples.cost, flops=2 * (samples.cost.flops or 0)))
    for result in (found, contents(family, costlier, schedule)):
        assert all(call["flops"] is None for one in result["lanes"][0]["samples"] for call in one["calls"])
    assert "in all" not in contents(family, costlier, schedule)["about"]


def test_a_character_of_several_tokens_is_that_of_the_first() -> None:
    in_bytes: Any = SimpleNamespace(tokenizer=ByteTokenizer(), mask_id=256)
    text = "naïve 中文 🙂"
    tokens_L = np.array(in_bytes.tokenizer.encode(text))
    pieces = row_pieces(in_bytes, tokens_L)
    assert len(pieces) == len(tokens_L) and "".join(pieces) == text
    assert pieces[2:4] == ["ï", ""] and pieces[7:13] == ["中", "", "", "文", "", ""]
    tokens_L[8] = 256  # what is not whole stays broken
    assert row_pieces(in_bytes, tokens_L)[7:13] == ["�", "_", "�", "文", "", ""]


def nasty(family: Family) -> tuple[Family, Samples, Schedule]:
    """A family whose name and whose first token are an attack."""
    samples, schedule = drawn(family)

    class Tokenizer(Text8Tokenizer):
        def decode_partial(self, ids: Any, mask_id: int | None, blank: str = "_") -> str:
            return NASTY + super().decode_partial(ids, mask_id, blank)

    return replace(family, name=NASTY, tokenizer=Tokenizer()), replace(samples, seed=7), schedule


def test_nothing_a_model_wrote_is_read_as_html(family: Family) -> None:
    evil, samples, schedule = nasty(family)
    text = page(evil, samples, schedule)
    reader, plain = read(text), read(page(family, *drawn(family)))
    assert [tag for tag, _ in reader.tags] == [tag for tag, _ in plain.tags]
    assert len(reader.scripts) == 2 and reader.scripts[1] == plain.scripts[1]
    assert reader.title.startswith(NASTY)
    pieces = json.loads(reader.scripts[0])["lanes"][0]["samples"][0]["pieces"]
    assert len(pieces) == 24 and all(piece.startswith(NASTY) for piece in pieces)


def test_the_page_loads_nothing(family: Family) -> None:
    text = page(family, *drawn(family))
    reader = read(text)
    assert not [tag for tag, _ in reader.tags if tag in ("link", "img", "iframe", "object", "base", "form")]
    assert all(not {"src", "href", "srcset"} & set(attributes) for _, attributes in reader.tags)
    assert not re.findall(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    policy = next(a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy


def test_from_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "play.html"
    words = ["sample", "--family", str(folder), "--schedule", "L6 H12 L6", "-n", "2", "--html"]
    assert cli.main([*words, str(target)]) == 0
    texts = capsys.readouterr().out.split("\n" + "─" * 40 + "\n")
    data = json.loads(read(target.read_text()).scripts[0])
    assert ["".join(one["pieces"]) for one in data["lanes"][0]["samples"]] == [text.rstrip("\n") for text in texts]
    assert cli.main([*words, str(tmp_path / "no" / "play.html")]) == 2
    assert "does not exist" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ in a browser


def dom(text: str, folder: Path, link: str = "", script: str = "") -> str:
    """The page as Chromium has it once it has run, after a script of ours."""
    assert CHROMIUM is not None
    file = folder / "page.html"
    file.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"{file.as_uri()}{link}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def shown(document: str) -> tuple[str, str]:
    """The text as it stands, masks as they are drawn, and the line about the state."""
    spans = re.findall(r'<span class="(?:given|mask|written)[^"]*"[^>]*>(.*?)</span>', document, re.DOTALL)
    state = re.search(r'id="state"[^>]*>(.*?)<', document)
    assert state is not None
    return "".join(spans), state.group(1)


# Does as a user would, and writes down what the page shows after each thing.
USER = """
const seen = [], text = () => [...document.querySelectorAll('.text span')].map(span => span.textContent).join('');
const look = () => seen.push([text(), document.getElementById('state').textContent]);
const press = key => { document.dispatchEvent(new KeyboardEvent('keydown', {key})); look(); };
look();
['ArrowRight', 'ArrowLeft', 'ArrowLeft', 'ArrowUp', 'End', 'Home'].forEach(press);
const slider = document.querySelector('#controls input');
slider.value = 3; slider.dispatchEvent(new Event('input')); look();
press('d');
document.body.dataset.seen = JSON.stringify(seen);
document.body.dataset.theme = document.documentElement.dataset.theme;
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser_it_plays_and_obeys(family: Family, tmp_path: Path) -> None:
    samples, schedule = drawn(family)
    text, rows = page(family, samples, schedule), contents(family, samples, schedule)["lanes"][0]["samples"]

    def draft(row: int, calls: int) -> str:
        pairs = zip(samples.texts[row], rows[row]["call"], strict=True)
        return "".join(character if call <= calls or character == " " else "░" for character, call in pairs)

    # Left alone it plays to the end.
    last = len(rows[0]["calls"])
    spans, state = shown(dom(text, tmp_path))
    assert spans == samples.texts[0] and state.startswith(f"call {last} of {last},")
    # From a link to the second sample after five calls.
    document = dom(text, tmp_path, "#2/5", USER)
    found = re.search(r'data-seen="([^"]*)"', document)
    assert found is not None
    seen = json.loads(html.unescape(found.group(1)))
    expected = [(1, 5), (1, 6), (1, 5), (1, 4), (0, 4), (0, last), (0, 0), (0, 3), (0, 3)]
    assert [item[0] for item in seen] == [draft(row, calls) for row, calls in expected]
    for (row, calls), (_, state) in zip(expected, seen, strict=True):
        assert re.match(rf"call {calls} of {len(rows[row]['calls'])}\b", state)
    assert 'data-theme="dark"' in document


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_in_a_browser_an_attack_is_text(family: Family, tmp_path: Path) -> None:
    evil, samples, schedule = nasty(family)
    document = dom(page(evil, samples, schedule), tmp_path, "#1/3")
    assert "<title>owned" not in document and "<img" not in re.sub(r"<script.*?</script>", "", document, flags=re.S)
    assert "&lt;/script&gt;&lt;script&gt;document.title" in document
