"""Several workers of one model as one EngineClient: which of them takes a request, and what happens when one fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from msaserve.errors import BusyError, EngineError, InvalidRequestError, MsaserveError, OverloadedError
from msaserve.gateway.client import Breaker, EngineClient, WorkerState
from msaserve.gateway.kv_index import KvEventSource, KvIndex, PromptBlocks, follow
from msaserve.gateway.processes.board import InFlight, OwnInFlight
from msaserve.types import GenerateRequest, ModelInfo, TokenEvent

_log = logging.getLogger(__name__)

Policy = Literal["prefix", "least_load", "round_robin"]

HEALTH_SECONDS = 2.0
SEGMENT_TOKENS = 256
"""What a worker was sent is remembered in steps of this many tokens."""
MAX_SEGMENTS = 200_000
"""Remembered for each worker, least recently used first forgotten."""
_EVENT_SECONDS = 2.0
"""Of a worker that sends KV events only what it was sent this recently is counted besides: they may be on their way."""
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
    number: int
    name: str
    client: EngineClient
    clock: Callable[[], float]
    is_ready: bool = True
    """By the last health check."""
    num_active: int = 0
    """Outputs that this gateway has in flight there."""
    num_requests: int = 0
    num_retries: int = 0
    """Requests that brought nothing here and went elsewhere."""
    num_failures: int = 0
    """In a row."""
    paused_until: float = 0.0
    segments: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    """Digests of prompts' beginnings that it was sent, and when."""
    blocks: KvIndex = field(init=False)
    """What it says it holds."""

    def __post_init__(self) -> None:
        self.blocks = KvIndex(on_clear=self.segments.clear)

    @property
    def is_available(self) -> bool:
        return self.is_ready and self.clock() >= self.paused_until

    @property
    def breaker(self) -> Breaker:
        if self.clock() < self.paused_until:
            return Breaker.OPEN
        return Breaker.HALF_OPEN if self.paused_until else Breaker.CLOSED

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

    def num_known(self, prompt: PromptBlocks) -> int:
        """How many tokens of a prompt's beginning it holds: by what it says, or else by what it was sent."""
        earliest = self.clock() - _EVENT_SECONDS if self.blocks.is_known else -math.inf
        num_sent = 0
        for digest in prompt.digests(SEGMENT_TOKENS):
            if self.segments.get(digest, -math.inf) <= earliest:
                break
            num_sent += SEGMENT_TOKENS
        return max(num_sent, self.blocks.num_tokens(prompt))

    def remember(self, prompt: PromptBlocks) -> Callable[[], None]:
        """It is sent a prompt. Returns what undoes this, for a worker that does not take it."""
        now = self.clock()
        before = {digest: self.segments.get(digest) for digest in prompt.digests(SEGMENT_TOKENS)}
        for digest in before:
            self.segments[digest] = now
            self.segments.move_to_end(digest)
        while len(self.segments) > MAX_SEGMENTS:
            self.segments.popitem(last=False)

        def undo() -> None:
            for digest, then in before.items():
                if self.segments.get(digest) != now:
                    continue  # it was sent again since
                if then is None:
                    del self.segments[digest]
                else:
                    self.segments[digest] = then

        return undo


