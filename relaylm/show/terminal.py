"""What a terminal or a notebook shows: text in the colours of the models that wrote it, a denoising as it happens,
samples side by side. rich draws, so this module is imported when something is shown.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.box import MINIMAL
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaylm.console import terminal_width
from relaylm.errors import printable
from relaylm.models.tokenizer import BLANK
from relaylm.show.colours import GIVEN, MASKED, colour_of, on_a_line, pieces_of, row_pieces, runs_of, writers_of

if TYPE_CHECKING:
    from relaylm.models.family import Family
    from relaylm.sampling.result import Event, Samples

WIDEST_FRAME = 100  # characters in a line of a denoising
CHARACTERS = 300  # the largest vocabulary of single characters or bytes
PIECE, SPREAD = 3.9, 1.3 * 2.4  # of a word piece's characters: mean, 1.3 standard deviations (held-out text, wiki-bpe)


def console_for(stream: TextIO) -> Console:
    """A console on a stream, with colours where they are seen; it follows NO_COLOR and FORCE_COLOR."""
    return Console(file=stream, width=terminal_width(), highlight=False)


def has_colours(console: Console) -> bool:
    """Whether the console shows colours."""
    return console.color_system is not None and not console.no_color


def painted(pieces: Sequence[str], ranks: Sequence[int]) -> Text:
    """Pieces in the colours of the models that wrote them. Long words are broken, so every line fits."""
    runs = runs_of(pieces, ranks)
    return Text.assemble(*((text, colour_of(rank)) for text, rank in runs), overflow="fold")


def coloured(family: Family, samples: Samples, row: int) -> Text:
    """One sample, each token in the colour of the model that wrote it."""
    return painted(list(map(printable, row_pieces(family, samples.tokens[row]))), writers_of(family, samples, row))


def legend(family: Family, models: Sequence[str], given: bool = True) -> Text:
    """The names of models, each in its colour."""
    names = [(f"■ {name}  ", colour_of(rank)) for rank, name in enumerate(family.names) if name in models]
    return Text.assemble("written by ", *names, *([("■ given", colour_of(GIVEN))] if given else []))


def side_by_side(family: Family, columns: Sequence[tuple[str, Samples]]) -> Table:
    """The first row under several schedules, in columns of equal width."""
    table = Table(box=MINIMAL, show_edge=False, expand=True, header_style="", pad_edge=False)
    for title, _ in columns:
        table.add_column(Text(printable(title)), ratio=1)
    pieces = [[on_a_line(piece) for piece in row_pieces(family, samples.tokens[0])] for _, samples in columns]
    table.add_row(*map(painted, pieces, (writers_of(family, samples, 0) for _, samples in columns)))
    return table


def positions_in_line(family: Family, width: int) -> int:
    """Positions that a line of a denoising holds: the same from the first call to the last, so that text does not jump
    as it is written. Once they are written, nine of ten lines of word pieces fit; the others are cut."""
    if family.vocab_size <= CHARACTERS:
        return width
    return max(1, int(((math.sqrt(SPREAD**2 + 4 * PIECE * width) - SPREAD) / (2 * PIECE)) ** 2))


class Draft:
    """A row on its way: what is written so far, and by which model."""

    def __init__(self, family: Family, given_L: np.ndarray) -> None:
        self.family, self.model = family, ""  # the model of the last call
        self.ranks = np.where(given_L < 0, MASKED, GIVEN)
        # About as long as what takes its place.
        self.blank = BLANK if family.vocab_size <= CHARACTERS else 3 * BLANK + " "
        self.pieces = [self.blank] * len(given_L)
        self._put([k for k, token in enumerate(given_L) if token >= 0], given_L[given_L >= 0])
        self.total = int((given_L < 0).sum())

    def _put(self, positions: Sequence[int], tokens: Sequence[int] | np.ndarray) -> None:
        for position, piece in zip(positions, pieces_of(self.family, np.asarray(tokens)), strict=True):
            self.pieces[position] = on_a_line(piece)

    def add(self, event: Event) -> None:
        """Put in what a call wrote, or masked again."""
        self.model = event.model
        self._put(event.positions, event.tokens)
        again = np.asarray(event.tokens) == self.family.mask_id
        self.ranks[event.positions] = np.where(again, MASKED, self.family.names.index(event.model))
        for position in np.asarray(event.positions)[again]:
            self.pieces[position] = self.blank

    @property
    def written(self) -> int:
        """Positions that are no longer masked."""
        return self.total - int((self.ranks == MASKED).sum())

    def picture(self, width: int) -> Text:
        """The row in lines of a fixed number of positions."""
        each, ranks = positions_in_line(self.family, width), self.ranks.tolist()
        starts = range(0, len(ranks), each)
        text = Text("\n").join(painted(self.pieces[k : k + each], ranks[k : k + each]) for k in starts)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class Watch:
    """Plays the denoising of row 0 in a `with` block, under one schedule or, with `titles`, under several side by side.
    It is the callback of the first schedule; `follow(k)` is that of the k-th. Playing takes `pace` seconds at least. A
    terminal or a notebook shows it in one place and clears it at the end; elsewhere a frame is printed now and then."""

    def __init__(
        self,
        family: Family,
        given_L: np.ndarray,
        models: Sequence[str],
        stream: TextIO = sys.stdout,
        pace: float = 4.0,
        titles: Sequence[str] = ("",),
    ) -> None:
        self.family, self.models, self.pace, self.titles = family, models, pace, titles
        self.drafts = [Draft(family, given_L) for _ in titles]
        self.given = bool((given_L >= 0).any())
        self.console = console_for(stream)
        self.live: Live | None = None  # where the display can be drawn over
        if self.console.is_jupyter or (stream.isatty() and not self.console.is_dumb_terminal):
            self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, transient=True)
        self.began, self.drawn = time.monotonic(), 0.0
        self.seconds = 0.0  # spent here, waiting and drawing: no part of what sampling took

    def __enter__(self) -> Watch:
        if self.live is not None:
            self.live.start()
            self._draw("")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: Event) -> None:
        """Show what a call of the first schedule wrote."""
        self._show(0, event)

    def follow(self, k: int) -> Callable[[Event], None]:
        """The callback of the k-th schedule."""
        return partial(self._show, k)

    def _show(self, k: int, event: Event) -> None:
        if event.row != 0:
            return
        came = time.perf_counter()
        self.drafts[k].add(event)
        written, total = (sum(getattr(draft, name) for draft in self.drafts) for name in ("written", "total"))
        ahead = self.began + self.pace * written / max(1, total) - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        if time.monotonic() - self.drawn > (1.0 if self.live is None else 0.04):
            self._draw(f"t = {event.t:.3f}")
        self.seconds += time.perf_counter() - came

    def _draw(self, state: str) -> None:
        rule = 3  # characters between columns
        width = min(self.console.width, WIDEST_FRAME * len(self.drafts))
        each = (width - rule * (len(self.drafts) - 1)) // len(self.drafts)
        columns = Table.grid(padding=(0, rule, 0, 0), pad_edge=False)
        for _ in self.drafts:
            columns.add_column(width=each, no_wrap=True)
        columns.add_row(*map(self._head, self.drafts, self.titles))
        columns.add_row(*(draft.picture(each) for draft in self.drafts))
        names = legend(self.family, self.models, self.given)
        frame = Group(Text.assemble(names, f"   {state}", no_wrap=True, overflow="ellipsis"), "", columns)
        if self.live is None:
            self.console.print(frame, "")
        else:
            self.live.update(frame, refresh=True)
        self.drawn = time.monotonic()

    def _head(self, draft: Draft, title: str) -> Text:
        ranks = {name: rank for rank, name in enumerate(self.family.names)}
        runs = (f"{draft.model} runs, ", colour_of(ranks.get(draft.model, MASKED))) if draft.model else ""
        about = Text.assemble(f"{title}\n" if title else "", runs, f"{draft.written}/{draft.total} written")
        about.no_wrap, about.overflow = True, "ellipsis"
        return about
