"""Requests of text a second: this gateway with one process and with several, and smg, asked in turn in one run.

Workers that answer at once, clients and gateways are processes of their own. The last column does not depend on what
else the machine does: processor time of all of a gateway's processes for one request, their supervisor's too.

    python benchmarks/gateway/throughput.py --processes 1 2 --rounds 5
    python benchmarks/gateway/throughput.py --processes 1 2 4 8 --workers 6 --load-processes 4 --clients 256
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil
import tyro
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.loop import run_loop
from msaserve.worker import server as worker_server
from msaserve.worker import servicer
from msaserve.worker.served import ServedModel
from msaserve.worker.server import WorkerServer

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
FIRST_PORT = 18_751
TINY = Path(__file__).parents[2] / "tests" / "golden" / "tiny"


@dataclass(frozen=True)
class Options:
    processes: tuple[int, ...] = (1, 2)
    """Gateway processes: one row each."""
    smg: bool = SMG is not None
    clients: int = 64
    """Connections, each with one request at a time."""
    load_processes: int = 1
    workers: int = 1
    rounds: int = 5
    seconds: float = 4.0
    """Of one measurement; every gateway has one in each round."""
    stream: bool = False
    """Ask for streams."""
    new_connections: bool = False
    """A connection for every request."""
    gateway_options: str = ""
    """More options of `msaserve gateway`, separated by spaces."""


class Answering(servicer.Servicer):
    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        prompt = len(request.tokenized.input_ids)
        if request.stream:
            yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[65], prompt_tokens=prompt))
        complete = pb.GenerateComplete(
            output_ids=[65, 2], finish_reason="stop", prompt_tokens=prompt, completion_tokens=2
        )
        yield pb.GenerateResponse(complete=complete)


def work(addresses: Queue[str]) -> None:
    """A worker, until it is killed."""

    async def serve() -> None:
        worker_server.Servicer = Answering  # type: ignore[misc]
        engine = Engine.from_checkpoint(TINY, EngineConfig(kv_cache_gib=0.01), show_progress=False)
        server = WorkerServer(AsyncEngine(engine), ServedModel.of(engine))
        addresses.put(f"grpc://127.0.0.1:{await server.start('127.0.0.1:0')}")
        await asyncio.Event().wait()

    run_loop(serve())


def load(jobs: Queue[tuple[int, int]], counts: Queue[int], options: Options, model: str) -> None:
    """Clients of one process: for every job (port, connections) as many requests as are answered in the time."""
    fields = {"model": model, "messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 4}
    body = json.dumps({**fields, "stream": options.stream})
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head += ["Connection: close"] if options.new_connections else []
    request = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode()

    async def ask_until(end: float, port: int) -> int:
        count = 0
        reader: asyncio.StreamReader | None = None
        while time.perf_counter() < end:
            if reader is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
            if length is not None:
                await reader.readexactly(int(length[1]))
            else:
                await reader.readuntil(b"0\r\n\r\n")
            count += 1
            if options.new_connections:
                writer.close()
                reader = None
        if reader is not None:
            writer.close()
        return count

    async def ask(port: int, num_clients: int) -> int:
        end = time.perf_counter() + options.seconds
        return sum(await asyncio.gather(*(ask_until(end, port) for _ in range(num_clients))))

    while True:
        counts.put(asyncio.run(ask(*jobs.get())))


class Front:
    """A gateway and all its processes."""

    def __init__(self, name: str, port: int, command: list[str]) -> None:
        self.name = name
        self.port = port
        self.rates: list[float] = []
        self.costs: list[float] = []
        self.popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self) -> list[psutil.Process]:
        top = psutil.Process(self.popen.pid)
        return [top, *top.children(recursive=True)]

    def seconds(self) -> float:
        """Of processor time so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes())

    def model(self) -> str:
        """What it serves, once it does."""
        opener = build_opener(ProxyHandler({}))
        for _ in range(600):
            try:
                with opener.open(f"http://127.0.0.1:{self.port}/v1/models") as answer:
                    return str(json.load(answer)["data"][0]["id"])
            except (OSError, ValueError, LookupError):
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} is not ready")


def commands(options: Options, addresses: list[str]) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "msaserve", "gateway", "--worker", *addresses, "--policy", "round_robin"]
    ours += options.gateway_options.split()
    names = {f"msaserve, {n} process{'es' * (n > 1)}": [*ours, "--processes", str(n)] for n in options.processes}
    commands = {name: [*line, "--port", str(FIRST_PORT + number)] for number, (name, line) in enumerate(names.items())}
    if options.smg:
        port = FIRST_PORT + len(names)
        theirs = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *addresses]
        theirs += ["--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
        commands["smg"] = [*theirs, "--worker-startup-check-interval", "1"]
    return commands


def measure(options: Options) -> None:
    context = multiprocessing.get_context("spawn")
    addresses: Queue[str] = context.Queue()
    jobs: Queue[tuple[int, int]] = context.Queue()
    counts: Queue[int] = context.Queue()
    helpers = [context.Process(target=work, args=(addresses,), daemon=True) for _ in range(options.workers)]
    for helper in helpers:
        helper.start()
    lines = commands(options, [addresses.get(timeout=120) for _ in helpers])
    fronts = [Front(name, FIRST_PORT + i, line) for i, (name, line) in enumerate(lines.items())]
    try:
        model = [front.model() for front in fronts].pop()
        for _ in range(options.load_processes):
            helpers.append(context.Process(target=load, args=(jobs, counts, options, model), daemon=True))
            helpers[-1].start()
        for number in range(options.rounds + 1):  # the first is not counted
            for front in fronts:
                before = front.seconds()
                for _ in range(options.load_processes):
                    jobs.put((front.port, options.clients // options.load_processes))
                total = sum(counts.get(timeout=60) for _ in range(options.load_processes))
                if number:
                    front.rates.append(total / options.seconds)
                    front.costs.append((front.seconds() - before) / total)
        print("| gateway | requests a second, median | best | processor ms a request, median | best | MiB |")
        print("|---|---|---|---|---|---|")
        for front in fronts:
            memory = sum(process.memory_info().rss for process in front.processes()) >> 20
            cells = [front.name, f"{statistics.median(front.rates):,.0f}", f"{max(front.rates):,.0f}"]
            cells += [f"{statistics.median(front.costs) * 1e3:.2f}", f"{min(front.costs) * 1e3:.2f}", str(memory)]
            print(f"| {' | '.join(cells)} |")
    finally:
        for front in fronts:
            front.popen.terminate()
            front.popen.wait()
        for helper in helpers:
            helper.kill()


if __name__ == "__main__":
    measure(tyro.cli(Options))
