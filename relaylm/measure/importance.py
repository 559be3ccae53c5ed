r"""Which steps need the heavy model: light against heavy on the same partly masked rows, by time.

For a row z_t with masked positions M and the true tokens x, and for two models L and H (equations 4 and 5 of the
paper),

    loss_k(z) = 1/|M| sum_{l in M} -log p_k(x_l | z, t),        |loss_L - loss_H|  and  loss_L - loss_H,
    kl(z)     = 1/|M| sum_{l in M} KL( p_H(. | z, t, l)  ||  p_L(. | z, t, l) ),

averaged over rows; rows with nothing masked are left out and counted. Two trainings of one network differ too: with a
twin H' of the heavy model (another seed), kl(H || H') and |loss_H' - loss_H| measure that difference, and the
*relative* curves subtract it. (The absolute loss difference needs it most: with |M| -> 0 it is all noise.) A twin L' of
the light model costs less to train: kl(L || L') stands beside the curve and is not subtracted, as two seeds of a
smaller network may differ more or less than two of the heavy one.

**States.** `data`: held-out text, masked where u <= 1 - alpha(t). `trajectory`: the states of the heavy model itself
while it samples, with the tokens it wrote later as x; no text is needed. There the curve has an exact meaning. Let a
schedule differ from all-heavy at some steps. Each masked position is written at step i with probability rho_i, so by
the chain rule the divergence of the two *paths* is

    KL(path_H || path_s) = sum over the steps i that differ of  rho_i  E_{z ~ H at t_i}  sum_{l in M} KL(p_H || p_s),

which bounds the divergence of the final samples (`path_kl`).

Shapes: N rows, L positions, T times, R bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaylm.console import progress_bar, table
from relaylm.core.noise import uniforms
from relaylm.core.plan import LINEAR, Alpha, unmask_probability
from relaylm.core.schedule import Timetable
from relaylm.errors import UserError, checked, whole
from relaylm.measure import metrics
from relaylm.measure.likelihood import MaskedSums, masked_sums, spread_rows, text_rows
from relaylm.models.family import Family
from relaylm.sampling.sample import sample

STATES = ("data", "trajectory")
TWIN = "twin of "


@checked
def importance(
    family: Family,
    text: np.ndarray | None = None,
    *,
    pairs: Sequence[tuple[str, str]] | str | None = None,
    states: str = "data",
    timesteps: int | Sequence[float] = 20,
    sequences: int | None = None,
    length: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    alpha: Alpha = LINEAR,
    twins: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Disagreement of models by time, with intervals; plain JSON values.

    `text` is held-out tokens, as one run or as rows. `pairs` lists (light, heavy) names; None sets each lighter model
    against the family's heavy one, "all" takes every pair. `timesteps` is a number of even times up to 1, or the times.
    `sequences` rows at each time (500 on a GPU, 64 on a CPU unless said). On trajectories `steps` is T (default: the
    length) and times are moved to its grid. The same rows and the same u serve every time and every model. `twins` are
    networks from another seed by the name of the model they are twins of, besides the family's own.
    """
    if states not in STATES:
        raise UserError(f"{states!r} are not states to measure on: choose {' or '.join(STATES)}")
    chosen = _pairs(family, pairs)
    times = _times(timesteps)
    n = (500 if family.device.type == "cuda" else 64) if sequences is None else whole(sequences, "sequences", 2)
    length = length or family.length
    if length > family.length:
        raise UserError(f"length {length} is more than the family's {family.length}")
    data = states == "data"
    rows_NL = _text_rows(family, text, length, n) if data else np.empty((n, 0), dtype=np.int64)
    heavies = dict.fromkeys(heavy for _, heavy in chosen)
    groups = [chosen] if data else [[pair for pair in chosen if pair[1] == heavy] for heavy in heavies]
    grid = steps or length
    if not data:
        times = sorted({max(1, round(t * grid)) / grid for t in times})
    curves = []
    with progress_bar("importance", len(groups) * len(times), "t", progress) as bar:
        for group in groups:
            models, everything = _with_twins(family, group, {**family.twins, **(twins or {})})
            if data:
                u_NL = uniforms(seed, np.arange(len(rows_NL)), length)
                masked_at = {t: u_NL <= 1 - alpha(t) for t in times}
            else:
                options: dict[str, Any] = {"steps": grid, "seed": seed, "alpha": alpha, "batch_size": batch_size}
                samples = sample(family, group[0][1], n, given=np.full(length, -1), **options)
                rows_NL = samples.tokens
                masked_at = {t: samples.trace.step_nL <= round(t * grid) for t in times}
            found = []
            for t, masked_NL in masked_at.items():
                bar.what = f"t = {t:.3f}"
                rows = (rows_NL, masked_NL, np.full(len(rows_NL), t), family.mask_id)
                found.append(masked_sums(models, everything, *rows, device=family.device, batch_size=batch_size))
                bar.update(1)
            curves += [_curve(pair, everything, list(models), found, times, states) for pair in group]
    return {
        "kind": "importance",
        "family": {"name": family.name, "digest": family.digest},
        "states": states,
        "sequences": len(rows_NL),
        "length": length,
        "steps": None if data else grid,
        "seed": seed,
        "device": str(family.device),
        "pairs": curves,
    }


