r"""The last stages of `tune` at one budget: who may run, a race on fresh rows, a confirmation on fresher ones.

**Who runs.** The model's best schedules of two models, of all models, of the heavy model in fewer steps, and of models
and steps together; the best of those measured so far; what the likelihood bound would allocate step by step; the light
model for the first eighth or quarter of time and then fewer steps of the heavy one, made by hand, because few rows say
little of single segments at the masked end, where rows of one plan part for good; and the equal-compute rivals, without
which nothing is worth its trouble: each model alone, in as many steps as the budget allows, and the sandwich.

**The race.** Rows come in rounds that double, all-heavy among them. After a round a contender is dropped if it is worse
than the leader by a one-sided paired t-test at level 0.05 / (contenders x rounds). By Bonferroni's correction the
chance that the truly best is ever dropped in favour of a worse one is then at most 5%. Of those that are left the one
with the least expected loss wins: by the model, which has all rows to go by, where it can express the schedule.

**The confirmation.** The winner, the next best, the best rival, the sandwich and all-heavy on rows that chose nothing.
These are the figures that are reported. If another is significantly better there, that one is recommended; and so is
a single model that does no worse than the winner, being simpler.

Shapes: S schedules, n rows, K models, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.allocate import allocate
from relaylm.schedule import Schedule, Segment
from relaylm.schedule_bound import step_costs
from relaylm.surrogate import SLACK, Choice
from relaylm.trials import paired

if TYPE_CHECKING:
    from relaylm.schedule_search import Problem
    from relaylm.tune import Tuner

FIRST_ROUND, RACE_ROUNDS, ALPHA = 8, 8, 0.05
CONFIRM = 1600  # rows at most
MOST_RUNS = 5  # of one model, in schedules allocated step by step
LIGHT_FIRST = (8, 4)  # one part in so many of time


@dataclass(frozen=True)
class Candidate:
    schedule: Schedule
    what: str  # in words
    kind: str  # "mixed", "rival" or "anchor"


def named(problem: Problem, schedule: Schedule, what: str) -> Candidate:
    """A mixed schedule; or, whoever proposes it, one model alone, which is a rival."""
    if len(schedule.segments) > 1:
        return Candidate(schedule, what, "mixed")
    fewer = "" if schedule.steps == problem.steps else f" in {schedule.steps} steps"
    return Candidate(schedule, f"{schedule.models[0]} alone{fewer}", "rival")


# ------------------------------------------------------------------------------------------------ who runs


def _most(price: Callable[[int], float], low: int, high: int, limit: float) -> int | None:
    """The largest number from low to high whose price, which rises with it, is within a limit; None if no one's is."""
    limit *= 1 + SLACK
    if low > high or price(low) > limit:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if price(middle) <= limit else (low, middle - 1)
    return low


def steps_within(problem: Problem, model: str, limit: float) -> int | None:
    """The most steps, up to T, that one model may take within a limit; None if not even one fits."""
    return _most(lambda steps: problem.price(problem.alone(model, steps)), 1, problem.steps, limit)


def sandwich_within(problem: Problem, limit: float) -> Schedule | None:
    """The sandwich of the light and the heavy model with the fewest light steps that is within a limit."""

    def at(heavy_steps: int) -> Schedule:
        last = (problem.steps - heavy_steps) // 2
        first = problem.steps - heavy_steps - last
        runs = [(problem.light, first), (problem.heavy, heavy_steps), (problem.light, last)]
        return Schedule(tuple(Segment(name, count) for name, count in runs if count))

    steps = _most(lambda steps: problem.price(at(steps)), 0, problem.steps, limit)
    return None if steps is None else at(steps)


def light_first(problem: Problem, limit: float, part: int) -> Schedule | None:
    """The light model at every step of the first 1/part of time, and then the heavy one in as many steps of one size as
    the limit allows; None if there is no room for that."""
    first = max(1, round(problem.steps / part))
    share = Fraction(first, problem.steps)
    if problem.light == problem.heavy or first == problem.steps:
        return None

    def at(steps: int) -> Schedule:
        return Schedule((Segment(problem.light, first, share), Segment(problem.heavy, steps, 1 - share)))

    steps = _most(lambda steps: problem.price(at(steps)), 1, problem.steps - first, limit)
    return None if steps is None else at(steps)


