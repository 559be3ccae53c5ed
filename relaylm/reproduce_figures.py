"""The figures of `reproduce`, labelled as in the paper so that one can lay them side by side.

Colours are Okabe and Ito's; what colours say is said by hatching, markers or labels as well. Each function takes plain
JSON values of an experiment and writes a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import metrics, paper
from relaylm.report import COLOURS, MARKERS, _figure, _save
from relaylm.schedule import hand_made

BLUE, RED, GREEN, PINK, SKY, ORANGE, BLACK = COLOURS
LOOK = {"light": (ORANGE, ".."), "sandwich": (GREEN, "//"), "heavy": ("0.35", ""), "rival": (RED, "xx")}


def segments_label(name: str, steps: int) -> str:
    """A hand-made schedule in segments, as the paper's bars are labelled: L125 H750 L125."""
    table = hand_made()[name].timetable(steps)
    return "\n".join(f"{model}{len(list(run))}" for model, run in groupby(table.models))


def bars(panels: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Perplexity of the seven schedules with intervals, one panel for each title; rivals beside them."""
    figure = _figure(max(6.4, 5.6 * min(2, len(panels))), 3.6 * ((len(panels) + 1) // 2))
    grid = figure.subplots((len(panels) + 1) // 2, min(2, len(panels)), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, result) in zip(grid.flat, panels.items(), strict=False):
        by = {row["schedule"]: row for row in result["rows"]}
        rows = [by[name] for name in paper.SCHEDULES if name in by]
        rows += [row for row in result["rows"] if row.get("kind") == "rival"]
        values = np.array([row["gen_ppl"] for row in rows])
        low, high = (np.array([row["gen_ppl_ci"][end] or row["gen_ppl"] for row in rows]) for end in (0, 1))
        for k, row in enumerate(rows):
            kind = "rival" if row.get("kind") == "rival" else row["schedule"]
            colour, hatch = LOOK.get(kind, (BLUE, ""))
            axes.bar(k, values[k], color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, width=0.8)
            label = f"{values[k]:.{2 if values[k] < 10 else 1 if values[k] < 100 else 0}f}"
            axes.text(k, high[k], label, ha="center", va="bottom", fontsize=7)
        error = np.stack([values - low, high - values])
        axes.errorbar(range(len(rows)), values, yerr=error, fmt="none", ecolor=BLACK, capsize=3, linewidth=1)
        steps = int(result["steps"])
        labels = [
            _rival_label(row) if row.get("kind") == "rival" else segments_label(row["schedule"], steps) for row in rows
        ]
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        span = high.max() - low.min()
        axes.set_ylim(max(0, low.min() - 0.35 * span), high.max() + 0.15 * span)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("Gen. PPL (axis does not start at 0)", fontsize=8)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    return _save(figure, path)


def _rival_label(row: Mapping[str, Any]) -> str:
    what = str(row.get("rival") or "")
    for word, short in (
        ("middle", row["schedule"]),
        ("fewer", row["schedule"]),
        ("evenly", "even"),
        ("random", "random"),
    ):
        if word in what:
            return f"rival:\n{short}"
    return "rival"


def search_map(result: Mapping[str, Any], path: Path) -> Path:
    """The five best and worst schedules; filled cells are light segments."""
    figure = _figure(9.0, 2.6)
    for k, (key, title) in enumerate((("top", "best 5"), ("bottom", "worst 5"))):
        axes = figure.add_subplot(1, 2, k + 1)
        rows = result[key]
        for y, row in enumerate(rows):
            for x, bit in enumerate(row["name"]):
                look = {"color": RED, "hatch": "//"} if bit == "1" else {"color": "0.9"}
                axes.barh(y, 0.94, left=x + 0.03, height=0.8, edgecolor="white", linewidth=0, **look)
        axes.set_yticks(range(len(rows)), [f"{row['ppl']:.3f}" for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xticks(np.arange(10) + 0.5, [str(j) for j in range(10)])
        axes.set_xlim(0, 10)
        axes.set_xlabel("segment (0: masked, 9: text); hatched: light")
        axes.set_title(f"{title}, with Gen. PPL", fontsize=9)
    return _save(figure, path)


def frequencies(result: Mapping[str, Any], path: Path) -> Path:
    figure = _figure(9.0, 2.8)
    light = next(iter(result["top_frequency"]))
    for k, (key, title) in enumerate((("top_frequency", "top 20"), ("bottom_frequency", "bottom 20"))):
        axes = figure.add_subplot(1, 2, k + 1)
        axes.bar(range(10), 20 * np.array(result[key][light]), color=(BLUE, RED)[k], hatch=("", "//")[k])
        axes.axhline(8, color=BLACK, linewidth=0.8, linestyle="--")  # 4 of 10 segments, by chance
        axes.set_xticks(range(10))
        axes.set_ylim(0, 20)
        axes.set_xlabel("segment (0: masked, 9: text)")
        axes.set_ylabel("light in so many schedules")
        axes.set_title(f"{title} (dashed: by chance)", fontsize=9)
    return _save(figure, path)


def influence(result: Mapping[str, Any], path: Path) -> Path:
    figure = _figure(6.4, 2.9)
    axes = figure.add_subplot()
    light = next(iter(result["influence"]))
    values = np.array(result["influence"][light], dtype=float)
    ci = np.array(result["influence_ci"][light], dtype=float).T
    for j, value in enumerate(values):
        axes.bar(j, value, color=RED if value > 0 else BLUE, hatch="//" if value > 0 else "")
    axes.errorbar(range(10), values, yerr=np.abs(ci - values), fmt="none", ecolor=BLACK, capsize=3)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(10))
    axes.set_xlabel("segment (0: masked, 9: text)")
    axes.set_ylabel("mean PPL with it light\nless mean PPL of all")
    return _save(figure, path)


def depth_curve(rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Perplexity above all-heavy by the light model's depth, the intervals paired; `rows` by depth."""
    figure = _figure(6.0, 3.0)
    axes = figure.add_subplot()
    found = [against(pairs, row["schedule"], rows[-1]["schedule"]) for row in rows[:-1]] + [(0.0, 0.0, 0.0)]
    drop, low, high = 100 * np.expm1(np.array(found)).T
    x = [row["depth"] for row in rows]
    axes.errorbar(x, drop, yerr=np.stack([drop - low, high - drop]), color=BLUE, marker="o", capsize=3, label="here")
    theirs = {d: 100 * (v[0] / paper.DEPTHS[12][0] - 1) for d, v in paper.DEPTHS.items()}
    axes.plot(list(theirs), list(theirs.values()), color=RED, marker="s", linestyle="--", label="paper (OpenWebText)")
    axes.set_xlabel("blocks of the light model (25% sandwich)")
    axes.set_ylabel("PPL above all-heavy, %")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    return _save(figure, path)


def share_curves(result: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Share of the gap paid, and time saved, over the light share."""
    shares = result["shares"]
    figure = _figure(9.0, 3.2)
    left, right = figure.subplots(1, 2)
    paid = [100 * (rows[label]["gap_paid"] or 0) for label in result["labels"]]
    theirs = [100 * (v[0] - 42.9) / (53.4 - 42.9) for v in paper.SHARES.values()]
    left.plot(shares, paid, color=BLUE, marker="o", label="here")
    left.plot(list(paper.SHARES), theirs, color=RED, marker="s", linestyle="--", label="paper")
    left.plot([0, 100], [0, 100], color="0.6", linewidth=0.8)
    left.set_ylabel("gap between heavy and light paid, %")
    for key, label, colour, mark in (
        ("engine_seconds", "engine", BLUE, "o"),
        ("published_seconds", "MDLM's sampler here", ORANGE, "^"),
    ):
        seconds = np.array([np.mean(result[key][str(s)]) for s in shares])
        right.plot(shares, 100 * (1 - seconds / seconds[0]), color=colour, marker=mark, label=label)
    flops = [100 * (rows[label]["flops_saved"] or 0) for label in result["labels"]]
    right.plot(shares, flops, color=BLACK, linestyle=":", label="FLOPs saved here")
    right.plot(
        list(paper.SHARES), [v[3] for v in paper.SHARES.values()], color=RED, marker="s", linestyle="--", label="paper"
    )
    right.set_ylabel("time saved, %")
    for axes in (left, right):
        axes.set_xlabel("% light steps (sandwich)")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    return _save(figure, path)


SAMPLERS = {"exact": "exact", "published": "MDLM's float32"}  # what they are called, by where their data is


def precision_bars(by_steps: Mapping[str, Any], path: Path) -> Path:
    """Perplexity above all-heavy of each mixed schedule, exact and as MDLM draws, and the paper's."""
    figure = _figure(4.6 * len(by_steps), 3.2)
    panels = figure.subplots(1, len(by_steps), sharey=True, squeeze=False)[0]
    theirs = paper.TABLES[paper.OWT]
    for axes, (steps, found) in zip(panels, by_steps.items(), strict=True):
        for k, (kind, colour, hatch) in enumerate((("exact", BLUE, ""), ("published", ORANGE, "//"))):
            loss, error = [], []
            for name in paper.MIXED:
                value, low, high = against(found[kind]["contrasts"], name, "heavy")
                loss.append(value)
                error.append([value - low, high - value])
            x = np.arange(len(paper.MIXED)) + 0.4 * k - 0.2
            samples = difference(found[kind]["contrasts"], "sandwich", "heavy")[2]
            label = f"{SAMPLERS[kind]}, {samples} samples"
            axes.bar(x, loss, 0.38, color=colour, hatch=hatch, edgecolor="white", label=label)
            axes.errorbar(x, loss, yerr=np.array(error).T, fmt="none", ecolor=BLACK, capsize=2)
        extra = [np.log1p(paper.degradation(theirs, name)) for name in paper.MIXED]
        axes.plot(range(len(extra)), extra, "D", color=RED, markeredgecolor="white", label="paper, T = 1000")
        axes.set_xticks(range(len(paper.MIXED)), [name.replace("quarter:", "q") for name in paper.MIXED], fontsize=8)
        axes.set_title(f"T = {steps}", fontsize=9)
        axes.axhline(0, color=BLACK, linewidth=0.8)
        axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=2)
    panels[0].set_ylabel("log-PPL above all-heavy")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high + 0.25 * (high - low))  # room for the legends
    return _save(figure, path)


