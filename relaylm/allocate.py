r"""A budget and a table of losses in; the best schedule out, exactly.

Each of T steps (or segments: whatever a column stands for) is given to one of K models. Model k at step t adds
loss[k, t] and costs price[k, t]; wanted is the assignment of least total loss whose total price is within the budget,
with at most R runs of one model if so asked. That is the multiple-choice knapsack. For two models whose prices differ
by the same amount at every step the answer is known (the steps of largest gain go to the heavy one); in general it
takes a search, which here is a shortest path under a budget:

**Paths.** A schedule is a path through T layers. Without a limit on runs a layer has one node and K edges lead on from
it; with one, a node is (model, runs so far).

**A bound.** For any multiplier m >= 0 every schedule within the budget B has

    loss  >=  loss + m (price - B)  >=  min over all paths of  sum (loss + m price)  -  m B,

and the minimum, being additive, is found layer by layer from the end, for every node at once. The best m is where
the shortest path jumps across the budget; the best path on this side of it is a first answer. If prices are multiples
of a unit, B is first rounded down to one: for two models with equal price differences the bound is then met, and the
first answer, the steps sorted by gain, is the last.

**Fronts.** Otherwise the layers are walked once more from the beginning. Of the ways to reach a node only those stay
that no other undercuts in both price and loss, and whose bound (what they have lost, and the least they still must) is
not above the best answer so far. Each way, completed by the shortest path from where it stands, may be a better answer.

Prices are compared as exact integers (a float is a whole number of some power of two), so a budget is never exceeded,
not by a rounding error either. Losses are added in double precision, and told apart down to 1e-9 of the sum of the
steps' largest. If the least loss of all is within the budget, the cheapest way to it is returned; of other equals
always the same one. A knapsack can be made arbitrarily hard (losses in proportion to prices that have nothing in common
are the worst); tables of costs are not: 1000 steps and five models take about a second.

Shapes: K models, T steps, N nodes of a layer, E edges between two layers, W ways to get so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from relaylm.errors import UserError

_RESOLUTION = 1e-9  # of the sum of the steps' largest losses: below this two losses are the same
_MOST_MULTIPLIERS = 60  # a bound from any multiplier holds, so the search for the best may stop anywhere


def allocate(
    loss_KT: np.ndarray, price_KT: np.ndarray, budget: float | Fraction, *, segments: int | None = None
) -> np.ndarray:
    """The model of each step, (T,), so that the sum of loss[k_t, t] is as small as it can be while that of
    price[k_t, t] is at most `budget`. An infinite loss forbids that model at that step; losses may be negative.
    `segments` limits the number of runs of one model. Raises UserError if nothing fits."""
    loss_KT, price_KT = np.asarray(loss_KT, dtype=np.float64), np.asarray(price_KT, dtype=np.float64)
    _check(loss_KT, price_KT, budget, segments)
    models, steps = loss_KT.shape
    allowed_KT = np.isfinite(loss_KT)
    graph = _graph(models, None if segments is None or segments >= steps else segments)
    unit_KT, room = _whole_prices(price_KT, allowed_KT, budget)
    problem = _Problem(graph, np.where(allowed_KT, loss_KT, 0.0), allowed_KT, unit_KT, room)
    cheapest = _Paths(problem, unit_KT, problem.loss_KT)
    if not cheapest.alive_TN[0, graph.start]:
        stuck = np.flatnonzero(~allowed_KT.any(axis=0))
        why = f"every model is forbidden at step {stuck[0] + 1}" if len(stuck) else f"it takes over {segments} runs"
        raise UserError(f"there is no schedule to allocate: {why}")
    if cheapest.first_TN[0, graph.start] > room:
        least = float(sum(Fraction(price_KT[k, t]) for t, k in enumerate(cheapest.path)))
        raise UserError(f"no schedule fits a budget of {float(budget):.12g}: the least possible price is {least:.12g}")
    return _search(problem, cheapest.path)


def _check(loss_KT: np.ndarray, price_KT: np.ndarray, budget: float | Fraction, segments: int | None) -> None:
    if loss_KT.ndim != 2 or 0 in loss_KT.shape or loss_KT.shape != price_KT.shape:
        shapes = f"{loss_KT.shape} and {price_KT.shape}"
        raise UserError(f"losses and prices must be tables of one shape, models by steps, not {shapes}")
    if np.isnan(loss_KT).any() or (loss_KT == -math.inf).any():
        raise UserError("a loss must be a number, or infinite where a model is forbidden")
    if not (np.isfinite(price_KT) & (price_KT >= 0)).all():
        raise UserError("a price must be a finite number from 0 up")
    if math.isnan(budget):
        raise UserError("the budget must be a number, not nan")
    if segments is not None and segments < 1:
        raise UserError(f"a schedule has at least one segment, not {segments}")


def _whole_prices(price_KT: np.ndarray, allowed_KT: np.ndarray, budget: float | Fraction) -> tuple[np.ndarray, int]:
    """Prices above each step's least, and what the budget leaves for them, in the largest unit in which all are whole.
    In 64 bits where every sum fits, else as Python's integers."""
    exact_KT = [[Fraction(price) for price in row] for row in price_KT.tolist()]
    scale = max(price.denominator for row in exact_KT for price in row)  # all are powers of two
    whole_KT = np.array([[int(price * scale) for price in row] for row in exact_KT], dtype=object)
    least_T = [min(column[allowed], default=0) for column, allowed in zip(whole_KT.T, allowed_KT.T, strict=True)]
    whole_KT = np.where(allowed_KT, whole_KT - np.array(least_T, dtype=object), 0)
    unit = math.gcd(*whole_KT.ravel().tolist()) or 1
    whole_KT = whole_KT // unit
    most = sum(whole_KT.max(axis=0).tolist())
    if math.isinf(budget):
        room = most if budget > 0 else -1
    else:
        room = max(-1, min(most, math.floor((Fraction(budget) * scale - sum(least_T)) / unit)))
    return whole_KT.astype(np.int64 if most < 2**63 else object), room


