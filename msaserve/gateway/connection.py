"""A client's HTTP connection: uvicorn's, with a bound on requests that never begin, and answers sent in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from msaserve.gateway.apis.openai import ErrorBody
from msaserve.gateway.transport import Departure

_MAX_HEAD_BYTES = 65_536
_JOINED_BYTES = 65_536
"""What is written within one turn of the event loop is sent together up to this size."""
_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """Answers 408 when a request's line and headers take too long to arrive, 431 when they are too large.

    A connection on which nothing was ever sent is closed without a word when an idle one would be.
    """

    def __init__(
        self, *arguments: Any, read_seconds: float, on_lost: Callable[[], None] | None = None, **options: Any
    ) -> None:
        """read_seconds: for a request's head. on_lost: called once the connection is no more. Others: as uvicorn's."""
        super().__init__(*arguments, **options)
        self._departure = Departure(lambda: self.flow.resume_reading())
        self.app_state = {**self.app_state, "departure": self._departure}
        self._read_seconds = read_seconds
        self._on_lost = on_lost
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def data_received(self, data: bytes) -> None:
        is_first = self._head_bytes == 0
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_bytes = 0
            self._stop_timer()
        elif not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431, f"the request's headers have more than {_MAX_HEAD_BYTES} bytes", "headers_too_large")
            elif is_first:
                self._stop_timer()
                self._head_timer = self.loop.call_later(self._read_seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._departure.happen()
        if self._on_lost is not None:
            self._on_lost()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._refuse(408, f"the request's headers did not arrive within {self._read_seconds:g} s", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = ErrorBody(message, "invalid_request_error", code=code).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _JoinedWrites:
    """A transport that sends what is written in one turn of the event loop together: an answer's head and its body."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= _JOINED_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = []
            self._size = 0
            if not self._transport.is_closing():  # the client may have gone since it was written
                self._transport.write(data)
