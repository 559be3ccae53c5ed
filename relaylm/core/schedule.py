r"""Which model runs at which step: a value that can be written, parsed, stored, compared and hashed.

A masked diffusion language model turns a fully masked row into text in T steps. A *model schedule* is a function
$s : \{1, \dots, T\} \to \mathcal{K}$ that names the denoiser of every step. (It is not the noise schedule $\alpha_t$.)

Time runs from t = 1 (fully masked) down to t = 0 (text). Step i goes from $t_i$ to $t_{i-1}$, on the uniform grid
$t_i = i / T$, so sampling starts with step i = T and ends with i = 1. Segments are listed from the masked end:
`L125 H750 L125` runs the light model for i = 1000..876, the heavy one for 875..126, the light one for 125..1. The
notation is that of `relaylm.core.notation`, and `Schedule.parse(str(s)) == s` for every schedule s.

Numbers are exact (`Fraction`). Shares round to T steps by the largest remainder, ties to the masked end, segment by
segment; cell j of S ends after round(T j / S) steps, halves up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

from relaylm.core import notation
from relaylm.core.notation import HEAVY, LIGHT, MAX_DENOMINATOR, RESERVED, shown
from relaylm.errors import UserError, meant, whole

MAX_STEPS, MAX_DISTANCE = 10_000_000, 1_000_000
SPACING_FORMS = ("sets", "prefix")


def _check_share(share: object, what: str) -> None:
    if not isinstance(share, Fraction) or not 0 < share <= 1:
        raise UserError(f"{what} must be a Fraction above 0% and up to 100%, not {shown(share)}")
    if share.denominator > MAX_DENOMINATOR:
        raise UserError(f"{what} must have a denominator of at most 10^18: {shown(share)} is too exact")


@dataclass(frozen=True)
class Segment:
    """One model for a number of consecutive steps."""

    model: str  # a model's name (`12b`), or a role: `L` the light one, `H` the heavy one
    steps: int | Fraction  # a count (int), or a share of all in (0, 1] (Fraction); `1` and `Fraction(1)` differ
    time: Fraction | None = None  # share of the time axis; None: as its share of the steps, the uniform grid

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not notation.name_re.fullmatch(self.model) or self.model in RESERVED:
            raise UserError(
                f"{shown(self.model)} cannot be a model's name: use letters, digits, '_', '.' and '-', "
                f"starting with a letter or digit, and none of {', '.join(RESERVED)}"
            )
        if not isinstance(self.steps, Fraction):
            object.__setattr__(self, "steps", whole(self.steps, f"the steps of {self.model}", 1, MAX_STEPS))
        else:
            _check_share(self.steps, f"the share of steps of {self.model}")
        if self.time is not None:
            _check_share(self.time, f"the share of time of {self.model}")

    @property
    def part(self) -> notation.Part:
        """The three values as the notation has them."""
        return self.model, self.steps, self.time

    def __eq__(self, other: object) -> bool:  # written out because 1 == Fraction(1): one step is not 100% of them
        return isinstance(other, Segment) and self.part == other.part and type(self.steps) is type(other.steps)

    def __hash__(self) -> int:
        return hash(self.part)

    def __str__(self) -> str:
        return notation.write_segment(*self.part)


@dataclass(frozen=True)
class Spacing:
    """Positions that one call writes are at least `distance` apart (`relaylm.core.spacing`)."""

    distance: int
    form: str = "sets"  # `sets`: the fewest calls. `prefix`: positions are written in the plan's own order.

    def __post_init__(self) -> None:
        object.__setattr__(self, "distance", whole(self.distance, "a spacing", 1, MAX_DISTANCE))
        if self.form not in SPACING_FORMS:
            raise UserError(f"the form of a spacing must be {' or '.join(SPACING_FORMS)}, not {shown(self.form)}")

    @classmethod
    def parse(cls, text: str | int | Spacing) -> Spacing:
        """`16`, `16:prefix`, `spaced:16` or `spaced:16:prefix`."""
        return text if isinstance(text, Spacing) else cls(*notation.read_spacing(str(text)))

    def __str__(self) -> str:
        return f"spaced:{self.distance}" + ("" if self.form == "sets" else f":{self.form}")


@dataclass(frozen=True, slots=True)
class RowState:
    """What a policy may look at: the row's own state before its next call, and nothing of other rows of the batch."""

    step: int  # the paper's i of the next event, T..1; 0 at T = infinity
    steps: int  # T; 0 at T = infinity
    t: float  # time before the step, `times[T - step]`; at T = infinity the event's own u
    masked: int  # positions still masked
    length: int  # positions in the row
    free: int  # positions that were masked at the start
    calls: int  # calls of this row so far
    model: str | None  # model of its last call
    mean_logprob: float | None  # mean log-probability of the tokens that call wrote, under the model that wrote them
    min_logprob: float | None  # the smallest of them
    # (masked, V) tensor of the last call, only for a policy with `wants_logits = True`
    masked_logits: Any = field(default=None, compare=False, repr=False)


