"""Do two judges rank the hand-made schedules alike? The family's own, and one that was trained by others.

    python tools/record_judges.py FAMILY JUDGE OUT.json [--n 400] [--store FOLDER]

JUDGE is hf:NAME or gguf:PATH. Samples in the store are taken from whatever device drew them. Recorded: each schedule's
log-perplexity under both judges, Kendall's tau of the two orders with its interval, the pairs of schedules on which
they say different things, and how far they agree row by row.
"""

from __future__ import annotations

import argparse
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import metrics, paper
from relaylm.checkpoint import write_json
from relaylm.comparison import compare
from relaylm.family import Family
from relaylm.provenance import how_made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("judge")
    parser.add_argument("out", type=Path)
    parser.add_argument("--n", type=int, default=400)
    parser.add_argument("--length", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    family = Family.load(options.family)
    schedules = [*paper.SCHEDULES, *(extra for extra in ("heavy", "light") if extra not in paper.SCHEDULES)]
    shared: dict[str, Any] = {"n": options.n, "length": options.length, "rivals": False, "any_device": True}
    tables = {
        name: compare(family, schedules, judge=judge, store=options.store, **shared)
        for name, judge in (("own", None), ("other", options.judge))
    }
    seven = [k for k, name in enumerate(schedules) if name in paper.SCHEDULES]
    log = {name: np.array([_numbers(row["log_ppls"]) for row in table["rows"]]) for name, table in tables.items()}
    finite_n = np.isfinite(log["own"]).all(axis=0) & np.isfinite(log["other"]).all(axis=0)
    own_Sn, other_Sn = log["own"][:, finite_n], log["other"][:, finite_n]
    tau = metrics.kendall_tau(own_Sn[seven], other_Sn[seven])
    pairs = []
    for i, j in combinations(range(len(schedules)), 2):
        difference = {"first": schedules[i], "second": schedules[j]}
        for name, log_Sn in (("own", own_Sn), ("other", other_Sn)):
            mean, low, high = (float(v) for v in metrics.mean_interval(log_Sn[i] - log_Sn[j]))
            difference |= {name: mean, f"{name}_ci": [low, high]}
        pairs.append(difference)
    centred = [log_Sn - log_Sn.mean(axis=0) for log_Sn in (own_Sn, other_Sn)]
    result = {
        "what": "the seven hand-made schedules, all-heavy and all-light under two judges: mean log-perplexity of the "
        "same samples",
        "family": {"name": family.name, "digest": family.digest},
        "seed": 0,
        "n": options.n,
        "rows_scored_by_both": int(finite_n.sum()),
        "judges": {name: table["judge"] for name, table in tables.items()},
        **how_made(family.device),
        "schedules": [
            {
                "schedule": name,
                "own": {"log_ppl": float(own_Sn[k].mean()), "ppl": tables["own"]["rows"][k]["gen_ppl"]},
                "other": {"log_ppl": float(other_Sn[k].mean()), "ppl": tables["other"]["rows"][k]["gen_ppl"]},
                "entropy": tables["own"]["rows"][k]["entropy"],
            }
            for k, name in enumerate(schedules)
        ],
        "kendall_tau": {"value": tau.value, "ci": tau.ci, "of": "the seven hand-made schedules"},
        "correlation_of_rows": float(np.corrcoef(own_Sn.ravel(), other_Sn.ravel())[0, 1]),
        "correlation_of_rows_between_schedules": float(np.corrcoef(centred[0].ravel(), centred[1].ravel())[0, 1]),
        "pairs": pairs,
        "differ": [pair for pair in pairs if _apart(pair["own_ci"]) * _apart(pair["other_ci"]) < 0],
        "only_one_tells_apart": [
            pair for pair in pairs if (_apart(pair["own_ci"]) == 0) != (_apart(pair["other_ci"]) == 0)
        ],
    }
    write_json(options.out, result)
    print(f"Kendall's tau {tau.value:.2f} ({tau.ci[0]:.2f} to {tau.ci[1]:.2f})")


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _apart(ci: list[float]) -> int:
    """-1, 0 or 1: below, around or above zero."""
    return 1 if ci[0] > 0 else -1 if ci[1] < 0 else 0


if __name__ == "__main__":
    main()
