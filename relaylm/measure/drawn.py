r"""Samples with what they cost, and as records of a store.

Shapes: n rows, L positions, X rows of costs, C columns of costs, F written positions, E events.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaylm.measure import metrics
from relaylm.models.family import Family
from relaylm.sampling.result import Samples, flops_of_calls


@dataclass(frozen=True)
class Drawn:
    """Samples of one spec and what they cost. The columns C of the costs are the calls of each model of the family, the
    FLOPs (NaN where a model does not say) and the seconds. The costs are by row (X = n), or sums over all rows (X = 1)
    where a decoding rule makes calls that the samples' trace does not show."""

    tokens_nL: np.ndarray
    cost_XC: np.ndarray
    steps: float  # that were made, at most
    exact: bool  # the samples follow the models' own law

    @property
    def by_row(self) -> bool:
        """Can rows be taken out, with their costs?"""
        return len(self.cost_XC) == len(self.tokens_nL)

    def costs(self, names: Sequence[str]) -> dict[str, Any]:
        """What all rows cost, as JSON; `names` are the family's models."""
        *calls, flops, seconds = self.cost_XC.sum(axis=0).tolist()
        by_model = {name: int(count) for name, count in zip(names, calls, strict=True) if count}
        total = {"calls": sum(by_model.values()), "calls_by_model": by_model}
        return {**total, "flops": metrics.finite(flops), "seconds": seconds}


def row_costs(samples: Samples, family: Family) -> Drawn:
    """The calls that were made and their operations, row by row, from the trace of samples without a decoding rule."""
    step_nL, model_nL = samples.trace.step_nL, samples.trace.model_nL
    n, length = samples.tokens.shape
    row_F, position_F = np.nonzero(model_nL >= 0)
    model_F = np.array([family.names.index(name) for name in samples.trace.models])[model_nL[row_F, position_F]]
    if math.isinf(samples.steps):
        row_E, model_E, count_E = row_F, model_F, np.ones(len(row_F), dtype=np.int64)
    else:
        event_F = row_F * (int(samples.steps) + 1) + step_nL[row_F, position_F]
        _, first_E, count_E = np.unique(event_F, return_index=True, return_counts=True)
        row_E, model_E = row_F[first_E], model_F[first_E]
    cost_nC = np.zeros((n, len(family.names) + 2))
    np.add.at(cost_nC, (row_E, model_E), 1)
    flops_E = flops_of_calls(list(family.models.values()), model_E, count_E, length)
    cost_nC[:, -2] = math.nan if flops_E is None else np.bincount(row_E, weights=flops_E, minlength=n)
    cost_nC[:, -1] = samples.cost.seconds / n
    return Drawn(samples.tokens, cost_nC, samples.steps, not samples.changes_law)


def total_costs(samples: Samples, family: Family) -> Drawn:
    """The samples with the sums of their costs."""
    cost = samples.cost
    flops = math.nan if cost.flops is None else cost.flops
    cost_1C = np.array([[*(cost.calls.get(name, 0) for name in family.names), flops, cost.seconds]])
    return Drawn(samples.tokens, cost_1C, samples.steps, not samples.changes_law)


def pack(drawn: Drawn, names: Sequence[str]) -> dict[str, Any]:
    """Samples as JSON: tokens as base64 of little-endian 32-bit integers, costs as lists."""
    *calls, flops, seconds = drawn.cost_XC.T
    return {
        "tokens": base64.b64encode(drawn.tokens_nL.astype("<i4").tobytes()).decode(),
        "calls": {name: each.astype(int).tolist() for name, each in zip(names, calls, strict=True) if each.any()},
        "flops": None if np.isnan(flops).any() else flops.tolist(),
        "seconds": seconds.sum(),
        "steps_made": steps_json(drawn.steps),
        "exact": drawn.exact,
    }


def unpack(record: Mapping[str, Any], length: int, names: Sequence[str]) -> Drawn:
    """What `pack` made JSON of. (Records of earlier releases have neither a rule nor the last two fields.)"""
    tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4").astype(np.int64).reshape(-1, length)
    rows = len(next(iter(record["calls"].values()), tokens))
    flops = [math.nan] * rows if record["flops"] is None else record["flops"]
    columns = [*(record["calls"].get(name, [0] * rows) for name in names), flops, [record["seconds"] / rows] * rows]
    steps = record.get("steps_made", record["steps"])
    return Drawn(tokens, np.array(columns, dtype=np.float64).T, float(steps), record.get("exact", True))


def steps_json(steps: float | None) -> int | str | None:
    """A number of steps as JSON has it."""
    return None if steps is None else "inf" if math.isinf(steps) else int(steps)