# ------------------------------------------------------------------------------------------------ paths


@dataclass(frozen=True)
class _Graph:
    """Edges from any layer to the next: a step goes from node src to node dst with a model."""

    nodes: int
    start: int  # the node before the first step
    src_E: np.ndarray
    dst_E: np.ndarray
    model_E: np.ndarray


def _graph(models: int, runs: int | None) -> _Graph:
    if runs is None:
        zero_E = np.zeros(models, dtype=np.int64)
        return _Graph(1, 0, zero_E, zero_E, np.arange(models))
    start = models * runs  # node k * runs + r is model k in its schedule's run number r
    edges = [(start, k * runs, k) for k in range(models)]
    edges += [(k * runs + r, k * runs + r, k) for k in range(models) for r in range(runs)]
    others = [(j, k) for j in range(models) for k in range(models) if j != k]
    edges += [(j * runs + r, k * runs + r + 1, k) for j, k in others for r in range(runs - 1)]
    src_E, dst_E, model_E = np.array(edges).T
    return _Graph(start + 1, start, src_E, dst_E, model_E)


@dataclass(frozen=True)
class _Problem:
    graph: _Graph
    loss_KT: np.ndarray  # 0 where forbidden
    allowed_KT: np.ndarray
    unit_KT: np.ndarray  # whole prices above each step's least
    room: int  # the budget for those

    @property
    def price_KT(self) -> np.ndarray:
        """Prices up to 1 and rounded, for bounds: rounding is allowed for there."""
        return (self.unit_KT / max(1, int(self.unit_KT.max()))).astype(np.float64)

    @property
    def budget(self) -> float:
        return self.room / max(1, int(self.unit_KT.max()))

    def measure(self, path_T: np.ndarray) -> tuple[float, float, bool]:
        """Loss, rounded price, and whether it is within the budget."""
        steps_T = np.arange(len(path_T))
        whole = sum(self.unit_KT[path_T, steps_T].tolist())
        loss, price = (math.fsum(value_KT[path_T, steps_T]) for value_KT in (self.loss_KT, self.price_KT))
        return loss, price, whole <= self.room


