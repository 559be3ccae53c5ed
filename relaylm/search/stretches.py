"""Stretches of trajectory, run through the networks: the part of `tree` that makes calls.

A stretch is what one model does to a row between two times. Many rows and stretches go through the sampler's own queue
together, in pieces that can be kept and taken back.

Shapes: L positions; U distinct states (a row's number and its tokens), M of them at work, m in a piece, E events, F
positions written.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm.core.plan import Events, Plan
from relaylm.core.schedule import Spacing
from relaylm.measure.store import content_key
from relaylm.sampling.denoise import next_call
from relaylm.sampling.engine import Call, Engine, settings
from relaylm.sampling.law import Law
from relaylm.sampling.queue import Queue

if TYPE_CHECKING:
    from relaylm.models.family import Family

Engines = dict[tuple[int, int, int], Engine]  # by rows, length and seed


class Stopped(Exception):
    """Sampling was asked to stop. What was saved until then is not lost."""


@dataclass(frozen=True)
class Stretch:
    """Steps of a grid from one cut to the next, under one model."""

    times: tuple[float, ...]
    spacing: Spacing | None
    model: int
    begin_n: np.ndarray  # each row's first event, among those of all grids
    end_n: np.ndarray  # the one after its last
    flops_n: np.ndarray  # operations of those events; 0 if a denoiser does not say
    members: list[int]  # schedules that make these steps
    prefixes: int  # nodes of the prefix tree that these schedules are at before

    @property
    def calls_n(self) -> np.ndarray:
        """Calls of each row."""
        return self.end_n - self.begin_n


def _ranges(begin_m: np.ndarray, end_m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers from begin up to end of each item, one item after the other, and the item that each belongs to."""
    count_m = end_m - begin_m
    item = np.repeat(np.arange(len(begin_m)), count_m)
    return item, np.arange(len(item)) + np.repeat(begin_m - np.cumsum(count_m) + count_m, count_m)


def kept_engine(family: Family, plan: Plan, places: int, engines: Engines | None) -> Engine:
    """An engine with so many rows, from `engines` if it is there."""
    engines = {} if engines is None else engines
    key = (places, plan.length, plan.seed)
    if key not in engines:
        masked = np.full((places, plan.length), -1)
        empty = Plan(plan.seed, np.zeros(places, dtype=np.int64), masked, np.zeros(masked.shape))
        engines[key] = Engine(list(family.models.values()), empty, family.mask_id, Law(), family.device)
    return engines[key]


@dataclass
class Runner:
    """Runs stretches of rows through the networks, piece by piece, on one engine."""

    family: Family
    plan: Plan
    events: Events
    engine: Engine
    batch: int
    stop: Callable[[], bool] | None
    load: Callable[[str], dict[str, Any] | None] | None
    save: Callable[[str, dict[str, Any]], object] | None
    network_calls: int = 0
    padded_calls: int = 0

    def run(
        self,
        work: list[tuple[Stretch, np.ndarray]],
        row_U: np.ndarray,
        tokens_UL: np.ndarray,
        report: Callable[[int], None],
    ) -> np.ndarray:
        """The tokens of each of these states at the end of its stretch."""
        stretches = [stretch for stretch, _ in work]
        states_M = np.concatenate([states for _, states in work])
        which_M = np.repeat(np.arange(len(work)), [len(states) for _, states in work])
        begin_M = np.concatenate([stretch.begin_n[row_U[states]] for stretch, states in work])
        end_M = np.concatenate([stretch.end_n[row_U[states]] for stretch, states in work])
        rows_M, tokens_ML = self.plan.rows_n[row_U[states_M]], tokens_UL[states_M]
        model_M = np.array([stretch.model for stretch in stretches])[which_M]
        start_E1 = np.append(self.events.start_E, len(self.events.positions_F))
        places = len(self.engine.state_nL) - 1
        for start in range(0, len(states_M), places):
            piece = slice(start, start + places)
            begin_m, end_m = begin_M[piece], end_M[piece]
            item_F, at_F = _ranges(start_E1[begin_m], start_E1[end_m])
            position_F = self.events.positions_F[at_F]
            content = (stretches, which_M[piece], rows_M[piece], tokens_ML[piece])
            record = None if self.load is None else self.load(self._key(*content))
            if record is None:
                self._run(rows_M[piece], tokens_ML[piece], begin_m, end_m, model_M[piece], report)
                index = (torch.from_numpy(x).to(self.engine.device) for x in (item_F, position_F))
                token_F = self.engine.state_nL[tuple(index)].cpu().numpy().astype("<u4")
                if self.save is not None:  # the batch, which is in the key, may have become smaller
                    packed = base64.b64encode(token_F.tobytes()).decode()
                    self.save(self._key(*content), {"kind": "tree", "tokens": packed})
            else:
                token_F = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<u4")
                report(int((end_m - begin_m).sum()))
            tokens_ML[start + item_F, position_F] = token_F
        return tokens_ML

    def _key(self, stretches: list[Stretch], which_m: np.ndarray, rows_m: np.ndarray, tokens_mL: np.ndarray) -> str:
        content = hashlib.sha256()
        for array in (which_m - which_m[0], rows_m, tokens_mL):
            content.update(np.ascontiguousarray(array).astype("<i8").tobytes())
        own = [stretches[j] for j in np.unique(which_m)]
        what: list[Any] = [[list(stretch.times), self.family.names[stretch.model]] for stretch in own]
        for described, stretch in zip(what, own, strict=True):
            described += [] if stretch.spacing is None else [str(stretch.spacing)]
        return content_key("tree", what, content.hexdigest(), self.plan.seed, list(tokens_mL.shape), self.batch)

    def _run(
        self,
        rows_m: np.ndarray,
        tokens_mL: np.ndarray,
        begin_m: np.ndarray,
        end_m: np.ndarray,
        model_m: np.ndarray,
        report: Callable[[int], None],
    ) -> None:
        """Make the calls of a piece. What comes out is in the engine's first rows."""
        item_E, index_E = _ranges(begin_m, end_m)
        ptr_m1 = np.concatenate([[0], np.cumsum(end_m - begin_m)])
        flat = [field.name for field in fields(Events) if field.name.endswith("_E")]
        own = replace(self.events, row_ptr_n1=ptr_m1, **{name: getattr(self.events, name)[index_E] for name in flat})
        queue = Queue(own, model_m[item_E], self.plan.length, self.batch)
        self.engine.load(rows_m, tokens_mL)

        def make(call: Call) -> None:
            if self.stop is not None and self.stop():
                raise Stopped
            self.engine.run(call)

        with settings(self.engine.device):
            while (made := next_call(queue, make, self.engine.release)) is not None:
                call, _ = made
                queue.advance(call)
                self.network_calls += 1
                self.padded_calls += call.shape.rows - len(call.rows_R)
                report(len(call.rows_R))
        self.batch = queue.batch
        self.engine.drawer.check()
