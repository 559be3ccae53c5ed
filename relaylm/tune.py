r"""A schedule for a budget, in a tenth of the calls that trying all of them takes.

1. **Prior.** The likelihood bound of every schedule is a sum over its steps (`schedule_bound`), so one table for each
   model, measured on held-out text or on the heavy model's own samples, gives the loss of every option of every
   segment: of other models and of fewer, larger steps. It is not the perplexity of samples, but it is nearly free.
2. **Ablations** under common random numbers, both ways: one segment of all-heavy given to each other model, or to
   the heavy model in fewer steps; one segment of all-light given to the heavy model; and each of these alone.
3. **Model.** Everything measured, and the prior, go into a regression with neighbour terms (`surrogate`). In a few
   rounds it proposes schedules within the budget (the exact minimum of its mean, and of draws from its posterior), has
   them measured, and learns. What it said of a schedule before it was measured is held against the measurement:
   that is the residual which is reported.
4. **Race** and 5. **confirmation** on fresh rows, against the sandwich and the equal-compute rivals (`race`). With
   several budgets, or a loss that must not be exceeded, a ladder of schedules is measured instead (`ladder`).

Each stage may spend a share of the calls, in expectation; what a stage leaves goes to the next. All decisions follow
from the seed and the scores, so a search that was stopped goes on from a store as if it had not been.

Shapes: S segments, O options, N measured schedules, n rows, T steps, K models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm.errors import UserError
from relaylm.sampler import sample
from relaylm.schedule import Schedule
from relaylm.schedule_bound import BoundTable, measure_table, step_costs
from relaylm.store import content_key
from relaylm.surrogate import Choice, Fit, Space, best, fit
from relaylm.tree import Stopped
from relaylm.trials import add_calls, paired

if TYPE_CHECKING:
    from relaylm.schedule_search import Problem

ROWS = 3300  # just under a tenth of 210 schedules times 160 rows
SHARES = {"ablations": 0.2, "proposals": 0.3, "race": 0.35, "confirmation": 0.15}  # of the calls
ROUNDS, PROPOSALS = 5, 8  # of stage 3
MOST_ROWS = 128  # for ablations, and for a round of proposals
PRIOR_FIRST_ROW = 1 << 31  # of the samples that the prior is measured on, far from all others
DRAWS = 8


@dataclass
class Tuner:
    """The state of a tuning: what may still be spent, the rows used, what is known of schedules."""

    problem: Problem
    space: Space
    budget: float  # row-calls
    used: float = 0.0
    next_row: int = 0
    prior_SO: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    table: BoundTable | None = None
    choices: dict[Choice, Schedule] = field(default_factory=dict)  # measured
    mixes: dict[Schedule, np.ndarray] = field(default_factory=dict)  # these and others, in the model's terms
    held_out: list[dict[str, Any]] = field(default_factory=list)
    fit: Fit | None = None
    stages: dict[str, Any] = field(default_factory=dict)

    def take_rows(self, schedules: Sequence[Schedule], n: int, what: str) -> np.ndarray:
        """Measure on the next n rows."""
        log_Sn = self.problem.trials.scores(schedules, n, self.next_row, what)
        self.used += n * self.problem.trials.expected_calls(schedules)
        self.next_row += n
        return log_Sn

    def affordable(self, schedules: Sequence[Schedule], calls: float) -> int:
        """Rows that so many calls are enough for."""
        return int(max(0.0, calls) // self.problem.trials.expected_calls(schedules))

    @property
    def left(self) -> float:
        return self.budget - self.used

    def know(self, schedule: Schedule) -> bool:
        """Learn from this schedule's rows from now on; False if the model cannot express it."""
        if schedule not in self.mixes and (mix_SO := self.space.mix(schedule)) is not None:
            self.mixes[schedule] = mix_SO
        return schedule in self.mixes

    def predict(self, schedules: Sequence[Schedule]) -> np.ndarray:
        assert self.fit is not None
        return self.fit.predict(np.stack([self.mixes[schedule] for schedule in schedules]))

    def measured(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Schedules as the model sees them, their mean losses against all-heavy over all rows that both have, and
        standard errors (with a spread that is shrunk towards the common one where rows are few)."""
        heavy = self.problem.trials.known(self.problem.alone(self.problem.heavy))
        found = []
        for schedule, mix_SO in self.mixes.items():
            known = self.problem.trials.known(schedule)
            d_n = np.array([known[r] - heavy[r] for r in sorted(known.keys() & heavy.keys())])
            d_n = d_n[np.isfinite(d_n)]
            if len(d_n) > 1 and mix_SO[:, 1:].any():  # all-heavy itself says nothing
                found.append((mix_SO, float(d_n.mean()), float(d_n.var(ddof=1)), len(d_n)))
        common = float(np.mean([variance for _, _, variance, _ in found]))
        errors = [math.sqrt((variance * (n - 1) + common * 8) / (n + 7) / n) for _, _, variance, n in found]
        return np.stack([mix for mix, *_ in found]), np.array([mean for _, mean, _, _ in found]), np.array(errors)

    def learn(self) -> Fit:
        self.fit = fit(self.space, self.prior_SO, *self.measured())
        return self.fit

    def options(self, models: Sequence[str], uniform: bool) -> list[int]:
        """Options of these models, on the full grid alone or in fewer steps too."""
        return [o for o, (m, d) in enumerate(self.space.options) if m in models and (d == 1 or not uniform)]

    def guess(
        self, limit: float, allowed: Sequence[int] | None = None, weight_F: np.ndarray | None = None
    ) -> Choice | None:
        """The model's best choice within a limit (the prior's, before there is a model)."""
        if self.fit is None:
            return best(self.space, self.prior_SO, None, limit, allowed)
        return best(self.space, *self.fit.tables(weight_F), limit, allowed)


def tune(
    problem: Problem,
    goals: Sequence[float],
    max_loss: float | None = None,
    *,
    rows: int | None = None,
    confirm: int | None = None,
    text: np.ndarray | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """`goals` are limits on a row's price: one for a recommendation, several for a front; none with a `max_loss`."""
    from relaylm.ladder import even_limits, measure_ladder, quick_look
    from relaylm.race import race

    limits = list(goals) if goals else even_limits(problem)
    total = rows if rows is not None else ROWS * (1 if len(goals) == 1 else 2)
    tuner = Tuner(problem, problem.space(), total * problem.trials.expected_calls([problem.alone(problem.heavy)]))
    result: dict[str, Any] = {"stopped": None, "rows": total, "goals": list(goals), "max_loss": max_loss}
    basis = None
    try:
        if not quick:
            _check_rows(tuner)
        measure_prior(tuner, text, quick)
        basis = "the likelihood bound alone"
        if quick:
            result |= quick_look(tuner, limits, max_loss)
        else:
            _ablate(tuner)
            basis = "ablations"
            _propose(tuner, limits)
            basis = "the model, without a race"
            if len(goals) == 1:
                result |= race(tuner, goals[0], confirm)
            else:
                result |= measure_ladder(tuner, limits, max_loss)
    except (Stopped, KeyboardInterrupt) as stop:
        result["stopped"] = "time limit" if isinstance(stop, Stopped) else "interrupted"
        if basis is None:
            raise UserError("the search was stopped before anything was measured: there is nothing to show") from None
        result |= _best_so_far(tuner, limits, basis)
    result["tuned"] = {
        "budget_calls": tuner.budget,
        "expected_calls": tuner.used,
        "rows_used": tuner.next_row,
        "stages": tuner.stages,
    }
    if tuner.fit is not None:
        result["model"] = _about_model(tuner)
    return result


