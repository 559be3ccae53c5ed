r"""The tuner: a schedule for a budget, in a tenth of the calls that measuring all schedules takes.

The space of schedules (`space`) is far too large to sample from all of them, and a single measured loss is noisy. So
the tuner measures few schedules, fits a model of the loss to all it has measured, and lets the model say which to
measure next, in five stages. Each may spend a share of the calls, in expectation, and leaves the rest to the next.

1. **Prior.** The likelihood bound of a schedule is a sum over its steps, so one table for each model gives the bound of
   every option of every segment: of other models, and of fewer, larger steps. The table is measured on held-out text or
   on the heavy model's own samples. The bound is not the perplexity of samples, but it costs next to nothing, and the
   model starts from it.
2. **Ablations.** Schedules that differ from all-heavy in one segment, which goes to another model or to the heavy model
   in fewer steps; schedules that differ from all-light in one segment, which goes to the heavy model; and each of these
   models alone. They tell what a segment is worth, both where the others are heavy and where they are light.
3. **Proposals.** In each of a few rounds the model proposes schedules within the budget: the exact minimum of its mean,
   and of draws from its posterior (Thompson sampling), which explore where the model is unsure. They are measured, and
   the model is fitted again. What it predicted of schedules before they were measured is reported as its error.
   Schedules on spaced plans are proposed by their predicted likelihood (`spaced`).
4. **Race.** The best proposals, schedules allocated step by step by the bound, a few made by hand, and equal-compute
   rivals are measured on fresh rows, in rounds that drop what is shown to be worse (`tournament.race`).
5. **Confirmation.** The finalists are measured on rows that chose nothing; only these figures are reported.

With several budgets, or a loss that must not be exceeded, stages 4 and 5 are replaced by one: candidates for a ladder
of prices, all measured on the same fresh rows (`tournament.ladder`). A quick search stops after the prior and chooses
by the bound (`tournament.by_the_bound`). All decisions follow from the seed and the scores, so a search that was
stopped continues from a store as if it had not been.

Shapes: S segments, O options, N measured schedules, n rows, T steps, K models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from relaylm.core.schedule import Schedule, Segment
from relaylm.measure.metrics import paired_difference as paired
from relaylm.measure.schedule_likelihood import step_costs
from relaylm.search import tournament
from relaylm.search.space import SLACK, Choice, Problem, best
from relaylm.search.spaced import spaced_mixed
from relaylm.search.tournament import FIRST_ROUND, Candidate, all_heavy, by_hand, named, rivals_within, unique
from relaylm.search.trials import Rows
from relaylm.search.tuner import MOST_ROWS, SHARES, Tuner, ablate, ablation_rows, measure_prior

ROWS = 3300  # just under a tenth of 210 schedules times 160 rows
ROUNDS, PROPOSALS = 5, 8  # of stage 3
CONFIRM = 1600  # rows at most
MOST_RUNS = 5  # of one model, in schedules allocated step by step


# ------------------------------------------------------------------------------------------------ 3: proposals


def _propose(tuner: Tuner, limits: Sequence[float]) -> None:
    problem, space, rows = tuner.problem, tuner.space, tuner.rows
    rng = np.random.default_rng([problem.trials.seed, 7])
    heavy = problem.alone(problem.heavy)
    kinds = [(problem.models, False), (problem.models, True), ((problem.models[0], problem.heavy), True)]
    sets = list(dict.fromkeys(tuple(tuner.options(models, uniform)) for models, uniform in kinds))
    rounds = []
    for number in range(ROUNDS):
        fitted = tuner.learn()
        picked: list[Choice] = []
        for attempt in range(6 * PROPOSALS):
            w_F = None if attempt < len(sets) else fitted.draw(rng)
            choice = tuner.guess(limits[attempt % len(limits)], sets[attempt % len(sets)], w_F)
            if choice is not None and choice not in picked and choice != space.all_heavy:
                picked.append(choice)
            if len(picked) == PROPOSALS:
                break
        schedules = [space.schedule(choice) for choice in picked]
        calls = min(SHARES["proposals"] / ROUNDS * rows.budget, rows.left)
        n = min(MOST_ROWS, rows.affordable([heavy, *schedules], calls))
        if not picked or n < 2:
            break
        for schedule in schedules:
            tuner.know(schedule)
        mixes_NSO = np.stack([tuner.mixes[schedule] for schedule in schedules])
        said_N, spread_N = fitted.predict(mixes_NSO), fitted.spread(mixes_NSO)
        heavy_n, *log_Sn = rows.take([heavy, *schedules], n, f"proposals {number + 1} of {ROUNDS}")
        for k, (choice, schedule) in enumerate(zip(picked, schedules, strict=True)):
            if choice not in tuner.choices:
                against = paired(log_Sn[k], heavy_n)
                about = {"schedule": space.show(choice), "predicted": float(said_N[k]), "spread": float(spread_N[k])}
                error = (against["sd"] or 0.0) / math.sqrt(against["rows"])
                tuner.held_out.append({**about, "measured": against["difference"], "error": error})
            tuner.choices[choice] = schedule
        rounds.append({"rows": n, "schedules": [space.show(choice) for choice in picked]})
    tuner.stages["proposals"] = rounds
    tuner.learn()


def _about_model(tuner: Tuner) -> dict[str, Any]:
    """How well the model describes what it has not seen: residuals next to what noise alone would make of them."""
    _, loss_N, error_N = tuner.measured()
    fitted, held = tuner.learn(), tuner.held_out

    def rms(values: Sequence[float] | np.ndarray) -> float | None:
        return float(np.sqrt(np.mean(np.square(values)))) if len(values) else None

    errors = {
        "held_out_rms": rms([item["measured"] - item["predicted"] for item in held]),
        "held_out_noise_rms": rms([item["error"] for item in held]),
        "held_out_spread_of_measured": float(np.std([item["measured"] for item in held])) if held else None,
        "leave_one_out_rms": rms(loss_N - fitted.loo_N),
        "noise_rms": rms(error_N),
    }
    widths = dict(zip(("segments", "neighbours", "unexplained"), fitted.widths, strict=True))
    options = [f"{model} {density}" for model, density in tuner.space.options]
    about = {"measured_schedules": len(loss_N), "held_out": held, "widths": widths, "options": options}
    return {**errors, **about, "loss_by_segment": fitted.tables()[0].tolist()}


# ------------------------------------------------------------------------------------------------ 4 and 5: candidates


def allocated(tuner: Tuner, limit: float, models: Sequence[str]) -> Schedule | None:
    """The schedule of least likelihood bound on the uniform grid, step by step, with at most MOST_RUNS runs."""
    problem, table = tuner.problem, tuner.table
    if table is None:
        return None
    steps = problem.steps
    loss_KT = step_costs(table, [(steps - k) / steps for k in range(steps + 1)])
    loss_TK = loss_KT[[table.models.index(name) for name in models]].T
    price_TK = np.tile([problem.price(problem.alone(name)) / steps for name in models], (steps, 1))
    choice = best(price_TK, loss_TK, None, limit, runs=MOST_RUNS)
    runs = [(models[k], len(list(run))) for k, run in groupby(choice or ())]
    return Schedule(tuple(Segment(name, count) for name, count in runs)) if runs else None


def candidates(tuner: Tuner, limit: float) -> list[Candidate]:
    """The rivals within a limit and the few best schedules of each kind."""
    problem, space, models = tuner.problem, tuner.space, tuner.problem.models
    found = rivals_within(problem, limit)
    pair = tuple(dict.fromkeys((models[0], models[-1])))
    kinds = {
        "two models": tuner.options(pair, uniform=True),
        "all models": tuner.options(models, uniform=True),
        "fewer steps where they are safe": tuner.options(models[-1:], uniform=False),
        "two models and fewer steps": tuner.options(pair, uniform=False),
        "models and steps together": None,
    }
    found += _guesses(tuner, limit, kinds)
    near = [schedule for choice, schedule in tuner.choices.items() if space.price(choice) <= limit * (1 + SLACK)]
    if tuner.fit is not None and near:
        order = np.argsort(tuner.predict(near), kind="stable")
        found += [named(problem, near[k], "proposed and measured") for k in order[:4]]
    found += by_hand(problem, limit)
    found += _spaced(tuner, limit)
    for names, what in ((pair, "two models, by the bound"), (models, "all models, by the bound")):
        if (schedule := allocated(tuner, limit, names)) is not None:
            found.append(named(problem, schedule, what))
    return unique(problem, found)


def _guesses(tuner: Tuner, limit: float, kinds: Mapping[str, Sequence[int] | None]) -> list[Candidate]:
    """The model's best choices within a limit, from the options of each kind."""
    found = [(what, tuner.guess(limit, allowed)) for what, allowed in kinds.items()]
    return [named(tuner.problem, tuner.space.schedule(c), what) for what, c in found if c is not None]


