r"""Does scheduling compose with fewer steps and with other decoding rules? A grid of rule x steps x schedule, measured.

Every cell samples the same rows (the same seed, row by row) and is judged alike, so differences are paired. Cells of
one rule form a *line*; along it a *dial* turns, the number of steps T, or for a rule that finds its own number of steps
its number (a confidence threshold). The line's end with the heavy model and the most operations is "neither"; fewer
steps alone, the schedule alone, and both are counted from there:

    saving        F(both) / F(neither)   against   F(schedule) / F(neither) x F(steps) / F(neither)
    loss          D(x) = mean over rows of log-perplexity(x) - log-perplexity(neither)
    interaction   D(both) - D(schedule) - D(steps), paired row by row, with its 95% interval.

Savings multiply if the first two agree. Losses add if the interaction is nil; above 0 they compound, below 0 they
overlap. Perplexity alone would reward dull text, so entropy stands beside it everywhere, and a cell belongs to the
Pareto front unless another has no more operations, no higher perplexity and no lower entropy (of words, where a family
has text), and one of them better. Held-out text, where a family comes with some, is judged in the same way: a
perplexity below its own or an entropy above its own is no merit, so for the front the one counts as no lower and the
other as no higher than the text's.

Shapes: n rows, C cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm import metrics
from relaylm.bound import held_out, spread_rows
from relaylm.comparison import _content_key, _model_key, _open_store
from relaylm.decode import resolve
from relaylm.decoding import Rule, counts_of, number_text, parse_rule
from relaylm.engine import Law
from relaylm.errors import UserError
from relaylm.judge import Judge, Scores, load_judge, score
from relaylm.progress import progress_bar
from relaylm.sampler import sample
from relaylm.schedule import Schedule

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.store import Store

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
        return number_text(self.rule.numbers[0]) if self.steps is None else f"T={self.steps}"

    def check(self, length: int) -> None:
        """Refuse what sampling would refuse, before anything is sampled."""
        Law(top_p=self.top_p)
        resolve(self.schedule, self.rule, self.steps)
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
    steps stands once for each of its numbers that is listed. The heavy model alone is always there."""
    labels = list(schedules or ["heavy", "sandwich:25%", "sandwich:50%", *_middle(family, light, heavy), "light"])
    bound = {label: Schedule.parse(label).bind(light, heavy) for label in labels}
    for schedule in bound.values():
        family.check_names(schedule.models)
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
    """Measure the grid and answer. Plain JSON values come back; `compose_view` shows and draws them. With a `store`
    each cell is kept as soon as it is done, and what is there already is not computed again (`fresh`: it is).
    `stored_only` samples nothing: the answer is that of the cells that are there, and `missing` names the others."""
    if n < 2:
        raise UserError(f"a grid needs at least 2 samples in each cell, not {n}")
    if stored_only and (store is None or fresh):
        raise UserError("what is stored alone can be shown of a store, and not afresh: --store FOLDER without --fresh")
    light, heavy = family.roles(light, heavy)
    grid = cells(family, rules, steps, schedules, light, heavy)
    length = length or family.length
    for cell in grid:
        cell.check(length)
    work = _Work(family, load_judge(judge, family), n, length, seed, heavy, batch_size, _open_store(store), fresh)
    missing = [cell for cell in grid if stored_only and not work.has(cell)]
    if len(missing) == len(grid):
        raise UserError(f"the store has none of the {len(grid)} cells of this grid, as they would be on this device")
    grid = [cell for cell in grid if cell not in missing]
    bar = progress_bar("sampling", len(grid) * n, "row", progress, leave=False)
    rows: list[dict[str, Any]] = []
    per_row: list[Mapping[str, np.ndarray]] = []
    for cell in grid:
        bar.set_description(f"{cell.line} {cell.dial} {cell.label}"[:40])
        before = bar.n

        def tell(done: int, total: int, before: int = before) -> None:
            bar.update(before + n * done // max(total, 1) - bar.n)

        figures, found = work.measure(cell, tell)
        rows.append({"rule": str(cell.rule), "line": cell.line, "dial": cell.dial, "schedule": cell.label, **figures})
        per_row.append(found)
        bar.update(before + n - bar.n)
    bar.close()
    heldout = work.heldout()
    front = pareto(rows, heldout)
    for row, on_front in zip(rows, front, strict=True):
        row["front"] = on_front
    both = combinations(grid, rows, per_row, heavy)
    return {
        "kind": "compose",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": length,
        "seed": seed,
        "light": light,
        "heavy": heavy,
        "judge": work.judge.name,
        "device": str(family.device),
        "heldout": heldout,
        "rows": rows,
        "missing": [{"line": cell.line, "dial": cell.dial, "schedule": cell.label} for cell in missing],
        "combinations": both,
        "answer": answer(both),
    }


# ------------------------------------------------------------------------------------------------ one cell


@dataclass
class _Work:
    """What all cells share."""

    family: Family
    judge: Judge
    n: int
    length: int
    seed: int
    heavy: str
    batch_size: int | None
    store: Store | None
    fresh: bool

    def __post_init__(self) -> None:
        if self.store is not None:
            self.keys = {name: _model_key(self.family, name) for name in self.family.names}
            if self.judge.key.startswith("unnamed:"):
                raise UserError(f"scores of the judge {self.judge.name} cannot be stored: its weights are not known")

    def has(self, cell: Cell) -> bool:
        """Is the cell in the store?"""
        key = self._key(cell)
        return self.store is not None and key is not None and self.store.get(key) is not None

    def measure(self, cell: Cell, tell: Callable[[int, int], None]) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """A cell's figures, and log-perplexity and entropy row by row: from the store, or sampled and judged."""
        key = self._key(cell)
        record = None if self.store is None or key is None or self.fresh else self.store.get(key)
        if record is None:
            record = self._sampled(cell, tell)
            if self.store is not None and key is not None:
                self.store.put(key, record, replace=self.fresh)
        by_row = {name: np.array(record["by_row"][name], dtype=np.float64) for name in ("log_ppl", "entropy")}
        return record["figures"], by_row

    def _sampled(self, cell: Cell, tell: Callable[[int, int], None]) -> dict[str, Any]:
        family = self.family
        samples = sample(
            family,
            cell.schedule,
            self.n,
            steps=cell.steps,
            length=self.length,
            seed=self.seed,
            rule=cell.rule,
            top_p=cell.top_p,
            heavy=self.heavy,
            batch_size=self.batch_size,
            on_calls=tell,
        )
        scores, judged = self._judged(samples.tokens, samples.texts)
        counted_n = scores.written_count_n > 0
        log_n = np.where(counted_n, scores.written_nll_n / np.maximum(scores.written_count_n, 1), math.nan)
        word = [metrics.word_entropy(text) for text in samples.texts]
        entropy = word or [metrics.token_entropy(row) for row in samples.tokens]
        figures = {
            "schedule_models": str(cell.schedule),
            "steps": cell.steps,
            "longest": int(samples.steps),
            "top_p": cell.top_p,
            "exact": not samples.changes_law,
            **judged,
            "calls": samples.cost.total_calls,
            "calls_by_model": {name: count for name, count in samples.cost.calls.items() if count},
            "flops": samples.cost.flops,
            "seconds": samples.cost.seconds,
        }
        rounded = {
            "log_ppl": [metrics.finite(round(float(x), 6)) for x in log_n],
            "entropy": np.round(entropy, 6).tolist(),
        }
        return {"kind": "compose", "figures": figures, "by_row": rounded}

    def _judged(self, tokens_nL: np.ndarray, texts: Sequence[str]) -> tuple[Scores, dict[str, Any]]:
        scores = score(self.judge, tokens_nL, texts, max_length=self.family.length)
        found = metrics.perplexity(scores.written_nll_n, scores.written_count_n)
        return scores, {**found, **metrics.describe_texts(list(tokens_nL), texts)}

    def heldout(self) -> dict[str, Any] | None:
        """As many rows of the text that came with the family, judged as samples are; None if there are none."""
        tokenizer, tokens_N = self.family.tokenizer, held_out(self.family)
        if tokenizer is None or tokens_N is None or len(tokens_N) < self.length:
            return None
        tokens_nL = spread_rows(tokens_N, self.length, self.n)
        return {"rows": len(tokens_nL), **self._judged(tokens_nL, [tokenizer.decode(row) for row in tokens_nL])[1]}

    def _key(self, cell: Cell) -> str | None:
        if self.store is None:
            return None
        device = self.family.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        weights = {model: self.keys[model] for model in cell.schedule.models}
        about = [weights, self.family.mask_id, cell.schedule.to_json(), cell.steps, str(cell.rule), cell.top_p]
        made = [self.n, self.length, self.seed, self.judge.key, name, self.batch_size, str(torch.__version__)]
        return _content_key("compose", about, made, f"torch.{self.family.precision}")


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


def combinations(
    grid: Sequence[Cell],
    rows: Sequence[Mapping[str, Any]],
    per_row: Sequence[Mapping[str, np.ndarray]],
    heavy: str,
) -> list[dict[str, Any]]:
    """For each line, every schedule that is not the heavy model with every setting of the dial that is not the line's
    end: what the schedule alone, the dial alone and both save and lose. Where one of the four cells is not in the grid,
    there is nothing to tell."""
    place = {(cell.line, cell.dial, cell.label): k for k, cell in enumerate(grid)}
    out = []
    for line in dict.fromkeys(cell.line for cell in grid):
        here = [k for k, cell in enumerate(grid) if cell.line == line]
        alone = [k for k in here if grid[k].schedule.models == (heavy,)]
        if not alone:
            continue
        neither = max(alone, key=lambda k: (rows[k]["flops"] or 0, rows[k]["calls"]))
        for k in here:
            cell = grid[k]
            if cell.schedule.models == (heavy,) or cell.dial == grid[neither].dial:
                continue
            if rows[k]["calls_by_model"].keys() == {heavy}:  # so few steps that the schedule has none for the others
                continue
            scheduled = place.get((line, grid[neither].dial, cell.label))
            fewer = place.get((line, cell.dial, grid[neither].label))
            if scheduled is not None and fewer is not None:
                out.append(_combine(rows, per_row, neither, scheduled, fewer, k))
    return out


def _combine(
    rows: Sequence[Mapping[str, Any]],
    per_row: Sequence[Mapping[str, np.ndarray]],
    neither: int,
    scheduled: int,
    fewer: int,
    both: int,
) -> dict[str, Any]:
    def paired(name: str, plus: Sequence[int], minus: Sequence[int]) -> dict[str, Any]:
        total_n = sum(per_row[k][name] for k in plus) - sum(per_row[k][name] for k in minus)
        found = metrics.mean_estimate(np.asarray(total_n)[np.isfinite(total_n)])
        return {"value": found.value, "ci": found.ci}

    def cost(k: int) -> float | None:
        most = rows[neither]["flops"]
        return rows[k]["flops"] / most if most else None

    shares = {name: cost(k) for name, k in (("schedule", scheduled), ("steps", fewer), ("both", both))}
    product = None
    if shares["both"] is not None and shares["schedule"] is not None and shares["steps"] is not None:
        product = shares["schedule"] * shares["steps"]
    return {
        **{name: rows[both][name] for name in ("line", "dial", "schedule")},
        "neither": rows[neither]["dial"],
        "flops": {**shares, "product": product},
        "loss": {
            name: paired("log_ppl", [k], [neither])
            for name, k in (("schedule", scheduled), ("steps", fewer), ("both", both))
        },
        "interaction": paired("log_ppl", [both, neither], [scheduled, fewer]),
        "entropy_both": paired("entropy", [both], [neither]),
        "entropy_interaction": paired("entropy", [both, neither], [scheduled, fewer]),
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
    size = [item["interaction"]["value"] for item in found]
    alone = [item["loss"]["schedule"]["value"] + item["loss"]["steps"]["value"] for item in found]
    told = f"losses {counts} of {len(found)} combinations" if counts else "losses add up as far as can be told"
    return (
        f"{line}: {savings}; {told} (interaction {np.mean(size):+.4f} on average, {min(size):+.4f} to "
        f"{max(size):+.4f}, beside a sum of {np.mean(alone):+.4f})."
    )


def kind_of(item: Mapping[str, Any]) -> str:
    """Do the two losses compound, overlap, or add up as far as the interval can tell?"""
    low, high = item["interaction"]["ci"]
    if low is not None and low > 0:
        return "compound"
    return "overlap" if high is not None and high < 0 else "add"
