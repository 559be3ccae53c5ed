"""What the campaigns share: arguments, resuming, the record under results/campaigns, and quick runs of commands.

A campaign is a list of numbered cases, all drawn from one seed. It keeps what is done in a file beside its record, so a
campaign that was stopped goes on with the same seed; its record has counts, failures, machine, versions, seed, commit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "campaigns"


class Campaign:
    """Cases 0, 1, ... of one campaign. `size` is how many; `minutes` ends it early, to be resumed."""

    def __init__(self, name: str, about: str, size: int, argv: list[str] | None = None, **numbers: int) -> None:
        parser = argparse.ArgumentParser(description=about)
        for key, number in numbers.items():
            parser.add_argument(f"--{key}", type=int, default=number, help="(default: %(default)s)")
        parser.add_argument("--size", type=int, default=size, help="number of cases (default: %(default)s)")
        parser.add_argument("--seed", type=int, help="default: a fresh one, or that of the campaign that was stopped")
        parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time, to be resumed")
        parser.add_argument("--only", help="of the kinds of cases, those with one of these words, by commas")
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record (default: %(default)s)")
        parser.add_argument("--fresh", action="store_true", help="forget a campaign that was stopped")
        self.options = parser.parse_args(argv)
        self.name, self.size = name, self.options.size
        self.path = self.options.out / f"{name}.json"
        self.partial = self.options.out / f".{name}.partial.json"
        self.options.out.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self.partial.read_text()) if self.partial.exists() and not self.options.fresh else {}
        if self.options.seed is not None and kept.get("seed") != self.options.seed:
            kept = {}
        self.seed: int = kept.get("seed", self.options.seed if self.options.seed is not None else secrets.randbits(32))
        self.done: int = kept.get("done", 0)
        self.counts: Counter[str] = Counter(kept.get("counts", {}))
        self.failures: list[dict[str, Any]] = kept.get("failures", [])
        self.details: dict[str, Any] = kept.get("details", {})
        self.seconds: float = kept.get("seconds", 0.0)
        self.began = self.kept = time.monotonic()
        print(f"{name}: seed {self.seed}, {self.size} cases, {self.done} done", flush=True)

    def wanted(self, kinds: list[str]) -> list[str]:
        """The kinds of cases that --only leaves."""
        words = (self.options.only or "").split(",")
        return [kind for kind in kinds if any(word in kind for word in words)]

    def cases(self, counted: str | None = None) -> Iterator[int]:
        """Numbers of the cases that are not done: `size` of them, or as many as it takes to count so many of
        something."""
        while (self.done if counted is None else self.counts[counted]) < self.size:
            if time.monotonic() - self.began > 60 * self.options.minutes:
                print(f"{self.name}: stopped after {self.done} of {self.size}; run it again to go on", flush=True)
                return
            yield self.done
            self.done += 1
            if time.monotonic() - self.kept > 2:
                self._keep()

    def fail(self, case: Any, why: str) -> None:
        """Note a case that went wrong."""
        print(f"{self.name}: case {case} FAILED: {why}", flush=True)
        self.failures.append({"case": case, "why": why[:2000]})

    def finish(self, **more: Any) -> int:
        """Write the record; the exit code says whether all went well."""
        import torch

        from relaylm.measure.provenance import how_made

        self._keep()
        record = {
            "campaign": self.name,
            "cases": self.done,
            "size": self.size,
            "failures": self.failures,
            "counts": dict(sorted(self.counts.items())),
            "seed": self.seed,
            "seconds": round(self.seconds + time.monotonic() - self.began, 1),
            **self.details,
            **more,
            **how_made(torch.device("cpu")),
        }
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        if time.monotonic() - self.began <= 60 * self.options.minutes:
            self.partial.unlink(missing_ok=True)
        print(f"{self.name}: {self.done} cases, {len(self.failures)} failures, {dict(self.counts)}", flush=True)
        return 1 if self.failures else 0

    def _keep(self) -> None:
        state = {
            "seed": self.seed,
            "done": self.done,
            "counts": self.counts,
            "failures": self.failures,
            "details": self.details,
            "seconds": self.seconds + time.monotonic() - self.began,
        }
        new = self.partial.with_suffix(".tmp")
        new.write_text(json.dumps(state))
        os.replace(new, self.partial)
        self.kept = time.monotonic()


# --------------------------------------------------------------------------------------------------- running commands


def forked(argv: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    """Start a command in a copy of this process, which has the imports already; returns the process id."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.setsid()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        from relaylm.cli.main import main

        if before is not None:
            before()
        code = main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    os._exit(code)


def wait(child: int, seconds: float) -> int | None:
    """The exit status of a process (negative: the signal that ended it), None if it still runs after the time."""
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.002)


def run(argv: list[str], log: Path, before: Callable[[], None] | None = None, seconds: float = 300) -> int | None:
    """Run a command to its end; None if it hangs."""
    child = forked(argv, log, before)
    status = wait(child, seconds)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status


