"""Between ASGI and the endpoints: errors and event streams out, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from msaserve.errors import (
    BusyError,
    EngineError,
    InvalidRequestError,
    MsaserveError,
    OverloadedError,
    TooLargeError,
)
from msaserve.gateway.apis.openai import ErrorBody

_log = logging.getLogger(__name__)

T = TypeVar("T")

HEADER_DELAY_SECONDS = 2.0
"""How long the headers of a stream wait for its first event, so that a refusal still gets its own status."""
KEEP_ALIVE_SECONDS = 15.0
"""A stream with nothing to say for this long sends a comment: proxies cut silent connections during long prompts."""


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete. There is nobody to tell."""


class NoSuchModelError(HTTPException):
    """A request for a model that this server does not serve."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(404, f"the model {name!r} does not exist; this server serves {served!r}")


def error_of(error: BaseException) -> tuple[int, ErrorBody]:
    """HTTP status and error object for what went wrong."""
    if isinstance(error, InvalidRequestError):
        return 413 if isinstance(error, TooLargeError) else 400, ErrorBody(
            str(error), "invalid_request_error", error.param, error.code
        )
    if isinstance(error, HTTPException):
        if isinstance(error, NoSuchModelError):
            return 404, ErrorBody(error.detail, "invalid_request_error", "model", "model_not_found")
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error.status_code, ErrorBody(error.detail, kind, code=_CODES.get(error.status_code))
    if isinstance(error, BusyError):
        return 429, ErrorBody(str(error), "rate_limit_error", code="busy")
    if isinstance(error, OverloadedError):
        return 503, ErrorBody(str(error), "server_error", code="overloaded")
    if isinstance(error, EngineError):
        return 500, ErrorBody(str(error), "server_error", code="engine_error")
    return 500, ErrorBody("internal error; the server's log has the details", "server_error", code="internal_error")


_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
}


def server_event(data: bytes, name: str = "") -> bytes:
    """One server-sent event, as it is sent. data: without line breaks."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"


@dataclass(frozen=True)
class Dialect:
    """How an API says what is no answer."""

    error: Callable[[int, ErrorBody], bytes]
    """The body of a response, for its status."""
    error_event: Callable[[int, ErrorBody], bytes]
    """What ends a stream that fails."""
    keep_alive: bytes = b": keep-alive\n\n"
    """What a silent stream sends."""


OPENAI = Dialect(lambda status, body: body.encode(), lambda status, body: server_event(body.encode()))


def error_response(error: BaseException, dialect: Dialect = OPENAI) -> Response:
    status, body = error_of(error)
    log_failure(error, status)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status in (429, 503):
        headers["retry-after"] = "1"
    return Response(dialect.error(status, body), status, headers, media_type="application/json")


def log_failure(error: BaseException, status: int) -> None:
    if isinstance(error, MsaserveError):
        if status >= 500:
            _log.error("request failed: %s", error)
    elif status >= 500:
        _log.error("request failed", exc_info=error)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], *, is_sent: Callable[[], bool] = lambda: False
) -> T:
    """The result of `work`, which is cancelled when the client goes away (the body must have been read).

    is_sent: whether `work` has sent all of an answer. `receive` says of that too that the client is gone.

    Raises:
        ClientGoneError: it went away first.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = asyncio.ensure_future(_disconnected(receive))
    is_over = has_left = False

    def leave(gone: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not (is_over or gone.cancelled() or is_sent()):
            has_left = True
            task.cancel()

    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left:
            raise
        uncancel(task)
        raise ClientGoneError from None
    finally:
        is_over = True
        gone.cancel()


def uncancel(task: asyncio.Task[Any]) -> None:
    """Take back a cancellation that was caught and meant for a part of the task alone."""
    if sys.version_info >= (3, 11):
        task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events; an ASGI application like Starlette's own responses.

    An error before the output began is answered with its own status; a later one ends the stream with an error event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        dialect: Dialect = OPENAI,
        *,
        has_begun: Callable[[], bool] = lambda: False,
    ) -> None:
        """events: as `server_event` makes them. has_begun: the output did, though no event may have shown it yet."""
        self._events = events
        self._has_begun = has_begun
        self._dialect = dialect
        self._last_sent = 0.0
        self._is_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._send_all(scope, receive, send)
            await until_disconnect(receive, work, is_sent=lambda: self._is_sent)
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = asyncio.ensure_future(anext(self._events, None))
        try:
            await asyncio.wait({first}, timeout=HEADER_DELAY_SECONDS)
            error = first.exception() if first.done() else None
            if error is not None and not self._has_begun():
                self._is_sent = True
                await error_response(error, self._dialect)(scope, receive, send)
                return
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"),
                        (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"),
                    ],
                }
            )
            await self._send_events(first, send)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _send_events(self, first: asyncio.Future[bytes | None], send: Send) -> None:
        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            event = await first
            while event is not None:
                await self._send(send, event)
                event = await anext(self._events, None)
        except Exception as error:
            status, body = error_of(error)
            log_failure(error, status)
            await self._send(send, self._dialect.error_event(status, body))
        finally:
            keep_alive.cancel()
            await asyncio.gather(keep_alive, return_exceptions=True)
        self._is_sent = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        self._last_sent = time.monotonic()
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if time.monotonic() - self._last_sent >= KEEP_ALIVE_SECONDS * 0.9:
                await self._send(send, self._dialect.keep_alive)