def by_hand(problem: Problem, limit: float) -> list[Candidate]:
    """`light_first` for each of LIGHT_FIRST, where steps may be larger than those of the full grid."""
    found = [light_first(problem, limit, part) for part in LIGHT_FIRST if len(problem.densities) > 1]
    return [named(problem, schedule, "light first, then fewer steps") for schedule in found if schedule is not None]


def rivals_within(problem: Problem, limit: float) -> list[Candidate]:
    """Each model alone, in as many steps as the limit allows, and the sandwich."""
    found = []
    for model in problem.models[::-1]:
        steps = steps_within(problem, model, limit)
        if steps is not None:
            found.append(named(problem, problem.alone(model, steps), ""))
    if len(problem.models) > 1 and (sandwich := sandwich_within(problem, limit)) is not None:
        found.append(Candidate(sandwich, "sandwich", "rival"))
    return found


def by_the_bound(tuner: Tuner, limit: float, models: Sequence[str]) -> Schedule | None:
    """The schedule of least likelihood bound, allocated step by step on the uniform grid."""
    problem, table = tuner.problem, tuner.table
    if table is None:
        return None
    steps = problem.steps
    loss_KT = step_costs(table, [(steps - k) / steps for k in range(steps + 1)])
    price_K = [problem.price(problem.alone(name)) / steps for name in models]
    if min(price_K) * steps > limit:
        return None
    price_KT = np.repeat(np.array(price_K)[:, None], steps, axis=1)
    index_T = allocate(loss_KT[[table.models.index(name) for name in models]], price_KT, limit, segments=MOST_RUNS)
    runs = [(models[k], len(list(run))) for k, run in groupby(index_T.tolist())]
    return Schedule(tuple(Segment(name, count) for name, count in runs))


def candidates(tuner: Tuner, limit: float) -> list[Candidate]:
    """The rivals within a limit and the few best of each kind; what does the same stands there once."""
    problem, space, models = tuner.problem, tuner.space, tuner.problem.models
    found = rivals_within(problem, limit)
    pair = tuple(dict.fromkeys((models[0], models[-1])))

    def add(choice: Choice | None, what: str) -> None:
        if choice is not None and space.price(choice) <= limit * (1 + SLACK):
            found.append(named(problem, space.schedule(choice), what))

    add(tuner.guess(limit, tuner.options(pair, uniform=True)), "two models")
    add(tuner.guess(limit, tuner.options(models, uniform=True)), "all models")
    add(tuner.guess(limit, tuner.options(models[-1:], uniform=False)), "fewer steps where they are safe")
    add(tuner.guess(limit, tuner.options(pair, uniform=False)), "two models and fewer steps")
    add(tuner.guess(limit), "models and steps together")
    near = [choice for choice in tuner.choices if space.price(choice) <= limit * (1 + SLACK)]
    if tuner.fit is not None and near:
        said_N = tuner.predict([tuner.choices[choice] for choice in near])
        for k in np.argsort(said_N, kind="stable")[:4].tolist():
            add(near[k], "proposed and measured")
    found += by_hand(problem, limit)
    for names, what in ((pair, "two models, by the bound"), (models, "all models, by the bound")):
        if (schedule := by_the_bound(tuner, limit, names)) is not None:
            found.append(named(problem, schedule, what))
    unique: dict[str, Candidate] = {}
    for candidate in found:
        unique.setdefault(problem.trials.law(candidate.schedule), candidate)
    return list(unique.values())


# ------------------------------------------------------------------------------------------------ the race


