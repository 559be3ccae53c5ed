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
   Schedules on spaced plans are proposed by their predicted likelihood (`bounds`).
4. **Race.** The best proposals, schedules allocated step by step by the bound, a few made by hand, and equal-compute
   rivals are measured on fresh rows, in rounds that drop what is shown to be worse (`tournament.race`).
5. **Confirmation.** The finalists are measured on rows that chose nothing; only these figures are reported.

With several budgets, or a loss that must not be exceeded, stages 4 and 5 are replaced by one: candidates for a ladder
of prices, all measured on the same fresh rows (`tournament.ladder`). A quick search stops after the prior and chooses
by the bound (`bounds.by_the_bound`). All decisions follow from the seed and the scores, so a search that was
stopped continues from a store as if it had not been.

Shapes: S segments, O options, N measured schedules, n rows, T steps, K models.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.files import plain, with_infinities
from relaylm.measure.likelihood import text_rows
from relaylm.measure.metrics import paired_difference as paired
from relaylm.measure.schedule_likelihood import BoundTable, measure_table, step_costs
from relaylm.measure.store import cached
from relaylm.search import tournament
from relaylm.search.bounds import allocated, by_the_bound, spaced_mixed
from relaylm.search.space import SLACK, Choice, Fit, Problem, Space, best, fit
from relaylm.search.tournament import FIRST_ROUND, Candidate, all_heavy, by_hand, named, rivals_within, unique
from relaylm.search.trials import Rows

ROWS = 3300  # just under a tenth of 210 schedules times 160 rows
SHARES = {"ablations": 0.2, "proposals": 0.3, "race": 0.35, "confirmation": 0.15}  # of the calls
MOST_ROWS = 128  # for ablations, and for a round of proposals
PRIOR_FIRST_ROW = 1 << 31  # of the samples that the prior is measured on, far from all others
DRAWS = 8  # of the mask, for a row of the prior
ROUNDS, PROPOSALS = 5, 8  # of stage 3
CONFIRM = 1600  # rows at most


