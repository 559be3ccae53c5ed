"""Samples and searches on many GPUs and hosts, on Ray.

Rows are independent (their noise is keyed by their numbers), so a range of rows under any schedules is a task of its
own: a plain function of a family and plain arguments (`sample_rows`, `grow_rows`). `Cluster` runs tasks on Ray actors,
one for each GPU (each CPU where the family is on CPUs), each of which loads the family once from its folder. Batches
have the same size wherever they run, so on the same kind of device results are the same bit for bit. (On CPUs a worker
computes with one thread; how a product is split among threads is part of a call's shape there.)

If a worker or its host is lost, its task goes to another worker and Ray is asked for a replacement. Workers store
nothing; the caller stores what comes back.

Needs the extra `cluster` (`pip install relaylm[cluster]`); Ray is imported when a Cluster is made.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from relaylm.core.schedule import Policy, Schedule, Timetable
from relaylm.errors import UserError, reason
from relaylm.measure.evaluate import sample_rows
from relaylm.models.family import Family
from relaylm.sampling.result import Samples, joined_rows
from relaylm.sampling.sample import checked_given, lay_out, pick_batch_size
from relaylm.search.tree import Stopped

MOST_LOSSES = 3  # of workers over one task, or in a row while they start: then the cause is not chance
LOOK = 0.5  # seconds between two checks of whether to stop


def row_ranges(n: int, batch: int, workers: int) -> list[tuple[int, int]]:
    """(first, number) of even pieces of n rows: about four for each worker, so that none is idle for long at the end,
    and at least two batches each, so that batches are full."""
    pieces = max(1, min(4 * workers, n // (2 * batch)))
    edges = [n * k // pieces for k in range(pieces + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def sample_many(
    workers: Cluster,
    schedule: str | Schedule | Policy,
    n: int,
    *,
    given: np.ndarray | None = None,
    batch_size: int | None = None,
    first_row: int = 0,
    on_rows: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Samples:
    """`sample`, with the rows distributed over workers; other options are those of `sample`. `on_rows` receives the
    number of rows done and n. The cost's seconds are wall-clock time."""
    began = time.perf_counter()
    if n < 1:
        raise UserError(f"the number of samples must be at least 1, not {n}")
    family = workers.family
    if isinstance(schedule, str):
        schedule = Schedule.parse(schedule)
    if given is not None:
        given = checked_given(given, n, family.length)
    laid_out = ["prompt", "suffix", "infill", "max_new_tokens"] + ["length"] * (options.get("stride") is None)
    layout = given if given is not None else lay_out(family, **{k: v for k, v in options.items() if k in laid_out})
    models = schedule.models if isinstance(schedule, Schedule | Timetable) else family.names
    batch = batch_size or pick_batch_size(family, n, layout.shape[-1], len(set(models)))
    tasks = []
    for first, rows in row_ranges(n, batch, workers.number):
        own = {**options, "batch_size": batch}
        if given is not None:
            own["given"] = given[first : first + rows] if given.ndim == 2 else given
        tasks.append((schedule, first_row + first, rows, own))
    parts: dict[int, Samples] = {}
    for index, part in workers.map(sample_rows, tasks):
        parts[index] = part
        if on_rows is not None:
            on_rows(sum(len(part.tokens) for part in parts.values()), n)
    samples = joined_rows([parts[index] for index in range(len(tasks))])
    return replace(samples, cost=replace(samples.cost, seconds=time.perf_counter() - began))


