"""Several workers of one model as one EngineClient: which of them takes a request, and what happens when one fails."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import msgspec

from msaserve.errors import BusyError, EngineError, InvalidRequestError, MsaserveError, OverloadedError
from msaserve.gateway.client import EngineClient
from msaserve.types import EngineLoad, GenerateRequest, ModelInfo, TokenEvent

_log = logging.getLogger(__name__)

Policy = Literal["prefix", "least_load", "round_robin"]

HEALTH_SECONDS = 2.0
SEGMENT_TOKENS = 256
"""Prompts are compared in steps of this many tokens."""
MAX_SEGMENTS = 200_000
"""Remembered for each worker, least recently used first forgotten."""
_SPARE_REQUESTS = 4
"""A worker that has a request's prefix is passed by when it is half again and this much busier than the idlest."""
_MAX_ENGINE_FAILURES = 2
"""Workers a request may fail in before it is taken for the cause."""
_FORGIVEN_FAILURES = 2
"""Engine errors in a row, without a success between them."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds for which a worker that failed gets nothing new; doubled with every failure in a row."""


@dataclass(eq=False)
class _Backend:
    name: str
    client: EngineClient
    clock: Callable[[], float]
    is_ready: bool = True
    """By the last health check."""
    num_active: int = 0
    """Outputs that this gateway has in flight there."""
    num_failures: int = 0
    """In a row."""
    paused_until: float = 0.0
    segments: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Digests of prompts' beginnings that it was sent."""

    @property
    def is_available(self) -> bool:
        return self.is_ready and self.clock() >= self.paused_until

    def fail(self, error: OverloadedError | EngineError) -> None:
        """It could not take a request. One that is merely busy is not at fault, and a request may fail by itself."""
        if isinstance(error, BusyError):
            return
        self.num_failures += 1
        if isinstance(error, EngineError) and self.num_failures <= _FORGIVEN_FAILURES:
            return
        pause = min(_FIRST_PAUSE * 2 ** min(self.num_failures - 1, 10), _LONGEST_PAUSE)
        self.paused_until = self.clock() + pause
        _log.warning("worker %s failed and gets nothing for %.1f s: %s", self.name, pause, error)

    def succeed(self) -> None:
        self.num_failures = 0
        self.paused_until = 0.0

    def num_known(self, digests: Sequence[bytes]) -> int:
        """How many of a prompt's segments it has seen, from the first on."""
        for count, digest in enumerate(digests):
            if digest not in self.segments:
                return count
        return len(digests)

    def remember(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.segments[digest] = None
            self.segments.move_to_end(digest)
        while len(self.segments) > MAX_SEGMENTS:
            self.segments.popitem(last=False)


class Router:
    """`gateway.client.EngineClient` of several workers that serve the same model. Made inside a running event loop.

    - policy "prefix": the worker that was sent most of the prompt's beginning before, unless it is much busier than the
      idlest; "least_load": the idlest by the outputs in flight; "round_robin": the next in turn.
    - A request that has brought nothing yet goes to another worker when its own refuses or fails. What fails later
      ends the stream, and no other stream.
    - A worker that fails gets nothing new for a while, and one that is not healthy nothing until it is.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, EngineClient]],
        *,
        policy: Policy = "prefix",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """workers: names for logs, and clients, which the router owns. clock: seconds."""
        assert workers
        self._backends = [_Backend(name, client, clock) for name, client in workers]
        self._policy = policy
        self._turn = 0
        self._running: dict[str, _Backend] = {}
        self._health = asyncio.create_task(self._check_forever())

    async def model_info(self) -> ModelInfo:
        """Of all workers that can be reached.

        Raises:
            OverloadedError: none can.
            EngineError: they serve different models.
        """
        answers = await asyncio.gather(*(b.client.model_info() for b in self._backends), return_exceptions=True)
        infos = [answer for answer in answers if isinstance(answer, ModelInfo)]
        if not infos:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        shortest = min(info.max_model_len for info in infos)
        alike = {msgspec.structs.replace(info, max_model_len=shortest) for info in infos}
        if len(alike) > 1:
            raise EngineError("the workers serve different models")
        return alike.pop()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Raises what the last worker that was tried raised, before any event."""
        digests = _digests(request) if self._policy == "prefix" and len(self._backends) > 1 else []
        tried: list[_Backend] = []
        num_engine_failures = 0
        while True:
            backend = self._choose(digests, tried)
            tried.append(backend)
            try:
                async with aclosing(self._events(backend, request, digests)) as events:
                    async for event in events:
                        yield event
                return
            except _NothingCameError as failure:
                error = failure.error
            if isinstance(error, EngineError):
                num_engine_failures += 1
            if num_engine_failures == _MAX_ENGINE_FAILURES or len(tried) == len(self._backends):
                raise error

    async def abort(self, request_id: str) -> None:
        backend = self._running.get(request_id)
        if backend is not None:
            await backend.client.abort(request_id)

    async def load(self) -> EngineLoad:
        """The sum over the workers that can be reached. Raises OverloadedError if none can."""
        answers = await asyncio.gather(*(b.client.load() for b in self._backends), return_exceptions=True)
        loads = [answer for answer in answers if isinstance(answer, EngineLoad)]
        if not loads:
            raise OverloadedError("no worker can be reached")
        fields = EngineLoad.__struct_fields__
        return EngineLoad(**{name: sum(getattr(load, name) for load in loads) for name in fields})

    async def is_ready(self) -> bool:
        return any(await asyncio.gather(*(b.client.is_ready() for b in self._backends)))

    async def drain(self) -> None:
        await asyncio.gather(*(b.client.drain() for b in self._backends))

    async def close(self) -> None:
        self._health.cancel()
        await asyncio.gather(*(b.client.close() for b in self._backends))

    def _choose(self, digests: Sequence[bytes], tried: Sequence[_Backend]) -> _Backend:
        untried = [backend for backend in self._backends if backend not in tried]
        # If all seem to be down, one of them may be the first to be back.
        candidates = [backend for backend in untried if backend.is_available] or untried
        self._turn += 1
        # Ties go round.
        candidates = [candidates[(self._turn + i) % len(candidates)] for i in range(len(candidates))]
        if self._policy == "round_robin":
            return candidates[0]
        idlest = min(candidates, key=lambda backend: backend.num_active)
        if not digests:
            return idlest
        known = max(candidates, key=lambda backend: backend.num_known(digests))
        is_too_busy = known.num_active > 1.5 * idlest.num_active + _SPARE_REQUESTS
        return idlest if is_too_busy or not known.num_known(digests) else known

    async def _events(
        self, backend: _Backend, request: GenerateRequest, digests: Sequence[bytes]
    ) -> AsyncGenerator[TokenEvent, None]:
        """Raises _NothingCameError for what may be tried elsewhere."""
        backend.num_active += request.sampling.n
        self._running[request.request_id] = backend
        events = backend.client.generate(request)
        has_begun = False
        try:
            async for event in events:
                if not has_begun:
                    has_begun = True
                    backend.remember(digests)
                    backend.succeed()
                yield event
        except InvalidRequestError:
            raise
        except (OverloadedError, EngineError) as error:
            if has_begun:
                raise
            backend.fail(error)
            raise _NothingCameError(error) from error
        finally:
            await _close(events)
            backend.num_active -= request.sampling.n
            if self._running.get(request.request_id) is backend:
                del self._running[request.request_id]

    async def _check_forever(self) -> None:
        while True:
            await asyncio.gather(*(self._check(backend) for backend in self._backends))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _check(self, backend: _Backend) -> None:
        try:
            is_ready = await backend.client.is_ready()
        except MsaserveError:
            is_ready = False
        if is_ready != backend.is_ready:
            _log.warning("worker %s is %s", backend.name, "ready" if is_ready else "not ready")
            if is_ready:
                backend.succeed()
        backend.is_ready = is_ready


class _NothingCameError(Exception):
    def __init__(self, error: OverloadedError | EngineError) -> None:
        super().__init__(str(error))
        self.error = error


def _digests(request: GenerateRequest) -> list[bytes]:
    """Chained digests of the prompt's whole segments: equal up to where two prompts, with their media, are."""
    token_ids = array("i", request.prompt_token_ids)
    media = sorted(request.media, key=lambda item: item.offset)
    digest = blake2b(request.cache_salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    digests = []
    for start in range(0, len(token_ids) - SEGMENT_TOKENS + 1, SEGMENT_TOKENS):
        end = start + SEGMENT_TOKENS
        state = blake2b(digest, digest_size=16)
        state.update(token_ids[start:end].tobytes())
        for item in media:
            if item.offset < end and item.offset + item.length > start:
                state.update(item.content_hash)
        digest = state.digest()
        digests.append(digest)
    return digests


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()
