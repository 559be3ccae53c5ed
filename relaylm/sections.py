"""One section of the report for each experiment: the paper's numbers, ours, the difference in words, tables, figures.

Each function takes an experiment's result (plain JSON, perhaps of a run years ago) and a folder for its figures, and
returns blocks of a `document`. Nothing is computed here but what is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import paper
from relaylm import reproduce_figures as draw
from relaylm.document import Block, Figure, Table, Text
from relaylm.report import plot_importance
from relaylm.reproduce_figures import against

Result = Mapping[str, Any]


def _ppl(row: Mapping[str, Any]) -> str:
    low, high = row["gen_ppl_ci"]
    return f"{row['gen_ppl']:.3f}" + ("" if low is None or high is None else f" ± {(high - low) / 2:.3f}")


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def _signed(item: tuple[float, float, float]) -> str:
    value, low, high = item
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def _loss(item: Mapping[str, Any]) -> str:
    return _signed((item["difference"], *item["ci"]))


def _calls(spent: Mapping[str, Any]) -> str:
    made, naive = spent["calls_made"], spent["calls_naive"]
    return f"Shared beginnings: {made:,} row-calls where independent runs make {naive:,} ({made / naive:.1%})."


def _named(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row["schedule"]: row for row in rows}


def _order(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted((name for name in paper.MIXED if name in rows), key=lambda name: rows[name]["gen_ppl"])


def _about(result: Result) -> str:
    steps, length = result["steps"], result["length"]
    return f"{result['n']} samples of each schedule, length {length}, T = {steps}, judge {result['judge']}."


def _seven(name: str, caption: str, result: Result, theirs: Mapping[str, paper.Row] | None) -> Table:
    """The seven schedules and what stands beside them, with the paper's numbers where it has them."""
    head = ["schedule", "Gen. PPL (95%)", "entropy", "word entropy", "gap paid", "log-PPL against heavy", "FLOPs saved"]
    head += ["paper's label", "paper's PPL", "paper's entropy", "gap paid there"]
    by = _named(result["rows"])
    order = [n for n in paper.SCHEDULES if n in by]
    order += [row["schedule"] for row in result["rows"] if row.get("kind") == "rival"]
    contests = {item["rival"]: item for item in result.get("rivals", []) if item["schedule"] == "sandwich"}
    rows = []
    for n in order:
        row, their = by[n], None if theirs is None else theirs.get(n)
        difference = "" if n == "heavy" else _signed(against(result["contrasts"], n, "heavy"))
        if row.get("kind") == "rival":
            item = contests.get(n)
            difference = "" if item is None else f"against the sandwich {_signed((item['difference'], *item['ci']))}"
        words = "" if row.get("word_entropy") is None else f"{row['word_entropy']:.3f}"
        cells = [f"{n}" + (f" (rival: {row['rival']})" if row.get("kind") == "rival" else ""), _ppl(row)]
        cells += [
            f"{row['entropy']:.3f}",
            words,
            _percent(row.get("gap_paid")),
            difference,
            _percent(row["flops_saved"]),
        ]
        if their is not None and theirs is not None:
            paid = _percent(paper.gap_paid(theirs, n), 0)
            cells += [paper.LABELS[n], f"{their.ppl} ± {their.half}", f"{their.entropy:.2f}", paid]
        rows.append([*cells, *[""] * (len(head) - len(cells))])
    return Table(name, caption, head, rows)


def _in_words(result: Result, theirs: Mapping[str, paper.Row]) -> str:
    """Our order of the mixed schedules against the paper's, and what the sandwich pays."""
    by = _named(result["rows"])
    ours, order = _order(by), paper.order(theirs)
    same = "the same order" if ours == order else f"not the paper's order ({', '.join(order)})"
    value, low, high = against(result["contrasts"], "sandwich", "heavy")
    paid = by["sandwich"].get("gap_paid")
    other = next(name for name in ours if name != "sandwich")
    apart = against(result["contrasts"], "sandwich", other)
    told = "" if apart[1] > 0 or apart[2] < 0 else ", not told apart"
    text = f"Best to worst here: {', '.join(ours)}; {same}. The sandwich against {other}: {_signed(apart)}{told}. "
    text += f"The sandwich costs {np.expm1(value):+.1%} "
    text += f"({np.expm1(low):+.1%} to {np.expm1(high):+.1%}) in perplexity"
    if paid is not None:
        text += f" and pays {paid:.0%} of the gap"
    text += f" (paper: {paper.degradation(theirs):+.1%}, {paper.gap_paid(theirs, 'sandwich'):.0%} of the gap)."
    contests = [item for item in result.get("rivals", []) if item["schedule"] == "sandwich"]
    if contests:
        best = min(contests, key=lambda item: item["difference"])
        text += f" Its best rival is {best['rival']} ({best['what']}), {_loss(best)} against it, which "
        text += {"wins": "wins", "loses": "loses", "level": "is level"}[best["outcome"]]
        text += f" (p = {best['p_holm']:.2g}, corrected for {len(result['rivals'])} contests)."
    return text + (f" {result['verdict']}" if result.get("rivals") else "")


