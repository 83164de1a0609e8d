"""Requests with broken bytes: refused by their own words, never by an accident."""

from __future__ import annotations

import random

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve import pixels
from msaserve.errors import InvalidRequestError
from msaserve.rpc import convert
from msaserve.rpc.media import items_to_proto
from msaserve.types import GenerateRequest, MediaItem, SamplingParams


def valid() -> bytes:
    item = MediaItem(
        modality="image",
        patches=np.arange(4 * 6, dtype=np.uint8).reshape(4, 6),
        grid_thw=((1, 2, 2),),
        offset=1,
        length=1,
        content_hash=b"h" * 8,
    )
    clip = MediaItem(
        modality="video",
        patches=np.ones((20, 6), np.float32),
        grid_thw=((4, 2, 2), (1, 2, 2)),
        offset=3,
        length=5,
        content_hash=b"c" * 8,
    )
    sampling = SamplingParams(max_tokens=5, stop=("a",), logit_bias={3: 1.0}, seed=1, logprobs=2)
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 510, 2, *[511] * 5], sampling=sampling)
    message = convert.request_to_proto(request)
    items_to_proto(message, [item, clip], token_ids={"image": 510, "video": 511}, dtype="float32")
    data: bytes = message.SerializeToString()
    return data


def read(data: bytes) -> GenerateRequest:
    return convert.request_from_proto(
        pb.GenerateRequest.FromString(data), normalize=lambda p: pixels.normalize(p, (0.5,), (0.5,)), tokenize=None
    )


def test_broken_bytes() -> None:
    whole = valid()
    assert len(read(whole).media) == 2
    rng = random.Random(7)
    num_read = num_refused = 0
    for _ in range(4000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
        try:
            read(bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data))
            num_read += 1
        except DecodeError:
            pass
        except InvalidRequestError:
            num_refused += 1
    assert num_read > 100
    assert num_refused > 100


@pytest.mark.parametrize("shape", [[], [0], [0, 6], [2**31, 2**31], [2**32 - 1]])
def test_shapes_that_hold_nothing(shape: list[int]) -> None:
    message = pb.GenerateRequest.FromString(valid())
    message.mm_inputs.pixel_values.ClearField("shape")
    message.mm_inputs.pixel_values.shape.extend(shape)
    for data in (b"", b"\0"):
        message.mm_inputs.pixel_values.inline = data
        with pytest.raises(InvalidRequestError):
            read(message.SerializeToString())
