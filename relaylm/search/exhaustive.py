r"""Every schedule on the same rows; the best of them again on fresh rows; and the influence of each segment.

All schedules with a given number of light segments are measured (210 for 4 of 10), or, with more models or a budget,
every assignment of models to segments that is within the budget and in which no single segment could have a more
expensive model. With ppl(s) a schedule's mean perplexity, the influence of a segment j is, as in the paper,

    I(j) = mean of ppl(s) over the s that are light in j  -  mean of ppl(s) over all s.

A positive I(j) says that a light model does more than average harm in segment j. Intervals are bootstrap intervals over
rows, which all schedules share. The best of many means is biased (winner's curse), so the winner is chosen among the
best 20 on rows that none of them was chosen by. A few schedules are also run independently, to check that the tree gave
the same tokens.

Shapes: S schedules, n rows, J segments, R bootstrap resamples, A all assignments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np

from relaylm.core.notation import shown
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.metrics import paired_difference as paired
from relaylm.search.space import SLACK, Choice, Problem, Space
from relaylm.search.tournament import Candidate, by_standing, difference, doubt, ranked_rows, summary, unique
from relaylm.search.trials import Rows

MOST_SCHEDULES = 20_000
TOP = 20  # schedules among which the winner is chosen again


def all_placements(segments: int = 10, light: int = 4) -> list[Schedule]:
    """Every choice of `light` light cells among `segments`, the lightest start first: 210 for 4 of 10."""
    if not 2 <= segments <= 1000 or not 0 <= light <= segments or math.comb(segments, light) > 1_000_000:
        asked = f"choosing {shown(light)} light cells of {shown(segments)}"
        raise UserError(f"{asked} is not possible here: 2 or more cells, 0 to all light, in at most 1000000 ways")
    chosen = combinations(range(segments), light)
    return [Schedule.from_bits("".join("1" if j in cells else "0" for j in range(segments))) for cells in chosen]


def assignments(problem: Problem, light_segments: int | None, limit: float | None) -> tuple[Space, list[Choice]]:
    """All choices of models for segments with a number of light ones; or those within a limit in which no single
    segment could have a more expensive model."""
    space = problem.space([Fraction(1)])
    options, segments = len(space.options), problem.segments
    if limit is None:
        light = light_segments if light_segments is not None else min(4, segments)
        if math.comb(segments, light) > MOST_SCHEDULES:
            raise UserError(f"{math.comb(segments, light)} schedules are too many to try: take fewer segments")
        # Option 0 is the heavy model, 1 the light one, as in the bits of a schedule.
        return space, [tuple(int(bit) for bit in str(schedule)) for schedule in all_placements(segments, light)]
    if options**segments > 10_000_000:
        raise UserError(f"{options} models in {segments} segments are too many to try: take fewer of them, or tune")
    index_AS = np.array(list(product(range(options), repeat=segments)), dtype=np.int8)
    price_AS = space.price_SO[np.arange(segments), index_AS]
    total_A, most = price_AS.sum(axis=1), limit * (1 + SLACK)
    # Options go from expensive to cheap, so option o - 1 is the next more expensive model.
    next_AS = space.price_SO[np.arange(segments), np.maximum(index_AS - 1, 0)]
    more_AS = np.where(index_AS > 0, next_AS - price_AS, np.inf)
    keep_A = (total_A <= most) & (total_A[:, None] + more_AS > most).all(axis=1)
    if not keep_A.any():
        raise UserError(f"no assignment of {', '.join(problem.models)} to {segments} segments fits the budget")
    if keep_A.sum() > MOST_SCHEDULES:
        raise UserError(f"{int(keep_A.sum())} schedules are too many to try: take fewer segments or models, or tune")
    return space, [tuple(int(o) for o in row) for row in index_AS[keep_A]]


@dataclass
class Exhaustive:
    """Every schedule on n rows, the best 20 on fresh ones."""

    problem: Problem
    light_segments: int | None = 4
    limit: float | None = None
    n: int = 160
    confirm: int = 1600

    def __post_init__(self) -> None:
        self.rows = Rows(self.problem.trials)
        self.space, self.choices = assignments(self.problem, self.light_segments, self.limit)
        self.schedules = [self.space.schedule(choice) for choice in self.choices]
        self.log_Sn = np.zeros((len(self.schedules), 0))
        self.calls: dict[str, Any] = {}
        self.tree_check: dict[str, Any] | None = None

    def propose(self) -> tuple[list[Candidate], int]:
        """Measure all; the best 20, all-heavy, all-light and the sandwich with as many light steps are finalists."""
        problem = self.problem
        self._measured(self.rows.take(self.schedules, self.n, f"{len(self.schedules)} schedules"))
        ranked = [self.schedules[s] for s in self.order]
        self.tree_check = self._check([ranked[0], ranked[-1], ranked[len(ranked) // 2]])
        anchors = {"heavy": problem.alone(problem.heavy), "light": problem.alone(problem.light)}
        light_steps = ranked[0].timetable().models.count(problem.light)
        if 0 < light_steps < problem.steps and len(problem.models) == 2:
            anchors["sandwich"] = problem.sandwich(light_steps)
        best = [Candidate(self.schedules[s], self.space.show(self.choices[s]), "candidate") for s in self.order[:TOP]]
        others = [Candidate(schedule, name, "anchor") for name, schedule in anchors.items()]
        return unique(problem, [*best, *others]), self.confirm

    def _measured(self, log_Sn: np.ndarray) -> None:
        self.log_Sn, self.calls = log_Sn, self.problem.trials.spent.to_json()
        self.order = by_standing(log_Sn)

    def _check(self, schedules: Sequence[Schedule]) -> dict[str, Any]:
        """Whether independent runs of schedules on one chunk's rows give the tokens that the tree gave."""
        trials, checked = self.problem.trials, []
        for schedule in schedules:
            first, rows = next((f, r) for law, f, r in trials.hashes if law == trials.law(schedule))
            about = {"schedule": str(schedule), "first_row": first, "rows": rows}
            checked.append({**about, "same_tokens": trials.check(schedule, first, rows)})
        return {"equal": all(item["same_tokens"] for item in checked), "schedules": checked}

    def decide(self, final: Sequence[Candidate], log_Sn: np.ndarray) -> dict[str, Any]:
        """The best candidate on the fresh rows."""
        rows = ranked_rows(self.problem, final, log_Sn)
        names = [c.what for c in final]
        best = next(row for row in rows if row["kind"] == "candidate")
        for row in rows:
            row["against_best"] = paired(log_Sn[names.index(row["name"])], log_Sn[names.index(best["name"])])
        line = (
            f"Best of {len(self.schedules)}, chosen again on {best['rows']} fresh rows: {best['name']} "
            f"({best['schedule']}), {best['saved']:.1%} saved, "
            f"{difference(best['against_heavy'], ' in log-perplexity')} against all-heavy."
        )
        second = next((row for row in rows if row["kind"] == "candidate" and row is not best), None)
        line += "" if second is None else doubt(second["against_best"], second["name"], best["rows"])
        return {"schedule": best["schedule"], "confirmed": rows, "verdict": line}

    def best_so_far(self) -> dict[str, Any] | None:
        """The best on the rows that are done under all schedules; None if these are fewer than two."""
        trials = self.problem.trials
        if not self.log_Sn.shape[1]:
            done = set.intersection(*(set(trials.known(schedule)) for schedule in self.schedules)) & set(range(self.n))
            if len(done) < 2:
                return None
            self._measured(trials.scores(self.schedules, len(done)))  # chunks are done in order: these are the first
        s, n = self.order[0], self.log_Sn.shape[1]
        ppl = metrics.mean_perplexity(self.log_Sn[s])
        name = self.space.show(self.choices[s])
        line = f"Best of {len(self.schedules)} on {n} rows (not confirmed on fresh ones): {name}, perplexity {ppl:.3f}."
        return {"schedule": str(self.schedules[s]), "verdict": line}

    def report(self) -> dict[str, Any]:
        """All schedules, best first, and what they say about segments."""
        names = [self.space.show(choice) for choice in self.choices]
        rows = [summary(self.problem, names[s], self.schedules[s], self.log_Sn[s]) for s in self.order]
        spent = {"schedules_tried": len(rows), "n": self.log_Sn.shape[1], "search_calls": self.calls}
        found = {"schedules": rows, "top": rows[:5], "bottom": rows[::-1][:5], "tree_check": self.tree_check}
        return {**spent, **found, **segment_figures(self.space, self.choices, self.log_Sn)}


