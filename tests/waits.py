"""What tests of servers need not to depend on the machine: patience, and ports that nobody else takes."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress

SECONDS = 200
"""For what must come true: soon, or on a busy machine later. Less than pytest's own limit for a test."""
_POLL_SECONDS = 0.01


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(_POLL_SECONDS)


async def until_true(condition: Callable[[], object]) -> None:
    """The same on an event loop, which goes on."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(_POLL_SECONDS)


def free_port() -> int:
    """For a process that is started later; not one of those that the kernel gives to others meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
