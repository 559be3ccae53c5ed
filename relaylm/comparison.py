r"""Schedules side by side: what each writes and what it costs, in one table.

Every schedule gets the same rows: row r has the same plan (the same order of positions, the same token noise) under all
of them, so differences are paired and need far fewer samples than separate means would. What stands in the table, the
equal-compute rivals included, is decided in `contenders`; which rows really differ, and how the table looks, in
`verdict`. Here rows are drawn, judged and stored.

Shapes: n rows, L positions, K models, S schedules.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm import metrics
from relaylm.contenders import Entry, base_steps, contenders
from relaylm.cost import mean_price, prices
from relaylm.errors import UserError
from relaylm.event_queue import distinct_pairs
from relaylm.judge import Judge, features, load_judge, score, weights_digest
from relaylm.progress import progress_bar
from relaylm.sampler import Samples, sample
from relaylm.schedule import Schedule
from relaylm.timing import energy_counter
from relaylm.verdict import comparisons, relate, verdict
from relaylm.verdict import render as render

if TYPE_CHECKING:
    from relaylm.cluster import Cluster
    from relaylm.family import Family
    from relaylm.store import Store

CHUNK = 64  # rows in a record, at least
SCORES = ("nll", "count", "written_nll", "written_count", "cut")


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
    mauve: np.ndarray | None = None,
    timing: bool = False,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    store: Store | str | Path | None = None,
    fresh: bool = False,
    any_device: bool = False,
    cluster: Cluster | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Sample n rows under each schedule, judge them, and compare. Plain JSON values come back; `render` shows them.

    `prompts` are texts (row r gets prompt r mod their number) or an array of token ids with -1 where free; perplexity
    is then that of the continuation, with `*_everything` beside it. `judge` and `recipe` as in `relaylm.judge`. `bound`
    adds each schedule's likelihood bound on `text` (rows of held-out token ids). `mauve` are such rows too, and adds
    MAUVE against them on the judge's states. `timing` adds the milliseconds and joules of the calls by the device's
    table (`relaylm.timing`), which is filled where it must be. With a `store` what is there already
    is not computed again (`fresh`: it is, and replaced); `any_device` also takes samples that were drawn on another
    device, in another batch size or under another version of PyTorch, which have the same law but not always the same
    bits. With a `cluster` (`relaylm.cluster`) its workers draw the samples; they are judged and stored here.
    """
    if not schedules:
        raise UserError("there is nothing to compare: name at least one schedule")
    if n < 2:
        raise UserError(f"a comparison needs at least 2 samples of each schedule, not {n}")
    light, heavy = family.roles(light, heavy)
    given_nL, prompt_texts = _given(family, prompts, n, length)
    entries = contenders(family, schedules, steps, given_nL, light, heavy, rivals)
    referee = load_judge(judge, family)
    kept = _open_store(store)
    batch = min(n, batch_size or family.batch_size(n, given_nL.shape[1]))
    work = _Work(family, referee, recipe, given_nL, prompt_texts, seed, batch, heavy, kept, fresh, any_device)
    bounds = _bounds(family, entries, text, seed) if bound else [None] * len(entries)
    if mauve is not None:
        metrics.mauve_package()  # before the work is done, not after
        work.human_mD = _features(referee, family, mauve)
    if cluster is not None:
        work.draw(entries, cluster, progress_bar("drawing", len(entries) * n, "row", progress, leave=False))
    bar = progress_bar("sampling" if cluster is None else "judging", len(entries) * n, "row", progress, leave=False)
    rows: list[dict[str, Any]] = []
    log_Sn: list[np.ndarray] = []
    for entry, likelihood in zip(entries, bounds, strict=True):
        bar.set_description(entry.label[:30])
        row, log_n = work.row(entry, bar.update)
        rows.append({**row, "bound": likelihood, **(_measured(family, entry, given_nL, batch) if timing else {})})
        log_Sn.append(log_n)
    bar.close()
    relate(rows, np.stack(log_Sn), family, entries, light, heavy)
    result = {
        "kind": "compare",
        "family": {"name": family.name, "digest": family.digest},
        "n": n,
        "length": int(given_nL.shape[1]),
        "steps": "inf" if math.isinf(base_steps(entries)) else int(base_steps(entries)),
        "seed": seed,
        "light": light,
        "heavy": heavy,
        "judge": referee.name,
        "recipe": recipe,
        "conditional": bool((given_nL >= 0).any()),
        "device": str(family.device),
        "batch_size": batch,
        "rows": rows,
        **comparisons(rows, np.stack(log_Sn)),
    }
    if kept is not None and (kept.damage or kept.repaired):
        result["store_notes"] = [*kept.damage, *kept.repaired]
    result["verdict"] = verdict(result)
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
    human_mD: np.ndarray | None = None  # features of held-out text, for MAUVE
    drawn: dict[Any, Drawn] = field(default_factory=dict)  # beforehand, on a cluster; by entry and first row

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
        parts: list[Drawn] = []
        scores: list[dict[str, np.ndarray]] = []
        for start, stop, part in self._pieces(entry):
            if part is None:
                part = self.drawn.pop((entry.identity, start), None) or self._sample(entry, start, stop)
            found = self._score(entry, start, part)
            parts.append(_head(part, stop - start))
            scores.append({name: array[: stop - start] for name, array in found.items()})
            done(stop - start)
        joined = {name: np.concatenate([found[name] for found in scores]) for name in scores[0]}
        return self._figures(entry, Drawn.join(parts), joined)

    def draw(self, entries: Sequence[Entry], workers: Cluster, bar: Any) -> None:
        """Draw what the store lacks of all entries, piece by piece, on a cluster's workers."""
        from relaylm.cluster import sample_rows

        pieces = [(entry, a, b) for entry in entries for a, b, part in self._pieces(entry) if part is None]
        tasks = [(entry.schedule, a, b - a, self._options(entry, a, b)) for entry, a, b in pieces]
        for index, samples in workers.map(sample_rows, tasks):
            entry, start, stop = pieces[index]
            self.drawn[entry.identity, start] = self._keep(entry, start, stop, samples)
            bar.update(stop - start)
        bar.close()

    def _pieces(self, entry: Entry) -> list[tuple[int, int, Drawn | None]]:
        """All rows in pieces (from, up to), with the samples that are stored."""
        n, size = len(self.given_nL), max(CHUNK, 4 * self.batch)
        stored = self._stored(entry)
        pieces: list[tuple[int, int, Drawn | None]] = []
        at = 0
        while at < n:
            part = stored.get(at)
            if part is None:
                end = min([n, at + size, *(first for first in stored if first > at)])
            else:
                end = min(n, at + len(part.tokens_nL))
            pieces.append((at, end, part))
            at = end
        return pieces

    def _options(self, entry: Entry, start: int, stop: int) -> dict[str, Any]:
        return {
            "steps": entry.steps,
            "seed": self.seed,
            "given": self.given_nL[start:stop],
            "batch_size": min(self.batch, stop - start),
            "heavy": self.heavy,
        }

    def _sample(self, entry: Entry, start: int, stop: int) -> Drawn:
        options = self._options(entry, start, stop)
        samples = sample(self.family, entry.schedule, stop - start, first_row=start, **options)
        return self._keep(entry, start, stop, samples)

    def _keep(self, entry: Entry, start: int, stop: int, samples: Samples) -> Drawn:
        rows, drawn = stop - start, row_costs(samples, self.family)
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
        precision, version = self.family.precision, str(torch.__version__)
        return {"device": name, "dtype": precision, "batch": min(self.batch, rows), "torch": version}

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
            **self._mauve(tokens_nL),
            "calls": int(calls_K.sum()),
            "calls_by_model": {name: int(c) for name, c in zip(self.family.names, calls_K, strict=True) if c},
            "flops": None if drawn.flops_n is None else float(drawn.flops_n.sum()),
            "seconds": drawn.seconds,
            "log_ppls": [metrics.finite(value) for value in log_n],
        }
        return row, log_n

    def _mauve(self, tokens_nL: np.ndarray) -> dict[str, float]:
        if self.human_mD is None:
            return {}
        return {"mauve": metrics.mauve(_features(self.judge, self.family, tokens_nL), self.human_mD)}


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
        pairs, which_E, _ = distinct_pairs(model_E, count_E)
        models: list[Any] = list(family.models.values())
        each = np.array([models[m].flops(length, k) for m, k in pairs])
        flops_n = np.bincount(row_E, weights=each[which_E], minlength=n) if len(row_E) else np.zeros(n)
    return Drawn(samples.tokens, calls_nK, flops_n, samples.cost.seconds)


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


def _features(judge: Judge, family: Family, tokens_nL: np.ndarray) -> np.ndarray:
    """Rows as vectors, whole: what was given counts as text, too."""
    tokenizer = family.tokenizer
    return features(judge, tokens_nL, [] if tokenizer is None else [tokenizer.decode(row) for row in tokens_nL])


def _measured(family: Family, entry: Entry, given_nL: np.ndarray, batch: int) -> dict[str, float | None]:
    """What the samples of an entry take by the device's table of timings, in expectation over plans."""
    free_n, used = (given_nL < 0).sum(axis=1), entry.schedule.models
    out: dict[str, float | None] = {"milliseconds": None, "joules": None}
    for name, unit in (("milliseconds", "ms"), ("joules", "J")):
        if unit == "ms" or not energy_counter(family.device)[1]:
            known = prices(family, unit, given_nL.shape[1], entry.steps, models=used, batch_size=batch)
            out[name] = len(free_n) * mean_price(known, entry.schedule, entry.steps, free_n)
    return out


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