# ------------------------------------------------------------------------------------------------ sections


def schedules(result: Result, figures: Path) -> list[Block]:
    return _by_light(result, figures, "schedules", "As fig:12b-4b-, 12b-6b-, 12b-8b- and 12b-10b-barplot-perplexity. ")


def bpe(result: Result, figures: Path) -> list[Block]:
    caption = "The same with a large vocabulary. "
    return [
        *_by_light(result["schedules"], figures, "bpe", caption),
        *_curves(result["disagreement"], figures, "bpe-kl", "As fig:loss_diff and fig:kldiv-plot."),
    ]


def _by_light(result: Result, figures: Path, name: str, caption: str) -> list[Block]:
    by_light = result["by_light"]
    titles = {f"light {light}, heavy {result['heavy']}, 25% light steps": r for light, r in by_light.items()}
    blocks: list[Block] = [Text(_about(next(iter(by_light.values()))))]
    caption += (
        "Bars with 95% intervals, of single schedules, not of differences; light schedule dotted, sandwich hatched, "
        "equal-compute rivals crossed."
    )
    blocks.append(Figure(draw.bars(titles, figures / f"{name}.png"), caption))
    for k, (light, found) in enumerate(by_light.items()):
        depth = result["depths"][light]
        theirs = paper.TABLES[paper.OWT] if k == 0 else None
        label = f" beside {paper.OWT}" if k == 0 else ""
        words = _in_words(found, paper.TABLES[paper.OWT])
        blocks.append(Text(f"**Light model {light}, {depth} deep.** {words}"))
        blocks.append(_seven(f"{name}-{light}", f"Seven schedules with light {light}{label}", found, theirs))
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
        [kind, row["name"], f"{row['ppl']:.4f}"] for kind, part in (("best", best), ("worst", worst)) for row in part
    ]
    blocks.append(Table("search-extremes", "Five best and worst (1: light)", ["", "segments", "Gen. PPL"], rows))
    return blocks


def depths(result: Result, figures: Path) -> list[Block]:
    rows = sorted(result["rows"], key=lambda row: row["depth"])
    heavy = rows[-1]
    table = []
    for row in rows:
        their = paper.DEPTHS.get(row["depth"])
        drop = "" if row is heavy else _signed(against(result["contrasts"], row["schedule"], heavy["schedule"]))
        cells = [row["light"], _ppl(row), _percent(row["gen_ppl"] / heavy["gen_ppl"] - 1, 2), drop]
        cells += [_percent(row["blocks_saved"], 2), _percent(row["flops_saved"], 2)]
        cells += ["", "", ""] if their is None else [
            f"{their[0]} ± {their[1]}", _percent(their[0] / paper.DEPTHS[12][0] - 1, 2), f"{their[2]}%"
        ]  # fmt: skip
        table.append(cells)
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
        Text(_about(result)),
        Figure(draw.depth_curve(rows, result["contrasts"], figures / "depths.png"), caption),
        Table("depths", "Beside tab:scaling_models", head, table),
    ]


