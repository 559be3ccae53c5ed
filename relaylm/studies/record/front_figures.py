"""The figures of `front`: every kind's losses over what it saves, and perplexity over calls for readers who are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.show.colours import BLACK, BROWN, GREEN, MARKERS, RED, VIOLET
from relaylm.show.figures import finish, nth, panels, points, save_figure

TICKS = (0.5, 0.67, 0.8, 0.9, 0.95)
PARTS = {
    "samples": "samples: extra log-perplexity, hundredths",
    "bound": "likelihood: loss, hundredths of a nat a position",
}
KINDS = {  # in the order in which they are measured
    "sets": "spaced sets",
    "uniform": "uniform steps",
    "surest": "surest first, spaced",
    "light-first": "light first, spaced sets",
    "sandwich": "sandwich, spaced sets",
    "light-last": "light last, spaced sets",
    "smaller": "one smaller model, spaced sets",
    "inf": "one position at a time",
    "prefix": "spaced, in the plan's order",
    "middle": "one middle model, uniform steps",
    "dus": "DUS",
    "eb": "EB-Sampler",
    "low-confidence": "low-confidence",
    "tuner": "the tuner's choice",  # by --also @SEARCH.json
}
MOST_CALLS, LEAST_CALLS = 220, 6  # of the figure over calls


def draw(result: dict[str, Any], path: Path) -> Path:
    """Loss over the share saved, a line for each kind; samples on the left, likelihood on the right. An axis reaches as
    far as uniform steps at 90% saved; a kind that lies outside as a whole is named at the edge."""
    figure, row = panels(11.0, 4.8, 2)
    kinds = [kind for kind in KINDS if kind != "inf" and any(row["kind"] == kind for row in result["cells"])]
    for axes, part in zip(row, PARTS, strict=True):
        cells = [row for row in result["cells"] if (row[part] or {}).get("loss") is not None]
        high = 1.1 * max(row[part]["loss"] for row in cells if row["kind"] == "uniform" and row["level"] < 0.94)
        low = 1.25 * min(0.0, *(row[part]["loss"] for row in cells if row["kind"] in ("sets", "surest")))
        outside = []
        for kind in kinds:
            rows = sorted((row for row in cells if row["kind"] == kind), key=lambda row: row["saved"])
            y_P = np.array([row[part]["loss"] for row in rows])
            if not rows or y_P.min() > high or y_P.max() < low:
                outside += [f"{KINDS[kind]}: {y_P.min():+.0f} to {y_P.max():+.0f}"] if rows else []
                continue
            x, ci = [1 - row["saved"] for row in rows], [row[part]["ci"] for row in rows]
            points(axes, x, y_P, ci, label=KINDS[kind], elinewidth=0.8, capsize=2, **look(kind))
        if outside:
            axes.text(0.02, 0.98, "\n".join(["off the scale:", *outside]), va="top", size=7, transform=axes.transAxes)
        axes.set_xscale("log")
        axes.set_xlim(0.56, 0.042)
        axes.set_xticks([1 - level for level in TICKS], [f"{level:.0%}" for level in TICKS])
        axes.set_xticks([], minor=True)
        axes.set_ylim(low, high)
        saved = f"FLOPs saved, of {result['heavy']} in T = {result['length']} uniform steps"
        finish(axes, saved, PARTS[part], legend=False, zero=BLACK)
    handles = {label: h for axes in row for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False, fontsize=8)
    what = "what is lost when FLOPs are saved (lower is better)"
    return save_figure(figure, path, f"{result['family']['name']}: {what}")


def look(kind: str) -> dict[str, Any]:
    """How a kind is drawn: solid lines for the heavy model, dashed ones for others, three bold."""
    single = ("sets", "uniform", "surest", "prefix", "dus", "eb", "low-confidence")
    others = {"light-first": VIOLET, "sandwich": BROWN, "light-last": BLACK, "smaller": "0.5", "middle": RED}
    others |= {"tuner": GREEN}
    if kind in others:
        return {"color": others[kind], "marker": MARKERS[-1 - list(others).index(kind)], "linestyle": "--",
                "linewidth": 1.0, "markersize": 4.0}  # fmt: skip
    width = 2.2 if kind in single[:3] else 1.0
    return {"linewidth": width, "markersize": 3 + width, **nth(single.index(kind))}


def draw_calls(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Perplexity of samples over the calls they took, for the heavy model alone: uniform steps, spaced sets, surest. A
    panel for each record that has all three; its dashed line is T = L."""
    kinds = {"uniform": "uniform steps", "sets": "spaced", "surest": "surest first"}
    found = [record for record in records if kinds.keys() <= {cell["kind"] for cell in record.get("cells", ())}]
    figure, row = panels(9.6, 3.5, len(found))
    for axes, record in zip(row, found, strict=True):
        base = next(cell for cell in record["cells"] if cell["kind"] == "reference")
        for kind, label in kinds.items():
            cells = sorted((cell for cell in record["cells"] if cell["kind"] == kind), key=lambda cell: cell["calls"])
            x, y, ci = ([cell[key] for cell in cells] for key in ("calls", "gen_ppl", "gen_ppl_ci"))
            points(axes, x, y, ci, label=label, **look(kind))
        what = f"one step a position: {base['calls']:.0f} calls"
        axes.axhline(base["gen_ppl"], color=BLACK, linewidth=1.0, linestyle="--", label=what)
        axes.set_xscale("log")
        axes.set_xlim(MOST_CALLS, LEAST_CALLS)
        ticks = [200, 100, 50, 25, 12]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, None)
        axes.set_title(f"{record['family']['name']}: {record['length']} positions, {record['n']:,} samples", size=9)
        finish(axes, "network calls for one text", "perplexity (lower is better)", loc="upper left")
    return save_figure(figure, path)
