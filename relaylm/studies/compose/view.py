"""What `compose` found, for readers: a table, Markdown for the documentation, and two figures.

Everything is made from the JSON that the command wrote, so that a table or a figure can be made again without sampling;
no number is typed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.console import table, terminal_width, wrapped
from relaylm.errors import UserError
from relaylm.files import atomic_write, expand, read_bytes
from relaylm.show.colours import COLOURS, MARKERS
from relaylm.show.figures import both_sides, finish, one_two_five, panels, plain_ticks, save_figure, signed
from relaylm.studies.compose.compose import diversity, kind_of

Result = Mapping[str, Any]
HEAD = ("rule", "dial", "schedule", "perplexity", "entropy", "words", "distinct-4", "calls/row", "GFLOPs/row", "s")
FONT = 7.0  # points, of the texts beside markers
SPARE = ("s", "calls/row", "distinct-4", "words")  # columns that a narrow terminal leaves out, the first of them first


def _name(result: Result) -> str:
    return result["family"]["name"] or "family"


def _number(value: float | None, form: str, ci: Sequence[float | None] = (None, None)) -> str:
    """A number, and half of its 95% interval where that is known."""
    if value is None:
        return "-"
    return f"{value:{form}}" + ("" if None in ci else f" ± {_margin(ci):{form.lstrip('+')}}")


def _margin(ci: Sequence[float | None]) -> float:
    """Half of an interval; 0 where there is none."""
    low, high = ci
    return 0.0 if low is None or high is None else (high - low) / 2


def _cells(result: Result, row: Mapping[str, Any]) -> list[str]:
    gflops = None if row["flops"] is None else _gflops(result, row)
    numbers = [(row["entropy"], ".3f"), (row.get("word_entropy"), ".3f"), (row["distinct_4"], ".3f")]
    numbers += [(row["calls"] / result["n"], ".1f")]
    numbers += [(gflops, ".0f" if gflops is not None and gflops >= 1000 else ".3g"), (row["seconds"], ".1f")]
    perplexity = _number(row["gen_ppl"], ".2f", row["gen_ppl_ci"])
    return [row["line"], row["dial"], row["schedule"], perplexity, *(_number(*number) for number in numbers)]


def render(result: Result, width: int | None = None) -> str:
    """The answer first, then every cell in `width` columns (the terminal's); a star marks the Pareto front."""
    width = width or terminal_width()
    rows = [["*" if row["front"] else "", *_cells(result, row)] for row in result["rows"]]
    star = f"* no cell has fewer operations, lower perplexity and higher {_entropy(result)} at once"
    notes = ["; ".join(text for text in (star, _capped(result)) if text)]
    notes += [f"{result['n']} samples a cell, judge {result['judge']}, seed {result['seed']}"]
    notes += [text for text in (_heldout(result), _undone(result), result.get("note")) if text]
    cells = table(["", *HEAD], rows, width, text=(0, 1, 2, 3), spare=SPARE)
    return "\n".join([*wrapped([result["answer"]], width), "", cells, *wrapped(notes, width, "  ")])


def _entropy(result: Result) -> str:
    return "entropy of words" if "word_entropy" in result["rows"][0] else "entropy"


def _capped(result: Result) -> str:
    """How real text bounds the front, where there is some."""
    if not result.get("heldout"):
        return ""
    return f"perplexity below held-out text's, or {_entropy(result)} above it, counts as the text's own"


def _heldout(result: Result) -> str:
    """What held-out text comes to by the same measures."""
    row = result.get("heldout")
    if not row:
        return ""
    words = f", of words {row['word_entropy']:.3f}" if "word_entropy" in row else ""
    spread = "" if row["distinct_4"] is None else f", distinct-4 {row['distinct_4']:.3f}"
    perplexity = _number(row["gen_ppl"], ".2f", row["gen_ppl_ci"])
    return f"held-out text: perplexity {perplexity}, entropy {row['entropy']:.3f}{words}{spread}"


def _undone(result: Result) -> str:
    """How much of the grid is missing; by name, where that is short."""
    missing = [f"{cell['line']} {cell['dial']} {cell['schedule']}" for cell in result.get("missing", [])]
    names = f": {', '.join(missing)}" if len(missing) <= 3 else ""
    return f"{len(missing)} of {len(missing) + len(result['rows'])} cells not measured{names}" if missing else ""


def markdown(result: Result) -> str:
    """The answer, the front, and what both together save and lose, as a section of a document."""
    name = _name(result)
    machine = result.get("machine", {})
    where = machine.get("gpu") or machine.get("cpu") or result["device"]
    made = (
        f"Family `{name}`, {result['n']} samples in each of {len(result['rows'])} cells, length {result['length']}, "
        f"judge `{result['judge']}`, seed {result['seed']}, {where}."
    )
    notes = [f"{text[0].upper()}{text[1:]}." for text in (_heldout(result), _undone(result)) if text]
    made = " ".join([made, *notes, *([result["note"]] if result.get("note") else [])])
    front = sorted((row for row in result["rows"] if row["front"]), key=lambda row: row["flops"] or 0)
    title = f"The Pareto front{f' ({capped})' if (capped := _capped(result)) else ''}, from the cheapest:"
    lines = [f"### {name}", "", result["answer"], "", made, "", title, ""]
    lines += _table(HEAD, [_cells(result, row) for row in front])
    lines += ["", "Each schedule at each line's end and with the dial turned:", ""]
    head = ["rule", "dial", "schedule", "FLOPs left: schedule × dial", "both"]
    head += ["loss: schedule + dial", "both", "interaction", "they"]
    body = []
    for item in result["combinations"]:
        flops, loss = item["flops"], item["loss"]
        known = flops["product"] is not None
        body.append(
            [
                item["line"],
                f"{item['neither']} → {item['dial']}",
                item["schedule"],
                f"{flops['schedule']:.3f} × {flops['steps']:.3f} = {flops['product']:.3f}" if known else "-",
                f"{flops['both']:.3f}" if known else "-",
                f"{loss['schedule']['value']:+.3f} {loss['steps']['value']:+.3f}",
                *(_number(each["value"], "+.3f", each["ci"]) for each in (loss["both"], item["interaction"])),
                kind_of(item),
            ]
        )
    return "\n".join([*lines, *_table(head, body)])


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]


