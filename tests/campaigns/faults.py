"""Faults: in every command that writes, each change on disk in turn (write, fsync, rename, mkdir, creation of a file)
fails once with a full disk, fails from then on, or is torn in half as the process ends. The command must end with its
result or with one sentence, and run again it must give the result that nobody disturbed. The calls are counted in the
C library, so those of SQLite and safetensors are among them. Needs a C compiler and Linux.
Example: python tests/campaigns/faults.py --jobs 2 (every change; --size N takes N of them at random)"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.campaigns.common import JOBS, Campaign, Commands, Outcome, difference, run, warm_up, workplace

MODES = ("once", "from then on", "torn")
TORN = 9  # the exit status of a process that ended in the middle of a write


def preloaded(argv: list[str]) -> None:
    """Build the library and start this program again with it."""
    if "FAULTS" in os.environ:
        return
    library = Path(tempfile.mkdtemp(prefix="faults-")) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "FAULTS": str(library), "LD_PRELOAD": str(library)}
    try:
        sys.exit(subprocess.run([sys.executable, __file__, *argv], env=environment).returncode)
    finally:
        shutil.rmtree(library.parent)


class Faults:
    """The commands, each with its undisturbed result and how many changes on disk it makes."""

    def __init__(self, campaign: Campaign, place: Path) -> None:
        self.library, self.place = ctypes.CDLL(os.environ["FAULTS"]), place
        self.library.faults_seen.restype = ctypes.c_long
        self.commands, self.reference, self.changes = Commands(place), {}, {}
        for kind in campaign.wanted(list(self.commands.words)):
            work = self.commands.folder()
            if (code := self.run(kind, work, -1, 0)) != 0:
                raise RuntimeError(f"{kind} ended with {code}: {self.commands.said(work)}")
            self.reference[kind], self.changes[kind] = self.commands.result(kind, work), self.library.faults_seen()
        self.plan = [
            (kind, number, mode)
            for kind, changes in self.changes.items()
            for mode in range(len(MODES))
            for number in range(changes)
        ]
        random.Random(campaign.seed).shuffle(self.plan)

    def run(self, kind: str, work: Path, number: int, mode: int) -> int | None:
        """Run a command whose number-th change on disk goes wrong (none, if that is negative)."""

        def arm() -> None:
            self.library.faults_arm(ctypes.c_long(number), mode, os.fsencode(work))

        self.library.faults_ready()
        return run(self.commands.argv(kind, work), work.with_suffix(".log"), arm)

    def one(self, case: int) -> Outcome:
        """One fault, and the same command again."""
        kind, number, mode = self.plan[case]
        outcome, work, name = Outcome(), self.commands.folder(), f"{kind}, change {number}, {MODES[mode]}"
        code = self.run(kind, work, number, mode)
        outcome.counts[f"{kind}, {MODES[mode]}: ended with {code}"] += 1
        if self.library.faults_seen() <= number:
            outcome.failures.append((name, f"only {self.library.faults_seen()} changes were made"))
        elif code not in (0, 2, TORN) or "Traceback" in self.commands.said(work):
            outcome.failures.append((name, f"ended with {code}: {self.commands.said(work)}"))
        elif (again := self.run(kind, work, -1, 0)) != 0:
            outcome.failures.append((name, f"run again it ended with {again}: {self.commands.said(work)}"))
        elif found := difference(self.commands.result(kind, work), self.reference[kind]):
            outcome.failures.append((name, f"run again, another result: {found}"))
        return outcome


def main(argv: list[str]) -> int:
    if shutil.which("cc") is None:
        print("faults: skipped, there is no C compiler (cc)")
        return 0
    preloaded(argv)
    campaign = Campaign("faults", __doc__ or "", 1_000_000, argv, jobs=JOBS)
    warm_up()
    with workplace() as place:
        faults = Faults(campaign, place)
        campaign.details |= {"changes on disk": faults.changes, "faults possible": len(faults.plan)}
        campaign.size = min(campaign.size, len(faults.plan))
        campaign.each(faults.one, campaign.options.jobs)
        return campaign.finish(jobs=campaign.options.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