class _Worker:
    """What runs in a Ray actor."""

    def load(self, folder: str, device: str, dtype: Any, narrow: bool, digest: str) -> int:
        """Load the family; returns the process's number. Not in the constructor, whose errors Ray hides."""
        host = socket.gethostname()
        try:
            self.family = Family.load(folder, device, dtype, narrow=narrow)
        except UserError as error:
            raise UserError(f"a worker on {host} cannot load the family: {error}") from None
        if self.family.digest != digest:
            raise UserError(f"{folder} holds other weights on {host} than here")
        return os.getpid()

    def do(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        return function(self.family, *task)


class Cluster:
    """Tasks on Ray actors, each with the family in its own memory. Use with `with`, or `close` it.

    `address` is that of a running cluster ("auto" for the one that this host belongs to, or "host:6379"); "local"
    starts one on this machine, for as long as this object lives. The family must be in a folder that every host can
    read under the same name. `workers` is by default one for each GPU, or each CPU where the family is on CPUs."""

    def __init__(self, family: Family, address: str = "local", workers: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray = import_module("ray")
        except ImportError:
            raise UserError("a cluster needs Ray: `pip install relaylm[cluster]`") from None
        self._digest = family.digest
        if family.stored is None or self._digest is None:
            raise UserError("a cluster needs a family from a folder that all its hosts can read: save this one first")
        if workers is not None and workers < 1:
            raise UserError(f"a cluster has at least one worker, not {workers}")
        self.family, self._ray = family, ray
        self._loss: tuple[type[BaseException], ...] = tuple(
            getattr(ray.exceptions, name)
            for name in ("RayActorError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError")
        )
        self._starting: dict[Any, Any] = {}  # the call that loads the family, and its actor
        self._idle: list[Any] = []
        self.pids: dict[Any, int] = {}  # of the workers that have started, by actor
        self._failed = 0  # starts in a row that came to nothing
        self._opened = not ray.is_initialized()
        if self._opened:
            local = {"num_cpus": workers or os.cpu_count(), "include_dashboard": False} if address == "local" else {}
            _check_reachable(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UserError(f"cannot reach a Ray cluster at {address}: {reason(error)}") from None
        gpu = family.device.type == "cuda"
        there = int(ray.cluster_resources().get("GPU" if gpu else "CPU", 0))
        self.number = min(workers or there, there)
        if not self.number:
            self.close()
            raise UserError(f"the family is on a {'GPU' if gpu else 'CPU'}, but the cluster has none")
        resources = {"num_gpus": 1, "num_cpus": 0} if gpu else {"num_cpus": 1}
        self._actor = ray.remote(**resources, max_restarts=0)(_Worker)
        for _ in range(self.number):
            self._start()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, and a cluster that was started here."""
        for actor in [*self._starting.values(), *self.pids]:
            self._ray.kill(actor)
        self._starting, self._idle, self.pids = {}, [], {}
        if self._opened:
            self._ray.shutdown()

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(index, function(family, *task)) for each task, in the order in which they are done. `function` is defined at
        the top of a module that workers can import. `stop` is called twice a second; if it returns True, Stopped is
        raised and the running tasks are given up."""
        if self.family.digest != self._digest:
            raise UserError("the family was changed after its workers were started: save it, and start them from there")
        waiting = deque(range(len(tasks)))
        running: dict[Any, tuple[int, Any]] = {}
        losses: Counter[int] = Counter()
        try:
            while waiting or running:
                while waiting and self._idle:
                    actor, index = self._idle.pop(), waiting.popleft()
                    running[actor.do.remote(function, tasks[index])] = index, actor
                ready, _ = self._ray.wait([*running, *self._starting], num_returns=1, timeout=LOOK)
                if stop is not None and stop():
                    raise Stopped
                for call in ready:
                    if call in self._starting:
                        self._started(call)
                        continue
                    index, actor = running.pop(call)
                    try:
                        result = self._get(call)
                    except self._loss as error:
                        losses[index] += 1
                        if losses[index] > MOST_LOSSES:
                            lost = f"{losses[index]} workers were lost over one task"
                            raise UserError(f"{lost}: {reason(error)}") from None
                        waiting.appendleft(index)
                        self._replace(actor)
                        continue
                    except Exception:  # raised by the function; the worker is in order
                        self._idle.append(actor)
                        raise
                    self._idle.append(actor)
                    yield index, result
        finally:
            for _, actor in running.values():  # given up: the next call of `map` must not wait for them
                if actor in self.pids:  # and the cluster was not closed meanwhile
                    self._replace(actor)

    def _start(self) -> None:
        stored, device = self.family.stored, self.family.device
        assert stored is not None
        actor = self._actor.remote()
        how = (device.type, stored.dtype, self.family.narrow)
        call = actor.load.remote(str(stored.folder.resolve()), *how, self._digest)
        self._starting[call] = actor

    def _started(self, call: Any) -> None:
        actor = self._starting.pop(call)
        try:
            self.pids[actor] = self._get(call)
        except self._loss as error:
            self._failed += 1
            if self._failed > MOST_LOSSES:
                raise UserError(f"workers are lost as they start: {reason(error)}") from None
            self._start()
            return
        self._failed = 0
        self._idle.append(actor)

    def _replace(self, actor: Any) -> None:
        self.pids.pop(actor, None)
        self._ray.kill(actor)
        self._start()

    def _get(self, call: Any) -> Any:
        """A call's result. An exception of its function is raised here, without Ray's wrapping."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _check_reachable(address: str) -> None:
    """Fail within seconds where Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot reach a Ray cluster at {address}: {error}") from None
