"""MiniMax-M3: constants and sizes as transformers' processors have them; sampling and hints as it is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msaserve.errors import CheckpointError, InvalidRequestError
from msaserve.gateway.media.spec import Hints, Piece, Prepared, smart_resize
from msaserve.types import Modality

MIN_FPS, MAX_FPS, DEFAULT_FPS = 0.2, 5.0, 1.0
MAX_FRAMES = 768
SEGMENT_LENGTH = 4
"""Temporal patches over which the vision tower attends at once."""
_TIME_TOLERANCE_S = 1.1e-3
"""Containers that count milliseconds are off by half of one at either end."""
_START, _END = "]<]start of image[>[", "]<]end of image[>["


@dataclass(frozen=True)
class MiniMaxM3Spec:
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    min_pixels: int = 4 * 28 * 28
    max_image_pixels: int = 576 * 28 * 28
    max_frame_pixels: int = 768 * 28 * 28

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def max_items(self) -> Mapping[Modality, int]:
        return {"image": 200, "video": 20}

    @property
    def placeholders(self) -> Mapping[Modality, tuple[str, ...]]:
        return {"image": ("]<]image[>[",), "video": ("]<]video[>[",)}

    def check_hints(self, modality: Modality, hints: Hints) -> None:
        if hints.fps is not None:
            if modality != "video":
                raise InvalidRequestError("fps is for videos only", code="media_hint")
            if not MIN_FPS <= hints.fps <= MAX_FPS:
                raise InvalidRequestError(
                    f"fps must be between {MIN_FPS} and {MAX_FPS}, not {hints.fps}", code="media_hint"
                )
        side = hints.max_long_side_pixel
        if side is not None and (side < self.factor or side % self.factor):
            raise InvalidRequestError(
                f"max_long_side_pixel must be a positive multiple of {self.factor}, not {side}", code="media_hint"
            )

    def image_size(self, height: int, width: int, hints: Hints) -> tuple[int, int]:
        if hints.max_long_side_pixel is not None and max(height, width) > hints.max_long_side_pixel:
            shrink = hints.max_long_side_pixel / max(height, width)
            height, width = max(1, round(height * shrink)), max(1, round(width * shrink))
        return smart_resize(
            height, width, factor=self.factor, min_pixels=self.min_pixels, max_pixels=self.max_image_pixels
        )

    def sample(self, times: Sequence[float], hints: Hints) -> list[int]:
        """Every frame that is 1/fps or more after the one kept before, and the last."""
        step = 1.0 / (DEFAULT_FPS if hints.fps is None else hints.fps) - _TIME_TOLERANCE_S
        kept = [0]
        for i, time in enumerate(times):
            if time - times[kept[-1]] >= step:
                kept.append(i)
        if kept[-1] != len(times) - 1:
            kept.append(len(times) - 1)
        if len(kept) > MAX_FRAMES:
            raise InvalidRequestError(
                f"{len(kept)} frames would be taken of a clip of {times[-1]:.1f} s; at most {MAX_FRAMES}: ask for a "
                "lower fps or send a shorter clip",
                code="media_too_many_frames",
            )
        return kept

    def video_size(self, num_frames: int, height: int, width: int, hints: Hints) -> tuple[int, int]:
        side = hints.max_long_side_pixel
        max_pixels = self.max_frame_pixels if side is None else side * side
        return smart_resize(height, width, factor=self.factor, min_pixels=self.min_pixels, max_pixels=max_pixels)

    def grid_rows(self, grid_thw: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        t, h, w = grid_thw
        return tuple((min(SEGMENT_LENGTH, t - start), h, w) for start in range(0, t, SEGMENT_LENGTH))

    def expand(self, item: Prepared) -> list[Piece]:
        t, h, w = item.grid_thw
        token = self.placeholders[item.modality][0]
        frame = [Piece(_START), Piece(token, h * w // self.merge_size**2), Piece(_END)]
        if item.modality == "image":
            return frame
        pieces = []
        for i in range(t):
            time = item.frame_times[min(i * self.temporal_patch_size, len(item.frame_times) - 1)]
            # The markers of video tokens exist but the model was not trained on them: frames stand between an image's.
            pieces += [Piece(f"]<]{time:.1f} seconds[>["), *frame]
        return pieces


def from_checkpoint(files: Mapping[str, Any]) -> MiniMaxM3Spec | None:
    """Reads the patch geometry, the normalisation and pixel bounds where the checkpoint states them.

    The released `"size": [672, 672]` is not a bound; transformers does not read it either.
    """
    if files["config"].get("model_type") != "minimax_m3_vl":
        return None
    image, video = files["preprocessor_config"], files["video_preprocessor_config"]
    compression = image.get("img_token_compression_config") or {}
    size = image["size"] if isinstance(image.get("size"), dict) else {}
    values = {
        "patch_size": image.get("patch_size"),
        "temporal_patch_size": compression.get("temporal_patch_size", image.get("temporal_patch_size")),
        "merge_size": compression.get("spatial_merge_size", image.get("merge_size")),
        "min_pixels": image.get("min_pixels", size.get("shortest_edge")),
        "max_image_pixels": image.get("max_pixels", size.get("longest_edge")),
        "max_frame_pixels": video.get("max_pixels"),
    }
    for name, value in values.items():
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"preprocessor_config.json: {name} must be a positive whole number, not {value!r}")
    statistics: dict[str, Any] = {}
    for name in ("image_mean", "image_std"):
        value = image.get(name)
        if value is not None:
            if len(value) != 3:
                raise CheckpointError(f"preprocessor_config.json: {name} must have three values, not {value!r}")
            statistics[name] = (float(value[0]), float(value[1]), float(value[2]))
    return MiniMaxM3Spec(**{k: v for k, v in values.items() if v is not None}, **statistics)
