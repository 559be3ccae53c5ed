r"""Candidates for a budget, and the rules that choose among them on rows that none of them was chosen by.

**Rivals.** A mixed schedule is only worth using if nothing simpler does as well at the same cost. So every choice
includes the equal-compute rivals: each model alone, in as many steps as the budget allows or with the largest spacing,
and the sandwich.

**Race.** Rows come in rounds that double. After each round a candidate is dropped if it is worse than the leader by a
one-sided paired t-test at level 0.05 / (candidates x rounds). By Bonferroni's correction the chance that the truly best
is ever dropped in favour of a worse one is at most 5%.

**Confirmation.** A few finalists, all-heavy among them, on fresh rows. The first finalist is recommended unless the
fresh rows show another to be better, or a single model to be no worse, which is simpler.

**Front.** For each of several limits the best candidate within it, chosen on one half of the rows and reported on the
other, so that the choice does not bias the figures. Many candidates share few rows, so the choice uses means that are
monotone in the price (`more_is_no_worse`). With the spreads recorded on `wiki-char` 31 rows then choose as well as 62.

**Allowed loss.** The cheapest candidate whose loss is shown to be within a limit: the upper end of a one-sided 95%
interval, corrected for the number of candidates, is. All-heavy loses nothing and is always among them.

Shapes: S schedules, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import stdtrit

from relaylm.core.notation import brief
from relaylm.core.schedule import Schedule, Segment, Spacing
from relaylm.measure import metrics
from relaylm.measure.metrics import paired_difference as paired
from relaylm.measure.rivals import one_model, steps_within
from relaylm.search.space import SLACK, Problem
from relaylm.search.trials import Rows

FIRST_ROUND, RACE_ROUNDS, ALPHA = 8, 8, 0.05
LIGHT_FIRST = (8, 4)  # one part in so many of time


@dataclass(frozen=True)
class Candidate:
    """A schedule that may be recommended, or that others are compared with."""

    schedule: Schedule
    what: str  # in words
    kind: str  # "mixed", "rival" or "anchor"; "candidate" in an exhaustive search


def named(problem: Problem, what: str, *schedules: Schedule | None) -> list[Candidate]:
    """Mixed schedules; or one model alone, which is a rival wherever it comes from. None is left out."""
    found = []
    for schedule in (schedule for schedule in schedules if schedule is not None):
        fewer = "" if schedule.steps == problem.steps else f" in {schedule.steps} steps"
        how = fewer if schedule.spacing is None else f", {schedule.spacing}"
        mixed = len(schedule.segments) > 1
        alone = Candidate(schedule, f"{schedule.models[0]} alone{how}", "rival")
        found.append(Candidate(schedule, what, "mixed") if mixed else alone)
    return found


def all_heavy(problem: Problem) -> Candidate:
    """What losses are counted from."""
    return Candidate(problem.alone(problem.heavy), "all-heavy", "anchor")


def unique(problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """The first of those that do the same."""
    kept: dict[str, Candidate] = {}
    for candidate in found:
        kept.setdefault(problem.trials.law(candidate.schedule), candidate)
    return list(kept.values())


# ------------------------------------------------------------------------------------------------ rivals


def _largest(problem: Problem, at: Callable[[int], Schedule], limit: float, least: int, most: int) -> Schedule | None:
    """The most expensive schedule within a limit among those `at` a number of steps; None if all cost more."""
    steps = steps_within(lambda steps: problem.price(at(steps)), limit * (1 + SLACK), least, most)
    return None if steps is None else at(steps)


def light_first(problem: Problem, limit: float, part: int) -> Schedule | None:
    """The light model at every step of the first 1/part of time, then the heavy one in as many steps of one size as
    the limit allows; None if no step is left for it."""
    first = max(1, round(problem.steps / part))
    share = Fraction(first, problem.steps)
    if problem.light == problem.heavy or first == problem.steps:
        return None

    def at(steps: int) -> Schedule:
        return Schedule((Segment(problem.light, first, share), Segment(problem.heavy, steps, 1 - share)))

    return _largest(problem, at, limit, 1, problem.steps - first)


def by_hand(problem: Problem, limit: float) -> list[Candidate]:
    """`light_first` for each of LIGHT_FIRST, where steps may be larger than those of the full grid. Few rows say little
    about single segments at the masked end, so the tuner alone finds these too rarely."""
    found = [light_first(problem, limit, part) for part in LIGHT_FIRST if len(problem.densities) > 1]
    return named(problem, "light first, then fewer steps", *found)


def rivals_within(problem: Problem, limit: float) -> list[Candidate]:
    """Each model alone, in as many steps or with as large a spacing below the length as the limit allows, and the
    sandwich of the light and the heavy model with the fewest light steps."""

    def spaced(model: str, distance: int) -> Schedule:
        return one_model(model, Spacing(distance))

    models, steps, widest = problem.models[::-1], problem.steps, max(1, problem.length - 1)
    alone = [_largest(problem, partial(problem.alone, m), limit, 1, steps) for m in models]
    alone += [_largest(problem, partial(spaced, m), limit, 1, widest) for m in models if problem.spaced]
    found = named(problem, "", *alone)
    if len(models) > 1:
        sandwich = _largest(problem, lambda heavy: problem.sandwich(steps - heavy), limit, 0, steps)
        found += [] if sandwich is None else [Candidate(sandwich, "sandwich", "rival")]
    return found


# ------------------------------------------------------------------------------------------------ the race


@dataclass
class Race:
    """How a race went: the scores of each runner and of all-heavy, who is left, who was dropped and why."""

    log_ppl: list[np.ndarray]  # by runner
    heavy_n: np.ndarray
    alive: list[int]
    rounds: int = 0
    dropped: list[dict[str, Any]] = field(default_factory=list)


def race(rows: Rows, runners: Sequence[Candidate], heavy: Schedule, reserve: float) -> Race:
    """Drop runners that are shown to be worse than the leader until one is left, the rounds are over, or only `reserve`
    calls are left."""
    found = Race([np.zeros(0) for _ in runners], np.zeros(0), list(range(len(runners))))
    level = ALPHA / (max(1, len(runners) - 1) * RACE_ROUNDS)
    while found.rounds < RACE_ROUNDS and (len(found.alive) > 1 or not found.rounds):
        running = [*(runners[c].schedule for c in found.alive), heavy]
        n = min(FIRST_ROUND << found.rounds, rows.affordable(running, rows.left - reserve))
        if n < 2 and found.rounds:
            break
        *log_Sn, heavy_n = rows.take(running, max(2, n), f"race of {len(found.alive)}")
        found.heavy_n = np.append(found.heavy_n, heavy_n)
        for c, log_n in zip(found.alive, log_Sn, strict=True):
            found.log_ppl[c] = np.append(found.log_ppl[c], log_n)
        leader = min(found.alive, key=lambda c: metrics.standing(found.log_ppl[c]))
        for c in [c for c in found.alive if c != leader]:
            against = paired(found.log_ppl[c], found.log_ppl[leader])
            if against["difference"] > 0 and against["p"] / 2 < level:
                found.alive.remove(c)
                about = {"schedule": str(runners[c].schedule), "what": runners[c].what, "after_rows": against["rows"]}
                about |= {"difference": against["difference"], "to": str(runners[leader].schedule)}
                found.dropped.append(about)
        found.rounds += 1
    return found


def finalists(problem: Problem, runners: Sequence[Candidate], ranked: Sequence[int], ran: Race) -> list[Candidate]:
    """The best two that are left, the best rival, the best mixed schedule, the sandwich and all-heavy; and always the
    strongest simple rivals, the heavy model in fewer steps and the heavy model spaced."""
    all_ranked = sorted(range(len(runners)), key=lambda c: metrics.standing(ran.log_ppl[c]))
    rivals = [c for c in (*ranked, *all_ranked) if runners[c].kind == "rival"]
    mixed = [c for c in ranked if runners[c].kind == "mixed"]
    sandwich = [c for c, runner in enumerate(runners) if runner.what == "sandwich"]
    simple = {_way(problem, runners[c]): c for c in rivals[::-1] if runners[c].schedule.models == (problem.heavy,)}
    chosen = [*ranked[:2], *rivals[:1], *mixed[:1], *simple.values(), *sandwich]
    return unique(problem, [*(runners[c] for c in chosen), all_heavy(problem)])


def confirmed(problem: Problem, final: Sequence[Candidate], log_Sn: np.ndarray, limit: float) -> dict[str, Any]:
    """The first finalist is recommended, unless fresh rows show another to be better, or one model to be no worse."""
    heavy_n = heavy_scores(problem, final, log_Sn)
    within = [s for s, c in enumerate(final) if problem.price(c.schedule) <= limit * (1 + SLACK)]
    chosen = within[0]
    for s in within[1:]:
        against = paired(log_Sn[s], log_Sn[chosen])
        simpler = len(final[s].schedule.segments) == 1 < len(final[chosen].schedule.segments)
        if against["difference"] <= 0 and (against["differs"] or simpler):
            chosen = s
    rows = [
        {
            **figures(problem, candidate, log_Sn[s], heavy_n),
            "within_budget": s in within,
            "against_recommended": paired(log_Sn[s], log_Sn[chosen]),
            "recommended": s == chosen,
        }
        for s, candidate in enumerate(final)
    ]
    order = {str(c.schedule): metrics.standing(log_n) for c, log_n in zip(final, log_Sn, strict=True)}
    rows.sort(key=lambda row: order[row["schedule"]])
    words = {"basis": "a race, and a confirmation on fresh rows", "verdict": _verdict(problem, rows)}
    return {**recommended(problem, final[chosen]), "limit": limit, "confirmed": rows, **words}


def _verdict(problem: Problem, rows: Sequence[dict[str, Any]]) -> str:
    """What to use, what it saves, what it costs in quality, whether something simpler does as well, and how sure that
    is."""
    chosen = next(row for row in rows if row["recommended"])
    line = f"{use(problem, chosen)}: {chosen['saved']:.1%} of all-heavy's {problem.unit} saved"
    if chosen["against_heavy"]["sd"] or math.isinf(chosen["against_heavy"]["difference"]):
        line += f", log-perplexity {difference(chosen['against_heavy'])} against it"
        line += "" if chosen["against_heavy"]["differs"] else ", which may be chance"
    line += f" on {chosen['rows']} fresh rows."
    other = "rival" if chosen["kind"] == "mixed" else "mixed"
    others = [row for row in rows if row["kind"] == other and row["within_budget"] and not row["recommended"]]
    if not others:
        return line
    row = min(others, key=lambda row: row["log_ppl"])
    against = row["against_recommended"]
    worse, margin = against["differs"] and against["difference"] > 0, difference(against)
    if other == "rival" and worse:
        return f"{line} The best equal-compute rival, {row['what']}, is worse: {margin}."
    if worse:
        return f"{line} AN EQUAL-COMPUTE RIVAL WINS: the best mixed schedule is at {margin} against it."
    needed = _needed(against, chosen["rows"])
    if other == "rival":
        return (
            f"NOT SIGNIFICANT. {line} It is not shown to be better than the best equal-compute rival, {row['what']}: "
            f"{margin}.{needed}"
        )
    return f"{line} No mixed schedule is shown to be better than this simpler choice; the best is at {margin}.{needed}"


def doubt(against: dict[str, Any], other: str, rows: int) -> str:
    """What is to be added where the choice is not shown to be better than the next best; nothing if it is."""
    if against["differs"]:
        return ""
    margin = f"{other} is at {difference(against)} against it"
    return f" NOT SIGNIFICANT: {margin}, which may be chance.{_needed(against, rows)}"


def _needed(against: dict[str, Any], rows: int) -> str:
    """How many rows would show a difference of the size that was measured, if that is more than there were."""
    needed = against.get("samples_needed")
    if needed is None or needed <= rows:
        return ""
    return f" To tell a difference of that size takes about {needed:,} rows (--confirm {needed})."


# ------------------------------------------------------------------------------------------------ several limits


def ladder(
    problem: Problem, rungs: Sequence[Candidate], log_Sn: np.ndarray, limits: Sequence[float], max_loss: float | None
) -> dict[str, Any]:
    """The best candidate within each limit; with a `max_loss` the cheapest that keeps to it. All-heavy comes first."""
    rows = [figures(problem, c, log_n, log_Sn[0]) for c, log_n in zip(rungs, log_Sn, strict=True)]
    price_S, mean_S = (np.array([row[key] for row in rows]) for key in ("price", "log_ppl"))
    if max_loss is None:
        picked, found = _front(problem, rungs, log_Sn, price_S, limits)
    else:
        picked, found = _cheapest(problem, rows, log_Sn, max_loss)
    for s, row in enumerate(rows):
        row["on_front"] = not ((price_S <= price_S[s]) & (mean_S < mean_S[s])).any()
        row["recommended"] = s in picked
    rows.sort(key=lambda row: row["price"])
    return {**recommended(problem, rungs[picked[len(picked) // 2]]), "confirmed": rows, **found}


def _front(
    problem: Problem, rungs: Sequence[Candidate], log_Sn: np.ndarray, price_S: np.ndarray, limits: Sequence[float]
) -> tuple[list[int], dict[str, Any]]:
    """The best for each limit, and the figures of the front."""
    half = log_Sn.shape[1] // 2
    ways = [_way(problem, candidate) for candidate in rungs]
    chosen_S, fresh_Sn = more_is_no_worse(ways, price_S, np.nanmean(log_Sn[:, :half], axis=1)), log_Sn[:, half:]
    goals, picked, mixed, wins = [], [], 0, 0
    for limit in limits:
        within = np.flatnonzero(price_S <= limit * (1 + SLACK)).tolist()
        order = sorted(within, key=lambda s: (chosen_S[s], -price_S[s]))
        s, rival = order[0], next((r for r in order if rungs[r].kind != "mixed"), None)
        goal: dict[str, Any] = {"limit": limit, "saved_at_least": 1 - limit / problem.all_heavy, "best_rival": None}
        beats = True
        if rival is not None:
            against = paired(fresh_Sn[s], fresh_Sn[rival])
            beats = against["differs"] and against["difference"] < 0
            about = {"schedule": str(rungs[rival].schedule), "what": rungs[rival].what}
            goal["best_rival"] = {**about, "against": against}
        mixed += rungs[s].kind == "mixed"
        wins += rungs[s].kind == "mixed" and beats
        goals.append({**goal, **figures(problem, rungs[s], fresh_Sn[s], fresh_Sn[0])})
        picked.append(s)
    line = (
        f"A mixed schedule is recommended at {mixed} of {len(goals)} budgets, and beats the best equal-compute "
        f"rival significantly at {wins} (paired, 95%, {fresh_Sn.shape[1]} rows)."
    )
    basis = "all candidates on the same fresh rows; the choice on one half, the figures of `front` on the other"
    return picked, {"front": goals, "basis": basis, "verdict": line}


def _way(problem: Problem, candidate: Candidate) -> str:
    """In which way a candidate saves: those that do it in the same way differ in how much."""
    models, steps = candidate.schedule.models, candidate.schedule.steps
    if len(models) > 1 or candidate.kind == "anchor":
        return candidate.what
    if candidate.schedule.spacing is not None:
        return f"{models[0]} spaced"
    return "alone" if steps == problem.steps else f"{models[0]} in fewer steps"


def more_is_no_worse(ways: Sequence[str], price_S: np.ndarray, mean_S: np.ndarray) -> np.ndarray:
    """Means that never rise with the price among candidates of the same way: the nearest such ones to those measured
    (isotonic regression)."""
    out_S = mean_S.copy()
    for way in set(ways):
        members = [s for s in range(len(ways)) if ways[s] == way and math.isfinite(mean_S[s])]
        members.sort(key=lambda s: -price_S[s])
        out_S[members] = isotonic_regression(mean_S[members]).x
    return out_S


def _cheapest(
    problem: Problem, rows: Sequence[dict[str, Any]], log_Sn: np.ndarray, max_loss: float
) -> tuple[list[int], dict[str, Any]]:
    """The cheapest that is shown to keep to the loss; all-heavy, the first, always is."""
    level = 1 - ALPHA / max(1, len(rows) - 1)
    finite_Sn = np.where(np.isinf(log_Sn), math.nan, log_Sn)
    for s, row in enumerate(rows):
        d_n = finite_Sn[s] - finite_Sn[0]
        d_n = d_n[np.isfinite(d_n)]
        row["loss_at_most"] = math.inf if s else 0.0
        if s and len(d_n) > 1 and row["against_heavy"]["difference"] < math.inf:
            margin = float(stdtrit(len(d_n) - 1, level)) * float(d_n.std(ddof=1)) / math.sqrt(len(d_n))
            row["loss_at_most"] = float(d_n.mean()) + margin
    shown = [s for s, row in enumerate(rows) if row["loss_at_most"] <= max_loss]
    chosen = min(shown, key=lambda s: rows[s]["price"])
    row, allowed = rows[chosen], f"{math.expm1(max_loss):.2%}"
    line = (
        f"{use(problem, row)}: {row['saved']:.1%} of all-heavy's {problem.unit} saved at {row['loss_at_most']:+.4f} "
        f"log-perplexity at most ({allowed} more perplexity allowed; {row['rows']} rows, corrected for {len(rows) - 1} "
        "candidates)."
    )
    if chosen == 0:
        line = f"Nothing cheaper than all-heavy is shown to lose at most {allowed} on {row['rows']} rows."
    return [chosen], {"basis": "all candidates on the same fresh rows", "verdict": line}


def about(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """What a candidate is."""
    return {"what": candidate.what, "kind": candidate.kind, **problem.about(candidate.schedule)}


def recommended(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """The recommendation of a result."""
    return {"schedule": str(candidate.schedule), "recommendation": about(problem, candidate)}


def figures(problem: Problem, candidate: Candidate, log_n: np.ndarray, heavy_n: np.ndarray) -> dict[str, Any]:
    """What a candidate is and how it scored: one line of a table."""
    means = {"ppl": metrics.mean_perplexity(log_n), "log_ppl": float(np.nanmean(log_n))}
    return {**about(problem, candidate), "rows": len(log_n), **means, "against_heavy": paired(log_n, heavy_n)}


def heavy_scores(problem: Problem, candidates: Sequence[Candidate], log_Sn: np.ndarray) -> np.ndarray:
    """The scores of all-heavy, which is one of the candidates, or does the same as one."""
    laws = [problem.trials.law(c.schedule) for c in candidates]
    return log_Sn[laws.index(problem.trials.law(problem.alone(problem.heavy)))]


def summary(problem: Problem, name: str, schedule: Schedule, log_n: np.ndarray) -> dict[str, Any]:
    """A schedule's price and mean perplexity, with intervals."""
    log_n = log_n[~np.isnan(log_n)]
    means = metrics.mean_estimate(metrics.exponential(log_n), skewed=True).named("ppl")
    return {"name": name, **problem.about(schedule), **means, **metrics.mean_estimate(log_n).named("log_ppl")}


