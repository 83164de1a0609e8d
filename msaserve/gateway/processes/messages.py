"""What the supervisor and a gateway process tell each other, and how."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from msaserve.gateway.command import Gateway
from msaserve.observe.merge import Family

_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Task(msgspec.Struct):
    """What a process is told first, on its standard input: one line of JSON."""

    options: Gateway
    """With the address that the supervisor listens on."""
    number: int
    count: int
    """Of processes."""
    num_workers: int
    created: int
    """When the supervisor began, in seconds: what /v1/models says."""
    supervisor: int
    """Its process id."""
    control: int
    """Descriptors: messages,"""
    connections: int
    """clients' connections, one with each byte,"""
    board: int
    """and the board."""


class Stop(msgspec.Struct, tag=True):
    """To a process: take no more, and end once all is answered."""

    failure: str | None = None
    """Why nothing can be served any more, if that is so."""


class Report(msgspec.Struct, tag=True):
    """To a process: say your numbers."""

    number: int


class Reports(msgspec.Struct, tag=True):
    """To a process: the numbers of all others."""

    number: int
    families: list[list[Family]]


class Ready(msgspec.Struct, tag=True):
    """From a process: it takes connections."""

    text: str
    """For who started the server."""


class Refused(msgspec.Struct, tag=True):
    """From a process: it cannot serve, and ends."""

    error: str
    kind: str
    """The class of the error, in msaserve.errors."""
    missing_module: str = ""
    """What is not installed, if that is the error."""


class Asked(msgspec.Struct, tag=True):
    """From a process: what are the others' numbers?"""

    number: int
    families: list[Family]
    """Its own: what is shown once must not be lost with it."""


class Told(msgspec.Struct, tag=True):
    """From a process: its numbers."""

    number: int
    families: list[Family]


ToProcess = Stop | Report | Reports
FromProcess = Ready | Refused | Asked | Told


class Control(Generic[T]):
    """One end of the connection between the two, to which messages T come. Made by `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def open(cls, sock: socket.socket, kind: Any) -> Control[T]:
        """kind: T, a union."""
        return cls(*await asyncio.open_unix_connection(sock=sock), kind)

    def send(self, message: ToProcess | FromProcess) -> None:
        """To nobody, if the other end is gone."""
        data = msgspec.msgpack.encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> T | None:
        """The next message; None when the other end is gone."""
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            message: T = self._decoder.decode(await self._reader.readexactly(size))
            return message
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        """Once all that was sent has left."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
