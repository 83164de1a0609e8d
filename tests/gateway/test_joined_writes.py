"""What is written to a connection within one turn of the event loop leaves it together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from msaserve.gateway.connection import _JOINED_BYTES, _JoinedWrites


class Transport:
    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.is_lost = False

    def write(self, data: bytes) -> None:
        if self.is_lost:
            raise RuntimeError("the handler is closed")
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")
        self.is_lost = True

    def is_closing(self) -> bool:
        return self.is_lost

    def get_extra_info(self, name: str) -> str:
        return f"its {name}"


@pytest.fixture
async def both() -> tuple[Transport, Any]:
    transport: Any = Transport()
    return transport, _JoinedWrites(transport, asyncio.get_running_loop())


async def test_a_turn_is_one_write(both: tuple[Transport, Any]) -> None:
    transport, joined = both
    joined.write(b"head")
    joined.write(b"body")
    assert transport.done == []
    await asyncio.sleep(0)
    assert transport.done == [b"headbody"]
    joined.write(b"next")
    await asyncio.sleep(0)
    assert transport.done == [b"headbody", b"next"]
    assert joined.get_extra_info("peername") == "its peername"


async def test_much_is_not_held(both: tuple[Transport, Any]) -> None:
    """The transport must know of it, to say when the client takes no more."""
    transport, joined = both
    joined.write(b"a")
    joined.write(b"b" * _JOINED_BYTES)
    assert transport.done == [b"a" + b"b" * _JOINED_BYTES]
    joined.write(b"c")
    await asyncio.sleep(0)
    assert transport.done[1:] == [b"c"]


async def test_what_was_written_before_the_end_is_sent(both: tuple[Transport, Any]) -> None:
    transport, joined = both
    joined.write(b"last")
    joined.close()
    await asyncio.sleep(0)
    assert transport.done == [b"last", "closed"]


async def test_a_client_that_leaves_in_between(both: tuple[Transport, Any], caplog: pytest.LogCaptureFixture) -> None:
    transport, joined = both
    joined.write(b"for nobody")
    transport.is_lost = True
    await asyncio.sleep(0)
    assert transport.done == []
    assert not caplog.records
