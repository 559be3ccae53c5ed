"""The families that are served: by name, what they make of a request, and how they are described to clients."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relaylm.core.cost import Price, mean_price
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.prices import flops_price
from relaylm.models.family import Family
from relaylm.sampling.rules import RULES
from relaylm.sampling.sample import Request, settle
from relaylm.serve.request import MAX_STEPS, Ask, Refused, bad
from relaylm.show.colours import colour_of
from relaylm.show.player import strip


def load_families(sources: list[str], device: str, dtype: str | None) -> dict[str, Family]:
    """Families by the names that clients use: NAME=SOURCE, or the family's own."""
    families: dict[str, Family] = {}
    for text in sources:
        name, _, source = text.partition("=") if "=" in text else ("", "", text)
        family = Family.load(source, device=device, dtype=dtype)
        if (name := name or family.name or source) in families:
            raise UserError(f"two families are called {name}: name them, --family NAME=SOURCE")
        families[name] = family
    return families


def outline(family: Family) -> Family:
    """The family without its weights, for a process that only plans and reads: networks keep the numbers that they say
    of themselves (what a call costs, their depth), which are plain values."""
    _ = family.parameters  # counted while they are there
    bare = copy.copy(family)
    bare.models = {name: _outline(model) for name, model in family.models.items()}
    return bare


def _outline(model: Any) -> Any:
    bare = object.__new__(type(model))
    kept = {name: value for name, value in vars(model).items() if isinstance(value, int | float | str)}
    vars(bare).update(kept, architecture=getattr(model, "architecture", None))
    return bare


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
    except UserError as error:  # in OpenAI's words, which clients sent
        message = str(error).replace("max_new_tokens", "max_tokens")
        named = message != str(error) and ask.max_tokens is not None
        raise bad(message, "max_tokens" if named else None) from None


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
    free_nL = np.atleast_2d(request.given) < 0
    steps = None if policy.spacing or policy.steps else request.steps
    names = {*request.names, request.heavy}

    def mean(schedule: Schedule, prices: Mapping[str, Price]) -> float:
        return mean_price(prices, schedule, steps, free_nL)

    each = {name: Price(0.0) for name in names}
    calls = {name: mean(policy, {**each, name: Price(1.0)}) for name in request.names}
    if not all(hasattr(family[name], "flops") for name in names):
        return {"calls": calls}
    prices = {name: flops_price(family[name], length) for name in names}
    flops = mean(policy, prices)
    reference = mean_price(prices, Schedule.parse(request.heavy), length, free_nL)  # as `Cost.flops_saved` has it
    return {"calls": calls, "flops": flops, "saved": 1 - flops / reference}
