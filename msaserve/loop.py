"""The event loop of gateways and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on the fastest event loop that is installed."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        asyncio.run(main)
    else:
        uvloop.run(main)
