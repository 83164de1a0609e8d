"""Requests to every API with anything anywhere: an answer or a 4xx that says why, never a fault of the server.

MSASERVE_TEST_FUZZ_REQUESTS=20000 tries more.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import EOS, TINY, FakeClient

from msaserve.engine.grammar import Grammars
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.pipeline import MediaPipeline
from msaserve.gateway.media.spec import find_spec
from msaserve.tokenizer import Tokenizer
from msaserve.types import GenerateRequest, TokenEvent

NUM_REQUESTS = int(os.environ.get("MSASERVE_TEST_FUZZ_REQUESTS", "1000"))

GIF = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
PICTURE = {"url": f"data:image/gif;base64,{GIF}", "max_long_side_pixel": 56}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"type": "array", "items": {"$ref": "#/$defs/q"}}},
    "required": ["a"],
    "$defs": {"q": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":"x"}'}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": PICTURE}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t"}]},
]
TOOLS = [{"type": "function", "function": FUNCTION}]
SAMPLING = {
    "temperature": 1, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "n": 2, "seed": 1, "stop": ["x"], "stop_token_ids": [3],
    "logit_bias": {"5": 1}, "max_tokens": 5, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "skip_special_tokens": True, "cache_salt": "s", "user": "u", "stream": False,
}  # fmt: skip
CHAT = {
    "messages": MESSAGES, **SAMPLING, "logprobs": True, "top_logprobs": 2, "thinking": {"type": "disabled"},
    "reasoning_effort": "none", "chat_template_kwargs": {"a": 1}, "metadata": {"a": "b"},
    "stream_options": {"include_usage": True},
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "tag", "begin": "<", "content": {"type": "any_text", "excludes": ["x"]}, "end": ">"},
            {"type": "json_schema", "json_schema": {"type": "integer"}},
        ],
    },
}
ASKED_CALL = {
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **ASKED_CALL}),
    ("/v1/chat/completions", {**CHAT, "response_format": FORM}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"structural_tag": TAG}}),
    ("/v1/completions", {**SAMPLING, "prompt": ["a", "b"], "logprobs": 2, "echo": False, "guided_choice": ["a"]}),
    ("/tokenize", {"messages": MESSAGES, "tools": TOOLS, "add_generation_prompt": True, "return_token_strs": True}),
    (
        "/v1/responses",
        {
            "instructions": "i",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": PICTURE["url"], "detail": "auto"},
                    ],
                },
                {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "o"},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 20,
            "store": False,
            "include": [],
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "max_tokens": 20,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": GIF}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["a"],
            "output_config": {"effort": "low"},
        },
    ),
]
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**64, -(2**63), 1e308, 1.5, "", "x", "\0", "\ud83d", "a" * 3000, "null", "{",
    "auto", "none", "[e~[", "image_url", [], [[]], [None], [{}], ["a"], [1, 2], {}, {"a": {}}, {"type": "x"},
    {"$ref": "#"}, {"type": "function"}, {"url": "data:,"}, {"type": {}},
]  # fmt: skip


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def spoilt(rng: random.Random, request: dict[str, Any]) -> dict[str, Any]:
    request = copy.deepcopy(request)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        known = list(paths(request))
        if not known:
            break
        path = rng.choice(known)
        parent, key = at(request, path[:-1]), path[-1]
        kind = rng.random()
        if kind < 0.15:
            del parent[key]
        elif kind < 0.3 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        elif kind < 0.4:
            parent[key] = copy.deepcopy(at(request, rng.choice(known)))
        elif kind < 0.45 and isinstance(parent, dict):
            parent[rng.choice(["type", "x", "content", "$ref", "name", "\0", ""])] = copy.deepcopy(rng.choice(VALUES))
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    return request


class CheckingClient(FakeClient):
    """Refuses what an engine refuses of sampling and constraints."""

    def __init__(self) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(self.info, supports_vision=True, image_token_id=510, video_token_id=511)
        self._grammars = Grammars(TINY, vocab_size=512, eos_token_ids=[EOS])

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        request.sampling.validate(vocab_size=512)
        if request.sampling.constraint is not None:
            self._grammars.compile(request.sampling.constraint)
        async for event in super().generate(request):
            yield event


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


USER = '"messages": [{"role": "user", "content": "x"}]'
CALLED = """{"messages": [
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": A}}]},
    {"role": "tool", "tool_call_id": "1", "content": ""}]}"""
OFFERED = """{%s, "tools": [{"type": "function", "function": {"name": "f", "parameters": P}}], "tool_choice": "C"}"""
NESTED = [
    ("/v1/chat/completions", '{%s, "chat_template_kwargs": {"x": X}}'),
    ("/v1/chat/completions", OFFERED.replace("P", '{"x": X}').replace("C", "auto")),
    ("/v1/chat/completions", OFFERED.replace("P", '{"x": X}').replace("C", "required")),
    ("/v1/chat/completions", OFFERED.replace("P", '{"properties": {"x": {"const": X}}}').replace("C", "required")),
    ("/v1/chat/completions", '{%s, "response_format": {"type": "json_schema", "json_schema": {"schema": X}}}'),
    ("/v1/chat/completions", '{%s, "response_format": {"type": "structural_tag", "format": X}}'),
    ("/v1/chat/completions", '{%s, "structured_outputs": X}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [X]}]}'),
    ("/v1/chat/completions", CALLED.replace("A", "X")),
    ("/v1/chat/completions", CALLED.replace("A", '"T"')),
    ("/v1/completions", '{"prompt": X}'),
    ("/tokenize", '{%s, "chat_template_kwargs": {"x": X}}'),
    ("/v1/messages", '{%s, "max_tokens": 1, "system": X}'),
    ("/v1/messages", '{%s, "max_tokens": 1, "tools": [{"name": "f", "input_schema": X}]}'),
    ("/v1/responses", '{"input": X}'),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": X}, "text": {"x": X}, "tool_choice": null}'),
]


@pytest.mark.parametrize("levels", [50, 300, 450, 900, 20_000])
async def test_anything_nested(levels: int) -> None:
    transport = httpx.ASGITransport(checking_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for path, body in NESTED:
            text = body.replace("%s", USER).replace("X", nested(levels))
            text = text.replace("T", nested(levels).replace('"', r"\""))
            response = await http.post(path, content=text)
            assert response.status_code in (200, 400), (body, response.text)


def checking_app() -> Any:
    return create_app(CheckingClient(), Tokenizer.load(TINY), ChatTemplate.load(TINY), GatewaySettings("tiny"))


async def test_anything_anywhere() -> None:
    tokenizer, template, source = Tokenizer.load(TINY), ChatTemplate.load(TINY), find_spec(TINY)
    assert source is not None
    media = MediaPipeline(source, num_processes=1)
    client = CheckingClient()
    ns = "]<]minimax[>["
    client.script = tokenizer.encode(
        f'x{ns}<tool_call>{ns}<invoke name="f">{ns}<a>x{ns}</a>{ns}</invoke>{ns}</tool_call>'
    )
    app = create_app(client, tokenizer, template, GatewaySettings("tiny"), media)
    rng = random.Random(0)
    num_answered = 0
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for path, request in REQUESTS:
            response = await http.post(path, content=json.dumps({"model": "tiny", **request}))
            assert response.status_code == 200, response.text
        for _ in range(NUM_REQUESTS):
            path, request = rng.choice(REQUESTS)
            body = json.dumps(spoilt(rng, {"model": "tiny", **request}))
            response = await http.post(path, content=body)
            assert response.status_code in (200, 400, 404), (path, body, response.text)
            if response.status_code == 200:
                num_answered += 1
            else:
                assert response.json()["error"]["message"], (path, body)
    assert NUM_REQUESTS * 0.1 < num_answered < NUM_REQUESTS * 0.5
    await media.close()
