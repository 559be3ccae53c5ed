r"""First calls that rows share.

Rows with the same tokens (all masked, or with one prompt) keep them until their first event, and a network that does
not look at the time has the same input there for all of them. So its blocks run once for all, and the head and the draw
for each row: the same bits in fewer network calls.

Shapes: n rows, B rows in a call, L positions, K places of a row, N places kept for the head, U positions that first
calls write, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm.models.denoiser import sees_t
from relaylm.sampling.engine import Call, Engine, Shape, out_of_memory
from relaylm.sampling.queue import Queue


def share(queue: Queue, engine: Engine, given_nL: np.ndarray, passed: Callable[[Call, Tensor], None]) -> int:
    """Make the first calls that rows can share, and tell `passed` of each, with its tokens; returns the number of
    network calls."""
    groups = alike(queue, given_nL, engine.models)
    features, network_calls = [], 0  # all features before anything is written: row 0 is in a group, too
    try:
        for group in groups:
            features.append(first_features(engine, group.model, group.shape, group.positions_U))
            network_calls += group.network_calls
        for group, features_UD in zip(groups, features, strict=True):
            for call in group.calls:
                passed(call, run_first(engine, call, features_UD, group.slot_L))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        engine.release()  # nothing was written by what failed: ordinary calls take less
    return network_calls


@dataclass(frozen=True)
class SharedCalls:
    """First calls of rows that want the same model and call shape and still have the same tokens."""

    model: int
    shape: Shape
    calls: list[Call]
    positions_U: np.ndarray  # that any of them is to write
    slot_L: np.ndarray  # where among those a position is
    network_calls: int  # that bring what the head takes at all of these positions


def alike(queue: Queue, given_nL: np.ndarray, models: Sequence[Any]) -> list[SharedCalls]:
    """First events that can share their network calls, where that takes fewer calls than the events would."""
    if len(given_nL) < 2 or (given_nL != given_nL[:1]).any():
        return []
    found, kind_T = [], queue.kind(queue.todo)
    for kind in np.unique(kind_T).tolist():
        model, shape = kind // len(queue.shapes), queue.shapes[kind % len(queue.shapes)]
        rows = queue.todo[kind_T == kind]
        timeless = hasattr(models[model], "hidden_at") and not getattr(models[model], "time_conditioning", True)
        if not timeless or len(rows) <= shape.rows:
            continue
        before = np.concatenate([[0], np.cumsum(queue.events.count_E[queue.next_n[rows]])])
        calls, start = [], 0
        while start < len(rows):
            fits = int(np.searchsorted(before, before[start] + shape.kept, side="right")) - 1 - start
            calls.append(queue.pack(model, shape, rows[start : start + min(fits, shape.rows)]))
            start += len(calls[-1].rows_R)
        due_L = np.zeros(queue.length, dtype=bool)
        for call in calls:
            due_L[call.due_F] = True
        positions_U = np.flatnonzero(due_L)
        network_calls = -(-len(positions_U) // (shape.rows * shape.per_row))
        if network_calls < len(calls):
            slot_L = np.maximum(np.cumsum(due_L) - 1, 0)
            found.append(SharedCalls(model, shape, calls, positions_U, slot_L, network_calls))
    return found


def first_features(engine: Engine, model_index: int, shape: Shape, positions_U: np.ndarray) -> Tensor:
    """What the head takes (U, D) at these positions of row 0 as it is now. By calls of this shape whose rows are all
    that row, so that the bits are those of any other call of the shape."""
    model, places = engine.models[model_index], shape.rows * shape.per_row
    tokens_BL = engine.state_nL[:1].expand(shape.rows, -1).contiguous()
    t_B = torch.ones(shape.rows, dtype=engine.exact, device=engine.device)
    parts = []
    for start in range(0, len(positions_U), places):
        some = positions_U[start : start + places]
        padded = np.concatenate([some, np.zeros(places - len(some), dtype=np.int64)])
        positions_BK = torch.from_numpy(padded).to(engine.device).view(shape.rows, shape.per_row)
        parts.append(model.hidden_at(tokens_BL, t_B, positions_BK).flatten(0, 1)[: len(some)])
    return torch.cat(parts)


def run_first(engine: Engine, call: Call, features_UD: Tensor, slot_L: np.ndarray) -> Tensor:
    """A call for rows whose tokens are those of row 0 in `first_features`: only the head and the draw. `slot_L` says
    where among the features a position is. Returns the tokens."""
    model = engine.models[call.model]
    *_, row_N, position_N = torch.split(torch.from_numpy(call.index).to(engine.device), call.shape.parts)
    features = features_UD[torch.from_numpy(slot_L).to(engine.device)[position_N]]
    t_N = torch.ones(len(row_N), dtype=engine.exact, device=engine.device) if sees_t(model) else None
    return engine.write(features, model.head, t_N, row_N, position_N, call.shape.rows)[0]
