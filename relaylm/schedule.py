r"""Which model runs at which step: a value that can be written, parsed, stored, compared and hashed.

A masked diffusion language model turns a fully masked row into text in T steps. A *model schedule* is a function
$s : \{1, \dots, T\} \to \mathcal{K}$ that names the denoiser of every step. (It is not the noise schedule $\alpha_t$.)

Conventions. Time runs from t = 1 (fully masked) down to t = 0 (text). Step i goes from $t_i$ to $t_{i-1}$, on the
uniform grid $t_i = i / T$, so sampling starts with step i = T and ends with i = 1. All is written from the masked
end: `L125 H750 L125` runs the light model for i = 1000..876, the heavy one for 875..126, the light one for 125..1.
Numbers are exact (`Fraction`), and `Schedule.parse(str(s)) == s` for every schedule s.

Notation (segments are separated by spaces, commas, `->` or `→`):

    L125 H750 L125              counts of steps; the roles L (light) and H (heavy) become models with `bind`
    4b:125 12b:750 4b:125       the same with models' names
    L12.5% H75% L1/8            shares of all steps, which fit any T and add up to exactly 100%
    L8@25% H200@65% L8@10%      each segment with its share of the time axis: 8 large steps, 200 small, 8 large
    12b, H, heavy, light        one model at every step
    quarter:2                   25% light steps, all in the second quarter (1 to 4)
    sandwich:25%                half of the light steps at each end (25% unless told)
    small-first:25%             all light steps at the masked end, as T-Stitch does
    interleaved:25%             light steps spread evenly:  interleaved(4b:25% 12b:75%),  interleaved(L64 H192)
    random:7:25%                light steps chosen by seed 7:  random:7(4b:25% 12b:75%)
    1000000111                  S equal cells, 1 = light:  cells(4b 8b 12b 12b) for other models

Segments stay as they were written: `L50% L50%` and `L100%` do the same but are different values, because rounding to T
steps goes by segment. Shares round to T steps by the largest remainder, ties to the masked end; cell j of S
ends after round(T j / S) steps, halves up.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations, groupby, pairwise
from numbers import Integral
from typing import Any

from .errors import UserError

LIGHT, HEAVY = "L", "H"
MAX_STEPS = 10_000_000
MAX_DENOMINATOR = 10**18  # keeps every number printable; 1/2**59 takes 57 decimals as a percentage
RESERVED = ("quarter", "sandwich", "small-first", "interleaved", "random", "cells")  # `sandwich:25%` is not a segment
FORMS = (
    "L125 H750 L125, 4b:125 12b:750 4b:125, L12.5% H75% L12.5%, L8@25% H200@65% L8@10%, 1000000111, "
    "cells(4b 8b 12b), heavy, light, quarter:1..4, sandwich[:SHARE], small-first[:SHARE], interleaved[:SHARE], "
    "random:SEED[:SHARE], or one model's name"
)
ShareLike = Fraction | float | str

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_SHARE = r"[0-9]{1,20}(?:\.[0-9]{1,80})?%|[0-9]{1,20}/[0-9]{1,20}"
_SEED = r"0|[1-9][0-9]{0,17}"
_name_re = re.compile(_NAME)
_share_re = re.compile(_SHARE)
_segment_re = re.compile(rf"(?:([LH]):?|({_NAME}):)({_SHARE}|[0-9]{{1,20}})(?:@({_SHARE}))?")
_group_re = re.compile(rf"(cells|interleaved|random:(?:{_SEED}))\((.*)\)", re.DOTALL)
_random_re = re.compile(rf"random:({_SEED})(?::({_SHARE}))?")
_placement_re = re.compile(rf"ordered|cells|interleaved|random:(?:{_SEED})")


def share_text(share: Fraction) -> str:
    """A share as a finite decimal percentage if there is one (`12.5%`), else as a fraction (`1/3`)."""
    for decimals in range(61):  # enough for every denominator up to 10^18 < 2^60
        scaled = share * 100 * 10**decimals
        if scaled.denominator == 1:
            whole, part = divmod(scaled.numerator, 10**decimals)
            return f"{whole}.{part:0{decimals}d}%" if decimals else f"{whole}%"
    return f"{share.numerator}/{share.denominator}"


def _show(value: object) -> str:
    """A bad value for an error message: one short line, whatever it is."""
    if isinstance(value, Fraction) and value >= 0:
        text = share_text(value) if value.denominator <= MAX_DENOMINATOR else f"about {float(value * 100):.6g}%"
    else:
        plain = (
            value is None
            or isinstance(value, str | float | Fraction)
            or (isinstance(value, int) and abs(value) < 10**99)
        )
        text = repr(value) if plain else f"this {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_share(value: ShareLike) -> Fraction:
    """`"12.5%"`, `"1/8"`, 0.125 or Fraction(1, 8), as an exact Fraction from 0 to 1. A float means its decimal text."""
    share: Fraction | None = None
    if isinstance(value, str) and _share_re.fullmatch(value):
        numerator, _, denominator = value.partition("/")
        if not denominator:
            share = Fraction(value[:-1]) / 100
        elif int(denominator):
            share = Fraction(int(numerator), int(denominator))
    elif isinstance(value, Fraction):
        share = value
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        share = Fraction(repr(float(value)))
    if share is None or not 0 <= share <= 1:
        raise UserError(f"{_show(value)} is not a share: write 0% to 100%, as 25%, 12.5% or 1/3")
    return share


def _round(numerator: int, denominator: int) -> int:
    """numerator / denominator to the nearest integer, halves up, in exact arithmetic."""
    return (2 * numerator + denominator) // (2 * denominator)


def _check_steps(steps: object, what: str) -> int:
    if isinstance(steps, bool) or not isinstance(steps, Integral) or not 1 <= int(steps) <= MAX_STEPS:
        raise UserError(f"{what} must be a whole number from 1 to {MAX_STEPS}, not {_show(steps)}")
    return int(steps)


def _check_share(share: object, what: str) -> None:
    if not isinstance(share, Fraction) or not 0 < share <= 1:
        raise UserError(f"{what} must be a Fraction above 0% and up to 100%, not {_show(share)}")
    if share.denominator > MAX_DENOMINATOR:
        raise UserError(f"{what} must have a denominator of at most 10^18: {_show(share)} is too exact")


@dataclass(frozen=True)
class Segment:
    """One model for a while."""

    model: str
    """A model's name (`12b`), or a role: `L` the light one, `H` the heavy one."""
    steps: int | Fraction
    """A count of steps (int), or a share of all steps in (0, 1] (Fraction). `1` and `Fraction(1)` are not the same."""
    time: Fraction | None = None
    """Share of the time axis this segment covers; None: as its share of the steps, the uniform grid."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not _name_re.fullmatch(self.model) or self.model in RESERVED:
            raise UserError(
                f"{_show(self.model)} cannot be a model's name: use letters, digits, '_', '.' and '-', "
                f"starting with a letter or digit, and none of {', '.join(RESERVED)}"
            )
        if not isinstance(self.steps, Fraction):
            object.__setattr__(self, "steps", _check_steps(self.steps, f"the steps of {self.model}"))
        else:
            _check_share(self.steps, f"the share of steps of {self.model}")
        if self.time is not None:
            _check_share(self.time, f"the share of time of {self.model}")

    def __eq__(self, other: object) -> bool:  # written out because 1 == Fraction(1): one step is not 100% of them
        return isinstance(other, Segment) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, bool, int | Fraction, Fraction | None]:
        return self.model, isinstance(self.steps, int), self.steps, self.time

    def __str__(self) -> str:
        amount = str(self.steps) if isinstance(self.steps, int) else share_text(self.steps)
        colon = "" if self.model in (LIGHT, HEAVY) else ":"
        return f"{self.model}{colon}{amount}" + (f"@{share_text(self.time)}" if self.time is not None else "")


@dataclass(frozen=True, slots=True)
class RowState:
    """What a policy may look at: the row's own state before its next network call, and nothing of its batch mates."""

    step: int
    """The paper's i of the next event, T..1; 0 at T = infinity."""
    steps: int
    """T; 0 at T = infinity."""
    t: float
    """Time before the step, `times[T - step]`; at T = infinity the event's own u."""
    masked: int
    """Positions still masked."""
    length: int
    """Positions in the row."""
    free: int
    """Positions that were masked at the start."""
    calls: int
    """Network calls this row has had."""
    model: str | None
    """Model of its last call."""
    mean_logprob: float | None
    """Mean log-probability of the tokens its last call wrote, under the model that wrote them."""
    min_logprob: float | None
    """The smallest of them."""
    masked_logits: Any = field(default=None, compare=False, repr=False)
    """(masked, V) tensor of the last call, only for a policy with `wants_logits = True`."""


