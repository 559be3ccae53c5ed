r"""Which rows go into the next network call, and in what shape it is.

A row's events are in order, and each waits for the one before; rows do not wait for each other. So a call takes rows at
whatever step they are, as long as they want the same model. Calls have a few fixed shapes, and the shape of a row's
call depends on its own event, the row's length and the batch size alone: a row's bits do not depend on the other rows
of a batch.

Shapes: n rows in all, R in a call, B places for them, L positions, K places for due positions in each row of a call, N
places kept for the head, F due positions, E events.
"""

from __future__ import annotations

import numpy as np

from relaylm.core.plan import Events
from relaylm.sampling.engine import SCRATCH, Call, Shape
from relaylm.sampling.result import distinct_pairs

LONG_STRETCH = 4  # events in a row for one model, on average, from which rows keep in step
IN_FLIGHT = 32  # batches' worth of rows that calls are chosen from


class Queue:
    """Rows, their next events, and the choice of the next batch.

    `model_E` holds the model of every event, as an index. Where that is known from the start, call `foresee`; otherwise
    the caller fills in a row's next event before the next `take`."""

    def __init__(
        self, events: Events, model_E: np.ndarray, length: int, batch: int, in_flight: int | None = None
    ) -> None:
        self.events, self.model_E, self.length = events, model_E, length
        self.next_n = events.row_ptr_n1[:-1].copy()  # each row's next event
        self.end_n = events.row_ptr_n1[1:]
        self.in_flight = in_flight or IN_FLIGHT * batch
        # Of each event, where it is known: its row's changes of model ahead, and the events until the first of them.
        self.changes_E = self.stretch_E = np.zeros(len(model_E), dtype=np.int64)
        self.in_step = False
        self.resize(batch)
        self.line_up()

    def resize(self, batch: int) -> None:
        """Make calls of so many rows from here on."""
        self.batch = batch
        self.shapes, self.shape_E = call_shapes(self.events, self.length, batch)

    def foresee(self) -> None:
        """Use that the models of all events are known."""
        self.changes_E, self.stretch_E = changes_ahead(self.model_E, self.events.row_ptr_n1)
        stretches = int(np.count_nonzero(self.stretch_E == 1))
        self.in_step = len(self.model_E) >= LONG_STRETCH * stretches

    def line_up(self) -> None:
        """All rows that have anything to do, in order: the first of them in flight, the others waiting."""
        self.todo = np.flatnonzero(self.next_n < self.end_n)
        self.pool, self.waiting = self.todo[: self.in_flight], self.todo[self.in_flight :]

    def kind(self, rows: np.ndarray) -> np.ndarray:
        """Model and shape of each row's next call, as one number: model * number of shapes + shape."""
        event = self.next_n[rows]
        return np.asarray(self.model_E[event] * len(self.shapes) + self.shape_E[event])

    def take(self) -> Call | None:
        """The next batch. A leading row decides the model and the shape, and the other places go to rows that want the
        same, first those with the furthest to go until they change model.

        Where models serve long stretches, the leader is the row with the most changes of model ahead: all rows cross
        from one model to the next together, and batches are full all the way. Where models alternate quickly, or what
        is to come is not known, it is the row with the most left to do, and a full batch of others goes first unless
        that row alone decides how long the rest takes."""
        pool = self.pool
        if not len(pool):
            return None
        event, kind = self.next_n[pool], self.kind(pool)
        left, stretch = self.end_n[pool] - event, self.stretch_E[event]
        if self.in_step:
            leader = int(np.lexsort((left, stretch, self.changes_E[event]))[-1])
        else:
            leader = int(left.argmax())
            full = np.bincount(kind)[kind] >= self.batch
            waits = not full[leader] and left[leader] * self.batch < left.sum()
            if waits and full.any():
                leader = int(np.where(full, left, -1).argmax())
        model, shape = divmod(int(kind[leader]), len(self.shapes))
        wanted = kind == kind[leader]
        ready = pool[wanted]
        if len(ready) > self.batch:
            ready = ready[np.lexsort((-left[wanted], -stretch[wanted]))[: self.batch]]
        due = np.cumsum(self.events.count_E[self.next_n[ready]])
        fits = int(np.searchsorted(due, self.shapes[shape].kept, side="right"))  # keep to the head's places
        return self.pack(model, self.shapes[shape], ready[:fits])

    def pack(self, model: int, shape: Shape, rows_R: np.ndarray) -> Call:
        """The call of these rows' next events."""
        events_R = self.next_n[rows_R]
        counts_R = self.events.count_E[events_R]
        due_F = self.events.positions_F[np.repeat(self.events.start_E[events_R], counts_R) + _within(counts_R)]
        return pack(model, shape, rows_R, events_R, counts_R, due_F, self.events.t_E[events_R])

    def advance(self, call: Call) -> None:
        """Move the call's rows to their next events; waiting rows take the places of finished ones."""
        self.next_n[call.rows_R] += 1
        alive = self.next_n[self.pool] < self.end_n[self.pool]
        if not alive.all():
            self.pool = self.pool[alive]
            places = self.in_flight - len(self.pool)
            self.pool = np.concatenate([self.pool, self.waiting[:places]])
            self.waiting = self.waiting[places:]


