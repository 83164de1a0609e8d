"""Small pictures and clips, made on the spot from seeds."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

GOLDEN_PROCESSOR = Path(__file__).parents[2] / "golden_processor"
TINY = Path(__file__).parents[2] / "golden" / "tiny"


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels], smooth enough for codecs."""
    small = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), channels), dtype=np.uint8)
    return np.ascontiguousarray(small.repeat(8, 0).repeat(8, 1)[:height, :width])


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def picture(height: int = 60, width: int = 90, kind: str = "PNG", seed: int = 0, **options: Any) -> bytes:
    return encode(Image.fromarray(noise(height, width, seed)), kind, **options)


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def clip(
    num_frames: int = 20,
    *,
    height: int = 64,
    width: int = 96,
    rate: int | Fraction = 10,
    codec: str = "libx264",
    container: str = "mp4",
    ticks: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """Frame i is the solid grey 10 + i·(240 / num_frames) with noise in one corner. ticks: times in milliseconds."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = width, height
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(num_frames):
            pixels = np.full((height, width, 3), grey(i, num_frames), np.uint8)
            pixels[:16, :16] = noise(16, 16, i)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if ticks is not None:
                frame.pts, frame.time_base = ticks[i], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def grey(i: int, num_frames: int) -> int:
    return 10 + i * 240 // num_frames


def turned(mp4: bytes) -> bytes:
    """The clip with the display matrix that phones write for a picture to be turned 90° clockwise."""
    at = mp4.index(b"tkhd") + 4 + 4 + 20 + 16  # version and flags, times and ids, reserved to volume
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    return mp4[:at] + matrix + mp4[at + 36 :]
