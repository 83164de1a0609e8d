"""Running the HTTP server: where connections and signals come from, draining. What is behind the application's client
is not its business."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.applications import Starlette

from msaserve.errors import EngineError
from msaserve.gateway.connection import Connection

if TYPE_CHECKING:
    from msaserve.gateway.app import Gateway

_KEEP_ALIVE_SECONDS = 75
"""Idle connections live longer than the pools of common clients keep them, so that none is reused as it closes."""

CUT_SECONDS = 5
"""For requests that were cut to tell their clients; then connections are closed whatever happens on them."""

_GC_THRESHOLD = 20_000
"""Objects made and not freed before the collector looks at them: a request makes hundreds, and few are in cycles."""

_log = logging.getLogger(__name__)


class Entrance(Protocol):
    """Where connections come from, and the word to end."""

    sockets: list[socket.socket]
    """To listen on."""
    on_lost: Callable[[], None] | None
    """Called for every connection that has ended."""

    def begin(self, server: Server) -> None:
        """Before the application starts. From now on `server.stop` or `server.fail` may be called."""
        ...

    def open(self, server: Server) -> None:
        """The application has started."""
        ...

    def close(self) -> None:
        """No connection is to come any more."""
        ...


class Listening:
    """The entrance of the only process: a socket, and SIGTERM or SIGINT. A second signal ends the process at once."""

    on_lost: Callable[[], None] | None = None

    def __init__(self, listener: socket.socket) -> None:
        self.sockets = [listener]

    def begin(self, server: Server) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, server, number)

    def open(self, server: Server) -> None:
        pass

    def close(self) -> None:
        pass

    @staticmethod
    def _stop(server: Server, number: int) -> None:
        if server.is_stopping.is_set():
            os._exit(128 + number)
        server.stop()


async def run(
    app: Starlette,
    entrance: Entrance,
    *,
    drain_seconds: float,
    read_seconds: float,
    on_ready: Callable[[], None],
    cut: Callable[[], Coroutine[Any, Any, None]],
    failure: asyncio.Future[str] | None = None,
) -> None:
    """Serve until the entrance says stop, then let requests in flight end.

    Args:
        app: of `gateway.app.create_app`.
        read_seconds: in which the line and the headers of a request must arrive.
        on_ready: called once requests are accepted.
        cut: ends every request that still runs drain_seconds after the stop.
        failure: why the server cannot go on, once it cannot; it then ends as after a stop.

    Raises:
        EngineError: `failure`, unless a stop came first.
    """
    server = Server(app, entrance, drain_seconds, read_seconds, on_ready)
    entrance.begin(server)
    late = asyncio.create_task(_cut_late(server, drain_seconds, cut))

    def fail(failure: asyncio.Future[str]) -> None:
        if not failure.cancelled():
            server.fail(failure.result())

    if failure is not None:
        failure.add_done_callback(fail)
    try:
        await server.serve(sockets=entrance.sockets)
    finally:
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        if failure is not None:
            failure.remove_done_callback(fail)
    if server.failure is not None:
        raise EngineError(server.failure)


async def _cut_late(server: Server, drain_seconds: float, cut: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await server.is_stopping.wait()
    await asyncio.sleep(drain_seconds)
    _log.warning("requests still run after %g s of draining; ending them", drain_seconds)
    await cut()


class Server(uvicorn.Server):
    """Made by `run`."""

    def __init__(
        self,
        app: Starlette,
        entrance: Entrance,
        drain_seconds: float,
        read_seconds: float,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                http=partial(Connection, read_seconds=read_seconds, on_lost=entrance.on_lost),  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(drain_seconds) + CUT_SECONDS,
            )
        )
        self.gateway: Gateway = app.state.gateway
        self.is_stopping = asyncio.Event()
        self.failure: str | None = None
        self._entrance = entrance
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is there now stays: looking through it again and again took a sixth of a text request's time.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
            self._entrance.open(self)
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._entrance.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end: a server that was asked to stop and did exits with 0."""
        yield

    def new_connection(self) -> Connection:
        """For a socket that another process accepted."""
        config = self.config
        connection: Connection = config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    def stop(self) -> None:
        """Take no more, and end once all is answered."""
        self.is_stopping.set()
        self.gateway.is_draining = True
        self.should_exit = True

    def fail(self, reason: str) -> None:
        """The same, because nothing can be served any more; not once it stops."""
        if self.is_stopping.is_set():
            return
        self.failure = self.gateway.failure = reason
        _log.error("ending: %s", reason)
        self.stop()