def race(tuner: Tuner, limit: float, confirm: int | None = None) -> dict[str, Any]:
    """The recommendation within a limit. So many rows for the confirmation (`confirm`) are taken even if they cost more
    calls than are left."""
    from relaylm.tune import SHARES

    problem = tuner.problem
    runners, heavy = candidates(tuner, limit), problem.alone(problem.heavy)
    alive = list(range(len(runners)))
    logs: dict[int, np.ndarray] = {c: np.zeros(0) for c in alive}
    heavy_log, dropped = np.zeros(0), []
    level = ALPHA / (max(1, len(runners) - 1) * RACE_ROUNDS)
    first_row, rounds = tuner.next_row, 0
    while rounds < RACE_ROUNDS and (len(alive) > 1 or not rounds):
        running = [*(runners[c].schedule for c in alive), heavy]
        n = min(FIRST_ROUND << rounds, tuner.affordable(running, tuner.left - SHARES["confirmation"] * tuner.budget))
        if n < 2 and rounds:
            break
        *log_Sn, heavy_n = tuner.take_rows(running, max(2, n), f"race of {len(alive)}")
        heavy_log = np.append(heavy_log, heavy_n)
        for c, log_n in zip(alive, log_Sn, strict=True):
            logs[c] = np.append(logs[c], log_n)
        leader = min(alive, key=lambda c: float(np.nanmean(logs[c])))
        for c in [c for c in alive if c != leader]:
            against = paired(logs[c], logs[leader])
            if against["difference"] > 0 and against["p"] / 2 < level:
                alive.remove(c)
                about = {"schedule": str(runners[c].schedule), "what": runners[c].what, "after_rows": against["rows"]}
                dropped.append({**about, "difference": against["difference"], "to": str(runners[leader].schedule)})
        rounds += 1
    known = [c for c in alive if tuner.know(runners[c].schedule)]
    tuner.learn()
    loss = {c: float(np.nanmean(logs[c] - heavy_log)) for c in alive}
    loss |= {c: float(tuner.predict([runners[c].schedule])[0]) for c in known}
    ranked = sorted(alive, key=lambda c: loss[c])
    tuner.stages["race"] = {
        "contenders": [{"what": c.what, "kind": c.kind, **problem.about(c.schedule)} for c in runners],
        "rounds": rounds,
        "rows": tuner.next_row - first_row,
        "dropped": dropped,
        "left": [{"schedule": str(runners[c].schedule), "what": runners[c].what, "loss": loss[c]} for c in ranked],
    }
    finalists = _finalists(runners, ranked, logs)
    laws = {problem.trials.law(c.schedule) for c in finalists}
    if problem.trials.law(heavy) not in laws:
        finalists.append(Candidate(heavy, "all-heavy", "anchor"))
    schedules = [c.schedule for c in finalists]
    n = confirm or min(CONFIRM, max(FIRST_ROUND, tuner.affordable(schedules, tuner.left)))
    return _conclude(problem, finalists, tuner.take_rows(schedules, n, "confirmation"), limit)


def _finalists(runners: Sequence[Candidate], ranked: Sequence[int], logs: dict[int, np.ndarray]) -> list[Candidate]:
    """The best two that are left, the best rival, the best mixed schedule and the sandwich."""
    final = list(ranked[:2])
    rivals = [c for c in ranked if runners[c].kind == "rival"] or [
        c for c in sorted(logs, key=lambda c: float(np.nanmean(logs[c]))) if runners[c].kind == "rival"
    ]
    mixed = [c for c in ranked if runners[c].kind == "mixed"]
    sandwich = [c for c, runner in enumerate(runners) if runner.what == "sandwich"]
    for group in (rivals, mixed, sandwich):
        final += [c for c in group[:1] if c not in final]
    return [runners[c] for c in final]


