"""Seeded damage to valid files, through a media process: a clear refusal or patches, never a crash, a hang or a leak.

MSASERVE_TEST_FUZZ_FILES says how many (default 400; 10,000 take about a minute).
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import psutil
from PIL import Image
from samples import TINY, clip, encode, noise, picture

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pool import MediaPool
from msaserve.gateway.media.spec import Hints, find_spec
from msaserve.types import Modality

NUM_FILES = int(os.environ.get("MSASERVE_TEST_FUZZ_FILES", "400"))
MAX_GROWTH_MIB = 150
CLIPS = (
    ("libx264", "mp4"),
    ("libx264", "matroska"),
    ("libx264", "mpegts"),
    ("libvpx-vp9", "webm"),
    ("mpeg4", "avi"),
    ("gif", "gif"),
    ("libsvtav1", "mp4"),
    ("libx265", "mp4"),
)


def valid_files() -> list[tuple[Modality, bytes]]:
    files: list[tuple[Modality, bytes]] = [
        ("image", picture(40, 56, kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    ]
    files += [
        ("image", encode(Image.fromarray(noise(30, 40, channels=4)), "PNG")),
        ("image", encode(Image.new("P", (30, 30)), "GIF")),
        ("image", encode(Image.new("CMYK", (30, 30)), "TIFF")),
    ]
    files += [("video", clip(8, height=32, width=32, codec=codec, container=name)) for codec, name in CLIPS]
    return files


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut short, with some bytes changed, or after something else."""
    damaged = bytearray(data if rng.random() < 0.5 else data[: rng.integers(1, len(data) + 1)])
    for _ in range(rng.integers(0, 12)):
        damaged[rng.integers(len(damaged))] = rng.integers(256)
    if rng.random() < 0.1:
        damaged[:0] = rng.bytes(8)
    return bytes(damaged)


async def test_damaged_files() -> None:
    source = find_spec(TINY)
    assert source is not None
    pool = MediaPool(source, MediaLimits(max_cache_bytes=0), num_processes=1)
    files, rng = valid_files(), np.random.default_rng(11)
    outcomes: Counter[str | None] = Counter()
    memory: list[int] = []
    for _ in range(NUM_FILES):
        modality, data = files[rng.integers(len(files))]
        try:
            await pool.prepare(modality, damage(data, rng), Hints())
        except InvalidRequestError as error:
            outcomes[error.code] += 1
        else:
            outcomes["prepared"] += 1
        # A process that failed or has done its share is gone.
        memory += [psutil.Process(p._popen.pid).memory_info().rss >> 20 for p in pool._idle if p._popen is not None]
    await pool.close()
    assert outcomes.keys().isdisjoint({None, "media_decoder_crashed", "media_timeout"}), outcomes
    assert {"prepared", "media_wrong_type", "media_decode_failed"} <= outcomes.keys()
    assert memory[-1] - memory[len(memory) // 4] < MAX_GROWTH_MIB, memory[:: max(1, len(memory) // 50)]
