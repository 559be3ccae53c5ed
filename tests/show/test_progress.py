"""Progress: a bar on a terminal, a plain line now and then elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from search_oracle import small_family

from relaylm import console as progress
from relaylm.cli.tools import progress as reported
from relaylm.console import Pace, progress_bar
from relaylm.measure.compare import compare
from relaylm.measure.importance import importance
from relaylm.search.search import search
from relaylm.studies.compose.compose import compose
from relaylm.train.corpus import prepare


class Clock:
    """Shows the time it is set to, and goes on by `tick` whenever it is looked at."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "PACE", Pace(clock=clock))
    return clock


def test_a_line_every_thirty_seconds_says_what_how_far_and_how_long(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    with progress_bar("sampling", 4000, "row") as bar:
        for _ in range(100):  # 1 s and 10 rows at a time
            clock.now += 1
            bar.update(10)
    lines = [
        "sampling: 300/4,000, 0:06:10 left",
        "sampling: 600/4,000, 0:05:40 left",
        "sampling: 900/4,000, 0:05:10 left",
    ]
    assert capsys.readouterr().err.splitlines() == lines


def test_many_short_bars_keep_one_pace(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    """None of them takes 30 s, and yet a line comes; nor does each of them write one."""
    for number in range(12):
        with progress_bar(f"part {number}", 2, "call") as bar:
            for _ in range(2):
                clock.now += 5
                bar.update()
    said = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["part 2", "part 5", "part 8", "part 11"]


def test_time_left_counts_from_where_a_run_was_resumed(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    bar = progress_bar("train", 1000, "step", initial=900)
    bar.what = "12b"
    bar.more = "bits 1.234"
    clock.now += 40
    bar.update(0)
    clock.now += 40
    bar.update(20)
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "12b: 900/1,000, bits 1.234",
        "12b: 920/1,000, 0:05:20 left, bits 1.234",
    ]


def test_without_a_total_there_is_no_time_left(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with progress_bar("count", None, "char") as bar:
        clock.now += 31
        bar.update(1_234_567)
    assert capsys.readouterr().err == "count: 1,234,567\n"


def test_what_is_reported_by_done_and_total(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    with reported("bound", "row") as bar:
        for done in (8, 16):
            clock.now += 30
            bar.report(done, 64)
    assert capsys.readouterr().err.splitlines() == ["bound: 8/64, 0:03:30 left", "bound: 16/64, 0:03:00 left"]


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("TERM", raising=False)
    with progress_bar("sampling", 10, "row") as bar:
        bar.update(5)
        bar.more = "bits 1.2 [b]"
    shown = stream.getvalue()
    assert "sampling" in shown and "━" in shown and "5/10 rows, 0:00:0" in shown and "left, bits 1.2 [b]" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is shown again
    monkeypatch.setenv("TERM", "dumb")
    with progress_bar("sampling", 10, "row") as bar:
        bar.update(5)
    assert stream.getvalue() == shown


def test_short_work_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("sampling", 10, "row", delay=60) as bar:
        bar.update(5)
    assert "sampling" not in stream.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_silence(kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("sampling", 10, "row", False) as bar:
        clock.now += 1000
        bar.what = "other"
        bar.update(5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("shown", [True, False])
def test_long_work_is_heard_of_in_a_log(
    shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family = small_family()
    text = np.random.default_rng(0).integers(0, 27, (4, family.length))
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 40)
    for name, work in {
        "compare": lambda: compare(family, ["sandwich:25%"], n=2, rivals=False, progress=shown),
        "compose": lambda: compose(family, ["ancestral"], [4], ["light"], 2, progress=shown),
        "importance": lambda: importance(family, text, timesteps=2, sequences=4, progress=shown),
        "search": lambda: search(
            family, "exhaustive", segments=2, light_segments=1, n=2, confirm=2, progress=shown, batch_size=2
        ),
        "prepare": lambda: prepare([tmp_path / "text.txt"], tmp_path / "corpus", tokenizer="text8", progress=shown),
    }.items():
        monkeypatch.setattr(progress, "PACE", Pace(clock=Clock(tick=60)))
        work()
        said = capsys.readouterr().err
        assert "\r" not in said and bool(said) == shown, name
        assert not shown or all(": " in line for line in said.splitlines()), name
