r"""The experiments that set MDLM's published sampler beside the engine: precision of the draw, and where time goes.

MDLM draws tokens with float32 noise over the whole vocabulary, which cuts off rare tokens (`reference`): the more so
the earlier the step and the more steps there are. Whether what the paper says of early steps survives exact sampling is
asked by running its seven schedules both ways. `kept_mass` is the probability that the float32 draw leaves in play.

Shapes: n rows, L positions, M masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm import metrics, paper, reference
from relaylm.denoiser import Transformer, build
from relaylm.engine import settings
from relaylm.errors import UserError
from relaylm.experiments import Setup, contrasts, depth_of, held_out_rows, judged, numbers
from relaylm.judge import load_judge, log_perplexity, score
from relaylm.plan import uniforms
from relaylm.published import Side, Window, seconds_of
from relaylm.sampler import sample
from relaylm.schedule import Schedule
from relaylm.store import content_key

if TYPE_CHECKING:
    from relaylm.family import Family


PUBLISHED_ROWS = 64  # of the wall-clock runs of MDLM's sampler, which is slow; counted for as many as there are


def published_sides(family: Family, names: Sequence[str]) -> dict[str, Side]:
    """Models as MDLM's code runs them."""
    sides = {}
    for name in names:
        model = family.models[name]
        if not isinstance(model, Transformer):
            raise UserError(
                f"MDLM's sampler is measured with relaylm's own networks, not with a {type(model).__name__}"
            )
        weights = {key: value.float().cpu() for key, value in model.state_dict().items()}
        sides[name] = Side(build(model.architecture, weights).to(family.device), model, family.device)
    return sides


def shares(setup: Setup) -> dict[str, Any]:
    """The sandwich with more and more light steps: quality, and wall-clock in the engine and in MDLM's sampler."""
    family = setup.family
    names = {share: {0: "heavy", 100: "light"}.get(share, f"sandwich:{share}%") for share in setup.scale.shares}
    found = judged(setup, list(names.values()), rivals=False)
    light, heavy = family.roles()
    length, steps, rows = setup.length(), setup.steps(), setup.scale.timed_rows
    bound = {share: Schedule.parse(name).bind(light, heavy) for share, name in names.items()}
    given = np.full(length, -1)

    def engine(share: int) -> float:
        run = lambda: sample(family, bound[share], rows, steps=steps, seed=setup.seed, given=given)  # noqa: E731
        return seconds_of(run, family.device)

    sides = published_sides(family, (light, heavy))

    def published(share: int) -> float:
        batch = min(rows, PUBLISHED_ROWS)
        run = reference.sample_reference(
            sides, bound[share], batch, length, mask_id=family.mask_id, steps=steps, device=family.device
        )
        return run.seconds * rows / batch

    setup.note("wall-clock by light share")
    sample(family, "sandwich:50%", rows, steps=min(8, steps), given=given)  # warm
    engine_seconds, published_seconds = _up_and_down(engine, names), _up_and_down(published, names)
    return {
        **found,
        "shares": list(names),
        "labels": list(names.values()),
        "timed_rows": rows,
        "engine_seconds": {str(k): v for k, v in engine_seconds.items()},
        "published_seconds": {str(k): v for k, v in published_seconds.items()},
    }


def _up_and_down(run: Callable[[int], float], keys: Mapping[int, Any]) -> dict[int, list[float]]:
    """Seconds of each, up the list and down again, so that a drift of the machine hits all alike."""
    order = list(keys)
    seconds: dict[int, list[float]] = {key: [] for key in order}
    for key in [*order, *order[::-1]]:
        seconds[key].append(run(key))
    return seconds


def precision(setup: Setup) -> dict[str, Any]:
    """The seven schedules in exact sampling and as MDLM's float32 sampler draws them, at several numbers of steps; that
    sampler is slow, so it has fewer samples. `setup.family` is the one of `--bpe` here, if there is one
    (`reproduce.placed`)."""
    family = setup.family
    light, heavy = family.roles()
    n, length = setup.scale.precision_samples, setup.length()
    sides = published_sides(family, (light, heavy))
    rows_nL, _ = held_out_rows(setup, family, setup.text, 16)
    out = {}
    for steps in setup.scale.precision_steps:
        exact = judged(setup, paper.SCHEDULES, n=max(n, setup.scale.samples), steps=steps, rivals=False)
        rows, logs = [], {}
        for name in paper.SCHEDULES:
            setup.note(f"MDLM's sampler, T = {steps}, {name}")
            found = _published_scores(setup, family, sides, name, steps, n)
            logs[name] = numbers(found["log_ppl"])
            figures = metrics.perplexity(numbers(found["nll"]), numbers(found["count"]))
            entropy = metrics.mean_estimate(numbers(found["entropy"]))
            rows.append({"schedule": name, **figures, "entropy": entropy.value, "entropy_ci": entropy.ci})
        table = [{"schedule": name, "kind": "asked", "log_ppls": logs[name].tolist()} for name in paper.SCHEDULES]
        out[str(steps)] = {
            "exact": exact,
            "published": {**contrasts({"rows": table}), "rows": rows},
            "kept_mass": {name: kept_mass(family, name, steps, rows_nL, setup.seed) for name in (light, heavy)},
        }
    return {"by_steps": out, "family": {"name": family.name}, "vocabulary": family.vocab_size, "n": n, "length": length}


