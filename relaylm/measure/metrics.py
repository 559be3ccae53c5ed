r"""What samples are like, in numbers with intervals; and tests of whether schedules differ.

**Perplexity.** A judge gives each row r the sum S_r of -log p over its c_r scored tokens; l_r = S_r / c_r is its log-
perplexity, the statistic of every test here: it is nearly normal, and differences of it are differences of rates.
Reported are the arithmetic mean of exp(l_r) (`gen_ppl`, what the paper's intervals suggest) and the corpus-level
exp(sum S_r / sum c_r) (`corpus_ppl`, MDLM's). They differ (Jensen), so both are always given. Repetitive text has a low
perplexity, so entropy is always given too.

**Intervals** are 95%. Means of nearly normal rows get Student's t. exp(l_r) is skewed, where t covers too little on the
upper side: its mean gets Hall's transformation of t (Hall, 1992). With g the sample skewness and T = (mean - mu) / se,

    T + g/(3 sqrt n) T^2 + g^2/(27 n) T^3 + g/(6 sqrt n)

is normal up to 1/n, and monotone in T, so inverting it gives an interval in closed form. The corpus-level figure is a
ratio of sums: its interval is that of a ratio, on the log scale.

**Paired differences.** Under common random numbers row r of two schedules shares its plan, so the mean of d_r =
l_r - l'_r has a far smaller error than two separate means. Its interval is Student's t, with the bootstrap's beside it.

**Infinite log-perplexities.** l_r is infinite where a judge gives what was written no probability. Means are infinite
then, and have no interval. In a comparison a row that is infinite under both schedules says nothing, as two infinities
have no difference, and is left out; one that is infinite under one alone outweighs all finite rows, so schedules with
different numbers of those differ by infinity. Whether that may be chance is an exact sign test of these numbers.

Shapes: n rows, L positions, S schedules, R bootstrap resamples.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import bdtr, stdtr, stdtrit

from relaylm.errors import UserError

LEVEL, POWER = 0.95, 0.8
RESAMPLES = 2000
LARGE = 1e75  # above it the fourth power of a number is no float64
LARGEST_POWER = math.log(sys.float_info.max)
Interval = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean, lower and upper end


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval (infinite where one row is all there is, or where the figure is infinite)."""

    value: float
    low: float
    high: float

    @property
    def ci(self) -> list[float | None]:
        """The interval as JSON has it."""
        return [finite(self.low), finite(self.high)]

    def named(self, name: str) -> dict[str, Any]:
        """The figure and its interval in a result. An infinite perplexity stays a number."""
        return {name: self.value, f"{name}_ci": self.ci}


def finite(x: float | None) -> float | None:
    """The number, or None where there is none: JSON has neither infinity nor NaN."""
    return None if x is None or not math.isfinite(x) else float(x)


# ------------------------------------------------------------------------------------------------ intervals


def mean_estimate(x_n: np.ndarray, skewed: bool = False) -> Estimate:
    """The mean of rows and its t interval, or that of skewed rows."""
    interval = skewed_mean_interval if skewed else mean_interval
    return Estimate(*(float(v) for v in interval(np.asarray(x_n, dtype=np.float64))))


def mean_interval(x_Xn: np.ndarray) -> Interval:
    """Mean, lower and upper end of Student's interval along the last axis."""
    if (scaled := _scaled(mean_interval, x_Xn)) is not None:
        return scaled
    n = x_Xn.shape[-1]
    mean = x_Xn.mean(axis=-1)
    if n < 2:
        return mean, np.full_like(mean, -np.inf), np.full_like(mean, np.inf)
    margin = stdtrit(n - 1, (1 + LEVEL) / 2) * x_Xn.std(axis=-1, ddof=1) / math.sqrt(n)
    return mean, mean - margin, mean + margin