def shares(result: Result, figures: Path) -> list[Block]:
    by = _named(result["rows"])
    mean = {key: {s: float(np.mean(result[key][str(s)])) for s in result["shares"]} for key in SECONDS}
    first = result["shares"][0]
    rows = []
    for share, label in zip(result["shares"], result["labels"], strict=True):
        row, their = by[label], paper.SHARES.get(share)
        cells = [
            str(share),
            _ppl(row),
            f"{row['entropy']:.3f}",
            _percent(row.get("gap_paid")),
            _percent(row["blocks_saved"]),
        ]
        cells.append(_percent(row["flops_saved"]))
        for key in SECONDS:
            cells += [f"{mean[key][share]:.2f}", _percent(1 - mean[key][share] / mean[key][first])]
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
    words += f"50,258 columns). Wall-clock on {result['timed_rows']} rows, up the shares and down again."
    caption = "As tab:scaling_steps: share of the quality gap paid, and time saved, over the light share."
    return [
        Text(f"{_about(result)} {words}"),
        Figure(draw.share_curves(result, by, figures / "shares.png"), caption),
        Table("shares", "Beside tab:scaling_steps", head, rows),
    ]


SECONDS = ("engine_seconds", "published_seconds")


def time(result: Result, figures: Path) -> list[Block]:
    blocks: list[Block] = []
    parts: dict[str, tuple[float, float]] = {}
    family, depth = result["family"], result["depths"]
    for which in ("light", "heavy"):
        share = family["published_blocks"][which]
        parts[f"MDLM's sampler, {depth[which]} blocks, {result['vocabulary']} tokens"] = share, 1 - share
    for key, which in (("breakdown_light", "light"), ("breakdown", "heavy")):
        if family.get(key):
            parts[f"engine, {depth[which]} blocks, {result['vocabulary']} tokens"] = _blocks(family[key])
    size = result.get("paper_size")
    if size:
        heavy_ms, light_ms = size["reference_ms_per_row_step"], size["reference_light_ms_per_row_step"]
        light_blocks = (1 - size["alpha"]) * heavy_ms / 3 / light_ms  # a third as many blocks take a third of the time
        parts["MDLM's sampler, 4 blocks, 50258 tokens"] = light_blocks, 1 - light_blocks
        parts["MDLM's sampler, 12 blocks, 50258 tokens"] = 1 - size["alpha"], size["alpha"]
        for key, count in (("breakdown_light", 4), ("breakdown", 12)):
            if size.get(key):
                parts[f"engine, {count} blocks, 50258 tokens"] = _blocks(size[key])
    parts |= {f"paper, {d} blocks, 50258 tokens": (paper.BLOCKS[d], paper.OUTPUT_LAYER[d]) for d in (4, 12)}
    bound = family["bound_1_over_alpha"]["heavy"]
    words = f"Smaller blocks alone could make MDLM's sampler at most {bound:.2f} times faster on this family (1/α)"
    if size:
        words += f" and {1 / size['alpha']:.2f} times at the paper's size"
        words += f" ({result['recorded']})" if "recorded" in result else ""
    words += f"; from the paper's profile the bound is {1 / paper.OUTPUT_LAYER[12]:.2f} (it prints 1/(1-α))."
    for where, item in (("this family", family), ("a network of the paper's size", size)):
        if item and item.get("engine_ms_per_row_step"):
            keys = ("reference", "reference_light", "engine", "engine_light")
            a, b, c, d = (item[f"{key}_ms_per_row_step"] for key in keys)
            words += f" On {where} a row and step takes {a:.3g} ms in MDLM's sampler ({b:.3g} light) and {c:.3g} ms in "
            words += f"the engine ({d:.3g} light): light steps save {1 - b / a:.1%} and {1 - d / c:.1%} of the time."
    blocks.append(Text(words))
    caption = "Share of the time in Transformer blocks and in the rest (output layer, draw, host)."
    blocks.append(Figure(draw.time_bars(parts, figures / "time.png"), caption))
    rows = [[name, _percent(a), _percent(b)] for name, (a, b) in parts.items()]
    blocks.append(Table("time", "Beside Section 'Wall-clock vs. FLOPs'", ["", "blocks", "the rest"], rows))
    return blocks


def _blocks(breakdown: Mapping[str, float]) -> tuple[float, float]:
    return breakdown["blocks"], 1 - breakdown["blocks"]


