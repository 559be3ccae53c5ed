"""Intervals that cover, tests with the right level, and figures with known answers."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from relaylm.errors import UserError
from relaylm.measure import metrics


# Per-sample perplexities of the paper have a log-sd of about 0.22, those of character models 0.1 to 0.3; 0.8 is far
# beyond either.
@pytest.mark.parametrize("sigma", [0.25, 0.8])
@pytest.mark.parametrize("n", [160, 1600])
def test_intervals_cover_on_skewed_data(n: int, sigma: float) -> None:
    """95% intervals of perplexity, log-perplexity and corpus-level perplexity on log-normal rows: 4,000 simulations."""
    rng = np.random.default_rng(n)
    truth = math.exp(3 + sigma**2 / 2)
    covered = np.zeros(2)
    simulations, part = 4000, 500
    for _ in range(simulations // part):
        log_Xn = rng.normal(3, sigma, (part, n))
        _, low, high = metrics.skewed_mean_interval(np.exp(log_Xn))
        covered[0] += ((low <= truth) & (truth <= high)).sum()
        _, low, high = metrics.mean_interval(log_Xn)
        covered[1] += ((low <= 3) & (high >= 3)).sum()
    assert (covered / simulations >= 0.93).all() and (covered / simulations <= 0.97).all(), covered / simulations


def test_the_skewed_interval_solves_halls_equation() -> None:
    """The ends are where Hall's polynomial of T, with the usual sample skewness, is a quantile of Student's t."""
    x = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    n, g, error = len(x), float(scipy.stats.skew(x, bias=False)), float(x.std(ddof=1) / math.sqrt(len(x)))

    def hall(t: float) -> float:
        return t + g / (3 * math.sqrt(n)) * t**2 + g**2 / (27 * n) * t**3 + g / (6 * math.sqrt(n))

    def inverse(y: float) -> float:
        return float(scipy.optimize.brentq(lambda t: hall(t) - y, -100, 100))

    mean, low, high = metrics.skewed_mean_interval(x)
    q = float(scipy.stats.t.ppf(0.975, n - 1))
    assert (mean, low, high) == pytest.approx((4, 4 - error * inverse(q), 4 - error * inverse(-q)))
    assert high - mean > 2 * (mean - low)


def test_the_ratio_interval_covers() -> None:
    """Corpus-level perplexity: rows of different lengths whose tokens are not independent."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(4000):
        count_n = rng.integers(20, 200, 160).astype(float)
        sum_n = count_n * rng.lognormal(1, 0.3, 160)
        e = metrics.ratio_estimate(sum_n, count_n)
        covered += e.low <= math.exp(1 + 0.045) <= e.high
    assert 0.93 <= covered / 4000 <= 0.97