class Router:
    """`gateway.client.EngineClient` of several workers that serve the same model. Made inside a running event loop.

    - policy "prefix": the worker that holds most of the prompt's beginning, by its KV events or, if it sends none, by
      what it was sent before; of several the idlest, and none that is much busier than the idlest of all. "least_load":
      the idlest by the outputs in flight, of all gateway processes; "round_robin": the next in turn.
    - A request that has brought nothing yet goes to another worker when its own refuses or fails. What fails later
      ends the stream, and no other stream.
    - A worker that fails gets nothing new for a while, and one that is not healthy nothing until it is.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, EngineClient]],
        *,
        policy: Policy = "prefix",
        in_flight: InFlight | None = None,
        first_turn: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        workers: names for logs, and clients, which the router owns.
        in_flight: of all gateway processes, whose requests count as load too. None: there is no other process.
        first_turn: where turns begin, so that several processes do not all begin with the same worker.
        clock: seconds.
        """
        assert workers
        self._in_flight = in_flight or OwnInFlight(len(workers))
        self._backends = [_Backend(i, name, client, clock) for i, (name, client) in enumerate(workers)]
        self._policy = policy
        self._is_prefix_affine = policy == "prefix" and len(workers) > 1
        self._turn = first_turn
        self._running: dict[str, _Backend] = {}
        self._health = asyncio.create_task(self._check_forever())
        self._followers = [
            asyncio.create_task(follow(backend.client, backend.blocks, name=backend.name))
            for backend in self._backends
            if self._is_prefix_affine and isinstance(backend.client, KvEventSource)
        ]

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
        prompt = PromptBlocks(request) if self._is_prefix_affine else None
        tried: list[_Backend] = []
        num_engine_failures = 0
        while True:
            backend = self._choose(prompt, tried)
            tried.append(backend)
            try:
                async with aclosing(self._events(backend, request, prompt)) as events:
                    async for event in events:
                        yield event
                return
            except _NothingCameError as failure:
                error = failure.error
            if isinstance(error, EngineError):
                num_engine_failures += 1
            if num_engine_failures == _MAX_ENGINE_FAILURES or len(tried) == len(self._backends):
                raise error
            backend.num_retries += 1

    async def abort(self, request_id: str) -> None:
        backend = self._running.get(request_id)
        if backend is not None:
            await backend.client.abort(request_id)

    def tallies(self) -> list[WorkerState]:
        return [
            WorkerState(
                backend.name,
                num_active=backend.num_active,
                num_requests=backend.num_requests,
                num_retries=backend.num_retries,
                num_failures=backend.num_failures,
                breaker=backend.breaker,
                num_indexed_blocks=len(backend.blocks),
            )
            for backend in self._backends
        ]

    async def workers(self) -> list[WorkerState]:
        answers = await asyncio.gather(*(backend.client.workers() for backend in self._backends))
        return [
            tally._replace(is_ready=state.is_ready, load=state.load)
            for tally, (state,) in zip(self.tallies(), answers, strict=True)
        ]

    async def is_ready(self) -> bool:
        return any(await asyncio.gather(*(b.client.is_ready() for b in self._backends)))

    async def drain(self) -> None:
        await asyncio.gather(*(b.client.drain() for b in self._backends))

    async def close(self) -> None:
        for task in (self._health, *self._followers):
            task.cancel()
        await asyncio.gather(*(b.client.close() for b in self._backends))

    def _choose(self, prompt: PromptBlocks | None, tried: Sequence[_Backend]) -> _Backend:
        untried = [backend for backend in self._backends if backend not in tried]
        # If all seem to be down, one of them may be the first to be back.
        candidates = [backend for backend in untried if backend.is_available] or untried
        self._turn += 1
        # Ties go round.
        candidates = [candidates[(self._turn + i) % len(candidates)] for i in range(len(candidates))]
        if self._policy == "round_robin":
            return candidates[0]
        loads = {backend: self._in_flight.total(backend.number) for backend in candidates}
        idlest = min(candidates, key=lambda backend: loads[backend])
        if prompt is None:
            return idlest
        num_known = {backend: backend.num_known(prompt) for backend in candidates}
        home = max(candidates, key=lambda backend: (num_known[backend], -loads[backend]))
        is_too_busy = loads[home] > 1.5 * loads[idlest] + _SPARE_REQUESTS
        return idlest if is_too_busy or not num_known[home] else home

    async def _events(
        self, backend: _Backend, request: GenerateRequest, prompt: PromptBlocks | None
    ) -> AsyncGenerator[TokenEvent, None]:
        """Raises _NothingCameError for what may be tried elsewhere."""
        self._count(backend, request.sampling.n)
        backend.num_requests += 1
        self._running[request.request_id] = backend
        # At once, and not when it answers: what comes meanwhile with the same beginning belongs there too.
        forget = None if prompt is None else backend.remember(prompt)
        events = backend.client.generate(request)
        has_begun = False
        try:
            async for event in events:
                if not has_begun:
                    has_begun = True
                    backend.succeed()
                yield event
        except (InvalidRequestError, OverloadedError, EngineError) as error:
            if has_begun:
                raise
            if forget is not None:
                forget()
            if isinstance(error, InvalidRequestError):
                raise
            backend.fail(error)
            raise _NothingCameError(error) from error
        finally:
            await events.aclose()
            self._count(backend, -request.sampling.n)
            if self._running.get(request.request_id) is backend:
                del self._running[request.request_id]

    def _count(self, backend: _Backend, num_outputs: int) -> None:
        backend.num_active += num_outputs
        self._in_flight.add(backend.number, num_outputs)

    async def _check_forever(self) -> None:
        while True:
            await asyncio.gather(*(self._check(backend) for backend in self._backends))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _check(self, backend: _Backend) -> None:
        try:
            is_ready = await backend.client.is_ready()
        except Exception as error:  # whatever it is, the others must be asked, and this one again
            is_ready = False
            if not isinstance(error, MsaserveError):
                _log.exception("worker %s cannot be asked whether it is healthy", backend.name)
        if is_ready != backend.is_ready:
            _log.warning("worker %s is %s", backend.name, "ready" if is_ready else "not ready")
            if is_ready:
                backend.succeed()
        backend.is_ready = is_ready


class _NothingCameError(Exception):
    def __init__(self, error: OverloadedError | EngineError) -> None:
        super().__init__(str(error))
        self.error = error