def prefixes(result: Result, figures: Path) -> list[Block]:
    found = result["by_prefix"]
    blocks: list[Block] = [Text(f"Prefixes are {result['source']}. {_about(next(iter(found.values())))}")]
    titles = {f"{k} given tokens": r for k, r in found.items()}
    caption = "As fig:owt_perplexity_barplot_12b4b_prefix128 and _prefix256: conditional perplexity."
    blocks.append(Figure(draw.bars(titles, figures / "prefixes.png"), caption))
    for k, r in found.items():
        key = paper.PREFIX_128 if r["length"] // int(k) == 8 else paper.PREFIX_256
        blocks.append(Text(f"**{k} of {r['length']} given.** {_in_words(r, paper.TABLES[key])}"))
        blocks.append(_seven(f"prefixes-{k}", f"After {k} given tokens, beside {key}", r, paper.TABLES[key]))
    return blocks


def disagreement(result: Result, figures: Path) -> list[Block]:
    return _curves(result, figures, "disagreement", "As fig:loss_diff and fig:kldiv-plot.")


def _curves(result: Result, figures: Path, name: str, caption: str) -> list[Block]:
    words, rows = [], []
    for pair in result["pairs"]:
        relative = pair["peak_t_relative"] is not None
        t, ci = (
            (pair["peak_t_relative"], pair["peak_t_relative_ci"]) if relative else (pair["peak_t"], pair["peak_t_ci"])
        )
        words.append(
            f"{pair['light']}: t = {t:.2f} ({ci[0]:.2f} to {ci[1]:.2f})"
            if not relative or draw.above_twin(pair)
            else f"{pair['light']}: nowhere, it is no further from the heavy model than a second seed"
        )
        for k, at in enumerate(pair["t"]):
            optional = [pair[key][k] if pair[key] else None for key in ("kl_base", "kl_relative")]
            cells = [pair["abs_loss_diff"][k], pair["loss_diff"][k], pair["kl"][k], *optional]
            rows.append([pair["light"], f"{at:.3f}", *("" if v is None else f"{v:.5f}" for v in cells)])
    base = "less the KL between two seeds of the heavy model" if result["pairs"][0]["kl_relative"] else "without a twin"
    where = "held-out text" if result["states"] == "data" else "the heavy model's own trajectories"
    text = f"On {where}, {result['sequences']} rows at each time, {base}. The KL peaks at " + "; ".join(words)
    text += f". Paper: t ≈ {paper.KL_PEAK[0]} to {paper.KL_PEAK[1]}."
    head = [
        "light",
        "t",
        "|loss difference|",
        "loss difference",
        "KL(heavy || light)",
        "KL of two seeds",
        "relative KL",
    ]
    return [
        Text(text),
        Figure(plot_importance(result, figures / f"{name}.png"), caption),
        Table(name, "Disagreement by time, nats", head, rows),
    ]


def second_corpus(result: Result, figures: Path) -> list[Block]:
    found = result["schedules"]
    name = found["family"]["name"] or "second corpus"
    caption = "As fig:lm1b-12b-4b-barplot-perplexity."
    blocks: list[Block] = [Text(f"Family {name}. {_about(found)} {_in_words(found, paper.TABLES[paper.LM1B])}")]
    blocks.append(Figure(draw.bars({name: found}, figures / "second-corpus.png"), caption))
    blocks.append(_seven("second-corpus", f"Beside {paper.LM1B}", found, paper.TABLES[paper.LM1B]))
    return blocks + _curves(result["disagreement"], figures, "second-corpus-kl", "As fig:lm1b-kldiv-plot.")


def precision(result: Result, figures: Path) -> list[Block]:
    rows, mass, words = [], [], []
    for steps, found in result["by_steps"].items():
        for kind, label in (("exact", "exact"), ("published", "MDLM's float32")):
            by = _named(found[kind]["rows"])
            for name in paper.SCHEDULES:
                difference = "" if name == "heavy" else _signed(against(found[kind]["contrasts"], name, "heavy"))
                rows.append([steps, label, name, _ppl(by[name]), f"{by[name]['entropy']:.3f}", difference])
            order = ", ".join(_order(by))
            words.append(f"- T = {steps}, {label}: all-heavy {_ppl(by['heavy'])}; best to worst {order}")
        for name, kept in found["kept_mass"].items():
            cells = [f"{m:.4f} ({low:.4f})" for m, low in zip(kept["mean"], kept["low"], strict=True)]
            mass.append([steps, name, *cells])
    times = [f"t = {t}" for t in next(iter(next(iter(result["by_steps"].values()))["kept_mass"].values()))["t"]]
    head = ["T", "sampler", "schedule", "Gen. PPL (95%)", "entropy", "log-PPL against heavy"]
    about = f"Family {result['family']['name']}, vocabulary {result['vocabulary']}, {result['n']} samples each. MDLM's "
    about += "sampler draws its noise in float32, which cuts rare tokens off; the kept mass is the probability left in "
    about += "play. Same random numbers for all schedules of one sampler."
    caption = "What light steps cost by where they are, in exact sampling and as MDLM draws; right, the kept mass."
    return [
        Text(about),
        Text("\n".join(words)),
        Figure(draw.precision_bars(result["by_steps"], figures / "precision.png"), caption),
        Table("precision", "Seven schedules in both samplers", head, rows),
        Table("kept-mass", "Kept probability mass: mean (5% quantile)", ["T", "model", *times], mass),
    ]