Policy = Callable[[RowState], str]
"""Any callable that names the model of a row's next call. An optional attribute `wants_logits: bool` (False if absent)
asks for `RowState.masked_logits`. `Schedule` and `Timetable` are the static policies."""


@dataclass(frozen=True)
class Timetable:
    """A schedule resolved for T steps; itself a policy."""

    models: tuple[str, ...]
    """`models[k]` runs at the k-th step from the masked end, k = 0..T-1, that is i = T - k."""
    times: tuple[float, ...]
    """T + 1 grid points from 1.0 (fully masked) down to 0.0; step k goes from `times[k]` to `times[k + 1]`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "times", tuple(self.times))
        if not self.models or len(self.times) != len(self.models) + 1:
            sizes = f"{len(self.models)} and {len(self.times)}"
            raise UserError(f"a timetable of T steps has T >= 1 models and T + 1 times, not {sizes}")
        falls = all(a > b for a, b in pairwise(self.times))
        if self.times[0] != 1.0 or self.times[-1] != 0.0 or not falls:
            raise UserError("the times of a timetable must fall strictly from 1.0 to 0.0 in double precision")

    @property
    def steps(self) -> int:
        return len(self.models)

    def s(self, i: int) -> str:
        """The model of step i as the paper counts: from T (t = 1) down to 1."""
        if not 1 <= i <= self.steps:
            raise UserError(f"step i must be from 1 to T = {self.steps}, not {_show(i)}")
        return self.models[self.steps - i]

    def __call__(self, state: RowState) -> str:
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

    def __post_init__(self) -> None:
        if isinstance(self.segments, str) or not isinstance(self.segments, Iterable):
            raise UserError(f"segments must be a sequence of Segment, not {_show(self.segments)}; for text use parse")
        segments = tuple(self.segments)
        object.__setattr__(self, "segments", segments)
        if not segments or not all(isinstance(segment, Segment) for segment in segments):
            raise UserError("a schedule needs at least one segment, and each must be a Segment")
        if not isinstance(self.placement, str) or not _placement_re.fullmatch(self.placement):
            raise UserError(
                f"the placement must be ordered, cells, interleaved or random:SEED (a whole number below 10^18), "
                f"not {_show(self.placement)}"
            )
        timed = [segment.time for segment in segments if segment.time is not None]
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
            raise UserError(f"the shares of steps add up to {_show(total)}, but must be exactly 100%")
        if timed and (total := sum(timed, Fraction(0))) != 1:
            raise UserError(f"the shares of time add up to {_show(total)}, but must be exactly 100%")

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `text` says, in the notation at the top of this file."""
        if not isinstance(text, str):
            raise UserError(f"a schedule is read from text, not from {_show(text)}")
        text = text.strip()
        if group := _group_re.fullmatch(text):
            placement, inside = group.groups()
            tokens = _tokens(inside)
            if placement == "cells":
                return _cells(tokens)
            return cls(tuple(_parse_segment(token, text) for token in tokens), placement)
        if (named := _parse_named(text)) is not None:
            return named
        if re.fullmatch(r"[01]{2,}", text):
            return cls.from_bits(text)
        tokens = _tokens(text)
        if len(tokens) == 1 and _name_re.fullmatch(text) and not _segment_re.fullmatch(text):
            if re.fullmatch(r"[LH]?[0-9.]+", text):  # `L12.5` or `1000`: a slip rather than a model's name
                raise UserError(f"{_show(text)} is not a schedule: write steps as L125, shares as L12.5%, bits as 1001")
            return cls((Segment(text, Fraction(1)),))
        return cls(tuple(_parse_segment(token, text) for token in tokens or [""]))

    @classmethod
    def from_bits(cls, bits: str) -> Schedule:
        """`1000000111`: as many equal cells as digits, from the masked end; 1 is light, 0 heavy."""
        if not isinstance(bits, str) or not re.fullmatch(r"[01]{2,}", bits):
            raise UserError(f"segment bits are at least two digits 0 or 1, such as 1000000111, not {_show(bits)}")
        return _cells([LIGHT if bit == "1" else HEAVY for bit in bits])

    def __str__(self) -> str:
        models = [segment.model for segment in self.segments]
        if self.placement == "cells":
            if len(models) >= 2 and set(models) <= {LIGHT, HEAVY}:
                return "".join("1" if model == LIGHT else "0" for model in models)
            return f"cells({' '.join(models)})"
        text = " ".join(map(str, self.segments))
        if self.placement == "ordered":
            return text
        if models == [LIGHT, HEAVY] and isinstance(share := self.segments[0].steps, Fraction):
            return f"{self.placement}:{share_text(share)}"
        return f"{self.placement}({text})"

    @property
    def steps(self) -> int | None:
        """The number of steps if the schedule is in counts; None if it is in shares, which fit any T."""
        counts = [segment.steps for segment in self.segments if isinstance(segment.steps, int)]
        return sum(counts) if counts else None

    @property
    def models(self) -> tuple[str, ...]:
        """Distinct names and roles in order of appearance."""
        return tuple(dict.fromkeys(segment.model for segment in self.segments))

    def bind(self, light: str, heavy: str) -> Schedule:
        """The same schedule with the roles L and H replaced by models' names."""
        names = {LIGHT: light, HEAVY: heavy}
        bound = (replace(segment, model=names.get(segment.model, segment.model)) for segment in self.segments)
        return replace(self, segments=tuple(bound))

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
        T = _check_steps(T, "T")
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
        own = self.steps
        if T is None and own is None:
            raise UserError(f"{_show(str(self))} is written in shares and fits any T: say how many steps to take")
        T = _check_steps(own if T is None else T, "T")
        if own is not None and own != T:
            raise UserError(
                f"the schedule has {own} steps ({self}), but T is {T}; write it in percent or change --steps"
            )
        return _timetable(self, T)

    def model_at(self, t: float) -> str:
        """The model at time t in (0, 1], for T = infinity; a segment from t1 down to t0 owns (t0, t1]."""
        if not 0 < t <= 1:
            raise UserError(f"time t must be above 0 and at most 1 (fully masked), not {_show(t)}")
        return next(segment.model for segment, end in zip(self.segments, self.ends, strict=True) if t > end)

    def __call__(self, state: RowState) -> str:
        if state.steps == 0:
            return self.model_at(state.t)
        return self.timetable(state.steps).s(state.step)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The time at which each segment ends, on the way down from 1 to 0."""
        if self.placement not in ("ordered", "cells"):
            raise UserError(f"{self} needs a finite number of steps: {self.placement} places single steps, not times")
        spans = [Fraction(segment.steps if segment.time is None else segment.time) for segment in self.segments]
        total = rest = sum(spans, Fraction(0))
        ends = []
        for span in spans:
            rest -= span
            ends.append(float(rest / total))
        return tuple(ends)

    def to_json(self) -> dict[str, Any]:
        """`{"placement": "ordered", "segments": [{"model": "L", "steps": 8, "time": "25%"}, ...]}`; shares are text."""

        def entry(segment: Segment) -> dict[str, Any]:
            steps = segment.steps if isinstance(segment.steps, int) else share_text(segment.steps)
            time = {} if segment.time is None else {"time": share_text(segment.time)}
            return {"model": segment.model, "steps": steps, **time}

        return {"placement": self.placement, "segments": [entry(segment) for segment in self.segments]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """What `to_json` gave."""
        entries = data.get("segments") if isinstance(data, Mapping) else None
        if not isinstance(entries, list) or not set(data) <= {"placement", "segments"}:
            raise UserError("a schedule in JSON is an object with a list 'segments' and, if not ordered, a 'placement'")
        segments = []
        for entry in entries:
            if not isinstance(entry, Mapping) or not {"model", "steps"} <= set(entry) <= {"model", "steps", "time"}:
                raise UserError("a segment in JSON is an object with 'model', 'steps' and, if it has one, 'time'")
            steps, time = entry["steps"], entry.get("time")
            steps = parse_share(steps) if isinstance(steps, str) else steps
            segments.append(Segment(entry["model"], steps, None if time is None else parse_share(time)))
        return cls(tuple(segments), data.get("placement", "ordered"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, in hexadecimal."""
        return hashlib.sha256(str(self).encode()).hexdigest()