class _Paths:
    """From every node of every layer the path of least `first`, and of least `second` among those."""

    def __init__(self, problem: _Problem, first_KT: np.ndarray, second_KT: np.ndarray) -> None:
        graph, steps = problem.graph, first_KT.shape[1]
        self.graph, self.steps = graph, steps
        self.alive_TN = np.zeros((steps + 1, graph.nodes), dtype=bool)  # does any path lead on from here?
        self.first_TN = np.zeros((steps + 1, graph.nodes), dtype=first_KT.dtype)
        self.edge_TN = np.zeros((steps, graph.nodes), dtype=np.int64)
        self.alive_TN[steps] = True
        second_N = np.zeros(graph.nodes, dtype=second_KT.dtype)
        for t in range(steps - 1, -1, -1):
            edges = np.flatnonzero(problem.allowed_KT[graph.model_E, t] & self.alive_TN[t + 1, graph.dst_E])
            src, dst, model = graph.src_E[edges], graph.dst_E[edges], graph.model_E[edges]
            first, second = first_KT[model, t] + self.first_TN[t + 1, dst], second_KT[model, t] + second_N[dst]
            order = _order(src, first, second)
            nodes, at = np.unique(src[order], return_index=True)
            best = order[at]
            self.alive_TN[t, nodes] = True
            self.first_TN[t, nodes], second_N[nodes] = first[best], second[best]
            self.edge_TN[t, nodes] = edges[best]

    @property
    def path(self) -> np.ndarray:
        return np.array(self.path_from(0, self.graph.start))

    def path_from(self, t: int, node: int) -> list[int]:
        """The models of the steps from t on."""
        models = []
        for edge_N in self.edge_TN[t:]:
            models.append(self.graph.model_E[edge_N[node]])
            node = self.graph.dst_E[edge_N[node]]
        return models

    def sums(self, value_KT: np.ndarray) -> np.ndarray:
        """(T + 1, N): another quantity, summed along each node's path to the end."""
        total_TN = np.zeros((self.steps + 1, self.graph.nodes), dtype=value_KT.dtype)
        for t in range(self.steps - 1, -1, -1):
            edge_N = self.edge_TN[t]
            total_TN[t] = value_KT[self.graph.model_E[edge_N], t] + total_TN[t + 1, self.graph.dst_E[edge_N]]
        return total_TN


def _order(*keys: np.ndarray) -> np.ndarray:
    """Indices in order of the first key, then the second, and so on. (lexsort does not take Python's integers.)"""
    order = np.arange(len(keys[0]))
    for key in keys[::-1]:
        order = order[np.argsort(key[order], kind="stable")]
    return order


# ------------------------------------------------------------------------------------------------ the search


def _search(problem: _Problem, within: np.ndarray) -> np.ndarray:
    """The best path, given one that is within the budget."""
    loss_KT, price_KT, budget = problem.loss_KT, problem.price_KT, problem.budget
    beyond = _Paths(problem, loss_KT, problem.unit_KT).path
    if problem.measure(beyond)[2]:
        return beyond  # the least loss of all, and the cheapest way to it
    multiplier, bound = 0.0, -math.inf
    for _ in range(_MOST_MULTIPLIERS):
        (loss_in, price_in, _), (loss_out, price_out, _) = problem.measure(within), problem.measure(beyond)
        if price_out <= price_in:  # the same but for rounding
            break
        candidate = max(0.0, (loss_in - loss_out) / (price_out - price_in))
        if not math.isfinite(candidate):  # prices that differ by next to nothing
            break
        paths = _Paths(problem, loss_KT + candidate * price_KT, price_KT)
        value = float(paths.first_TN[0, problem.graph.start]) - candidate * budget
        if value > bound:
            multiplier, bound = candidate, value
        path = paths.path
        fits = problem.measure(path)[2]
        if np.array_equal(path, within if fits else beyond):
            break  # nothing lies below the line through the two
        within, beyond = (path, beyond) if fits else (within, path)
    loss_in = problem.measure(within)[0]
    if loss_in <= bound:
        return within
    if problem.graph.nodes > 1:
        return _walk_fronts(problem, multiplier, within)
    within = _fill(problem, within, beyond)
    # Without a limit on runs steps may be taken in any order: first those where the choice is closest.
    order_T = np.argsort(_margins(problem, multiplier), kind="stable")
    columns = {name: getattr(problem, name)[:, order_T] for name in ("loss_KT", "allowed_KT", "unit_KT")}
    path_T = np.empty(len(order_T), dtype=np.int64)
    path_T[order_T] = _walk_fronts(replace(problem, **columns), multiplier, within[order_T])
    return path_T


