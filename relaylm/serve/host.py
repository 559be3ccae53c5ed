"""From requests to rows, and from what becomes of rows to the events of a stream.

Here are plans, texts and costs; the rows are computed by a `Computer` in this process, or by a `Worker` in another one.
Networks are asked here what they say of themselves, such as the cost of a call: they need no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from relaylm.core.cost import Cost
from relaylm.core.plan import Plan, make_plan
from relaylm.errors import UserError
from relaylm.models.family import Family
from relaylm.sampling.confidence import as_plan, changes_of
from relaylm.sampling.denoise import follow
from relaylm.sampling.policy import check_whole, policy_text, resolve, static_models
from relaylm.sampling.queue import call_shapes
from relaylm.sampling.result import Event, cost_of_calls, total_cost
from relaylm.sampling.sample import Request
from relaylm.serve.compute import Computer
from relaylm.serve.families import describe, describe_models, describe_schedule, pick_family, settled
from relaylm.serve.metrics import Metrics
from relaylm.serve.request import Ask, Limits, bad
from relaylm.serve.rows import Ended, LaneKey, Planned, Rows, Ruled
from relaylm.show.colours import pieces_of, row_pieces

if TYPE_CHECKING:
    from relaylm.serve.process import Worker

FEW = 4096  # positions whose plan and text take a few milliseconds
KNOWN = 64  # kinds of requests that are kept
ResultT = TypeVar("ResultT")


@dataclass
class Part:
    """The rows of one prompt of a request."""

    request: Request
    rows: Rows
    first: int  # its first row's number in the answer
    tokens_nL: np.ndarray  # as far as they are written, -1 elsewhere
    cost: Cost | None  # of its calls; of a rule's at the end
    ended: Ended | None = None

    @property
    def lasting_nL(self) -> np.ndarray:
        """The tokens that stay: until the end those given, if the rule masks positions again."""
        again = self.ended is None and self.request.rule is not None and self.request.rule.rates is not None
        return self.rows.plan.given_nL if again else self.tokens_nL

    def end(self, ended: Ended) -> None:
        """Take note of the end."""
        self.ended, self.cost = ended, ended.cost or self.cost
        if ended.tokens_nL is not None:
            self.tokens_nL = ended.tokens_nL


def rows_in_call(family: Family, length: int, limits: Limits) -> int:
    """Rows that every call has, empty places included. As few as keep the device busy, since a lone row pays for all of
    them: on a CPU 256 tokens are enough for the matrix products, on CUDA about 16,384. A power of two."""
    if limits.batch_size is not None:
        return limits.batch_size
    rows = (16384 if family.device.type == "cuda" else 256) // length
    return 1 << max(0, min(rows, limits.max_rows).bit_length() - 1)


class Host:
    """The families that are served, and what is made of requests for them."""

    def __init__(
        self, families: Mapping[str, Family], limits: Limits | None = None, computer: Computer | Worker | None = None
    ) -> None:
        for family in families.values():
            check_whole(family.models)
        self.families, self.limits, self.created = families, limits or Limits(), int(time.time())
        self.metrics_of = Metrics()
        self.computer = computer or Computer(families, self.limits)
        self.computer.count(self.metrics_of.call)
        # One thread for all requests: several would only take the interpreter away from each other.
        self.worker = ThreadPoolExecutor(1, "relaylm-plans")
        self.described = {name: describe_models(family) for name, family in families.items()}
        self.known: dict[tuple[str, Ask, str | None], Request] = {}  # what was asked before

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """From the start to the close, for an event loop of this process."""
        return self.computer.running()

    async def models(self) -> list[dict[str, Any]]:
        """The entries of GET /v1/models."""
        return [describe(name, family, self.created) for name, family in self.families.items()]

    async def schedule(self, ask: Ask) -> dict[str, Any]:
        """A schedule as parsed, and what it costs."""
        return await asyncio.to_thread(describe_schedule, pick_family(self.families, ask.model)[1], ask)

    async def health(self) -> dict[str, Any]:
        """Rows in flight and waiting."""
        in_flight, waiting = self.computer.rows()
        return {"rows_in_flight": in_flight, "rows_waiting": waiting}

    async def metrics(self) -> bytes:
        """Prometheus' text."""
        return self.metrics_of.text(*self.computer.rows())

    async def stream(self, ask: Ask) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """start, written ..., done; see `app.Backend`."""
        name, family = pick_family(self.families, ask.model)
        if ask.n * len(ask.prompts) > self.limits.max_queue:
            raise bad(f"{ask.n * len(ask.prompts)} rows are more than the {self.limits.max_queue} served at once", "n")
        few = ask.n * len(ask.prompts) * family.length < FEW
        kind = name, replace(ask, prompt=None, seed=None, user=None)
        requests = [request for prompt in ask.prompts if (request := self.known.get((*kind, prompt)))]
        if len(requests) < len(ask.prompts):
            requests = await self._run(False, self._settle, family, kind, ask.prompts)
        parts, start = await self._run(few, self._prepare, name, family, ask, requests)
        inbox = asyncio.Queue[tuple[int, Event | Ended]]()
        ticket = await self.computer.submit([part.rows for part in parts], lambda *what: inbox.put_nowait(what))
        try:
            yield "start", start
            left = len(parts)
            while left:
                number, what = await inbox.get()
                if isinstance(what, Event):
                    yield "written", written_event(family, parts[number], what, ask)
                elif what.error is not None:
                    raise what.error
                else:
                    parts[number].end(what)
                    left -= 1
            done = await self._run(few, done_event, family, ask, parts, start)
            self.metrics_of.request(done["relaylm"])
            yield "done", done
        finally:
            self.computer.leave(ticket)

    async def _run(self, at_once: bool, work: Callable[..., ResultT], *values: Any) -> ResultT:
        """Work that takes a millisecond is done at once: handing it to a thread takes a third as long. What takes
        longer is done in the thread, so that other requests need not wait."""
        if at_once:
            return work(*values)
        return await asyncio.get_running_loop().run_in_executor(self.worker, work, *values)

    def _settle(self, family: Family, kind: tuple[str, Ask], prompts: Sequence[str | None]) -> list[Request]:
        """What each prompt asks for, noted for requests to come. A prompt may be long, so only the thread does this."""
        requests = [self.known.get((*kind, prompt)) or settled(family, kind[1], prompt) for prompt in prompts]
        self.known |= {(*kind, prompt): request for prompt, request in zip(prompts, requests, strict=True)}
        while len(self.known) > KNOWN:
            del self.known[next(iter(self.known))]
        return requests

    def _prepare(
        self, name: str, family: Family, ask: Ask, requests: list[Request]
    ) -> tuple[list[Part], dict[str, Any]]:
        batch = rows_in_call(family, max(request.given.shape[-1] for request in requests), self.limits)
        parts = []
        for number, request in enumerate(requests):
            length = request.given.shape[-1]
            assert ask.seed is not None
            plan = make_plan(ask.n, length, ask.seed, request.given, first_row=number * ask.n)
            # Without a stream and without probabilities nobody wants the events one by one.
            lane = LaneKey(name, length, request.law, scored=ask.stream or ask.logprobs is not None)
            try:
                rows, cost = _rows(family, request, plan, lane, batch, self.limits.timeout)
            except UserError as error:
                raise bad(str(error)) from None
            parts.append(Part(request, rows, number * ask.n, plan.given_nL.copy(), cost))
        return parts, start_event(name, family, ask, parts, self.described[name])


