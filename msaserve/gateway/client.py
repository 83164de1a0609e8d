"""The one interface through which the HTTP side reaches engines: one worker by gRPC, or several by a router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from msaserve.types import EngineLoad, GenerateRequest, ModelInfo, TokenEvent


class EngineClient(Protocol):
    """An engine, wherever it runs."""

    async def model_info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream the events of all `n` outputs of a request, each index ending with a finish_reason.

        Closing the iterator (or cancelling the task that reads it) aborts the request and frees its pages.

        Raises:
            InvalidRequestError: it can never be served (too long, token ids out of range, …); before any event.
            OverloadedError: the engine drains or its queue is full; before any event.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request, if it is there; its stream ends with finish_reason "abort"."""
        ...

    async def load(self) -> EngineLoad: ...

    async def is_ready(self) -> bool: ...

    async def drain(self) -> None:
        """Take no new request and return when every one in flight has ended."""
        ...

    async def close(self) -> None:
        """End everything that still runs and free the engine."""
        ...
