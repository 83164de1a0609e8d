"""Exceptions over the wire, and what other servers' statuses mean."""

from __future__ import annotations

import grpc
import pytest

from msaserve.errors import BusyError, EngineError, InvalidRequestError, MsaserveError, OverloadedError, TooLargeError
from msaserve.rpc.errors import from_status, to_status
from msaserve.rpc.protocol import parse_address


def failed(code: grpc.StatusCode, message: str, metadata: object = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=message)  # type: ignore


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("bad", param="top_p", code="c"), grpc.StatusCode.INVALID_ARGUMENT),
        (InvalidRequestError("bad"), grpc.StatusCode.INVALID_ARGUMENT),
        (TooLargeError("large", param="media"), grpc.StatusCode.INVALID_ARGUMENT),
        (BusyError("later"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (OverloadedError("drains"), grpc.StatusCode.UNAVAILABLE),
        (EngineError("broke"), grpc.StatusCode.INTERNAL),
    ],
)
def test_back_as_it_was(error: MsaserveError, code: grpc.StatusCode) -> None:
    status, message, metadata = to_status(error)
    assert status is code
    back = from_status(failed(status, message, metadata), has_begun=False)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert [getattr(back, n, None) for n in ("param", "code")] == [getattr(error, n, None) for n in ("param", "code")]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, InvalidRequestError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, BusyError),
        (grpc.StatusCode.UNAVAILABLE, OverloadedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EngineError),
        (grpc.StatusCode.UNKNOWN, EngineError),
    ],
)
def test_of_other_servers(code: grpc.StatusCode, kind: type[MsaserveError]) -> None:
    assert type(from_status(failed(code, "why"), has_begun=False)) is kind
    assert type(from_status(failed(code, "why", [("msaserve-error-bin", b"[")]), has_begun=False)) is kind
    assert type(from_status(failed(code, "why"), has_begun=True)) is EngineError


def test_addresses() -> None:
    assert parse_address("grpc://127.0.0.1:50051") == "127.0.0.1:50051"
    assert parse_address("grpc://[::1]:50051") == "[::1]:50051"
    assert parse_address("grpc://worker.example:1") == "worker.example:1"
    for address in (
        "127.0.0.1:50051",
        "http://a:1",
        "grpc://a",
        "grpc://:5",
        "grpc://a:0",
        "grpc://a:65536",
        "grpc://a:x",
    ):
        with pytest.raises(InvalidRequestError):
            parse_address(address)