def _spaced(tuner: Tuner, limit: float) -> list[Candidate]:
    """Mixed schedules on spaced plans, by predicted likelihood."""
    problem = tuner.problem
    return [named(problem, s, "models and spacing together") for s in spaced_mixed(problem, tuner.table, limit)]


def rungs(tuner: Tuner, limits: Sequence[float]) -> list[Candidate]:
    """All-heavy first; for each limit the rivals, the model's best on any grid and on the full one, and one by hand."""
    problem = tuner.problem
    found = [all_heavy(problem)]
    kinds = {"models and steps together": None, "all models": tuner.options(problem.models, uniform=True)}
    for limit in limits:
        rivals = rivals_within(problem, limit)
        found += [c for c in rivals if c.schedule.steps == problem.steps or c.schedule.models == (problem.heavy,)]
        found += _guesses(tuner, limit, kinds)
        found += by_hand(problem, limit)[:1] + _spaced(tuner, limit)[:1]
    return unique(problem, found)


def limits_around(tuner: Tuner, limits: Sequence[float], max_loss: float) -> list[float]:
    """Limits near the one at which the model expects the allowed loss to be reached."""
    most, least = tuner.problem.all_heavy, min(limits)
    edge = most
    for limit in np.linspace(most, least, 41)[1:].tolist():
        if (choice := tuner.guess(limit)) is not None and tuner.know(schedule := tuner.space.schedule(choice)):
            edge = limit if tuner.predict([schedule])[0] <= max_loss else edge
    around = [most - (most - edge) * share for share in (0.5, 0.7, 0.85, 1.0, 1.15, 1.4)]
    kept = [limit for limit in around if least <= limit < most]
    return kept or [most - (most - least) * share for share in (0.05, 0.1, 0.2)]