def _best_so_far(tuner: Tuner, limits: Sequence[float], basis: str) -> dict[str, Any]:
    choice = tuner.guess(limits[0])
    schedule = tuner.space.schedule(tuner.space.all_heavy if choice is None else choice)
    about = tuner.problem.about(schedule)
    line = f"Stopped. Best so far, by {basis}: {schedule}, {about['saved']:.1%} saved; it was not confirmed."
    return {"schedule": str(schedule), "recommendation": about, "confirmed": [], "basis": basis, "verdict": line}


# ------------------------------------------------------------------------------------------------ 1: the prior


def measure_prior(tuner: Tuner, text: np.ndarray | None, quick: bool) -> None:
    problem, space, trials = tuner.problem, tuner.space, tuner.problem.trials
    tuner.prior_SO = np.zeros_like(space.price_SO)
    models = {name: problem.family.models[name] for name in problem.models}
    sees_time = [name for name, model in models.items() if getattr(model, "time_conditioning", False)]
    if sees_time and not quick:
        problem.notes.append(f"{sees_time[0]} looks at the time t, so there is no likelihood bound to begin with")
        return
    trials.check_time()
    length = trials.given_PL.shape[1]
    if text is not None and (text.ndim != 2 or text.shape[1] < length):
        raise UserError(f"the held-out text must be rows of at least {length} tokens, not an array of {text.shape}")
    tuner.table, rows = _bound_table(tuner, models, text)
    before = 0
    for j, width in enumerate(space.widths):
        for o, (model, density) in enumerate(space.options):
            count = space.count(width, density)
            times = [1 - Fraction(before * count + width * k, count * space.steps) for k in range(count + 1)]
            cost_KT = step_costs(tuner.table, [float(t) for t in times])
            tuner.prior_SO[j, o] = cost_KT[tuner.table.models.index(model)].sum() / length
        before += width
    tuner.prior_SO -= tuner.prior_SO[:, :1]
    tuner.stages["prior"] = {
        "source": "the heavy model's own samples" if text is None else "held-out text",
        "rows": rows,
        "options": [f"{model} {density}" for model, density in space.options],
        "excess_nats_per_token": tuner.prior_SO.tolist(),
    }


