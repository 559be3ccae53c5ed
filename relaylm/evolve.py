r"""Schedules that breed under a hard budget (OMS-DPM's idea): for spaces too large to try, and too odd for a model.

An individual is one option (a model, and a density of steps) for each segment. Its fitness is its mean log-perplexity
on n rows that all individuals share, so differences are paired. The first generation is hand-made (the sandwich and the
quarters, cut to segments) and allocated by the likelihood bound; the rest is chance. Children come from two parents,
each the best of three drawn at random: a crossover (at one place, or segment by segment), then mutation (another option
in a segment, or two segments exchanged). What costs too much is made cheaper in random segments until it fits, and what
money is left is spent in random segments: nobody ever exceeds the budget, in whatever unit it is.

A predictor, the regression of `surrogate` on everything measured so far, ranks many children before any is run; half of
those that are run are its favourites, half are not asked about. Fitness is always measured, never predicted.
The best are confirmed on fresh rows, with all-heavy and the equal-compute rivals beside them.

Shapes: S segments, O options, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.errors import UserError
from relaylm.exhaustive import paired_rows
from relaylm.race import rivals_within
from relaylm.schedule import Schedule, hand_made
from relaylm.surrogate import SLACK, Choice, Space
from relaylm.tree import Stopped
from relaylm.tune import Tuner, measure_prior

if TYPE_CHECKING:
    from relaylm.schedule_search import Problem

GENERATIONS, POPULATION = 12, 16
SCREENED = 8  # children that the predictor sees for each that is run
FINALISTS = 5


def evolve(
    problem: Problem,
    limit: float,
    n: int = 64,
    confirm: int = 1600,
    *,
    generations: int = GENERATIONS,
    population: int = POPULATION,
    predictor: bool = True,
) -> dict[str, Any]:
    """The best schedule within a limit on a row's price that so many generations bring forth."""
    trials, space = problem.trials, problem.space()
    rng = np.random.default_rng([trials.seed, 11])
    tuner = Tuner(problem, space, float("inf"))
    heavy = problem.alone(problem.heavy)
    fitness: dict[Choice, float] = {}
    history: list[dict[str, Any]] = []
    result: dict[str, Any] = {"stopped": None, "limit": limit, "n": n, "predictor": predictor}

    def run(children: Sequence[Choice], what: str) -> None:
        schedules = [space.schedule(child) for child in children]
        log_Sn = trials.scores([heavy, *schedules], n, what=what)
        for child, schedule, log_n in zip(children, schedules, log_Sn[1:], strict=True):
            fitness[child] = float(np.nanmean(log_n - log_Sn[0]))
            tuner.know(schedule)

    try:
        measure_prior(tuner, None, quick=False)
        run(first_generation(tuner, limit, population, rng), "first generation")
        for generation in range(1, generations + 1):
            parents = sorted(fitness, key=lambda c: fitness[c])[:population]
            history.append(_about(space, generation - 1, parents, fitness))
            born = _children(space, limit, parents, fitness, SCREENED * population, rng)
            if not born:
                break  # everything that can be reached was measured
            run(_screened(tuner, born, population, predictor), f"generation {generation} of {generations}")
        parents = sorted(fitness, key=lambda c: fitness[c])[:population]
        history.append(_about(space, len(history), parents, fitness))
    except (Stopped, KeyboardInterrupt) as stop:
        result["stopped"] = "time limit" if isinstance(stop, Stopped) else "interrupted"
        if not fitness:
            raise UserError("the search was stopped before its first generation: there is nothing to show") from None
    ranked = sorted(fitness, key=lambda c: fitness[c])
    result |= {"measured_schedules": len(fitness), "history": history, "confirmed": []}
    result["search_calls"] = trials.spent.to_json()
    winner = space.schedule(ranked[0])
    try:
        if result["stopped"] is None:
            result["confirmed"] = _confirm(problem, space, ranked[:FINALISTS], limit, n, confirm)
            best = next(row for row in result["confirmed"] if row["within_budget"])
            winner = Schedule.parse(best["schedule"])
    except (Stopped, KeyboardInterrupt) as stop:
        result["stopped"] = "time limit" if isinstance(stop, Stopped) else "interrupted"
    result |= {"schedule": str(winner), "recommendation": problem.about(winner)}
    return {**result, "verdict": _verdict(problem, result)}


# ------------------------------------------------------------------------------------------------ breeding


def first_generation(tuner: Tuner, limit: float, population: int, rng: np.random.Generator) -> list[Choice]:
    """Hand-made and allocated schedules within the limit, and chance for the rest."""
    space, problem = tuner.space, tuner.problem
    found: list[Choice] = []
    for uniform in (True, False):
        for models in (problem.models, (problem.models[0], problem.heavy), (problem.heavy,)):
            if (choice := tuner.guess(limit, tuner.options(models, uniform))) is not None:
                found.append(choice)
    for schedule in hand_made().values():
        table = schedule.bind(problem.light, problem.heavy).timetable(problem.steps)
        middle = np.cumsum((0, *space.widths))[:-1] + np.array(space.widths) // 2
        names = [table.models[k] for k in middle.tolist()]
        found.append(within(space, limit, [space.options.index((name, space.options[0][1])) for name in names], rng))
    unique = list(dict.fromkeys(found))
    for _ in range(50 * population):
        if len(unique) >= population:
            break
        child = within(space, limit, rng.integers(0, len(space.options), space.segments).tolist(), rng)
        if child not in unique:
            unique.append(child)
    return unique[: max(population, len(unique))]


