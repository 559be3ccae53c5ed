"""Text in a terminal: colours, samples side by side and a denoising as it happens, at several widths and in a pipe."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from search_oracle import small_family

from relaylm.cli.main import build_parser
from relaylm.models.family import Family
from relaylm.sampling.result import Samples
from relaylm.sampling.sample import sample
from relaylm.show.colours import COLOURS, GIVEN, MASKED, MODELS, colour_of, runs_of, writers_of
from relaylm.show.terminal import Watch, coloured, console_for, has_colours, legend, positions_in_line, side_by_side

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def family() -> Family:
    return small_family()


@pytest.fixture(scope="module")
def samples(family: Family) -> Samples:
    return sample(family, "L25% H50% L25%", 2, seed=3, prompt="the ")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def luminance(colour: str) -> float:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])


def test_the_palette_can_be_read_on_white_and_models_on_black() -> None:
    assert all(1.05 / (luminance(colour) + 0.05) >= 3 for colour in COLOURS)
    assert all((luminance(colour) + 0.05) / 0.05 >= 2.4 for colour in MODELS)
    assert len({*MODELS, colour_of(GIVEN), colour_of(MASKED)}) == len(MODELS) + 2
    assert colour_of(len(MODELS)) == colour_of(0)


# How linear RGB is seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
CONES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]  # each relative to white


def lab(colour: str, cones: Any) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    x = np.array(XYZ) @ np.clip(np.array(cones) @ linear, 0, 1)
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", CONES)
def test_four_models_can_be_told_apart_without_a_kind_of_cone(kind: str) -> None:
    seen = [lab(colour, CONES[kind]) for colour in MODELS[:4]]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 25


def test_neighbours_by_one_model_are_one_run() -> None:
    assert runs_of("abcde", [0, 0, 2, 2, 0]) == [("ab", 0), ("cd", 2), ("e", 0)] and runs_of([], []) == []


@pytest.mark.parametrize(
    ("stream", "environment", "seen"),
    [
        (Terminal, {}, True),
        (io.StringIO, {}, False),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colours_are_for_those_who_see_them(
    stream: Any, environment: dict[str, str], seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_colours(console_for(stream())) == seen


def test_each_token_has_the_colour_of_its_writer(family: Family, samples: Samples) -> None:
    text = coloured(family, samples, 1)
    assert text.plain == samples.texts[1]
    at = {k: span.style for span in text.spans for k in range(span.start, span.end)}
    assert [at[k] for k in range(len(text))] == [colour_of(rank) for rank in writers_of(family, samples, 1)]
    assert at[0] == colour_of(GIVEN)
    names = legend(family, [family.names[0], family.names[-1]])
    assert names.plain == f"written by ■ {family.names[0]}  ■ {family.names[-1]}  ■ given"
    assert [span.style for span in names.spans] == [colour_of(0), colour_of(len(family.names) - 1), colour_of(GIVEN)]


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_side_by_side(
    width: int, stream: Any, family: Family, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    target = stream()
    console_for(target).print(side_by_side(family, [("[b]one", samples), ("two", samples), ("three", samples)]))
    assert ("\x1b" in target.getvalue()) == (stream is Terminal)
    head, rule, *lines = without_codes(target.getvalue()).splitlines()
    assert [cell.strip() for cell in head.split("│")] == ["[b]one", "two", "three"] and "┼" in rule
    assert all(len(line) == width for line in [head, rule, *lines])
    for k in range(3):  # broken between words, nothing lost
        assert "".join(line.split("│")[k] for line in lines).split() == samples.texts[0].split()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_denoising_keeps_its_lines(width: int, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame has the same number of lines, none is too long, and the cursor is given back."""
    monkeypatch.setenv("COLUMNS", str(width))
    given_L = np.full(family.length, -1)
    given_L[:4] = family.tokenizer.encode("the ")
    for stream in (Terminal(), io.StringIO()):
        frames: list[list[str]] = []
        with Watch(family, given_L, family.names, stream, pace=0.0) as watch:

            def follow(event: Any, watch: Watch = watch, frames: list[list[str]] = frames) -> None:
                watch.drawn = 0.0  # each frame is due
                watch(event)
                frames.append(watch.drafts[0].picture(width).plain.splitlines())

            drawn = sample(family, "L25% H50% L25%", 1, seed=3, prompt="the ", callback=follow)
        assert 0 < watch.seconds < drawn.cost.seconds
        assert {len(lines) for lines in frames} == {-(-family.length // width)}
        assert "".join(frames[-1]) == drawn.texts[0] and watch.drafts[0].written == family.length - 4
        assert all(len(line) <= width for line in without_codes(stream.getvalue()).splitlines())
        text = stream.getvalue()
        assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == isinstance(stream, Terminal)


def test_lines_of_word_pieces_hold_what_mostly_fits() -> None:
    large: Any = SimpleNamespace(vocab_size=8193)
    each = [positions_in_line(large, width) for width in (1, 26, 60, 80, 120)]
    assert (
        each[0] == 1
        and each == sorted(each)
        and all(3.9 * k <= width for k, width in zip(each[1:], (26, 60, 80, 120), strict=True))
    )


def test_an_error_gives_the_cursor_back(family: Family) -> None:
    stream = Terminal()

    def fail(event: Any) -> None:
        watch(event)
        raise RuntimeError("boom")

    with (
        pytest.raises(RuntimeError),
        Watch(family, np.full(family.length, -1), family.names, stream, pace=0.0) as watch,
    ):
        sample(family, "heavy", 1, callback=fail)
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


# ------------------------------------------------------------------------------------------- a real pseudo-terminal


IMPATIENT = "import relaylm.cli.demo as demo, relaylm.__main__ as program; demo.SECONDS = 0; program.main()"
PLAYED = ["sample", "--family", "wiki-char", "--schedule", "sandwich:50%", "--spacing", "8", "--length", "192"]


def on_screen(width: int, *words: str, lines: int = 24) -> list[str]:
    """What a terminal of that size shows once a command has ended, without the empty lines below."""
    pyte = pytest.importorskip("pyte")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-c", IMPATIENT, *words]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT)
    os.close(slave)
    screen = pyte.HistoryScreen(width, lines, history=500)
    stream = pyte.ByteStream(screen)
    with contextlib.suppress(OSError):  # the last reader of a pseudo-terminal gets an error, not an end
        while data := os.read(master, 65536):
            stream.feed(data)
    os.close(master)
    assert process.wait() == 0, screen.display
    above = ["".join(line[k].data for k in range(width)) for line in screen.history.top]
    return [line.rstrip() for line in "\n".join([*above, *screen.display]).rstrip().splitlines()]


@pytest.fixture(scope="module")
def piped() -> str:
    """The text that a pipe gets."""
    command = [sys.executable, "-m", "relaylm", *PLAYED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout + done.stderr
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_of_a_denoising_is_left_on_the_screen(width: int, piped: str) -> None:
    shown = on_screen(width, *PLAYED)
    assert len(piped) == 192 and "".join(line.ljust(width) for line in shown)[:192] == piped  # at the top of the screen
    assert not any("_" in line for line in shown) and sum("FLOPs" in line for line in shown) == 1


def test_the_demo_on_a_screen(tmp_path: Path) -> None:
    shown = on_screen(100, "demo", "--family", "wiki-char", "--json", str(tmp_path / "demo.json"))
    found = json.loads((tmp_path / "demo.json").read_text())
    start = next(k for k, line in enumerate(shown) if "┼" in line) + 1
    cells = [line.split("│") for line in shown[start:] if "│" in line]
    for k, samples in enumerate(found["samples"].values()):
        assert "".join(cell[k].strip() + " " for cell in cells).split() == samples["texts"][0].split()
    end = next(k for k, line in enumerate(shown) if line.startswith("Try next"))
    assert not any("_" in line for line in shown[:end])
    further = [shlex.split(line)[1:] for line in shown if line.startswith("  relaylm ")]
    assert len(further) == 3 and all(build_parser().parse_args(words).family == "wiki-char" for words in further)
