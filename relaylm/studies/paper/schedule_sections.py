"""Sections of the report about schedules: the seven by hand, all 210, depths and shares, prefixes, strides, the tuner.

Each function takes an experiment's result (plain JSON, perhaps of a run years ago) and a folder for its figures, and
returns blocks of a `document`: the paper's numbers, ours, the difference in words, tables, figures. Nothing is computed
here but what is shown. The sections about models are in `model_sections`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.show.search import plot_search
from relaylm.studies.paper import figures as draw
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.claims import rivals_by_budget
from relaylm.studies.paper.contrasts import against, signed
from relaylm.studies.paper.document import Block, Figure, Table
from relaylm.studies.paper.mdlm_experiments import PUBLISHED_ROWS

Result = Mapping[str, Any]
Row = Mapping[str, Any]
SECONDS = ("engine_seconds", "published_seconds")


def ppl_text(row: Row) -> str:
    """Perplexity and half of its interval."""
    low, high = row["gen_ppl_ci"]
    return f"{row['gen_ppl']:.3f}" + ("" if low is None or high is None else f" ± {(high - low) / 2:.3f}")


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent; nothing for None."""
    return "" if value is None else f"{value:.{digits}%}"


def entropy_text(row: Row, key: str = "entropy") -> str:
    """Entropy in nats; nothing where there is none."""
    return "" if row.get(key) is None else f"{row[key]:.3f}"


def by_name(rows: Sequence[Row]) -> dict[str, Row]:
    """Rows of a comparison by schedule."""
    return {row["schedule"]: row for row in rows}


def about_samples(result: Result) -> str:
    """How many samples there are, of what."""
    steps, length = result["steps"], result["length"]
    return f"{result['n']} samples of each schedule, length {length}, T = {steps}, judge {result['judge']}."


def _calls(spent: Row) -> str:
    made, naive = spent["calls_made"], spent["calls_naive"]
    return f"Shared beginnings: {made:,} row-calls where independent runs make {naive:,} ({made / naive:.1%})."


def _contests(result: Result) -> list[Row]:
    return [item for item in result.get("rivals", []) if item["schedule"] == "sandwich"]


def seven_table(name: str, caption: str, result: Result, label: str | None = None) -> Table:
    """The seven schedules and their rivals, beside the paper's table of this label."""
    by, theirs, pairs = by_name(result["rows"]), paper.TABLES[label] if label else {}, result["contrasts"]
    contests = {item["rival"]: signed((item["difference"], *item["ci"])) for item in _contests(result)}
    rivals = {row["schedule"]: row["rival"] for row in result["rows"] if row.get("kind") == "rival"}
    rows = []
    for n in [*(n for n in paper.SCHEDULES if n in by), *rivals]:
        row, their = by[n], theirs.get(n)
        loss = "" if n == "heavy" or n in rivals else signed(against(pairs, n, "heavy"))
        loss = f"against the sandwich {contests[n]}" if n in rivals and n in contests else loss
        cells = {"schedule": n + (f" (rival: {rivals[n]})" if n in rivals else ""), "Gen. PPL (95%)": ppl_text(row)}
        cells |= {"entropy": entropy_text(row), "word entropy": entropy_text(row, "word_entropy")}
        cells |= {"gap paid": percent(row.get("gap_paid")), "log-PPL against heavy": loss}
        cells |= {"FLOPs saved": percent(row["flops_saved"]), "paper's label": "", "paper's PPL": ""}
        cells |= {"paper's entropy": "", "gap paid there": ""}
        if label and their:
            cells |= {"paper's label": " → ".join(draw.segments(n, paper.STEPS[label]))}
            cells |= {"paper's PPL": f"{their.ppl} ± {their.half}", "paper's entropy": f"{their.entropy:.2f}"}
            cells |= {"gap paid there": percent(paper.gap_paid(theirs, n), 0)}
        rows.append(cells)
    return Table.of(name, caption, rows)


