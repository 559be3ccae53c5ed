"""Sections of the report about schedules: the seven by hand, all 210, depths and shares, prefixes, strides, the tuner.

Each function takes an experiment's result (plain JSON, perhaps of a run years ago) and a folder for its figures, and
returns blocks of a `document`: the paper's numbers, ours, the difference in words, tables, figures. Nothing is computed
here but what is shown. The sections about models, and the list of all sections, are in `sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import paper
from relaylm import reproduce_figures as draw
from relaylm.document import Block, Figure, Table, Text
from relaylm.mdlm_experiments import PUBLISHED_ROWS
from relaylm.reproduce_figures import against

Result = Mapping[str, Any]


def ppl_text(row: Mapping[str, Any]) -> str:
    low, high = row["gen_ppl_ci"]
    return f"{row['gen_ppl']:.3f}" + ("" if low is None or high is None else f" ± {(high - low) / 2:.3f}")


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def signed(item: tuple[float, float, float]) -> str:
    value, low, high = item
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def _loss(item: Mapping[str, Any]) -> str:
    return signed((item["difference"], *item["ci"]))


def _calls(spent: Mapping[str, Any]) -> str:
    made, naive = spent["calls_made"], spent["calls_naive"]
    return f"Shared beginnings: {made:,} row-calls where independent runs make {naive:,} ({made / naive:.1%})."


def by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row["schedule"]: row for row in rows}


def mixed_order(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted((name for name in paper.MIXED if name in rows), key=lambda name: rows[name]["gen_ppl"])


def about_samples(result: Result) -> str:
    steps, length = result["steps"], result["length"]
    return f"{result['n']} samples of each schedule, length {length}, T = {steps}, judge {result['judge']}."


def seven_table(name: str, caption: str, result: Result, theirs: Mapping[str, paper.Row] | None) -> Table:
    """The seven schedules and what stands beside them, with the paper's numbers where it has them."""
    head = ["schedule", "Gen. PPL (95%)", "entropy", "word entropy", "gap paid", "log-PPL against heavy", "FLOPs saved"]
    head += ["paper's label", "paper's PPL", "paper's entropy", "gap paid there"]
    by = by_name(result["rows"])
    order = [n for n in paper.SCHEDULES if n in by]
    order += [row["schedule"] for row in result["rows"] if row.get("kind") == "rival"]
    contests = {item["rival"]: item for item in result.get("rivals", []) if item["schedule"] == "sandwich"}
    rows = []
    for n in order:
        row, their = by[n], None if theirs is None else theirs.get(n)
        difference = "" if n == "heavy" else signed(against(result["contrasts"], n, "heavy"))
        if row.get("kind") == "rival":
            item = contests.get(n)
            difference = "" if item is None else f"against the sandwich {signed((item['difference'], *item['ci']))}"
        words = "" if row.get("word_entropy") is None else f"{row['word_entropy']:.3f}"
        cells = [f"{n}" + (f" (rival: {row['rival']})" if row.get("kind") == "rival" else ""), ppl_text(row)]
        cells += [
            f"{row['entropy']:.3f}",
            words,
            percent(row.get("gap_paid")),
            difference,
            percent(row["flops_saved"]),
        ]
        if their is not None and theirs is not None:
            paid = percent(paper.gap_paid(theirs, n), 0)
            labels = paper.LM1B_LABELS if theirs is paper.TABLES[paper.LM1B] else paper.LABELS
            cells += [labels[n], f"{their.ppl} ± {their.half}", f"{their.entropy:.2f}", paid]
        rows.append([*cells, *[""] * (len(head) - len(cells))])
    return Table(name, caption, head, rows)


