"""What a search found: as text, as CSV, and as a figure.

Each function takes the JSON that `search` returned, so a recorded search can be shown again.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.console import table, terminal_width, wrapped
from relaylm.core.notation import brief
from relaylm.core.schedule import Schedule
from relaylm.show.colours import BLACK, BLUE, GREEN, MARKERS, PINK, RED, colour_of
from relaylm.show.figures import finish, new_figure, nth, points, save_figure
from relaylm.show.player import strip

LOOKS = {  # of kinds of candidates
    "mixed": (BLUE, "o", "mixed schedules"),
    "candidate": (BLUE, "o", "candidates"),
    "rival": (RED, "D", "one model alone"),
    "sandwich": (GREEN, "^", "sandwich"),
    "anchor": (BLACK, "s", "all-heavy, for comparison"),
}


def render(result: Mapping[str, Any], width: int | None = None) -> str:
    """The verdict, then tables in `width` columns (the terminal's)."""
    width = width or terminal_width()
    parts = ["\n".join(wrapped([result["verdict"]], width))]
    parts += [_picture(result)] if len(Schedule.parse(result["schedule"]).segments) > 1 else []
    if result["method"] == "exhaustive":
        parts += _exhaustive(result, width)
    elif result["method"] == "evolve":
        head = ["generation", "measured", "best", "its loss", "mean loss"]
        forms = ("{generation}", "{measured}", "{best}", "{best_loss:+.4f}", "{mean_loss:+.4f}")
        rows = [[form.format(**item) for form in forms] for item in result["history"]]
        parts.append(table(head, rows, width, text=(2,)))
    elif result.get("bounds"):
        head = ["", "by the bound", "masked to text", "what", "saved", "bits a token", "nats to heavy", "95%"]
        rows = [_candidate(result, row, f"{row['bits']:.4f}")[:8] for row in result["bounds"][:15]]
        parts.append(table(head, rows, width, text=(0, 1, 2, 3), spare=("what", "95%")))
    if result.get("front"):
        head = ["budget", "saved", "schedule", "loss to heavy", "95%", "against the best rival"]
        parts.append(table(head, [_goal(goal) for goal in result["front"]], width, text=(2, 5)))
    if shown := result["confirmed"]:
        head = ["", f"on {shown[0]['rows']} fresh rows", "masked to text", "what", "saved", "perplexity"]
        head += ["log-ppl to heavy", "95%", "to the recommended", "rows to tell them apart"]
        if result["method"] == "exhaustive":  # the five best and what they are compared with
            best = [row for row in shown if row["kind"] == "candidate"][:5]
            shown = [row for row in shown if row["kind"] == "anchor" or row in best]
        rows = [_candidate(result, row, f"{row['ppl']:.3f}", star=True) for row in shown]
        columns = [k for k, title in enumerate(head) if k < 2 or any(row[k] for row in rows)]
        head, rows = [head[k] for k in columns], [[row[k] for k in columns] for row in rows]
        spare = ("what", "rows to tell them apart", "95%")
        parts.append(table(head, rows, width, text=(0, 1, 2, 3), spare=spare))
    notes = [*(_model_notes(result) if result.get("model") else ()), *_footer(result)]
    return "\n\n".join([*parts, "\n".join(wrapped(notes, width))])


SHADES = "░▒▓█"  # of models, from light to heavy, where there may be no colours


def drawn(schedule: Schedule, models: Sequence[str], width: int = 16) -> str:
    """Which model runs when, from the masked end on the left to the text on the right, in time."""
    if schedule.placement not in ("ordered", "cells"):
        return ""
    shade = {name: SHADES[round(3 * rank / max(1, len(models) - 1))] for rank, name in enumerate(models)}
    return "".join(shade.get(schedule.model_at(1 - (k + 0.5) / width), "?") for k in range(width))


def short(text: str) -> str:
    """A schedule as tables show it: shares rounded."""
    schedule = Schedule.parse(text)
    spacing = "" if schedule.spacing is None else f" {schedule.spacing}"
    return brief([segment.part for segment in schedule.segments], schedule.placement) + spacing


def _picture(result: Mapping[str, Any]) -> str:
    """The recommended schedule as a strip, with what the shades mean."""
    models = result["models"]
    shades = ", ".join(f"{drawn(Schedule.parse(f'{name}:100%'), models, 1)} {name}" for name in models)
    return f"all masked {drawn(Schedule.parse(result['schedule']), models, 40)} text   {shades}"


def _interval(ci: Sequence[float | None], form: str) -> str:
    return "" if ci[0] is None or ci[1] is None else f"{ci[0]:{form}} to {ci[1]:{form}}"


def _candidate(result: Mapping[str, Any], row: Mapping[str, Any], score: str, star: bool = False) -> list[str]:
    """A line of candidates; > marks the recommended one, a star a difference to all-heavy that is not chance."""
    against, to_best = row["against_heavy"], row.get("against_recommended") or {}
    mark = ">" if row.get("recommended") or row["schedule"] == result["schedule"] else ""
    picture = drawn(Schedule.parse(row["schedule"]), result["models"])
    about = [mark, short(row["schedule"]), picture, row.get("what") or row.get("name", ""), f"{row['saved']:.1%}"]
    loss = [
        f"{against['difference']:+.4f}{'*' if star and against['differs'] else ''}",
        _interval(against["ci"], "+.4f"),
    ]
    best = f"{to_best['difference']:+.4f}{'*' if to_best['differs'] else ''}" if to_best and not mark else ""
    needed = to_best.get("samples_needed") if best else None
    return [*about, score, *loss, best, "" if needed is None else f"{needed:,}"]


def _goal(goal: Mapping[str, Any]) -> list[str]:
    """The best schedule at one budget."""
    against, rival, beaten = goal["against_heavy"], goal.get("best_rival"), ""
    if rival is not None and rival["schedule"] != goal["schedule"]:
        star = "*" if rival["against"]["differs"] else ""
        beaten = f"{rival['against']['difference']:+.4f}{star} to {rival['what']}"
    saved = [f"{goal.get('saved_at_least', goal['saved']):.0%}", f"{goal['saved']:.1%}"]
    return [*saved, short(goal["schedule"]), f"{against['difference']:+.4f}", _interval(against["ci"], "+.4f"), beaten]


def _exhaustive(result: Mapping[str, Any], width: int) -> list[str]:
    """The schedules, the influence of each segment, and whether the tree was right."""
    few = len(result["schedules"]) <= len(result["top"]) + len(result["bottom"])
    title = f"all {len(result['schedules'])}, best first" if few else f"best and worst of {result['schedules_tried']}"

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [row["name"], f"{row['saved']:.1%}", f"{row['ppl']:.3f}", _interval(row["ppl_ci"], ".3f")]

    rows = [cells(row) for row in (result["schedules"] if few else result["top"])]
    if not few:
        rows += [["...", "", "", ""], *(cells(row) for row in result["bottom"][::-1])]
    parts = [table([title, "saved", "perplexity", "95%"], rows, width)]
    for model, influence in result["influence"].items():
        head = [f"{model} in segment", "influence on perplexity", "95%"]
        head += [] if few else ["in the top 20", "in the bottom 20"]
        rows = []
        for j, value in enumerate(influence):
            frequency = (result[f"{end}_frequency"][model][j] for end in (() if few else ("top", "bottom")))
            shown = "" if value is None else f"{value:+.3f}"
            ci = result["influence_ci"][model][j]
            rows.append([str(j), shown, _interval(ci, "+.3f"), *(f"{share:.0%}" for share in frequency)])
        parts.append(table(head, rows, width))
    if (check := result["tree_check"]) is not None:
        same = "the same tokens as" if check["equal"] else "OTHER TOKENS THAN"
        parts.append(f"the tree gave {same} independent runs of {len(check['schedules'])} schedules")
    return parts


def _model_notes(result: Mapping[str, Any]) -> list[str]:
    model, stages = result["model"], result["tuned"]["stages"]
    lines = []
    if model["held_out_rms"] is not None:
        lines.append(
            f"the model's error on {len(model['held_out'])} schedules before they were measured: "
            f"{model['held_out_rms']:.4f} (noise alone: {model['held_out_noise_rms']:.4f}; they differ by "
            f"{model['held_out_spread_of_measured']:.4f})"
        )
    if race := stages.get("race"):
        dropped, left = len(race["dropped"]), len(race["left"])
        raced = f"{len(race['contenders'])} raced over {race['rows']} rows"
        lines.append(f"{raced}; {dropped} were dropped as worse, {left} were left")
    return lines


def _footer(result: Mapping[str, Any]) -> list[str]:
    calls = result.get("search_calls") or result["calls"]
    line = f"{calls['calls_made']:,} row-calls of networks"
    if calls["ratio"] is not None:
        line += f", {calls['ratio']:.1%} of what independent runs take"
    line += f"; {result['seconds']:.0f} s. Schedules and figures in full: --json."
    line += f" Saved: {result['unit']}, against {result['heavy']} alone in {result['steps']} steps; * not chance."
    stopped = [f"stopped: {result['stopped']}; run again with the same --store to go on"] if result["stopped"] else []
    return [line, *stopped, *(f"note: {note}" for note in result["notes"])]


def to_csv(result: Mapping[str, Any]) -> str:
    """All schedules that were measured (of an exhaustive search), or the candidates and rivals, one in a line."""
    rows = []
    for row in result.get("schedules") or result["confirmed"] or result.get("bounds") or []:
        against = row.get("against_heavy", {"difference": "", "ci": ["", ""]})
        low, high = against["ci"]
        rows.append({**row, "against_heavy": against["difference"], "low": low, "high": high})
    possible = [*("name", "what", "kind", "schedule", "steps", "price", "saved", "rows", "ppl", "log_ppl", "bits")]
    possible += ["recommended", "on_front", "against_heavy", "low", "high"]
    names = [name for name in possible if any(row.get(name, "") != "" for row in rows)]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


# ------------------------------------------------------------------------------------------------ figures

ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}  # of a legend: above its panel