def second_seeds(family: Family, other: Family) -> dict[str, Any]:
    """The networks of another family that were trained like those of this one from another seed: those of the same
    name."""
    found = {name: other.models[name] for name in other.names if name in family.names}
    if not found:
        raise UserError(f"the twin has {', '.join(other.names)}, but none of {', '.join(family.names)}")
    if (other.vocab_size, other.mask_id) != (family.vocab_size, family.mask_id):
        raise UserError("the twin has another vocabulary: prepare its corpus with the family's own tokenizer")
    return found


def path_kl(pair: Mapping[str, Any], timetable: Timetable, alpha: Alpha = LINEAR) -> float:
    """The divergence in nats of a row's path under the heavy model from that under a timetable of this pair's two
    models, from a curve measured on trajectories (linear between its times, and to 0 at t = 0)."""
    unknown = set(timetable.models) - {pair["light"], pair["heavy"]}
    if unknown:
        names = f"{pair['light']} and {pair['heavy']}"
        raise UserError(f"this curve compares {names}, but the schedule has {unknown.pop()}")
    t_T, s_T = np.array(timetable.times[:-1]), np.array(timetable.times[1:])
    kl_T = np.interp(t_T, [0.0, *pair["t"]], [0.0, *pair["kl_sum"]])
    light_T = np.array([name == pair["light"] for name in timetable.models])
    return float((unmask_probability(t_T, s_T, alpha) * kl_T * light_T).sum())


