"""Models' rules: sizes against transformers' own functions, sampling, prompts."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import TINY, clip, picture

from msaserve.errors import CheckpointError, InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.prompt import expand
from msaserve.gateway.media.spec import Hints, ModelSpec, Piece, Prepared, SpecSource, find_spec, spec_targets
from msaserve.gateway.media.specs import minimax_m3, qwen3_vl
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.gateway.media.specs.qwen3_vl import Qwen3VLSpec
from msaserve.tokenizer import Tokenizer
from msaserve.types import Modality

M3, QWEN = MiniMaxM3Spec(), Qwen3VLSpec()


def oracle(module: str, function: str) -> Callable[..., Any]:
    """A function of transformers, without the imports of its module (torchvision)."""
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        pytest.skip("transformers is not installed")
    path = Path(package.submodule_search_locations[0]) / "models" / f"{module}.py"
    nodes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == function]
    namespace: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(nodes, []), str(path), "exec"), namespace)
    found: Callable[..., Any] = namespace[function]
    return found


def random_sizes(seed: int, count: int = 3000) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    sizes = [(int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13))) for _ in range(count)]
    return [(h, w) for h, w in sizes if max(h, w) <= 200 * min(h, w)]


def test_m3_sizes_are_those_of_transformers() -> None:
    theirs = oracle("minimax_m3_vl/image_processing_minimax_m3_vl", "smart_resize")
    for height, width in random_sizes(0):
        image = theirs(height, width, factor=28, min_pixels=4 * 28 * 28, max_pixels=451_584)
        frame = theirs(height, width, factor=28, min_pixels=4 * 28 * 28, max_pixels=768 * 28 * 28)
        assert M3.image_size(height, width, Hints()) == image
        assert M3.video_size(7, height, width, Hints()) == frame


def test_qwen3_sizes_are_those_of_transformers() -> None:
    images = oracle("qwen2_vl/image_processing_qwen2_vl", "smart_resize")
    videos = oracle("qwen3_vl/video_processing_qwen3_vl", "smart_resize")
    for i, (height, width) in enumerate(random_sizes(1)):
        low, high = QWEN.image_pixels
        assert QWEN.image_size(height, width, Hints()) == images(height, width, 32, low, high)
        low, high = QWEN.video_pixels
        frames = 2 + i % 400
        expected = videos(frames, height, width, factor=32, min_pixels=low, max_pixels=high)
        assert QWEN.video_size(frames, height, width, Hints()) == expected


@pytest.mark.parametrize(
    ("hints", "size"),
    [
        (Hints(), (504, 868)),
        (Hints(max_long_side_pixel=2016), (504, 868)),
        (Hints(max_long_side_pixel=504), (20 * 14, 36 * 14)),
    ],
)
def test_m3_long_side_only_shrinks_a_picture(hints: Hints, size: tuple[int, int]) -> None:
    height, width = (1134, 2016) if hints != Hints() else (1080, 1920)
    new = M3.image_size(height, width, hints)
    if hints.max_long_side_pixel == 504:
        assert new == size
    else:
        assert new[0] * new[1] <= 451_584


def test_m3_long_side_replaces_the_budget_of_frames() -> None:
    height, width = M3.video_size(10, 1080, 1920, Hints(max_long_side_pixel=1008))
    assert 602_112 < height * width <= 1008 * 1008
    height, width = M3.video_size(10, 1080, 1920, Hints(max_long_side_pixel=280))
    assert height * width <= 280 * 280


@pytest.mark.parametrize(
    ("modality", "hints"),
    [
        ("video", Hints(fps=0)),
        ("video", Hints(fps=0.19)),
        ("video", Hints(fps=99)),
        ("video", Hints(fps=math.nan)),
        ("image", Hints(fps=1)),
        ("image", Hints(max_long_side_pixel=100)),
        ("video", Hints(max_long_side_pixel=0)),
        ("video", Hints(max_long_side_pixel=-28)),
    ],
)
def test_m3_refuses_hints(modality: Modality, hints: Hints) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        M3.check_hints(modality, hints)
    assert caught.value.code == "media_hint"


def test_m3_samples_by_time_and_keeps_the_last_frame() -> None:
    rate = Fraction(30_000, 1001)
    times = [float(i / rate) for i in range(159)]
    assert M3.sample(times, Hints()) == [0, 30, 60, 90, 120, 150, 158]
    assert M3.sample(times, Hints(fps=5))[:4] == [0, 6, 12, 18]
    assert M3.sample(times[:1], Hints()) == [0]
    assert M3.sample(times[:2], Hints()) == [0, 1]
    assert M3.sample(times[:31], Hints()) == [0, 30]


def test_m3_samples_the_same_from_millisecond_clocks() -> None:
    exact = [i / 30 for i in range(300)]
    rounded = [round(t, 3) for t in exact]
    for fps in (0.2, 0.5, 1.0, 2.0, 3.0, 5.0):
        assert M3.sample(rounded, Hints(fps=fps)) == M3.sample(exact, Hints(fps=fps))


def item(modality: Modality, grid: tuple[int, int, int], times: tuple[float, ...] = ()) -> Prepared:
    return Prepared(modality, np.zeros((math.prod(grid), 1176), np.uint8), grid, times, b"")


def test_m3_prompt_of_a_picture() -> None:
    assert M3.expand(item("image", (1, 32, 32))) == [
        Piece("]<]start of image[>["),
        Piece("]<]image[>[", 256),
        Piece("]<]end of image[>["),
    ]


def test_m3_prompt_of_a_clip() -> None:
    """The stamps of a clip of 5.3 s at 29.97 frames a second: each patch has its first frame's time."""
    rate = Fraction(30_000, 1001)
    times = tuple(float(i / rate) for i in (0, 30, 60, 90, 120, 150, 158))
    pieces = M3.expand(item("video", (4, 18, 22), times))
    stamps = ["]<]0.0 seconds[>[", "]<]2.0 seconds[>[", "]<]4.0 seconds[>[", "]<]5.3 seconds[>["]
    assert [piece.text for piece in pieces[::4]] == stamps
    assert pieces[1:4] == [
        Piece("]<]start of image[>["),
        Piece("]<]video[>[", 99),
        Piece("]<]end of image[>["),
    ]
    assert M3.grid_rows((9, 18, 22)) == ((4, 18, 22), (4, 18, 22), (1, 18, 22))


