"""Kills: commands that write are ended by SIGKILL at random moments, once or several times, and run again to their end:
every result must be that of a run that nobody disturbed. Example: python tests/campaigns/kills.py --size 1000"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.campaigns.common import Campaign, Commands, difference, forked, run, wait, warm_up, workplace


def main(argv: list[str] | None = None) -> int:
    campaign = Campaign("kills", __doc__ or "", 200, argv)
    warm_up()
    with workplace() as place:
        commands = Commands(place)
        reference, seconds = {}, {}
        kinds = campaign.wanted(list(commands.words))
        for kind in kinds:
            work = place / f"whole {kind}"
            work.mkdir()
            began = time.monotonic()
            if (code := run(commands.argv(kind, work), place / "log")) != 0:
                raise RuntimeError(f"{kind} ended with {code}: {(place / 'log').read_text()[-2000:]}")
            seconds[kind], reference[kind] = time.monotonic() - began, commands.result(kind, work)
        campaign.details["kinds"] = kinds
        for case in campaign.cases("kills"):  # a case has none, one or several
            one(campaign, commands, kinds, reference, seconds, place, case)
        return campaign.finish()


def one(
    campaign: Campaign,
    commands: Commands,
    kinds: list[str],
    reference: dict[str, object],
    seconds: dict[str, float],
    place: Path,
    case: int,
) -> None:
    rng = random.Random(f"{campaign.seed} {case}")
    kind = rng.choice(kinds)
    work = place / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    words = commands.argv(kind, work)
    for _ in range(rng.randint(1, 3)):
        child = forked(words, place / "log")
        if wait(child, rng.uniform(0, 1.1 * seconds[kind])) is not None:
            continue  # it was faster
        os.killpg(child, signal.SIGKILL) if os.getpgid(child) == child else os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        campaign.counts["kills"] += 1
        campaign.counts[f"kills of {kind}"] += 1
    code = run(words, place / "log")
    if code != 0:
        campaign.fail(case, f"{kind}, run again, ended with {code}: {(place / 'log').read_text()[-800:]}")
        return
    if found := difference(commands.result(kind, work), reference[kind]):
        campaign.fail(case, f"{kind}: the result is not that of a run that nobody disturbed: {found}")
    left = [str(path.relative_to(work)) for path in work.rglob(".*") if path.name != ".relaylm.json"]
    campaign.counts["leftovers"] += len(left)


if __name__ == "__main__":
    sys.exit(main())
