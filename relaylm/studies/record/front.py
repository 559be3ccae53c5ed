"""What each way of saving compute loses: quality over operations saved, by who computes and what is written together.

    python -m relaylm.studies.record.front FAMILY OUT.json [--n 1600] [--bound-rows 160] [--levels 50,67,80,90,95]
        [--kinds sets,uniform,...] [--few inf,eb,...] [--also "SCHEDULE"] [--also @SEARCH.json] [--store FOLDER]
    python -m relaylm.studies.record.front FAMILY OUT.json --draw

A cell is one kind at one level, the share of operations to be saved against the heavy model in as many uniform steps as
positions (T = L). Its parameter (T, D, a block, gamma) makes it cost at most that: by the expected cost where the plan
alone decides what a call writes, and by a short run on a few rows where a rule looks at the network. The share saved is
then reported as measured. Each cell has samples, judged by the family's own judge and paired with T = L row by row;
where the rule looks at no draw it has the likelihood bound of held-out rows, paired as well. Losses are in hundredths:
of log-perplexity, and of a nat for one position. `against_sets` is the same against spaced sets of the same level.

Cells of the `--few` kinds, slow ones, have a quarter of the rows (`n` of a cell says how many). OUT.json is written
after every cell. Samples and bounds go through the store, so the same command resumes; cells of OUT.json that a command
does not name stay in it, if it is about the same family, rows and precision. `--also @SEARCH.json` takes what a search
(`relaylm search --json`) chose at those of its budgets that are levels here; with `--kinds sets` it is compared
with spaced sets, too. With `--draw` only the figures are made: OUT.svg, and calls.svg of all records beside OUT.json.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError
from relaylm.files import read_object
from relaylm.measure.evaluate import LEAST_PIECE, Evaluator, SampleSpec, array_hash, conditions, figures
from relaylm.measure.judge import load_judge, log_perplexity
from relaylm.measure.likelihood import held_out, spread_rows
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.measure.provenance import how_made
from relaylm.measure.rivals import expected_flops, one_model, steps_within
from relaylm.measure.store import Store, cached
from relaylm.models.family import Family
from relaylm.sampling.result import reference_flops
from relaylm.sampling.rules import RULES, level_calls, llada_counts, parse_rule
from relaylm.sampling.sample import sample
from relaylm.studies.paper.contrasts import paired
from relaylm.studies.record.common import begun, command, keep, records_beside
from relaylm.studies.record.front_figures import KINDS, draw, draw_calls

SEED = 1000  # of the samples; rows that no search has seen
TRIED = 32  # rows of a calibrating run
FEW = ("inf", "eb", "low-confidence")
MIXED = {"light-first": "L25% H75%", "sandwich": "L12.5% H75% L12.5%", "light-last": "H75% L25%"}


@dataclass(frozen=True)
class Cell:
    """What is measured: `level` is the share to be saved, None where none was asked for."""

    kind: str
    label: str
    spec: SampleSpec
    level: float | None = None


class Study:
    """A family with its rows, and everything that was measured of it in this run."""

    def __init__(
        self, family: Family, n: int, rows_NL: np.ndarray | None, store: Store | None, few: Sequence[str] = FEW
    ) -> None:
        self.family, self.n, self.rows_NL, self.store, self.few = family, n, rows_NL, store, few
        self.light, self.heavy = family.roles()
        self.length, self.free_n = family.length, np.array([family.length])
        self.batch = min(n, family.batch_size(n, self.length))
        self.judge = load_judge(None, family)
        self.reference = Cell("reference", f"uniform:{self.length}", SampleSpec(one_model(self.heavy), self.length))
        self.all_heavy = self.flops(one_model(self.heavy), self.length)
        self.log_ppl: dict[str, np.ndarray] = {}
        self.nats: dict[str, np.ndarray] = {}

    def flops(self, schedule: Schedule, steps: float | None = None) -> float:
        """Expected operations of a row."""
        return expected_flops(self.family.models, schedule, steps, self.free_n, self.length)

    def flops_of_calls(self, positions_C: np.ndarray) -> float:
        """Operations of calls of the heavy model, by the positions at which each needs the head."""
        heavy: Any = self.family[self.heavy]
        return float(sum(heavy.flops(self.length, k) for k in positions_C.tolist() if k))

    def cost(self, rule: str) -> float:
        """Operations of a row under a rule that looks at the network, measured on a few."""
        tried = min(TRIED, self.n)

        def run() -> dict[str, Any]:
            found = sample(self.family, self.heavy, tried, rule=rule, seed=SEED, length=self.length)
            return {"kind": "cost", "flops": found.cost.flops}

        key = ["cost of a rule", self.family.digest, conditions(self.family, None), rule, SEED, tried]
        return float(cached(self.store, key, run)["flops"]) / tried

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The samples of a cell, judged, and its bound; what both lose against the reference."""
        rows = max(2, self.n // 4) if cell.kind in self.few else self.n
        given_nL = np.full((rows, self.length), -1)
        evaluator = Evaluator(
            self.family, self.judge, given_nL, self.heavy, seed=SEED, batch=self.batch,
            piece=max(LEAST_PIECE, 4 * self.batch), store=self.store,
        )  # fmt: skip
        drawn, scores = next(iter(evaluator.evaluate([(cell.label, cell.spec)], False)))
        spent = drawn.costs(self.family.names)
        all_heavy = reference_flops(self.family[self.heavy], make_plan(rows, self.length, SEED, given_nL))
        self.log_ppl[cell.label] = log_perplexity(scores)
        quality = figures(self.family, drawn.tokens_nL, scores)
        keep = ("gen_ppl", "gen_ppl_ci", "entropy", "entropy_ci", "word_entropy", "word_entropy_ci")
        return {
            **{"kind": cell.kind, "label": cell.label, "level": cell.level, "models": str(cell.spec.schedule)},
            **{"n": rows, "calls": spent["calls"] / rows, "calls_by_model": spent["calls_by_model"]},
            **{"flops": spent["flops"] / rows, "saved": 1 - spent["flops"] / all_heavy, "seconds": spent["seconds"]},
            "samples": loss(self.log_ppl, cell.label, self.reference.label),
            **{key: quality[key] for key in keep if key in quality},
            "bound": self.bound(cell),
        }

    def bound(self, cell: Cell) -> dict[str, Any] | None:
        """The likelihood bound of the held-out rows; None where there is none."""
        rule, rows_NL = cell.spec.rule, self.rows_NL
        if rows_NL is None or (rule is not None and not rule.bounded):
            return None
        schedule, steps = cell.spec.schedule, cell.spec.steps
        used = {name: self.family[name] for name in self.family.names if name in schedule.models}
        options: dict[str, Any] = {"seed": SEED, "device": self.family.device, "batch_size": self.batch}

        def run() -> dict[str, Any]:
            found = plan_bound(used, schedule, rows_NL, self.family.mask_id, steps=steps, rule=rule, **options)
            return {"kind": "bound", "nats": found.nats_N.tolist()}

        what = [str(schedule), str(steps), str(rule), SEED, array_hash(rows_NL)]
        key = ["bound of a plan", self.family.digest, conditions(self.family, self.batch), *what]
        self.nats[cell.label] = np.array(cached(self.store, key, run)["nats"]) / self.length
        bits = float(self.nats[cell.label].mean()) / math.log(2)
        return {"bits": bits, **loss(self.nats, cell.label, self.reference.label)}


def loss(by: dict[str, np.ndarray], label: str, other: str) -> dict[str, Any]:
    """The paired difference in hundredths, its interval and its rows (those that both have)."""
    rows = min(len(by[label]), len(by[other]))
    found = paired(100 * (by[label][:rows] - by[other][:rows]))
    return {"loss": found["difference"], "ci": found["ci"], "rows": found["rows"]}


# ------------------------------------------------------------------------------------------------ which cells


def cells_of(study: Study, kind: str, levels: Sequence[float]) -> Iterator[Cell]:
    """The cells of a kind, one for each level that it can reach. (At distance 1 a spacing writes all in one call.)"""
    if kind == "tuner":
        return
    if kind == "inf":
        yield Cell(kind, "uniform:inf", SampleSpec(one_model(study.heavy), math.inf))
        return
    for level in levels:
        found = _spec(study, kind, (1 - level) * study.all_heavy)
        if found is not None:
            yield Cell(kind, *found, level)


def _spec(study: Study, kind: str, limit: float) -> tuple[str, SampleSpec] | None:
    """A kind's label and parameters at a limit of operations; None if nothing of the kind is within it, or if the
    family has no such model."""
    family, light, heavy = study.family, study.light, study.heavy
    middle = middle_model(family)
    if kind in ("uniform", "middle"):
        name = heavy if kind == "uniform" else middle
        if name is None:
            return None
        alone = one_model(name)
        steps = steps_within(lambda t: study.flops(alone, t), limit, most=study.length)
        label = f"uniform:{steps}" if kind == "uniform" else f"{name} uniform:{steps}"
        return None if steps is None else (label, SampleSpec(alone, steps))
    if kind in ("sets", "prefix", "smaller", *MIXED):
        name = (middle or light) if kind == "smaller" else heavy
        text = MIXED.get(kind, name)
        if len(family.names) < 2 and (kind in MIXED or kind == "smaller"):
            return None
        form = "prefix" if kind == "prefix" else "sets"
        schedule = family.bind(text, light, heavy)

        def at(distance: int) -> Schedule:
            return replace(schedule, spacing=Spacing(distance, form))

        distance = steps_within(lambda d: study.flops(at(d)), limit, least=2, most=study.length - 1)
        if distance is None:
            return None
        label = f"{at(distance).spacing}" if text == heavy else f"{text} {at(distance).spacing}"
        return label, SampleSpec(at(distance), None)
    if kind == "dus":
        blocks = [2**k for k in range(2, study.length.bit_length()) if dus_flops(study, 2**k) <= limit]
        return rule_spec(study, f"dus:{blocks[0]}") if blocks else None
    if kind == "low-confidence":
        steps = steps_within(lambda t: llada_flops(study, t), limit, most=study.length)
        return None if steps is None else rule_spec(study, kind, steps)
    calls = limit / study.all_heavy * study.length * (1 - math.exp(-1))  # of T = L a share 1/e of the steps makes none
    if kind == "surest":
        far = largest(lambda d: study.cost(f"surest:{d:g}"), limit, max(1, round(calls / 1.8)), True)
        return None if far is None else rule_spec(study, f"surest:{far:g}")
    inverse = largest(lambda x: study.cost(f"eb:{1 / x:.3g}"), limit, calls / (2 * study.length), False)
    return None if inverse is None else rule_spec(study, f"eb:{1 / inverse:.3g}")


def rule_spec(study: Study, text: str, steps: int | None = None) -> tuple[str, SampleSpec]:
    """The heavy model under a rule."""
    label = text if steps is None else f"{text}, T = {steps}"
    return label, SampleSpec(one_model(study.heavy), steps, parse_rule(text))


def dus_flops(study: Study, block: int) -> float:
    """Operations of a row under DUS, which has no chance in it."""
    calls_1L = level_calls(parse_rule(f"dus:{block}"), np.full((1, study.length), -1))
    return study.flops_of_calls(np.bincount(calls_1L[0])[1:])


def llada_flops(study: Study, steps: int) -> float:
    """Operations of a row in LLaDA's steps, with the head at every masked position."""
    count_T = llada_counts(study.length, steps)
    return study.flops_of_calls(study.length - count_T.cumsum() + count_T)


def middle_model(family: Family) -> str | None:
    """The model between the family's smallest and largest whose call costs closest to half of the largest's."""
    models: Any = family.models
    cost = {name: models[name].flops(family.length, 1) for name in family.names}
    between = [name for name in family.names if name not in family.roles()]
    return min(between, key=lambda name: abs(cost[name] - cost[family.heavy] / 2), default=None)


def largest(cost: Callable[[Any], float], limit: float, x: float, whole: bool, tries: int = 6) -> float | None:
    """About the largest x whose cost, which rises with it, is within a limit: at least 95% of the limit, or the last
    whole number. The search begins at x and takes cost for a power of x, at first for proportional. None if nothing
    within the limit was found."""
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    before, power = None, 1.0
    for _ in range(tries):
        found = cost(x)
        if found <= limit:
            low = (x, found)
        else:
            high = (x, found)
        if (low and low[1] >= 0.95 * limit) or (whole and high and high[0] - (low[0] if low else 0) <= 1):
            break
        if before is not None and before[0] != x:
            power = min(2.0, max(0.2, math.log(found / before[1]) / math.log(x / before[0])))
        before = (x, found)
        x = x * (0.98 * limit / found) ** (1 / power)
        if low and high:
            x = min(high[0] * (low[0] / high[0]) ** 0.1, max(low[0] * (high[0] / low[0]) ** 0.1, x))
        if whole:
            x = max(round(x), low[0] + 1 if low else 1)
            x = min(x, high[0] - 1) if high else x
    return low[0] if low else None


def other_cell(study: Study, text: str, levels: Sequence[float]) -> Cell:
    """A cell for a schedule or a rule as text; its level is the nearest to what the schedule saves."""
    if text.partition(":")[0] in {rule.name for rule in RULES}:
        return Cell("also", *rule_spec(study, text))
    schedule = study.family.bind(text, study.light, study.heavy)
    steps = None if schedule.spacing is not None else schedule.steps or study.length
    saved = 1 - study.flops(schedule, steps) / study.all_heavy
    return Cell("also", text, SampleSpec(schedule, steps), min(levels, key=lambda level: abs(level - saved)))


def tuned_cells(study: Study, path: Path, levels: Sequence[float]) -> Iterator[Cell]:
    """A cell for each budget of a search that is a level."""
    found = read_object(path)
    if (found["family"]["digest"], found["steps"]) != (study.family.digest, study.length):
        raise UserError(f"{path} is not a search of this family from T = {study.length} steps")
    for limit, choice in zip(found["goals"], found.get("front") or [found], strict=False):
        for level in levels:
            if abs(1 - limit / found["all_heavy_price"] - level) < 1e-6:
                yield replace(other_cell(study, choice["schedule"], levels), kind="tuner", level=level)


# ------------------------------------------------------------------------------------------------ the command


def main() -> None:
    """The command."""
    options = command(
        __doc__,
        "family out",
        n=(1600, "samples of a cell"),
        bound_rows=160,
        levels=("50,67,80,90,95", "operations to be saved, per cent"),
        kinds=(",".join(KINDS), f"of {', '.join(KINDS)}; none for --also alone"),
        few=(",".join(FEW), "kinds with a quarter of the samples"),
        also={"action": "append", "default": [], "metavar": "WHAT", "help": "schedule, rule or @SEARCH.json"},
        device="auto",
        store=(Path, "samples and bounds (default: OUT.store)"),
        draw=(False, "only the figures, from what is there"),
    )
    if options.draw:
        print(draw(read_object(options.out), options.out.with_suffix(".svg")))
        print(draw_calls(records_beside(options.out), options.out.with_name("calls.svg")))
        return
    kinds = [kind for kind in KINDS if kind in options.kinds.split(",")]
    few = options.few.split(",")
    if unknown := {*options.kinds.split(","), *few} - {*KINDS, "none"}:
        raise UserError(f"there is no kind {min(unknown)!r}: choose from {', '.join(KINDS)}")
    levels = [float(level) / 100 for level in options.levels.split(",")]
    family = Family.load(options.family, device=options.device)
    text = held_out(family)
    rows_NL = None if text is None or not options.bound_rows else spread_rows(text, family.length, options.bound_rows)
    study = Study(family, options.n, rows_NL, Store(options.store or options.out.with_suffix(".store")), few)
    record = {"light": study.light, "heavy": study.heavy, "length": study.length, "n": options.n}
    record |= {"seed": SEED, "precision": family.precision, "judge": study.judge.name}
    record["bound_rows"] = 0 if rows_NL is None else len(rows_NL)
    known = begun(options.out, family, record)
    commands = list(dict.fromkeys([*known.get("commands", []), how_made(family.device)["command"]]))
    found = {(cell["kind"], cell["label"], cell["level"]): cell for cell in known.get("cells", [])}
    for cell in cells(study, kinds, levels, options.also):
        began = time.perf_counter()
        row = study.measure(cell)
        sets = next((c["label"] for c in found.values() if (c["kind"], c["level"]) == ("sets", cell.level)), None)
        row["against_sets"] = against_sets(study, cell, sets)
        found[cell.kind, cell.label, cell.level] = row
        keep(options.out, family, {**record, "commands": commands, "cells": list(found.values())})
        print(f"{line(row)}  [{time.perf_counter() - began:.1f} s]", flush=True)


def cells(study: Study, kinds: Sequence[str], levels: Sequence[float], also: Sequence[str]) -> Iterator[Cell]:
    """The reference, kind after kind, then what was asked for besides."""
    yield study.reference
    for kind in kinds:
        yield from cells_of(study, kind, levels)
    for text in also:
        yield from tuned_cells(study, Path(text[1:]), levels) if text[:1] == "@" else [other_cell(study, text, levels)]


def against_sets(study: Study, cell: Cell, sets: str | None) -> dict[str, Any] | None:
    """What a cell loses against the spaced sets of its level, where this run has them."""
    if sets is None or sets not in study.log_ppl or cell.kind in ("sets", "reference"):
        return None
    bound = loss(study.nats, cell.label, sets) if {cell.label, sets} <= study.nats.keys() else None
    return {"label": sets, "samples": loss(study.log_ppl, cell.label, sets), "bound": bound}


def line(row: dict[str, Any]) -> str:
    """A cell in one line."""

    def shown(item: dict[str, Any] | None) -> str:
        if item is None or item["loss"] is None or item["ci"][0] is None:
            return "-"
        return f"{item['loss']:+.2f} ± {(item['ci'][1] - item['ci'][0]) / 2:.2f}"

    what = f"{row['kind']:<14} {row['label']:<34} {row['calls']:6.1f} calls {row['saved']:7.1%} saved"
    return f"{what}  samples {shown(row['samples']):<16} bound {shown(row['bound'])}"


if __name__ == "__main__":
    main()
