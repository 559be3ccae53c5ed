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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from relaylm import metrics, paper
from relaylm.reproduce_figures import SAMPLERS, above_twin, against, difference, rivals_by_budget

Data = Mapping[str, Mapping[str, Any]]  # results by experiment
MODEST = 0.05  # more perplexity than all-heavy; the paper's 3.4% and no more than half again
SAME_ENTROPY = 0.01  # of all-heavy's entropy; the paper's range of 0.03 nats is 0.6% of 5.29
MIDDLE = (0.25, 0.75)  # of the time axis
CLOCK = 0.03  # what a share of time saved may be off by


@dataclass(frozen=True)
class Finding:
    where: str
    says: bool | None  # None: open
    evidence: str


@dataclass(frozen=True)
class Claim:
    name: str
    paper: str
    criterion: str
    shown: str  # figures or tables of the report
    find: Callable[[Data], list[Finding]]


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    verdict: str
    findings: tuple[Finding, ...]


def judge(claim: Claim, data: Data) -> Verdict:
    findings = tuple(claim.find(data))
    known = {finding.says for finding in findings if finding.says is not None}
    if not findings:
        verdict = "not measured"
    elif not known:
        verdict = "open"
    else:
        all_yes = all(finding.says for finding in findings)
        yes = "confirmed" if all_yes else "partly"
        verdict = "depends" if len(known) == 2 else yes if True in known else "not confirmed"
    return Verdict(claim, verdict, findings)


def verdicts(data: Data) -> list[Verdict]:
    return [judge(claim, data) for claim in CLAIMS]


def sign(low: float, high: float, edge: float = 0.0) -> bool | None:
    """True: the interval lies above the edge; False: below; None: it holds it (or there is none)."""
    return True if low > edge else False if high < edge else None


def _comparisons(data: Data) -> dict[str, Mapping[str, Any]]:
    """Every comparison of the seven schedules, by where it was made."""
    found: dict[str, Mapping[str, Any]] = {}
    main = data.get("schedules", {}).get("by_light", {})
    found |= {f"light {light}": result for light, result in main.items()}
    found |= {f"prefix of {k}": result for k, result in data.get("prefixes", {}).get("by_prefix", {}).items()}
    if "second-corpus" in data:
        found["second corpus"] = data["second-corpus"]["schedules"]
    with_tokens = data.get("bpe", {}).get("schedules", {}).get("by_light", {})
    found |= {f"BPE, light {light}": result for light, result in with_tokens.items()}
    for steps, both in data.get("precision", {}).get("by_steps", {}).items():
        # What `bpe` has with as many steps is the same comparison.
        if not any(result["steps"] == int(steps) for result in with_tokens.values()):
            found[f"BPE, T = {steps}"] = both["exact"]
    return found


