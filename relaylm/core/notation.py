r"""Schedules as text and as JSON. `read` and `write` are inverse; `relaylm.core.schedule` checks what a text says.

Segments are separated by spaces, commas, `->` or `→`, and go from the masked end to the text:

    L125 H750 L125              counts of steps; the roles L (light) and H (heavy) become models with `bind`
    4b:125 12b:750 4b:125       the same with models' names
    L12.5% H75% L1/8            shares of all steps, which fit any T and add up to exactly 100%
    L8@25% H200@65% L8@10%      each segment with its share of the time axis: 8 large steps, 200 small, 8 large
    12b, H, heavy, light        one model at every step
    quarter:2                   25% light steps, all in the second quarter (1 to 4)
    sandwich:25%                half of the light steps at each end (25% by default, here and below)
    small-first:25%             all light steps at the masked end, as T-Stitch does
    interleaved:25%             light steps spread evenly:  interleaved(4b:25% 12b:75%),  interleaved(L64 H192)
    random:7:25%                light steps chosen by seed 7:  random:7(4b:25% 12b:75%)
    1000000111                  S equal cells, 1 = light:  cells(4b 8b 12b 12b) for other models
    heavy spaced:16             calls that write positions at least 16 apart, instead of steps; behind any schedule in
                                shares of ordered segments or cells; spaced:16:prefix keeps the plan's order

Numbers are exact (`Fraction`). Segments stay as they are written: `L50% L50%` and `L100%` are different values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from relaylm.errors import UserError, meant
from relaylm.errors import brief as short_repr

LIGHT, HEAVY = "L", "H"
MAX_DENOMINATOR = 10**18  # keeps every number printable; 1/2**59 takes 57 decimals as a percentage
# No models' names: `sandwich:25%` is not a segment.
RESERVED = ("quarter", "sandwich", "small-first", "interleaved", "random", "cells", "spaced")
NAMES = ("heavy", "light", *RESERVED)  # of schedules and what belongs to them
FORMS = (
    "L125 H750 L125, 4b:125 12b:750 4b:125, L12.5% H75% L12.5%, L8@25% H200@65% L8@10%, 1000000111, "
    "cells(4b 8b 12b), heavy, light, quarter:1..4, sandwich[:SHARE], small-first[:SHARE], interleaved[:SHARE], "
    "random:SEED[:SHARE], or one model's name; any in shares may end in spaced:DISTANCE[:prefix]"
)

Part = tuple[str, int | Fraction, Fraction | None]
"""A segment: its model, its count (int) or share (Fraction) of the steps, and its share of the time axis if given."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_SHARE = r"[0-9]{1,20}(?:\.[0-9]{1,80})?%|[0-9]{1,20}/[0-9]{1,20}"
_SEED = r"0|[1-9][0-9]{0,17}"
_share_re = re.compile(_SHARE)
_segment_re = re.compile(rf"(?:([LH]):?|({_NAME}):)({_SHARE}|[0-9]{{1,20}})(?:@({_SHARE}))?")
_group_re = re.compile(rf"(cells|interleaved|random:(?:{_SEED}))\((.*)\)", re.DOTALL)
_random_re = re.compile(rf"(random:(?:{_SEED}))(?::({_SHARE}))?")
name_re = re.compile(_NAME)
_spaced_re = re.compile(r"(.*?)[\s,]+(spaced(?::[^\s,]*)?)", re.DOTALL)
bits_re = re.compile(r"[01]{2,}")
placement_re = re.compile(rf"ordered|cells|interleaved|random:(?:{_SEED})")


def share_text(share: Fraction) -> str:
    """A share as a finite decimal percentage if there is one (`12.5%`), else as a fraction (`1/3`)."""
    for decimals in range(61):  # enough for every denominator up to 10^18 < 2^60
        scaled = share * 100 * 10**decimals
        if scaled.denominator == 1:
            whole, part = divmod(scaled.numerator, 10**decimals)
            return f"{whole}.{part:0{decimals}d}%" if decimals else f"{whole}%"
    return f"{share.numerator}/{share.denominator}"


