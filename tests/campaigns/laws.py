"""Laws: samples against enumerated distributions, for every decoding rule, every kind of spacing and several schedules,
on fresh random denoisers with fresh seeds. Each test is chi-square on all rows that can occur; together they are
corrected by Holm's method. Samples of `dream-entropy` and `dream-margin` must also be rejected under each other's law.
The enumeration is written from the rules' definitions and shares no code with the samplers.
Example: python tests/campaigns/laws.py --size 1000"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers import TableDenoiser, law_of_events, law_of_steps, p_value

from tests.campaigns.common import Campaign

LENGTH, SYMBOLS, STEPS, LEVEL = 3, 3, 4, 0.01
State = tuple[int, ...]
Law = dict[Any, float]
Choice = Callable[[list[int], np.ndarray], list[int]]


# ------------------------------------------------------------------------------------------------------ enumeration


def written(state: State, due: tuple[int, ...] | list[int], p_LV: np.ndarray) -> Law:
    """All ways to draw tokens at positions, each from its own distribution."""
    ways: Law = {}
    for tokens in itertools.product(range(SYMBOLS), repeat=len(due)):
        new = list(state)
        for j, token in zip(due, tokens, strict=True):
            new[j] = token
        ways[tuple(new)] = math.prod(float(p_LV[j, token]) for j, token in zip(due, tokens, strict=True))
    return ways


def masked(state: State) -> list[int]:
    return [j for j, token in enumerate(state) if token == SYMBOLS]


def advance(law: Law, step: Callable[[State], Law]) -> Law:
    """The law after a step that says what becomes of each row."""
    after: Law = {}
    for state, weight in law.items():
        for new, chance in step(state).items():
            after[new] = after.get(new, 0.0) + weight * chance
    return after


def entropy(p: np.ndarray) -> float:
    return -sum(float(x) * math.log(x) for x in p if x > 0)


def margin(p: np.ndarray) -> float:
    top = sorted(map(float, p))[::-1]
    return top[0] - top[1]


def by_look(model: TableDenoiser, count: Callable[[int, int], int], sure: Callable[[np.ndarray], float]) -> Law:
    """Rules that look at distributions: the surest `count(k, masked)` positions of each step k."""
    law: Law = {(SYMBOLS,) * LENGTH: 1.0}
    for k in range(STEPS):

        def step(state: State, k: int = k) -> Law:
            here, p_LV = masked(state), model(state, 1.0)
            order = sorted(here, key=lambda j: (-sure(p_LV[j]), j))
            return written(state, order[: count(k, len(here))], p_LV)

        law = advance(law, step)
    return law


def by_draw(model: TableDenoiser, keep: Callable[[int, list[tuple[float, int]]], int], steps: int | None) -> Law:
    """Rules that draw everywhere and keep the likeliest draws: `keep(k, [(probability, position)])` of them."""
    law: Law = {(SYMBOLS,) * LENGTH: 1.0}
    for k in range(LENGTH if steps is None else steps):

        def step(state: State, k: int = k) -> Law:
            here, p_LV = masked(state), model(state, 1.0)
            after: Law = {}
            for tokens in itertools.product(range(SYMBOLS), repeat=len(here)):
                drawn = dict(zip(here, tokens, strict=True))
                sure = sorted(((float(p_LV[j, drawn[j]]), j) for j in here), key=lambda pair: (-pair[0], pair[1]))
                new = list(state)
                for _, j in sure[: keep(k, sure)]:
                    new[j] = drawn[j]
                chance = math.prod(float(p_LV[j, token]) for j, token in drawn.items())
                after[tuple(new)] = after.get(tuple(new), 0.0) + chance
            return after

        law = advance(law, step)
    return law


def llada_count(k: int, size: int) -> int:
    base, rest = divmod(LENGTH, STEPS)
    return min(size, base + (k < rest))


def dream_times() -> list[float]:
    return [1 - k * (1 - 1e-3) / STEPS for k in range(STEPS + 1)]


def dream_count(k: int, size: int) -> int:
    times = dream_times()
    return size if k == STEPS - 1 else int(size * (1 - times[k + 1] / times[k]))


def law_random(model: TableDenoiser) -> Law:
    law: Law = {(SYMBOLS,) * LENGTH: 1.0}
    for k in range(STEPS):

        def step(state: State, k: int = k) -> Law:
            here, p_LV = masked(state), model(state, 1.0)
            sets = list(itertools.combinations(here, llada_count(k, len(here))))
            after: Law = {}
            for due in sets:
                for new, chance in written(state, due, p_LV).items():
                    after[new] = after.get(new, 0.0) + chance / len(sets)
            return after

        law = advance(law, step)
    return law


def law_origin(model: TableDenoiser) -> Law:
    times, law = dream_times(), {(SYMBOLS,) * LENGTH: 1.0}
    for k in range(STEPS):
        hazard = 1.0 if k == STEPS - 1 else 1 - times[k + 1] / times[k]

        def step(state: State, hazard: float = hazard) -> Law:
            here, p_LV = masked(state), model(state, 1.0)
            after: Law = {}
            for size in range(len(here) + 1):
                for due in itertools.combinations(here, size):
                    chance = hazard**size * (1 - hazard) ** (len(here) - size)
                    for new, p in written(state, due, p_LV).items():
                        after[new] = after.get(new, 0.0) + chance * p
            return after

        law = advance(law, step)
    return law


def law_until_done(model: TableDenoiser, choose: Choice) -> Law:
    """Rules that look at distributions until nothing is masked."""
    law: Law = {(SYMBOLS,) * LENGTH: 1.0}
    for _ in range(LENGTH):

        def step(state: State) -> Law:
            here, p_LV = masked(state), model(state, 1.0)
            return written(state, choose(here, p_LV), p_LV) if here else {state: 1.0}

        law = advance(law, step)
    return law


def choose_eb(gamma: float) -> Choice:
    def choose(here: list[int], p_LV: np.ndarray) -> list[int]:
        order = sorted(here, key=lambda j: (entropy(p_LV[j]), j))
        size = 1
        for n in range(2, len(order) + 1):
            first = [entropy(p_LV[j]) for j in order[:n]]
            size = n if sum(first) - max(first) <= gamma else size
        return order[:size]

    return choose


def choose_surest(distance: int) -> Choice:
    def choose(here: list[int], p_LV: np.ndarray) -> list[int]:
        taken: list[int] = []
        for j in sorted(here, key=lambda j: (entropy(p_LV[j]), j)):
            if all(abs(j - other) >= distance for other in taken):
                taken.append(j)
        return taken

    return choose


def law_of_sets(model: TableDenoiser, sets: list[tuple[int, ...]]) -> Law:
    """Positions written in sets that are known beforehand."""
    law: Law = {(SYMBOLS,) * LENGTH: 1.0}
    for due in sets:
        law = advance(law, lambda state, due=due: written(state, due, model(state, 1.0)))
    return law


def law_spaced(model: TableDenoiser, distance: int, prefix: bool) -> Law:
    """Every order of the positions is equally likely; a call takes what is far enough from what it has taken."""
    total: Law = {}
    orders = list(itertools.permutations(range(LENGTH)))
    for order in orders:
        law: Law = {(SYMBOLS,) * LENGTH: 1.0}
        left = list(order)
        while left:
            taken: list[int] = []
            for j in left:
                if all(abs(j - other) >= distance for other in taken):
                    taken.append(j)
                elif prefix:
                    break
            left = [j for j in left if j not in taken]
            law = advance(law, lambda state, due=tuple(taken): written(state, due, model(state, 1.0)))
        for state, chance in law.items():
            total[state] = total.get(state, 0.0) + chance / len(orders)
    return total


Rates = Callable[[float, float], tuple[float, float, float]]  # (t, s) to alpha_t, alpha_s and sigma


def capped(sigma: Callable[[float], float]) -> Rates:
    """alpha = 1 - t, and sigma from its largest value."""

    def rates(t: float, s: float) -> tuple[float, float, float]:
        return 1 - t, 1 - s, sigma(1.0 if t == 1 else min(1.0, s / (1 - t)))

    return rates


def looped(eta: float, on: float, off: float, alpha: float) -> Rates:
    """Up to alpha at time `on`, there until `off` with remasking, and on to 1; `on` and `off` lie on the grid."""

    def rates(t: float, s: float) -> tuple[float, float, float]:
        if t > on:
            return (1 - t) * alpha / (1 - on), (1 - s) * alpha / (1 - on), 0.0
        if t > off:
            return alpha, alpha, eta
        return 1 - t * (1 - alpha) / off, 1 - s * (1 - alpha) / off, 0.0

    return rates


def law_remdm(model: TableDenoiser, rates: Rates, conf: bool = False) -> Law:
    """States carry, beside the tokens, the probability with which each was drawn (for `remdm-conf`)."""
    start = ((SYMBOLS,) * LENGTH, (0.0,) * LENGTH)
    law: Law = {start: 1.0}
    for k in range(STEPS):
        a_t, a_s, most = rates((STEPS - k) / STEPS, (STEPS - k - 1) / STEPS)
        sigma = 0.0 if conf else most

        def step(state: Any, a_t: float = a_t, a_s: float = a_s, sigma: float = sigma, most: float = most) -> Law:
            row, psi = state
            p_LV, there = model(row, 1.0), [j for j in range(LENGTH) if row[j] != SYMBOLS]
            total = sum(math.exp(-psi[j]) for j in there)
            chances = []
            for j in range(LENGTH):
                if row[j] == SYMBOLS:
                    chances.append((a_s - (1 - sigma) * a_t) / (1 - a_t))
                else:
                    chances.append(most * math.exp(-psi[j]) / total if conf else sigma)
            after: Law = {}
            for changed in itertools.product((False, True), repeat=LENGTH):
                weight = math.prod(c if yes else 1 - c for c, yes in zip(chances, changed, strict=True))
                if not weight:
                    continue
                due = [j for j in range(LENGTH) if changed[j] and row[j] == SYMBOLS]
                for new, chance in written(row, due, p_LV).items():
                    tokens, sure = list(new), list(psi)
                    for j in due:
                        sure[j] = float(p_LV[j, new[j]]) if conf else 0.0
                    for j in there:
                        if changed[j]:
                            tokens[j], sure[j] = SYMBOLS, 0.0
                    key = (tuple(tokens), tuple(sure))
                    after[key] = after.get(key, 0.0) + weight * chance
            return after

        law = advance(law, step)
    rows: Law = {}
    for (row, _), chance in law.items():
        rows[row] = rows.get(row, 0.0) + chance
    return rows


# ------------------------------------------------------------------------------------------------------------ cases

GRID = [1 - k / STEPS for k in range(STEPS + 1)]
START = (SYMBOLS,) * LENGTH


def two(a: TableDenoiser, b: TableDenoiser, light: int) -> Law:
    """The first `light` steps by a, the others by b."""
    return law_of_steps(START, GRID, lambda k, state: a if k < light else b, SYMBOLS)


Case = tuple[dict[str, Any], Callable[[TableDenoiser, TableDenoiser], Law]]
CASES: dict[str, Case] = {
    "uniform": ({"steps": STEPS}, lambda a, b: two(a, b, STEPS)),
    "uniform, two models": ({"schedule": "a:1 b:3"}, lambda a, b: two(a, b, 1)),
    "uniform, shares": ({"schedule": "a:50% b:50%", "steps": STEPS}, lambda a, b: two(a, b, 2)),
    "infinite": ({"steps": math.inf}, lambda a, b: law_of_events(START, [1.0, 0.0], [a], SYMBOLS)),
    "infinite, two models": (
        {"schedule": "a:50% b:50%", "steps": math.inf},
        lambda a, b: law_of_events(START, [1.0, 0.5, 0.0], [a, b], SYMBOLS),
    ),
    **{
        f"spaced:{d}{form}": ({"spacing": f"{d}{form}"}, lambda a, b, d=d, form=form: law_spaced(a, d, bool(form)))
        for d in (1, 2, 3)
        for form in ("", ":prefix")
    },
    "rule ancestral": ({"rule": "ancestral", "steps": STEPS}, lambda a, b: two(a, b, STEPS)),
    "rule random": ({"rule": "random", "steps": STEPS}, lambda a, b: law_random(a)),
    "rule low-confidence": (
        {"rule": "low-confidence", "steps": STEPS},
        lambda a, b: by_draw(a, lambda k, sure: llada_count(k, len(sure)), STEPS),
    ),
    "rule dream-origin": ({"rule": "dream-origin", "steps": STEPS}, lambda a, b: law_origin(a)),
    "rule dream-maskgit": (
        {"rule": "dream-maskgit", "steps": STEPS},
        lambda a, b: by_draw(a, lambda k, sure: dream_count(k, len(sure)), STEPS),
    ),
    "rule dream-entropy": (
        {"rule": "dream-entropy", "steps": STEPS},
        lambda a, b: by_look(a, dream_count, lambda p: -entropy(p)),
    ),
    "rule dream-margin": ({"rule": "dream-margin", "steps": STEPS}, lambda a, b: by_look(a, dream_count, margin)),
    "rule threshold": (
        {"rule": "threshold:0.6"},
        lambda a, b: by_draw(a, lambda k, sure: max(1, sum(p >= 0.6 for p, _ in sure)), None),
    ),
    "rule factor": (
        {"rule": "factor:1.2"},
        lambda a, b: by_draw(
            a,
            lambda k, sure: next(
                (n for n in range(1, len(sure)) if (n + 2) * (1 - sure[n][0]) > 1.2),
                len(sure),
            ),
            None,
        ),
    ),
    "rule eb": ({"rule": "eb:0.5"}, lambda a, b: law_until_done(a, choose_eb(0.5))),
    "rule surest:1": ({"rule": "surest:1"}, lambda a, b: law_until_done(a, choose_surest(1))),
    "rule surest:2": ({"rule": "surest:2"}, lambda a, b: law_until_done(a, choose_surest(2))),
    "rule surest:3": ({"rule": "surest:3"}, lambda a, b: law_until_done(a, choose_surest(3))),
    "rule dus": ({"rule": "dus", "block_length": 2}, lambda a, b: law_of_sets(a, [(0, 1), (2,)])),
    "rule remdm-cap": (
        {"rule": "remdm-cap:0.2", "steps": STEPS},
        lambda a, b: law_remdm(a, capped(lambda most: min(0.2, most))),
    ),
    "rule remdm-rescale": (
        {"rule": "remdm-rescale:0.4", "steps": STEPS},
        lambda a, b: law_remdm(a, capped(lambda most: 0.4 * most)),
    ),
    "rule remdm-conf": (
        {"rule": "remdm-conf", "steps": STEPS},
        lambda a, b: law_remdm(a, capped(lambda most: most), conf=True),
    ),
    "rule remdm-loop": (
        {"rule": "remdm-loop:0.1:0.75:0.25:0.9", "steps": STEPS},
        lambda a, b: law_remdm(a, looped(0.1, 0.75, 0.25, 0.9)),
    ),
}


def tokens_of(options: dict[str, Any], a: TableDenoiser, b: TableDenoiser, n: int, seed: int) -> np.ndarray:
    """Samples by the public function."""
    import relaylm

    family = relaylm.Family({"a": a, "b": b}, SYMBOLS, SYMBOLS + 1, LENGTH)  # type: ignore[dict-item]
    options = {"schedule": "a", **options}
    return relaylm.sample(family, options.pop("schedule"), n, seed=seed, batch_size=4096, **options).tokens


def apart(seed: int) -> tuple[TableDenoiser, Law, Law]:
    """A denoiser under which entropy and margin choose differently often: total variation above 0.05."""
    for k in itertools.count():
        model = TableDenoiser(seed + k, LENGTH, SYMBOLS)
        laws = [CASES[f"rule dream-{name}"][1](model, model) for name in ("entropy", "margin")]
        if sum(abs(laws[0].get(s, 0.0) - laws[1].get(s, 0.0)) for s in {**laws[0], **laws[1]}) / 2 > 0.05:
            return model, laws[0], laws[1]
    raise AssertionError


def main(argv: list[str] | None = None, n: int = 20_000) -> int:
    campaign = Campaign("laws", __doc__ or "", 100, argv)
    names = campaign.wanted(list(CASES))
    tests: dict[str, list[float]] = campaign.details.setdefault("p_values", {})
    for case in campaign.cases():
        name = names[case % len(names)]
        options, law_of = CASES[name]
        seed = int(np.random.default_rng([campaign.seed, case]).integers(2**31))
        a, b = TableDenoiser(seed, LENGTH, SYMBOLS), TableDenoiser(seed + 1, LENGTH, SYMBOLS)
        law = law_of(a, b)
        assert abs(sum(law.values()) - 1) < 1e-9, name
        tests.setdefault(name, []).append(p_value(tokens_of(options, a, b, n, seed), law, SYMBOLS))
        campaign.counts["tests"] += 1
    flat = sorted((p, name) for name, values in tests.items() for p in values)
    for rank, (p, name) in enumerate(flat):
        if p * (len(flat) - rank) >= LEVEL:
            break
        campaign.fail(name, f"p = {p:.3g}, rejected at level {LEVEL} by Holm's method over {len(flat)} tests")
    if any("dream" in name for name in names):
        campaign.details["told apart"] = told_apart(campaign, n)
    return campaign.finish(rows=n, smallest=flat[0] if flat else None, level=LEVEL)


def told_apart(campaign: Campaign, n: int) -> dict[str, float]:
    """p-values of the samples of each of Dream's two rules under the law of the other, and under its own."""
    model, by_entropy, by_margin = apart(campaign.seed)
    laws = {"entropy": by_entropy, "margin": by_margin}
    found = {}
    for rule in laws:
        tokens = tokens_of(CASES[f"rule dream-{rule}"][0], model, model, n, campaign.seed)
        for law in laws:
            p = found[f"samples of dream-{rule}, law of dream-{law}"] = p_value(tokens, laws[law], SYMBOLS)
            if (p < 1e-6) != (rule != law):
                campaign.fail(f"dream-{rule} under the law of dream-{law}", f"p = {p:.3g}")
    return found


if __name__ == "__main__":
    sys.exit(main())