def _bound_table(tuner: Tuner, models: dict[str, Any], text: np.ndarray | None) -> tuple[BoundTable, int]:
    """Every model's loss by the number of masked positions, from the store or measured, and the rows it is of."""
    problem, trials = tuner.problem, tuner.problem.trials
    about = None if text is None else hashlib.sha256(np.ascontiguousarray(text).tobytes()).hexdigest()
    n = len(text) if text is not None else 256 if problem.family.device.type == "cuda" else 32
    key = content_key("prior", trials.base, list(models), problem.steps, problem.heavy, about, n, DRAWS)
    record = trials.store.get(key) if trials.store is not None and not trials.fresh else None
    spent = trials.spent
    if record is None:
        calls = dict.fromkeys(models, n * DRAWS)
        if text is None:
            drawn = sample(
                problem.family,
                problem.alone(problem.heavy),
                n,
                seed=trials.seed,
                given=trials.given(PRIOR_FIRST_ROW, n),
                first_row=PRIOR_FIRST_ROW,
                batch_size=trials.batch,
                heavy=problem.heavy,
            )
            text = drawn.tokens
            add_calls(calls, {name: count for name, count in drawn.cost.calls.items() if count})
        text = text[:, : trials.given_PL.shape[1]]
        device = problem.family.device
        table = measure_table(models, text, problem.family.mask_id, draws=DRAWS, seed=trials.seed, device=device)
        arrays = {"m": table.m_ND.tolist(), "weight": table.weight_ND.tolist(), "c": table.c_KND.tolist()}
        record = {"kind": "prior", "length": table.length, **arrays, "calls": calls}
        if trials.store is not None:
            trials.store.put(key, record, replace=trials.fresh)
        add_calls(spent.now, calls)
    for total in (spent.made, spent.naive):
        add_calls(total, record["calls"])
    tuner.used += sum(record["calls"].values())
    m_ND, weight_ND, c_KND = (np.array(record[name]) for name in ("m", "weight", "c"))
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


def _check_rows(tuner: Tuner) -> None:
    """Are there enough for the ablations? Known before any network runs."""
    space, problem = tuner.space, tuner.problem
    schedules = [space.schedule(choice) for choice in ablations(space)]
    if tuner.affordable(schedules, SHARES["ablations"] * tuner.budget) < 2:
        one, least = (problem.trials.expected_calls(part) for part in (schedules[:1], schedules))
        raise UserError(
            f"{tuner.budget / one:.0f} rows are too few to tune {len(problem.models)} models in {space.segments} "
            f"segments: give at least {math.ceil(2.01 * least / SHARES['ablations'] / one)}, or fewer segments, models "
            "or densities"
        )