@pytest.mark.parametrize("n", [160, 1600])
def test_the_paired_test_has_its_level_and_its_power(n: int) -> None:
    """Two schedules whose log-perplexities share most of their noise: 5% false alarms at no difference, and about 80%
    detection at the n that `samples_needed` asks for. Skewed noise: log-normal, centred."""
    rng = np.random.default_rng(n)
    simulations, part = 4000, 500
    sd = math.sqrt((math.exp(0.25) - 1) * math.exp(0.25))
    effect = sd / math.sqrt(n) * 2.8
    alarms = found = 0
    for _ in range(simulations // part):
        d_Xn = rng.lognormal(0, 0.5, (part, n)) - math.exp(0.125)
        _, low, high = metrics.mean_interval(d_Xn)
        alarms += ((low > 0) | (high < 0)).sum()
        found += ((low + effect > 0) | (high + effect < 0)).sum()
    assert 0.03 <= alarms / simulations <= 0.07
    assert metrics.samples_needed(effect, sd) == pytest.approx(n, rel=0.03)
    assert 0.75 <= found / simulations <= 0.85


@pytest.mark.parametrize("n", [160, 1600])
def test_the_bootstrap_interval_covers(n: int) -> None:
    """The percentile interval beside the t interval, on the same skewed differences: 4,000 simulations."""
    rng = np.random.default_rng(n)
    weights_Rn = metrics.resampling_weights(n, 500)
    covered = 0
    for _ in range(8):
        d_nX = rng.lognormal(0, 0.5, (n, 500)).astype(np.float32)
        low, high = np.quantile(weights_Rn @ d_nX, [0.025, 0.975], axis=0)
        covered += ((low <= math.exp(0.125)) & (math.exp(0.125) <= high)).sum()
    assert 0.93 <= covered / 4000 <= 0.97


def test_paired_difference_in_full() -> None:
    rng = np.random.default_rng(1)
    base = rng.normal(2, 0.3, 200)
    d = rng.normal(0.05, 0.1, 200)
    out = metrics.paired_difference(base + d, base)
    result = scipy.stats.ttest_1samp(d, 0)
    ci = result.confidence_interval()
    assert out["difference"] == pytest.approx(d.mean())
    assert out["p"] == pytest.approx(result.pvalue, rel=1e-9)
    assert out["ci"] == pytest.approx([ci.low, ci.high], rel=1e-9)
    assert out["bootstrap_ci"] == pytest.approx(out["ci"], abs=0.004)
    assert out["differs"] and out["rows"] == 200
    same = metrics.paired_difference(base, base)
    assert same["p"] == 1 and not same["differs"] and same["samples_needed"] is None
    holes = base.copy()
    holes[:3] = math.nan
    assert metrics.paired_difference(holes, base + d)["rows"] == 197
    with pytest.raises(UserError):
        metrics.paired_difference(np.array([math.nan]), np.array([1.0]))


def test_the_ratio_interval_of_two_rows() -> None:
    """Equal counts make it the mean's: of 1 and 2 a token, 1.5 and Student's t of one degree of freedom times 1/2."""
    found = metrics.ratio_estimate(np.array([4.0, 8.0]), np.array([4.0, 4.0]))
    margin = scipy.stats.t.ppf(0.975, 1) * 0.5
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5 - margin, 1.5 + margin))


@pytest.mark.parametrize("effect", [5.0, 2.0, 1.0, 0.71, 0.5, 0.35, 0.29])
def test_the_rows_that_are_needed_are_the_fewest(effect: float) -> None:
    """The first n at which Student's quantiles of level and power together are within the standardised effect."""

    def enough(n: int) -> bool:
        t = scipy.stats.t(n - 1)
        return effect * math.sqrt(n) >= t.ppf(0.975) + t.ppf(0.8)

    assert metrics.samples_needed(-effect, 1.0) == next(n for n in range(2, 1000) if enough(n))


def test_holm() -> None:
    assert metrics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert metrics.holm([]) == []


def test_ranks_know_what_they_do_not_know() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(2, 0.3, 400)
    rows = np.stack([base, base + 0.5 + rng.normal(0, 0.01, 400), base + rng.normal(0, 0.1, 400)])
    places = metrics.ranks(rows)
    assert places[1] == {"rank": 3, "rank_ci": [3, 3], "chance_best": 0.0}
    assert {places[0]["rank"], places[2]["rank"]} == {1, 2}
    assert places[0]["rank_ci"] == [1, 2]
    assert places[0]["chance_best"] + places[2]["chance_best"] == pytest.approx(1)


def test_ranks_cover() -> None:
    """The bootstrap's rank interval holds the true rank at least as often as it says."""
    rng = np.random.default_rng(3)
    true = np.array([0.0, 0.02, 0.04, 0.06])
    hits = 0
    for _ in range(300):
        places = metrics.ranks(true[:, None] + rng.normal(0, 0.15, (4, 100)))
        hits += sum(p["rank_ci"][0] <= k + 1 <= p["rank_ci"][1] for k, p in enumerate(places))
    assert hits / 1200 > 0.93


def test_perplexity_of_rows() -> None:
    nll, count = np.array([2.0, 6.0, 0.0]), np.array([2, 3, 0])
    out = metrics.perplexity(nll, count)
    assert out["gen_ppl"] == pytest.approx((math.e + math.e**2) / 2)
    assert out["corpus_ppl"] == pytest.approx(math.exp(8 / 5))
    assert out["log_ppl"] == pytest.approx(1.5)
    assert out["unscored"] == 1
    with pytest.raises(UserError):
        metrics.perplexity(np.zeros(2), np.zeros(2, dtype=int))


