"""Figures of `compare`, `importance` and `pairs`.

Each function takes the JSON that a command wrote, so a recorded result can be drawn again. It writes a file whose
format follows from its name (.png, .svg, .pdf) and returns its path. matplotlib comes with
`pip install relaylm[report]` and is imported when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.errors import UserError, printable, reason
from relaylm.files import atomic_write, expand
from relaylm.show.colours import BLACK, BLUE, COLOURS, MARKERS, RED, colour_of

KINDS = {
    "asked": (BLUE, "o", "asked for"),
    "anchor": (BLACK, "s", "one model, for the gap"),
    "rival": (RED, "D", "equal-compute rival"),
}


def plot_importance(result: Mapping[str, Any], path: str | Path) -> Path:
    """Loss difference and KL by time for every pair, with 95% bands. Where the family has a twin, its disagreement is
    drawn too, and a second row shows the curves less that of the twin."""
    pairs: Sequence[Mapping[str, Any]] = result["pairs"]
    relative = all(pair["kl_relative"] is not None for pair in pairs)
    ends = {"": "", "_relative": "\nabove that of two seeds"} if relative else {"": ""}
    names = list(dict.fromkeys([*(pair["light"] for pair in pairs), *(pair["heavy"] for pair in pairs)]))
    figure = new_figure(9.0, 3.6 * len(ends))
    panels = figure.subplots(len(ends), 2, squeeze=False)
    for row, (end, what) in zip(panels, ends.items(), strict=True):
        for axes, (name, label) in zip(row, (("abs_loss_diff", "|loss difference|"), ("kl", "KL(heavy || light)"))):
            for j, pair in enumerate(pairs):
                title = f"{pair['light']} : {pair['heavy']}"
                colour = colour_of(names.index(pair["light"]))  # the light model's own, where a light one comes once
                _curve(axes, pair, name + end, colour, MARKERS[j % len(MARKERS)], title)
                if not end and pair.get(f"{name}_light_base"):
                    twin = f"two seeds of {pair['light']}"
                    _curve(axes, pair, f"{name}_light_base", colour, "x", twin, linestyle="--")
            if relative and not end:
                twin = f"two seeds of {pairs[0]['heavy']}"
                _curve(axes, pairs[0], f"{name}_base", "0.35", "x", twin, linestyle="--")
            axes.set_xlim(0, 1)
            finish(axes, "t   (0: text, 1: all masked)", f"{label}, nats{what}", legend=False, zero="0.6")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, title="light : heavy", fontsize=8)
    about = f"disagreement on {result['states']}, {pairs[0]['n']} rows for each t"
    return save_figure(figure, path, f"{result['family']['name'] or 'family'}: {about}")


def plot_pairs(result: Mapping[str, Any], path: str | Path) -> Path:
    """Mutual information of two masked positions by distance, a line with a 95% band for each masked share."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    for j, (share, nats, error) in enumerate(zip(result["shares"], result["nats"], result["error"], strict=True)):
        low, value, high = (np.maximum(np.array(nats) + z * np.array(error), 1e-6) for z in (-1.96, 0, 1.96))
        label, look = f"{100 * share:g}% masked", nth(j)
        axes.plot(result["distances"], value, label=label, linewidth=1, markersize=3, **look)
        axes.fill_between(result["distances"], low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log")
    finish(axes, "distance, positions", "mutual information, nats")
    about = f"{result['model']} on {result['source']}"
    return save_figure(figure, path, f"{result['family']['name'] or 'family'}: {about}")


def plot_front(result: Mapping[str, Any], path: str | Path) -> Path:
    """Loss in likelihood over the calls of a row, a line with 95% intervals for each way to choose what a call writes;
    `result` is a record of `studies.record.spacing`."""
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for plan in result["plans"]:
        name, _, rest = plan["plan"].partition(":")
        lines.setdefault(f"{name}, prefix" if rest.endswith("prefix") else name, []).append(plan)
    for j, (name, plans) in enumerate(lines.items()):
        plans.sort(key=lambda plan: plan["calls"])
        x, y, ci = ([plan[key] for plan in plans] for key in ("calls", "loss", "loss_ci"))
        points(axes, x, y, ci, label=name, linewidth=1, markersize=4, capsize=2, **nth(j))
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=2)
    plain_ticks(axes.xaxis, one_two_five(0, 5))
    plain_ticks(axes.yaxis, both_sides(0, 4), signed)
    finish(axes, "calls a row", "loss, hundredths of a nat a position", zero=BLACK)
    what = f"{result['family']['name']}: {result['model']} against T = {result['length']} uniform steps"
    return save_figure(figure, path, f"{what}, {result['rows']} rows")


def _curve(axes: Any, pair: Mapping[str, Any], name: str, colour: str, marker: str, label: str, **look: Any) -> None:
    band = np.array(pair[f"{name}_ci"], dtype=float)
    axes.fill_between(pair["t"], band[:, 0], band[:, 1], color=colour, alpha=0.2, linewidth=0)
    y = np.array(pair[name], dtype=float)
    axes.plot(pair["t"], y, color=colour, marker=marker, markersize=4, label=label, **look)