def _within(counts_R: np.ndarray) -> np.ndarray:
    """0, 1, ... for the due positions of each row."""
    return np.asarray(np.arange(counts_R.sum()) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R))


def pack(
    model: int,
    shape: Shape,
    rows_R: np.ndarray,
    events_R: np.ndarray,
    counts_R: np.ndarray,
    due_F: np.ndarray,
    t_R: np.ndarray,
) -> Call:
    """The call of rows (their places in the engine), each with its number of due positions, those positions row after
    row, and its time."""
    r, total = len(rows_R), len(due_F)
    place_F = np.repeat(np.arange(r), counts_R)  # the place in the batch that each due position belongs to
    t_B, index = np.ones(shape.rows), np.zeros(sum(shape.parts), dtype=np.int64)
    rows_B, positions, kept_N, row_N, position_N = np.split(index, np.cumsum(shape.parts[:-1]))
    rows_B[r:] = row_N[total:] = SCRATCH
    rows_B[:r], t_B[:r] = rows_R, t_R
    kept_N[:total] = place_F * shape.per_row + _within(counts_R)
    row_N[:total], position_N[:total] = rows_R[place_F], due_F
    positions[kept_N[:total]] = due_F
    return Call(model, shape, rows_R, events_R, counts_R, due_F, t_B, index)


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


def call_shapes(events: Events, length: int, rows: int) -> tuple[list[Shape], np.ndarray]:
    """The shapes of calls of so many rows, and which of them each event's call has: places for the due positions that
    its step usually writes, doubled as often as an unusual event needs."""
    expected_E = events.expected_E
    usual_E = np.minimum(expected_E + 5 * np.sqrt(expected_E) + 1, events.most_E)
    places_E = np.exp2(np.ceil(np.log2(np.maximum(usual_E, events.count_E)))).astype(np.int64)
    # At least two: PyTorch's attention on a CPU treats a single query specially, and its bits then depend on the row's
    # place in the batch.
    places_E = np.minimum(np.maximum(places_E, 2), length)
    # The head's places: rows times the mean count of an event (given that there is one), and four deviations.
    mean_E = np.where(expected_E > 1e-9, expected_E / -np.expm1(-np.maximum(expected_E, 1e-9)), 1.0)
    kept_E = np.ceil((rows * mean_E + 4 * np.sqrt(rows * mean_E)) / 8).astype(np.int64) * 8
    kept_E = np.minimum(np.maximum(kept_E, places_E), rows * places_E)
    pairs, index_E = distinct_pairs(places_E, kept_E)
    return [Shape(rows, places, kept) for places, kept in pairs], index_E
