"""What a client may ask for: the fields of a request, their types and limits. (`families` says what they make of one.)

Everything here is checked before a row is queued. A field that is not known, or has another type, is refused by name:
an option that is silently ignored would give text that the client did not ask for.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_STEPS = 10_000  # a timetable has one entry for each
MAX_TEXT = 2_000  # characters of a schedule, a rule or a name
MAX_PROMPTS = 128
TEMPERATURES = 1e-30, 1e6  # logits are divided by it, in 32 bits


class Refused(Exception):
    """An answer that is no text: an HTTP status and OpenAI's error object."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def __reduce__(self) -> Any:  # it travels between processes
        return type(self), (self.status, self.message, self.code, self.param, self.retry_after)

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "code": self.code, "param": self.param}}


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> Refused:
    """A refusal because of what was asked."""
    return Refused(400, message, code, param)


@dataclass(frozen=True)
class Limits:
    """What the server is told on the command line."""

    max_rows: int = 64
    max_queue: int = 256
    timeout: float = 600.0
    batch_size: int | None = None


@dataclass(frozen=True)
class Ask:
    """The fields of a request, with defaults."""

    model: str | None = None
    prompt: str | tuple[str, ...] | None = None
    suffix: str | None = None
    infill: str | None = None
    length: int | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    schedule: str = "heavy"
    steps: float | None = None
    spacing: str | int | None = None
    rule: str | None = None
    temperature: float = 1.0
    top_p: float | None = None
    stream: bool = False
    stop: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    user: str | None = None
    stream_options: bool = False  # include_usage
    finished: bool = False  # whether events have the left-most finished text, which completions need

    @property
    def prompts(self) -> tuple[str | None, ...]:
        """One for each group of n rows."""
        return self.prompt if isinstance(self.prompt, tuple) else (self.prompt,)


_ONLY_COMPLETIONS = {"stop", "echo", "logprobs", "user", "stream_options"}
COMPLETIONS = frozenset(field.name for field in fields(Ask)) - {"length", "finished"}
DENOISE = frozenset(field.name for field in fields(Ask)) - _ONLY_COMPLETIONS - {"finished"}


# ------------------------------------------------------------------------------------------------ types of fields


def _text(value: Any, most: int | None = None) -> str:
    if not isinstance(value, str) or (most is not None and len(value) > most):
        raise ValueError("text" if most is None else f"text of at most {most} characters")
    return value


def _name(value: Any) -> str:
    return _text(value, MAX_TEXT)


def _whole(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"a whole number from {low} to {high}")
    return value


def _count(value: Any) -> int:
    return _whole(value, 1, 1_000_000)


def _temperature(value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not (value == 0 or TEMPERATURES[0] <= value <= TEMPERATURES[1]):
        raise ValueError("0, under a rule, or a number from {:g} to {:,.0f}".format(*TEMPERATURES))
    return float(value)


def _top_p(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError("a number above 0 and up to 1")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _prompt(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, list) and 1 <= len(value) <= MAX_PROMPTS and all(isinstance(text, str) for text in value):
        return tuple(value)
    if not isinstance(value, str):
        raise ValueError(f"text, or a list of 1 to {MAX_PROMPTS} texts")
    return value


def _steps(value: Any) -> float:
    if value == "inf":
        return math.inf
    try:
        return _whole(value, 1, MAX_STEPS)
    except ValueError as error:
        raise ValueError(f'{error}, or "inf"') from None


def _spacing(value: Any) -> str | int:
    return _text(value, 64) if isinstance(value, str) else _whole(value, 1, 1_000_000)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and len(texts) <= 4 and all(isinstance(t, str) and 0 < len(t) <= 256 for t in texts)
    if not good:
        raise ValueError("text of 1 to 256 characters, or a list of at most 4 such texts")
    return tuple(texts)


def _logprobs(value: Any) -> int:
    try:
        return _whole(value, 0, 1)
    except ValueError:
        raise ValueError("0 or 1: those of the written tokens are known, not of alternatives") from None


def _stream_options(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise ValueError('an object with "include_usage"')
    return _flag(value.get("include_usage", False))


_TYPES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("suffix", "infill"), _text),
    **dict.fromkeys(("model", "schedule", "rule", "user"), _name),
    **dict.fromkeys(("length", "max_tokens", "n"), _count),
    **dict.fromkeys(("stream", "echo"), _flag),
    "prompt": _prompt,
    "temperature": _temperature,
    "top_p": _top_p,
    "seed": lambda value: _whole(value, 0, 2**64 - 1),
    "steps": _steps,
    "spacing": _spacing,
    "stop": _stop,
    "logprobs": _logprobs,
    "stream_options": _stream_options,
}


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object from the bytes of a request."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON number")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate is no text
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else "must be JSON in UTF-8"
        raise bad(f"the body {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad("the body must be a JSON object", code="invalid_json")
    return value


def read_ask(values: Mapping[str, Any], allowed: frozenset[str]) -> Ask:
    """The fields, checked one by one; null counts as left out. Without a seed one is drawn, so that it can be named."""
    if unknown := sorted(set(values) - allowed):
        name = unknown[0][:100]
        raise bad(f"unknown field {name!r}; the fields are {', '.join(sorted(allowed))}", name, "unknown_field")
    given = {}
    for name, value in values.items():
        if value is None:
            continue
        try:
            given[name] = _TYPES[name](value)
        except ValueError as error:
            raise bad(f"{name} must be {error}", name) from None
    return Ask(**{"seed": secrets.randbits(32), **given})