def plot_search(result: Mapping[str, Any], path: str | Path) -> Path:
    """A figure in the format that the file's name says (.png, .svg, .pdf)."""
    about = f"T = {result['steps']}, " + (f"judge {result['judge']}" if result["judge"] else "likelihood bounds")
    if result["method"] == "exhaustive":
        figure = new_figure(11.0, 6.4)
        panels = figure.subplots(2, 2)
        _plot_map(panels[0, 0], result, "top", "best five")
        _plot_map(panels[0, 1], result, "bottom", "worst five")
        _plot_frequency(panels[1, 0], result)
        _plot_influence(panels[1, 1], result)
    elif result["method"] == "evolve":
        figure = new_figure(11.0, 4.2)
        left, right = figure.subplots(1, 2)
        _plot_generations(left, result["history"])
        _plot_candidates(right, result)
    elif result.get("tuned", {}).get("stages", {}).get("ablations") and not result.get("front"):
        figure = new_figure(11.0, 4.4)
        left, right = figure.subplots(1, 2)
        _plot_ablations(left, result)
        _plot_candidates(right, result)
    else:
        figure = new_figure(7.5, 4.8)
        _plot_candidates(figure.subplots(1, 1), result)
    return save_figure(figure, path, f"{result['family']['name'] or 'family'}: {result['method']}, {about}")


