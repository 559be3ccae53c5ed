"""The HTTP side: routes, streams, OpenAI's completions, limits on what comes in, and the log.

Nothing here computes. `Backend.stream` gives the events of a request (start, written, done), from a `Host` or from a
cluster; /v1/denoise passes them on, /v1/completions makes text of them. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relaylm.serve.completions import Completion
from relaylm.serve.request import COMPLETIONS, DENOISE, Ask, Refused, bad, read_ask, read_json
from relaylm.show.player import template

log = logging.getLogger("relaylm.serve")
Events = AsyncIterator[tuple[str, dict[str, Any]]]

BODY_SECONDS = 10.0  # for a request's body to arrive
HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}
REVALIDATE = "no-cache"  # a browser keeps it, but asks each time whether it has changed


class Backend(Protocol):
    """Where rows are computed."""

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """As long as requests may come."""
        ...

    async def models(self) -> list[dict[str, Any]]:
        """The entries of GET /v1/models."""
        ...

    async def schedule(self, ask: Ask) -> dict[str, Any]:
        """A schedule as parsed, and what it costs."""
        ...

    async def health(self) -> dict[str, Any]:
        """Rows in flight and waiting."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus' text."""
        ...

    def stream(self, ask: Ask) -> Events:
        """The events of a request. Closing the iterator ends the request's rows. Raises Refused."""
        ...


@dataclass(frozen=True)
class Settings:
    """What the HTTP side is told on the command line."""

    api_key: str | None = None
    max_body: int = 1 << 18  # bytes
    log_prompts: bool = False


