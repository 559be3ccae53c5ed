r"""The likelihood bound of a schedule by following its plans: spaced plans, others whose calls are known, and rules.

Let a plan write the sets S_1, ..., S_C of a row's positions in this order, with model s(c) at call c. The plan does not
depend on the tokens, so by Jensen's inequality

    -log p(x)  <=  E_plan  sum_c  sum_{l in S_c}  -log p_{s(c)}( x_l | x_{S_1}, ..., x_{S_{c-1}} ).

Every term is a network call on the true text with what is not yet written masked. One plan for each row gives an
unbiased estimate; no sampling is needed, and the calls of a row do not wait for each other. Schedules that are measured
on the same rows with the same seed share their plans, so differences are paired.

**Rules.** A decoding rule that looks at distributions and at chance but never at a draw (`Rule.bounded`) chooses S_c
from what is written. On its way to x every S_c is then a function of x and of chance, and the same sum is a bound;
without chance in the rule it is -log p(x) itself. Calls of a row follow each other, with the row's own tokens written
(`sampling.confidence.forced`).

**Blocks.** Models of block diffusion write block after block, with a plan for each (`sampling.blocks`): the bound of a
row is the sum of its blocks', each with the true text before it.

**Continuations.** Some positions of a row given, the others scored, from several plans of each row. Where calls are
few, plans are followed to their end: of a model that is consistent, every order gives the same sum, so whole plans vary
little. Where uniform steps would need more calls than there are to spend, a plan is one call: at the step of a random
position, with all masked positions scored (`likelihood` has the weights).

Plans of a row come in groups. In a group they are *antithetic*, in pairs u and 1 - u (what one writes first, the other
writes last; for single calls also x and 1 - x, which say how many positions are masked), and *stratified*: the pairs
divide (0, 1/2) evenly among their x, and in whole plans the u of pair j of P are moved by j / P. Each plan alone has
the right law, so the mean is unbiased; groups are independent, and the standard error is over groups. Equal plans of a
row are computed once.

Shapes: N rows, L positions, E events or calls, B events of a network call, K due positions of an event, G groups, D
plans of a group, R plans of all rows, U distinct ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relaylm.console import progress_bar
from relaylm.core.noise import uniforms
from relaylm.core.plan import Plan, make_events, make_plan
from relaylm.core.schedule import Schedule
from relaylm.core.spacing import spaced_calls
from relaylm.errors import UserError
from relaylm.measure.likelihood import log_probabilities, masked_sums
from relaylm.measure.schedule_likelihood import ScheduleBound, bound_of
from relaylm.sampling.blocks import inside, window_seed
from relaylm.sampling.confidence import as_plan, forced
from relaylm.sampling.denoise import follow
from relaylm.sampling.engine import at_rows
from relaylm.sampling.policy import resolve, static_models
from relaylm.sampling.result import cost_of_calls, total_cost
from relaylm.sampling.rules import Rule

_CELLS = 1 << 25  # logits that are in memory at once, at most


@torch.inference_mode()
def plan_bound(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    mask_id: int,
    *,
    steps: float | None = None,
    rule: Rule | None = None,
    seed: int = 0,
    first_row: int = 0,
    device: torch.device | str = "cpu",
    batch_size: int = 32,
    progress: bool = False,
    plan: Plan | None = None,
) -> ScheduleBound:
    """The bound of a schedule with models' names in it, in bits for one position, with its interval over rows. `steps`
    is T, or infinity; a spaced schedule takes none, nor does a rule that finds its own; where models write in blocks
    all of these are a block's. Rules that look at draws, or mask positions again, have no bound and are refused.
    `plan` says which plans to follow instead of those of the seed; what it has as given is not scored."""
    masks_NL = (rows_NL == mask_id) & (True if plan is None else plan.given_nL < 0)  # a given mask stays one
    if rows_NL.ndim != 2 or masks_NL.any() or (rows_NL < 0).any():
        raise UserError("a bound needs whole rows of tokens, without masks and free positions")
    if block := next(getattr(model, "block_length", 0) for model in models.values()):
        if plan is not None:
            raise UserError("models that write in blocks have bounds of whole rows only")
        each = {"steps": steps, "rule": rule, "device": device, "batch_size": batch_size}
        return _block_bound(models, schedule, rows_NL, mask_id, block, seed, first_row, progress, each)
    names = tuple(models)
    followed, times = resolve(schedule, steps, rule)
    lookup = static_models(followed, names)
    assert lookup is not None
    n, length = rows_NL.shape
    plan = make_plan(n, length, seed, first_row=first_row) if plan is None else plan
    free_N = (plan.given_nL < 0).sum(axis=1)
    if not free_N.all():
        raise UserError("every row needs a free position: there is nothing to score")
    if rule is not None and not rule.bounded:
        raise UserError(f"{rule.name} looks at the tokens it draws or masks some again: it has no likelihood bound")
    if rule is not None and not rule.planned:
        where = {"mask_id": mask_id, "device": device, "batch_size": min(batch_size, n)}
        with progress_bar("bound", None, "step", progress) as bar:
            nats_N, run = forced(models, followed, plan, rule, times, rows_NL, on_calls=bar.report, **where)
        return bound_of(nats_N / (free_N * np.log(2)), nats_N, run.cost)
    laid, call_nL = plan, None
    if rule is not None:
        laid, steps, call_nL = as_plan(rule, plan, times)
    _, _, events = follow(schedule, steps, laid, call_nL=call_nL)
    model_E = lookup(events.step_E, events.t_E)
    row_E = np.repeat(np.arange(n), events.per_row_n)
    first_N = np.cumsum(free_N) - free_N  # of each row in positions_F
    row_F = np.repeat(np.arange(n), free_N)
    rank_NL = np.full((n, length), -1)  # in which order positions are written; given ones come before all
    rank_NL[row_F, events.positions_F] = np.arange(len(row_F)) - first_N[row_F]
    rows, rank = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (rows_NL.astype(np.int64), rank_NL))
    nats_N = np.zeros(n)
    with progress_bar("bound", len(row_E), "call", progress) as bar:
        for k, name in enumerate(names):
            own = np.flatnonzero(model_E == k)
            own = own[np.argsort(events.count_E[own], kind="stable")]  # events of one size together: little padding
            size = int(getattr(models[name], "vocab_size", mask_id + 1))
            while len(own):
                most = int(events.count_E[own[min(len(own), batch_size) - 1]])
                part = own[: max(1, min(batch_size, _CELLS // (most * size)))]
                own = own[len(part) :]
                place_1K = np.arange(int(events.count_E[part].max()))[None, :]
                real_BK = place_1K < events.count_E[part, None]  # the other places hold the first position again
                due_BK = events.positions_F[events.start_E[part, None] + np.where(real_BK, place_1K, 0)]
                row_B = torch.from_numpy(row_E[part]).to(device)
                before_B = torch.from_numpy(events.start_E[part] - first_N[row_E[part]]).to(device)
                text_BL = rows[row_B]
                seen_BL = torch.where(rank[row_B] < before_B[:, None], text_BL, mask_id)
                t_B = torch.from_numpy(events.t_E[part]).to(device, torch.float32)
                places = torch.from_numpy(due_BK).to(device)
                log_p = log_probabilities(at_rows(models[name], row_B), seen_BL, t_B, places, mask_id)
                log_p = log_p.gather(2, text_BL.gather(1, places)[..., None])[..., 0]
                np.add.at(nats_N, row_E[part], -np.where(real_BK, log_p.cpu().numpy(), 0.0).sum(axis=1))
                bar.update(len(part))
    cost = cost_of_calls(models, model_E, events.count_E, length, names[-1], followed, plan)
    return bound_of(nats_N / (free_N * np.log(2)), nats_N, cost)


def _block_bound(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    mask_id: int,
    block: int,
    seed: int,
    first_row: int,
    progress: bool,
    each: dict[str, Any],
) -> ScheduleBound:
    """The bounds of blocks, one after the other, added up; rows in groups of one batch, whose past is in memory."""
    n, length = rows_NL.shape
    if length % block:
        raise UserError(f"models that write blocks of {block} need rows of whole blocks for a bound, not of {length}")
    nats_N, costs, size = np.zeros(n), [], each["batch_size"]
    with progress_bar("bound", -(-n // size) * (length // block), "block", progress) as bar:
        for start in range(0, n, size):
            part, within = slice(start, start + size), {name: inside(model) for name, model in models.items()}
            for k in range(length // block):
                here = rows_NL[part, k * block : (k + 1) * block]
                own = {"seed": window_seed(seed, k), "first_row": first_row + start, **each}
                found = plan_bound(within, schedule, here, mask_id, **own)
                nats_N[part] += found.nats_N
                costs += [found.cost] if found.cost is not None else []
                tokens = torch.from_numpy(here.astype(np.int64)).to(each["device"])
                within = {name: one.after(tokens, True) for name, one in within.items()}
                bar.update()
    return bound_of(nats_N / (length * np.log(2)), nats_N, total_cost(costs))


# ------------------------------------------------------------------------------------------------ continuations


@dataclass(frozen=True)
class ContinuationBound:
    """Bounds on -log p(free | given) of rows, in nats, with their standard errors (nan with one group, or where the
    bound is infinite)."""

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
    `plan_bound`; `numbers_N` (0, 1, ...) are the rows' numbers, which with the seed fix a row's plans."""
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
    nats_NG, made, where = np.zeros((len(rows_NL), groups)), 0, {"device": device, "batch_size": batch_size}
    for whole, plans in sorted(set(zip(whole_N.tolist(), plans_N.tolist()))):
        own = np.flatnonzero((whole_N == whole) & (plans_N == plans))
        u_MGDL, x_MGD = _plans(seed, numbers_N[own], rows_NL.shape[1], groups, plans, whole)
        request = (models, schedule, rows_NL[own], free_NL[own], mask_id, steps, where, u_MGDL)
        found, count = _followed(*request, rule) if whole else _steps(*request, x_MGD)
        nats_NG[own], made = found.mean(axis=2), made + count
    error_N, finite_N = np.full(len(rows_NL), np.nan), np.isfinite(nats_NG).all(axis=1)
    if groups > 1:
        error_N[finite_N] = nats_NG[finite_N].std(axis=1, ddof=1) / np.sqrt(groups)
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
    where: dict[str, Any],
    u_NGDL: np.ndarray,
    x_NGD: np.ndarray,
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
            sums = masked_sums({name: models[name]}, [], *inputs, **where)
            mean_U[own] = sums.nll_KN[0] / sums.count_N
    return (mean_U[which_E] * free_N[row_E]).reshape(x_NGD.shape), len(first_U)


def _followed(
    models: Mapping[str, Any],
    schedule: Schedule,
    rows_NL: np.ndarray,
    free_NL: np.ndarray,
    mask_id: int,
    steps: float | None,
    where: dict[str, Any],
    u_NGDL: np.ndarray,
    rule: Rule | None,
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
    found = plan_bound(models, schedule, tokens_RL[first_U], mask_id, steps=steps, rule=rule, plan=plan, **where)
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
