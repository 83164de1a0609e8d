"""Properties of the parser over any stream: however it is cut, wherever it ends, whatever it holds."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from m3_text import MARKERS, NS, Read, block, element, invoke, parse

from msaserve.gateway.parsers.minimax_m3 import MiniMaxM3Parser

MODES = ("adaptive", "enabled", "disabled")
SCALARS = ("string", "integer", "number", "boolean")
STRINGS = st.text(max_size=12) | st.sampled_from(
    ["<a>&amp;</a>", "]<]", "</k>", "null", "1", ' "\\n', "<mm:think>", "</mm:think>", NS[:-1]] * 2
)
TYPES = {
    "string": STRINGS.filter(lambda text: NS not in text),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
}
KEYS = st.text(min_size=1, max_size=8).filter(lambda k: ">" not in k and k[0] != "/" and not k.isspace()) | (
    st.sampled_from(["k", "item", "invoke", "tool_call", "$filter", "año", "-n"])
)
SPACE = st.sampled_from(["", "\n", " ", "\n  "])


@st.composite
def typed(draw: st.DrawFn, depth: int = 3) -> tuple[Any, dict[str, Any]]:
    """A value and the schema it is of."""
    kind = draw(st.sampled_from(SCALARS if depth == 0 else (*SCALARS, "array", "object")))
    if kind in TYPES:
        return draw(TYPES[kind]), {"type": kind}
    if kind == "object":
        return draw(objects(depth - 1))
    # One schema for all items, so its values are drawn again from it.
    value, schema = draw(typed(depth - 1))
    if schema["type"] in TYPES:
        return draw(st.lists(TYPES[schema["type"]], max_size=4)), {"type": "array", "items": schema}
    return draw(st.sampled_from([[], [value], [value, value]])), {"type": "array", "items": schema}


@st.composite
def objects(draw: st.DrawFn, depth: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    members = draw(st.dictionaries(KEYS, typed(depth), max_size=4))
    return (
        {key: value for key, (value, _) in members.items()},
        {"type": "object", "properties": {key: schema for key, (_, schema) in members.items()}},
    )


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, str, str, list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Text, and what it must be read as: reasoning, content, calls, and the tools' schemas."""
    prose = st.text(max_size=20) | st.sampled_from(["a < b", "</think>", "]", "a\n"])
    prose = prose.filter(lambda text: not any(marker in text for marker in MARKERS))
    has_thought = draw(st.booleans())
    thought = draw(prose).strip() if has_thought else ""
    before = draw(prose).strip()
    calls, tools = [], {}
    for i in range(draw(st.integers(0, 3))):
        arguments, schema = draw(objects())
        calls.append((f"tool_{i}", arguments))
        tools[f"tool_{i}"] = schema
    text = f"<mm:think>{thought}</mm:think>" if has_thought else ""
    text += before
    if calls:
        invokes = (invoke(name, arguments) for name, arguments in calls)
        text += draw(SPACE) if not before else ""
        text += f"{NS}<tool_call>" + draw(SPACE) + draw(SPACE).join(invokes) + draw(SPACE) + f"{NS}</tool_call>"
        text += draw(SPACE)
    return text, thought, before, calls, tools


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(outputs(), st.lists(st.integers(0, 10**6), max_size=8))
def test_what_is_rendered_is_read_again(
    output: tuple[str, str, str, list[tuple[str, dict[str, Any]]], dict[str, Any]], cuts: list[int]
) -> None:
    text, thought, before, calls, tools = output
    whole = parse(text, tools)
    got = Read(whole)
    assert (got.reasoning, got.content, got.malformed) == (thought, before, [])
    assert [name for name, _ in got.calls] == [name for name, _ in calls]
    assert got.arguments == [arguments for _, arguments in calls]
    assert parse(list(text), tools) == whole
    assert parse(pieces(text, cuts), tools) == whole