def test_entropy_of_fixed_rows() -> None:
    assert metrics.token_entropy(np.zeros(50, dtype=int)) == 0
    assert metrics.token_entropy(np.arange(1024)) == pytest.approx(math.log(1024))
    assert metrics.token_entropy(np.array([1, 1, 2, 3])) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert metrics.word_entropy("a b a  c") == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert metrics.word_entropy("") == metrics.word_entropy("one") == 0


def test_character_entropy_is_blind_where_words_are_not() -> None:
    """The same sentence over and over has the characters of many, and neither its words nor its 4-grams."""
    rng = np.random.default_rng(0)
    words = [f"w{i:03d}" for i in range(1000)]
    varied = [" ".join(rng.permutation(words)[:40]) for _ in range(10)]
    same = [varied[0]] * 10
    rows = [np.frombuffer(text.encode(), np.uint8) for text in same]
    out = metrics.describe_texts(rows, same)
    other = metrics.describe_texts([np.frombuffer(t.encode(), np.uint8) for t in varied], varied)
    assert out["entropy"] == pytest.approx(other["entropy"], abs=0.1)
    assert out["distinct_4"] == pytest.approx(0.1) and other["distinct_4"] == 1
    looping = metrics.describe_texts([rows[0]], ["one two three four five " * 8])
    assert looping["repetition_4"] == pytest.approx(1 - 5 / 37)


def test_distinct_ngrams() -> None:
    rows = [list("abcde"), list("abcdf")]  # abcd bcde | abcd bcdf
    assert metrics.distinct(rows).value == pytest.approx(3 / 4)
    assert math.isnan(metrics.distinct([["a"]]).value)
    assert metrics.describe_texts([np.zeros(3, dtype=int)], ["one two"])["distinct_4"] is None
    rng = np.random.default_rng(0)
    many = [rng.integers(0, 4, 12).tolist() for _ in range(100)]
    e = metrics.distinct(many)
    assert e.low < e.value < e.high
    assert metrics.describe_texts([np.array(row) for row in many], [])["distinct_4"] == e.value


def test_the_interval_of_distinct_ngrams_is_a_jackknife() -> None:
    """Written out: the figure of all rows but one, for each row of 12, which are fewer than 20 groups."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 3, 9).tolist() for _ in range(12)]

    def share(some: list[list[int]]) -> float:
        grams = [tuple(row[k : k + 4]) for row in some for k in range(6)]
        return len(set(grams)) / len(grams)

    without = np.array([share(rows[:k] + rows[k + 1 :]) for k in range(12)])
    margin = scipy.stats.t.ppf(0.975, 11) * math.sqrt(11 / 12 * ((without - without.mean()) ** 2).sum())
    found = metrics.distinct(rows)
    assert (found.value, found.low, found.high) == pytest.approx(
        (share(rows), share(rows) - margin, share(rows) + margin)
    )


def test_resampling_weights_are_a_bootstrap() -> None:
    weights = metrics.resampling_weights(50, 400)
    assert weights.sum(axis=1) == pytest.approx(np.ones(400), abs=1e-6)
    x = np.random.default_rng(0).normal(size=50)
    assert (weights @ x).std() == pytest.approx(x.std() / math.sqrt(50), rel=0.15)


def test_mauve_gets_human_text_first_and_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_mauve(p_features: np.ndarray, q_features: np.ndarray, **options: object) -> SimpleNamespace:
        assert options == {"verbose": False, "num_buckets": 2}
        return SimpleNamespace(mauve=np.float64(p_features.mean() - 2 * q_features.mean()))

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    value = metrics.mauve(np.full((3, 2), 0.1), np.full((4, 2), 1.0), num_buckets=2)
    assert value == pytest.approx(0.8) and type(value) is float
    monkeypatch.setitem(sys.modules, "mauve", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"pip install relaylm\[mauve\]"):
        metrics.mauve(np.zeros((3, 2)), np.zeros((4, 2)))


def test_the_real_mauve() -> None:
    pytest.importorskip("mauve")
    rng = np.random.default_rng(0)
    human, like, unlike = rng.normal(size=(200, 8)), rng.normal(size=(200, 8)), rng.normal(size=(200, 8)) + 3
    assert metrics.mauve(like, human) > 0.9 and metrics.mauve(unlike, human) < 0.1
