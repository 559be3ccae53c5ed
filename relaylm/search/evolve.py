r"""Evolution of schedules under a hard budget (the idea of OMS-DPM), for spaces too large to enumerate.

An individual is one option (a model and a density of steps) for each segment. Its fitness is its mean log-perplexity
on n rows that all individuals share, so differences are paired. The first generation has hand-made schedules (the
sandwich and the quarters, cut to segments), the minima of the likelihood bound, and random ones. A child has two
parents, each the best of three drawn at random: crossover (at one place, or segment by segment), then mutation (another
option in a segment, or two segments exchanged). A child that costs too much is made cheaper in random segments until it
is within the budget, and what the budget leaves is spent in random segments.

The regression of `space` on everything measured so far ranks many children before any is run; half of those that are
run are its favourites, half are not ranked. Fitness is always measured, never predicted. The best are confirmed on
fresh rows, with all-heavy and the equal-compute rivals.

Shapes: S segments, O options, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaylm.core.schedule import hand_made
from relaylm.errors import UserError
from relaylm.measure.metrics import paired_difference as paired
from relaylm.search.space import SLACK, Choice, Problem, Space
from relaylm.search.tournament import Candidate, all_heavy, difference, doubt, named, ranked_rows, rivals_within, unique
from relaylm.search.trials import Rows
from relaylm.search.tune import Tuner, measure_prior

GENERATIONS, POPULATION = 12, 16
SCREENED = 8  # children that are ranked for each that is run
FINALISTS = 5


@dataclass
class Evolve:
    """The best schedule within a limit on a row's price after GENERATIONS generations."""

    problem: Problem
    limit: float
    n: int = 64
    confirm: int = 1600

    def __post_init__(self) -> None:
        trials = self.problem.trials
        self.rows = Rows(trials, next=self.n)  # all generations share the first n
        self.space = self.problem.space()
        self.tuner = Tuner(self.problem, self.space, self.rows)
        self.rng = np.random.default_rng([trials.seed, 11])
        self.fitness: dict[Choice, float] = {}
        self.history: list[dict[str, Any]] = []
        self.calls: dict[str, Any] | None = None

    @property
    def ranked(self) -> list[Choice]:
        """All that were measured, best first."""
        return sorted(self.fitness, key=lambda choice: self.fitness[choice])

    def propose(self) -> tuple[list[Candidate], int]:
        """Run the generations; the best few, the rivals and all-heavy are finalists."""
        measure_prior(self.tuner, None, quick=False)
        self._run(self._first_generation(), "first generation")
        for generation in range(1, GENERATIONS + 1):
            self._record()
            born = self._children(self.ranked[:POPULATION], SCREENED * POPULATION)
            if not born:
                break  # everything that can be reached was measured
            self._run(self._screened(born), f"generation {generation} of {GENERATIONS}")
        self._record()
        self.calls = self.problem.trials.spent.to_json()
        space, best = self.space, self.ranked[:FINALISTS]
        found = [one for c in best for one in named(self.problem, space.show(c), space.schedule(c))]
        found += [*rivals_within(self.problem, self.limit), all_heavy(self.problem)]
        return unique(self.problem, found), self.confirm

    def _run(self, born: Sequence[Choice], what: str) -> None:
        schedules = [self.space.schedule(child) for child in born]
        heavy = self.problem.alone(self.problem.heavy)
        heavy_n, *log_Sn = self.problem.trials.scores([heavy, *schedules], self.n, what=what)
        for child, schedule, log_n in zip(born, schedules, log_Sn, strict=True):
            self.fitness[child] = paired(log_n, heavy_n)["difference"]
            self.tuner.know(schedule)

    def _record(self) -> None:
        parents = self.ranked[:POPULATION]
        losses = [self.fitness[choice] for choice in parents]
        about = {"generation": len(self.history), "measured": len(self.fitness), "best": self.space.show(parents[0])}
        self.history.append({**about, "best_loss": losses[0], "mean_loss": float(np.mean(losses))})

    def _first_generation(self) -> list[Choice]:
        """Minima of the bound and hand-made schedules within the limit, and random ones for the rest."""
        problem, space = self.problem, self.space
        guesses = [
            self.tuner.guess(self.limit, self.tuner.options(models, uniform))
            for uniform in (True, False)
            for models in (problem.models, (problem.models[0], problem.heavy), (problem.heavy,))
        ]
        found = dict.fromkeys(choice for choice in guesses if choice is not None)
        middle = np.cumsum((0, *space.widths))[:-1] + np.array(space.widths) // 2
        for schedule in hand_made().values():
            models = schedule.bind(problem.light, problem.heavy).timetable(problem.steps).models
            options = [space.options.index((models[k], space.options[0][1])) for k in middle.tolist()]
            found[within(space, self.limit, options, self.rng)] = None
        for _ in range(50 * POPULATION):
            if len(found) >= POPULATION:
                break
            wanted = self.rng.integers(0, len(space.options), space.segments).tolist()
            found[within(space, self.limit, wanted, self.rng)] = None
        return list(found)

    def _children(self, parents: Sequence[Choice], number: int) -> list[Choice]:
        """New individuals that were not measured yet."""
        space, rng = self.space, self.rng
        born: dict[Choice, None] = {}
        for _ in range(4 * number):
            # Parents are ranked, so the least of three drawn places is the best of three drawn parents.
            mother, father = (parents[int(rng.integers(0, len(parents), 3).min())] for _ in range(2))
            cut = int(rng.integers(0, space.segments + 1))
            take = rng.random(space.segments) < 0.5 if rng.random() < 0.5 else np.arange(space.segments) < cut
            child = [m if t else f for m, f, t in zip(mother, father, take.tolist(), strict=True)]
            if rng.random() < 0.5:
                i, j = (int(k) for k in rng.integers(0, space.segments, 2))
                child[i], child[j] = child[j], child[i]
            for j in np.flatnonzero(rng.random(space.segments) < 1 / space.segments).tolist():
                child[j] = int(rng.integers(len(space.options)))
            fitted = within(space, self.limit, child, rng)
            if fitted not in self.fitness:
                born[fitted] = None
            if len(born) == number:
                break
        return list(born)

    def _screened(self, born: Sequence[Choice]) -> list[Choice]:
        """Half of them the predictor's favourites, half the first of the others."""
        if len(born) <= POPULATION:
            return list(born)
        mixes = np.stack([mix for c in born if (mix := self.space.mix(self.space.schedule(c))) is not None])
        order = np.argsort(self.tuner.learn().predict(mixes), kind="stable").tolist()
        favourites = [born[k] for k in order[: POPULATION // 2]]
        others = [child for child in born if child not in favourites]
        return favourites + others[: POPULATION - len(favourites)]

    def decide(self, final: Sequence[Candidate], log_Sn: np.ndarray) -> dict[str, Any]:
        """The best finalist within the budget on the fresh rows."""
        rows = ranked_rows(self.problem, final, log_Sn)
        for row in rows:
            row["within_budget"] = row["price"] <= self.limit * (1 + SLACK)
        row = next(row for row in rows if row["within_budget"])
        best = "an equal-compute rival that beats the best" if row["kind"] == "rival" else "the best"
        line = (
            f"Use {row['schedule']}, {best} of {len(self.fitness)} measured: {row['saved']:.1%} of all-heavy's "
            f"{self.problem.unit} saved, {difference(row['against_heavy'], ' in log-perplexity')} against it on "
            f"{row['rows']} fresh rows."
        )
        line = line if row["kind"] == "mixed" else f"AN EQUAL-COMPUTE RIVAL WINS. {line}"
        others = [other for other in rows if other["within_budget"] and other["kind"] != row["kind"]]
        if others:
            scores = {str(candidate.schedule): log_n for candidate, log_n in zip(final, log_Sn, strict=True)}
            against = paired(scores[others[0]["schedule"]], scores[row["schedule"]])
            line += doubt(against, others[0]["name"], row["rows"])
        return {"schedule": row["schedule"], "confirmed": rows, "verdict": line}

    def best_so_far(self) -> dict[str, Any] | None:
        """The best that was measured."""
        if not self.fitness:
            return None
        schedule = self.space.schedule(self.ranked[0])
        saved = f"{self.problem.about(schedule)['saved']:.1%} saved"
        line = f"Stopped. Best of {len(self.fitness)} so far, not confirmed on fresh rows: {schedule}, {saved}."
        return {"schedule": str(schedule), "verdict": line}

    def report(self) -> dict[str, Any]:
        """The question, the generations, and what they spent."""
        about = {"limit": self.limit, "n": self.n, "predictor": True, "measured_schedules": len(self.fitness)}
        calls = self.calls or self.problem.trials.spent.to_json()
        return {**about, "history": self.history, "search_calls": calls}


def within(space: Space, limit: float, wanted: Sequence[int], rng: np.random.Generator) -> Choice:
    """The choice, made cheaper in random segments until it is within the limit; then more expensive in random segments
    where that still fits."""
    choice, price_SO = list(wanted), space.price_SO
    limit *= 1 + SLACK
    while space.price(choice) > limit:
        cheaper = np.argwhere(price_SO < price_SO[np.arange(space.segments), choice][:, None])
        if not len(cheaper):
            raise UserError("no schedule fits the budget")
        j, o = cheaper[int(rng.integers(len(cheaper)))].tolist()
        choice[j] = o
    for j in rng.permutation(space.segments).tolist():
        extra_O = price_SO[j] - price_SO[j, choice[j]]
        fits = np.flatnonzero((extra_O > 0) & (extra_O <= limit - space.price(choice)))
        if len(fits):
            trial = [*choice[:j], int(fits[extra_O[fits].argmax()]), *choice[j + 1 :]]
            choice = trial if space.price(trial) <= limit else choice
    return tuple(choice)
