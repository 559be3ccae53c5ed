r"""Schedules side by side: what each writes, what it costs, and which of them really differ.

Every schedule gets the same rows: row r has the same plan (the same order of positions, the same token noise) under all
of them, so differences are paired and need far fewer samples than separate means would.

**Rivals.** A mixed schedule is only worth its trouble if nothing simpler does as well for the same money. So beside
each one stand, at its floating-point operations: one model of middle depth at every step, the heavy model in fewer
steps, and the same number of light steps spread evenly or at random. If one of them wins, the first line says so. The
light and the heavy model alone are always there too, since each row's share of the quality gap is counted between them:

    gap_paid = (ppl - ppl_H) / (ppl_L - ppl_H).

Operations are compared in expectation over plans, which is exact and does not depend on the seed: with F free positions
a step that unmasks a share w of the masked axis makes a call with probability 1 - (1 - w)^F and asks for F w positions.

Shapes: n rows, L positions, K models, S schedules, R bootstrap resamples.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm import metrics
from relaylm.errors import UserError
from relaylm.judge import Judge, load_judge, score, weights_digest
from relaylm.sampler import Samples, sample
from relaylm.schedule import Schedule, Segment

if TYPE_CHECKING:
    from relaylm.family import Family
    from relaylm.store import Store

RANDOM_SEED = 1  # of the rival with randomly placed light steps
CHUNK = 64  # rows in a record, at least
SCORES = ("nll", "count", "written_nll", "written_count", "cut")
SLACK = 1e-9  # relative; expected operations are exact but for rounding


@dataclass
class Entry:
    """One row of the table to be."""

    label: str
    schedule: Schedule  # bound: models' names, no roles
    steps: float
    kind: str  # "asked", "anchor" or "rival"
    rival: str | None = None  # what kind of rival
    rival_of: list[str] = field(default_factory=list)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Entries that would give the same samples are one."""
        if math.isinf(self.steps):
            return ("inf", self.schedule)
        table = self.schedule.timetable(int(self.steps))
        return table.models, table.times


@dataclass(frozen=True)
class Drawn:
    """Samples of one entry and what they cost, by row."""

    tokens_nL: np.ndarray
    calls_nK: np.ndarray
    flops_n: np.ndarray | None
    seconds: float

    @staticmethod
    def join(parts: Sequence[Drawn]) -> Drawn:
        flops = [part.flops_n for part in parts if part.flops_n is not None]
        return Drawn(
            np.concatenate([part.tokens_nL for part in parts]),
            np.concatenate([part.calls_nK for part in parts]),
            np.concatenate(flops) if len(flops) == len(parts) else None,
            sum(part.seconds for part in parts),
        )