def marks(result: Result) -> tuple[str, str]:
    """The comments between which a document has this result."""
    return f"<!-- compose {_name(result)}: begin -->", f"<!-- compose {_name(result)}: end -->"


def put_into(result: Result, path: str | Path) -> Path:
    """Write the Markdown between its marks in a document; at its end if they are not there yet."""
    target = expand(path)
    try:
        text = read_bytes(target).decode() if target.exists() else ""
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {target}: {error}") from None
    begin, end = marks(result)
    section = f"{begin}\n{markdown(result)}\n{end}"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n".lstrip()
    atomic_write(target, text)
    return target


# ------------------------------------------------------------------------------------------------ figures


def plot(result: Result, path: str | Path) -> list[Path]:
    """Two figures: NAME (perplexity and entropy against operations) and NAME-both (do savings and losses compose?)."""
    target = expand(path)
    drawn = [save_figure(_front_figure(result), target)]
    if result["combinations"]:
        drawn.append(save_figure(_both_figure(result), target.with_name(f"{target.stem}-both{target.suffix}")))
    return drawn


def _sizes(lines: Sequence[str]) -> dict[str, float]:
    """Diameters of the lines' markers, the first the largest: cells that coincide lie inside each other, all seen."""
    return {line: float(size) for line, size in zip(lines, np.linspace(10, 5, len(lines)), strict=True)}


def _styles(result: Result) -> tuple[dict[str, str], dict[str, str]]:
    lines = dict.fromkeys(row["line"] for row in result["rows"])
    schedules = dict.fromkeys(row["schedule"] for row in result["rows"])
    colours = {line: COLOURS[k % len(COLOURS)] for k, line in enumerate(lines)}
    return colours, {schedule: MARKERS[k % len(MARKERS)] for k, schedule in enumerate(schedules)}


def _legend(figure: Any, colours: Mapping[str, str], markers: Mapping[str, str], extra: Sequence[Any] = ()) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=3, label=line) for line, colour in colours.items()]
    handles += [Line2D([], [], color="0.3", marker=mark, linestyle="", label=name) for name, mark in markers.items()]
    figure.legend(handles=[*handles, *extra], loc="outside right upper", frameon=False, fontsize=8)


@dataclass(frozen=True)
class _Mark:
    """A marker in a figure, the error bar it has, what is to be written beside it, and with which it may move aside."""

    axes: Any
    artist: Any
    text: str = ""
    margin: float = 0.0
    kin: tuple[str, str] | None = None  # line and dial

    def at(self, figure: Any, up: float = 0.0) -> np.ndarray:
        """Where it is, in points, once the layout is settled; or a point so far above it."""
        x, y = self.artist.get_data()
        return np.array(self.axes.transData.transform((x[0], y[0] + up))) * 72 / figure.dpi


