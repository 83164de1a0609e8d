"""Engines that do not outrun their readers: for tests that count events, or that need a request which still runs."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine

HELD = Path(__file__).parent / "held"
"""On PYTHONPATH it does to an engine in another process what `hold_long_requests` does here."""


def hold_long_requests(engine: Engine) -> None:
    """Requests of 100 tokens and more, whatever they say, take 10 ms a token and more."""
    spec = importlib.util.spec_from_file_location("held", HELD / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.hold(engine)


def step_when_read(engine: Engine, async_engine: AsyncEngine) -> Callable[[], None]:
    """Let a step begin only when what the last one made is read: each step is an event of its own.

    Without this, tokens that a reader has not fetched in time pile up in one event. Returns what ends it.
    """
    step = engine.step
    is_over = False

    def must_wait() -> bool:  # asked in the engine's thread, whose the streams are
        if is_over or async_engine._commands or async_engine._is_closing:
            return False
        told = [stream for stream in async_engine._streams.values() if stream not in async_engine._to_wake]
        return any(stream._pending for stream in told)

    def waiting_step() -> Any:
        while must_wait():
            time.sleep(0.001)
        return step()

    def end() -> None:
        nonlocal is_over
        is_over = True

    engine.step = waiting_step  # type: ignore[method-assign]
    return end
