"""What a terminal or a notebook shows: text in the colours of the models that wrote it, a denoising as it happens,
samples side by side. rich draws; it is imported when something is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from relaylm.show.colours import GIVEN, MASKED, colour_of, pieces_of, printable, runs_of, writers_of
from relaylm.tables import terminal_width

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from relaylm.models.family import Family
    from relaylm.sampling.result import Event, Samples

WIDEST_FRAME = 100  # characters in a line of a denoising


def console_for(stream: TextIO) -> Console:
    """A console on a stream, with colours where they are seen; it follows NO_COLOR and FORCE_COLOR."""
    from rich.console import Console

    return Console(file=stream, width=terminal_width(), highlight=False)


def has_colours(console: Console) -> bool:
    """Whether the console shows colours."""
    return console.color_system is not None and not console.no_color


def painted(pieces: Sequence[str], ranks: Sequence[int]) -> Text:
    """Pieces in the colours of the models that wrote them. Long words are broken, so every line fits."""
    from rich.text import Text

    runs = runs_of(pieces, ranks)
    return Text.assemble(*((text, colour_of(rank)) for text, rank in runs), overflow="fold")


def coloured(family: Family, samples: Samples, row: int) -> Text:
    """One sample, each token in the colour of the model that wrote it."""
    return painted(pieces_of(family, samples.tokens[row]), writers_of(family, samples, row))


def legend(family: Family, models: Sequence[str], given: bool = True) -> Text:
    """The names of models, each in its colour."""
    from rich.text import Text

    names = [(f"■ {name}  ", colour_of(rank)) for rank, name in enumerate(family.names) if name in models]
    return Text.assemble("written by ", *names, *([("■ given", colour_of(GIVEN))] if given else []))


def side_by_side(family: Family, columns: Sequence[tuple[str, Samples]], row: int = 0) -> Table:
    """The same row under several schedules, in columns of equal width."""
    from rich.box import MINIMAL
    from rich.table import Table
    from rich.text import Text

    table = Table(box=MINIMAL, show_edge=False, expand=True, header_style="", pad_edge=False)
    for title, _ in columns:
        table.add_column(Text(title), ratio=1)
    pieces = [[printable(piece) for piece in pieces_of(family, samples.tokens[row])] for _, samples in columns]
    writers = [writers_of(family, samples, row) for _, samples in columns]
    table.add_row(*map(painted, pieces, writers))
    return table


class Watch:
    """A callback that plays the denoising of one row, in a `with` block. It takes `pace` seconds at least. A terminal
    or a notebook shows it in one place; elsewhere a frame is printed now and then."""

    def __init__(
        self,
        family: Family,
        given_L: np.ndarray,
        models: Sequence[str],
        stream: TextIO = sys.stdout,
        row: int = 0,
        pace: float = 4.0,
    ) -> None:
        self.family, self.models, self.row, self.pace = family, models, row, pace
        self.tokens = np.where(given_L < 0, family.mask_id, given_L)
        self.ranks = np.where(given_L < 0, MASKED, GIVEN)
        self.total = int((given_L < 0).sum())
        self.console = console_for(stream)
        self.live: Any = None  # rich's, where the display can be drawn over
        if self.console.is_jupyter or (stream.isatty() and not self.console.is_dumb_terminal):
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
        self.began, self.drawn = time.monotonic(), 0.0
        self.seconds = 0.0  # spent here, waiting and drawing: no part of what sampling took

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: Event) -> None:
        """Show what a call wrote."""
        if event.row != self.row:
            return
        came = time.perf_counter()
        self.tokens[event.positions] = event.tokens
        again = np.asarray(event.tokens) == self.family.mask_id  # masked again, by a rule that does so
        self.ranks[event.positions] = np.where(again, MASKED, self.family.names.index(event.model))
        written = self.total - int((self.ranks == MASKED).sum())
        ahead = self.began + self.pace * written / max(1, self.total) - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        if time.monotonic() - self.drawn > (1.0 if self.live is None else 0.04) or written == self.total:
            self._draw(f"t = {event.t:.3f}   step {event.step or '-'}   {event.model} runs   ", written)
        self.seconds += time.perf_counter() - came

    def _draw(self, state: str, written: int) -> None:
        from rich.console import Group
        from rich.constrain import Constrain
        from rich.text import Text

        pieces = [printable(piece) for piece in pieces_of(self.family, self.tokens)]
        names = legend(self.family, self.models, bool((self.ranks == GIVEN).any()))
        lines = (painted(pieces, self.ranks.tolist()), "", Text(f"{state}{written}/{self.total} written"), names)
        frame = Constrain(Group(*lines), WIDEST_FRAME)
        if self.live is None:
            self.console.print(frame)
        else:
            self.live.start()
            self.live.update(frame, refresh=True)
        self.drawn = time.monotonic()
