"""This project's gateway before a worker of another make that is running already: vLLM's own gRPC server.

    vllm serve MODEL --grpc --port 50071 --structured-outputs-config '{"backend": "guidance"}' \\
        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'
    MSASERVE_TEST_WORKER=grpc://127.0.0.1:50071 pytest tests/worker/test_vllm.py

docs/wire.md says with which it was run. Skipped where no address is given.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from smg_driver import picture, text
from smg_grpc_proto.generated import common_pb2

from msaserve.errors import CheckpointError
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.grpc_client import GrpcClient, Worker
from msaserve.gateway.kv_index import KvIndex, PromptBlocks, follow
from msaserve.gateway.media.options import MediaOptions
from msaserve.tokenizer import Tokenizer
from msaserve.types import GenerateRequest, SamplingParams

ADDRESS = os.environ.get("MSASERVE_TEST_WORKER")
pytestmark = [
    pytest.mark.skipif(not ADDRESS, reason="MSASERVE_TEST_WORKER names no worker"),
    pytest.mark.asyncio(loop_scope="module"),
]
OFF = {"thinking": {"type": "disabled"}}
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 3, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["days"],
    "additionalProperties": False,
}


@dataclass
class Front:
    client: GrpcClient
    worker: Worker
    http: httpx.AsyncClient

    async def chat(self, content: Any = "Hello, how are you?", **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
        return await self.http.post("/v1/chat/completions", json={**body, **fields})

    async def choice(self, content: Any = "Hello, how are you?", **fields: Any) -> dict[str, Any]:
        answer = await self.chat(content, **fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    assert ADDRESS is not None
    client = GrpcClient(ADDRESS)
    files: Path = tmp_path_factory.mktemp("files")
    await client.save_files(files)
    worker = await client.worker()
    media = None
    with suppress(CheckpointError):
        media = MediaOptions(media_processes=1).pipeline(files)
    settings = GatewaySettings("m", defaults=worker.defaults)
    app = create_app(client, Tokenizer.load(files), ChatTemplate.load(files), settings, media)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://m", timeout=120) as http,
    ):
        yield Front(client, worker, http)


async def test_whole_and_streamed(front: Front) -> None:
    whole = await front.chat()
    assert whole.json()["usage"]["completion_tokens"] == 12
    streamed = await front.chat(stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert said == whole.json()["choices"][0]["message"]["content"]
    assert streamed.text.rstrip().endswith("data: [DONE]")


async def spoken(front: Front, n: int = 1, **fields: Any) -> list[tuple[str, str, list[float]]]:
    """Text, finish reason and log-probabilities of each choice of a streamed answer."""
    answer = await front.chat(stream=True, n=n, logprobs=True, top_logprobs=2, **fields)
    assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
    texts, reasons, logprobs = [""] * n, [""] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
    for line in answer.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            logprobs[choice["index"]] += [p["logprob"] for p in (choice["logprobs"] or {}).get("content") or ()]
    return list(zip(texts, reasons, logprobs, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"n": 1, "temperature": 1, "seed": 5},
        {"n": 3, "temperature": 1, "seed": 5},
        {"n": 1, "max_tokens": 1},
        {"n": 3, "max_tokens": 30, "ignore_eos": True, "temperature": 1, "seed": 7},
        {"n": 1, "max_tokens": 30, "stop": True},
        {"n": 3, "max_tokens": 30, "temperature": 1, "seed": 5, "stop": True},
    ],
)
async def test_whole_answers_are_what_streams_bring(front: Front, fields: dict[str, Any]) -> None:
    """One message of the worker's for each choice, but with a stop string, which is looked for in a stream."""
    fields = dict(fields)
    if fields.pop("stop", False):
        first = (await front.choice(**{**fields, "n": 1}))["message"]["content"]
        fields["stop"] = [first[6:8], "never said"]
    answer = await front.chat(logprobs=True, top_logprobs=2, **fields)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    choices = sorted(whole["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(fields["n"]))
    streamed = await spoken(front, **fields)
    for choice, (said, reason, logprobs) in zip(choices, streamed, strict=True):
        positions = choice["logprobs"]["content"]
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == (said, reason)
        assert [position["logprob"] for position in positions] == pytest.approx(logprobs, abs=1e-3)
        assert all(len(position["top_logprobs"]) >= 2 for position in positions)
        for stop in fields.get("stop", ()):
            assert stop not in said
    if "stop" in fields:
        assert streamed[0][1] == "stop"
    usage = whole["usage"]
    assert fields["n"] <= usage["completion_tokens"] <= fields["n"] * fields.get("max_tokens", 12)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_a_client_that_leaves_a_whole_answer(front: Front) -> None:
    fields = {"max_tokens": 900, "ignore_eos": True}
    for n in (1, 3):
        asking = asyncio.create_task(front.chat("x", n=n, temperature=1, **fields))
        for _ in range(100):
            if (await front.client.load()).num_running:
                break
            await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(100):
            if (await front.client.load()).num_running == 0:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the request goes on")


async def test_sampling(front: Front) -> None:
    answer = await front.chat(n=2, seed=5, temperature=1, logprobs=True, top_logprobs=2)
    for choice in answer.json()["choices"]:
        assert len(choice["logprobs"]["content"]) == 12
        assert all(len(position["top_logprobs"]) >= 2 for position in choice["logprobs"]["content"])
    again = await front.chat(n=2, seed=5, temperature=1)
    assert [c["message"] for c in again.json()["choices"]] == [c["message"] for c in answer.json()["choices"]]
    whole = (await front.choice(max_tokens=30))["message"]["content"]
    cut = await front.choice(max_tokens=30, stop=[whole[6:8]])
    assert cut["message"]["content"] == whole[: whole.index(whole[6:8])]
    assert cut["finish_reason"] == "stop"
    assert (await front.choice(logit_bias={"77": 100}, max_tokens=1))["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"choice": ["eins", "zwei"]}}, ("eins", "zwei")),
        ({"structured_outputs": {"regex": "[ab]"}}, ("a", "b")),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, ("x", "y")),
    ],
)
async def test_forms(front: Front, fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    choice = await front.choice(**fields, **OFF)
    assert (choice["message"]["content"], choice["finish_reason"]) in [(text, "stop") for text in expected]


async def test_a_schema_and_a_call(front: Front) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
    value = json.loads(
        (await front.choice(response_format=form, max_tokens=300, temperature=1, seed=1, **OFF))["message"]["content"]
    )
    assert 3 <= value["days"] <= 9
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    for choose in ("required", {"type": "function", "function": {"name": "weather"}}):
        choice = await front.choice(tools=[tool], tool_choice=choose, max_tokens=300, parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls", choice
        assert 3 <= json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["days"] <= 9


async def test_refusals_say_why(front: Front) -> None:
    for fields, word in (
        ({"structured_outputs": {"regex": "[a"}}, "regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "objekt"}}}},
            "objekt",
        ),
        ({"max_tokens": 10**6}, "max_tokens"),
    ):
        answer = await front.chat(**fields)
        assert answer.status_code == 400, answer.text
        assert word in answer.json()["error"]["message"]


async def test_a_client_that_leaves(front: Front) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True}
    async with front.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        async for _ in answer.aiter_lines():
            break
    for _ in range(50):
        if (await front.client.load()).num_running == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the request goes on")


async def test_its_kv_events(front: Front) -> None:
    index = KvIndex()
    following = asyncio.create_task(follow(front.client, index, name="it"))
    await asyncio.sleep(0.5)
    prompt = [(7 * i) % 400 + 3 for i in range(300)]

    async def ask(number: int, prompt: list[int]) -> int:
        request = GenerateRequest(
            request_id=f"kv{number}", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=2, ignore_eos=True)
        )
        return [event async for event in front.client.generate(request)][-1].num_cached_tokens

    stub = (await front.client._dialect()).stub
    await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=3))
    assert await ask(0, prompt) == 0
    asked = PromptBlocks(GenerateRequest(request_id="x", prompt_token_ids=prompt))
    await asyncio.sleep(0.5)
    held = index.num_tokens(asked)
    assert held >= 128
    assert await ask(1, prompt) == held  # what the index says is what the worker then finds
    await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=3))
    await ask(2, prompt[::-1])  # vLLM tells of a flush with its next step
    await asyncio.sleep(0.5)
    assert index.num_tokens(asked) == 0
    following.cancel()


async def test_pictures(front: Front) -> None:
    if not front.worker.info.supports_vision:
        pytest.skip("a text model")

    async def seen(*pictures: dict[str, Any]) -> tuple[int, list[float]]:
        answer = await front.chat([text("what is this"), *pictures], logprobs=True, max_tokens=4)
        assert answer.status_code == 200, answer.text
        positions = answer.json()["choices"][0]["logprobs"]["content"]
        return answer.json()["usage"]["prompt_tokens"], [position["logprob"] for position in positions]

    num_tokens, said = await seen(picture(224, 160))
    assert await seen(picture(224, 160)) == (num_tokens, pytest.approx(said, abs=1e-3))
    same_size, of_another = await seen(picture(224, 160, 2))
    assert same_size == num_tokens
    assert of_another != pytest.approx(said, abs=1e-3)
    assert (await seen(picture(224, 160), picture(100, 300, 1)))[0] > num_tokens