def _rows(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {row["schedule"]: row for row in result["rows"]}


def _ci(value: float, low: float, high: float) -> str:
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


# ------------------------------------------------------------------------------------------------ what is asked


def middle_matters(data: Data) -> list[Finding]:
    found = []
    for where, result in _comparisons(data).items():
        item = result.get("middle_minus_ends")
        if item and None not in item["ci"]:
            low, high = item["ci"]
            evidence = f"middle quarters against end quarters {_ci(item['difference'], low, high)}"
            found.append(Finding(where, sign(low, high), evidence))
    if "search" in data:
        result = data["search"]
        light = next(iter(result["influence"]))
        value, ci = result["influence"][light], result["influence_ci"][light]
        worst = max(range(len(value)), key=lambda j: value[j])
        best = min(range(len(value)), key=lambda j: value[j])
        apart = ci[worst][0] > ci[best][1]
        inside = {j for j in range(len(value)) if MIDDLE[0] <= (j + 0.5) / len(value) <= MIDDLE[1]}
        evidence = (
            f"segment {worst} is most harmful (I = {value[worst]:+.3f}), segment {best} safest ({value[best]:+.3f})"
        )
        found.append(Finding("search of 210", (worst in inside and best not in inside) if apart else None, evidence))
    curves = {"KL": data.get("disagreement", {})}
    curves["KL, second corpus"] = data.get("second-corpus", {}).get("disagreement", {})
    curves["KL, BPE"] = data.get("bpe", {}).get("disagreement", {})
    return found + [
        _peak(f"{where}, {pair['light']}", pair) for where, c in curves.items() for pair in c.get("pairs", [])
    ]


def _peak(where: str, pair: Mapping[str, Any]) -> Finding:
    end = "_relative" if pair.get("peak_t_relative") is not None else ""
    t, (low, high) = pair[f"peak_t{end}"], pair[f"peak_t{end}_ci"]
    inside = MIDDLE[0] <= low and high <= MIDDLE[1]
    outside = high < MIDDLE[0] or low > MIDDLE[1]
    says = True if inside else False if outside else None
    if end and says is None and not above_twin(pair):
        return Finding(where, says, "nowhere shown to be further from the heavy model than its second seed")
    raw = "" if end else ", with no second seed's KL to take off"
    return Finding(where, says, f"peaks at t = {t:.2f} ({low:.2f} to {high:.2f}){raw}")


def sandwich_best(data: Data) -> list[Finding]:
    found = []
    for where, result in _comparisons(data).items():
        others = [name for name in paper.MIXED if name != "sandwich"]
        items = {name: against(result["contrasts"], "sandwich", name) for name in others}
        beats = all(sign(low, high) is False for _, low, high in items.values())
        beaten = any(sign(*against(result["contrasts"], "sandwich", name, len(others))[1:]) for name in others)
        says = False if beaten else True if beats else None
        closest = max(items, key=lambda name: items[name][0])
        found.append(Finding(where, says, f"against {closest} {_ci(*items[closest])}"))
    return found


def same_order(data: Data) -> list[Finding]:
    """Pairs of mixed schedules that are told apart in two places, against each other: with the same light model, where
    a place has several."""
    places = _comparisons(data)
    main = next((result for where, result in places.items() if where.startswith("light")), None)
    if main is None:
        return []
    found = []
    for where, result in places.items():
        if where.startswith("light"):
            continue
        same, reversed_, open_ = 0, [], 0
        light = where.rpartition(", ")[2]
        both = places[light] if light in places and light != where else main, result
        for a, b in combinations(paper.MIXED, 2):
            first, second = (sign(*against(found_in["contrasts"], a, b, 10)[1:]) for found_in in both)
            if first is None or second is None:
                open_ += 1
            elif first == second:
                same += 1
            else:
                reversed_.append(f"{a} and {b}")
        says = False if reversed_ else True if same > open_ else None
        evidence = f"of 10 pairs {same} in the same order, {len(reversed_)} reversed, {open_} not told apart"
        found.append(Finding(where, says, evidence + (f": {', '.join(reversed_)}" if reversed_ else "")))
    return found


def entropy_unchanged(data: Data) -> list[Finding]:
    found = []
    for where, result in _comparisons(data).items():
        rows = _rows(result)
        for key, what in (("entropy", "tokens"), ("word_entropy", "words")):
            if not rows["heavy"].get(key):
                continue
            base = rows["heavy"][key]
            shift = {name: rows[name][key] / base - 1 for name in paper.MIXED}
            worst = max(shift, key=lambda name: abs(shift[name]))
            half = max(_half(rows[name][f"{key}_ci"]) for name in (worst, "heavy")) / base * math.sqrt(2)
            size = abs(shift[worst])
            says = True if size + half <= SAME_ENTROPY else False if size - half > SAME_ENTROPY else None
            found.append(Finding(f"{where}, {what}", says, f"{worst}: {shift[worst]:+.2%} ± {half:.2%} of {base:.3f}"))
    return found


def _half(ci: Sequence[float | None]) -> float:
    return math.inf if ci[0] is None or ci[1] is None else (ci[1] - ci[0]) / 2


def continuous(data: Data) -> list[Finding]:
    if "shares" not in data:
        return []
    result = data["shares"]
    rises = [against(result["contrasts"], b, a) for a, b in pairwise(result["labels"])]
    whole = against(result["contrasts"], result["labels"][-1], result["labels"][0])
    steps = list(pairwise(result["labels"]))
    back = [step for step in steps if sign(*against(result["contrasts"], *step[::-1], len(steps))[1:]) is False]
    widths = [(b - a) / 100 for a, b in pairwise(result["shares"])]
    steepest = max(rise[0] / whole[0] / width for rise, width in zip(rises, widths, strict=True))
    says = False if back or steepest > 3 else True if sign(*whole[1:]) else None
    evidence = f"{len(back)} of {len(rises)} steps go down; the steepest pays {steepest:.1f} times its share of the gap"
    return [Finding("light share 0 to 100%", says, evidence)]


def deeper_loses_less(data: Data) -> list[Finding]:
    rows = sorted(data.get("depths", {}).get("rows", []), key=lambda row: row["depth"])[:-1]
    if len(rows) < 2:
        return []
    found = []
    for a, b in pairwise(rows):
        value, low, high = against(data["depths"]["contrasts"], a["schedule"], b["schedule"])
        evidence = f"{a['depth']} blocks lose {_ci(value, low, high)} more than {b['depth']}"
        found.append(Finding(f"{a['light']} to {b['light']}", sign(low, high), evidence))
    return found


def wall_clock_below_flops(data: Data) -> list[Finding]:
    found = []
    times = data.get("time", {})
    recorded = f" ({times['recorded'].split(',')[0]})" if times.get("recorded") else ""  # not measured in this run
    for where, item in (("this family", times.get("family")), ("the paper's size" + recorded, times.get("paper_size"))):
        if not item or not item.get("reference_ms_per_row_step") or not item.get("engine_ms_per_row_step"):
            continue
        depth = item["settings"]["depth"]
        blocks = 1 - depth[1] / depth[0]
        for sampler, key in (("MDLM's sampler", "reference"), ("the engine", "engine")):
            saved = 1 - item[f"{key}_light_ms_per_row_step"] / item[f"{key}_ms_per_row_step"]
            says = sign(saved - CLOCK, saved + CLOCK, 0.9 * blocks)
            says = None if says is None else not says
            evidence = f"light steps save {saved:.1%} of the time where blocks save {blocks:.1%}"
            found.append(Finding(f"{where}, {sampler}", says, evidence))
    return found


def modest(data: Data) -> list[Finding]:
    found = []
    for where, result in _comparisons(data).items():
        value, low, high = against(result["contrasts"], "sandwich", "heavy")
        above = sign(low, high, math.log1p(MODEST))
        says = None if above is None else not above
        found.append(Finding(where, says, f"sandwich {_ci(value, low, high)}, of light {_ci(*_gap(result))}"))
    return found


def _gap(result: Mapping[str, Any]) -> tuple[float, float, float]:
    return against(result["contrasts"], "light", "heavy")


def no_rival_wins(data: Data) -> list[Finding]:
    """Not a claim of the paper, which has no rivals; the question that its user has."""
    found = []
    for where, result in _comparisons(data).items():
        contests = [item for item in result["rivals"] if item["schedule"] == "sandwich"]
        for item in contests:
            says = {"wins": False, "loses": True, "level": None}[item["outcome"]]
            low, high = item["ci"]
            evidence = f"{item['rival']} ({item['what']}) {_ci(item['difference'], low, high)} against the sandwich"
            if says is None and sign(low, high) is not None:
                evidence += f"; among {len(result['rivals'])} contests p = {item['p_holm']:.2f} (Holm)"
            found.append(Finding(where, says, evidence))
    return found + (_rivals_on_fresh_rows(data["tuner"]["fresh"]) if "tuner" in data else [])


def _rivals_on_fresh_rows(fresh: Mapping[str, Any]) -> list[Finding]:
    """At each budget, every model alone (whole, or in as many steps as it allows) against the sandwich, on the same
    rows. An outcome must stand the adjustment for the number of all these contests (Holm)."""
    contests = []
    for rivals in rivals_by_budget(fresh).values():
        if (sandwich := rivals.pop("sandwich", None)) is not None:
            contests += [(row, sandwich) for row in rivals.values()]
    pairs = [(row["schedule"], sandwich["schedule"]) for row, sandwich in contests]
    adjusted = metrics.holm([_chance(*difference(fresh["contrasts"], *pair)) for pair in pairs])
    found = []
    for (row, sandwich), pair, p in zip(contests, pairs, adjusted, strict=True):
        value, low, high = against(fresh["contrasts"], *pair)
        evidence = f"{row['what']} {_ci(value, low, high)} against the sandwich on {fresh['n']} fresh rows"
        if p >= 1 - metrics.LEVEL and sign(low, high) is not None:
            evidence += f"; among {len(contests)} contests p = {p:.2f} (Holm)"
        says = None if p >= 1 - metrics.LEVEL else value > 0
        found.append(Finding(f"tuner, {sandwich['budget']:.0%} saved", says, evidence))
    return found


def _chance(value: float, error: float, rows: int) -> float:
    """Student's p-value of no difference; 1 where none was measured."""
    if rows < 2 or value == 0:
        return 1.0
    return 0.0 if error == 0 else 2 * metrics.student_cdf(-abs(value / error), rows - 1)


def survives_exact_sampling(data: Data) -> list[Finding]:
    found = []
    for steps, both in data.get("precision", {}).get("by_steps", {}).items():
        for kind, label in SAMPLERS.items():
            pairs = both[kind]["contrasts"]
            items = [
                f"quarter {k} against the first {_ci(*against(pairs, f'quarter:{k}', 'quarter:1'))}" for k in (2, 3)
            ]
            evidence = f"{'; '.join(items)}; {difference(pairs, 'quarter:2', 'quarter:1')[2]} samples"
            found.append(Finding(f"T = {steps}, {label}", early_is_robust(pairs), evidence))
    return found


def early_is_robust(pairs: Sequence[Mapping[str, Any]]) -> bool | None:
    """Do light steps cost more in both middle quarters than in the first? No if they cost less in one of them."""
    middle = ("quarter:2", "quarter:3")
    costs = all(sign(*against(pairs, name, "quarter:1")[1:]) for name in middle)
    saves = any(sign(*against(pairs, name, "quarter:1", len(middle))[1:]) is False for name in middle)
    return False if saves else True if costs else None


CLAIMS = (
    Claim(
        "Middle steps matter most",
        "abstract; fig:12b-4b-barplot-perplexity, fig:kldiv-plot, fig:per_segment_ppl_barplot",
        "light steps in the middle two quarters cost more than in the outer two; the most harmful of ten segments lies "
        "in the middle half and the safest outside; the KL peaks between t = 0.25 and 0.75",
        "schedules, search-influence, disagreement, second-corpus, bpe, precision",
        middle_matters,
    ),
    Claim(
        "The sandwich is the best way to place 25% light steps",
        "Section 3.2; tab:schedule_ppl_entopy_owt_12b-4b",
        "it beats each of the four quarters; no if any of them beats it",
        "schedules, prefixes, second-corpus, bpe, precision",
        sandwich_best,
    ),
    Claim(
        "The ranking is the same on a second corpus and with prefixes",
        "Section 3.5; app:lm1b",
        "no two mixed schedules are told apart in opposite orders, and most pairs are told apart in both places",
        "prefixes, second-corpus, bpe, precision",
        same_order,
    ),
    Claim(
        "Entropy is unchanged",
        "app:entropy",
        f"every mixed schedule's entropy is within {SAME_ENTROPY:.0%} of all-heavy's, of tokens and of words",
        "tables schedules, prefixes, second-corpus, bpe, precision",
        entropy_unchanged,
    ),
    Claim(
        "The trade-off is continuous",
        "tab:scaling_steps",
        "perplexity falls significantly at no light share against the one before, and none pays over three times its "
        "share of the gap",
        "shares",
        continuous,
    ),
    Claim(
        "Deeper light models lose less",
        "tab:scaling_models",
        "each depth loses more than the next",
        "depths",
        deeper_loses_less,
    ),
    Claim(
        "Wall-clock savings stay well below FLOPs savings",
        "Section 'Wall-clock vs. FLOPs'",
        f"all-light saves less than 90% as much time as it saves blocks (open within {CLOCK:.0%} of all time)",
        "time, shares",
        wall_clock_below_flops,
    ),
    Claim(
        "The degradation is modest",
        "abstract and introduction (3.4% at 16.7% saved FLOPs)",
        f"the 25% sandwich has at most {MODEST:.0%} more perplexity than all-heavy",
        "schedules, prefixes, second-corpus, bpe, precision",
        modest,
    ),
    Claim(
        "Early steps are robust also in exact sampling",
        "not asked in the paper, whose sampler draws in float32",
        "both middle quarters cost more than the first, at each number of steps and in both samplers",
        "precision",
        survives_exact_sampling,
    ),
    Claim(
        "Nothing simpler does as well for the same compute",
        "not asked in the paper",
        "every equal-compute rival loses to the sandwich",
        "schedules, second-corpus, bpe, tuner",
        no_rival_wins,
    ),
)
