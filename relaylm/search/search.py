r"""The best schedule for a family within a budget: by measuring all of them, by evolution, or by a tuner.

`search` reads the question (models, steps, budget), hands it to a method and assembles the result. A method (`Tune`,
`Exhaustive`, `Evolve`) only says which schedules to measure and how to choose. `run` does what all share: it measures
the finalists on fresh rows, and when the search is stopped, by Ctrl-C or a time limit, it returns the best so far.

**Budgets.** A budget is the share of the all-heavy cost to be saved ("25%"), an amount for one sample ("40ms", "3.1e12
flops"), or a number of light segments of two models. Costs are means over all plans, in closed form (`core.cost`), so a
budget holds whatever the seed. A schedule that costs more than the budget is never recommended.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.core import cost
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError, check_family, meant, whole
from relaylm.measure import prices as pricing
from relaylm.measure.estimate import announce, announce_calls
from relaylm.measure.evaluate import Workers, given_rows
from relaylm.measure.judge import load_judge
from relaylm.measure.rivals import one_model
from relaylm.measure.store import Store, open_store
from relaylm.models.family import Family
from relaylm.search.evolve import Evolve
from relaylm.search.exhaustive import Exhaustive
from relaylm.search.space import SLACK, Problem
from relaylm.search.tree import Stopped
from relaylm.search.trials import Trials
from relaylm.search.tune import DRAWS, ROWS, Tune

METHODS = ("tune", "exhaustive", "evolve")
DENSITIES = (Fraction(1), Fraction(1, 2), Fraction(1, 4))


def run(method: Tune | Exhaustive | Evolve) -> dict[str, Any]:
    """Let a method propose finalists and decide by their scores on fresh rows; when stopped, return the best so far.

    `propose` measures schedules and returns the finalists with a number of fresh rows, `decide` the recommendation and
    its verdict, `best_so_far` the same at any time (None before anything was measured), `report` the other results.
    """
    found: dict[str, Any] | None
    stopped = None
    try:
        final, n = method.propose()
        log_Sn = method.rows.take([c.schedule for c in final], n, "confirmation")
        found = method.decide(final, log_Sn)
    except (Stopped, KeyboardInterrupt) as stop:
        stopped = "time limit" if isinstance(stop, Stopped) else "interrupted"
        found = method.best_so_far()
        if found is None:
            if isinstance(stop, KeyboardInterrupt):
                raise
            raise UserError("the search was stopped before anything was measured: there is nothing to show") from None
    about = method.problem.about(Schedule.parse(found["schedule"]))
    return {"stopped": stopped, "confirmed": [], "recommendation": about, **found, **method.report()}


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
    cluster: Workers | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The best schedule within a budget, as plain JSON values: `result["schedule"]` is the recommendation, and
    `show.search.render` makes a text of the whole.

    `budget`: "25%" or 0.25 of the all-heavy cost to be saved (the default), "40ms", "3.1e12 flops", or several shares
    ("0:1:0.1": a front); or what a number of `light_segments` of the light model saves; or for `tune` a `max_loss`
    ("2%": at most 2% more perplexity, as cheaply as possible). `models` may be used (default: all; `exhaustive` without
    a budget uses the light and the heavy one), in `densities` of a segment's steps (1, 1/2, 1/4; `exhaustive` uses 1).
    `n` rows for each schedule (160, `evolve` 64), `confirm` fresh rows for the best (1600). `tune` spends at most as
    many calls as `rows` independent samples take (3300; twice that for a front), unless `confirm` asks for more fresh
    rows than that leaves, or 8 are more (16 for a front or a `max_loss`); `quick` makes it use likelihood bounds alone;
    `text` are rows of held-out token ids (else the heavy model's own samples are used). After `time_limit` seconds, as
    on Ctrl-C, the best so far is returned. With a `store` a search continues where it was stopped. `cluster` are
    workers, such as a `relaylm.cluster.Cluster`.
    """
    began = time.monotonic()
    check_family(family)
    numbers = {"n": (n, 2), "confirm": (confirm, 2), "rows": (rows, 1), "segments": (segments, 1)}
    numbers |= {"batch_size": (batch_size, 1), "light_segments": (light_segments, 0)}
    whole(seed, "seed", 0, 2**64 - 1)
    for what, (number, least) in numbers.items():
        if number is not None:
            whole(number, what, least)
    if cluster is not None and not hasattr(cluster, "map"):
        raise UserError(f"cluster must be an open relaylm.cluster.Cluster, not {cluster!r}")
    _check_question(method, budget, max_loss, light_segments, segments, quick)
    two = light_segments is not None or budget is None
    light, heavy, names = _models(family, method, models, light, heavy, two)
    given_PL, texts = given_rows(family, prompts, 1 if prompts is None else len(prompts), length)
    free_PL, length = given_PL < 0, given_PL.shape[1]
    if not free_PL.any(axis=1).all():
        raise UserError("nothing is left to write: a prompt takes all positions")
    total = _steps(length if steps is None else steps, segments)
    # Independent of n, so that bits stay the same. A quarter of the usual batch is nearly as fast, and is filled by the
    # few rows of a round.
    few = max(1, (16_384 if family.device.type == "cuda" else 1024) // length)
    batch = batch_size or min(family.batch_size(1 << 20, length), few)
    scorer = None if quick else load_judge(judge, family)
    kept = None if quick else open_store(store)  # the bounds take no longer than reading them would
    deadline = None if time_limit is None else began + time_limit
    trials = Trials(
        family, scorer, given_PL, heavy, seed, texts, recipe, batch, kept, fresh, deadline, progress, cluster
    )
    unit = "flops" if budget is None else budgets(budget)[0].unit
    prices = pricing.prices(family, unit, length, total, models=names, batch_size=batch)
    each = _densities(DENSITIES if densities is None else densities)
    problem = Problem(family, trials, light, heavy, names, total, segments, each, unit, prices, free_PL)
    if method == "tune":
        problem.pairs = family.pairs
        if problem.pairs is None:
            problem.notes.append("no table of pairs (relaylm pairs --keep), so spaced plans were left out")
    if progress and cluster is None and unit == "flops":
        _announce(problem, method, n, confirm, rows, quick)
    way: Tune | Exhaustive | Evolve
    if method == "exhaustive":
        limit = None if budget is None else limits(problem, budget, None)[0]
        way = Exhaustive(problem, light_segments, limit, n or 160, confirm or 1600)
    elif method == "evolve":
        way = Evolve(problem, limits(problem, budget, light_segments)[0], n or 64, confirm or 1600)
    else:
        goals = [] if max_loss is not None else limits(problem, budget, light_segments)
        way = Tune(problem, goals, _loss(max_loss), rows, confirm, text, quick)
    found = run(way)
    about: dict[str, Any] = {"kind": "search", "method": method, "device": str(family.device)}
    about |= {"family": {"name": family.name, "digest": family.digest}, "models": list(names)}
    about |= {"light": light, "heavy": heavy, "steps": total, "length": int(length), "segments": segments}
    about |= {"seed": seed, "judge": scorer and scorer.name, "recipe": recipe, "batch_size": batch}
    about |= {"conditional": prompts is not None, "unit": unit, "all_heavy_price": problem.all_heavy}
    notes = [*problem.notes, *([*kept.damage, *kept.repaired] if kept is not None else [])]
    return {**about, **found, "calls": trials.spent.to_json(), "seconds": time.monotonic() - began, "notes": notes}


def _announce(problem: Problem, method: str, n: int | None, confirm: int | None, rows: int | None, quick: bool) -> None:
    """Say how long the search will take at most, before it begins: samples are counted as all-heavy ones."""
    family, hint = problem.family, "--quick takes far less, --rows, --length and --time-limit make it shorter"
    if quick:
        calls, hint = 64 * DRAWS * len(problem.models), "--length makes it shorter"
        return announce_calls(family, "a quick search", calls, problem.length, hint)
    if method == "tune":
        samples = (rows or ROWS) + (confirm or 0)
    else:
        schedules = math.comb(problem.segments, problem.segments // 2) if method == "exhaustive" else 200
        samples = schedules * (n or 160) // 10 + (confirm or 1600)
        hint = "-n, --confirm and --time-limit make it shorter"
    what, batch = f"at most {samples:,} samples", problem.trials.batch
    announce(family, what, samples * problem.all_heavy, problem.length, batch, hint)


def _check_question(
    method: str, budget: Any, max_loss: Any, light_segments: int | None, segments: int, quick: bool
) -> None:
    if method not in METHODS:
        raise UserError(
            f"{method!r} is not a method of search{meant(str(method), METHODS) or ':'} choose {', '.join(METHODS)}"
        )
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
    """What L and H stand for, and the models that may be used, light to heavy: two, by default, in an exhaustive search
    by light segments."""
    models = [family.named(name) for name in models or ()] or None
    if models:
        light = light or min(models, key=family.names.index)
        heavy = heavy or max(models, key=family.names.index)
    light, heavy = family.roles(light, heavy)
    chosen = {*(models or ((light, heavy) if two and method == "exhaustive" else family.names)), heavy}
    names = tuple(name for name in family.names if name in chosen)
    if two and method == "exhaustive" and len(names) > 2:
        raise UserError(f"light segments are of two models, not of {', '.join(names)}: give a budget instead")
    if names[-1] != heavy:
        raise UserError(f"{names[-1]} costs more than the heavy model {heavy}: say which models may be used")
    if len(names) < 2 and method != "tune":
        raise UserError(f"there is nothing to search: {names[0]} is the only model")
    return light, heavy, names


def _steps(steps: float, segments: int) -> int:
    if not isinstance(steps, Real) or not 1 <= steps < math.inf or steps != int(steps):
        raise UserError(f"a search needs a whole number of steps from 1 up, not {steps}")
    if segments > steps:
        raise UserError(f"{int(steps)} steps cannot be cut into {segments} segments: take 1 to {int(steps)}")
    return int(steps)


def _densities(values: Sequence[Fraction | float | str]) -> tuple[Fraction, ...]:
    found = tuple(_share(value) for value in values)
    for value, density in zip(values, found, strict=True):
        if not 0 < density <= 1:
            raise UserError(f"{value!r} is not a density: write shares of a segment's steps, such as 1, 1/2, 25%")
    if 1 not in found:
        raise UserError("densities are shares of a segment's steps, above 0 and up to 1, and 1 is one of them")
    return found


def _loss(max_loss: str | float | None) -> float | None:
    """The largest difference in log-perplexity; "2%" is log 1.02."""
    if max_loss is None:
        return None
    try:
        text = str(max_loss).strip()
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise UserError(f"{max_loss!r} is not a loss: write the most perplexity may rise, such as 2% or 0.02")
    return math.log1p(share)


def _share(value: Fraction | float | str) -> Fraction:
    """25%, 1/4 or 0.25, without an exponent; 0 for what is no share."""
    if not isinstance(value, str):
        value = value if isinstance(value, Fraction) else float(value)
        return Fraction(value) if math.isfinite(value) else Fraction(0)
    text = value.strip()
    if not re.fullmatch(r"[0-9./]{1,40}%?", text):
        return Fraction(0)
    try:
        return Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)


def budgets(budget: str | float | Sequence[float]) -> list[cost.Budget]:
    """One budget or several: "0:1:0.1" and lists are shares to be saved."""
    if isinstance(budget, str) and budget.count(":") == 2:
        try:
            start, stop, step = (float(part) for part in budget.split(":"))
            number = math.floor((stop - start) / step + 1e-9) + 1
        except (ValueError, ZeroDivisionError, OverflowError):
            number = 0
        if not (1 <= number <= 1000 and step > 0 and 0 <= start <= stop <= 1):
            raise UserError(f"{budget!r} is not a range of budgets: write START:STOP:STEP, such as 0:1:0.1")
        return [cost.Budget(round(start + k * step, 12), "flops", share=True) for k in range(number)]
    if isinstance(budget, str):
        return [cost.parse_budget(budget)]
    shares: list[float] = [budget] if isinstance(budget, int | float) else list(budget)
    if not shares or not all(isinstance(share, Real) and 0 <= share < 1 for share in shares):
        raise UserError(f"a budget is a share to be saved, from 0 to below 1, not {budget}")
    return [cost.Budget(float(share), "flops", share=True) for share in shares]


def limits(problem: Problem, budget: str | float | Sequence[float] | None, light_segments: int | None) -> list[float]:
    """The most that a row may cost, for each budget. Of a range, what no schedule can save is left out."""
    all_heavy = problem.all_heavy
    if light_segments is not None:
        # Segments differ by a step where T is no multiple of their number; the most expensive placement is within.
        space = problem.space([Fraction(1)])
        gain_S = np.sort(space.price_SO[:, 0] - space.price_SO[:, space.all_light[0]])
        light = light_segments == problem.segments
        return [space.price(space.all_light) if light else all_heavy - float(gain_S[:light_segments].sum())]
    asked = budgets("25%" if budget is None else budget)
    floor = math.fsum(problem.space().price_SO.min(axis=1))
    if problem.spaced:  # all positions at once
        floor = min(floor, problem.price(one_model(problem.models[0], Spacing(1))))
    found = [b.limit(all_heavy) for b in asked]
    within = [limit for limit in found if limit * (1 + SLACK) >= floor]
    most = f"at most {1 - floor / all_heavy:.1%} can be saved"
    if not within:
        what = f"no schedule of {', '.join(problem.models)} fits a budget of {asked[0]}"
        raise UserError(f"{what}: {most} ({floor:.4g} {problem.unit} a row)")
    if len(within) < len(found):
        left = len(found) - len(within)
        problem.notes.append(f"{left} budget{' was' if left == 1 else 's were'} left out: {most}")
    return within