Policy = Callable[[RowState], str]
"""Any callable that names the model of a row's next call. An optional attribute `wants_logits: bool` (False if absent)
asks for `RowState.masked_logits`. `Schedule` and `Timetable` are the static policies."""


@dataclass(frozen=True)
class Timetable:
    """A schedule resolved for T steps; itself a policy."""

    models: tuple[str, ...]  # `models[k]` runs at the k-th step from the masked end, k = 0..T-1, that is i = T - k
    times: tuple[float, ...]  # T + 1 grid points from 1.0 (masked) down to 0.0; step k: `times[k]` to `times[k + 1]`

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "times", tuple(self.times))
        if not self.models or len(self.times) != len(self.models) + 1:
            sizes = f"{len(self.models)} and {len(self.times)}"
            raise UserError(f"a timetable of T steps has T >= 1 models and T + 1 times, not {sizes}")
        if self.times[0] != 1.0 or self.times[-1] != 0.0 or not all(a > b for a, b in pairwise(self.times)):
            raise UserError("the times of a timetable must fall strictly from 1.0 to 0.0 in double precision")

    @property
    def steps(self) -> int:
        """T."""
        return len(self.models)

    def s(self, i: int) -> str:
        """The model of step i as the paper counts: from T (t = 1) down to 1."""
        if not 1 <= i <= self.steps:
            raise UserError(f"step i must be from 1 to T = {self.steps}, not {shown(i)}")
        return self.models[self.steps - i]

    def __call__(self, state: RowState) -> str:
        """The model of the row's next step."""
        if state.steps != self.steps:
            raise UserError(f"the timetable has {self.steps} steps, but the sampler takes {state.steps or 'infinity'}")
        return self.s(state.step)


