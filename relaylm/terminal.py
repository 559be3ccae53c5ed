"""What a terminal shows: text coloured by the model that wrote it, a denoising as it happens, samples side by side."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import numpy as np

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.sampler import Event, Samples

# From the lightest model to the heaviest; told apart by the colour-blind too (Okabe and Ito's orange, sky blue, ...).
PALETTE = (214, 75, 36, 220, 26, 166, 175)
GIVEN, BLANK = 245, 238  # greys: what the user gave, and, darker, what is still masked
WIDE, LONG, NARROW = 44, 24, 12  # characters in a column of names: at most, before other columns go, at least


def has_colours(stream: TextIO) -> bool:
    """Follow NO_COLOR and FORCE_COLOR, else colour what a person looks at."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and os.environ.get("TERM") != "dumb")


def paint(text: str, colour: int) -> str:
    return f"\x1b[38;5;{colour}m{text}\x1b[0m"


def colour_of(model: int) -> int:
    if model < 0:
        return GIVEN if model == -1 else BLANK
    return PALETTE[model % len(PALETTE)]


def legend(family: Family, models: Sequence[str], colours: bool, given: bool = True) -> str:
    ranked = [(family.names.index(name), name) for name in family.names if name in models]
    names = [paint(f"■ {name}", colour_of(rank)) if colours else name for rank, name in ranked]
    return "written by " + "  ".join(names) + (paint("  ■ given", GIVEN) if colours and given else "")


def writers_of(family: Family, samples: Samples, row: int) -> list[int]:
    """For each position the rank in the family of the model that wrote it, -1 where it was given: a model has one
    colour, whichever others took part."""
    ranks = [family.names.index(name) for name in samples.trace.models]
    return [-1 if model < 0 else ranks[model] for model in samples.trace.model_nL[row].tolist()]


def runs_of(pieces: Sequence[str], model_L: Sequence[int]) -> list[tuple[str, int]]:
    """Neighbouring pieces by the same model, joined."""
    runs: list[tuple[str, int]] = []
    for piece, model in zip(pieces, model_L, strict=True):
        if runs and runs[-1][1] == model:
            runs[-1] = (runs[-1][0] + piece, model)
        else:
            runs.append((piece, model))
    return runs


def coloured(family: Family, samples: Samples, row: int) -> str:
    """One sample, each token in the colour of the model that wrote it."""
    runs = runs_of(pieces_of(family, samples.tokens[row]), writers_of(family, samples, row))
    return "".join(paint(text, colour_of(model)) for text, model in runs)


def pieces_of(family: Family, tokens_L: np.ndarray) -> list[str]:
    """The text of each token by itself, the mask as a blank."""
    if family.tokenizer is None:
        return [f"{token} " for token in tokens_L]
    return [family.tokenizer.decode_partial([int(token)], family.mask_id) for token in tokens_L]


def printable(piece: str) -> str:
    """One column for each character: what moves the cursor (tabs, line ends) becomes a space."""
    return "".join(character if character.isprintable() else " " for character in piece)


def wrapped(pieces: Sequence[str], model_L: Sequence[int], width: int, colours: bool) -> list[str]:
    """Lines of at most `width` characters, broken between words where possible, coloured afterwards."""
    pieces = [printable(piece) for piece in pieces]
    text = "".join(pieces)
    owner = [model for piece, model in zip(pieces, model_L, strict=True) for _ in piece]
    lines, at = [], 0
    for line in textwrap.wrap(text, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False):
        models = owner[at : at + len(line)]
        at += len(line)
        runs = runs_of(list(line), models)
        shown = "".join(paint(part, colour_of(model)) if colours else part for part, model in runs)
        lines.append(shown + " " * (width - len(line)))
    return lines


