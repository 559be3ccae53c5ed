"""The process: families loaded, a server on a port, the log, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from relaylm.errors import UserError, reason
from relaylm.serve.app import JsonLines, Settings, create_app
from relaylm.serve.host import Host, Limits
from relaylm.serve.request import load_families

HEADER_SECONDS = 10.0  # for the first request of a connection to arrive


class Protocol(H11Protocol):
    """uvicorn's, for clients that connect and say nothing: those are cut off after a while."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(HEADER_SECONDS, self._expect)

    def _expect(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


def application(host: Host, settings: Settings) -> Any:
    """The application with a host that works as long as it is served."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        host.start()
        try:
            yield
        finally:
            await asyncio.to_thread(host.close)

    return create_app(host, settings, lifespan)


def run(app: Any, address: str, port: int, most: int, grace: float) -> None:
    """Serve until SIGINT or SIGTERM; then finish what runs, for at most `grace` seconds."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    try:
        listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise UserError(f"cannot listen on {address}:{port}: {reason(error)}") from None
    # The thread that makes calls gives the interpreter up at every operation on the device, and other threads keep it
    # for this long before they give it back: 5 ms, Python's own, is more than a call takes.
    sys.setswitchinterval(1e-4)
    with listener:
        host, port = listener.getsockname()[:2]
        facts = {"address": f"http://{f'[{host}]' if ':' in host else host}:{port}"}
        logging.getLogger("relaylm.serve").info("listening", extra={"facts": facts})
        config = uvicorn.Config(
            app,
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
        uvicorn.Server(config).run([listener])


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
    """Serve families from this process, or from replicas on a Ray cluster."""
    most = limits.max_rows + limits.max_queue + 64
    if cluster is None:
        app = application(Host(load_families(sources, device, dtype), limits), settings)
    else:
        from relaylm.serve.replicas import deploy

        app = create_app(deploy(sources, device, dtype, limits, cluster, replicas), settings)
        most *= replicas or 16
    run(app, *address, most, limits.timeout)
