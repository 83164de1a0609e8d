"""One file to patches: decode, sample, resize, cut. Pure; runs in a media process."""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor

import numpy as np

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.resample import Resize
from msaserve.gateway.media.spec import Hints, ModelSpec, Prepared, to_patches
from msaserve.types import Modality


def prepare(
    modality: Modality,
    data: bytes,
    hints: Hints,
    spec: ModelSpec,
    limits: MediaLimits,
    threads: Executor | None = None,
) -> Prepared:
    """threads: for the resize of large pictures.

    Raises InvalidRequestError, saying why, for a file that cannot be served."""
    if not data:
        raise InvalidRequestError("the file is empty", code="media_empty")
    times: tuple[float, ...] = ()
    if modality == "image":
        frames = _image_frames(data, hints, spec, limits, threads)
    else:
        frames, times = _video_frames(data, hints, spec, limits, threads)
    patches, grid = to_patches(frames, spec)
    digest = hashlib.sha256(np.asarray(grid, np.int64).tobytes())
    digest.update(patches.data)
    return Prepared(modality, patches, grid, times, digest.digest())


def _image_frames(
    data: bytes, hints: Hints, spec: ModelSpec, limits: MediaLimits, threads: Executor | None
) -> np.ndarray:
    # Pillow and FFmpeg are loaded when first needed: a gateway that sees no clip never pays for FFmpeg.
    from msaserve.gateway.media.image import decode_image

    def check(height: int, width: int) -> None:
        new_height, new_width = spec.image_size(height, width, hints)
        _check_size(1, new_height, new_width, spec, limits)

    pixels = decode_image(data, limits, check)
    height, width = pixels.shape[1:]
    new_height, new_width = spec.image_size(height, width, hints)
    return Resize(height, width, new_height=new_height, new_width=new_width)(pixels, threads)[None]


def _video_frames(
    data: bytes, hints: Hints, spec: ModelSpec, limits: MediaLimits, threads: Executor | None
) -> tuple[np.ndarray, tuple[float, ...]]:
    from msaserve.gateway.media.video import sample_video

    sampling = sample_video(data, lambda times: spec.sample(times, hints), limits)
    resizes: dict[tuple[int, int], Resize] = {}
    frames: np.ndarray | None = None
    times: list[float] = []
    for frame in sampling.frames:
        height, width = frame.pixels.shape[1:]
        if frames is None:
            new_height, new_width = spec.video_size(sampling.num_frames, height, width, hints)
            _check_size(sampling.num_frames, new_height, new_width, spec, limits)
            frames = np.empty((sampling.num_frames, 3, new_height, new_width), np.uint8)
        if (height, width) not in resizes:
            # A stream may change its size on the way; every frame gets the first one's.
            resizes = {(height, width): Resize(height, width, new_height=frames.shape[2], new_width=frames.shape[3])}
        frames[len(times)] = resizes[height, width](frame.pixels, threads)
        times.append(frame.time)
    assert frames is not None
    return frames[: len(times)], tuple(times)


def _check_size(num_frames: int, height: int, width: int, spec: ModelSpec, limits: MediaLimits) -> None:
    num_bytes = max(num_frames, spec.temporal_patch_size) * height * width * 3
    if num_bytes > limits.max_item_bytes:
        raise InvalidRequestError(
            f"{num_frames} frames of {width}×{height} pixels make {num_bytes} bytes of patches; at most "
            f"{limits.max_item_bytes} are taken",
            code="media_too_large",
        )
