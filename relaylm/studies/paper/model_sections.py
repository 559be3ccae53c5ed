"""Sections of the report about models: where the time goes, where models disagree, other corpora and tokens, precision,
stages of training. The functions are like those of `schedule_sections`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy import stats

from relaylm.show.figures import plot_importance
from relaylm.studies.paper import figures as draw
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.claims import above_twin, curves, early_is_robust, peak
from relaylm.studies.paper.contrasts import SAMPLERS, against, difference, signed
from relaylm.studies.paper.document import Block, Figure, Table
from relaylm.studies.paper.schedule_sections import (
    Result,
    Row,
    about_samples,
    by_name,
    in_words,
    percent,
    ppl_text,
    schedules,
    search,
    seven_table,
    share_table,
    tuned_table,
)

CURVES = "KL and loss difference between light and heavy models by time, as in the paper's Figures 4 and 5."


def time(result: Result, figures: Path) -> list[Block]:
    """Blocks and the rest of the time in both samplers, here and in the paper."""
    family, size, depth = result["family"], result.get("paper_size"), result["depths"]
    parts: dict[str, Row] = {}  # shares of the time by part, where they were measured; else of blocks alone
    measured = [(family, result["vocabulary"], depth["light"], depth["heavy"], family["published_blocks"])]
    if size:
        heavy_ms, light_ms = size["reference_ms_per_row_step"], size["reference_light_ms_per_row_step"]
        light = (1 - size["alpha"]) * heavy_ms / 3 / light_ms  # a third as many blocks take a third of the time
        measured.append((size, 50258, 4, 12, {"light": light, "heavy": 1 - size["alpha"]}))
    for found, vocabulary, few, many, published in measured:
        for which, blocks in (("light", few), ("heavy", many)):
            parts[f"MDLM's sampler, {blocks} blocks, {vocabulary} tokens"] = {"blocks": published[which]}
        for key, blocks in (("breakdown_light", few), ("breakdown", many)):
            if found.get(key):
                parts[f"engine, {blocks} blocks, {vocabulary} tokens"] = found[key]
    shares = {name: (part["blocks"], 1 - part["blocks"]) for name, part in parts.items()}
    shares |= {f"paper, {d} blocks, 50258 tokens": (paper.BLOCKS[d], paper.OUTPUT_LAYER[d]) for d in (4, 12)}
    rows = []
    for name, (blocks, rest) in shares.items():
        cells = {"": name, "blocks": percent(blocks), "the rest": percent(rest)}
        within = [percent(parts.get(name, {}).get(key)) for key in ("head", "drawing", "host")]
        rows.append(cells | dict(zip(("of it: output layer", "draw", "host"), within, strict=True)))
    caption = "Share of the time in Transformer blocks and in the rest (output layer, draw, host)."
    return [
        _time_in_words(result, family, size),
        Figure(draw.time_bars(shares, figures / "time.png"), caption),
        Table.of("time", "Shares of the time, beside the paper's section on wall-clock and FLOPs", rows),
    ]


def _time_in_words(result: Result, family: Row, size: Row | None) -> str:
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
    return words


def disagreement(result: Result, figures: Path, name: str = "disagreement", caption: str = CURVES) -> list[Block]:
    """Loss difference and KL by timestep."""
    words, rows, peaks = [], [], []
    for pair in result["pairs"]:
        t, low, high, relative = peak(pair)
        if not relative or above_twin(pair):
            peaks.append(t)
            words.append(f"{pair['light']}: t = {t:.2f} ({low:.2f} to {high:.2f})")
        else:
            words.append(f"{pair['light']}: nowhere, it is no further from the heavy model than a second seed")
        columns = {"|loss difference|": "abs_loss_diff", "loss difference": "loss_diff", "KL(heavy || light)": "kl"}
        columns |= {"KL of two seeds": "kl_base", "relative KL": "kl_relative"}
        columns |= {f"KL of two seeds of {pair['light']}": "kl_light_base"} if pair.get("kl_light_base") else {}
        for k, at in enumerate(pair["t"]):
            values = {title: f"{pair[key][k]:.5f}" if pair[key] else "" for title, key in columns.items()}
            rows.append({"light": pair["light"], "t": f"{at:.3f}", **values})
    first = result["pairs"][0]
    twin = first["kl_relative"]
    base = "less the KL between two seeds of the heavy model" if twin else "without a twin of the heavy model"
    if seeds := first.get("kl_light_base"):
        kl, most = max(zip(first["kl"], seeds, strict=True))
        base += f"; where {first['light']} is furthest from {first['heavy']}, by {kl:.3f} nats, "
        base += f"two seeds of it differ by {most:.3f}"
    where = "held-out text" if result["states"] == "data" else "the heavy model's own trajectories"
    text = f"On {where}, {result['sequences']} rows at each time, {base}. The KL peaks at " + "; ".join(words)
    inside = sum(paper.KL_PEAK[0] <= t <= paper.KL_PEAK[1] for t in peaks)
    text += f". Paper: t ≈ {paper.KL_PEAK[0]} to {paper.KL_PEAK[1]}"
    text += f"; {inside} of {len(peaks)} {'peak lies' if len(peaks) == 1 else 'peaks lie'} there." if peaks else "."
    drawn = Figure(plot_importance(result, figures / f"{name}.png"), caption)
    return [text, drawn, Table.of(name, "Disagreement by time, nats", rows)]


def second_corpus(result: Result, figures: Path) -> list[Block]:
    """Schedules and KL on another corpus."""
    found, label = result["schedules"], paper.LM1B
    name = found["family"]["name"] or "second corpus"
    bars = "Perplexity of the seven schedules on the second corpus, as in the paper's Figure 11."
    kl = "KL and loss difference by time on the second corpus, as in the paper's Figure 12."
    beside = f"Seven schedules on the second corpus, beside the paper's {label}"
    return [
        f"Family {name}. {about_samples(found)} {in_words(found, label)}",
        Figure(draw.bars({name: found}, figures / "second-corpus.png"), bars),
        seven_table("second-corpus", beside, found, label),
        *disagreement(result["disagreement"], figures, "second-corpus-kl", kl),
    ]


def bpe(result: Result, figures: Path) -> list[Block]:
    """Schedules, KL, shares and searches on tokens, as far as they are there."""
    return [
        *schedules(result["schedules"], figures, "bpe", "The same with a large vocabulary."),
        *disagreement(result["disagreement"], figures, "bpe-kl"),
        *(share_table(result["shares"], "bpe-shares") if "shares" in result else []),
        *(search(result["search"], figures, "bpe-search") if "search" in result else []),
        *(tuned_table(result["tuner"], "bpe-tuner") if "tuner" in result else []),
    ]


def precision(result: Result, figures: Path) -> list[Block]:
    """Exact samples beside those of MDLM's float32 sampler."""
    by_steps = result["by_steps"]
    exact_n = ", ".join(f"{found['exact']['n']} at T = {steps}" for steps, found in by_steps.items())
    about = (
        f"Family {result['family']['name']}, vocabulary {result['vocabulary']}, length {result['length']}, "
        f"{result['n']} samples of each schedule from MDLM's sampler, in exact sampling {exact_n}. MDLM's sampler "
        "draws its noise in float32, which cuts rare tokens off; the kept mass is the probability left in play. "
        "Schedules of one sampler share their random numbers, so what stands against heavy is paired; the two "
        "samplers share none."
    )
    bars = "What light steps cost by where they are, in exact sampling and as MDLM draws."
    levels = "Perplexity and entropy in both samplers over the number of steps; right, the mean probability left in "
    levels += "play."
    mass = [
        {"T": steps, "model": name}
        | {f"t = {t}": f"{m:.4f} ({low:.4f})" for t, m, low in zip(kept["t"], kept["mean"], kept["low"], strict=True)}
        for steps, found in by_steps.items()
        for name, kept in found["kept_mass"].items()
    ]
    return [
        about,
        "\n".join(_what_float32_does(steps, found) for steps, found in by_steps.items()),
        _early_steps_in_words(by_steps),
        Figure(draw.precision_bars(by_steps, figures / "precision.png"), bars),
        Figure(draw.precision_levels(by_steps, figures / "precision-levels.png"), levels),
        Table.of("precision", "Seven schedules in both samplers", _precision_rows(by_steps)),
        Table.of("kept-mass", "Kept probability mass: mean (5% quantile)", mass),
    ]


