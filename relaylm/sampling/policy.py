"""Which model a row's next call goes to: a request checked, its policy resolved for a grid of steps, and asked.

A `Schedule` or `Timetable` names the model of every call before any network runs. Any other policy is dynamic: it is
asked before each call of a row, and sees the row's own state and nothing of other rows. Shapes: n rows, L positions, E
events, R rows of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from relaylm.core.notation import shown
from relaylm.core.plan import Plan
from relaylm.core.schedule import MAX_STEPS, Policy, RowState, Schedule, Timetable, timetable_of
from relaylm.errors import UserError, whole

if TYPE_CHECKING:
    from relaylm.sampling.rules import Rule

Grid = tuple[float, ...] | None  # T + 1 times from 1 down to 0; None where steps are not counted


def resolve(policy: Policy | Schedule, steps: float | None, rule: Rule | None = None) -> tuple[Policy, Grid]:
    """The policy to follow and its grid of times: None at T = infinity, and for a decoding rule that finds its own
    number of steps. Refuses what does not go together."""
    if isinstance(policy, Schedule) and policy.spacing is not None:
        if rule is not None:
            raise UserError(f"{rule.name} decides itself what a call writes: {policy.spacing} does not go with it")
        return _without_steps(policy, f"{policy.spacing} decides what each call writes", steps), None
    if rule is not None and rule.adaptive:
        return _without_steps(policy, f"{rule.name} finds its own number of steps", steps), None
    if steps is not None and not (steps >= 1 and (math.isinf(steps) or steps == int(steps))):
        raise UserError(f"the number of steps must be a whole number from 1 up, or inf, not {steps}")
    if rule is not None:
        if steps is not None and math.isinf(steps):
            raise UserError(f"{rule.name} needs a finite number of steps")
        timed = isinstance(policy, Schedule) and any(segment.time is not None for segment in policy.segments)
        if timed and rule.rates is None and rule.name != "ancestral":
            raise UserError(
                f"{rule.name} has its own step grid: a schedule with shares of time (@) does not go with it"
            )
    if isinstance(policy, Schedule | Timetable):
        table = timetable_of(policy, steps)
        return (policy, None) if table is None else (table, table.times)
    if steps is not None and math.isinf(steps):
        return policy, None
    if steps is None or steps > MAX_STEPS:
        raise UserError(f"a dynamic policy needs a number of steps from 1 to {MAX_STEPS}, not {steps}")
    return policy, tuple((int(steps) - k) / int(steps) for k in range(int(steps) + 1))


def _without_steps(policy: Policy | Schedule, why: str, steps: float | None) -> Policy:
    if steps is not None:
        raise UserError(f"{why}: leave out the number of steps")
    if isinstance(policy, Timetable):
        raise UserError(f"{why}: a timetable does not go with it")
    if isinstance(policy, Schedule):
        if policy.steps is not None:
            raise UserError(f"{why}: write the schedule in shares (L50% H50%), not in counts ({policy})")
        _ = policy.ends  # refuses schedules that place single steps, which have none
    return policy


def check_request(
    models: Mapping[str, Any], plan: Plan, mask_id: int, batch_size: int | None = None, heavy: str | None = None
) -> None:
    """Refuse given tokens that are none of the models', and options without a meaning."""
    check_whole(models)
    whole(mask_id, "mask_id", 0)
    if heavy is not None and heavy not in models:
        raise UserError(f"there is no model {heavy!r} to count savings against; the models are {', '.join(models)}")
    if batch_size is not None:
        whole(batch_size, "batch_size")
    if (plan.given_nL == mask_id).any():
        raise UserError(f"the mask ({mask_id}) cannot be given as a token: write -1 where a position is free")
    for name, model in models.items():
        if (size := getattr(model, "vocab_size", None)) is not None and plan.given_nL.max() >= size:
            raise UserError(f"token {plan.given_nL.max()} is given, but {name} knows ids 0 to {size - 1} only")