def strides(result: Result, figures: Path) -> list[Block]:
    rows = []
    for row in result["rows"]:
        what = "light model" if row["kind"] == "light" else f"1 of {result['sparse']} steps"
        span = f"{row['from']:.3f} to {row['to']:.3f}"
        rows.append([what, span, _signed((row["loss"], *row["ci"])), _percent(row["flops_saved"])])
    text = (
        f"One of {result['stretches']} stretches of time at a time is run by the light model, or by the heavy one in "
        f"one of {result['sparse']} steps ({result['n']} samples each; stretch 0 is the masked end, "
        f"{result['stretches'] - 1} the text)."
    )
    for kind, what in (("light", "A smaller model"), ("stride", "Larger strides")):
        by_loss = sorted((row for row in result["rows"] if row["kind"] == kind), key=lambda row: row["loss"])
        level = sorted(row["stretch"] for row in by_loss if row["ci"][0] <= 0 <= row["ci"][1])
        worst = by_loss[-1]
        text += f" {what}: most costly in stretch {worst['stretch']}, {_signed((worst['loss'], *worst['ci']))}; "
        text += f"not told apart from all-heavy in {', '.join(map(str, level)) or 'none'}."
    first, last = (
        [_signed((row["loss"], *row["ci"])) for row in result["rows"] if row["stretch"] == j]
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
    head = ["to save", "recommended", "what", "saved", "log-PPL against heavy", "best rival", "against it"]
    head += ["best mixture of the tuner's own", "saved", "its log-PPL against heavy"]
    rows: list[list[str]] = []
    chosen: dict[str, list[str]] = {}
    for goal in result.get("front", []):
        rival, saved = goal.get("best_rival"), _percent(goal["saved_at_least"], 0)
        chosen.setdefault(f"`{goal['schedule']}` ({goal['what']})", []).append(saved)
        cells = [saved, goal["schedule"], goal["what"], _percent(goal["saved"]), _loss(goal["against_heavy"])]
        if rival is None:
            cells += ["", ""]
        elif rival["schedule"] == goal["schedule"]:
            cells += [rival["what"], "the same"]
        else:
            cells += [rival["what"], _loss(rival["against"])]
        fits = [row for row in result["confirmed"] if row["kind"] == "mixed" and row["price"] <= goal["limit"]]
        own = min(fits, key=lambda row: row["against_heavy"]["difference"], default=None)
        rows.append(
            cells
            + (["", "", ""] if own is None else [own["what"], _percent(own["saved"]), _loss(own["against_heavy"])])
        )
    found = "; ".join(f"to save {' or '.join(savings)}, {what}" for what, savings in chosen.items())
    text = f"{result['verdict']} What it recommends: {found}."
    if result.get("front"):
        text += f" Recommendations are chosen on one half of {result['confirmed'][0]['rows']} fresh rows and measured "
        text += "on the other; mixtures of its own and the figure are measured on all."
    caption = "Quality against cost: schedules that the tuner made, and what simpler ways give for the same money."
    return [
        Text(f"{text} {_calls(result['calls'])}"),
        Figure(draw.front(result, figures / "tuner.png"), caption),
        Table("tuner", "What the tuner recommends at each budget", head, rows),
    ]


def training(result: Result, figures: Path) -> list[Block]:
    rows, peaks = [], []
    for stage in result["stages"]:
        pair = stage["pair"]
        t, ci = pair["peak_t"], pair["peak_t_ci"]
        near, far = pair["loss_heavy"][0], pair["loss_heavy"][-1]
        peaks.append(t)
        tokens = "" if stage["tokens"] is None else f"{stage['tokens'] / 1e6:.0f}M"
        cells = [stage["family"], tokens, f"{t:.2f} ({ci[0]:.2f} to {ci[1]:.2f})", f"{near:.3f}", f"{far:.3f}"]
        rows.append([*cells, f"{near / far:.3f}", f"{pair['loss_diff'][0]:+.4f}", f"{max(pair['loss_diff']):+.4f}"])
    moved = "moves up" if peaks[-1] > peaks[0] else "moves down" if peaks[-1] < peaks[0] else "stays"
    text = f"With training the peak of the KL {moved}: t = {', '.join(f'{t:.2f}' for t in peaks)}."
    head = ["family", "tokens", "peak t (95%)", "heavy loss at smallest t", "at t = 1", "ratio", "light's extra there"]
    head += ["most extra"]
    caption = "KL between light and heavy by time, and where it peaks, at several stages of training."
    return [
        Text(text),
        Figure(draw.stages(result, figures / "training.png"), caption),
        Table("training", "Stages of training", head, rows),
    ]


def where_it_peaks(data: Mapping[str, Result]) -> list[Block]:
    """Every family's and every stage's curve by how much the context leaves open near the text; nothing for one."""
    curves = [(result, name) for name in ("disagreement", "second-corpus", "bpe") if (result := data.get(name))]
    pairs = []
    for result, name in curves:
        found = result if name == "disagreement" else result["disagreement"]
        if found["states"] == "data":
            pairs.append((found["family"]["name"] or name, found["pairs"][0]))
    pairs += [(stage["family"], stage["pair"]) for stage in data.get("training", {}).get("stages", [])]
    if len(pairs) < 3:
        return []
    pairs.sort(key=lambda item: left_open(item[1]))
    ratio, peak = np.array([(left_open(pair), pair["peak_t"]) for _, pair in pairs]).T
    flat = ratio.std() == 0 or peak.std() == 0
    ranks = np.nan if flat else float(np.corrcoef(_ranks(ratio), _ranks(peak))[0, 1])
    text = (
        "A reading. Two models agree where there is nothing to know (t = 1: frequencies alone) and where the context "
        "settles the token for both (t → 0, once both have learnt to use it), and differ most in between. How much is "
        "left open near the text is the heavy model's loss at the smallest t over that at t = 1. "
        f"{pairs[0][0]} leaves least open ({ratio[0]:.3f}) and peaks at t = {peak[0]:.2f}, {pairs[-1][0]} most "
        f"({ratio[-1]:.3f}), at t = {peak[-1]:.2f}"
        + (f"; over these {len(pairs)} curves the two have a rank correlation of {ranks:+.2f}." if not flat else ".")
    )
    rows = []
    for name, pair in pairs:
        near, far, (low, high) = pair["loss_heavy"][0], pair["loss_heavy"][-1], pair["peak_t_ci"]
        cells = [name, f"{pair['light']} and {pair['heavy']}", f"{near:.3f}", f"{far:.3f}", f"{near / far:.3f}"]
        rows.append([*cells, f"{pair['peak_t']:.2f} ({low:.2f} to {high:.2f})"])
    head = [
        "family",
        "models",
        f"heavy loss at t = {pairs[0][1]['t'][0]:.2f}",
        "at t = 1",
        "ratio",
        "KL's peak t (95%)",
    ]
    return [Text(text), Table("peaks", "Where the KL of two models peaks, by what is left open", head, rows)]


def left_open(pair: Mapping[str, Any]) -> float:
    return float(pair["loss_heavy"][0] / pair["loss_heavy"][-1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values sharing theirs."""
    return np.array([(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values])


SECTIONS: dict[str, Callable[[Result, Path], list[Block]]] = {
    "schedules": schedules,
    "search": search,
    "depths": depths,
    "shares": shares,
    "time": time,
    "prefixes": prefixes,
    "disagreement": disagreement,
    "second-corpus": second_corpus,
    "bpe": bpe,
    "precision": precision,
    "strides": strides,
    "tuner": tuner,
    "training": training,
}
