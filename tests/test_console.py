"""The text table: every width, no broken word in a heading, no number cut."""

from __future__ import annotations

import pytest

from relaylm.console import table, wrapped

HEAD = ["", "rule", "schedule", "perplexity", "entropy", "distinct-4", "GFLOPs/row", "seconds"]
ROWS = [
    ["*", "ancestral", "1b:12.5% 3b:75% 1b:12.5% [b]", "12.34 ± 0.12", "3.456", "0.123", "12.3", "1.2"],
    ["", "low-confidence", "heavy", "112.34 ± 0.12", "3.456", "0.123", "1234.5", "1.2"],
]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_width(width: int) -> None:
    lines = table(HEAD, ROWS, width, text=(0, 1, 2), spare=("seconds", "distinct-4", "entropy")).splitlines()
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    left_out = next((line.split(": ")[1] for line in lines if line.startswith("left out at this width: ")), "")
    words = " ".join(lines).split()
    for title in HEAD:
        if title and title not in left_out:  # in whole words, one below the other where it is short of width
            assert title in words or all(part in words for part in title.replace("/", " /").split())
    assert sum("12.34 ± 0.12" in line for line in lines) == 2 and "1234.5" in words  # no number is broken
    for word in ["1b:12.5%", "3b:75%", "1b:12.5%", "[b]"]:
        assert word in words
    if width >= 120:
        assert len(lines) == 3 and not left_out
        assert lines[0].index("entropy") + len("entropy") == lines[1].index("3.456") + len("3.456")


def test_where_nothing_may_go_a_table_is_wider() -> None:
    shown = table(HEAD, ROWS, 40, text=(0, 1, 2))
    assert max(map(len, shown.splitlines())) > 40 and "left out" not in shown
    assert all(part in shown.split() for part in ("perplexity", "seconds", "GFLOPs", "/row", "0.123"))


def test_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert table(HEAD, ROWS, text=(0, 1, 2)) == table(HEAD, ROWS, 70, text=(0, 1, 2))


def test_a_table_without_rows_is_its_heading() -> None:
    assert table(["schedule", "ms"], [], 80) == "schedule  ms"


def test_wide_characters_take_two_columns() -> None:
    first, *lines = table(["text", "n"], [["日本", "1"], ["ab", "2"]], 80).splitlines()
    assert first == "text  n" and lines == ["日本  1", "ab    2"]


def test_notes_are_wrapped_one_by_one() -> None:
    assert wrapped(["one two three", "four"], 8, "  ") == ["one two", "  three", "four"]
