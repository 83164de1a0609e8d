"""The worker process: the gRPC server around an engine, its health, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc as services

from msaserve.engine.async_engine import AsyncEngine
from msaserve.errors import AddressError, EngineError
from msaserve.observe.trace import Tracer
from msaserve.rpc.protocol import SERVER_OPTIONS, SERVICE
from msaserve.worker.served import ServedModel
from msaserve.worker.servicer import Servicer

_OBSERVE_SECONDS = 1.0
_RATE_WINDOW = 10
"""Observations over which the rate of output is taken."""
_END_SECONDS = 2
"""What calls that were aborted have to hear of it."""


class WorkerServer:
    """Serves an engine, which it owns, to gateways. Made inside a running event loop."""

    def __init__(self, engine: AsyncEngine, model: ServedModel, tracer: Tracer | None = None) -> None:
        self._engine = engine
        self._counts: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW + 1)
        self._server: Any = grpc.aio.server(options=SERVER_OPTIONS)
        self._health: Any = health.aio.HealthServicer()
        services.add_VllmEngineServicer_to_server(
            Servicer(engine, model, tokens_per_second=self._tokens_per_second, tracer=tracer), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._observer: asyncio.Task[None] | None = None
        self._is_draining = False
        self.engine_stopped = asyncio.Event()
        """Set once the engine has ended without having been asked to."""

    async def start(self, address: str) -> int:
        """Listen on "host:port" (port 0 takes a free one) or "unix:/path" and answer. Returns the port.

        Raises:
            AddressError: the port is in use, or the address is not this machine's.
        """
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise AddressError(f"cannot listen on {address}: {error}") from error
        await self._observe()
        await self._server.start()
        self._observer = asyncio.create_task(self._observe_forever())
        return port

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, say so to health checks, and wait for those in flight, no longer than `seconds`."""
        self._is_draining = True
        drained = asyncio.create_task(self._engine.drain())
        await asyncio.sleep(0)  # let it begin: from here on the engine refuses
        await self._health.enter_graceful_shutdown()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(drained, seconds)

    async def close(self) -> None:
        """Abort what still runs, tell its callers, and stop."""
        if self._observer is not None:
            self._observer.cancel()
        await self._engine.close()
        await self._server.stop(_END_SECONDS)

    async def _observe_forever(self) -> None:
        while True:
            await asyncio.sleep(_OBSERVE_SECONDS)
            await self._observe()

    async def _observe(self) -> None:
        load = await self._engine.load()
        self._counts.append((time.monotonic(), load.num_output_tokens))
        status = health_pb2.HealthCheckResponse
        is_ready = await self._engine.is_ready()
        if not is_ready and not self._is_draining:
            self.engine_stopped.set()
        state = status.SERVING if is_ready else status.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, state)

    def _tokens_per_second(self) -> float:
        (start, before), (end, after) = self._counts[0], self._counts[-1]
        return (after - before) / (end - start) if end > start else 0.0


async def run(
    engine: AsyncEngine,
    model: ServedModel,
    address: str,
    *,
    stop: asyncio.Event,
    drain_seconds: float,
    on_ready: Callable[[int], None],
    tracer: Tracer | None = None,
) -> None:
    """Serve until `stop` is set, then let requests in flight end for drain_seconds.

    on_ready: called with the port once requests are accepted.

    Raises:
        AddressError: see WorkerServer.start.
        EngineError: the engine has stopped by itself; every stream was told.
    """
    server = WorkerServer(engine, model, tracer)
    try:
        on_ready(await server.start(address))
        ends = [asyncio.create_task(event.wait()) for event in (stop, server.engine_stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if server.engine_stopped.is_set():
            raise EngineError("the engine has stopped")
        await server.drain(drain_seconds)
    finally:
        await server.close()


def stop_on_signals() -> asyncio.Event:
    """Set by SIGTERM or SIGINT. A second signal exits at once. Called inside a running event loop."""
    asked_to_stop = asyncio.Event()

    def stop(number: int) -> None:
        if asked_to_stop.is_set():
            os._exit(128 + number)
        asked_to_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return asked_to_stop
