"""Parts of a request to the items an engine takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from samples import TINY, clip, data_url, picture

from msaserve.errors import InvalidRequestError, TooLargeError
from msaserve.gateway.media.budget import ByteBudget
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pipeline import MediaPart, MediaPipeline, parse_part
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints, Prepared, find_spec, normalize
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.tokenizer import Tokenizer

SOURCE = find_spec(TINY)
TOKENIZER = Tokenizer.load(TINY)
IMAGE = MediaPart("image", data_url(picture()), Hints(), "messages[0].content[0]")
VIDEO = MediaPart("video", data_url(clip(12)), Hints(fps=2), "messages[0].content[1]")


def pipeline(**limits: Any) -> MediaPipeline:
    assert SOURCE is not None
    return MediaPipeline(SOURCE, MediaLimits(**limits), num_processes=1)


@pytest.fixture
async def media() -> AsyncIterator[MediaPipeline]:
    media = pipeline()
    yield media
    await media.close()


async def test_prepare_and_place(media: MediaPipeline) -> None:
    spec = MiniMaxM3Spec()
    with closing(media.lease()) as lease:
        items = await media.prepare([VIDEO, IMAGE, VIDEO], lease)
        prompt = TOKENIZER.encode("see ]<]video[>[ and ]<]image[>[ and ]<]video[>[.")
        token_ids, placed = await media.place(items, prompt, TOKENIZER, lease)
        assert media._budget.used == lease.size > 4 * sum(item.patches.nbytes for item in items)
    assert media._budget.used == 0
    expected = prepare("video", clip(12), Hints(fps=2), spec, MediaLimits())
    assert [item.modality for item in placed] == ["video", "image", "video"]
    assert placed[0].patches.dtype == np.float32
    np.testing.assert_array_equal(placed[0].patches, normalize(expected.patches, spec))
    assert placed[0].content_hash == placed[2].content_hash == expected.content_hash
    assert placed[1].content_hash != placed[0].content_hash
    for item in placed:
        span = token_ids[item.offset : item.offset + item.length]
        media_tokens = sum(i in (510, 511) for i in span)
        assert media_tokens * 4 == len(item.patches)
    assert sum(i in (510, 511) for i in token_ids) * 4 == sum(len(item.patches) for item in placed)


async def test_errors_name_their_part(media: MediaPipeline) -> None:
    bad = [part._replace(url=data_url(b"?")) for part in (IMAGE, VIDEO)]
    for part in bad:
        with closing(media.lease()) as lease, pytest.raises(InvalidRequestError) as caught:
            await media.prepare([IMAGE, part], lease)
        assert caught.value.param == part.where
        assert part.where in str(caught.value)
        assert caught.value.code == "media_wrong_type"
    # The same bad file twice at once: each error names its own part.
    with closing(media.lease()) as lease:
        parts = [bad[0], bad[0]._replace(where="elsewhere")]
        errors = await asyncio.gather(*(media.prepare([p], lease) for p in parts), return_exceptions=True)
    assert [getattr(error, "param", None) for error in errors] == [bad[0].where, "elsewhere"]


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([IMAGE] * 201, "media_too_many_items"),
        ([VIDEO] * 21, "media_too_many_items"),
        ([VIDEO._replace(hints=Hints(fps=0))], "media_hint"),
        ([VIDEO._replace(hints=Hints(fps=99))], "media_hint"),
        ([IMAGE._replace(hints=Hints(max_long_side_pixel=29))], "media_hint"),
    ],
)
async def test_checked_before_fetching(media: MediaPipeline, parts: list[MediaPart], code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        media.check(parts)
    assert caught.value.code == code


async def test_two_hundred_pictures(media: MediaPipeline) -> None:
    with closing(media.lease()) as lease:
        items = await media.prepare([IMAGE] * 200, lease)
    assert len(items) == 200


async def test_a_request_over_the_budget() -> None:
    media = pipeline(max_inflight_bytes=50_000)
    with closing(media.lease()) as lease:
        items = await media.prepare([IMAGE], lease)
        with pytest.raises(TooLargeError):
            await media.place(items, TOKENIZER.encode("]<]image[>["), TOKENIZER, lease)
    await media.close()


async def test_what_is_prepared_counts_at_once() -> None:
    media = pipeline(max_inflight_bytes=200_000)
    parts = [IMAGE._replace(url=data_url(picture(seed=i))) for i in range(100)]
    with closing(media.lease()) as lease:
        with pytest.raises(TooLargeError):
            await media.prepare(parts, lease)
        assert lease.size <= 200_000
    assert media._pool.cache_bytes < 300_000
    assert media.bytes_in_flight == 0
    await media.close()


async def test_cancelled_in_the_moment_of_admission() -> None:
    budget = ByteBudget(10, max_wait_s=5)
    await budget.reserve(10)
    waiting = asyncio.ensure_future(budget.reserve(4))
    await asyncio.sleep(0)
    budget.release(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == 0


async def test_a_prompt_is_not_expanded_in_the_event_loop(
    media: MediaPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = tuple(float(i) for i in range(768))
    item = Prepared("video", np.zeros((384 * 16, 1176), np.uint8), (384, 4, 4), times, b"")
    prompt = TOKENIZER.encode("]<]video[>[") * 2
    calls: list[tuple[str, bool]] = []
    encode = Tokenizer.encode

    def encode_noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        calls.append((text, threading.current_thread() is threading.main_thread()))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode_noted)
    with closing(media.lease()) as lease:
        token_ids, _ = await media.place([item] * 2, prompt, TOKENIZER, lease, as_pixels=True)
    assert token_ids.count(511) == 2 * 384 * 4
    assert not any(is_main for _, is_main in calls)
    assert len(calls) < 400  # each text once


def test_parse_part() -> None:
    hints = {"fps": 2, "max_long_side_pixel": 280}
    part = parse_part({"type": "video_url", "video_url": {"url": " data:x ", **hints}}, "here")
    assert part == MediaPart("video", "data:x", Hints(2.0, 280), "here")
    assert parse_part({"type": "image_url", "image_url": "data:x"}, "here").url == "data:x"
    assert parse_part({"type": "image_url", "image_url": {"url": "u", "detail": "high"}}, "h").hints == Hints()


@pytest.mark.parametrize(
    "body", [None, 3, {}, {"url": ""}, {"url": 1}, {"url": "u", "fps": "1"}, {"url": "u", "max_long_side_pixel": 1.5},
             {"url": "u", "fps": True}]
)  # fmt: skip
def test_parse_part_refuses(body: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_part({"type": "video_url", "video_url": body}, "messages[3].content[1]")
    assert caught.value.param == "messages[3].content[1]"
