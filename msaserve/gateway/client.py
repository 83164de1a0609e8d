"""The one interface through which the HTTP side reaches engines: one worker by gRPC, or several by a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import IntEnum
from typing import NamedTuple, Protocol

from msaserve.types import EngineLoad, GenerateRequest, ModelInfo, TokenEvent


class Breaker(IntEnum):
    """Whether a worker gets requests."""

    CLOSED = 0
    """It does."""
    OPEN = 1
    """It failed and gets none for a while."""
    HALF_OPEN = 2
    """The next one shows whether it is back."""


class WorkerState(NamedTuple):
    """A worker as this gateway sees it."""

    name: str
    is_ready: bool | None = None
    """None: it was not asked."""
    num_active: int = 0
    """Outputs that this gateway has in flight there."""
    num_requests: int = 0
    """Sent there so far."""
    num_retries: int = 0
    """Of them those that brought nothing and were sent elsewhere."""
    num_failures: int = 0
    """In a row."""
    breaker: Breaker = Breaker.CLOSED
    num_indexed_blocks: int = 0
    """That it holds, by its KV events."""
    load: EngineLoad | None = None
    """None if it cannot be asked, or was not."""


class EngineClient(Protocol):
    """An engine, wherever it runs."""

    async def model_info(self) -> ModelInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stream the events of all `n` outputs of a request, each index ending with a finish_reason.

        Closing the generator (or cancelling the task that reads it) aborts the request and frees its pages.

        Raises:
            InvalidRequestError: it can never be served (too long, token ids out of range, …); before any event.
            OverloadedError: the engine drains or its queue is full (BusyError); before any event.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request, if it is there; its stream ends with finish_reason "abort"."""
        ...

    def tallies(self) -> list[WorkerState]:
        """What is known here of every worker behind this: none is asked."""
        ...

    async def workers(self) -> list[WorkerState]:
        """The same, and what every worker says. Raises nothing: who cannot be asked says so by having no load."""
        ...

    async def is_ready(self) -> bool: ...

    async def drain(self) -> None:
        """Take no new request and return when every one in flight has ended."""
        ...

    async def close(self) -> None:
        """End everything that still runs and free the engine."""
        ...
