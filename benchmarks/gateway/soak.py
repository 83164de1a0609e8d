"""Servers under load for a long time: is memory flat, is every answer right or a clear error, is nothing left behind?

    python benchmarks/gateway/soak.py --seconds 600 --processes 2       # text, pictures, clips, disconnects, nonsense
    python benchmarks/gateway/soak.py --scenario slow --clients 500     # streams whose readers are slow
    python benchmarks/gateway/soak.py --scenario kill                   # two workers, one of them killed every 20 s

Prints the memory of every process over time as a Markdown table, what became of the requests, and what was wrong; exits
with 1 if anything was. The first third is not judged: buffers and caches grow to what the load needs.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import av
import httpx
import numpy as np
import psutil
import tyro
from media import GOLDEN, url
from PIL import Image

Role = Literal["gateway", "workers", "media"]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Options:
    scenario: Literal["mix", "slow", "kill"] = "mix"
    seconds: float = 600.0
    clients: int = 16
    processes: int = 1
    """Gateway processes."""
    checkpoint: Path = GOLDEN / "tiny"
    interval: float = 10.0
    """Seconds between two looks at the processes, and half of those between two kills."""
    growth_mib: float = 24.0
    """What a role's memory may be higher at the end than after the first third."""
    seed: int = 0


class Process:
    """One msaserve command; its log goes to standard error."""

    def __init__(self, pattern: str, *arguments: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "msaserve", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._popen.stdout is not None
        found = next((m for line in self._popen.stdout if (m := re.search(pattern, line))), None)
        if found is None:
            raise RuntimeError(f"{arguments[0]} ended with {self._popen.wait()}")
        self.address = found.group(1)

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._popen.pid)
        return [process, *process.children(recursive=True)]

    def end(self, number: int = signal.SIGTERM) -> int:
        self._popen.send_signal(number)
        return self._popen.wait(60)


def sizes(options: Options) -> list[str]:
    return [str(options.checkpoint), "--kv-cache-gib", "0.1", "--max-model-len", "4096", "--max-num-seqs", "512"]


class Servers:
    """`serve`, or for the scenario "kill" a gateway before two workers."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.workers: list[Process] = []
        port = ["--port", "0", "--processes", str(options.processes)]
        if options.scenario == "kill":
            self.workers = [self._worker("127.0.0.1:0") for _ in range(2)]
            addresses = [worker.address for worker in self.workers]
            self.front = Process(r"curl (http://[^/]+)", "gateway", *port, "--worker", *addresses)
        else:
            self.front = Process(r"curl (http://[^/]+)", "serve", *sizes(options), *port)

    def _worker(self, address: str) -> Process:
        return Process(r"--worker (grpc://\S+)", "worker", *sizes(self._options), "--grpc", address)

    def replace(self, index: int) -> None:
        """Kill a worker and start another at its address."""
        worker = self.workers[index]
        worker.end(signal.SIGKILL)
        self.workers[index] = self._worker(worker.address.removeprefix("grpc://"))

    def look(self) -> tuple[dict[Role, float], int]:
        """MiB by role, and open files over all processes."""
        memory: dict[Role, float] = {"gateway": 0.0, "workers": 0.0, "media": 0.0}
        num_files = 0
        for top in (self.front, *self.workers):
            for process in top.processes():
                with suppress(psutil.Error):
                    command = " ".join(process.cmdline())
                    is_worker = "worker.child" in command or " worker " in command
                    role: Role = "media" if "media.process" in command else "workers" if is_worker else "gateway"
                    memory[role] += process.memory_info().rss / 2**20
                    num_files += process.num_fds()
        return memory, num_files

    def end(self) -> int:
        code = self.front.end()
        return max([code, *(worker.end() for worker in self.workers)])


class Media:
    """Pictures and clips that no cache has seen: bytes behind a file's end change its hash and nothing else."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._rng = random.Random(seed)
        self._pictures = [
            self._picture(rng, kind, (int(h), int(w)))
            for kind in ("PNG", "JPEG", "WEBP")
            for h, w in rng.integers(30, 500, (6, 2))
        ]
        self._clips = [self._clip(rng, seconds) for seconds in (1, 3)]

    def part(self) -> dict[str, Any]:
        kind, files = ("video_url", self._clips) if self._rng.random() < 0.1 else ("image_url", self._pictures)
        return {"type": kind, kind: {"url": url(self._rng.choice(files) + self._rng.randbytes(8))}}

    @staticmethod
    def _picture(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, kind)
        return buffer.getvalue()

    @staticmethod
    def _clip(rng: np.random.Generator, seconds: int) -> bytes:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format="mp4") as output:
            stream: Any = output.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
            for _ in range(10 * seconds):
                pixels = rng.integers(0, 256, (120, 160, 3), dtype=np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode(None))
        return buffer.getvalue()


