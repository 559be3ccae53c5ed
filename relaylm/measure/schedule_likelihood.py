r"""The likelihood bound of a whole schedule on held-out text, without sampling.

Let the masked share at t be y(t) = 1 - alpha(t). A schedule s with steps t_i -> t_{i-1} defines a generative path, and

    -log p_s(x)  <=  sum_i  rho_i  E_{z ~ q(z_{t_i} | x)}  sum_{masked l} -log p_{s(i)}(x_l | z),
                     rho_i = (y_i - y_{i-1}) / y_i      the chance that a masked position is written at step i.

Which positions are masked at y is a uniformly random set of m ~ Binomial(L, y) of them. For networks that do not look
at t only the set matters, so all there is to know of model k and text x is

    c_k(m) = E over sets of m positions of the mean of -log p_k(x_l | rest) over the set,        m = 1 .. L,

one table for each model, and the bound of *every* schedule is a weighted sum of table entries:

    bound_s = sum_k sum_m W_{s,k}(m) c_k(m),
    W_{s,k}(m) = sum_{i: s(i) = k} rho_i m Bin(m; L, y_i)                        on a grid of T steps,
    W_{s,k}(m) = sum over k's stretches (y0, y1] of  P(Bin(L, y1) >= m) - P(Bin(L, y0) >= m)       at T = infinity,

the latter since rho becomes dy/y and the integral of m Bin(m; L, y) / y dy is the incomplete beta function. One model
at every step at T = infinity has W = 1 for every m: the usual bound (see `bound`). The bound is additive over steps
(`step_costs`), so the best placement of a given number of light steps, in likelihood, is a matter of sorting.

All models see the same sets of positions, so differences of schedules are paired. Sets are drawn with m stratified over
1 .. L in each row; short rows can be enumerated exactly instead. Where W varies a lot with m, as for large steps at the
masked end, a few draws estimate the sum poorly. So only what a smooth curve g leaves of c is estimated from them,

    sum_m W(m) c(m)  ~  sum_m W(m) g(m) + sum_d weight W(m_d) (c_d - g(m_d)),

with g fitted to the rows of the other half, which keeps the estimate unbiased whatever g is. Of a single row g is
fitted to the row itself: a small bias, where without g the sum may be several times too large, or nearly 0.

Shapes: N rows, D draws for each, K models, L positions, T steps, M = L + 1 mask counts from 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from relaylm.core.cost import Cost
from relaylm.core.noise import uniforms
from relaylm.core.plan import LINEAR, Alpha
from relaylm.core.schedule import Schedule, Timetable
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.likelihood import check_losses, in_words, mask_counts, masked_sums, perplexity_of

MOST_SETS = 1 << 12  # up to which sets are enumerated


@dataclass(frozen=True)
class BoundTable:
    """c_k(m) as it was measured: for every row and draw the size of the set and each model's mean -log p on it."""

    models: tuple[str, ...]
    length: int
    m_ND: np.ndarray
    weight_ND: np.ndarray  # so that sum_d weight f(m) c is an unbiased estimate of sum_m f(m) c(m)
    c_KND: np.ndarray

    @cached_property
    def smooth_K2M(self) -> np.ndarray:
        """g for the rows of even and of odd number: a cubic in m fitted to the others (to a single row itself), as far
        as they are finite; 0 if there are none."""
        out = np.zeros((len(self.models), 2, self.length + 1))
        for half in (0, 1):
            others = slice(1 - half, None, 2) if len(self.m_ND) > 1 else slice(None)
            m_other = self.m_ND[others].ravel()
            for k, c_ND in enumerate(self.c_KND):
                c_other = c_ND[others].ravel()
                known = np.isfinite(c_other)
                if not known.any():
                    continue
                degree = min(3, len(np.unique(m_other[known])) - 1)
                fit = np.polynomial.Polynomial.fit(m_other[known], c_other[known], degree, [0, self.length])
                out[k, half] = fit(np.arange(self.length + 1))
        return out

    @cached_property
    def left_KND(self) -> np.ndarray:
        """What g leaves of c, times the draws' weights."""
        half_N1 = np.arange(len(self.m_ND))[:, None] % 2
        return (self.c_KND - self.smooth_K2M[:, half_N1, self.m_ND]) * self.weight_ND

    def curve(self) -> np.ndarray:
        """(K, L + 1), so that `curve() @ W` is the estimate: the mean of g, and in the sizes that were drawn what it
        leaves."""
        n = len(self.m_ND)
        out = (self.smooth_K2M * np.array([(n + 1) // 2, n // 2])[:, None] / n).sum(axis=1)
        for k, left_ND in enumerate(self.left_KND):
            np.add.at(out[k], self.m_ND.ravel(), left_ND.ravel() / n)
        return out


@dataclass(frozen=True)
class ScheduleBound:
    """Bits for one symbol, with the 95% interval over rows; `nats_N` are the rows' own totals, for paired
    differences."""

    bits: float
    low: float
    high: float
    rows: int
    nats_N: np.ndarray
    cost: Cost | None = None  # what writing the rows would take, where calls were followed

    def __str__(self) -> str:
        return in_words(self.bits, self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """All but the rows' totals, with the perplexity."""
        ci = [metrics.finite(self.low), metrics.finite(self.high)]
        return {"bits": self.bits, "ci": ci, "perplexity": perplexity_of(self.bits), "rows": self.rows}


def measure_table(
    models: Mapping[str, Any],
    tokens_NL: np.ndarray,
    mask_id: int,
    *,
    draws: int | None = 8,
    seed: int = 0,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    on_rows: Callable[[int, int], None] | None = None,
) -> BoundTable:
    """Measure every model on the same random sets of positions of the same rows. `draws=None` takes all 2^L - 1
    sets. `on_rows(done, total)` receives progress, in rows times draws."""
    for name, model in models.items():
        if getattr(model, "time_conditioning", False):
            raise UserError(f"{name} looks at the time t, so one table by mask count does not describe it")
    tokens_NL = np.atleast_2d(tokens_NL)
    n, length = tokens_NL.shape
    if draws is None:
        if 2**length > MOST_SETS:
            raise UserError(f"rows of {length} positions have too many sets to enumerate: say how many draws")
        sets = [s for size in range(1, length + 1) for s in itertools.combinations(range(length), size)]
        masked_DL = np.zeros((len(sets), length), dtype=bool)
        for d, positions in enumerate(sets):
            masked_DL[d, list(positions)] = True
        masked_NDL = np.broadcast_to(masked_DL, (n, *masked_DL.shape))
        m_ND = masked_NDL.sum(axis=2)
        weight_ND = 1 / np.array([math.comb(length, m) for m in m_ND[0]])[None].repeat(n, axis=0)
    else:
        m_ND = mask_counts(n, length, draws, seed)
        u_NDL = np.stack([uniforms(seed, np.arange(n), length, draw) for draw in range(draws)], axis=1)
        rank_NDL = u_NDL.argsort(axis=2, kind="stable").argsort(axis=2, kind="stable")
        masked_NDL = rank_NDL < m_ND[:, :, None]
        weight_ND = np.full((n, draws), length / draws)
    rows = np.repeat(tokens_NL, m_ND.shape[1], axis=0), masked_NDL.reshape(-1, length), m_ND.ravel() / length
    found = masked_sums(models, [], *rows, mask_id, device=device, batch_size=batch_size, on_rows=on_rows)
    c_KND = (found.nll_KN / found.count_N).reshape(len(models), *m_ND.shape)
    return BoundTable(tuple(models), length, m_ND, weight_ND, c_KND)


def schedule_bound(
    table: BoundTable, schedule: Schedule | Timetable, steps: float | None = None, alpha: Alpha = LINEAR
) -> ScheduleBound:
    """The bound of a schedule (models' names, no roles) in `steps` steps: its own number if None, or infinity."""
    weight_KM = schedule_weights(table.models, schedule, steps, table.length, alpha)
    each_KND = np.stack([weight_M[table.m_ND] for weight_M in weight_KM])
    each_KND = each_KND * np.where(each_KND > 0, table.left_KND, 0.0)  # a model that is not asked may know nothing
    smooth_2 = np.einsum("km,khm->h", weight_KM, table.smooth_K2M)
    nats_N = each_KND.sum(axis=(0, 2)) + smooth_2[np.arange(len(table.m_ND)) % 2]
    return bound_of(nats_N / table.length / math.log(2), nats_N)


def bound_of(bits_N: np.ndarray, nats_N: np.ndarray, cost: Cost | None = None) -> ScheduleBound:
    """The bound from each row's bits for one symbol, and its total."""
    found = metrics.mean_estimate(check_losses(bits_N))
    return ScheduleBound(found.value, found.low, found.high, len(nats_N), nats_N, cost)


def schedule_weights(
    models: Sequence[str], schedule: Schedule | Timetable, steps: float | None, length: int, alpha: Alpha = LINEAR
) -> np.ndarray:
    """W_{s,k}(m), (K, L + 1)."""
    unknown = [name for name in schedule.models if name not in models]
    if unknown:
        raise UserError(f"the schedule asks for model {unknown[0]!r}; the table has {', '.join(models)}")
    if isinstance(schedule, Schedule) and schedule.spacing is not None:
        raise UserError(f"a table by mask count does not describe {schedule}: follow its plans (`plan_bound`)")
    out = np.zeros((len(models), length + 1))
    if steps is not None and math.isinf(steps):
        if isinstance(schedule, Timetable):
            raise UserError(f"the timetable has {schedule.steps} steps, but T is infinite")
        at_least_EM = _at_least(_masked_share([1.0, *schedule.ends], alpha), length)
        for j, segment in enumerate(schedule.segments):
            out[list(models).index(segment.model)] += at_least_EM[j] - at_least_EM[j + 1]
        out[:, 0] = 0  # nothing masked, nothing to pay
        return out
    table = schedule if isinstance(schedule, Timetable) else schedule.timetable(None if steps is None else int(steps))
    rho_M = _step_weights(table.times, length, alpha)
    index_T = np.array([list(models).index(name) for name in table.models])
    for k in range(len(models)):
        out[k] = rho_M[index_T == k].sum(axis=0)
    return out


def step_costs(table: BoundTable, times: Sequence[float], alpha: Alpha = LINEAR) -> np.ndarray:
    """What each step costs under each model, in nats for a row: (K, T), the masked end first. A schedule's bound is the
    sum of its steps' entries."""
    curve_KM, weight_TM = table.curve(), _step_weights(times, table.length, alpha)
    infinite_KM = np.isinf(curve_KM)
    if not infinite_KM.any():
        return curve_KM @ weight_TM.T
    cost_KT = np.where(infinite_KM, 0.0, curve_KM) @ weight_TM.T
    return np.where(infinite_KM.astype(float) @ weight_TM.T > 0, math.inf, cost_KT)


def _step_weights(times: Sequence[float], length: int, alpha: Alpha) -> np.ndarray:
    """rho_i m Bin(m; L, y_i), (T, L + 1), the masked end first."""
    y = _masked_share(times, alpha)
    rho_T = (y[:-1] - y[1:]) / y[:-1]
    return rho_T[:, None] * np.arange(length + 1) * _binomial(y[:-1], length)


def _masked_share(times: Sequence[float], alpha: Alpha) -> np.ndarray:
    return 1 - np.asarray(alpha(np.asarray(times, dtype=np.float64)))


def _binomial(y_T: np.ndarray, length: int) -> np.ndarray:
    """Bin(m; L, y), (T, L + 1). By hand, since scipy rounds otherwise and step costs are recorded to the last bit."""
    m, y = np.arange(length + 1), np.asarray(y_T, dtype=np.float64)[:, None]
    log_choose = [math.lgamma(length + 1) - math.lgamma(k + 1) - math.lgamma(length - k + 1) for k in m]
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 log 0 is 0 here: at y = 1 all are masked, at y = 0 none
        on, off = np.where(m == 0, 0.0, m * np.log(y)), np.where(m == length, 0.0, (length - m) * np.log1p(-y))
    return np.exp(np.array(log_choose) + on + off)


def _at_least(y_E: np.ndarray, length: int) -> np.ndarray:
    """P(Bin(L, y) >= m), (E, L + 1)."""
    return np.cumsum(_binomial(y_E, length)[:, ::-1], axis=1)[:, ::-1]