WORDS = [f"w{i}q" for i in range(8)]
FRAGMENTS = [
    *(NS, NS, NS),
    *(NS + tag for tag in ("<tool_call>", "</tool_call>", '<invoke name="f">', "</invoke>", "<s>", "</s>")),
    *("<tool_call>", "</tool_call>", '<invoke name="f">', "</invoke>", "<invoke", "<s>", "</s>", "<a>", "</a>", "<n>"),
    *("<item>", "</item>", "<", ">", "]", "]<]", "minimax[>[", "]<]minimax[>", "[", " ", "\n", "null", "1", '"', "\\"),
    *("<mm:think>", "</mm:think>", "<mm:", "{", "}", "[1]", "é", "\x00"),
    *WORDS,
]
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "a": {"type": "array", "items": {"type": ["string", "null"]}},
            "n": {"type": ["null", "string"]},
        },
    }
}


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=24), st.sampled_from(MODES), st.lists(st.integers(0, 10**6)))
@example([NS + '<invoke name="f">', NS, "<s>", "w1q", "</s>", "\n", NS, "<", "w2q", NS, "</s>"], "adaptive", [3])
def test_any_text(fragments: list[str], mode: Any, cuts: list[int]) -> None:
    text = "".join(fragments)
    whole = parse(text, TOOLS, thinking=mode)
    assert parse(list(text), TOOLS, thinking=mode) == whole
    assert parse(pieces(text, cuts), TOOLS, thinking=mode) == whole
    got = Read(whole)
    for word in WORDS:
        assert got.everything.count(word) >= text.count(word)
    assert len(got.ended) + sum(m.index is not None for m in got.malformed) == len(got.calls)
    if NS not in text and "mm:" not in text:
        assert got.everything == (f"{text}\0" if mode != "enabled" else f"\0{text}")


@given(st.text(max_size=60), st.sampled_from(MODES))
def test_any_characters(text: str, mode: Any) -> None:
    assert parse(list(text), thinking=mode) == parse(text, thinking=mode)


LONG = (
    "<mm:think>why not</mm:think>\nwell "
    + block(
        invoke("f", {"s": 'a "quoted" <s>\n', "a": ["x", "y"], "n": "nine"}),
        invoke("g", {"deep": {"er": [{"k": "1"}, {"k": "2"}]}}),
        f'{NS}<invoke name="f">{NS}<s>1</s>{NS}<n>null</n> {NS}</invoke>',
        f'{NS}<invoke name="f">{NS}<s>broken{NS}</x>{NS}</invoke>',
    )
    + "\nand so on"
)


def test_every_split_into_two_says_the_same() -> None:
    whole = parse(LONG, TOOLS)
    for cut in range(len(LONG)):
        assert parse([LONG[:cut], LONG[cut:]], TOOLS) == whole


def test_an_end_at_any_character() -> None:
    words = [(match.end(), match.group()) for match in re.finditer(r"[a-z]{4,}", LONG)]
    for end in range(len(LONG)):
        got = Read(parse(LONG[:end], TOOLS))
        assert Read(parse(list(LONG[:end]), TOOLS)).everything == got.everything
        for position, word in words:
            if position <= end and word not in ("think", "minimax", "tool", "call", "invoke", "name", "quoted", "item"):
                assert word in got.everything
        assert len(got.ended) + sum(m.index is not None for m in got.malformed) == len(got.calls)


def test_a_megabyte_in_single_characters() -> None:
    text = f'{NS}<tool_call>{NS}<invoke name="f">{element("s", "x" * 2**20)}{NS}</invoke>{NS}</tool_call>'
    parser = MiniMaxM3Parser(TOOLS)
    start = time.process_time()
    for char in text:
        parser.feed(char)
    parser.finish()
    # Seconds; one that read its text again and again would take hours.
    assert time.process_time() - start < 60
    got = Read(parse([text[i : i + 999] for i in range(0, len(text), 999)], TOOLS))
    assert got.arguments == [{"s": "x" * 2**20}]


@pytest.mark.parametrize(
    "filler",
    [
        *("x", " ", "<", "]", "]<]", "]<]minimax[>", NS, "</s>", "</s> ", "<mm:think>", "</mm:think>", '"'),
        *(f"{NS}<tool_call>", f"{NS}<s>1{NS}</s>", f"{NS}<item>1{NS}</item>", f"{NS}<{'k' * 50}", f"</{'k' * 398}"),
    ],
)
def test_little_is_held_back(filler: str) -> None:
    """What is held is read again with the next piece: if it is short, the whole takes time in proportion."""
    call = f'{NS}<invoke name="f">{NS}'
    for head in ("", "<mm:think>", NS, f"{NS}<", f"{NS}<tool_call>", f"{call}<s>", f"{call}<s>1{NS}</broken>",
                 f"{call}<a>", f"{call}<{'k' * 127}>", f"{call}<{'k' * 500}>"):  # fmt: skip
        parser = MiniMaxM3Parser(TOOLS)
        for char in head + filler * (400 // len(filler)):
            parser.feed(char)
            assert len(parser._held) < 150