def _margins(problem: _Problem, multiplier: float) -> np.ndarray:
    """By how much any other choice at a step raises the bound, at least."""
    both_KT = np.where(problem.allowed_KT, problem.loss_KT + multiplier * problem.price_KT, math.inf)
    return np.diff(np.sort(both_KT, axis=0)[:2], axis=0)[0] if len(both_KT) > 1 else np.full(both_KT.shape[1], math.inf)


def _fill(problem: _Problem, within: np.ndarray, beyond: np.ndarray) -> np.ndarray:
    """Turn one path into another, step by step, where the budget allows it. In a scattered order, so that among any few
    steps some could still be dearer and some cheaper."""
    path_T, steps_T = within.copy(), np.arange(len(within))
    left = problem.room - sum(problem.unit_KT[within, steps_T].tolist())
    for t in np.random.default_rng(0).permutation(np.flatnonzero(within != beyond)):
        more = int(problem.unit_KT[beyond[t], t]) - int(problem.unit_KT[within[t], t])
        if more <= left:
            path_T[t], left = beyond[t], left - more
    return path_T


def _walk_fronts(problem: _Problem, multiplier: float, path_T: np.ndarray) -> np.ndarray:
    """The best path by fronts of (price, loss), given a multiplier for the bound and a path within the budget."""
    graph, loss_KT, unit_KT, price_KT = problem.graph, problem.loss_KT, problem.unit_KT, problem.price_KT
    best, enough = problem.measure(path_T)[0], _RESOLUTION * float(np.abs(loss_KT).max(axis=0).sum())
    # Where prices hardly differ multipliers are huge, and their rounding must not rule anything out.
    rounding = 1e-16 * loss_KT.shape[1] * multiplier * (problem.budget + float(price_KT.max(axis=0).sum()))
    cheapest = _Paths(problem, unit_KT, loss_KT)
    ahead = _Paths(problem, loss_KT + multiplier * price_KT, price_KT)
    # The path at hand leads on from every node if there is but one in a layer.
    off_KT = (np.arange(len(loss_KT))[:, None] != path_T).astype(np.int64)
    follow = [_Paths(problem, off_KT, loss_KT)] if graph.nodes == 1 else []
    tails = [(paths, paths.sums(unit_KT), paths.sums(loss_KT)) for paths in (ahead, cheapest, *follow)]
    swaps = _Swaps(problem, path_T) if follow else None
    margin_T = np.append(_margins(problem, multiplier), math.inf)

    node_W, unit_W = np.array([graph.start]), np.zeros(1, dtype=unit_KT.dtype)
    price_W, loss_W = np.zeros(1), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []  # by step: the way each way came from, and its last model
    for t in range(loss_KT.shape[1]):
        starts_N = np.searchsorted(node_W, np.arange(graph.nodes + 1))
        edges = np.flatnonzero(problem.allowed_KT[graph.model_E, t] & ahead.alive_TN[t + 1, graph.dst_E])
        sources = [np.arange(starts_N[src], starts_N[src + 1]) for src in graph.src_E[edges]]
        from_W, edge_W = np.concatenate(sources), np.repeat(edges, [len(source) for source in sources])
        node_W, model_W = graph.dst_E[edge_W], graph.model_E[edge_W]
        unit_W = unit_W[from_W] + unit_KT[model_W, t]
        price_W, loss_W = price_W[from_W] + price_KT[model_W, t], loss_W[from_W] + loss_KT[model_W, t]

        def front_path(way: int, t: int = t, from_W: np.ndarray = from_W, model_W: np.ndarray = model_W) -> list[int]:
            return _retrace(trail[:t], from_W[way]) + [model_W[way]]

        for paths, tail_unit_TN, tail_loss_TN in tails:
            left_W = problem.room - (unit_W + tail_unit_TN[t + 1, node_W])
            whole_W = loss_W + tail_loss_TN[t + 1, node_W]
            fits_W = np.where((left_W >= 0).astype(bool), whole_W, math.inf)
            if fits_W.min() < best:
                way = int(fits_W.argmin())
                best, path_T = float(fits_W[way]), np.array(front_path(way) + paths.path_from(t + 1, node_W[way]))
            if swaps is not None and paths is follow[0]:
                way, value, swap = swaps.best(t, left_W, whole_W)
                if value < best:
                    best, path_T = value, np.array(front_path(way) + paths.path_from(t + 1, node_W[way]))
                    path_T[swaps.step_M[swap]] = swaps.model_M[swap]
        bound_W = loss_W + multiplier * (price_W - problem.budget) + ahead.first_TN[t + 1, node_W]
        hopeful_W = bound_W < best - enough + rounding
        hopeful_W &= (unit_W + cheapest.first_TN[t + 1, node_W] <= problem.room).astype(bool)
        keep = np.flatnonzero(hopeful_W)
        if not len(keep):
            break
        if follow and bound_W[keep].min() + margin_T[t + 1 :].min() >= best - enough + rounding:
            break  # from here on all must follow the path of the bound, which has been tried
        keep = keep[_front(node_W[keep], unit_W[keep], loss_W[keep])]
        node_W, unit_W, price_W, loss_W = node_W[keep], unit_W[keep], price_W[keep], loss_W[keep]
        trail.append((from_W[keep], model_W[keep]))
    return path_T


