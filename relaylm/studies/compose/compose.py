r"""Does scheduling compose with fewer steps and with other decoding rules? A grid of rule x steps x schedule, measured.

Every cell samples the same rows (the same seed, row by row) and is judged alike, so differences are paired. Cells of
one rule form a *line*. Along it one number varies, the *dial*: the number of steps T, or for a rule that finds its own
number of steps its parameter (a confidence threshold). The line's end with the heavy model and the most operations is
"neither"; fewer steps alone, the schedule alone, and both are counted from there:

    saving        F(both) / F(neither)   against   F(schedule) / F(neither) x F(steps) / F(neither)
    loss          D(x) = mean over rows of log-perplexity(x) - log-perplexity(neither)
    interaction   D(both) - D(schedule) - D(steps), paired row by row, with its 95% interval.

Savings multiply if the first two agree. Losses add if the interaction is 0; above 0 they compound, below 0 they
overlap. Perplexity alone would reward repetitive text, so entropy is given with it everywhere. A cell belongs to the
Pareto front unless another has no more operations, no higher perplexity and no lower entropy (of words, where a family
has text), and one of them better. Where a family has held-out text, it is judged in the same way; on the front a
perplexity below the text's, or an entropy above it, counts as the text's own.

Shapes: n rows, C cells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.estimate import announce_samples
from relaylm.measure.evaluate import Drawn, Evaluator, SampleSpec, figures, given_rows, judge_rows, texts_of
from relaylm.measure.judge import Scores, load_judge, log_perplexity
from relaylm.measure.likelihood import held_out, spread_rows
from relaylm.measure.store import Store, open_store
from relaylm.models.family import Family
from relaylm.sampling.law import Law
from relaylm.sampling.policy import resolve
from relaylm.sampling.rules import Rule, counts_of, number_text, parse_rule

RULES = ("ancestral", "low-confidence", "threshold:0.9", "threshold:0.6", "remdm-cap", "ancestral@0.9")
STEPS = (8, 32, 256)
CLOSE = 0.1  # savings that agree with the product to this share are said to multiply


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    rule: Rule
    top_p: float | None
    label: str  # of the schedule
    schedule: Schedule  # bound
    steps: int | None  # None: the rule finds its own

    @property
    def line(self) -> str:
        """The rule with everything but its dial."""
        blocks = "" if self.rule.block is None else f":{self.rule.block}"
        name = f"{self.rule.name}{blocks}" if self.rule.adaptive else str(self.rule)
        return name if self.top_p is None else f"{name}@{self.top_p:g}"

    @property
    def dial(self) -> str:
        """The number that varies along the line."""
        return number_text(self.rule.numbers[0]) if self.steps is None else f"T={self.steps}"

    @property
    def spec(self) -> SampleSpec:
        """How its rows are sampled."""
        return SampleSpec(self.schedule, self.steps, self.rule, self.top_p)

    def check(self, length: int) -> None:
        """Refuse what sampling would refuse, before anything is sampled."""
        Law(top_p=self.top_p)
        resolve(self.schedule, self.steps, self.rule)
        if self.rule.counts is not None and self.steps is not None:
            counts_of(self.rule, np.full((1, length), -1), self.steps)


def cells(
    family: Family,
    rules: Sequence[str],
    steps: Sequence[int],
    schedules: Sequence[str] | None,
    light: str,
    heavy: str,
) -> list[Cell]:
    """The grid. A rule is written as for `sample`, with @P after it for a nucleus; a rule that finds its own number of
    steps appears once for each of its numbers that is listed. The heavy model alone is always there."""
    labels = list(schedules or ["heavy", "sandwich:25%", "sandwich:50%", *_middle(family, light, heavy), "light"])
    bound = {label: family.bind(label, light, heavy) for label in labels}
    for schedule in bound.values():
        if schedule.steps is not None:
            raise UserError(f"the grid goes over several numbers of steps: write {schedule} in percent")
    if not any(schedule.models == (heavy,) for schedule in bound.values()):
        bound = {"heavy": Schedule.parse("heavy").bind(light, heavy), **bound}
    if not rules or not steps:
        raise UserError("a grid needs at least one rule and one number of steps")
    found: dict[tuple[Any, ...], Cell] = {}
    for text in rules:
        name, at, nucleus = text.partition("@")
        rule = parse_rule(name)
        try:
            top_p = float(nucleus) if at else None
        except ValueError:
            raise UserError(f"{text!r} is not a rule with a nucleus: write {name}@0.9") from None
        for number in [None] if rule.adaptive else sorted(set(steps), reverse=True):
            for label, schedule in bound.items():
                cell = Cell(rule, top_p, label, schedule, number)
                found[(cell.line, cell.dial, label)] = cell
    return list(found.values())


def _middle(family: Family, light: str, heavy: str) -> list[str]:
    """The model halfway between the light and the heavy one in what a call costs, if there is any between."""
    cost = {name: model.flops(family.length, 1) for name, model in family.models.items() if hasattr(model, "flops")}
    if light not in cost or heavy not in cost:
        return []
    half = (cost[light] + cost[heavy]) / 2
    between = [name for name in cost if cost[light] < cost[name] < cost[heavy]]
    return [min(between, key=lambda name: abs(cost[name] - half))] if between else []


def compose(
    family: Family,
    rules: Sequence[str] = RULES,
    steps: Sequence[int] = STEPS,
    schedules: Sequence[str] | None = None,
    n: int = 400,
    *,
    length: int | None = None,
    seed: int = 0,
    judge: Any = None,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    store: Store | str | Path | None = None,
    fresh: bool = False,
    stored_only: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure the grid and answer, in plain JSON values; `view` shows and draws them. With a `store` each cell is kept
    as soon as it is done, and what is there already is not computed again (`fresh`: it is). `stored_only` samples
    nothing: the answer is that of the cells that are there, and `missing` names the others."""
    if n < 2:
        raise UserError(f"a grid needs at least 2 samples in each cell, not {n}")
    if stored_only and (store is None or fresh):
        raise UserError("what is stored alone can be shown of a store, and not afresh: --store FOLDER without --fresh")
    light, heavy = family.roles(light, heavy)
    grid = cells(family, rules, steps, schedules, light, heavy)
    length = length or family.length
    for cell in grid:
        cell.check(length)
    kept: dict[str, Any] = {"piece": n, "store": open_store(store), "fresh": fresh}
    given_nL, _ = given_rows(family, None, n, length)
    evaluator = Evaluator(family, load_judge(judge, family), given_nL, heavy, seed=seed, batch=batch_size, **kept)
    missing = [cell for cell in grid if stored_only and not evaluator.has(cell.spec)]
    if len(missing) == len(grid):
        raise UserError(f"the store has none of the {len(grid)} cells of this grid, as they would be on this device")
    grid = [cell for cell in grid if cell not in missing]
    specs = [(f"{cell.line} {cell.dial} {cell.label}", cell.spec) for cell in grid]
    if progress and not stored_only:
        announce_samples(family, n * len(grid), length, "-n and --length make it shorter")
    drawn = evaluator.evaluate(specs, progress)
    found = [measured(family, cell, *each) for cell, each in zip(grid, drawn, strict=True)]
    rows, heldout = [one.row for one in found], _heldout(evaluator)
    for row, on_front in zip(rows, pareto(rows, heldout), strict=True):
        row["front"] = on_front
    both = combinations(found, heavy)
    return {
        "kind": "compose",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": length,
        "seed": seed,
        "light": light,
        "heavy": heavy,
        "judge": evaluator.judge.name,
        "device": str(family.device),
        "heldout": heldout,
        "rows": rows,
        "missing": [{"line": cell.line, "dial": cell.dial, "schedule": cell.label} for cell in missing],
        "combinations": both,
        "answer": answer(both),
    }


