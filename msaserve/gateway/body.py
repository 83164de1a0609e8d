"""The body of a request as it comes: how large it may be, and how slow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from msaserve.gateway.media.budget import Lease
from msaserve.gateway.transport import uncancel

_STEP_BYTES = 2**20
_BYTES_A_SECOND = 16_384
"""A body may take a second more for each of these."""


async def read_body(request: Request, limit: int, lease: Lease, *, read_seconds: float = math.inf) -> bytes:
    """The body, at most `limit` bytes of it; the lease gets what goes beyond the first MiB, as it arrives.

    read_seconds: how long the client may take, besides a second for every 16 KiB that have come.

    Raises:
        HTTPException: 413 for more, 408 for slower.
        BusyError: other requests' bodies left no room.
    """
    chunks: list[bytes] = []
    size, reserved, has_more = 0, _STEP_BYTES, True
    with _Patience(read_seconds) as patience:
        while has_more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            patience.size = size
            # Read on: a client that is still sending does not look at the answer. But not for ever.
            if size > 2 * limit:
                break
            if size > limit:
                chunks.clear()
                continue
            if size > reserved:
                step = max(_STEP_BYTES, size - reserved)
                with patience.stopped():
                    await lease.add(step)
                reserved += step
            chunks.append(chunk)
    if size > limit:
        words = f"{size} bytes" if size <= 2 * limit else f"more than {2 * limit} bytes"
        raise HTTPException(
            413,
            f"the request body has {words}; at most {limit} are accepted",
            headers=None if size <= 2 * limit else {"connection": "close"},
        )
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Patience:
    """How long a client may take to send a body. The task that entered it leaves it with an HTTPException, 408."""

    def __init__(self, seconds: float) -> None:
        self.size = 0
        """Bytes that have come."""
        self._seconds = seconds
        self._is_over = False

    def __enter__(self) -> _Patience:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._timer = None if math.isinf(self._seconds) else self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_over and isinstance(error, asyncio.CancelledError):
            uncancel(self._task)
            raise HTTPException(
                408,
                f"the request body came too slowly: {self.size} bytes in {self._loop.time() - self._start:.0f} s",
                headers={"connection": "close"},
            )

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """For what the client is not to blame for."""
        start = self._loop.time()
        try:
            yield
        finally:
            self._start += self._loop.time() - start

    def _check(self) -> None:
        end = self._start + self._seconds + self.size / _BYTES_A_SECOND
        if end > self._loop.time():
            self._timer = self._loop.call_at(end, self._check)
        else:
            self._is_over = True
            self._task.cancel()
