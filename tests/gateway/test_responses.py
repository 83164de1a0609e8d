"""/v1/responses: the unmodified `openai` client, a fake engine, a template that shows what it gets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import httpx
import openai
import pytest
from chat_apis import FULL, NS, PARAMETERS, TEMPLATE, call
from fake_engine import TINY, FakeClient, serve
from in_process import InProcessClient
from waits import until

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.errors import InvalidRequestError, OverloadedError
from msaserve.gateway.apis.responses import ResponsesRequest, chat_of
from msaserve.gateway.chat import ChatTemplate
from msaserve.tokenizer import Tokenizer

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": PARAMETERS,
    "strict": False,
}
CLOCK: Any = {"type": "function", "name": "clock"}
TOOLS = [WEATHER, CLOCK]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return TEMPLATE


@pytest.fixture
def client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hi", **fields})


def plain(response: Any) -> dict[str, Any]:
    """All that two runs of one request must have in common."""
    text = response.model_dump_json(exclude={"id", "created_at"})
    return json.loads(re.sub(r"\b(?:msg|rs|fc|call)_[0-9a-f]+", "ID", text))  # type: ignore[no-any-return]


def test_text(client: openai.OpenAI, engine: FakeClient, say: Any, prompt: Any) -> None:
    say("Grüße")
    engine.num_cached_tokens = 5
    response = create(client, instructions="be brief", metadata={"a": "b"}, temperature=0.5, store=True)
    assert prompt() == "]~!b[]~b]system:be brief[e~[]~b]user:hi[e~[]~b]ai:"
    assert response.output_text == "Grüße"
    assert (response.object, response.status, response.model) == ("response", "completed", "tiny")
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    assert (response.instructions, response.temperature, response.store) == ("be brief", 0.5, False)
    (item,) = response.output
    assert (item.type, item.role, item.status, item.content[0].annotations) == ("message", "assistant", "completed", [])
    usage = response.usage
    num_prompt, num_output = len(engine.requests[0].prompt_token_ids), len(engine.script) + 1
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        num_prompt,
        num_output,
        num_prompt + num_output,
    )
    assert usage.input_tokens_details.cached_tokens == 5
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_reasoning_and_calls(client: openai.OpenAI, say: Any, prompt: Any, tokenizer: Tokenizer) -> None:
    say(FULL)
    response = create(client, tools=TOOLS, reasoning={"effort": "high", "summary": "auto"})
    assert '{"name": "weather", "description": "of a city", "parameters": {"type": "object"' in prompt()
    reasoning, message, weather, clock = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "look it up", [])
    assert (message.type, message.content[0].text) == ("message", "One moment.")
    assert [(c.type, c.name, json.loads(c.arguments), c.status) for c in (weather, clock)] == [
        ("function_call", "weather", {"city": "Köln", "days": 2}, "completed"),
        ("function_call", "clock", {}, "completed"),
    ]
    assert weather.call_id != clock.call_id
    assert len({item.id for item in response.output}) == 4
    assert response.status == "completed"
    assert response.reasoning.effort == "high"
    assert response.tools[0].name == "weather"
    # The opening marker counts; the closing one may.
    num_thinking = len(tokenizer.encode("<mm:think>look it up"))
    assert abs(response.usage.output_tokens_details.reasoning_tokens - num_thinking) <= 1


@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_a_stream_says_what_the_whole_says(client: openai.OpenAI, engine: FakeClient, say: Any, burst: int) -> None:
    say(FULL)
    engine.burst = burst
    whole = create(client, tools=TOOLS)
    seen = list(create(client, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type for event in seen[:2]] == ["response.created", "response.in_progress"]
    assert seen[0].response.output == []
    assert seen[-1].type == "response.completed"
    assert plain(seen[-1].response) == plain(whole)
    names = [event.type.removeprefix("response.") for event in seen[2:-1]]
    steps = [name for i, name in enumerate(names) if not name.endswith(".delta") or name != names[i - 1]]
    part = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    one_call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert steps == [
        *part[0], "reasoning_text.delta", "reasoning_text.done", *part[1],
        *part[0], "output_text.delta", "output_text.done", *part[1],
        *one_call, *one_call,
    ]  # fmt: skip
    output = seen[-1].response.output
    texts: dict[int, str] = {}
    for event in seen:
        if event.type.endswith(".delta"):
            assert event.item_id == output[event.output_index].id
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        elif event.type == "response.output_item.added":
            assert (event.item.id, event.item.status) == (output[event.output_index].id, "in_progress")
            assert event.output_index not in texts
        elif event.type == "response.output_item.done":
            assert event.item.model_dump() == output[event.output_index].model_dump()
        elif event.type == "response.function_call_arguments.done":
            assert event.name == output[event.output_index].name
            assert event.arguments == texts[event.output_index]
        elif event.type.endswith("text.done"):
            assert event.text == texts[event.output_index]
    assert texts[0] == output[0].content[0].text
    assert texts[1] == output[1].content[0].text
    assert [texts[2], texts[3]] == [output[2].arguments, output[3].arguments]


def test_stream_helper(client: openai.OpenAI, say: Any) -> None:
    say(FULL)
    with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        final = stream.get_final_response()
    assert final.output_text == "One moment."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_an_agents_loop(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    """Output goes back as input, with the results in any order."""
    say(FULL)
    first = create(client, tools=TOOLS)
    *_, weather, clock = first.output
    results = [
        {"type": "function_call_output", "call_id": clock.call_id, "output": "noon"},
        {
            "type": "function_call_output",
            "call_id": weather.call_id,
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ]
    say("Bring an umbrella.")
    items = [{"role": "user", "content": "hi"}, *first.output, *results, {"role": "developer", "content": "be brief"}]
    second = create(client, input=items, tools=TOOLS)
    assert second.output_text == "Bring an umbrella."
    assert prompt().partition("]~b]user:")[2] == (
        "hi[e~[]~b]assistant:<mm:think>look it up</mm:think>One moment."
        f"{call('weather', city='Köln', days=2)}{call('clock')}[e~["
        "]~b]tool:rain[e~[]~b]tool:noon[e~[]~b]developer:be brief[e~[]~b]ai:"
    )


def test_messages_of_every_kind(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say("ok")
    create(
        client,
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "reasoning", "id": "rs_2", "summary": [], "content": None, "encrypted_content": "x"},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "c"}],
            },
            {"role": "system", "content": "d"},
        ],
    )
    assert prompt() == ("]~!b[]~b]user:a[e~[]~b]assistant:<mm:think>so</mm:think>bc[e~[]~b]system:d[e~[]~b]ai:")


def test_tool_choice(client: openai.OpenAI, engine: FakeClient, say: Any, prompt: Any) -> None:
    say("ok")
    create(client, tools=TOOLS, tool_choice="none")
    assert "weather" not in prompt()
    say(f"{NS}<city>Köln{NS}</city>{NS}</invoke>\n{NS}</tool_call>")
    response = create(client, tools=TOOLS, tool_choice={"type": "function", "name": "weather"})
    assert prompt().endswith(f'</mm:think>{NS}<tool_call>\n{NS}<invoke name="weather">')
    assert [(item.name, item.arguments) for item in response.output] == [("weather", '{"city": "Köln"}')]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    response = create(client, tools=[*TOOLS, {**TOOLS[0], "name": "other"}], tool_choice=choice)
    assert prompt().endswith(f"</mm:think>{NS}<tool_call>\n{NS}")
    assert "other" not in prompt()
    assert response.tool_choice.type == "allowed_tools"
    say(FULL)
    assert [item.type for item in create(client, tools=TOOLS, parallel_tool_calls=False).output] == [
        "reasoning",
        "message",
        "function_call",
    ]


def test_every_sampling_field_arrives(client: openai.OpenAI, engine: FakeClient, say: Any, prompt: Any) -> None:
    say("ok")
    extra = {"top_k": 3, "seed": 7, "stop": ["x"], "cache_salt": "s", "min_p": 0.125, "repetition_penalty": 1.5}
    create(client, temperature=0.5, top_p=0.25, max_output_tokens=9, extra_body=extra, reasoning={"effort": "none"})
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.25, 9)
    assert (sampling.top_k, sampling.seed, sampling.stop) == (3, 7, ("x",))
    assert (sampling.min_p, sampling.repetition_penalty, request.cache_salt) == (0.125, 1.5, "s")
    assert prompt().endswith("</mm:think>")


def test_what_a_coding_agent_sends(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    """Fields that mean nothing here are passed over."""
    say(f"<mm:think>look it up</mm:think>{call('clock')}")
    *_, last = create(
        client,
        instructions="a",
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        tools=[CLOCK],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        service_tier="auto",
        text={"verbosity": "low"},
        truncation="auto",
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert [item.type for item in last.response.output] == ["reasoning", "function_call"]
    assert prompt().endswith("]~b]system:a[e~[]~b]user:hi[e~[]~b]ai:")


def test_text_format(client: openai.OpenAI, engine: FakeClient, say: Any) -> None:
    """What chat makes of it is tested there."""
    say("{}")
    create(client, text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}})
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema must be an object") as refused:
        create(client, text={"format": {"type": "json_schema", "name": "a", "schema": 5}})
    assert refused.value.param is not None
    assert refused.value.param.startswith("text.format")
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    chat = chat_of(ResponsesRequest(input="hi", text={"format": form}))
    assert chat.fields["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
    }
    chat = chat_of(ResponsesRequest(input="hi", text={"format": {"type": "json_object"}}))
    assert chat.fields["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_is_cut_off(client: openai.OpenAI, say: Any, is_stream: bool) -> None:
    say("a longer answer")
    response = create(client, max_output_tokens=5, stream=is_stream)
    if is_stream:
        *_, item_done, last = response
        assert (item_done.type, item_done.item.status) == ("response.output_item.done", "incomplete")
        assert last.type == "response.incomplete"
        response = last.response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.output_text) == ("incomplete", "a lon")


def test_a_call_that_breaks_off(client: openai.OpenAI, say: Any) -> None:
    """Its arguments are no JSON, and it says so; the next one is whole."""
    broken = f'{NS}<invoke name="weather">{NS}<city>Köln{NS}</town>{NS}</invoke>'
    say(f"{NS}<tool_call>\n{broken}\n{call('clock')}\n{NS}</tool_call>")
    weather, clock = create(client, tools=TOOLS).output
    assert (weather.name, weather.status, weather.arguments) == ("weather", "incomplete", '{"city": "Köln')
    assert (clock.name, clock.status, clock.arguments) == ("clock", "completed", "{}")
    last = list(create(client, tools=TOOLS, stream=True))[-1]
    assert [item.status for item in last.response.output] == ["incomplete", "completed"]


def test_an_engine_that_fails(client: openai.OpenAI, engine: FakeClient, say: Any) -> None:
    say("never whole")
    engine.fail_after = 3
    with pytest.raises(openai.InternalServerError, match="the fake engine fails"):
        create(client)
    seen = list(create(client, stream=True))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.failed"
    failed = seen[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == (
        "failed",
        "server_error",
        "the fake engine fails",
    )
    assert failed.output[0].content[0].text == "nev"
    assert failed.output[0].status == "incomplete"
    engine.refusal = OverloadedError("full")
    with pytest.raises(openai.InternalServerError, match="full") as refused:
        create(client, stream=True)
    assert refused.value.status_code == 503


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "https://x.org/a.png"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored; send the whole conversation"),
        ({"background": True}, "background", "not stored"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation", "nothing is stored"),
        ({"prompt": {"id": "p"}}, "prompt", "no stored prompts"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be between 1"),
        ({"temperature": 3}, "temperature", "between 0 and 2"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "reasoning.effort must be one of"),
        ({"input": []}, "input", "input must not be empty"),
        ({"input": 5}, "input", "input must be text or a list"),
        ({"input": ["hi"]}, "input[0]", "must be an object"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "must be text or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "'input_file'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": "a"}, IMAGE]}, "input[1].content[0]", "takes text only"),
        ({"instructions": "a", "input": [IMAGE]}, "input[0].content[0]", "takes text only"),
        ({"input": [CALL]}, "input", "must be answered"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[0].call_id", "no call"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters, digits"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters", "JSON schema"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "object", "not": {}}}],
          "tool_choice": "required"}, "tools[0].parameters", "cannot be enforced: parameters: not "),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not in tools"),
    ],
)  # fmt: skip
def test_refused(client: openai.OpenAI, engine: FakeClient, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)) as refused:
        create(client, **fields)
    assert refused.value.param == param
    assert "messages" not in str(refused.value)
    assert not engine.requests


@pytest.mark.parametrize("is_stream", [False, True])
def test_refused_by_the_engine(client: openai.OpenAI, engine: FakeClient, is_stream: bool) -> None:
    engine.refusal = InvalidRequestError("response_format: no schema", param="response_format")
    with pytest.raises(openai.BadRequestError, match=r"text\.format: no schema") as refused:
        create(client, stream=is_stream)
    assert refused.value.param == "text.format"


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(client, model="other")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_client_that_goes_away_aborts_its_request(
    client: openai.OpenAI, engine: FakeClient, say: Any, is_stream: bool, path: str
) -> None:
    say("abc" * 1000)
    engine.delay = 0.01
    fields = (
        {"input": "a"}
        if path == "/v1/responses"
        else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99}
    )
    body = json.dumps({**fields, "stream": is_stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(head + body)
        until(lambda: bool(engine.running))
        if is_stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    until(lambda: not engine.running)
    assert len(engine.closed_early) == 1


def test_the_small_checkpoint() -> None:
    """The engine itself: the text of /v1/responses is that of /v1/chat/completions."""
    config = EngineConfig(device="cpu", max_model_len=512, kv_cache_gib=0.02)
    engine = InProcessClient(AsyncEngine(Engine.from_checkpoint(TINY, config)))
    with serve(engine) as url:
        transport = httpx.Client(trust_env=False, timeout=200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=16
            )
            fields = {"temperature": 0, "max_output_tokens": 16}
            whole = create(client, **fields)
            *_, last = create(client, **fields, stream=True)
        assert whole.output_text == chat.choices[0].message.content
        assert whole.output_text
        assert plain(last.response)["output"] == plain(whole)["output"]
        assert whole.usage.output_tokens == chat.usage.completion_tokens
    asyncio.run(engine.close())