def within(space: Space, limit: float, wanted: Sequence[int], rng: np.random.Generator) -> Choice:
    """The choice, made cheaper in random segments until it is within the limit; then dearer in random segments where
    that still fits."""
    choice, price_SO = list(wanted), space.price_SO
    limit *= 1 + SLACK
    while space.price(choice) > limit:
        cheaper = [
            (j, o)
            for j in range(space.segments)
            for o in range(len(space.options))
            if price_SO[j, o] < price_SO[j, choice[j]]
        ]
        if not cheaper:
            raise UserError("no schedule fits the budget")
        j, o = cheaper[int(rng.integers(len(cheaper)))]
        choice[j] = o
    for j in rng.permutation(space.segments).tolist():
        room = limit - space.price(choice)
        extra_O = price_SO[j] - price_SO[j, choice[j]]
        fits = np.flatnonzero((extra_O > 0) & (extra_O <= room))
        if len(fits):
            trial = [*choice[:j], int(fits[extra_O[fits].argmax()]), *choice[j + 1 :]]
            choice = trial if space.price(trial) <= limit else choice
    return tuple(choice)


def _children(
    space: Space,
    limit: float,
    parents: Sequence[Choice],
    fitness: dict[Choice, float],
    number: int,
    rng: np.random.Generator,
) -> list[Choice]:
    """New individuals that were not measured yet."""
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
        fitted = within(space, limit, child, rng)
        if fitted not in fitness:
            born[fitted] = None
        if len(born) == number:
            break
    return list(born)


def _screened(tuner: Tuner, born: Sequence[Choice], number: int, predictor: bool) -> list[Choice]:
    """Half of them the predictor's favourites, half the first of the others."""
    if not predictor or len(born) <= number:
        return list(born[:number])
    schedules = [tuner.space.schedule(child) for child in born]
    mixes = np.stack([mix for schedule in schedules if (mix := tuner.space.mix(schedule)) is not None])
    order = np.argsort(tuner.learn().predict(mixes), kind="stable").tolist()
    favourites = [born[k] for k in order[: number // 2]]
    return favourites + [child for child in born if child not in favourites][: number - len(favourites)]


# ------------------------------------------------------------------------------------------------ results


def _about(space: Space, generation: int, parents: Sequence[Choice], fitness: dict[Choice, float]) -> dict[str, Any]:
    losses = [fitness[choice] for choice in parents]
    return {
        "generation": generation,
        "measured": len(fitness),
        "best": space.show(parents[0]),
        "best_loss": losses[0],
        "mean_loss": float(np.mean(losses)),
    }


def _confirm(
    problem: Problem, space: Space, ranked: Sequence[Choice], limit: float, first: int, n: int
) -> list[dict[str, Any]]:
    """The finalists, the rivals and all-heavy on rows that nobody was chosen by, best first."""
    named = {space.show(choice): space.schedule(choice) for choice in ranked}
    laws = {problem.trials.law(schedule) for schedule in named.values()}
    kinds = dict.fromkeys(named, "mixed")
    for rival in rivals_within(problem, limit):
        if problem.trials.law(rival.schedule) not in laws:
            named[rival.what] = rival.schedule
            kinds[rival.what] = "rival"
            laws.add(problem.trials.law(rival.schedule))
    heavy = problem.alone(problem.heavy)
    if problem.trials.law(heavy) not in laws:
        named["all-heavy"], kinds["all-heavy"] = heavy, "anchor"
    log_Sn = problem.trials.scores(list(named.values()), n, first, what="confirming")
    rows = paired_rows(problem, named, log_Sn)
    for row in rows:
        row |= {"kind": kinds[row["name"]], "within_budget": row["price"] <= limit * (1 + SLACK)}
    return rows


def _verdict(problem: Problem, result: dict[str, Any]) -> str:
    about = result["recommendation"]
    if not result["confirmed"]:
        return (
            f"Stopped. Best of {result['measured_schedules']} so far, not confirmed on fresh rows: "
            f"{about['schedule']}, {about['saved']:.1%} saved."
        )
    row = next(row for row in result["confirmed"] if row["schedule"] == about["schedule"])
    low, high = row["against_heavy"]["ci"]
    best = "an equal-compute rival that beats the best" if row["kind"] == "rival" else "the best"
    line = (
        f"Use {about['schedule']}, {best} of {result['measured_schedules']} measured: {about['saved']:.1%} of "
        f"all-heavy's {problem.unit} saved, {row['against_heavy']['difference']:+.4f} in log-perplexity "
        f"({low:+.4f} to {high:+.4f}) against it on {row['rows']} fresh rows."
    )
    return line if row["kind"] == "mixed" else f"AN EQUAL-COMPUTE RIVAL WINS. {line}"
