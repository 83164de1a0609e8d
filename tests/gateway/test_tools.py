from __future__ import annotations

from typing import Any

import pytest

from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.openai import chat_messages
from msaserve.gateway.media.pipeline import MediaPart
from msaserve.gateway.tools import called_tools, in_call_order, tool_use


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS = [function("f", parameters=SCHEMA), function("g")]


@pytest.mark.parametrize(
    ("choice", "prefix"),
    [
        (None, ""),
        ("auto", ""),
        ("required", "]<]minimax[>[<tool_call>\n]<]minimax[>["),
        (function("g"), ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="g">'),
    ],
)
def test_choice(choice: Any, prefix: str) -> None:
    use = tool_use(TOOLS, choice, None)
    assert use.offered == TOOLS
    assert use.schemas == {"f": SCHEMA, "g": None}
    assert (use.prefix, use.parses_calls, use.is_parallel) == (prefix, True, True)


def test_what_of_a_tool_is_offered() -> None:
    use = tool_use([function("f", strict=True, description=None, note="x") | {"cache": 1}], None, None)
    assert use.offered == [function("f")]


def test_none_offers_and_parses_nothing() -> None:
    use = tool_use(TOOLS, "none", False)
    assert (use.offered, use.parses_calls, use.is_parallel) == ([], False, False)
    assert tool_use(None, None, None).parses_calls


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ("f", None, "tools must be a list"),
        ([{"type": "retrieval"}], None, r"tools\[0\] must be"),
        ([{"function": {"name": "f"}}], None, r"tools\[0\] must be"),
        ([function("")], None, r"function\.name must be 1 to 128"),
        ([function('f">x')], None, r"function\.name must be 1 to 128"),
        ([function("f"), function("f")], None, r"tools\[1\]: there are two tools 'f'"),
        ([function("f", description=3)], None, "description must be text"),
        ([function("f", parameters=[])], None, "must be a JSON schema"),
        ([function("f", parameters={"type": "string"})], None, 'of type "object"'),
        ([function("f", parameters={"properties": ["x"]})], None, r"properties must be an object"),
        ([function("f", parameters={"properties": {"x": 3}})], None, r"properties\.x is not a JSON schema"),
        ([function("f", parameters={"properties": {"x": {"type": "str"}}})], None, "'str' is no type"),
        ([function("f", parameters={"properties": {"x": {"items": {"type": "int"}}}})], None, "'int' is no type"),
        ([function("f", parameters={"anyOf": {}})], None, "anyOf must be a list"),
        ([function("f", parameters={"required": 5})], None, r"required must be a list"),
        ([function("f", parameters={"required": [5]})], None, r"required must be a list of names"),
        ([function("f", parameters={"enum": "a"})], None, r"enum must be a list"),
        ([function("f", parameters={"additionalProperties": "x"})], None, r"additionalProperties must be a schema"),
        ([function("f", parameters={"not": 3})], None, r"not must be a schema"),
        ([function("f", parameters={"minProperties": True})], None, r"minProperties must be a number"),
        ([function("f", parameters={"$defs": []})], None, r"\$defs must be an object"),
        ([function("f", parameters={"properties": {"x": {"items": 5}}})], None, r"items must be a schema"),
        ([function("f", parameters={"properties": {"x": {"items": [{"type": "int"}]}}})], None, r"'int' is no type"),
        ([function("f", parameters={"properties": {"x": {"minimum": "1"}}})], None, r"minimum must be a number"),
        ([function("f", parameters={"properties": {"x": {"pattern": 1}}})], None, r"pattern must be text"),
        ([function("f", parameters={"properties": {"x": {"not": {"enum": 1}}}})], None, r"enum must be a list"),
        ([function(f"f{i}") for i in range(1025)], None, "at most 1024"),
        (TOOLS, "always", "tool_choice must be one of none, auto, required"),
        (TOOLS, 1, "tool_choice must be one of"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.allowed_tools must be"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": []}, "tool_choice.allowed_tools must be"),
        (TOOLS, allowed("none", function("f")), "tool_choice.allowed_tools must be"),
        (TOOLS, allowed("auto", "f"), "an entry of tool_choice.allowed_tools.tools must be"),
        (TOOLS, allowed("auto", function("h")), "'h', which is not in tools"),
        (TOOLS, allowed("required"), "there are no tools"),
        (TOOLS, function("h"), "'h', which is not in tools"),
        ([], "required", "there are no tools"),
        (None, function("f"), "there are no tools"),
    ],
)
def test_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        tool_use(tools, choice, None)
    assert raised.value.param


def test_a_schema_nested_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"x": schema}}
    with pytest.raises(InvalidRequestError, match="too deep"):
        tool_use([function("f", parameters=schema)], None, None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": [1, {"y": null}]}', {"x": [1, {"y": None}]}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ('{"path": "a', {"$text": '{"path": "a'}),
        ("[1]", {"$text": "[1]"}),
        ("[" * 100_000, {"$text": "[" * 100_000}),
    ],
)
def test_arguments_become_objects(arguments: Any, expected: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (got,) = called_tools("here", [call])
    assert got == {"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}}


@pytest.mark.parametrize(
    "call",
    [
        "f",
        {},
        {"id": "c", "type": "custom", "custom": {}},
        {"type": "function", "function": {"name": "f"}},
        {"id": "c", "function": {"name": ""}},
        {"id": "c", "function": {"name": 1}},
        {"id": "c", "function": {"name": "f", "arguments": 3}},
    ],
)
def test_calls_refused(call: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^here\[0\]"):
        called_tools("here", [call])


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"id": i} for i in ids]}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": call_id, "tool_call_id": call_id}


USER = {"role": "user", "content": "u"}


def test_pictures_follow_their_results() -> None:
    def shown(call_id: str) -> dict[str, Any]:
        url = f"https://example.org/{call_id}.png"
        return {**result(call_id), "content": [{"type": "image_url", "image_url": {"url": url}}]}

    called = [{"id": i, "function": {"name": "f"}} for i in ("a", "b")]
    media: list[MediaPart] = []
    messages = [{"role": "assistant", "tool_calls": called}, shown("b"), shown("a")]
    got = chat_messages(messages, media)
    assert [m.get("tool_call_id") for m in got] == [None, "a", "b"]
    assert [part.url for part in media] == ["https://example.org/a.png", "https://example.org/b.png"]


def test_results_come_in_the_order_of_the_calls() -> None:
    messages = [USER, calls("a", "b", "c"), result("c"), result("a"), result("b"), USER, calls("a"), result("a")]
    got = in_call_order(messages)
    assert [m["content"] for m in got] == ["u", "", "a", "b", "c", "u", "", "a"]
    assert in_call_order([USER]) == [USER]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([result("a")], r"messages\[0\]\.tool_call_id: .* no call 'a'"),
        ([calls("a"), result("a"), USER, result("a")], r"messages\[3\]\.tool_call_id: .* no call 'a'"),
        ([calls("a"), result("b")], "no call 'b'"),
        ([calls("a"), result("a"), result("a")], "answered already"),
        ([calls("a", "b"), result("a"), USER], r"before messages\[2\] each of the tool calls 'b'"),
        ([calls("a", "b")], "before the end of the messages each of the tool calls 'a', 'b'"),
        ([calls("a", "a")], r"messages\[0\]\.tool_calls: two calls have the id 'a'"),
    ],
)
def test_results_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        in_call_order(messages)