@dataclass(frozen=True)
class SwitchByMaskFraction:
    """A dynamic policy: heavy while low < masked / length <= high, else light."""

    light: str
    heavy: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise UserError(
                f"the masked fractions must obey 0 <= low <= high <= 1, not {_show(self.low)}, {_show(self.high)}"
            )

    @property
    def models(self) -> tuple[str, ...]:
        return self.light, self.heavy

    def __call__(self, state: RowState) -> str:
        return self.heavy if self.low < state.masked / state.length <= self.high else self.light


def heavy() -> Schedule:
    """The heavy model at every step."""
    return Schedule((Segment(HEAVY, Fraction(1)),))


def light() -> Schedule:
    """The light model at every step."""
    return Schedule((Segment(LIGHT, Fraction(1)),))


def quarter(k: int) -> Schedule:
    """25% light steps, all in the k-th quarter from the masked end, k = 1..4."""
    if isinstance(k, bool) or k not in (1, 2, 3, 4):
        raise UserError(f"a quarter is 1 (at the masked end), 2, 3 or 4, not {_show(k)}")
    return _runs((HEAVY, Fraction(k - 1, 4)), (LIGHT, Fraction(1, 4)), (HEAVY, Fraction(4 - k, 4)))


def sandwich(share: ShareLike = Fraction(1, 4)) -> Schedule:
    """Light steps at both ends, half of the share at each: the paper's best hand-made schedule."""
    share = parse_share(share)
    return light() if share == 1 else _runs((LIGHT, share / 2), (HEAVY, 1 - share), (LIGHT, share / 2))