def in_words(result: Result, theirs: Mapping[str, paper.Row] | None, depth: int | None = None) -> str:
    """Our order of the mixed schedules against the paper's, and what the sandwich pays. Where the paper prints no such
    table, it still says what the sandwich costs with a light model of this `depth`."""
    by = by_name(result["rows"])
    ours = mixed_order(by)
    same = ""
    if theirs is not None:
        agrees = all(theirs[a].ppl <= theirs[b].ppl for a, b in pairwise(ours))
        same = "; the same order as in the paper" if agrees else f"; not the paper's order ({paper.order_text(theirs)})"
    value, low, high = against(result["contrasts"], "sandwich", "heavy")
    paid = by["sandwich"].get("gap_paid")
    other = next(name for name in ours if name != "sandwich")
    apart = against(result["contrasts"], "sandwich", other)
    told = "" if apart[1] > 0 or apart[2] < 0 else ", not told apart"
    text = f"Best to worst here: {', '.join(ours)}{same}. The sandwich against {other}: {signed(apart)}{told}. "
    text += f"The sandwich costs {np.expm1(value):+.1%} "
    text += f"({np.expm1(low):+.1%} to {np.expm1(high):+.1%}) in perplexity"
    if paid is not None:
        text += f" and pays {paid:.0%} of the gap"
    if theirs is not None:
        text += f" (paper: {paper.degradation(theirs):+.1%}, {paper.gap_paid(theirs, 'sandwich'):.0%} of the gap)"
    elif depth in paper.DEPTHS:
        text += f" (paper: {paper.DEPTHS[depth][3] / 100:+.1%})"
    text += "."
    contests = [item for item in result.get("rivals", []) if item["schedule"] == "sandwich"]
    if contests:
        best = min(contests, key=lambda item: item["difference"])
        text += f" Its best rival is {best['rival']} ({best['what']}), {_loss(best)} against it, which "
        text += {"wins": "wins", "loses": "loses", "level": "is level"}[best["outcome"]]
        text += f" (p = {best['p_holm']:.2g}, corrected for {len(result['rivals'])} contests)."
    return text + (f" {result['verdict']}" if result.get("rivals") else "")


# ------------------------------------------------------------------------------------------------ sections


def schedules(result: Result, figures: Path) -> list[Block]:
    return tables_by_light(
        result, figures, "schedules", "As fig:12b-4b-, 12b-6b-, 12b-8b- and 12b-10b-barplot-perplexity. "
    )


def tables_by_light(result: Result, figures: Path, name: str, caption: str) -> list[Block]:
    by_light = result["by_light"]
    titles = {f"light {light}, heavy {result['heavy']}, 25% light steps": r for light, r in by_light.items()}
    blocks: list[Block] = [Text(about_samples(next(iter(by_light.values()))))]
    caption += (
        "Bars with 95% intervals, of single schedules, not of differences; light schedule dotted, sandwich hatched, "
        "equal-compute rivals crossed."
    )
    blocks.append(Figure(draw.bars(titles, figures / f"{name}.png"), caption))
    for k, (light, found) in enumerate(by_light.items()):
        depth = result["depths"][light]
        theirs = paper.TABLES[paper.OWT] if k == 0 else None
        label = f" beside {paper.OWT}" if k == 0 else ""
        words = in_words(found, theirs, depth)
        blocks.append(Text(f"**Light model {light}, {depth} deep.** {words}"))
        blocks.append(seven_table(f"{name}-{light}", f"Seven schedules with light {light}{label}", found, theirs))
    return blocks


