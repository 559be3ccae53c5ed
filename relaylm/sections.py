"""One section of the report for each experiment: those about models here, those about schedules in `schedule_sections`.

About models is what does not go by schedule alone: where the time goes, where models disagree, other corpora and
tokens, precision, stages of training. Functions are like those of `schedule_sections`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import paper, schedule_sections
from relaylm import reproduce_figures as draw
from relaylm.claims import early_is_robust
from relaylm.document import Block, Figure, Table, Text
from relaylm.report import plot_importance
from relaylm.reproduce_figures import SAMPLERS, against, difference
from relaylm.schedule_sections import (
    Result,
    about_samples,
    by_name,
    in_words,
    percent,
    ppl_text,
    seven_table,
    signed,
    tables_by_light,
)


def time(result: Result, figures: Path) -> list[Block]:
    blocks: list[Block] = []
    parts: dict[str, tuple[float, float]] = {}
    within: dict[str, Mapping[str, float]] = {}  # what the rest consists of, where it was measured
    family, depth = result["family"], result["depths"]
    for which in ("light", "heavy"):
        share = family["published_blocks"][which]
        parts[f"MDLM's sampler, {depth[which]} blocks, {result['vocabulary']} tokens"] = share, 1 - share
    for key, which in (("breakdown_light", "light"), ("breakdown", "heavy")):
        if family.get(key):
            name = f"engine, {depth[which]} blocks, {result['vocabulary']} tokens"
            parts[name], within[name] = _blocks(family[key]), family[key]
    size = result.get("paper_size")
    if size:
        heavy_ms, light_ms = size["reference_ms_per_row_step"], size["reference_light_ms_per_row_step"]
        light_blocks = (1 - size["alpha"]) * heavy_ms / 3 / light_ms  # a third as many blocks take a third of the time
        parts["MDLM's sampler, 4 blocks, 50258 tokens"] = light_blocks, 1 - light_blocks
        parts["MDLM's sampler, 12 blocks, 50258 tokens"] = 1 - size["alpha"], size["alpha"]
        for key, count in (("breakdown_light", 4), ("breakdown", 12)):
            if size.get(key):
                name = f"engine, {count} blocks, 50258 tokens"
                parts[name], within[name] = _blocks(size[key]), size[key]
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
    if size:
        words += " At the paper's size the 4 blocks of MDLM's sampler are taken to need a third of what its 12 do."
    blocks.append(Text(words))
    caption = "Share of the time in Transformer blocks and in the rest (output layer, draw, host)."
    blocks.append(Figure(draw.time_bars(parts, figures / "time.png"), caption))
    rows = [
        [name, percent(a), percent(b)]
        + [percent(within[name][key]) if name in within else "" for key in ("head", "drawing", "host")]
        for name, (a, b) in parts.items()
    ]
    head = ["", "blocks", "the rest", "of it: output layer", "draw", "host"]
    blocks.append(Table("time", "Beside Section 'Wall-clock vs. FLOPs'", head, rows))
    return blocks


def _blocks(breakdown: Mapping[str, float]) -> tuple[float, float]:
    return breakdown["blocks"], 1 - breakdown["blocks"]


def disagreement(result: Result, figures: Path) -> list[Block]:
    return _curves(result, figures, "disagreement", "As fig:loss_diff and fig:kldiv-plot.")


def _curves(result: Result, figures: Path, name: str, caption: str) -> list[Block]:
    words, rows, peaks = [], [], []
    for pair in result["pairs"]:
        relative = pair["peak_t_relative"] is not None
        t, ci = (
            (pair["peak_t_relative"], pair["peak_t_relative_ci"]) if relative else (pair["peak_t"], pair["peak_t_ci"])
        )
        if not relative or draw.above_twin(pair):
            peaks.append(t)
            words.append(f"{pair['light']}: t = {t:.2f} ({ci[0]:.2f} to {ci[1]:.2f})")
        else:
            words.append(f"{pair['light']}: nowhere, it is no further from the heavy model than a second seed")
        for k, at in enumerate(pair["t"]):
            optional = [pair[key][k] if pair[key] else None for key in ("kl_base", "kl_relative")]
            cells = [pair["abs_loss_diff"][k], pair["loss_diff"][k], pair["kl"][k], *optional]
            rows.append([pair["light"], f"{at:.3f}", *("" if v is None else f"{v:.5f}" for v in cells)])
    base = "less the KL between two seeds of the heavy model" if result["pairs"][0]["kl_relative"] else "without a twin"
    where = "held-out text" if result["states"] == "data" else "the heavy model's own trajectories"
    text = f"On {where}, {result['sequences']} rows at each time, {base}. The KL peaks at " + "; ".join(words)
    inside = sum(paper.KL_PEAK[0] <= t <= paper.KL_PEAK[1] for t in peaks)
    text += f". Paper: t ≈ {paper.KL_PEAK[0]} to {paper.KL_PEAK[1]}"
    text += f"; {inside} of {len(peaks)} {'peak lies' if len(peaks) == 1 else 'peaks lie'} there." if peaks else "."
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
    blocks: list[Block] = [Text(f"Family {name}. {about_samples(found)} {in_words(found, paper.TABLES[paper.LM1B])}")]
    blocks.append(Figure(draw.bars({name: found}, figures / "second-corpus.png"), caption))
    blocks.append(seven_table("second-corpus", f"Beside {paper.LM1B}", found, paper.TABLES[paper.LM1B]))
    return blocks + _curves(result["disagreement"], figures, "second-corpus-kl", "As fig:lm1b-kldiv-plot.")


def bpe(result: Result, figures: Path) -> list[Block]:
    caption = "The same with a large vocabulary. "
    return [
        *tables_by_light(result["schedules"], figures, "bpe", caption),
        *_curves(result["disagreement"], figures, "bpe-kl", "As fig:loss_diff and fig:kldiv-plot."),
    ]


def precision(result: Result, figures: Path) -> list[Block]:
    by_steps, theirs = result["by_steps"], paper.TABLES[paper.OWT]
    rows, mass, words, answers = [], [], [], []
    for steps, found in by_steps.items():
        exact, cut = (by_name(found[kind]["rows"]) for kind in SAMPLERS)
        for name in paper.SCHEDULES:
            cells = [steps, name, ppl_text(exact[name]), ppl_text(cut[name]), _moved(exact[name], cut[name], "log_ppl")]
            cells += [f"{row[name]['entropy']:.3f}" for row in (exact, cut)]
            cells.append(_moved(exact[name], cut[name], "entropy"))
            pairs = [] if name == "heavy" else [found[kind]["contrasts"] for kind in SAMPLERS]
            cells += [signed(against(pair, name, "heavy")) for pair in pairs] or ["", ""]
            rows.append([*cells, f"{_extra(theirs, name):+.4f}" if pairs else ""])
        for name, kept in found["kept_mass"].items():
            cells = [f"{m:.4f} ({low:.4f})" for m, low in zip(kept["mean"], kept["low"], strict=True)]
            mass.append([steps, name, *cells])
        words.append(_what_float32_does(steps, found))
        for kind, label in SAMPLERS.items():
            pairs = found[kind]["contrasts"]
            says = {True: "yes", False: "no", None: "not told"}[early_is_robust(pairs)]
            answers.append(f"{says} at T = {steps}, {label} ({difference(pairs, 'quarter:2', 'quarter:1')[2]} samples)")
    head = ["T", "schedule", "exact PPL (95%)", "MDLM's float32", "log-PPL of float32 against exact"]
    head += ["exact entropy", "float32's", "difference", "log-PPL against heavy, exact", "in float32", "in the paper"]
    times = [f"t = {t}" for t in next(iter(next(iter(by_steps.values()))["kept_mass"].values()))["t"]]
    costs = ", ".join(f"{_extra(theirs, f'quarter:{k}'):+.3f}" for k in (1, 2, 3, 4))
    about = f"Family {result['family']['name']}, vocabulary {result['vocabulary']}, length {result['length']}, "
    exact_n = ", ".join(f"{found['exact']['n']} at T = {steps}" for steps, found in by_steps.items())
    about += f"{result['n']} samples of each schedule from MDLM's sampler, in exact sampling {exact_n}. MDLM's sampler "
    about += "draws its noise in float32, which cuts rare tokens off; the kept mass is the probability left in play. "
    about += "Schedules of one sampler share their random numbers, so what stands against heavy is paired; the two "
    about += "samplers share none."
    apart = [_told_apart(found, name) for found in by_steps.values() for name in paper.MIXED]
    asked = (
        "Do light steps cost more in both middle quarters than in the first? The paper (T = 1000, by MDLM's code, so "
    )
    asked += f"presumably in float32; light steps in quarters 1 to 4 cost {costs} in log-perplexity): yes. Here: "
    caption = "What light steps cost by where they are, in exact sampling and as MDLM draws."
    levels = (
        "Perplexity and entropy in both samplers over the number of steps; right, the mean probability left in play."
    )
    return [
        Text(about),
        Text("\n".join(words)),
        Text(
            f"{asked}{'; '.join(answers)}. Of {len(apart)} costs against heavy (mixed schedules at each T) "
            f"{sum(apart)} differ between the samplers by more than the 95% interval."
        ),
        Figure(draw.precision_bars(by_steps, figures / "precision.png"), caption),
        Figure(draw.precision_levels(by_steps, figures / "precision-levels.png"), levels),
        Table("precision", "Seven schedules in both samplers", head, rows),
        Table("kept-mass", "Kept probability mass: mean (5% quantile)", ["T", "model", *times], mass),
    ]


def _what_float32_does(steps: str, found: Result) -> str:
    """One line for a number of steps: kept mass, all-heavy's perplexity and entropy in both samplers."""
    kept = list(found["kept_mass"].values())[-1]
    exact, cut = (by_name(found[kind]["rows"])["heavy"] for kind in SAMPLERS)
    return (
        f"- T = {steps}: float32 leaves {kept['mean'][0]:.1%} of the probability in play at t = {kept['t'][0]}, "
        f"{kept['mean'][-1]:.1%} at t = {kept['t'][-1]}. All-heavy has perplexity {ppl_text(exact)} in exact sampling "
        f"and {ppl_text(cut)} in float32, {_moved(exact, cut, 'log_ppl')} in log-perplexity "
        f"({cut['gen_ppl'] / exact['gen_ppl'] - 1:+.0%} of perplexity), and entropy {exact['entropy']:.3f} and "
        f"{cut['entropy']:.3f}, {_moved(exact, cut, 'entropy')}"
    )