def plot_compare(result: Mapping[str, Any], path: str | Path) -> Path:
    """The paired difference of every schedule to the first, with its interval, and beside it the FLOPs saved. A hollow
    mark is a difference that may be chance; labels give perplexity and entropy."""
    paired = {item["schedule"]: item for item in result["paired"]}
    first = {"difference": 0.0, "ci": [0.0, 0.0], "p_holm": 1.0}
    rows = sorted(result["rows"], key=lambda row: -paired.get(row["schedule"], first)["difference"])
    figure = new_figure(9.5, 1.4 + 0.34 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    seen = set()
    for k, row in enumerate(rows):
        colour, marker, label = KINDS[row["kind"]]
        item = paired.get(row["schedule"], first)
        look = {"fmt": marker, "color": colour, "capsize": 3, "label": None if label in seen else label}
        look |= {"xerr": reach(item["difference"], item["ci"]), "mfc": colour if item["p_holm"] < 0.05 else "white"}
        left.errorbar(item["difference"], k, **look)
        right.barh(k, 100 * (row["flops_saved"] or 0), color=colour, height=0.55)
        seen.add(label)
    left.axvline(0, color="0.5", linewidth=0.8)
    names = [f"{row['schedule']}   (perplexity {row['gen_ppl']:.2f}, entropy {row['entropy']:.2f})" for row in rows]
    left.set_yticks(np.arange(len(rows)), names, fontsize=8)
    reference = result["rows"][0]["schedule"]
    what = f"log-perplexity less that of {reference}, paired\n(lower is better; 95%; hollow: may be chance)"
    finish(left, what, grid="x")
    finish(right, f"FLOPs saved, %\nto {result['heavy']}, {result['length']} steps", grid="x", legend=False)
    about = f"{result['n']} samples each, T = {result['steps']}, judge {result['judge']}"
    return save_figure(figure, path, f"{result['family']['name'] or 'family'}: {about}")


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, sizes in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("figures need matplotlib: `pip install relaylm[report]`") from None
    return Figure(figsize=(width, height), layout="constrained")


def panels(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Any, Sequence[Any]]:
    """An empty figure and its axes, side by side; options are those of `subplots`."""
    figure = new_figure(width, height)
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def nth(k: int) -> dict[str, Any]:
    """The look of the k-th of several curves."""
    return {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)]}


def points(axes: Any, x: Any, y: Any, ci: Any, **look: Any) -> None:
    """Values with their intervals."""
    axes.errorbar(x, y, yerr=reach(y, ci), **{"capsize": 3, **look})


def reach(values: Any, ci: Any) -> np.ndarray:
    """How far intervals reach below and above their values, as `errorbar` wants it; not at all where an end is None."""
    low, high = np.array(ci, dtype=float).reshape(-1, 2).T
    y = np.array(values, dtype=float)
    return np.nan_to_num(np.maximum(0, [y - low, high - y]), posinf=0)


def one_two_five(first: int, last: int) -> list[float]:
    """1, 2, 5, 10, ... between two powers of ten."""
    return [k * 10.0**e for e in range(first, last) for k in (1, 2, 5)] + [10.0**last]


def both_sides(first: int, last: int) -> list[float]:
    """The same with 0 and the negative ones."""
    up = one_two_five(first, last)
    return [*(-value for value in up), 0.0, *up]


def signed(value: float) -> str:
    """A number with its sign; 0 without."""
    return f"{value:+g}" if value else "0"


def plain_ticks(axis: Any, values: Sequence[float], text: Callable[[float], str] = "{:g}".format) -> None:
    """Ticks at these values alone, as plain numbers: on a logarithmic axis matplotlib labels only powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def finish(
    axes: Any, x: str, y: str = "", grid: str = "both", legend: bool = True, zero: str = "", **look: Any
) -> None:
    """Label the axes, lay a faint grid below what is drawn, and add a legend, with these settings; a line at 0 in the
    colour `zero`."""
    axes.set(xlabel=x, ylabel=y)
    axes.grid(axis=grid, alpha=0.25)
    axes.set_axisbelow(True)
    if zero:
        axes.axhline(0, color=zero, linewidth=0.8)
    if legend:
        axes.legend(**{"frameon": False, "fontsize": 8, **look})


def save_figure(figure: Any, path: str | Path, title: str = "") -> Path:
    """Write a figure, with a title above it, in the format that the name says. The same figure has the same bytes."""
    from matplotlib import rc_context
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    if title:
        figure.suptitle(title, fontsize=10)
    for text in figure.findobj(Text):  # names and schedules may hold dollar signs, which are no mathematics
        text.set(parse_math=False, text=printable(text.get_text()))
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not isinstance(axis.get_major_formatter(), (FixedFormatter, FuncFormatter)):  # but powers of ten are
            for text in axis.findobj(Text):
                text.set_parse_math(text is not axis.label)
    target, data = expand(path), io.BytesIO()
    kind = target.suffix[1:].lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    try:
        with rc_context({"svg.hashsalt": "relaylm"}):
            figure.savefig(data, dpi=160, format=kind or None, metadata=undated)
    except ValueError as error:
        raise UserError(f"cannot draw the figure {target}: {reason(error)}") from None
    atomic_write(target, data.getvalue())
    return target
