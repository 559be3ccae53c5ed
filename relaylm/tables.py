"""The text table of every report: it fits the width it is given, in a terminal, a pipe or a notebook.

rich does the layout and counts wide characters correctly. It is imported when a table is made.
"""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from html import escape

WIDEST, FAIR, NARROWEST = 44, 24, 12  # characters of a text column: at most, before `spare` columns go, at least
GAP = 2  # spaces between columns


def terminal_width() -> int:
    """Columns of the terminal (or `COLUMNS`); 120 where there is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def wrapped(notes: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` characters; each note starts on a line of its own, `indent` precedes its other lines."""
    return [line for note in notes for line in textwrap.wrap(note, width, subsequent_indent=indent)]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    text: Sequence[int] = (0,),
    spare: Sequence[str] = (),
) -> str:
    """A table of at most `width` characters (the terminal's) a line, without a line end at its end.

    The columns numbered in `text` are set to the left, numbers to the right. Where the width is short, headings are
    broken between words, then long texts are, and then the columns with a heading in `spare` are left out, the first of
    them first; a last line names them. Words of headings and numbers are never broken and texts never cut, so a table
    that cannot fit is wider. A mark in front of a text should be a column of its own."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = width or terminal_width()
    kept = list(range(len(head)))
    cells = [max([0, *(cell_len(row[k]) for row in rows)]) for k in kept]
    sizes = [min(max(cell_len(head[k]), cells[k]), WIDEST if k in text else width) for k in kept]

    def needed(long: int) -> int:
        """The width of the table if no text column has more than `long` characters."""
        return sum(min(sizes[k], long) if k in text else sizes[k] for k in kept) + GAP * (len(kept) - 1)

    if needed(WIDEST) > width:
        words = [max([1, *map(cell_len, _breakable(title).split())]) for title in head]
        sizes = [sizes[k] if k in text else max(cells[k], words[k]) for k in kept]
    for title in spare:
        if needed(FAIR) > width and title in head:
            kept.remove(head.index(title))
    for k in kept:  # what is left goes to the headings
        sizes[k] = max(sizes[k], min(cell_len(head[k]), sizes[k] + width - needed(WIDEST)))
    layout = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for k in kept:
        if k in text:
            least = min(sizes[k], NARROWEST)
            layout.add_column(Text(head[k]), overflow="fold", min_width=least, max_width=sizes[k])
        else:
            title = head[k] if cell_len(head[k]) <= sizes[k] else _breakable(head[k])
            layout.add_column(Text(title), justify="right", width=sizes[k])
    for row in rows:
        layout.add_row(*(Text(row[k]) for k in kept))
    size, stream = max(width, needed(NARROWEST)), io.StringIO()
    Console(file=stream, width=size, color_system=None, force_jupyter=False, legacy_windows=False).print(layout)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    if left_out := [title for k, title in enumerate(head) if k not in kept]:
        lines += wrapped([f"left out at this width: {', '.join(left_out)} (--json has all)"], width)
    return "\n".join(lines)


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)) -> str:
    """The same as HTML, for a notebook; texts are escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = ("left" if k in text else "right" for k in range(len(cells)))
        return "".join(f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _breakable(title: str) -> str:
    return title.replace("/", " /")