def precision_levels(by_steps: Mapping[str, Any], path: Path) -> Path:
    """Perplexity and entropy over the number of steps in both samplers, and the kept probability mass over time."""
    figure = _figure(13.2, 3.4)
    left, middle, right = figure.subplots(1, 3)
    looks = {("exact", "light"): (SKY, "s", "-"), ("exact", "heavy"): (BLUE, "o", "-")}
    looks |= {("published", "light"): (RED, "v", "--"), ("published", "heavy"): (ORANGE, "^", "--")}
    for axes, key, label in ((left, "gen_ppl", "Gen. PPL"), (middle, "entropy", "entropy, nats")):
        for k, ((kind, name), (colour, mark, line)) in enumerate(looks.items()):
            rows = [next(r for r in found[kind]["rows"] if r["schedule"] == name) for found in by_steps.values()]
            value = np.array([row[key] for row in rows])
            ends = [[v if end is None else end for end in row[f"{key}_ci"]] for v, row in zip(value, rows, strict=True)]
            error = np.abs(np.array(ends).T - value)
            look: dict[str, Any] = {"color": colour, "marker": mark, "linestyle": line, "capsize": 3}
            x = np.arange(len(rows)) + 0.05 * (k - 1.5)  # beside each other, so that intervals can be told apart
            axes.errorbar(x, value, yerr=error, label=f"{SAMPLERS[kind]}, all-{name}", **look)
        axes.set_xticks(range(len(by_steps)), list(by_steps))
        axes.set_xlabel("T")
        axes.set_ylabel(f"{label} (axis does not start at 0)", fontsize=8)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.2 * (high - low))  # room for the legend
        axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper center")
    for j, (steps, found) in enumerate(by_steps.items()):
        name, kept = list(found["kept_mass"].items())[-1]
        right.plot(kept["t"], kept["mean"], color=COLOURS[j], marker=MARKERS[j], label=f"T = {steps}, {name}")
    right.set_xlabel("t (1: all masked)")
    right.set_ylabel("kept probability mass", fontsize=8)
    right.ticklabel_format(useOffset=False)
    right.legend(frameon=False, fontsize=8)
    for axes in (left, middle, right):
        axes.grid(alpha=0.25)
    return _save(figure, path)


