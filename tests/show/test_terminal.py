"""Text in a terminal: colours, samples side by side and a denoising as it happens, at several widths and in a pipe."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from search_oracle import small_family

from relaylm.models.family import Family
from relaylm.sampling.result import Samples
from relaylm.sampling.sample import sample
from relaylm.show.colours import COLOURS, GIVEN, MASKED, MODELS, colour_of, runs_of, writers_of
from relaylm.show.terminal import Watch, coloured, console_for, has_colours, legend, side_by_side


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
def test_a_denoising_in_a_terminal_and_in_a_pipe(width: int, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    given_L = np.full(family.length, -1)
    given_L[:4] = family.tokenizer.encode("the ")
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        with Watch(family, given_L, family.names, stream, pace=0.0) as watch:
            drawn = sample(family, "L25% H50% L25%", 1, seed=3, prompt="the ", callback=watch)
        assert 0 < watch.seconds < drawn.cost.seconds
        shown[type(stream)] = stream.getvalue()
        lines = without_codes(stream.getvalue()).splitlines()
        assert max(map(len, lines)) <= min(width, 100)
        free = family.length - 4
        assert f"{free}/{free} written" in lines[-2] and lines[-1].startswith("written by ")
        end = " ".join(line.strip() for line in lines[-6:-3] if "_" not in line)
        assert end.endswith(" ".join(drawn.texts[0].split()[-2:]))
    assert shown[Terminal].count("\x1b[?25l") == shown[Terminal].count("\x1b[?25h") == 1  # the cursor is shown again
    assert "\x1b" not in shown[io.StringIO]


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
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")