def create_app(backend: Backend, settings: Settings) -> ASGIApp:
    """The application, with a backend that works as long as it is served."""
    AppStatus.disable_automatic_graceful_drain()  # on shutdown streams end by themselves: what runs is finished

    async def body_of(request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page elsewhere cannot send this without asking first
            raise Refused(415, "the content type must be application/json", "unsupported_media_type")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > settings.max_body:
                        raise Refused(413, f"the body is larger than {settings.max_body} bytes", "body_too_large")
        except TimeoutError:
            raise Refused(408, f"the body did not arrive in {BODY_SECONDS:g} seconds", "timeout") from None
        return bytes(body)

    async def asked(request: Request, allowed: frozenset[str], **defaults: Any) -> Ask:
        values = {**defaults, **read_json(await body_of(request))}
        if settings.log_prompts:
            request.state.about["body"] = values
        return read_ask(values, allowed)

    async def started(request: Request, ask: Ask) -> tuple[dict[str, Any], Events]:
        """The first event, which comes once the rows are queued, and the iterator over the others."""
        events = backend.stream(ask)
        _, start = await anext(events)
        about = {key: start[key] for key in ("id", "family", "rows", "length", "schedule", "law")}
        request.state.about.update(about, stream=ask.stream)
        return start, events

    async def denoise(request: Request) -> Response:
        ask = await asked(request, DENOISE, stream=True)
        if isinstance(ask.prompt, tuple):
            raise bad("prompt must be text", "prompt")
        start, events = await started(request, ask)
        if not ask.stream:
            done = await unless_gone(request, last(noted(request, events)))
            return JSONResponse({**start, **done})

        async def passed_on() -> AsyncIterator[dict[str, str]]:
            yield sse("start", start)
            async for name, value in recorded(request, events):
                yield sse(name, value)

        return streamed(passed_on())

    async def completions(request: Request) -> Response:
        ask = await asked(request, COMPLETIONS)
        start, events = await started(request, replace(ask, finished=True))
        completion = Completion(ask, start)
        if not ask.stream:

            async def all_of() -> dict[str, Any]:
                async for name, value in noted(request, events):
                    completion.take(name, value)
                return completion.body()

            return JSONResponse(await unless_gone(request, all_of()))

        async def passed_on() -> AsyncIterator[dict[str, str]]:
            async for name, value in recorded(request, events):
                if name == "error":
                    yield {"data": encoded(value)}
                    return
                completion.take(name, value)
                for chunk in completion.chunks():
                    yield {"data": encoded(chunk)}
            yield {"data": "[DONE]"}

        return streamed(passed_on())

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await backend.models()})

    async def model(request: Request) -> Response:
        name = "/".join(request.path_params.values())
        found = [entry for entry in await backend.models() if entry["id"] == name]
        if not found:
            raise Refused(404, "no such model is served here", "model_not_found", "model")
        return JSONResponse(found[0])

    async def schedule(request: Request) -> Response:
        values: dict[str, Any] = dict(request.query_params)
        for name in ("steps", "length", "max_tokens"):
            if values.get(name, "").isdecimal() and len(values[name]) < 10:
                values[name] = int(values[name])
        allowed = frozenset({"model", "schedule", "steps", "spacing", "rule", "length", "prompt", "suffix", "infill"})
        return JSONResponse(await backend.schedule(read_ask(values, allowed | {"max_tokens"})))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **await backend.health()})

    async def metrics(request: Request) -> Response:
        return Response(await backend.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def player(request: Request) -> Response:
        # The page fills it with what it has shown.
        return Response(template(), media_type="text/html", headers={"cache-control": REVALIDATE})

    api = [
        Route("/completions", completions, methods=["POST"]),
        Route("/denoise", denoise, methods=["POST"]),
        Route("/models", models),
        Route("/models/{name}", model),
        Route("/models/{owner}/{name:path}", model),  # families may be called as on a hub
        Route("/schedule", schedule),
    ]
    routes: list[Any] = [
        Mount("/v1", Router(api, redirect_slashes=False)),  # apart from the page, which knows GET alone
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/player.html", player),
        Mount("/show", Assets(packages=[("relaylm.show", "web")])),
        Mount("/", Assets(packages=[("relaylm.serve", "page")], html=True)),
    ]
    handlers: dict[Any, Any] = {Refused: refused, HTTPException: http_error, ClientDisconnect: gone, Exception: broken}
    return Guard(
        Starlette(routes=routes, exception_handlers=handlers, lifespan=lambda app: backend.running()), settings
    )


# ------------------------------------------------------------------------------------------------ streams


def encoded(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def sse(name: str, value: dict[str, Any]) -> dict[str, str]:
    """An event with a name."""
    return {"event": name, "data": encoded(value)}


def streamed(events: AsyncIterator[dict[str, str]]) -> Response:
    """Server-sent events."""
    return EventSourceResponse(events, ping=15, sep="\n")


async def noted(request: Request, events: Events) -> Events:
    """The events; what the last one says goes into the log."""
    try:
        async for name, value in events:
            if name == "done":
                request.state.about.update(value["relaylm"])
            yield name, value
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def recorded(request: Request, events: Events) -> Events:
    """The same for a stream: an error after the start is an event, too."""
    try:
        async with contextlib.aclosing(noted(request, events)) as all_of:  # type: ignore[type-var]
            async for event in all_of:
                yield event
    except Refused as error:
        request.state.about["error"] = error.code
        yield "error", error.body


async def last(events: Events) -> dict[str, Any]:
    """The content of the last event; raises what went wrong."""
    return [value async for _, value in events][-1]


async def unless_gone(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of the work, which ends as soon as the client has disconnected."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------------------------------------ errors


async def refused(request: Request, error: Refused) -> Response:
    """OpenAI's error object, and when to try again."""
    after = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    request.state.about["error"] = error.code
    return JSONResponse(error.body, error.status, after)


async def http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals (no such route, method not allowed), in the same form."""
    message, code = (
        str(error.detail),
        {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error"),
    )
    if allowed := (error.headers or {}).get("Allow"):
        message = f"{request.method} is not possible here, only {' and '.join(sorted(allowed.split(', ')))}"
    return JSONResponse(Refused(error.status_code, message, code).body, error.status_code, error.headers)


async def gone(request: Request, error: ClientDisconnect) -> Response:
    """The client has left; nobody reads this."""
    return Response(status_code=499)


async def broken(request: Request, error: Exception) -> Response:
    """A defect of the server: one line for the client, the rest in the log."""
    log.error("failed", exc_info=error)
    return JSONResponse(Refused(500, "the server failed; its log says why", "internal_error").body, 500)


class Assets(StaticFiles):
    """Files of the page. Without a word about it a browser would show those of an older server for hours."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """The file, or that it has not changed."""
        response = super().file_response(*args, **options)
        response.headers["cache-control"] = REVALIDATE
        return response


class Guard:
    """Around the application: the API key, headers against misuse, one line of log for each request."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        about: dict[str, Any] = {}
        scope.setdefault("state", {})["about"] = about
        names = {name for name, _ in scope["headers"]}
        unread = bool(names & {b"content-length", b"transfer-encoding"})

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # After an answer to half a request the rest would be read for ever.
                closing = [(b"connection", b"close")] if unread else []
                message["headers"] = [*message["headers"], *HEADERS.items(), *closing]
            await send(message)

        try:
            if self._allowed(scope):
                await self.app(scope, received, sent)
            else:
                refusal = Refused(401, "the API key is missing or wrong", "invalid_api_key")
                await JSONResponse(refusal.body, 401, {"www-authenticate": "Bearer"})(scope, received, sent)
        finally:
            seconds = round(time.perf_counter() - began, 4)
            facts = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds, **about}
            log.info("request", extra={"facts": facts})

    def _allowed(self, scope: Scope) -> bool:
        key, path = self.settings.api_key, scope["path"]
        if key is None or not (path.startswith("/v1/") or path == "/metrics"):
            return True
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode())
