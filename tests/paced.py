"""Engines that do not outrun their readers: for tests that count events, or that need a request which still runs."""

from __future__ import annotations

import time
from typing import Any

from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine

LONG = 1000
"""Tokens. A test that asks for as many means a request which runs until something ends it."""
_LONG_STEP_SECONDS = 0.02


def hold_long_requests(engine: Engine) -> None:
    """Make every step beside a long request so slow that it lasts at least LONG * 20 ms, on whatever machine."""
    step = engine.step

    def slow_step() -> Any:
        if any((request.sampling.max_tokens or 0) >= LONG for request in engine.scheduler._running):
            time.sleep(_LONG_STEP_SECONDS)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]


def step_when_read(engine: Engine, async_engine: AsyncEngine) -> None:
    """Let a step begin only when what the last one made is read: each step is an event of its own.

    Without this, tokens that a reader has not fetched in time pile up in one event.
    """
    step = engine.step

    def must_wait() -> bool:  # asked in the engine's thread, whose the streams are
        if async_engine._commands or async_engine._is_closing:
            return False
        return any(stream._pending for stream in async_engine._streams.values())

    def waiting_step() -> Any:
        while must_wait():
            time.sleep(0.001)
        return step()

    engine.step = waiting_step  # type: ignore[method-assign]
