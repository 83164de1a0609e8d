"""Thinking and tools over HTTP: the unmodified `openai` client, a fake engine, a template that shows what it gets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from chat_apis import NS, PARAMETERS, TEMPLATE, TWO_CALLS, call
from fake_engine import TINY, FakeClient

from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.parsers.minimax_m3 import MARKER_TOKENS
from msaserve.tokenizer import IncrementalDetokenizer, Tokenizer

USER: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": PARAMETERS,
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return TEMPLATE


@pytest.fixture
def client(openai_client: openai.OpenAI) -> openai.OpenAI:
    return openai_client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": USER, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """Reasoning, content, calls and finish reason."""
    content, reasoning, calls, reason = "", "", [], None
    for chunk in create(client, stream=True, **fields):
        (choice,) = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or ():
            if piece.index == len(calls):
                assert piece.type == "function"
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
            assert piece.index == len(calls) - 1
            calls[-1]["arguments"] += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return reasoning, content, calls, reason


def test_calls(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say(f"<mm:think>look it up</mm:think>One moment.{TWO_CALLS}")
    choice = create(client, tools=[WEATHER, CLOCK]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "look it up"
    weather, clock = choice.message.tool_calls
    assert (weather.type, weather.function.name) == ("function", "weather")
    assert json.loads(weather.function.arguments) == {"city": "Köln", "days": 2}
    assert (clock.function.name, clock.function.arguments) == ("clock", "{}")
    assert weather.id != clock.id
    assert all(c.id.startswith("call_") and len(c.id) == 29 for c in (weather, clock))
    assert f"tools:{json.dumps(WEATHER['function'])}{json.dumps(CLOCK['function'])}" in prompt()


@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_calls_in_a_stream(client: openai.OpenAI, engine: FakeClient, say: Any, burst: int) -> None:
    engine.burst = burst
    say(f"<mm:think>look it up</mm:think>One moment.{TWO_CALLS}")
    reasoning, content, calls, reason = streamed(client, tools=[WEATHER, CLOCK])
    assert (reasoning, content, reason) == ("look it up", "One moment.", "tool_calls")
    assert [c["name"] for c in calls] == ["weather", "clock"]
    assert json.loads(calls[0]["arguments"]) == {"city": "Köln", "days": 2}
    assert calls[1]["arguments"] == "{}"
    assert all(c["id"].startswith("call_") for c in calls)


def test_the_clients_own_accumulation(client: openai.OpenAI, say: Any) -> None:
    say(TWO_CALLS)
    with client.chat.completions.stream(model="tiny", messages=USER, tools=[WEATHER, CLOCK]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [c.function.name for c in message.tool_calls or ()] == ["weather", "clock"]
    assert not message.content


def test_a_string_argument_comes_as_it_is_written(client: openai.OpenAI, say: Any) -> None:
    say(f"{NS}<tool_call>{call('weather', city='x' * 50)}{NS}</tool_call>")
    pieces = [
        piece.function.arguments
        for chunk in create(client, stream=True, tools=[WEATHER])
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert len(pieces) > 40
    assert json.loads("".join(pieces)) == {"city": "x" * 50}


def test_whole_message_without_calls(client: openai.OpenAI, say: Any, served: tuple[FakeClient, str]) -> None:
    say("b")
    answer = httpx.post(
        f"{served[1]}/v1/chat/completions", json={"messages": USER, "tools": [CLOCK]}, trust_env=False
    ).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "b"}
    say(f"{NS}<tool_call>{call('clock')}{NS}</tool_call>")
    answer = httpx.post(f"{served[1]}/v1/chat/completions", json={"messages": USER}, trust_env=False).json()
    message = answer["choices"][0]["message"]
    call_id = message["tool_calls"][0].pop("id")
    assert call_id
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
    }


@pytest.mark.parametrize(
    ("fields", "ends_with", "text", "reasoning", "content"),
    [
        ({}, "]~b]ai:", "<mm:think>r</mm:think>c", "r", "c"),
        ({}, "]~b]ai:", "c", None, "c"),
        ({"thinking": {"type": "enabled"}}, "]~b]ai:<mm:think>", "r</mm:think>c", "r", "c"),
        ({"thinking": {"type": "enabled"}}, "]~b]ai:<mm:think>", "r", "r", None),
        ({"thinking": {"type": "disabled"}}, "]~b]ai:</mm:think>", "c </mm:think>", None, "c </mm:think>"),
        ({"reasoning_effort": "none"}, "]~b]ai:</mm:think>", "c", None, "c"),
        ({"chat_template_kwargs": {"thinking_mode": "enabled"}}, "]~b]ai:<mm:think>", "r</mm:think>c", "r", "c"),
        # Markers in the prompt say nothing of the output.
        ({"messages": [{"role": "user", "content": "say <mm:think>"}]}, "]~b]ai:", "c", None, "c"),
        ({"messages": [{"role": "user", "content": "</mm:think>"}]}, "]~b]ai:", "<mm:think>r", "r", None),
    ],
)
def test_thinking(
    client: openai.OpenAI,
    say: Any,
    prompt: Any,
    fields: dict[str, Any],
    ends_with: str,
    text: str,
    reasoning: str | None,
    content: str | None,
) -> None:
    say(text)
    message = create(client, extra_body=fields).choices[0].message
    assert (getattr(message, "reasoning_content", None), message.content) == (reasoning, content)
    assert prompt().endswith(ends_with)
    assert streamed(client, extra_body=fields)[:2] == (reasoning or "", content or "")


def test_kept_tokens_are_shown_even_if_special(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a]~b]b[e~[<mm:think>")
    shown = IncrementalDetokenizer(tokenizer, kept_tokens=["]~b]", "no such token"])
    assert "".join(map(shown.push, ids)) == "a]~b]b<mm:think>"
    assert set(MARKER_TOKENS) >= {"<mm:think>", "</mm:think>", NS}


async def test_markers_are_parsed_even_if_special() -> None:
    definition = json.loads((TINY / "tokenizer.json").read_text())
    for token in definition["added_tokens"]:
        token["special"] = True
    tokenizer, engine = Tokenizer(json.dumps(definition), {}), FakeClient()
    engine.script = tokenizer.encode("<mm:think>r</mm:think>c]~b]")
    app = create_app(engine, tokenizer, TEMPLATE, GatewaySettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": USER})).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "c", "reasoning_content": "r"}


def test_every_chunk_says_something(client: openai.OpenAI, say: Any) -> None:
    say(f"<mm:think>look</mm:think>so{TWO_CALLS}")
    first, *others, last = create(client, stream=True, tools=[WEATHER, CLOCK])
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "tool_calls"
    for chunk in others:
        delta = chunk.choices[0].delta
        assert delta.content or delta.tool_calls or delta.reasoning_content


def test_an_answer_that_is_cut_off_in_a_call(client: openai.OpenAI, engine: FakeClient, say: Any) -> None:
    say(TWO_CALLS)
    whole = len(engine.script)
    for limit in range(1, whole):
        reasoning, content, calls, reason = streamed(client, tools=[WEATHER], max_tokens=limit)
        choice = create(client, tools=[WEATHER], max_tokens=limit).choices[0]
        assert (reasoning, reason, choice.finish_reason) == ("", "length", "length")
        assert (choice.message.content or "") == content
        given = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or ()]
        assert given == [{k: v for k, v in c.items() if k != "id"} for c in calls]
        assert content or calls or limit < 3


def test_choice_none(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say(TWO_CALLS)
    choice = create(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TWO_CALLS, None, "stop")
    assert "weather" not in prompt()


def test_choice_named(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say(f"{NS}<city>Rom{NS}</city>{NS}</invoke>\n{NS}</tool_call>")
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    choice = create(client, **fields).choices[0]
    assert prompt().endswith(f']~b]ai:</mm:think>{NS}<tool_call>\n{NS}<invoke name="weather">')
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Rom"}'
    assert [c["name"] for c in streamed(client, **fields)[2]] == ["weather"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_choice_among_some(client: openai.OpenAI, say: Any, prompt: Any, mode: str) -> None:
    """As if the others had not been sent."""
    clock = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [clock]}}
    say("ok" if mode == "auto" else f'<invoke name="clock">{NS}</invoke>\n{NS}</tool_call>')
    create(client, tools=[WEATHER, CLOCK], tool_choice=choice)
    given = prompt()
    create(client, tools=[CLOCK], tool_choice=mode)
    assert given == prompt()


def test_choice_required(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say(f'<invoke name="clock">{NS}</invoke>\n{NS}</tool_call>')
    choice = create(client, tools=[WEATHER, CLOCK], tool_choice="required").choices[0]
    assert prompt().endswith(f"]~b]ai:</mm:think>{NS}<tool_call>\n{NS}")
    assert [c.function.name for c in choice.message.tool_calls] == ["clock"]
    with pytest.raises(openai.BadRequestError, match="thinking comes first") as raised:
        create(client, tools=[CLOCK], tool_choice="required", extra_body={"thinking": {"type": "enabled"}})
    assert raised.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        create(client, tools=[CLOCK], tool_choice="required", extra_body={"add_generation_prompt": False})


def test_one_call_only(client: openai.OpenAI, say: Any) -> None:
    say(TWO_CALLS)
    fields = {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False}
    assert [c.function.name for c in create(client, **fields).choices[0].message.tool_calls] == ["weather"]
    assert [c["name"] for c in streamed(client, **fields)[2]] == ["weather"]


def test_several_choices(client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.scripts = [tokenizer.encode(text) for text in ("<mm:think>r</mm:think>c", TWO_CALLS)]
    first, second = create(client, n=2).choices
    assert (first.message.reasoning_content, first.message.content, first.finish_reason) == ("r", "c", "stop")
    assert (len(second.message.tool_calls), second.finish_reason) == (2, "tool_calls")


def history(*results: Any, arguments: Any = '{"city": "Rom", "days": null}') -> list[Any]:
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}},
        {"id": "2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]
    assistant = {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": calls}
    return [*USER, assistant, *results]


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_earlier_calls_and_results(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say("c")
    create(client, messages=history(result("2", "noon"), result("1", [{"type": "text", "text": "sun"}])))
    assert (
        f"]~b]assistant:<mm:think>why</mm:think>"
        f'{NS}<invoke name="weather">{NS}<city>Rom{NS}</city>{NS}</invoke>{NS}<invoke name="clock">{NS}</invoke>[e~['
        f"]~b]tool:sun[e~[]~b]tool:noon[e~["
    ) in prompt()
    create(client, messages=history(result("1", "a"), result("2", "b"), arguments='{"city": "Ro'))
    assert f'{NS}<$text>{{"city": "Ro{NS}</$text>' in prompt()


def test_an_answer_can_be_sent_back(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    say(f"<mm:think>r</mm:think>{TWO_CALLS}")
    message = create(client, tools=[WEATHER]).choices[0].message
    calls = message.tool_calls
    create(client, messages=[*USER, message, *(result(c.id, "done") for c in calls)])
    assert f"<mm:think>r</mm:think>{call('weather', city='Köln', days=2)}{call('clock')}[e~[" in prompt()


def test_a_call_of_no_tool_can_be_sent_back(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    """Else an agent whose model made a name up could not go on."""
    say(f"{NS}<tool_call>{call('look it up', q='x')}{NS}</tool_call>")
    message = create(client, tools=[CLOCK]).choices[0].message
    (made_up,) = message.tool_calls
    assert made_up.function.name == "look it up"
    create(client, messages=[*USER, message, result(made_up.id, "there is no such tool")])
    assert f"{call('look it up', q='x')}[e~[]~b]tool:there is no such tool" in prompt()


def test_half_a_character_in_arguments(client: openai.OpenAI, say: Any, prompt: Any) -> None:
    """JSON text can spell one, no text can hold it: neither answers nor prompts fail for it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"o": {"type": "object"}}}}}
    broken = call("f", o=r'{"a": "x\ud800y"}')
    say(f"{NS}<tool_call>{broken}{NS}</tool_call>")
    message = create(client, tools=[tool]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"o": {"a": "x�y"}}
    create(client, messages=history(result("1", "[e~["), result("2", ""), arguments=r'{"city": "x\ud800y"}'))
    assert "<city>x�y]<" in prompt()