class Measured(NamedTuple):
    """A cell's figures, and its log-perplexity and entropy row by row."""

    row: dict[str, Any]
    log_ppl_n: np.ndarray
    entropy_n: np.ndarray


def measured(family: Family, cell: Cell, drawn: Drawn, scores: Scores) -> Measured:
    """A cell, from its samples and their scores."""
    row = {
        "rule": str(cell.rule),
        "line": cell.line,
        "dial": cell.dial,
        "schedule": cell.label,
        "schedule_models": str(cell.schedule),
        "steps": cell.steps,
        "longest": int(drawn.steps),
        "top_p": cell.top_p,
        "exact": drawn.exact,
        **figures(family, drawn.tokens_nL, scores),
        **drawn.costs(family.names),
    }
    texts = texts_of(family, drawn.tokens_nL)
    entropy = [metrics.word_entropy(text) for text in texts] or [metrics.token_entropy(row) for row in drawn.tokens_nL]
    return Measured(row, log_perplexity(scores), np.array(entropy))


def _heldout(evaluator: Evaluator) -> dict[str, Any] | None:
    """As many rows of the text that came with the family, judged as samples are; None if there are none."""
    family, (n, length) = evaluator.family, evaluator.given_nL.shape
    tokens_N = held_out(family)
    if tokens_N is None or len(tokens_N) < length:
        return None
    tokens_nL = spread_rows(tokens_N, length, n)
    scores = judge_rows(family, evaluator.judge, tokens_nL)
    return {"rows": len(tokens_nL), **figures(family, tokens_nL, scores)}


# ------------------------------------------------------------------------------------------------ what it all says


def diversity(row: Mapping[str, Any]) -> float:
    """Entropy of words where there are any, else of tokens."""
    return float(row.get("word_entropy", row["entropy"]))


def pareto(rows: Sequence[Mapping[str, Any]], heldout: Mapping[str, Any] | None = None) -> list[bool]:
    """Which cells no other beats, with no more operations, no higher perplexity, no lower entropy and one better. Where
    there is held-out text, a perplexity below its own counts as its own, and so does an entropy above it: neither is
    better than real text."""
    least, most = (heldout["log_ppl"], diversity(heldout)) if heldout else (-math.inf, math.inf)
    points = np.array(
        [[row["flops"] or math.nan, max(row["log_ppl"], least), -min(diversity(row), most)] for row in rows]
    )
    return [not ((points <= own).all(axis=1) & (points < own).any(axis=1)).any() for own in points]


