"""Pictures and clips on the wire: every dtype and transport, several items, and batches that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve import pixels
from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.spec import normalize
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.rpc import shm
from msaserve.rpc.media import items_from_proto, items_to_proto, segment_rows, shm_names
from msaserve.rpc.tensors import decode, encode, from_bfloat16, to_bfloat16
from msaserve.types import MediaItem, Modality

TOKENS: dict[Modality, int | None] = {"image": 510, "video": 511}
WIDTH = 12


def item(modality: Modality, grid: tuple[int, int, int], offset: int, seed: int = 0) -> MediaItem:
    t, h, w = grid
    rng = np.random.default_rng(seed)
    return MediaItem(
        modality=modality,
        patches=rng.standard_normal((t * h * w, WIDTH)).astype(np.float32),
        grid_thw=segment_rows(grid) if modality == "video" else (grid,),
        offset=offset,
        length=t * h * w // 4 + 2,
        content_hash=bytes([seed]) * 32,
    )


def sent(items: list[MediaItem], **options: Any) -> list[Any]:
    message = pb.GenerateRequest()
    items_to_proto(message, items, token_ids=TOKENS, **{"dtype": "float32", **options})
    message = pb.GenerateRequest.FromString(message.SerializeToString())
    return [message.mm_inputs, *message.extra_mm_inputs]


def assert_same(found: MediaItem, known: MediaItem) -> None:
    assert found.patches.dtype == np.float32
    assert np.array_equal(found.patches, known.patches)
    names = ("modality", "grid_thw", "offset", "length")
    assert [getattr(found, n) for n in names] == [getattr(known, n) for n in names]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["image", "video"]), st.integers(1, 11), st.integers(1, 3), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    )
)
def test_items_come_back(kinds: list[tuple[Modality, int, int, int]]) -> None:
    items = [
        item(kind, (t if kind == "video" else 1, 2 * h, 2 * w), offset=500 * i, seed=i)
        for i, (kind, t, h, w) in enumerate(kinds)
    ]
    batches = sent(items)
    assert [batch.im_token_id for batch in batches] == [TOKENS[m] for m in TOKENS if m in {k for k, *_ in kinds}]
    found = items_from_proto(batches, lambda patches: patches)
    known = [i for i in items if i.modality == "image"] + [i for i in items if i.modality == "video"]
    for one, other in zip(found, known, strict=True):
        assert_same(one, other)
    assert len({i.content_hash for i in found}) == len(items)
    assert [i.content_hash for i in items_from_proto(sent(items), lambda p: p)] == [i.content_hash for i in found]


def test_the_message_is_the_one_gateways_send() -> None:
    (batch,) = sent([item("image", (1, 4, 4), 3), item("image", (1, 2, 2), 20, seed=1)])
    assert list(batch.pixel_values.shape) == [20, WIDTH]
    assert decode(batch.model_specific_tensors["image_grid_thw"], name="x").tolist() == [[1, 4, 4], [1, 2, 2]]
    assert decode(batch.model_specific_tensors["patches_per_image"], name="x").tolist() == [16, 4]
    assert batch.model_specific_tensors["image_grid_thw"].dtype == "int64"
    assert [(p.offset, p.length) for p in batch.mm_placeholders] == [(3, 6), (20, 3)]
    assert list(batch.mm_hashes) == ["00" * 32, "01" * 32]
    assert dict(batch.flat_keys) == {"pixel_values": "patches_per_image"}
    assert set(batch.batched_keys) == {"image_grid_thw", "patches_per_image"}
    assert set(batch.keep_on_cpu_keys) == {"image_grid_thw", "video_grid_thw"}


def test_a_long_clip_is_several_rows_and_one_on_the_wire() -> None:
    clip = item("video", (9, 2, 4), 0)
    assert clip.grid_thw == ((4, 2, 4), (4, 2, 4), (1, 2, 4))
    (batch,) = sent([clip])
    assert decode(batch.model_specific_tensors["video_grid_thw"], name="x").tolist() == [[9, 2, 4]]
    (batch,) = sent([replace(clip, grid_thw=((9, 2, 4),))])  # another model's clip of one row
    assert decode(batch.model_specific_tensors["video_grid_thw"], name="x").tolist() == [[9, 2, 4]]
    odd = MediaItem(
        modality="video", patches=clip.patches, grid_thw=((3, 2, 4), (6, 2, 4)), offset=0, length=9, content_hash=b""
    )
    with pytest.raises(InvalidRequestError, match="not one item's"):
        sent([odd])


def test_bfloat16_is_torchs() -> None:
    values = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(10_000).astype(np.float32),
            np.asarray([0, -0.0, 1e-45, 3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875], np.float32),
        ]
    )
    known = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(from_bfloat16(to_bfloat16(values)), known.float().numpy())
    assert np.isnan(from_bfloat16(to_bfloat16(np.asarray([np.nan], np.float32)))[0])
    (found,) = items_from_proto(sent([item("image", (1, 2, 2), 0)], dtype="bfloat16"), lambda p: p)
    assert np.array_equal(found.patches, from_bfloat16(to_bfloat16(item("image", (1, 2, 2), 0).patches)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64", "int32", "uint32"])
def test_tensors_come_back(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = decode(pb.TensorData.FromString(encode(array).SerializeToString()), name="x")
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_pixels_are_normalised_as_the_gateway_would() -> None:
    patches = np.random.default_rng(1).integers(0, 256, (64, 1176)).astype(np.uint8)
    assert np.array_equal(pixels.normalize(patches), normalize(patches, MiniMaxM3Spec()))
    (batch,) = sent([item("image", (1, 8, 8), 0)])
    batch.pixel_values.CopyFrom(encode(patches))
    (found,) = items_from_proto([batch], pixels.normalize)
    raw = msgspec.structs.replace(item("image", (1, 8, 8), 0), patches=patches)
    assert sent([raw])[0].pixel_values == batch.pixel_values
    with pytest.raises(InvalidRequestError, match="one dtype"):
        sent([raw, item("image", (1, 2, 2), 50)])
    assert np.array_equal(found.patches, pixels.normalize(patches))
    batch.pixel_values.CopyFrom(encode(patches.astype(np.float16)))
    (found,) = items_from_proto([batch], pixels.normalize)
    assert np.array_equal(found.patches, patches.astype(np.float32))


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "DIRECTORY", tmp_path)
    items = [item("image", (1, 2, 2), 0), item("video", (5, 2, 2), 10)]
    batches = sent(items, store=shm.write)
    names = {path.name for path in tmp_path.iterdir()}
    assert shm_names(batches) == names
    assert len(names) == 2
    for one, other in zip(items_from_proto(batches, lambda p: p), items, strict=True):
        assert_same(one, other)
    assert {path.name for path in tmp_path.iterdir()} == names  # reading removes nothing
    for name in names:
        shm.remove(name)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        items_from_proto(batches, lambda p: p)


def test_the_senders_hash_alone_does_not_name_the_features() -> None:
    one, other = item("image", (1, 2, 4), 0), item("image", (1, 4, 2), 0)
    hashes = [items_from_proto(sent([i]), lambda p: p)[0].content_hash for i in (one, other)]
    assert one.content_hash == other.content_hash
    assert hashes[0] != hashes[1]
    (batch,) = sent([one])
    del batch.mm_hashes[:]
    (unnamed,) = items_from_proto([batch], lambda p: p)
    batch.pixel_values.CopyFrom(encode(one.patches + 1))
    (changed,) = items_from_proto([batch], lambda p: p)
    assert len({unnamed.content_hash, changed.content_hash, hashes[0]}) == 3


def _audio(batch: Any) -> None:
    batch.modality = 2


def _cut(batch: Any) -> None:
    batch.pixel_values.inline = batch.pixel_values.inline[:-1]


def _dtype(batch: Any) -> None:
    batch.pixel_values.dtype = "complex64"


def _integers(batch: Any) -> None:
    batch.pixel_values.CopyFrom(encode(np.zeros((20, WIDTH), np.int64)))


def _one_dimension(batch: Any) -> None:
    batch.pixel_values.CopyFrom(encode(np.zeros(20 * WIDTH, np.float32)))


def _remote(batch: Any) -> None:
    batch.pixel_values.remote.transport = "x"


def _no_grid(batch: Any) -> None:
    del batch.model_specific_tensors["image_grid_thw"]


def _grid(rows: list[list[int]]) -> Callable[[Any], None]:
    return lambda batch: batch.model_specific_tensors["image_grid_thw"].CopyFrom(encode(np.asarray(rows, np.int64)))


def _float_grid(batch: Any) -> None:
    batch.model_specific_tensors["image_grid_thw"].CopyFrom(encode(np.ones((2, 3), np.float32)))


def _sizes(batch: Any) -> None:
    batch.model_specific_tensors["patches_per_image"].CopyFrom(encode(np.asarray([4, 16], np.int64)))


def _no_sizes(batch: Any) -> None:
    del batch.model_specific_tensors["patches_per_image"]


def _hashes(batch: Any) -> None:
    batch.mm_hashes.append("00")


def _placeholders(batch: Any) -> None:
    batch.mm_placeholders.add(offset=50, length=3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_audio, "only pictures and video"),
        (_cut, "takes 960 bytes, not 959"),
        (_dtype, "complex64"),
        (_integers, "must be"),
        (_one_dimension, "must be"),
        (_remote, "remote memory"),
        (_no_grid, "image_grid_thw is missing"),
        (_grid([[1, 4, 4]]), r"\[2, 3\]"),
        (_grid([[1, 4, 4], [0, 2, 2]]), "positive"),
        (_grid([[1, 4, 4], [-1, -2, 2]]), "positive"),
        (_grid([[1, 4, 4], [1, 2, 4]]), "patches"),
        (_float_grid, "whole numbers"),
        (_sizes, "patches_per_image is"),
        (_no_sizes, "patches_per_image is missing"),
        (_hashes, "3 hashes for 2 items"),
        (_placeholders, "3 items"),
    ],
)
def test_a_batch_that_contradicts_itself(spoil: Callable[[Any], None], message: str) -> None:
    (batch,) = sent([item("image", (1, 4, 4), 3), item("image", (1, 2, 2), 20, seed=1)])
    spoil(batch)
    with pytest.raises(InvalidRequestError, match=message):
        items_from_proto([batch], lambda p: p)
