"""Latency that this gateway and smg (the reference in Rust, PyPI `smg`) add, in front of the same worker, in turn.

The worker answers every request with one token as soon as it has read the message, so what is measured is the way from
HTTP to a message with patches and back. Every request holds new media: nothing is found in a cache. Prints a Markdown
table of medians and minima in milliseconds, then requests a second of many clients at once, and memory. smg decodes
clips with the ffmpeg programs and is left out where there are none.

    python benchmarks/gateway/beside_smg.py --clip-seconds 60
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import tyro
from media import Case, Options, cases, url
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.rpc.media import shm_names
from msaserve.worker import server as worker_server
from msaserve.worker import servicer
from msaserve.worker.served import ServedModel
from msaserve.worker.server import WorkerServer

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
OURS, THEIRS = "msaserve", "smg"
LONG = "text of 480,000 characters"
PORTS = {OURS: 18701, THEIRS: 18702}


class Answering(servicer.Servicer):
    """A worker that takes the tensors and answers at once. Prompts may have a million tokens."""

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        info = await super().GetModelInfo(request, context)
        info.max_context_length, info.max_req_input_len = 2**20, 2**20 - 1
        return info

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        for name in shm_names(
            [*([request.mm_inputs] if request.HasField("mm_inputs") else []), *request.extra_mm_inputs]
        ):
            (Path("/dev/shm") / name).unlink(missing_ok=True)
        prompt = len(request.tokenized.input_ids)
        if request.stream:
            yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[65], prompt_tokens=prompt))
        complete = pb.GenerateComplete(
            output_ids=[65, 2], finish_reason="stop", prompt_tokens=prompt, completion_tokens=2
        )
        yield pb.GenerateResponse(complete=complete)


@dataclass(frozen=True)
class BesideOptions(Options):
    repeats: int = 15
    processes: int = 1
    """Of this gateway."""
    num_clients: int = 64
    seconds: float = 5.0
    """For which they ask."""


async def measure(options: BesideOptions) -> None:
    worker_server.Servicer = Answering  # type: ignore[misc]
    engine = Engine.from_checkpoint(options.checkpoint, EngineConfig(kv_cache_gib=0.05), show_progress=False)
    server = WorkerServer(AsyncEngine(engine), ServedModel.of(engine))
    address = f"grpc://127.0.0.1:{await server.start('127.0.0.1:0')}"
    ours = [sys.executable, "-m", "msaserve", "gateway", "--worker", address, "--port", str(PORTS[OURS])]
    ours += ["--processes", str(options.processes)]
    theirs = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(PORTS[THEIRS]), "--worker-urls", address]
    theirs += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", "18703"]
    theirs += ["--worker-startup-check-interval", "1", "--multimodal-tensor-transport", "auto"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = {OURS: subprocess.Popen(ours, **quiet), THEIRS: subprocess.Popen(theirs, **quiet)}  # type: ignore[call-overload]
    try:
        clients = {
            name: httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600)
            for name, port in PORTS.items()
        }
        for client in clients.values():
            await until_ready(client)
        model = (await clients[OURS].get("/v1/models")).json()["data"][0]["id"]
        print("| request | msaserve, median | smg, median | msaserve, best | smg, best |\n|---|---|---|---|---|")
        texts = [Case("text", "image", b"", 0), Case(LONG, "image", b"", 0)]
        for number, case in enumerate([*texts, *cases(options)]):
            times = await run(clients, model, case, number, options.repeats)
            row = [statistics.median(t) * 1e3 if t else None for t in times.values()]
            row += [min(t) * 1e3 if t else None for t in times.values()]
            print(f"| {case.name} | " + " | ".join("–" if v is None else f"{v:.1f}" for v in row) + " |", flush=True)
        for name in clients:
            rate = await requests_a_second(PORTS[name], model, options)
            print(f"\n{name}: {rate:.0f} requests of text a second, {options.num_clients} clients")
        for name, process in running.items():
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            print(f"{name}: {', '.join(str(p.memory_info().rss >> 20) for p in tree)} MiB")
    finally:
        for process in running.values():
            process.kill()
            process.wait()
        await server.close()


async def run(
    clients: dict[str, httpx.AsyncClient], model: str, case: Case, number: int, repeats: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in clients}
    has_programs = shutil.which("ffmpeg") is not None and shutil.which("ffprobe") is not None
    for i in range(repeats + 2):
        for name, client in clients.items():
            if name == THEIRS and case.modality == "video" and not has_programs:
                continue
            kind = f"{case.modality}_url"
            words = long_text(i) if case.name == LONG else "What is this?"
            parts: list[dict[str, Any]] = [{"type": "text", "text": f"{words}{i}"}]
            for part in range(case.count):
                unique = (number * 10_000_000 + i * 1000 + part).to_bytes(8, "little")
                parts.append({"type": kind, kind: {"url": url(case.data + unique)}})
            body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
            start = time.perf_counter()
            response = await client.post("/v1/chat/completions", json=body)
            elapsed = time.perf_counter() - start
            if response.status_code != 200:
                raise RuntimeError(f"{name}: {response.text[:500]}")
            if i >= 2:
                times[name].append(elapsed)
    return times


def long_text(seed: int) -> str:
    """480,000 characters of words that no request before had in this order."""
    words = ["the", "quick", "brown", "fox", "over", "a", "lazy", "Zürich", "1234", "(maybe)", "foo_bar", "=", "5.6\n"]
    return " ".join(random.Random(seed).choices(words, k=130_000))[:480_000]


async def requests_a_second(port: int, model: str, options: BesideOptions) -> float:
    """Sockets and bytes alone: an HTTP library would be what is measured."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 4})
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    request = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode()

    async def ask_until(end: float) -> int:
        count = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            assert length is not None, answer
            await reader.readexactly(int(length[1]))
            count += 1
        writer.close()
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(ask_until(start + options.seconds) for _ in range(options.num_clients)))
    return sum(counts) / (time.perf_counter() - start)


async def until_ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/v1/models")).json()["data"]:
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{client.base_url} is not ready")


if __name__ == "__main__":
    asyncio.run(measure(tyro.cli(BesideOptions)))
