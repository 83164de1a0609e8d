"""Tensors through shared memory: files of /dev/shm whose names come from another process and are not trusted."""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2

from msaserve.errors import InvalidRequestError

DIRECTORY = Path("/dev/shm")
_NAME_PREFIX = "msaserve-"


def namespace_id() -> str:
    """Equal on two processes if they see the same shared memory; empty where there is none."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


def read(name: str, offset: int, num_bytes: int) -> bytearray:
    """A copy of a part of one file. The file stays.

    Raises:
        InvalidRequestError: the name could lead elsewhere, there is no such regular file, or it is shorter.
    """
    descriptor, size = _open(name)
    try:
        if offset + num_bytes > size:
            raise InvalidRequestError(
                f"shared memory {name!r} has {size} bytes, not {num_bytes} at {offset}", param="mm_inputs"
            )
        data = bytearray(num_bytes)
        view, position = memoryview(data), offset
        while view:
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise InvalidRequestError(f"shared memory {name!r} was cut while it was read", param="mm_inputs")
            view, position = view[count:], position + count
        return data
    finally:
        os.close(descriptor)


def remove(name: str) -> None:
    """Remove a file that `read` would read; anything else is left alone."""
    with suppress(InvalidRequestError, OSError):
        descriptor, _ = _open(name)
        os.close(descriptor)
        os.unlink(DIRECTORY / name)


def write(data: Any, owner: str = "") -> Any:
    """A new file that holds `data` (bytes-like), as a ShmHandle.

    owner: whose it is, for `remove_all`: process ids joined by "-", from the outermost. Default: this process.

    Raises:
        OSError: no room for it, or no shared memory; nothing is left behind.
    """
    view = memoryview(data).cast("B")
    name = f"{_own_prefix(owner or os.getpid())}{uuid.uuid4().hex}"
    descriptor = os.open(DIRECTORY / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = view
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.unlink(DIRECTORY / name)
        raise
    finally:
        os.close(descriptor)
    return common_pb2.ShmHandle(name=name, nbytes=len(view), owner_id=f"msaserve-{os.getpid()}")


def remove_all(owner: int | str) -> None:
    """Remove whatever a process of this machine that is gone, or one within it, wrote and nobody took."""
    for path in DIRECTORY.glob(f"{_own_prefix(owner)}*"):
        with suppress(OSError):
            path.unlink()


def _own_prefix(owner: int | str) -> str:
    return f"{_NAME_PREFIX}{owner}-"


def _open(name: str) -> tuple[int, int]:
    """(descriptor, size). O_NONBLOCK: opening a pipe must not wait for its writer."""
    if not name or "/" in name or "\0" in name or ".." in name or name == ".":
        raise InvalidRequestError(f"{name!r} is no name of shared memory", param="mm_inputs")
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"shared memory {name!r} cannot be opened: {error}", param="mm_inputs") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise InvalidRequestError(f"shared memory {name!r} is no regular file", param="mm_inputs")
    return descriptor, status.st_size
