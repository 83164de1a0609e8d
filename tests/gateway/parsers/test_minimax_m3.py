"""The grammar by example, and the faults seen in other parsers."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from m3_text import NS, Read, block, element, invoke, parse

from msaserve.gateway.parsers.events import ArgumentsDelta, ContentDelta, Malformed, ReasoningDelta, ToolCallStart
from msaserve.gateway.parsers.minimax_m3 import MiniMaxM3Parser, new_call_id

TOOLS: dict[str, Any] = {
    "create_order": {
        "type": "object",
        "properties": {
            "user_id": {"type": "integer"},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}},
                },
            },
            "gift": {"type": "boolean"},
        },
    },
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "note": {"type": ["string", "null"]},
            "mode": {"type": "integer"},
        },
    },
}
ORDER = block(
    f'{NS}<invoke name="create_order">{NS}<user_id>42{NS}</user_id>{NS}<items>{NS}<item>{NS}<sku>book-001{NS}</sku>'
    f"{NS}<qty>2{NS}</qty>{NS}</item>{NS}</items>{NS}<gift>true{NS}</gift>{NS}</invoke>"
)
WRITE = block(invoke("write", {"path": "a", "text": "b"}))


def read(text: str, **options: Any) -> Read:
    whole = parse(text, TOOLS, **options)
    assert parse(list(text), TOOLS, **options) == whole
    return Read(whole)


@pytest.mark.parametrize(
    ("text", "mode", "reasoning", "content"),
    [
        ("<mm:think>a</mm:think>b", "adaptive", "a", "b"),
        ("a</mm:think>b", "enabled", "a", "b"),
        ("</mm:think>b", "adaptive", "", "b"),
        ("</mm:think>b", "disabled", "", "b"),
        ("b", "adaptive", "", "b"),
        ("<mm:think>a", "adaptive", "a", ""),
        ("a", "enabled", "a", ""),
        # Markers given again.
        ("<mm:think>a</mm:think>b", "enabled", "a", "b"),
        ("\n<mm:think>a</mm:think>b", "enabled", "a", "b"),
        (" </mm:think> </mm:think>\n<mm:think>a</mm:think>b", "adaptive", "a", "b"),
        ("<mm:think>a</mm:think></mm:think>\n</mm:think>b", "adaptive", "a", "b"),
        ("<mm:think></mm:think>b", "adaptive", "", "b"),
        ("<mm:think>\n</mm:think>\n\nb", "adaptive", "", "\n\nb"),
        # Text before an opener; markers that are text.
        ("b <mm:think>a</mm:think> c", "adaptive", "a", "b  c"),
        ("<mm:think>a</mm:think>b </mm:think> c", "adaptive", "a", "b </mm:think> c"),
        ("<mm:think>a</mm:think>b <mm:think> c", "adaptive", "a", "b <mm:think> c"),
        ("write <mm:think>", "disabled", "", "write <mm:think>"),
        ("<mm:think>a</mm:think>b", "disabled", "a", "b"),
        ("<mm:think>a <mm:think> b</mm:think>c", "adaptive", "a <mm:think> b", "c"),
        ("b </mm:think> c", "adaptive", "", "b </mm:think> c"),
        # Text is kept as it is, whitespace too.
        ("\n a \n", "adaptive", "", "\n a \n"),
        ("\n\n", "adaptive", "", "\n\n"),
        ("\n\n", "enabled", "\n\n", ""),
        ("<mm:think>\na\n</mm:think>\n\nb\n", "adaptive", "\na\n", "\n\nb\n"),
        ("<mm:think>a</mm:think>\n", "adaptive", "a", ""),
        ("a < b <mm:thin", "adaptive", "", "a < b <mm:thin"),
        ("<mm:think>a</mm:thin", "adaptive", "a</mm:thin", ""),
        ("", "adaptive", "", ""),
    ],
)
def test_reasoning(text: str, mode: Any, reasoning: str, content: str) -> None:
    got = read(text, thinking=mode)
    assert (got.reasoning, got.content, got.calls) == (reasoning, content, [])


def test_the_grammars_example() -> None:
    got = read(ORDER)
    assert got.arguments == [{"user_id": 42, "items": [{"sku": "book-001", "qty": 2}], "gift": True}]
    assert (got.content, got.reasoning, got.malformed) == ("", "", [])


def test_a_call_inside_unclosed_thinking_is_found() -> None:
    for text, mode in ((f"<mm:think>plan{ORDER}", "adaptive"), (f"plan{ORDER}", "enabled")):
        got = read(text, thinking=mode)
        assert (got.reasoning, got.content, len(got.arguments)) == ("plan", "", 1)
    got = read(f"<mm:think>plan{ORDER}</mm:think>done")
    assert (got.reasoning, got.content) == ("plan", "done")
    got = read(f"<mm:think>plan{ORDER}\nand</mm:think> done")
    assert (got.reasoning, got.content) == ("plan", "\nand done")


def test_text_around_calls_is_content() -> None:
    got = read(f"<mm:think>r</mm:think>\nbefore\n{ORDER}\nafter{WRITE}\n")
    assert (got.reasoning, got.content) == ("r", "\nbefore\n\nafter")
    assert [name for name, _ in got.calls] == ["create_order", "write"]
    assert read(f"<mm:think>r</mm:think>\n\n{ORDER}\n").content == ""
    assert read(invoke("write", {"path": "p"}) + "\n\ndone").content == "\n\ndone"


def test_several_calls() -> None:
    got = read(block(*(invoke("write", {"path": str(i)}) for i in range(5))))
    assert [a["path"] for a in got.arguments] == ["0", "1", "2", "3", "4"]
    assert got.malformed == []


def test_a_string_comes_as_it_is_written() -> None:
    parser = MiniMaxM3Parser(TOOLS)
    assert parser.feed(f'{NS}<tool_call>{NS}<invoke name="write">{NS}<text>') == []
    start, arguments = parser.feed('say "hi"')
    assert isinstance(start, ToolCallStart)
    assert arguments == ArgumentsDelta(0, '{"text": "say \\"hi\\"')
    assert parser.feed("\n]<]mini") == [ArgumentsDelta(0, "\\n")]
    assert parser.feed("ature") == [ArgumentsDelta(0, "]<]miniature")]
    assert parser.feed(f"{NS}</text>{NS}<mode>7") == [ArgumentsDelta(0, '"')]
    assert parser.feed(f"{NS}</mode>{NS}<note>nu") == [ArgumentsDelta(0, ', "mode": 7')]
    assert parser.feed("t") == [ArgumentsDelta(0, ', "note": "nut')]


@pytest.mark.parametrize(
    "text",
    [
        '<a href="x">&amp; &lt;</a>\n\t<!-- -->',
        "</text> and more",
        "</path>",
        "<mm:think>no</mm:think>",
        "<tool_call><invoke name='x'></invoke></tool_call>",
        "]<]minimax[>]<]minimax[",
        "null",
        "",
        " 42 ",
        '\\ " \u2028 \x00 \x7f 😀',
    ],
)
def test_text_inside_an_argument_is_literal(text: str) -> None:
    got = read(block(invoke("write", {"text": text, "path": text})))
    assert got.arguments == [{"text": text, "path": text}]
    assert got.content == ""


@pytest.mark.parametrize("key", ["$filter", "año", "-A", "a b", "a/b", "item", "invoke", "tool_call", "x[]<]minimax["])
def test_any_key(key: str) -> None:
    arguments = {key: {key: "1", "b": "2"}, "z": "3"}
    assert read(block(invoke("unknown", arguments))).arguments == [arguments]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", {}),
        ("\n", {}),
        (element("note", "null"), {"note": None}),
        (element("note", ""), {"note": ""}),
        (element("note", "nullable"), {"note": "nullable"}),
        (element("mode", "") + element("path", ""), {"mode": "", "path": ""}),
        (element("x", "1") + element("x", "2") + element("path", "p"), {"x": ["1", "2"], "path": "p"}),
        (element("text", {"a": "1"}), {"text": {"a": "1"}}),
        ('{"path": "p", "mode": 1}', {"path": "p", "mode": 1}),
        ("do it" + element("path", "p"), {"path": "p", "$text": "do it"}),
        ('{"a": 1}' + element("path", "p"), {"path": "p", "$text": '{"a": 1}'}),
        ("do it" + element("$text", "p"), {"$text": "p", "$$text": "do it"}),
        (f"{element('path', 'p')}</invoke>", {"path": "p"}),
        (f"{NS} <path>p{NS}\n</path>", {"path": "p"}),
    ],
)
def test_arguments(body: str, expected: Any) -> None:
    got = read(block(f'{NS}<invoke name="write">{body}{NS}</invoke>'))
    assert got.arguments == [expected]
    assert got.malformed == []


@pytest.mark.parametrize("header", ["invoke name='write'", "invoke name=write", ' invoke  name = " write " '])
def test_headers(header: str) -> None:
    got = read(block(f"{NS}<{header}>{element('path', 'p')}{NS}</invoke>"))
    assert got.calls == [["write", '{"path": "p"}']]


@pytest.mark.parametrize(
    "text",
    [
        # Closers and openers whose NS is missing.
        f'{NS}<tool_call>{NS}<invoke name="write">{NS}<path>p</path>{NS}<text>t</text>\n{NS}</invoke>{NS}</tool_call>',
        f'{NS}<tool_call>\n<invoke name="write">{NS}<path>p{NS}</path>{NS}<text>t{NS}</text></invoke>{NS}</tool_call>',
        # No block around it, or no end of it.
        invoke("write", {"path": "p", "text": "t"}),
        f"{NS}<tool_call>{invoke('write', {'path': 'p', 'text': 't'})}",
        f"{NS}<tool_call>{NS}<tool_call>{invoke('write', {'path': 'p', 'text': 't'})}{NS}</tool",
        f"{NS}<tool_call>{invoke('write', {'path': 'p', 'text': 't'})}</tool_call>",
        f"{NS}<tool_call>{invoke('write', {'path': 'p', 'text': 't'})}</tool",
        # An outer closer closes what is open inside, the end of a block ends its call.
        f'{NS}<tool_call>{NS}<invoke name="write">{NS}<path>p{NS}</path>{NS}<text>t{NS}</invoke>{NS}</tool_call>',
        f'{NS}<tool_call>{NS}<invoke name="write">{element("path", "p")}{element("text", "t")}{NS}</tool_call>',
    ],
)
def test_what_is_understood_all_the_same(text: str) -> None:
    got = read(text)
    assert got.arguments == [{"path": "p", "text": "t"}]
    assert (got.content, got.malformed) == ("", [])


def test_an_outer_closer_closes_what_is_open_inside() -> None:
    got = read(invoke("f", {}).replace(f"{NS}</invoke>", f"{NS}<a>{NS}<b>{NS}<c>1{NS}</b>{NS}</a>{NS}</invoke>"))
    assert got.arguments == [{"a": {"b": {"c": "1"}}}]


@pytest.mark.parametrize(
    ("broken", "started", "reason"),
    [
        (f'{NS}<invoke name="write">{NS}<path>p{NS}</pth>{NS}</invoke>', True, "closes nothing"),
        (f'{NS}<invoke name="write">{NS}<mode>1{NS}</pth>{NS}</invoke>', False, "closes nothing"),
        (f'{NS}<invoke name="write">{NS}<path>p', True, "has no end"),
        (f'{NS}<invoke name="write">{NS}<mode>1', False, "has no end"),
        (f'{NS}<invoke name="write">{element("path", "p")}{element("path", "q")}{NS}</invoke>', True, "again"),
        (f'{NS}<invoke name="write">{NS}<path>p{NS}<q>1{NS}</q>{NS}</path>{NS}</invoke>', True, "inside the text"),
        (f'{NS}<invoke name="write">{NS}<note>nu{NS}<q>1{NS}</q>{NS}</note>{NS}</invoke>', False, "inside the text"),
        (f'{NS}<invoke name="f">{f"{NS}<a>" * 129}{NS}</invoke>', False, "128 deep"),
    ],
)
def test_a_malformed_call_is_reported_and_the_next_is_parsed(broken: str, started: bool, reason: str) -> None:
    got = read(f"<mm:think>r{NS}<tool_call>\n{broken}\n{invoke('write', {'text': 't'})}\n{NS}</tool_call>")
    assert got.ended == [len(got.calls) - 1]
    assert json.loads(got.calls[-1][1]) == {"text": "t"}
    (report,) = got.malformed
    assert reason in report.reason
    assert report.text == f"{NS}<tool_call>\n{broken}" + ("" if broken.endswith("</invoke>") else "\n")
    assert got.reasoning == "r"
    if started:
        assert report.index == 0
        assert got.calls[0][1].startswith('{"path": "p')
        with pytest.raises(ValueError, match=r"\d"):
            json.loads(got.calls[0][1])
        assert got.content == ""
    else:
        assert report.index is None
        assert got.content == report.text.removesuffix("\n") + "\n"


@pytest.mark.parametrize(
    "text",
    [
        f"use {NS} well",
        f"use {NS}<b>bold{NS}</b>",
        f"use {NS}<tool_call> to call",
        f"{NS}<tool_call>{NS}</tool_call>",
        f"end it with {NS}</tool_call>",
        f"{NS}<invoke>{NS}</invoke>",
        f'{NS}<invoke name="">{NS}</invoke>',
        f"{NS}<tool_call>{NS}<x>{NS}</tool_call>",
        f"{NS}<tool_call>\n ",
        f"{NS}<tool_call",
        f'{NS}<tool_call>{NS}<invoke name="f">',
        f'{NS}<tool_call>{NS}<invoke name="f">{NS}<x>1{NS}</x>',
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    got = read(text)
    assert (got.content, got.calls) == (text, [])


def test_a_reason_is_short_and_one_line() -> None:
    got = read(f'{NS}<invoke name="write">{NS}<path>p{NS}</{"x" * 500}>{NS}</invoke>')
    assert len(got.malformed[0].reason) == 200
    got = read(f'{NS}<invoke name="write">{NS}<path>p{NS}</a\nb>{NS}</invoke>')
    assert got.malformed[0].reason == f"'{NS}</a\\nb>' closes nothing"


def test_talk_of_the_format_does_not_end_reasoning() -> None:
    got = read(f"<mm:think>I open with {NS}<tool_call> and so on</mm:think>done")
    assert (got.reasoning, got.content) == (f"I open with {NS}<tool_call> and so on", "done")
    assert [m.text for m in got.malformed] == [f"{NS}<tool_call> "]


def test_a_call_inside_text_that_looks_like_one() -> None:
    got = read(f"{NS}<x {NS}<tool_call>{invoke('write', {'path': 'p'})}{NS}</tool_call>")
    assert (got.content, got.arguments) == (f"{NS}<x ", [{"path": "p"}])


def test_an_output_that_ends_in_a_call() -> None:
    got = read(f'a{NS}<tool_call>\n{NS}<invoke name="write">{NS}<path>p')
    assert (got.content, got.calls, got.ended) == ("a", [["write", '{"path": "p']], [])
    assert [m.index for m in got.malformed] == [0]
    for tail in ("]<]mini", "</path>", "</path> \n", "</pa", "</path>]<]"):
        got = read(f'{NS}<invoke name="write">{NS}<path>p{tail}')
        assert json.loads(got.calls[0][1] + '"}') == {"path": f"p{tail}"}
    got = read(f"<mm:think>a{NS}<tool_call>\n")
    assert (got.reasoning, got.content) == ("a", f"{NS}<tool_call>\n")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{NS}</tool_call>", "", ""),
        (f"\n{NS}</tool_call>\nc", "", "\nc"),
        (f"<mm:think>r</mm:think>\n{NS}</tool_call>", "r", ""),
        (f"<mm:think>{NS}</tool_call>r</mm:think>{NS}</tool_call>c", "r", "c"),
    ],
)
def test_a_stray_end_of_calls_beside_a_marker_is_dropped(text: str, reasoning: str, content: str) -> None:
    got = read(text)
    assert (got.reasoning, got.content, got.calls, got.malformed) == (reasoning, content, [], [])
    got = read(f"{WRITE}\n{text}")
    assert (got.content, len(got.calls), got.malformed) == (read(text).content or "", 1, [])


def test_no_output_takes_long() -> None:
    """Whole answers come in one piece: no text is to be looked through again for each of its tags."""
    tools = {"write": {"properties": {f"k{i}": {"type": "integer"} for i in range(20_000)}}}
    spaces = " " * 30_000
    start = time.process_time()
    many = Read(parse(block(invoke("f", {"a": list(range(20_000))}))))
    assert len(json.loads(many.calls[0][1])["a"]) == 20_000
    many = Read(parse(block(invoke("write", {f"k{i}": i for i in range(20_000)})), tools))
    assert len(json.loads(many.calls[0][1])) == 20_000
    assert Read(parse(block(invoke("write", {"text": "</text> " * 50_000})), TOOLS)).calls
    assert not Read(parse(f'{NS}<tool_call>{NS}<invoke name="{spaces}>')).calls
    assert not Read(parse(f"{NS}<tool_call>{NS}<{spaces}invoke{spaces}name{spaces}={spaces}>")).calls
    assert time.process_time() - start < 8


def test_calls_may_be_left_alone() -> None:
    got = read(f"<mm:think>a{ORDER}</mm:think>b{ORDER}", parses_calls=False)
    assert (got.reasoning, got.content, got.calls) == (f"a{ORDER}", f"b{ORDER}", [])


def test_events_keep_their_order() -> None:
    kinds = [type(event) for event in parse(f"<mm:think>a</mm:think>b{WRITE}c{NS}<x>", TOOLS)]
    assert kinds[:3] == [ReasoningDelta, ContentDelta, ToolCallStart]
    assert kinds[-2:] == [ContentDelta, Malformed]


def test_ids() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)
