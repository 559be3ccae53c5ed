"""Where rows are computed: engines for a scheduler, and a `Computer`, which has both in this process. `process` has its
like for another process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from relaylm.core.plan import Plan
from relaylm.models.family import Family
from relaylm.sampling.confidence import RuleRun
from relaylm.sampling.denoise import Options
from relaylm.sampling.engine import Engine
from relaylm.sampling.result import Event
from relaylm.serve.request import Limits, Refused
from relaylm.serve.rows import Ended, LaneKey, Made, Rows, Ruled
from relaylm.serve.scheduler import Job, Scheduler

Put = Callable[[int, Event | Ended], None]
"""Receives what becomes of rows, with their number among those that were submitted together."""


def scheduler_of(families: Mapping[str, Family], limits: Limits) -> Scheduler:
    """A scheduler for rows of these families."""

    def engine_for(lane: LaneKey, places: int) -> Engine:
        family, nothing = families[lane.family], np.full((places, lane.length), -1, dtype=np.int64)
        empty = Plan(0, np.zeros(places, dtype=np.int64), nothing, np.zeros((places, lane.length)))
        models = list(family.models.values())
        return Engine(models, empty, family.mask_id, lane.law, family.device, lane.scored, shared=True)

    def loop_for(rows: Rows, emit: Callable[[Event], None]) -> RuleRun:
        family, calls = families[rows.lane.family], rows.calls
        assert isinstance(calls, Ruled)
        models = {name: family.models[name] for name in calls.names}
        options = Options(family.mask_id, rows.lane.law, rows.batch, calls.heavy, family.device, emit)
        return RuleRun(models, calls.policy, rows.plan, calls.rule, calls.times, options, calls.greedy)

    devices = sorted((family.device for family in families.values()), key=lambda device: device.type == "cuda")
    ahead = 2 * (devices[-1].type == "cuda")
    return Scheduler(engine_for, loop_for, limits.max_rows, limits.max_queue, devices[-1], ahead=ahead)


class Computer:
    """A scheduler and its thread."""

    def __init__(self, families: Mapping[str, Family], limits: Limits) -> None:
        self.scheduler = scheduler_of(families, limits)
        self.thread = threading.Thread(target=self.scheduler.work, name="relaylm-calls", daemon=True)

    def count(self, made: Callable[[Made], None]) -> None:
        """Have each call counted."""
        self.scheduler.on_call = made

    def start(self) -> None:
        """Begin to make calls."""
        self.thread.start()

    def close(self) -> None:
        """Finish what was accepted, refuse the rest."""
        self.scheduler.close()
        self.thread.join()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the start to the close."""
        self.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.close)

    def rows(self) -> tuple[int, int]:
        """In flight and waiting; refused if no calls are made."""
        if not self.thread.is_alive():
            raise Refused(503, "the thread that makes calls has ended", "dead")
        return self.scheduler.rows_in_flight, self.scheduler.rows_waiting

    async def submit(self, all_rows: list[Rows], put: Put) -> Any:
        """Queue all rows, or refuse them. `put` is called in the thread of this event loop; what is returned says
        whose rows to `leave`."""
        loop = asyncio.get_running_loop()

        def pass_on(number: int, what: Event | Ended) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(put, number, what)

        jobs = [Job(rows, partial(pass_on, number)) for number, rows in enumerate(all_rows)]
        self.scheduler.submit(jobs)
        return jobs

    def leave(self, jobs: Any) -> None:
        """Nobody listens any more: take out what is not written."""
        if not all(job.over for job in jobs):
            self.scheduler.cancel(jobs)
