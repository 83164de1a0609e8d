"""The media process: takes files from a socket, answers with patches. Started by the pool as `python -m`.

Decoders are large C libraries fed with files from strangers: here a crash, a leak or an endless loop costs one job and
one process that the pool starts anew, and the address space is bounded.
"""

from __future__ import annotations

import gc
import logging
import resource
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints, Prepared, SpecSource
from msaserve.types import Modality

_FRAME = struct.Struct("<IQ")
"""Bytes of the message, bytes of the payload that follows it."""


class Setup(msgspec.Struct, tag=True):
    """First message to a process."""

    source: SpecSource
    limits: MediaLimits


class Job(msgspec.Struct, tag=True):
    """One file; it is the payload."""

    modality: Modality
    hints: Hints


class Done(msgspec.Struct, tag=True):
    """Patches are the payload."""

    modality: Modality
    grid_thw: tuple[int, int, int]
    frame_times: tuple[float, ...]
    content_hash: bytes
    shape: tuple[int, int]

    def item(self, payload: bytearray) -> Prepared:
        patches = np.frombuffer(payload, np.uint8).reshape(self.shape)
        return Prepared(self.modality, patches, self.grid_thw, self.frame_times, self.content_hash)


class Failed(msgspec.Struct, tag=True):
    """is_fault: through no fault of the file."""

    message: str
    code: str | None
    is_fault: bool = False


Message = Setup | Job | Done | Failed


def send(sock: socket.socket, message: Message, payload: Any = b"") -> None:
    """payload: any bytes-like object. Raises OSError when the other side is gone or the socket's timeout passes."""
    body = msgspec.msgpack.encode(message)
    view = memoryview(payload).cast("B")
    sock.sendall(_FRAME.pack(len(body), len(view)) + body)
    if len(view):
        sock.sendall(view)


def receive(sock: socket.socket) -> tuple[Message, bytearray]:
    """Raises EOFError when the other side is gone, TimeoutError when the socket's timeout passes."""
    head = bytearray(_FRAME.size)
    _fill(sock, head)
    body_size, payload_size = _FRAME.unpack(head)
    body, payload = bytearray(body_size), bytearray(payload_size)
    _fill(sock, body)
    _fill(sock, payload)
    return msgspec.msgpack.decode(body, type=Message), payload


def _fill(sock: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError("the other side closed the connection")
        view = view[count:]


def main(descriptor: int) -> None:
    """Serve jobs from the socket until the other side closes it."""
    with socket.socket(fileno=descriptor) as sock:
        try:
            setup, _ = receive(sock)
            assert isinstance(setup, Setup)
            _bound_memory(setup.limits.max_process_bytes)
            work = _Work(setup)
            while True:
                job, data = receive(sock)
                assert isinstance(job, Job)
                send(sock, *work.answer(job, data))
        except (EOFError, ConnectionError):
            return


class _Work:
    def __init__(self, setup: Setup) -> None:
        self._limits = setup.limits
        self._spec = setup.source.load()
        # One picture alone on the machine may use what its neighbours leave.
        self._threads = ThreadPoolExecutor(4)

    def answer(self, job: Job, data: bytearray) -> tuple[Message, Any]:
        try:
            item = prepare(job.modality, bytes(data), job.hints, self._spec, self._limits, self._threads)
        except InvalidRequestError as error:
            return Failed(str(error), error.code), b""
        except MemoryError:
            return Failed("decoding it takes more memory than a media process has", "media_too_large"), b""
        except Exception as error:
            logging.getLogger(__name__).exception("a %s failed", job.modality)
            return Failed(f"{type(error).__name__}: {error}", None, is_fault=True), b""
        finally:
            # A clip's container and decoder refer to each other: its threads and frames would stay for a while.
            if job.modality == "video":
                gc.collect()
        rows, columns = item.patches.shape
        done = Done(item.modality, item.grid_thw, item.frame_times, item.content_hash, (rows, columns))
        return done, item.patches


def _bound_memory(max_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
