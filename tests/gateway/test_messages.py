"""/v1/messages: the unmodified `anthropic` client, a fake engine, a template that shows what it gets."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from chat_apis import FULL, NS, PARAMETERS, TEMPLATE, TWO_CALLS, call
from fake_engine import TINY, FakeClient, serve
from in_process import InProcessClient
from PIL import Image

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.errors import OverloadedError
from msaserve.gateway import transport
from msaserve.gateway.apis.messages import MessagesRequest, chat_of
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.pipeline import MediaPipeline
from msaserve.gateway.media.spec import find_spec
from msaserve.tokenizer import Tokenizer

WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": PARAMETERS,
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}, "type": "custom"}
TOOLS = [WEATHER, CLOCK]
USER: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def connected(url: str, **options: Any) -> Iterator[Any]:
    transport = anthropic.DefaultHttpxClient(trust_env=False, timeout=200)
    options = {"api_key": "none", **options}
    with anthropic.Anthropic(base_url=url, max_retries=0, http_client=transport, **options) as client:
        yield client


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return TEMPLATE


@pytest.fixture
def client(served: tuple[FakeClient, str], engine: FakeClient) -> Iterator[Any]:
    with connected(served[1]) as client:
        yield client


def create(client: Any, **fields: Any) -> Any:
    return client.messages.create(**_fields(fields))


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Clients of 2026 have no argument for some fields that the API has."""
    body = {name: fields[name] for name in ("temperature", "top_p", "top_k") if name in fields}
    rest = {name: value for name, value in fields.items() if name not in body}
    extra = {**body, **rest.pop("extra_body", {})}
    return {"model": "tiny", "max_tokens": 2000, "messages": USER, **rest, "extra_body": extra}


def plain(message: Any) -> dict[str, Any]:
    """All that two runs of one request must have in common."""
    text = message.model_dump_json(exclude={"id"}, exclude_none=True)
    return json.loads(re.sub(r"\bcall_[0-9a-f]+", "ID", text))  # type: ignore[no-any-return]


def test_text(client: Any, engine: FakeClient, say: Any, prompt: Any) -> None:
    say("Grüße")
    engine.num_cached_tokens = 5
    message = create(client, system="be brief", metadata={"user_id": "u"})
    assert prompt() == "]~!b[]~b]system:be brief[e~[]~b]user:hi[e~[]~b]ai:"
    assert [(block.type, block.text) for block in message.content] == [("text", "Grüße")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    usage = message.usage
    assert usage.input_tokens == len(engine.requests[0].prompt_token_ids) - 5
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert usage.output_tokens == len(engine.script) + 1


def test_thinking_and_calls(client: Any, say: Any, prompt: Any) -> None:
    say(f"look it up</mm:think>One moment.{TWO_CALLS}")
    message = create(client, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt().endswith("<mm:think>")
    assert '{"name": "weather", "description": "of a city", "parameters": {"type": "object"' in prompt()
    thinking, text, weather, clock = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "look it up")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "One moment.")
    assert [(c.type, c.name, c.input) for c in (weather, clock)] == [
        ("tool_use", "weather", {"city": "Köln", "days": 2}),
        ("tool_use", "clock", {}),
    ]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_a_stream_says_what_the_whole_says(client: Any, engine: FakeClient, say: Any, burst: int) -> None:
    say(FULL)
    engine.burst = burst
    whole = create(client, tools=TOOLS)
    events = list(create(client, tools=TOOLS, stream=True))
    steps: list[str] = []
    for event in events:
        step = f"{event.delta.type} {event.index}" if event.type == "content_block_delta" else event.type
        if event.type.startswith("content_block_st"):
            step += f" {event.index}"
        steps += [step] if not steps or step != steps[-1] else []
    assert steps == [
        "message_start",
        "content_block_start 0", "thinking_delta 0", "signature_delta 0", "content_block_stop 0",
        "content_block_start 1", "text_delta 1", "content_block_stop 1",
        "content_block_start 2", "input_json_delta 2", "content_block_stop 2",
        "content_block_start 3", "input_json_delta 3", "content_block_stop 3",
        "message_delta",
        "message_stop",
    ]  # fmt: skip
    start, delta = events[0].message, events[-2]
    assert (start.content, start.stop_reason) == ([], None)
    assert start.usage.input_tokens == whole.usage.input_tokens
    assert delta.delta.stop_reason == "tool_use"
    assert delta.usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(model="tiny", max_tokens=2000, messages=USER, tools=TOOLS) as stream:
        assert plain(stream.get_final_message()) == plain(whole)


