"""`msaserve worker` and `msaserve gateway` as processes of their own: one that dies and comes back, two of them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from process_driver import ADDRESS, SECONDS, URL, gateway, worker
from waits import free_port, until_true
from worker_driver import GREEDY, PROMPT, TINY, read, request, tokens

from msaserve.cli import main
from msaserve.errors import OverloadedError
from msaserve.gateway.grpc_client import GrpcClient


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=SECONDS) as http:
        yield http


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 24, **fields}


async def test_a_worker_that_dies_and_comes_back(http: httpx.AsyncClient) -> None:
    """The gateway is there first, and goes on through all of it."""
    address = f"127.0.0.1:{free_port()}"
    with gateway(f"grpc://{address}", served_model_name="m3") as front:
        with worker(address, holds=True) as first:
            url = front.line(URL)
            models = (await http.get(f"{url}/v1/models")).json()["data"]
            assert [(model["id"], model["max_model_len"]) for model in models] == [("m3", 4096)]
            client = GrpcClient(first.line(ADDRESS))
            assert tokens(await read(client, request("a"))) == GREEDY
            streams = [client.generate(request(f"s{i}", max_tokens=3000, n=i + 1)) for i in range(2)]
            for stream in streams:
                await stream.__anext__()
            first.end(signal.SIGKILL)
            for i, stream in enumerate(streams):
                ends = [event for event in [e async for e in stream] if event.finish_reason is not None]
                assert [event.finish_reason for event in ends] == ["error"] * (i + 1)
                assert all("the worker failed" in (event.error or "") for event in ends)
            assert not await client.is_ready()
            with pytest.raises(OverloadedError):
                await read(client, request("b"))
            assert (await http.get(f"{url}/ready")).status_code == 503
            gone = await http.post(f"{url}/v1/completions", json=completion(model="m3"))
            assert gone.status_code == 503, gone.text
            metrics = (await http.get(f"{url}/metrics")).text
            assert 'path="/v1/completions",status="503"} 1.0' in metrics
            assert "num_pages" not in metrics
        with worker(address) as second:
            second.line(ADDRESS)
            while not (await client.is_ready() and (await http.get(f"{url}/ready")).status_code == 200):
                await asyncio.sleep(0.05)
            assert tokens(await read(client, request("c"))) == GREEDY
            await client.close()
            again = await http.post(f"{url}/v1/completions", json=completion(model="m3"))
            assert again.status_code == 200, again.text
            assert second.end(signal.SIGTERM) == 0


async def test_two_workers_and_one_dies(http: httpx.AsyncClient) -> None:
    """Streams on it end with an error event; the others go on, and what comes next goes elsewhere."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(holds=True)) for _ in range(2)]
        addresses = [process.line(ADDRESS) for process in workers]
        front = stack.enter_context(gateway(*addresses, policy="round_robin"))
        url = front.line(URL)
        num_begun = [0] * 4

        async def stream(i: int) -> list[dict[str, Any]]:
            events = []
            async with http.stream(
                "POST", f"{url}/v1/completions", json=completion(stream=True, max_tokens=2500)
            ) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line.removeprefix("data: ")))
                        num_begun[i] += 1
            return events

        tasks = [asyncio.create_task(stream(i)) for i in range(4)]
        while min(num_begun) < 3:
            assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
            await asyncio.sleep(0.01)
        workers[0].end(signal.SIGKILL)
        await until_true(lambda: sum(task.done() for task in tasks) == 2)
        assert all("error" in task.result()[-1] for task in tasks if task.done())
        others = [i for i in range(4) if not tasks[i].done()]
        before = list(num_begun)
        await until_true(lambda: all(num_begun[i] > before[i] for i in others))
        for i in others:
            tasks[i].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            again = await http.post(f"{url}/v1/completions", json=completion())
            assert again.status_code == 200, again.text
        assert (await http.get(f"{url}/ready")).status_code == 200
        command = [sys.executable, "-m", "msaserve", "gateway", "--worker", *addresses, "--check"]
        result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)
        assert result.returncode == 1  # one of the two cannot be reached
        for words in (*addresses, "tiny (minimax_m3_vl)", "4,096 tokens", "pages of 16", "cannot be used", "prefix"):
            assert words in result.stdout
        for words in (
            "http://127.0.0.1:8000",
            "MiniMaxM3Spec, from any public host",
            "none: whoever reaches it",
            "vllm",
        ):
            assert words in result.stdout
        assert front.end(signal.SIGTERM) == 0
        assert workers[1].end(signal.SIGTERM) == 0


def test_a_gateway_does_not_wait_for_ever() -> None:
    with gateway("grpc://127.0.0.1:9", wait_seconds="1") as front:
        assert front.wait() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gateway", "--worker", "http://127.0.0.1:1"], "grpc://HOST:PORT"),
        (["gateway", "--worker", "grpc://a:1", "grpc://a:1"], "different"),
        (["worker", str(TINY), "--grpc", "5"], "HOST:PORT"),
        (["worker", str(TINY / "none")], "does not exist"),
    ],
)
def test_refused_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_taken_address(capsys: pytest.CaptureFixture[str]) -> None:

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["worker", str(TINY), "--grpc", address, "--kv-cache-gib", "0.01"]) == 1
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_the_gateway_loads_no_torch() -> None:
    code = "import sys, msaserve.cli, msaserve.gateway.grpc_client; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS)
    assert result.stdout == "False\n"
