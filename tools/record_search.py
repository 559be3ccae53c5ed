"""Does the tuner find what exhaustive search finds, and does any of it beat one model alone? Measured and recorded.

    python tools/record_search.py FAMILY OUT [--device cuda]

Two questions, each answered on rows that no search has seen (another seed):

    two    light and heavy model, four light segments of ten: all 210 schedules on 160 rows, the best 20 again on 400;
           then the tuner with five seeds, each with a tenth of the calls that the 210 would take one by one. Its
           schedules stand beside the winner and the worst of the 210.
    all    every model of the family, step density too, at three savings: what the tuner recommends beside the sandwich,
           each model alone in as many steps as the budget allows, and the best schedule of each kind that raced.

OUT/search.json has all of it, with the searches themselves in OUT/searches; samples go through OUT/store, so that the
same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import metrics
from relaylm.checkpoint import write_json
from relaylm.comparison import compare
from relaylm.family import Family
from relaylm.provenance import how_made
from relaylm.schedule_search import search
from relaylm.store import Store

FRESH_SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", choices=("two", "all"), help="one of the questions")
    parser.add_argument("--n", type=int, default=160, help="rows for each of the 210")
    parser.add_argument("--confirm", type=int, default=400, help="rows for the best 20 of them")
    parser.add_argument("--rows", type=int, default=3300, help="the tuner's calls, in samples")
    parser.add_argument("--fresh", type=int, default=1600, help="rows of the comparisons")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--length", type=int, help="positions in a row (default: the family's)")
    options = parser.parse_args()
    family = Family.load(options.family, device=options.device)
    file = options.out / "search.json"
    kept = json.loads(file.read_text()) if file.is_file() else {}
    for name, question in (("two", two_models), ("all", all_models)):
        if options.only in (None, name):
            kept[name] = question(family, options)
            about = {"family": {"name": family.name, "digest": family.digest}, "seed": 0, "fresh_seed": FRESH_SEED}
            write_json(file, {**about, **how_made(family.device), **{k: kept[k] for k in ("two", "all") if k in kept}})


def found_by(family: Family, options: argparse.Namespace, label: str, method: str, **question: Any) -> dict[str, Any]:
    """A search, through the store; all of what it says goes to a file."""
    folder = options.out / "store" / label
    result = search(family, method, length=options.length, store=Store(folder), progress=True, **question)
    write_json(options.out / "searches" / f"{label}.json", {**result, **how_made(family.device)})
    print(f"{label}: {result['verdict']}", flush=True)
    return result


def log_ppls(family: Family, options: argparse.Namespace, schedules: list[str]) -> dict[str, np.ndarray]:
    """Log-perplexity of each fresh row under each schedule, paired."""
    unique = list(dict.fromkeys(schedules))
    result = compare(
        family, unique, options.fresh, length=options.length, seed=FRESH_SEED, rivals=False,
        store=Store(options.out / "store" / "fresh"),
    )  # fmt: skip
    values = [np.array([math.nan if v is None else v for v in row["log_ppls"]]) for row in result["rows"]]
    return dict(zip(unique, values[: len(unique)], strict=True))


def against(log_n: np.ndarray, other_n: np.ndarray) -> dict[str, Any]:
    d = (log_n - other_n)[np.isfinite(log_n - other_n)]
    mean, low, high = (float(v) for v in metrics.mean_interval(d))
    return {"difference": mean, "ci": [low, high], "rows": len(d)}


def two_models(family: Family, options: argparse.Namespace) -> dict[str, Any]:
    light, heavy = family.roles()
    question: dict[str, Any] = {"light_segments": 4, "models": [light, heavy], "seed": 0}
    whole = found_by(family, options, "all-210", "exhaustive", n=options.n, confirm=options.confirm, **question)
    tuned = []
    for seed in range(options.seeds):
        mine = {**question, "seed": seed, "densities": [1], "rows": options.rows}
        tuned.append(found_by(family, options, f"tune-{seed}", "tune", **mine))
    best, worst = whole["schedule"], whole["schedules"][-1]["schedule"]
    logs = log_ppls(family, options, [best, worst, *(t["schedule"] for t in tuned)])
    spread = against(logs[worst], logs[best])
    calls = whole["search_calls"]
    rows = []
    for seed, result in enumerate(tuned):
        log_n = logs[result["schedule"]]
        beside = against(log_n, logs[best])
        recovered = 1 - beside["difference"] / spread["difference"]
        rows.append(
            {
                "seed": seed,
                "schedule": result["schedule"],
                "saved": result["recommendation"]["saved"],
                "calls_of_naive_search": result["calls"]["calls_made"] / calls["calls_naive"],
                "against_winner": beside,
                "non_inferior": beside["ci"][1] <= 0.01,
                "recovered_of_spread": recovered,
                "mean_ppl": float(np.nanmean(np.exp(log_n))),
            }
        )
    return {
        "light": light,
        "heavy": heavy,
        "winner": {"schedule": best, **whole["recommendation"], "mean_ppl": float(np.nanmean(np.exp(logs[best])))},
        "worst": {"schedule": worst, "mean_ppl": float(np.nanmean(np.exp(logs[worst])))},
        "worst_against_winner": spread,
        "calls": calls,
        "tree_check": whole["tree_check"],
        "top": whole["top"],
        "bottom": whole["bottom"],
        "influence": whole["influence"],
        "influence_ci": whole["influence_ci"],
        "tune": rows,
    }


def all_models(family: Family, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for saved in (1 / 6, 1 / 3, 1 / 2):
        label = f"tune-all-{saved:.0%}".replace("%", "")
        result = found_by(family, options, label, "tune", budget=saved, rows=2 * options.rows, seed=0)
        contenders = {row["schedule"]: row for row in result["tuned"]["stages"]["race"]["contenders"]}
        chosen = result["schedule"]
        named = {chosen: {"what": "recommended", **result["recommendation"]}}
        named |= {s: row for s, row in contenders.items() if row["kind"] == "rival" and s != chosen}
        mixed = [row for row in result["confirmed"] if row["kind"] == "mixed" and row["schedule"] not in named]
        named |= {row["schedule"]: row for row in mixed}
        heavy = f"{family.heavy}:{result['steps']}"
        logs = log_ppls(family, options, [heavy, *named])
        rows = [
            {
                "schedule": schedule,
                "what": contenders.get(schedule, about)["what"],
                "kind": about["kind"],
                "saved": about["saved"],
                "recommended": schedule == chosen,
                "mean_ppl": float(np.nanmean(np.exp(logs[schedule]))),
                "against_heavy": against(logs[schedule], logs[heavy]),
                "against_recommended": against(logs[schedule], logs[chosen]),
            }
            for schedule, about in named.items()
        ]
        rows.sort(key=lambda row: row["against_heavy"]["difference"])
        found.append({"saved": saved, "verdict": result["verdict"], "calls": result["calls"], "rows": rows})
    return found


if __name__ == "__main__":
    main()
