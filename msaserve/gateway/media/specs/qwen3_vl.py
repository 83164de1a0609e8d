"""Qwen3-VL: other patches, other sampling, a pixel budget for the whole clip, time stamps between two frames.

Rules as transformers' Qwen2VLImageProcessor, Qwen3VLVideoProcessor and Qwen3VLProcessor have them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.spec import Hints, Piece, Prepared, check_aspect_ratio, smart_resize
from msaserve.types import Modality

MIN_FRAMES, MAX_FRAMES = 4, 768
DEFAULT_FPS = 2.0
_START, _END = "<|vision_start|>", "<|vision_end|>"
_TOKENS: Mapping[Modality, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}


@dataclass(frozen=True)
class Qwen3VLSpec:
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_pixels: tuple[int, int] = (256 * 256, 4096 * 4096)
    video_pixels: tuple[int, int] = (64 * 64, 24_576 * 32 * 32)
    """Least and most pixels, of all frames together."""

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_items(self) -> Mapping[Modality, int]:
        return {"image": 200, "video": 20}

    @property
    def placeholders(self) -> Mapping[Modality, tuple[str, ...]]:
        # vLLM counts positions from a picture's first token, and from a clip's first marker.
        return {"image": (_TOKENS["image"],), "video": (_START, _TOKENS["video"], _END)}

    def check_hints(self, modality: Modality, hints: Hints) -> None:
        if hints.max_long_side_pixel is not None:
            raise InvalidRequestError("this model does not take max_long_side_pixel", code="media_hint")
        if hints.fps is not None and (modality != "video" or not 0 < hints.fps <= 60):
            raise InvalidRequestError(f"fps is for videos and at most 60, not {hints.fps}", code="media_hint")

    def image_size(self, height: int, width: int, hints: Hints) -> tuple[int, int]:
        low, high = self.image_pixels
        return smart_resize(height, width, factor=self.factor, min_pixels=low, max_pixels=high)

    def sample(self, times: Sequence[float], hints: Hints) -> list[int]:
        """Frames at equal distances from the first to the last, about fps of them per second."""
        total = len(times)
        rate = (total - 1) / times[-1] if total > 1 and times[-1] > 0 else 24.0
        wanted = int(total / rate * (DEFAULT_FPS if hints.fps is None else hints.fps) + 1e-3)
        count = min(max(wanted, MIN_FRAMES), MAX_FRAMES, total)
        return [int(i) for i in np.linspace(0, total - 1, count).round()]

    def video_size(self, num_frames: int, height: int, width: int, hints: Hints) -> tuple[int, int]:
        if min(height, width) < self.factor:
            grow = max(self.factor / height, self.factor / width)
            height, width = int(height * grow), int(width * grow)
        check_aspect_ratio(height, width)
        factor, (low, high) = self.factor, self.video_pixels
        # transformers leaves a clip of one frame to its caller; it is filled up to one temporal patch.
        frames = max(num_frames, self.temporal_patch_size)
        padded = round(frames / self.temporal_patch_size) * self.temporal_patch_size
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if padded * new_height * new_width > high:
            shrink = math.sqrt(frames * height * width / high)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif padded * new_height * new_width < low:
            grow = math.sqrt(low / (frames * height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width

    def grid_rows(self, grid_thw: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        return (grid_thw,)

    def expand(self, item: Prepared) -> list[Piece]:
        t, h, w = item.grid_thw
        features = Piece(_TOKENS[item.modality], h * w // self.merge_size**2)
        if item.modality == "image":
            return [features]
        frame = [Piece(_START), features, Piece(_END)]
        pieces, times, size = [], item.frame_times, self.temporal_patch_size
        for i in range(t):
            first, last = times[i * size], times[min(i * size + size, len(times)) - 1]
            pieces += [Piece(f"<{(first + last) / 2:.1f} seconds>"), *frame]
        return pieces


def from_checkpoint(files: Mapping[str, Any]) -> Qwen3VLSpec | None:
    """Reads the patch geometry and pixel bounds where the checkpoint states them."""
    if files["config"].get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
        return None
    image, video = files["preprocessor_config"], files["video_preprocessor_config"]
    default = Qwen3VLSpec()
    return Qwen3VLSpec(
        patch_size=image.get("patch_size", default.patch_size),
        temporal_patch_size=image.get("temporal_patch_size", default.temporal_patch_size),
        merge_size=image.get("merge_size", default.merge_size),
        image_pixels=_bounds(image, default.image_pixels),
        video_pixels=_bounds(video, default.video_pixels),
    )


def _bounds(config: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    size = config.get("size") or {}
    return size.get("shortest_edge", default[0]), size.get("longest_edge", default[1])
