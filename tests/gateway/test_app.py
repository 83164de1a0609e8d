"""The HTTP side over real sockets, with a fake engine: errors, limits, streams, clients that go away."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from fake_engine import TINY, FakeClient, serve
from waits import SECONDS

from msaserve.config import GenerationDefaults
from msaserve.errors import EngineError, InvalidRequestError, OverloadedError
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, whose shape must be OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return dict(body["error"])


CHAT_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "robot"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0]",
        "image_url parts are not supported",
    ),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", "no call '1'"),
    ({"messages": "hi"}, "messages", "Expected `array`"),
    ({"max_tokens": 0}, "max_tokens", "between 1 and 4096, not 0"),
    ({"max_tokens": 5000}, "max_tokens", "between 1 and 4096, not 5000"),
    ({"max_completion_tokens": 4096}, "max_tokens", "this model's context is 4096 tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "between 1 and 4096"),
    ({"max_tokens": "many"}, "max_tokens", "Expected `int"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "between 0 and 8, not 9"),
    ({"temperature": -1}, "temperature", "between 0 and 2, not -1"),
    ({"temperature": 2.5}, "temperature", "between 0 and 2"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "between -1"),
    ({"min_p": 2}, "min_p", "between 0 and 1"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"n": 0}, "n", "between 1 and 128, not 0"),
    ({"n": 129}, "n", "between 1 and 128"),
    ({"seed": 2**70}, "seed", ""),
    ({"stop": ""}, "stop", "1 to 1024 characters"),
    ({"stop": ["x"] * 17}, "stop", "17 entries; at most 16"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "token id 512 is not within 0 … 511"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "not a token id within 0 … 511"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"0" * 20 + "9" * 5000: 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"0" * 20 + "512": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
    ({"logit_bias": {"5": "NaN"}}, "logit_bias[...]", "Expected `float`"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "must be"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"thinking": {"type": "maybe"}}, "thinking", "adaptive, enabled, disabled"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "may not set"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "at most 4095"),
]


@pytest.mark.parametrize(("fields", "param", "message"), CHAT_ERRORS)
def test_bad_chat_requests(
    http: httpx.Client, engine: FakeClient, fields: dict[str, Any], param: str, message: str
) -> None:
    problem = error(http.post(CHAT, json={"model": "tiny", "messages": USER, **fields}), 400)
    assert problem["param"] == param
    assert message in problem["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "missing required field"),
        ({"prompt": []}, "prompt", "none empty"),
        ({"prompt": [[]]}, "prompt", "none empty"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"prompt": ["a", 1]}, "prompt", "list of token ids"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [1, 512]}, "prompt", "token id 512 is not within 0 … 511"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [7] * 4096}, "prompt", "the prompt has 4096 tokens; this model takes at most 4095"),
        ({"prompt": [7] * 4000, "max_tokens": 97}, "max_tokens", "make 4097"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "make 130 choices; at most 128"),
        ({"prompt": "a", "echo": True}, "echo", "not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ],
)
def test_bad_completion_requests(
    http: httpx.Client, engine: FakeClient, fields: dict[str, Any], param: str, message: str
) -> None:
    problem = error(http.post(TEXT, json={"model": "tiny", **fields}), 400)
    assert problem["param"] == param
    assert message in problem["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a",}',
        b"[1]",
        b'"x"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "logit_bias": {"5": NaN}}',
        b'{"prompt": "a", "temperature": 1e999}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_malformed_bodies(http: httpx.Client, path: str, body: bytes) -> None:
    problem = error(http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    assert problem["code"] == "invalid_json"


def test_unknown_model_path_and_method(http: httpx.Client) -> None:
    problem = error(http.post(CHAT, json={"model": "gpt", "messages": USER}), 404)
    assert (problem["code"], problem["param"]) == ("model_not_found", "model")
    assert "'gpt'" in problem["message"]
    assert "'tiny'" in problem["message"]
    error(http.get("/v1/models/gpt"), 404)
    assert "/v1/nothing" in error(http.get("/v1/nothing"), 404)["message"]
    response = http.get(CHAT)
    error(response, 405)
    assert response.headers["allow"] == "POST"


def test_fields_without_meaning_are_ignored(http: httpx.Client, engine: FakeClient) -> None:
    extra = {"user": "u", "store": False, "metadata": {}, "tools": [], "tool_choice": "none", "response_format": None}
    assert http.post(CHAT, json={"messages": USER, "max_tokens": 4, **extra}).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 4


def test_a_body_over_the_limit(http: httpx.Client, engine: FakeClient) -> None:
    problem = error(http.post(TEXT, json={"prompt": "x" * 2**20}), 413)
    assert problem["code"] == "body_too_large"
    assert "at most 1048576" in problem["message"]
    assert http.get("/health").status_code == 200


def test_a_body_without_end(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        while True:
            yield b"x" * 2**18

    with http.stream("POST", TEXT, content=chunks()) as response:
        assert response.status_code == 413
        assert "more than 2097152 bytes" in response.read().decode()
    assert http.get("/health").status_code == 200


async def test_bodies_together_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msaserve.gateway.app._MAX_BODIES", 1)
    monkeypatch.setattr("msaserve.gateway.app._BODY_SECONDS", 0.2)
    app = create_app(FakeClient(), tokenizer, None, GatewaySettings("tiny", max_body_bytes=3 * 2**20))
    budget = app.state.gateway._bodies
    has_sent, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * (5 * 2**19)
        has_sent.set()
        await may_end.wait()
        yield b'{"prompt": "a"}'

    large = b" " * (5 * 2**19) + b'{"prompt": "a"}'
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        first = asyncio.create_task(http.post(TEXT, content=slow()))
        await has_sent.wait()
        response = await http.post(TEXT, content=large)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "busy")
        assert response.headers["retry-after"] == "1"
        assert (await http.post(TEXT, json={"prompt": "a"})).status_code == 200  # small ones need no room
        may_end.set()
        assert (await first).status_code == 200
        assert (await http.post(TEXT, content=large)).status_code == 200
    assert budget.used == 0


def test_a_huge_prompt_is_refused_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    count_beyond = Tokenizer.count_beyond

    def spy(tokenizer: Tokenizer, text: str, limit: int) -> int | None:
        threads.append(threading.current_thread().name)
        if threads[-1] != "http-server":
            assert httpx.get(f"{url}/health", timeout=SECONDS, trust_env=False).status_code == 200
        return count_beyond(tokenizer, text, limit)

    monkeypatch.setattr(Tokenizer, "count_beyond", spy)
    engine = FakeClient(max_model_len=524_288)
    huge: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": "word " * 2_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "ab" * 5_000_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "ab" * 100_000}] * 40}),
    ]
    with (
        serve(engine, max_body_bytes=2**26) as url,
        httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as http,
    ):
        for path, fields in huge:
            problem = error(http.post(path, json=fields), 400)
            assert problem["code"] == "context_length_exceeded"
            assert "at most 524287" in problem["message"]
            assert "characters has more than" in problem["message"]
        assert len(threads) == 3
        assert "http-server" not in threads
        assert not engine.requests


def test_a_template_that_raises() -> None:
    template = ChatTemplate("{{ raise_exception('no such roles here') }}")
    with serve(FakeClient(), template=template) as url:
        for fields in ({}, {"stream": True}):
            response = httpx.post(url + CHAT, json={"messages": USER, **fields}, trust_env=False)
            problem = error(response, 400)
            assert "no such roles here" in problem["message"]
            assert problem["param"] == "messages"


def test_api_key() -> None:
    with serve(FakeClient(), api_key="sécret") as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert error(http.get(path), 401)["code"] == "invalid_api_key"
        for header in ("Bearer x", "sécret", "Basic sécret", ""):
            assert http.get("/v1/models", headers={"authorization": header.encode()}).status_code == 401
        for header in ("Bearer sécret", "bearer sécret"):
            assert http.get("/v1/models", headers={"authorization": header.encode("latin-1")}).status_code == 200


def test_request_ids(http: httpx.Client) -> None:
    assert http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [http.get("/nothing", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("a b", "x" * 129)]
    assert len(set(made)) == 2
    assert all(len(m) == 32 for m in made)


def test_ready(http: httpx.Client, engine: FakeClient) -> None:
    assert http.get("/ready").status_code == 200
    engine.is_up = False
    assert http.get("/ready").status_code == 503
    assert http.get("/health").status_code == 200


def test_engine_refusals(http: httpx.Client, engine: FakeClient) -> None:
    for is_stream in (False, True):
        body = {"prompt": "a", "stream": is_stream}
        engine.refusal = InvalidRequestError("9 tokens fit", param="prompt", code="too_long")
        assert error(http.post(TEXT, json=body), 400)["message"] == "9 tokens fit"
        engine.refusal = OverloadedError("the queue is full")
        response = http.post(TEXT, json=body)
        assert error(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        engine.refusal = EngineError("the engine has stopped")
        assert error(http.post(TEXT, json=body), 500)["message"] == "the engine has stopped"
        engine.refusal = RuntimeError("secret detail")
        assert "secret" not in error(http.post(TEXT, json=body), 500)["message"]


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def test_an_engine_error_in_mid_stream(http: httpx.Client, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.script = tokenizer.encode("abc")
    engine.fail_after = 2
    with http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as response:
        assert response.status_code == 200
        first, second, last = events(response)
    assert (first["choices"][0]["text"], second["choices"][0]["text"]) == ("a", "b")
    assert last["error"]["message"] == "the fake engine fails"
    assert error(http.post(TEXT, json={"prompt": "a"}), 500)["code"] == "engine_error"


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/responses", "/v1/messages"])
def test_a_stream_that_fails_before_its_first_text(http: httpx.Client, engine: FakeClient, path: str) -> None:
    """The first token is half a character, and nothing can be shown of it: the output began all the same."""
    engine.script = [Tokenizer.load(TINY).encode("é")[0], 5]
    engine.fail_after = 1
    asked = {"prompt": "a"} if path == TEXT else {"input": "a"} if path == "/v1/responses" else {"messages": USER}
    with http.stream("POST", path, json={**asked, "max_tokens": 8, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        last = [line for line in response.iter_lines() if line][-1]
    assert "the fake engine fails" in last
    engine.fail_after = 0
    assert http.post(path, json={**asked, "max_tokens": 8, "stream": True}).status_code == 500


async def test_a_request_that_came_before_the_end_is_served(tokenizer: Tokenizer) -> None:
    """The server begins to drain while the body of one request is still on its way."""
    app = create_app(FakeClient(), tokenizer, None, GatewaySettings("tiny"))

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        app.state.gateway.is_draining = True
        yield b'"a"}'

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        assert (await http.post(TEXT, content=body())).status_code == 200
        assert (await http.post(TEXT, json={"prompt": "a"})).status_code == 503
        assert (await http.get("/ready")).status_code == 503


async def test_health_when_the_engine_is_gone_for_good(tokenizer: Tokenizer) -> None:
    app = create_app(FakeClient(), tokenizer, None, GatewaySettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        assert (await http.get("/health")).status_code == 200
        app.state.gateway.failure = "the worker died: SIGKILL"
        response = await http.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "the worker died: SIGKILL")


def test_the_shape_of_a_stream(http: httpx.Client, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.script = tokenizer.encode("hé")
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", CHAT, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        got = events(response)
    assert got[-1] == "[DONE]"
    assert [c["choices"][0]["delta"] for c in got[:-2]] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in got[:-2]] == [None, None, None, "stop"]
    assert all(c["usage"] is None for c in got[:-2])
    assert got[-2]["choices"] == []
    assert got[-2]["usage"]["completion_tokens"] == 4
    assert len({c["id"] for c in got[:-1]}) == 1
    with http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as response:
        assert all("usage" not in c for c in events(response)[:-1])


def test_headers_and_keep_alive_come_before_a_slow_first_token(
    http: httpx.Client, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msaserve.gateway.transport.HEADER_DELAY_SECONDS", 0.05)
    monkeypatch.setattr("msaserve.gateway.transport.KEEP_ALIVE_SECONDS", 0.05)
    engine.delay = 0.4
    with http.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"


def test_a_model_is_described_for_clients_of_either_api(http: httpx.Client) -> None:
    answer = http.get("/v1/models").json()
    (card,) = answer["data"]
    assert card == http.get("/v1/models/tiny").json()
    assert (card["object"], card["type"], card["display_name"]) == ("model", "model", "tiny")
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert card["max_input_tokens"] == card["max_model_len"] == 4096
    assert (answer["object"], answer["has_more"], answer["last_id"]) == ("list", False, "tiny")


def test_tokenize_and_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "hé [e~["
    result = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert result["tokens"] == tokenizer.encode(text)
    assert (result["count"], result["max_model_len"]) == (len(result["tokens"]), 4096)
    assert result["token_strs"][-1] == "[e~["
    assert http.post("/detokenize", json={"tokens": result["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": USER}).json()
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == "]~!b[]~b]user\nhi[e~[\n]~b]ai\n"
    assert error(http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert "512" in error(http.post("/detokenize", json={"tokens": [512]}), 400)["message"]


def test_metrics(http: httpx.Client, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.script = tokenizer.encode("abc")

    def value(name: str) -> float:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"msaserve:{name}")]
        assert len(lines) == 1, (name, lines)
        return float(lines[0].rpartition(" ")[2])

    def observed() -> list[float]:
        return [
            value(f"{name}_count")
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
            )
        ]

    http.post(TEXT, json={"prompt": "a"})
    # Of an answer that is sent whole nobody sees the single tokens.
    for stream, counts in ((True, [1, 3, 1, 1]), (False, [0, 0, 0, 1])):
        before = observed()
        assert http.post(TEXT, json={"prompt": "a", "stream": stream}).status_code == 200
        assert [b - a for a, b in zip(before, observed(), strict=True)] == counts
    assert value("num_requests_waiting") == 3
    assert value("kv_cache_usage_perc") == 0.25
    assert value("prefix_cache_queries_total") == 1000
    assert value("prefix_cache_hits_total") == 250
    assert value("prompt_tokens_total") == 2000
    assert value("generation_tokens_total") == 777
    assert value("num_used_pages") == 50
    assert value("num_preemptions_total") == 5
    assert value(f'http_requests_total{{method="POST",path="{TEXT}",status="200"}}') >= 2
    assert value('request_success_total{finished_reason="stop"') >= 2


def test_defaults_come_from_the_checkpoint() -> None:
    engine = FakeClient()
    defaults = GenerationDefaults(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)
    with serve(engine, defaults=defaults) as url:
        httpx.post(url + CHAT, json={"messages": USER}, trust_env=False)
        fields = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "seed": -5}
        httpx.post(url + CHAT, json={"messages": USER, **fields, "cache_salt": "me"}, trust_env=False)
    first, second = (r.sampling for r in engine.requests)
    assert (first.temperature, first.top_p, first.top_k, first.min_p, first.repetition_penalty) == (
        0.7,
        0.9,
        40,
        0.1,
        1.1,
    )
    assert (first.max_tokens, first.seed, first.logprobs) == (None, None, None)
    assert (second.temperature, second.top_p, second.top_k, second.min_p, second.repetition_penalty) == (0, 1, 0, 0, 1)
    assert second.seed == -5
    assert engine.requests[1].cache_salt == "me"
