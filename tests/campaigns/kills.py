"""Kills: commands that write, and a server under load, are ended by SIGKILL at random moments, once or several times,
and run again to their end: every result and every answer must be that of a run that nobody disturbed.
Example: python tests/campaigns/kills.py --jobs 2"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.campaigns.common import JOBS, Campaign, Commands, Outcome, difference, forked, run, wait, warm_up, workplace

SERVE = "serve"
BODY = {"prompt": "the ", "steps": 4, "seed": 7}
ASKS = (
    ("/v1/completions", {**BODY, "max_tokens": 4, "n": 2}),
    ("/v1/completions", {**BODY, "max_tokens": 3, "schedule": "light", "seed": 8}),
    ("/v1/denoise", {**BODY, "length": 8, "schedule": "L50% H50%"}),
)


class Kills:
    """The commands, each with its undisturbed result and the time it takes."""

    def __init__(self, campaign: Campaign, place: Path) -> None:
        self.seed, self.place, self.commands = campaign.seed, place, Commands(place)
        self.reference: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        served = all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn", "sse_starlette"))
        if not served:
            print("kills: no serve, its packages are not installed", flush=True)
        self.kinds = campaign.wanted([*self.commands.words, *([SERVE] if served else [])])
        for kind in self.kinds:
            began = time.monotonic()
            work = self.commands.folder()
            if (code := self.finish(kind, work)) != 0:
                raise RuntimeError(f"{kind} ended with {code}: {self.commands.said(work)}")
            self.seconds[kind], self.reference[kind] = time.monotonic() - began, self.result(kind, work)
        if SERVE in self.seconds:
            self.seconds[SERVE] *= 3  # to be killed at work more often than while it starts

    def argv(self, kind: str, work: Path) -> list[str]:
        """The command line; a server has the port in a file of the folder."""
        if kind != SERVE:
            return self.commands.argv(kind, work)
        if not (work / "port").exists():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                (work / "port").write_text(str(probe.getsockname()[1]))
        return ["serve", "--family", str(self.place / "trained" / "family"), "--port", (work / "port").read_text()]

    def finish(self, kind: str, work: Path) -> int | None:
        """Run a command to its end; of a server, until it has answered everything, which is then its result."""
        log = work.with_suffix(".log")
        if kind != SERVE:
            return run(self.argv(kind, work), log)
        child, status = forked(self.argv(kind, work), log), None
        answers, until = [], time.monotonic() + 120
        while time.monotonic() < until and (status := wait(child, 0)) is None:
            try:
                answers = [ask(int((work / "port").read_text()), *one) for one in ASKS]
                break
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)
        (work / "answers").write_text(json.dumps(answers))
        if status is None:
            end(child)
        return status or (0 if answers else 1)

    def result(self, kind: str, work: Path) -> Any:
        """What the command wrote, or what the server answered."""
        return json.loads((work / "answers").read_text()) if kind == SERVE else self.commands.result(kind, work)

    def one(self, case: int) -> Outcome:
        """A command, killed one to three times and then run to its end."""
        rng, outcome, work = random.Random(f"{self.seed} {case}"), Outcome(), self.commands.folder()
        kind = rng.choice(self.kinds)
        name = f"{case}, {kind}"
        for _ in range(rng.randint(1, 3)):
            child = forked(self.argv(kind, work), work.with_suffix(".log"))
            stop = self.load(work, rng, name, outcome) if kind == SERVE else None
            status = wait(child, rng.uniform(0, 1.1 * self.seconds[kind]))
            if status is None:
                end(child)
                outcome.counts += {"kills": 1, f"kills of {kind}": 1}
            elif status != 0 or kind == SERVE:
                outcome.failures.append((name, f"ended with {status}: {self.commands.said(work)}"))
            if stop is not None:
                stop()
        if (code := self.finish(kind, work)) != 0:
            outcome.failures.append((name, f"run again it ended with {code}: {self.commands.said(work)}"))
        elif found := difference(self.result(kind, work), self.reference[kind]):
            outcome.failures.append((name, f"the result is not that of a run that nobody disturbed: {found}"))
        left = [path for path in work.rglob(".*") if path.name != ".relaylm.json"]
        outcome.counts["leftovers"] += len(left)
        return outcome

    def load(self, work: Path, rng: random.Random, name: str, outcome: Outcome) -> Callable[[], None]:
        """Requests by three clients until the function that is returned is called; answers are compared."""
        over, port, orders = threading.Event(), int((work / "port").read_text()), [rng.random() for _ in range(3)]

        def client(order: float) -> None:
            chosen = random.Random(order)
            while not over.is_set():
                which = chosen.randrange(len(ASKS))
                try:
                    found = ask(port, *ASKS[which])
                except (OSError, http.client.HTTPException):  # not yet there, or no longer
                    over.wait(0.005)
                    continue
                outcome.counts["answers under load"] += 1
                if different := difference(found, self.reference[SERVE][which]):
                    outcome.failures.append((name, f"another answer under load: {different}"))

        clients = [threading.Thread(target=client, args=(order,)) for order in orders]
        for one in clients:
            one.start()

        def stop() -> None:
            over.set()
            for one in clients:
                one.join()

        return stop


def ask(port: int, path: str, body: dict[str, Any]) -> list[Any]:
    """Status and texts of an answer, or its events; a stream of events that was cut off is an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            return [answer.status, data.decode(errors="replace")]
        if path == "/v1/completions":
            return [200, [choice["text"] for choice in json.loads(data)["choices"]]]
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
        return [200, [[event.get(key) for key in ("positions", "tokens", "texts", "error")] for event in events]]
    finally:
        connection.close()


def end(child: int) -> None:
    """SIGKILL to a process and those it made."""
    os.killpg(child, signal.SIGKILL) if os.getpgid(child) == child else os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(argv: list[str] | None = None) -> int:
    campaign = Campaign("kills", __doc__ or "", 1000, argv, jobs=JOBS)
    warm_up()
    with workplace() as place:
        kills = Kills(campaign, place)
        campaign.details["kinds"] = kills.kinds
        campaign.each(kills.one, campaign.options.jobs, "kills")  # a case has none, one or several
        return campaign.finish(jobs=campaign.options.jobs)


if __name__ == "__main__":
    sys.exit(main())
