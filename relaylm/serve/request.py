"""What a client may ask for: the fields of a request, their types and limits, and what they make of a family.

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

import numpy as np

from relaylm.core.cost import Price, mean_price
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.prices import flops_price
from relaylm.models.family import Family
from relaylm.sampling.rules import RULES
from relaylm.sampling.sample import Request, settle
from relaylm.show.colours import colour_of
from relaylm.show.player import strip

MAX_STEPS = 10_000  # a timetable has one entry for each
MAX_TEXT = 2_000  # characters of a schedule, a rule or a name
MAX_PROMPTS = 128


class Refused(Exception):
    """An answer that is no text: an HTTP status and OpenAI's error object."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def __reduce__(self) -> Any:  # it travels between processes on a cluster
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


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise ValueError("a number")
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
    **dict.fromkeys(("temperature", "top_p"), _number),
    **dict.fromkeys(("stream", "echo"), _flag),
    "prompt": _prompt,
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


# ------------------------------------------------------------------------------------------------ families


def load_families(sources: list[str], device: str, dtype: str | None) -> dict[str, Family]:
    """Families by the names that clients use: NAME=SOURCE, or the family's own."""
    families: dict[str, Family] = {}
    for text in sources:
        name, _, source = text.rpartition("=")
        family = Family.load(source, device=device, dtype=dtype)
        if (name := name or family.name or source) in families:
            raise UserError(f"two families are called {name}: name them, --family NAME=SOURCE")
        families[name] = family
    return families


def pick_family(families: Mapping[str, Family], name: str | None) -> tuple[str, Family]:
    """A served family by its name, or the first."""
    name = next(iter(families)) if name is None else name
    if name not in families:
        message = (
            f"model {name[:100]!r} is not served here: {', '.join(families)} (a schedule chooses among its models)"
        )
        raise Refused(404, message, "model_not_found", "model")
    return name, families[name]


def settled(family: Family, ask: Ask, prompt: str | None) -> Request:
    """What `relaylm.sample` makes of a request with one of its prompts."""
    try:
        schedule = Schedule.parse(ask.schedule)
        if schedule.steps is not None and schedule.steps > MAX_STEPS:
            raise UserError(f"the schedule has {schedule.steps} steps, but at most {MAX_STEPS} are served")
        return settle(
            family,
            schedule,
            ask.n,
            steps=ask.steps,
            spacing=ask.spacing,
            length=ask.length,
            prompt=prompt,
            suffix=ask.suffix,
            infill=ask.infill,
            max_new_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            rule=ask.rule,
        )
    except UserError as error:
        raise bad(str(error)) from None


def describe_models(family: Family) -> list[dict[str, Any]]:
    """Name, size and colour of each model of a family, from light to heavy."""
    known, found = family.parameters, []
    for rank, (name, model) in enumerate(family.models.items()):
        blocks = getattr(model, "depth", None)
        found.append({"name": name, "blocks": blocks, "parameters": known.get(name), "colour": colour_of(rank)})
    return found


def describe(name: str, family: Family, created: int) -> dict[str, Any]:
    """An entry of GET /v1/models."""
    about = {
        "length": family.length,
        "models": describe_models(family),
        "light": family.light,
        "heavy": family.heavy,
        "spacing": family.meta.get("spacing"),
        "steps": family.length,
        "rules": [rule.name for rule in RULES],
        "tokenizer": None if family.tokenizer is None else family.tokenizer.to_json().get("type"),
    }
    return {"id": name, "object": "model", "created": created, "owned_by": "relaylm", "relaylm": about}


def describe_schedule(family: Family, ask: Ask) -> dict[str, Any]:
    """A schedule as parsed: who runs when, and what a row costs on average over plans."""
    request = settled(family, ask, ask.prompts[0])
    policy, length = request.policy, request.given.shape[-1]
    assert isinstance(policy, Schedule)
    counted = request.rule is None or not request.rule.adaptive
    finite = counted and policy.spacing is None and not (request.steps is not None and math.isinf(request.steps))
    steps = (policy.steps or int(request.steps or length)) if finite else math.inf
    try:
        runs = strip(policy, steps, request.names)
    except UserError as error:
        raise bad(str(error)) from None
    answer: dict[str, Any] = {
        "schedule": str(policy),
        "law": request.law_text,
        "length": length,
        "steps": int(steps) if math.isfinite(steps) else None,
        "placement": policy.placement,
        "segments": [{"model": request.names[who], "share": start - end} for who, start, end in runs],
        "calls": None,
        "flops": None,
        "saved": None,
    }
    if request.rule is None:  # rules decide on the way how many calls they make
        answer.update(_expected_cost(family, request, policy, length))
    return answer


def _expected_cost(family: Family, request: Request, policy: Schedule, length: int) -> dict[str, Any]:
    free_n = (np.atleast_2d(request.given) < 0).sum(axis=1)
    steps = None if policy.spacing or policy.steps else request.steps
    names = {*request.names, request.heavy}

    def mean(schedule: Schedule, prices: Mapping[str, Price]) -> float:
        return mean_price(prices, schedule, steps, free_n)

    each = {name: Price(0.0) for name in names}
    calls = {name: mean(policy, {**each, name: Price(1.0)}) for name in request.names}
    if not all(hasattr(family[name], "flops") for name in names):
        return {"calls": calls}
    prices = {name: flops_price(family[name], length) for name in names}
    flops = mean(policy, prices)
    reference = mean_price(prices, Schedule.parse(request.heavy), length, free_n)  # as `Cost.flops_saved` has it
    return {"calls": calls, "flops": flops, "saved": 1 - flops / reference}