def small_first(share: ShareLike = Fraction(1, 4)) -> Schedule:
    """All light steps at the masked end, as T-Stitch does."""
    share = parse_share(share)
    return _runs((LIGHT, share), (HEAVY, 1 - share))


def interleaved(share: ShareLike = Fraction(1, 4)) -> Schedule:
    """Light steps spread evenly: after k of T steps, round(k n / T) of the n light ones are done, halves up."""
    return _spread(parse_share(share), "interleaved")


def random_placement(seed: int, share: ShareLike = Fraction(1, 4)) -> Schedule:
    """Uniformly chosen light steps, the same for ever: those i of T..1 with the smallest sha256(f"{seed}:{i}")."""
    return _spread(parse_share(share), f"random:{seed}")


def hand_made() -> dict[str, Schedule]:
    """The paper's seven schedules with 25% light steps (and none, and all), in the paper's order."""
    quarters = {f"quarter:{k}": quarter(k) for k in (1, 2, 3, 4)}
    return {"light": light(), **quarters, "sandwich": sandwich(), "heavy": heavy()}


def all_placements(segments: int = 10, light: int = 4) -> list[Schedule]:
    """Every choice of `light` light cells among `segments`, the lightest start first: 210 for 4 of 10."""
    if not 2 <= segments <= 1000 or not 0 <= light <= segments or math.comb(segments, light) > 1_000_000:
        raise UserError(
            f"choosing {_show(light)} light cells of {_show(segments)} is not possible here: take 2 or more cells, of "
            f"which 0 to all are light, in at most 1000000 ways"
        )
    chosen = combinations(range(segments), light)
    return [Schedule.from_bits("".join("1" if j in cells else "0" for j in range(segments))) for cells in chosen]