def compare(
    family: Family,
    schedules: Sequence[str | Schedule],
    n: int = 400,
    *,
    steps: float | None = None,
    length: int | None = None,
    seed: int = 0,
    prompts: Sequence[str] | np.ndarray | None = None,
    judge: Any = None,
    recipe: str = "plain",
    rivals: bool = True,
    bound: bool = False,
    text: np.ndarray | None = None,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    store: Store | str | Path | None = None,
    fresh: bool = False,
    any_device: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Sample n rows under each schedule, judge them, and compare. Plain JSON values come back; `render` shows them.

    `prompts` are texts (row r gets prompt r mod their number) or an array of token ids with -1 where free; perplexity
    is then that of the continuation, with `*_everything` beside it. `judge` and `recipe` as in `relaylm.judge`. `bound`
    adds each schedule's likelihood bound on `text` (rows of held-out token ids). With a `store` what is there already
    is not computed again (`fresh`: it is, and replaced); `any_device` also takes samples that were drawn on another
    device, in another batch size or under another version of PyTorch, which have the same law but not always the same
    bits.
    """
    if not schedules:
        raise UserError("there is nothing to compare: name at least one schedule")
    if n < 2:
        raise UserError(f"a comparison needs at least 2 samples of each schedule, not {n}")
    light, heavy = family.roles(light, heavy)
    given_nL, prompt_texts = _given(family, prompts, n, length)
    entries = _entries(family, schedules, steps, given_nL, light, heavy, rivals)
    referee = load_judge(judge, family)
    kept = _open_store(store)
    batch = min(n, batch_size or family.batch_size(n, given_nL.shape[1]))
    work = _Work(family, referee, recipe, given_nL, prompt_texts, seed, batch, heavy, kept, fresh, any_device)
    bounds = _bounds(family, entries, text, seed) if bound else [None] * len(entries)
    bar = _progress(progress, len(entries) * n)
    rows: list[dict[str, Any]] = []
    log_Sn: list[np.ndarray] = []
    for entry, likelihood in zip(entries, bounds, strict=True):
        bar.set_description(entry.label[:30])
        row, log_n = work.row(entry, bar.update)
        rows.append({**row, "bound": likelihood})
        log_Sn.append(log_n)
    bar.close()
    _relate(rows, np.stack(log_Sn), family, entries, light, heavy)
    result = {
        "kind": "compare",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": int(given_nL.shape[1]),
        "steps": "inf" if math.isinf(_base(entries)) else int(_base(entries)),
        "seed": seed,
        "light": light,
        "heavy": heavy,
        "judge": referee.name,
        "recipe": recipe,
        "conditional": bool((given_nL >= 0).any()),
        "device": str(family.device),
        "batch_size": batch,
        "rows": rows,
        **_comparisons(rows, np.stack(log_Sn)),
    }
    if kept is not None and (kept.damage or kept.repaired):
        result["store_notes"] = [*kept.damage, *kept.repaired]
    result["verdict"] = _verdict(result)
    return result


# ------------------------------------------------------------------------------------------------ what is compared


def _given(
    family: Family, prompts: Sequence[str] | np.ndarray | None, n: int, length: int | None
) -> tuple[np.ndarray, list[str] | None]:
    """(n, L) token ids, -1 where free, and the prompts' texts by row."""
    from relaylm.family import lay_out

    if prompts is None:
        return np.tile(lay_out(family, length=length), (n, 1)), None
    if len(prompts) == 0:
        raise UserError("the list of prompts is empty")
    if isinstance(prompts, np.ndarray):
        given = np.atleast_2d(prompts).astype(np.int64)
        if length is not None and length != given.shape[1]:
            raise UserError(f"the prompts are laid out for length {given.shape[1]}, but length is {length}")
        given_nL, texts = given[np.arange(n) % len(given)], None
        if family.tokenizer is not None:
            ends = [int((row < 0).argmax()) if (row < 0).any() else len(row) for row in given_nL]
            fronts = [row[:end] for row, end in zip(given_nL, ends, strict=True)]
            if all((row[end:] < 0).all() for row, end in zip(given_nL, ends, strict=True)):
                texts = [family.tokenizer.decode(front) for front in fronts]
        return given_nL, texts
    laid = [lay_out(family, prompt, length=length) for prompt in prompts]
    order = [r % len(prompts) for r in range(n)]
    # What a judge that reads text will see in front of the continuation: the prompt as the tokenizer gives it back.
    assert family.tokenizer is not None
    shown = [family.tokenizer.decode(row[row >= 0]) for row in laid]
    return np.stack([laid[k] for k in order]), [shown[k] for k in order]


def _entries(
    family: Family,
    schedules: Sequence[str | Schedule],
    steps: float | None,
    given_nL: np.ndarray,
    light: str,
    heavy: str,
    rivals: bool,
) -> list[Entry]:
    """What was asked for, in order; then the light and the heavy model; then the rivals of each mixed schedule."""
    asked = []
    for item in schedules:
        schedule = (Schedule.parse(item) if isinstance(item, str) else item).bind(light, heavy)
        family.check_names(schedule.models)
        asked.append((item if isinstance(item, str) else str(item), schedule))
    counts = [schedule.steps for _, schedule in asked if schedule.steps is not None]
    base = steps if steps is not None else counts[0] if counts else given_nL.shape[1]
    entries: list[Entry] = []

    def add(entry: Entry) -> None:
        for other in entries:
            if other.identity == entry.identity:
                other.rival = other.rival or entry.rival  # what was asked for may be another's rival, too
                other.rival_of += [name for name in entry.rival_of if name not in other.rival_of]
                return
        entries.append(entry)

    for label, schedule in asked:
        own = schedule.steps if schedule.steps is not None and steps is None else base
        add(Entry(label, schedule, own, "asked"))
    names = {entry.label for entry in entries}
    for label, model in (("heavy", heavy), ("light", light)):
        add(Entry(label if label not in names else model, _alone(model), base, "anchor"))
    if rivals:
        free_n = (given_nL < 0).sum(axis=1)
        for entry in [entry for entry in entries if entry.kind == "asked" and len(entry.schedule.models) > 1]:
            for rival in _rivals(family, entry, free_n, given_nL.shape[1], heavy):
                add(rival)
    return entries


def _alone(model: str) -> Schedule:
    return Schedule((Segment(model, Fraction(1)),))


def _rivals(family: Family, entry: Entry, free_n: np.ndarray, length: int, heavy: str) -> list[Entry]:
    """The equal-compute rivals of a mixed schedule."""
    found = []
    models = {name: model for name, model in family.models.items() if hasattr(model, "flops")}
    if len(models) == len(family.models):
        budget = expected_flops(models, entry.schedule, entry.steps, free_n, length) * (1 + SLACK)
        used = set(entry.schedule.models)

        def alone(name: str) -> float:
            return expected_flops(models, _alone(name), entry.steps, free_n, length)

        # Of the models that this schedule does not use already; those it does use are in the table anyway.
        within = [name for name in family.names if name not in used and alone(name) <= budget]
        if within:
            best = max(within, key=alone)
            found.append(Entry(best, _alone(best), entry.steps, "rival", "one model of middle depth"))
        fewer = steps_within(models, heavy, budget, free_n, length)
        if fewer is not None and fewer < entry.steps:
            found.append(Entry(f"H{fewer}", _alone(heavy), fewer, "rival", "heavy in fewer steps"))
    if len(entry.schedule.models) == 2 and not math.isinf(entry.steps):
        order = [name for name in family.names if name in entry.schedule.models]
        table = entry.schedule.timetable(int(entry.steps))
        pair = tuple(Segment(name, count) for name in order if (count := table.models.count(name)))
        if len(pair) == 2:
            for placement, what in (("interleaved", "spread evenly"), (f"random:{RANDOM_SEED}", "placed at random")):
                schedule = Schedule(pair, placement)
                found.append(Entry(str(schedule), schedule, entry.steps, "rival", f"light steps {what}"))
    for rival in found:
        rival.rival_of = [entry.label]
    return found


def expected_flops(
    models: Mapping[str, Any], schedule: Schedule, steps: float, free_n: np.ndarray, length: int
) -> float:
    """Mean operations for a row, over all plans; `free_n` are the free positions of the rows there are."""
    lines = {name: _line(models[name], length) for name in schedule.models}
    free, rows = np.unique(np.asarray(free_n), return_counts=True)
    if math.isinf(steps):
        spans = -np.diff([1.0, *schedule.ends])
        each = sum(span * sum(lines[seg.model]) for span, seg in zip(spans, schedule.segments, strict=True))
        return float(each * (free * rows).sum() / rows.sum())
    table = schedule.timetable(int(steps))
    share_T = -np.diff(np.asarray(table.times))
    base_T, slope_T = (np.array([lines[name][k] for name in table.models]) for k in (0, 1))
    each_f = [
        (base_T * -np.expm1(f * np.log1p(-np.minimum(share_T, 1 - 1e-15))) + slope_T * share_T * f).sum() for f in free
    ]
    return float((np.array(each_f) * rows).sum() / rows.sum())


def steps_within(
    models: Mapping[str, Any], model: str, budget: float, free_n: np.ndarray, length: int, most: int = 1 << 20
) -> int | None:
    """The largest T at which one model alone stays within so many operations for a row; None if not even T = 1 does."""

    def cost(steps: int) -> float:
        return expected_flops(models, _alone(model), steps, free_n, length)

    if cost(1) > budget:
        return None
    low, high = 1, 2
    while high < most and cost(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return low


def _line(model: Any, length: int) -> tuple[float, float]:
    """Operations of a call as base + slope * positions."""
    slope = float(model.flops(length, 2) - model.flops(length, 1))
    return float(model.flops(length, 1)) - slope, slope


def _base(entries: Sequence[Entry]) -> float:
    return next((entry.steps for entry in entries if entry.kind == "anchor"), entries[0].steps)


# ------------------------------------------------------------------------------------------------ sampling, judging


@dataclass
class _Work:
    """What all entries of a comparison share, and the store between them and the networks."""

    family: Family
    judge: Judge
    recipe: str
    given_nL: np.ndarray
    prompts: list[str] | None
    seed: int
    batch: int
    heavy: str
    store: Store | None
    fresh: bool
    any_device: bool

    def __post_init__(self) -> None:
        if self.store is not None:
            self.model_keys = {name: _model_key(self.family, name) for name in self.family.names}
            if self.judge.key.startswith("unnamed:"):
                raise UserError(f"scores of the judge {self.judge.name} cannot be stored: its weights are not known")

    @property
    def same_given(self) -> bool:
        """Is the same given in every row? Then a record's rows mean the same whatever n was."""
        return not (self.given_nL != self.given_nL[0]).any()

    def row(self, entry: Entry, done: Any = lambda k: None) -> tuple[dict[str, Any], np.ndarray]:
        """One row of the table, and the log-perplexity of each sample: in pieces, each taken from the store or drawn,
        judged and put there."""
        n, size = len(self.given_nL), max(CHUNK, 4 * self.batch)
        stored = self._stored(entry)
        parts: list[Drawn] = []
        scores: list[dict[str, np.ndarray]] = []
        at = 0
        while at < n:
            part = stored.get(at)
            if part is None:
                part = self._sample(entry, at, min([n, at + size, *(first for first in stored if first > at)]))
            found = self._score(entry, at, part)
            rows = min(n - at, len(part.tokens_nL))
            parts.append(_head(part, rows))
            scores.append({name: array[:rows] for name, array in found.items()})
            at += rows
            done(rows)
        joined = {name: np.concatenate([found[name] for found in scores]) for name in scores[0]}
        return self._figures(entry, Drawn.join(parts), joined)

    def _sample(self, entry: Entry, start: int, stop: int) -> Drawn:
        rows = stop - start
        samples = sample(
            self.family,
            entry.schedule,
            rows,
            steps=entry.steps,
            seed=self.seed,
            given=self.given_nL[start:stop],
            batch_size=min(self.batch, rows),
            first_row=start,
            heavy=self.heavy,
        )
        drawn = row_costs(samples, self.family)
        if self.store is not None:
            record = {
                "law": self._law(entry),
                "made": self._made(rows),
                "given": _hash(self._given(start, rows)),
                "schedule": str(entry.schedule),
                "steps": _steps(entry.steps),
                "first_row": start,
                "rows": rows,
            }
            key = _content_key("samples", record)
            packed = {"kind": "samples", **record, **_pack(drawn, self.family.names)}
            self.store.put(key, packed, replace=self.fresh)
        return drawn

    def _stored(self, entry: Entry) -> dict[int, Drawn]:
        """Samples that are there, by their first row; the longest where several start at one."""
        if self.store is None or self.fresh:
            return {}
        found: dict[int, Drawn] = {}
        for record in self.store.records("samples", law=self._law(entry)):
            first, rows = record["first_row"], record["rows"]
            if first >= len(self.given_nL) or (first in found and len(found[first].tokens_nL) > rows):
                continue
            if not self.same_given and first + rows > len(self.given_nL):
                continue
            if record["given"] != _hash(self._given(first, rows)):
                continue
            if self.any_device or record["made"] == self._made(rows):
                found[first] = _unpack(record, self.given_nL.shape[1], self.family.names)
        return found

    def _given(self, start: int, rows: int) -> np.ndarray:
        if self.same_given:
            return np.broadcast_to(self.given_nL[0], (rows, self.given_nL.shape[1]))
        return self.given_nL[start : start + rows]

    def _law(self, entry: Entry) -> str:
        """A hash of what fixes the law of the samples and their plan, but for the rows' numbers and what is given."""
        weights = {name: self.model_keys[name] for name in entry.schedule.models}
        length = self.given_nL.shape[1]
        schedule = entry.schedule.to_json()
        return _content_key("law", weights, self.family.mask_id, schedule, _steps(entry.steps), length, self.seed)

    def _made(self, rows: int) -> dict[str, Any]:
        """What fixes the bits beyond the law: device, number type, call shape, version."""
        device = self.family.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        stored = self.family.stored
        dtype = str(stored.dtype).removeprefix("torch.") if stored is not None else "as given"
        return {"device": name, "dtype": dtype, "batch": min(self.batch, rows), "torch": str(torch.__version__)}

    def _score(self, entry: Entry, start: int, part: Drawn) -> dict[str, np.ndarray]:
        """The judge's sums for the rows of a piece, from the store or anew."""
        tokens_nL = part.tokens_nL
        given_nL = self._given(start, len(tokens_nL))
        prompts = None
        if self.prompts is not None:
            prompts = self.prompts[start : start + len(tokens_nL)]
            prompts += self.prompts[:1] * (len(tokens_nL) - len(prompts))  # beyond n they are all the same
        key = record = None
        if self.store is not None:
            what = [_hash(tokens_nL), _hash(given_nL), prompts, self.judge.key, self.recipe, self.family.length]
            key = _content_key("scores", what)
            record = None if self.fresh else self.store.get(key)
        if record is None:
            tokenizer = self.family.tokenizer
            texts = [] if tokenizer is None else [tokenizer.decode(row) for row in tokens_nL]
            scores = score(
                self.judge, tokens_nL, texts, given_nL, prompts, recipe=self.recipe, max_length=self.family.length
            )
            record = {name: getattr(scores, f"{name}_n").tolist() for name in SCORES}
            if self.store is not None and key is not None:
                about = {"schedule": str(entry.schedule), "steps": _steps(entry.steps), "first_row": start}
                about |= {"judge": self.judge.name, "recipe": self.recipe}
                self.store.put(key, {"kind": "scores", **about, **record}, replace=self.fresh)
        return {name: np.array(record[name]) for name in SCORES}

    def _figures(
        self, entry: Entry, drawn: Drawn, scores: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], np.ndarray]:
        tokens_nL, free_nL = drawn.tokens_nL, self.given_nL < 0
        nll_n, count_n = scores["written_nll"], scores["written_count"]
        figures = metrics.perplexity(nll_n, count_n)
        if not free_nL.all():
            everything = metrics.perplexity(scores["nll"], scores["count"])
            names = ("gen_ppl", "gen_ppl_ci", "corpus_ppl", "corpus_ppl_ci")
            figures |= {name.replace("_ppl", "_ppl_everything"): everything[name] for name in names}
        written = [row[free] for row, free in zip(tokens_nL, free_nL, strict=True)]
        tokenizer = self.family.tokenizer
        texts = [] if tokenizer is None else [tokenizer.decode(row) for row in tokens_nL]
        if texts and self.prompts is not None:
            texts = [text[len(prompt) :] for text, prompt in zip(texts, self.prompts, strict=True)]
        log_n = np.where(count_n > 0, nll_n / np.maximum(count_n, 1), math.nan)
        calls_K = drawn.calls_nK.sum(axis=0)
        row = {
            "schedule": entry.label,
            "kind": entry.kind,
            "rival": entry.rival,
            "rival_of": entry.rival_of,
            "models": str(entry.schedule),
            "steps": _steps(entry.steps),
            **figures,
            "cut_tokens": int(scores["cut"].sum()),
            **metrics.describe_texts(written, texts),
            "calls": int(calls_K.sum()),
            "calls_by_model": {name: int(c) for name, c in zip(self.family.names, calls_K, strict=True) if c},
            "flops": None if drawn.flops_n is None else float(drawn.flops_n.sum()),
            "seconds": drawn.seconds,
            "log_ppls": [metrics.finite(value) for value in log_n],
        }
        return row, log_n


def row_costs(samples: Samples, family: Family) -> Drawn:
    """The calls that were made and their operations, row by row, from the samples' trace."""
    step_nL, model_nL = samples.trace.step_nL, samples.trace.model_nL
    n, length = samples.tokens.shape
    row_F, position_F = np.nonzero(model_nL >= 0)
    model_F = np.array([family.names.index(name) for name in samples.trace.models])[model_nL[row_F, position_F]]
    if math.isinf(samples.steps):
        row_E, model_E, count_E = row_F, model_F, np.ones(len(row_F), dtype=np.int64)
    else:
        event_F = row_F * (int(samples.steps) + 1) + step_nL[row_F, position_F]
        _, first_E, count_E = np.unique(event_F, return_index=True, return_counts=True)
        row_E, model_E = row_F[first_E], model_F[first_E]
    calls_nK = np.zeros((n, len(family.names)), dtype=np.int64)
    np.add.at(calls_nK, (row_E, model_E), 1)
    flops_n = None
    if all(hasattr(model, "flops") for model in family.models.values()):
        pairs, which_E = np.unique(np.stack([model_E, count_E], axis=1), axis=0, return_inverse=True)
        models: list[Any] = list(family.models.values())
        each = np.array([models[m].flops(length, k) for m, k in pairs.tolist()])
        flops_n = np.bincount(row_E, weights=each[which_E.reshape(-1)], minlength=n) if len(row_E) else np.zeros(n)
    return Drawn(samples.tokens, calls_nK, flops_n, samples.cost.seconds)


# ------------------------------------------------------------------------------------------------ statistics


def _relate(
    rows: list[dict[str, Any]], log_Sn: np.ndarray, family: Family, entries: Sequence[Entry], light: str, heavy: str
) -> None:
    """What a row is only in relation to others: savings against all-heavy, the share of the gap it pays."""
    anchors = {}
    for name in (heavy, light):
        alone = Entry(name, _alone(name), _base(entries), "anchor").identity
        anchors[name] = next(s for s, entry in enumerate(entries) if entry.identity == alone)
    h, l = anchors[heavy], anchors[light]
    ppl_Sn = np.exp(log_Sn)
    shared_n = np.isfinite(ppl_Sn).all(axis=0)
    weights_Rn = metrics.resampling_weights(int(shared_n.sum()))
    mean_RS = weights_Rn @ ppl_Sn[:, shared_n].T
    depths = {name: getattr(model, "depth", None) for name, model in family.models.items()}
    for s, (row, entry) in enumerate(zip(rows, entries, strict=True)):
        gap = rows[l]["gen_ppl"] - rows[h]["gen_ppl"]
        row["gap_paid"] = row["gap_paid_ci"] = None
        if h != l and gap > 0:
            row["gap_paid"] = (row["gen_ppl"] - rows[h]["gen_ppl"]) / gap
            with np.errstate(divide="ignore", invalid="ignore"):
                paid_R = (mean_RS[:, s] - mean_RS[:, h]) / (mean_RS[:, l] - mean_RS[:, h])
            clear = bool((mean_RS[:, l] > mean_RS[:, h]).mean() > 0.975)  # else the gap itself is in doubt
            ends = np.quantile(paid_R, [0.025, 0.975]) if clear else (math.nan, math.nan)
            row["gap_paid_ci"] = [metrics.finite(float(v)) for v in ends]
        flops, most = row["flops"], rows[h]["flops"]
        row["flops_saved"] = None if flops is None or not most else 1 - flops / most
        row["blocks_saved"] = None
        if None not in depths.values() and not math.isinf(entry.steps) and not math.isinf(entries[h].steps):
            blocks = sum(depths[name] or 0 for name in entry.schedule.timetable(int(entry.steps)).models)
            row["blocks_saved"] = 1 - blocks / (entries[h].steps * (depths[heavy] or 1))


def _comparisons(rows: Sequence[dict[str, Any]], log_Sn: np.ndarray) -> dict[str, Any]:
    """Paired differences to the first row, places, and the samples it takes to tell any two rows apart."""
    weights_Rn = metrics.resampling_weights(log_Sn.shape[1])
    paired = []
    for row, log_n in zip(rows[1:], log_Sn[1:], strict=True):
        difference = metrics.paired_difference(log_n, log_Sn[0], weights_Rn)
        paired.append({"schedule": row["schedule"], "reference": rows[0]["schedule"], **difference})
    for item, p in zip(paired, metrics.holm([item["p"] for item in paired]), strict=True):
        item["p_holm"] = p
    for row, place in zip(rows, metrics.ranks(log_Sn, weights_Rn), strict=True):
        row |= place
    needed = []
    for i, a_n in enumerate(log_Sn):
        d = [(a_n - b_n)[np.isfinite(a_n) & np.isfinite(b_n)] for b_n in log_Sn]
        needed.append(
            [None if i == j else metrics.samples_needed(float(x.mean()), float(x.std(ddof=1))) for j, x in enumerate(d)]
        )
    contests = []
    for s, row in enumerate(rows):
        for r, other in enumerate(rows):
            if row["schedule"] in other["rival_of"]:
                difference = metrics.paired_difference(log_Sn[r], log_Sn[s], weights_Rn)
                ratio = None if not row["flops"] or other["flops"] is None else other["flops"] / row["flops"]
                outcome = ("wins" if difference["difference"] < 0 else "loses") if difference["differs"] else "level"
                contests.append(
                    {
                        "schedule": row["schedule"],
                        "rival": other["schedule"],
                        "what": other["rival"],
                        "outcome": outcome,
                        "flops_ratio": ratio,
                        "entropy_difference": other["entropy"] - row["entropy"],
                        **difference,
                    }
                )
    return {"paired": paired, "samples_needed": needed, "rivals": contests}


def _verdict(result: Mapping[str, Any]) -> str:
    """The first line."""
    contests = result["rivals"]
    if not contests:
        mixed = any(row["kind"] == "asked" and len(row["calls_by_model"]) > 1 for row in result["rows"])
        return "The equal-compute rivals were left out." if mixed else "No mixed schedule, so no equal-compute rival."

    def show(item: Mapping[str, Any]) -> str:
        margin = (item["ci"][1] - item["ci"][0]) / 2
        flops = "" if item["flops_ratio"] is None else f" at {item['flops_ratio']:.1%} of its FLOPs"
        return (
            f"{item['rival']} ({item['what']}) against {item['schedule']}: {item['difference']:+.4f} +- {margin:.4f} "
            f"in log-perplexity{flops}, entropy {item['entropy_difference']:+.3f}"
        )

    winners = sorted((item for item in contests if item["outcome"] == "wins"), key=lambda item: item["difference"])
    if winners:
        beaten = {item["schedule"] for item in winners}
        return f"AN EQUAL-COMPUTE RIVAL WINS against {', '.join(sorted(beaten))}. {show(winners[0])}."
    level = [item for item in contests if item["outcome"] == "level"]
    if level:
        best = min(level, key=lambda item: item["difference"])
        known = f"No equal-compute rival is shown to win, but {len(level)} of {len(contests)} cannot be told apart"
        return f"{known}. {show(best)}."
    return f"Every equal-compute rival loses ({len(contests)} of them)."


# ------------------------------------------------------------------------------------------------ showing


def render(result: Mapping[str, Any]) -> str:
    """The comparison as text: the verdict on the rivals first, then the table."""
    rows, paired = result["rows"], {item["schedule"]: item for item in result["paired"]}
    words = "word_entropy" in rows[0]
    bounded = any(row["bound"] is not None for row in rows)
    head = ["schedule", "gen ppl", "corpus", "entropy", *(["words"] if words else []), "distinct-4", "log-ppl diff"]
    head += ["gap paid", "blocks saved", "FLOPs saved", "calls/row", "s", "rank", *(["bound"] if bounded else [])]
    lines = []
    for row in rows:
        mark = {"asked": " ", "anchor": "·", "rival": "≈"}[row["kind"]]
        item = paired.get(row["schedule"])
        difference = (
            "reference" if item is None else _plus_minus(item["difference"], item["ci"], "+.4f", item["differs"])
        )
        cells = [
            f"{mark} {row['schedule']}",
            _plus_minus(row["gen_ppl"], row["gen_ppl_ci"], ".3f"),
            f"{row['corpus_ppl']:.3f}",
            _plus_minus(row["entropy"], row["entropy_ci"], ".3f"),
            *([f"{row['word_entropy']:.3f}"] if words else []),
            "" if row["distinct_4"] is None else f"{row['distinct_4']:.3f}",
            difference,
            _percent(row["gap_paid"]),
            _percent(row["blocks_saved"]),
            _percent(row["flops_saved"]),
            f"{row['calls'] / result['n']:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['rank']} ({row['rank_ci'][0]}-{row['rank_ci'][1]})",
        ]
        if bounded:
            cells.append("" if row["bound"] is None else f"{row['bound']['bits']:.4f}")
        lines.append(cells)
    widths = [max(len(line[k]) for line in [head, *lines]) for k in range(len(head))]
    table = [
        "  ".join(
            cell.ljust(width) if k == 0 else cell.rjust(width) for k, (cell, width) in enumerate(zip(line, widths))
        )
        for line in [head, *lines]
    ]
    about = (
        f"{result['n']} samples a row, length {result['length']}, T = {result['steps']}, judge {result['judge']}"
        f"{' (MDLM recipe)' if result['recipe'] == 'mdlm' else ''}; 95% intervals; differences are paired, to "
        f"{rows[0]['schedule']}, * where it is not chance; ≈ an equal-compute rival, · for the gap"
    )
    notes = [f"note: {note}" for note in result.get("store_notes", [])]
    unscored = sum(row["unscored"] for row in rows)
    notes += [f"note: {unscored} samples have a single token and so no perplexity"] if unscored else []
    return "\n".join([result["verdict"], "", *table, "", about, *notes])


def _plus_minus(value: float, ci: Sequence[float | None], form: str, star: bool = False) -> str:
    low, high = ci
    margin = "" if low is None or high is None else f" +- {(high - low) / 2:{form.lstrip('+')}}"
    return f"{value:{form}}{margin}{'*' if star else ''}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


# ------------------------------------------------------------------------------------------------ small things


def _bounds(
    family: Family, entries: Sequence[Entry], text: np.ndarray | None, seed: int
) -> list[dict[str, Any] | None]:
    from relaylm.schedule_bound import measure_table, schedule_bound

    if text is None:
        raise UserError("a likelihood bound needs held-out text: give rows of token ids as `text`")
    names = {name for entry in entries for name in entry.schedule.models}
    table = measure_table(
        {name: family.models[name] for name in family.names if name in names}, text, family.mask_id, seed=seed
    )
    return [schedule_bound(table, entry.schedule, entry.steps).to_json() for entry in entries]


def _open_store(store: Store | str | Path | None) -> Store | None:
    if isinstance(store, str | Path):
        from relaylm.store import Store as Open

        return Open(store)
    return store


def _content_key(*parts: Any) -> str:
    from relaylm.store import content_key

    return content_key(*parts)


def _model_key(family: Family, name: str) -> str:
    """A hash of one model: of its files as stored, or of its weights in memory."""
    if family.stored is not None:
        entry = family.stored.manifest["models"][name]
        return _content_key(entry["architecture"], sorted(entry["files"].values()))
    model = family.models[name]
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"samples of {name} cannot be stored: a {type(model).__name__} has no weights to hash")
    return weights_digest(model)