def _curve(
    pair: tuple[str, str],
    pairs: Sequence[tuple[str, str]],
    names: Sequence[str],
    found: Sequence[MaskedSums],
    times: Sequence[float],
    states: str,
) -> dict[str, Any]:
    """One pair's curves, as JSON values."""
    light, heavy = pair
    count_TN = np.stack([item.count_N for item in found])
    some_TN = count_TN > 0
    each_TN = np.where(some_TN, 1 / np.maximum(count_TN, 1), math.nan)

    def loss(name: str) -> np.ndarray:
        return np.stack([item.nll_KN[names.index(name)] for item in found]) * each_TN

    def kl(which: tuple[str, str]) -> np.ndarray:
        return np.stack([item.kl_PN[pairs.index(which)] for item in found]) * each_TN

    light_TN, heavy_TN, kl_TN = loss(light), loss(heavy), kl(pair)
    signed_TN = difference(light_TN, heavy_TN)
    out: dict[str, Any] = {
        "light": light,
        "heavy": heavy,
        "states": states,
        "n": count_TN.shape[1],
        "rows": some_TN.sum(axis=1).tolist(),
        "rows_without_mask": (~some_TN).sum(axis=1).tolist(),
        "t": [float(t) for t in times],
        "masked": count_TN.mean(axis=1).tolist(),
        **_means("loss_light", light_TN),
        **_means("loss_heavy", heavy_TN),
        **_means("loss_diff", signed_TN),
        **_means("abs_loss_diff", np.abs(signed_TN), skewed=True),
        **_means("kl", kl_TN, skewed=True),
        "kl_sum": [float(item.kl_PN[pairs.index(pair)].mean()) for item in found],
    }
    weights_RN = metrics.resampling_weights(count_TN.shape[1], 1000)
    out |= _peak("peak_t", kl_TN, times, weights_RN)
    out |= _peak("peak_t_loss", np.abs(signed_TN), times, weights_RN)
    relative = ("kl_relative", "abs_loss_diff_relative", "kl_base", "abs_loss_diff_base")
    out |= dict.fromkeys(relative) | {f"{name}_ci": None for name in relative}
    out |= {f"peak_t_relative{end}": None for end in ("", "_ci")}
    for model, own_TN, end in ((light, light_TN, "_light_base"), (heavy, heavy_TN, "_base")):
        if (twin := (TWIN + model, model)) not in pairs:
            continue
        base_TN, wobble_TN = kl(twin), np.abs(difference(loss(twin[0]), own_TN))
        out |= _means(f"kl{end}", base_TN, skewed=True) | _means(f"abs_loss_diff{end}", wobble_TN, skewed=True)
        if end != "_base":
            continue
        relative_TN = difference(kl_TN, base_TN)
        out |= _means("kl_relative", relative_TN)
        out |= _means("abs_loss_diff_relative", difference(np.abs(signed_TN), wobble_TN))
        out |= _peak("peak_t_relative", relative_TN, times, weights_RN)
    return out


def difference(x_TN: np.ndarray, y_TN: np.ndarray) -> np.ndarray:
    """x - y; NaN where both are infinite, which have no difference."""
    both_TN = np.isinf(x_TN) & np.isinf(y_TN)
    return np.where(both_TN, math.nan, x_TN) - np.where(both_TN, math.nan, y_TN)


def _means(name: str, x_TN: np.ndarray, skewed: bool = False) -> dict[str, Any]:
    """Mean over the rows that have a value, and its interval, at each time; None where no row has one. The mean of an
    infinite value is infinite, and has no interval."""
    value: list[float | None] = []
    ci: list[list[float | None]] = []
    for x_N in x_TN:
        x = x_N[~np.isnan(x_N)]
        found = metrics.mean_estimate(x, skewed) if len(x) else metrics.Estimate(*(math.nan,) * 3)
        # What is skewed here cannot be negative.
        low = max(found.low, 0.0) if skewed and math.isfinite(found.value) else found.low
        value.append(None if math.isnan(found.value) else found.value)
        ci.append([metrics.finite(low), metrics.finite(found.high)])
    return {name: value, f"{name}_ci": ci}