def in_words(result: Result, label: str | None = None, depth: int | None = None) -> str:
    """Our order of the mixed schedules against that of the paper's table of this label, and what the sandwich pays.
    Where the paper prints no such table, it still says what the sandwich costs with a light model of this `depth`."""
    by, theirs = by_name(result["rows"]), paper.TABLES.get(label or "")
    ours = sorted((name for name in paper.MIXED if name in by), key=lambda name: by[name]["gen_ppl"])
    same = ""
    if theirs:
        agrees = all(theirs[a].ppl <= theirs[b].ppl for a, b in pairwise(ours))
        same = "; the same order as in the paper" if agrees else f"; not the paper's order ({paper.order_text(theirs)})"
    value, low, high = np.expm1(against(result["contrasts"], "sandwich", "heavy"))
    other = next(name for name in ours if name != "sandwich")
    apart = against(result["contrasts"], "sandwich", other)
    level = "" if apart[1] > 0 or apart[2] < 0 else ", not significant"
    text = f"Best to worst here: {', '.join(ours)}{same}. The sandwich against {other}: {signed(apart)}{level}. "
    text += f"The sandwich costs {value:+.1%} ({low:+.1%} to {high:+.1%}) in perplexity"
    if (paid := by["sandwich"].get("gap_paid")) is not None:
        text += f" and pays {paid:.0%} of the gap"
    if theirs:
        text += f" (paper: {paper.degradation(theirs):+.1%}, {paper.gap_paid(theirs, 'sandwich'):.0%} of the gap)"
    elif depth in paper.DEPTHS:
        text += f" (paper: {paper.DEPTHS[depth][3] / 100:+.1%})"
    text += "."
    if contests := _contests(result):
        best = min(contests, key=lambda item: item["difference"])
        loss, outcome = signed((best["difference"], *best["ci"])), best["outcome"]
        text += f" Its best rival is {best['rival']} ({best['what']}), {loss} against it, which "
        text += f"{'is level' if outcome == 'level' else outcome} "
        text += f"(p = {best['p_holm']:.2g}, corrected for {len(result['rivals'])} contests)."
    return text + (f" {result['verdict']}" if result.get("rivals") else "")


# ------------------------------------------------------------------------------------------------ sections


SEVEN = "Perplexity of the seven schedules with each light model, as in the paper's Figures 1, 7, 8 and 9."


def schedules(result: Result, figures: Path, name: str = "schedules", caption: str = SEVEN) -> list[Block]:
    """The seven schedules with each light model, the first beside the paper's table."""
    by_light = result["by_light"]
    titles = {f"light {light}, heavy {result['heavy']}, 25% light steps": r for light, r in by_light.items()}
    caption += (
        " Bars with 95% intervals, of single schedules, not of differences; light schedule dotted, sandwich hatched, "
        "equal-compute rivals crossed."
    )
    blocks: list[Block] = [
        about_samples(next(iter(by_light.values()))),
        Figure(draw.bars(titles, figures / f"{name}.png"), caption),
    ]
    for k, (light, found) in enumerate(by_light.items()):
        depth, label = result["depths"][light], paper.OWT if k == 0 else None
        beside = f", beside the paper's {label}" if label else ""
        blocks.append(f"**Light model {light}, {depth} deep.** {in_words(found, label, depth)}")
        blocks.append(seven_table(f"{name}-{light}", f"Seven schedules with light {light}{beside}", found, label))
    return blocks


