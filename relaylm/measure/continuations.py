r"""Likelihood bounds of continuations: some positions of a row given, the others scored, a standard error for each.

The bound of `plan_likelihood` for the free positions of rows whose others are given, from several plans of each row.
Where calls are few, plans are followed to their end: of a model that is consistent, every order gives the same sum, so
whole plans vary little. Where uniform steps would need more calls than there are to spend, a plan is one call: at the
step of a random position, with all masked positions scored (`likelihood` has the weights).

Plans of a row come in groups. In a group they are *antithetic*, in pairs u and 1 - u (what one writes first, the other
writes last; for single calls also x and 1 - x, which say how many positions are masked), and *stratified*: the pairs
divide (0, 1/2) evenly among their x, and in whole plans the u of pair j of P are moved by j / P. Each plan alone has
the right law, so the mean is unbiased; groups are independent, and the standard error is over groups. Equal plans of a
row are computed once.

Shapes: N rows, L positions, G groups, D plans of a group, E calls, R plans of all rows, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relaylm.core.noise import uniforms
from relaylm.core.plan import Plan, make_events, spaced_calls
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.likelihood import masked_sums
from relaylm.measure.plan_likelihood import plan_bound
from relaylm.sampling.policy import resolve, static_models
from relaylm.sampling.rules import Rule


@dataclass(frozen=True)
class ContinuationBound:
    """Bounds on -log p(free | given) of rows, in nats, with their standard errors (nan with one group)."""

    nats_N: np.ndarray
    error_N: np.ndarray
    calls: int  # rows through a network


def continuation_bound(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    free_NL: np.ndarray,
    mask_id: int,
    *,
    steps: float | None = None,
    rule: Rule | None = None,
    calls: int = 32,
    groups: int = 4,
    seed: int = 0,
    numbers_N: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
) -> ContinuationBound:
    """Estimate the bound of each row's free positions, given the others, from `groups` groups of plans with about
    `calls` network calls in all (at least one plan a group; with a rule, one). The first arguments are those of
    `plan_bound`;
    `numbers_N` (0, 1, ...) are the rows' numbers, which with the seed fix a row's plans whatever is beside it."""
    if not 1 <= groups <= calls:
        raise UserError(f"a bound needs at least one call for each group, not {calls} for {groups} groups")
    free_N = free_NL.sum(axis=1)
    if not free_N.all():
        raise UserError("every row needs a free position: there is nothing to score")
    spacing = schedule.spacing
    each_N = free_N if spacing is None else np.minimum(free_N, -(-3 * spacing.distance // 2))  # calls of a plan
    whole_N = (each_N * groups <= calls) | (spacing is not None) | (rule is not None)
    plans_N = np.maximum(1, calls // (groups * np.where(whole_N, each_N, 1)))
    plans_N = np.where((plans_N > 1) & (rule is None), plans_N - plans_N % 2, 1)
    numbers_N = np.arange(len(rows_NL)) if numbers_N is None else numbers_N
    nats_NG, made = np.zeros((len(rows_NL), groups)), 0
    for whole, plans in sorted(set(zip(whole_N.tolist(), plans_N.tolist()))):
        own = np.flatnonzero((whole_N == whole) & (plans_N == plans))
        u_MGDL, x_MGD = _plans(seed, numbers_N[own], rows_NL.shape[1], groups, plans, whole)
        request = (models, schedule, rows_NL[own], free_NL[own], mask_id, steps, u_MGDL)
        if whole:
            found, count = _followed(*request, rule, device, batch_size)
        else:
            found, count = _steps(*request, x_MGD, device, batch_size)
        nats_NG[own], made = found.mean(axis=2), made + count
    error_N = nats_NG.std(axis=1, ddof=1) / np.sqrt(groups) if groups > 1 else np.full(len(rows_NL), np.nan)
    return ContinuationBound(nats_NG.mean(axis=1), error_N, made)


def _plans(
    seed: int, number_N: np.ndarray, length: int, groups: int, plans: int, whole: bool
) -> tuple[np.ndarray, np.ndarray]:
    """u (N, G, D, L) of the plans of each row, and x (N, G, D), both in (0, 1)."""
    pairs = max(1, plans // 2)
    u = np.stack([uniforms(seed, number_N, length, draw) for draw in range(groups * pairs)], axis=1)
    u_NGPL = u.reshape(len(number_N), groups, pairs, length)
    x_NG1 = np.stack([uniforms(seed, number_N, 1, groups * pairs + group) for group in range(groups)], axis=1)
    x_NGP = (x_NG1 + np.arange(pairs)) / (pairs if plans == 1 else plans)
    if whole:
        u_NGPL = ((u_NGPL + np.arange(pairs)[:, None] / pairs) % 1.0).clip(2.0**-53, 1 - 2.0**-53)
    if plans == 1:
        return u_NGPL, x_NGP
    return np.concatenate([u_NGPL, 1 - u_NGPL], axis=2), np.concatenate([x_NGP, 1 - x_NGP], axis=2)


def _steps(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    free_NL: np.ndarray,
    mask_id: int,
    steps: float | None,
    u_NGDL: np.ndarray,
    x_NGD: np.ndarray,
    device: torch.device | str,
    batch_size: int,
) -> tuple[np.ndarray, int]:
    """One call for each plan: at the step of the position whose u is the ceil(x F)-th smallest of the row's F."""
    followed, times = resolve(schedule, steps)
    names = tuple(models)
    lookup = static_models(followed, names)
    assert lookup is not None
    free_N11L, free_N = free_NL[:, None, None, :], free_NL.sum(axis=1)
    rank_NGD = np.ceil(x_NGD * free_N[:, None, None]).clip(1, free_N[:, None, None]).astype(np.int64) - 1
    ordered_NGDL = np.sort(np.where(free_N11L, u_NGDL, np.inf), axis=3)
    t_NGD = np.take_along_axis(ordered_NGDL, rank_NGD[..., None], axis=3)[..., 0]
    step_NGD = np.zeros_like(rank_NGD)
    if times is not None:
        rising = np.asarray(times[::-1])
        step_NGD = np.searchsorted(rising, t_NGD, side="left")
        t_NGD = rising[step_NGD]
    masked_EL = (free_N11L & (u_NGDL <= t_NGD[..., None])).reshape(-1, free_NL.shape[1])
    row_E, t_E = np.repeat(np.arange(len(rows_NL)), x_NGD[0].size), t_NGD.ravel()
    model_E = lookup(step_NGD.ravel(), t_E)
    first_U, which_E = _distinct(row_E, model_E, t_E * _timed(models), masked_EL)
    mean_U = np.zeros(len(first_U))
    for k, name in enumerate(names):
        if len(own := np.flatnonzero(model_E[first_U] == k)):
            at = first_U[own]
            inputs = rows_NL[row_E[at]], masked_EL[at], t_E[at], mask_id
            sums = masked_sums({name: models[name]}, [], *inputs, device=device, batch_size=batch_size)
            mean_U[own] = sums.nll_KN[0] / sums.count_N
    return (mean_U[which_E] * free_N[row_E]).reshape(x_NGD.shape), len(first_U)


