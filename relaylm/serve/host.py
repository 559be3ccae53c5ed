"""Requests on this machine: from fields to rows, and from written rows to the events of a stream."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from relaylm.models.family import Family
from relaylm.sampling.result import Event
from relaylm.sampling.sample import sample
from relaylm.serve.request import Ask, describe, describe_models, describe_schedule, pick_family, settled
from relaylm.show.colours import pieces_of


class Host:
    """Families in this process."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self.families, self.created, self.lock = families, int(time.time()), threading.Lock()

    async def models(self) -> list[dict[str, Any]]:
        return [describe(name, family, self.created) for name, family in self.families.items()]

    async def schedule(self, ask: Ask) -> dict[str, Any]:
        return await asyncio.to_thread(describe_schedule, pick_family(self.families, ask.model)[1], ask)

    async def health(self) -> dict[str, Any]:
        return {}

    async def metrics(self) -> bytes:
        return b""

    async def stream(self, ask: Ask) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        name, family = pick_family(self.families, ask.model)
        request = settled(family, ask, ask.prompts[0])
        given_L = np.atleast_2d(request.given)[0]
        pieces = [None if token < 0 else piece for token, piece in zip(given_L, pieces_of(family, given_L))]
        yield (
            "start",
            {
                "id": f"denoise-{secrets.token_hex(8)}",
                "family": name,
                "rows": ask.n,
                "length": len(given_L),
                "seed": ask.seed,
                "schedule": str(request.policy),
                "law": request.law_text,
                "steps": request.steps,
                "models": [m for m in describe_models(family) if m["name"] in request.names],
                "given": [pieces] * ask.n,
                "planned": None,
            },
        )
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        tokens_nL = np.repeat(given_L[None], ask.n, axis=0)

        def written(event: Event) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def work() -> Any:
            with self.lock:
                return sample(
                    family,
                    request.policy,
                    ask.n,
                    steps=request.steps,
                    seed=ask.seed,
                    given=request.given,
                    temperature=ask.temperature,
                    top_p=ask.top_p,
                    rule=request.rule,
                    callback=written,
                    batch_size=1,
                )

        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        while (event := await queue.get()) is not None:
            tokens_nL[event.row, event.positions] = event.tokens
            texts = pieces_of(family, np.array(event.tokens))
            yield (
                "written",
                {
                    "row": event.row,
                    "positions": event.positions,
                    "tokens": event.tokens,
                    "texts": texts,
                    "logprobs": [None] * len(texts),
                    "model": event.model,
                    "step": event.step,
                    "t": event.t,
                    "finished": "",
                },
            )
        samples = await task
        cost = samples.cost
        yield (
            "done",
            {
                "texts": samples.texts,
                "completions": samples.texts,
                "usage": {},
                "relaylm": {
                    "schedule": samples.schedule,
                    "law": samples.law,
                    "calls": cost.calls,
                    "flops": cost.flops,
                    "saved": cost.flops_saved,
                    "seconds_queued": 0.0,
                    "seconds_computing": cost.seconds,
                    "batch_size": cost.batch_size,
                },
            },
        )