def _retrace(trail: list[tuple[np.ndarray, np.ndarray]], way: int) -> list[int]:
    """The models of a way, from the first step on."""
    models = []
    for from_W, model_W in reversed(trail):
        models.append(model_W[way])
        way = from_W[way]
    return models[::-1]


class _Swaps:
    """All changes of a path in one step, M of them. A way that ends in this path may use what it leaves of the budget,
    or make up for what it takes too much, by one of them."""

    def __init__(self, problem: _Problem, path_T: np.ndarray) -> None:
        steps_T = np.arange(len(path_T))
        model_M, step_M = np.nonzero(problem.allowed_KT & (np.arange(len(problem.loss_KT))[:, None] != path_T))
        unit_M = problem.unit_KT[model_M, step_M] - problem.unit_KT[path_T, steps_T][step_M]
        order = np.argsort(unit_M, kind="stable")
        self.model_M, self.step_M, self.unit_M = model_M[order], step_M[order], unit_M[order]
        self.loss_M = (problem.loss_KT[model_M, step_M] - problem.loss_KT[path_T, steps_T][step_M])[order]

    def best(self, t: int, left_W: np.ndarray, loss_W: np.ndarray) -> tuple[int, float, int]:
        """Of all ways and swaps after step t that stay within the budget: the best way, its loss, and its swap."""
        later = np.flatnonzero(self.step_M > t)
        if not len(later):
            return 0, math.inf, 0
        lowest_M = np.minimum.accumulate(self.loss_M[later])
        at_W = np.searchsorted(self.unit_M[later], left_W, side="right") - 1
        after_W = np.where(at_W >= 0, loss_W + lowest_M[at_W], math.inf)
        way = int(after_W.argmin())
        swap = int(later[self.loss_M[later][: at_W[way] + 1].argmin()]) if at_W[way] >= 0 else 0
        return way, float(after_W[way]), swap


def _front(node_W: np.ndarray, unit_W: np.ndarray, loss_W: np.ndarray) -> np.ndarray:
    """Indices, by node and then price, of the ways that none at the same node undercuts in price and loss."""
    order = _order(node_W, unit_W, loss_W)
    node, loss = node_W[order], loss_W[order]
    kept = np.ones(len(order), dtype=bool)
    edges = [0, *(np.flatnonzero(np.diff(node)) + 1), len(order)]
    for start, end in pairwise(edges):
        kept[start + 1 : end] = loss[start + 1 : end] < np.minimum.accumulate(loss[start:end])[:-1]
    return order[kept]
