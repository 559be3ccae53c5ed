"""Does the tuner find what exhaustive search finds, and does any of it beat one model alone? Measured and recorded.

    python tools/record_search.py FAMILY OUT [--device cuda]

Two questions, each answered on rows that no search has seen (another seed):

    two    light and heavy model, four light segments of ten: all 210 schedules on 160 rows, the best 20 again on 400;
           then the tuner with five seeds, each with a tenth of the calls that the 210 would take one by one. Its
           schedules stand beside the winner and the worst of the 210.
    all    every model of the family, step density too, at three savings: what the tuner recommends beside the sandwich,
           each model alone in as many steps as the budget allows, and the best schedule of each kind that raced.

OUT/search.json has all of it, with the searches themselves in OUT/searches and figures beside them; samples go through
OUT/store, so that the same command goes on where it was stopped. With `--draw` the figures alone are made again.
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
from relaylm.report import COLOURS, MARKERS, _figure, _save
from relaylm.schedule_search import search
from relaylm.search_report import plot_search
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
    parser.add_argument("--draw", action="store_true", help="only the figures, from what is there")
    options = parser.parse_args()
    file = options.out / "search.json"
    if options.draw:
        draw(options.out)
        return
    family = Family.load(options.family, device=options.device)
    kept = json.loads(file.read_text()) if file.is_file() else {}
    for name, question in (("two", two_models), ("all", all_models)):
        if options.only in (None, name):
            kept[name] = question(family, options)
            about = {"family": {"name": family.name, "digest": family.digest}, "seed": 0, "fresh_seed": FRESH_SEED}
            write_json(file, {**about, **how_made(family.device), **{k: kept[k] for k in ("two", "all") if k in kept}})
    draw(options.out)


def draw(out: Path) -> None:
    """What the tuner and its rivals lose against all-heavy, a panel for each saving; and the 210."""
    if (whole := out / "searches" / "all-210.json").is_file():
        plot_search(json.loads(whole.read_text()), out / "all-210.png")
    budgets = json.loads((out / "search.json").read_text()).get("all", [])
    if not budgets:
        return
    figure = _figure(4.6 * len(budgets), 0.9 + 0.33 * max(len(budget["rows"]) for budget in budgets))
    ends = [100 * end for budget in budgets for row in budget["rows"] for end in row["against_heavy"]["ci"]]
    looks = {"rival": (COLOURS[1], MARKERS[1]), "mixed": (COLOURS[0], MARKERS[0])}
    for axes, budget in zip(figure.subplots(1, len(budgets), squeeze=False)[0], budgets, strict=True):
        for k, row in enumerate(budget["rows"]):
            value, (low, high) = 100 * row["against_heavy"]["difference"], row["against_heavy"]["ci"]
            colour, marker = looks[row["kind"]] if row["what"] != "sandwich" else (COLOURS[2], MARKERS[2])
            reach = [[value - 100 * low], [100 * high - value]]
            axes.errorbar(value, k, xerr=reach, color=colour, marker=marker, capsize=3)
            label = f"{'mixed: ' if row['kind'] == 'mixed' else ''}{row['what']}{' *' if row['recommended'] else ''}"
            axes.annotate(
                f"{label}, {row['saved']:.0%} saved", (100 * high, k), (4, -3), textcoords="offset points", fontsize=7
            )
        axes.set_yticks([])
        axes.set_ylim(len(budget["rows"]) - 0.5, -0.5)
        axes.set_xlim(min(0.0, *ends) - 0.5, 1.9 * max(ends))  # room for the labels on the right
        axes.set_xlabel("extra log-perplexity, hundredths")
        axes.set_title(f"at least {budget['saved']:.0%} saved (* recommended)", fontsize=9)
        axes.grid(axis="x", alpha=0.25)
    _save(figure, out / "budgets.png")


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
        sandwich = next(schedule for schedule in named if contenders.get(schedule, {}).get("what") == "sandwich")
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
                "against_sandwich": against(logs[schedule], logs[sandwich]),
            }
            for schedule, about in named.items()
        ]
        rows.sort(key=lambda row: row["against_heavy"]["difference"])
        found.append({"saved": saved, "verdict": result["verdict"], "calls": result["calls"], "rows": rows})
    return found


if __name__ == "__main__":
    main()