def _conclude(problem: Problem, finalists: Sequence[Candidate], log_Sn: np.ndarray, limit: float) -> dict[str, Any]:
    """The race's winner is recommended, unless the fresh rows show another to be better, or something simpler to do no
    worse."""
    laws = [problem.trials.law(c.schedule) for c in finalists]
    heavy_n = log_Sn[laws.index(problem.trials.law(problem.alone(problem.heavy)))]
    within = [s for s, c in enumerate(finalists) if problem.price(c.schedule) <= limit * (1 + SLACK)]
    chosen = within[0]
    for s in within[1:]:
        against = paired(log_Sn[s], log_Sn[chosen])
        simpler = len(finalists[s].schedule.segments) == 1 < len(finalists[chosen].schedule.segments)
        if against["difference"] <= 0 and (against["differs"] or simpler):
            chosen = s
    rows = [
        {
            **figures(problem, candidate, log_Sn[s], heavy_n),
            "within_budget": s in within,
            "against_recommended": paired(log_Sn[s], log_Sn[chosen]),
            "recommended": s == chosen,
        }
        for s, candidate in enumerate(finalists)
    ]
    rows.sort(key=lambda row: row["log_ppl"])
    return {
        **recommendation(problem, finalists[chosen]),
        "limit": limit,
        "confirmed": rows,
        "basis": "a race, and a confirmation on fresh rows",
        "verdict": _verdict(rows, problem),
    }


def figures(problem: Problem, candidate: Candidate, log_n: np.ndarray, heavy_n: np.ndarray) -> dict[str, Any]:
    """One line of a table."""
    return {
        "what": candidate.what,
        "kind": candidate.kind,
        **problem.about(candidate.schedule),
        "rows": len(log_n),
        "ppl": float(np.nanmean(np.exp(log_n))),
        "log_ppl": float(np.nanmean(log_n)),
        "against_heavy": paired(log_n, heavy_n),
    }


def recommendation(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    about = {"what": candidate.what, "kind": candidate.kind, **problem.about(candidate.schedule)}
    return {"schedule": str(candidate.schedule), "recommendation": about}


def use(problem: Problem, row: dict[str, Any]) -> str:
    """What to do, in words."""
    schedule = Schedule.parse(row["schedule"])
    if len(schedule.segments) == 1:
        fewer = "" if row["steps"] == problem.steps else f" in {row['steps']} steps instead of {problem.steps}"
        return f"Use the {schedule.models[0]} model alone{fewer}"
    return f"Use {row['schedule']} ({row['what']})"


def _verdict(rows: Sequence[dict[str, Any]], problem: Problem) -> str:
    """What to use, what it saves, what it costs in quality, and whether something simpler does as well."""
    chosen = next(row for row in rows if row["recommended"])
    low, high = chosen["against_heavy"]["ci"]
    line = f"{use(problem, chosen)}: {chosen['saved']:.1%} of all-heavy's {problem.unit} saved"
    if chosen["against_heavy"]["sd"]:
        line += f", log-perplexity {chosen['against_heavy']['difference']:+.4f} ({low:+.4f} to {high:+.4f}) against it"
    line += f" on {chosen['rows']} fresh rows."
    others = [row for row in rows if row["kind"] == "rival" and row["within_budget"] and not row["recommended"]]
    if others and chosen["kind"] == "mixed":
        rival = min(others, key=lambda row: row["log_ppl"])
        against = rival["against_recommended"]
        margin = f"{against['difference']:+.4f} ({against['ci'][0]:+.4f} to {against['ci'][1]:+.4f})"
        if against["differs"] and against["difference"] > 0:
            line += f" The best equal-compute rival, {rival['what']}, is worse: {margin}."
        else:
            line += f" It CANNOT BE TOLD APART from the best equal-compute rival, {rival['what']}: {margin}."
    mixed = [row for row in rows if row["kind"] == "mixed" and row["within_budget"]]
    if mixed and chosen["kind"] != "mixed":
        against = min(mixed, key=lambda row: row["log_ppl"])["against_recommended"]
        margin = f"{against['difference']:+.4f} ({against['ci'][0]:+.4f} to {against['ci'][1]:+.4f})"
        if against["differs"] and against["difference"] > 0:
            line += f" AN EQUAL-COMPUTE RIVAL WINS: the best mixed schedule is at {margin} against it."
        else:
            line += f" No mixed schedule is shown to be better than this simpler choice; the best is at {margin}."
    return line