def _hash(array: np.ndarray) -> str:
    data = np.ascontiguousarray(array)
    return hashlib.sha256(f"{data.shape}{data.dtype}".encode() + data.tobytes()).hexdigest()


def _steps(steps: float) -> int | str:
    return "inf" if math.isinf(steps) else int(steps)


def _head(part: Drawn, rows: int) -> Drawn:
    if len(part.tokens_nL) <= rows:
        return part
    flops = None if part.flops_n is None else part.flops_n[:rows]
    share = rows / len(part.tokens_nL)
    return replace(
        part,
        tokens_nL=part.tokens_nL[:rows],
        calls_nK=part.calls_nK[:rows],
        flops_n=flops,
        seconds=part.seconds * share,
    )


def _pack(drawn: Drawn, names: Sequence[str]) -> dict[str, Any]:
    """Tokens as base64 of little-endian 32-bit integers; the rest as lists."""
    return {
        "tokens": base64.b64encode(drawn.tokens_nL.astype("<i4").tobytes()).decode(),
        "calls": {name: calls.tolist() for name, calls in zip(names, drawn.calls_nK.T, strict=True) if calls.any()},
        "flops": None if drawn.flops_n is None else drawn.flops_n.tolist(),
        "seconds": drawn.seconds,
    }


def _unpack(record: Mapping[str, Any], length: int, names: Sequence[str]) -> Drawn:
    tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4").astype(np.int64).reshape(-1, length)
    flops = None if record["flops"] is None else np.array(record["flops"], dtype=np.float64)
    none = [0] * len(tokens)
    calls = np.array([record["calls"].get(name, none) for name in names], dtype=np.int64).T
    return Drawn(tokens, calls, flops, float(record["seconds"]))


def _progress(show: bool, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not show, unit="row", leave=False)
