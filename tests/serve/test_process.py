"""`relaylm serve` as it is run: HTTP in one process, the networks in another, and how both end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile import attack
from test_http import Running

import relaylm
from relaylm.cli.main import main
from relaylm.models.family import Family
from relaylm.serve.families import load_families
from relaylm.serve.process import Worker, _Asked, _signals_wait, packed
from relaylm.serve.request import Refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
ASK = {"prompt": "the ", "length": 32, "steps": 16, "seed": 3, "schedule": "sandwich:50%", "n": 2, "stream": False}


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save_pretrained(tmp_path_factory.mktemp("family") / "tiny", name="tiny")


def status(pid: int) -> tuple[str, int]:
    """The state of a process and its parent; X if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return words[0], int(words[1])


def computing(pid: int) -> int:
    """The process with the networks."""
    others = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    mine = [other for other in others if status(other)[1] == pid]
    (found,) = [other for other in mine if b"spawn_main" in Path(f"/proc/{other}/cmdline").read_bytes()]
    return found


def gone(pid: int) -> bool:
    """Whether a process has ended, now or soon."""
    until = time.monotonic() + 20
    while status(pid)[0] not in "XZ" and time.monotonic() < until:
        time.sleep(0.02)
    return status(pid)[0] in "XZ"


class Served:
    """A running server: its process, its address and what it has logged."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "relaylm", "serve", "--device", "cpu", "--port", "0", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()))
        assert self.process.stderr is not None
        listening = next(line for line in self.process.stderr if "listening" in line)
        self.reader.start()
        self.client = httpx.Client(base_url=json.loads(listening)["address"], timeout=60)
        self.child = computing(self.process.pid)

    def end(self) -> tuple[int, str]:
        """The exit code and the rest of the log."""
        code = self.process.wait(60)
        self.reader.join(60)
        return code, "".join(self.lines)


@contextmanager
def served(*words: str) -> Iterator[Served]:
    one = Served(*words)
    try:
        yield one
    finally:
        one.client.close()
        one.process.kill()
        one.process.wait()
        assert gone(one.child)


def test_texts_are_those_of_sample_and_a_signal_lets_them_end(folder: Path, family: Family) -> None:
    with served("--family", str(folder), "--max-queue", "64") as one:
        answer = one.client.post("/v1/denoise", json=ASK).json()
        options: dict[str, Any] = {name: ASK[name] for name in ("prompt", "length", "steps", "seed")}
        size = answer["relaylm"]["batch_size"]
        assert answer["texts"] == relaylm.sample(family, "sandwich:50%", 2, batch_size=size, **options).texts
        assert [entry["id"] for entry in one.client.get("/v1/models").json()["data"]] == ["tiny"]
        assert one.client.get("/v1/schedule", params={"schedule": "L25% H70%"}).status_code == 400
        assert one.client.post("/v1/denoise", json={**ASK, "model": "other"}).status_code == 404
        assert "relaylm_requests_total 1.0" in one.client.get("/metrics").text
        many = {**ASK, "n": 64, "steps": "inf"}
        with pytest.raises(httpx.ReadTimeout):  # who leaves takes the rows along
            one.client.post("/v1/denoise", json=many, timeout=0.2)
        until = time.monotonic() + 20
        while one.client.get("/health").json()["rows_in_flight"] and time.monotonic() < until:
            time.sleep(0.02)
        assert one.client.get("/health").json() == {"status": "ok", "rows_in_flight": 0, "rows_waiting": 0}
        with one.client.stream("POST", "/v1/denoise", json={**many, "stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            for pid in (one.child, one.process.pid):  # as systemd does: to both
                os.kill(pid, signal.SIGTERM)
            assert any("event: done" in line for line in lines)
        code, log = one.end()
        assert code == -signal.SIGTERM and "Traceback" not in log and '"level": "error"' not in log


ASKS: list[dict[str, Any]] = [
    {"prompt": "the ", "length": 32, "steps": 8, "n": 3, "schedule": "sandwich:50%"},
    {"infill": "the ____ of __ river", "spacing": 3, "stream": False},
    {"length": 16, "rule": "dus:8", "n": 2, "temperature": 0},
    {"length": 16, "rule": "threshold:0.5", "n": 3, "schedule": "L50% H50%"},
    {"length": 16, "rule": "remdm-cap:0.2", "steps": 8, "temperature": 0.9, "stream": False},
    {"length": 16, "rule": "random", "steps": 4, "stream": False},
    {"prompt": ["the ", "history of "], "max_tokens": 9, "n": 2, "logprobs": 1, "echo": True, "top_p": 0.8},
    {"prompt": ["the ", "history of "], "max_tokens": 9, "rule": "low-confidence", "steps": 3},
    {"prompt": "the ", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}},
]


def said(client: httpx.Client, ask: dict[str, Any]) -> list[Any]:
    """The answer, but for what is another one every time: events of different rows may overtake each other."""
    path = "/v1/completions" if "max_tokens" in ask else "/v1/denoise"
    answer = client.post(path, json={"seed": 7, **ask})
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        values = [json.loads(data) for data in found]
    else:
        values = [answer.json()]
    for value in values:
        for at in (value, value.get("relaylm") or {}):
            for name in ("id", "created", "seconds_queued", "seconds_computing"):
                at.pop(name, None)
    return sorted(values, key=lambda value: value.get("row", -1 if "given" in value else 99))


def test_two_processes_answer_as_one_does(folder: Path, family: Family) -> None:
    alone = Running(family)
    try:
        with served("--family", str(folder)) as one:
            for ask in ASKS:
                assert said(one.client, ask) == said(alone.client, ask), ask
    finally:
        alone.close()


def test_over_the_limits_of_the_other_process_requests_are_refused(folder: Path) -> None:
    with served("--family", str(folder), "--max-rows", "1", "--max-queue", "2") as one:
        asks = [{**ASK, "steps": "inf", "seed": seed} for seed in range(6)]
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda ask=ask: answers.append(one.client.post("/v1/denoise", json=ask)))
            for ask in asks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
        late = one.client.post("/v1/denoise", json={**ASK, "length": 33})
        assert late.status_code == 400 and "33" in late.json()["error"]["message"]


@pytest.mark.parametrize("numbers", [range(200), pytest.param(range(300, 10_300), marks=pytest.mark.slow)])
def test_hostile_requests_leave_nothing_in_either_process(folder: Path, family: Family, numbers: range) -> None:
    with served("--family", str(folder), "--max-queue", "64") as one:
        counts = asyncio.run(attack(one.client.base_url.port or 0, numbers))
        print(dict(counts))
        assert counts["400"] > len(numbers) / 10 and counts["200"] > 0
        until = time.monotonic() + 20
        while one.client.get("/health").json()["rows_in_flight"] and time.monotonic() < until:
            time.sleep(0.02)
        assert one.client.get("/health").json() == {"status": "ok", "rows_in_flight": 0, "rows_waiting": 0}
        answer = one.client.post("/v1/denoise", json=ASK).json()
        options: dict[str, Any] = {name: ASK[name] for name in ("prompt", "length", "steps", "seed")}
        size = answer["relaylm"]["batch_size"]
        assert answer["texts"] == relaylm.sample(family, "sandwich:50%", 2, batch_size=size, **options).texts
        one.process.terminate()
        code, log = one.end()
        assert code == -signal.SIGTERM and "Traceback" not in log and '"level": "error"' not in log


def test_a_body_that_is_no_http_is_refused_and_nothing_fails(folder: Path) -> None:
    """It comes with the head, so two answers are due: that to the path, which wants no body, and that to the body."""
    fields = b" HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with served("--family", str(folder)) as one:
        for path, body in itertools.product((b"/nowhere", b"/v1/denoise"), (b"zz\r\n", b"5\r\nhello\r\nzz\r\n")):
            with socket.create_connection(("127.0.0.1", one.client.base_url.port or 0), timeout=10) as line:
                line.sendall(b"POST " + path + fields + body)
                assert line.recv(4096).startswith(b"HTTP/1.1 400")
        assert one.client.post("/v1/denoise", json=ASK).status_code == 200
        one.process.terminate()
        code, log = one.end()
        assert code == -signal.SIGTERM and "Traceback" not in log and '"level": "error"' not in log


def test_when_the_process_that_computes_is_lost_the_server_says_so_and_ends(folder: Path) -> None:
    with served("--family", str(folder)) as one:
        answers: list[httpx.Response] = []
        many = {**ASK, "n": 200, "steps": "inf"}
        asking = threading.Thread(target=lambda: answers.append(one.client.post("/v1/denoise", json=many)))
        asking.start()
        while not one.client.get("/health").json()["rows_in_flight"]:
            time.sleep(0.01)
        os.kill(one.child, signal.SIGKILL)
        asking.join(60)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "dead"
        code, log = one.end()
        errors = [json.loads(line) for line in log.splitlines() if '"level": "error"' in line]
        assert code == 1 and [error["exit_code"] for error in errors] == [-signal.SIGKILL] and "Traceback" not in log


def test_an_interrupt_is_quiet_and_leaves_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "relaylm", "serve", "--family", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            child = computing(process.pid)
            break
        except ValueError:  # not started yet
            time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to both, here while the family is loaded
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said == "relaylm: interrupted\n"
    assert gone(child)


def test_a_client_that_leaves_while_its_rows_are_accepted_stops_nobody_else() -> None:
    async def heard() -> Refused | None:
        worker, reader = Worker.__new__(Worker), asyncio.StreamReader()
        worker.asked, worker.closing = {}, True
        gone, stays = asyncio.Future[Refused | None](), asyncio.Future[Refused | None]()
        gone.cancel()
        for number, accepted in enumerate((gone, stays)):
            worker.asked[number] = _Asked(lambda *_: None, 1, accepted)
            reader.feed_data(packed(([(number, None, None)], [], (0, 0))))
        reader.feed_eof()
        await worker._listen(reader)
        return stays.result()

    assert asyncio.run(heard()) is None


def test_an_interrupt_waits_whichever_thread_takes_it() -> None:
    other, waited = threading.Event(), False
    threading.Thread(target=other.wait, daemon=True).start()  # does not block signals
    with pytest.raises(KeyboardInterrupt), _signals_wait():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        waited = True
    other.set()
    assert waited


LOADS_FOR_EVER = """
import socket, sys, time
from relaylm.serve import families, process, request
families.load_families = lambda *_: (print("loading", flush=True), time.sleep(600))
process.compute(socket.socket(fileno=int(sys.argv[1])), [], "cpu", None, request.Limits())
"""


def test_a_process_that_loads_ends_with_the_one_that_started_it() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", LOADS_FOR_EVER, str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
    theirs.close()
    assert child.stdout is not None and child.stdout.readline() == "loading\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    ours.close()
    assert child.wait(20) == 0


def test_a_family_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relaylm", "serve", "--family", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("relaylm: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("key", ["", " key", "key\n"])
def test_a_key_that_nobody_can_send_is_an_error(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELAYLM_API_KEY", key)
    assert main(["serve", "--family", "nothing"]) == 2
    assert "API key" in capsys.readouterr().err


def test_a_name_ends_at_the_first_equals_sign(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "steps=8"
    shutil.copytree(folder, odd)
    assert [*load_families([f"mine={odd}"], "cpu", None)] == ["mine"]


def test_a_busy_port_is_reported_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert main(["serve", "--family", "no such family", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err