def warm_up() -> None:
    """Import what commands need, so that copies of this process start at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    from importlib import import_module

    for name in ("cli.main", "models.family", "train.family", "train.corpus", "search.search", "measure.compare"):
        import_module(f"relaylm.{name}")
    for name in ("studies.compose.compose", "studies.compose.view", "convert", "sampling.confidence"):
        import_module(f"relaylm.{name}")


# ----------------------------------------------------------------------------------- commands, and their results


VOLATILE = (
    "seconds",
    "date",
    "commit",
    "per_s",
    "mfu",
    "wall",
    "command",
    "folder",
    "config",
    "spent",
    "store",
    "in_this_run",
)


def plain(value: Any) -> Any:
    """A result without what differs from run to run: times, places, and how much was found in a store."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not any(word in k for word in VOLATILE)}
    if isinstance(value, list):  # that a store was begun anew is said once, and rightly so
        return [plain(item) for item in value if not (isinstance(item, str) and item.startswith("store.sqlite"))]
    return value


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where two results first differ; empty if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((found for key in a if (found := difference(a[key], b[key], f"{at}/{key}"))), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return next((found for k, pair in enumerate(zip(a, b)) if (found := difference(*pair, f"{at}/{k}"))), "")
    return "" if a == b else f"{at}: {str(a)[:200]} is not {str(b)[:200]}"


def tree(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def json_at(path: Path) -> Any:
    return plain(json.loads(path.read_text()))


def trained(place: Path) -> Any:
    manifest = json.loads((place / "out" / "family" / "family.json").read_text())
    steps = [json.loads(path.read_text())["steps"] for path in sorted(place.glob("out/models/*/summary.json"))]
    return manifest["digest"], steps


class Commands:
    """Commands that write, on a family small enough to take a moment. Each works in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "text.txt").write_text("the history of the river and of the people who lived by it " * 60)
        log = place / "log"
        train = ["--depths", "1,2", "--judge", "1", "--twin", "0"]
        sizes = {"steps": 12, "length": 8, "width": 8, "heads": 2, "batch": 4, "checkpoint_every": 3, "eval_rows": 4}
        self.sizes = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
        self.train = [*train, *self.sizes]
        corpus, out, family = (str(place / name) for name in ("corpus", "trained", "trained/family"))
        text = str(place / "text.txt")
        for words in (["prepare", text, corpus, "--tokenizer", "text8"], ["train", corpus, out, *self.train]):
            if run(words, log) != 0:
                raise RuntimeError(f"{words[0]} failed: {log.read_text()[-2000:]}")
        own = ["--family", family, "--seed", "3"]
        self.words: dict[str, tuple[list[str], Callable[[Path], Any]]] = {
            "prepare": (["prepare", text, "WORK/c", "--tokenizer", "bpe:300"], lambda work: tree(work / "c")),
            "train": (["train", corpus, "WORK/out", *self.train], trained),
            "search tune": (
                ["search", "tune", *own, "--rows", "60", "--budget", "20%", "--segments", "2", "--steps", "8"],
                lambda work: json_at(work / "r.json"),
            ),
            "search exhaustive": (
                ["search", "exhaustive", *own, "--light-segments", "1", "--segments", "3", "-n", "8", "--steps", "6"],
                lambda work: json_at(work / "r.json"),
            ),
            "search evolve": (
                ["search", "evolve", *own, "--rows", "40", "--budget", "20%", "--segments", "3", "--steps", "6"],
                lambda work: json_at(work / "r.json"),
            ),
            "compare": (
                ["compare", *own, "-n", "12", "--steps", "6", "--schedules", "light,heavy"],
                lambda work: json_at(work / "r.json"),
            ),
            "compose": (
                ["compose", *own, "-n", "8", "--steps", "2,4", "--rules", "ancestral,low-confidence"],
                lambda work: json_at(work / "r.json"),
            ),
            "convert": (["convert", "--to-mdlm", family, "WORK/m", "--overwrite"], lambda work: tree(work / "m")),
            "sample": (
                ["sample", *own, "-n", "3", "--steps", "4", "--svg", "WORK/a.svg"],
                lambda work: (json_at(work / "r.json"), tree(work).get("a.svg")),
            ),
        }

    def argv(self, kind: str, work: Path) -> list[str]:
        """The command line of a kind, in a folder of its own."""
        words = [word.replace("WORK", str(work)) for word in self.words[kind][0]]
        if kind not in ("prepare", "train", "convert"):
            words += ["--json", str(work / "r.json")]
        if kind.startswith("search") or kind in ("compare", "compose"):
            words += ["--store", str(work / "store")]
        return words

    def result(self, kind: str, work: Path) -> Any:
        """What the command wrote, as values that can be compared."""
        return self.words[kind][1](work)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        yield Path(name)
