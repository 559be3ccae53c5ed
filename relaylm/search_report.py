"""What a search found, as text, as a table for other programs, and as a figure.

Each function takes the JSON that `search` gave, so that all of it can be shown again years later.
"""

from __future__ import annotations

import csv
import io
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.report import COLOURS, MARKERS, _figure, _save
from relaylm.schedule import Schedule
from relaylm.terminal import fitted_table

LOOKS = {  # of kinds of candidates
    "mixed": (COLOURS[0], "o", "mixed schedules"),
    "candidate": (COLOURS[0], "o", "candidates"),
    "rival": (COLOURS[1], "D", "one model alone"),
    "sandwich": (COLOURS[2], "^", "sandwich"),
    "anchor": ("#000000", "s", "all-heavy, for comparison"),
}


def render(result: Mapping[str, Any], width: int | None = None) -> str:
    """The verdict, then tables in `width` columns (the terminal's)."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    lines = [result["verdict"], ""]
    if result["method"] == "exhaustive":
        lines += _exhaustive_lines(result, width)
    elif result["method"] == "evolve":
        lines += _evolve_lines(result, width)
    elif result.get("bounds"):
        lines += _bound_lines(result, width)
    if result.get("front"):
        lines += _front_lines(result, width)
    if result["confirmed"]:
        lines += _confirmed_lines(result, width)
    notes = [*(_model_lines(result) if result.get("model") else ()), *_footer(result)]
    return "\n".join([*lines, *(line for note in notes for line in textwrap.wrap(note, width))])


def _interval(ci: Sequence[float | None], form: str) -> str:
    return "" if ci[0] is None or ci[1] is None else f"{ci[0]:{form}} to {ci[1]:{form}}"


def _exhaustive_lines(result: Mapping[str, Any], width: int) -> list[str]:
    few = len(result["schedules"]) <= len(result["top"]) + len(result["bottom"])
    title = f"all {len(result['schedules'])}, best first" if few else f"best and worst of {result['schedules_tried']}"
    head = [title, "saved", "perplexity", "95%"]

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [row["name"], f"{row['saved']:.1%}", f"{row['ppl']:.3f}", _interval(row["ppl_ci"], ".3f")]

    rows = [cells(row) for row in (result["schedules"] if few else result["top"])]
    if not few:
        rows += [["...", "", "", ""], *(cells(row) for row in result["bottom"][::-1])]
    lines = [*fitted_table(head, rows, width)[0], ""]
    for model, influence in result["influence"].items():
        head = [f"{model} in segment", "influence on perplexity", "95%"]
        head += [] if few else ["in the top 20", "in the bottom 20"]
        rows = []
        for j, value in enumerate(influence):
            frequency = (result[f"{end}_frequency"][model][j] for end in (() if few else ("top", "bottom")))
            shown = "" if value is None else f"{value:+.3f}"
            ci = result["influence_ci"][model][j]
            rows.append([str(j), shown, _interval(ci, "+.3f"), *(f"{share:.0%}" for share in frequency)])
        lines += [*fitted_table(head, rows, width)[0], ""]
    check = result["tree_check"]
    if check is not None:
        same = "the same tokens as" if check["equal"] else "OTHER TOKENS THAN"
        lines += [f"the tree gave {same} independent runs of {len(check['schedules'])} schedules", ""]
    return lines


def _confirmed_lines(result: Mapping[str, Any], width: int) -> list[str]:
    rows = []
    shown = result["confirmed"]
    if result["method"] == "exhaustive":  # the five best and what they stand beside
        best = [row for row in shown if row["kind"] == "candidate"][:5]
        shown = [row for row in shown if row["kind"] == "anchor" or row in best]
    for row in shown:
        mark = "> " if row.get("recommended") or row["schedule"] == result["schedule"] else "  "
        against = row["against_heavy"]
        rows.append(
            [
                f"{mark}{row['schedule']}",
                row.get("what") or row.get("name", ""),
                f"{row['saved']:.1%}",
                f"{row['ppl']:.3f}",
                f"{against['difference']:+.4f}{'*' if against['differs'] else ''}",
                _interval(against["ci"], "+.4f"),
            ]
        )
    head = [
        f"  on {result['confirmed'][0]['rows']} fresh rows",
        "what",
        "saved",
        "perplexity",
        "log-ppl to heavy",
        "95%",
    ]
    return [*fitted_table(head, rows, width, names=(0, 1))[0], ""]


def _front_lines(result: Mapping[str, Any], width: int) -> list[str]:
    rows = []
    for goal in result["front"]:
        against, rival = goal["against_heavy"], goal.get("best_rival")
        beaten = ""
        if rival is not None and rival["schedule"] != goal["schedule"]:
            star = "*" if rival["against"]["differs"] else ""
            beaten = f"{rival['against']['difference']:+.4f}{star} to {rival['what']}"
        saved = [f"{goal.get('saved_at_least', goal['saved']):.0%}", f"{goal['saved']:.1%}"]
        rows.append(
            [
                *saved,
                goal["schedule"],
                f"{against['difference']:+.4f}",
                _interval(against["ci"], "+.4f"),
                beaten,
            ]
        )
    head = ["budget", "saved", "schedule", "loss to heavy", "95%", "against the best rival"]
    return [*fitted_table(head, rows, width, names=(2, 5))[0], ""]


def _bound_lines(result: Mapping[str, Any], width: int) -> list[str]:
    rows = []
    for row in result["bounds"][:15]:
        mark, against = ("> " if row["recommended"] else "  "), row["against_heavy"]
        nats = [f"{against['difference']:+.4f}", _interval(against["ci"], "+.4f")]
        rows.append([f"{mark}{row['schedule']}", row["what"], f"{row['saved']:.1%}", f"{row['bits']:.4f}", *nats])
    head = ["  by the bound", "what", "saved", "bits a token", "nats to heavy", "95%"]
    return [*fitted_table(head, rows, width, names=(0, 1))[0], ""]


def _evolve_lines(result: Mapping[str, Any], width: int) -> list[str]:
    rows = [
        [
            str(h["generation"]),
            str(h["measured"]),
            h["best"],
            f"{h['best_loss']:+.4f}",
            f"{h['mean_loss']:+.4f}",
        ]
        for h in result["history"]
    ]
    head = ["generation", "measured", "best", "its loss", "mean loss"]
    return [*fitted_table(head, rows, width, names=(2,))[0], ""]


def _model_lines(result: Mapping[str, Any]) -> list[str]:
    model, stages = result["model"], result["tuned"]["stages"]
    lines = []
    if model["held_out_rms"] is not None:
        lines.append(
            f"the model's error on {len(model['held_out'])} schedules before they were measured: "
            f"{model['held_out_rms']:.4f} (noise alone: {model['held_out_noise_rms']:.4f}; they differ by "
            f"{model['held_out_spread_of_measured']:.4f})"
        )
    if "race" in stages:
        race = stages["race"]
        lines.append(
            f"{len(race['contenders'])} raced over {race['rows']} rows; {len(race['dropped'])} were dropped as worse, "
            f"{len(race['left'])} were left"
        )
    return lines


def _footer(result: Mapping[str, Any]) -> list[str]:
    calls = result.get("search_calls") or result["calls"]
    line = f"{calls['calls_made']:,} row-calls of networks"
    if calls["ratio"] is not None:
        line += f", {calls['ratio']:.1%} of what independent runs take"
    line += f"; {result['seconds']:.0f} s. Schedules and figures in full: --json."
    stopped = [f"stopped: {result['stopped']}; run again with the same --store to go on"] if result["stopped"] else []
    return [line, *stopped, *(f"note: {note}" for note in result["notes"])]


def to_csv(result: Mapping[str, Any]) -> str:
    """All schedules that were measured (of an exhaustive search), or the candidates and rivals, one in a line."""
    rows = result.get("schedules") or result["confirmed"] or result.get("bounds") or []
    possible = ("name", "what", "kind", "schedule", "steps", "price", "saved", "rows", "ppl", "log_ppl", "bits")
    names = [name for name in (*possible, "recommended", "on_front") if any(name in row for row in rows)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    paired = any("against_heavy" in row for row in rows)
    writer.writerow([*names, *(("against_heavy", "low", "high") if paired else ())])
    for row in rows:
        against = row.get("against_heavy", {"difference": "", "ci": ["", ""]})
        writer.writerow(
            [*(row.get(name, "") for name in names), *((against["difference"], *against["ci"]) if paired else ())]
        )
    return out.getvalue()


# ------------------------------------------------------------------------------------------------ figures


def plot_search(result: Mapping[str, Any], path: str | Path) -> Path:
    """A figure in the format that the file's name says (.png, .svg, .pdf)."""
    name = result["family"]["name"] or "family"
    by = f"judge {result['judge']}" if result["judge"] else "likelihood bounds"
    title = f"{name}: {result['method']}, T = {result['steps']}, {by}"
    if result["method"] == "exhaustive":
        figure = _figure(11.0, 6.4)
        panels = figure.subplots(2, 2, height_ratios=[1, 1])
        _plot_map(panels[0, 0], result, "top", "best five")
        _plot_map(panels[0, 1], result, "bottom", "worst five")
        _plot_frequency(panels[1, 0], result)
        _plot_influence(panels[1, 1], result)
    elif result["method"] == "evolve":
        figure = _figure(11.0, 4.2)
        left, right = figure.subplots(1, 2)
        generation = [h["generation"] for h in result["history"]]
        for key, colour, marker in (("best_loss", COLOURS[0], "o"), ("mean_loss", COLOURS[1], "s")):
            label = "best" if key == "best_loss" else "mean of the population"
            left.plot(generation, [h[key] for h in result["history"]], color=colour, marker=marker, label=label)
        left.set_xlabel("generation")
        left.set_ylabel("loss to all-heavy, log-perplexity")
        left.grid(alpha=0.25)
        left.legend(frameon=False, fontsize=8)
        _plot_candidates(right, result)
    elif result.get("tuned", {}).get("stages", {}).get("ablations") and not result.get("front"):
        figure = _figure(11.0, 4.4)
        left, right = figure.subplots(1, 2)
        _plot_ablations(left, result)
        _plot_candidates(right, result)
    else:
        figure = _figure(7.5, 4.8)
        _plot_candidates(figure.subplots(1, 1), result)
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def _plot_map(axes: Any, result: Mapping[str, Any], which: str, title: str) -> None:
    """Which model runs when, one schedule in a line, as in the paper."""
    rows: Sequence[Mapping[str, Any]] = result[which]
    models = result["models"]
    for k, row in enumerate(rows):
        table = Schedule.parse(row["schedule"]).timetable()
        edges = [0, *(i for i in range(1, table.steps) if table.models[i] != table.models[i - 1]), table.steps]
        for a, b in pairwise(edges):
            rank = models.index(table.models[a])
            left, width = 1 - table.times[a], table.times[a] - table.times[b]
            axes.barh(
                k, width, left=left, height=0.8, color=_shade(rank, len(models)), edgecolor="white", linewidth=0.5
            )
    axes.set_yticks(range(len(rows)), [f"{row['ppl']:.2f}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks(np.linspace(0, 1, 6), [f"{t:.1f}" for t in np.linspace(1, 0, 6)])
    axes.set_xlabel("t   (1: all masked, 0: text)")
    axes.set_ylabel("perplexity")
    axes.set_title(title, fontsize=9)
    handles = [axes.barh(0, 0, color=_shade(rank, len(models)), label=model) for rank, model in enumerate(models)]
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=len(models), loc="lower right", bbox_to_anchor=(1, 1))


def _shade(rank: int, models: int) -> Any:
    """Light models bright, heavy ones dark: told apart in grey as well."""
    share = rank / max(1, models - 1)
    bright, dark = np.array([0.90, 0.62, 0.0]), np.array([0.0, 0.22, 0.42])
    return tuple(bright + (dark - bright) * share)


def _plot_frequency(axes: Any, result: Mapping[str, Any]) -> None:
    model = result["light"]
    place = np.arange(result["segments"])
    for k, (end, label) in enumerate((("top", "best 20"), ("bottom", "worst 20"))):
        share = 100 * np.array(result[f"{end}_frequency"][model])
        axes.bar(place + 0.4 * (k - 0.5), share, 0.38, color=COLOURS[k], label=label, hatch=("", "//")[k])
    axes.set_xticks(place)
    axes.set_xlabel("segment   (0: all masked)")
    axes.set_ylabel(f"schedules with {model} there, %")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def _plot_influence(axes: Any, result: Mapping[str, Any]) -> None:
    for k, (model, influence) in enumerate(result["influence"].items()):
        value = np.array(influence, dtype=float)
        ci = np.array(result["influence_ci"][model], dtype=float)
        x = np.arange(len(value)) + 0.12 * (k - (len(result["influence"]) - 1) / 2)
        spread = np.abs(ci.T - value)
        axes.errorbar(x, value, yerr=spread, fmt=MARKERS[k % 7], color=COLOURS[k % 7], capsize=3, label=model)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xticks(range(result["segments"]))
    axes.set_xlabel("segment   (0: all masked)")
    axes.set_ylabel("influence on perplexity, 95%\n(above 0: light does harm there)")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))