def search(result: Result, figures: Path, name: str = "search") -> list[Block]:
    """All 210 placements of light segments."""
    light = next(iter(result["influence"]))
    influence, ci, top, bottom = (
        result[key][light] for key in ("influence", "influence_ci", "top_frequency", "bottom_frequency")
    )
    order = sorted(range(10), key=lambda j: influence[j])
    text = (
        f"All {result['schedules_tried']} ways to make four of ten segments light, {result['n']} samples of each "
        f"on the same random numbers. {result['verdict']} Paper: {paper.SEARCH}. Here the "
        f"safest segments to make light are {', '.join(map(str, order[:3]))}, the most harmful "
        f"{', '.join(map(str, order[:-4:-1]))} (0 is the fully masked end). {_calls(result['search_calls'])}"
    )
    caption = (
        "The best and the worst placements by mean log-perplexity, how often each segment is light among the 20 best "
        "and worst, and the influence of each segment with 95% bootstrap intervals (positive is harmful), as in the "
        "paper's Figures 2, 3, 10 and 6."
    )
    segments = [
        {"segment": str(j), "light in top 20": f"{20 * top[j]:.0f}", "light in bottom 20": f"{20 * bottom[j]:.0f}"}
        | {"influence I(j)": f"{influence[j]:+.4f}", "95%": f"{ci[j][0]:+.4f} to {ci[j][1]:+.4f}"}
        for j in range(10)
    ]
    extremes = [
        {"": kind, "segments": row["name"], "log-PPL": f"{row['log_ppl']:.4f}", "Gen. PPL": f"{row['ppl']:.4f}"}
        for kind, part in (("best", "top"), ("worst", "bottom"))
        for row in result[part]
    ]
    return [
        text,
        Figure(plot_search(result, figures / f"{name}.png"), caption),
        Table.of(f"{name}-segments", "Segments", segments),
        Table.of(f"{name}-extremes", "Five best and worst by log-perplexity (1: light)", extremes),
    ]


def depths(result: Result, figures: Path) -> list[Block]:
    """The sandwich with light models of several depths."""
    *lights, heavy = rows = sorted(result["rows"], key=lambda row: row["depth"])
    table, drops = [], []
    for row in rows:
        ppl, half, saved, drop = (f"{v}" for v in paper.DEPTHS.get(row["depth"], [""] * 4))
        drops.append(row["gen_ppl"] / heavy["gen_ppl"] - 1)
        paired = "" if row is heavy else signed(against(result["contrasts"], row["schedule"], heavy["schedule"]))
        cells = {"light model": row["light"], "Gen. PPL (95%)": ppl_text(row), "PPL drop": percent(drops[-1], 2)}
        cells |= {"log-PPL against heavy (paired)": paired, "blocks saved": percent(row["blocks_saved"], 2)}
        cells |= {"FLOPs saved": percent(row["flops_saved"], 2), "paper's PPL": ppl and f"{ppl} ± {half}"}
        table.append(
            cells | {"paper's drop": drop and f"{float(drop):.2f}%", "paper's saved FLOPs": saved and f"{saved}%"}
        )
    there = ", ".join(f"{paper.DEPTHS[row['depth']][3] / 100:+.1%}" for row in lights if row["depth"] in paper.DEPTHS)
    words = f"The sandwich costs {', '.join(f'{drop:+.1%}' for drop in drops[:-1])} of perplexity with "
    words += f"{', '.join(str(row['depth']) for row in lights)} light blocks" + (
        f" (paper: {there})." if there else "."
    )
    caption = "Perplexity above all-heavy by the light model's depth, with 95% intervals, as in the paper's Table 1."
    return [
        f"{about_samples(result)} {words}",
        Figure(draw.depth_curve(rows, result["contrasts"], figures / "depths.png"), caption),
        Table.of("depths", "The light model's depth, beside the paper's Table 1", table),
    ]


