r"""Scores of schedules on rows, each computed once, for all searches.

A trial is a schedule in counts of steps or on spaced plans, with models' names. Row r has the same plan under every
schedule (common random numbers), so scores are a table of log-perplexities, schedules by rows, with paired columns.

Rows without a score are sampled by `tree.grow`, in which schedules that begin alike share their beginning, and judged.
This happens in chunks of a few rows under all schedules at once. A finished chunk is stored as one record, so a search
that was killed continues from its last chunk, and inside a chunk from the last finished piece of the tree. With
workers a chunk is one task. The chunks are the same with and without them.

**Counting.** The calls that were made (`Spent.made`) are reported next to those that independent runs of the same
schedules on the same rows would make (`Spent.naive`). The latter follow from the plan alone: a row is called at the
steps at which one of its positions is due.

Shapes: S schedules, n rows, L positions, T steps, K models, U distinct rows, P beginnings.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relaylm.console import progress_bar
from relaylm.core.cost import kinds_of_rows, spaced_sizes
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError
from relaylm.files import plain, with_infinities
from relaylm.measure.evaluate import Workers, array_hash, check_storable, conditions, judge_rows, model_key
from relaylm.measure.judge import Judge, log_perplexity, reading_key
from relaylm.measure.store import Store, cached, content_key
from relaylm.models.family import Family
from relaylm.sampling.engine import Engine, out_of_memory
from relaylm.sampling.result import Samples
from relaylm.sampling.sample import sample
from relaylm.search.tree import Grown, Stopped, calls_by_step, grow, grow_rows

LEAST_CHUNK = 16  # rows
FULL_BATCHES = 16  # of rows under all schedules in a chunk: enough to fill batches, few enough to share among workers


@dataclass
class Spent:
    """Row-calls by model: `made` in all (for chunks from a store, when they were sampled), `now` in this run, `naive`
    in independent runs; and the number of rows that `merged` in the tree."""

    made: Counter[str] = field(default_factory=Counter)
    now: Counter[str] = field(default_factory=Counter)
    naive: Counter[str] = field(default_factory=Counter)
    merged: int = 0

    def to_json(self) -> dict[str, Any]:
        """The counts and their ratio."""
        made, naive, now = self.made.total(), self.naive.total(), self.now.total()
        by_model = {"calls_made_by_model": dict(self.made), "calls_naive_by_model": dict(self.naive)}
        totals = {"calls_made": made, "calls_naive": naive, "ratio": made / naive if naive else None}
        return {**totals, **by_model, "calls_made_in_this_run": now, "merged": self.merged}


class Chunk(NamedTuple):
    """A range of rows under several schedules, by their laws; the key of its record."""

    schedules: Mapping[str, Schedule]
    first: int
    rows: int
    key: str


@dataclass
class Trials:
    """The family, the judge and the conditions of a search, and all scores so far."""

    family: Family
    judge: Judge | None  # None where nothing is scored
    given_PL: np.ndarray  # row r has given_PL[r % P]; -1 where free
    heavy: str
    seed: int = 0
    prompts: Sequence[str] | None = None  # the texts of the P beginnings
    recipe: str = "plain"
    batch: int = 64
    store: Store | None = None
    fresh: bool = False
    deadline: float | None = None  # by time.monotonic()
    progress: bool = False
    workers: Workers | None = None
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        self.log_ppl: dict[str, dict[int, float]] = {}  # by law of the schedule and row
        self.hashes: dict[tuple[str, int, int], str] = {}  # of the tokens, by law, first row and number of rows
        self._laws: dict[Schedule, str] = {}
        self._calls = lru_cache(256)(self._count_calls)
        self._naive: set[tuple[str, int]] = set()  # laws and rows that are counted
        self._engines: dict[tuple[int, int, int], Engine] = {}
        self._stored: dict[str, list[tuple[dict[str, Any], set[str]]]] = {}  # by law: records, and laws used of each
        self.base = ""
        if self.store is not None and self.judge is not None:
            self.base = self._conditions()
            self._open(self.store)

    def scores(self, schedules: Sequence[Schedule], n: int, first: int = 0, what: str = "") -> np.ndarray:
        """Log-perplexity of rows first .. first + n - 1 under each schedule, (S, n); NaN where nothing is scored."""
        laws = [self.law(schedule) for schedule in schedules]
        unique = dict(zip(laws, schedules, strict=True))
        rows = range(first, first + n)
        lacking: dict[tuple[int, ...], dict[str, Schedule]] = {}  # schedules that lack the same rows grow together
        for law, schedule in unique.items():
            self._use_stored(law, rows)
            known = self.log_ppl.setdefault(law, {})
            if missing := tuple(r for r in rows if r not in known):
                lacking.setdefault(missing, {})[law] = schedule
        chunks = [chunk for missing, group in lacking.items() for chunk in self._chunks(group, missing)]
        if chunks:
            self._draw(chunks, what)
        self._count_naive(unique, rows)
        return np.array([[self.log_ppl[law][r] for r in rows] for law in laws])

    def known(self, schedule: Schedule) -> dict[int, float]:
        """All rows of a schedule that have a score, with their log-perplexities."""
        return self.log_ppl.get(self.law(schedule), {})

    def law(self, schedule: Schedule) -> str:
        """A hash of what a schedule does: its models at its times."""
        if schedule not in self._laws:
            if schedule.spacing is None:
                table = schedule.timetable()
                text = repr((table.models, [t.hex() for t in table.times]))
            else:
                text = str(schedule)
            self._laws[schedule] = hashlib.sha256(text.encode()).hexdigest()
        return self._laws[schedule]

    def given(self, first: int, n: int) -> np.ndarray:
        """What is given in a range of rows, (n, L)."""
        return self.given_PL[np.arange(first, first + n) % len(self.given_PL)]

    def sample(
        self, schedule: Schedule, first: int, n: int, on_calls: Callable[[int, int], None] | None = None
    ) -> Samples:
        """An independent run of a range of rows."""
        options = self._options(first, n)
        return sample(self.family, schedule, n, first_row=first, heavy=self.heavy, on_calls=on_calls, **options)

    def check(self, schedule: Schedule, first: int, rows: int) -> bool:
        """Whether an independent run of the schedule gives the tokens that the tree gave, bit for bit."""
        law = self.law(schedule)

        def alone() -> dict[str, Any]:
            with self._bar("checking", rows * self.expected_calls([schedule])) as bar:
                samples = self.sample(schedule, first, rows, bar.report)
            return {"kind": "alone", "schedule": str(schedule), "tokens": array_hash(samples.tokens.astype("<i4"))}

        record = cached(self.store, ["alone", self.base, law, first, rows], alone, self.fresh)
        return bool(record["tokens"] == self.hashes[law, first, rows])

    def check_time(self) -> None:
        """Raise Stopped after the deadline."""
        if self._late():
            raise Stopped

    # -------------------------------------------------------------------------------------------- costs

    def needed(self, schedule: Schedule, first: int, n: int) -> dict[str, int]:
        """Row-calls by model that an independent run of the rows takes."""
        models, times = _stages(schedule)
        names, calls_T = np.array(models), self._calls(times, schedule.spacing, first, n)
        return {name: int(calls_T[names == name].sum()) for name in dict.fromkeys(models)}

    def _count_calls(self, times: tuple[float, ...], spacing: Spacing | None, first: int, n: int) -> np.ndarray:
        """Calls of these rows from each time of a grid down to the next, (T,), the masked end first."""
        given_nL = self.given(first, n)
        plan = make_plan(n, given_nL.shape[1], self.seed, given_nL, first)
        return calls_by_step(plan, times, spacing)[1].sum(axis=0)[1:]

    def expected_calls(self, schedules: Sequence[Schedule]) -> float:
        """Mean row-calls of one row under all of the schedules together, with shared beginnings. Rows that merge after
        they parted are not foreseen."""
        free = np.bincount((self.given_PL < 0).sum(axis=1))
        weight = {f: count / free.sum() for f, count in enumerate(free) if count}
        codes: dict[tuple[Any, ...], int] = {}
        rows = []
        for schedule in {self.law(s): s for s in schedules}.values():
            models, times = _stages(schedule)
            steps = zip(models, times[:-1], times[1:], strict=True)
            rows.append(tuple(codes.setdefault((schedule.spacing, *step), len(codes)) for step in steps))
        share_C = np.array([a - b for _, _, a, b in codes])
        chance_C = sum(w * -np.expm1(f * np.log1p(-np.minimum(share_C, 1 - 1e-15))) for f, w in weight.items())
        kinds = kinds_of_rows(self.given_PL < 0)
        for c, (spacing, _, a, b) in enumerate(codes):
            if spacing is not None:  # not a chance to be called, but a number of calls
                t_E, _, weight_E = spaced_sizes(kinds, spacing)
                chance_C[c] = weight_E[(t_E <= a) & (t_E > b)].sum()
        total = 0.0
        previous: tuple[int, ...] = ()
        for row in sorted(rows):
            alike = next((k for k, (a, b) in enumerate(zip(previous, row)) if a != b), min(len(previous), len(row)))
            total += float(chance_C[list(row[alike:])].sum()) if len(row) > alike else 0.0
            previous = row
        return total

    def _count_naive(self, schedules: Mapping[str, Schedule], rows: range) -> None:
        for law, schedule in schedules.items():
            new = [r for r in rows if (law, r) not in self._naive]
            self._naive.update((law, r) for r in new)
            for start, stop in _stretches(new):
                self.spent.naive.update(self.needed(schedule, start, stop - start))

    # -------------------------------------------------------------------------------------------- sampling

    def _options(self, first: int, rows: int) -> dict[str, Any]:
        return {"seed": self.seed, "batch_size": self.batch, "given": self.given(first, rows)}

    def _chunks(self, schedules: Mapping[str, Schedule], rows: Sequence[int]) -> Iterator[Chunk]:
        """Stretches of rows under schedules, cut evenly."""
        most = max(LEAST_CHUNK, math.ceil(FULL_BATCHES * self.batch / len(schedules)))
        for start, stop in _stretches(rows):
            pieces = math.ceil((stop - start) / most)
            for a, b in pairwise([start + (stop - start) * k // pieces for k in range(pieces + 1)]):
                yield Chunk(schedules, a, b - a, self._key(a, b - a, list(schedules)))

    def _draw(self, chunks: Sequence[Chunk], what: str) -> None:
        """Sample, judge and store chunks, here or with workers."""
        self.check_time()
        calls = [chunk.rows * self.expected_calls(list(chunk.schedules.values())) for chunk in chunks]
        with self._bar(what, sum(calls)) as bar:
            if self.workers is None:
                for chunk in chunks:
                    self._finish(chunk, self._grow(chunk, bar))
                return
            tasks = [
                (list(schedules.values()), first, rows, self._options(first, rows))
                for schedules, first, rows, _ in chunks
            ]
            for index, grown in self.workers.map(grow_rows, tasks, self._late):
                self._finish(chunks[index], grown)
                bar.update(round(calls[index]))

    def _grow(self, chunk: Chunk, bar: Any) -> Grown:
        began = bar.n
        hooks: dict[str, Any] = {"stop": self._late, "engines": self._engines}
        hooks["on_calls"] = lambda done, _: bar.update(began + done - bar.n)
        if self.store is not None:  # pieces of a chunk are kept next to the results until it is done
            pieces = Store(self._unfinished(self.store, chunk.key))
            hooks |= {"load": pieces.get, "save": pieces.put}
        options = {**self._options(chunk.first, chunk.rows), **hooks}
        return grow(self.family, list(chunk.schedules.values()), chunk.rows, first_row=chunk.first, **options)

    def _finish(self, chunk: Chunk, grown: Grown) -> None:
        # Rows that came out alike under several schedules are judged once.
        row_U = np.zeros(len(grown.final_UL), dtype=np.int64)
        row_U[grown.which_Sn] = np.arange(chunk.rows)
        given_UL = self.given(chunk.first, chunk.rows)[row_U]
        log_U = self._judge(grown.final_UL.astype(np.int64), given_UL, chunk.first + row_U)
        calls = {k: int(c) for k, c in zip(grown.models, grown.calls_made_K, strict=True) if c}
        record = {
            "kind": "trials",
            "base": self.base,
            "first": chunk.first,
            "rows": chunk.rows,
            "laws": list(chunk.schedules),
            "schedules": [str(schedule) for schedule in chunk.schedules.values()],
            "log_ppl": plain(log_U[grown.which_Sn].tolist()),
            "tokens": [array_hash(grown.final_UL[which_n].astype("<i4")) for which_n in grown.which_Sn],
            "calls_made": calls,
            "merged": grown.merged,
        }
        if self.store is not None:
            self.store.put(chunk.key, record, replace=self.fresh)
            shutil.rmtree(self._unfinished(self.store, chunk.key), ignore_errors=True)
        self._take(record)
        self.spent.made.update(calls)
        self.spent.now.update(calls)
        self.spent.merged += grown.merged

    def _judge(self, tokens_UL: np.ndarray, given_UL: np.ndarray, row_U: np.ndarray) -> np.ndarray:
        if self.judge is None:
            raise UserError("without a judge there are no scores: choose one, as hf:gpt2-large or gguf:PATH")
        prompts = None if self.prompts is None else [self.prompts[r % len(self.prompts)] for r in row_U]
        what = (self.family, self.judge, tokens_UL, given_UL, prompts, self.recipe)
        try:
            return log_perplexity(judge_rows(*what))
        except (RuntimeError, MemoryError) as error:
            if not self._engines or not out_of_memory(error):
                raise
            for engine in self._engines.values():  # free what the sampler keeps captured between rounds
                engine.release()
            self._engines.clear()
            return log_perplexity(judge_rows(*what))

    def _key(self, first: int, rows: int, laws: Sequence[str]) -> str:
        return content_key("trials", self.base, first, rows, laws)

    @staticmethod
    def _unfinished(store: Store, key: str) -> Path:
        return store.folder / f"unfinished-{key[:16]}"

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _bar(self, what: str, calls: float) -> Any:
        return progress_bar(what, round(calls), "call", self.progress)

    # -------------------------------------------------------------------------------------------- the store

    def _conditions(self) -> str:
        """A hash of everything that fixes a row's score except the schedule and the row's number."""
        assert self.judge is not None
        check_storable(self.judge)
        family, made = self.family, conditions(self.family, self.batch)
        weights = {name: model_key(family, name) for name in family.names}
        prompts = list(self.prompts) if self.prompts is not None else None
        rows = [family.mask_id, self.seed, array_hash(self.given_PL), prompts, self.judge.key, self.recipe]
        bits = [made[name] for name in ("batch", "device", "dtype", "torch")]
        # A store holds one family as stored, which covers its tokenizer; of one in memory it knows the weights alone.
        how = reading_key(family, self.judge, self.recipe) if family.digest is None else []
        return content_key("conditions", weights, *rows, *bits, *how)

    def _open(self, store: Store) -> None:
        """Find the chunks of these conditions; refuse a folder in which another family was searched."""
        family = self.family
        digest = family.digest or content_key({name: model_key(family, name) for name in family.names})
        about = {"kind": "search", "family": digest, "name": family.name or ""}
        kept = store.put(content_key("search"), about)
        if (own := str(kept.get("family"))) != digest:
            other = f"{kept.get('name') or 'a family'} {own[:12]}, not {digest[:12]}"
            what = f"the store {store.folder} belongs to a search over other weights ({other})"
            raise UserError(f"{what}: name another folder")
        if not self.fresh:
            for record in store.records("trials", base=self.base):
                with store.using():
                    _check_record(record)
                used: set[str] = set()
                key = self._key(record["first"], record["rows"], record["laws"])
                shutil.rmtree(self._unfinished(store, key), ignore_errors=True)  # left by a kill after the record
                for law in record["laws"]:
                    self._stored.setdefault(law, []).append((record, used))

    def _use_stored(self, law: str, rows: range) -> None:
        """Take in the stored chunks that hold rows of a schedule. Each schedule of a chunk accounts for an equal part
        of its calls."""
        for record, used in self._stored.get(law, []):
            first, done, parts = record["first"], len(used), len(record["laws"])

            def part(calls: int, done: int = done, parts: int = parts) -> int:
                return calls * (done + 1) // parts - calls * done // parts

            if law not in used and range(max(rows.start, first), min(rows.stop, first + record["rows"])):
                used.add(law)
                self._take(record, law)
                self.spent.made.update({name: part(count) for name, count in record["calls_made"].items()})
                self.spent.merged += part(record["merged"])

    def _take(self, record: Mapping[str, Any], only: str | None = None) -> None:
        for law, values, digest in zip(record["laws"], record["log_ppl"], record["tokens"], strict=True):
            if only in (None, law):
                known = self.log_ppl.setdefault(law, {})
                for k, value in enumerate(with_infinities(values)):
                    known.setdefault(record["first"] + k, math.nan if value is None else value)
                self.hashes[law, record["first"], record["rows"]] = digest


def _stages(schedule: Schedule) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The models of a schedule and the times between which they serve: steps, or segments of a spaced schedule."""
    if schedule.spacing is None:
        table = schedule.timetable()
        return table.models, table.times
    return tuple(segment.model for segment in schedule.segments), (1.0, *schedule.ends)


