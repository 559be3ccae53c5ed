"""What the campaigns share: arguments, resuming, the record under results/campaigns, and quick runs of commands.

A campaign is a list of numbered cases, all drawn from one seed. It keeps what is done in a file beside its record, so a
campaign that was stopped goes on with the same seed; its record has counts, failures, machine, versions, seed, commit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import itertools
import json
import os
import pkgutil
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "campaigns"
JOBS = os.cpu_count() or 1


@dataclasses.dataclass
class Outcome:
    """What came of a case: what is counted, and what went wrong, by name."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[tuple[str, str]] = dataclasses.field(default_factory=list)


CASE: list[Callable[[int], Outcome]] = []  # in a copy of this process, the function that it was made for


def run_case(case: int) -> Outcome:
    return CASE[-1](case)


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
        self.done: set[int] = set(kept.get("done", ()))
        self.counts: Counter[str] = Counter(kept.get("counts", {}))
        self.failures: list[dict[str, Any]] = kept.get("failures", [])
        self.details: dict[str, Any] = kept.get("details", {})
        self.seconds: float = kept.get("seconds", 0.0)
        self.commits: list[Any] = kept.get("commits", [])
        if (commit := how_made()["commit"]) not in self.commits:
            self.commits.append(commit)
        self.began = self.kept = time.monotonic()
        self.stopped = False
        print(f"{name}: seed {self.seed}, {self.size} cases, {len(self.done)} done", flush=True)

    def wanted(self, kinds: list[str]) -> list[str]:
        """The kinds of cases that --only leaves."""
        words = (self.options.only or "").split(",")
        return [kind for kind in kinds if any(word in kind for word in words)]

    def cases(self) -> Iterator[int]:
        """Numbers of the cases that are not done."""
        for case in self._left():
            yield case
            self._end(case)

    def each(self, one: Callable[[int], Outcome], jobs: int, counted: str | None = None) -> None:
        """Run the cases that are not done, in copies of this process: `size` of them, or as many as it takes to count
        so many of something."""
        left = self._left(counted)
        with ProcessPoolExecutor(jobs, get_context("fork"), CASE.append, (one,)) as pool:
            running = {pool.submit(run_case, case): case for case in itertools.islice(left, jobs)}
            while running:
                for ended in wait_for(running, return_when=FIRST_COMPLETED).done:
                    case, outcome = running.pop(ended), ended.result()
                    self.counts += outcome.counts
                    for name, why in outcome.failures:
                        self.fail(name, why)
                    self._end(case)
                    running |= {pool.submit(run_case, case): case for case in itertools.islice(left, 1)}

    def _left(self, counted: str | None = None) -> Iterator[int]:
        for case in itertools.count():
            if (case if counted is None else self.counts[counted]) >= self.size:
                return
            if time.monotonic() - self.began > 60 * self.options.minutes:
                self.stopped = True
                print(f"{self.name}: stopped after {len(self.done)} of {self.size}; run it again to go on", flush=True)
                return
            if case not in self.done:
                yield case

    def _end(self, case: int) -> None:
        self.done.add(case)
        if time.monotonic() - self.kept > 2:
            self._keep()

    def fail(self, case: Any, why: str) -> None:
        """Note a case that went wrong."""
        print(f"{self.name}: case {case} FAILED: {why}", flush=True)
        self.failures.append({"case": case, "why": why[:2000]})

    def finish(self, **more: Any) -> int:
        """Write the record; the exit code says whether all went well."""
        self._keep()
        record = {
            "campaign": self.name,
            "cases": len(self.done),
            "size": self.size,
            "failures": self.failures,
            "counts": dict(sorted(self.counts.items())),
            "seed": self.seed,
            "seconds": round(self.seconds + time.monotonic() - self.began, 1),
            **self.details,
            **more,
            **how_made(),
            **({"commits": self.commits} if len(self.commits) > 1 else {}),  # it was stopped and went on later
        }
        self.path.write_text(json.dumps(record, indent=1) + "\n")
        if not self.stopped:
            self.partial.unlink(missing_ok=True)
        print(f"{self.name}: {len(self.done)} cases, {len(self.failures)} failures, {dict(self.counts)}", flush=True)
        return 1 if self.failures else 0

    def _keep(self) -> None:
        state = {
            "seed": self.seed,
            "done": sorted(self.done),
            "commits": self.commits,
            "counts": self.counts,
            "failures": self.failures,
            "details": self.details,
            "seconds": self.seconds + time.monotonic() - self.began,
        }
        new = self.partial.with_suffix(".tmp")
        new.write_text(json.dumps(state))
        os.replace(new, self.partial)
        self.kept = time.monotonic()


