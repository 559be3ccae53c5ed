"""Hostile clients: nothing gets a 500, nothing is left behind, and the next good request is right."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from hostile import attack
from test_http import ASK, Running, sampled

from relaylm.models.family import Family
from relaylm.serve import app, server


@pytest.fixture
def running(family: Family, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(server, "HEADER_SECONDS", 1.0)
    monkeypatch.setattr(server, "STALL_SECONDS", 1.0)
    one = Running(family, max_queue=64)
    yield one
    one.close()


@pytest.mark.parametrize("numbers", [range(300), pytest.param(range(300, 10_300), marks=pytest.mark.slow)])
def test_hostile_requests_leave_nothing_behind(running: Running, family: Family, numbers: range) -> None:
    counts = asyncio.run(attack(running.port, numbers))
    print(dict(counts))
    assert counts["400"] > len(numbers) / 10 and counts["200"] > 0
    assert running.settled()
    scheduler = running.scheduler
    assert not scheduler.jobs and all(len(lane.free) == scheduler.max_rows for lane in scheduler.lanes.values())
    answer = running.client.post("/v1/denoise", json={**ASK, "stream": False}).json()
    assert answer["texts"] == sampled(family, answer["relaylm"]["batch_size"])
    assert running.client.get("/health").json()["rows_in_flight"] == 0


def test_slow_clients_are_cut_off(running: Running) -> None:
    head = b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"

    async def talk(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    assert b" 408 " in asyncio.run(talk(head))
    assert asyncio.run(talk(b"POST /v1/deno")) == b""  # a request that never comes
    assert asyncio.run(talk(b"")) == b""

    async def talk_twice() -> None:  # after a good request the next one must come, too
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /hea")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()

    asyncio.run(talk_twice())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system does not count for us")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_cut_off(
    running: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", running.port))
        # Many events, or one answer that is larger than what the system holds back for a client.
        body = json.dumps({"n": 64, "length": 32, "steps": 32, "stream": stream, "seed": 0})
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        connections = running.server.server_state.connections
        wait(lambda: len(connections) > 0)
        [there] = connections
        there.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        deaf.sendall(f"POST /v1/denoise HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode())
        wait(lambda: not connections)
    assert running.settled()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def wait(until: Callable[[], bool]) -> None:
    """Until it is so, for at most 30 seconds."""
    end = time.monotonic() + 30
    while not until():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_bodies_over_the_limit_are_refused_before_they_are_read(running: Running) -> None:
    def forever() -> Iterator[bytes]:
        while True:
            yield b"x" * 65536

    try:
        answer = running.client.post("/v1/denoise", content=forever(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the server answered and hung up while the client was still sending
