"""What sampling returns: samples, their trace, their cost, and the events that callbacks receive.

A call is one row through one network once, with logits at some of its positions. Shapes: n rows, L positions, E calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from relaylm.core.cost import Cost, blocks_saved
from relaylm.core.plan import Plan
from relaylm.core.schedule import Policy, Schedule, Timetable

SHOWN = 4  # samples that are shown, of many


@dataclass(frozen=True)
class Event:
    """What a callback receives: one row's network call and the tokens it wrote."""

    row: int
    step: int  # the paper's i; 0 at T = infinity
    t: float
    model: str
    positions: list[int]
    tokens: list[int]
    logprobs: list[float] | None = None  # of the tokens, where the loop computes them


@dataclass(frozen=True)
class Trace:
    """For each position of each row: when it was written, and by which model."""

    step_nL: np.ndarray  # the paper's step i, T down to 1; 0 where given, and everywhere at T = infinity
    u_nL: np.ndarray  # the time in (0, 1) at which the plan has it written; 0 where given
    model_nL: np.ndarray  # index into `models`; -1 where given
    models: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Samples:
    """Sampled rows, how each position came about, and what the run cost."""

    tokens: np.ndarray  # (n, L)
    trace: Trace
    cost: Cost
    schedule: str
    steps: float  # T, possibly infinite
    seed: int
    texts: list[str] = field(default_factory=list)
    law: str = ""  # what decides which positions a call writes: `uniform:256`, `spaced:16`, or a rule
    changes_law: tuple[str, ...] = ()  # options in force under which samples no longer follow the models' own law
    family: Any = None  # whose samples they are, to show them; it is not pickled with them

    def summary(self) -> str:
        """Schedule, law, calls and cost in one line."""
        calls = ", ".join(f"{count} of {name}" for name, count in self.cost.calls.items() if count)
        line = f"{self.schedule}; {self.law or 'no law named'}; seed {self.seed}; calls: {calls}"
        line += "" if self.cost.flops is None else f"; {self.cost.flops:.3g} FLOPs"
        line += "" if self.cost.flops_saved is None else f", {self.cost.flops_saved:.1%} saved"
        return f"{line}; {self.cost.seconds:.2f} s" + "".join(f"; {change}" for change in self.changes_law)

    def __repr__(self) -> str:
        """The first texts and what they cost."""
        rows = self.texts[:SHOWN] if self.texts else [" ".join(map(str, row)) for row in self.tokens[:SHOWN]]
        more = [f"and {len(self.tokens) - SHOWN} more"] if len(self.tokens) > SHOWN else []
        return "\n\n".join([*rows, *more, self.summary()])

    def _repr_html_(self) -> str:
        from relaylm.show.picture import samples_html  # a higher floor, asked for by notebooks alone

        return samples_html(self, self.family, SHOWN)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "family": None}

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values, as `relaylm sample --json` writes it."""
        return {
            "texts": self.texts,
            "tokens": self.tokens.tolist(),
            "schedule": self.schedule,
            "steps": "inf" if math.isinf(self.steps) else int(self.steps),
            "length": int(self.tokens.shape[1]),
            "seed": self.seed,
            "law": self.law,
            "changes_law": list(self.changes_law),
            "cost": self.cost.to_json(),
            "trace": {
                "models": list(self.trace.models),
                "model": self.trace.model_nL.tolist(),
                "step": self.trace.step_nL.tolist(),
            },
        }


# ------------------------------------------------------------------------------------------------ cost


def distinct_pairs(a_E: np.ndarray, b_E: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The pairs of small whole numbers that occur, in order, and which of them each one is. By counting: sorting as
    many events as a large run has takes longer than the run's first calls."""

    def ranks(values_E: np.ndarray) -> tuple[list[int], np.ndarray]:
        there = np.bincount(values_E, minlength=1) > 0
        return np.flatnonzero(there).tolist(), (np.cumsum(there) - 1)[values_E]

    (a_A, rank_a_E), (b_B, rank_b_E) = ranks(a_E), ranks(b_E)
    found_P, rank_E = ranks(rank_a_E * len(b_B) + rank_b_E)
    return [(a_A[pair // len(b_B)], b_B[pair % len(b_B)]) for pair in found_P], rank_E


def flops_of_calls(
    models: Sequence[Any], model_E: np.ndarray, count_E: np.ndarray, length: int, everywhere: bool = False
) -> np.ndarray | None:
    """Operations of each call on a row of `length`, by its model and the number of positions with logits (with
    `everywhere`: all of them, nothing pruned). None if a model does not say what it costs."""
    if not all(hasattr(model, "flops") for model in models):
        return None
    pairs, which_E = distinct_pairs(model_E, count_E)
    each = [models[model].flops(length, None if everywhere else count) for model, count in pairs]
    return np.asarray(np.array(each, dtype=np.float64)[which_E])


def cost_of_calls(
    models: Mapping[str, Any],
    model_E: np.ndarray,
    count_E: np.ndarray,
    length: int,
    heavy: str,
    followed: Policy | Schedule,
    plan: Plan,
    everywhere: bool = False,
) -> Cost:
    """The cost of calls that were made: by model, in operations, against the same calls all made by `heavy`, and
    against the reference for this plan.
    `blocks_saved` is the paper's count over the steps of a timetable, and None for other policies."""
    names, each = tuple(models), list(models.values())
    calls = np.bincount(model_E, minlength=len(names)).tolist()
    heavy_E = np.full_like(model_E, names.index(heavy))
    mixed = calls[names.index(heavy)] < len(model_E)
    flops = [flops_of_calls(each, who_E, count_E, length, everywhere) for who_E in (model_E, heavy_E)[: 1 + mixed]]
    total, total_heavy = (None if flops_E is None else float(flops_E.sum()) for flops_E in (flops[0], flops[-1]))
    depths: dict[str, Any] = {name: getattr(model, "depth", None) for name, model in models.items()}
    saved = None
    if isinstance(followed, Timetable) and None not in depths.values():
        saved = blocks_saved(depths, followed.models, heavy)
    reference_K = reference_calls(plan)
    reference = reference_flops(models[heavy], plan, reference_K)
    if np.array_equal(reference_K, np.bincount(count_E)):  # these calls are the reference's, to the last bit
        reference = total_heavy
    return Cost(dict(zip(names, calls, strict=True)), total, total_heavy, reference, saved)


def reference_calls(plan: Plan) -> np.ndarray:
    """How many calls ask for 0, 1, 2, ... positions where a plan is followed in as many uniform steps as a row has
    positions."""
    length, free_nL = plan.length, plan.given_nL < 0
    ends = 1 - (1 - np.arange(length + 1) / length)  # as `make_events` has them
    step_F = np.searchsorted(ends, plan.u_nL[free_nL])
    count = np.bincount(np.nonzero(free_nL)[0] * (length + 1) + step_F, minlength=1)
    return np.bincount(count[count > 0], minlength=1)


def reference_flops(heavy: Any, plan: Plan, calls_K: np.ndarray | None = None) -> float | None:
    """Operations of the heavy model alone in as many uniform steps as a row has positions, which savings are counted
    against; None if it does not say what it costs."""
    if not hasattr(heavy, "flops"):
        return None
    calls_K = reference_calls(plan) if calls_K is None else calls_K
    return float(sum(count * heavy.flops(plan.length, k) for k, count in enumerate(calls_K.tolist()) if count))


def total_cost(parts: Sequence[Cost]) -> Cost:
    """The cost of runs one after the other, of the same models by the same schedule."""

    def total(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if None in values else sum(values)

    summed = ("flops", "flops_all_heavy", "flops_reference", "padded_calls", "shared_calls", "network_calls", "seconds")
    return Cost(
        calls={name: sum(part.calls[name] for part in parts) for name in parts[0].calls},
        blocks_saved=parts[0].blocks_saved,
        batch_size=min(part.batch_size for part in parts),
        **{name: total(name) for name in summed},
    )


def joined_rows(parts: Sequence[Samples]) -> Samples:
    """Ranges of rows, one below the other; counts and costs are summed."""
    first, names = parts[0], ("step_nL", "u_nL", "model_nL")
    arrays = {name: np.concatenate([getattr(part.trace, name) for part in parts]) for name in names}
    return replace(
        first,
        tokens=np.concatenate([part.tokens for part in parts]),
        trace=Trace(**arrays, models=first.trace.models),
        cost=total_cost([part.cost for part in parts]),
        texts=[text for part in parts for text in part.texts],
        steps=max(part.steps for part in parts),
    )
