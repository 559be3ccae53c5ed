r"""What every search asks: how good are these schedules, on these rows? Each answer is computed once.

A trial is a schedule in counts of steps, with models' names. Row r has the same plan under every schedule (common
random numbers), so the answer is a table of log-perplexities, schedules by rows, whose columns are paired. Rows that
are not known yet are drawn by `tree.grow`, where schedules that begin alike share their beginning, and judged; they
are drawn in chunks of a few rows under all schedules at once. A chunk is stored when it is done, as one record, so a
search that was killed goes on from its last chunk, and inside the chunk from the tree's last piece. On a cluster
chunks are what workers are handed; the chunks are the same ones.

**Counting.** The calls that were made (`made`) stand beside those that independent runs of the same schedules on the
same rows would have made (`naive`). The latter follow from the plan alone: a row is called at the steps where one of
its positions is due.

Shapes: S schedules, n rows, L positions, T steps, K models.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm import metrics
from relaylm.cluster import Cluster, Local, grow_rows
from relaylm.comparison import _content_key, _hash, _model_key
from relaylm.diffusion import LINEAR
from relaylm.errors import UserError
from relaylm.judge import Judge, log_perplexity, score
from relaylm.plan import uniforms
from relaylm.progress import progress_bar
from relaylm.sampler import sample
from relaylm.schedule import Schedule
from relaylm.tree import Grown, Stopped, grow

if TYPE_CHECKING:
    from relaylm.engine import Engine
    from relaylm.family import Family
    from relaylm.store import Store

LEAST_CHUNK = 16  # rows
FULL_BATCHES = 16  # of rows under all schedules in a chunk: enough to keep batches full, small enough to share out


@dataclass
class Spent:
    """Row-calls by model: those that were made (for chunks from a store: when they were drawn), those that were made
    in this run, and those that independent runs would have made."""

    made: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    naive: dict[str, int] = field(default_factory=dict)
    merged: int = 0

    def since(self, earlier: Spent) -> Spent:
        def less(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
            return {name: count - b.get(name, 0) for name, count in a.items() if count - b.get(name, 0)}

        return Spent(
            less(self.made, earlier.made),
            less(self.now, earlier.now),
            less(self.naive, earlier.naive),
            self.merged - earlier.merged,
        )

    def copy(self) -> Spent:
        return Spent(dict(self.made), dict(self.now), dict(self.naive), self.merged)

    def to_json(self) -> dict[str, Any]:
        made, naive = sum(self.made.values()), sum(self.naive.values())
        return {
            "calls_made": made,
            "calls_naive": naive,
            "ratio": made / naive if naive else None,
            "calls_made_by_model": dict(self.made),
            "calls_naive_by_model": dict(self.naive),
            "calls_made_in_this_run": sum(self.now.values()),
            "merged": self.merged,
        }


@dataclass(frozen=True)
class _Chunk:
    """A range of rows under several schedules, by their laws."""

    schedules: Mapping[str, Schedule]
    first: int
    rows: int


@dataclass
class Trials:
    """The family, the judge and the conditions of a search, with all that is known so far."""

    family: Family
    judge: Judge | None  # None where nothing will be scored
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
    workers: Cluster | Local | None = None
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        self.log_ppl: dict[str, dict[int, float]] = {}  # by law of the schedule and row
        self._laws: dict[Schedule, str] = {}
        self._chunks: dict[str, list[tuple[int, dict[str, Any]]]] = {}  # stored chunks that hold a law's rows
        self._counted: dict[int, set[str]] = {}  # of each stored chunk, the laws that were asked for
        self._needs: dict[tuple[Any, ...], np.ndarray] = {}
        self._naive: set[tuple[str, int]] = set()
        self.hashes: dict[tuple[str, int, int], str] = {}  # of the tokens, by law, first row and rows
        self._engines: dict[tuple[int, int, int], Engine] = {}
        self.base = self._conditions()
        if self.store is not None:
            self._open()

    # -------------------------------------------------------------------------------------------- asking

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
        chunks = [
            _Chunk(group, start, stop - start)
            for missing, group in lacking.items()
            for start, stop in self._chunk_bounds(missing, len(group))
        ]
        if chunks:
            self._draw(chunks, what)
        self._count_naive(unique, rows)
        return np.array([[self.log_ppl[law][r] for r in rows] for law in laws])

    def known(self, schedule: Schedule) -> dict[int, float]:
        """All rows of a schedule that were measured, with their log-perplexities."""
        return self.log_ppl.get(self.law(schedule), {})

    def law(self, schedule: Schedule) -> str:
        """A hash of what a schedule does: its models at its times."""
        if schedule not in self._laws:
            table = schedule.timetable()
            text = repr((table.models, [t.hex() for t in table.times]))
            self._laws[schedule] = hashlib.sha256(text.encode()).hexdigest()
        return self._laws[schedule]

    def given(self, first: int, n: int) -> np.ndarray:
        return self.given_PL[np.arange(first, first + n) % len(self.given_PL)]

    # -------------------------------------------------------------------------------------------- costs

    def needed(self, schedule: Schedule, first: int, n: int) -> dict[str, int]:
        """Row-calls by model that the rows need when they are run by themselves."""
        table = schedule.timetable()
        hit_nT = self._hits(table.times, first, n)
        calls_T = hit_nT.sum(axis=0)
        names = np.array(table.models)
        return {name: int(calls_T[names == name].sum()) for name in dict.fromkeys(table.models)}

    def _hits(self, times: tuple[float, ...], first: int, n: int) -> np.ndarray:
        """Which steps of a grid write something in which rows, (n, T)."""
        key = (times, first, n)
        if key not in self._needs:
            if len(self._needs) > 256:
                self._needs.clear()
            given_nL = self.given(first, n)
            u_nL = uniforms(self.seed, np.arange(first, first + n), given_nL.shape[1])
            edges = 1 - np.asarray(LINEAR(np.array(times[::-1])))
            step_nL = np.searchsorted(edges, u_nL, side="left")  # i = 1 .. T from the text's end
            hit_nT = np.zeros((n, len(times)), dtype=bool)
            row_F, position_F = np.nonzero(given_nL < 0)
            hit_nT[row_F, step_nL[row_F, position_F]] = True
            self._needs[key] = hit_nT[:, :0:-1]
        return self._needs[key]

    def expected_calls(self, schedules: Sequence[Schedule]) -> float:
        """Mean row-calls that one row takes under all of the schedules together, beginnings shared (rows that meet
        again are not foreseen)."""
        free = np.bincount((self.given_PL < 0).sum(axis=1))
        weight = {f: count / free.sum() for f, count in enumerate(free) if count}
        codes: dict[tuple[str, float, float], int] = {}
        rows = []
        for schedule in {self.law(s): s for s in schedules}.values():
            table = schedule.timetable()
            steps = zip(table.models, table.times[:-1], table.times[1:], strict=True)
            rows.append(tuple(codes.setdefault(step, len(codes)) for step in steps))
        share_C = np.array([a - b for _, a, b in codes])
        chance_C = sum(w * -np.expm1(f * np.log1p(-np.minimum(share_C, 1 - 1e-15))) for f, w in weight.items())
        total = 0.0
        previous: tuple[int, ...] = ()
        for row in sorted(rows):
            alike = next((k for k, (a, b) in enumerate(zip(previous, row)) if a != b), min(len(previous), len(row)))
            total += float(chance_C[list(row[alike:])].sum()) if len(row) > alike else 0.0
            previous = row
        return total

    # -------------------------------------------------------------------------------------------- drawing

    def _chunk_bounds(self, rows: Sequence[int], schedules: int) -> Iterable[tuple[int, int]]:
        """Runs of rows, cut evenly."""
        most = max(LEAST_CHUNK, math.ceil(FULL_BATCHES * self.batch / schedules))
        edges = [0, *(k for k in range(1, len(rows)) if rows[k] != rows[k - 1] + 1), len(rows)]
        for a, b in pairwise(edges):
            pieces = math.ceil((b - a) / most)
            cuts = [rows[a] + (b - a) * k // pieces for k in range(pieces + 1)]
            yield from pairwise(cuts)

    def _draw(self, chunks: Sequence[_Chunk], what: str) -> None:
        """Draw, judge and store chunks, here or on the workers of a cluster."""
        self.check_time()
        calls = [chunk.rows * self.expected_calls(list(chunk.schedules.values())) for chunk in chunks]
        options = {"seed": self.seed, "batch_size": self.batch, "heavy": self.heavy}
        with self._bar(what, sum(calls)) as bar:
            if self.workers is not None:
                tasks = [
                    (
                        list(chunk.schedules.values()),
                        chunk.first,
                        chunk.rows,
                        {**options, "given": self.given(chunk.first, chunk.rows)},
                    )
                    for chunk in chunks
                ]
                for index, grown in self.workers.map(grow_rows, tasks, self._late):
                    self._finish(chunks[index], grown)
                    bar.update(round(calls[index]))
                return
            for chunk in chunks:
                self._finish(chunk, self._grow(chunk, options, bar))

    def _grow(self, chunk: _Chunk, options: dict[str, Any], bar: Any) -> Grown:
        began = bar.n
        hooks: dict[str, Any] = {}
        if self.store is not None:  # pieces of a chunk are kept beside the results until it is done
            from relaylm.store import Store

            pieces = Store(self._unfinished(self._key(chunk)))
            hooks = {"load": pieces.get, "save": pieces.put}
        return grow(
            self.family,
            list(chunk.schedules.values()),
            chunk.rows,
            given=self.given(chunk.first, chunk.rows),
            first_row=chunk.first,
            on_calls=lambda done, _: bar.update(began + done - bar.n),
            stop=self._late,
            engines=self._engines,
            **options,
            **hooks,
        )

    def _finish(self, chunk: _Chunk, grown: Grown) -> None:
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
            "log_ppl": [[None if math.isnan(x) else x for x in row] for row in log_U[grown.which_Sn].tolist()],
            "tokens": [_hash(grown.final_UL[which_n].astype("<i4")) for which_n in grown.which_Sn],
            "calls_made": calls,
            "merged": grown.merged,
        }
        if self.store is not None:
            self.store.put(self._key(chunk), record, replace=self.fresh)
            shutil.rmtree(self._unfinished(self._key(chunk)), ignore_errors=True)
        self._take(record)
        add_calls(self.spent.made, calls)
        add_calls(self.spent.now, calls)
        self.spent.merged += grown.merged

    def _key(self, chunk: _Chunk) -> str:
        return _content_key("trials", self.base, chunk.first, chunk.rows, list(chunk.schedules))

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _unfinished(self, key: str) -> Path:
        assert self.store is not None
        return self.store.folder / f"unfinished-{key[:16]}"

    def _judge(self, tokens_nL: np.ndarray, given_nL: np.ndarray, row_n: np.ndarray) -> np.ndarray:
        if self.judge is None:
            raise UserError("without a judge there are no scores: choose one, as hf:gpt2-large or gguf:PATH")
        texts: list[str] = []
        prompts = None
        if self.judge.encode is not None and self.family.tokenizer is not None:
            texts = [self.family.tokenizer.decode(row) for row in tokens_nL]
            prompts = None if self.prompts is None else [self.prompts[r % len(self.prompts)] for r in row_n]
        options: dict[str, Any] = {"recipe": self.recipe, "max_length": self.family.length}
        try:
            found = score(self.judge, tokens_nL, texts, given_nL, prompts, **options)
        except torch.OutOfMemoryError:
            if not self._engines:
                raise
            for engine in self._engines.values():  # what the sampler keeps captured between rounds may go
                engine.release()
            self._engines.clear()
            found = score(self.judge, tokens_nL, texts, given_nL, prompts, **options)
        return log_perplexity(found)

    def check(self, schedule: Schedule, first: int, rows: int) -> bool:
        """Does the schedule, run by itself, give the tokens that the tree gave, bit for bit?"""
        law = self.law(schedule)
        key = _content_key("alone", self.base, law, first, rows)
        record = None if self.store is None or self.fresh else self.store.get(key)
        if record is None:
            with self._bar("checking", rows * self.expected_calls([schedule])) as bar:
                alone = sample(
                    self.family,
                    schedule,
                    rows,
                    seed=self.seed,
                    given=self.given(first, rows),
                    first_row=first,
                    batch_size=self.batch,
                    heavy=self.heavy,
                    on_calls=lambda done, _: bar.update(done - bar.n),
                )
            record = {"kind": "alone", "schedule": str(schedule), "tokens": _hash(alone.tokens.astype("<i4"))}
            if self.store is not None:
                self.store.put(key, record, replace=self.fresh)
        return bool(record["tokens"] == self.hashes[law, first, rows])

    def check_time(self) -> None:
        if self._late():
            raise Stopped

    # -------------------------------------------------------------------------------------------- what is known

    def _conditions(self) -> str:
        """A hash of all that fixes a row's score but the schedule and the row's number."""
        if self.store is None or self.judge is None:
            return ""
        if self.judge.key.startswith("unnamed:"):
            raise UserError(f"scores of the judge {self.judge.name} cannot be stored: its weights are not known")
        family, device = self.family, self.family.device
        return _content_key(
            "conditions",
            {name: _model_key(family, name) for name in family.names},
            family.mask_id,
            self.seed,
            _hash(self.given_PL),
            list(self.prompts) if self.prompts is not None else None,
            self.judge.key,
            self.recipe,
            self.batch,
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            family.precision,
            str(torch.__version__),
        )

    def _open(self) -> None:
        """Read the chunks of these conditions; refuse a folder in which another family was searched."""
        assert self.store is not None
        family = self.family
        about = {
            "kind": "search",
            "family": family.digest or _content_key({name: _model_key(family, name) for name in family.names}),
            "name": family.name or "",
        }
        kept = self.store.put(_content_key("search"), about)
        if kept["family"] != about["family"]:
            raise UserError(
                f"the store {self.store.folder} belongs to a search over other weights "
                f"({kept['name'] or 'a family'} {kept['family'][:12]}, not {about['family'][:12]}): name another folder"
            )
        if not self.fresh:
            for number, record in enumerate(self.store.records("trials", base=self.base)):
                for law in record["laws"]:
                    self._chunks.setdefault(law, []).append((number, record))

    def _use_stored(self, law: str, rows: range) -> None:
        """Take in the stored chunks that hold rows of a schedule that are asked for. Of a chunk's calls each of its
        schedules answers for an equal part."""
        for number, record in self._chunks.get(law, []):
            used = self._counted.setdefault(number, set())
            overlap = range(max(rows.start, record["first"]), min(rows.stop, record["first"] + record["rows"]))
            if overlap and law not in used:
                self._take(record, law)
                before, after, parts = len(used), len(used) + 1, len(record["laws"])
                used.add(law)
                calls = record["calls_made"].items()
                add_calls(self.spent.made, {name: c * after // parts - c * before // parts for name, c in calls})
                self.spent.merged += record["merged"] * after // parts - record["merged"] * before // parts

    def _take(self, record: Mapping[str, Any], only: str | None = None) -> None:
        for law, values, digest in zip(record["laws"], record["log_ppl"], record["tokens"], strict=True):
            if only not in (None, law):
                continue
            known = self.log_ppl.setdefault(law, {})
            for k, value in enumerate(values):
                known.setdefault(record["first"] + k, math.nan if value is None else value)
            self.hashes[law, record["first"], record["rows"]] = digest

    def _count_naive(self, schedules: Mapping[str, Schedule], rows: range) -> None:
        for law, schedule in schedules.items():
            new = [r for r in rows if (law, r) not in self._naive]
            self._naive.update((law, r) for r in new)
            if new and new[-1] - new[0] + 1 == len(new):
                add_calls(self.spent.naive, self.needed(schedule, new[0], len(new)))
            else:
                for r in new:
                    add_calls(self.spent.naive, self.needed(schedule, r, 1))

    def _bar(self, what: str, calls: float) -> Any:
        return progress_bar(what, round(calls), "call", self.progress, leave=False)


def add_calls(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count


def counted(schedule: Schedule, steps: int, light: str, heavy: str) -> Schedule:
    """The schedule with models' names and in counts, so that it says its own number of steps."""
    bound = schedule.bind(light, heavy)
    return bound if bound.steps is not None else bound.resample(steps)


@lru_cache(maxsize=4)
def _weights(n: int) -> np.ndarray:
    return metrics.resampling_weights(n)


def paired(log_n: np.ndarray, reference_n: np.ndarray) -> dict[str, Any]:
    """`metrics.paired_difference`, with one set of bootstrap weights for all comparisons of so many rows."""
    return metrics.paired_difference(log_n, reference_n, _weights(len(log_n)))


def shared_rows(log_Sn: np.ndarray) -> np.ndarray:
    """The columns that have a score under every schedule."""
    return log_Sn[:, np.isfinite(log_Sn).all(axis=0)]