def search(result: Result, figures: Path) -> list[Block]:
    best, worst = result["top"], result["bottom"]
    light = next(iter(result["influence"]))
    influence = result["influence"][light]
    order = sorted(range(10), key=lambda j: influence[j])
    made = result["search_calls"]
    blocks: list[Block] = [
        Text(
            f"All {result['schedules_tried']} ways to make four of ten segments light, {result['n']} samples of each "
            f"on the same random numbers. {result['verdict']} Paper: {paper.SEARCH}. Here the "
            f"safest segments to make light are {', '.join(map(str, order[:3]))}, the most harmful "
            f"{', '.join(map(str, order[:-4:-1]))} "
            f"(0 is the fully masked end). {_calls(made)}"
        )
    ]
    blocks.append(
        Figure(
            draw.search_map(result, figures / "search-map.png"), "As fig:best_worst_barplot, by mean log-perplexity."
        )
    )
    files = draw.frequencies(result, figures / "search-frequencies.png")
    blocks.append(Figure(files, "As fig:top20config_barplot and fig:bottom20config_barplot."))
    caption = "As fig:per_segment_ppl_barplot, with 95% bootstrap intervals; positive is harmful."
    blocks.append(Figure(draw.influence(result, figures / "search-influence.png"), caption))
    rows = [
        [str(j), f"{20 * result['top_frequency'][light][j]:.0f}", f"{20 * result['bottom_frequency'][light][j]:.0f}",
         f"{influence[j]:+.4f}", "{:+.4f} to {:+.4f}".format(*result["influence_ci"][light][j])]
        for j in range(10)
    ]  # fmt: skip
    head = ["segment", "light in top 20", "light in bottom 20", "influence I(j)", "95%"]
    blocks.append(Table("search-segments", "Segments", head, rows))
    rows = [
        [kind, row["name"], f"{row['log_ppl']:.4f}", f"{row['ppl']:.4f}"]
        for kind, part in (("best", best), ("worst", worst))
        for row in part
    ]
    head = ["", "segments", "log-PPL", "Gen. PPL"]
    blocks.append(Table("search-extremes", "Five best and worst by log-perplexity (1: light)", head, rows))
    return blocks


def depths(result: Result, figures: Path) -> list[Block]:
    rows = sorted(result["rows"], key=lambda row: row["depth"])
    heavy = rows[-1]
    table = []
    for row in rows:
        their = paper.DEPTHS.get(row["depth"])
        drop = "" if row is heavy else signed(against(result["contrasts"], row["schedule"], heavy["schedule"]))
        cells = [row["light"], ppl_text(row), percent(row["gen_ppl"] / heavy["gen_ppl"] - 1, 2), drop]
        cells += [percent(row["blocks_saved"], 2), percent(row["flops_saved"], 2)]
        cells += ["", "", ""] if their is None else [
            f"{their[0]} ± {their[1]}", f"{their[3]:.2f}%", f"{their[2]}%"
        ]  # fmt: skip
        table.append(cells)
    lights = [row for row in rows if row is not heavy]
    here = ", ".join(f"{row['gen_ppl'] / heavy['gen_ppl'] - 1:+.1%}" for row in lights)
    there = ", ".join(f"{paper.DEPTHS[row['depth']][3] / 100:+.1%}" for row in lights if row["depth"] in paper.DEPTHS)
    blocks = ", ".join(str(row["depth"]) for row in lights)
    words = f"The sandwich costs {here} of perplexity with {blocks} light blocks"
    words += f" (paper: {there})." if there else "."
    head = [
        "light model",
        "Gen. PPL (95%)",
        "PPL drop",
        "log-PPL against heavy (paired)",
        "blocks saved",
        "FLOPs saved",
    ]
    head += ["paper's PPL", "paper's drop", "paper's saved FLOPs"]
    caption = "As tab:scaling_models: perplexity above all-heavy by the light model's depth, 95% intervals."
    return [
        Text(f"{about_samples(result)} {words}"),
        Figure(draw.depth_curve(rows, result["contrasts"], figures / "depths.png"), caption),
        Table("depths", "Beside tab:scaling_models", head, table),
    ]


