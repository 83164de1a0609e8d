"""This package's exceptions as gRPC statuses, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc

from msaserve.errors import BusyError, EngineError, InvalidRequestError, MsaserveError, OverloadedError, TooLargeError
from msaserve.rpc.protocol import ERROR_KEY

Metadata = tuple[tuple[str, str | bytes], ...]

# The first that fits. Codes that another server chose come back by the second table.
_CODES: tuple[tuple[type[MsaserveError], Any], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (OverloadedError, grpc.StatusCode.UNAVAILABLE),
    (MsaserveError, grpc.StatusCode.INTERNAL),
)
_INVALID_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
_INVALID_KINDS = {kind.__name__: kind for kind in (InvalidRequestError, TooLargeError)}


def to_status(error: MsaserveError) -> tuple[Any, str, Metadata]:
    """(status code, message, trailing metadata) of an exception."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    details = {"kind": type(error).__name__}
    if isinstance(error, InvalidRequestError):
        details |= {name: value for name in ("param", "code") if (value := getattr(error, name)) is not None}
    return code, str(error), ((ERROR_KEY, json.dumps(details).encode()),)


def from_status(error: Any, *, has_begun: bool) -> MsaserveError:
    """The exception of a call that failed (grpc.aio.AioRpcError).

    has_begun: the call had brought something: whatever ended it then is a failure and no refusal.
    """
    code, message = error.code(), error.details() or error.code().name
    if has_begun:
        return EngineError(f"the worker failed: {message}" if code is grpc.StatusCode.UNAVAILABLE else message)
    if code in _INVALID_CODES:
        details = _details(error.trailing_metadata())
        kind = _INVALID_KINDS.get(str(details.get("kind")), InvalidRequestError)
        return kind(message, param=details.get("param"), code=details.get("code"))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BusyError(message)
    if code is grpc.StatusCode.UNAVAILABLE:
        return OverloadedError(message)
    return EngineError(message)


def read_json(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> dict[str, Any]:
    """The JSON object under a key of metadata; {} if there is none or it is none."""
    for name, value in metadata or ():
        if name == key:
            try:
                data = json.loads(value)
            except ValueError:
                return {}
            return data if isinstance(data, dict) else {}
    return {}


def _details(metadata: Any) -> dict[str, Any]:
    return read_json(metadata, ERROR_KEY)
