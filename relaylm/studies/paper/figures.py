"""The figures of `reproduce`, labelled as in the paper so that they can be laid beside it.

Colours are Okabe and Ito's; hatching, markers or labels say the same as the colours. Each function takes plain JSON
values of an experiment and writes a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.core.schedule import hand_made
from relaylm.show.colours import COLOURS
from relaylm.show.figures import finish, new_figure, nth, panels, points, reach, save_figure
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import SAMPLERS, against, difference

BLUE, RED, GREEN, PINK, VIOLET, BROWN, BLACK = COLOURS
LOOK = {"light": (BROWN, ".."), "sandwich": (GREEN, "//"), "heavy": ("0.35", ""), "rival": (RED, "xx")}
Result = Mapping[str, Any]


def segments(name: str, steps: int) -> list[str]:
    """A hand-made schedule as the paper labels it: L125, H750, L125."""
    return [f"{model}{len(list(run))}" for model, run in groupby(hand_made()[name].timetable(steps).models)]


def bars(results: Mapping[str, Result], path: Path) -> Path:
    """Perplexity of the seven schedules with intervals, one panel for each title; rivals beside them."""
    down, across = (len(results) + 1) // 2, min(2, len(results))
    figure = new_figure(max(6.4, 5.6 * across), 3.6 * down)
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(results) :]:
        axes.set_axis_off()
    for axes, (title, result) in zip(grid.flat, results.items(), strict=False):
        by = {row["schedule"]: row for row in result["rows"]}
        rows = [(by[name], name) for name in paper.SCHEDULES if name in by]
        rows += [(row, "rival") for row in result["rows"] if row.get("kind") == "rival"]
        values = np.array([row["gen_ppl"] for row, _ in rows])
        below, above = reach(values, [row["gen_ppl_ci"] for row, _ in rows])
        low, high = values - below, values + above
        for k, (_, kind) in enumerate(rows):
            colour, hatch = LOOK.get(kind, (BLUE, ""))
            axes.bar(k, values[k], color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, width=0.8)
            label = f"{values[k]:.{2 if values[k] < 10 else 1 if values[k] < 100 else 0}f}"
            axes.text(k, high[k], label, ha="center", va="bottom", fontsize=7)
        axes.errorbar(range(len(rows)), values, yerr=[below, above], fmt="none", ecolor=BLACK, capsize=3, linewidth=1)
        steps = int(result["steps"])
        labels = [_rival_label(row) if kind == "rival" else "\n".join(segments(kind, steps)) for row, kind in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        span = high.max() - low.min()
        axes.set_ylim(max(0, low.min() - 0.35 * span), high.max() + 0.15 * span)
        axes.set_title(title, fontsize=9)
        finish(axes, "", "Gen. PPL (axis does not start at 0)", "y", legend=False)
    return save_figure(figure, path)


def _rival_label(row: Mapping[str, Any]) -> str:
    name = str(row["schedule"])
    shorts = {"middle": name, "fewer": name, "spaced": name.split()[-1], "evenly": "even", "random": "random"}
    found = [short for word, short in shorts.items() if word in str(row.get("rival") or "")]
    return f"rival:\n{found[0]}" if found else "rival"


def depth_curve(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Perplexity above all-heavy by the light model's depth, the intervals paired; `rows` by depth."""
    figure, (axes,) = panels(6.0, 3.0)
    found = [against(pairs, row["schedule"], rows[-1]["schedule"]) for row in rows[:-1]] + [(0.0, 0.0, 0.0)]
    drop, *ci = 100 * np.expm1(np.array(found)).T
    points(axes, [row["depth"] for row in rows], drop, np.transpose(ci), color=BLUE, marker="o", label="here")
    theirs = {d: 100 * (v[0] / paper.DEPTHS[12][0] - 1) for d, v in paper.DEPTHS.items()}
    axes.plot(list(theirs), list(theirs.values()), color=RED, marker="s", linestyle="--", label="paper (OpenWebText)")
    finish(axes, "blocks of the light model (25% sandwich)", "PPL above all-heavy, %")
    return save_figure(figure, path)