def parse_share(text: str) -> Fraction:
    """`12.5%` or `1/8` as an exact Fraction from 0 to 1."""
    if isinstance(text, str) and _share_re.fullmatch(text):
        numerator, _, denominator = text.partition("/")
        scale = int(denominator) if denominator else 100
        if scale and (share := Fraction(numerator.rstrip("%")) / scale) <= 1:
            return share
    raise UserError(f"{shown(text)} is not a share: write 0% to 100%, as 25%, 12.5% or 1/3")


def shown(value: object) -> str:
    """A wrong value for an error message, in one short line."""
    if isinstance(value, Fraction) and value >= 0:
        text = share_text(value) if value.denominator <= MAX_DENOMINATOR else f"about {float(value * 100):.6g}%"
    else:
        text = short_repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_segment(
    model: str, steps: int | Fraction, time: Fraction | None, text: Callable[[Fraction], str] = share_text
) -> str:
    """One segment as text: `L125`, `4b:12.5%`, `H200@65%`; `text` writes shares."""
    amount = str(steps) if isinstance(steps, int) else text(steps)
    colon = "" if model in (LIGHT, HEAVY) else ":"
    return f"{model}{colon}{amount}" + (f"@{text(time)}" if time is not None else "")


def write(parts: Sequence[Part], placement: str) -> str:
    """The shortest text that `read` turns into these parts and this placement."""
    models = [model for model, _, _ in parts]
    if placement == "cells":
        if len(models) >= 2 and set(models) <= {LIGHT, HEAVY}:
            return "".join("1" if model == LIGHT else "0" for model in models)
        return f"cells({' '.join(models)})"
    text = " ".join(write_segment(*part) for part in parts)
    if placement == "ordered":
        return text
    if models == [LIGHT, HEAVY] and isinstance(share := parts[0][1], Fraction):
        return f"{placement}:{share_text(share)}"
    return f"{placement}({text})"


def brief(parts: Sequence[Part], placement: str) -> str:
    """A schedule for people to read: `write` with shares rounded to three digits, so not always readable again."""
    if placement != "ordered":
        return write(parts, placement)
    return " ".join(write_segment(*part, lambda share: f"{100 * float(share):.3g}%") for part in parts)


def split_spacing(text: str) -> tuple[str, str | None]:
    """A schedule's text without its spacing, and the spacing's own (`spaced:16`), None if there is none."""
    found = _spaced_re.fullmatch(text.strip())
    return (found[1], found[2]) if found else (text, None)


def read_spacing(text: str) -> tuple[int, str]:
    """The distance and the form (`sets` or `prefix`) of `16`, `16:prefix`, `spaced:16` or `spaced:16:prefix`."""
    found = re.fullmatch(r"(?:spaced:)?([0-9]{1,7})(?::(sets|prefix))?", text.strip())
    if found is None:
        raise UserError(f"{shown(text)} is not a spacing: write 16, or 16:prefix for calls in the plan's order")
    return int(found[1]), found[2] or "sets"


def read(text: str) -> tuple[list[Part], str]:
    """The parts and the placement (`ordered`, `cells`, `interleaved` or `random:SEED`) that a text says."""
    text = text.strip()
    if group := _group_re.fullmatch(text):
        placement, inside = group.groups()
        tokens = _tokens(inside)
        return (_cells(tokens) if placement == "cells" else _segments(tokens, text)), placement
    if (named := _named(text)) is not None:
        return named
    if bits_re.fullmatch(text):
        return _cells([LIGHT if bit == "1" else HEAVY for bit in text]), "cells"
    if name_re.fullmatch(text) and not _segment_re.fullmatch(text):
        if re.fullmatch(r"[LH]?[0-9.]+", text):  # `L12.5` or `1000`: a slip rather than a model's name
            raise UserError(f"{shown(text)} is not a schedule: write steps as L125, shares as L12.5%, bits as 1001")
        return _shares((text, Fraction(1))), "ordered"
    return _segments(_tokens(text) or [""], text), "ordered"


