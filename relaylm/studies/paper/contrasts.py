"""Paired differences of mean log-perplexity between schedules, with 95% intervals.

A row has the same plan under every schedule, so two schedules are compared row by row. `contrasts` keeps the difference
of every two schedules before single rows are dropped; `difference` and `against` read them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from relaylm.measure import metrics
from relaylm.studies.paper import numbers as paper

Pairs = Sequence[Mapping[str, Any]]
SAMPLERS = {"exact": "exact", "published": "MDLM's float32"}  # what they are called, by where their data is


def numbers(values: Sequence[float | None]) -> np.ndarray:
    """JSON's numbers as an array; null is not a number, and neither is infinity."""
    return np.array([math.nan if value is None or not math.isfinite(value) else value for value in values])


def paired(d_n: np.ndarray) -> dict[str, Any]:
    """The mean of the finite differences, its interval, its standard error and their number."""
    d = d_n[np.isfinite(d_n)]
    if len(d) < 2:
        return {"difference": None, "ci": [None, None], "error": None, "rows": len(d)}
    mean, error = metrics.mean_estimate(d), float(d.std(ddof=1)) / math.sqrt(len(d))
    return {"difference": mean.value, "ci": mean.ci, "error": error, "rows": len(d)}


def contrasts(result: Mapping[str, Any], stretches: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    """Of a comparison's result: each pair of the schedules that were asked for (`contrasts`), the middle of the
    trajectory against its ends (`middle_minus_ends`, and for other `stretches` of it by name), and its `rows` without
    their single values."""
    log_by = {row["schedule"]: numbers(row["log_ppls"]) for row in result["rows"]}
    asked = [row["schedule"] for row in result["rows"] if row["kind"] == "asked"]
    pairs = [{"first": a, "second": b, **paired(log_by[a] - log_by[b])} for a, b in combinations(asked, 2)]
    out: dict[str, Any] = {"contrasts": pairs}
    for key, names in {"middle_minus_ends": paper.SCHEDULES[1:5], **(stretches or {})}.items():
        if set(names) <= set(asked):
            logs, end = [log_by[name] for name in names], len(names) // 4
            out[key] = paired(np.mean(logs[end:-end], axis=0) - np.mean(logs[:end] + logs[-end:], axis=0))
    out["rows"] = [{k: v for k, v in row.items() if k != "log_ppls"} for row in result["rows"]]
    return out


def difference(pairs: Pairs, name: str, other: str) -> tuple[float, float, int]:
    """The mean of `name` less that of `other`, its standard error and its rows; nan and 0 rows where none is kept."""
    for pair in pairs:
        turned = (pair["second"], pair["first"]) == (name, other)
        if (turned or (pair["first"], pair["second"]) == (name, other)) and pair["difference"] is not None:
            return -pair["difference"] if turned else pair["difference"], pair["error"], pair["rows"]
    return math.nan, math.nan, 0


def against(pairs: Pairs, name: str, other: str, among: int = 1) -> tuple[float, float, float]:
    """The same difference with its interval, corrected for being one of `among` (Bonferroni); nan where none is
    kept."""
    value, error, rows = difference(pairs, name, other)
    half = float(stats.t.ppf(1 - 0.025 / among, rows - 1)) * error if rows else math.nan
    return value, value - half, value + half


def sign(low: float, high: float, edge: float = 0.0) -> bool | None:
    """True: the interval lies above the edge; False: below; None: it holds it (or there is none)."""
    return True if low > edge else False if high < edge else None


def signed(item: Sequence[float]) -> str:
    """A difference and its interval, as text."""
    value, low, high = item
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"