@dataclass(frozen=True)
class Schedule:
    """Segments from the masked end to the text, and how they are placed. A value; itself a policy."""

    segments: tuple[Segment, ...]
    """From the masked end. All in counts or all in shares that add up to 1; all with `time` or none."""
    placement: str = "ordered"
    """`ordered`: one after another. `cells`: S equal shares, all with the same boundaries for one S. `interleaved` and
    `random:SEED`: two segments, the first one's steps spread evenly or at random among the second one's."""
    spacing: Spacing | None = None
    """Calls write positions this far apart, instead of a grid of steps; segments then go by the share of a row's free
    positions that are masked before the call."""

    def __post_init__(self) -> None:
        if isinstance(self.segments, str) or not isinstance(self.segments, Iterable):
            raise UserError(f"segments must be a sequence of Segment, not {shown(self.segments)}; for text use parse")
        segments = tuple(self.segments)
        object.__setattr__(self, "segments", segments)
        if not segments or not all(isinstance(segment, Segment) for segment in segments):
            raise UserError("a schedule needs at least one segment, and each must be a Segment")
        if not isinstance(self.placement, str) or not notation.placement_re.fullmatch(self.placement):
            known = "ordered, cells, interleaved or random:SEED (a whole number below 10^18)"
            raise UserError(f"the placement must be {known}, not {shown(self.placement)}")
        timed = [segment.time for segment in segments if segment.time is not None]
        self._check_spacing(bool(timed))
        if timed and self.placement != "ordered":
            raise UserError(f"shares of time (@) go with ordered segments only, not with {self.placement}")
        if timed and len(timed) != len(segments):
            raise UserError("either every segment says how much of the time it covers (@25%) or none does")
        if self.placement == "cells":
            if any(segment != Segment(segment.model, Fraction(1, len(segments))) for segment in segments):
                raise UserError(f"each of {len(segments)} cells must have the share 1/{len(segments)} of the steps")
            return
        if self.placement != "ordered" and len(segments) != 2:
            raise UserError(f"{self.placement} takes two segments, not {len(segments)}")
        if len({type(segment.steps) for segment in segments}) != 1:
            raise UserError("counts of steps (L125) and shares (L12.5%) must not be mixed in one schedule")
        if self.steps is not None and self.steps > MAX_STEPS:
            raise UserError(f"the steps add up to {self.steps}, but at most {MAX_STEPS} are possible")
        if self.steps is None and (total := sum((Fraction(segment.steps) for segment in segments), Fraction(0))) != 1:
            hint = next(filter(None, (meant(segment.model, notation.NAMES) for segment in segments)), "")
            raise UserError(f"the shares of steps add up to {shown(total)}, but must be exactly 100%{hint}")
        if timed and (total := sum(timed, Fraction(0))) != 1:
            raise UserError(f"the shares of time add up to {shown(total)}, but must be exactly 100%")

    def _check_spacing(self, timed: bool) -> None:
        if self.spacing is None:
            return
        if not isinstance(self.spacing, Spacing):
            raise UserError(f"the spacing of a schedule must be a Spacing, not {shown(self.spacing)}")
        if self.placement not in ("ordered", "cells"):
            raise UserError(f"{self.placement} places single steps, and a spacing has none: use ordered segments")
        if timed or self.steps is not None:
            how = "write segments in shares (L25% H75%), not in counts and without @"
            raise UserError(f"{self.spacing} decides how many calls there are: {how}")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `text` says, in the notation of `relaylm.core.notation`."""
        if not isinstance(text, str):
            raise UserError(f"a schedule is read from text, not from {shown(text)}")
        text, spacing = notation.split_spacing(text)
        parts, placement = notation.read(text)
        segments = tuple(Segment(*part) for part in parts)
        return cls(segments, placement, None if spacing is None else Spacing.parse(spacing))

    @classmethod
    def from_bits(cls, bits: str) -> Schedule:
        """`1000000111`: as many equal cells as digits, from the masked end; 1 is light, 0 heavy."""
        if not isinstance(bits, str) or not notation.bits_re.fullmatch(bits):
            raise UserError(f"segment bits are at least two digits 0 or 1, such as 1000000111, not {shown(bits)}")
        return cls.parse(bits)

    def __str__(self) -> str:
        spacing = "" if self.spacing is None else f" {self.spacing}"
        return notation.write([segment.part for segment in self.segments], self.placement) + spacing

    @property
    def steps(self) -> int | None:
        """The number of steps if the schedule is in counts; None if it is in shares, which fit any T."""
        return sum(s.steps for s in self.segments if isinstance(s.steps, int)) or None

    @property
    def takes_spacing(self) -> bool:
        """Whether a spacing could be added: there is none, and segments are shares that follow each other."""
        plain = self.segments[0].time is None and self.placement in ("ordered", "cells")
        return plain and self.spacing is None and self.steps is None

    @property
    def models(self) -> tuple[str, ...]:
        """Distinct names and roles in order of appearance."""
        return tuple(dict.fromkeys(segment.model for segment in self.segments))

    def bind(self, light: str, heavy: str) -> Schedule:
        """The same schedule with the roles L and H replaced by models' names."""
        names = {LIGHT: light, HEAVY: heavy}
        return replace(self, segments=tuple(replace(s, model=names.get(s.model, s.model)) for s in self.segments))

    def mirrored(self) -> Schedule:
        """The schedule from the other end, in shares. Rounding to T steps may differ by one, as ties are not mirrored;
        evenly spread steps are their own mirror image in this sense."""
        if self.placement.startswith("random"):
            raise UserError(f"{self} has no mirror image: choose another seed, or an ordered schedule")
        return self if self.placement == "interleaved" else replace(self, segments=self.segments[::-1])

    def resample(self, T: int) -> Schedule:
        """The schedule in counts that add up to exactly T.

        Each segment gets T times its share, rounded by the largest remainder, ties to the masked end: never off by a
        whole step. Segments without a step are dropped. Cells become an ordered schedule: cell j of S ends after
        round(T j / S) steps, halves up, and equal neighbours are merged."""
        T = whole(T, "T", 1, MAX_STEPS)
        self._refuse_steps()
        if self.placement == "cells":
            ends = [_round(T * j, len(self.segments)) for j in range(len(self.segments) + 1)]
            widths = [(seg.model, end - start) for seg, (start, end) in zip(self.segments, pairwise(ends), strict=True)]
            runs = groupby((cell for cell in widths if cell[1]), key=lambda cell: cell[0])
            return Schedule(tuple(Segment(model, sum(width for _, width in run)) for model, run in runs))
        counts = _largest_remainder([Fraction(segment.steps) for segment in self.segments], T)
        for segment, count in zip(self.segments, counts, strict=True):
            if segment.time is not None and not count:
                raise UserError(f"{segment} would get no step at T = {T}, but every stretch of time needs one: raise T")
        kept = tuple(replace(seg, steps=count) for seg, count in zip(self.segments, counts, strict=True) if count)
        return Schedule(kept, self.placement if len(kept) == len(counts) else "ordered")

    def timetable(self, T: int | None = None) -> Timetable:
        """Which model runs at each of T steps, and when; T None takes the schedule's own count.

        The grid is uniform, times[k] = (T - k) / T, unless the segments say what time they cover: then each divides its
        own stretch uniformly into its steps."""
        self._refuse_steps()
        own = self.steps
        if T is None and own is None:
            raise UserError(f"{shown(str(self))} is written in shares and fits any T: say how many steps to take")
        T = whole(own if T is None else T, "T", 1, MAX_STEPS)
        if own is not None and own != T:
            hint = "write it in percent or change --steps"
            raise UserError(f"the schedule has {own} steps ({self}), but T is {T}; {hint}")
        return _timetable(self, T)

    def _refuse_steps(self) -> None:
        if self.spacing is not None:
            raise UserError(f"{self} has no steps: its spacing decides what each call writes; leave out the steps")

    def model_at(self, t: float) -> str:
        """The model at time t in (0, 1], for T = infinity; a segment from t1 down to t0 owns (t0, t1]."""
        if not 0 < t <= 1:
            raise UserError(f"time t must be above 0 and at most 1 (fully masked), not {shown(t)}")
        return next(segment.model for segment, end in zip(self.segments, self.ends, strict=True) if t > end)

    def __call__(self, state: RowState) -> str:
        """The model of the row's next step, or of its next event at T = infinity."""
        if state.steps == 0:
            return self.model_at(state.t)
        return self.timetable(state.steps).s(state.step)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The time at which each segment ends, on the way down from 1 to 0."""
        if self.placement not in ("ordered", "cells"):
            raise UserError(f"{self} needs a finite number of steps: {self.placement} places single steps, not times")
        spans = [Fraction(segment.steps if segment.time is None else segment.time) for segment in self.segments]
        return tuple(float(1 - done / sum(spans)) for done in accumulate(spans))

    def to_json(self) -> dict[str, Any]:
        """`{"placement": "ordered", "segments": [{"model": "L", "steps": 8, "time": "25%"}, ...]}`; shares are text."""
        spacing = {} if self.spacing is None else {"spacing": str(self.spacing)}
        segments = [notation.segment_to_json(*segment.part) for segment in self.segments]
        return {"placement": self.placement, "segments": segments, **spacing}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """What `to_json` gave."""
        parts, placement, spacing = notation.read_json(data)
        segments = tuple(Segment(*part) for part in parts)
        return cls(segments, placement, None if spacing is None else Spacing.parse(spacing))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, in hexadecimal."""
        return hashlib.sha256(str(self).encode()).hexdigest()


