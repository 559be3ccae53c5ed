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

Shapes: N rows, L positions, E events, B events of a network call, K due positions of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from relaylm.console import progress_bar
from relaylm.core.cost import Cost
from relaylm.core.plan import Plan, events_of_calls, make_events, make_plan, spaced_events
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.schedule_likelihood import ScheduleBound
from relaylm.sampling.blocks import inside
from relaylm.sampling.confidence import forced
from relaylm.sampling.engine import at_rows
from relaylm.sampling.policy import resolve, static_models
from relaylm.sampling.result import cost_of_calls, total_cost
from relaylm.sampling.rules import Rule, level_calls, planned
from relaylm.sampling.windows import window_seed

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
    if rule is not None and not rule.bounded:
        raise UserError(f"{rule.name} looks at the tokens it draws or masks some again: it has no likelihood bound")
    if rule is not None and not rule.planned:
        options = {"mask_id": mask_id, "device": device, "batch_size": min(batch_size, n)}
        with progress_bar("bound", n * (length if rule.adaptive else len(times or ()) - 1), "step", progress) as bar:
            options["on_calls"] = lambda done, _: bar.update(done - bar.n)
            nats_N, run = forced(models, schedule, plan, rule, rows_NL, steps=steps, **options)
        return _bound(nats_N, free_N, run.cost)
    if rule is not None and rule.levels is not None:
        events = events_of_calls(plan, level_calls(rule, plan.given_nL))
    elif schedule.spacing is not None:
        events = spaced_events(plan, schedule.spacing)
    else:
        events = make_events(plan if rule is None or times is None else planned(rule, plan, times), times)
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
                due_BK, real_BK = _due(events.start_E[part], events.count_E[part], events.positions_F)
                row_B = torch.from_numpy(row_E[part]).to(device)
                before_B = torch.from_numpy(events.start_E[part] - first_N[row_E[part]]).to(device)
                text_BL = rows[row_B]
                seen_BL = torch.where(rank[row_B] < before_B[:, None], text_BL, mask_id)
                t_B = torch.from_numpy(events.t_E[part]).to(device, torch.float32)
                places = torch.from_numpy(due_BK).to(device)
                logits = at_rows(models[name], row_B).logits_at(seen_BL, t_B, places).double()
                logits[..., mask_id] = -torch.inf
                log_p = logits.log_softmax(dim=-1).gather(2, text_BL.gather(1, places)[..., None])[..., 0]
                np.add.at(nats_N, row_E[part], -np.where(real_BK, log_p.cpu().numpy(), 0.0).sum(axis=1))
                bar.update(len(part))
    return _bound(nats_N, free_N, cost_of_calls(models, model_E, events.count_E, length, names[-1], followed, plan))


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
    return _bound(nats_N, np.full(n, length), total_cost(costs))


def _bound(nats_N: np.ndarray, free_N: np.ndarray, cost: Cost) -> ScheduleBound:
    bits, low, high = (float(v) for v in metrics.mean_interval(nats_N / (free_N * np.log(2))))
    return ScheduleBound(bits, low, high, len(nats_N), nats_N, cost)


def _due(start_B: np.ndarray, count_B: np.ndarray, positions_F: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Due positions of events (B, K), padded with the first of each, and which of them are real."""
    place_1K = np.arange(int(count_B.max()))[None, :]
    real_BK = place_1K < count_B[:, None]
    return positions_F[start_B[:, None] + np.where(real_BK, place_1K, 0)], real_BK
