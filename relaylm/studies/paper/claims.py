r"""The paper's claims, and a verdict on each from the data of `reproduce`.

Every claim is asked of the data in several places (light depths, corpora, prefixes, methods). Each place gives one
`Finding`: yes, no or open, by a criterion in which 95% intervals decide: yes or no only where the interval lies wholly
on one side. Where one finding looks at several intervals and any of them may decide it, they are corrected for their
number (Bonferroni). The verdict is then a rule, too:

    confirmed       every finding says yes
    partly          some say yes and the others are open: nothing speaks against it, but not all of it is shown
    not confirmed   at least one says no, and none yes
    depends         some say yes and some no
    open            all are open: the samples do not suffice

Differences are in mean log-perplexity, so 0.01 is 1%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from scipy import stats

from relaylm.measure import metrics
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import SAMPLERS, Pairs, against, difference, sign, signed

Data = Mapping[str, Mapping[str, Any]]  # results by experiment
MODEST = 0.05  # more perplexity than all-heavy; the paper's 3.4% and no more than half again
SAME_ENTROPY = 0.01  # of all-heavy's entropy; the paper's range of 0.03 nats is 0.6% of 5.29
MIDDLE = (0.25, 0.75)  # of the time axis
CLOCK = 0.03  # what a share of time saved may be off by
LESS = 0.05  # of the sandwich's FLOPs: a rival that costs less by more is said to


@dataclass(frozen=True)
class Finding:
    """What one place of the data says of a claim."""

    where: str
    says: bool | None  # None: open
    evidence: str


@dataclass(frozen=True)
class Claim:
    """A claim, where the paper makes it, and what of the report shows it. The docstring of `find` is the criterion."""

    name: str
    paper: str
    shown: str
    find: Callable[[Data], Iterable[Finding]]
    ours: bool = False  # left out where nothing was measured

    @property
    def criterion(self) -> str:
        """By what it is judged."""
        return " ".join((self.find.__doc__ or "").split()).rstrip(".")


@dataclass(frozen=True)
class Verdict:
    """A claim with its findings and what they come to."""

    claim: Claim
    verdict: str
    findings: tuple[Finding, ...]

    @property
    def tally(self) -> str:
        """How many findings say yes, no and nothing."""
        counts = {word: sum(f.says is says for f in self.findings) for says, word in WORDS.items()}
        return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


WORDS = {True: "yes", False: "no", None: "open"}


def judge(claim: Claim, data: Data) -> Verdict:
    """The verdict that a claim's findings come to."""
    findings = tuple(claim.find(data))
    said = {finding.says for finding in findings}
    if not findings:
        verdict = "not measured"
    elif said >= {True, False}:
        verdict = "depends"
    elif True in said:
        verdict = "partly" if None in said else "confirmed"
    else:
        verdict = "not confirmed" if False in said else "open"
    return Verdict(claim, verdict, findings)


def verdicts(data: Data) -> list[Verdict]:
    """Verdicts on all claims."""
    found = [judge(claim, data) for claim in CLAIMS]
    return [verdict for verdict in found if verdict.findings or not verdict.claim.ours]


def _comparisons(data: Data) -> dict[str, Mapping[str, Any]]:
    """Every comparison of the seven schedules, by where it was made."""
    tokens = data.get("bpe", {}).get("schedules", {}).get("by_light", {})
    found = {f"light {name}": result for name, result in data.get("schedules", {}).get("by_light", {}).items()}
    found |= {f"prefix of {k}": result for k, result in data.get("prefixes", {}).get("by_prefix", {}).items()}
    found |= {"second corpus": data["second-corpus"]["schedules"]} if "second-corpus" in data else {}
    found |= {f"BPE, light {name}": result for name, result in tokens.items()}
    there = {result["steps"] for result in tokens.values() if "steps" in result}  # with as many steps it is the same
    by_steps = data.get("precision", {}).get("by_steps", {})
    return found | {f"BPE, T = {T}": both["exact"] for T, both in by_steps.items() if int(T) not in there}