def shares(result: Result, figures: Path) -> list[Block]:
    by = by_name(result["rows"])
    mean = {key: {s: float(np.mean(result[key][str(s)])) for s in result["shares"]} for key in SECONDS}
    first = result["shares"][0]
    rows = []
    for share, label in zip(result["shares"], result["labels"], strict=True):
        row, their = by[label], paper.SHARES.get(share)
        cells = [
            str(share),
            ppl_text(row),
            f"{row['entropy']:.3f}",
            percent(row.get("gap_paid")),
            percent(row["blocks_saved"]),
        ]
        cells.append(percent(row["flops_saved"]))
        for key in SECONDS:
            cells += [f"{mean[key][share]:.2f}", percent(1 - mean[key][share] / mean[key][first])]
        cells += ["", "", "", ""] if their is None else [f"{their[0]}", f"{their[1]}%", f"{their[2]}", f"{their[3]}%"]
        rows.append(cells)
    head = ["% light steps", "Gen. PPL (95%)", "entropy", "gap paid", "blocks saved", "FLOPs saved"]
    head += ["engine, s", "time saved", "MDLM's sampler, s", "time saved", "paper's PPL", "paper's FLOPs", "paper's s"]
    head += ["paper's speedup"]
    last = result["shares"][-1]
    saved = {key: 1 - mean[key][last] / mean[key][first] for key in SECONDS}
    words = (
        f"All-light saves {saved['engine_seconds']:.1%} of the engine's time and {saved['published_seconds']:.1%} of "
    )
    words += (
        f"MDLM's sampler's, on this vocabulary; the paper's column says {paper.SHARES[100][3]}% (its output layer has "
    )
    words += f"50,258 columns). Wall-clock on {result['timed_rows']} rows, up the shares and down again"
    if result["timed_rows"] > PUBLISHED_ROWS:
        words += f"; MDLM's sampler on {PUBLISHED_ROWS}, counted for as many"
    apart = {key: max(max(s) / min(s) - 1 for s in result[key].values()) for key in SECONDS}
    words += f". Two passes of a share differ by up to {apart['engine_seconds']:.0%} in the engine and by "
    words += f"{apart['published_seconds']:.0%} in MDLM's sampler."
    half = min(result["shares"], key=lambda share: abs(share - 50))
    paid = by[result["labels"][result["shares"].index(half)]].get("gap_paid")
    if half in paper.SHARES and paid is not None:
        ppl = {share: values[0] for share, values in paper.SHARES.items()}
        words += f" At {half}% light steps {paid:.0%} of the quality gap is paid"
        words += f" (paper: {(ppl[half] - ppl[0]) / (ppl[100] - ppl[0]):.0%})."
    caption = "As tab:scaling_steps: share of the quality gap paid, and time saved, over the light share."
    return [
        Text(f"{about_samples(result)} {words}"),
        Figure(draw.share_curves(result, by, figures / "shares.png"), caption),
        Table("shares", "Beside tab:scaling_steps", head, rows),
    ]


SECONDS = ("engine_seconds", "published_seconds")


def prefixes(result: Result, figures: Path) -> list[Block]:
    found = result["by_prefix"]
    blocks: list[Block] = [Text(f"Prefixes are {result['source']}. {about_samples(next(iter(found.values())))}")]
    titles = {f"{k} given tokens": r for k, r in found.items()}
    caption = "As fig:owt_perplexity_barplot_12b4b_prefix128 and _prefix256: conditional perplexity."
    blocks.append(Figure(draw.bars(titles, figures / "prefixes.png"), caption))
    for k, r in found.items():
        key = paper.PREFIX_128 if r["length"] // int(k) == 8 else paper.PREFIX_256
        blocks.append(Text(f"**{k} of {r['length']} given.** {in_words(r, paper.TABLES[key])}"))
        blocks.append(seven_table(f"prefixes-{k}", f"After {k} given tokens, beside {key}", r, paper.TABLES[key]))
    return blocks