def _tidy(figure: Any, marks: Sequence[_Mark]) -> None:
    """Move markers that would hide their kin a little to the sides, then write the texts where they cover the least of
    the markers and of each other. Markers at one place have one text."""
    from matplotlib.transforms import ScaledTranslation

    figure.draw_without_rendering()  # settles the layout
    for axes in dict.fromkeys(mark.axes for mark in marks):
        here = [mark for mark in marks if mark.axes is axes]
        size = np.array([mark.artist.get_markersize() for mark in here])
        at = np.array([mark.at(figure) for mark in here])
        aside = np.zeros(len(here))
        for j, k in combinations(range(len(here)), 2):
            if here[j].kin and here[j].kin == here[k].kin and np.hypot(*(at[j] - at[k])) < 0.9 * size[j]:
                aside[[j, k]] += -0.5 * size[j], 0.5 * size[k]
        boxes = []
        for mark, (x, y), dx, width in zip(here, at, aside.tolist(), size, strict=True):
            if dx:
                shift = ScaledTranslation(dx / 72, 0, figure.dpi_scale_trans)
                mark.artist.set_transform(axes.transData + shift)
            boxes.append((x + dx, y, width / 2, width / 2))
            if mark.margin:
                low, high = (mark.at(figure, up)[1] for up in (-mark.margin, mark.margin))
                boxes.append((x, (low + high) / 2, 2.0, (high - low) / 2))
        frame = axes.bbox.extents * 72 / figure.dpi
        left = [k for k, mark in enumerate(here) if mark.text]
        while left:
            k = left[0]
            together = [j for j in left if np.hypot(*(at[j] - at[k])) < 8]
            left = [j for j in left if j not in together]
            text = ", ".join(dict.fromkeys(here[j].text for j in together))
            half = 0.32 * FONT * len(text), 0.55 * FONT
            dx, dy = _free_place(np.array(boxes), frame, at[k], size[k] / 2, half)
            x, y = here[k].artist.get_data()
            where = {"xytext": (dx, dy), "textcoords": "offset points", "ha": "center", "va": "center"}
            axes.annotate(text, (x[0], y[0]), fontsize=FONT, color="0.2", **where)
            boxes.append((at[k][0] + dx, at[k][1] + dy, *half))


def _free_place(
    boxes_A4: np.ndarray, frame: np.ndarray, at: np.ndarray, radius: float, half: tuple[float, float]
) -> tuple[float, float]:
    """Where beside a marker, inside the frame, a text of so much half width and height covers the least of the boxes
    (centre, half width, half height): the nearest such place, as an offset."""
    best = (np.inf, 0.0, 0.0)
    for gap in (2.0, 5.0, 9.0, 14.0, 20.0):
        for angle in np.deg2rad([0, 90, 270, 45, 315, 180, 135, 225]):
            away = radius + gap + np.array(half)
            x, y = np.clip(at + away * (np.cos(angle), np.sin(angle)), frame[:2] + half, frame[2:] - half)
            wide, high = (
                np.maximum(0.0, half[k] + boxes_A4[:, 2 + k] - np.abs((x, y)[k] - boxes_A4[:, k])) for k in (0, 1)
            )
            over = float((wide * high).sum())
            if over < best[0] - 1e-9:
                best = (over, float(x - at[0]), float(y - at[1]))
    return best[1], best[2]