def segment_figures(space: Space, choices: Sequence[Choice], log_Sn: np.ndarray) -> dict[str, Any]:
    """For every model but the heavy one: how often it has each segment in the best and worst 20 schedules, and the
    segment's influence with its interval, on the rows of finite perplexity under all schedules."""
    index_SJ, order = np.array(choices), by_standing(log_Sn[:, ~np.isnan(log_Sn).any(axis=0)])
    shared_n = np.isfinite(metrics.exponential(log_Sn)).all(axis=0)
    ppl_Sn = np.exp(log_Sn[:, shared_n]) if shared_n.any() else np.full((len(choices), 1), math.nan)
    weights_Rn = metrics.resampling_weights(ppl_Sn.shape[1])
    mean_S, mean_RS = ppl_Sn.mean(axis=1), weights_Rn @ ppl_Sn.T
    out: dict[str, Any] = {"top_frequency": {}, "bottom_frequency": {}, "influence": {}, "influence_ci": {}}
    for o, (model, _) in enumerate(space.options[1:], 1):
        light_SJ = index_SJ == o
        with np.errstate(invalid="ignore"):
            contrast_SJ = light_SJ / light_SJ.sum(axis=0) - 1 / len(choices)  # nan where no schedule has it
        out["top_frequency"][model] = light_SJ[order[:TOP]].mean(axis=0).tolist()
        out["bottom_frequency"][model] = light_SJ[order[::-1][:TOP]].mean(axis=0).tolist()
        out["influence"][model] = [metrics.finite(v) for v in mean_S @ contrast_SJ]
        ends_2J = np.quantile(mean_RS @ contrast_SJ, [0.025, 0.975], axis=0)
        out["influence_ci"][model] = [[metrics.finite(low), metrics.finite(high)] for low, high in ends_2J.T]
    return out