def shares(result: Result, figures: Path) -> list[Block]:
    """More and more light steps: quality, and time in both samplers."""
    by, shares, table = by_name(result["rows"]), result["shares"], []
    mean = {key: {s: float(np.mean(result[key][str(s)])) for s in shares} for key in SECONDS}
    saved = {key: {s: 1 - mean[key][s] / mean[key][shares[0]] for s in shares} for key in SECONDS}
    engine, published = SECONDS
    for share, cells in zip(shares, _share_rows(result), strict=True):
        seconds, speedup = (f"{v}" for v in paper.SHARES.get(share, [""] * 4)[2:])
        times = {"engine, s": f"{mean[engine][share]:.2f}", "time saved": percent(saved[engine][share])}
        times |= {"MDLM's sampler, s": f"{mean[published][share]:.2f}"}
        times |= {"time saved there": percent(saved[published][share])}
        printed = {key: cells.pop(key) for key in list(cells) if key.startswith("paper's")}
        printed |= {"paper's s": seconds, "paper's speedup": speedup and f"{speedup}%"}
        table.append(cells | times | printed)
    ours, theirs = (f"{saved[key][shares[-1]]:.1%}" for key in SECONDS)
    words = f"All-light saves {ours} of the engine's time and {theirs} of MDLM's sampler's, on this vocabulary; the "
    words += f"paper's column says {paper.SHARES[100][3]}% (its output layer has 50,258 columns). "
    words += f"Wall-clock on {result['timed_rows']} rows, up the shares and down again"
    if result["timed_rows"] > PUBLISHED_ROWS:
        words += f"; MDLM's sampler on {PUBLISHED_ROWS}, counted for as many"
    ours, theirs = (f"{max(max(s) / min(s) - 1 for s in result[key].values()):.0%}" for key in SECONDS)
    words += f". Two passes of a share differ by up to {ours} in the engine and by {theirs} in MDLM's sampler."
    half = min(shares, key=lambda share: abs(share - 50))
    paid = by[result["labels"][shares.index(half)]].get("gap_paid")
    if half in paper.SHARES and paid is not None:
        words += f" At {half}% light steps {paid:.0%} of the quality gap is paid (paper: {paper.share_paid(half):.0%})."
    caption = "Share of the quality gap paid, and time saved, over the share of light steps, as in the paper's Table 2."
    return [
        f"{about_samples(result)} {words}",
        Figure(draw.share_curves(result, by, figures / "shares.png"), caption),
        Table.of("shares", "The share of light steps, beside the paper's Table 2", table),
    ]


def share_table(result: Result, name: str) -> list[Block]:
    """The quality alone."""
    caption = "The share of light steps, beside the paper's Table 2"
    return [about_samples(result), Table.of(name, caption, _share_rows(result))]


def _share_rows(result: Result) -> list[dict[str, str]]:
    by, rows = by_name(result["rows"]), []
    for share, label in zip(result["shares"], result["labels"], strict=True):
        row, (ppl, flops) = by[label], (f"{v}" for v in paper.SHARES.get(share, [""] * 4)[:2])
        cells = {"% light steps": str(share), "Gen. PPL (95%)": ppl_text(row), "entropy": entropy_text(row)}
        cells |= {"gap paid": percent(row.get("gap_paid")), "blocks saved": percent(row["blocks_saved"])}
        cells |= {"FLOPs saved": percent(row["flops_saved"]), "paper's PPL": ppl}
        rows.append({**cells, "paper's FLOPs": flops and f"{flops}%"})
    return rows


def prefixes(result: Result, figures: Path) -> list[Block]:
    """The seven schedules after prefixes."""
    found = result["by_prefix"]
    titles = {f"{k} given tokens": r for k, r in found.items()}
    caption = "Conditional perplexity after a prefix, as in the paper's Figures 13 and 14."
    blocks: list[Block] = [
        f"Prefixes are {result['source']}. {about_samples(next(iter(found.values())))}",
        Figure(draw.bars(titles, figures / "prefixes.png"), caption),
    ]
    for k, r in found.items():
        label = paper.PREFIX_128 if r["length"] // int(k) == 8 else paper.PREFIX_256
        blocks.append(f"**{k} of {r['length']} given.** {in_words(r, label)}")
        blocks.append(seven_table(f"prefixes-{k}", f"After {k} given tokens, beside the paper's {label}", r, label))
    return blocks