def _front_figure(result: Result) -> Any:
    figure, (left, right) = panels(11.0, 4.8, 2)
    from matplotlib.lines import Line2D

    rows = [row for row in result["rows"] if row["flops"] is not None]
    if not rows:
        raise UserError("the figure needs FLOPs, and these models do not say what a call costs")
    colours, markers = _styles(result)
    sizes = _sizes(list(colours))
    words = "word_entropy" in rows[0]
    marks = []
    for axes, value in ((left, lambda row: row["gen_ppl"]), (right, diversity)):
        for line, colour in colours.items():
            heavy = [row for row in rows if row["line"] == line and row["calls_by_model"].keys() == {result["heavy"]}]
            heavy = sorted((row for row in heavy if math.isfinite(value(row))), key=lambda row: row["flops"])
            axes.plot([_gflops(result, row) for row in heavy], [value(row) for row in heavy], color=colour, alpha=0.4)
        for row in rows:
            x, y = _gflops(result, row), value(row)
            if not math.isfinite(y):
                continue
            edge = "black" if row["front"] else "none"
            style = {"color": colours[row["line"]], "marker": markers[row["schedule"]], "markeredgecolor": edge}
            (artist,) = axes.plot(x, y, linestyle="", markersize=sizes[row["line"]], markeredgewidth=1.1, **style)
            alone = row["calls_by_model"].keys() == {result["heavy"]}
            marks.append(_Mark(axes, artist, row["dial"] if alone else "", kin=(row["line"], row["dial"])))
        if result.get("heldout") and math.isfinite(value(result["heldout"])):
            axes.axhline(value(result["heldout"]), color="black", linestyle=":", linewidth=1.2, zorder=0)
        axes.set_xscale("log")
        plain_ticks(axes.xaxis, one_two_five(-5, 8))
    span = [row["gen_ppl"] for row in rows if math.isfinite(row["gen_ppl"])]  # the others have no place in it
    if span and max(span) > 3 * min(span):
        left.set_yscale("log")
        plain_ticks(left.yaxis, one_two_five(0, 6))
    finish(left, "GFLOPs for a sample", f"generative perplexity, judge {result['judge']}", legend=False)
    finish(right, "GFLOPs for a sample", f"entropy of a sample's {'words' if words else 'tokens'}, nats", legend=False)
    extra = [Line2D([], [], color="none", marker="o", markeredgecolor="black", label="on the Pareto front")]
    extra += [Line2D([], [], color="0.3", alpha=0.4, label="heavy alone, dial turned")]
    if result.get("heldout"):
        extra += [Line2D([], [], color="black", linestyle=":", linewidth=1.2, label="held-out text")]
    _legend(figure, colours, markers, extra)
    figure.suptitle(f"{_name(result)}: rule x steps x schedule, {result['n']} samples each")
    _tidy(figure, marks)
    return figure


def _gflops(result: Result, row: Mapping[str, Any]) -> float:
    return float(row["flops"]) / float(result["n"]) / 1e9


def _both_figure(result: Result) -> Any:
    figure, (left, right) = panels(11.0, 4.8, 2)
    colours, markers = _styles(result)
    sizes = _sizes(list(colours))
    left.set_xscale("log")
    right.set_xscale("asinh", linear_width=0.05)  # even near 0, where most losses are, and space for the large ones
    right.set_yscale("asinh", linear_width=0.02)
    marks = []
    last = {(item["line"], item["dial"]): item["schedule"] for item in result["combinations"]}
    for item in result["combinations"]:
        style: dict[str, Any] = {"color": colours[item["line"]], "marker": markers[item["schedule"]], "linestyle": ""}
        style["markersize"] = sizes[item["line"]]
        flops, loss, interaction = item["flops"], item["loss"], item["interaction"]
        text = item["dial"] if last[item["line"], item["dial"]] == item["schedule"] else ""  # once is enough
        if flops["product"]:
            (artist,) = left.plot(flops["product"], flops["both"] / flops["product"], **style)
            marks.append(_Mark(left, artist, text, kin=(item["line"], item["dial"])))
        if not all(math.isfinite(each["value"]) for each in (loss["schedule"], loss["steps"], interaction)):
            continue
        added = loss["schedule"]["value"] + loss["steps"]["value"]
        margin = _margin(interaction["ci"])
        drawn = right.errorbar(added, interaction["value"], yerr=margin, capsize=3, elinewidth=1.0, **style)
        marks.append(_Mark(right, drawn.lines[0], text, margin))
    left.axhline(1.0, color="0.4", linewidth=0.8, zorder=0)
    right.axhline(0.0, color="0.4", linewidth=0.8, zorder=0)
    plain_ticks(left.xaxis, one_two_five(-4, 1), lambda value: f"{100 * value:g}%")
    bottom, top = left.get_ylim()
    left.set_ylim(min(bottom, 0.9), max(top, 1.1))  # what differs by less than a per cent should look like it
    for axis, first in ((right.xaxis, -1), (right.yaxis, -2)):
        plain_ticks(axis, both_sides(first, 1), signed)
    what = "FLOPs left by the schedule x FLOPs left by the dial"
    finish(left, what, "FLOPs left by both, over that product", legend=False)
    what = "loss by the schedule + loss by the dial (log-perplexity)"
    finish(right, what, "loss by both less that sum, with its 95% interval", legend=False)
    used = {item[key] for item in result["combinations"] for key in ("line", "schedule")}
    lines, schedules = ({name: look for name, look in all_.items() if name in used} for all_ in (colours, markers))
    _legend(figure, lines, schedules)
    left.set_title("savings: at 1 they multiply", fontsize=10)
    right.set_title("losses: at 0 they add up, above compound, below overlap", fontsize=10)
    figure.suptitle(f"{_name(result)}: a schedule and fewer steps, or a lower threshold, at once")
    _tidy(figure, marks)
    return figure
