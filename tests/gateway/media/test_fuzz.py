"""Seeded damage to valid files, through a media process and over HTTP: a clear refusal or patches, never a crash, a
hang or a leak.

MSASERVE_TEST_FUZZ_FILES says how many (default 400; 10,000 take some minutes; -s shows what became of them).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import httpx
import numpy as np
import psutil
import pytest
from fake_engine import serve
from PIL import Image
from samples import TINY, clip, data_url, encode, noise, picture
from test_chat_media import fake

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pipeline import MediaPipeline
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
    """Cut short, with some bytes changed, after something else, or nothing but chance."""
    if rng.random() < 0.05:
        return data[: rng.integers(24)] + rng.bytes(rng.integers(2000))
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


@pytest.mark.timeout(3600)
async def test_damaged_files_over_http() -> None:
    """Four at a time through a whole gateway. Its memory and its open files stay what they were."""
    source = find_spec(TINY)
    assert source is not None
    media = MediaPipeline(source, MediaLimits(max_cache_bytes=0), num_processes=2)
    files, rng = valid_files(), np.random.default_rng(12)
    outcomes: Counter[str] = Counter()
    own, seen, engine = psutil.Process(), [], fake()
    with serve(engine, media=media, max_body_bytes=2**24) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http:

            async def ask(modality: Modality, data: bytes) -> str:
                part = {"type": f"{modality}_url", f"{modality}_url": {"url": data_url(data)}}
                body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
                answer = await http.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    return "200"
                error = answer.json()["error"]
                assert answer.status_code == 400, answer.text
                assert error["message"]
                assert error["param"] == "messages[0].content[0]"
                return str(error["code"])

            for start in range(0, NUM_FILES, 4):
                batch = [files[rng.integers(len(files))] for _ in range(min(4, NUM_FILES - start))]
                outcomes.update(await asyncio.gather(*(ask(kind, damage(data, rng)) for kind, data in batch)))
                engine.requests.clear()  # it keeps what it is asked, patches and all
                workers = [child.memory_info().rss >> 20 for child in own.children(recursive=True)]
                seen.append((own.memory_info().rss >> 20, own.num_fds(), max(workers, default=0)))
            assert await ask("image", picture()) == "200"
    assert outcomes.keys().isdisjoint({"None", "media_decoder_crashed", "media_timeout"}), outcomes
    assert {"200", "media_wrong_type", "media_decode_failed"} <= outcomes.keys()
    quarter, last = seen[len(seen) // 4], seen[-1]
    print(f"\n{NUM_FILES} files: {dict(outcomes)}")
    print(f"MiB of the gateway, open files, MiB of a media process: {quarter} after a quarter, {last} at the end")
    assert last[0] - quarter[0] < MAX_GROWTH_MIB, seen[:: max(1, len(seen) // 20)]
    assert last[1] - quarter[1] < 20
    assert max(workers for _, _, workers in seen) < 1024
    assert media._budget.used == 0
