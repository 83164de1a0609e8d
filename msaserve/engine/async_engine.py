"""The engine in a thread of its own, and streams of its tokens for any number of asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from llguidance import LLMatcher

from msaserve.engine.engine import Engine
from msaserve.engine.request import Request
from msaserve.engine.scheduler import RequestOutput
from msaserve.errors import EngineError, InvalidRequestError, OverloadedError
from msaserve.types import EngineLoad, FinishReason, GenerateRequest, Logprobs, ModelInfo, TokenEvent

_log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 1.0
"""Pages and queues are checked once each time the engine has had nothing to do for this long."""


class _Pending:
    """What one output has brought since its reader last looked. A slow reader's tokens pile up in one event."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None


class _Stream:
    """One request's way from the engine's thread (`put`, then `wake` on the reader's loop) to its reader (`take`)."""

    def __init__(self, request: GenerateRequest, compiled: LLMatcher | None) -> None:
        self.request = request
        self.compiled = compiled
        """Of its constraint."""
        self.loop = asyncio.get_running_loop()
        self.refusal: Exception | None = None
        """Why the engine did not take it; set before `wake`, instead of a `put`."""
        self.sequences: list[Request] = []
        self.num_open = request.sampling.n
        """Outputs that the engine has not ended; the engine's thread only."""
        self._pending: dict[int, _Pending] = {}
        self._lock = threading.Lock()
        self._is_ready = asyncio.Event()

    def put(self, index: int, output: RequestOutput) -> None:
        with self._lock:
            pending = self._pending.setdefault(index, _Pending())
            pending.token_ids.extend(output.token_ids)
            pending.logprobs.extend(output.logprobs)
            pending.finish_reason = output.finish_reason
            pending.error = output.error

    def wake(self) -> None:
        """On the reader's loop, after `put`. Admission wakes nobody: it would take the interpreter from the step."""
        self._is_ready.set()

    async def take(self) -> list[TokenEvent]:
        """Wait for something new; at most one event for each output. Raises the refusal."""
        await self._is_ready.wait()
        self._is_ready.clear()
        if self.refusal is not None:
            raise self.refusal
        with self._lock:
            taken, self._pending = self._pending, {}
        return [self._event(index, pending) for index, pending in sorted(taken.items())]

    def _event(self, index: int, pending: _Pending) -> TokenEvent:
        sequence = self.sequences[index]
        return TokenEvent(
            index=index,
            token_ids=tuple(pending.token_ids),
            logprobs=tuple(pending.logprobs),
            finish_reason=pending.finish_reason,
            stop_token_id=sequence.stop_token_id if pending.finish_reason == "stop" else None,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            error=pending.error,
        )


