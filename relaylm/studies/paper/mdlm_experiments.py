r"""The experiments that set MDLM's published sampler beside the engine: precision of the draw, and where time goes.

MDLM draws tokens with float32 noise over the whole vocabulary, which cuts off rare tokens (`reference`): the more so
the earlier the step and the more steps there are. Whether what the paper says of early steps survives exact sampling is
asked by running its seven schedules both ways. `kept_mass` is the probability that the float32 draw leaves in play.

Shapes: n rows, L positions, M masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaylm.core.noise import uniforms
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.evaluate import judge_rows
from relaylm.measure.judge import load_judge, log_perplexity
from relaylm.measure.provenance import load_record
from relaylm.measure.store import cached
from relaylm.models.denoiser import Transformer, build
from relaylm.models.family import Family
from relaylm.sampling import reference
from relaylm.sampling.engine import settings
from relaylm.sampling.sample import sample
from relaylm.studies.bench.bench import bench
from relaylm.studies.bench.published import Side, Window, seconds_of
from relaylm.studies.paper import numbers as paper
from relaylm.studies.paper.contrasts import contrasts, numbers
from relaylm.studies.paper.experiments import Result, Setup, by_share, depth_of, held_out_rows, judged

PUBLISHED_ROWS = 64  # of the wall-clock runs of MDLM's sampler, which is slow; counted for as many as there are


def published_sides(family: Family) -> dict[str, Side]:
    """The light and the heavy model as MDLM's code runs them."""
    sides = {}
    for name in family.roles():
        model = family.models[name]
        if not isinstance(model, Transformer):
            raise UserError(
                f"MDLM's sampler is measured with relaylm's own networks, not with a {type(model).__name__}"
            )
        weights = {key: value.float().cpu() for key, value in model.state_dict().items()}
        sides[name] = Side(build(model.architecture, weights).to(family.device), model, family.device)
    return sides


def shares(setup: Setup) -> Result:
    """The sandwich with more and more light steps: quality, and wall-clock in the engine and in MDLM's sampler."""
    family = setup.family
    found = by_share(setup, setup.scale.samples)
    length, steps, rows = setup.length(), setup.steps(), setup.scale.timed_rows
    named = zip(found["shares"], found["labels"], strict=True)
    bound = {share: Schedule.parse(name).bind(*family.roles()) for share, name in named}
    sides, batch, given = published_sides(family), min(rows, PUBLISHED_ROWS), np.full(length, -1)

    def engine(share: int) -> float:
        run = partial(sample, family, bound[share], rows, steps=steps, seed=setup.seed, given=given)
        return seconds_of(run, family.device)

    def published(share: int) -> float:
        options: dict[str, Any] = {"mask_id": family.mask_id, "steps": steps, "device": family.device}
        return reference.sample_reference(sides, bound[share], batch, length, **options).seconds * rows / batch

    setup.note("wall-clock by light share")
    sample(family, "sandwich:50%", rows, steps=min(8, steps), given=given)  # warm
    seconds = {f"{run.__name__}_seconds": _up_and_down(run, list(bound)) for run in (engine, published)}
    return {**found, "timed_rows": rows, **seconds}


def _up_and_down(run: Callable[[int], float], keys: list[int]) -> dict[str, list[float]]:
    """Seconds of each, up the list and down again, so that a drift of the machine affects all alike."""
    seconds: dict[str, list[float]] = {str(key): [] for key in keys}
    for key in [*keys, *keys[::-1]]:
        seconds[str(key)].append(run(key))
    return seconds


def precision(setup: Setup) -> Result:
    """The seven schedules in exact sampling and as MDLM's float32 sampler draws them, at several numbers of steps; that
    sampler is slow, so it has fewer samples."""
    family, n = setup.family, setup.scale.precision_samples
    sides = published_sides(family)
    rows_nL, _ = held_out_rows(setup, 16)
    out = {}
    for steps in setup.scale.precision_steps:
        exact = judged(setup, paper.SCHEDULES, n=max(n, setup.scale.samples), steps=steps, rivals=False)
        rows = []
        for name in paper.SCHEDULES:
            setup.note(f"MDLM's sampler, T = {steps}, {name}")
            found = _published_scores(setup, sides, name, steps, n)
            figures = metrics.perplexity(numbers(found["nll"]), numbers(found["count"]))
            entropy = metrics.mean_estimate(numbers(found["entropy"]))
            figures |= {"entropy": entropy.value, "entropy_ci": entropy.ci}
            rows.append({"schedule": name, **figures, "kind": "asked", "log_ppls": found["log_ppl"]})
        published = contrasts({"rows": rows})
        published["rows"] = [{k: v for k, v in row.items() if k != "kind"} for row in published["rows"]]
        mass = {name: kept_mass(family, name, steps, rows_nL, setup.seed) for name in family.roles()}
        out[str(steps)] = {"exact": exact, "published": published, "kept_mass": mass}
    about = {"family": {"name": family.name}, "vocabulary": family.vocab_size, "n": n, "length": setup.length()}
    return {"by_steps": out, **about}