def _rows(
    family: Family, request: Request, plan: Plan, lane: LaneKey, batch: int, timeout: float
) -> tuple[Rows, Cost | None]:
    """The rows of a plan as the scheduler takes them, and their cost: with their calls where those are known before any
    network runs, else with what the loop of their rule takes."""
    policy, steps, rule, call_nL, laid = request.policy, request.steps, request.rule, None, plan
    if rule is not None:
        policy, times = resolve(policy, steps, rule)
        if not rule.planned:
            calls = Ruled(tuple(request.models), policy, rule, times, request.heavy, request.greedy)
            return Rows(lane, plan, calls, batch, timeout), None
        laid, steps, call_nL = as_plan(rule, plan, times)
        lane = lane._replace(law=replace(lane.law, top_k=1)) if request.greedy else lane
    followed, _, events = follow(policy, steps, laid, call_nL=call_nL)
    lookup = static_models(followed, family.names)
    assert lookup is not None
    model_E = lookup(events.step_E, events.t_E)
    cost = cost_of_calls(family.models, model_E, events.count_E, plan.length, request.heavy, followed, plan)
    cost.calls = {name: calls for name, calls in cost.calls.items() if name in request.names}
    shapes, shape_E = call_shapes(events, plan.length, batch)
    each_E5 = np.stack([model_E, shape_E, events.count_E, events.start_E, events.step_E], axis=1)
    known = Planned(family.names, shapes, events.row_ptr_n1, each_E5, events.t_E, events.positions_F)
    return Rows(lane, replace(laid, u_nL=laid.u_nL[:, :0]), known, batch, timeout), cost


# ------------------------------------------------------------------------------------------------ events