@dataclass
class Tuner:
    """What a search knows: the bound, the schedules that were measured, and the model fitted to them."""

    problem: Problem
    space: Space
    rows: Rows
    prior_SO: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    table: BoundTable | None = None
    choices: dict[Choice, Schedule] = field(default_factory=dict)  # measured
    mixes: dict[Schedule, np.ndarray] = field(default_factory=dict)  # these and others, in the model's terms
    held_out: list[dict[str, Any]] = field(default_factory=list)  # predictions of schedules before they were measured
    fit: Fit | None = None
    stages: dict[str, Any] = field(default_factory=dict)

    def know(self, schedule: Schedule) -> bool:
        """Learn from this schedule's rows from here on; False if the model cannot express it."""
        unknown = schedule not in self.mixes and schedule.spacing is None
        if unknown and (mix_SO := self.space.mix(schedule)) is not None:
            self.mixes[schedule] = mix_SO
        return schedule in self.mixes

    def predict(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """The model's losses of schedules that it knows."""
        assert self.fit is not None
        return self.fit.predict(np.stack([self.mixes[schedule] for schedule in schedules]))

    def measured(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Mixes of the schedules that were measured, their mean losses against all-heavy over all rows that both have,
        and standard errors, with a variance that is shrunk towards the common one where rows are few."""
        heavy = self.problem.trials.known(self.problem.alone(self.problem.heavy))
        found = []
        for schedule, mix_SO in self.mixes.items():
            known = self.problem.trials.known(schedule)
            d_n = np.array([known[r] - heavy[r] for r in sorted(known.keys() & heavy.keys())])
            d_n = d_n[np.isfinite(d_n)]
            if len(d_n) > 1 and mix_SO[:, 1:].any():  # all-heavy itself says nothing
                found.append((mix_SO, float(d_n.mean()), float(d_n.var(ddof=1)), len(d_n)))
        if not found:
            raise UserError("too few rows have a finite perplexity to learn from: choose another judge, or more rows")
        mixes, mean_N, var_N, n_N = (np.array(each) for each in zip(*found, strict=True))
        return mixes, mean_N, np.sqrt((var_N * (n_N - 1) + var_N.mean() * 8) / (n_N + 7) / n_N)

    def learn(self) -> Fit:
        """Fit the model to all that was measured."""
        self.fit = fit(self.space, self.prior_SO, *self.measured())
        return self.fit

    def options(self, models: Sequence[str], uniform: bool) -> list[int]:
        """Options of these models, on the full grid alone or in fewer steps too."""
        return [o for o, (m, d) in enumerate(self.space.options) if m in models and (d == 1 or not uniform)]

    def guess(self, limit: float, allowed: Sequence[int] | None = None, w_F: np.ndarray | None = None) -> Choice | None:
        """The best choice within a limit by the model, at coefficients `w_F`; by the prior before there is a model."""
        single_SO, pair_SOO = (self.prior_SO, None) if self.fit is None else self.fit.tables(w_F)
        return best(self.space.price_SO, single_SO, pair_SOO, limit, allowed=allowed)


# ------------------------------------------------------------------------------------------------ 1: the prior


def measure_prior(tuner: Tuner, text: np.ndarray | None, quick: bool) -> None:
    """Measure the bound of every option in every segment, in nats for a token above that of the heavy model."""
    problem, space, trials = tuner.problem, tuner.space, tuner.problem.trials
    tuner.prior_SO = np.zeros_like(space.price_SO)
    models = {name: problem.family.models[name] for name in problem.models}
    sees_time = [name for name, model in models.items() if getattr(model, "time_conditioning", False)]
    if sees_time and not quick:
        problem.notes.append(f"{sees_time[0]} looks at the time t, so there is no likelihood bound to begin with")
        return
    trials.check_time()
    length = trials.given_PL.shape[1]
    text = None if text is None else text_rows(problem.family, text, length, 2**32)
    tuner.table, rows = _bound_table(tuner, models, text)
    before = 0
    for j, width in enumerate(space.widths):
        for o, (model, density) in enumerate(space.options):
            count = space.count(width, density)
            times = [1 - Fraction(before * count + width * k, count * space.steps) for k in range(count + 1)]
            cost_KT = step_costs(tuner.table, [float(t) for t in times])
            tuner.prior_SO[j, o] = cost_KT[tuner.table.models.index(model)].sum() / length
        before += width
    if not np.isfinite(tuner.prior_SO).all():
        infinite = "the likelihood bound is infinite: a model gives a token of the text no probability"
        if quick:
            raise UserError(f"{infinite}, so there is nothing to choose by: search without quick, or by another text")
        problem.notes.append(f"{infinite}, so the search began without it")
        tuner.prior_SO, tuner.table = np.zeros_like(space.price_SO), None
        return
    tuner.prior_SO -= tuner.prior_SO[:, :1]
    source = "the heavy model's own samples" if text is None else "held-out text"
    options = [f"{model} {density}" for model, density in space.options]
    about = {"source": source, "rows": rows, "options": options}
    tuner.stages["prior"] = {**about, "excess_nats_per_token": tuner.prior_SO.tolist()}


def _bound_table(tuner: Tuner, models: dict[str, Any], text: np.ndarray | None) -> tuple[BoundTable, int]:
    """Every model's loss by the number of masked positions, from the store or measured, and its number of rows."""
    problem, trials, family = tuner.problem, tuner.problem.trials, tuner.problem.family
    about = None if text is None else hashlib.sha256(np.ascontiguousarray(text, dtype=np.int64).tobytes()).hexdigest()
    n = len(text) if text is not None else 256 if family.device.type == "cuda" else 32

    def measure() -> dict[str, Any]:
        calls, rows = Counter(dict.fromkeys(models, n * DRAWS)), text
        if rows is None:
            drawn = trials.sample(problem.alone(problem.heavy), PRIOR_FIRST_ROW, n)
            rows = drawn.tokens
            calls += Counter(drawn.cost.calls)
        rows = rows[:, : trials.given_PL.shape[1]]
        table = measure_table(models, rows, family.mask_id, draws=DRAWS, seed=trials.seed, device=family.device)
        trials.spent.now.update(calls)
        arrays = {"m": table.m_ND.tolist(), "weight": table.weight_ND.tolist(), "c": plain(table.c_KND.tolist())}
        return {"kind": "prior", "length": table.length, **arrays, "calls": calls}

    what = ["prior", trials.base, list(models), problem.steps, problem.heavy, about, n, DRAWS]
    record = cached(trials.store, what, measure, trials.fresh)
    for total in (trials.spent.made, trials.spent.naive):
        total.update(record["calls"])
    tuner.rows.used += sum(record["calls"].values())
    m_ND, weight_ND, c_KND = (np.array(with_infinities(record[name])) for name in ("m", "weight", "c"))
    return BoundTable(tuple(models), record["length"], m_ND, weight_ND, c_KND), n


# ------------------------------------------------------------------------------------------------ 2: ablations


def ablations(space: Space) -> list[Choice]:
    """All-heavy first; each other model, and the heavy one in fewer steps, alone; then one segment at a time."""
    heavy, light = space.all_heavy, space.all_light
    plain = [o for o, (m, d) in enumerate(space.options) if o and (d == 1 or m == space.models[-1])]
    found = [heavy, *((o,) * space.segments for o in plain)]
    for j in range(space.segments):
        found += [(*heavy[:j], o, *heavy[j + 1 :]) for o in plain]
        found.append((*light[:j], 0, *light[j + 1 :]))
    return list(dict.fromkeys(found))


def ablation_rows(tuner: Tuner) -> int:
    """Rows of the ablations. Too few are refused before any network runs."""
    space, rows = tuner.space, tuner.rows
    schedules = [space.schedule(choice) for choice in ablations(space)]
    n = rows.affordable(schedules, SHARES["ablations"] * rows.budget)
    if n < 2:
        one, least = (rows.trials.expected_calls(part) for part in (schedules[:1], schedules))
        enough = math.ceil(2.01 * least / SHARES["ablations"] / one)
        raise UserError(
            f"{rows.budget / one:.0f} rows are too few to tune {len(space.models)} models in {space.segments} "
            f"segments: give at least {enough}, or fewer segments, models or densities"
        )
    return min(MOST_ROWS, n)


def ablate(tuner: Tuner, n: int) -> None:
    """Measure all ablations on n rows, and fit the model."""
    space, choices = tuner.space, ablations(tuner.space)
    tuner.choices |= {choice: space.schedule(choice) for choice in choices}
    log_Sn = tuner.rows.take(list(tuner.choices.values()), n, "ablations")
    singles = []
    for choice, log_n in zip(choices, log_Sn, strict=True):
        tuner.know(tuner.choices[choice])
        changed = [j for j in range(space.segments) if choice[j] != 0]
        if len(changed) == 1:
            against = paired(log_n, log_Sn[0])
            model, density = space.options[choice[changed[0]]]
            loss = {"loss": against["difference"], "ci": against["ci"]}
            singles.append({"segment": changed[0], "model": model, "density": str(density), **loss})
    tuner.stages["ablations"] = {"rows": n, "schedules": len(choices), "one_in_all_heavy": singles}
    tuner.learn()


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
            against = paired(log_Sn[k], heavy_n)
            if choice not in tuner.choices and math.isfinite(against["difference"]):
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
        found += named(problem, "proposed and measured", *(near[k] for k in order[:4]))
    found += by_hand(problem, limit)
    found += named(problem, "models and spacing together", *spaced_mixed(problem, tuner.table, limit))
    found += named(problem, "two models, by the bound", allocated(problem, tuner.table, limit, pair))
    found += named(problem, "all models, by the bound", allocated(problem, tuner.table, limit, models))
    return unique(problem, found)


def _guesses(tuner: Tuner, limit: float, kinds: Mapping[str, Sequence[int] | None]) -> list[Candidate]:
    """The model's best choices within a limit, from the options of each kind."""
    guesses = [(what, tuner.guess(limit, allowed)) for what, allowed in kinds.items()]
    found = [(what, tuner.space.schedule(choice)) for what, choice in guesses if choice is not None]
    return [candidate for what, schedule in found for candidate in named(tuner.problem, what, schedule)]


def rungs(tuner: Tuner, limits: Sequence[float]) -> list[Candidate]:
    """All-heavy first; for each limit the rivals, the model's best on any grid and on the full one, and one by hand."""
    problem = tuner.problem
    found = [all_heavy(problem)]
    kinds = {"models and steps together": None, "all models": tuner.options(problem.models, uniform=True)}
    for limit in limits:
        rivals = rivals_within(problem, limit)
        found += [c for c in rivals if c.schedule.steps == problem.steps or c.schedule.models == (problem.heavy,)]
        found += _guesses(tuner, limit, kinds)
        found += by_hand(problem, limit)[:1]
        found += named(problem, "models and spacing together", *spaced_mixed(problem, tuner.table, limit)[:1])
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
    loss = {c: float(paired(ran.log_ppl[c], ran.heavy_n)["difference"]) for c in ran.alive}
    loss |= {c: float(tuner.predict([runners[c].schedule])[0]) for c in known if math.isfinite(loss[c])}
    ranked = sorted(ran.alive, key=lambda c: loss[c])
    left = [{"schedule": str(runners[c].schedule), "what": runners[c].what, "loss": loss[c]} for c in ranked]
    about = {"contenders": [tournament.about(problem, c) for c in runners], "rounds": ran.rounds}
    tuner.stages["race"] = {**about, "rows": rows.next - first, "dropped": ran.dropped, "left": left}
    return tournament.finalists(problem, runners, ranked, ran)


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
        return final, self.confirm or max(FIRST_ROUND * (1 if one else 2), min(CONFIRM, n))

    def decide(self, final: Sequence[Candidate], log_Sn: np.ndarray) -> dict[str, Any]:
        """Stage 5."""
        problem, tuner = self.problem, self.tuner
        if self.quick:
            assert tuner.table is not None
            found = [all_heavy(problem), *(c for limit in self.limits for c in candidates(tuner, limit))]
            return by_the_bound(problem, tuner.table, unique(problem, found), self.limits, self.max_loss)
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
