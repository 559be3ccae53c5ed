r"""Samples of schedules, judged and kept: the one evaluator behind `compare`, `compose` and the searches.

A `SampleSpec` says how rows are sampled: schedule, steps, decoding rule, nucleus. An `Evaluator` holds what all specs
of a study share (family, judge, what is given, seed) and returns each spec's rows with their scores. Row r has the same
plan under every spec, so differences between specs are paired.

**Records.** Rows are sampled in pieces. Each piece is one record of samples and one of scores in the store, written as
soon as it is done, so a run that was killed continues from its last piece. Samples are found by what fixes their law
(weights, schedule, steps, rule, seed, length, what is given) and, unless `any_device` is set, by what fixes their bits
(`conditions`). Scores are found by the tokens and the judge, so a second judge reads the stored samples.

Shapes: n rows, L positions, X rows of costs, C columns of costs, F written positions, E events.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from relaylm.console import progress_bar
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError, whole
from relaylm.files import plain, with_infinities
from relaylm.measure import metrics
from relaylm.measure.judge import Judge, Scores, reading_key, score, weights_digest
from relaylm.measure.store import Store, cached, content_key
from relaylm.models.family import Family
from relaylm.sampling.policy import check_whole
from relaylm.sampling.result import Samples, flops_of_calls
from relaylm.sampling.rules import Rule
from relaylm.sampling.sample import lay_out, sample

LEAST_PIECE = 64  # rows in a record, at least
SCORES = ("nll", "count", "written_nll", "written_count", "cut")  # a record's fields, in the order of `Scores`


class Workers(Protocol):
    """Where sampling runs (`relaylm.cluster`). Workers sample; this process judges and stores."""

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(index, function(family, *task)) for each task, in the order in which they are done."""


def array_hash(array: np.ndarray) -> str:
    """sha256 of an array: shape, type and bytes."""
    data = np.ascontiguousarray(array)
    return hashlib.sha256(f"{data.shape}{data.dtype}".encode() + data.tobytes()).hexdigest()


def model_key(family: Family, name: str) -> str:
    """A hash of one model and its architecture: of its files as stored, or of its weights in memory."""
    if (entry := family.entry(name)) is not None:
        return content_key(entry["architecture"], sorted(entry["files"].values()))
    model = family.models[name]
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"samples of {name} cannot be stored: a {type(model).__name__} has no weights to hash")
    return weights_digest(model)


def check_storable(judge: Judge) -> None:
    """Refuse a judge whose scores could not be found again."""
    if judge.key.startswith("unnamed:"):
        raise UserError(f"scores of the judge {judge.name} cannot be stored: its weights are not known")


def conditions(family: Family, batch: int | None) -> dict[str, Any]:
    """What fixes the bits of samples beyond their law: device, number type, rows in a call, version."""
    device = family.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "dtype": family.precision, "batch": batch, "torch": str(torch.__version__)}


@dataclass(frozen=True)
class SampleSpec:
    """How rows are sampled. `schedule` has models' names in it; `steps` is None where the rule finds its own."""

    schedule: Schedule
    steps: float | None
    rule: Rule | None = None
    top_p: float | None = None


def sample_rows(family: Family, schedule: Any, first_row: int, rows: int, options: Mapping[str, Any]) -> Samples:
    """A range of rows under one schedule, as `sample` gives them: the task that workers are handed."""
    return sample(family, schedule, rows, first_row=first_row, **options)