def _of_both(data: Data, name: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """An experiment's result on the first family and on tokens, as far as they are there, by where it was found."""
    for place, results in ((where, data), (f"BPE, {where}", data.get("bpe", {}))):
        if name in results:
            yield place, results[name]


# ------------------------------------------------------------------------------------------------ what is asked


def middle_matters(data: Data) -> Iterator[Finding]:
    """light steps in the middle two quarters cost more than in the outer two; the most harmful of ten segments lies in
    the middle half and the safest outside; the KL peaks between t = 0.25 and 0.75"""
    for where, result in _comparisons(data).items():
        item = result.get("middle_minus_ends")
        if item and None not in item["ci"]:
            text = signed((item["difference"], *item["ci"]))
            yield Finding(where, sign(*item["ci"]), f"middle quarters against end quarters {text}")
    for where, found in _of_both(data, "search", "search of 210"):
        light, value = next(iter(found["influence"].items()))
        ci = found["influence_ci"][light]
        best, *_, worst = sorted(range(len(value)), key=lambda j: value[j])
        inside = [MIDDLE[0] <= (j + 0.5) / len(value) <= MIDDLE[1] for j in range(len(value))]
        says = inside[worst] and not inside[best] if ci[worst][0] > ci[best][1] else None
        text = f"segment {worst} is most harmful (I = {value[worst]:+.3f}), segment {best} safest ({value[best]:+.3f})"
        yield Finding(where, says, text)
    places = {"disagreement": "KL", "second-corpus": "KL, second corpus", "bpe": "KL, BPE"}
    for name, curve in curves(data).items():
        yield from (_peak(f"{places[name]}, {pair['light']}", pair) for pair in curve["pairs"])


def curves(data: Data) -> dict[str, Mapping[str, Any]]:
    """The disagreement of models by time, by the experiment that has it."""
    results = {name: data[name] for name in ("disagreement", "second-corpus", "bpe") if name in data}
    found = {name: result.get("disagreement", result) for name, result in results.items()}
    return {name: curve for name, curve in found.items() if "pairs" in curve}


def above_twin(pair: Mapping[str, Any]) -> bool:
    """Whether a model is shown anywhere to be further from the heavy one than its twin is, by a hundredth of the most
    that their KL comes to."""
    return any(low > 0.01 * max(pair["kl"]) for low, _ in pair["kl_relative_ci"])


def peak(pair: Mapping[str, Any]) -> tuple[float, float, float, bool]:
    """Where the KL peaks, with its interval: less that of a second seed where there is one, which the last says."""
    end = "_relative" if pair.get("peak_t_relative") is not None else ""
    return pair[f"peak_t{end}"], *pair[f"peak_t{end}_ci"], bool(end)


def _peak(where: str, pair: Mapping[str, Any]) -> Finding:
    t, low, high, end = peak(pair)
    says = True if MIDDLE[0] <= low and high <= MIDDLE[1] else False if high < MIDDLE[0] or low > MIDDLE[1] else None
    if end and says is None and not above_twin(pair):
        return Finding(where, says, "nowhere shown to be further from the heavy model than its second seed")
    raw = "" if end else ", with no second seed's KL to take off"
    return Finding(where, says, f"peaks at t = {t:.2f} ({low:.2f} to {high:.2f}){raw}")


def sandwich_best(data: Data) -> Iterator[Finding]:
    """it beats each of the four quarters; no if any of them beats it"""
    yield from _sandwich(_comparisons(data))


def _sandwich(places: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    others = [name for name in paper.MIXED if name != "sandwich"]
    for where, result in places.items():
        items = {name: against(result["contrasts"], "sandwich", name) for name in others}
        beats = all(sign(low, high) is False for _, low, high in items.values())
        beaten = any(sign(*against(result["contrasts"], "sandwich", name, len(others))[1:]) for name in others)
        closest = max(items, key=lambda name: items[name][0])
        says = False if beaten else True if beats else None
        yield Finding(where, says, f"against {closest} {signed(items[closest])}")


def same_order(data: Data) -> Iterator[Finding]:
    """no two mixed schedules differ significantly in opposite directions, and most pairs differ significantly in both
    places"""
    places = _comparisons(data)
    lights = [where for where in places if where.startswith("light")]
    for where in [where for where in places if lights and where not in lights]:
        light = where.rpartition(", ")[2]  # with the same light model, where there are several
        both = places[light if light in lights else lights[0]], places[where]
        same, reversed_ = 0, []
        for a, b in combinations(paper.MIXED, 2):
            first, second = (sign(*against(place["contrasts"], a, b, 10)[1:]) for place in both)
            if None not in (first, second):
                same += first == second
                reversed_ += [f"{a} and {b}"] if first != second else []
        unknown = 10 - same - len(reversed_)
        says = False if reversed_ else True if same > unknown else None
        text = f"of 10 pairs {same} in the same order, {len(reversed_)} reversed, {unknown} not significant"
        yield Finding(where, says, text + (f": {', '.join(reversed_)}" if reversed_ else ""))


def entropy_unchanged(data: Data) -> Iterator[Finding]:
    """every mixed schedule's entropy is within 1% of all-heavy's, of tokens and of words"""
    for where, result in _comparisons(data).items():
        rows = {row["schedule"]: row for row in result["rows"]}
        for key, what in (("entropy", "tokens"), ("word_entropy", "words")):
            if base := rows["heavy"].get(key):
                shift = {name: rows[name][key] / base - 1 for name in paper.MIXED}
                worst = max(shift, key=lambda name: abs(shift[name]))
                half = max(_half(rows[name][f"{key}_ci"]) for name in (worst, "heavy")) / base * math.sqrt(2)
                below = sign(abs(shift[worst]) - half, abs(shift[worst]) + half, SAME_ENTROPY)
                text = f"{worst}: {shift[worst]:+.2%} ± {half:.2%} of {base:.3f}"
                yield Finding(f"{where}, {what}", _not(below), text)


def _not(says: bool | None) -> bool | None:
    return None if says is None else not says


def _half(ci: Sequence[float | None]) -> float:
    return math.inf if ci[0] is None or ci[1] is None else (ci[1] - ci[0]) / 2


def continuous(data: Data) -> Iterator[Finding]:
    """perplexity falls significantly at no light share against the one before, and none pays over three times its share
    of the gap"""
    for where, found in _of_both(data, "shares", "light share 0 to 100%"):
        pairs, labels, shares = (found[key] for key in ("contrasts", "labels", "shares"))
        steps, widths = list(pairwise(labels)), [(b - a) / 100 for a, b in pairwise(shares)]
        whole = against(pairs, labels[-1], labels[0])
        back = sum(sign(*against(pairs, *step[::-1], len(steps))[1:]) is False for step in steps)
        steepest = max(against(pairs, b, a)[0] / whole[0] / width for (a, b), width in zip(steps, widths, strict=True))
        says = False if back or steepest > 3 else True if sign(*whole[1:]) else None
        text = f"{back} of {len(steps)} steps go down; the steepest pays {steepest:.1f} times its share of the gap"
        yield Finding(where, says, text)


def deeper_loses_less(data: Data) -> Iterator[Finding]:
    """each depth loses more than the next"""
    for a, b in pairwise(sorted(data.get("depths", {}).get("rows", []), key=lambda row: row["depth"])[:-1]):
        item = against(data["depths"]["contrasts"], a["schedule"], b["schedule"])
        text = f"{a['depth']} blocks lose {signed(item)} more than {b['depth']}"
        yield Finding(f"{a['light']} to {b['light']}", sign(*item[1:]), text)


def wall_clock_below_flops(data: Data) -> Iterator[Finding]:
    """all-light saves less than 90% as much time as it saves blocks (open within 3% of all time)"""
    times = data.get("time", {})
    recorded = f" ({times['recorded'].split(',')[0]})" if times.get("recorded") else ""  # not measured in this run
    for where, item in (("this family", times.get("family")), (f"the paper's size{recorded}", times.get("paper_size"))):
        if item and item.get("reference_ms_per_row_step") and item.get("engine_ms_per_row_step"):
            blocks = 1 - item["settings"]["depth"][1] / item["settings"]["depth"][0]
            for sampler, key in (("MDLM's sampler", "reference"), ("the engine", "engine")):
                saved = 1 - item[f"{key}_light_ms_per_row_step"] / item[f"{key}_ms_per_row_step"]
                says = _not(sign(saved - CLOCK, saved + CLOCK, 0.9 * blocks))
                text = f"light steps save {saved:.1%} of the time where blocks save {blocks:.1%}"
                yield Finding(f"{where}, {sampler}", says, text)


def modest(data: Data) -> Iterator[Finding]:
    """the 25% sandwich has at most 5% more perplexity than all-heavy"""
    for where, result in _comparisons(data).items():
        item, gap = (against(result["contrasts"], name, "heavy") for name in ("sandwich", "light"))
        says = _not(sign(*item[1:], math.log1p(MODEST)))
        yield Finding(where, says, f"sandwich {signed(item)}, of light {signed(gap)}")


def no_rival_wins(data: Data) -> Iterator[Finding]:
    """every rival that costs no more than the sandwich loses to it"""
    for where, result in _comparisons(data).items():
        for item in (item for item in result["rivals"] if item["schedule"] == "sandwich"):
            says = {"wins": False, "loses": True, "level": None}[item["outcome"]]
            loss = signed((item["difference"], *item["ci"]))
            text = f"{item['rival']} ({item['what']}) {loss} against the sandwich{_for_less(item['flops_ratio'])}"
            if says is None and sign(*item["ci"]) is not None:
                text += f"; among {len(result['rivals'])} contests p = {item['p_holm']:.2f} (Holm)"
            yield Finding(where, says, text)
    if "tuner" in data:
        yield from _contests(list(_rivals_on_fresh_rows(data["tuner"]["fresh"])))
    if "tuner" in data.get("bpe", {}):
        yield from _contests(list(_rivals_of_record(data["bpe"]["tuner"]["all"])))


def rivals_by_budget(fresh: Mapping[str, Any]) -> dict[float, dict[str, Mapping[str, Any]]]:
    """Of the tuner's schedules on fresh rows, for each budget the sandwich and each model alone, by that word or its
    name: of several the one that spends most (what is recommended may cost less than the budget)."""
    found: dict[float, dict[str, Mapping[str, Any]]] = {row["budget"]: {} for row in fresh["rows"]}
    for row in sorted(fresh["rows"], key=lambda row: -row["saved"]):
        if row["kind"] == "rival":
            found[row["budget"]][row["what"].partition(" ")[0]] = row
    return found


def _for_less(ratio: float | None) -> str:
    """In words, that a rival costs far less than the sandwich: then it may lose for that."""
    return "" if ratio is None or ratio > 1 - LESS else f" at {ratio:.0%} of its FLOPs"


# Where, what, share of the sandwich's FLOPs, mean against it, standard error, rows.
Contest = tuple[str, str, float, float, float, int]


def _rivals_on_fresh_rows(fresh: Mapping[str, Any]) -> Iterator[Contest]:
    """At each budget, every model alone (whole, or in as many steps as it allows), on the same rows."""
    for rivals in rivals_by_budget(fresh).values():
        if (sandwich := rivals.pop("sandwich", None)) is not None:
            for row in rivals.values():
                found = difference(fresh["contrasts"], row["schedule"], sandwich["schedule"])
                yield f"tuner, {sandwich['budget']:.0%} saved", row["what"], _ratio(row, sandwich), *found


def _rivals_of_record(budgets: Sequence[Mapping[str, Any]]) -> Iterator[Contest]:
    """The same of a record of `studies.record.search`."""
    for budget in budgets:
        sandwich = next((row for row in budget["rows"] if row["what"] == "sandwich"), None)
        for row in budget["rows"]:
            if sandwich is not None and row["kind"] == "rival" and row is not sandwich:
                item, where = row["against_sandwich"], f"BPE, tuner, {budget['saved']:.0%} saved"
                yield where, row["what"], _ratio(row, sandwich), item["difference"], item["error"], item["rows"]


def _ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """The FLOPs of one schedule over those of another, by what each saves."""
    return float((1 - row["saved"]) / (1 - other["saved"]))


def _contests(contests: Sequence[Contest]) -> Iterator[Finding]:
    """An outcome must stand the adjustment for the number of all these contests (Holm)."""
    adjusted = metrics.holm([_chance(value, error, rows) for *_, value, error, rows in contests])
    for (where, what, ratio, value, error, rows), p in zip(contests, adjusted, strict=True):
        half, level = float(stats.t.ppf(0.975, max(1, rows - 1))) * error, p >= 1 - metrics.LEVEL
        item = value, value - half, value + half
        text = f"{what} {signed(item)} against the sandwich{_for_less(ratio)} on {rows} fresh rows"
        if level and sign(*item[1:]) is not None:
            text += f"; among {len(contests)} contests p = {p:.2f} (Holm)"
        yield Finding(where, None if level else value > 0, text)


def _chance(value: float, error: float, rows: int) -> float:
    """Student's p-value of no difference; 1 where none was measured."""
    if rows < 2 or value == 0:
        return 1.0
    return 0.0 if error == 0 else 2 * float(stats.t.cdf(-abs(value / error), rows - 1))


def survives_exact_sampling(data: Data) -> Iterator[Finding]:
    """both middle quarters cost more than the first, at each number of steps and in both samplers"""
    for steps, both in data.get("precision", {}).get("by_steps", {}).items():
        for kind, label in SAMPLERS.items():
            pairs = both[kind]["contrasts"]
            items = [(k, signed(against(pairs, f"quarter:{k}", "quarter:1"))) for k in (2, 3)]
            text = "; ".join(f"quarter {k} against the first {item}" for k, item in items)
            text += f"; {difference(pairs, 'quarter:2', 'quarter:1')[2]} samples"
            yield Finding(f"T = {steps}, {label}", early_is_robust(pairs), text)


def early_is_robust(pairs: Pairs) -> bool | None:
    """Do light steps cost more in both middle quarters than in the first? No if they cost less in one of them."""
    middle = ("quarter:2", "quarter:3")
    costs = all(sign(*against(pairs, name, "quarter:1")[1:]) for name in middle)
    saves = any(sign(*against(pairs, name, "quarter:1", len(middle))[1:]) is False for name in middle)
    return False if saves else True if costs else None


def sandwich_on_spaced_plans(data: Data) -> Iterator[Finding]:
    """on spaced plans it beats each of the four quarters; no if any of them beats it"""
    yield from _sandwich(_spaced(data))


def middle_on_spaced_plans(data: Data) -> Iterator[Finding]:
    """on spaced plans light calls in the middle two quarters cost more than in the outer two, and the light model in
    the middle four eighths of time, one at a time, more than in the outer four"""
    for where, result in _spaced(data).items():
        for key, what in (("middle_minus_ends", "quarters"), ("stretches_middle_minus_ends", "eighths")):
            if None not in (item := result[key])["ci"]:
                text = f"middle {what} against those at the ends {signed((item['difference'], *item['ci']))}"
                yield Finding(f"{where}, {what}", sign(*item["ci"]), text)


def _spaced(data: Data) -> dict[str, Mapping[str, Any]]:
    """The comparisons on spaced plans, by family and spacing."""
    return {f"{found['family']}, {found['spacing']}": found for found in data.get("spaced", {}).get("families", [])}


MAIN = "schedules, prefixes, second-corpus, bpe, precision"
# fmt: off
CLAIMS = (
    Claim("Middle steps matter most",
          "abstract; fig:12b-4b-barplot-perplexity, fig:kldiv-plot, fig:per_segment_ppl_barplot",
          "schedules, search, disagreement, second-corpus, bpe, precision", middle_matters),
    Claim("The sandwich is the best way to place 25% light steps", f"Section 3.2; {paper.OWT}", MAIN, sandwich_best),
    Claim("The ranking is the same on a second corpus and with prefixes", "Section 3.5; app:lm1b",
          "prefixes, second-corpus, bpe, precision", same_order),
    Claim("Entropy is unchanged", "app:entropy", f"tables {MAIN}", entropy_unchanged),
    Claim("The trade-off is continuous", "tab:scaling_steps", "shares", continuous),
    Claim("Deeper light models lose less", "tab:scaling_models", "depths", deeper_loses_less),
    Claim("Wall-clock savings stay well below FLOPs savings", "Section 'Wall-clock vs. FLOPs'", "time, shares",
          wall_clock_below_flops),
    Claim("The degradation is modest", "abstract and introduction (3.4% at 16.7% saved FLOPs)", MAIN, modest),
    Claim("Early steps are robust also in exact sampling", "not asked in the paper, whose sampler draws in float32",
          "precision", survives_exact_sampling),
    Claim("Nothing simpler does as well for the same compute", "not asked in the paper",
          "schedules, second-corpus, bpe, tuner", no_rival_wins),
    Claim("The sandwich is still the best on spaced plans", "not asked in the paper", "spaced",
          sandwich_on_spaced_plans, ours=True),
    Claim("Middle steps still matter most on spaced plans", "not asked in the paper", "spaced",
          middle_on_spaced_plans, ours=True),
)
# fmt: on
