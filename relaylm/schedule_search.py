r"""The best schedule for a family: by trying all of them, by evolution, or by a tuner that needs a tenth of it.

All three methods (`exhaustive`, `evolve`, `tune`) ask one evaluator (`trials`): rows of common random numbers, judged,
stored, with shared beginnings drawn once. They differ in which schedules they ask about. Here is what they share: the
question, the models, the budget.

**Budgets.** A budget is the share of the all-heavy cost that must be saved ("25%"), an amount for one sample ("40ms",
"3.1e12 flops"), or a number of light segments of two models. Costs are means over all plans, in closed form (`cost`),
so a budget holds whatever the seed. A schedule that costs more than the budget is never proposed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm import cost
from relaylm.comparison import _given, _open_store
from relaylm.contenders import one_model
from relaylm.errors import UserError
from relaylm.evolve import evolve
from relaylm.exhaustive import exhaustive
from relaylm.judge import load_judge
from relaylm.schedule import Schedule
from relaylm.surrogate import SLACK, Space
from relaylm.trials import Trials, counted
from relaylm.tune import tune

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.store import Store

METHODS = ("tune", "exhaustive", "evolve")
DENSITIES = (Fraction(1), Fraction(1, 2), Fraction(1, 4))


@dataclass
class Problem:
    """What is searched for, for whom, and by what means."""

    family: Family
    trials: Trials
    light: str
    heavy: str
    models: tuple[str, ...]  # that may take part, light to heavy
    steps: int
    segments: int
    densities: tuple[Fraction, ...]
    unit: str
    prices: dict[str, cost.Price]
    free_n: np.ndarray
    notes: list[str] = field(default_factory=list)

    def price(self, schedule: Schedule) -> float:
        return cost.mean_price(self.prices, schedule, None, self.free_n)

    @property
    def all_heavy(self) -> float:
        return self.price(self.alone(self.heavy))

    def alone(self, model: str, steps: int | None = None) -> Schedule:
        return counted(one_model(model), steps or self.steps, self.light, self.heavy)

    def space(self, densities: Sequence[Fraction] | None = None) -> Space:
        chosen = tuple(self.densities if densities is None else densities)
        return Space(self.models, self.steps, self.segments, chosen, self.prices, self.free_n)

    def about(self, schedule: Schedule) -> dict[str, Any]:
        """A schedule's name and price, for a result."""
        price = self.price(schedule)
        return {
            "schedule": str(schedule),
            "steps": schedule.steps,
            "price": price,
            "saved": 1 - price / self.all_heavy,
        }