def _check_record(record: Mapping[str, Any]) -> None:
    """Refuse a record whose parts are not there or do not fit each other."""
    size, rows = len(record["laws"]), range(record["first"], record["first"] + record["rows"])
    calls = [*record["calls_made"].values(), record["merged"], record["first"]]
    scores = [x for row in record["log_ppl"] for x in row]
    fits = all(len(row) == len(rows) for row in record["log_ppl"])
    if not fits or {len(record["log_ppl"]), len(record["tokens"])} != {size} or not size:
        raise ValueError("its parts differ in length")
    texts = [*record["laws"], *record["tokens"], *record["calls_made"]]
    if not all(isinstance(x, str) for x in texts) or not all(type(x) is int and x >= 0 for x in calls):
        raise TypeError("its parts are of other kinds")
    if not all(x is None or isinstance(x, float) or x in ("inf", "-inf") for x in scores):
        raise TypeError("its scores are no numbers")


def _stretches(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, after the last) of each run of consecutive numbers."""
    edges = [0, *(k for k in range(1, len(rows)) if rows[k] != rows[k - 1] + 1), len(rows)]
    return ((rows[a], rows[b - 1] + 1) for a, b in pairwise(edges) if a < b)


@dataclass
class Rows:
    """Hands out fresh rows, and counts the calls they take, in expectation, against a budget of row-calls."""

    trials: Trials
    budget: float = math.inf
    used: float = 0.0
    next: int = 0  # the first row that was not used

    def take(self, schedules: Sequence[Schedule], n: int, what: str) -> np.ndarray:
        """Log-perplexities of the next n rows under each schedule, (S, n)."""
        log_Sn = self.trials.scores(schedules, n, self.next, what)
        self.used += n * self.trials.expected_calls(schedules)
        self.next += n
        return log_Sn

    def affordable(self, schedules: Sequence[Schedule], calls: float) -> int:
        """Rows that a number of calls is enough for."""
        return int(max(0.0, calls) // self.trials.expected_calls(schedules))

    @property
    def left(self) -> float:
        """Calls that the budget leaves."""
        return self.budget - self.used