class Clients:
    def __init__(self, options: Options, address: str) -> None:
        self._options = options
        self._media = Media(options.seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(base_url=address, trust_env=False, timeout=120, limits=limits)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, number: int, until: float) -> None:
        rng = random.Random(self._options.seed * 1000 + number)
        while time.monotonic() < until:
            try:
                if self._options.scenario == "mix":
                    await self._one(rng)
                else:
                    await self._stream(TEXT, self._text(rng, 60), rng, slow=self._options.scenario == "slow")
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}"[:300])

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    def _text(self, rng: random.Random, max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._options.checkpoint.name,
            "prompt": [rng.randrange(3, 259) for _ in range(rng.choice([1, 16, 17, 200, 900]))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stop": rng.choice([None, None, "e"]),
            "n": rng.choice([1, 1, 2]),
        }

    def _chat(self, rng: random.Random) -> dict[str, Any]:
        parts = [
            {"type": "text", "text": "What is this?"},
            *(self._media.part() for _ in range(rng.choice([0, 1, 1, 3]))),
        ]
        messages = [{"role": "user", "content": parts}]
        return {"model": self._options.checkpoint.name, "max_tokens": rng.choice([1, 8, 30]), "messages": messages}

    async def _one(self, rng: random.Random) -> None:
        path, body = (CHAT, self._chat(rng)) if rng.random() < 0.5 else (TEXT, self._text(rng, rng.choice([1, 8, 60])))
        draw = rng.random()
        if draw < 0.1:
            await self._nonsense(path, body, rng)
        elif draw < 0.25:
            await self._leave(path, body, rng)
        elif draw < 0.5:
            answer = await self.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] >= 1
            self.counts["whole"] += 1
        else:
            await self._stream(path, body, rng, leaves=rng.random() < 0.3, slow=rng.random() < 0.2)

    async def _stream(
        self, path: str, body: dict[str, Any], rng: random.Random, *, leaves: bool = False, slow: bool = False
    ) -> None:
        last, num_lines, leave_after = "", 0, rng.randrange(1, 20)
        async with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                last, num_lines = line or last, num_lines + 1
                if leaves and num_lines > leave_after:
                    self.counts["left a stream"] += 1
                    return
                if slow:
                    await asyncio.sleep(rng.uniform(0, 0.2))
        if last == "data: [DONE]":
            self.counts["streams"] += 1
        elif self._options.scenario == "kill" and "the worker failed" in json.loads(last[6:])["error"]["message"]:
            self.counts["streams lost with their worker"] += 1
        else:
            raise AssertionError(f"a stream ended with {last[:200]}")

    async def _leave(self, path: str, body: dict[str, Any], rng: random.Random) -> None:
        """At any moment: while a picture is prepared, before the first token, between two."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.http.post(path, json=body), rng.uniform(0.001, 0.15))
        self.counts["left an answer"] += 1

    async def _nonsense(self, path: str, body: dict[str, Any], rng: random.Random) -> None:
        broken = rng.choice(
            [
                {"max_tokens": -1},
                {"temperature": "hot"},
                {"prompt": [10**6]} if path == TEXT else {"messages": [{"role": "user", "content": 5}]},
                {"prompt": [5] * 5000} if path == TEXT else {"tools": [{"type": "function"}]},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            ]
        )
        answer = await self.http.post(path, json={**body, **broken})
        assert 400 <= answer.status_code < 500, f"{broken}: {answer.status_code} {answer.text}"
        self.counts["refused"] += 1


async def measure(options: Options) -> int:
    servers = await asyncio.to_thread(Servers, options)
    clients = Clients(options, servers.front.address)
    start = time.monotonic()
    until = start + options.seconds
    load = [asyncio.create_task(clients.run(i, until)) for i in range(options.clients)]
    rows: list[tuple[float, dict[Role, float]]] = []
    num_kills = 0
    print("| s | gateway, MiB | workers | media processes | open files | requests |\n|---|---|---|---|---|---|")
    while not all(task.done() for task in load):
        await asyncio.wait(load, timeout=options.interval)
        memory, num_files = await asyncio.to_thread(servers.look)
        seconds = time.monotonic() - start
        rows.append((seconds, memory))
        cells = [f"{seconds:.0f}", *(f"{mib:.0f}" for mib in memory.values()), str(num_files)]
        print(f"| {' | '.join(cells)} | {clients.counts.total()} |", flush=True)
        if options.scenario == "kill" and len(rows) % 2 == 0 and time.monotonic() < until:
            await asyncio.to_thread(servers.replace, num_kills % 2)
            num_kills += 1
    wrong = clients.wrong + await left_behind(clients)
    if options.scenario != "kill":  # a worker that was started anew is another process
        wrong += growth(rows, options)
    await clients.http.aclose()
    code = await asyncio.to_thread(servers.end)
    if code:
        wrong.append(f"a process ended with {code}")
    print(f"\n{dict(clients.counts)}" + (f", {num_kills} workers killed" if num_kills else ""))
    for text, count in Counter(wrong).most_common(20):
        print(f"WRONG, {count} times: {text}")
    return 1 if wrong else 0


async def left_behind(clients: Clients) -> list[str]:
    """What should be nothing once all requests have ended."""
    names = ("msaserve:num_requests_running", "msaserve:num_used_pages", "msaserve:media_bytes_in_flight")
    found: dict[str, float] = {}
    for _ in range(100):
        found = {name: await clients.metric(name) for name in names}
        found["requests besides this one"] = await clients.metric("smg_http_connections_active") - 1
        if not any(found.values()):
            break
        await asyncio.sleep(0.1)
    wrong = [f"{name} is {value:g} at the end" for name, value in found.items() if value]
    memory = [path.name for path in Path("/dev/shm").glob("msaserve*")]
    return wrong + ([f"shared memory left: {memory}"] if memory else [])


def growth(rows: list[tuple[float, dict[Role, float]]], options: Options) -> list[str]:
    wrong = []
    third = len(rows) // 3
    for role in ("gateway", "workers", "media"):
        then = statistics.median(memory[role] for _, memory in rows[third : 2 * third] or rows)
        now = statistics.median(memory[role] for _, memory in rows[-max(third, 1) :])
        print(f"\n{role}: {then:.0f} MiB in the second third, {now:.0f} in the last")
        if now - then > options.growth_mib:
            wrong.append(f"{role} grew by {now - then:.0f} MiB")
    return wrong


if __name__ == "__main__":
    sys.exit(asyncio.run(measure(tyro.cli(Options))))
