"""Does the tuner find what exhaustive search finds, and does any of it beat one model alone?

    python -m relaylm.studies.record.search FAMILY OUT [--device cuda]

Two questions, each answered on rows that no search has seen (another seed):

    two    light and heavy model, four light segments of ten: all 210 schedules on N rows (160), the best 20 again on
           5N/2; then the tuner with five seeds, each with a tenth of the calls that the 210 would take one by one. Its
           schedules stand beside the winner and the worst of the 210.
    all    every model of the family, step density too, at three savings: what the tuner recommends beside the sandwich,
           each model alone in as many steps as the budget allows, and the best schedule of each kind that raced.

OUT/search.json has all of it, with the searches themselves in OUT/searches and figures beside them. Samples go through
OUT/store, so that the same command resumes. With `--draw` only the figures are made, from what is there.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.files import read_json, read_object, write_json
from relaylm.measure.compare import compare
from relaylm.measure.provenance import how_made
from relaylm.measure.store import Store
from relaylm.models.family import Family
from relaylm.search.search import search
from relaylm.show.figures import finish, nth, panels, reach, save_figure
from relaylm.show.search import plot_search
from relaylm.studies.paper.contrasts import numbers, paired
from relaylm.studies.record.common import command, keep

FRESH_SEED = 1000


def main() -> None:
    """The command."""
    options = command(
        __doc__,
        "family out",
        device="auto",
        only={"choices": ("two", "all"), "help": "one of the questions"},
        seeds=5,
        steps=(int, "T (default: as many as positions)"),
        n=(160, "rows of each of the 210; the tuner's calls follow from it"),
        fresh=(1600, "rows of the comparisons"),
        draw=(False, "only the figures, from what is there"),
    )
    file = options.out / "search.json"
    if not options.draw:
        family = Family.load(options.family, device=options.device)
        options.steps = options.steps or family.length
        record = {"fresh_seed": FRESH_SEED, "steps": options.steps, "n": options.n, "fresh": options.fresh}
        known = read_json(file) or {}
        record |= {name: known[name] for name in ("two", "all") if name in known}
        for name, question in (("two", two_models), ("all", all_models)):
            if options.only in (None, name):
                record[name] = question(family, options)
                keep(file, family, record)
    draw(options.out)


def found_by(family: Family, options: Namespace, label: str, method: str, **question: Any) -> dict[str, Any]:
    """A search, through the store; all of its result goes to a file."""
    store = Store(options.out / "store" / label)
    result = search(family, method, steps=options.steps, store=store, progress=True, **question)
    write_json(options.out / "searches" / f"{label}.json", {**result, **how_made(family.device)})
    print(f"{label}: {result['verdict']}", flush=True)
    return result


def log_ppls(family: Family, options: Namespace, schedules: list[str]) -> dict[str, np.ndarray]:
    """Log-perplexity of each fresh row under each schedule, paired."""
    unique, store = list(dict.fromkeys(schedules)), Store(options.out / "store" / "fresh")
    # With steps None each schedule takes its own number, and the first gives that of the anchors.
    result = compare(family, unique, options.fresh, seed=FRESH_SEED, rivals=False, store=store, progress=True)
    return {name: numbers(row["log_ppls"]) for name, row in zip(unique, result["rows"], strict=False)}


def mean_ppl(log_n: np.ndarray) -> float:
    """Mean perplexity over rows that have one."""
    return float(np.nanmean(np.exp(log_n)))


def _rows(options: Namespace) -> int:
    """The calls of the tuner, in samples: just under a tenth of 210 schedules."""
    return 20 * options.n + 5 * options.n // 8


def two_models(family: Family, options: Namespace) -> dict[str, Any]:
    """The first question."""
    light, heavy = family.roles()
    question: dict[str, Any] = {"light_segments": 4, "models": [light, heavy]}
    whole = found_by(family, options, "all-210", "exhaustive", n=options.n, confirm=5 * options.n // 2, **question)
    question |= {"densities": [1], "rows": _rows(options)}
    tuned = [found_by(family, options, f"tune-{k}", "tune", seed=k, **question) for k in range(options.seeds)]
    best, worst = whole["schedule"], whole["schedules"][-1]["schedule"]
    logs = log_ppls(family, options, [best, worst, *(result["schedule"] for result in tuned)])
    spread = paired(logs[worst] - logs[best])
    rows = []
    for seed, result in enumerate(tuned):
        log_n = logs[result["schedule"]]
        beside = paired(log_n - logs[best])
        rows.append(
            {
                "seed": seed,
                "schedule": result["schedule"],
                "saved": result["recommendation"]["saved"],
                "calls_of_naive_search": result["calls"]["calls_made"] / whole["search_calls"]["calls_naive"],
                "against_winner": beside,
                "non_inferior": beside["ci"][1] <= 0.01,
                "recovered_of_spread": 1 - beside["difference"] / spread["difference"],
                "mean_ppl": mean_ppl(log_n),
            }
        )
    return {
        "light": light,
        "heavy": heavy,
        "winner": {"schedule": best, **whole["recommendation"], "mean_ppl": mean_ppl(logs[best])},
        "worst": {"schedule": worst, "mean_ppl": mean_ppl(logs[worst])},
        "worst_against_winner": spread,
        "calls": whole["search_calls"],
        **{key: whole[key] for key in ("tree_check", "top", "bottom", "influence", "influence_ci")},
        "tune": rows,
    }


def all_models(family: Family, options: Namespace) -> list[dict[str, Any]]:
    """The second question."""
    found = []
    for saved in (1 / 6, 1 / 3, 1 / 2):
        label = f"tune-all-{100 * saved:.0f}"
        result = found_by(family, options, label, "tune", budget=saved, rows=2 * _rows(options))
        contenders = {row["schedule"]: row for row in result["tuned"]["stages"]["race"]["contenders"]}
        chosen, heavy = result["schedule"], f"{family.heavy}:{result['steps']}"
        named = {chosen: {"what": "recommended", **result["recommendation"]}}
        named |= {s: row for s, row in contenders.items() if row["kind"] == "rival" and s != chosen}
        mixed = (row for row in result["confirmed"] if row["kind"] == "mixed" and row["schedule"] not in named)
        named |= {row["schedule"]: row for row in mixed}
        logs = log_ppls(family, options, [heavy, *named])
        sandwich = next(schedule for schedule in named if contenders.get(schedule, {}).get("what") == "sandwich")
        beside = {"heavy": heavy, "recommended": chosen, "sandwich": sandwich}
        rows = [
            {
                "schedule": schedule,
                "what": contenders.get(schedule, about)["what"],
                "kind": about["kind"],
                "saved": about["saved"],
                "recommended": schedule == chosen,
                "mean_ppl": mean_ppl(logs[schedule]),
                **{f"against_{name}": paired(logs[schedule] - logs[other]) for name, other in beside.items()},
            }
            for schedule, about in named.items()
        ]
        rows.sort(key=lambda row: row["against_heavy"]["difference"])
        found.append({"saved": saved, "verdict": result["verdict"], "calls": result["calls"], "rows": rows})
    return found


def draw(out: Path) -> None:
    """What the tuner and its rivals lose against all-heavy, a panel for each saving; and the 210."""
    if whole := read_json(out / "searches" / "all-210.json"):
        plot_search(whole, out / "all-210.png")
    budgets = read_object(out / "search.json").get("all", [])
    if not budgets:
        return
    height = 0.9 + 0.33 * max(len(budget["rows"]) for budget in budgets)
    figure, columns = panels(4.6 * len(budgets), height, len(budgets))
    ends = [100 * end for budget in budgets for row in budget["rows"] for end in row["against_heavy"]["ci"]]
    looks = {kind: nth(k) for k, kind in enumerate(("mixed", "rival", "sandwich"))}
    for axes, budget in zip(columns, budgets, strict=True):
        for k, row in enumerate(budget["rows"]):
            value, ci = 100 * row["against_heavy"]["difference"], 100 * np.array(row["against_heavy"]["ci"])
            look = looks["sandwich" if row["what"] == "sandwich" else row["kind"]]
            axes.errorbar(value, k, xerr=reach(value, ci), capsize=3, **look)
            label = f"{'mixed: ' if row['kind'] == 'mixed' else ''}{row['what']}{' *' if row['recommended'] else ''}"
            where: dict[str, Any] = {"xytext": (4, -3), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(f"{label}, {row['saved']:.0%} saved", (ci[1], k), **where)
        axes.set_yticks([])
        axes.set_ylim(len(budget["rows"]) - 0.5, -0.5)
        axes.set_xlim(min(0.0, *ends) - 0.5, 1.9 * max(ends))  # the labels stand on the right
        axes.set_title(f"at least {budget['saved']:.0%} saved (* recommended)", fontsize=9)
        finish(axes, "extra log-perplexity, hundredths", grid="x", legend=False)
    save_figure(figure, out / "budgets.png")


if __name__ == "__main__":
    main()