def against(pairs: Sequence[Mapping[str, Any]], name: str, other: str, among: int = 1) -> tuple[float, float, float]:
    """The difference in mean log-perplexity of two schedules and its 95% interval, corrected for being one of `among`
    (Bonferroni); nan where there is none."""
    value, error, rows = difference(pairs, name, other)
    if not rows:
        return np.nan, np.nan, np.nan
    half = metrics.student_quantile(1 - 0.025 / among, rows - 1) * error
    return value, value - half, value + half


def difference(pairs: Sequence[Mapping[str, Any]], name: str, other: str) -> tuple[float, float, int]:
    """The difference in mean log-perplexity of two schedules, its standard error and its rows; no rows where there is
    none."""
    for pair in pairs:
        turned = (pair["second"], pair["first"]) == (name, other)
        if (turned or (pair["first"], pair["second"]) == (name, other)) and pair["difference"] is not None:
            return -pair["difference"] if turned else pair["difference"], pair["error"], pair["rows"]
    return np.nan, np.nan, 0


def tuned_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the tuner's search led to, on fresh rows against all-heavy."""
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


def rivals_by_budget(fresh: Mapping[str, Any]) -> dict[float, dict[str, Mapping[str, Any]]]:
    """Of the tuner's schedules on fresh rows, for each budget the sandwich and each model alone, by that word or its
    name: of several the one that spends most (what is recommended may cost less than it might)."""
    found: dict[float, dict[str, Mapping[str, Any]]] = {row["budget"]: {} for row in fresh["rows"]}
    for row in sorted(fresh["rows"], key=lambda row: -row["saved"]):
        if row["kind"] == "rival":
            found[row["budget"]][row["what"].partition(" ")[0]] = row
    return found


