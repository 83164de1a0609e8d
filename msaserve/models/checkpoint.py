"""A checkpoint's safetensors files, from their headers alone. No torch here."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msaserve.errors import CheckpointError, UnsupportedError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_IGNORED_PREFIXES = ("mtp.", "model.mtp.", "language_model.mtp.", "language_model.model.mtp.")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint, as a header describes it."""

    path: Path
    dtype: str
    """The safetensors name: F32, BF16, …"""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint by name, multi-token-prediction heads (`mtp.*`) left out.

    Raises:
        CheckpointError: no weights, a file that the index names is missing, a file is truncated or not safetensors,
            or the files do not hold what the index says.
        UnsupportedError: weights in a quantised format.
    """
    index_path = directory / INDEX_NAME
    indexed = _read_index(index_path) if index_path.is_file() else None
    names = sorted(set(indexed.values())) if indexed is not None else [SINGLE_NAME]
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise CheckpointError(f"checkpoint {directory}: weight files missing: {', '.join(absent)}")
    entries: dict[str, TensorEntry] = {}
    for name in names:
        for tensor, entry in _read_header(directory / name).items():
            if tensor in entries:
                raise CheckpointError(
                    f"checkpoint {directory}: {tensor} is in both {entries[tensor].path.name} and {name}"
                )
            entries[tensor] = entry
    if indexed is not None:
        lost = sorted(
            tensor for tensor, name in indexed.items() if tensor not in entries or entries[tensor].path.name != name
        )
        if lost:
            raise CheckpointError(f"checkpoint {directory}: not where {INDEX_NAME} says: {', '.join(lost)}")
    entries = {tensor: entry for tensor, entry in entries.items() if not tensor.startswith(_IGNORED_PREFIXES)}
    _refuse_quantized(entries)
    return entries


def _refuse_quantized(entries: dict[str, TensorEntry]) -> None:
    dtypes = sorted({entry.dtype for entry in entries.values()} - set(_DTYPE_BYTES))
    scales = sorted({name.rsplit(".", 1)[-1] for name in entries if "_scale" in name.rsplit(".", 1)[-1]})
    if dtypes or scales:
        raise UnsupportedError(
            f"the checkpoint's weights are quantised ({', '.join([*dtypes, *scales])}); "
            "only bfloat16, float16 and float32 weights are implemented"
        )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise CheckpointError(f"{path}: weight_map must name files beside it")
    return weight_map


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """The format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is truncated: its header of {header_bytes} bytes is not all there")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        entries = {
            name: TensorEntry(path, str(info["dtype"]), tuple(int(n) for n in info["shape"]))
            for name, info in header.items()
            if name != "__metadata__"
        }
        end = max((int(info["data_offsets"][1]) for name, info in header.items() if name != "__metadata__"), default=0)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error!r}") from error
    if 8 + header_bytes + end != size:
        raise CheckpointError(
            f"{path} is truncated or damaged: {size} bytes, but its header describes {8 + header_bytes + end}"
        )
    return entries
