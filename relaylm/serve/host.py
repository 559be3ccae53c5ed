"""Requests on this machine: from fields to rows of the scheduler, and from written rows to the events of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from relaylm.core.cost import Cost
from relaylm.core.plan import Plan, make_plan
from relaylm.core.schedule import Policy
from relaylm.errors import UserError
from relaylm.models.family import Family
from relaylm.sampling.confidence import RuleRun, as_plan, changes_of
from relaylm.sampling.denoise import Options, follow
from relaylm.sampling.engine import Engine
from relaylm.sampling.policy import Grid, check_whole, policy_text, resolve, static_models
from relaylm.sampling.result import Event, cost_of_calls, total_cost
from relaylm.sampling.sample import Request
from relaylm.serve.families import describe, describe_models, describe_schedule, pick_family, settled
from relaylm.serve.metrics import Metrics
from relaylm.serve.request import Ask, Limits, Refused, bad
from relaylm.serve.scheduler import Job, LaneKey, Scheduler
from relaylm.show.colours import pieces_of, row_pieces


@dataclass
class Part:
    """The rows of one prompt of a request."""

    request: Request
    job: Job
    first: int  # its first row's number in the answer
    tokens_nL: np.ndarray  # as far as they are written, -1 elsewhere
    plan: Plan  # before a rule set the steps
    followed: Policy
    heavy: str
    planned: Cost | None = None  # once it is known

    def cost(self, family: Family) -> Cost:
        """Of the calls that its rows make."""
        job = self.job
        if job.events is None or job.model_E is None:
            assert job.cost is not None
            return job.cost
        if self.planned is None:
            models, events, length = family.models, job.events, self.plan.length
            cost = cost_of_calls(models, job.model_E, events.count_E, length, self.heavy, self.followed, self.plan)
            cost.calls = {name: calls for name, calls in cost.calls.items() if name in self.request.names}
            self.planned = cost
        return self.planned


def rows_in_call(family: Family, length: int, limits: Limits) -> int:
    """Rows that every call has, empty places included. As few as keep the device busy, since a lone row pays for all of
    them: on a CPU 256 tokens are enough for the matrix products, on CUDA about 16,384. A power of two."""
    if limits.batch_size is not None:
        return limits.batch_size
    rows = (16384 if family.device.type == "cuda" else 256) // length
    return 1 << max(0, min(rows, limits.max_rows).bit_length() - 1)


class Host:
    """Families in this process, one scheduler and its thread."""

    def __init__(self, families: Mapping[str, Family], limits: Limits | None = None) -> None:
        for family in families.values():
            check_whole(family.models)
        self.families, self.limits, self.created = families, limits or Limits(), int(time.time())
        self.metrics_of = Metrics()
        rows, queue = self.limits.max_rows, self.limits.max_queue
        devices = sorted((family.device for family in families.values()), key=lambda device: device.type == "cuda")
        ahead = 2 * (devices[-1].type == "cuda")
        self.scheduler = Scheduler(self._engine, rows, queue, devices[-1], on_call=self.metrics_of.call, ahead=ahead)
        self.thread = threading.Thread(target=self.scheduler.work, name="relaylm-calls", daemon=True)
        # One thread for all requests: more of them would only take the interpreter away from the one that makes calls.
        self.worker = ThreadPoolExecutor(1, "relaylm-plans")
        self.described = {name: describe_models(family) for name, family in families.items()}
        self.settled = lru_cache(64)(lambda name, ask, prompt: settled(families[name], ask, prompt))

    def start(self) -> None:
        """Begin to make calls."""
        self.thread.start()

    def close(self) -> None:
        """Finish what was accepted, refuse the rest."""
        self.scheduler.close()
        self.thread.join()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From the start to the close, for an event loop of this process."""
        self.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.close)

    def _engine(self, lane: LaneKey, places: int) -> Engine:
        family, length = self.families[lane.family], lane.length
        nothing = np.full((places, length), -1, dtype=np.int64)
        empty = Plan(0, np.zeros(places, dtype=np.int64), nothing, np.zeros((places, length)))
        models = list(family.models.values())
        return Engine(models, empty, family.mask_id, lane.law, family.device, lane.scored, shared=True)

    # -------------------------------------------------------------------------------- what the HTTP side asks for

    async def models(self) -> list[dict[str, Any]]:
        """The entries of GET /v1/models."""
        return [describe(name, family, self.created) for name, family in self.families.items()]

    async def schedule(self, ask: Ask) -> dict[str, Any]:
        """A schedule as parsed, and what it costs."""
        return await asyncio.to_thread(describe_schedule, pick_family(self.families, ask.model)[1], ask)

    async def health(self) -> dict[str, Any]:
        """Rows in flight and waiting."""
        if not self.thread.is_alive():
            raise Refused(503, "the thread that makes calls has ended", "dead")
        return {"rows_in_flight": self.scheduler.rows_in_flight, "rows_waiting": self.scheduler.rows_waiting}

    async def metrics(self) -> bytes:
        """Prometheus' text."""
        return self.metrics_of.text(self.scheduler.rows_in_flight, self.scheduler.rows_waiting)

    async def stream(self, ask: Ask) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """start, written ..., done; see `app.Backend`."""
        name, family = pick_family(self.families, ask.model)
        if ask.n * len(ask.prompts) > self.limits.max_queue:
            raise bad(f"{ask.n * len(ask.prompts)} rows are more than the {self.limits.max_queue} served at once", "n")
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[Part, Any]]()

        def put(part: Part, what: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(inbox.put_nowait, (part, what))

        parts = await loop.run_in_executor(self.worker, self._prepare, name, family, ask, put)
        jobs = [part.job for part in parts]
        self.scheduler.submit(jobs)
        try:
            start = start_event(name, family, ask, parts, self.described[name])
            yield "start", start
            left = len(parts)
            while left:
                part, what = await inbox.get()
                if isinstance(what, Event):
                    yield "written", written_event(family, part, what, ask)
                elif isinstance(what, Refused):
                    raise what
                else:
                    left -= 1
            done = done_event(family, ask, parts, start)
            self.metrics_of.request(done["relaylm"])
            yield "done", done
        finally:
            if not all(job.over for job in jobs):
                self.scheduler.cancel(jobs)

    def _prepare(self, name: str, family: Family, ask: Ask, put: Callable[[Part, Any], None]) -> list[Part]:
        parts: list[Part] = []
        deadline = self.scheduler.clock() + self.limits.timeout
        same = replace(ask, prompt=None, seed=None, user=None)
        requests = [self.settled(name, same, prompt) for prompt in ask.prompts]
        batch = rows_in_call(family, max(request.given.shape[-1] for request in requests), self.limits)
        for number, request in enumerate(requests):
            length = request.given.shape[-1]
            assert ask.seed is not None
            plan = make_plan(ask.n, length, ask.seed, request.given, first_row=number * ask.n)
            part = Part(request, None, number * ask.n, plan.given_nL.copy(), plan, request.policy, request.heavy)  # type: ignore[arg-type]
            # Without a stream and without probabilities nobody wants the events one by one.
            quiet = not ask.stream and ask.logprobs is None
            hooks: dict[str, Any] = {
                "emit": partial(note_tokens, family, part) if quiet else partial(put, part),
                "tokens_nL": part.tokens_nL if quiet else None,
                "ended": lambda error, part=part: put(part, error),
                "deadline": deadline,
            }
            try:
                part.followed, part.job = _job(name, family, request, plan, batch, hooks)
            except UserError as error:
                raise bad(str(error)) from None
            parts.append(part)
        return parts


def _job(
    name: str, family: Family, request: Request, plan: Plan, batch: int, hooks: dict[str, Any]
) -> tuple[Policy, Job]:
    """The policy as followed, and the rows of a request as the scheduler takes them: with their events where those are
    known before any network runs, else with the loop of their rule."""
    policy, steps, law, rule, call_nL = request.policy, request.steps, request.law, request.rule, None
    if rule is not None:
        followed, times = resolve(policy, steps, rule)
        if not rule.planned:
            loop = _rule_loop(family, request, followed, times, plan, batch)
            lane = LaneKey(name, plan.length, law, scored=True)
            return followed, Job(lane, tuple(request.models), plan, batch, rule=loop, **hooks)
        plan, steps, call_nL = as_plan(rule, plan, times)
        policy, law = followed, replace(law, top_k=1) if request.greedy else law
    followed, _, events = follow(policy, steps, plan, call_nL=call_nL)
    lookup = static_models(followed, family.names)
    assert lookup is not None
    model_E = lookup(events.step_E, events.t_E)
    lane = LaneKey(name, plan.length, law, scored=hooks["tokens_nL"] is None)
    return followed, Job(lane, family.names, plan, batch, events=events, model_E=model_E, **hooks)


def _rule_loop(
    family: Family, request: Request, followed: Policy, times: Grid, plan: Plan, batch: int
) -> Callable[[Callable[[Event], None]], RuleRun]:
    def make(emit: Callable[[Event], None]) -> RuleRun:
        options = Options(family.mask_id, request.law, batch, request.heavy, family.device, emit)
        assert request.rule is not None
        return RuleRun(request.models, followed, plan, request.rule, times, options, request.greedy)

    return make


# ------------------------------------------------------------------------------------------------ events


def start_event(name: str, family: Family, ask: Ask, parts: list[Part], models: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known before the first call."""
    first, given = parts[0], []
    for part in parts:
        given_L = part.job.plan.given_nL[0]
        texts: list[str | None] = [None] * len(given_L)
        if (given_L >= 0).any():
            pairs = zip(given_L.tolist(), row_pieces(family, given_L), strict=True)
            texts = [None if token < 0 else piece for token, piece in pairs]
        given += [texts] * ask.n
    known, steps = all(part.job.events is not None for part in parts), first.request.steps
    return {
        "id": f"relaylm-{secrets.token_hex(12)}",
        "family": name,
        "rows": len(given),
        "length": first.job.plan.length,
        "seed": ask.seed,
        "schedule": policy_text(first.request.policy),
        "law": first.request.law_text,
        "steps": "inf" if steps is not None and math.isinf(steps) else steps,
        "models": [model for model in models if model["name"] in first.request.names],
        "given": given,
        "planned": spent(family, parts) if known else None,
    }


def spent(family: Family, parts: list[Part]) -> dict[str, Any]:
    """What the calls of a request come to."""
    total = total_cost([part.cost(family) for part in parts])
    return {"calls": total.calls, "flops": total.flops, "saved": total.flops_saved}


def note_tokens(family: Family, part: Part, event: Event) -> None:
    """Write a row's call into its tokens; -1 where a rule masked a position again."""
    tokens_L = part.tokens_nL[event.row]
    tokens_L[event.positions] = event.tokens
    tokens_L[tokens_L == family.mask_id] = -1


def written_event(family: Family, part: Part, event: Event, ask: Ask) -> dict[str, Any]:
    """One row's call. A position that a rule masked again has no text and no probability."""
    mask = family.mask_id
    note_tokens(family, part, event)
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
    """The text of a completion as far as it is finished from the left: what follows the prompt up to the suffix; all of
    the row with `echo` or `infill`."""
    given_L, tokens_L = part.job.plan.given_nL[row], part.tokens_nL[row]
    free = np.flatnonzero(given_L < 0)
    start, end = free[0], free[-1] + 1
    if ask.echo or ask.infill is not None:
        start, end = 0, len(tokens_L) if ask.infill is not None else end
    masked = np.flatnonzero(tokens_L[start:end] < 0)
    return _decode(family, tokens_L[start : start + masked[0]] if len(masked) else tokens_L[start:end])


def _decode(family: Family, tokens: np.ndarray) -> str:
    return " ".join(map(str, tokens)) if family.tokenizer is None else family.tokenizer.decode(tokens)


def done_event(family: Family, ask: Ask, parts: list[Part], start: dict[str, Any]) -> dict[str, Any]:
    """The texts and what they cost."""
    jobs, request = [part.job for part in parts], parts[0].request
    given = [int((part.job.plan.given_nL[0] >= 0).sum()) for part in parts]
    free = [ask.n * part.job.plan.length - ask.n * g for part, g in zip(parts, given, strict=True)]
    usage = {"prompt_tokens": sum(given), "completion_tokens": sum(free), "total_tokens": sum(given) + sum(free)}
    began, law, rule = min(job.began for job in jobs), request.law, request.rule
    about = {
        "schedule": start["schedule"],
        "law": start["law"],
        **(start["planned"] or spent(family, parts)),
        "seconds_queued": round(began - jobs[0].submitted, 6),
        "seconds_computing": round(max(job.finished for job in jobs) - began, 6),
        "batch_size": jobs[0].batch,
        "seed": ask.seed,
        "length": jobs[0].plan.length,
        "changes_law": law.changes if rule is None else changes_of(rule, law, request.greedy),
    }
    texts = [_decode(family, tokens_L) for part in parts for tokens_L in part.tokens_nL]
    event: dict[str, Any] = {"texts": texts, "usage": usage, "relaylm": about}
    if not ask.finished:
        event["pieces"] = [row_pieces(family, tokens_L) for part in parts for tokens_L in part.tokens_nL]
    else:
        event["completions"] = [completed(family, part, row, ask) for part in parts for row in range(ask.n)]
    return event