def _published_scores(setup: Setup, sides: Mapping[str, Side], name: str, steps: int, n: int) -> dict[str, Any]:
    """The judge's sums for n rows of MDLM's sampler, all schedules from the same random numbers; kept in the store."""
    family, length = setup.family, setup.length()
    judge, device = load_judge(setup.judge, family), family.device

    def drawn() -> dict[str, Any]:
        schedule = Schedule.parse(name).bind(*family.roles())
        memory = 2**32 if device.type == "cuda" else 2**26  # numbers in a B x L x V tensor
        size = min(n, max(1, memory // (length * family.vocab_size)))
        options: dict[str, Any] = {"mask_id": family.mask_id, "steps": steps, "device": device}
        tokens = []
        for first in range(0, n, size):
            batch, seed = min(size, n - first), setup.seed + first
            tokens.append(reference.sample_reference(sides, schedule, batch, length, seed=seed, **options).tokens)
        tokens_nL = np.concatenate(tokens)
        scores = judge_rows(family, judge, tokens_nL, recipe=setup.scale.recipe)
        return {
            "kind": "published",
            "schedule": name,
            "steps": steps,
            "nll": scores.written_nll_n.tolist(),
            "count": scores.written_count_n.tolist(),
            "log_ppl": [metrics.finite(float(v)) for v in log_perplexity(scores)],
            "entropy": [metrics.token_entropy(row) for row in tokens_nL],
        }

    key = ["published", family.digest, judge.key, name, steps, n, length, setup.seed, str(device)]
    return cached(setup.store if family.digest else None, key, drawn)


def kept_mass(family: Family, name: str, steps: int, tokens_nL: np.ndarray, seed: int) -> dict[str, Any]:
    """The probability that MDLM's float32 draw leaves in play, at several times: mean and 5% quantile over masked
    positions of these rows."""
    rows, length = tokens_nL.shape
    u_nL = uniforms(seed, np.arange(rows), length)
    model, times = family.models[name], (1.0, 0.75, 0.5, 0.25, 0.1)
    means, lows = [], []
    with settings(family.device):
        for t in times:
            masked_nL = u_nL <= t
            x_nL = torch.from_numpy(np.where(masked_nL, family.mask_id, tokens_nL)).to(family.device)
            logits_nLV = model.logits(x_nL, torch.full((rows,), t, device=family.device)).double()
            logits_nLV[..., family.mask_id] = -torch.inf
            p_MV = logits_nLV.softmax(-1)[torch.from_numpy(masked_nL).to(family.device)].cpu().numpy()
            p_MV = p_MV[np.linspace(0, len(p_MV) - 1, min(256, len(p_MV))).astype(int)]
            kept = [reference.kept_mass(p_V, t - 1 / steps, steps) for p_V in p_MV]
            means.append(float(np.mean(kept)))
            lows.append(float(np.quantile(kept, 0.05)))
    return {"t": list(times), "mean": means, "low": lows}


def where_time_goes(setup: Setup) -> Result:
    """Output layer against blocks for the light and the heavy model in MDLM's sampler, and the engine's own shares."""
    family, cuda = setup.family, setup.family.device.type == "cuda"
    small: dict[str, Any] = {} if cuda else {"batch_size": 16, "samples": 16}
    options: dict[str, Any] = {"device": family.device, "seed": setup.seed, "progress": setup.progress}
    setup.note("where the time goes")
    source = family if family.folder is None else str(family.folder)  # loaded again, in float32
    found = bench(family=source, length=setup.length(), quick=not cuda, parts=["breakdown"], **small, **options)
    roles, sides = ("light", "heavy"), published_sides(family)
    out = {
        "family": _time_of(found, dict(zip(roles, sides.values(), strict=True)), 64 if cuda else 8, setup),
        "depths": {role: depth_of(family, name) for role, name in zip(roles, sides, strict=True)},
        "vocabulary": family.vocab_size,
    }
    if cuda:
        setup.note("the same at the paper's size, random weights")
        out["paper_size"] = paper_size(bench(quick=True, parts=["breakdown", "bound"], **options))
    return out


def _time_of(found: Mapping[str, Any], sides: Mapping[str, Side], rows: int, setup: Setup) -> dict[str, Any]:
    """The share of MDLM's step that its blocks take, what that bounds, and what the report shows of the bench."""
    steps, length, blocks = setup.steps(), setup.length(), {}
    for which, side in sides.items():
        with torch.inference_mode():
            window = Window(side, 0.5, steps, 8, rows, length, setup.seed)
            window.ddpm(1)
            step_ms = window.ms(window.ddpm)
            blocks[which] = min(1.0, window.blocks_ms() / step_ms)
    return {
        "published_blocks": blocks,
        "bound_1_over_alpha": {which: 1 / max(1e-9, 1 - share) for which, share in blocks.items()},
        **paper_size(found),
    }


def paper_size(found: Mapping[str, Any]) -> dict[str, Any]:
    """What this report shows of a bench."""
    names = ["reference_ms_per_row_step", "reference_light_ms_per_row_step", "engine_ms_per_row_step"]
    names += ["engine_light_ms_per_row_step", "breakdown", "breakdown_light", "alpha", "settings", "machine", "errors"]
    return {name: found.get(name) for name in names}


def with_paper_size(result: Result, records: Path | None) -> Result:
    """Where time was measured without a GPU, the paper's size comes from the recorded bench, if there is one."""
    found = load_record(records / "bench" / "h200.json" if records is not None else None)
    if found is None or result.get("paper_size"):
        return result
    recorded = f"recorded on one {found['machine']['gpu']}, {found['date']}: `{found['command']}`"
    return {**result, "paper_size": paper_size(found), "recorded": recorded}
