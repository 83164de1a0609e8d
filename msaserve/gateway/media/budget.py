"""Bytes in flight: how much media the gateway holds at once, over all requests."""

from __future__ import annotations

import asyncio
from collections import deque

from msaserve.errors import BusyError, TooLargeError


class ByteBudget:
    """A number of bytes that requests share, first come first served."""

    def __init__(self, limit: int, *, max_wait_s: float) -> None:
        self.limit = limit
        self.used = 0
        self._max_wait_s = max_wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def reserve(self, size: int) -> None:
        """Raises BusyError when there is no room within the waiting time."""
        if not self._waiting and self.used + size <= self.limit:
            self.used += size
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, place)
        self._waiting.append(entry)
        try:
            # Not wait_for: it swallows a cancellation that comes in the moment of admission (until Python 3.12).
            await asyncio.wait({place}, timeout=self._max_wait_s)
        except asyncio.CancelledError:
            self._give_up(entry)
            raise
        if not place.done():
            self._give_up(entry)
            raise BusyError(f"other requests filled {self.limit} bytes for {self._max_wait_s:g} s")

    def release(self, size: int) -> None:
        self.used -= size
        assert self.used >= 0
        self._admit()

    def _give_up(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        if entry[1].done():
            self.release(entry[0])  # admitted in the moment it gave up
        else:
            self._waiting.remove(entry)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            size, place = self._waiting.popleft()
            self.used += size
            place.set_result(None)


class Lease:
    """What one request holds of a budget, until it is closed."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.size = 0

    def close(self) -> None:
        """Give everything back."""
        size, self.size = self.size, 0
        self._budget.release(size)

    async def add(self, size: int) -> None:
        """Raises TooLargeError when the request alone exceeds the budget, BusyError when others fill it."""
        if self.size + size > self._budget.limit:
            raise TooLargeError(
                f"the media of this request take {self.size + size} bytes or more; at most {self._budget.limit} are "
                "taken",
                code="media_too_large",
            )
        await self._budget.reserve(size)
        self.size += size