def test_qwen3_prompt_of_a_clip() -> None:
    """As transformers averages them: the stamp lies between the patch's two frames."""
    pieces = QWEN.expand(item("video", (2, 4, 4), (0.0, 0.5, 1.0)))
    assert [p.text for p in pieces[::4]] == ["<0.2 seconds>", "<1.0 seconds>"]
    assert pieces[1:4] == [Piece("<|vision_start|>"), Piece("<|video_pad|>", 4), Piece("<|vision_end|>")]
    assert QWEN.placeholders["video"] == ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>")


def test_qwen3_prompt_of_a_picture_leaves_the_templates_markers_outside_its_span() -> None:
    """vLLM counts positions from the span's first token; one too early changed every answer."""
    assert QWEN.placeholders["image"] == ("<|image_pad|>",)
    assert QWEN.expand(item("image", (1, 4, 4), ())) == [Piece("<|image_pad|>", 4)]


def test_qwen3_samples_evenly() -> None:
    times = [i / 30 for i in range(300)]
    expected = np.linspace(0, 299, 20).round().astype(int).tolist()
    assert QWEN.sample(times, Hints()) == expected
    assert QWEN.sample(times[:2], Hints()) == [0, 1]


@pytest.mark.parametrize("spec", [M3, QWEN], ids=["minimax_m3", "qwen3_vl"])
def test_the_pipeline_serves_every_spec(spec: ModelSpec) -> None:
    image = prepare("image", picture(100, 140), Hints(), spec, MediaLimits())
    video = prepare("video", clip(25), Hints(), spec, MediaLimits())
    for one in (image, video):
        t, h, w = one.grid_thw
        assert one.patches.shape == (t * h * w, 3 * spec.temporal_patch_size * spec.patch_size**2)
        tokens = sum(piece.repeats for piece in spec.expand(one) if "pad" in piece.text or piece.text in MEDIA_TOKENS)
        assert tokens == t * h * w // spec.merge_size**2
        assert sum(math.prod(row) for row in spec.grid_rows(one.grid_thw)) == len(one.patches)