def hand_made() -> dict[str, Schedule]:
    """The paper's seven schedules with 25% light steps (and none, and all), in the paper's order."""
    names = ("light", "quarter:1", "quarter:2", "quarter:3", "quarter:4", "sandwich", "heavy")
    return {name: Schedule.parse(name) for name in names}


def timetable_of(schedule: Schedule | Timetable, steps: float | None) -> Timetable | None:
    """A schedule or timetable in so many steps, its own number if None; None at T = infinity."""
    if isinstance(schedule, Timetable):
        if steps is not None and steps != schedule.steps:
            count = "infinite" if math.isinf(steps) else int(steps)
            raise UserError(f"the timetable has {schedule.steps} steps, but T is {count}")
        return schedule
    if steps is not None and math.isinf(steps):
        return None
    return schedule.timetable(None if steps is None else int(steps))


def _round(numerator: int, denominator: int) -> int:
    """numerator / denominator to the nearest integer, halves up, in exact arithmetic."""
    return (2 * numerator + denominator) // (2 * denominator)


def _largest_remainder(weights: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total`; equal remainders go to the first."""
    scale = total / sum(weights, Fraction(0))
    counts = [math.floor(weight * scale) for weight in weights]
    largest_first = sorted(range(len(weights)), key=lambda j: counts[j] - weights[j] * scale)  # stable
    for j in largest_first[: total - sum(counts)]:
        counts[j] += 1
    return counts


@lru_cache(maxsize=64)
def _timetable(schedule: Schedule, T: int) -> Timetable:
    """`Schedule.timetable`, kept because a policy asks for it at every call."""
    counted = schedule.resample(T)
    first, counts = counted.segments[0], [int(segment.steps) for segment in counted.segments]
    if counted.placement == "ordered":
        models = [seg.model for seg, count in zip(counted.segments, counts, strict=True) for _ in range(count)]
    else:
        if counted.placement == "interleaved":
            done = [_round(k * counts[0], T) for k in range(T + 1)]
            spread = {k for k in range(T) if done[k + 1] > done[k]}
        else:
            seed = counted.placement.partition(":")[2]
            order = sorted(range(1, T + 1), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
            spread = {T - i for i in order[: counts[0]]}
        models = [counted.segments[0 if k in spread else 1].model for k in range(T)]
    if first.time is None:
        return Timetable(tuple(models), tuple((T - k) / T for k in range(T + 1)))
    times, start = [1.0], Fraction(1)
    for segment, count in zip(counted.segments, counts, strict=True):
        span = Fraction(segment.time or 0)
        times += [float(start - span * k / count) for k in range(1, count + 1)]
        start -= span
    return Timetable(tuple(models), tuple(times))
