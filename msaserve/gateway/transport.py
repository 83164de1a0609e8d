"""Between ASGI and the endpoints: errors and event streams out, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

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


_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


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


class Posts:
    """POST to a path that is a route is answered at once: Starlette's way takes longer than reading the request."""

    def __init__(self, routes: Sequence[Route], router: ASGIApp) -> None:
        """router: for everything else."""
        self._endpoints = {route.path: route.endpoint for route in routes if "POST" in (route.methods or ())}
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None:
            await self._router(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


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


class Departure:
    """Tells that a client has gone, without a task that waits for it: `scope["state"]["departure"]`, if it is there."""

    def __init__(self, listen: Callable[[], None]) -> None:
        """listen: called when somebody wants to know."""
        self._listen = listen
        self._is_gone = False
        self._leave: Callable[[], None] | None = None

    def watch(self, leave: Callable[[], None]) -> None:
        """leave: called once it has gone, also if it has already."""
        if self._is_gone:
            leave()
        else:
            self._leave = leave
            self._listen()

    def unwatch(self) -> None:
        self._leave = None

    def happen(self) -> None:
        self._is_gone = True
        if self._leave is not None:
            self._leave()


async def until_disconnect(
    scope: Scope, receive: Receive, work: Coroutine[Any, Any, T], *, is_sent: Callable[[], bool] = lambda: False
) -> T:
    """The result of `work`, which is cancelled when the client goes away (the body must have been read).

    is_sent: whether `work` has sent all of an answer. `receive` says of that too that the client is gone.

    Raises:
        ClientGoneError: it went away first.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = has_left = False

    def leave() -> None:
        nonlocal has_left
        if not (is_over or has_left or is_sent()):
            has_left = True
            task.cancel()

    departure: Departure | None = scope.get("state", {}).get("departure")
    if departure is not None:
        departure.watch(leave)
        stop: Callable[[], object] = departure.unwatch
    else:
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(lambda gone: None if gone.cancelled() else leave())
        stop = gone.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left:
            raise
        uncancel(task)
        raise ClientGoneError from None
    finally:
        is_over = True
        stop()


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
        self._has_headers = False
        self._is_sent = False
        self._timer: asyncio.TimerHandle
        """Of early headers, then of comments that keep the connection alive."""
        self._aside: asyncio.Task[None] | None = None
        """What a timer sends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._send_all(scope, receive, send)
            await until_disconnect(scope, receive, work, is_sent=lambda: self._is_sent)
        finally:
            await self._events.aclose()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEADER_DELAY_SECONDS, self._begin_early, send)
        try:
            event = await anext(self._events, None)
            await self._begin(send)
            while event is not None:
                await self._send(send, event)
                event = await anext(self._events, None)
        except Exception as error:
            status, body = error_of(error)
            if not self._has_headers and not self._has_begun():
                self._is_sent = True
                await error_response(error, self._dialect)(scope, receive, send)
                return
            log_failure(error, status)
            await self._begin(send)
            await self._send(send, self._dialect.error_event(status, body))
        finally:
            self._timer.cancel()
            if self._aside is not None:
                self._aside.cancel()
        self._is_sent = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        """Send the headers, if they are not sent."""
        if self._aside is not None:
            await self._aside
        if not self._has_headers:
            await self._send_headers(send)

    async def _send_headers(self, send: Send) -> None:
        self._has_headers = True
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._keep_alive, send)
        self._last_sent = time.monotonic()
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})

    def _begin_early(self, send: Send) -> None:
        self._has_headers = True
        self._aside = asyncio.ensure_future(self._send_headers(send))

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    def _keep_alive(self, send: Send) -> None:
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_SECONDS, self._keep_alive, send)
        is_idle = self._aside is None or self._aside.done()
        if is_idle and time.monotonic() - self._last_sent >= KEEP_ALIVE_SECONDS * 0.9:
            self._aside = asyncio.ensure_future(self._send(send, self._dialect.keep_alive))


class JsonBody:
    """A response of JSON, status 200; an ASGI application, made in less time than Starlette's."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = b"%d" % len(self._body)
        headers = [(b"content-length", size), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})
