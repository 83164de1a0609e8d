"""Answers of a given form over HTTP: the small checkpoint's random weights, held by the grammar alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_engine import EOS, TINY, FakeClient, serve
from in_process import InProcessClient

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.engine.grammar import Grammars
from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.openai import ChatRequest, CompletionRequest
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.constraints import asked_constraint, chat_constraint
from msaserve.gateway.tool_grammar import ToolGrammar
from msaserve.gateway.tools import tool_use
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
COMPACT = {"whitespace_pattern": ""}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rom"]}, "degrees": {"type": "integer", "minimum": -9, "maximum": 40}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Köln", "<b> & co", 7]},
                "days": {"type": "integer"},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"enum": [1.5, -2]}, "is_sea": {"type": "boolean"}},
                    "required": ["lat", "is_sea"],
                },
                "hours": {"type": "array", "items": {"enum": ["am", "pm"]}, "minItems": 1, "maxItems": 2},
            },
            "required": ["city", "where", "hours"],
        },
    },
}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}


def fits(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["city", "degrees"] and value["city"] in ("Köln", "Rom") and -9 <= value["degrees"] <= 40


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = EngineConfig(kv_cache_gib=0.02, max_num_batched_tokens=256, max_model_len=4096)
    engine = AsyncEngine(Engine.from_checkpoint(TINY, config, show_progress=False))
    client = InProcessClient(engine)
    with serve(client, template=ChatTemplate.load(TINY)) as address:
        yield address


@pytest.fixture
def real(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=200, trust_env=False) as client:
        yield client


def ask(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 400, "temperature": 1, **fields}
    body |= {"messages": USER} if path == CHAT else {"prompt": "hi"}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def refused(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 50, **fields} | ({"messages": USER} if path == CHAT else {"prompt": "hi"})
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    return dict(response.json()["error"])


def schema_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


class TestAnswers:
    # Without thinking, or the random weights may think for ever.
    OFF = {"thinking": {"type": "disabled"}}  # noqa: RUF012

    @pytest.mark.parametrize("strict", [True, False])
    def test_json_schema(self, real: httpx.Client, strict: bool) -> None:
        choice = ask(real, response_format=schema_format(strict=strict), **self.OFF)
        assert choice["finish_reason"] == "stop"
        assert fits(choice["message"]["content"])

    @pytest.mark.parametrize(
        ("fields", "pattern"),
        [
            ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
            ({"structured_outputs": {"choice": ["eins", "zwei"]}}, "eins|zwei"),
            ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
            ({"structured_outputs": {"json": SCHEMA}}, r'\{"city":.*\}'),
            ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
            ({"guided_choice": ["eins", "zwei"]}, "eins|zwei"),
            ({"guided_grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
            ({"guided_json": json.dumps(SCHEMA)}, r'\{"city":.*\}'),
        ],
    )
    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_other_forms(self, real: httpx.Client, path: str, fields: dict[str, Any], pattern: str) -> None:
        choice = ask(real, path, **fields, **(self.OFF if path == CHAT else {}))
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, text), text

    def test_cut_off(self, real: httpx.Client) -> None:
        choice = ask(real, response_format={"type": "json_object"}, max_tokens=4, **self.OFF)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith("{")

    def test_thinking_is_free_and_the_answer_is_not(self, real: httpx.Client) -> None:
        bias = {"265": 4, "2": -100}
        fields = {"response_format": schema_format(), "thinking": {"type": "enabled"}, "logit_bias": bias}
        choice = ask(real, max_tokens=1000, **fields)
        assert choice["message"]["reasoning_content"]
        assert fits(choice["message"]["content"])

    def test_openai_client_streams_it(self, url: str) -> None:
        transport = httpx.Client(trust_env=False, timeout=200)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport) as client:
            stream: Any = client.chat.completions.create(
                model="tiny", messages=USER, response_format=schema_format(strict=True), stream=True, max_tokens=400,
                extra_body=self.OFF,
            )  # type: ignore[call-overload]  # fmt: skip
            chunks = list(stream)
        assert fits("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        assert chunks[-1].choices[0].finish_reason == "stop"


class TestCalls:
    def test_a_named_function_gets_arguments_that_fit(self, real: httpx.Client) -> None:
        choice = ask(real, tools=[WEATHER, PING], tool_choice={"type": "function", "function": {"name": "weather"}})
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        check_arguments(json.loads(call["function"]["arguments"]))

    @pytest.mark.parametrize("seed", range(4))
    def test_required_calls_one_of_the_tools(self, real: httpx.Client, seed: int) -> None:
        choice = ask(real, tools=[WEATHER, PING], tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("weather", "ping")
        if call["function"]["name"] == "weather":
            check_arguments(json.loads(call["function"]["arguments"]))

    def test_text_arguments_are_text_up_to_the_marker(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
        tools = tool_use([{"type": "function", "function": {"name": "say", "parameters": schema}}], "required", None)
        text = ToolGrammar(tools, tokenizer).rest()
        assert text is not None
        assert follows(grammars, text, '<invoke name="say">]<]minimax[>[<note>a <b> & "c"\n]<]minimax[>[</note>')
        assert not follows(grammars, text, '<invoke name="say">]<]minimax[>[<other>')
        assert not follows(grammars, text, '<invoke name="cry">')
        assert not follows(grammars, text, "hello")

    def test_free_form_parameters(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        parameters = {"type": "object"}
        tools = tool_use([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", None)
        text = ToolGrammar(tools, tokenizer).rest()
        assert text is not None
        one = (
            '<invoke name="f">]<]minimax[>[<a>]<]minimax[>[<b>1]<]minimax[>[</b>]<]minimax[>[</a>]<]minimax[>[</invoke>'
        )
        assert follows(grammars, text, f"{one}\n]<]minimax[>[</tool_call>", is_end=True)
        assert follows(grammars, text, f"{one}\n]<]minimax[>[{one}\n]<]minimax[>[</tool_call>", is_end=True)

    @pytest.mark.parametrize("choice", ["required", "auto"])
    def test_a_call_ends_whoever_loves_spaces(self, grammars: Grammars, tokenizer: Tokenizer, choice: str) -> None:
        """A model may prefer whitespace wherever it is allowed: it must not be for ever."""
        form = {"response_format": schema_format()} if choice == "auto" else {}
        asked = ChatRequest(messages=USER, tools=[PING], **form)
        constraint = chat_constraint(asked, tool_use(asked.tools, None if form else choice, None), tokenizer)
        assert constraint is not None
        ns = "]<]minimax[>["
        call = f'<invoke name="ping">{ns}</invoke>'
        begin = f"{ns}<tool_call>" if form else call
        rest = f"{ns}{call}\n{ns}</tool_call>" if form else f"{ns}</tool_call>"
        for spaces in (" " * 40, "\n \r\t" * 10):
            assert follows(grammars, constraint.text, f"{begin}{spaces}{rest}", is_end=True)
        for spaces in (" " * 41, "\n" * 41):
            assert not follows(grammars, constraint.text, begin + spaces)

    def test_an_answer_may_be_a_call_instead(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        asked = ChatRequest(messages=USER, response_format=schema_format(), tools=[PING])
        constraint = chat_constraint(asked, tool_use(asked.tools, None, None), tokenizer)
        assert constraint is not None
        assert constraint.after_reasoning
        ns = "]<]minimax[>["
        call = f'{ns}<tool_call>\n{ns}<invoke name="ping">{ns}</invoke>\n{ns}</tool_call>'
        assert follows(grammars, constraint.text, call, is_end=True)
        assert follows(grammars, constraint.text, '{"city":"Rom","degrees":3}', is_end=True)
        assert not follows(grammars, constraint.text, "hello")


def check_arguments(arguments: dict[str, Any]) -> None:
    assert {"city", "where", "hours"} <= set(arguments) <= {"city", "days", "where", "hours"}
    assert arguments["city"] in ("Köln", "<b> & co", 7)
    assert type(arguments.get("days", 0)) is int
    assert arguments["where"]["lat"] in (1.5, -2)
    assert type(arguments["where"]["is_sea"]) is bool
    assert set(arguments["hours"]) <= {"am", "pm"}
    assert len(arguments["hours"]) in (1, 2)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TINY, vocab_size=512, eos_token_ids=(EOS,))


def follows(grammars: Grammars, grammar: str, text: str, *, is_end: bool = False) -> bool:
    """Whether the grammar allows the tokens of a text, and with is_end that the output ends there."""
    tokens = Tokenizer.load(TINY).encode(text)
    matcher = grammars.matcher(Constraint(kind="grammar", text=grammar), [9])
    mask = np.zeros(16, dtype=np.int32)
    for i, token in enumerate([*tokens, EOS][: None if is_end else -1]):
        assert matcher.fill(tokens[:i], mask), matcher.error
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
            return False
    return True


def test_what_spells_a_call_is_data_but_in_a_structural_tag(real: httpx.Client) -> None:
    call = ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>]<]minimax[>[</tool_call>'
    choice = ask(real, structured_outputs={"choice": [call]}, thinking={"type": "disabled"})
    assert choice["message"]["content"] == call
    tag = {"begin": f"{call[:-25]}<a>", "schema": {"enum": [7]}, "end": ""}
    form = {"type": "structural_tag", "triggers": [call], "structures": [tag]}
    problem = refused(real, response_format=form)
    assert "starts with none of the triggers" in problem["message"]


OBJECT = {"type": "json_object"}
DEEP: dict[str, Any] = reduce(lambda inner, _: {"properties": {"a": inner}}, range(200), {})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": schema_format({"type": "objekt"})}, "response_format", "objekt"),
        ({"response_format": schema_format({"if": {}}, strict=True)}, "response_format", "if"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object"),
        ({"response_format": schema_format(DEEP)}, "response_format", "recursion limit"),
        ({"response_format": {"type": "xml"}}, "response_format", "must be one of"),
        ({"response_format": "json"}, "response_format", "must be one of"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        ({"guided_regex": "[a"}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-ahead"),
        ({"structured_outputs": {"json_path": "x"}}, "structured_outputs", "json_path"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be text"),
        ({"response_format": OBJECT, "guided_regex": "a"}, "guided_regex", "contradict"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "contradict"),
        ({"response_format": OBJECT, "ignore_eos": True}, "ignore_eos", "contradicts response_format"),
        ({"response_format": OBJECT, "min_tokens": 5}, "min_tokens", "contradicts response_format"),
        ({"response_format": OBJECT, "tools": [PING], "tool_choice": "required"}, "response_format", "contradict"),
        ({"guided_regex": "a", "tools": [PING]}, "guided_regex", "tool_choice"),
        ({"guided_json": "{", "tools": [PING]}, "guided_json", "not JSON"),
        ({"response_format": schema_format({"type": "x"}), "tools": [PING]}, "response_format", "x"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_constraints(real: httpx.Client, fields: dict[str, Any], param: str, message: str, stream: bool) -> None:
    problem = refused(real, stream=stream, **fields)
    assert problem["param"] == param
    assert message in problem["message"]


def test_without_strict_what_cannot_be_enforced_is_left_out(grammars: Grammars) -> None:
    schema = {"type": "object", "if": {"required": ["a"]}, "then": {}}
    lenient = asked_constraint(ChatRequest(messages=USER, response_format=schema_format(schema)))
    strict = asked_constraint(ChatRequest(messages=USER, response_format=schema_format(schema, strict=True)))
    assert lenient is not None
    assert strict is not None
    grammars.compile(lenient)
    with pytest.raises(InvalidRequestError, match="response_format: "):
        grammars.compile(strict)


def test_text_and_nothing_are_no_constraint(http: httpx.Client, engine: FakeClient) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None}}):
        ask(http, **fields)
        assert engine.requests[-1].sampling.constraint is None
    assert asked_constraint(CompletionRequest(prompt="x")) is None


def test_completions_start_at_once_and_chat_behind_reasoning() -> None:
    chat = asked_constraint(ChatRequest(messages=USER, guided_regex="a"))
    text = asked_constraint(CompletionRequest(prompt="x", guided_regex="a"))
    assert chat == Constraint(kind="regex", text="a", after_reasoning=True, param="guided_regex")
    assert text == Constraint(kind="regex", text="a", after_reasoning=False, param="guided_regex")
