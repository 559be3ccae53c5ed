r"""A space of schedules, a model of their losses that is quick to fit, and its exact minimum under a budget.

**Space.** The time axis is cut into S segments of (nearly) equal numbers of the T steps. Each gets one of O options: a
model, and the share of the segment's steps that are taken (1, 1/2, 1/4: fewer, larger steps). A *choice* is one option
for each segment, `choice[0]` at the masked end. Its price is the sum of its segments' prices, exactly.

**Model.** The loss y(c) of a choice, its log-perplexity less that of all-heavy, is taken to be

    y(c) = b prior(c) + sum_j main(j, c_j) + sum_j f_j e(j, c_j) e(j + 1, c_{j+1}) + g E(c)^2,

where prior(c) is the likelihood bound's excess over all-heavy, main(j, o) is one effect for the model and one for the
density (each the sum of a part common to all segments and one of its own), e(j, o) is the share of the segment's price
that an option saves and E(c) that of the whole. Neighbours interact through f; that many small losses add up to less
(or more) than their sum is g's doing. A schedule that changes
models inside a segment is a mix of options there, with the shares as weights (`mix`). All coefficients have Gaussian
priors of mean 0; their widths, and a variance
for what the model cannot express, are those of largest marginal likelihood on a small grid. Measured means enter with
their own standard errors. So the posterior is Gaussian: `predict` gives its mean, `draw` a sample from it
(for Thompson's rule), `leave_one_out` what the model says of each schedule when it has not seen it.

**Minimum.** `best` finds the choice of least loss within a price, exactly, by fronts of undominated (price, loss)
pairs, one for each option of the segment last decided, since only neighbours interact. The term in E depends on the
price alone; it does not change which choice is best at a price, and is left out there.

Shapes: S segments, O options, N measured schedules, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from relaylm.cost import Price
from relaylm.errors import UserError
from relaylm.schedule import Schedule, Segment

SLACK = 1e-9  # relative: what sums of prices may differ by in rounding

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """Segments of time, and the options that each may take."""

    models: tuple[str, ...]  # light to heavy
    steps: int  # T
    segments: int
    densities: tuple[Fraction, ...]
    prices: Mapping[str, Price]
    free_n: np.ndarray  # free positions of the rows there are

    def __post_init__(self) -> None:
        if not 1 <= self.segments <= self.steps:
            raise UserError(f"{self.steps} steps cannot be cut into {self.segments} segments: take 1 to {self.steps}")
        if not self.densities or not all(0 < d <= 1 for d in self.densities) or 1 not in self.densities:
            raise UserError("densities are shares of a segment's steps, above 0 and up to 1, and 1 is one of them")

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Steps in each segment, as `cells` have it: segment j ends after round(T j / S) steps, halves up."""
        ends = [(2 * self.steps * j + self.segments) // (2 * self.segments) for j in range(self.segments + 1)]
        return tuple(b - a for a, b in pairwise(ends))

    @cached_property
    def options(self) -> tuple[tuple[str, Fraction], ...]:
        """(model, density), all-heavy's own first. Densities that give no segment fewer steps than the one before are
        left out."""
        kept: list[Fraction] = []
        for density in sorted(set(self.densities), reverse=True):
            if not kept or any(self.count(w, density) < self.count(w, kept[-1]) for w in self.widths):
                kept.append(density)
        return tuple((model, density) for model in self.models[::-1] for density in kept)

    @staticmethod
    def count(width: int, density: Fraction) -> int:
        return max(1, math.ceil(width * density))

    @property
    def all_heavy(self) -> Choice:
        return (0,) * self.segments

    @property
    def all_light(self) -> Choice:
        return (self.options.index((self.models[0], Fraction(1))),) * self.segments

    @cached_property
    def price_SO(self) -> np.ndarray:
        """Mean price of each option in each segment."""
        free, rows = np.unique(self.free_n, return_counts=True)
        out = np.zeros((self.segments, len(self.options)))
        for j, width in enumerate(self.widths):
            for o, (model, density) in enumerate(self.options):
                count, price = self.count(width, density), self.prices[model]
                share = width / self.steps / count
                called_f = 1.0 if price.every_step else -np.expm1(free * math.log1p(-min(share, 1 - 1e-15)))
                each_f = count * (price.base * called_f + price.slope * share * free)
                out[j, o] = float((each_f * rows).sum() / rows.sum())
        return out

    def price(self, choice: Sequence[int]) -> float:
        return math.fsum(self.price_SO[np.arange(self.segments), list(choice)])

    @cached_property
    def saved_SO(self) -> np.ndarray:
        """The share of a segment's all-heavy price that an option saves."""
        return 1 - self.price_SO / self.price_SO[:, :1]

    def schedule(self, choice: Sequence[int]) -> Schedule:
        """In counts; neighbours that go on alike are one segment."""
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
        """(S, O): the share of each segment that each option has in a schedule, which need not change at the segments'
        ends; None if it does not go by these options."""
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


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Fit:
    """The posterior, and how it was arrived at."""

    space: Space
    prior_SO: np.ndarray
    scale: float  # losses are counted in this
    mean_F: np.ndarray
    root_FF: np.ndarray  # a square root of the posterior's covariance
    loo_N: np.ndarray  # what is said of each measured schedule without it
    widths: tuple[float, float, float]  # of segments' own effects, of neighbours', of what is not expressed

    def predict(self, mixes_NSO: np.ndarray) -> np.ndarray:
        return features(self.space, self.prior_SO, mixes_NSO) @ self.mean_F * self.scale

    def spread(self, mixes_NSO: np.ndarray) -> np.ndarray:
        """Standard deviation of the prediction's error, but for what the model cannot express."""
        return np.linalg.norm(features(self.space, self.prior_SO, mixes_NSO) @ self.root_FF, axis=1) * self.scale

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return self.mean_F + self.root_FF @ rng.normal(size=self.root_FF.shape[1])

    def tables(self, weight_F: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Losses of options (S, O) and of neighbouring options (S - 1, O, O), the term in E left out."""
        weight_F = (self.mean_F if weight_F is None else weight_F) * self.scale
        space = self.space
        singles = [
            [_main_features(space, self.prior_SO, j, o) for o in range(len(space.options))]
            for j in range(space.segments)
        ]
        single_SO = np.array(singles) @ weight_F
        f_S = weight_F[len(weight_F) - space.segments : -1]
        e_SO = space.saved_SO
        pair_SOO = np.array([f * np.outer(e_SO[j], e_SO[j + 1]) for j, f in enumerate(f_S)], dtype=np.float64).reshape(
            space.segments - 1, len(space.options), len(space.options)
        )
        return single_SO, pair_SOO


def features(space: Space, prior_SO: np.ndarray, mixes_NSO: np.ndarray) -> np.ndarray:
    """(N, F): the prior; model and density effects, common and by segment; neighbours (S - 1); E^2."""
    single_SOF = np.array(
        [[_main_features(space, prior_SO, j, o) for o in range(len(space.options))] for j in range(space.segments)]
    )
    out_NF = np.einsum("nso,sof->nf", mixes_NSO, single_SOF)
    e_NS = (mixes_NSO * space.saved_SO).sum(axis=2)
    share_S = space.price_SO[:, 0] / space.price_SO[:, 0].sum()
    out_NF[:, out_NF.shape[1] - space.segments : -1] = e_NS[:, :-1] * e_NS[:, 1:]
    out_NF[:, -1] = (e_NS @ share_S) ** 2
    return out_NF


def _main_features(space: Space, prior_SO: np.ndarray, j: int, o: int) -> np.ndarray:
    """The features of one option in one segment; those of neighbours and of the whole are 0 here."""
    model, density = space.options[o]
    densities = sorted({d for _, d in space.options}, reverse=True)
    own = [float(model == name) for name in space.models[:-1]] + [float(density == d) for d in densities[1:]]
    weight = space.widths[j] / space.steps
    local = np.zeros((space.segments, len(own)))
    local[j] = own
    return np.concatenate([[prior_SO[j, o]], weight * np.array(own), weight * local.ravel(), np.zeros(space.segments)])


def fit(space: Space, prior_SO: np.ndarray, mixes_NSO: np.ndarray, loss_N: np.ndarray, error_N: np.ndarray) -> Fit:
    """The posterior from mean losses against all-heavy and their standard errors."""
    unit = max(1e-3, float(np.abs(loss_N).max(initial=0.0)))
    whole = float(np.abs(prior_SO[np.arange(space.segments), list(space.all_light)].sum()))
    scaled_SO = prior_SO / whole if whole > 0 else prior_SO
    x_NF = features(space, scaled_SO, mixes_NSO)
    y_N, noise_N = loss_N / unit, np.maximum(error_N / unit, 1e-6) ** 2
    common = (x_NF.shape[1] - 1 - space.segments) // (space.segments + 1)
    best: tuple[float, np.ndarray, tuple[float, float, float]] | None = None
    for own, pair, rest in product((0.25, 0.5, 1.0, 2.0), (0.03, 0.1, 0.3), (0.0, 0.02, 0.05, 0.1)):
        sd_F = np.concatenate(
            [[1.0], np.full(common, 1.0), np.full(common * space.segments, own), np.full(space.segments - 1, pair), [1]]
        )
        cover_NN = (x_NF * sd_F**2) @ x_NF.T + np.diag(noise_N + rest**2)
        root = np.linalg.cholesky(cover_NN)
        white = np.linalg.solve(root, y_N)
        evidence = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
        if best is None or evidence > best[0]:
            best = (evidence, sd_F, (own, pair, rest))
    assert best is not None
    _, sd_F, widths = best
    noise_N = noise_N + widths[2] ** 2
    precision_FF = (x_NF.T / noise_N) @ x_NF + np.diag(1 / sd_F**2)
    inverse_root = np.linalg.inv(np.linalg.cholesky(precision_FF))
    mean_F = inverse_root.T @ (inverse_root @ (x_NF.T @ (y_N / noise_N)))
    cover_NN = np.linalg.inv((x_NF * sd_F**2) @ x_NF.T + np.diag(noise_N))
    loo_N = (y_N - cover_NN @ y_N / np.diag(cover_NN)) * unit
    return Fit(space, scaled_SO, unit, mean_F, inverse_root.T, loo_N, widths)


# ------------------------------------------------------------------------------------------------ the minimum


def best(
    space: Space,
    single_SO: np.ndarray,
    pair_SOO: np.ndarray | None,
    limit: float,
    allowed: Sequence[int] | None = None,
) -> Choice | None:
    """The choice of least loss whose price is within the limit (the cheapest of equals), from the `allowed` options;
    None if nothing fits."""
    found = front(space, single_SO, pair_SOO, limit, allowed)
    return found[-1][2] if found else None


def front(
    space: Space,
    single_SO: np.ndarray,
    pair_SOO: np.ndarray | None,
    limit: float = math.inf,
    allowed: Sequence[int] | None = None,
) -> list[tuple[float, float, Choice]]:
    """All undominated (price, loss, choice) within a limit, from the cheapest to the best."""
    use = np.arange(len(space.options)) if allowed is None else np.array(sorted(allowed))
    price_SO, limit = space.price_SO[:, use], limit * (1 + SLACK)
    loss_SO = single_SO[:, use]
    least_S = np.append(np.cumsum(price_SO.min(axis=1)[::-1])[::-1][1:], 0.0)  # that the rest costs at least
    price_W, loss_W = price_SO[0], loss_SO[0]
    option_W, layers = np.arange(len(use)), []
    keep = price_W + least_S[0] <= limit
    layers.append((option_W[keep], np.full(int(keep.sum()), -1)))
    price_W, loss_W, option_W = price_W[keep], loss_W[keep], option_W[keep]
    for j in range(1, space.segments):
        parts = []
        for o in range(len(use)):
            price, loss = price_W + price_SO[j, o], loss_W + loss_SO[j, o]
            if pair_SOO is not None:
                loss = loss + pair_SOO[j - 1][use[option_W], use[o]]
            which = np.flatnonzero(price + least_S[j] <= limit)
            which = which[_undominated(price[which], loss[which])]
            parts.append((price[which], loss[which], np.full(len(which), o), which))
        price_W, loss_W, option_W, parent_W = (np.concatenate([part[k] for part in parts]) for k in range(4))
        layers.append((option_W, parent_W))
    last = _undominated(price_W, loss_W)
    out = []
    for w in last.tolist():
        choice, at = [], w
        for option_X, parent_X in layers[::-1]:
            choice.append(int(use[option_X[at]]))
            at = int(parent_X[at])
        out.append((float(price_W[w]), float(loss_W[w]), tuple(choice[::-1])))
    return out


def _undominated(price_W: np.ndarray, loss_W: np.ndarray) -> np.ndarray:
    """Indices of the pairs that no other undercuts, by rising price; of equals the first."""
    order = np.lexsort((loss_W, price_W))
    lowest = np.minimum.accumulate(loss_W[order]) if len(order) else loss_W
    first = np.ones(len(order), dtype=bool)
    first[1:] = loss_W[order][1:] < lowest[:-1]
    return order[first]
