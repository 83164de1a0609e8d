"""Under load: many streams whose readers are slow, and a worker that is killed. The long versions are in
benchmarks/gateway/soak.py."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from process_driver import ADDRESS, SECONDS, URL, gateway, serve, worker
from waits import until_true

NUM_STREAMS = 500
NUM_TOKENS = 12


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "stream": True, **fields}


async def slow_stream(url: str, seed: int) -> str:
    """The whole answer, through a small window and with pauses: the server cannot send it ahead."""
    rng = random.Random(seed)
    address = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    body = json.dumps(completion(max_tokens=NUM_TOKENS, prompt=[5 + seed % 200, 6, 7])).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    chunks = []
    while chunk := await reader.read(600):
        chunks.append(chunk)
        await asyncio.sleep(rng.uniform(0.0, 0.3))
    writer.close()
    return b"".join(chunks).decode()


async def test_500_streams_with_slow_readers() -> None:
    with serve("--max-num-seqs", "512") as server:
        url = await asyncio.to_thread(server.line, URL)
        family = [psutil.Process(server.popen.pid), *psutil.Process(server.popen.pid).children(recursive=True)]
        async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
            streams = [asyncio.create_task(slow_stream(url, seed)) for seed in range(NUM_STREAMS)]
            # Who reads at once is served among them.
            quick = await http.post(f"{url}/v1/completions", json=completion(stream=False, max_tokens=4))
            assert quick.json()["usage"]["completion_tokens"] == 4
            answers = await asyncio.gather(*streams)
            for answer in answers:
                assert answer.startswith("HTTP/1.1 200"), answer
                assert answer.count('"text"') >= 1
                assert "[DONE]" in answer
                assert '"error"' not in answer
            for quiet in ('msaserve:num_used_pages{model_name="tiny"} 0.0', "smg_http_connections_active 1.0"):
                while quiet not in (await http.get(f"{url}/metrics")).text:
                    await asyncio.sleep(0.05)
        assert sum(p.num_fds() for p in family) < 300  # no connection is left
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.log


async def test_a_client_that_never_reads_is_cut_off() -> None:
    with serve("--stall-seconds", "1") as server:
        url = await asyncio.to_thread(server.line, URL)
        address = urlsplit(url)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect((address.hostname, address.port))
            body = json.dumps(completion(max_tokens=4000, n=8)).encode()
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=SECONDS) as http:
                most_running, is_cut = 0.0, False
                while not is_cut:
                    metrics = (await http.get("/metrics")).text
                    running = float(re.findall(r"num_requests_running\{.*\} (\S+)", metrics)[0])
                    most_running = max(most_running, running)
                    is_cut = most_running > 0 and not running and "smg_http_connections_active 1.0" in metrics
                    await asyncio.sleep(0.1)
                assert 'msaserve:generation_tokens_total{model_name="tiny"} 32000.0' not in metrics


async def test_a_worker_killed_under_load() -> None:
    """Eight long requests run in each of two workers, and twelve wait. Only the eight that run in one are lost."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker("127.0.0.1:0", "--max-num-seqs", "8", holds=True)) for _ in range(2)]
        addresses = [process.line(ADDRESS) for process in workers]
        front = stack.enter_context(gateway(*addresses, policy="least_load"))
        url = front.line(URL)
        begun: set[int] = set()

        async def stream(i: int) -> tuple[int, list[str]]:
            lines = []
            body = completion(max_tokens=3000 if i < 16 else NUM_TOKENS, prompt=[5 + i, 6, 7])
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        lines.append(line)
                        begun.add(i)
                return answer.status_code, lines

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=SECONDS, limits=limits) as http:
            tasks = [asyncio.create_task(stream(i)) for i in range(16)]
            await until_true(lambda: len(begun) == 16)
            tasks += [asyncio.create_task(stream(i)) for i in range(16, 40)]
            sent, metrics = 'smg_worker_requests_active{worker="%s"} 20.0', ""
            while not all(sent % address in metrics for address in addresses):
                metrics = (await http.get(f"{url}/metrics")).text
                await asyncio.sleep(0.05)
            workers[0].popen.kill()
            await until_true(lambda: sum(task.done() for task in tasks) == 8)
            lost = [task.result() for task in tasks if task.done()]
            assert {status for status, _ in lost} == {200}
            assert all("the worker failed" in lines[-1] for _, lines in lost)
            for task in tasks[:16]:  # the other eight have run long enough
                task.cancel()
            whole = await asyncio.gather(*tasks[16:])
            assert {(status, lines[-1]) for status, lines in whole} == {(200, "data: [DONE]")}
            metrics = (await http.get(f"{url}/metrics")).text
            assert f'smg_worker_retries_total{{model="tiny",worker="{addresses[0]}"}} 12.0' in metrics
        assert "Traceback" not in front.log