def _race(tuner: Tuner, limit: float) -> list[Candidate]:
    """Finalists of a race, that of least loss first: by the model, which uses all rows, where it has the schedule."""
    problem, rows = tuner.problem, tuner.rows
    runners, first = candidates(tuner, limit), rows.next
    ran = tournament.race(rows, runners, problem.alone(problem.heavy), SHARES["confirmation"] * rows.budget)
    known = [c for c in ran.alive if tuner.know(runners[c].schedule)]
    tuner.learn()
    loss = {c: float(np.nanmean(ran.log_ppl[c] - ran.heavy_n)) for c in ran.alive}
    loss |= {c: float(tuner.predict([runners[c].schedule])[0]) for c in known}
    ranked = sorted(ran.alive, key=lambda c: loss[c])
    left = [{"schedule": str(runners[c].schedule), "what": runners[c].what, "loss": loss[c]} for c in ranked]
    about = {"contenders": [tournament.about(problem, c) for c in runners], "rounds": ran.rounds}
    tuner.stages["race"] = {**about, "rows": rows.next - first, "dropped": ran.dropped, "left": left}
    return tournament.finalists(problem, runners, ranked, ran)


# ------------------------------------------------------------------------------------------------ the method


@dataclass
class Tune:
    """The stages in order. `goals` are limits on a row's price: one for a recommendation, several for a front, none
    with a `max_loss`."""

    problem: Problem
    goals: Sequence[float]
    max_loss: float | None = None
    total: int | None = None  # rows' worth of calls
    confirm: int | None = None  # fresh rows, taken even if they cost more calls than are left
    text: np.ndarray | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        problem = self.problem
        self.limits = list(self.goals)
        if not self.limits:  # even savings up to the largest possible
            most, floor = problem.all_heavy, math.fsum(problem.space().price_SO.min(axis=1))
            self.limits = [most - (most - floor) * k / 10 for k in range(1, 11)]
        self.ladder = self.limits
        self.total = self.total if self.total is not None else ROWS * (1 if len(self.goals) == 1 else 2)
        self.rows = Rows(problem.trials, self.total * problem.trials.expected_calls([problem.alone(problem.heavy)]))
        self.tuner = Tuner(problem, problem.space(), self.rows)
        self.basis: str | None = None  # of the best so far

    def propose(self) -> tuple[list[Candidate], int]:
        """Stages 1 to 4. The number of fresh rows is what the calls that are left are enough for."""
        tuner = self.tuner
        n = 0 if self.quick else ablation_rows(tuner)
        measure_prior(tuner, self.text, self.quick)
        self.basis = "the likelihood bound alone"
        if self.quick:
            return [], 0
        ablate(tuner, n)
        self.basis = "ablations"
        _propose(tuner, self.limits)
        self.basis = "the model, without a race"
        if self.max_loss is not None:
            self.ladder = limits_around(tuner, self.limits, self.max_loss)
        one = len(self.goals) == 1
        final = _race(tuner, self.goals[0]) if one else rungs(tuner, self.ladder)
        n = self.rows.affordable([c.schedule for c in final], self.rows.left)
        return final, (one and self.confirm) or max(FIRST_ROUND * (1 if one else 2), min(CONFIRM, n))

    def decide(self, final: Sequence[Candidate], log_Sn: np.ndarray) -> dict[str, Any]:
        """Stage 5."""
        problem, tuner = self.problem, self.tuner
        if self.quick:
            assert tuner.table is not None
            found = [all_heavy(problem), *(c for limit in self.limits for c in candidates(tuner, limit))]
            return tournament.by_the_bound(problem, tuner.table, unique(problem, found), self.limits, self.max_loss)
        if len(self.goals) == 1:
            return tournament.confirmed(problem, final, log_Sn, self.goals[0])
        tuner.stages["ladder"] = {"rows": log_Sn.shape[1], "candidates": len(final), "limits": self.ladder}
        return tournament.ladder(problem, final, log_Sn, self.ladder, self.max_loss)

    def best_so_far(self) -> dict[str, Any] | None:
        """The model's choice, or that of the bound."""
        if self.basis is None:
            return None
        space = self.tuner.space
        schedule = space.schedule(self.tuner.guess(self.limits[0]) or space.all_heavy)
        about = self.problem.about(schedule)
        line = f"Stopped. Best so far, by {self.basis}: {schedule}, {about['saved']:.1%} saved; it was not confirmed."
        return {"schedule": str(schedule), "recommendation": about, "basis": self.basis, "verdict": line}

    def report(self) -> dict[str, Any]:
        """The question, what each stage spent and found, and how good the model is."""
        rows, tuner = self.rows, self.tuner
        spent = {"budget_calls": rows.budget, "expected_calls": rows.used, "rows_used": rows.next}
        about = {"rows": self.total, "goals": list(self.goals), "max_loss": self.max_loss}
        model = {} if tuner.fit is None else {"model": _about_model(tuner)}
        return {**about, "tuned": {**spent, "stages": tuner.stages}, **model}
