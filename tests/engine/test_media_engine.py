"""Pictures and clips through the engine: cut anywhere, cached, mixed with text, and broken."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from driver import Output, expected, greedy_prompt, greedy_tokens, make_engine, model, request, run

from msaserve.engine.media import MediaFeatures, media_positions
from msaserve.engine.plan import PlanRow, StepPlan
from msaserve.errors import InvalidRequestError
from msaserve.types import MediaItem, SamplingParams

IMAGE, VIDEO = 510, 511


def golden_prompt() -> list[int]:
    tokens: list[int] = expected("tiny")["mm.input_ids"].tolist()
    return tokens


def golden_media() -> tuple[MediaItem, ...]:
    tensors = expected("tiny")
    prompt = golden_prompt()
    items = []
    for modality, token, patches, grid in (
        ("image", IMAGE, "mm.pixel_values", "mm.image_grid_thw"),
        ("video", VIDEO, "mm.pixel_values_videos", "mm.video_grid_thw"),
    ):
        places = [i for i, t in enumerate(prompt) if t == token]
        items.append(
            MediaItem(
                modality=modality,  # type: ignore[arg-type]
                patches=tensors[patches].numpy(),
                grid_thw=tuple(tuple(row) for row in tensors[grid].tolist()),
                offset=places[0],
                length=places[-1] - places[0] + 1,
                content_hash=modality.encode(),
            )
        )
    return tuple(items)


def mixed(name: str = "mm", **options: Any) -> Any:
    options = {"max_tokens": 8, "logprobs": 20, "media": golden_media(), **options}
    return request(name, golden_prompt(), **options)


@pytest.fixture(scope="module")
def whole() -> Output:
    return run(make_engine(), [mixed()])[0]


def assert_same(output: Output, whole: Output) -> None:
    assert output.token_ids == whole.token_ids
    for found, known in zip(output.logprobs, whole.logprobs, strict=True):
        assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
        assert dict(found.top) == pytest.approx(dict(known.top), abs=1e-4)


def test_whole_is_golden(whole: Output) -> None:
    logprobs = expected("tiny")["mm.logits"][-1].double().log_softmax(-1)
    assert whole.token_ids[0] == int(logprobs.argmax())
    for token, logprob in whole.logprobs[0].top:
        assert logprob == pytest.approx(float(logprobs[token]), rel=2e-4)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 15])
def test_chunks_split_an_item(whole: Output, chunk: int) -> None:
    ends = range(chunk, len(golden_prompt()), chunk)
    assert any(item.offset < end < item.offset + item.length for item in golden_media() for end in ends)
    assert_same(run(make_engine(max_num_batched_tokens=chunk), [mixed()])[0], whole)


def test_in_a_batch_with_text(whole: Output) -> None:
    engine = make_engine(max_num_batched_tokens=60)
    outputs = run(engine, [request("text", greedy_prompt("tiny")), mixed("a"), mixed("b")], arrivals=[0, 2, 3])
    assert outputs[0].token_ids == greedy_tokens("tiny")
    assert_same(outputs[1], whole)
    assert_same(outputs[2], whole)


def test_prefix_is_shared_only_with_the_same_picture(whole: Output) -> None:
    image, video = golden_media()
    assert image.offset < 16 < len(golden_prompt()) - 16
    engine = make_engine()
    other = msgspec.structs.replace(image, patches=image.patches[::-1].copy(), content_hash=b"another")
    different = run(engine, [mixed(media=(other, video))])[0]
    assert different.logprobs[0].top != whole.logprobs[0].top
    first = run(engine, [mixed()])[0]
    again = run(engine, [mixed()])[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert_same(first, whole)
    assert_same(again, whole)


def test_preempted(whole: Output) -> None:
    requests = [mixed(name, salt=name, max_tokens=24) for name in "abcd"]
    engine = make_engine(num_pages=1 + 4 * 3 + 3)
    outputs = run(engine, requests)
    assert engine.load().num_preemptions > 0
    for output in outputs:
        assert output.token_ids[:8] == whole.token_ids


def test_an_item_is_embedded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    m3 = model("tiny")
    embed = m3.embed_media
    monkeypatch.setattr(m3, "embed_media", lambda *args: calls.append(1) or embed(*args))
    run(make_engine(max_num_batched_tokens=3), [mixed("a"), mixed("b"), mixed("c", salt="other")])
    assert len(calls) == 2


def test_recent_features_are_kept_by_bytes() -> None:
    calls: list[int] = []

    def embed(patches: torch.Tensor, grid: Any) -> torch.Tensor:
        calls.append(len(patches))
        return torch.zeros(len(patches), 4)

    def item(size: int) -> MediaItem:
        patches = np.zeros((size, 3), np.float32)
        return MediaItem(modality="image", patches=patches, grid_thw=(), offset=0, length=1, content_hash=bytes([size]))

    features = MediaFeatures(embed, max_bytes=20 * 16)
    for size in (5, 6, 7, 5, 8):  # 8 pushes 6 out: 5 was used since
        features.get(item(size))
    assert calls == [5, 6, 7, 8]
    features.get(item(6))
    assert calls == [5, 6, 7, 8, 6]
    assert len(features.get(item(100))) == 100  # larger than all that may be kept: kept alone
    features.get(item(100))
    features.get(item(5))
    assert calls == [5, 6, 7, 8, 6, 100, 5]


def test_the_same_patches_in_other_rows_are_other_features() -> None:
    """A clip's rows are told apart by the tower, and the sender's hash need not tell."""
    grids: list[Any] = []

    def embed(patches: torch.Tensor, grid: Any) -> torch.Tensor:
        grids.append(grid)
        return torch.full((1, 4), float(len(grids)))

    features = MediaFeatures(embed, max_bytes=2**20)
    patches = np.zeros((32, 3), np.float32)
    for grid in (((8, 2, 2),), ((4, 2, 2), (4, 2, 2)), ((8, 2, 2),)):
        item = MediaItem(modality="video", patches=patches, grid_thw=grid, offset=0, length=1, content_hash=b"same")
        assert features.get(item)[0, 0] == grids.index(grid) + 1
    assert len(grids) == 2


def test_positions_are_the_media_tokens_of_the_span() -> None:
    image, video = golden_media()
    prompt = golden_prompt()
    for item, token in ((image, IMAGE), (video, VIDEO)):
        positions = media_positions(item, prompt, (IMAGE, VIDEO))
        assert positions.tolist() == [i for i, t in enumerate(prompt) if t == token]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patches": np.zeros((24, 1000), np.float32)}, "patches must be float32"),
        ({"patches": np.zeros((24, 1176), np.float64)}, "patches must be float32"),
        ({"patches": np.zeros((20, 1176), np.float32)}, "makes 24 patches, but there are 20"),
        ({"grid_thw": ((1, 3, 8),)}, "multiples of 2"),
        ({"grid_thw": ((0, 4, 6),)}, "positive"),
        ({"grid_thw": ((1, 4, 8),), "patches": np.zeros((32, 1176), np.float32)}, "32 patches make 8 tokens"),
        ({"length": 5}, "but the prompt has 5 image or video tokens"),
        ({"offset": 45, "length": 10}, "outside the prompt|image or video tokens"),
    ],
)
def test_an_item_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    engine = make_engine()
    image, video = golden_media()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(mixed(media=(msgspec.structs.replace(image, **changes), video)))
    assert not engine.has_work()


def test_a_broken_item_fails_its_row_alone(whole: Output) -> None:
    """What got past every check and makes the vision tower raise."""
    engine = make_engine()
    image, video = golden_media()
    sequences = engine.add(mixed("broken")) + engine.add(mixed("whole", salt="x"))
    broken = msgspec.structs.replace(image, patches=np.zeros((24, 7), np.float32), content_hash=b"broken")
    sequences[0].media = (broken, video)
    outputs: list[list[int]] = [[], []]
    errors = []
    while engine.has_work():
        for out in engine.step():
            outputs[sequences.index(out.request)] += out.token_ids
            errors += [(out.request, out.error)] if out.error else []
    assert sequences[0].finish_reason == "error"
    assert [request for request, _ in errors] == [sequences[0]]
    assert "a media item could not be embedded" in errors[0][1]
    assert outputs == [[], whole.token_ids]
    assert engine.load().num_used_pages == 0


def test_a_step_of_nothing_but_broken_rows() -> None:
    engine = make_engine()
    image = msgspec.structs.replace(golden_media()[0], grid_thw=((1, 4, 4),), content_hash=b"few")
    row = PlanRow(
        request_id="r",
        token_ids=golden_prompt(),
        prefix_len=0,
        pages=array("i", [1, 2, 3]),
        sampling=SamplingParams(),
        seed=0,
        is_sampled=True,
        prompt_token_ids=array("i", golden_prompt()),
        media=(image,),
    )
    (result,) = engine.runner.run(StepPlan([row])).rows
    assert result.token_id is None
    assert result.error is not None


def test_nan_patches_fail_their_request_alone(whole: Output) -> None:
    image, video = golden_media()
    nan = msgspec.structs.replace(image, patches=np.full_like(image.patches, np.nan), content_hash=b"nan")
    outputs = run(make_engine(), [mixed("nan", media=(nan, video)), mixed("whole")])
    assert outputs[0].error == "the model's logits are not finite"
    assert_same(outputs[1], whole)
