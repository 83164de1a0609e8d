"""What a model wants of pictures and clips. The pipeline knows models through this protocol alone.

A spec is a module with a function `from_checkpoint(files) -> ModelSpec | None`: in `specs/` next to this file, or in
any installed package under the entry point group `msaserve.media_specs` (value `package.module:function`).
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from msaserve import pixels
from msaserve.errors import CheckpointError, InvalidRequestError
from msaserve.types import Modality

ENTRY_POINTS = "msaserve.media_specs"
MAX_ASPECT_RATIO = 200
_FILES = ("config", "preprocessor_config", "video_preprocessor_config")


class Hints(msgspec.Struct, frozen=True):
    """What a content part may say of how it is prepared. None: the model's default."""

    fps: float | None = None
    max_long_side_pixel: int | None = None


class Prepared(msgspec.Struct, frozen=True):
    """One picture or clip as patches, before normalisation."""

    modality: Modality
    patches: np.ndarray
    """uint8 [t·h·w, 3 · temporal patch · patch · patch], neighbours that are merged next to each other."""
    grid_thw: tuple[int, int, int]
    """Size in patches."""
    frame_times: tuple[float, ...]
    """Seconds from the clip's first frame, of every sampled frame; empty for a picture."""
    content_hash: bytes
    """SHA-256 of patches and grid."""


class Piece(NamedTuple):
    """A part of what replaces a placeholder in the prompt: `text`, tokenised alone, `repeats` times."""

    text: str
    repeats: int = 1


class ModelSpec(Protocol):
    """A model's constants and rules. Sizes in pixels, times in seconds."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def merge_size(self) -> int: ...
    @property
    def image_mean(self) -> tuple[float, float, float]: ...
    @property
    def image_std(self) -> tuple[float, float, float]: ...
    @property
    def max_items(self) -> Mapping[Modality, int]:
        """Items of one request."""
        ...

    @property
    def placeholders(self) -> Mapping[Modality, tuple[str, ...]]:
        """The tokens, one after another, by which the chat template marks one item."""
        ...

    def check_hints(self, modality: Modality, hints: Hints) -> None:
        """Raises InvalidRequestError for hints that the model does not take."""
        ...

    def image_size(self, height: int, width: int, hints: Hints) -> tuple[int, int]:
        """New height and width of a picture. Raises InvalidRequestError for a shape that the model does not take."""
        ...

    def sample(self, times: Sequence[float], hints: Hints) -> list[int]:
        """Which frames to keep, ascending, at least one. times: of all frames, ascending, the first is 0."""
        ...

    def video_size(self, num_frames: int, height: int, width: int, hints: Hints) -> tuple[int, int]:
        """New height and width of the frames. Raises InvalidRequestError."""
        ...

    def grid_rows(self, grid_thw: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
        """The rows as which the model's vision tower takes one item."""
        ...

    def expand(self, item: Prepared) -> list[Piece]:
        """What stands in the prompt in place of the item's placeholder."""
        ...


class SpecSource(msgspec.Struct, frozen=True):
    """Where a spec comes from, in a form that another process can follow."""

    target: str
    """package.module:function"""
    files: dict[str, Any]
    """The checkpoint's config, preprocessor_config and video_preprocessor_config."""

    def load(self) -> ModelSpec:
        spec = _from_checkpoint(self.target, self.files)
        assert spec is not None
        return spec


def find_spec(directory: str | Path) -> SpecSource | None:
    """The spec that takes a checkpoint, or None if none does.

    Raises:
        CheckpointError: a configuration file cannot be read, or its values do not fit the spec.
    """
    files = {name: _read_json(Path(directory) / f"{name}.json") for name in _FILES}
    for target in spec_targets():
        if _from_checkpoint(target, files) is not None:
            return SpecSource(target, files)
    return None


def spec_targets() -> list[str]:
    """Every known spec: the project's own, then those of installed packages."""
    package = f"{__package__}.specs"
    own = [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    found = [f"{package}.{name}:from_checkpoint" for name in sorted(own)]
    return found + sorted(point.value for point in entry_points(group=ENTRY_POINTS))


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of `factor`, their product within the bounds, the shape about kept.

    Raises:
        InvalidRequestError: one side is more than 200 times the other.
    """
    check_aspect_ratio(height, width)
    # round() is to even at .5: it decides between two grids.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def check_aspect_ratio(height: int, width: int) -> None:
    """Raises InvalidRequestError."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise InvalidRequestError(
            f"a picture of {width}×{height} pixels is too long: one side may be at most {MAX_ASPECT_RATIO} times the "
            "other",
            code="media_aspect_ratio",
        )


def to_patches(frames: np.ndarray, spec: ModelSpec) -> tuple[np.ndarray, tuple[int, int, int]]:
    """frames: uint8 [F, 3, H, W], H and W multiples of patch · merge. A last group of frames is filled with its last.

    Returns uint8 patches [t·h·w, 3 · temporal · patch · patch] and (t, h, w).
    """
    count, channels, height, width = frames.shape
    temporal, patch, merge = spec.temporal_patch_size, spec.patch_size, spec.merge_size
    t, h, w = -(-count // temporal), height // patch, width // patch
    if count % temporal:
        fill = np.broadcast_to(frames[-1:], (t * temporal - count, *frames.shape[1:]))
        frames = np.concatenate([frames, fill])
    # A patch's row of pixels moves as one element: half the time of moving bytes.
    rows = np.ascontiguousarray(frames).view(f"V{patch}")
    split = rows.reshape(t, temporal, channels, h // merge, merge, patch, w // merge, merge)
    patches = np.ascontiguousarray(split.transpose(0, 3, 6, 4, 7, 2, 1, 5)).view(np.uint8)
    return patches.reshape(t * h * w, channels * temporal * patch * patch), (t, h, w)


def normalize(patches: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """uint8 patches to float32 ones, as the model takes them."""
    return pixels.normalize(patches, spec.image_mean, spec.image_std)


def _from_checkpoint(target: str, files: Mapping[str, Any]) -> ModelSpec | None:
    module, _, function = target.partition(":")
    spec: ModelSpec | None = getattr(importlib.import_module(module), function)(files)
    return spec


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return data
