r"""The last stage of `tune` for more than one budget: a front, the cheapest schedule that is good enough, a quick look.

A *ladder* is a schedule for each of several limits on the price, as the model would have it, with the rivals of each
limit (every model alone, the heavy one in fewer steps, the sandwich). All are measured on the same fresh rows.

- **Front.** For each limit the best of all that are within it, chosen on the first half of the rows and reported on the
  second, so that the choice does not flatter itself. Many candidates share few rows, so the choice goes by means that
  `more_is_no_worse`: with the spreads recorded on `wiki-char`, 31 rows then choose as well as 62 would without.
- **Allowed loss.** Limits stand around the one at which the model expects the loss. Recommended is the cheapest
  candidate whose loss is *shown* to be within it: the upper end of a one-sided 95% interval, corrected for the number
  of candidates (Bonferroni), is. All-heavy loses nothing and is always there.
- **Quick.** The same by the likelihood bound alone: no race, no judge, only (without text) a few samples to measure on.

Shapes: S schedules, n rows, N text rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relaylm import metrics
from relaylm.race import (
    ALPHA,
    CONFIRM,
    FIRST_ROUND,
    Candidate,
    by_hand,
    candidates,
    figures,
    named,
    recommendation,
    rivals_within,
    use,
)
from relaylm.schedule_bound import schedule_bound
from relaylm.surrogate import SLACK
from relaylm.trials import paired

if TYPE_CHECKING:
    from relaylm.schedule_search import Problem
    from relaylm.tune import Tuner


def even_limits(problem: Problem, rungs: int = 10) -> list[float]:
    """Even savings up to the largest possible."""
    floor, most = math.fsum(problem.space().price_SO.min(axis=1)), problem.all_heavy
    return [most - (most - floor) * k / rungs for k in range(1, rungs + 1)]


def measure_ladder(tuner: Tuner, limits: Sequence[float], max_loss: float | None) -> dict[str, Any]:
    """A front over the limits; with a `max_loss` the cheapest that keeps to it."""
    problem = tuner.problem
    if max_loss is not None:
        limits = _limits_around(tuner, limits, max_loss)
    rungs = _rungs(tuner, limits)
    schedules = [c.schedule for c in rungs]
    n = max(2 * FIRST_ROUND, min(CONFIRM, tuner.affordable(schedules, tuner.left)))
    log_Sn = tuner.take_rows(schedules, n, f"{len(rungs)} candidates")
    rows = [figures(problem, c, log_n, log_Sn[0]) for c, log_n in zip(rungs, log_Sn, strict=True)]
    price_S, mean_S = (np.array([row[key] for row in rows]) for key in ("price", "log_ppl"))
    for s, row in enumerate(rows):
        row["on_front"] = not ((price_S <= price_S[s]) & (mean_S < mean_S[s])).any()
    tuner.stages["ladder"] = {"rows": n, "candidates": len(rungs), "limits": list(limits)}
    if max_loss is not None:
        return _cheapest(problem, rungs, rows, log_Sn, max_loss)
    return _front(problem, rungs, rows, log_Sn, limits)


def _rungs(tuner: Tuner, limits: Sequence[float]) -> list[Candidate]:
    """All-heavy first; for each limit the rivals, the model's best on the full grid and on any, and one by hand."""
    problem, trials = tuner.problem, tuner.problem.trials
    found = [Candidate(problem.alone(problem.heavy), "all-heavy", "anchor")]
    uniform = tuner.options(problem.models, uniform=True)
    for limit in limits:
        for rival in rivals_within(problem, limit):
            if rival.schedule.steps == problem.steps or rival.schedule.models == (problem.heavy,):
                found.append(rival)
        for what, allowed in (("models and steps together", None), ("all models", uniform)):
            if (choice := tuner.guess(limit, allowed)) is not None:
                found.append(named(problem, tuner.space.schedule(choice), what))
        found += by_hand(problem, limit)[:1]
    unique: dict[str, Candidate] = {}
    for candidate in found:
        unique.setdefault(trials.law(candidate.schedule), candidate)
    return list(unique.values())


