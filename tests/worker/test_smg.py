"""The real smg (a gateway in Rust that speaks the same protocol) in front of the worker. Skipped where it is not."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from smg_driver import TEMPLATE, clip, needs_ffmpeg, needs_smg, picture, running_smg, text
from worker_driver import IMAGE, TINY, VIDEO, Worker, new_engine, running_worker

import msaserve.worker.servicer as servicer
from msaserve.rpc.media import segment_rows
from msaserve.types import GenerateRequest
from msaserve.worker.archive import pack

pytestmark = [needs_smg, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Front:
    worker: Worker
    http: httpx.AsyncClient
    seen: list[GenerateRequest]
    metrics: str

    async def chat(self, content: Any, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
        return await self.http.post("/v1/chat/completions", json={**body, "ignore_eos": True, **fields})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """smg learns tokenizer, template and processor from the worker alone."""
    seen: list[GenerateRequest] = []
    read = servicer.convert.request_from_proto

    def record(*args: Any, **options: Any) -> GenerateRequest:
        seen.append(read(*args, **options))
        return seen[-1]

    model_info = servicer.Servicer.GetModelInfo

    async def elsewhere(self: servicer.Servicer, request: Any, context: Any) -> Any:
        info = await model_info(self, request, context)
        info.model_path = info.tokenizer_path = "/of/another/machine"
        return info

    files = tmp_path_factory.mktemp("files")
    for path in (*TINY.glob("*.json"), *TINY.glob("*.jinja")):
        shutil.copy(path, files)
    (files / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servicer.convert, "request_from_proto", record)
        patch.setattr(servicer.Servicer, "GetModelInfo", elsewhere)
        patch.setattr(servicer, "pack", lambda directory: pack(files))
        async with (
            running_worker(new_engine(max_num_batched_tokens=1024)) as worker,
            running_smg(worker.port, tmp_path_factory.mktemp("smg") / "log") as smg,
        ):
            yield Front(worker, smg.http, seen, smg.metrics)


async def events(front: Front, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "stream": True}
    async with front.http.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True, **fields}) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_text_whole_and_streamed(front: Front) -> None:
    answer = (await front.chat("Hello", max_tokens=20)).json()
    streamed = await events(front, max_tokens=20, stream_options={"include_usage": True})
    whole = answer["choices"][0]["message"]["content"]
    assert whole == "".join(c["delta"].get("content") or "" for e in streamed for c in e["choices"])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == streamed[-1]["usage"]["completion_tokens"] == 20
    assert streamed[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert front.seen[-1].sampling.temperature == 0


async def test_choices_logprobs_and_stop_strings(front: Front) -> None:
    answer = (await front.chat("Hello", n=2, seed=5, temperature=1, logprobs=True, top_logprobs=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["content"]) == 8
        assert all(len(position["top_logprobs"]) >= 2 for position in choice["logprobs"]["content"])
    whole = (await front.chat("Hello", max_tokens=20)).json()["choices"][0]["message"]["content"]
    stop = whole[10:13]
    cut = (await front.chat("Hello", max_tokens=20, stop=[stop])).json()["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)


async def test_pictures(front: Front) -> None:
    answer = await front.chat([text("one"), picture(448, 448)])
    assert answer.status_code == 200, answer.text
    (item,) = front.seen[-1].media
    assert (item.grid_thw, item.length) == (((1, 32, 32),), 258)
    ids = front.seen[-1].prompt_token_ids
    assert ids[item.offset : item.offset + item.length].count(IMAGE) == 256
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert item.patches.shape == (1024, 1176)
    assert -2 < float(item.patches.min()) < 0 < float(item.patches.max()) < 3  # normalised here
    answer = await front.chat([picture(112, 140), text("and"), picture(200, 120, 1)])
    assert answer.status_code == 200, answer.text
    first, second = front.seen[-1].media
    assert (first.grid_thw, second.grid_thw) == (((1, 8, 10),), ((1, 14, 8),))
    assert first.offset + first.length <= second.offset


@needs_ffmpeg
async def test_a_clip_and_a_clip_with_a_picture(front: Front) -> None:
    answer = await front.chat([clip(9.0), text("what")])
    assert answer.status_code == 200, answer.text
    (item,) = front.seen[-1].media
    t = sum(row[0] for row in item.grid_thw)
    assert item.modality == "video"
    assert t == 5  # frames at 0, 1, … 8 s and the last
    assert item.grid_thw == segment_rows((t, *item.grid_thw[0][1:]))
    ids = front.seen[-1].prompt_token_ids
    assert ids[item.offset : item.offset + item.length].count(VIDEO) == sum(a * b * c for a, b, c in item.grid_thw) // 4
    answer = await front.chat([clip(2.0), picture(112, 112)])
    assert answer.status_code == 200, answer.text
    assert {item.modality for item in front.seen[-1].media} == {"image", "video"}


async def test_tools_and_formats(front: Front) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert (await front.chat("call f", tools=tools)).status_code == 200
    fields: dict[str, Any] = {"ignore_eos": False, "max_tokens": 400}
    forced = await front.chat("call f", tools=tools, tool_choice="required", **fields)
    assert forced.status_code == 200, forced.text
    constraint = front.seen[-1].sampling.constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = (await front.chat("Hello", response_format=asked, **fields)).json()["choices"][0]
    assert json.loads(answer["message"]["content"])["a"] in ("x", "y")
    assert answer["finish_reason"] == "stop"


async def test_it_follows_the_kv_events(front: Front) -> None:
    """smg's index has as many blocks as the worker. (Of blocks that differ in a picture alone it counts one.)"""

    async def until_indexed(count: int) -> None:
        seen = -1.0
        while seen != count:
            lines = (await front.http.get(front.metrics)).text.splitlines()
            seen = sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("smg_kv_index_blocks"))
            await asyncio.sleep(0.1)

    for words in ("a prompt of more than one block, so that there is something to be stored", "and one more"):
        assert (await front.http.post("/flush_cache")).json()["status"] == "success"
        await until_indexed(0)
        assert (await front.chat(words)).is_success
        held = len(front.worker.engine.scheduler.index.pages())
        assert held >= 1
        await until_indexed(held)


async def test_refusals(front: Front) -> None:
    answer = await front.chat("Hello", max_tokens=5000)
    assert answer.status_code == 400, answer.text
    assert "4096" in answer.text


async def test_clients_that_go_away(front: Front) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3500, "ignore_eos": True}
    before = front.worker.engine.load().num_output_tokens
    async with front.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        async for _ in answer.aiter_lines():
            break
    await front.worker.until_empty()
    asked = asyncio.create_task(front.http.post("/v1/chat/completions", json=body))
    await front.worker.until(3)
    asked.cancel()
    await front.worker.until_empty()
    assert front.worker.engine.load().num_output_tokens - before < 3000


async def test_the_load_it_polls(front: Front) -> None:
    worker: dict[str, Any] = {}
    while "engine_load" not in worker:
        (worker,) = (await front.http.get("/workers")).json()["workers"]
        await asyncio.sleep(0.1)
    assert worker["runtime_type"] == "vllm"
    assert worker["labels"]["mm_device_do_normalize"] == "true"
    assert worker["engine_load"]["loads"][0]["max_running_requests"] == 64
    flushed = await front.http.post("/flush_cache")
    assert flushed.json()["status"] == "success", flushed.text
    assert front.worker.engine.load().num_cached_pages == 0
