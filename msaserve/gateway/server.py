"""Running the HTTP server: signals, draining. What is behind the application's client is not its business."""

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
from typing import Any

import uvicorn
from starlette.applications import Starlette

from msaserve.errors import EngineError
from msaserve.gateway.connection import Connection

_KEEP_ALIVE_SECONDS = 75
"""Idle connections live longer than the pools of common clients keep them, so that none is reused as it closes."""

_CUT_SECONDS = 5
"""For requests that were cut to tell their clients; then connections are closed whatever happens on them."""

_GC_THRESHOLD = 20_000
"""Objects made and not freed before the collector looks at them: a request makes hundreds, and few are in cycles."""

_log = logging.getLogger(__name__)


async def run(
    app: Starlette,
    listener: socket.socket,
    *,
    drain_seconds: float,
    read_seconds: float,
    on_ready: Callable[[], None],
    cut: Callable[[], Coroutine[Any, Any, None]],
    failure: asyncio.Future[str] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight end. A second signal ends the process at once.

    Args:
        app: of `gateway.app.create_app`.
        read_seconds: in which the line and the headers of a request must arrive.
        on_ready: called once requests are accepted.
        cut: ends every request that still runs drain_seconds after the signal.
        failure: why the server cannot go on, once it cannot; it then ends as after a signal.

    Raises:
        EngineError: `failure`, unless a signal came first.
    """
    server = _Server(app, drain_seconds, read_seconds, on_ready)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop, number)
    late = loop.create_task(_cut_late(server, drain_seconds, cut))
    if failure is not None:
        failure.add_done_callback(server.fail)
    try:
        await server.serve(sockets=[listener])
    finally:
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        if failure is not None:
            failure.remove_done_callback(server.fail)
    if server.failure is not None:
        raise EngineError(server.failure)


async def _cut_late(server: _Server, drain_seconds: float, cut: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await server.is_stopping.wait()
    await asyncio.sleep(drain_seconds)
    _log.warning("requests still run after %g s of draining; ending them", drain_seconds)
    await cut()


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, drain_seconds: float, read_seconds: float, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                http=partial(Connection, read_seconds=read_seconds),  # type: ignore[arg-type]
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(drain_seconds) + _CUT_SECONDS,
            )
        )
        self._app = app
        self._on_ready = on_ready
        self.is_stopping = asyncio.Event()
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is there now stays: looking through it again and again took a third of a text request's time.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end: a server that was asked to stop and did exits with 0."""
        yield

    def stop(self, number: int) -> None:
        if self.is_stopping.is_set():
            os._exit(128 + number)
        self._end()

    def fail(self, failure: asyncio.Future[str]) -> None:
        if self.is_stopping.is_set() or failure.cancelled():
            return
        self.failure = self._app.state.gateway.failure = failure.result()
        _log.error("ending: %s", self.failure)
        self._end()

    def _end(self) -> None:
        self.is_stopping.set()
        self._app.state.gateway.is_draining = True
        self.should_exit = True
