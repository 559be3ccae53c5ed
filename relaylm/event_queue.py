r"""Which rows go into the next network call, and in what shape it is.

A row's events are in order, and each waits for the one before; rows do not wait for each other. So a call takes rows at
whatever step they are, as long as they want the same model. Calls have a few fixed shapes, which depend on the grid,
the length and the event alone: a row's bits are the same in any company.

Shapes: n rows in all, R in a call, B places for them, L positions, K places for due positions in each row of a call, N
due positions kept for the head, E events, U positions that first events write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaylm.diffusion import Alpha
from relaylm.engine import Call, Shape
from relaylm.plan import Events, Plan

LONG_STRETCH = 4  # events in a row for one model, on average, from which rows keep in step


class Queue:
    """Rows in flight, their next events, and the choice of the next batch."""

    def __init__(self, plan: Plan, events: Events, shapes_E: np.ndarray, shapes: list[Shape], in_flight: int) -> None:
        self.plan, self.events, self.shapes_E, self.shapes = plan, events, shapes_E, shapes
        self.next_n = events.row_ptr_n1[:-1].copy()  # each row's next event
        self.end_n = events.row_ptr_n1[1:]
        self.model_n = np.zeros(plan.n, dtype=np.int64)  # the model its next event asks for; set by the caller
        self.in_flight = in_flight
        self.line_up()
        # Of each event, where it is known: its row's changes of model ahead, and the events until the first of them.
        self.changes_E = np.zeros(len(shapes_E), dtype=np.int64)
        self.stretch_E = np.zeros(len(shapes_E), dtype=np.int64)
        self.in_step = False

    def foresee(self, model_E: np.ndarray) -> None:
        """Take note of what every event will ask for."""
        self.changes_E, self.stretch_E = changes_ahead(model_E, self.events.row_ptr_n1)
        stretches = int(np.count_nonzero(self.stretch_E == 1))
        self.in_step = len(model_E) >= LONG_STRETCH * stretches

    def line_up(self) -> None:
        """All rows that have anything to do, in order: the first of them in flight, the others waiting."""
        self.todo = np.flatnonzero(self.next_n < self.end_n)
        self.pool, self.waiting = self.todo[: self.in_flight], self.todo[self.in_flight :]

    def take(self) -> Call | None:
        """The next batch: a row that must not fall behind says which model and shape, and of the rows that want the
        same those come along that have the furthest to go until they change model.

        Where models serve long stretches, the one to wait for is the row with the most changes of model ahead. So all
        rows cross from one model to the next together and finish together, and batches are full all the way: with two
        batches' worth of rows a sandwich leaves a few places in a thousand empty. Where models alternate quickly (or
        nobody knows what is to come) it is the row with the most left to do, and a full batch of others goes first
        unless that row alone decides how long the rest takes."""
        pool = self.pool
        if not len(pool):
            return None
        event = self.next_n[pool]
        key = self.model_n[pool] * len(self.shapes) + self.shapes_E[event]
        left, stretch = self.end_n[pool] - event, self.stretch_E[event]
        if self.in_step:
            leader = int(np.lexsort((left, stretch, self.changes_E[event]))[-1])
        else:
            leader = int(left.argmax())
            full = np.bincount(key)[key] >= self.shapes[0].rows
            waits = not full[leader] and left[leader] * self.shapes[0].rows < left.sum()
            if waits and full.any():
                leader = int(np.where(full, left, -1).argmax())
        group = int(key[leader])
        model, shape = group // len(self.shapes), self.shapes[group % len(self.shapes)]
        wanted = key == group
        ready = pool[wanted]
        if len(ready) > shape.rows:
            ready = ready[np.lexsort((-left[wanted], -stretch[wanted]))[: shape.rows]]
        counts = self.events.count_E[self.next_n[ready]]
        if counts.sum() > shape.kept:  # keep to the room the head has
            fits = int(np.searchsorted(np.cumsum(counts), shape.kept, side="right"))
            ready, counts = ready[:fits], counts[:fits]
        return self.pack(model, shape, ready, counts)

    def pack(self, model: int, shape: Shape, rows_R: np.ndarray, counts_R: np.ndarray) -> Call:
        n, r, total = self.plan.n, len(rows_R), int(counts_R.sum())
        events_R = self.next_n[rows_R]
        rows_B = np.full(shape.rows, n)
        rows_B[:r] = rows_R
        t_B = np.ones(shape.rows)
        t_B[:r] = self.events.t_E[events_R]
        place_R = np.repeat(np.arange(r), counts_R)  # which batch row each due position belongs to
        within = np.arange(total) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        due = self.events.positions_F[np.repeat(self.events.start_E[events_R], counts_R) + within]
        positions_BK = np.zeros((shape.rows, shape.per_row), dtype=np.int64)
        positions_BK[place_R, within] = due
        kept_N = np.zeros(shape.kept, dtype=np.int64)
        kept_N[:total] = place_R * shape.per_row + within
        kept_row_N = np.full(shape.kept, n)
        kept_row_N[:total] = rows_R[place_R]
        kept_position_N = np.zeros(shape.kept, dtype=np.int64)
        kept_position_N[:total] = due
        return Call(
            model, shape, rows_R, events_R, counts_R, rows_B, t_B, positions_BK, kept_N, kept_row_N, kept_position_N
        )

    def advance(self, call: Call) -> None:
        """Move the call's rows to their next events; finished rows make room for waiting ones."""
        self.next_n[call.rows_R] += 1
        alive = self.next_n[self.pool] < self.end_n[self.pool]
        if not alive.all():
            self.pool = self.pool[alive]
            room = self.in_flight - len(self.pool)
            self.pool = np.concatenate([self.pool, self.waiting[:room]])
            self.waiting = self.waiting[room:]