def _precision_rows(by_steps: Result) -> list[dict[str, str]]:
    rows = []
    for steps, found in by_steps.items():
        both = [by_name(found[kind]["rows"]) for kind in SAMPLERS]
        for name in paper.SCHEDULES:
            exact, cut = (by[name] for by in both)
            losses = [signed(against(found[kind]["contrasts"], name, "heavy")) for kind in SAMPLERS]
            losses = ["", "", ""] if name == "heavy" else [*losses, f"{paper.extra(name):+.4f}"]
            cells = {"T": steps, "schedule": name, "exact PPL (95%)": ppl_text(exact), "MDLM's float32": ppl_text(cut)}
            cells |= {"log-PPL of float32 against exact": _moved(exact, cut, "log_ppl")}
            cells |= {"exact entropy": f"{exact['entropy']:.3f}", "float32's": f"{cut['entropy']:.3f}"}
            cells |= {"difference": _moved(exact, cut, "entropy"), "log-PPL against heavy, exact": losses[0]}
            rows.append(cells | {"in float32": losses[1], "in the paper": losses[2]})
    return rows


def _early_steps_in_words(by_steps: Result) -> str:
    answers = []
    for steps, found in by_steps.items():
        for kind, label in SAMPLERS.items():
            pairs = found[kind]["contrasts"]
            says = {True: "yes", False: "no", None: "open"}[early_is_robust(pairs)]
            answers.append(f"{says} at T = {steps}, {label} ({difference(pairs, 'quarter:2', 'quarter:1')[2]} samples)")
    costs = ", ".join(f"{paper.extra(f'quarter:{k}'):+.3f}" for k in (1, 2, 3, 4))
    apart = [_differ(found, name) for found in by_steps.values() for name in paper.MIXED]
    return (
        "Do light steps cost more in both middle quarters than in the first? The paper (T = 1000, by MDLM's code, so "
        f"presumably in float32; light steps in quarters 1 to 4 cost {costs} in log-perplexity): yes. Here: "
        f"{'; '.join(answers)}. Of {len(apart)} costs against heavy (mixed schedules at each T) {sum(apart)} differ "
        "between the samplers by more than the 95% interval."
    )


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