def _peak(name: str, x_TN: np.ndarray, times: Sequence[float], weights_RN: np.ndarray) -> dict[str, Any]:
    """The time of the largest mean, and a bootstrap interval over rows."""
    some_TN = np.isfinite(x_TN)
    filled_TN = np.where(some_TN, x_TN, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_T = filled_TN.sum(axis=1) / some_TN.sum(axis=1)
        mean_RT = (weights_RN @ filled_TN.T) / (weights_RN @ some_TN.T.astype(np.float64))
    if not np.isfinite(mean_T).any():
        return {name: None, f"{name}_ci": None}
    at_R = np.array(times)[np.where(np.isfinite(mean_RT), mean_RT, -np.inf).argmax(axis=1)]
    low, high = np.quantile(at_R, [0.025, 0.975], method="nearest")
    return {name: float(times[int(np.nanargmax(mean_T))]), f"{name}_ci": [float(low), float(high)]}


def _pairs(family: Family, pairs: Sequence[tuple[str, str]] | str | None) -> list[tuple[str, str]]:
    if pairs is None:
        heavy = family.heavy
        found = [(name, heavy) for name in family.names if name != heavy]
    elif pairs == "all":
        names = family.names
        found = [(names[i], names[j]) for j in range(len(names)) for i in range(j)]
    elif isinstance(pairs, str):
        raise UserError(f"{pairs!r} are not pairs: write all, or list (light, heavy) names")
    else:
        found = [(family.named(str(light)), family.named(str(heavy))) for light, heavy in pairs]
    if not found:
        raise UserError("there is no pair to compare: the family has a single model")
    return list(dict.fromkeys(found))


def _times(timesteps: int | Sequence[float]) -> list[float]:
    if isinstance(timesteps, int):
        if timesteps < 1:
            raise UserError(f"the number of timesteps must be at least 1, not {timesteps}")
        return [k / timesteps for k in range(1, timesteps + 1)]
    times = sorted({float(t) for t in timesteps})
    if not times or not all(0 < t <= 1 for t in times):
        raise UserError("times must be above 0 (all written) and at most 1 (all masked)")
    return times


def _text_rows(family: Family, text: np.ndarray | None, length: int, n: int) -> np.ndarray:
    if text is None:
        raise UserError("importance on data needs held-out text: give its tokens, or choose states trajectory")
    tokens = np.asarray(text)
    rows = spread_rows(tokens, length, n) if tokens.ndim == 1 else tokens
    return text_rows(family, rows, length, 2**32)[:n, :length].astype(np.int64)


def _with_twins(
    family: Family, pairs: Sequence[tuple[str, str]], twins: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The models that a group of pairs needs, and the pairs with each model's twin added."""
    names = dict.fromkeys(name for pair in pairs for name in pair)
    models: dict[str, Any] = {name: family.models[name] for name in names}
    everything = list(pairs)
    for name in names:
        if name in twins:
            models[TWIN + name] = twins[name]
            everything.append((TWIN + name, name))
    return models, everything


def render(result: Mapping[str, Any]) -> str:
    """The curves as tables: losses and KL of each pair by time, relative where there is a twin, and where it peaks."""
    lines = []
    for pair in result["pairs"]:
        relative = pair["kl_relative"]
        peak = f"peak of the KL at t = {pair['peak_t']:.2f} ({_span(pair['peak_t_ci'], '.2f')})"
        if relative is not None:
            span = _span(pair["peak_t_relative_ci"], ".2f")
            peak += f", relative to the twin at {pair['peak_t_relative']:.2f} ({span})"
        lines += [f"{pair['light']} against {pair['heavy']} on {pair['states']}, {pair['n']} rows: {peak}"]
        numbers = [pair[name] for name in ("loss_light", "loss_heavy", "abs_loss_diff", "kl")]
        columns = {"t": [f"{t:.3f}" for t in pair["t"]]}
        for title, values in zip(("loss light", "loss heavy", "|diff|", "KL"), numbers, strict=True):
            columns[title] = [_number(value) for value in values]
        columns["95%"] = [_span(ci, ".4f") for ci in pair["kl_ci"]]
        if relative is not None:
            columns["relative"] = [_number(value) for value in relative]
        if pair.get("kl_light_base"):
            columns[f"two seeds of {pair['light']}"] = [_number(value) for value in pair["kl_light_base"]]
        # Own samples have no true tokens and so no losses; one row has no interval.
        columns = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
        lines += [table(list(columns), list(zip(*columns.values(), strict=True)), text=()), ""]
    return "\n".join(lines).rstrip()


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4f}"


def _span(ci: Sequence[float | None] | None, form: str) -> str:
    low, high = ci or (None, None)
    return "-" if low is None or high is None else f"{low:{form}} to {high:{form}}"