def start_event(name: str, family: Family, ask: Ask, parts: list[Part], models: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known before the first call."""
    first, given = parts[0], []
    for part in parts:
        given_L = part.rows.plan.given_nL[0]
        texts: list[str | None] = [None] * len(given_L)
        if (given_L >= 0).any():
            pairs = zip(given_L.tolist(), row_pieces(family, given_L), strict=True)
            texts = [None if token < 0 else piece for token, piece in pairs]
        given += [texts] * ask.n
    known, steps = all(part.cost is not None for part in parts), first.request.steps
    event = {
        "id": f"relaylm-{secrets.token_hex(12)}",
        "family": name,
        "rows": len(given),
        "length": first.rows.plan.length,
        "seed": ask.seed,
        "schedule": policy_text(first.request.policy),
        "law": first.request.law_text,
        "steps": "inf" if steps is not None and math.isinf(steps) else steps,
        "models": [model for model in models if model["name"] in first.request.names],
        "given": given,
        "planned": spent(parts) if known else None,
    }
    if ask.finished:  # characters of each completion that were given
        event["leads"] = [len(text) for part in parts for text in [completed(family, part, 0, ask)] * ask.n]
    return event


def spent(parts: list[Part]) -> dict[str, Any]:
    """What the calls of a request come to."""
    total = total_cost([part.cost for part in parts if part.cost is not None])
    return {"calls": total.calls, "flops": total.flops, "saved": total.flops_saved}


def written_event(family: Family, part: Part, event: Event, ask: Ask) -> dict[str, Any]:
    """One row's call. A position that a rule masked again has no text and no probability."""
    mask, tokens_L = family.mask_id, part.tokens_nL[event.row]
    tokens_L[event.positions] = event.tokens
    tokens_L[tokens_L == mask] = -1
    pieces = pieces_of(family, np.array(event.tokens))
    scores: Sequence[float | None] = event.logprobs or [None] * len(pieces)
    masked = [token == mask for token in event.tokens]
    value: dict[str, Any] = {
        "row": part.first + event.row,
        "positions": event.positions,
        "tokens": event.tokens,
        "texts": [None if gone else piece for piece, gone in zip(pieces, masked, strict=True)],
        "logprobs": [None if gone else score for score, gone in zip(scores, masked, strict=True)],
        "model": event.model,
        "step": event.step,
        "t": event.t,
    }
    return {**value, "finished": completed(family, part, event.row, ask)} if ask.finished else value


def completed(family: Family, part: Part, row: int, ask: Ask) -> str:
    """The text of a completion as far as it is finished from the left."""
    tokens = part.lasting_nL[row][_span(part, row, ask)]
    masked = np.flatnonzero(tokens < 0)
    return _decode(family, tokens[: masked[0]] if len(masked) else tokens)


def _span(part: Part, row: int, ask: Ask) -> slice:
    """The positions of a completion's text: what follows the prompt up to the suffix, with `echo` from the row's start
    on; all of the row with `infill`."""
    free = np.flatnonzero(part.rows.plan.given_nL[row] < 0)
    if ask.infill is not None:
        return slice(0, part.rows.plan.length)
    return slice(0 if ask.echo else free[0], free[-1] + 1)


def _tokens(family: Family, part: Part, row: int, ask: Ask) -> list[tuple[int, str]]:
    """Positions of a completion's text and what each has of it: the end of a text is the tokenizer's own mark."""
    span, tokens_L = _span(part, row, ask), part.tokens_nL[row]
    eos = None if family.tokenizer is None else family.tokenizer.eos_id
    pieces = [
        _decode(family, tokens_L[at : at + 1]) if tokens_L[at] == eos else piece
        for at, piece in enumerate(row_pieces(family, tokens_L))
    ]
    return [*enumerate(pieces)][span]


def _decode(family: Family, tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens)) if family.tokenizer is None else family.tokenizer.decode(tokens)


def done_event(family: Family, ask: Ask, parts: list[Part], start: dict[str, Any]) -> dict[str, Any]:
    """The texts and what they cost."""
    all_rows, request = [part.rows for part in parts], parts[0].request
    ends = [part.ended for part in parts if part.ended is not None]
    given = [int((rows.plan.given_nL[0] >= 0).sum()) for rows in all_rows]
    free = [ask.n * (rows.plan.length - g) for rows, g in zip(all_rows, given, strict=True)]
    usage = {"prompt_tokens": sum(given), "completion_tokens": sum(free), "total_tokens": sum(given) + sum(free)}
    began, law, rule = min(end.began for end in ends), request.law, request.rule
    about = {
        "schedule": start["schedule"],
        "law": start["law"],
        **(start["planned"] or spent(parts)),
        "seconds_queued": round(began - ends[0].submitted, 6),
        "seconds_computing": round(max(end.finished for end in ends) - began, 6),
        "batch_size": all_rows[0].batch,
        "seed": ask.seed,
        "length": all_rows[0].plan.length,
        "changes_law": law.changes if rule is None else changes_of(rule, law, request.greedy),
    }
    texts = [_decode(family, tokens_L) for part in parts for tokens_L in part.tokens_nL]
    event: dict[str, Any] = {"texts": texts, "usage": usage, "relaylm": about}
    if not ask.finished:
        event["pieces"] = [row_pieces(family, tokens_L) for part in parts for tokens_L in part.tokens_nL]
    else:
        rows = [(part, row) for part in parts for row in range(ask.n)]
        event["completions"] = [completed(family, part, row, ask) for part, row in rows]
        if ask.logprobs is not None:
            event["tokens"] = [_tokens(family, part, row, ask) for part, row in rows]
    return event