def above_twin(pair: Mapping[str, Any]) -> bool:
    """Whether a model is shown anywhere to be further from the heavy one than its twin is, by a hundredth of the most
    that their KL comes to."""
    return any(low > 0.01 * max(pair["kl"]) for low, _ in pair["kl_relative_ci"])


def stretches(result: Mapping[str, Any], path: Path) -> Path:
    figure = _figure(6.4, 3.0)
    axes = figure.add_subplot()
    for kind, colour, mark, label, shift in (
        ("light", ORANGE, "o", "light model there", -0.1),
        ("stride", BLUE, "s", f"{result['sparse']} times larger steps there", 0.1),
    ):
        rows = [row for row in result["rows"] if row["kind"] == kind]
        x = np.array([row["stretch"] for row in rows]) + shift
        y = np.array([row["loss"] for row in rows], dtype=float)
        ci = np.array([row["ci"] for row in rows], dtype=float).T
        axes.errorbar(x, y, yerr=np.abs(ci - y), color=colour, marker=mark, capsize=3, label=label)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set_xticks(range(result["stretches"]))
    axes.set_xlabel(f"stretch of time (0: masked, {result['stretches'] - 1}: text)")
    axes.set_ylabel("log-PPL above all-heavy")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    return _save(figure, path)


def stages(result: Mapping[str, Any], path: Path) -> Path:
    """The KL itself, not above a twin's: stages on the way have no twin."""
    figure = _figure(9.0, 3.2)
    left, right = figure.subplots(1, 2)
    tokens, peaks, spreads = [], [], []
    for k, stage in enumerate(result["stages"]):
        pair = stage["pair"]
        curve = np.array(pair["kl"], dtype=float)
        label = f"{(stage['tokens'] or 0) / 1e6:.0f}M tokens"
        left.plot(pair["t"], curve, color=COLOURS[k % 7], marker=MARKERS[k % 7], markersize=4, label=label)
        tokens.append((stage["tokens"] or 0) / 1e6)
        peaks.append(pair["peak_t"])
        spreads.append([pair["peak_t"] - pair["peak_t_ci"][0], pair["peak_t_ci"][1] - pair["peak_t"]])
    left.set_xlabel("t (0: text, 1: all masked)")
    left.set_ylabel("KL(heavy || light), nats")
    left.legend(frameon=False, fontsize=8)
    right.errorbar(tokens, peaks, np.maximum(0, np.transpose(spreads)), color=BLUE, marker="o", capsize=3)
    if min(tokens) > 0:
        right.set_xscale("log")
    right.set_xlabel("training tokens, millions")
    right.set_ylabel("t of the peak")
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    return _save(figure, path)


