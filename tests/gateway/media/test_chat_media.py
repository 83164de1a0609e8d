"""Pictures and clips in chat requests, from an unmodified `openai` client to what the engine gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from fake_engine import FakeClient, serve
from in_process import InProcessClient
from samples import TINY, clip, data_url, picture
from test_image import png_header
from test_video import audio_only
from waits import until

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pipeline import MediaPipeline
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints, find_spec, normalize
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.tokenizer import Tokenizer

PNG, MP4 = picture(60, 90), clip(25)
START, END = "]<]start of image[>[", "]<]end of image[>["


def image(data: bytes = PNG, **hints: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png"), **hints}}


def video(data: bytes = MP4, **hints: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **hints}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def pipeline(**limits: Any) -> MediaPipeline:
    source = find_spec(TINY)
    assert source is not None
    return MediaPipeline(source, MediaLimits(**limits), num_processes=1)


@contextmanager
def chat(engine: Any, media: MediaPipeline | None) -> Iterator[openai.OpenAI]:
    with serve(engine, media=media, max_body_bytes=2**24) as url:
        transport = httpx.Client(trust_env=False, timeout=200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
            yield client


def fake(*, has_vision: bool = True) -> FakeClient:
    engine = FakeClient()
    engine.info = msgspec.structs.replace(
        engine.info, supports_vision=has_vision, image_token_id=510, video_token_id=511
    )
    engine.script = Tokenizer.load(TINY).encode("seen")
    return engine


@pytest.fixture(scope="module")
def _shared() -> Iterator[tuple[FakeClient, openai.OpenAI, MediaPipeline]]:
    engine, media = fake(), pipeline(max_image_bytes=200_000)
    with chat(engine, media) as client:
        yield engine, client, media


@pytest.fixture
def engine(_shared: tuple[FakeClient, openai.OpenAI, MediaPipeline]) -> FakeClient:
    _shared[0].requests.clear()
    return _shared[0]


@pytest.fixture
def client(_shared: tuple[FakeClient, openai.OpenAI, MediaPipeline], engine: FakeClient) -> openai.OpenAI:
    return _shared[1]


@pytest.fixture
def media(_shared: tuple[FakeClient, openai.OpenAI, MediaPipeline]) -> MediaPipeline:
    return _shared[2]


def ask(client: openai.OpenAI, *parts: dict[str, Any], **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": list(parts)}], **options)


def test_tokenize_gives_the_prompt_that_chat_makes(
    client: openai.OpenAI, engine: FakeClient, media: MediaPipeline
) -> None:
    parts = [text("see "), video(fps=2), image()]
    ask(client, *parts)
    with httpx.Client(base_url=str(client.base_url).removesuffix("v1/"), trust_env=False, timeout=200) as http:
        messages = [{"role": "user", "content": parts}]
        answer = http.post("/tokenize", json={"messages": messages}).json()
        assert answer["tokens"] == engine.requests[0].prompt_token_ids
        assert answer["count"] == len(answer["tokens"])
        broken = http.post("/tokenize", json={"messages": [{"role": "user", "content": [image(b"GIF")]}]})
        assert broken.status_code == 400
        assert broken.json()["error"]["param"].startswith("messages[0].content[0]")
    assert len(engine.requests) == 1
    assert is_released(media)


def test_picture_and_clip(client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    answer = ask(client, text("see "), video(fps=2), text(" and "), image(), text("?"))
    assert answer.choices[0].message.content == "seen"
    (request,) = engine.requests
    spec = MiniMaxM3Spec()
    first = prepare("video", MP4, Hints(fps=2), spec, MediaLimits())
    second = prepare("image", PNG, Hints(), spec, MediaLimits())
    for item, expected in zip(request.media, (first, second), strict=True):
        assert item.modality == expected.modality
        np.testing.assert_array_equal(item.patches, normalize(expected.patches, spec))
        assert item.grid_thw == spec.grid_rows(expected.grid_thw)
        assert item.content_hash == expected.content_hash
    # 2.5 s at 10 frames a second, two taken each second: 0, 0.5, 1, 1.5, 2 s and the last at 2.4 s.
    t, h, w = first.grid_thw
    frames = [f"]<]{time} seconds[>[{START}{']<]video[>[' * (h * w // 4)}{END}" for time in ("0.0", "1.0", "2.0")]
    assert t == len(frames)
    still = f"{START}{']<]image[>[' * (len(second.patches) // 4)}{END}"
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt == f"]~!b[]~b]user\nsee {''.join(frames)} and {still}?[e~[\n]~b]ai\n"
    for item, span in zip(request.media, ("".join(frames), still), strict=True):
        ids = request.prompt_token_ids[item.offset : item.offset + item.length]
        assert tokenizer.decode(ids, skip_special_tokens=False) == span
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)


def is_released(media: MediaPipeline) -> bool:
    """Whether no request holds bytes: the client has its answer a moment before the server has cleaned up behind it."""
    until(lambda: not media._budget.used)
    return True


def test_stream(client: openai.OpenAI, engine: FakeClient, media: MediaPipeline) -> None:
    words = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, image(), stream=True))
    assert words == "seen"
    assert len(engine.requests[0].media) == 1
    assert is_released(media)


def test_pixels_for_an_engine_that_normalizes() -> None:
    engine = fake()
    engine.info = msgspec.structs.replace(engine.info, takes_pixels=True)
    with chat(engine, pipeline()) as client:
        ask(client, image())
    (item,) = engine.requests[0].media
    assert item.patches.dtype == np.uint8
    expected = prepare("image", PNG, Hints(), MiniMaxM3Spec(), MediaLimits())
    np.testing.assert_array_equal(item.patches, expected.patches)


def test_parts_over_several_messages(client: openai.OpenAI, engine: FakeClient) -> None:
    other = picture(60, 90, seed=5)
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "look"},
            {"role": "user", "content": [image(), text("a")]},  # type: ignore[list-item, misc]
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [image(other), image(), text("b")]},  # type: ignore[list-item, misc]
        ],
    )
    items = engine.requests[0].media
    assert [item.content_hash for item in items].count(items[0].content_hash) == 2
    assert items[0].content_hash == items[2].content_hash != items[1].content_hash
    assert [item.offset for item in items] == sorted(item.offset for item in items)


def test_users_cannot_write_media_tokens(client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    words = f"]<]image[>[ {START} ]<]video[>[ {END} ]<]0.0 seconds[>["
    ask(client, text(words), image(), text(words + "]<]im"), text("age[>["))
    (request,) = engine.requests
    (item,) = request.media
    outside = request.prompt_token_ids[: item.offset] + request.prompt_token_ids[item.offset + item.length :]
    assert not {510, 511, 261, 262} & set(outside)
    assert tokenizer.decode(outside, skip_special_tokens=False) == (
        f"]~!b[]~b]user\n{words}{words}]<]image[>[[e~[\n]~b]ai\n"
    )
    # Without any picture they are text as well.
    ask(client, text(words))
    assert not {510, 511, 261, 262} & set(engine.requests[1].prompt_token_ids)


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (image(b""), "media_empty"),
        (image(b"neither picture nor clip"), "media_wrong_type"),
        (image(picture(kind="JPEG")[:500]), "media_decode_failed"),
        (image(png_header(30_000, 30_000)), "media_too_many_pixels"),
        (image(png_header(2010, 10)), "media_aspect_ratio"),
        (image(bytes(210_000)), "media_too_large"),
        (image(fps=1), "media_hint"),
        (image(max_long_side_pixel=30), "media_hint"),
        (video(MP4[: len(MP4) // 2]), "media_wrong_type"),
        (video(audio_only()), "media_no_frames"),
        (video(fps=0), "media_hint"),
        (video(fps=99), "media_hint"),
        (video(fps="fast"), "media_hint"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "media_data_url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "media_url"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "media_host"),
        ({"type": "image_url", "image_url": {"url": "http://no-such-host.invalid/x.png"}}, "media_fetch_failed"),
        ({"type": "image_url", "image_url": {}}, None),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "unsupported_content"),
    ],
)
def test_errors(client: openai.OpenAI, engine: FakeClient, part: dict[str, Any], code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("see"), part)
    assert caught.value.code == code
    assert caught.value.param == "messages[0].content[1]"
    assert not engine.requests


def test_too_many_parts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="201"):
        ask(client, *[image(picture(8, 8))] * 201)


def test_text_only_model() -> None:
    for engine, media in ((fake(has_vision=False), pipeline()), (fake(), None)):
        with chat(engine, media) as client:
            with pytest.raises(openai.BadRequestError, match="text only") as caught:
                ask(client, text("see"), image())
            assert caught.value.code == "unsupported_content"


def test_a_request_over_the_budget_and_a_full_one() -> None:
    media = pipeline(max_inflight_bytes=150_000, max_wait_s=0.2)
    with chat(fake(), media) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, image(picture(200, 300)))
        assert caught.value.status_code == 413
        media._budget.used += 140_000  # as if other requests held it
        with pytest.raises(openai.RateLimitError):
            ask(client, image(picture(30, 30)))
        media._budget.used -= 140_000
        ask(client, image(picture(30, 30)))
        assert is_released(media)


def test_a_prompt_that_is_too_long_with_its_pictures(client: openai.OpenAI) -> None:
    parts = [image(picture(500, 700, kind="WEBP", seed=i)) for i in range(12)]
    with pytest.raises(openai.BadRequestError, match="at most 4095") as caught:
        ask(client, *parts)
    assert caught.value.code == "context_length_exceeded"


def test_the_engine_sees() -> None:
    """The small checkpoint, its real engine: other pixels, another answer; the same pixels, the same one."""
    config = EngineConfig(device="cpu", max_model_len=2048, kv_cache_gib=0.05)
    engine = InProcessClient(AsyncEngine(Engine.from_checkpoint(TINY, config)))
    options = {"max_tokens": 8, "temperature": 0, "logprobs": True, "extra_body": {"ignore_eos": True}}

    def logprobs(*parts: dict[str, Any]) -> list[float]:
        answer = ask(client, text("see "), *parts, **options)
        return [token.logprob for token in answer.choices[0].logprobs.content]

    with chat(engine, pipeline()) as client:
        seen = logprobs(image(), video())
        np.testing.assert_allclose(logprobs(image(), video()), seen, atol=1e-4)
        assert np.abs(np.array(logprobs(image(picture(60, 90, seed=1)), video())) - seen).max() > 1e-3
        assert np.abs(np.array(logprobs(image(), video(clip(25, options={"qp": "51"})))) - seen).max() > 1e-3
