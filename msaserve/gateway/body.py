"""The body of a request as it comes: how large it may be, and how slow; and of how many values its JSON."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from msaserve.errors import TooLargeError
from msaserve.gateway.media.budget import Lease
from msaserve.gateway.transport import uncancel

T = TypeVar("T")

_STEP_BYTES = 2**20
_BYTES_A_SECOND = 16_384
"""A body may take a second more for each of these."""
_PIECE_BYTES = 2**18

LARGE_BYTES = 2**18
"""A body up to this takes milliseconds to decode and check, whatever it holds; a larger one is a thread's."""
MAX_NODES = 2**17
"""Objects, lists and members of objects in the JSON of a large body: 43,690 messages of a role and a text."""
MAX_VALUES = 2**19
"""Commas in it: values that have another before them."""
MAX_TOKEN_VALUES = 2**21
"""Of those in a body that may carry token ids."""


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


async def read_large(body: bytes, read: Callable[[bytes], T], max_values: int = MAX_VALUES) -> T:
    """What `read` makes of a large body of JSON, in a thread.

    Raises:
        TooLargeError: it has more than MAX_NODES or max_values.
        Exception: whatever `read` raises.
    """

    def checked() -> T:
        _check_json(body, max_values)
        return read(body)

    return await asyncio.to_thread(checked)


def _check_json(body: bytes, max_values: int) -> None:
    """Refuse JSON that takes long to decode: a decoder lets no other thread run before it has ended.

    Numpy reads it piece by piece, and lets others run.
    """
    num_nodes = num_commas = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece_nodes, piece_commas = _marks(np.frombuffer(body, np.uint8, min(_PIECE_BYTES, len(body) - start), start))
        num_nodes += int(np.count_nonzero(piece_nodes))
        num_commas += int(np.count_nonzero(piece_commas))
    if num_nodes <= MAX_NODES and num_commas <= max_values:
        return  # also with what stands in texts, which takes longer to tell
    num_nodes = num_commas = start = 0
    in_text = np.uint8(0)
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last one belongs to the byte behind it
            piece = body[start : start + _PIECE_BYTES + 1]
        start += len(piece)
        chars = np.frombuffer(piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)
        texts = np.bitwise_xor.accumulate((chars == ord('"')).view(np.uint8)) ^ in_text
        in_text = texts[-1]
        is_outside = texts == 0
        is_node, is_comma = _marks(chars)
        num_nodes += int(np.count_nonzero(is_node & is_outside))
        num_commas += int(np.count_nonzero(is_comma & is_outside))
        if num_nodes > MAX_NODES:
            raise TooLargeError(
                f"the request body has more than {MAX_NODES} JSON objects, lists and members of objects",
                code="body_too_large",
            )
        if num_commas > max_values:
            raise TooLargeError(f"the request body has more than {max_values} JSON values", code="body_too_large")


def _marks(chars: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where objects, lists and members begin, and where commas are; uint8 [n] to bool [n]."""
    return ((chars | 0x20) == ord("{")) | (chars == ord(":")), chars == ord(",")  # [ is { without that bit


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