def time_bars(parts: Mapping[str, tuple[float, float]], path: Path) -> Path:
    """Shares of the time: blocks, and everything else (output layer and draw), by label."""
    figure = _figure(8.0, 0.9 + 0.42 * len(parts))
    axes = figure.add_subplot()
    for k, (blocks, rest) in enumerate(parts.values()):
        axes.barh(k, 100 * blocks, color=BLUE, label="blocks" if k == 0 else None)
        axes.barh(k, 100 * rest, left=100 * blocks, color=ORANGE, hatch="//", label="the rest" if k == 0 else None)
        axes.text(50 * blocks, k, f"{blocks:.0%}", ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(parts)), list(parts), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time, %")
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return _save(figure, path)


def front(result: Mapping[str, Any], path: Path) -> Path:
    """Loss against FLOPs saved: mixed schedules of the tuner, rivals, all-heavy; side by side where savings agree."""
    figure = _figure(8.0, 3.8)
    axes = figure.add_subplot()
    measured = tuned_rows(result)
    kinds = (
        ("mixed", BLUE, "o", "mixtures of the tuner", 0.6),
        ("sandwich", GREEN, "^", "sandwich (rival)", -0.6),
        ("rival", RED, "D", "one model alone (rival)", 0.0),
        ("anchor", BLACK, "s", "all-heavy", 0.0),
    )
    for kind, colour, mark, label, shift in kinds:
        rows = [row for row in measured if ("sandwich" if row["what"] == "sandwich" else row["kind"]) == kind]
        x = [100 * row["saved"] + shift for row in rows]
        y = np.array([row["against_heavy"]["difference"] for row in rows], dtype=float)
        ci = np.array([row["against_heavy"]["ci"] for row in rows], dtype=float).reshape(-1, 2).T
        axes.errorbar(x, y, yerr=np.abs(ci - y), fmt=mark, color=colour, capsize=2, label=label)
    chosen = [row for row in measured if row.get("recommended")]
    if chosen:
        at = [(100 * row["saved"], row["against_heavy"]["difference"]) for row in chosen]
        axes.plot(*zip(*at), "o", color="none", markeredgecolor=BLACK, markersize=12, label="recommended by the search")
    best = sorted((row["saved"], row["against_heavy"]["difference"]) for row in measured if row.get("on_front"))
    axes.plot([100 * saved for saved, _ in best], [loss for _, loss in best], color="0.5", linewidth=1, label="front")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("FLOPs saved against all-heavy, % (kinds drawn side by side)")
    axes.set_ylabel("log-PPL above all-heavy")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.25)
    return _save(figure, path)
