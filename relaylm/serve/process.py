"""The process that computes, beside the one that speaks HTTP.

Python runs one thread of a process at a time. On a fast GPU a call takes as long as the host's work for it, so HTTP,
JSON and streams are in the process that was started (`Worker`), and families, plans and the scheduler in another one
(`compute`), whose thread that makes calls is then held up by less.

They talk over a pair of sockets. A question is (number, method of a `Replica`, values); (number, "leave", ()) takes it
back. An answer is (number, value or event); a stream ends with "done" or "refused". Messages are pickled: nobody but
these two processes can write to the pair. When either process ends, the other one sees the end of the stream, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from itertools import count
from multiprocessing import resource_tracker
from typing import Any

from relaylm.serve.request import Ask, Limits, Refused

log = logging.getLogger("relaylm.serve")
Event = tuple[str, Any]


class Replica:
    """A host for questions from another process. A refusal is returned, not raised: Ray would wrap an exception."""

    def __init__(self, sources: list[str], device: str, dtype: str | None, limits: Limits) -> None:
        from relaylm.serve.families import load_families
        from relaylm.serve.host import Host

        self.host = Host(load_families(sources, device, dtype), limits)
        self.host.start()

    async def ask(self, method: str, *values: Any) -> Any:
        """What a method of the host returns, or why it does not."""
        try:
            return await getattr(self.host, method)(*values)
        except Refused as error:
            return error

    async def stream(self, ask: Ask) -> AsyncIterator[Event]:
        """The events of a request; a refusal is the last one."""
        try:
            async for event in self.host.stream(ask):
                yield event
        except Refused as error:
            yield "refused", error

    async def process(self) -> int:
        """The process's number."""
        return os.getpid()

    async def check_health(self) -> None:
        """Ray replaces a replica whose thread has ended."""
        await self.host.health()


class Remote:
    """The part of `app.Backend` that is one question to a replica."""

    async def ask(self, method: str, *values: Any) -> Any:
        """One answer; raises a refusal."""
        raise NotImplementedError

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Nothing to begin or end."""
        return contextlib.nullcontext()

    async def models(self) -> Any:
        """The entries of GET /v1/models."""
        return await self.ask("models")

    async def schedule(self, ask: Ask) -> Any:
        """A schedule as parsed, and what it costs."""
        return await self.ask("schedule", ask)

    async def health(self) -> Any:
        """Rows in flight and waiting."""
        return await self.ask("health")

    async def metrics(self) -> Any:
        """Prometheus' text."""
        return await self.ask("metrics")


# ------------------------------------------------------------------------------------------------ messages


def packed(message: Any) -> bytes:
    """A message with its size before it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "big") + data


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """What the other process sends, until it ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(8), "big")
            yield pickle.loads(await reader.readexactly(size))


# ------------------------------------------------------------------------------------------------ the one that computes


def compute(end: socket.socket) -> None:
    """What the process does: load what the first question says, answer the others, and end with the one that asks."""
    start_log()
    # The thread that makes calls gives the interpreter up at every operation on the device, and other threads keep it
    # for this long before they give it back: 5 ms, Python's own, is more than a call takes.
    sys.setswitchinterval(1e-4)
    asyncio.run(_answer_all(end))


async def _answer_all(end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    replica: Replica | None = None
    tasks: dict[int, asyncio.Task[None]] = {}

    async def load(*options: Any) -> Exception | None:
        nonlocal replica
        try:
            replica = await asyncio.to_thread(Replica, *options)
        except Exception as error:
            return error
        gc.collect()
        gc.freeze()  # what was imported and loaded stays: collections need not look through it
        return None

    async def answer(number: int, method: str, values: tuple[Any, ...]) -> None:
        try:
            if method == "load":
                writer.write(packed((number, await load(*values))))
            elif method == "stream":
                assert replica is not None
                async with contextlib.aclosing(replica.stream(*values)) as events:  # type: ignore[type-var]
                    async for event in events:
                        writer.write(packed((number, event)))
            else:
                assert replica is not None
                writer.write(packed((number, await replica.ask(method, *values))))
        except Exception as error:
            log.error("failed", exc_info=error)
            refusal = Refused(500, "the server failed; its log says why", "internal_error")
            writer.write(packed((number, refusal)))
        finally:
            del tasks[number]

    async for number, method, values in messages(reader):
        if method != "leave":
            tasks[number] = asyncio.create_task(answer(number, method, values))
        elif number in tasks:
            tasks[number].cancel()
    os._exit(0)  # nobody is there to read what still runs


# ------------------------------------------------------------------------------------------------ the one that asks


class Worker(Remote):
    """The backend that passes requests on to a process of its own; see `app.Backend`."""

    def __init__(self, sources: list[str], device: str, dtype: str | None, limits: Limits) -> None:
        self.end, theirs = socket.socketpair()
        self.process = multiprocessing.get_context("spawn").Process(target=compute, args=(theirs,))
        self.asked: dict[int, asyncio.Queue[Any]] = {}
        self.numbers, self.closing, self.lost = count(1), False, False
        self.on_loss: Callable[[], None] = lambda: None
        resource_tracker.ensure_running()  # otherwise started below, where it would let the signals through
        # Signals that a terminal or systemd sends to both processes are for this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        try:
            self.end.sendall(packed((0, "load", (sources, device, dtype, limits))))
            size = int.from_bytes(self.end.recv(8, socket.MSG_WAITALL), "big")
            error = pickle.loads(self.end.recv(size, socket.MSG_WAITALL))[1] if size else ended()
            if error is not None:
                raise error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, whatever it does."""
        self.closing = True
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.process.join(5)
        self.process.kill()
        self.process.join()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen to the process; end it at last, when requests have their answers."""
        reader, self.writer = await asyncio.open_connection(sock=self.end)
        listening = asyncio.create_task(self._listen(reader))
        try:
            yield
        finally:
            await asyncio.to_thread(self.close)
            await listening

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        async for number, answer in messages(reader):
            if number in self.asked:
                self.asked[number].put_nowait(answer)
        self.lost = not self.closing
        for inbox in self.asked.values():
            inbox.put_nowait(ended())
        if self.lost:
            await asyncio.to_thread(self.process.join, 5)
            log.error("the process that computes has ended", extra={"facts": {"exit_code": self.process.exitcode}})
            self.on_loss()

    async def ask(self, method: str, *values: Any) -> Any:
        """One answer."""
        return await anext(self._answers(method, *values))

    def stream(self, ask: Ask) -> AsyncIterator[Event]:
        """The events of a request."""
        return self._answers("stream", ask)

    async def _answers(self, method: str, *values: Any) -> AsyncIterator[Any]:
        """What comes back. Who stops listening before the end takes the question back."""
        if self.lost or self.closing:
            raise ended()
        number, last = next(self.numbers), False
        inbox = self.asked[number] = asyncio.Queue()
        self.writer.write(packed((number, method, values)))
        try:
            while not last:
                answer = await inbox.get()
                if isinstance(answer, tuple) and answer[0] == "refused":
                    answer = answer[1]
                last = method != "stream" or isinstance(answer, Refused) or answer[0] == "done"
                if isinstance(answer, Refused):
                    raise answer
                yield answer
        finally:
            del self.asked[number]
            if not last:
                self.writer.write(packed((number, "leave", ())))


def ended() -> Refused:
    """The answer when there is no process to ask."""
    return Refused(503, "the process that computes has ended", "dead")


# ------------------------------------------------------------------------------------------------ the log of both


class JsonLines(logging.Formatter):
    """One JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line.update(getattr(record, "facts", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def start_log() -> None:
    """JSON lines on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