def _front(
    problem: Problem,
    rungs: Sequence[Candidate],
    rows: list[dict[str, Any]],
    log_Sn: np.ndarray,
    limits: Sequence[float],
) -> dict[str, Any]:
    price_S = np.array([row["price"] for row in rows])
    half = log_Sn.shape[1] // 2
    ways = [_way(problem, candidate) for candidate in rungs]
    chosen_S, fresh_Sn = more_is_no_worse(ways, price_S, np.nanmean(log_Sn[:, :half], axis=1)), log_Sn[:, half:]
    goals: list[dict[str, Any]] = []
    for limit in limits:
        within = np.flatnonzero(price_S <= limit * (1 + SLACK)).tolist()
        s = min(within, key=lambda s: (chosen_S[s], -price_S[s]))
        rivals = [r for r in within if rungs[r].kind != "mixed"]
        best_rival = None
        if rivals:
            r = min(rivals, key=lambda r: (chosen_S[r], -price_S[r]))
            against = paired(fresh_Sn[s], fresh_Sn[r])
            best_rival = {"schedule": rows[r]["schedule"], "what": rows[r]["what"], "against": against}
        goals.append(
            {
                "limit": limit,
                "saved_at_least": 1 - limit / problem.all_heavy,
                **figures(problem, rungs[s], fresh_Sn[s], fresh_Sn[0]),
                "best_rival": best_rival,
            }
        )
        rows[s]["recommended"] = True
    for row in rows:
        row.setdefault("recommended", False)
    mixed = [goal for goal in goals if goal["kind"] == "mixed"]
    wins = [
        goal
        for goal in mixed
        if goal["best_rival"] is None
        or (goal["best_rival"]["against"]["differs"] and goal["best_rival"]["against"]["difference"] < 0)
    ]
    line = (
        f"A mixed schedule is recommended at {len(mixed)} of {len(goals)} budgets, and beats the best equal-compute "
        f"rival significantly at {len(wins)} (paired, 95%, {fresh_Sn.shape[1]} rows)."
    )
    middle = goals[len(goals) // 2]
    picked = next(c for c, row in zip(rungs, rows, strict=True) if row["schedule"] == middle["schedule"])
    rows.sort(key=lambda row: row["price"])
    basis = "all candidates on the same fresh rows; the choice on one half, the figures of `front` on the other"
    return {**recommendation(problem, picked), "front": goals, "confirmed": rows, "basis": basis, "verdict": line}


def _way(problem: Problem, candidate: Candidate) -> str:
    """In which way a candidate saves: those that do it in the same way differ in how much."""
    models, steps = candidate.schedule.models, candidate.schedule.steps
    if len(models) > 1 or candidate.kind == "anchor":
        return candidate.what
    return "alone" if steps == problem.steps else f"{models[0]} in fewer steps"


def more_is_no_worse(ways: Sequence[str], price_S: np.ndarray, mean_S: np.ndarray) -> np.ndarray:
    """Means that never fall with the price among candidates of the same way: the nearest such ones to what was measured
    (isotonic regression, by pooling neighbours in the wrong order)."""
    out_S = mean_S.copy()
    for way in set(ways):
        members = sorted((s for s in range(len(ways)) if ways[s] == way), key=lambda s: -price_S[s])
        pools: list[list[int]] = []
        for s in members:
            pools.append([s])
            while len(pools) > 1 and mean_S[pools[-2]].mean() > mean_S[pools[-1]].mean():
                last = pools.pop()
                pools[-1] += last
        for pool in pools:
            out_S[pool] = mean_S[pool].mean()
    return out_S


def _limits_around(tuner: Tuner, limits: Sequence[float], max_loss: float) -> list[float]:
    """Limits near the one at which the model expects the allowed loss to be reached."""
    most, least = tuner.problem.all_heavy, min(limits)
    edge = most
    for limit in np.linspace(most, least, 41)[1:].tolist():
        if (choice := tuner.guess(limit)) is None:
            continue
        schedule = tuner.space.schedule(choice)
        tuner.know(schedule)
        if tuner.predict([schedule])[0] <= max_loss:
            edge = min(edge, limit)
    around = [most - (most - edge) * share for share in (0.5, 0.7, 0.85, 1.0, 1.15, 1.4)]
    kept = [limit for limit in around if least <= limit < most]
    return kept or [most - (most - least) * share for share in (0.05, 0.1, 0.2)]


def _cheapest(
    problem: Problem, rungs: Sequence[Candidate], rows: list[dict[str, Any]], log_Sn: np.ndarray, max_loss: float
) -> dict[str, Any]:
    level = 1 - ALPHA / max(1, len(rows) - 1)
    for row, log_n in zip(rows, log_Sn, strict=True):
        d_n = (log_n - log_Sn[0])[np.isfinite(log_n - log_Sn[0])]
        margin = metrics.student_quantile(level, len(d_n) - 1) * float(d_n.std(ddof=1)) / math.sqrt(len(d_n))
        row["loss_at_most"] = float(d_n.mean()) + margin
    shown = [s for s, row in enumerate(rows) if row["loss_at_most"] <= max_loss]
    chosen = min(shown, key=lambda s: rows[s]["price"])  # all-heavy is one of them
    for s, row in enumerate(rows):
        row["recommended"] = s == chosen
    row = rows[chosen]
    allowed = f"{math.expm1(max_loss):.2%}"
    line = (
        f"{use(problem, row)}: {row['saved']:.1%} of all-heavy's {problem.unit} saved at {row['loss_at_most']:+.4f} "
        f"log-perplexity at most ({allowed} more perplexity allowed; {row['rows']} rows, corrected for {len(rows) - 1} "
        "candidates)."
    )
    if chosen == 0:
        line = f"Nothing cheaper than all-heavy is shown to lose at most {allowed} on {row['rows']} rows."
    picked = rungs[chosen]
    rows.sort(key=lambda item: item["price"])
    basis = "all candidates on the same fresh rows"
    return {**recommendation(problem, picked), "confirmed": rows, "basis": basis, "verdict": line}


def quick_look(tuner: Tuner, limits: Sequence[float], max_loss: float | None) -> dict[str, Any]:
    """Candidates by the likelihood bound alone. An allowed loss is one of the bound, in nats for a token."""
    problem, table = tuner.problem, tuner.table
    assert table is not None
    heavy = Candidate(problem.alone(problem.heavy), "all-heavy", "anchor")
    unique = {problem.trials.law(heavy.schedule): heavy}
    for limit in limits:
        for candidate in candidates(tuner, limit):
            unique.setdefault(problem.trials.law(candidate.schedule), candidate)
    heavy_N = schedule_bound(table, heavy.schedule).nats_N / table.length
    rows, nats = [], {}
    for candidate in unique.values():
        found = schedule_bound(table, candidate.schedule)
        nats[str(candidate.schedule)] = found.nats_N / table.length
        against = paired(nats[str(candidate.schedule)], heavy_N)
        about = {"what": candidate.what, "kind": candidate.kind, **problem.about(candidate.schedule)}
        rows.append({**about, "bits": found.bits, "against_heavy": against})

    def best_within(limit: float) -> dict[str, Any]:
        return min((row for row in rows if row["price"] <= limit * (1 + SLACK)), key=lambda row: row["bits"])

    front = [] if max_loss is not None else [{"limit": limit, **best_within(limit)} for limit in limits]
    if max_loss is not None:
        chosen = min((row for row in rows if row["against_heavy"]["difference"] <= max_loss), key=lambda r: r["price"])
    else:
        chosen = best_within(limits[len(limits) // 2])
    for row in rows:
        row["recommended"] = row is chosen
    own_N, (low, high) = nats[chosen["schedule"]], chosen["against_heavy"]["ci"]
    others = [row for row in rows if row is not chosen and row["price"] <= chosen["price"] * (1 + SLACK)]
    alike = sum(not paired(nats[row["schedule"]], own_N)["differs"] for row in others)
    line = (
        f"{use(problem, chosen)}, by the likelihood bound alone: {chosen['saved']:.1%} saved, "
        f"{chosen['against_heavy']['difference']:+.4f} nats a token against all-heavy ({low:+.4f} to {high:+.4f}); "
        f"{alike} of {len(others)} others that cost no more cannot be told from it. Sampling may disagree."
    )
    picked = next(c for c in unique.values() if str(c.schedule) == chosen["schedule"])
    rows.sort(key=lambda row: row["bits"])
    return {
        **recommendation(problem, picked),
        "bounds": rows,
        "front": front if len(limits) > 1 else [],
        "confirmed": [],
        "basis": "the likelihood bound alone",
        "verdict": line,
    }