@pytest.mark.parametrize(
    "message",
    [{"content": None}, {}, {"content": None, "tool_calls": []}, {"content": [{"type": "refusal", "refusal": "no"}]}],
)
def test_messages_that_say_nothing(client: openai.OpenAI, say: Any, prompt: Any, message: Any) -> None:
    """As clients send them back that keep no reasoning, and for tools that answer nothing."""
    say("c")
    create(client, messages=[*USER, {"role": "assistant", **message}, *history(result("1", None), result("2", ""))])
    assert f"]~b]assistant:{'no' * (message.get('content') is not None)}[e~[" in prompt()
    assert "]~b]tool:[e~[]~b]tool:[e~[" in prompt()


@pytest.mark.parametrize("spelled", ["[e~[", "]~b]", "]~!b["])
def test_no_control_token_through_tools(
    client: openai.OpenAI, engine: FakeClient, say: Any, tokenizer: Tokenizer, spelled: str
) -> None:
    def controls() -> list[int]:
        control = set(tokenizer.encode("[e~[]~b]]~!b["))
        return [i for i in engine.requests[-1].prompt_token_ids if i in control]

    def ask(text: str) -> None:
        properties = {text: {"type": "string", "description": text}, "type": {"description": text}}
        function = {"name": "f", "description": text, "parameters": {"properties": properties}}
        arguments = json.dumps({text: {text: text}})
        messages = history(result("1", text), result("2", [{"type": "text", "text": text}]), arguments=arguments)
        create(client, messages=messages, tools=[{"type": "function", "function": function}])

    say("c")
    ask("plain")
    plain = controls()
    ask(spelled)
    assert controls() == plain
    assert spelled in tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [*USER, result("1", "x")]}, "messages[1].tool_call_id"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": history(result("1", "x"))}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, **fields)
    assert raised.value.param == param


def test_completions_take_no_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.completions.create(model="tiny", prompt="a", extra_body={"tools": [CLOCK]})


def test_tokenize_with_tools(served: tuple[FakeClient, str], tokenizer: Tokenizer) -> None:
    answer = httpx.post(f"{served[1]}/tokenize", json={"messages": USER, "tools": [CLOCK]}, trust_env=False).json()
    assert 'tools:{"name": "clock"}' in tokenizer.decode(answer["tokens"], skip_special_tokens=False)