def side_by_side(family: Family, columns: Sequence[tuple[str, Samples]], stream: TextIO, row: int = 0) -> str:
    """The same row under several schedules, in columns as wide as the terminal allows."""
    room = shutil.get_terminal_size((100, 24)).columns
    width = max(20, (room - 3 * (len(columns) - 1)) // len(columns))
    colours = has_colours(stream)
    blocks = []
    for title, samples in columns:
        pieces = pieces_of(family, samples.tokens[row])
        body = wrapped(pieces, writers_of(family, samples, row), width, colours)
        blocks.append([title[:width].ljust(width), "─" * width, *body])
    height = max(len(block) for block in blocks)
    rows = [" │ ".join(block[i] if i < len(block) else " " * width for block in blocks) for i in range(height)]
    return "\n".join(rows)


def fitted_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    names: Sequence[int] = (0,),
    spare: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """A table's lines, at most `width` characters each, and the heads of the columns that were left out.

    `names` are the columns of text, set to the left; numbers are set to the right. For want of room heads are broken
    into lines, then long names are, then columns go (those of `spare`, the first to go first). Names are never
    shortened, so that two rows that begin alike can be told apart."""
    body = [max([0, *(len(row[k]) for row in rows)]) for k in range(len(head))]
    sizes = [max(len(title), cells) for title, cells in zip(head, body, strict=True)]
    for k in names:
        sizes[k] = min(sizes[k], WIDE)
    wished = list(sizes)
    kept = list(range(len(head)))

    def excess(long: int = WIDE) -> int:
        """Characters too many, with names broken where they are longer than that."""
        needed = [min(sizes[k], long) if k in names else sizes[k] for k in kept]
        return sum(needed) + 2 * (len(kept) - 1) - width

    if excess() > 0:
        words = [max([0, *map(len, _breakable(title).split())]) for title in head]
        sizes = [min(size, max(cells, word)) for size, cells, word in zip(sizes, body, words, strict=True)]
    for title in spare:
        if excess(LONG) > 0 and title in head:
            kept.remove(list(head).index(title))
    while excess() > 0 and max(sizes[k] for k in names) > NARROW:
        sizes[max(names, key=lambda k: sizes[k])] -= 1
    for k in kept:  # what is left over goes to the heads
        sizes[k] = min(wished[k], sizes[k] + max(0, -excess()))
    lines = []
    for number, row in enumerate([head, *rows]):
        blocks = []
        for k in kept:
            text = _breakable(row[k]) if number == 0 and len(row[k]) > sizes[k] else row[k]
            indent = "  " if k in names else ""
            parts = textwrap.wrap(text, sizes[k], subsequent_indent=indent, break_on_hyphens=False) or [""]
            blocks.append([part.ljust(sizes[k]) if k in names else part.rjust(sizes[k]) for part in parts])
        for i in range(max(map(len, blocks))):
            cells = [block[i] if i < len(block) else " " * sizes[k] for k, block in zip(kept, blocks, strict=True)]
            lines.append("  ".join(cells).rstrip())
    return lines, [title for k, title in enumerate(head) if k not in kept]


def _breakable(title: str) -> str:
    return title.replace("/", " /")


class Watch:
    """A callback that plays the denoising of one row in the terminal. Paced to take `pace` seconds at least; it draws
    over itself where the terminal allows, and otherwise prints a frame now and then."""

    def __init__(
        self,
        family: Family,
        given_L: np.ndarray,
        models: Sequence[str],
        stream: TextIO = sys.stdout,
        row: int = 0,
        pace: float = 4.0,
    ) -> None:
        self.pace = pace
        self.family, self.models, self.stream, self.row = family, list(models), stream, row
        self.tokens = np.where(given_L < 0, family.mask_id, given_L)
        self.writer = np.where(given_L < 0, -2, -1)
        self.colours = has_colours(stream)
        self.total, self.written, self.height = int((given_L < 0).sum()), 0, 0
        self.began, self.drawn = time.monotonic(), 0.0
        self.seconds = 0.0  # spent here, waiting and drawing: no part of what sampling took

    def __call__(self, event: Event) -> None:
        if event.row != self.row:
            return
        came = time.perf_counter()
        self.tokens[event.positions] = event.tokens
        again = np.asarray(event.tokens) == self.family.mask_id  # masked again, by a rule that does so
        self.writer[event.positions] = np.where(again, -2, self.family.names.index(event.model))
        self.written = self.total - int((self.writer == -2).sum())
        ahead = self.began + self.pace * self.written / max(1, self.total) - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        if time.monotonic() - self.drawn > (0.04 if self.colours else 1.0) or self.written == self.total:
            self._draw(event)
        self.seconds += time.perf_counter() - came

    def _draw(self, event: Event) -> None:
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        pieces = pieces_of(self.family, self.tokens)
        lines = wrapped(pieces, self.writer.tolist(), width, self.colours)
        state = (
            f"t = {event.t:.3f}   step {event.step or '-'}   {event.model} runs   {self.written}/{self.total} written"
        )
        given = bool((self.writer == -1).any())
        lines += ["", state[:width].ljust(width), legend(self.family, self.models, self.colours, given)]
        up = f"\x1b[{self.height}F" if self.colours and self.height else ""
        self.stream.write(up + "\n".join(lines) + "\n")
        self.stream.flush()
        self.height, self.drawn = len(lines), time.monotonic()
