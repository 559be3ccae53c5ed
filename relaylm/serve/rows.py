r"""Rows on their way to the scheduler, and what comes back: values, which another process may send.

Plans are made and texts are read on the side of `host`, so that where networks run Python does little else: a call of a
small network on a GPU takes no longer than the host's work for it.

Shapes: n rows, L positions, E events, F due positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from relaylm.core.cost import Cost
from relaylm.core.plan import Plan
from relaylm.core.schedule import Policy
from relaylm.sampling.engine import Shape
from relaylm.sampling.law import Law
from relaylm.sampling.policy import Grid
from relaylm.sampling.rules import Rule
from relaylm.serve.request import Refused


class LaneKey(NamedTuple):
    """Rows with the same of these share an engine, and so may share calls."""

    family: str
    length: int
    law: Law
    scored: bool  # whether what calls write is wanted one by one, with log-probabilities


@dataclass(frozen=True)
class Planned:
    """Calls that are known before any network runs. As in `Events`, row r makes row_ptr[r] .. row_ptr[r + 1] - 1."""

    names: tuple[str, ...]  # of the engine's models
    shapes: list[Shape]
    row_ptr_n1: np.ndarray
    each_E5: np.ndarray  # the call's model and shape, as numbers, how many positions it writes, their start, its step
    t_E: np.ndarray
    positions_F: np.ndarray


@dataclass(frozen=True)
class Ruled:
    """A rule that chooses on the way, as its loop takes it (`RuleRun`)."""

    names: tuple[str, ...]  # of the models that may run, and the heavy one
    policy: Policy
    rule: Rule
    times: Grid
    heavy: str
    greedy: bool


@dataclass(frozen=True)
class Rows:
    """Rows of one plan that are to be written. The plan's u is empty where the calls are known."""

    lane: LaneKey
    plan: Plan
    calls: Planned | Ruled
    batch: int  # rows in a call
    timeout: float = math.inf  # seconds


@dataclass(frozen=True)
class Ended:
    """The end of rows: None, or what went wrong; times by the scheduler's clock."""

    error: Refused | None
    submitted: float
    began: float  # its first call
    finished: float
    tokens_nL: np.ndarray | None  # unless calls were reported one by one
    cost: Cost | None  # of a rule's calls


@dataclass(frozen=True)
class Made:
    """A call that was made, for the metrics."""

    family: str
    model: str
    shape: str  # rows x length : places for the head
    rows: int
    padded: int
    tokens: int
    seconds: float
    waited: float = 0.0  # of these the host did nothing but wait for the device