def how_made() -> dict[str, Any]:
    """The provenance of a record."""
    import torch

    from relaylm.measure import provenance

    return provenance.how_made(torch.device("cpu"))


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
    """Import the whole package, so that copies of this process start at once, and none of them reads code that was
    edited since."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    import relaylm

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(relaylm.__path__, "relaylm."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # a package that is not installed
                importlib.import_module(module.name)
    gc.freeze()  # collecting garbage in a copy would copy all of this


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

        quick = [word for key in ("steps=4", "batch=4", "checkpoint_every=2", "eval_rows=4") for word in ("--set", key)]

        def json_in(work: Path) -> Any:
            return json_at(work / "r.json")

        def search(words: str) -> tuple[list[str], Callable[[Path], Any]]:
            return ["search", *words.split(), *own], json_in

        self.words: dict[str, tuple[list[str], Callable[[Path], Any]]] = {
            "prepare": (["prepare", text, "WORK/c", "--tokenizer", "bpe:300"], lambda work: tree(work / "c")),
            "train": (["train", corpus, "WORK/out", *self.train], trained),
            "lighten": (
                ["lighten", family, "--blocks", "1", "--corpus", corpus, "--out", "WORK/out", "--rows", "2", *quick],
                trained,
            ),
            "search tune": search("tune --budget 20% --rows 44 --densities 1 --segments 2 --steps 4"),
            "search exhaustive": search(
                "exhaustive --light-segments 1 --segments 2 -n 4 --confirm 4 --steps 3",
            ),
            "search evolve": search("evolve --budget 20% -n 4 --confirm 4 --segments 2 --steps 3"),
            "compare": (["compare", *own, "-n", "12", "--steps", "6", "--schedules", "light,heavy"], json_in),
            "compose": (
                ["compose", *own, *["-n", "4", "--steps", "3", "--rules", "ancestral,low-confidence"]],
                json_in,
            ),
            "pairs": (
                ["pairs", "--family", "WORK/family", "--text", text, "--keep"],
                lambda work: tree(work / "family"),
            ),
            "convert": (["convert", "--to-mdlm", family, "WORK/m", "--overwrite"], lambda work: tree(work / "m")),
            "sample": (
                ["sample", *own, "-n", "3", "--steps", "4", "--svg", "WORK/a.svg"],
                lambda work: (json_at(work / "r.json"), tree(work).get("a.svg")),
            ),
        }

    def folder(self) -> Path:
        """An empty folder for this process alone; what a command prints goes beside it, under the suffix .log."""
        work = self.place / f"work-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        return work

    def said(self, work: Path) -> str:
        """The end of what the last command printed."""
        return work.with_suffix(".log").read_text(errors="replace")[-800:]

    def argv(self, kind: str, work: Path) -> list[str]:
        """The command line of a kind, in a folder of its own."""
        if kind == "pairs" and not (work / "family").exists():  # it changes a family
            shutil.copytree(self.place / "trained" / "family", work / "family")
        words = [word.replace("WORK", str(work)) for word in self.words[kind][0]]
        if kind not in ("prepare", "train", "lighten", "convert", "pairs"):
            words += ["--json", str(work / "r.json")]
        if kind.startswith("search") or kind in ("compare", "compose"):
            words += ["--store", str(work / "store")]
        return words

    def result(self, kind: str, work: Path) -> Any:
        """What the command wrote, as values that can be compared."""
        return self.words[kind][1](work)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder that is removed at the end: in memory, where there is room, since no power is cut here."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**30
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory if roomy else None) as name:
        yield Path(name)