class AsyncEngine:
    """Runs an engine in one thread. Everything public may be awaited on any asyncio loop.

    The engine's thread never waits for a reader. Requests, aborts and closing reach it between steps, in order.
    """

    def __init__(self, engine: Engine) -> None:
        self.info: ModelInfo = engine.info
        self._engine = engine
        self.kv_events = engine.record_kv_events()
        """Of the prefix cache; None if there is none."""
        self._commands: deque[Callable[[], None]] = deque()
        self._has_news = threading.Condition()
        self._is_draining = False
        self._is_closing = False
        self._is_ended = False
        self._failure: str | None = None
        # Only the engine's thread touches these.
        self._streams: dict[str, _Stream] = {}
        self._outputs: dict[Request, tuple[_Stream, int]] = {}
        self._to_wake: dict[_Stream, None] = {}
        self._drains: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="msaserve-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stream the events of all n outputs; closing the iterator aborts what has not ended.

        Raises:
            InvalidRequestError: it can never be served; before any event.
            OverloadedError: the engine drains or its queue is full; before any event.
            EngineError: the engine has stopped; before any event.
        """
        if self._is_draining or self._is_closing:
            raise OverloadedError("the engine is shutting down and takes no new request")
        compiled = None
        if request.sampling.constraint is not None:
            request.sampling.validate(vocab_size=self.info.vocab_size)
            compiled = await asyncio.to_thread(self._engine.grammars.compile, request.sampling.constraint)
        stream = _Stream(request, compiled)
        if not self._submit(lambda: self._add(stream)):
            raise EngineError(self._failure or "the engine is closed")
        num_open = request.sampling.n
        try:
            while True:
                for event in await stream.take():
                    num_open -= event.finish_reason is not None
                    yield event
                if not num_open:
                    return
        finally:
            if num_open:
                self._submit(lambda: self._abort(stream))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its n outputs, if it is there; what is ended ends with finish_reason "abort"."""
        self._submit(lambda: self._abort_id(request_id, index))

    async def load(self) -> EngineLoad:
        return self._engine.load()

    async def flush_prefix_cache(self) -> int:
        """Forget every cached prefix, also of what runs now. Returns how many blocks it forgot.

        Raises:
            EngineError: the engine has stopped.
        """
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not self._submit(lambda: self._flush(flushed)):
            raise EngineError(self._failure or "the engine is closed")
        return await flushed

    async def is_ready(self) -> bool:
        return not (self._is_draining or self._is_closing or self._is_ended)

    async def drain(self) -> None:
        """Take no new request and return when every one in flight has ended."""
        self._is_draining = True
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._submit(lambda: self._drains.append(drained)):
            await drained

    async def close(self) -> None:
        """Abort everything that still runs and end the thread."""
        with self._has_news:
            self._is_closing = True
            self._has_news.notify()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, command: Callable[[], None]) -> bool:
        """Have the engine's thread run a command between two steps. False: it has ended and never will."""
        with self._has_news:
            if self._is_ended:
                return False
            self._commands.append(command)
            self._has_news.notify()
            return True

    # The rest runs in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                self._deliver()  # who was aborted need not wait for the step
                if self._engine.has_work():
                    for output in self._engine.step():
                        self._forward(output)
                self._deliver()
                if not self._engine.has_work():
                    self._rest()
        except BaseException as error:
            _log.exception("the engine has stopped")
            self._failure = f"the engine has stopped: {type(error).__name__}: {error}"
        self._end()

    def _rest(self) -> None:
        """Wait for a command."""
        with self._has_news:
            if self._has_news.wait_for(self._must_wake, IDLE_CHECK_SECONDS):
                return
        self._engine.check_integrity()
        with self._has_news:
            self._has_news.wait_for(self._must_wake)

    def _must_wake(self) -> bool:
        return bool(self._commands) or self._is_closing

    def _run_commands(self) -> None:
        # One by one: what stands behind a command that fails is left for `_end`.
        for _ in range(len(self._commands)):
            self._commands.popleft()()

    def _end(self) -> None:
        """Whatever is or was about to be in flight gets its end, so that no reader waits for ever."""
        with self._has_news:
            self._is_ended = True
        self._run_commands()
        for stream in list(self._streams.values()):
            self._abort(stream)
        self._deliver()
        if self.kv_events is not None:
            self.kv_events.close()

    def _add(self, stream: _Stream) -> None:
        request_id = stream.request.request_id
        try:
            if self._is_ended:
                raise EngineError(self._failure or "the engine is closed")
            if request_id in self._streams:
                raise InvalidRequestError(f"request id {request_id!r} is already in use", param="request_id")
            stream.sequences = self._engine.add(stream.request, stream.compiled)
        except Exception as error:  # one request's fault, whatever it is, is not the others'
            stream.refusal = error
            _call(stream.loop, stream.wake)
            return
        self._streams[request_id] = stream
        self._outputs.update((sequence, (stream, index)) for index, sequence in enumerate(stream.sequences))

    def _abort_id(self, request_id: str, index: int | None) -> None:
        if request_id in self._streams:
            self._abort(self._streams[request_id], index)

    def _abort(self, stream: _Stream, only: int | None = None) -> None:
        for index, sequence in enumerate(stream.sequences):
            if sequence not in self._outputs or only not in (None, index):
                continue
            if self._failure is None:
                self._engine.abort(sequence)
                self._forward(RequestOutput(sequence, finish_reason="abort"))
            else:
                self._forward(RequestOutput(sequence, finish_reason="error", error=self._failure))

    def _flush(self, flushed: asyncio.Future[int]) -> None:
        if self._is_ended:
            _settle(flushed, EngineError(self._failure or "the engine is closed"))
            return
        try:
            _settle(flushed, result=self._engine.flush_prefix_cache())
        except BaseException as error:  # the engine ends of it, and whoever waits hears why
            _settle(flushed, EngineError(f"the engine has stopped: {type(error).__name__}: {error}"))
            raise

    def _forward(self, output: RequestOutput) -> None:
        stream, index = self._outputs[output.request]
        stream.put(index, output)
        self._to_wake[stream] = None
        if output.finish_reason is not None:
            del self._outputs[output.request]
            stream.num_open -= 1
            if stream.num_open == 0:
                del self._streams[stream.request.request_id]

    def _deliver(self) -> None:
        """Wake the readers of what came in: one call for each loop, however many streams it reads."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[_Stream]] = defaultdict(list)
        for stream in self._to_wake:
            by_loop[stream.loop].append(stream)
        self._to_wake.clear()
        for loop, streams in by_loop.items():
            if not _call(loop, _wake, streams):
                for stream in streams:  # its reader is gone for good
                    self._abort(stream)
        if self._drains and not self._streams:
            for drained in self._drains:
                _settle(drained)
            self._drains.clear()


def _wake(streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.wake()


def _settle(future: asyncio.Future[Any], error: Exception | None = None, result: Any = None) -> None:
    """Give a future its result from another thread, unless its waiter has gone."""

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    _call(future.get_loop(), settle)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> bool:
    """Run a function on a loop; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
