"""TensorData to numpy and back. All bytes on the wire are little-endian."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.errors import InvalidRequestError
from msaserve.rpc import shm

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "uint8": np.dtype("u1"),
}

Store = Callable[[np.ndarray], Any]
"""Puts an array's bytes into shared memory and returns its ShmHandle, or None to send them in the message."""


def decode(tensor: Any, *, name: str) -> np.ndarray:
    """A TensorData as an array; bfloat16 becomes float32. It may be read-only and share the message's memory.

    Raises:
        InvalidRequestError: naming the tensor: unknown dtype or transport, or bytes that do not make its shape.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequestError(f"{name}: dtype {tensor.dtype!r} is none of {', '.join(_DTYPES)}", param="mm_inputs")
    shape = tuple(tensor.shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    transport = tensor.WhichOneof("payload")
    if transport == "remote":
        raise InvalidRequestError(f"{name}: tensors of remote memory are not supported", param="mm_inputs")
    given = tensor.shm.nbytes if transport == "shm" else len(tensor.inline)
    if given != num_bytes:
        raise InvalidRequestError(
            f"{name}: {tensor.dtype} {list(shape)} takes {num_bytes} bytes, not {given}", param="mm_inputs"
        )
    data = tensor.inline if transport != "shm" else shm.read(tensor.shm.name, tensor.shm.offset, num_bytes)
    array = np.frombuffer(data, dtype).reshape(shape)
    return from_bfloat16(array) if tensor.dtype == "bfloat16" else array


def encode(array: np.ndarray, *, dtype: str | None = None, store: Store | None = None, into: Any = None) -> Any:
    """An array as a TensorData.

    dtype: "bfloat16" for float32 that is to be rounded to it; None: the array's own. into: the message to fill, which
    spares the copy that putting one message into another makes; None: a new one.
    """
    dtype = dtype or array.dtype.name
    wire = to_bfloat16(array) if dtype == "bfloat16" else np.ascontiguousarray(array, _DTYPES[dtype])
    tensor = pb.TensorData() if into is None else into
    tensor.shape.extend(array.shape)
    tensor.dtype = dtype
    handle = None if store is None else store(wire)
    if handle is None:
        tensor.inline = wire.tobytes()
    else:
        tensor.shm.CopyFrom(handle)
    return tensor


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 patterns of bfloat16 as the float32 of the same value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 as uint16 patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