def share_curves(result: Result, rows: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Share of the gap paid, and time saved, over the light share."""
    shares, printed = result["shares"], {"color": RED, "marker": "s", "linestyle": "--", "label": "paper"}
    figure, (left, right) = panels(9.0, 3.2, 2)
    paid, flops = ([100 * (rows[label][key] or 0) for label in result["labels"]] for key in ("gap_paid", "flops_saved"))
    theirs = [100 * paper.share_paid(share) for share in paper.SHARES]
    left.plot(shares, paid, color=BLUE, marker="o", label="here")
    left.plot(list(paper.SHARES), theirs, **printed)
    left.plot([0, 100], [0, 100], color="0.6", linewidth=0.8)
    looks = (("engine_seconds", "engine", BLUE, "o"), ("published_seconds", "MDLM's sampler here", BROWN, "^"))
    for key, label, colour, mark in looks:
        seconds = np.array([np.mean(result[key][str(s)]) for s in shares])
        right.plot(shares, 100 * (1 - seconds / seconds[0]), color=colour, marker=mark, label=label)
    right.plot(shares, flops, color=BLACK, linestyle=":", label="FLOPs saved here")
    right.plot(list(paper.SHARES), [v[3] for v in paper.SHARES.values()], **printed)
    for axes, y in ((left, "gap between heavy and light paid, %"), (right, "time saved, %")):
        finish(axes, "% light steps (sandwich)", y)
    return save_figure(figure, path)


def precision_bars(by_steps: Mapping[str, Any], path: Path) -> Path:
    """Perplexity above all-heavy of each mixed schedule, exact and as MDLM draws, and the paper's."""
    figure, row = panels(4.6 * len(by_steps), 3.2, len(by_steps), sharey=True)
    for axes, (steps, found) in zip(row, by_steps.items(), strict=True):
        for k, (kind, colour, hatch) in enumerate((("exact", BLUE, ""), ("published", BROWN, "//"))):
            pairs = found[kind]["contrasts"]
            loss, *ci = np.array([against(pairs, name, "heavy") for name in paper.MIXED]).T
            x = np.arange(len(paper.MIXED)) + 0.4 * k - 0.2
            label = f"{SAMPLERS[kind]}, {difference(pairs, 'sandwich', 'heavy')[2]} samples"
            axes.bar(x, loss, 0.38, color=colour, hatch=hatch, edgecolor="white", label=label)
            points(axes, x, loss, np.transpose(ci), fmt="none", ecolor=BLACK, capsize=2)
        extra = [paper.extra(name) for name in paper.MIXED]
        axes.plot(range(len(extra)), extra, "D", color=RED, markeredgecolor="white", label="paper, T = 1000")
        axes.set_xticks(range(len(paper.MIXED)), [name.replace("quarter:", "q") for name in paper.MIXED], fontsize=8)
        axes.set_title(f"T = {steps}", fontsize=9)
        axes.axhline(0, color=BLACK, linewidth=0.8)
        axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    row[0].set_ylabel("log-PPL above all-heavy")
    low, high = row[0].get_ylim()
    row[0].set_ylim(low, high + 0.25 * (high - low))  # for the legends
    return save_figure(figure, path)


def precision_levels(by_steps: Mapping[str, Any], path: Path) -> Path:
    """Perplexity and entropy over the number of steps in both samplers, and the kept probability mass over time."""
    figure, (left, middle, right) = panels(13.2, 3.4, 3)
    looks = {("exact", "light"): (VIOLET, "s", "-"), ("exact", "heavy"): (BLUE, "o", "-")}
    looks |= {("published", "light"): (RED, "v", "--"), ("published", "heavy"): (BROWN, "^", "--")}
    for axes, key, label in ((left, "gen_ppl", "Gen. PPL"), (middle, "entropy", "entropy, nats")):
        for k, ((kind, name), (colour, mark, line)) in enumerate(looks.items()):
            rows = [next(r for r in found[kind]["rows"] if r["schedule"] == name) for found in by_steps.values()]
            value, ci = ([row[column] for row in rows] for column in (key, f"{key}_ci"))
            x = np.arange(len(rows)) + 0.05 * (k - 1.5)  # side by side, so that intervals do not cover each other
            label_of = f"{SAMPLERS[kind]}, all-{name}"
            points(axes, x, value, ci, color=colour, marker=mark, linestyle=line, label=label_of)
        axes.set_xticks(range(len(by_steps)), list(by_steps))
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.2 * (high - low))  # for the legend
        finish(axes, "T", f"{label} (axis does not start at 0)", fontsize=7, ncols=2, loc="upper center")
    for j, (steps, found) in enumerate(by_steps.items()):
        name, kept = list(found["kept_mass"].items())[-1]
        right.plot(kept["t"], kept["mean"], label=f"T = {steps}, {name}", **nth(j))
    finish(right, "t (1: all masked)", "kept probability mass")
    right.ticklabel_format(useOffset=False)
    return save_figure(figure, path)


def stretches(result: Result, path: Path) -> Path:
    """What a light model, or fewer steps, cost in each stretch of time."""
    figure, (axes,) = panels(6.4, 3.0)
    apart = 0.1 if len({row["kind"] for row in result["rows"]}) > 1 else 0.0  # so that intervals do not cover others
    for kind, colour, mark, label, shift in (
        ("light", BROWN, "o", "light model there", -apart),
        ("stride", BLUE, "s", f"{result.get('sparse')} times larger steps there", apart),
    ):
        if rows := [row for row in result["rows"] if row["kind"] == kind]:
            x, y = [row["stretch"] + shift for row in rows], np.array([row["loss"] for row in rows], dtype=float)
            points(axes, x, y, [row["ci"] for row in rows], color=colour, marker=mark, label=label)
    axes.set_xticks(range(result["stretches"]))
    what = f"stretch of time (0: masked, {result['stretches'] - 1}: text)"
    finish(axes, what, "log-PPL above all-heavy", zero=BLACK)
    return save_figure(figure, path)


