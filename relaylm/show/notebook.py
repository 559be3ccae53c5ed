"""Samples as a notebook shows them: each token in the colour of the model that wrote it, and what they cost."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from relaylm.show.colours import GIVEN, colour_of, row_pieces, runs_of, writers_of

if TYPE_CHECKING:
    from relaylm.models.family import Family
    from relaylm.sampling.result import Samples


def samples_html(samples: Samples, family: Family | None, rows: int) -> str:
    """The first rows as HTML, a legend and a line of cost. All text is escaped."""
    parts = [_row(samples, family, row) for row in range(min(rows, len(samples.tokens)))]
    if len(samples.tokens) > rows:
        parts.append(f"<p>and {len(samples.tokens) - rows} more</p>")
    return f'<div class="relaylm-samples">{"".join(parts)}{_legend(samples, family)}</div>'


def _row(samples: Samples, family: Family | None, row: int) -> str:
    if family is None:
        text = samples.texts[row] if samples.texts else " ".join(map(str, samples.tokens[row]))
        return f'<p style="white-space:pre-wrap">{escape(text)}</p>'
    runs = runs_of(row_pieces(family, samples.tokens[row]), writers_of(family, samples, row))
    spans = (f'<span style="color:{colour_of(rank)}">{escape(text)}</span>' for text, rank in runs)
    return f'<p style="white-space:pre-wrap">{"".join(spans)}</p>'


def _legend(samples: Samples, family: Family | None) -> str:
    names = [] if family is None else [(name, rank) for rank, name in enumerate(family.names)]
    names = [pair for pair in names if samples.cost.calls.get(pair[0])]
    names += [("given", GIVEN)] if family is not None and (samples.trace.model_nL < 0).any() else []
    marks = (f'<span style="color:{colour_of(rank)}">■ {escape(name)}</span>' for name, rank in names)
    return f"<p><small>{' '.join(marks)} {escape(samples.summary())}</small></p>"