MEDIA_TOKENS = ("]<]image[>[", "]<]video[>[")


def test_find_spec() -> None:
    source = find_spec(TINY)
    assert source is not None
    assert source.load() == MiniMaxM3Spec()
    assert any(target.startswith(qwen3_vl.__name__) for target in spec_targets())


def test_find_spec_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "video_preprocessor_config.json").write_text('{"size": {"shortest_edge": 64, "longest_edge": 4096}}')
    source = find_spec(tmp_path)
    assert source is not None
    assert source.load() == Qwen3VLSpec(video_pixels=(64, 4096))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_spec(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError):
        find_spec(tmp_path)


def test_m3_reads_the_checkpoint() -> None:
    files: dict[str, Any] = {"config": {"model_type": "minimax_m3_vl"}, "preprocessor_config": {}}
    files["video_preprocessor_config"] = {"max_pixels": 784}
    files["preprocessor_config"] = {
        "size": [672, 672],
        "img_token_compression_config": {"spatial_merge_size": 4, "temporal_patch_size": 1},
        "image_std": [1, 1, 1],
    }
    spec = minimax_m3.from_checkpoint(files)
    assert spec == MiniMaxM3Spec(merge_size=4, temporal_patch_size=1, image_std=(1.0, 1.0, 1.0), max_frame_pixels=784)
    files["preprocessor_config"] = {"patch_size": "14"}
    with pytest.raises(CheckpointError, match="patch_size"):
        minimax_m3.from_checkpoint(files)


def test_a_spec_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installed package declares under the entry point group is found beside our own."""

    class Point:
        value = f"{__name__}:foreign"

    monkeypatch.setattr("msaserve.gateway.media.spec.entry_points", lambda group: [Point()])
    assert spec_targets()[-1] == Point.value


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def test_expand(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a]<]image[>[b]<]video[>[]<]image[>[c")
    items = [item("image", (1, 2, 4)), item("video", (1, 2, 2), (0.0,)), item("image", (1, 2, 2))]
    expanded = expand(prompt, items, M3, tokenizer)
    text = tokenizer.decode(expanded.token_ids, skip_special_tokens=False)
    start, end = "]<]start of image[>[", "]<]end of image[>["
    parts = [
        f"{start}]<]image[>[]<]image[>[{end}",
        f"]<]0.0 seconds[>[{start}]<]video[>[{end}",
        f"{start}]<]image[>[{end}",
    ]
    assert text == f"a{parts[0]}b{parts[1]}{parts[2]}c"
    for (offset, length), part in zip(expanded.spans, parts, strict=True):
        ids = expanded.token_ids[offset : offset + length]
        assert tokenizer.decode(ids, skip_special_tokens=False) == part


@pytest.mark.parametrize("prompt", ["no place", "]<]image[>[]<]image[>[", "]<]video[>["])
def test_expand_refuses_a_template_that_moves_parts(tokenizer: Tokenizer, prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template"):
        expand(tokenizer.encode(prompt), [item("image", (1, 2, 2))], M3, tokenizer)


def test_expand_without_the_model_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="text only"):
        expand([1, 2], [item("image", (1, 2, 2))], QWEN, tokenizer)


def test_source_is_what_another_process_can_load() -> None:
    source = SpecSource(f"{minimax_m3.__name__}:from_checkpoint", {
        "config": {"model_type": "minimax_m3_vl"}, "preprocessor_config": {}, "video_preprocessor_config": {},
    })  # fmt: skip
    assert source.load() == M3