def given_rows(
    family: Family, prompts: Sequence[str] | np.ndarray | None, n: int, length: int | None
) -> tuple[np.ndarray, list[str] | None]:
    """(n, L) token ids, -1 where free, and the prompts' texts by row; row r has prompt r mod their number."""
    if prompts is None:
        return np.tile(lay_out(family, length=length), (n, 1)), None
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of texts: write [TEXT] for one")
    if len(prompts) == 0:
        raise UserError("the list of prompts is empty")
    if isinstance(prompts, np.ndarray):
        given = np.atleast_2d(prompts).astype(np.int64)
        if length is not None and length != given.shape[1]:
            raise UserError(f"the prompts are laid out for length {given.shape[1]}, but length is {length}")
        given_nL, texts = given[np.arange(n) % len(given)], None
        ends = [int((row < 0).argmax()) if (row < 0).any() else len(row) for row in given_nL]
        if family.tokenizer is not None and all((row[end:] < 0).all() for row, end in zip(given_nL, ends, strict=True)):
            texts = [family.tokenizer.decode(row[:end]) for row, end in zip(given_nL, ends, strict=True)]
        return given_nL, texts
    laid = [lay_out(family, prompt, length=length) for prompt in prompts]
    order = [r % len(prompts) for r in range(n)]
    # What a judge that reads text will see in front of the continuation: the prompt as the tokenizer gives it back.
    assert family.tokenizer is not None
    shown = [family.tokenizer.decode(row[row >= 0]) for row in laid]
    return np.stack([laid[k] for k in order]), [shown[k] for k in order]


def texts_of(family: Family, tokens_nL: np.ndarray) -> list[str]:
    """Rows as text; empty for a family without a tokenizer."""
    return [] if family.tokenizer is None else [family.tokenizer.decode(row) for row in tokens_nL]


def judge_rows(
    family: Family,
    judge: Judge,
    tokens_nL: np.ndarray,
    given_nL: np.ndarray | None = None,
    prompts: Sequence[str] | None = None,
    recipe: str = "plain",
) -> Scores:
    """The judge's scores of a family's rows; `given_nL` and `prompts` say what was given, as for `score`."""
    texts = [] if judge.encode is None else texts_of(family, tokens_nL)
    return score(judge, tokens_nL, texts, given_nL, prompts, recipe=recipe, max_length=family.length)


