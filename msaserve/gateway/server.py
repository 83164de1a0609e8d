"""Running the HTTP server: binding, signals, draining. What is behind the application's client is not its business."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from msaserve.errors import MsaserveError

_KEEP_ALIVE_SECONDS = 75
"""Idle connections live longer than the pools of common clients keep them, so that none is reused as it closes."""


class BindError(MsaserveError):
    """The address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, while a model loads.

    Raises:
        BindError: the port is in use, or the address is not this machine's.
    """
    if not 0 <= port < 65_536:  # getaddrinfo would take it modulo 65536
        raise BindError(f"cannot listen on {host} port {port}: ports are 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BindError(f"cannot listen on {host} port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BindError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


async def run(
    app: Starlette, listener: socket.socket, *, drain_seconds: int, on_ready: Callable[[], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight end for drain_seconds. A second signal exits at once.

    app: of `gateway.app.create_app`. on_ready: called once requests are accepted.
    """
    server = _Server(app, drain_seconds, on_ready)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, server.stop, number)
    try:
        await server.serve(sockets=[listener])
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, drain_seconds: int, on_ready: Callable[[], None] | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=drain_seconds,
            )
        )
        self._app = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end: a server that was asked to stop and did exits with 0."""
        yield

    def stop(self, number: int) -> None:
        if self.should_exit:
            os._exit(128 + number)
        self._app.state.gateway.is_draining = True
        self.should_exit = True
