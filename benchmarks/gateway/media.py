"""What preparing a picture or a clip costs: from the data: URL of a request to float32 patches.

Every item goes through the whole pipeline (base64, a media process, its decoder, the resize, patches, normalisation)
with nothing kept from the time before. Prints a Markdown table: wall-clock medians, and the processor time of one item
over all processes, which does not depend on what else the machine does.

    python benchmarks/gateway/media.py --clip-seconds 10
"""

from __future__ import annotations

import asyncio
import base64
import io
import platform
import resource
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import tyro
from PIL import Image

from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pipeline import MediaPart, MediaPipeline
from msaserve.gateway.media.pool import num_cores
from msaserve.gateway.media.spec import Hints, find_spec
from msaserve.types import Modality

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"


@dataclass(frozen=True)
class Options:
    checkpoint: Path = GOLDEN / "tiny"
    repeats: int = 7
    clip_seconds: int = 10
    """Length of the clip of 1920×1080 at 30 frames a second, H.264; 0: no clip."""
    processes: int | None = None
    """Media processes. Default: one for each core."""


@dataclass(frozen=True)
class Case:
    name: str
    modality: Modality
    data: bytes
    count: int = 1
    """Parts in one request, all different."""


def main(options: Options) -> None:
    asyncio.run(measure(options))


async def measure(options: Options) -> None:
    source = find_spec(options.checkpoint)
    assert source is not None
    limits = MediaLimits(max_cache_bytes=0, video_timeout_s=600.0)
    media = MediaPipeline(source, limits, num_processes=options.processes or num_cores())
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {num_cores()} cores, ", end="")
    print(f"{options.processes or num_cores()} media processes, median of {options.repeats}\n")
    print("| item | ms | processor ms | tokens |\n|---|---|---|---|")
    try:
        for case in cases(options):
            await run(media, case, 2)
            times, used, tokens = [], [], 0
            for _ in range(options.repeats):
                busy, start = processor_seconds(media), time.perf_counter()
                tokens = await run(media, case, 1)
                times.append(time.perf_counter() - start)
                used.append(processor_seconds(media) - busy)
            print(f"| {case.name} | {statistics.median(times) * 1e3:.1f} | {min(used) * 1e3:.1f} | {tokens} |")
        sizes = [psutil.Process(p._popen.pid).memory_info().rss >> 20 for p in media._pool._idle if p._popen]
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"\nmedia processes now: {', '.join(map(str, sizes))} MiB; this process at most: {own} MiB")
    finally:
        await media.close()


async def run(media: MediaPipeline, case: Case, times: int) -> int:
    tokens = 0
    for _ in range(times):
        # Bytes after the end of a file change nothing but its hash: the parts of a request are different files.
        parts = [
            MediaPart(case.modality, url(case.data + i.to_bytes(2, "little") * (case.count > 1)), Hints(), "part")
            for i in range(case.count)
        ]
        async with media.lease() as lease:
            items = await media.prepare(parts, lease)
            placed = media._items(items, [(0, 0)] * len(items), False)
            tokens = sum(len(item.patches) for item in placed) // 4
    return tokens


def processor_seconds(media: MediaPipeline) -> float:
    """Of this process and the media processes."""
    total = time.process_time()
    for process in media._pool._idle:
        if process._popen is not None:
            used = psutil.Process(process._popen.pid).cpu_times()
            total += used.user + used.system
    return total


def cases(options: Options) -> list[Case]:
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (300, 400, 3), dtype=np.uint8))

    def encode(image: Image.Image, kind: str, **choices: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **choices)
        return buffer.getvalue()

    def noise(size: int) -> bytes:
        return encode(Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)), "PNG")

    def photo(width: int, height: int) -> bytes:
        return encode(small.resize((width, height), Image.Resampling.BICUBIC), "JPEG", quality=90)

    pictures = [
        Case("PNG 448², noise", "image", noise(448)),
        Case("JPEG 1920×1080", "image", photo(1920, 1080)),
        Case("JPEG 4000×3000", "image", photo(4000, 3000)),
        Case("24 PNG 672², noise, one request", "image", noise(672), 24),
    ]
    if not options.clip_seconds:
        return pictures
    name = f"H.264 1920×1080, 30 fps, {options.clip_seconds} s"
    return [*pictures, Case(name, "video", clip(small, options.clip_seconds))]


def clip(picture: Image.Image, seconds: int) -> bytes:
    pixels = np.asarray(picture.resize((2400, 1400), Image.Resampling.BICUBIC))
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": "250"})
        stream.width, stream.height, stream.pix_fmt = 1920, 1080, "yuv420p"
        for i in range(30 * seconds):
            x, y = abs((3 * i) % 960 - 480), abs((2 * i) % 640 - 320)
            crop = np.ascontiguousarray(pixels[y : y + 1080, x : x + 1920])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(crop, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


if __name__ == "__main__":
    main(tyro.cli(Options))
