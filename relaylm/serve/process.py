"""The process that computes, beside the one that speaks HTTP.

Python runs one thread of a process at a time. With a small network on a fast GPU the host's work for a call and for the
requests in it take as long as the call, so they are divided: HTTP, plans, texts and costs are in the process that was
started (a `Host`, with families without weights), and the scheduler is in another one (`compute`), beside a thread that
hardly does more than to wait for rows.

They talk over a pair of sockets. `compute` is sent (number, rows), or (number, None), which takes them back. It sends
lists of news, with the calls that were made and how many rows are in flight and waiting: (number, None, why not or
None) says whether rows were accepted, (number, which of them, `Event` or `Ended`) what became of them. Messages are
pickled: nobody but these two processes can write to the pair. When either process ends, the other one sees the end of
the stream, and ends.
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
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from relaylm.serve.request import Limits, Refused

if TYPE_CHECKING:  # what needs PyTorch is imported while the other process starts
    from relaylm.models.family import Family
    from relaylm.serve.compute import Put
    from relaylm.serve.rows import Made, Rows

log = logging.getLogger("relaylm.serve")
_SIGNALS = signal.SIGINT, signal.SIGTERM


# ------------------------------------------------------------------------------------------------ messages


def packed(message: Any) -> bytes:
    """A message with its size before it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "big") + data


def send(end: socket.socket, message: Any) -> None:
    """Send a message. If nobody is there any more, that is seen where messages are received."""
    with contextlib.suppress(OSError):
        end.sendall(packed(message))