def check_whole(models: Mapping[str, Any]) -> None:
    """Refuse models that write block after block where whole rows are asked for."""
    for name, model in models.items():
        if block := getattr(model, "block_length", 0):
            raise UserError(f"{name} writes one block of {block} positions after another: only sample and bound do so")


def policy_text(policy: Policy | Schedule) -> str:
    """A policy in a few words, for the record."""
    if isinstance(policy, Timetable):
        runs = [(name, len(list(run))) for name, run in groupby(policy.models)]
        return " ".join(f"{name}:{count}" for name, count in runs)
    return str(policy) if isinstance(policy, Schedule) else getattr(policy, "__name__", type(policy).__name__)


def static_models(
    policy: Policy | Schedule, names: Sequence[str]
) -> Callable[[np.ndarray, np.ndarray], np.ndarray] | None:
    """The models of a schedule or timetable, as a function of events' steps (T down to 1) and times that returns
    indices into `names`. None for a dynamic policy."""
    if not isinstance(policy, Schedule | Timetable):
        return None
    if unknown := [name for name in policy.models if name not in names]:
        raise UserError(f"the schedule asks for model {unknown[0]!r}; the models are {', '.join(names)}")
    if isinstance(policy, Timetable):
        steps, model_T = policy.steps, np.array([names.index(name) for name in policy.models])
        return lambda step_E, t_E: np.asarray(model_T[steps - step_E])
    # From the masked end, segment j owns the times in (ends[j], ends[j-1]].
    falling_S, model_S = -np.asarray(policy.ends), np.array([names.index(segment.model) for segment in policy.segments])
    return lambda step_E, t_E: np.asarray(model_S[np.searchsorted(falling_S, -t_E, side="right")])


@dataclass(frozen=True)
class SwitchByMaskFraction:
    """A dynamic policy: heavy while low < masked / length <= high, else light."""

    light: str
    heavy: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise UserError(f"masked fractions obey 0 <= low <= high <= 1, not {shown(self.low)}, {shown(self.high)}")

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that may run."""
        return self.light, self.heavy

    def __call__(self, state: RowState) -> str:
        """The model of the row's next call."""
        return self.heavy if self.low < state.masked / state.length <= self.high else self.light


class RowStates:
    """What a dynamic policy sees of each row, kept between its calls."""

    def __init__(self, policy: Policy, names: Sequence[str], given_nL: np.ndarray, steps: int) -> None:
        self.policy, self.names, self.steps, self.length = policy, names, steps, given_nL.shape[1]
        self.wants_logits = bool(getattr(policy, "wants_logits", False))
        self.free_n = (given_nL < 0).sum(axis=1)
        self.masked_n = self.free_n.copy()
        self.calls_n = np.zeros(len(given_nL), dtype=np.int64)
        self.last: dict[int, tuple[str, float, float]] = {}  # model, mean and least log-probability of the last call
        self.logits: dict[int, Tensor] = {}  # (masked, V) of the last call, for policies that want them

    def choose(self, row: int, step: int, t: float) -> int:
        """Ask the policy for the model of a row's next call; an index into the names."""
        masked, free, calls = (int(x_n[row]) for x_n in (self.masked_n, self.free_n, self.calls_n))
        model, mean, least = self.last.get(row, (None, None, None))
        state = RowState(
            step, self.steps, t, masked, self.length, free, calls, model, mean, least, self.logits.get(row)
        )
        name = self.policy(state)
        if name not in self.names:
            raise UserError(f"the policy asked for model {name!r}; the models are {', '.join(self.names)}")
        return self.names.index(name)

    def record(self, rows_R: np.ndarray, model: int, logprobs_R: Sequence[tuple[float, float]]) -> None:
        """Take note of a call: its rows, its model, and the mean and least log-probability of what each row got."""
        self.calls_n[rows_R] += 1
        for row, (mean, least) in zip(rows_R.tolist(), logprobs_R, strict=True):
            self.last[row] = (self.names[model], mean, least)