def _runs(*runs: tuple[str, Fraction]) -> Schedule:
    return Schedule(tuple(Segment(model, share) for model, share in runs if share))


def _spread(share: Fraction, placement: str) -> Schedule:
    if not _placement_re.fullmatch(placement):  # said here too, as a share of 0% or 100% forgets the placement
        raise UserError(
            f"the seed must be a whole number from 0 to 10^18 - 1, not {_show(placement.partition(':')[2])}"
        )
    if share in (0, 1):
        return light() if share else heavy()
    return Schedule((Segment(LIGHT, share), Segment(HEAVY, 1 - share)), placement)


def _cells(models: Sequence[str]) -> Schedule:
    return Schedule(tuple(Segment(model, Fraction(1, len(models))) for model in models), "cells")


def _tokens(text: str) -> list[str]:
    return re.sub("->|→|,", " ", text).split()


def _parse_segment(token: str, text: str) -> Segment:
    match = _segment_re.fullmatch(token)
    if not match:
        where = "" if token == text else f" in {_show(text)}"
        raise UserError(f"cannot read {_show(token)}{where} as a schedule: write {FORMS}")
    role, name, amount, time = match.groups()
    steps = int(amount) if amount.isdigit() else parse_share(amount)
    return Segment(role or name, steps, None if time is None else parse_share(time))


def _parse_named(text: str) -> Schedule | None:
    """`heavy`, `sandwich:25%`, `random:7` and so on; None if the text does not begin like one of them."""
    head, colon, rest = text.partition(":")
    if text in ("heavy", "light"):
        return heavy() if text == "heavy" else light()
    if head == "quarter":
        return quarter(int(rest) if rest in ("1", "2", "3", "4") else rest)  # type: ignore[arg-type]
    if head in ("sandwich", "small-first", "interleaved"):
        build = {"sandwich": sandwich, "small-first": small_first, "interleaved": interleaved}[head]
        return build(rest) if colon else build()
    if head == "random":
        if not (match := _random_re.fullmatch(text)):
            raise UserError(f"{_show(text)} is not a random placement: write random:SEED or random:SEED:SHARE")
        seed, share = match.groups()
        return random_placement(int(seed), share) if share else random_placement(int(seed))
    return None


def _largest_remainder(weights: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `total`; equal remainders go to the first."""
    scale = total / sum(weights, Fraction(0))
    counts = [math.floor(weight * scale) for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda j: counts[j] - weights[j] * scale
    )  # stable: ties to the first
    for j in by_remainder[: total - sum(counts)]:
        counts[j] += 1
    return counts


@lru_cache(maxsize=64)
def _timetable(schedule: Schedule, T: int) -> Timetable:
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