def received(stream: Any) -> Any:
    """The next message of a file, or None at its end."""
    with contextlib.suppress(ConnectionError):
        size = int.from_bytes(stream.read(8), "big")
        data = stream.read(size)
        return pickle.loads(data) if size and len(data) == size else None


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """What the other process sends, until it ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = int.from_bytes(await reader.readexactly(8), "big")
            yield pickle.loads(await reader.readexactly(size))


# ------------------------------------------------------------------------------------------------ the one that computes


def compute(end: socket.socket, sources: list[str], device: str, dtype: str | None, limits: Limits) -> None:
    """What the process does: load families, send them without their weights, compute rows, and end with the one that
    asks."""
    start_log()
    # The thread that makes calls gives the interpreter up at every operation on the device, and the one that listens
    # keeps it for this long before it gives it back: 5 ms, Python's own, is more than a call takes.
    sys.setswitchinterval(1e-4)
    threading.Thread(target=_end_with, args=(end,), name="relaylm-loads", daemon=True).start()
    try:
        from relaylm.serve.families import load_families, outline

        families = load_families(sources, device, dtype)
        send(end, {name: outline(family) for name, family in families.items()})
    except Exception as error:
        send(end, error)
        return
    gc.collect()
    gc.freeze()  # what was imported and loaded stays: collections need not look through it
    _compute(end, families, limits)


def _end_with(end: socket.socket) -> None:
    """End this process, even while it loads, if the one that started it ends before it asks for anything."""
    with contextlib.suppress(OSError):
        if end.recv(1, socket.MSG_PEEK):
            return
    os._exit(0)


def _compute(end: socket.socket, families: dict[str, Family], limits: Limits) -> None:
    from relaylm.serve.compute import scheduler_of
    from relaylm.serve.scheduler import Job

    scheduler, sending = scheduler_of(families, limits), threading.Lock()
    jobs: dict[int, list[Job]] = {}
    news: list[tuple[int, int | None, Any]] = []
    made: list[Made] = []

    def tell(news: list[tuple[int, int | None, Any]], made: list[Made]) -> None:
        with sending:
            send(end, (news, made, (scheduler.rows_in_flight, scheduler.rows_waiting)))

    def pass_on() -> None:
        """After each call, in the thread that makes calls."""
        if news or made:
            tell(news, made)
            for number in {number for number, _, _ in news}:
                if all(job.over for job in jobs[number]):
                    del jobs[number]
            news.clear()
            made.clear()

    def listen() -> None:
        with end.makefile("rb") as stream:
            while (message := received(stream)) is not None:
                number, all_rows = message
                if all_rows is None:
                    scheduler.cancel(jobs.get(number, []))
                else:
                    tell([(number, None, refusal(number, all_rows))], [])

    def refusal(number: int, all_rows: list[Rows]) -> Refused | None:
        def put(which: int, what: Any) -> None:
            news.append((number, which, what))

        jobs[number] = [Job(rows, partial(put, which)) for which, rows in enumerate(all_rows)]
        try:
            scheduler.submit(jobs[number])
        except Refused as error:
            del jobs[number]
            return error
        return None

    def to_the_end(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            log.error("failed", exc_info=error)
            os._exit(1)
        os._exit(0)  # nobody is there to read what still runs

    scheduler.on_call, scheduler.after_step = made.append, pass_on
    threading.Thread(target=to_the_end, args=(listen,), name="relaylm-listens", daemon=True).start()
    to_the_end(scheduler.work)


# ------------------------------------------------------------------------------------------------ the one that asks


class Worker:
    """A `Computer` in a process of its own; `families` are those that it has loaded, without weights."""

    def __init__(self, sources: list[str], device: str, dtype: str | None, limits: Limits) -> None:
        self.end, theirs = socket.socketpair()
        options = (theirs, sources, device, dtype, limits)
        self.process = multiprocessing.get_context("spawn").Process(target=compute, args=options)
        self.asked: dict[int, _Asked] = {}
        self.numbers, self.closing, self.lost, self.there = count(1), False, False, (0, 0)
        self.on_loss: Callable[[], None] = lambda: None
        self.on_call: Callable[[Made], None] = lambda made: None
        resource_tracker.ensure_running()  # otherwise started below, where it would let the signals through
        with _signals_wait():  # those that a terminal or systemd sends to both processes are for this one
            self.process.start()
        theirs.close()
        try:
            with _signals_wait():  # one that interrupted the import of PyTorch would end Python
                import_module("relaylm.serve.host")  # while the other process does the same
            with self.end.makefile("rb") as stream:
                loaded = received(stream) or ended()
            if isinstance(loaded, Exception):
                raise loaded
            self.families: dict[str, Family] = loaded
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
        from relaylm.serve.rows import Ended

        try:
            async for news, made, self.there in messages(reader):
                for call in made:
                    self.on_call(call)
                for number, which, what in news:
                    if (asked := self.asked.get(number)) is None:  # nobody listens any more
                        continue
                    if which is not None:
                        asked.left -= isinstance(what, Ended)
                        asked.put(which, what)
                    elif not asked.accepted.done():  # its client may just have left
                        asked.accepted.set_result(what)
        except Exception as error:  # without news no request would ever end
            log.error("listening to the process that computes has failed", exc_info=error)
        self.lost = not self.closing
        for asked in self.asked.values():
            if asked.accepted.done():
                asked.put(0, Ended(ended(), 0.0, 0.0, 0.0, None, None))
            else:
                asked.accepted.set_result(ended())
        if self.lost:
            await asyncio.to_thread(self.process.join, 5)
            log.error("the process that computes has ended", extra={"facts": {"exit_code": self.process.exitcode}})
            self.on_loss()

    def count(self, made: Callable[[Made], None]) -> None:
        """Have each call counted."""
        self.on_call = made

    def rows(self) -> tuple[int, int]:
        """In flight and waiting, as last heard of."""
        if self.lost or self.closing:
            raise ended()
        return self.there

    async def submit(self, all_rows: list[Rows], put: Put) -> int:
        """Queue all rows, or refuse them; see `Computer`."""
        if self.lost or self.closing:
            raise ended()
        number, accepted = next(self.numbers), asyncio.get_running_loop().create_future()
        self.asked[number] = _Asked(put, len(all_rows), accepted)
        self.writer.write(packed((number, all_rows)))
        try:
            refusal = await accepted
        except asyncio.CancelledError:
            self.leave(number)
            raise
        if refusal is not None:
            del self.asked[number]
            raise refusal
        return number

    def leave(self, number: Any) -> None:
        """Nobody listens any more: take out what is not written."""
        if self.asked.pop(number).left and not self.lost:
            self.writer.write(packed((number, None)))


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM come afterwards; processes that are started meanwhile never see them."""
    # Blocked here, a signal goes to another thread, as NumPy has them, and would be handled here all the same.
    noted: list[int] = []
    kept = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        for which, handler in kept.items():
            signal.signal(which, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in noted[:1]:
            signal.raise_signal(number)


@dataclass
class _Asked:
    """Rows that were submitted: who hears of them, how many have not ended, and whether they were accepted."""

    put: Put
    left: int
    accepted: asyncio.Future[Refused | None]


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
