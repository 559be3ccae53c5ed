"""Do two judges rank the hand-made schedules alike? The family's own, and one that was trained by others.

    python -m relaylm.studies.record.judges FAMILY JUDGE OUT.json [--store FOLDER]

JUDGE is hf:NAME or gguf:PATH. Samples in the store may come from any device. Recorded: each schedule's log-perplexity
under both judges, Kendall's tau of the two orders with its interval, the pairs of schedules on which they say different
things, and how far they agree row by row.

Shapes: S schedules, n rows that both judges could score.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from relaylm.measure import metrics
from relaylm.measure.compare import compare
from relaylm.models.family import Family
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import numbers, sign
from relaylm.studies.record.common import command, keep

ROWS = 400  # of each schedule


def main() -> None:
    """The command."""
    options = command(__doc__, "family judge out", store=str)
    family = Family.load(options.family)
    tables = {
        name: compare(family, paper.SCHEDULES, ROWS, judge=judge, store=options.store, rivals=False, any_device=True)
        for name, judge in (("own", None), ("other", options.judge))
    }
    result = agreement(tables)
    what = "the seven hand-made schedules under two judges: mean log-perplexity of the same samples"
    keep(options.out, family, {"what": what, "n": ROWS, **result})
    tau = result["kendall_tau"]
    print(f"Kendall's tau {tau['value']:.2f} ({tau['ci'][0]:.2f} to {tau['ci'][1]:.2f})")


def agreement(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What two comparisons of the same samples, `own` and `other`, say of each other."""
    log = {name: np.array([numbers(row["log_ppls"]) for row in table["rows"]]) for name, table in tables.items()}
    finite_n = np.isfinite([*log["own"], *log["other"]]).all(axis=0)
    log = {name: log_Sn[:, finite_n] for name, log_Sn in log.items()}
    tau = kendall_tau(log["own"], log["other"])
    pairs = []
    for i, j in combinations(range(len(paper.SCHEDULES)), 2):
        pair: dict[str, Any] = {"first": paper.SCHEDULES[i], "second": paper.SCHEDULES[j]}
        for name, log_Sn in log.items():
            pair |= metrics.mean_estimate(log_Sn[i] - log_Sn[j]).named(name)
        pairs.append(pair)
    said = [(pair, {sign(*pair["own_ci"]), sign(*pair["other_ci"])}) for pair in pairs]
    rows = {name: table["rows"] for name, table in tables.items()}
    return {
        "rows_scored_by_both": int(finite_n.sum()),
        "judges": {name: table["judge"] for name, table in tables.items()},
        "schedules": [
            {"schedule": schedule}
            | {name: {"log_ppl": float(log[name][k].mean()), "ppl": rows[name][k]["gen_ppl"]} for name in log}
            | {"entropy": rows["own"][k]["entropy"]}
            for k, schedule in enumerate(paper.SCHEDULES)
        ],
        "kendall_tau": {"value": tau.value, "ci": tau.ci, "of": "the seven hand-made schedules"},
        "correlation_of_rows": _correlation(log["own"], log["other"]),
        "correlation_of_rows_between_schedules": _correlation(*(x_Sn - x_Sn.mean(axis=0) for x_Sn in log.values())),
        "pairs": pairs,
        "differ": [pair for pair, signs in said if signs == {True, False}],
        "only_one_tells_apart": [pair for pair, signs in said if len(signs) == 2 and None in signs],
    }


def _correlation(a_Sn: np.ndarray, b_Sn: np.ndarray) -> float:
    return float(np.corrcoef(a_Sn.ravel(), b_Sn.ravel())[0, 1])


def kendall_tau(a_Sn: np.ndarray, b_Sn: np.ndarray) -> metrics.Estimate:
    """Kendall's tau-b of the schedules' mean log-perplexities; its bootstrap interval resamples rows for both judges
    together."""
    weights_Rn = metrics.resampling_weights(a_Sn.shape[1])
    drawn = zip(weights_Rn @ a_Sn.T, weights_Rn @ b_Sn.T, strict=True)
    low, high = np.quantile([stats.kendalltau(a_S, b_S)[0] for a_S, b_S in drawn], [0.025, 0.975])
    return metrics.Estimate(float(stats.kendalltau(a_Sn.mean(axis=1), b_Sn.mean(axis=1))[0]), float(low), float(high))


if __name__ == "__main__":
    main()
