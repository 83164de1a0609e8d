"""The real smg (a gateway in Rust that speaks the same protocols) in front of a worker, and media to send."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from waits import SECONDS, free_port

# The tiny checkpoint's template in the words by which smg recognises that a template takes lists of parts; of others it
# makes one string, media first.
TEMPLATE = """
{{- ']~!b[' -}}
{%- for message in messages -%}
{{- ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for item in message.content -%}
{%- if item.type == 'text' -%}{{- item.text -}}
{%- elif item.type == 'image' -%}{{- ']<]image[>[' -}}
{%- elif item.type == 'video' -%}{{- ']<]video[>[' -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '[e~[\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\n' -}}{%- endif -%}
"""
SMG = Path(sys.executable).with_name("smg")

needs_smg = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None or not SMG.exists(), reason="smg is not installed"
)
needs_ffmpeg = pytest.mark.skipif(
    not (shutil.which("ffmpeg") and shutil.which("ffprobe")), reason="smg decodes video with the ffmpeg programs"
)


@dataclass
class Smg:
    http: httpx.AsyncClient
    metrics: str


@asynccontextmanager
async def running_smg(worker_port: int, log: Path) -> AsyncIterator[Smg]:
    port, metrics_port = free_port(), free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(SMG),
                "launch",
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--worker-urls", f"grpc://127.0.0.1:{worker_port}", "--policy", "cache_aware"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
                *("--worker-startup-check-interval", "1", "--load-monitor-interval", "1"),
                *("--multimodal-tensor-transport", "auto"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=200) as http:
                await _until_ready(http, log)
                yield Smg(http, f"http://127.0.0.1:{metrics_port}/metrics")
        finally:
            process.kill()  # asked politely it waits for minutes
            process.wait()


async def _until_ready(http: httpx.AsyncClient, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if (await http.get("/readiness")).status_code == 200 and (await http.get("/v1/models")).json()["data"]:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace")[-3000:])


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(height: int, width: int, seed: int = 0) -> dict[str, Any]:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": _data_url("image/png", file.getvalue())}}


def clip(seconds: float) -> dict[str, Any]:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        stream.time_base = Fraction(1, 10)
        for i in range(round(seconds * 10)):
            frame = av.VideoFrame.from_ndarray(np.full((120, 160, 3), 3 * i % 256, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", file.getvalue())}}


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
