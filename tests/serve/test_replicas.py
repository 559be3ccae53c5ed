"""Replicas on Ray Serve: the backend with stand-ins for Ray, and for real with one replica killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import relaylm
from relaylm.models.family import Family
from relaylm.serve.compute import Computer
from relaylm.serve.host import Host
from relaylm.serve.replicas import Replica, Replicas
from relaylm.serve.request import Ask, Limits, Refused


class Lost(Exception):
    """What Ray raises when an actor has died."""


class Stream:
    """A stream of a replica that is lost after some events."""

    def __init__(self, host: Host, ask: Ask, events: int) -> None:
        self.host, self.ask, self.events = host, ask, events

    async def __aiter__(self) -> AsyncIterator[Any]:
        count = 0
        async for event in self.host.stream(self.ask):
            if (count := count + 1) > self.events:
                raise Lost
            yield event

    def cancel(self) -> None: ...


class Handle:
    """A deployment's handle: the k-th request is lost after losses[k] events."""

    def __init__(self, host: Host, losses: list[int]) -> None:
        self.host, self.losses = host, iter(losses)
        self.stream = SimpleNamespace(remote=lambda ask: Stream(self.host, ask, next(self.losses)))

    def options(self, **_: Any) -> Handle:
        return self


@pytest.mark.parametrize("stream", [True, False])
def test_what_replicas_do_is_counted(family: Family, stream: bool) -> None:
    computer = Computer({"tiny": family}, Limits())
    ask = Ask(prompt=("a", "the "), max_tokens=5, steps=4, n=3, seed=3, stream=stream)
    backend = Replicas(Handle(Host({"tiny": family}, Limits(), computer), [1, 10**9]), (Lost,), None)

    async def talk() -> bytes:
        events = backend.stream(ask)
        await anext(events)
        there = await backend.metrics()
        async for _ in events:
            pass
        return there

    computer.start()
    try:
        there = asyncio.run(talk()).decode()
    finally:
        computer.close()
    assert "relaylm_rows_in_flight 6.0" in there
    after = asyncio.run(backend.metrics()).decode()
    assert 'relaylm_tokens_total{family="tiny"} 30.0' in after and "relaylm_rows_in_flight 0.0" in after


def test_without_a_replica_the_server_is_not_healthy() -> None:
    assert asyncio.run(Replicas(None, (Lost,), lambda: 2).health()) == {"replicas": 2, "requests": 0}
    with pytest.raises(Refused) as refused:
        asyncio.run(Replicas(None, (Lost,), lambda: 0).health())
    assert refused.value.status == 503


@pytest.mark.parametrize("losses", [[10**9], [0, 10**9], [5, 10**9], [1, 9, 10**9]])
def test_a_lost_replica_is_not_seen_in_the_stream(family: Family, losses: list[int]) -> None:
    computer = Computer({"tiny": family}, Limits())
    host = Host({"tiny": family}, Limits(), computer)
    ask = Ask(prompt="the ", length=20, steps=8, n=2, seed=3, schedule="L50% H50%", stream=True)

    async def all_of(backend: Any) -> list[Any]:
        return [event async for event in backend.stream(ask)]

    computer.start()
    try:
        expected = asyncio.run(all_of(host))
        found = asyncio.run(all_of(backend := Replicas(Handle(host, losses), (Lost,), None)))
    finally:
        computer.close()
    metrics = asyncio.run(backend.metrics()).decode()
    assert 'relaylm_tokens_total{family="tiny"} 32.0' in metrics and "relaylm_rows_in_flight 0.0" in metrics
    for events in (expected, found):
        events[0][1].pop("id")
        for name in ("seconds_queued", "seconds_computing"):
            events[-1][1]["relaylm"].pop(name)

    def by_row(events: list[Any]) -> list[Any]:  # rows may overtake each other, a row's own events may not
        return sorted(events, key=lambda event: event[1].get("row", -1 if event[0] == "start" else 99))

    assert by_row(found) == by_row(expected) and [found[0][0], found[-1][0]] == ["start", "done"]


def test_after_several_losses_the_request_is_refused(family: Family) -> None:
    computer = Computer({"tiny": family}, Limits())
    host = Host({"tiny": family}, Limits(), computer)
    computer.start()

    async def all_of() -> None:
        async for _ in Replicas(Handle(host, [2, 3, 4]), (Lost,), None).stream(
            Ask(length=20, steps=8, seed=3, stream=True)
        ):
            pass

    try:
        with pytest.raises(Refused) as refused:
            asyncio.run(all_of())
    finally:
        computer.close()
    assert refused.value.status == 503 and refused.value.retry_after


@pytest.mark.slow
def test_a_replica_behind_ray_serves_handle(family: Family, tmp_path: Path) -> None:
    """In this process, by Ray Serve's own way of testing: its handles and streams without a cluster."""
    serve = pytest.importorskip("ray.serve")
    family.save_pretrained(tmp_path / "tiny", name="tiny")
    bound = serve.deployment(Replica).bind([str(tmp_path / "tiny")], "cpu", None, Limits(batch_size=2))
    backend = Replicas(serve.run(bound, route_prefix=None, _local_testing_mode=True), (Lost,), None)

    async def talk() -> list[Any]:
        assert [model["id"] for model in await backend.models()] == ["tiny"]
        with pytest.raises(Refused):
            await backend.schedule(Ask(schedule="nothing"))
        with pytest.raises(Refused):
            await anext(backend.stream(Ask(length=99)))
        left = backend.stream(Ask(length=32, steps=32, n=4, seed=1, stream=True))
        await anext(left)
        await left.aclose()  # type: ignore[attr-defined]
        return [event async for event in backend.stream(Ask(length=12, steps=4, seed=3, stream=True))]

    events = asyncio.run(talk())
    texts = relaylm.sample(family, length=12, steps=4, seed=3, batch_size=2).texts
    assert events[-1][1]["texts"] == texts and backend.under_way == 0


@pytest.mark.slow
def test_two_replicas_one_killed_under_load() -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    from relaylm.serve.replicas import deploy

    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        backend = deploy(["wiki-char"], "cpu", None, Limits(batch_size=2), "local", 2)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        pytest.skip("Ray cannot start its own processes in time on a machine this busy")
    fields = {"length": 24, "steps": 12, "schedule": "sandwich:50%", "n": 2}

    async def one(seed: int) -> Any:
        try:
            events = [event async for event in backend.stream(Ask(**fields, seed=seed, stream=True))]  # type: ignore[arg-type]
        except Refused as error:
            return error.status
        return events[-1][1]["texts"]

    async def load() -> tuple[list[Any], set[int]]:
        pids: set[int] = set()
        while len(pids) < 2:
            pids.add(await backend.handle.process.remote())
        tasks = [asyncio.ensure_future(one(seed)) for seed in range(24)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) < 20
        os.kill(min(pids), signal.SIGKILL)
        return await asyncio.gather(*tasks), pids

    try:
        answers, _ = asyncio.run(load())
    finally:
        ray.shutdown()
    family = relaylm.Family.load("wiki-char")
    right = 0
    for seed, answer in enumerate(answers):
        if answer == 503:
            continue
        assert (
            answer == relaylm.sample(family, "sandwich:50%", 2, length=24, steps=12, seed=seed, batch_size=2).texts
        ), f"seed {seed}"
        right += 1
    print(f"{right} of {len(answers)} answered, {len(answers) - right} refused with 503")
    assert right >= len(answers) // 2