def _followed(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    free_NL: np.ndarray,
    mask_id: int,
    steps: float | None,
    u_NGDL: np.ndarray,
    rule: Rule | None,
    device: torch.device | str,
    batch_size: int,
) -> tuple[np.ndarray, int]:
    """Whole plans."""
    row_R = np.repeat(np.arange(len(rows_NL)), u_NGDL[0, ..., 0].size)
    tokens_RL, free_RL = rows_NL[row_R], free_NL[row_R]
    u_RL = np.where(free_RL, u_NGDL.reshape(free_RL.shape), 0.0)
    plan = Plan(0, row_R, np.where(free_RL, -1, tokens_RL), u_RL)
    when_RL = u_RL  # what fixes the calls of a plan
    if rule is None and schedule.spacing is not None:
        when_RL = spaced_calls(u_RL, free_RL, schedule.spacing)
    elif rule is None and (times := resolve(schedule, steps)[1]) is not None:
        when_RL = make_events(plan, times).step_nL
    elif rule is None and len(set(schedule.models)) == 1 and not _timed(models):
        when_RL = u_RL.argsort(axis=1).argsort(axis=1)
    first_U, which_R = _distinct(row_R, when_RL)
    plan = Plan(0, first_U, plan.given_nL[first_U], u_RL[first_U])
    where: dict[str, Any] = {"device": device, "batch_size": batch_size, "steps": steps, "rule": rule, "plan": plan}
    found = plan_bound(models, schedule, tokens_RL[first_U], mask_id, **where)
    assert found.cost is not None
    return found.nats_N[which_R].reshape(u_NGDL.shape[:3]), found.cost.total_calls


def _timed(models: Mapping[str, Any]) -> bool:
    """Whether a model looks at the time, or does not say."""
    return any(getattr(model, "time_conditioning", True) for model in models.values())


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each kind of row of a table, and the kind of every row."""
    table = np.column_stack(columns)
    _, first, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, which.ravel()
