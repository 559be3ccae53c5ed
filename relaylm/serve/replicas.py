"""Scale-out: replicas on Ray Serve, behind one address.

The HTTP side stays in the process that was started; each replica is an actor with its own families and scheduler, on a
GPU of its own or on a CPU. Ray sends a request to the less busy of two replicas.

**A replica that is lost.** A request's seed is settled before it is sent, and a row's text and calls depend on nothing
else, so another replica writes the same. What it writes is compared with what was passed on by counting: the first
calls of each row that the client has seen are left out. After `TRIES` losses the request is refused with 503.

Needs the extra `cluster` beside `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

from relaylm.errors import UserError, reason
from relaylm.serve.metrics import Metrics
from relaylm.serve.request import Ask, Limits, Refused

TRIES = 3
NAME = "relaylm"


class Replica:
    """A host for questions from another process. A refusal is returned, not raised: Ray would wrap an exception."""

    def __init__(self, sources: list[str], device: str, dtype: str | None, limits: Limits) -> None:
        from relaylm.serve.compute import Computer
        from relaylm.serve.families import load_families
        from relaylm.serve.host import Host

        families = load_families(sources, device, dtype)
        computer = Computer(families, limits)
        self.host = Host(families, limits, computer)
        computer.start()

    async def ask(self, method: str, *values: Any) -> Any:
        """What a method of the host returns, or why it does not."""
        try:
            return await getattr(self.host, method)(*values)
        except Refused as error:
            return error

    async def stream(self, ask: Ask) -> AsyncIterator[tuple[str, Any]]:
        """The events of a request; a refusal is the last one."""
        try:
            async for event in self.host.stream(ask):
                yield event
        except Refused as error:
            yield "refused", error

    async def process(self) -> int:
        """The process's number."""
        return os.getpid()

    async def check_health(self) -> None:
        """Ray replaces a replica whose thread has ended."""
        await self.host.health()


class Replicas:
    """The backend that passes requests on; see `app.Backend`."""

    def __init__(self, handle: Any, losses: tuple[type[BaseException], ...], status: Any) -> None:
        self.handle, self.losses, self.status = handle, losses, status
        self.metrics_of, self.under_way, self.rows = Metrics(), 0, 0

    async def ask(self, method: str, *values: Any) -> Any:
        """One answer of any replica."""
        for _ in range(TRIES):
            try:
                answer = await self.handle.ask.remote(method, *values)
            except self.losses:
                continue
            if isinstance(answer, Refused):
                raise answer
            return answer
        raise lost()

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Nothing to begin or end."""
        return contextlib.nullcontext()

    async def models(self) -> list[dict[str, Any]]:
        """The entries of GET /v1/models."""
        return await self.ask("models")

    async def schedule(self, ask: Ask) -> dict[str, Any]:
        """A schedule as parsed, and what it costs."""
        return await self.ask("schedule", ask)

    async def health(self) -> dict[str, Any]:
        """Replicas that run, and requests under way; refused if none runs."""
        if not (replicas := await asyncio.to_thread(self.status)):
            raise lost()
        return {"replicas": replicas, "requests": self.under_way}

    async def metrics(self) -> bytes:
        """Prometheus' text: of requests, their rows and tokens only; calls are counted where they are made."""
        return self.metrics_of.text(self.rows, 0)

    async def stream(self, ask: Ask) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of a request, each once, whatever becomes of replicas."""
        family, passed = None, Counter[int]()  # calls of each row that were passed on
        rows = ask.n * len(ask.prompts)
        self.under_way, self.rows = self.under_way + 1, self.rows + rows
        try:
            for _ in range(TRIES):
                seen, events, ended = Counter[int](), self.handle.options(stream=True).stream.remote(ask), False
                try:
                    async for name, value in events:
                        if name == "refused":
                            raise value
                        if name == "start":
                            again, family = family is not None, value["family"]
                            if again:
                                continue
                        if name == "written":
                            row = value["row"]
                            seen[row] += 1
                            if seen[row] <= passed[row]:
                                continue
                            passed[row] += 1
                        if name == "done":
                            self.metrics_of.tokens.labels(family).inc(value["usage"]["completion_tokens"])
                            self.metrics_of.request(value["relaylm"])
                        yield name, value
                    ended = True
                    return
                except self.losses:
                    await asyncio.sleep(0.1)  # until the router knows
                finally:
                    if not ended:
                        with contextlib.suppress(Exception):  # Ray's, about a replica that is gone
                            await asyncio.to_thread(events.cancel)
            raise lost()
        finally:
            self.under_way, self.rows = self.under_way - 1, self.rows - rows


def lost() -> Refused:
    """The answer when replicas are lost again and again."""
    return Refused(503, "the replicas that computed this were lost: try again", "replica_lost", retry_after=5)


def deploy(
    sources: list[str], device: str, dtype: str | None, limits: Limits, address: str, replicas: int | None
) -> Replicas:
    """Start replicas on a Ray cluster ("local": on this machine), by default one for each GPU, else one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray, serve = import_module("ray"), import_module("ray.serve")
    except ImportError:
        raise UserError("a cluster needs Ray Serve: pip install 'relaylm[serve,cluster]'") from None
    if not ray.is_initialized():
        processors = max(replicas or 1, os.cpu_count() or 1)
        local = {"include_dashboard": False, "num_cpus": processors} if address == "local" else {}
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"cannot reach a Ray cluster at {address}: {reason(error)}") from None
    serve.start(proxy_location="Disabled")  # the HTTP side is here
    gpus = int(ray.cluster_resources().get("GPU", 0)) if device in ("auto", "cuda") else 0
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas or max(1, gpus),
        max_ongoing_requests=limits.max_rows + limits.max_queue,
        ray_actor_options={"num_gpus": 1} if gpus else {"num_cpus": 1},
        health_check_period_s=2,
    )(Replica)
    handle = serve.run(deployment.bind(sources, device, dtype, limits), name=NAME, route_prefix=None)
    names = ("RayActorError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError")
    losses = [getattr(ray.exceptions, name) for name in names]
    losses.append(import_module("ray.serve.exceptions").DeploymentUnavailableError)

    def running() -> int:
        states = serve.status().applications[NAME].deployments[NAME].replica_states
        return int(states.get("RUNNING", 0))

    return Replicas(handle, tuple(losses), running)
