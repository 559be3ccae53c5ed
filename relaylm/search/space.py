r"""A space of schedules, a model of their losses, and its minimum under a budget.

**Space.** The time axis is cut into S segments with (nearly) equal numbers of the T steps. Each segment gets one of O
options: a model, and the share of the segment's steps that are taken (1, 1/2, 1/4: fewer, larger steps). A *choice* is
one option for each segment, `choice[0]` at the masked end. Its price is the sum of its segments' prices.

**Model.** The loss y(c) of a choice is its log-perplexity minus that of all-heavy. It is modelled by

    y(c) = b prior(c) + sum_j main(j, c_j) + sum_j f_j e(j, c_j) e(j + 1, c_{j+1}) + g E(c)^2,

where prior(c) is the excess of the likelihood bound over all-heavy; main(j, o) is an effect of the model plus one of
the density, each with a part common to all segments and a part of its own; e(j, o) is the share of the segment's price
that an option saves; and E(c) is that share of the whole. Neighbours interact through f, and g lets many small losses
add up to more or less than their sum. A schedule that changes models inside a segment is a mix of options there
(`Space.mix`). The coefficients have Gaussian priors of mean 0. Their widths, and a variance for what the model cannot
express, maximise the marginal likelihood on a small grid. Measured means enter with their standard errors, so the
posterior is Gaussian: `Fit.predict` is its mean, `Fit.draw` a sample from it.

**Minimum.** `best` finds the choice of least loss within a price limit, exactly. For any multiplier m >= 0 and any
choice c within the limit,

    loss(c)  >=  min over all choices c' of  loss(c') + m (price(c') - limit),

and the right side is a shortest path through the segments, because only neighbours interact. Partial choices are
extended segment by segment. Kept are those that no other with the same last option undercuts in both price and loss,
and whose own such bound is below a threshold, which is raised if nothing below it fits the budget. The term in E
depends on the price alone, so it does not change which choice is best at a price, and is left out.

Shapes: S segments, O options, N measured schedules, F features, P effects, R changes left, W partial choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize_scalar

from relaylm.core.cost import Price, free_counts, mean_price
from relaylm.core.pairs import PairTable
from relaylm.core.schedule import Schedule, Segment
from relaylm.models.family import Family
from relaylm.search.trials import Trials

SLACK = 1e-9  # relative rounding error that sums of prices may have
PLAIN = 16  # segments up to which the minimum is found without a bound

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """Segments of time, and the options that each may take."""

    models: tuple[str, ...]  # light to heavy
    steps: int  # T
    segments: int
    densities: tuple[Fraction, ...]
    prices: Mapping[str, Price]
    free_n: np.ndarray  # free positions of the rows

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Steps in each segment, as in `cells`: segment j ends after round(T j / S) steps, halves up."""
        ends = [(2 * self.steps * j + self.segments) // (2 * self.segments) for j in range(self.segments + 1)]
        return tuple(b - a for a, b in pairwise(ends))

    @cached_property
    def options(self) -> tuple[tuple[str, Fraction], ...]:
        """(model, density), that of all-heavy first. Densities that give no segment fewer steps are left out."""
        kept: list[Fraction] = []
        for density in sorted(set(self.densities), reverse=True):
            if not kept or any(self.count(w, density) < self.count(w, kept[-1]) for w in self.widths):
                kept.append(density)
        return tuple((model, density) for model in self.models[::-1] for density in kept)

    @staticmethod
    def count(width: int, density: Fraction) -> int:
        """Steps that are taken of a segment's."""
        return max(1, math.ceil(width * density))

    @property
    def all_heavy(self) -> Choice:
        """The heavy model at every step."""
        return (0,) * self.segments

    @property
    def all_light(self) -> Choice:
        """The light model at every step."""
        return (self.options.index((self.models[0], Fraction(1))),) * self.segments

    @cached_property
    def price_SO(self) -> np.ndarray:
        """Mean price of each option in each segment."""
        free, rows = np.unique(self.free_n, return_counts=True)

        def mean(width: int, model: str, density: Fraction) -> float:
            count, price = self.count(width, density), self.prices[model]
            share = width / self.steps / count
            called_f = 1.0 if price.every_step else -np.expm1(free * math.log1p(-min(share, 1 - 1e-15)))
            return float((count * (price.base * called_f + price.slope * share * free) * rows).sum() / rows.sum())

        return np.array([[mean(width, *option) for option in self.options] for width in self.widths])

    def price(self, choice: Sequence[int]) -> float:
        """Mean price of a row."""
        return math.fsum(self.price_SO[np.arange(self.segments), list(choice)])

    @cached_property
    def saved_SO(self) -> np.ndarray:
        """The share of a segment's all-heavy price that an option saves."""
        return 1 - self.price_SO / self.price_SO[:, :1]

    def schedule(self, choice: Sequence[int]) -> Schedule:
        """The choice in counts of steps; neighbours that continue alike are one segment."""
        runs: list[tuple[str, int, int]] = []  # model, steps taken, steps of the full grid
        for option, width in zip(choice, self.widths, strict=True):
            model, density = self.options[option]
            count = self.count(width, density)
            if runs and runs[-1][0] == model and Fraction(runs[-1][1], runs[-1][2]) == Fraction(count, width):
                runs[-1] = (model, runs[-1][1] + count, runs[-1][2] + width)
            else:
                runs.append((model, count, width))
        if len(runs) == 1 or all(count == width for _, count, width in runs):
            return Schedule(tuple(Segment(model, count) for model, count, _ in runs))
        return Schedule(tuple(Segment(model, count, Fraction(width, self.steps)) for model, count, width in runs))

    def mix(self, schedule: Schedule) -> np.ndarray | None:
        """(S, O): the share of each segment that each option has in a schedule, which may change inside segments; None
        if it takes steps of other sizes than the options."""
        table = schedule.timetable()
        out = np.zeros((self.segments, len(self.options)))
        ends = np.cumsum((0, *self.widths)) / self.steps
        done_T1 = 1 - np.array(table.times)
        for j, (start, stop, width) in enumerate(zip(ends, ends[1:], self.widths, strict=False)):
            inside_T = np.minimum(done_T1[1:], stop) - np.maximum(done_T1[:-1], start)
            for k in np.flatnonzero(inside_T > 1e-9).tolist():
                share = Fraction(width, self.steps) / Fraction(done_T1[k + 1] - done_T1[k])  # steps in the segment
                fits = [
                    o
                    for o, (model, density) in enumerate(self.options)
                    if model == table.models[k] and abs(self.count(width, density) / float(share) - 1) < 1e-6
                ]
                if not fits:
                    return None
                out[j, fits[0]] += inside_T[k] / (stop - start)
        return out

    def show(self, choice: Sequence[int]) -> str:
        """Bits where there are two models and one density, else the schedule."""
        if len(self.models) == 2 and all(self.options[o][1] == 1 for o in choice):
            return "".join("1" if self.options[o][0] == self.models[0] else "0" for o in choice)
        return str(self.schedule(choice))


@dataclass
class Problem:
    """What a search looks for: the best schedule of these models on this grid, measured by these trials."""

    family: Family
    trials: Trials
    light: str
    heavy: str
    models: tuple[str, ...]  # that may be used, light to heavy
    steps: int
    segments: int
    densities: tuple[Fraction, ...]
    unit: str
    prices: dict[str, Price]
    free_n: np.ndarray  # how many positions of each row are free, or which (n, L)
    notes: list[str] = field(default_factory=list)
    pairs: PairTable | None = None  # what positions know of each other; without it spaced plans are left out

    @property
    def length(self) -> int:
        """Positions of a row."""
        return int(self.trials.given_PL.shape[1])

    @property
    def spaced(self) -> bool:
        """May spaced plans be candidates? They have no steps to count blocks by."""
        return self.pairs is not None and not any(price.every_step for price in self.prices.values())

    def price(self, schedule: Schedule) -> float:
        """Mean price of a row, in the problem's unit."""
        return mean_price(self.prices, schedule, None, self.free_n)

    @property
    def all_heavy(self) -> float:
        """The price of the heavy model at every step."""
        return self.price(self.alone(self.heavy))

    def alone(self, model: str, steps: int | None = None) -> Schedule:
        """One model at every step."""
        return Schedule((Segment(model, steps or self.steps),))

    def sandwich(self, light_steps: int) -> Schedule:
        """The light model for half of its steps, the heavy one, the light one again."""
        return Schedule.parse(f"sandwich:{light_steps}/{self.steps}").bind(self.light, self.heavy).resample(self.steps)

    def space(self, densities: Sequence[Fraction] | None = None) -> Space:
        """The schedules that may be chosen."""
        chosen = tuple(self.densities if densities is None else densities)
        return Space(self.models, self.steps, self.segments, chosen, self.prices, free_counts(self.free_n))

    def about(self, schedule: Schedule) -> dict[str, Any]:
        """A schedule's name and price, for a result."""
        price = self.price(schedule)
        saved = 1 - price / self.all_heavy
        return {"schedule": str(schedule), "steps": schedule.steps, "price": price, "saved": saved}


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Fit:
    """The posterior of the model."""

    space: Space
    single_SOF: np.ndarray  # features of single options
    scale: float  # unit of losses
    mean_F: np.ndarray
    root_FF: np.ndarray  # a square root of the posterior's covariance
    loo_N: np.ndarray  # prediction of each measured schedule from the others (leave one out)
    widths: tuple[float, float, float]  # of segments' own effects, of neighbours', of what is not expressed

    def predict(self, mixes_NSO: np.ndarray) -> np.ndarray:
        """Posterior mean of the losses of mixes."""
        return features(self.space, self.single_SOF, mixes_NSO) @ self.mean_F * self.scale

    def spread(self, mixes_NSO: np.ndarray) -> np.ndarray:
        """Standard deviation of the prediction, without the variance of what the model cannot express."""
        return np.linalg.norm(features(self.space, self.single_SOF, mixes_NSO) @ self.root_FF, axis=1) * self.scale

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Coefficients drawn from the posterior, (F,)."""
        return self.mean_F + self.root_FF @ rng.normal(size=self.root_FF.shape[1])

    def tables(self, weight_F: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Losses of options (S, O) and of neighbouring options (S - 1, O, O), without the term in E, at the posterior
        mean or at other coefficients."""
        weight_F = (self.mean_F if weight_F is None else weight_F) * self.scale
        e_SO = self.space.saved_SO
        f_S = weight_F[len(weight_F) - len(e_SO) : -1]
        return self.single_SOF @ weight_F, f_S[:, None, None] * e_SO[:-1, :, None] * e_SO[1:, None, :]


def single_features(space: Space, prior_SO: np.ndarray) -> np.ndarray:
    """(S, O, F): the prior; model and density effects, common and by segment; zeros for neighbours (S - 1) and E^2."""
    densities = sorted({d for _, d in space.options}, reverse=True)
    own_OP = np.array(
        [[*(m == name for name in space.models[:-1]), *(d == x for x in densities[1:])] for m, d in space.options]
    ).reshape(len(space.options), -1)
    effects = own_OP.shape[1]
    out_SOF = np.zeros((*prior_SO.shape, 1 + effects * (1 + space.segments) + space.segments))
    out_SOF[:, :, 0] = prior_SO
    for j, width in enumerate(space.widths):
        for place in (0, 1 + j):
            out_SOF[j, :, 1 + effects * place : 1 + effects * (place + 1)] = width / space.steps * own_OP
    return out_SOF


def features(space: Space, single_SOF: np.ndarray, mixes_NSO: np.ndarray) -> np.ndarray:
    """(N, F): those of single options, weighted; products of neighbours; E^2."""
    out_NF = np.einsum("nso,sof->nf", mixes_NSO, single_SOF)
    e_NS = (mixes_NSO * space.saved_SO).sum(axis=2)
    share_S = space.price_SO[:, 0] / space.price_SO[:, 0].sum()
    out_NF[:, out_NF.shape[1] - space.segments : -1] = e_NS[:, :-1] * e_NS[:, 1:]
    out_NF[:, -1] = (e_NS @ share_S) ** 2
    return out_NF


def fit(space: Space, prior_SO: np.ndarray, mixes_NSO: np.ndarray, loss_N: np.ndarray, error_N: np.ndarray) -> Fit:
    """The posterior from mean losses against all-heavy and their standard errors."""
    unit = max(1e-3, float(np.abs(loss_N).max(initial=0.0)))
    whole = float(np.abs(prior_SO[np.arange(space.segments), list(space.all_light)].sum()))
    single_SOF = single_features(space, prior_SO / whole if whole > 0 else prior_SO)
    x_NF = features(space, single_SOF, mixes_NSO)
    # Paired losses may have no spread at all (small models draw the same tokens): a floor keeps the matrices below
    # positive definite in float64.
    floor = max(1e-12, 1e-10 * float((x_NF**2).sum(axis=1).max(initial=0.0)))
    y_N, noise_N = loss_N / unit, np.maximum((error_N / unit) ** 2, floor)
    common = (x_NF.shape[1] - 1 - space.segments) // (space.segments + 1)
    most: tuple[float, np.ndarray, tuple[float, float, float]] | None = None
    for own, pair, rest in product((0.25, 0.5, 1.0, 2.0), (0.03, 0.1, 0.3), (0.0, 0.02, 0.05, 0.1)):
        sd_F = np.repeat([1.0, own, pair, 1.0], [1 + common, common * space.segments, space.segments - 1, 1])
        factor = cho_factor((x_NF * sd_F**2) @ x_NF.T + np.diag(noise_N + rest**2), lower=True)
        evidence = -0.5 * float(y_N @ cho_solve(factor, y_N)) - float(np.log(np.diag(factor[0])).sum())
        if most is None or evidence > most[0]:
            most = (evidence, sd_F, (own, pair, rest))
    assert most is not None
    _, sd_F, widths = most
    noise_N = noise_N + widths[2] ** 2
    root_FF = cholesky((x_NF.T / noise_N) @ x_NF + np.diag(1 / sd_F**2), lower=True)
    mean_F = cho_solve((root_FF, True), x_NF.T @ (y_N / noise_N))
    inverse_FF = solve_triangular(root_FF, np.eye(len(root_FF)), lower=True)
    cover_NN = np.linalg.inv((x_NF * sd_F**2) @ x_NF.T + np.diag(noise_N))
    loo_N = (y_N - cover_NN @ y_N / np.diag(cover_NN)) * unit
    return Fit(space, single_SOF, unit, mean_F, inverse_FF.T, loo_N, widths)


# ------------------------------------------------------------------------------------------------ the minimum


def best(
    price_SO: np.ndarray,
    loss_SO: np.ndarray,
    pair_SOO: np.ndarray | None,
    limit: float,
    *,
    allowed: Sequence[int] | None = None,
    runs: int | None = None,
) -> Choice | None:
    """The choice of least loss whose price is within the limit, the cheapest of equals; None if nothing fits.

    `pair_SOO[j]` is added for the options of segments j and j + 1. `allowed` are the options that may be used, and
    `runs` is the largest number of runs of one option.
    """
    use = np.arange(price_SO.shape[1]) if allowed is None else np.array(sorted(allowed))
    shape = (len(price_SO) - 1, len(use), len(use))
    pair_SOO = np.zeros(shape) if pair_SOO is None else pair_SOO[:, use][:, :, use]
    paths = _Paths(price_SO[:, use], loss_SO[:, use], pair_SOO, runs, limit * (1 + SLACK))
    for m, threshold in paths.thresholds():
        choice, loss = paths.walk(m, threshold)
        if loss <= threshold:
            return tuple(int(use[o]) for o in choice) if choice else None
    raise AssertionError("the last threshold is infinite")


@dataclass(frozen=True)
class _Paths:
    """Choices as paths through the segments."""

    price_SO: np.ndarray
    loss_SO: np.ndarray
    pair_SOO: np.ndarray
    runs: int | None
    limit: float

    def tails(self, cost_SO: np.ndarray, pair_SOO: np.ndarray) -> np.ndarray:
        """(S, O, R): the least cost of the segments after j, for the option of segment j and the changes left."""
        out_SOR = np.zeros((*cost_SO.shape, self.runs or 1))
        for j in range(len(cost_SO) - 2, -1, -1):
            next_OR = cost_SO[j + 1][:, None] + out_SOR[j + 1]
            change_OR = (next_OR + pair_SOO[j][:, :, None]).min(axis=1)
            if self.runs is None:
                out_SOR[j] = change_OR
            else:
                out_SOR[j] = next_OR + pair_SOO[j].diagonal()[:, None]
                out_SOR[j, :, 1:] = np.minimum(out_SOR[j, :, 1:], change_OR[:, :-1])
        return out_SOR

    def thresholds(self) -> Iterator[tuple[float, float]]:
        """Multipliers for the bound, and what a choice may lose; the last is no limit at all. Any multiplier will do; a
        good one keeps few partial choices, which pays where there are many segments."""
        if len(self.price_SO) > PLAIN:
            spread = float(np.ptp(self.loss_SO, axis=1).mean() + np.ptp(self.pair_SOO, axis=(1, 2)).sum()) or 1.0
            # Limited, so that prices which hardly differ do not take the multiplier beyond what a float can hold.
            middle = math.log(spread) - math.log(float(np.ptp(self.price_SO, axis=1).mean()) or 1.0)
            middle = min(max(middle, -300.0), 300.0)

            def bound(log_m: float) -> float:
                cost_SO = self.loss_SO + math.exp(log_m) * self.price_SO
                first_O = cost_SO[0] + self.tails(cost_SO, self.pair_SOO)[0, :, -1]
                return float(first_O.min()) - math.exp(log_m) * self.limit

            ends = (middle - 12, middle + 12)
            found = minimize_scalar(lambda x: -bound(x), bounds=ends, method="bounded", options={"xatol": 1e-3})
            yield from ((math.exp(found.x), -found.fun + gap * spread) for gap in (0.25, 1.0, 4.0, 16.0))
        yield 0.0, math.inf

    def walk(self, m: float, threshold: float) -> tuple[list[int], float]:
        """The best choice among those whose bound is within the threshold, and its loss; [] and infinity if none is."""
        cheapest_SOR = self.tails(self.price_SO, 0 * self.pair_SOO)
        ahead_SOR = self.tails(self.loss_SO + m * self.price_SO, self.pair_SOO)
        price_W, loss_W, option_W = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64)
        left_W = np.full(1, self.runs or 0)
        trail = []
        for j, (price_O, loss_O) in enumerate(zip(self.price_SO, self.loss_SO, strict=True)):
            pair_OO = self.pair_SOO[j - 1] if j else np.zeros(2 * price_O.shape)
            parts = []
            for o in range(len(price_O)):
                left = left_W - ((option_W != o) | (j == 0)) if self.runs else left_W
                price, loss = price_W + price_O[o], loss_W + loss_O[o] + pair_OO[option_W, o]
                hopeful = (left >= 0) & (price + cheapest_SOR[j, o, left] <= self.limit)
                hopeful &= loss + m * (price - self.limit) + ahead_SOR[j, o, left] <= threshold
                for r in range(self.runs or 1):
                    which = np.flatnonzero(hopeful & (left == r))
                    which = which[_undominated(price[which], loss[which])]
                    parts.append((price[which], loss[which], np.full(len(which), o), left[which], which))
            price_W, loss_W, option_W, left_W, from_W = (np.concatenate(each) for each in zip(*parts, strict=True))
            trail.append((option_W, from_W))
        if not len(loss_W):
            return [], math.inf
        at = int(np.lexsort((price_W, loss_W))[0])
        choice, loss = [], float(loss_W[at])
        for option_W, from_W in trail[::-1]:
            choice.append(int(option_W[at]))
            at = int(from_W[at])
        return choice[::-1], loss


def _undominated(price_W: np.ndarray, loss_W: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other undercuts, by rising price; of equals the first."""
    order = np.lexsort((loss_W, price_W))
    first = np.ones(len(order), dtype=bool)
    first[1:] = loss_W[order][1:] < np.minimum.accumulate(loss_W[order])[:-1]
    return order[first]
