"""The server as its users run it: a process of its own, the small checkpoint, the real engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest
from fake_engine import TINY
from golden_data import golden
from openai.types import CompletionChoice
from paced import HELD
from waits import SECONDS, until

from msaserve.tokenizer import Tokenizer

LIVE_SECONDS = float(os.environ.get("MSASERVE_TEST_LIVE_SECONDS", "5"))
TEXT, URL = "/v1/completions", "curl (http://[^/]+)"
COMMAND = (
    sys.executable,
    "-m",
    "msaserve",
    "serve",
    str(TINY),
    "--max-model-len",
    "2048",
    "--kv-cache-gib",
    "0.05",
)
ENDLESS = {"model": "tiny", "prompt": "go", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Server:
    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--port", "0", *options],
            env={**os.environ, "MSASERVE_CHECK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HELD)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,), daemon=True)
            for pipe in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()
        self.wait_for(lambda: re.search(URL, self.text))
        self.url = re.findall(URL, self.text)[0]

    def _read(self, pipe: object) -> None:
        self.log.extend(iter(pipe.readline, ""))  # type: ignore[attr-defined]

    @property
    def text(self) -> str:
        return "".join(self.log)

    def wait_for(self, condition: Callable[[], object]) -> None:
        def is_so() -> object:
            assert self.process.poll() is None, self.text
            return condition()

        until(is_so)

    def wait(self) -> int:
        code = self.process.wait(SECONDS)
        for thread in self._threads:
            thread.join(SECONDS)
        return code

    def takes_connections(self) -> bool:
        host, port = self.url.removeprefix("http://").split(":")
        try:
            socket.create_connection((host, int(port))).close()
        except ConnectionRefusedError:
            return False
        return True

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"msaserve:{name}"))


@contextmanager
def running(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        server.process.kill()
        server.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server
        assert server.process.poll() is None
        assert "Traceback" not in server.text


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    transport = httpx.Client(trust_env=False, timeout=SECONDS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, http_client=transport) as client:
        yield client


def test_the_printed_curl_line_works(server: Server) -> None:
    command = next(line for line in server.log if "curl" in line)
    result = subprocess.run(
        command.strip() + " -s --noproxy '*'", shell=True, capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert json.loads(result.stdout)["object"] == "chat.completion"


def test_golden_tokens(api: openai.OpenAI) -> None:
    _, expected = golden("tiny")
    tokenizer = Tokenizer.load(TINY)
    prompt = expected["text.input_ids"].flatten()[: int(expected["text.greedy_prompt_len"])].tolist()
    greedy = expected["text.greedy"].flatten().tolist()
    for is_warm in (False, True):
        answer = api.completions.create(
            model="tiny",
            prompt=prompt,
            temperature=0,
            max_tokens=len(greedy),
            logprobs=0,
            extra_body={"skip_special_tokens": False, "ignore_eos": True},
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == [tokenizer.token_text(i) for i in greedy]
        assert answer.choices[0].text == tokenizer.decode(greedy, skip_special_tokens=False)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= (len(prompt) // 2 if is_warm else 0)
    assert is_warm


def test_chat_stream_equals_whole(api: openai.OpenAI) -> None:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "seed": 3}
    whole = api.chat.completions.create(**fields)  # type: ignore[call-overload]
    stream = api.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    text, usage = "", None
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_seeds_and_n(api: openai.OpenAI) -> None:
    def texts(**fields: object) -> list[str]:
        answer = api.completions.create(model="tiny", prompt="abc", max_tokens=12, **fields)  # type: ignore[call-overload]
        return [choice.text for choice in answer.choices]

    first = texts(seed=11, n=3)
    assert len(set(first)) == 3
    assert texts(seed=11, n=3) == first
    assert texts(seed=12) == first[1:2]
    # The stop string does not occur; with one, each output is a request of its own, of the same seed.
    assert texts(seed=11, n=3, stop="no such text") == first


def test_sampling_fields_matter(api: openai.OpenAI) -> None:
    tokenizer = Tokenizer.load(TINY)
    a, b = tokenizer.encode("ab")

    def choice(**fields: object) -> CompletionChoice:
        fields = {"logit_bias": {str(a): 100, str(b): 94}, "temperature": 0, "max_tokens": 8, **fields}
        return api.completions.create(model="tiny", prompt="abc", **fields).choices[0]  # type: ignore[call-overload,no-any-return]

    assert choice().text == "a" * 8
    assert {"a", "b"} <= set(choice(frequency_penalty=2).text)
    assert choice(stop="aaa").text == ""
    assert choice(extra_body={"stop_token_ids": [a]}).text == ""
    late = choice(extra_body={"stop_token_ids": [a, b], "min_tokens": 5}, logprobs=0)
    assert late.logprobs is not None
    assert len(late.logprobs.tokens or []) == 5


def test_errors(api: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 2047") as raised:
        api.completions.create(model="tiny", prompt=[5] * 2048)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"token id 512 is not within 0 … 511"):
        api.completions.create(model="tiny", prompt=[512])
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="gpt", prompt="x")
    response = httpx.post(server.url + TEXT, content=b'{"prompt": "\xff"}', trust_env=False)
    assert response.status_code == 400


def test_a_ten_megabyte_prompt(server: Server) -> None:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=SECONDS) as http:
        response = http.post(TEXT, json={"model": "tiny", "prompt": "tenbytes! " * 1_000_000})
    assert response.status_code == 400
    assert "10000000 characters" in response.json()["error"]["message"]
    assert "at most 2047" in response.json()["error"]["message"]


async def _client(http: httpx.AsyncClient, rng: random.Random, until: float, counts: dict[str, int]) -> None:
    while time.monotonic() < until:
        max_tokens = rng.choice([1, 4, 16, 48])
        body = {
            "model": "tiny",
            "prompt": [rng.randrange(3, 259) for _ in range(rng.choice([1, 15, 16, 17, 120, 600]))],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": rng.choice([1, 1, 1, 2]),
            "stop": rng.choice([None, None, "e"]),
        }
        leave_after = rng.randrange(1, max_tokens + 1) if rng.random() < 0.25 else None
        async with http.stream("POST", TEXT, json=body) as response:
            assert response.status_code == 200, await response.aread()
            chunks = []
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                chunks.append(line[6:])
                assert '"error"' not in line, line
                if leave_after is not None and len(chunks) >= leave_after:
                    counts["left"] += 1
                    break
            else:
                assert chunks[-1] == "[DONE]"
                usage = json.loads(chunks[-2])["usage"]
                assert usage["prompt_tokens"] == len(body["prompt"])  # type: ignore[arg-type]
                assert usage["completion_tokens"] <= max_tokens * body["n"]  # type: ignore[operator]
                counts["whole"] += 1


async def _load(server: Server, seconds: float) -> dict[str, int]:
    counts = {"whole": 0, "left": 0}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=SECONDS, trust_env=False, limits=limits) as http:
        await asyncio.gather(*(_client(http, random.Random(i), until, counts) for i in range(64)))
    return counts


def _is_idle(server: Server) -> bool:
    return not any(server.metric(name) for name in ("num_used_pages", "num_requests_running", "num_requests_waiting"))


async def test_64_clients(server: Server) -> None:
    """No error, no leaked page, memory as before. MSASERVE_TEST_LIVE_SECONDS says for how long."""
    process = psutil.Process(server.process.pid)
    await _load(server, min(LIVE_SECONDS / 3, 10))  # buffers grow to what this load needs
    server.wait_for(lambda: _is_idle(server))
    before = process.memory_info().rss
    counts = await _load(server, LIVE_SECONDS)
    assert counts["whole"] >= 32
    assert counts["left"] >= 4
    server.wait_for(lambda: _is_idle(server))
    assert process.memory_info().rss - before < 48 * 2**20
    assert server.metric("http_requests_total") > sum(counts.values())
    assert server.process.poll() is None
    assert "Traceback" not in server.text
    print(f"{counts}, memory {before / 2**20:.0f} MiB, then {process.memory_info().rss / 2**20:.0f} MiB")


def test_sigterm_drains() -> None:
    with running() as server, httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http:
        asked = {**ENDLESS, "max_tokens": 100, "stream_options": {"include_usage": True}}
        with http.stream("POST", TEXT, json=asked) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not server.takes_connections())
            *_, last, usage, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert json.loads(usage[6:])["usage"]["completion_tokens"] == 100
        assert server.wait() == 0
        assert "Traceback" not in server.text


def test_a_second_signal_ends_at_once() -> None:
    with (
        running() as server,
        httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as http,
        http.stream("POST", TEXT, json=ENDLESS) as response,
    ):
        lines = response.iter_lines()  # closes the stream when nobody holds it
        next(lines)
        server.process.send_signal(signal.SIGINT)
        until(lambda: not server.takes_connections())
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT, server.text


def test_a_drain_that_takes_too_long_is_cut() -> None:
    with running("--drain-seconds", "1", "--api-key", "k") as server:
        headers = {"authorization": "Bearer k"}
        with (
            httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False, headers=headers) as http,
            http.stream("POST", TEXT, json=ENDLESS) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
            assert json.loads(last[6:])["error"]["message"] == "the request was aborted"
            assert server.wait() == 0
            assert time.monotonic() - start > 0.9
            assert "Traceback" not in server.text
