"""A sample as a picture: text in the colours of the models that wrote it, and the schedule as a strip under it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from relaylm.schedule import Timetable
from relaylm.terminal import pieces_of, printable, runs_of, writers_of

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.sampler import Samples

# Okabe and Ito's colours, which the colour-blind can tell apart; from the lightest model to the heaviest.
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#F0E442", "#56B4E9", "#D55E00", "#CC79A7")
GIVEN = "#888888"
_FONT = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"


def colour_of(model: int) -> str:
    return GIVEN if model < 0 else COLOURS[model % len(COLOURS)]


def svg(family: Family, samples: Samples, timetable: Timetable | None = None, row: int = 0, columns: int = 72) -> str:
    """One sample as a self-contained SVG. Each line of text is laid out on a grid of `columns` characters."""
    pieces = [printable(piece) for piece in pieces_of(family, samples.tokens[row])]
    owner = [model for piece, model in zip(pieces, writers_of(family, samples, row), strict=True) for _ in piece]
    text = "".join(pieces)
    wide, high, margin = 10.2, 24, 20
    width = columns * wide + 2 * margin
    body, y = [], margin + 16
    for start in range(0, len(text), columns):
        line, models = text[start : start + columns], owner[start : start + columns]
        x = float(margin)
        for part, model in runs_of(list(line), models):
            body.append(
                f"<text x='{x:.1f}' y='{y}' fill='{colour_of(model)}' textLength='{len(part) * wide:.1f}' "
                f"xml:space='preserve'>{escape(part)}</text>"
            )
            x += len(part) * wide
        y += high
    names = samples.trace.models
    if timetable is not None:
        y += 8
        step = (width - 2 * margin) / timetable.steps
        x = float(margin)
        for part, model in runs_of([" "] * timetable.steps, [family.names.index(name) for name in timetable.models]):
            long = len(part) * step
            body.append(f"<rect x='{x:.1f}' y='{y}' width='{long:.1f}' height='14' fill='{colour_of(model)}'/>")
            x += long
        y += 32
        label = "fill='#444444' font-size='13'"
        body.append(f"<text x='{margin}' y='{y}' {label}>fully masked (t = 1)</text>")
        body.append(f"<text x='{width - margin}' y='{y}' {label} text-anchor='end'>text (t = 0)</text>")
    y += 26
    x = float(margin)
    for name in names:
        calls = samples.cost.calls.get(name, 0)
        caption = f"{name} ({calls} calls)"
        body.append(
            f"<rect x='{x:.0f}' y='{y - 11}' width='12' height='12' fill='{colour_of(family.names.index(name))}'/>"
        )
        body.append(f"<text x='{x + 18:.0f}' y='{y}' fill='#444444' font-size='13'>{escape(caption)}</text>")
        x += 40 + 8 * len(caption)
    height = y + margin
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height}' "
        f"viewBox='0 0 {width:.0f} {height}' {_FONT} font-size='17'>"
        f"<rect width='100%' height='100%' rx='8' fill='#ffffff'/>{''.join(body)}</svg>\n"
    )
