"""MultimodalInputs to MediaItems and back.

On the wire one message holds all items of one modality: their patches one after another, a grid row for each item, and
for each item the span of the prompt that stands for it, markers and timestamps included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from msaserve.errors import InvalidRequestError
from msaserve.rpc.tensors import Store, decode, encode
from msaserve.types import MediaItem, Modality

SEGMENT_LENGTH = 4
"""Temporal patches of one row of MediaItem.grid_thw; the wire has one row for a clip of any length."""

_MODALITIES: dict[int, Modality] = {
    common_pb2.MODALITY_UNSPECIFIED: "image",
    common_pb2.IMAGE: "image",
    common_pb2.VIDEO: "video",
}
_WIRE_MODALITIES = {"image": common_pb2.IMAGE, "video": common_pb2.VIDEO}

Normalize = Callable[[np.ndarray], np.ndarray]
"""uint8 patches to float32 ones."""


def items_from_proto(batches: Iterable[Any], normalize: Normalize) -> tuple[MediaItem, ...]:
    """The items of all batches, in the order of their batches. normalize: takes patches that come as uint8.

    Raises:
        InvalidRequestError: a batch contradicts itself. Whether its items fit the model and the prompt is the engine's
            to check.
    """
    return tuple(item for batch in batches for item in _batch_from_proto(batch, normalize))


def items_to_proto(
    message: Any,
    items: Sequence[MediaItem],
    *,
    token_ids: Mapping[Modality, int | None],
    dtype: str,
    store: Store | None = None,
) -> None:
    """Put items into a GenerateRequest: one MultimodalInputs for each modality that occurs.

    token_ids: the model's token of each modality, in the order in which they are sent. dtype: of normalised patches on
    the wire, "float32" or "bfloat16"; pixels stay uint8.

    Raises:
        InvalidRequestError: a clip's rows are not the ones `items_from_proto` makes of it, or one item of a modality
            is normalised and another is not.
    """
    for modality, token_id in token_ids.items():
        batch = [item for item in items if item.modality == modality]
        if batch:
            into = message.extra_mm_inputs.add() if message.HasField("mm_inputs") else message.mm_inputs
            _batch_to_proto(into, modality, batch, token_id, dtype, store)


def shm_names(batches: Iterable[Any]) -> set[str]:
    """The shared memory that a request's tensors lie in."""
    tensors = [t for b in batches for t in (b.pixel_values, *b.model_specific_tensors.values())]
    return {tensor.shm.name for tensor in tensors if tensor.WhichOneof("payload") == "shm"}