def _plot_map(axes: Any, result: Mapping[str, Any], which: str, title: str) -> None:
    """Which model runs when, one schedule in a line, as in the paper."""
    rows: Sequence[Mapping[str, Any]] = result[which]
    models = result["models"]
    for k, row in enumerate(rows):
        schedule = Schedule.parse(row["schedule"])
        for rank, start, end in strip(schedule, result["steps"], models):
            look = {"color": colour_of(rank), "edgecolor": "white", "linewidth": 0.5}
            axes.barh(k, start - end, left=1 - start, height=0.8, **look)
    axes.set_yticks(range(len(rows)), [f"{row['ppl']:.2f}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks(np.linspace(0, 1, 6), [f"{t:.1f}" for t in np.linspace(1, 0, 6)])
    axes.set_title(title, fontsize=9)
    handles = [axes.barh(0, 0, color=colour_of(rank), label=model) for rank, model in enumerate(models)]
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=len(models), **ABOVE)
    axes.set(xlabel="t   (1: all masked, 0: text)", ylabel="perplexity")


def _plot_frequency(axes: Any, result: Mapping[str, Any]) -> None:
    model = result["light"]
    place = np.arange(result["segments"])
    for k, (end, label) in enumerate((("top", "best 20"), ("bottom", "worst 20"))):
        share = 100 * np.array(result[f"{end}_frequency"][model])
        axes.bar(place + 0.4 * (k - 0.5), share, 0.38, color=("0.3", "0.75")[k], label=label, hatch=("", "//")[k])
    axes.set_xticks(place)
    finish(axes, "segment   (0: all masked)", f"schedules with {model} there, %", "y", ncols=2, **ABOVE)


def _plot_influence(axes: Any, result: Mapping[str, Any]) -> None:
    for k, (model, influence) in enumerate(result["influence"].items()):
        x = np.arange(len(influence)) + 0.12 * (k - (len(result["influence"]) - 1) / 2)
        look = {"color": colour_of(result["models"].index(model)), "fmt": MARKERS[k % len(MARKERS)], "label": model}
        points(axes, x, np.array(influence, dtype=float), result["influence_ci"][model], **look)
    axes.set_xticks(range(result["segments"]))
    y = "influence on perplexity, 95%\n(above 0: light does harm there)"
    finish(axes, "segment   (0: all masked)", y, "y", zero="0.5", ncols=4, **ABOVE)


def _plot_generations(axes: Any, history: Sequence[Mapping[str, Any]]) -> None:
    for k, (key, label) in enumerate((("best_loss", "best"), ("mean_loss", "mean of the population"))):
        axes.plot([h["generation"] for h in history], [h[key] for h in history], label=label, **nth(k))
    finish(axes, "generation", "loss to all-heavy, log-perplexity")


def _plot_ablations(axes: Any, result: Mapping[str, Any]) -> None:
    singles = result["tuned"]["stages"]["ablations"]["one_in_all_heavy"]
    options = list(dict.fromkeys((item["model"], item["density"]) for item in singles))
    for k, (model, density) in enumerate(options):
        chosen = [item for item in singles if (item["model"], item["density"]) == (model, density)]
        x = np.array([item["segment"] for item in chosen]) + 0.7 * ((k + 0.5) / len(options) - 0.5)
        y, ci = ([item[key] for item in chosen] for key in ("loss", "ci"))
        label = model if density == "1" else f"{model}, {density} of the steps"
        points(axes, x, y, ci, linestyle="", markersize=4, capsize=2, label=label, **nth(k))
    axes.set_xticks(range(result["segments"]))
    above: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 4}
    x_label = "segment that is changed in all-heavy   (0: all masked)"
    finish(axes, x_label, "loss, log-perplexity, 95%", "y", zero="0.5", **above)