def combinations(found: Sequence[Measured], heavy: str) -> list[dict[str, Any]]:
    """For each line, every schedule that is not the heavy model with every setting of the dial that is not the line's
    end: what the schedule alone, the dial alone and both save and lose. Left out where one of the four cells is not
    there."""
    place = {tuple(one.row[key] for key in ("line", "dial", "schedule")): one for one in found}
    out = []
    for line in dict.fromkeys(one.row["line"] for one in found):
        here = [one for one in found if one.row["line"] == line]
        alone = [one for one in here if Schedule.parse(one.row["schedule_models"]).models == (heavy,)]
        if not alone:
            continue
        neither = max(alone, key=lambda one: (one.row["flops"] or 0, one.row["calls"]))
        end, heavy_label = neither.row["dial"], neither.row["schedule"]
        for both in here:
            # With few steps a schedule may have none for the other models.
            if both.row["dial"] != end and both.row["calls_by_model"].keys() != {heavy}:
                scheduled = place.get((line, end, both.row["schedule"]))
                fewer = place.get((line, both.row["dial"], heavy_label))
                if scheduled is not None and fewer is not None:
                    out.append(combined(neither, scheduled, fewer, both))
    return out


def combined(neither: Measured, scheduled: Measured, fewer: Measured, both: Measured) -> dict[str, Any]:
    """What the schedule alone, the dial alone and both save and lose against neither."""
    three = {"schedule": scheduled, "steps": fewer, "both": both}
    most = neither.row["flops"]
    shares: dict[str, Any] = {name: one.row["flops"] / most if most else None for name, one in three.items()}

    def paired(name: str, plus: Sequence[Measured], minus: Sequence[Measured]) -> dict[str, Any]:
        gain_n, loss_n = (np.sum([getattr(one, name) for one in side], axis=0) for side in (plus, minus))
        found = metrics.paired_difference(gain_n, loss_n)
        return {"value": found["difference"], "ci": found["ci"]}

    return {
        **{name: both.row[name] for name in ("line", "dial", "schedule")},
        "neither": neither.row["dial"],
        "flops": {**shares, "product": shares["schedule"] * shares["steps"] if most else None},
        "loss": {name: paired("log_ppl_n", [one], [neither]) for name, one in three.items()},
        "interaction": paired("log_ppl_n", [both, neither], [scheduled, fewer]),
        "entropy_both": paired("entropy_n", [both], [neither]),
        "entropy_interaction": paired("entropy_n", [both, neither], [scheduled, fewer]),
    }


def answer(found: Sequence[Mapping[str, Any]]) -> str:
    """In words, line by line: do savings multiply, and what becomes of the losses?"""
    if not found:
        return "Nothing was combined: the grid needs the heavy model, another schedule and two settings of a dial."
    return " ".join(
        _answer_of(line, [item for item in found if item["line"] == line])
        for line in dict.fromkeys(item["line"] for item in found)
    )


def _answer_of(line: str, found: Sequence[Mapping[str, Any]]) -> str:
    ratios = [item["flops"]["both"] / item["flops"]["product"] for item in found if item["flops"]["product"]]
    savings = "operations unknown"
    if ratios:
        off = max(abs(ratio - 1) for ratio in ratios)
        verdict = f"savings multiply to within {off:.1%}" if off < CLOSE else "savings do not multiply"
        savings = f"{verdict} (both over product {min(ratios):.3f} to {max(ratios):.3f})"
    kinds = [kind_of(item) for item in found]
    counts = ", ".join(f"{kind} in {kinds.count(kind)}" for kind in ("overlap", "compound") if kinds.count(kind))
    losses = f"losses {counts} of {len(found)} combinations" if counts else "losses add up as far as can be told"
    each = [(item["interaction"], item["loss"]["schedule"], item["loss"]["steps"]) for item in found]
    parts = [[estimate["value"] for estimate in three] for three in each]
    size_N3 = np.array([part for part in parts if np.isfinite(part).all()])
    if not len(size_N3):
        return f"{line}: {savings}; losses are infinite."
    size_N, alone = size_N3[:, 0], size_N3[:, 1:].sum(axis=1).mean()
    infinite = len(found) - len(size_N3)
    but = f"; {infinite} infinite ones left out" if infinite else ""
    return (
        f"{line}: {savings}; {losses} (interaction {size_N.mean():+.4f} on average, {size_N.min():+.4f} to "
        f"{size_N.max():+.4f}, beside a sum of {alone:+.4f}{but})."
    )


def kind_of(item: Mapping[str, Any]) -> str:
    """Do the two losses compound, overlap, or add up as far as the interval can tell?"""
    low, high = item["interaction"]["ci"]
    if low is not None and low > 0:
        return "compound"
    return "overlap" if high is not None and high < 0 else "add"
