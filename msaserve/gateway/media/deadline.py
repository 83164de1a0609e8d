"""A bound on the time of what the current task does, with cancellation that always arrives.

Until Python 3.12 asyncio.wait_for drops a cancellation that comes in the moment when the work is done, and leaves the
work running when it is cancelled a second time.
"""

from __future__ import annotations

import asyncio
import sys


class Deadline:
    """A context manager. Leaving it after its time raises TimeoutError in place of what interrupted the work."""

    def __init__(self, seconds: float | None) -> None:
        """None: no bound."""
        self._seconds = seconds
        self._is_over = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = None
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Somebody else may have cancelled it too: that goes on.
        if self._is_over and (sys.version_info < (3, 11) or self._task.uncancel() == 0):
            if isinstance(error, asyncio.CancelledError):
                raise TimeoutError from error

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()
