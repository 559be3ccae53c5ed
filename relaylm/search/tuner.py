"""What the tuner knows while it searches, and its first two stages (`tune` describes all five): prior and ablations.

Shapes: S segments, O options, N measured schedules, n rows, T steps, K models.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.evaluate import cached
from relaylm.measure.metrics import paired_difference as paired
from relaylm.measure.schedule_likelihood import BoundTable, measure_table, step_costs
from relaylm.search.space import Choice, Fit, Problem, Space, best, fit
from relaylm.search.trials import Rows

SHARES = {"ablations": 0.2, "proposals": 0.3, "race": 0.35, "confirmation": 0.15}  # of the calls
MOST_ROWS = 128  # for ablations, and for a round of proposals
PRIOR_FIRST_ROW = 1 << 31  # of the samples that the prior is measured on, far from all others
DRAWS = 8  # of the mask, for a row of the prior


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
        common = float(np.mean([variance for _, _, variance, _ in found]))
        errors = [math.sqrt((variance * (n - 1) + common * 8) / (n + 7) / n) for _, _, variance, n in found]
        return np.stack([mix for mix, *_ in found]), np.array([mean for _, mean, _, _ in found]), np.array(errors)

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
    source = "the heavy model's own samples" if text is None else "held-out text"
    options = [f"{model} {density}" for model, density in space.options]
    nats = tuner.prior_SO.tolist()
    tuner.stages["prior"] = {"source": source, "rows": rows, "options": options, "excess_nats_per_token": nats}


def _bound_table(tuner: Tuner, models: dict[str, Any], text: np.ndarray | None) -> tuple[BoundTable, int]:
    """Every model's loss by the number of masked positions, from the store or measured, and its number of rows."""
    problem, trials, family = tuner.problem, tuner.problem.trials, tuner.problem.family
    about = None if text is None else hashlib.sha256(np.ascontiguousarray(text).tobytes()).hexdigest()
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
        arrays = {"m": table.m_ND.tolist(), "weight": table.weight_ND.tolist(), "c": table.c_KND.tolist()}
        return {"kind": "prior", "length": table.length, **arrays, "calls": calls}

    what = ["prior", trials.base, list(models), problem.steps, problem.heavy, about, n, DRAWS]
    record = cached(trials.store, what, measure, trials.fresh)
    for total in (trials.spent.made, trials.spent.naive):
        total.update(record["calls"])
    tuner.rows.used += sum(record["calls"].values())
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


def ablation_rows(tuner: Tuner) -> int:
    """Rows of the ablations. Too few are refused before any network runs."""
    space, rows = tuner.space, tuner.rows
    schedules = [space.schedule(choice) for choice in ablations(space)]
    n = rows.affordable(schedules, SHARES["ablations"] * rows.budget)
    if n < 2:
        one, least = (rows.trials.expected_calls(part) for part in (schedules[:1], schedules))
        what = (
            f"{rows.budget / one:.0f} rows are too few to tune {len(space.models)} models in {space.segments} segments"
        )
        enough = math.ceil(2.01 * least / SHARES["ablations"] / one)
        raise UserError(f"{what}: give at least {enough}, or fewer segments, models or densities")
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