def figures(
    family: Family,
    tokens_nL: np.ndarray,
    scores: Scores,
    given_nL: np.ndarray | None = None,
    prompts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Perplexity, entropy, diversity and repetition of what was written, with intervals."""
    free_nL = np.ones(tokens_nL.shape, dtype=bool) if given_nL is None else given_nL < 0
    found = metrics.perplexity(scores.written_nll_n, scores.written_count_n)
    if not free_nL.all():
        everything = metrics.perplexity(scores.nll_n, scores.count_n)
        names = ("gen_ppl", "gen_ppl_ci", "corpus_ppl", "corpus_ppl_ci")
        found |= {name.replace("_ppl", "_ppl_everything"): everything[name] for name in names}
    texts = texts_of(family, tokens_nL)
    if prompts is not None:
        texts = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=False)]
    written = [row[free] for row, free in zip(tokens_nL, free_nL, strict=True)]
    return {**found, **metrics.describe_texts(written, texts)}


@dataclass(frozen=True)
class Drawn:
    """Samples of one spec and what they cost. The columns C of the costs are the calls of each model of the family, the
    FLOPs (NaN where a model does not say) and the seconds. The costs are by row (X = n), or sums over all rows (X = 1)
    where a decoding rule makes calls that the samples' trace does not show."""

    tokens_nL: np.ndarray
    cost_XC: np.ndarray
    steps: float  # that were made, at most
    exact: bool  # the samples follow the models' own law

    @property
    def by_row(self) -> bool:
        """Can rows be taken out, with their costs?"""
        return len(self.cost_XC) == len(self.tokens_nL)

    def costs(self, names: Sequence[str]) -> dict[str, Any]:
        """What all rows cost, as JSON; `names` are the family's models."""
        *calls, flops, seconds = self.cost_XC.sum(axis=0).tolist()
        by_model = {name: int(count) for name, count in zip(names, calls, strict=True) if count}
        total = {"calls": sum(by_model.values()), "calls_by_model": by_model}
        return {**total, "flops": metrics.finite(flops), "seconds": seconds}


def row_costs(samples: Samples, family: Family) -> Drawn:
    """The calls that were made and their operations, row by row, from the trace of samples without a decoding rule."""
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
    cost_nC = np.zeros((n, len(family.names) + 2))
    np.add.at(cost_nC, (row_E, model_E), 1)
    flops_E = flops_of_calls(list(family.models.values()), model_E, count_E, length)
    cost_nC[:, -2] = math.nan if flops_E is None else np.bincount(row_E, weights=flops_E, minlength=n)
    cost_nC[:, -1] = samples.cost.seconds / n
    return Drawn(samples.tokens, cost_nC, samples.steps, not samples.changes_law)


def total_costs(samples: Samples, family: Family) -> Drawn:
    """The samples with the sums of their costs."""
    cost = samples.cost
    flops = math.nan if cost.flops is None else cost.flops
    cost_1C = np.array([[*(cost.calls.get(name, 0) for name in family.names), flops, cost.seconds]])
    return Drawn(samples.tokens, cost_1C, samples.steps, not samples.changes_law)


def pack(drawn: Drawn, names: Sequence[str]) -> dict[str, Any]:
    """Samples as JSON: tokens as base64 of little-endian 32-bit integers, costs as lists."""
    *calls, flops, seconds = drawn.cost_XC.T
    return {
        "tokens": base64.b64encode(drawn.tokens_nL.astype("<i4").tobytes()).decode(),
        "calls": {name: each.astype(int).tolist() for name, each in zip(names, calls, strict=True) if each.any()},
        "flops": None if np.isnan(flops).any() else flops.tolist(),
        "seconds": seconds.sum(),
        "steps_made": steps_json(drawn.steps),
        "exact": drawn.exact,
    }


def unpack(record: Mapping[str, Any], length: int, names: Sequence[str]) -> Drawn:
    """What `pack` made JSON of. (Records of earlier releases have neither a rule nor the last two fields.)"""
    tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4").astype(np.int64).reshape(-1, length)
    rows = len(next(iter(record["calls"].values()), tokens))
    flops = [math.nan] * rows if record["flops"] is None else record["flops"]
    columns = [*(record["calls"].get(name, [0] * rows) for name in names), flops, [record["seconds"] / rows] * rows]
    steps = record.get("steps_made", record["steps"])
    return Drawn(tokens, np.array(columns, dtype=np.float64).T, float(steps), record.get("exact", True))


def steps_json(steps: float | None) -> int | str | None:
    """A number of steps as JSON has it."""
    return None if steps is None else "inf" if math.isinf(steps) else int(steps)


# ------------------------------------------------------------------------------------------------ the evaluator


@dataclass(frozen=True)
class Evaluator:
    """What all specs of a study share, and the store between them and the networks."""

    family: Family
    judge: Judge
    given_nL: np.ndarray  # -1 where free
    heavy: str
    prompts: Sequence[str] | None = None  # by row
    seed: int = 0
    recipe: str = "plain"
    batch: int | None = None  # rows in a call; None: as many as `sample` chooses
    piece: int = LEAST_PIECE  # rows in a record, at most
    store: Store | None = None
    fresh: bool = False
    any_device: bool = False

    def __post_init__(self) -> None:
        check_whole(self.family.models)  # costs by row are those of whole rows
        if self.store is not None:
            check_storable(self.judge)

    def evaluate(
        self, specs: Sequence[tuple[str, SampleSpec]], progress: bool, workers: Workers | None = None
    ) -> Iterator[tuple[Drawn, Scores]]:
        """The rows of each spec in turn, and their scores. With workers everything that the store lacks is sampled
        first. The specs' labels appear in the progress bar."""
        n, drawn = len(self.given_nL), {}
        if workers is not None:
            with progress_bar("sampling on workers", len(specs) * n, "row", progress) as bar:
                drawn = self._draw([spec for _, spec in specs], workers, bar.update)
        name = "sampling" if workers is None else "judging"
        with progress_bar(name, len(specs) * n, "row", progress) as bar:
            for index, (label, spec) in enumerate(specs):
                bar.what = label[:40]

                def on_rows(done: int, before: int = index * n) -> None:
                    bar.update(before + done - bar.n)

                yield self._rows(spec, drawn, on_rows)

    def _rows(
        self, spec: SampleSpec, drawn: Mapping[tuple[SampleSpec, int], Drawn], on_rows: Callable[[int], None]
    ) -> tuple[Drawn, Scores]:
        """All rows of a spec and their scores. `on_rows(done)` receives the number of rows done so far."""
        parts: list[Drawn] = []
        scores: list[list[np.ndarray]] = []
        for start, stop, stored in self._pieces(spec):
            part = stored or drawn.get((spec, start)) or self._sample(spec, start, stop, on_rows)
            rows = stop - start
            scores.append([array[:rows] for array in self._score(spec, start, part)])
            parts.append(replace(part, tokens_nL=part.tokens_nL[:rows], cost_XC=part.cost_XC[:rows]))
            on_rows(stop)
        tokens_nL, cost_XC = (np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens_nL", "cost_XC"))
        joined = Drawn(tokens_nL, cost_XC, max(p.steps for p in parts), all(p.exact for p in parts))
        return joined, Scores(*(np.concatenate(each) for each in zip(*scores, strict=True)))

    def _draw(
        self, specs: Sequence[SampleSpec], workers: Workers, on_rows: Callable[[int], None]
    ) -> dict[tuple[SampleSpec, int], Drawn]:
        """What the store lacks of all specs, sampled by workers piece by piece; by spec and first row. `on_rows(k)`
        receives the number of rows of each piece that is done."""
        pieces = [(spec, start, stop) for spec in specs for start, stop, part in self._pieces(spec) if part is None]
        tasks = [(spec.schedule, start, stop - start, self._options(spec, start, stop)) for spec, start, stop in pieces]
        drawn = {}
        for index, samples in workers.map(sample_rows, tasks):
            spec, start, stop = pieces[index]
            drawn[spec, start] = self._keep(spec, start, samples)
            on_rows(stop - start)
        return drawn

    def has(self, spec: SampleSpec) -> bool:
        """Are all rows of the spec, and their scores, in the store?"""
        return self.store is not None and all(
            part is not None and content_key(*self._score_key(start, part)) in self.store
            for start, _, part in self._pieces(spec)
        )

    @cached_property
    def _model_keys(self) -> dict[str, str]:
        return {name: model_key(self.family, name) for name in self.family.names}

    @cached_property
    def _same_given(self) -> bool:
        """Is the same given in every row? Then a record's rows mean the same whatever n was."""
        return not (self.given_nL != self.given_nL[0]).any()

    def _given(self, start: int, rows: int) -> np.ndarray:
        if self._same_given:
            return np.broadcast_to(self.given_nL[0], (rows, self.given_nL.shape[1]))
        return self.given_nL[start : start + rows]

    def _pieces(self, spec: SampleSpec) -> list[tuple[int, int, Drawn | None]]:
        """All rows in pieces (from, up to), with the samples that are stored."""
        n, stored = len(self.given_nL), self._stored(spec)
        pieces: list[tuple[int, int, Drawn | None]] = []
        while (at := pieces[-1][1] if pieces else 0) < n:
            part = stored.get(at)
            ends = [first for first in (*stored, at + self.piece) if first > at]
            pieces.append((at, min(n, *(ends if part is None else [at + len(part.tokens_nL)])), part))
        return pieces

    def _stored(self, spec: SampleSpec) -> dict[int, Drawn]:
        """Samples that are there, by their first row; the longest where several start at one."""
        if self.store is None or self.fresh:
            return {}
        found: dict[int, Drawn] = {}
        (n, length), size = self.given_nL.shape, self.family.vocab_size
        for record in self.store.records("samples", law=self._law(spec)):
            with self.store.using():
                first, rows = (whole(record[name], name, low) for name, low in (("first_row", 0), ("rows", 1)))
            if first >= n or (first in found and len(found[first].tokens_nL) > rows):
                continue
            if (first + rows > n and not self._same_given) or record["given"] != array_hash(self._given(first, rows)):
                continue
            if self.any_device or record["made"] == conditions(self.family, self._rows_in_call(rows)):
                with self.store.using():
                    drawn = unpack(record, length, self.family.names)
                    if len(drawn.tokens_nL) != rows or not 0 <= drawn.tokens_nL.min() <= drawn.tokens_nL.max() < size:
                        raise ValueError("its tokens are not those of its rows")
                if drawn.by_row or first + rows <= n:
                    found[first] = drawn
        return found

    def _law(self, spec: SampleSpec) -> str:
        """A hash of what fixes the law of the samples and their plan, but for the rows' numbers and what is given."""
        weights = {name: self._model_keys[name] for name in spec.schedule.models}
        rule = [] if spec.rule is None and spec.top_p is None else [str(spec.rule), spec.top_p]
        grid = (spec.schedule.to_json(), steps_json(spec.steps), self.given_nL.shape[1])
        return content_key("law", weights, self.family.mask_id, *grid, self.seed, *rule)

    def _rows_in_call(self, rows: int) -> int | None:
        return None if self.batch is None else min(self.batch, rows)

    def _options(self, spec: SampleSpec, start: int, stop: int) -> dict[str, Any]:
        return {
            "steps": spec.steps,
            "rule": spec.rule,
            "top_p": spec.top_p,
            "seed": self.seed,
            "given": self.given_nL[start:stop],
            "batch_size": self._rows_in_call(stop - start),
            "heavy": self.heavy,
        }

    def _sample(self, spec: SampleSpec, start: int, stop: int, on_rows: Callable[[int], None]) -> Drawn:
        def on_calls(done: int, total: int) -> None:
            on_rows(start + (stop - start) * done // max(total, 1))

        options = {**self._options(spec, start, stop), "on_calls": on_calls}
        return self._keep(spec, start, sample_rows(self.family, spec.schedule, start, stop - start, options))

    def _keep(self, spec: SampleSpec, start: int, samples: Samples) -> Drawn:
        rows = len(samples.tokens)
        drawn = row_costs(samples, self.family) if spec.rule is None else total_costs(samples, self.family)
        if self.store is not None:
            record = {
                "law": self._law(spec),
                "made": conditions(self.family, self._rows_in_call(rows)),
                "given": array_hash(self._given(start, rows)),
                "schedule": str(spec.schedule),
                "steps": steps_json(spec.steps),
                "first_row": start,
                "rows": rows,
            }
            packed = {"kind": "samples", **record, **pack(drawn, self.family.names)}
            self.store.put(content_key("samples", record), packed, replace=self.fresh)
        return drawn

    def _prompts(self, start: int, rows: int) -> list[str] | None:
        if self.prompts is None:
            return None
        prompts = list(self.prompts[start : start + rows])
        return prompts + list(self.prompts[:1]) * (rows - len(prompts))  # beyond n they are all the same

    def _score_key(self, start: int, part: Drawn) -> list[Any]:
        rows = len(part.tokens_nL)
        what = [array_hash(part.tokens_nL), array_hash(self._given(start, rows)), self._prompts(start, rows)]
        how = reading_key(self.family, self.judge, self.recipe)
        return ["scores", [*what, self.judge.key, self.recipe, self.family.length, *how]]

    def _score(self, spec: SampleSpec, start: int, part: Drawn) -> list[np.ndarray]:
        """The judge's sums for the rows of a piece, in the order of `Scores`."""
        rows = len(part.tokens_nL)

        def judged() -> dict[str, Any]:
            given = self._given(start, rows), self._prompts(start, rows)
            found = judge_rows(self.family, self.judge, part.tokens_nL, *given, self.recipe)
            about = {"schedule": str(spec.schedule), "steps": steps_json(spec.steps), "first_row": start}
            sums = {name: plain(getattr(found, f"{name}_n").tolist()) for name in SCORES}
            return {"kind": "scores", **about, "judge": self.judge.name, "recipe": self.recipe, **sums}

        record = cached(self.store, self._score_key(start, part), judged, self.fresh)
        with contextlib.nullcontext() if self.store is None else self.store.using():
            sums = [np.array(with_infinities(record[name])) for name in SCORES]
            if any(array.shape != (rows,) or array.dtype.kind not in "fib" for array in sums):
                raise ValueError("its scores are not those of its rows")
        return sums