def by_standing(log_Sn: np.ndarray) -> list[int]:
    """The schedules' numbers, the best first."""
    return sorted(range(len(log_Sn)), key=lambda s: metrics.standing(log_Sn[s]))


def ranked_rows(problem: Problem, candidates: Sequence[Candidate], log_Sn: np.ndarray) -> list[dict[str, Any]]:
    """Candidates, best first, with intervals and paired differences to all-heavy."""
    heavy_n = heavy_scores(problem, candidates, log_Sn)
    rows = []
    for s in by_standing(log_Sn):
        about = {"kind": candidates[s].kind, "rows": log_Sn.shape[1], "against_heavy": paired(log_Sn[s], heavy_n)}
        rows.append({**summary(problem, candidates[s].what, candidates[s].schedule, log_Sn[s]), **about})
    return rows


def difference(against: dict[str, Any], unit: str = "") -> str:
    """A paired difference with its interval, in words."""
    low, high = against["ci"]
    interval = "" if low is None or high is None else f" ({low:+.4f} to {high:+.4f})"
    return f"{against['difference']:+.4f}{unit}{interval}"


def use(problem: Problem, row: dict[str, Any]) -> str:
    """What to do, in words."""
    schedule = Schedule.parse(row["schedule"])
    if len(schedule.segments) == 1:
        if schedule.spacing is not None:
            return f"Use the {schedule.models[0]} model alone, {schedule.spacing}"
        fewer = "" if row["steps"] == problem.steps else f" in {row['steps']} steps instead of {problem.steps}"
        return f"Use the {schedule.models[0]} model alone{fewer}"
    spacing = "" if schedule.spacing is None else f" {schedule.spacing}"
    short = brief([segment.part for segment in schedule.segments], schedule.placement)
    return f"Use {short}{spacing} ({row['what']})"