def _plot_candidates(axes: Any, result: Mapping[str, Any]) -> None:
    """Saved cost against loss; a line joins the Pareto front, a circle marks the recommended schedule."""

    def place(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([100 * r["saved"] for r in rows]), np.array([r["against_heavy"]["difference"] for r in rows])

    rows = result["confirmed"] or result.get("bounds") or []
    kinds = ["sandwich" if "sandwich" in (row.get("what"), row.get("name")) else str(row["kind"]) for row in rows]
    for kind, (colour, marker, label) in LOOKS.items():
        if chosen := [row for row, its in zip(rows, kinds, strict=True) if its == kind]:
            ci = [row["against_heavy"]["ci"] for row in chosen]
            points(axes, *place(chosen), ci, fmt=marker, color=colour, markersize=5, label=label)
    front = sorted([row for row in rows if row.get("on_front")], key=lambda row: row["saved"])
    axes.step(*place(front), where="pre", color="0.55", linewidth=1, zorder=0)
    best = [row for row in rows if row.get("recommended") or row["schedule"] == result["schedule"]]
    axes.scatter(*place(best), s=170, facecolors="none", edgecolors=BLACK, label="recommended", zorder=3)
    if result.get("max_loss") is not None:
        axes.axhline(result["max_loss"], color=PINK, linestyle="--", linewidth=1, label="allowed")
    what = "log-perplexity" if result["confirmed"] else "nats a token by the bound"
    finish(axes, f"{result['unit']} saved against all-heavy, %", f"loss to all-heavy, {what}, 95%", zero="0.5")
