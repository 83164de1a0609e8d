"""An engine of this process behind the interface of one that is reached by gRPC: for tests of one side alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msaserve.engine.async_engine import AsyncEngine
from msaserve.gateway.client import WorkerState
from msaserve.types import EngineLoad, GenerateRequest, ModelInfo, TokenEvent


class InProcessClient:
    """`gateway.client.EngineClient` over an engine of this process, which it owns: `close` ends it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def model_info(self) -> ModelInfo:
        return self._engine.info

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        return self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    def tallies(self) -> list[WorkerState]:
        return [WorkerState("in process")]

    async def workers(self) -> list[WorkerState]:
        return [WorkerState("in process", await self.is_ready(), load=await self.load())]

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def is_ready(self) -> bool:
        return await self._engine.is_ready()

    async def drain(self) -> None:
        await self._engine.drain()

    async def close(self) -> None:
        await self._engine.close()
