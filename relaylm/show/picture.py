"""Samples in the colours of the models that wrote them: an SVG picture with the schedule as a strip under the text, and
what a notebook shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from relaylm.core.schedule import Schedule
from relaylm.show.colours import GIVEN, colour_of, on_a_line, row_pieces, runs_of, writers_of
from relaylm.show.player import strip

if TYPE_CHECKING:
    from relaylm.models.family import Family
    from relaylm.sampling.result import Samples

WIDE, HIGH, MARGIN = 10.2, 24, 20  # of a character, of a line, around everything; pixels
COLUMNS = 72  # characters in a line of text
_FONT = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"
_LABEL = "fill='#444444' font-size='13'"


def svg(family: Family, samples: Samples, schedule: Schedule | None = None) -> str:
    """The first sample as an SVG that needs no other file. `schedule` (bound to models' names) gives the strip."""
    pieces = [on_a_line(piece) for piece in row_pieces(family, samples.tokens[0])]
    owner = [rank for piece, rank in zip(pieces, writers_of(family, samples, 0), strict=True) for _ in piece]
    text = "".join(pieces)
    width = COLUMNS * WIDE + 2 * MARGIN
    body, y = [], MARGIN + 16
    for line in _lines(text):
        x = float(MARGIN)
        for part, rank in runs_of(text[line], owner[line]):
            long = len(part) * WIDE
            body.append(
                f"<text x='{x:.1f}' y='{y}' fill='{colour_of(rank)}' textLength='{long:.1f}' "
                f"xml:space='preserve'>{escape(part)}</text>"
            )
            x += long
        y += HIGH
    if schedule is not None:
        runs = strip(schedule, math.inf if samples.law.startswith("spaced") else samples.steps, family.names)
        body += _strip(runs, y + 8, width)
        y += 40
    y += 26
    x = float(MARGIN)
    for name in samples.trace.models:
        caption, colour = f"{name} ({samples.cost.calls.get(name, 0)} calls)", colour_of(family.names.index(name))
        body.append(f"<rect x='{x:.0f}' y='{y - 11}' width='12' height='12' fill='{colour}'/>")
        body.append(f"<text x='{x + 18:.0f}' y='{y}' {_LABEL}>{escape(caption)}</text>")
        x += 40 + 8 * len(caption)
    height = y + MARGIN
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' "
        f"viewBox='0 0 {width:.0f} {height}' {_FONT} font-size='17'>"
        f"<rect width='100%' height='100%' rx='8' fill='#ffffff'/>{''.join(body)}</svg>\n"
    )


def _lines(text: str) -> Iterator[slice]:
    """Lines of at most COLUMNS characters, broken after a space where there is one."""
    start = 0
    while start < len(text):
        end = start + COLUMNS
        space = text.rfind(" ", start, end + 1) if end < len(text) else -1
        line = slice(start, space + 1 if space > start else end)
        yield line
        start = line.stop


def _strip(runs: list[tuple[int, float, float]], y: int, width: float) -> list[str]:
    """Which model runs at which time, from the fully masked end on the left."""
    body, long = [], width - 2 * MARGIN
    for rank, start, end in runs:
        place = f"x='{MARGIN + (1 - start) * long:.1f}' y='{y}' width='{(start - end) * long:.1f}'"
        body.append(f"<rect {place} height='14' fill='{colour_of(rank)}'/>")
    body.append(f"<text x='{MARGIN}' y='{y + 32}' {_LABEL}>fully masked (t = 1)</text>")
    body.append(f"<text x='{width - MARGIN}' y='{y + 32}' {_LABEL} text-anchor='end'>text (t = 0)</text>")
    return body


def samples_html(samples: Samples, family: Family | None, rows: int) -> str:
    """The first rows as HTML, a legend and a line of cost. All text is escaped."""

    def coloured(text: str, rank: int) -> str:
        return f'<span style="color:{colour_of(rank)}">{escape(text)}</span>'

    texts, legend = [], []
    for row in range(min(rows, len(samples.tokens))):
        if family is None:
            texts.append(escape(samples.texts[row] if samples.texts else " ".join(map(str, samples.tokens[row]))))
        else:
            runs = runs_of(row_pieces(family, samples.tokens[row]), writers_of(family, samples, row))
            texts.append("".join(coloured(*run) for run in runs))
    if family is not None:
        names = {name: rank for rank, name in enumerate(family.names) if samples.cost.calls.get(name)}
        names |= {"given": GIVEN} if (samples.trace.model_nL < 0).any() else {}
        legend = [coloured(f"■ {name}", rank) for name, rank in names.items()]
    parts = [f'<p style="white-space:pre-wrap">{text}</p>' for text in texts]
    parts += [f"<p>and {len(samples.tokens) - rows} more</p>"] if len(samples.tokens) > rows else []
    parts.append(f"<p><small>{' '.join(legend)} {escape(samples.summary())}</small></p>")
    return f'<div class="relaylm-samples">{"".join(parts)}</div>'