def _ablate(tuner: Tuner) -> None:
    space = tuner.space
    choices = ablations(space)
    schedules = [space.schedule(choice) for choice in choices]
    n = min(MOST_ROWS, tuner.affordable(schedules, SHARES["ablations"] * tuner.budget))
    log_Sn = tuner.take_rows(schedules, n, "ablations")
    tuner.choices |= dict(zip(choices, schedules, strict=True))
    singles = []
    for choice, schedule, log_n in zip(choices, schedules, log_Sn, strict=True):
        tuner.know(schedule)
        changed = [j for j in range(space.segments) if choice[j] != 0]
        if len(changed) == 1:
            against = paired(log_n, log_Sn[0])
            model, density = space.options[choice[changed[0]]]
            about = {"segment": changed[0], "model": model, "density": str(density)}
            singles.append({**about, "loss": against["difference"], "ci": against["ci"]})
    tuner.stages["ablations"] = {"rows": n, "schedules": len(choices), "one_in_all_heavy": singles}
    tuner.learn()


# ------------------------------------------------------------------------------------------------ 3: proposals


def _propose(tuner: Tuner, limits: Sequence[float]) -> None:
    problem, space = tuner.problem, tuner.space
    rng = np.random.default_rng([problem.trials.seed, 7])
    heavy = problem.alone(problem.heavy)
    sets = [tuner.options(problem.models, uniform=False), tuner.options(problem.models, uniform=True)]
    sets.append(tuner.options((problem.models[0], problem.heavy), uniform=True))
    sets = [options for k, options in enumerate(sets) if options not in sets[:k]]
    rounds = []
    for number in range(ROUNDS):
        fitted = tuner.learn()
        picked: list[Choice] = []
        for attempt in range(6 * PROPOSALS):
            weight_F = None if attempt < len(sets) else fitted.draw(rng)
            choice = tuner.guess(limits[attempt % len(limits)], sets[attempt % len(sets)], weight_F)
            if choice is not None and choice not in picked and choice != space.all_heavy:
                picked.append(choice)
            if len(picked) == PROPOSALS:
                break
        schedules = [heavy, *(space.schedule(choice) for choice in picked)]
        calls = min(SHARES["proposals"] / ROUNDS * tuner.budget, tuner.left)
        n = min(MOST_ROWS, tuner.affordable(schedules, calls))
        if not picked or n < 2:
            break
        for schedule in schedules[1:]:
            tuner.know(schedule)
        mixes_NSO = np.stack([tuner.mixes[schedule] for schedule in schedules[1:]])
        said_N, spread_N = fitted.predict(mixes_NSO), fitted.spread(mixes_NSO)
        log_Sn = tuner.take_rows(schedules, n, f"proposals {number + 1} of {ROUNDS}")
        for choice, schedule, said, spread, log_n in zip(
            picked, schedules[1:], said_N, spread_N, log_Sn[1:], strict=True
        ):
            if choice not in tuner.choices:
                against = paired(log_n, log_Sn[0])
                about = {"schedule": space.show(choice), "predicted": float(said), "spread": float(spread)}
                error = (against["sd"] or 0.0) / math.sqrt(against["rows"])
                tuner.held_out.append({**about, "measured": against["difference"], "error": error})
            tuner.choices[choice] = schedule
        rounds.append({"rows": n, "schedules": [space.show(choice) for choice in picked]})
    tuner.stages["proposals"] = rounds
    tuner.learn()


def _about_model(tuner: Tuner) -> dict[str, Any]:
    """How well the model describes what it has not seen: residuals beside what noise alone would make of them."""
    _, loss_N, error_N = tuner.measured()
    fitted, held = tuner.learn(), tuner.held_out
    single_SO, _ = fitted.tables()

    def rms(values: Sequence[float] | np.ndarray) -> float | None:
        return float(np.sqrt(np.mean(np.square(values)))) if len(values) else None

    return {
        "measured_schedules": len(loss_N),
        "held_out_rms": rms([item["measured"] - item["predicted"] for item in held]),
        "held_out_noise_rms": rms([item["error"] for item in held]),
        "held_out_spread_of_measured": float(np.std([item["measured"] for item in held])) if held else None,
        "held_out": held,
        "leave_one_out_rms": rms(loss_N - fitted.loo_N),
        "noise_rms": rms(error_N),
        "widths": dict(zip(("segments", "neighbours", "unexplained"), fitted.widths, strict=True)),
        "options": [f"{model} {density}" for model, density in tuner.space.options],
        "loss_by_segment": single_SO.tolist(),
    }