def skewed_mean_interval(x_Xn: np.ndarray) -> Interval:
    """Mean and interval of skewed rows along the last axis: Hall's transformation of t (see the top of this file)."""
    if (scaled := _scaled(skewed_mean_interval, x_Xn)) is not None:
        return scaled
    n = x_Xn.shape[-1]
    mean = x_Xn.mean(axis=-1)
    if n < 3:
        return mean_interval(x_Xn)
    centred = x_Xn - mean[..., None]
    spread = np.sqrt((centred**2).mean(axis=-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        skewness = np.where(spread > 0, (centred**3).mean(axis=-1) / spread**3, 0.0)
    skewness = skewness * (math.sqrt(n * (n - 1)) / (n - 2))  # the usual correction for small n
    a = skewness / math.sqrt(n)
    error = spread * math.sqrt(n / (n - 1)) / math.sqrt(n)
    quantile = stdtrit(n - 1, (1 + LEVEL) / 2)

    def invert(y: float) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            exact = (np.cbrt(1 + a * (y - a / 6)) - 1) * 3 / a
        return np.where(np.abs(a) < 1e-8, y, exact)

    return mean, mean - error * invert(quantile), mean - error * invert(-quantile)


def _scaled(interval: Callable[[np.ndarray], Interval], x_Xn: np.ndarray) -> Interval | None:
    """The interval of rows that hold infinity, or numbers whose cubes no float64 can hold; None of all others. An
    infinite mean has no interval: its ends are infinite."""
    size = np.abs(x_Xn).max(initial=0.0, where=np.isfinite(x_Xn))
    infinite_Xn = np.isinf(x_Xn)
    if size < LARGE and not infinite_Xn.any():
        return None
    unit = 2.0 ** (math.frexp(size)[1] - 1) if size >= LARGE else 1.0  # no square or sum of x / unit overflows
    most = sys.float_info.max / unit
    in_units = interval(np.where(infinite_Xn, 0.0, x_Xn / unit))
    found = [np.where(np.abs(x) > most, np.copysign(math.inf, x), x) * unit for x in in_units]
    up, down = (infinite_Xn & (x_Xn > 0)).any(axis=-1), (infinite_Xn & (x_Xn < 0)).any(axis=-1)
    infinite, none = np.where(up & down, math.nan, np.where(up, math.inf, -math.inf)), up | down
    ends = (infinite, np.array(-math.inf), np.array(math.inf))
    mean, low, high = (np.where(none, end, x) for end, x in zip(ends, found, strict=True))
    return mean, low, high


def exponential(x: np.ndarray) -> np.ndarray:
    """e to the power of each number, infinite where no float64 holds it."""
    return np.exp(np.where(x > LARGEST_POWER, math.inf, x))


def ratio_estimate(sum_n: np.ndarray, count_n: np.ndarray) -> Estimate:
    """sum / count over all rows, and the interval of a ratio of sums (rows are independent, tokens are not)."""
    n, total = len(sum_n), float(count_n.sum())
    ratio = float(sum_n.sum()) / total
    if n < 2 or math.isinf(ratio):
        return Estimate(ratio, -math.inf, math.inf)
    error = math.sqrt(float(((sum_n - ratio * count_n) ** 2).sum()) * n / (n - 1)) / total
    margin = stdtrit(n - 1, (1 + LEVEL) / 2) * error
    return Estimate(ratio, ratio - margin, ratio + margin)


@lru_cache(maxsize=4)
def resampling_weights(n: int, resamples: int = RESAMPLES) -> np.ndarray:
    """(R, n) bootstrap weights that each sum to 1: how often a row was drawn, over n. Not to be changed."""
    rng = np.random.default_rng(0)
    counts = np.zeros((resamples, n), dtype=np.float32)
    for r in range(resamples):
        counts[r] = np.bincount(rng.integers(0, n, n), minlength=n)
    return counts / n


def _power(x: float) -> float:
    return math.exp(x) if x <= LARGEST_POWER else math.inf


def perplexity(nll_n: np.ndarray, count_n: np.ndarray) -> dict[str, Any]:
    """Both perplexities of the rows that have scored tokens, with intervals; `unscored` counts the rows that have none
    (a text of a single token)."""
    scored_n = count_n > 0
    if not scored_n.any():
        raise UserError("no row has a token to score: a judge gives the first token of a text and scores the rest")
    log_n = nll_n[scored_n] / count_n[scored_n]
    corpus = ratio_estimate(nll_n[scored_n], count_n[scored_n].astype(np.float64))
    return {
        **mean_estimate(exponential(log_n), skewed=True).named("gen_ppl"),
        "corpus_ppl": _power(corpus.value),
        "corpus_ppl_ci": [finite(_power(v)) if math.isfinite(v) else None for v in (corpus.low, corpus.high)],
        **mean_estimate(log_n).named("log_ppl"),
        "unscored": int((~scored_n).sum()),
    }


def standing(log_n: np.ndarray) -> tuple[float, float]:
    """What schedules are ordered by, the best first, on rows that all share: the share of rows with infinite
    log-perplexity, and the mean of the others. Rows without a score are left out."""
    finite_n = np.isfinite(log_n)
    infinite = int(np.isinf(log_n).sum())
    if not finite_n.any():
        return (1.0, 0.0) if infinite else (math.nan, math.nan)
    return infinite / (infinite + int(finite_n.sum())), float(np.nanmean(np.where(np.isinf(log_n), math.nan, log_n)))


def mean_perplexity(log_n: np.ndarray) -> float:
    """The mean perplexity of the rows that have a score; NaN if there is none."""
    scored_n = ~np.isnan(log_n)
    return mean_estimate(exponential(log_n[scored_n])).value if scored_n.any() else math.nan


# ------------------------------------------------------------------------------------------------ what texts are like


def token_entropy(row: np.ndarray) -> float:
    """Entropy in nats of the tokens of one row, as frequencies of the row itself (ReMDM's definition)."""
    _, counts = np.unique(np.asarray(row), return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum()) if len(counts) > 1 else 0.0


def word_entropy(text: str) -> float:
    """The same over the words of a text, as white space separates them; 0 for a text without words."""
    counts = Counter(text.split())
    total = sum(counts.values())
    return -sum(c / total * math.log(c / total) for c in counts.values()) if len(counts) > 1 else 0.0


def ngrams(items: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All runs of 4 items."""
    return [tuple(items[i : i + 4]) for i in range(len(items) - 3)]


def repetition(items: Sequence[Any]) -> float:
    """Share of a row's 4-grams that occur earlier in the row; 0 for a row with none."""
    grams = ngrams(items)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(rows: Sequence[Sequence[Any]]) -> Estimate:
    """Different 4-grams among all of all rows, with a jackknife interval over 20 groups of rows. The figure falls as
    rows are added: compare it at one n. NaN if no row is long enough."""
    grams = [ngrams(row) for row in rows]
    total, everything = Counter(g for row in grams for g in row), sum(len(row) for row in grams)
    if not everything:
        return Estimate(math.nan, -math.inf, math.inf)
    value = len(total) / everything
    groups = min(20, len(rows))
    if groups < 2:
        return Estimate(value, -math.inf, math.inf)
    without = []
    for k in range(groups):
        part = Counter(g for row in grams[k::groups] for g in row)
        gone = sum(total[g] == c for g, c in part.items())
        left = everything - sum(part.values())
        without.append((len(total) - gone) / left if left else value)
    # A figure that depends on n shifts when rows are left out; the shift is common to all groups and drops out here.
    spread = math.sqrt((groups - 1) / groups * float(((np.array(without) - np.mean(without)) ** 2).sum()))
    margin = float(stdtrit(groups - 1, (1 + LEVEL) / 2)) * spread
    return Estimate(value, value - margin, value + margin)


def describe_texts(rows: Sequence[np.ndarray], texts: Sequence[str]) -> dict[str, Any]:
    """Entropy, diversity and repetition of samples, each with its interval. `rows` are the tokens that were written;
    `texts` may be empty (a family without a tokenizer), and n-grams then are of tokens instead of words."""
    units: list[Sequence[Any]] = [text.split() for text in texts] or [row.tolist() for row in rows]
    out = mean_estimate(np.array([token_entropy(row) for row in rows])).named("entropy")
    if texts:
        out |= mean_estimate(np.array([word_entropy(text) for text in texts])).named("word_entropy")
    repeated = mean_estimate(np.array([repetition(unit) for unit in units]))
    different = distinct(units).named("distinct_4")
    different["distinct_4"] = finite(different["distinct_4"])  # NaN where no row is long enough
    return {**out, **different, **repeated.named("repetition_4")}


def mauve(features_nD: np.ndarray, reference_mD: np.ndarray, **options: Any) -> float:
    """MAUVE between samples and human text, each row as a vector (`judge.features`); options as for
    `mauve.compute_mauve`. It depends on the number of rows on both sides: compare it at one n."""
    given = {"p_features": reference_mD, "q_features": features_nD, "verbose": False, **options}
    return float(mauve_package().compute_mauve(**given).mauve)


def mauve_package() -> Any:
    """The package `mauve`, or a UserError that says how to install it."""
    try:
        import mauve
    except ImportError as error:
        raise UserError(f"MAUVE needs `pip install relaylm[mauve]` ({error})") from None
    return mauve


# ------------------------------------------------------------------------------------------------ comparisons


def paired_difference(log_n: np.ndarray, reference_n: np.ndarray) -> dict[str, Any]:
    """The mean of log_n - reference_n: t interval, bootstrap interval, p-value of no difference, and the number of
    rows needed to detect a difference of this size (80% power). Rows without a score in either are left out; of
    infinite ones see the top of this file."""
    scored_n = ~(np.isnan(log_n) | np.isnan(reference_n))
    if not scored_n.any():
        raise UserError("no row has a score under both schedules, so they cannot be compared")
    infinite_n, reference_infinite_n = np.isinf(log_n), np.isinf(reference_n)
    worse = int((scored_n & infinite_n & ~reference_infinite_n).sum())
    better = int((scored_n & ~infinite_n & reference_infinite_n).sum())
    both_n = scored_n & ~infinite_n & ~reference_infinite_n
    d_n = log_n[both_n] - reference_n[both_n]
    n = len(d_n)
    if worse != better or not n:
        p = min(1.0, 2 * float(bdtr(min(worse, better), worse + better, 0.5)))
        difference = math.copysign(math.inf, worse - better) if worse != better else 0.0
        unknown: dict[str, Any] = {"ci": [None, None], "bootstrap_ci": [None, None], "sd": None}
        rows = n + worse + better
        return _tested(difference, p, rows, None, unknown)
    mean, low, high = (float(v) for v in mean_interval(d_n))
    spread = float(d_n.std(ddof=1)) if n > 1 else math.inf
    error = spread / math.sqrt(n)
    if n < 2 or (error == 0 and mean == 0):
        p = 1.0
    else:
        p = 0.0 if error == 0 else float(2 * stdtr(n - 1, -abs(mean / error)))
    boot = np.quantile(resampling_weights(n) @ d_n, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    ends = {"ci": [finite(low), finite(high)], "bootstrap_ci": [float(v) for v in boot], "sd": finite(spread)}
    return _tested(mean, p, n, samples_needed(mean, spread), ends)


def _tested(difference: float, p: float, rows: int, needed: int | None, ends: dict[str, Any]) -> dict[str, Any]:
    tested = {"p": p, "rows": rows, "differs": bool(p < 1 - LEVEL), "samples_needed": needed}
    return {"difference": difference, **ends, **tested}


def samples_needed(difference: float, sd: float) -> int | None:
    """Paired rows needed to detect a difference of two schedules at the 5% level with 80% power, if the difference
    and the standard deviation of the rows' differences are as given; None if there is no difference to detect."""
    if difference == 0 or not math.isfinite(difference) or not math.isfinite(sd):
        return None
    z = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
    n = max(2, math.ceil((z * sd / difference) ** 2))
    while n <= 100:  # Student's t instead of the normal, where that matters: the first n that is enough
        z = stdtrit(n - 1, (1 + LEVEL) / 2) + stdtrit(n - 1, POWER)
        if n >= (z * sd / difference) ** 2:
            break
        n += 1
    return n


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm's step-down)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def ranks(log_Sn: np.ndarray) -> list[dict[str, Any]]:
    """Place of each schedule by mean log-perplexity (1 is best), its 95% bootstrap interval over the rows that all
    share, and the chance that it is best. Among infinite means fewer infinite rows are better, and then the mean of the
    rows that are finite under all."""
    x_Sn = log_Sn[:, ~np.isnan(log_Sn).any(axis=0)]
    n = x_Sn.shape[1]
    if not n:
        raise UserError("no row has a score under every schedule, so they cannot be ranked")
    infinite_Sn = np.isinf(x_Sn)
    x_Sn = np.where(infinite_Sn.any(axis=0), 0.0, x_Sn) if infinite_Sn.any() else x_Sn
    weights_Rn = resampling_weights(n)
    often_RS = np.rint(weights_Rn @ infinite_Sn.T.astype(np.float32) * n)
    place_RS = _places(weights_Rn @ x_Sn.T, often_RS)
    place_S = _places(x_Sn.mean(axis=1)[None], infinite_Sn.sum(axis=1)[None])[0]
    low_S, high_S = np.quantile(place_RS, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    best_S = (place_RS == 1).mean(axis=0)
    return [
        {"rank": int(place), "rank_ci": [math.floor(low), math.ceil(high)], "chance_best": float(best)}
        for place, low, high, best in zip(place_S, low_S, high_S, best_S, strict=True)
    ]


def _places(x_RS: np.ndarray, infinite_RS: np.ndarray) -> np.ndarray:
    """1 for the smallest of each row, the one with the fewest infinities first; equals share the better place."""
    fewer_RSS = infinite_RS[:, None, :] < infinite_RS[:, :, None]
    as_many_RSS = infinite_RS[:, None, :] == infinite_RS[:, :, None]
    return 1 + (fewer_RSS | (as_many_RSS & (x_RS[:, None, :] < x_RS[:, :, None]))).sum(axis=2)
