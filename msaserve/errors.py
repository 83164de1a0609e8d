"""What can go wrong, in the words a user sees. Asserts guard invariants; these are for users' input."""

from __future__ import annotations


class MsaserveError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidRequestError(MsaserveError, ValueError):
    """A request that can never be served as it was sent. HTTP 400.

    Args:
        message: what is wrong, with the numbers.
        param: the field at fault, as OpenAI's error object names it.
        code: a short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class TooLargeError(InvalidRequestError):
    """A request that is larger than the server takes. HTTP 413."""


class OverloadedError(MsaserveError):
    """The engine accepts no request now: it drains or cannot be reached. HTTP 503."""


class BusyError(OverloadedError):
    """No room for this request now: a full queue, or no place while it waited. HTTP 429."""


class EngineError(MsaserveError):
    """A request failed inside the engine through no fault of its sender. HTTP 500."""


class AddressError(MsaserveError):
    """A worker's address that cannot be listened on: in use, or not this machine's."""


class CheckpointError(MsaserveError, ValueError):
    """A checkpoint directory that cannot be served: missing, truncated, of another model, or with wrong tensors."""


class UnsupportedError(CheckpointError):
    """A checkpoint that is well formed but asks for what is not implemented; the message names it."""
