"""The event loop of gateways and workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the fastest event loop that is installed.

    SIGINT cancels `main` until it handles the signal itself, unless the process ignores it.

    Raises:
        KeyboardInterrupt: SIGINT has cancelled `main`.
    """
    before = signal.getsignal(signal.SIGINT)
    was_interrupted = False

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            nonlocal was_interrupted
            was_interrupted = True
            task.cancel()

        if before is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await main

    try:
        try:
            import uvloop
        except ImportError:  # there is none for Windows
            result = asyncio.run(interruptible())
        else:
            result = uvloop.run(interruptible())
    except asyncio.CancelledError:
        if not was_interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)  # the loop has put Python's own in its place
    if was_interrupted:
        raise KeyboardInterrupt
    return result
