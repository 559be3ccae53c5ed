"""How far long work has come, on standard error: a bar on a terminal; elsewhere (a log file, CI, a job on a cluster)
a plain line now and then, with what is done, how much of it, and the time left.

Lines come at most every 30 s over all bars together: a search that is made of a thousand short pieces neither floods a
log nor stays silent, and short work says nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO


@dataclass
class Pace:
    """When the next line may come, whichever bar it is of."""

    every: float = 30.0  # seconds
    clock: Callable[[], float] = time.monotonic
    last: float | None = None  # when the last line came; at first, when the first bar began


PACE = Pace()


def progress_bar(what: str, total: int | None, unit: str, shown: bool = True, *, initial: int = 0, **look: Any) -> Any:
    """tqdm's bar on a terminal, with its options `look`; `Lines` elsewhere; a silent bar if it is not to be shown."""
    if shown and not sys.stderr.isatty():
        return Lines(what, total, sys.stderr, PACE, initial)
    from tqdm import tqdm

    return tqdm(desc=what, total=total, unit=unit, disable=not shown, initial=initial, file=sys.stderr, **look)


class Lines:
    """What is used of tqdm's bar, told in plain lines."""

    def __init__(self, what: str, total: int | None, stream: TextIO, pace: Pace, initial: int = 0) -> None:
        self.what, self.total, self.stream, self.pace = what, total, stream, pace
        self.n = self.initial = initial
        self.more = ""
        self.began = pace.clock()
        if pace.last is None:
            pace.last = self.began

    def update(self, done: int = 1) -> None:
        self.n += done
        now = self.pace.clock()
        if self.pace.last is None or now - self.pace.last >= self.pace.every:
            self.pace.last = now
            self.stream.write(self._line(now - self.began) + "\n")
            self.stream.flush()

    def _line(self, seconds: float) -> str:
        if self.total is None:
            parts = [f"{self.what}: {self.n:,}"]
        else:
            parts = [f"{self.what}: {self.n:,}/{self.total:,}"]
            if (done := self.n - self.initial) > 0:  # what a resumed run found says nothing about its speed
                parts.append(f"{timedelta(seconds=round(max(0, self.total - self.n) * seconds / done))} left")
        return ", ".join([*parts, self.more] if self.more else parts)

    def write(self, line: str, file: TextIO | None = None) -> None:
        """A line of its own, at once."""
        (file or self.stream).write(line + "\n")

    def set_description(self, what: str) -> None:
        self.what = what

    def set_postfix_str(self, more: str) -> None:
        self.more = more

    def close(self) -> None:
        pass

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
