"""Soak: mixed requests to a server for so many seconds, some of them broken, some given up half-way; between stretches
the server is killed and started again. Its memory and open files must stay flat, the same request must always have the
same answer, and no request may end in a server error. Linux, for /proc.
Example: python tests/campaigns/soak.py --size 600 (--pause: milliseconds that each client waits between requests)"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from relaylm.studies.record.serving import numbers_of, processes
from tests.campaigns.common import Campaign

STRETCHES, CLIENTS, PAUSE = 4, 3, 100
SLACK_MB, SLACK_FILES = 30, 8
FIXED = {"prompt": "the history of ", "max_tokens": 8, "seed": 7, "steps": 4}
BROKEN = (b"", b"{", b"[]", b'{"n": -1}', b'{"prompt": 5}', b'{"steps": 1e99}', b"\xff\xfe", b'{"schedule": "L9% H"}')


class Server:
    """`relaylm serve` in a process of its own."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = ["serve", "--family", "wiki-char", "--port", str(self.port), "--max-rows", "8", "--max-queue", "16"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "relaylm", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                if self.ask("GET", "/v1/models")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("the server did not start in two minutes")

    def ask(self, method: str, path: str, body: bytes | None = None, read: int | None = None) -> tuple[int, bytes]:
        """Status and body of a request; with `read`, the connection is given up after so many bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, {"content-type": "application/json"} if body is not None else {})
            answer = connection.getresponse()
            return answer.status, answer.read() if read is None else answer.read(read)
        finally:
            connection.close()

    def text(self) -> str:
        """The answer to the request that never changes."""
        status, body = self.ask("POST", "/v1/completions", json.dumps(FIXED).encode())
        return json.loads(body)["choices"][0]["text"] if status == 200 else f"status {status}: {body[:200]!r}"

    def size(self) -> tuple[float, int]:
        """Megabytes of memory, and open files, of both processes."""
        places = processes(self.process.pid)
        files = sum(len(list((place / "fd").iterdir())) for place in places)
        return numbers_of(self.process.pid)[1] / 2**20, files

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def request(server: Server, rng: random.Random) -> str:
    """One request of a random kind; returns what came of it."""
    kind = rng.choice(("completion", "completion", "denoise", "given up", "broken", "models", "missing"))
    ask: dict[str, Any] = {"prompt": "the ", "steps": rng.choice((2, 4)), "seed": rng.randrange(1000)}
    ask |= {"schedule": rng.choice(("light", "heavy", "L50% H50%"))}
    if kind == "completion":
        body = json.dumps({**ask, "max_tokens": rng.randint(1, 24), "n": rng.randint(1, 3)}).encode()
        status = server.ask("POST", "/v1/completions", body)[0]
    elif kind in ("denoise", "given up"):
        body = json.dumps({**ask, "length": 32}).encode()
        status = server.ask("POST", "/v1/denoise", body, read=20 if kind == "given up" else None)[0]
    elif kind == "broken":
        status = server.ask("POST", rng.choice(("/v1/completions", "/v1/denoise")), rng.choice(BROKEN))[0]
    else:
        status = server.ask("GET", "/v1/models" if kind == "models" else "/nowhere")[0]
    return f"{kind}: {status}"


def stretch(campaign: Campaign, server: Server, seconds: float, number: int) -> dict[str, Any]:
    """Requests by several clients for some time, and what the server took meanwhile."""
    until, lock, sizes = time.monotonic() + seconds, threading.Lock(), []

    def client(which: int) -> None:
        rng = random.Random(f"{campaign.seed} {number} {which}")
        while time.monotonic() < until:
            time.sleep(campaign.options.pause / 1000)
            try:
                came = request(server, rng)
            except (OSError, http.client.HTTPException) as error:
                came = f"connection: {type(error).__name__}"
            with lock:
                campaign.counts["requests"] += 1
                campaign.counts[came] += 1
                if came.startswith("connection") or came[-3:].startswith("5"):
                    campaign.fail(number, came)

    clients = [threading.Thread(target=client, args=(which,)) for which in range(CLIENTS)]
    for one in clients:
        one.start()
    while any(one.is_alive() for one in clients):
        sizes.append(server.size())
        time.sleep(min(1.0, seconds / 20))
    quarter = max(1, len(sizes) // 4)
    warm, last = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
    found = {
        name: [round(statistics.median(one[k] for one in part), 1) for part in (warm, last)]
        for k, name in enumerate(("MB", "files"))
    }
    for name, slack in (("MB", SLACK_MB), ("files", SLACK_FILES)):
        before, after = found[name]
        if after > 1.05 * before + slack:
            campaign.fail(number, f"{name} grew from {before} to {after}")
    return found


def main(argv: list[str] | None = None) -> int:
    campaign = Campaign("soak", __doc__ or "", 3600, argv, stretches=STRETCHES, pause=PAUSE)
    stretches = campaign.options.stretches
    seconds, campaign.size = campaign.size, stretches
    answer = None
    for number in campaign.cases():
        server = Server()
        try:
            first = server.text()
            answer = first if answer is None else answer
            campaign.details.setdefault("stretches", []).append(stretch(campaign, server, seconds / stretches, number))
            for said in (first, server.text()):
                if said != answer:
                    campaign.fail(number, f"the same request had another answer: {said!r}, not {answer!r}")
            busy = threading.Thread(target=lambda server=server: swallow(server))
            busy.start()
            time.sleep(0.05)
        finally:
            server.kill()  # with a request under way
        busy.join()
        campaign.counts["kills"] += 1
    return campaign.finish(seconds_asked=seconds, clients=CLIENTS, pause_ms=campaign.options.pause)


def swallow(server: Server) -> None:
    """A request whose server is killed."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        server.ask("POST", "/v1/denoise", json.dumps({"prompt": "the ", "length": 64}).encode())


if __name__ == "__main__":
    sys.exit(main())
