"""Requests that no good client sends, by number: `attack` sends many and counts the answers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

GOOD = {"prompt": "the ", "length": 24, "steps": 6, "seed": 1, "n": 1}
FIELDS = (
    *("model", "prompt", "suffix", "infill", "length", "max_tokens", "n", "seed", "schedule", "steps", "spacing"),
    *("rule", "temperature", "top_p", "stream", "stop", "echo", "logprobs", "user", "stream_options", "best_of", "é"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**6, 10**30, 2**64, -(2**70), 0.5, -0.0, 1e308, 1e-300, "", "a", "_", "\x00"),
    *(
        "ÿ",
        "𝔘",
        "the " * 5000,
        "inf",
        "-inf",
        "nan",
        [],
        [[]],
        [1, 2],
        ["a"] * 1000,
        {},
        {"include_usage": 3},
        "L" * 3000,
    ),
    *(
        "L50% H50%",
        "L1 H99999999",
        "random:7:25%",
        "interleaved:25%",
        "spaced:0",
        "spaced:3",
        "cells(1b 3b)",
        "0" * 1500,
    ),
    *("threshold:-1", "threshold:1e999", "remdm-loop:1:1:1:1", "low-confidence:3", "dus:0", "L1/0", "12b:50%@100%"),
)
BODIES = (
    *(
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{",
        b"}",
        b"{}{}",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"\x00" * 100,
    ),
    *(b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}', b'{"prompt": "\xff"}', b'{"seed": NaN}', b'{"seed": -Infinity}'),
    *(b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 10_000 + b"}", b'{"n": 1, "n": 2, "length": 0}'),
    *(json.dumps({"prompt": "a" * 400_000}).encode(), b"x" * 1_000_000, '{"prompt": "é"}'.encode("latin-1")),
)
HEADS = (
    *(b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\r\n" * 1000, b"\x00" * 4096),
    *(
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000,
    ),
    b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: 1\r\n" % k for k in range(20_000)) + b"\r\n",
    b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/denoise HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nx\x00y: 1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    *(
        b"%s %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % pair
        for pair in (
            *(
                (b"GET", b"/../../etc/passwd"),
                (b"GET", b"/%2e%2e/%2e%2e/app.py"),
                (b"GET", b"/show/..%2f..%2fplayer.py"),
            ),
            *(
                (b"GET", b"/nothing"),
                (b"DELETE", b"/v1/models"),
                (b"GET", b"/v1/denoise"),
                (b"BREW", b"/"),
                (b"GET", b"/%00"),
            ),
            *(
                (b"GET", b"/v1/schedule?steps=x"),
                (b"GET", b"/v1/schedule?schedule=%ff%fe&length=-1"),
                (b"GET", b"/%ff"),
            ),
            *((b"GET", b"/v1/schedule?length=" + b"9" * 5000), (b"GET", b"/v1/schedule?a=1"), (b"OPTIONS", b"*")),
        )
    ),
)


def post(
    body: bytes, path: bytes = b"/v1/denoise", kind: bytes = b"application/json", length: int | None = None
) -> bytes:
    size = len(body) if length is None else length
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (path, kind, size) + body


def wrong_fields(chance: random.Random) -> bytes:
    """A good request with some fields replaced."""
    path = chance.choice([b"/v1/denoise", b"/v1/completions"])
    fields = {**GOOD, "stream": chance.random() < 0.5}
    if path == b"/v1/completions":
        fields["max_tokens"] = fields.pop("length") - 8
    for _ in range(chance.randint(1, 3)):
        fields[chance.choice(FIELDS)] = chance.choice(VALUES)
    return post(json.dumps(fields).encode(), path)


async def exchange(port: int, data: bytes, how: str, chance: random.Random) -> bytes:
    """Send what there is, in the way that `how` says; returns what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    answer = b""
    try:
        if how == "slow":
            for at in range(0, min(len(data), 60), 20):
                writer.write(data[at : at + 20])
                await writer.drain()
                await asyncio.sleep(0.002)
            if chance.random() < 0.7:
                return b""  # leave with the request half sent
        else:
            writer.write(data)
        if how == "leave":
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a goodbye
            answer = await asyncio.wait_for(reader.read(chance.choice([1, 200, 3000])), 30)
            writer.transport.abort()
            return answer
        if how == "half":
            writer.write_eof()
        while chunk := await asyncio.wait_for(reader.read(1 << 16), 30):
            answer += chunk
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return answer


def one(number: int) -> tuple[bytes, str, random.Random]:
    """The request of that number, and how it is sent."""
    chance = random.Random(number)
    kinds: list[tuple[Callable[[], bytes], str]] = [
        (lambda: wrong_fields(chance), "whole"),
        (lambda: wrong_fields(chance), "whole"),
        (lambda: wrong_fields(chance), chance.choice(["slow", "half", "leave"])),
        (lambda: post(chance.choice(BODIES), chance.choice([b"/v1/denoise", b"/v1/completions"])), "whole"),
        (lambda: chance.choice(HEADS), chance.choice(["half", "slow", "half"])),
        (lambda: post(json.dumps(GOOD).encode(), kind=chance.choice([b"text/plain", b"", b"application/x"])), "whole"),
        (lambda: post(json.dumps(GOOD).encode(), length=chance.choice([0, 3, 10**4])), "half"),
        (lambda: post(json.dumps({**GOOD, "n": 8, "steps": "inf"}).encode()), "leave"),
        (lambda: post(json.dumps(GOOD).encode())[: chance.randrange(200)], "half"),
        (lambda: chance.randbytes(chance.choice([0, 1, 100, 5000])), "half"),
    ]
    make, how = kinds[number % len(kinds)]
    return make(), how, chance


async def attack(port: int, numbers: range, at_once: int = 16) -> Counter[str]:
    """Send the requests of these numbers; counts of statuses. Raises at a 5xx other than a refusal, or a traceback."""
    counts: Counter[str] = Counter()
    turn = asyncio.Semaphore(at_once)

    async def send(number: int) -> None:
        async with turn:
            data, how, chance = one(number)
            answer = await exchange(port, data, how, chance)
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"
        counts[status] += 1
        said = f"request {number} ({how}, {data[:300]!r}) got {answer[:600]!r}"
        assert status not in ("500", "502") and b"Traceback" not in answer and b"internal_error" not in answer, said

    await asyncio.gather(*(send(number) for number in numbers))
    return counts