def test_an_agents_loop(client: Any, say: Any, prompt: Any) -> None:
    """Content goes back as it came, with the results in any order and other words beside them."""
    say(FULL)
    first = create(client, tools=TOOLS)
    *_, weather, clock = first.content
    results = [
        {"type": "text", "text": "go on"},
        {"type": "tool_result", "tool_use_id": clock.id, "content": "noon"},
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "rain"}]},
    ]
    say("Bring an umbrella.")
    turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = create(client, messages=turns, tools=TOOLS)
    assert second.content[0].text == "Bring an umbrella."
    assert prompt().partition("]~b]user:")[2] == (
        "hi[e~[]~b]assistant:<mm:think>look it up</mm:think>One moment."
        f"{call('weather', city='Köln', days=2)}{call('clock')}[e~["
        "]~b]tool:rain[e~[]~b]tool:noon[e~[]~b]user:go on[e~[]~b]ai:"
    )


def test_messages_of_every_kind(client: Any, say: Any, prompt: Any) -> None:
    """Neighbours of one role are one message; results may come in several; nothing is said of what is hidden."""
    say("ok")
    cached = {"cache_control": {"type": "ephemeral"}}
    use: Any = {"type": "tool_use", "name": "clock", "input": {}}
    create(
        client,
        system=[{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": "c"},
            {"role": "user", "content": [{"type": "text", "text": "d", **cached}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {**use, "id": "1"}]},
            {"role": "assistant", "content": [{**use, "id": "2"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "2", "content": "e", "is_error": True}],
            },
        ],
    )
    assert prompt() == (
        "]~!b[]~b]system:ab[e~[]~b]user:cd[e~["
        f"]~b]assistant:{call('clock')}{call('clock')}[e~[]~b]tool:[e~[]~b]tool:e[e~[]~b]ai:"
    )


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "document", "source": source, **more}]}]}


def test_documents_that_are_text(client: Any, say: Any, prompt: Any) -> None:
    say("ok")
    create(client, **document({"type": "text", "data": "words"}, title="T", context="C", citations={"enabled": False}))
    assert "]~b]user:T\nC\nwords[e~[" in prompt()
    for content in ("a\nb", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        create(client, **document({"type": "content", "content": content}, title=None))
        assert "]~b]user:a\nb[e~[" in prompt()


def test_tool_choice(client: Any, say: Any, prompt: Any) -> None:
    say("ok")
    create(client, tools=TOOLS, tool_choice={"type": "none"})
    assert "weather" not in prompt()
    say(f'invoke name="clock">{NS}</invoke>\n{NS}</tool_call>')
    create(client, tools=TOOLS, tool_choice={"type": "any"})
    assert prompt().endswith(f"</mm:think>{NS}<tool_call>\n{NS}")
    say(f"{NS}<city>Köln{NS}</city>{NS}</invoke>\n{NS}</tool_call>")
    message = create(client, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert prompt().endswith(f'{NS}<invoke name="weather">')
    assert [(block.name, block.input) for block in message.content] == [("weather", {"city": "Köln"})]
    say(FULL)
    one = create(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]


def test_every_sampling_field_arrives(client: Any, engine: FakeClient, say: Any, prompt: Any) -> None:
    say("ok")
    extra = {"seed": 7, "cache_salt": "s"}
    create(client, temperature=0.5, top_p=0.25, top_k=3, max_tokens=9, stop_sequences=["x", "y"], extra_body=extra,
           thinking={"type": "disabled"})  # fmt: skip
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert (sampling.max_tokens, sampling.stop, sampling.seed) == (9, ("x", "y"), 7)
    assert engine.requests[0].cache_salt == "s"
    assert prompt().endswith("</mm:think>")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "one two three", "end_turn", None),
        ({"max_tokens": 5}, "one t", "max_tokens", None),
        ({"stop_sequences": ["three", "two"]}, "one ", "stop_sequence", "two"),
        ({"stop_sequences": ["four"]}, "one two three", "end_turn", None),
    ],
)
def test_why_it_stopped(
    client: Any,
    engine: FakeClient,
    say: Any,
    is_stream: bool,
    fields: Any,
    text: str,
    reason: str,
    sequence: str | None,
) -> None:
    say("one two three")
    engine.burst = 1 if is_stream else 6
    if is_stream:
        with client.messages.stream(**{"model": "tiny", "max_tokens": 99, "messages": USER, **fields}) as stream:
            message = stream.get_final_message()
    else:
        message = create(client, **fields)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (text, reason, sequence)