def strides(result: Result, figures: Path) -> list[Block]:
    """A smaller model, or larger strides, in one stretch of time."""
    rows, last = {(row["kind"], row["stretch"]): row for row in result["rows"]}, result["stretches"] - 1
    loss = {key: signed((row["loss"], *row["ci"])) for key, row in rows.items()}
    free = {key: row["ci"][0] <= 0 <= row["ci"][1] for key, row in rows.items()}
    text = (
        f"One of {result['stretches']} stretches of time at a time is run by the light model, or by the heavy one in "
        f"one of {result['sparse']} steps ({result['n']} samples each; stretch 0 is the masked end, {last} the text)."
    )
    for kind, what in (("light", "A smaller model"), ("stride", "Larger strides")):
        mine = [key for key in rows if key[0] == kind]
        worst = max(mine, key=lambda key: rows[key]["loss"])
        level = ", ".join(str(j) for j in sorted(key[1] for key in mine if free[key]))
        text += f" {what}: most costly in stretch {worst[1]}, {loss[worst]}; "
        text += f"no significant loss in {level or 'none'}."
    text += f" At the masked end the light model costs {loss['light', 0]} and larger strides {loss['stride', 0]}; at "
    text += f"the text {loss['light', last]} and {loss['stride', last]}."
    if [free[kind, j] for j in (0, last) for kind in ("light", "stride")] == [True, False, False, True]:
        text += " So the first steps take a smaller model but not larger strides, and the last ones the reverse."
    table = []
    for key, row in rows.items():
        cells = {"there": "light model" if key[0] == "light" else f"1 of {result['sparse']} steps"}
        cells |= {"t": f"{row['from']:.3f} to {row['to']:.3f}", "log-PPL against heavy": loss[key]}
        table.append(cells | {"FLOPs saved": percent(row["flops_saved"])})
    caption = "Which steps tolerate a smaller model, and which a larger stride."
    return [
        text,
        Figure(draw.stretches(result, figures / "strides.png"), caption),
        Table.of("strides", "One stretch at a time", table),
    ]


def spaced(result: Result, figures: Path) -> list[Block]:
    """The seven schedules, and the light model in one stretch of time, on spaced plans."""
    blocks: list[Block] = []
    for found in result["families"]:
        name, pairs = found["family"] or "family", found["contrasts"]
        text = f"**{name}, `{found['spacing']}`**, about {found['calls']:.0f} calls a row, light {found['light']}, "
        text += f"heavy {found['heavy']}: {found['n']} samples of each schedule, length {found['length']}, judge "
        text += f"{found['judge']}. Calls take the model of the masked share they begin with. "
        sandwich = signed(against(pairs, "sandwich", "heavy"))
        best = min(paper.MIXED, key=lambda other: against(pairs, other, "heavy")[0])
        text += f"Best with 25% light: {best}, {signed(against(pairs, best, 'heavy'))}; the sandwich {sandwich}."
        for key, what in (("middle_minus_ends", "quarters"), ("stretches_middle_minus_ends", "eighths")):
            if None not in (item := found[key])["ci"]:
                text += f" Light {what} in the middle against those at the ends: "
                text += f"{signed((item['difference'], *item['ci']))}."
        bare = {**found, "rows": [{k: v for k, v in row.items() if k != "gap_paid"} for row in found["rows"]]}
        table = [
            {"t": f"{row['from']:.3f} to {row['to']:.3f}", "FLOPs saved": percent(row["flops_saved"])}
            | {"log-PPL against heavy": signed([np.nan if v is None else v for v in (row["loss"], *row["ci"])])}
            for row in found["by_stretch"]
        ]
        drawn = draw.stretches({**found, "rows": found["by_stretch"]}, figures / f"spaced-{name}.png")
        blocks += [
            text,
            Figure(drawn, f"What the light model costs in each stretch of time, {name} on spaced plans."),
            seven_table(f"spaced-{name}", f"Seven schedules on `{found['spacing']}`, {name}", bare),
            Table.of(f"spaced-stretches-{name}", f"The light model in one stretch of time, {name}", table),
        ]
    return sorted(blocks, key=lambda block: (not isinstance(block, str), not isinstance(block, Figure)))