def _plot_ablations(axes: Any, result: Mapping[str, Any]) -> None:
    singles = result["tuned"]["stages"]["ablations"]["one_in_all_heavy"]
    options = list(dict.fromkeys((item["model"], item["density"]) for item in singles))
    for k, (model, density) in enumerate(options):
        chosen = [item for item in singles if (item["model"], item["density"]) == (model, density)]
        x = np.array([item["segment"] for item in chosen]) + 0.7 * ((k + 0.5) / len(options) - 0.5)
        y = np.array([item["loss"] for item in chosen])
        spread = np.abs(np.array([item["ci"] for item in chosen], dtype=float).T - y)
        label = model if density == "1" else f"{model}, {density} of the steps"
        axes.errorbar(x, y, yerr=spread, fmt=MARKERS[k % 7], color=COLOURS[k % 7], markersize=4, capsize=2, label=label)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xticks(range(result["segments"]))
    axes.set_xlabel("segment that is changed in all-heavy   (0: all masked)")
    axes.set_ylabel("loss, log-perplexity, 95%")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _looks_like(row: Mapping[str, Any]) -> str:
    return "sandwich" if "sandwich" in (row.get("what"), row.get("name")) else str(row["kind"])


def _plot_candidates(axes: Any, result: Mapping[str, Any]) -> None:
    """Saved cost against loss; the undominated ones joined by a line, the recommended one circled."""
    rows = result["confirmed"] or result.get("bounds") or []
    for kind, (colour, marker, label) in LOOKS.items():
        chosen = [row for row in rows if _looks_like(row) == kind]
        if not chosen:
            continue
        x = np.array([100 * row["saved"] for row in chosen])
        y = np.array([row["against_heavy"]["difference"] for row in chosen])
        ci = [row["against_heavy"]["ci"] for row in chosen]
        ends = np.array([c if c[0] is not None else (v, v) for c, v in zip(ci, y, strict=True)], dtype=float)
        axes.errorbar(x, y, yerr=np.abs(ends.T - y), fmt=marker, color=colour, capsize=3, markersize=5, label=label)
    front = sorted((100 * row["saved"], row["against_heavy"]["difference"]) for row in rows if row.get("on_front"))
    if front:
        axes.step([x for x, _ in front], [y for _, y in front], where="pre", color="0.55", linewidth=1, zorder=0)
    best = [row for row in rows if row.get("recommended") or row["schedule"] == result["schedule"]]
    where = [[100 * row["saved"] for row in best], [row["against_heavy"]["difference"] for row in best]]
    axes.scatter(*where, s=170, facecolors="none", edgecolors="#000000", label="recommended", zorder=3)
    if result.get("max_loss") is not None:
        axes.axhline(result["max_loss"], color=COLOURS[3], linestyle="--", linewidth=1, label="allowed")
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xlabel(f"{result['unit']} saved against all-heavy, %")
    what = "log-perplexity" if result["confirmed"] else "nats a token by the bound"
    axes.set_ylabel(f"loss to all-heavy, {what}, 95%")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