def _moved(row: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    """The second mean less the first, of independent samples, with its 95% interval."""
    ends = [*row[f"{key}_ci"], *other[f"{key}_ci"]]
    half = np.nan if None in ends else np.hypot(ends[1] - ends[0], ends[3] - ends[2]) / 2
    value = other[key] - row[key]
    return signed((value, value - half, value + half))


def _told_apart(found: Result, name: str) -> bool:
    """Do the two samplers differ in what a schedule costs against all-heavy?"""
    (a, low, _), (b, floor, _) = (against(found[kind]["contrasts"], name, "heavy") for kind in SAMPLERS)
    return bool(abs(a - b) > np.hypot(a - low, b - floor))


def _extra(table: Mapping[str, paper.Row], name: str) -> float:
    """Log-perplexity above all-heavy in a table of the paper."""
    return float(np.log1p(paper.degradation(table, name)))


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
    "schedules": schedule_sections.schedules,
    "search": schedule_sections.search,
    "depths": schedule_sections.depths,
    "shares": schedule_sections.shares,
    "time": time,
    "prefixes": schedule_sections.prefixes,
    "disagreement": disagreement,
    "second-corpus": second_corpus,
    "bpe": bpe,
    "precision": precision,
    "strides": schedule_sections.strides,
    "tuner": schedule_sections.tuner,
    "training": training,
}