def segment_to_json(model: str, steps: int | Fraction, time: Fraction | None) -> dict[str, Any]:
    """A segment as JSON values; shares are text."""
    entry = {"model": model, "steps": steps if isinstance(steps, int) else share_text(steps)}
    return entry if time is None else {**entry, "time": share_text(time)}


def read_json(data: Mapping[str, Any]) -> tuple[list[Part], str, Any]:
    """The parts, the placement and the spacing's text (None: there is none) of a schedule in JSON."""
    entries = data.get("segments") if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or not set(data) <= {"placement", "segments", "spacing"}:
        raise UserError("a schedule in JSON is an object with a list 'segments' and perhaps 'placement', 'spacing'")
    parts: list[Part] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"model", "steps"} <= set(entry) <= {"model", "steps", "time"}:
            raise UserError("a segment in JSON is an object with 'model', 'steps' and, if it has one, 'time'")
        steps, time = entry["steps"], entry.get("time")
        steps = parse_share(steps) if isinstance(steps, str) else steps
        parts.append((entry["model"], steps, None if time is None else parse_share(time)))
    return parts, data.get("placement", "ordered"), data.get("spacing")


def _tokens(text: str) -> list[str]:
    return re.sub("->|→|,", " ", text).split()


def _shares(*runs: tuple[str, Fraction]) -> list[Part]:
    return [(model, share, None) for model, share in runs if share]


def _cells(models: Sequence[str]) -> list[Part]:
    return [(model, Fraction(1, len(models)), None) for model in models]


def _segments(tokens: Sequence[str], text: str) -> list[Part]:
    parts: list[Part] = []
    for token in tokens:
        if (match := _segment_re.fullmatch(token)) is None:
            where = "" if token == text else f" in {shown(text)}"
            hint = meant(token.partition(":")[0], NAMES) or ":"
            raise UserError(f"cannot read {shown(token)}{where} as a schedule{hint} write {FORMS}")
        role, name, amount, time = match.groups()
        steps = int(amount) if amount.isdigit() else parse_share(amount)
        parts.append((role or name, steps, None if time is None else parse_share(time)))
    return parts


def _named(text: str) -> tuple[list[Part], str] | None:
    """`heavy`, `sandwich:25%`, `random:7` and so on; None if the text does not begin like one of them."""
    name, colon, rest = text.partition(":")
    if text in ("heavy", "light"):
        return _shares((HEAVY if text == "heavy" else LIGHT, Fraction(1))), "ordered"
    if name == "quarter":
        if rest not in ("1", "2", "3", "4"):
            raise UserError(f"a quarter is 1 (at the masked end), 2, 3 or 4, not {shown(rest)}")
        before = Fraction(int(rest) - 1, 4)
        return _shares((HEAVY, before), (LIGHT, Fraction(1, 4)), (HEAVY, Fraction(3, 4) - before)), "ordered"
    if name == "random":
        if (match := _random_re.fullmatch(text)) is None:
            raise UserError(f"{shown(text)} is not a random placement: write random:SEED or random:SEED:SHARE")
        name, share = match.groups()
    elif name in ("sandwich", "small-first", "interleaved"):
        share = rest if colon else None
    else:
        return None
    light = Fraction(1, 4) if share is None else parse_share(share)
    if light in (0, 1):
        return _shares((LIGHT, light), (HEAVY, 1 - light)), "ordered"
    if name == "sandwich":
        return _shares((LIGHT, light / 2), (HEAVY, 1 - light), (LIGHT, light / 2)), "ordered"
    return _shares((LIGHT, light), (HEAVY, 1 - light)), "ordered" if name == "small-first" else name