def tuner(result: Result, figures: Path) -> list[Block]:
    """What the tuner recommends, and what is best on fresh rows."""
    chosen: dict[str, list[str]] = {}
    for goal in result.get("front", []):
        chosen.setdefault(f"`{goal['schedule']}` ({goal['what']})", []).append(percent(goal["saved_at_least"], 0))
    found = "; ".join(f"to save {' or '.join(savings)}, {what}" for what, savings in chosen.items())
    fresh = result["fresh"]
    text = f"{result['verdict']} What it recommends: {found}."
    text += f" What stands in the table was then judged on {fresh['n']} rows that the search has not seen (seed "
    text += f"{fresh['seed']}), the same for all schedules; the best and the next best there are listed below."
    caption = "Quality against cost: schedules that the tuner made, and what simpler ways give at the same cost."
    return [
        f"{text} {_calls(result['calls'])}",
        _best_on_fresh_rows(fresh),
        Figure(draw.front(result, figures / "tuner.png"), caption),
        _fresh_table(fresh),
    ]


def tuned_table(record: Result, name: str) -> list[Block]:
    """What the tuner and its rivals lose on fresh rows, from a record of `studies.record.search`."""
    rows = []
    for budget in record["all"]:
        for row in budget["rows"]:
            items = {key: row[f"against_{key}"] for key in ("heavy", "sandwich")}
            loss = {key: signed((item["difference"], *item["ci"])) for key, item in items.items()}
            cells = _tuned_cells(row, budget["saved"])
            cells |= {"Mean PPL": f"{row['mean_ppl']:.3f}", "log-PPL against heavy": loss["heavy"]}
            rows.append(cells | {"against the sandwich": "" if row["what"] == "sandwich" else loss["sandwich"]})
    verdicts = " ".join(f"To save {percent(budget['saved'], 0)}: {budget['verdict']}" for budget in record["all"])
    fresh = record["all"][0]["rows"][0]["against_heavy"]["rows"]
    text = f"The tuner, T = {record['steps']}. {verdicts} In the table all are judged on {fresh} fresh rows."
    return [text, Table.of(name, "What the tuner finds on tokens, on fresh rows", rows)]


def _best_on_fresh_rows(fresh: Result) -> str:
    """What is best at each budget, and whether the next differs from it significantly."""
    pairs, words = fresh["contrasts"], []
    for budget in dict.fromkeys(row["budget"] for row in fresh["rows"]):
        rows = [row for row in fresh["rows"] if row["budget"] == budget]
        best, *others = sorted(rows, key=lambda row: against(pairs, row["schedule"], fresh["heavy"])[0])
        mixed = ", mixed" if best["kind"] == "mixed" else ""
        words.append(f"- to save {percent(budget, 0)}: {best['what']}{mixed}")
        if others:
            item = against(pairs, others[0]["schedule"], best["schedule"])
            level = "" if item[1] > 0 else ", not significant"
            words[-1] += f"; the next, {others[0]['what']}, {signed(item)} against it{level}"
    return "\n".join(words)


def _tuned_cells(row: Row, budget: float) -> dict[str, str]:
    cells = {"to save": percent(budget, 0), "schedule": row["schedule"], "what": row["what"]}
    return cells | {"recommended": "yes" if row["recommended"] else "", "saved": percent(row["saved"])}


def _fresh_table(fresh: Result) -> Table:
    by_budget, pairs, rows = rivals_by_budget(fresh), fresh["contrasts"], []
    for row in fresh["rows"]:
        own, other = row["schedule"], by_budget[row["budget"]].get("sandwich", row)["schedule"]
        cells = _tuned_cells(row, row["budget"])
        cells |= {"Gen. PPL (95%)": ppl_text(row), "log-PPL against heavy": signed(against(pairs, own, fresh["heavy"]))}
        rows.append(cells | {"against the sandwich": "" if other == own else signed(against(pairs, own, other))})
    return Table.of("tuner", "At each budget, on fresh rows", rows)
