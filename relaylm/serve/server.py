"""The process: families loaded, a server on a port, the log, and a clean end."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relaylm.errors import UserError, reason
from relaylm.serve.app import Backend, Settings, create_app
from relaylm.serve.process import Worker, start_log
from relaylm.serve.request import Limits

HEADER_SECONDS = 10.0  # for the head of a request to arrive
STALL_SECONDS = 30.0  # for which a client may take nothing of what it is sent


class Protocol(H11Protocol):
    """uvicorn's, for clients that say nothing or stop within the head of a request, who are cut off after a while, and
    for those whose request stops being HTTP while it is answered."""

    _due: asyncio.TimerHandle | None = None  # when the head that has begun must be there

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Handle what is there; what has begun must go on. (uvicorn stops its own clock at the first byte.)"""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._forget()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. An answer that is under way on this connection goes nowhere."""
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if under_way and self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _expect(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._due is None and not self.transport.is_closing():
            self._due = asyncio.get_running_loop().call_later(HEADER_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._due = None


def listen(address: str, port: int) -> socket.socket:
    """A socket for clients, who may connect from now on. Those that do not read what they are sent are cut off after a
    while by Linux, which also counts once the last byte is handed to it: elsewhere they are not."""
    try:
        listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise UserError(f"cannot listen on {address}:{port}: {reason(error)}") from None
    if stall := getattr(socket, "TCP_USER_TIMEOUT", None):  # every connection has it from here
        listener.setsockopt(socket.IPPROTO_TCP, stall, int(1000 * STALL_SECONDS))
    return listener


def run(
    backend: Backend, settings: Settings, listener: socket.socket, most: int, grace: float, worker: Worker | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, or until the process that computes is lost; then finish what runs, for at most
    `grace` seconds."""
    start_log()
    host, port = listener.getsockname()[:2]
    facts = {"address": f"http://{f'[{host}]' if ':' in host else host}:{port}"}
    logging.getLogger("relaylm.serve").info("listening", extra={"facts": facts})
    config = uvicorn.Config(
        create_app(backend, settings),
        http=Protocol,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=most,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(grace) + 1,
        h11_max_incomplete_event_size=1 << 15,  # bytes of headers
    )
    server = uvicorn.Server(config)
    if worker is not None:
        worker.on_loss = lambda: setattr(server, "should_exit", True)
    server.run([listener])


def serve(
    sources: list[str],
    device: str,
    dtype: str | None,
    limits: Limits,
    settings: Settings,
    address: tuple[str, int],
    cluster: str | None = None,
    replicas: int | None = None,
) -> None:
    """Serve families from a process of their own, or from replicas on a Ray cluster. The port is taken first: if it is
    busy, nothing is loaded, and clients who come early wait."""
    most = limits.max_rows + limits.max_queue + 64
    with listen(*address) as listener:
        if cluster is not None:
            from relaylm.serve.replicas import deploy

            replicas_there = deploy(sources, device, dtype, limits, cluster, replicas)
            run(replicas_there, settings, listener, most * (replicas or 16), limits.timeout)
            return
        worker = Worker(sources, device, dtype, limits)
        from relaylm.serve.host import Host  # needs PyTorch, which was imported while the other process loaded

        try:
            host = Host(worker.families, limits, worker)
            run(host, settings, listener, most, limits.timeout, worker)
        finally:
            worker.close()
    if worker.lost:
        sys.exit(1)  # the log says why