def strides(result: Result, figures: Path) -> list[Block]:
    rows = []
    for row in result["rows"]:
        what = "light model" if row["kind"] == "light" else f"1 of {result['sparse']} steps"
        span = f"{row['from']:.3f} to {row['to']:.3f}"
        rows.append([what, span, signed((row["loss"], *row["ci"])), percent(row["flops_saved"])])
    text = (
        f"One of {result['stretches']} stretches of time at a time is run by the light model, or by the heavy one in "
        f"one of {result['sparse']} steps ({result['n']} samples each; stretch 0 is the masked end, "
        f"{result['stretches'] - 1} the text)."
    )
    for kind, what in (("light", "A smaller model"), ("stride", "Larger strides")):
        by_loss = sorted((row for row in result["rows"] if row["kind"] == kind), key=lambda row: row["loss"])
        level = sorted(row["stretch"] for row in by_loss if row["ci"][0] <= 0 <= row["ci"][1])
        worst = by_loss[-1]
        text += f" {what}: most costly in stretch {worst['stretch']}, {signed((worst['loss'], *worst['ci']))}; "
        text += f"not told apart from all-heavy in {', '.join(map(str, level)) or 'none'}."
    first, last = (
        [signed((row["loss"], *row["ci"])) for row in result["rows"] if row["stretch"] == j]
        for j in (0, result["stretches"] - 1)
    )
    text += f" At the masked end the light model costs {first[0]} and larger strides {first[1]}; at the text "
    text += f"{last[0]} and {last[1]}."
    free = {(row["kind"], row["stretch"]): row["ci"][0] <= 0 <= row["ci"][1] for row in result["rows"]}
    ends = [(free["light", j], free["stride", j]) for j in (0, result["stretches"] - 1)]
    if ends == [(True, False), (False, True)]:
        text += " So the first steps take a smaller model but not larger strides, and the last ones the reverse."
    head = ["there", "t", "log-PPL against heavy", "FLOPs saved"]
    caption = "Which steps tolerate a smaller model, and which a larger stride."
    return [
        Text(text),
        Figure(draw.stretches(result, figures / "strides.png"), caption),
        Table("strides", "One stretch at a time", head, rows),
    ]


def tuner(result: Result, figures: Path) -> list[Block]:
    chosen: dict[str, list[str]] = {}
    for goal in result.get("front", []):
        chosen.setdefault(f"`{goal['schedule']}` ({goal['what']})", []).append(percent(goal["saved_at_least"], 0))
    found = "; ".join(f"to save {' or '.join(savings)}, {what}" for what, savings in chosen.items())
    text = f"{result['verdict']} What it recommends: {found}."
    fresh = result["fresh"]
    text += f" What stands in the table was then judged on {fresh['n']} rows that the search has not seen (seed "
    text += f"{fresh['seed']}), the same for all schedules; the best and the next best there are listed below."
    caption = "Quality against cost: schedules that the tuner made, and what simpler ways give for the same money."
    return [
        Text(f"{text} {_calls(result['calls'])}"),
        Text(_best_on_fresh_rows(fresh)),
        Figure(draw.front(result, figures / "tuner.png"), caption),
        _fresh_table(fresh),
    ]


def _best_on_fresh_rows(fresh: Result) -> str:
    """What is best at each budget, and whether the next is told apart from it."""
    pairs, words = fresh["contrasts"], []
    for budget in dict.fromkeys(row["budget"] for row in fresh["rows"]):
        rows = [row for row in fresh["rows"] if row["budget"] == budget]
        rows.sort(key=lambda row: against(pairs, row["schedule"], fresh["heavy"])[0])
        mixed = ", mixed" if rows[0]["kind"] == "mixed" else ""
        words.append(f"- to save {percent(budget, 0)}: {rows[0]['what']}{mixed}")
        if len(rows) > 1:
            item = against(pairs, rows[1]["schedule"], rows[0]["schedule"])
            told = "" if item[1] > 0 else ", not told apart"
            words[-1] += f"; the next, {rows[1]['what']}, {signed(item)} against it{told}"
    return "\n".join(words)


def _fresh_table(fresh: Result) -> Table:
    head = ["to save", "schedule", "what", "recommended", "saved", "Gen. PPL (95%)", "log-PPL against heavy"]
    head += ["against the sandwich"]
    by_budget = draw.rivals_by_budget(fresh)
    rows = []
    for row in fresh["rows"]:
        cells = [percent(row["budget"], 0), row["schedule"], row["what"], "yes" if row["recommended"] else ""]
        cells += [percent(row["saved"]), ppl_text(row)]
        cells.append(signed(against(fresh["contrasts"], row["schedule"], fresh["heavy"])))
        other = by_budget[row["budget"]].get("sandwich", row)["schedule"]
        same = other == row["schedule"]
        rows.append([*cells, "" if same else signed(against(fresh["contrasts"], row["schedule"], other))])
    return Table("tuner", "At each budget, on fresh rows", head, rows)