def _published_scores(
    setup: Setup, family: Family, sides: Mapping[str, Side], name: str, steps: int, n: int
) -> dict[str, Any]:
    """The judge's sums for n rows of MDLM's sampler, all schedules from the same random numbers; kept in the store."""
    length, judge = setup.length(family), load_judge(setup.judge, family)
    key = content_key("published", family.digest, judge.key, name, steps, n, length, setup.seed, str(family.device))
    if setup.store is not None and family.digest and (record := setup.store.get(key)) is not None:
        return record
    schedule = Schedule.parse(name).bind(*family.roles())
    tokens = []
    room = 2**32 if family.device.type == "cuda" else 2**26  # numbers in a B x L x V tensor
    size = min(n, max(1, room // (length * family.vocab_size)))
    for first in range(0, n, size):
        options: dict[str, Any] = {"mask_id": family.mask_id, "steps": steps, "device": family.device}
        run = reference.sample_reference(
            sides, schedule, min(size, n - first), length, seed=setup.seed + first, **options
        )
        tokens.append(run.tokens)
    tokens_nL = np.concatenate(tokens)
    texts = [] if family.tokenizer is None else [family.tokenizer.decode(row) for row in tokens_nL]
    scores = score(judge, tokens_nL, texts, recipe=setup.scale.recipe, max_length=family.length)
    record = {
        "kind": "published",
        "schedule": name,
        "steps": steps,
        "nll": scores.written_nll_n.tolist(),
        "count": scores.written_count_n.tolist(),
        "log_ppl": [metrics.finite(float(v)) for v in log_perplexity(scores)],
        "entropy": [metrics.token_entropy(row) for row in tokens_nL],
    }
    if setup.store is not None and family.digest:
        setup.store.put(key, record)
    return record


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


def where_time_goes(setup: Setup) -> dict[str, Any]:
    """Output layer against blocks for the light and the heavy model in MDLM's sampler, and the engine's own shares."""
    from relaylm.bench import bench

    family, cuda = setup.family, setup.family.device.type == "cuda"
    small: dict[str, Any] = {} if cuda else {"batch_size": 16, "samples": 16}
    options: dict[str, Any] = {"device": family.device, "seed": setup.seed, "progress": setup.progress}
    setup.note("where the time goes")
    source = family if family.folder is None else str(family.folder)  # loaded anew, in float32
    found = bench(family=source, length=setup.length(), quick=not cuda, parts=["breakdown"], **small, **options)
    light, heavy = family.roles()
    sides, rows = published_sides(family, (light, heavy)), 64 if cuda else 8
    out = {
        "family": _time_of(found, {d: sides[name] for d, name in (("light", light), ("heavy", heavy))}, rows, setup),
        "depths": {"light": depth_of(family, light), "heavy": depth_of(family, heavy)},
        "vocabulary": family.vocab_size,
    }
    if cuda:
        setup.note("the same at the paper's size, random weights")
        out["paper_size"] = paper_size(bench(quick=True, parts=["breakdown", "bound"], **options))
    return out


def _time_of(found: Mapping[str, Any], sides: Mapping[str, Side], rows: int, setup: Setup) -> dict[str, Any]:
    steps, length = setup.steps(), setup.length()
    blocks = {}
    for which, side in sides.items():
        window = Window(side, 0.5, steps, 8, rows, length, setup.seed)
        t_B = torch.ones(rows, device=side.device)
        with torch.inference_mode():
            window.ddpm(1)
            step_ms = window.ms(window.ddpm)
            seconds = [seconds_of(partial(side.blocks, window.x_BL, t_B), side.device) for _ in range(5)]
        blocks[which] = min(1.0, float(np.median(seconds)) * 1e3 / rows / step_ms)
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
