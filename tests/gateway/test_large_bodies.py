"""Large bodies: what takes long to decode is refused before it is, and the rest is not read on the event loop."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from chat_apis import TEMPLATE
from fake_engine import FakeClient, serve
from waits import SECONDS

from msaserve.errors import TooLargeError
from msaserve.gateway import app, constraints
from msaserve.gateway import body as body_module
from msaserve.gateway.apis import messages, openai, responses
from msaserve.gateway.body import LARGE_BYTES, MAX_NODES, MAX_TOKEN_VALUES, MAX_VALUES

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO: Any = {"role": "user", "content": "a"}
PART: Any = {"type": "text", "text": "a"}
TOOL: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
PADDING = " " * LARGE_BYTES


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeClient, httpx.Client]]:
    client = FakeClient(max_model_len=MAX_TOKEN_VALUES)
    with (
        serve(client, template=TEMPLATE, max_body_bytes=2**26) as url,
        httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as http,
    ):
        yield client, http


MANY_TOOLS = [TOOL] * (MAX_NODES // 4)
TOO_MANY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [HELLO] * (MAX_NODES // 3)}),
    (RESPONSES, {"input": [HELLO] * (MAX_NODES // 3)}),
    (MESSAGES, {"max_tokens": 4, "messages": [HELLO] * (MAX_NODES // 3)}),
    ("/v1/messages/count_tokens", {"messages": [HELLO] * (MAX_NODES // 3)}),
    ("/tokenize", {"messages": [HELLO] * (MAX_NODES // 3)}),
    (CHAT, {"messages": [{"role": "user", "content": [PART] * (MAX_NODES // 3)}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [PART] * (MAX_NODES // 3)}]}),
    (MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": [PART] * (MAX_NODES // 3)}]}),
    (CHAT, {"messages": [HELLO], "tools": MANY_TOOLS}),
    (RESPONSES, {"input": "a", "tools": MANY_TOOLS}),
    (MESSAGES, {"max_tokens": 4, "messages": [HELLO], "tools": MANY_TOOLS}),
    (CHAT, {"messages": [HELLO], "unknown": [[]] * MAX_NODES}),
    (CHAT, {"messages": [HELLO], "logit_bias": {str(i): 1 for i in range(MAX_NODES)}}),
    (CHAT, {"messages": [HELLO], "guided_json": {"enum": [1] * (MAX_VALUES + 1)}}),
    (CHAT, {"messages": [HELLO], "stop": ["a"] * (MAX_VALUES + 1)}),
    (TEXT, {"prompt": [1] * (MAX_TOKEN_VALUES + 2)}),
    ("/detokenize", {"tokens": [1] * (MAX_TOKEN_VALUES + 2)}),
]


@pytest.mark.parametrize("number", range(len(TOO_MANY)))
def test_what_takes_long_to_decode_is_refused_before_it_is(
    server: tuple[FakeClient, httpx.Client], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def decode(body: bytes) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr("msaserve.gateway.apis.openai.msgspec.json.decode", decode)
    path, fields = TOO_MANY[number]
    response = server[1].post(path, json=fields)
    assert response.status_code == 413
    assert "the request body has more than" in response.json()["error"]["message"]


ACCEPTED: list[tuple[str, dict[str, Any], set[str]]] = [
    (CHAT, {"messages": [HELLO], "tools": [TOOL], "x": PADDING}, {"decode", "tool_use", "asked_constraint"}),
    (RESPONSES, {"input": "a", "x": PADDING}, {"decode", "tool_use", "asked_constraint", "responses.chat_of"}),
    (
        MESSAGES,
        {"max_tokens": 4, "messages": [HELLO], "x": PADDING},
        {"decode", "tool_use", "asked_constraint", "messages.chat_of"},
    ),
    ("/v1/messages/count_tokens", {"messages": [HELLO], "x": PADDING}, {"decode", "tool_use", "messages.chat_of"}),
    ("/tokenize", {"messages": [HELLO], "x": PADDING}, {"decode", "tool_use"}),
    (TEXT, {"prompt": [100] * LARGE_BYTES, "guided_json": {}}, {"decode", "asked_constraint", "check_token_ids"}),
    ("/detokenize", {"tokens": [100] * LARGE_BYTES}, {"decode", "check_token_ids"}),
]


@pytest.mark.parametrize("number", range(len(ACCEPTED)))
@pytest.mark.parametrize("is_large", [False, True])
def test_only_small_bodies_are_read_on_the_event_loop(
    server: tuple[FakeClient, httpx.Client], monkeypatch: pytest.MonkeyPatch, number: int, is_large: bool
) -> None:
    seen: dict[str, set[bool]] = {}

    def watch(place: str, name: str, function: Callable[..., Any]) -> None:
        def spy(*args: Any, **kwargs: Any) -> Any:
            if args[0] is not None and args[0] != ():
                seen.setdefault(name, set()).add(threading.current_thread().name == "http-server")
            return function(*args, **kwargs)

        monkeypatch.setattr(place, spy)

    watch("msaserve.gateway.apis.openai.msgspec.json.decode", "decode", openai.msgspec.json.decode)
    watch("msaserve.gateway.app.check_token_ids", "check_token_ids", app.check_token_ids)
    watch("msaserve.gateway.app.asked_constraint", "asked_constraint", app.asked_constraint)
    watch("msaserve.gateway.constraints.asked_constraint", "asked_constraint", constraints.asked_constraint)
    watch("msaserve.gateway.apis.messages.chat_of", "messages.chat_of", messages.chat_of)
    watch("msaserve.gateway.apis.responses.chat_of", "responses.chat_of", responses.chat_of)
    offered = app.tool_use

    def tool_use(*args: Any) -> Any:
        seen.setdefault("tool_use", set()).add(threading.current_thread().name == "http-server")
        return offered(*args)

    monkeypatch.setattr("msaserve.gateway.app.tool_use", tool_use)
    path, fields, names = ACCEPTED[number]
    if not is_large:
        fields = {name: value[:10] if isinstance(value, (list, str)) else value for name, value in fields.items()}
    assert server[1].post(path, json=fields).status_code == 200
    assert {name for name in names if name not in seen} == set()
    assert {name: places for name, places in seen.items() if places != {not is_large}} == {}


def test_only_what_is_outside_texts_counts(server: tuple[FakeClient, httpx.Client]) -> None:
    text = '[{,:\\"}]' * MAX_VALUES
    response = server[1].post("/tokenize", json={"prompt": "a", "unknown": text})
    assert response.status_code == 200


def test_values_are_counted_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(5)

    def value(depth: int) -> Any:
        kind = source.randrange(5 if depth else 3)
        if kind == 3:
            return [value(depth - 1) for _ in range(source.randrange(4))]
        if kind == 4:
            return {f"{i}{text()}": value(depth - 1) for i in range(source.randrange(4))}
        return (None, 7, text())[kind]

    def text() -> str:
        return "".join(source.choices('\\",:[{é\n ', k=source.randrange(9)))

    def counts(value: Any) -> tuple[int, int]:
        """Nodes, commas."""
        if not isinstance(value, (dict, list)):
            return 0, 0
        inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
        members = len(value) if isinstance(value, dict) else 0
        return 1 + members + sum(n for n, _ in inner), max(len(value) - 1, 0) + sum(c for _, c in inner)

    for _ in range(300):
        data = value(4)
        body = json.dumps(data, ensure_ascii=source.random() < 0.5).encode()
        num_nodes, num_commas = counts(data)
        monkeypatch.setattr(body_module, "_PIECE_BYTES", source.choice((1, 2, 3, 5, 8, 2**18)))
        monkeypatch.setattr(body_module, "MAX_NODES", num_nodes)
        body_module._check_json(body, num_commas)
        if num_commas:
            with pytest.raises(TooLargeError, match="JSON values"):
                body_module._check_json(body, num_commas - 1)
        if num_nodes:
            monkeypatch.setattr(body_module, "MAX_NODES", num_nodes - 1)
            with pytest.raises(TooLargeError, match="members of objects"):
                body_module._check_json(body, num_commas)