def search(
    family: Family,
    method: str = "tune",
    *,
    budget: str | float | Sequence[float] | None = None,
    max_loss: str | float | None = None,
    light_segments: int | None = None,
    segments: int = 10,
    models: Sequence[str] | None = None,
    densities: Sequence[Fraction | float | str] | None = None,
    n: int | None = None,
    confirm: int | None = None,
    rows: int | None = None,
    steps: int | None = None,
    length: int | None = None,
    seed: int = 0,
    prompts: Sequence[str] | np.ndarray | None = None,
    judge: Any = None,
    recipe: str = "plain",
    text: np.ndarray | None = None,
    quick: bool = False,
    time_limit: float | None = None,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    store: Store | str | Path | None = None,
    fresh: bool = False,
    cluster: Any = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The best schedule within a budget. Plain JSON values come back; `search_report.render` shows them, and
    `result["schedule"]` is the recommendation.

    `budget`: "25%" or 0.25 of the all-heavy cost to be saved (the default), "40ms", "3.1e12 flops", or several shares
    ("0:1:0.1": a front); or what so many `light_segments` of the light model save; or for `tune` a `max_loss` ("2%":
    at most 2% more perplexity, as cheaply as possible). `models` may take part (default: all; `exhaustive` without a
    budget takes the light and the heavy one), in `densities` of a segment's steps (1, 1/2, 1/4; `exhaustive` takes 1).
    `n` rows for each schedule (160, `evolve` 64), `confirm` fresh rows for the best (1600). `tune` spends at most as
    many calls as `rows` independent samples take (3300; twice that for a front), unless `confirm` asks for more fresh
    rows than that leaves; `quick` makes it look at likelihood bounds alone; `text` are rows of held-out token ids (else
    the heavy model's own samples are used). `time_limit` is in seconds: the best so far comes back, as it does on
    Ctrl-C. With a `store` a search goes on where it was stopped. `cluster` is a Ray address, "local", or a
    `cluster.Cluster`.
    """
    for what, number, least in (("n", n, 2), ("confirm", confirm, 2), ("rows", rows, 1), ("segments", segments, 1)):
        if number is not None and number < least:
            raise UserError(f"{what} must be at least {least}, not {number}")
    _check_question(method, budget, max_loss, light_segments, segments, quick)
    began = time.monotonic()
    light, heavy, names = _models(
        family, method, models, light, heavy, two=light_segments is not None or budget is None
    )
    given_PL, texts = _given(family, prompts, 1 if prompts is None else len(prompts), length)
    free_n = (given_PL < 0).sum(axis=1)
    if not free_n.all():
        raise UserError("nothing is left to write: a prompt takes all positions")
    total = _steps(given_PL.shape[1] if steps is None else steps, segments)
    batch = batch_size or _batch_size(family, given_PL.shape[1])
    unit = "flops" if budget is None else budgets(budget)[0].unit
    prices = cost.prices(family, unit, given_PL.shape[1], total, models=names, batch_size=batch)
    with _workers(family, cluster) as workers:
        trials = Trials(
            family,
            None if quick else load_judge(judge, family),
            given_PL,
            heavy,
            seed,
            texts,
            recipe,
            batch,
            None if quick else _open_store(store),  # the bounds take no longer than reading them would
            fresh,
            None if time_limit is None else began + time_limit,
            progress,
            workers,
        )
        each = DENSITIES if densities is None else tuple(_density(d) for d in densities)
        problem = Problem(family, trials, light, heavy, names, total, segments, each, unit, prices, free_n)
        if method == "exhaustive":
            limit = None if budget is None else limits(problem, budget, None)[0]
            found = exhaustive(problem, light_segments, limit, n or 160, confirm or 1600)
        elif method == "evolve":
            limit = limits(problem, budget, light_segments)[0]
            found = evolve(problem, limit, n or 64, confirm or 1600)
        else:
            goals = [] if max_loss is not None else limits(problem, budget, light_segments)
            found = tune(problem, goals, _loss(max_loss), rows=rows, confirm=confirm, text=text, quick=quick)
    kept = trials.store
    return {
        "kind": "search",
        "method": method,
        "family": {"name": family.name, "digest": family.digest},
        "light": light,
        "heavy": heavy,
        "models": list(names),
        "steps": total,
        "length": int(given_PL.shape[1]),
        "segments": segments,
        "seed": seed,
        "judge": None if trials.judge is None else trials.judge.name,
        "recipe": recipe,
        "conditional": prompts is not None,
        "unit": unit,
        "all_heavy_price": problem.all_heavy,
        "device": str(family.device),
        "batch_size": batch,
        **found,
        "calls": trials.spent.to_json(),
        "seconds": time.monotonic() - began,
        "notes": [*problem.notes, *([*kept.damage, *kept.repaired] if kept is not None else [])],
    }


# ------------------------------------------------------------------------------------------------ the question


def _check_question(
    method: str, budget: Any, max_loss: Any, light_segments: int | None, segments: int, quick: bool
) -> None:
    if method not in METHODS:
        raise UserError(f"{method!r} is not a method of search: choose {', '.join(METHODS)}")
    if sum(option is not None for option in (budget, max_loss, light_segments)) > 1:
        raise UserError("say what may be spent in one way: a budget, a max_loss or light_segments")
    if method != "tune" and (max_loss is not None or quick):
        raise UserError(f"{'quick' if quick else 'max_loss'} is for tune, not for {method}")
    if method != "tune" and budget is not None and len(budgets(budget)) > 1:
        raise UserError(f"several budgets are for tune; give one to {method}")
    if light_segments is not None and not 0 <= light_segments <= segments:
        raise UserError(f"{light_segments} light segments of {segments} are not possible: take 0 to {segments}")


def _models(
    family: Family, method: str, models: Sequence[str] | None, light: str | None, heavy: str | None, two: bool
) -> tuple[str, str, tuple[str, ...]]:
    """What L and H stand for, and the models that may take part, light to heavy. Exhaustive search by light segments
    takes two unless told otherwise."""
    family.check_names(models or ())
    if models:
        light = light or min(models, key=family.names.index)
        heavy = heavy or max(models, key=family.names.index)
    light, heavy = family.roles(light, heavy)
    chosen = {*(models or ((light, heavy) if two and method == "exhaustive" else family.names)), heavy}
    names = tuple(name for name in family.names if name in chosen)
    if two and method == "exhaustive" and len(names) > 2:
        raise UserError(f"light segments are of two models, not of {', '.join(names)}: give a budget instead")
    if names[-1] != heavy:
        raise UserError(f"{names[-1]} is dearer than the heavy model {heavy}: say which models may take part")
    if len(names) < 2 and method != "tune":
        raise UserError(f"there is nothing to search: {names[0]} is the only model")
    return light, heavy, names


def _steps(steps: float, segments: int) -> int:
    if math.isinf(steps) or steps != int(steps) or steps < 1:
        raise UserError(f"a search needs a whole number of steps from 1 up, not {steps}")
    if segments > steps:
        raise UserError(f"{int(steps)} steps cannot be cut into {segments} segments: take 1 to {int(steps)}")
    return int(steps)


def _workers(family: Family, cluster: Any) -> Any:
    """A cluster by its address, one that is there already, or none."""
    if isinstance(cluster, str):
        from relaylm.cluster import Cluster

        return Cluster(family, cluster)
    return nullcontext(cluster)


def _batch_size(family: Family, length: int) -> int:
    """Whatever n is, so that bits stay the same. A quarter of the usual batch is nearly as quick, and the few rows that
    a round of a search has do not leave most of its places empty."""
    whole = family.batch_size(1 << 20, length)
    return min(whole, max(1, (16_384 if family.device.type == "cuda" else 1024) // length))


def _density(value: Fraction | float | str) -> Fraction:
    try:
        density = Fraction(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else Fraction(value)
    except (ValueError, ZeroDivisionError):
        density = Fraction(0)
    if not 0 < density <= 1:
        raise UserError(f"{value!r} is not a density: write shares of a segment's steps, such as 1, 1/2, 25%")
    return density


def _loss(max_loss: str | float | None) -> float | None:
    """The largest difference in log-perplexity; "2%" is log 1.02."""
    if max_loss is None:
        return None
    try:
        text = str(max_loss).strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < math.inf:
        raise UserError(f"{max_loss!r} is not a loss: write the most perplexity may rise, such as 2% or 0.02")
    return math.log1p(share)


def budgets(budget: str | float | Sequence[float]) -> list[cost.Budget]:
    """One, or several: "0:1:0.1" and lists are shares to be saved."""
    if isinstance(budget, str) and budget.count(":") == 2:
        try:
            start, stop, step = (float(part) for part in budget.split(":"))
            number = math.floor((stop - start) / step + 1e-9) + 1
        except (ValueError, ZeroDivisionError):
            number = 0
        if not (1 <= number <= 1000 and step > 0 and 0 <= start <= stop <= 1):
            raise UserError(f"{budget!r} is not a range of budgets: write START:STOP:STEP, such as 0:1:0.1")
        return [cost.Budget(round(start + k * step, 12), "flops", share=True) for k in range(number)]
    if isinstance(budget, str):
        return [cost.parse_budget(budget)]
    shares: list[float] = [budget] if isinstance(budget, int | float) else list(budget)
    if not shares or not all(0 <= share < 1 for share in shares):
        raise UserError(f"a budget is a share to be saved, from 0 to below 1, not {budget}")
    return [cost.Budget(float(share), "flops", share=True) for share in shares]


def limits(problem: Problem, budget: str | float | Sequence[float] | None, light_segments: int | None) -> list[float]:
    """The most that a row may cost, for each budget. Of a range, what no schedule can save is left out."""
    all_heavy, segments = problem.all_heavy, problem.segments
    if light_segments is not None:
        # Segments differ by a step where T is no multiple of their number; the dearest placement is within.
        space = problem.space([Fraction(1)])
        gain_S = np.sort(space.price_SO[:, 0] - space.price_SO[:, space.all_light[0]])
        return [
            all_heavy - float(gain_S[:light_segments].sum())
            if light_segments < segments
            else space.price(space.all_light)
        ]
    asked = budgets("25%" if budget is None else budget)
    floor = math.fsum(problem.space().price_SO.min(axis=1))
    found = [b.limit(all_heavy) for b in asked]
    within = [limit for limit in found if limit * (1 + SLACK) >= floor]
    if not within:
        raise UserError(
            f"no schedule of {', '.join(problem.models)} fits a budget of {asked[0]}: at most "
            f"{1 - floor / all_heavy:.1%} can be saved ({floor:.4g} {problem.unit} a row)"
        )
    if len(within) < len(found):
        problem.notes.append(
            f"{len(found) - len(within)} budgets were left out: at most {1 - floor / all_heavy:.1%} can be saved"
        )
    return within
