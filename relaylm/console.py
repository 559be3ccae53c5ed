"""What people see in a terminal, a pipe or a notebook: the text table of every report, and the progress of long work.

A table fits the width it is given; rich does the layout and counts wide characters correctly. Progress goes to standard
error: a bar in a terminal or a notebook, elsewhere a plain line now and then. Lines come at most every 30 s over all
bars together: a search made of a thousand short pieces neither floods a log nor stays silent, and short work writes
nothing. rich is imported when it is used.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from importlib.util import find_spec
from typing import Any

from relaylm.errors import printable

WIDEST, FAIR, NARROWEST = 44, 24, 12  # characters of a text column: at most, before `spare` columns go, at least
GAP = 2  # spaces between columns


def terminal_width() -> int:
    """Columns of the terminal (or `COLUMNS`); 120 where there is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def wrapped(notes: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` characters; each note starts on a line of its own, `indent` precedes its other lines."""
    return [line for note in notes for line in textwrap.wrap(note, width, subsequent_indent=indent)]


def note(text: str, prose: bool = False) -> None:
    """Print to standard error: standard output is for results. In a terminal `prose` is broken between words; commands
    are not, so that they can be pasted."""
    lines = wrapped([text], terminal_width()) if prose and sys.stderr.isatty() else [text]
    print(printable("\n".join(lines), sys.stderr), file=sys.stderr)


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


# ------------------------------------------------------------------------------------------------ progress


@dataclass
class Pace:
    """When the next line may come, of any bar."""

    every: float = 30.0  # seconds
    clock: Callable[[], float] = time.monotonic
    last: float | None = None  # when the last line came; at first, when the first bar began


PACE = Pace()


class Bar:
    """How far a piece of work has come: `n` of `total` units (None: unknown), `initial` of them before it began.

    Callers may set `what` (the work), `more` (a remark behind the numbers) and `total` at any time."""

    def __init__(self, what: str, total: int | None, initial: int, pace: Pace) -> None:
        self.what, self.total, self.initial, self.n, self.more = what, total, initial, initial, ""
        self.pace, self.began = pace, pace.clock()
        self.live: Any = None  # rich's, while the bar is drawn
        pace.last = self.began if pace.last is None else pace.last

    def update(self, done: int = 1) -> None:
        """Add units that are done; write a line if one is due."""
        self.n += done
        if (now := self.pace.clock()) - (self.pace.last or 0.0) >= self.pace.every:
            self.pace.last = now
            print(f"{self.what}: {self.state()}", file=sys.stderr, flush=True)

    def report(self, done: int, total: int) -> None:
        """Set how far the work has come; a callback for work that knows its own total."""
        self.total = total
        self.update(done - self.n)

    def state(self, units: str = "") -> str:
        """What is done, of how much, and the time left at the speed so far (of this run, if it was resumed)."""
        parts = [f"{self.n:,}{units}" if self.total is None else f"{self.n:,}/{self.total:,}{units}"]
        if self.total is not None and (done := self.n - self.initial) > 0:
            seconds = max(0, self.total - self.n) * (self.pace.clock() - self.began) / done
            parts.append(f"{timedelta(seconds=round(seconds))} left")
        return ", ".join([*parts, self.more] if self.more else parts)

    def draw(self, console: Any, units: str, delay: float) -> None:
        """Draw the bar until it is closed; other output to standard error goes above it."""
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        def picture() -> Table:
            grid = Table.grid(padding=(0, 1))
            if self.pace.clock() >= self.began + delay:
                line = ProgressBar(self.total, self.n, width=30, pulse=self.total is None)
                grid.add_row(Text(printable(self.what)), line, Text(self.state(units)))
            return grid

        self.live = Live(console=console, get_renderable=picture, transient=True, redirect_stdout=False)
        self.live.start()
        atexit.register(self.live.stop)  # shows the cursor again if an error kept the caller from closing

    def close(self) -> None:
        """Remove the bar."""
        if self.live is not None:
            atexit.unregister(self.live.stop)
            self.live.stop()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def progress_bar(
    what: str, total: int | None, unit: str, shown: bool = True, *, initial: int = 0, delay: float = 0.0
) -> Bar:
    """A bar over `total` units; in a terminal it appears after `delay` seconds. Without `shown` nothing is written."""
    if not shown:
        return Bar(what, total, initial, Pace(every=math.inf))
    from rich.console import Console

    console = Console(stderr=True)
    notebook = console.is_jupyter and find_spec("ipywidgets") is not None
    drawn = notebook or (sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    bar = Bar(what, total, initial, Pace(every=math.inf) if drawn else PACE)
    if drawn:
        bar.draw(console, f" {unit}s", delay)
    return bar
