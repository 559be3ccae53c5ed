"""Progress of long work, on standard error: a bar in a terminal or a notebook, elsewhere a plain line now and then.

Lines come at most every 30 s over all bars together: a search made of a thousand short pieces neither floods a log nor
stays silent, and short work writes nothing.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from relaylm.errors import printable


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