def segment_rows(grid: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """A clip's grid as rows of at most 4 temporal patches."""
    t, h, w = grid
    return tuple((min(SEGMENT_LENGTH, t - start), h, w) for start in range(0, t, SEGMENT_LENGTH))


def _batch_from_proto(batch: Any, normalize: Normalize) -> list[MediaItem]:
    modality = _MODALITIES.get(batch.modality)
    if modality is None:
        raise InvalidRequestError("only pictures and video are supported", param="mm_inputs.modality")
    key = batch.encoder_input_key or "pixel_values"
    spans = [(span.offset, span.length) for span in batch.mm_placeholders]
    patches = decode(batch.pixel_values, name=key)
    if patches.ndim != 2 or patches.dtype not in (np.float32, np.float16, np.uint8):
        raise _invalid(f"{key} must be [patches, values] of float32, bfloat16, float16 or uint8", key)
    grids = _grids(batch, modality, len(spans))
    sizes = [math.prod(grid) for grid in grids]
    sizes_key = batch.flat_keys.get(key)
    if sizes_key:
        given = _tensor(batch, sizes_key).reshape(-1).tolist()
        if given != sizes:
            raise _invalid(f"{sizes_key} is {given}, but the grids make {sizes} patches", sizes_key)
    if sum(sizes) != len(patches):
        raise _invalid(f"{key} has {len(patches)} patches, but the grids make {sum(sizes)}", key)
    if batch.mm_hashes and len(batch.mm_hashes) != len(spans):
        raise _invalid(f"there are {len(batch.mm_hashes)} hashes for {len(spans)} items", "mm_hashes")
    hashes = list(batch.mm_hashes) or [""] * len(spans)
    items, start = [], 0
    for grid, size, (offset, length), given_hash in zip(grids, sizes, spans, hashes, strict=True):
        part = patches[start : start + size]
        start += size
        items.append(
            MediaItem(
                modality=modality,
                # Writable, as torch wants its arrays.
                patches=normalize(part) if part.dtype == np.uint8 else np.require(part, np.float32, "W"),
                grid_thw=segment_rows(grid) if modality == "video" else (grid,),
                offset=offset,
                length=length,
                content_hash=_content_hash(given_hash, grid, part),
                name=given_hash,
            )
        )
    return items


def _batch_to_proto(
    batch: Any, modality: Modality, items: Sequence[MediaItem], token_id: int | None, dtype: str, store: Store | None
) -> None:
    grids = [whole_grid(item) for item in items]
    kinds = {item.patches.dtype.name for item in items}
    if len(kinds) > 1:
        raise InvalidRequestError(f"patches of one request must have one dtype, not {sorted(kinds)}", param="media")
    patches = items[0].patches if len(items) == 1 else np.concatenate([item.patches for item in items])
    grid_key, sizes_key = f"{modality}_grid_thw", f"patches_per_{modality}"
    tensors = batch.model_specific_tensors
    encode(patches, dtype="uint8" if "uint8" in kinds else dtype, store=store, into=batch.pixel_values)
    encode(np.asarray(grids, np.int64), into=tensors[grid_key])
    encode(np.asarray([math.prod(grid) for grid in grids], np.int64), into=tensors[sizes_key])
    if token_id is not None:
        batch.im_token_id = token_id
    batch.mm_placeholders.extend(pb.PlaceholderRange(offset=item.offset, length=item.length) for item in items)
    batch.mm_hashes.extend(item.content_hash.hex() for item in items)
    batch.batched_keys.extend((grid_key, sizes_key))
    batch.flat_keys["pixel_values"] = sizes_key
    batch.keep_on_cpu_keys.extend(("image_grid_thw", "video_grid_thw"))
    batch.modality = _WIRE_MODALITIES[modality]


def _grids(batch: Any, modality: Modality, count: int) -> list[tuple[int, int, int]]:
    name = f"{modality}_grid_thw"
    grids = _tensor(batch, name)
    if grids.shape != (count, 3):
        raise _invalid(f"{name} is {list(grids.shape)} for {count} items; it must be [{count}, 3]", name)
    rows = [(int(t), int(h), int(w)) for t, h, w in grids.tolist()]
    for row in rows:
        if min(row) < 1:
            raise _invalid(f"{name} has the row {row}; its numbers must be positive", name)
    return rows


def _tensor(batch: Any, name: str) -> np.ndarray:
    if name not in batch.model_specific_tensors:
        raise _invalid(f"the tensor {name} is missing", name)
    tensor = decode(batch.model_specific_tensors[name], name=name)
    if tensor.dtype.kind not in "iu":
        raise _invalid(f"{name} must hold whole numbers, not {tensor.dtype}", name)
    return tensor


def whole_grid(item: MediaItem) -> tuple[int, int, int]:
    """An item's grid as one row. Raises InvalidRequestError if its rows are not the ones that such a row becomes."""
    t, h, w = (sum(row[0] for row in item.grid_thw), *item.grid_thw[0][1:])
    whole = ((t, h, w),)
    expected = segment_rows((t, h, w)) if item.modality == "video" else whole
    if item.grid_thw not in (expected, whole):
        raise InvalidRequestError(
            f"grid_thw {list(item.grid_thw)} is not one item's; rows of {(t, h, w)} are {list(expected)}", param="media"
        )
    return t, h, w


def _content_hash(given: str, grid: tuple[int, int, int], patches: np.ndarray) -> bytes:
    """The sender's hash names the picture; what this request made of it is in the grid and the dtype.

    Were the sender's word taken alone, features of one size could be taken for another's.
    """
    state = blake2b(f"{grid} {patches.dtype}".encode(), digest_size=32)
    if given:
        state.update(given.encode())
    else:
        state.update(np.ascontiguousarray(patches).data)
    return state.digest()


def _invalid(message: str, name: str) -> InvalidRequestError:
    return InvalidRequestError(f"mm_inputs: {message}", param=f"mm_inputs.{name}")