def changes_ahead(model_E: np.ndarray, row_ptr_n1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each event: how often its row changes model after it, and how many of the row's events remain, itself
    included, before the first change (or the end)."""
    index, changed = np.arange(len(model_E)), np.zeros(len(model_E) + 1, dtype=bool)
    changed[1:-1] = model_E[1:] != model_E[:-1]
    changed[row_ptr_n1] = False  # another row is no change
    number = np.cumsum(changed)
    last_E = np.repeat(row_ptr_n1[1:] - 1, np.diff(row_ptr_n1))  # its row's last event
    changed[row_ptr_n1] = True
    edges = np.flatnonzero(changed)
    return number[last_E] - number[index], edges[np.searchsorted(edges, index, side="right")] - index


def distinct_pairs(a_E: np.ndarray, b_E: np.ndarray) -> tuple[list[tuple[int, int]], np.ndarray, np.ndarray]:
    """The pairs of small whole numbers that occur, in order; which of them each one is; and how often each occurs. By
    counting: sorting as many events as a large run has takes longer than the run's first calls."""

    def ranks(values_E: np.ndarray) -> tuple[list[int], np.ndarray]:
        there = np.bincount(values_E, minlength=1) > 0
        return np.flatnonzero(there).tolist(), (np.cumsum(there) - 1)[values_E]

    (a_A, rank_a_E), (b_B, rank_b_E) = ranks(a_E), ranks(b_E)
    found_P, rank_E = ranks(rank_a_E * len(b_B) + rank_b_E)
    pairs = [(a_A[pair // len(b_B)], b_B[pair % len(b_B)]) for pair in found_P]
    return pairs, rank_E, np.bincount(rank_E, minlength=len(pairs))


def call_shapes(
    events: Events, times: Sequence[float] | None, alpha: Alpha, length: int, rows: int
) -> tuple[list[Shape], np.ndarray]:
    """The shape of each event's call: room for the due positions that its step usually brings, doubled as often as an
    unusual event needs. Depends on the grid, the length and the event itself, not on the rest of the batch."""
    if times is None:
        expected_E = np.zeros(len(events.step_E))
    else:
        share = -np.diff(1 - np.asarray(alpha(np.asarray(times, dtype=np.float64))))  # of all positions, by step
        expected_E = length * share[len(times) - 1 - events.step_E]
    usual_E = expected_E + 5 * np.sqrt(expected_E) + 1
    room_E = np.exp2(np.ceil(np.log2(np.maximum(usual_E, events.count_E)))).astype(np.int64)
    # At least two: PyTorch's attention on a CPU treats a single query specially, and its bits then depend on the row's
    # place in the batch.
    room_E = np.minimum(np.maximum(room_E, 2), length)
    # The head's room: rows times the mean count of an event (given that there is one), and four deviations.
    mean_E = np.where(expected_E > 1e-9, expected_E / -np.expm1(-np.maximum(expected_E, 1e-9)), 1.0)
    kept_E = np.ceil((rows * mean_E + 4 * np.sqrt(rows * mean_E)) / 8).astype(np.int64) * 8
    kept_E = np.minimum(np.maximum(kept_E, room_E), rows * room_E)
    pairs, index_E, _ = distinct_pairs(room_E, kept_E)
    return [Shape(rows, room, kept) for room, kept in pairs], index_E


@dataclass(frozen=True)
class Group:
    """Rows whose first events want the same model and call shape, from the same tokens."""

    model: int
    shape: Shape
    calls: list[Call]  # of those events
    positions_U: np.ndarray  # that any of them is to write
    slot_L: np.ndarray  # where among those a position is
    table_calls: int  # that bring what the head takes at all of these positions


def alike(queue: Queue, plan: Plan, models: Sequence[Any]) -> list[Group]:
    """First events that can share their network calls. Rows that begin alike (all masked, or with one prompt) stay so
    until their first event, and a network that does not look at the time sees one and the same input there: few calls
    serve them all. Only where that takes fewer calls than the events would."""
    if plan.n < 2 or (plan.given_nL != plan.given_nL[:1]).any():
        return []
    rows, found = queue.todo, []
    event = queue.next_n[rows]
    key = queue.model_n[rows] * len(queue.shapes) + queue.shapes_E[event]
    for group in np.unique(key).tolist():
        model, shape = group // len(queue.shapes), queue.shapes[group % len(queue.shapes)]
        mine = rows[key == group]
        blind = hasattr(models[model], "hidden_at") and not getattr(models[model], "time_conditioning", True)
        if not blind or len(mine) <= shape.rows:
            continue
        count = queue.events.count_E[queue.next_n[mine]]
        before = np.concatenate([[0], np.cumsum(count)])
        calls, start = [], 0
        while start < len(mine):
            fits = int(np.searchsorted(before, before[start] + shape.kept, side="right")) - 1 - start
            stop = start + min(fits, shape.rows)
            calls.append(queue.pack(model, shape, mine[start:stop], count[start:stop]))
            start = stop
        due = np.zeros(plan.length, dtype=bool)
        for call in calls:
            due[call.kept_position_N[: int(call.counts_R.sum())]] = True
        positions_U = np.flatnonzero(due)
        table_calls = -(-len(positions_U) // (shape.rows * shape.per_row))
        if table_calls < len(calls):
            slot_L = np.maximum(np.cumsum(due) - 1, 0)
            found.append(Group(model, shape, calls, positions_U, slot_L, table_calls))
    return found
