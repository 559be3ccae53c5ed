"""Faults: in every command that writes, each change on disk in turn (write, fsync, rename, mkdir, creation of a file)
fails once with a full disk, fails from then on, or is torn in half as the process ends. The command must end with its
result or with one sentence, and run again it must give the result that nobody disturbed. The calls are counted in the
C library, so those of SQLite and safetensors are among them. Needs a C compiler and Linux.
Example: python tests/campaigns/faults.py --size 100000 (every change; --size N takes N of them, evenly spread)"""

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
from tests.campaigns.common import Campaign, Commands, difference, run, warm_up, workplace

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


def main(argv: list[str]) -> int:
    preloaded(argv)
    campaign = Campaign("faults", __doc__ or "", 300, argv)
    library = ctypes.CDLL(os.environ["FAULTS"])
    library.faults_seen.restype = ctypes.c_long

    def arm(number: int, mode: int, folder: Path) -> None:
        library.faults_arm(ctypes.c_long(number), mode, os.fsencode(folder))

    warm_up()
    with workplace() as place:
        commands, work, log = Commands(place), place / "work", place / "log"
        reference, plan = {}, []
        for kind in campaign.wanted(list(commands.words)):
            work.mkdir()
            counter = place / "count"
            if (code := counted(commands.argv(kind, work), log, counter, arm, library, work)) != 0:
                raise RuntimeError(f"{kind} ended with {code}: {log.read_text()[-2000:]}")
            reference[kind] = commands.result(kind, work)
            changes = int(counter.read_text())
            campaign.details.setdefault("changes on disk", {})[kind] = changes
            plan += [(kind, number, mode) for mode in range(len(MODES)) for number in range(changes)]
            shutil.rmtree(work)
        rng = random.Random(campaign.seed)
        rng.shuffle(plan)
        campaign.details["faults possible"] = len(plan)
        campaign.size = min(campaign.size, len(plan))
        for case in campaign.cases():
            kind, number, mode = plan[case]
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            words = commands.argv(kind, work)
            code = run(words, log, lambda number=number, mode=mode: arm(number, mode, work))
            said = log.read_text(errors="replace")
            campaign.counts[f"{kind}, {MODES[mode]}: ended with {code}"] += 1
            name = f"{kind}, change {number}, {MODES[mode]}"
            if code not in (0, 2, TORN) or "Traceback" in said:
                campaign.fail(name, f"ended with {code}: {said[-800:]}")
                continue
            if (again := run(words, log)) != 0:
                campaign.fail(name, f"run again it ended with {again}: {log.read_text()[-800:]}")
            elif found := difference(commands.result(kind, work), reference[kind]):
                campaign.fail(name, f"run again, another result: {found}")
        return campaign.finish()


def counted(words: list[str], log: Path, counter: Path, arm: object, library: ctypes.CDLL, work: Path) -> int | None:
    """Run a command undisturbed in a copy of this process, which writes down how many changes it made."""
    from relaylm.cli import main as cli

    command = cli.main

    def main_and_count(argv: list[str]) -> int:
        arm(-1, 0, work)  # type: ignore[operator]
        code = command(argv)
        counter.write_text(str(library.faults_seen()))
        return code

    cli.main = main_and_count  # type: ignore[assignment]
    try:
        return run(words, log)
    finally:
        cli.main = command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