def stages(result: Result, path: Path) -> Path:
    """KL by time, and where it peaks, over training. The KL itself, not above a twin's: early stages have no twin."""
    figure, (left, right) = panels(9.0, 3.2, 2)
    pairs = [stage["pair"] for stage in result["stages"]]
    tokens = [(stage["tokens"] or 0) / 1e6 for stage in result["stages"]]
    for k, pair in enumerate(pairs):
        label = f"{tokens[k]:.0f}M tokens"
        left.plot(pair["t"], np.array(pair["kl"], dtype=float), markersize=4, label=label, **nth(k))
    peaks, ci = ([pair[key] for pair in pairs] for key in ("peak_t", "peak_t_ci"))
    points(right, tokens, peaks, ci, color=BLUE, marker="o")
    if min(tokens) > 0:
        right.set_xscale("log")
    right.set_ylim(0, 1)
    finish(left, "t (0: text, 1: all masked)", "KL(heavy || light), nats")
    finish(right, "training tokens, millions", "t of the peak", legend=False)
    return save_figure(figure, path)


def time_bars(parts: Mapping[str, tuple[float, float]], path: Path) -> Path:
    """Shares of the time: blocks, and everything else (output layer and draw), by label."""
    figure, (axes,) = panels(8.0, 0.9 + 0.42 * len(parts))
    for k, (blocks, rest) in enumerate(parts.values()):
        axes.barh(k, 100 * blocks, color=BLUE, label="blocks" if k == 0 else None)
        axes.barh(k, 100 * rest, left=100 * blocks, color=BROWN, hatch="//", label="the rest" if k == 0 else None)
        axes.text(50 * blocks, k, f"{blocks:.0%}", ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(parts)), list(parts), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time, %")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return save_figure(figure, path)


def tuned_rows(result: Result) -> list[dict[str, Any]]:
    """Loss against all-heavy on fresh rows of what the tuner's search led to, and which of it nothing dominates."""
    fresh = result["fresh"]
    zero = {"difference": 0.0, "ci": [0.0, 0.0]}
    found: dict[str, dict[str, Any]] = {}
    found[fresh["heavy"]] = {"what": "all-heavy", "kind": "anchor", "saved": 0.0, "against_heavy": zero}
    for row in fresh["rows"]:
        value, low, high = against(fresh["contrasts"], row["schedule"], fresh["heavy"])
        found.setdefault(row["schedule"], {**row, "against_heavy": {"difference": value, "ci": [low, high]}})
    at = [(row["saved"], row["against_heavy"]["difference"]) for row in found.values()]
    for row in found.values():
        saved, loss = row["saved"], row["against_heavy"]["difference"]
        row["on_front"] = not any(other >= saved - 0.005 and better < loss for other, better in at)  # half a per cent
    return list(found.values())


def front(result: Result, path: Path) -> Path:
    """Loss against FLOPs saved: mixed schedules of the tuner, rivals, all-heavy; side by side where savings agree."""
    figure, (axes,) = panels(8.0, 3.8)
    measured = tuned_rows(result)
    kinds = (
        ("mixed", BLUE, "o", "mixtures of the tuner", 0.6),
        ("sandwich", GREEN, "^", "sandwich (rival)", -0.6),
        ("rival", RED, "D", "one model alone (rival)", 0.0),
        ("anchor", BLACK, "s", "all-heavy", 0.0),
    )
    for kind, colour, mark, label, shift in kinds:
        rows = [row for row in measured if ("sandwich" if row["what"] == "sandwich" else row["kind"]) == kind]
        x, y = [100 * row["saved"] + shift for row in rows], [row["against_heavy"]["difference"] for row in rows]
        ci = [row["against_heavy"]["ci"] for row in rows]
        points(axes, x, y, ci, fmt=mark, color=colour, capsize=2, label=label)
    recommended, on_front = (
        sorted((100 * row["saved"], row["against_heavy"]["difference"]) for row in measured if row.get(key))
        for key in ("recommended", "on_front")
    )
    if recommended:
        ring: dict[str, Any] = {"color": "none", "markeredgecolor": BLACK, "markersize": 12}
        axes.plot(*zip(*recommended), "o", label="recommended by the search", **ring)
    axes.plot(*zip(*on_front), color="0.5", linewidth=1, label="front")
    what = "FLOPs saved against all-heavy, % (kinds drawn side by side)"
    finish(axes, what, "log-PPL above all-heavy", zero="0.6")
    return save_figure(figure, path)