def test_a_call_that_breaks_off(client: Any, say: Any) -> None:
    """Shown as it was written: half an input is no input."""
    broken = f'{NS}<invoke name="weather">{NS}<city>Köln{NS}</town>{NS}</invoke>'
    say(f"{NS}<tool_call>\n{broken}\n{call('clock')}\n{NS}</tool_call>")
    shown, clock = create(client, tools=TOOLS).content
    assert shown.type == "text"
    assert broken in shown.text
    assert (clock.type, clock.name, clock.input) == ("tool_use", "clock", {})


def test_half_a_character_in_an_input(client: Any, say: Any) -> None:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"o": {"type": "object"}}}}
    broken = call("f", o=r'{"a": "x\ud800y"}')
    say(f"{NS}<tool_call>{broken}{NS}</tool_call>")
    (block,) = create(client, tools=[tool]).content
    assert block.input == {"o": {"a": "x�y"}}


def test_what_a_coding_agent_sends(client: Any, say: Any, prompt: Any) -> None:
    """Fields and headers that mean nothing here are passed over."""
    say(f"<mm:think>look it up</mm:think>{call('clock')}")
    cached = {"cache_control": {"type": "ephemeral"}}
    with client.beta.messages.stream(
        model="tiny",
        max_tokens=2000,
        betas=["interleaved-thinking-2025-05-14"],
        system=[{"type": "text", "text": "a", **cached}],
        messages=USER,
        tools=[{**CLOCK, "eager_input_streaming": True, **cached}],
        tool_choice={"type": "auto"},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert "ephemeral" not in prompt()
    assert client.models.list().data[0].id == "tiny"


def test_output_format(client: Any, engine: FakeClient, say: Any) -> None:
    """What chat makes of it is tested there."""
    say("{}")
    create(client, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    schema = {"type": "object"}
    for field in ({"output_config": {"format": {"type": "json_schema", "schema": schema}}},
                  {"output_format": {"type": "json_schema", "schema": schema}}):  # fmt: skip
        chat = chat_of(MessagesRequest(messages=USER, max_tokens=9, **field))  # type: ignore[arg-type]
        assert chat.fields["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema, "strict": True},
        }


def test_count_tokens(client: Any, engine: FakeClient, say: Any) -> None:
    say("ok")
    fields: Any = {"model": "tiny", "messages": USER, "system": "a", "tools": TOOLS, "thinking": {"type": "disabled"}}
    counted = client.messages.count_tokens(**fields).input_tokens
    assert not engine.requests
    assert create(client, **fields).usage.input_tokens == counted == len(engine.requests[0].prompt_token_ids)


def test_an_engine_that_fails(client: Any, engine: FakeClient, say: Any) -> None:
    say("never whole")
    engine.fail_after = 3
    with pytest.raises(anthropic.InternalServerError, match="the fake engine fails") as failed:
        create(client)
    assert failed.value.body == {"type": "error", "error": {"type": "api_error", "message": "the fake engine fails"}}
    events: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match="the fake engine fails"):
        events.extend(create(client, stream=True))
    assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == "nev"
    engine.refusal = OverloadedError("full")
    with pytest.raises(anthropic.APIStatusError, match="full") as refused:
        create(client, stream=True)
    assert (refused.value.status_code, refused.value.body["error"]["type"]) == (503, "overloaded_error")


def test_ping(
    client: Any, served: tuple[FakeClient, str], engine: FakeClient, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is silent says so in a way that clients pass over."""
    monkeypatch.setattr(transport, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(transport, "HEADER_DELAY_SECONDS", 0.01)
    say("ok")
    engine.delay = 0.3
    fields = {"messages": USER, "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{served[1]}/v1/messages", json=fields, trust_env=False) as response:
        lines = list(response.iter_lines())
    assert lines[:3] == ["event: ping", 'data: {"type":"ping"}', ""]
    assert "event: message_stop" in lines
    assert next(event.type for event in create(client, stream=True)) == "message_start"


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role must be user or assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be text or a list"),
        ({"messages": [*USER, {"role": "assistant", "content": "So"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}, "content[0]: type 'search_result'"),
        (document(None), "content[0].source: type 'None' is not supported; taken are text and content"),
        (document({"type": "base64", "media_type": "application/pdf", "data": ""}), "source: type 'base64'"),
        (document({"type": "content", "content": [{"type": "image"}]}), "source.content[0].text must be text"),
        (document({"type": "text", "data": 3}, citations={"enabled": True}), "content[0].citations are not supported"),
        ({"messages": [*USER, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]: image_url parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "'file'"),
        ({"messages": [*USER, USE, *USER]}, "must be answered"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
         "messages[0].content[0].tool_use_id: the assistant's message before it has no call 'c'"),
        ({"temperature": 3}, "temperature must be between 0 and 2"),
        ({"stop_sequences": [""]}, "stop strings must have"),
        ({"thinking": {"type": "huge"}}, "thinking.type must be one of"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}}, "thinking comes first"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type must be one of"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: type 'web_search_20250305'"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema must be"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "a", "input_schema": {"type": "object", "not": {}}}], "tool_choice": {"type": "any"}},
         "tools[0].input_schema of 'a' cannot be enforced: parameters: not "),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers is not supported"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
    ],
)  # fmt: skip
def test_refused(client: Any, engine: FakeClient, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=re.escape(words)) as refused:
        create(client, **fields)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    ("content", "max_tokens", "words"),
    [
        ("x" * 5000, 9, r"^prompt is too long: \d+ tokens > 4095 maximum$"),
        ("x " * 200_000, 9, r"^prompt is too long: \d+ tokens > 4095 maximum$"),
        ("x", 4096, r"^input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 4096, "),
    ],
)
def test_what_is_too_long_is_said_in_words_that_agents_know(
    client: Any, content: str, max_tokens: int, words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, messages=[{"role": "user", "content": content}], max_tokens=max_tokens)
    assert re.search(words, refused.value.body["error"]["message"])
    assert refused.value.request_id


def test_max_tokens_is_needed(served: tuple[FakeClient, str]) -> None:
    response = httpx.post(f"{served[1]}/v1/messages", json={"messages": USER}, trust_env=False)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert "max_tokens" in response.json()["error"]["message"]


def test_errors_of_the_server(client: Any, served: tuple[FakeClient, str]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        create(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    response = httpx.get(f"{served[1]}/v1/messages", trust_env=False)
    assert (response.status_code, response.json()["type"]) == (405, "error")


def test_keys() -> None:
    """x-api-key and Bearer are the same key, on every path."""
    engine = FakeClient()
    engine.script = Tokenizer.load(TINY).encode("ok")
    with serve(engine, api_key="secret") as url:
        with connected(url, api_key="secret") as client:
            assert create(client).content[0].text == "ok"
        with connected(url, api_key=None, auth_token="secret") as client:
            assert create(client).content[0].text == "ok"
        with connected(url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            create(client)
        assert refused.value.body["error"]["type"] == "authentication_error"
        for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": ""}, 401), ({}, 401)):
            assert httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code == status


def test_pictures() -> None:
    """Of users and of tools, in the prompt and in its count."""
    source = find_spec(TINY)
    assert source is not None
    png = BytesIO()
    Image.linear_gradient("L").resize((90, 60)).save(png, "PNG")
    data = base64.b64encode(png.getvalue()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    engine = FakeClient()
    engine.info = msgspec.structs.replace(engine.info, supports_vision=True, image_token_id=510, video_token_id=511)
    engine.script = Tokenizer.load(TINY).encode("seen")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    ]
    with (
        serve(engine, media=MediaPipeline(source, num_processes=1), max_body_bytes=2**24) as url,
        connected(url) as client,
    ):
        counted = client.messages.count_tokens(model="tiny", messages=messages).input_tokens
        message = create(client, messages=messages, max_tokens=9)
        broken = {**image, "source": {**image["source"], "data": "AAAA"}}  # type: ignore[dict-item]
        with pytest.raises(anthropic.BadRequestError, match=re.escape("messages[0].content[1]: ")):
            create(client, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, broken]}])
    (request,) = engine.requests
    assert message.content[0].text == "seen"
    assert [item.modality for item in request.media] == ["image", "image"]
    assert message.usage.input_tokens == counted == len(request.prompt_token_ids)


def test_the_small_checkpoint() -> None:
    """The engine itself: the text of /v1/messages is that of /v1/chat/completions."""
    config = EngineConfig(device="cpu", max_model_len=512, kv_cache_gib=0.02)
    engine = InProcessClient(AsyncEngine(Engine.from_checkpoint(TINY, config)))
    with serve(engine) as url:
        transport = httpx.Client(trust_env=False, timeout=200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
            chat = client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=16)
        with connected(url) as client:
            whole = create(client, temperature=0, max_tokens=16)
            with client.messages.stream(**_fields({"temperature": 0, "max_tokens": 16})) as stream:
                streamed = stream.get_final_message()
    assert "".join(block.text for block in whole.content) == chat.choices[0].message.content
    assert whole.content
    assert plain(streamed)["content"] == plain(whole)["content"]
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    asyncio.run(engine.close())