def _moved(row: Row, other: Row, key: str) -> str:
    """The second mean less the first, of independent samples, with its 95% interval."""
    ends = [*row[f"{key}_ci"], *other[f"{key}_ci"]]
    half = np.nan if None in ends else np.hypot(ends[1] - ends[0], ends[3] - ends[2]) / 2
    value = other[key] - row[key]
    return signed((value, value - half, value + half))


def _differ(found: Result, name: str) -> bool:
    """Do the two samplers differ in what a schedule costs against all-heavy?"""
    (a, low, _), (b, floor, _) = (against(found[kind]["contrasts"], name, "heavy") for kind in SAMPLERS)
    return bool(abs(a - b) > np.hypot(a - low, b - floor))


def _peak_cells(pair: Row) -> dict[str, str]:
    """The heavy model's loss near the text and at t = 1, and where the KL peaks."""
    near, far, (low, high) = pair["loss_heavy"][0], pair["loss_heavy"][-1], pair["peak_t_ci"]
    return {
        "near": f"{near:.3f}",
        "at t = 1": f"{far:.3f}",
        "ratio": f"{near / far:.3f}",
        "peak": f"{pair['peak_t']:.2f} ({low:.2f} to {high:.2f})",
    }


def training(result: Result, figures: Path) -> list[Block]:
    """KL at several stages of training."""
    rows, peaks = [], [stage["pair"]["peak_t"] for stage in result["stages"]]
    for stage in result["stages"]:
        pair, shown = stage["pair"], _peak_cells(stage["pair"])
        tokens = "" if stage["tokens"] is None else f"{stage['tokens'] / 1e6:.0f}M"
        cells = {"family": stage["family"], "tokens": tokens, "peak t (95%)": shown["peak"]}
        cells |= {"heavy loss at smallest t": shown["near"], "at t = 1": shown["at t = 1"], "ratio": shown["ratio"]}
        extra = {"light's extra there": pair["loss_diff"][0], "most extra": max(pair["loss_diff"])}
        rows.append(cells | {title: f"{value:+.4f}" for title, value in extra.items()})
    moved = "moves up" if peaks[-1] > peaks[0] else "moves down" if peaks[-1] < peaks[0] else "stays"
    caption = "KL between light and heavy by time, and where it peaks, at several stages of training."
    return [
        f"With training the peak of the KL {moved}: t = {', '.join(f'{t:.2f}' for t in peaks)}.",
        Figure(draw.stages(result, figures / "training.png"), caption),
        Table.of("training", "Stages of training", rows),
    ]


def where_it_peaks(data: Mapping[str, Result]) -> list[Block]:
    """Every family's and every stage's curve by how much the context leaves open near the text; nothing for fewer than
    three curves."""
    found = {name: curve for name, curve in curves(data).items() if curve["states"] == "data"}
    pairs = [(curve["family"]["name"] or name, curve["pairs"][0]) for name, curve in found.items()]
    pairs += [(stage["family"], stage["pair"]) for stage in data.get("training", {}).get("stages", [])]
    if len(pairs) < 3:
        return []
    pairs.sort(key=lambda item: left_open(item[1]))
    ratio, peak = np.array([(left_open(pair), pair["peak_t"]) for _, pair in pairs]).T
    flat = ratio.std() == 0 or peak.std() == 0
    ranks = np.nan if flat else float(stats.spearmanr(ratio, peak)[0])
    text = (
        "A reading. Two models agree where there is nothing to know (t = 1: frequencies alone) and where the context "
        "settles the token for both (t → 0, once both have learnt to use it), and differ most in between. How much is "
        "left open near the text is the heavy model's loss at the smallest t over that at t = 1. "
        f"{pairs[0][0]} leaves least open ({ratio[0]:.3f}) and peaks at t = {peak[0]:.2f}, {pairs[-1][0]} most "
        f"({ratio[-1]:.3f}), at t = {peak[-1]:.2f}"
        + ("." if flat else f"; over these {len(pairs)} curves the two have a rank correlation of {ranks:+.2f}.")
    )
    titles = {"near": f"heavy loss at t = {pairs[0][1]['t'][0]:.2f}", "peak": "KL's peak t (95%)"}
    rows = [
        {"family": name, "models": f"{pair['light']} and {pair['heavy']}"}
        | {titles.get(key, key): cell for key, cell in _peak_cells(pair).items()}
        for name, pair in pairs
    ]
    return [text, Table.of("peaks", "Where the KL of two models peaks, by what is left open", rows)]


def left_open(pair: Row) -> float:
    """The heavy model's loss near the text over that at t = 1."""
    return float(pair["loss_heavy"][0] / pair["loss_heavy"][-1])
