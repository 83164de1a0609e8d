"""Structural tags: what each format allows, token by token, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from masks import EOS, TOKENIZER, allowed

from msaserve.engine.grammar import Grammars
from msaserve.errors import InvalidRequestError
from msaserve.types import Constraint

NS = TOKENIZER.encode("]<]minimax[>[")[0]


class TestStructuralTags:
    def constraint(self, begin: str, trigger: str, end: str) -> Constraint:
        structures = [{"begin": begin, "schema": {"type": "integer"}, "end": end}]
        return Constraint(kind="structural_tag", text=json.dumps({"triggers": [trigger], "structures": structures}))

    def test_text_is_free_until_a_trigger(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(self.constraint("<f=x>", "<f=", "</f>"), [9])
        said = TOKENIZER.encode("hello <f")
        free = allowed(matcher, said)
        assert free is not None
        assert EOS in free
        assert len(free) > 150  # all of it but what no UTF-8 begins with
        said += TOKENIZER.encode("=")
        assert allowed(matcher, said) == set(TOKENIZER.encode("x"))
        said += TOKENIZER.encode("x>42")
        assert allowed(matcher, said) == set(TOKENIZER.encode("0123456789<"))
        said += TOKENIZER.encode("</f>")
        assert EOS in (allowed(matcher, said) or set())

    def test_markers_that_are_tokens_are_those_tokens(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(self.constraint("]<]minimax[>[<x>", "]<]minimax[>[", "]<]minimax[>[</x>"), [9])
        assert NS in (allowed(matcher, TOKENIZER.encode("hm")) or set())
        said = [*TOKENIZER.encode("hm"), NS]
        assert allowed(matcher, said) == set(TOKENIZER.encode("<"))
        said += TOKENIZER.encode("<x>7")
        assert NS in (allowed(matcher, said) or set())
        assert allowed(matcher, [*said, NS]) == set(TOKENIZER.encode("<"))


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
NUMBER_OR_TEXT = {"type": "or", "elements": [NUMBER, {"type": "any_text"}]}
TAG_A = {"type": "tag", "begin": "<a>", "content": NUMBER, "end": "</a>"}
TAG_B = {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": ["</b>", "</B>"]}
FORMATS: dict[str, tuple[Any, list[str], list[str]]] = {
    "const_string": ({"type": "const_string", "value": "ab"}, ["ab"], ["", "abc", "b"]),
    "json_schema": ({"type": "json_schema", "json_schema": {"enum": [7]}}, ["7"], ["8"]),
    "regex": ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["a/", "xa/b"]),
    "regex without": ({"type": "regex", "pattern": "[ab]+", "excludes": ["bb"]}, ["aba"], ["abba"]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x7"], ["x"]),
    "any_text": ({"type": "any_text"}, ["", "a\nb"], []),
    "any_text without": ({"type": "any_text", "excludes": ["no", "nein"]}, ["on", "nei"], ["a no", "nein"]),
    "sequence": (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b*"}]},
        ["a", "abb"],
        ["b", ""],
    ),
    "or": ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, TAG_A]}, ["a", "<a>1</a>"], ["", "<a>"]),
    "optional": ({"type": "optional", "content": TAG_A}, ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
    "star": ({"type": "star", "content": TAG_A}, ["", "<a>1</a><a>2</a>"], ["x"]),
    "plus": ({"type": "plus", "content": TAG_A}, ["<a>1</a><a>2</a>"], [""]),
    "tag": (TAG_A, ["<a>12</a>"], ["<a>x</a>", "<a>12"]),
    "text up to the end of its tag": (TAG_B, ["<b>x <</b>", "<b></B>"], ["<b>x</b></b>", "<b>x"]),
    "text at the end of what its tag holds": (
        {**TAG_B, "content": {"type": "sequence", "elements": [NUMBER, NUMBER_OR_TEXT]}},
        ["<b>1 x<</b>", "<b>1</B>"],
        ["<b>x</b>"],
    ),
    "tags in a tag": (
        {**TAG_B, "content": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG_A]}},
        ["<b></b>", "<b>x <a>1</a> <y</B>"],
        ["<b>x <a>1</b>", "<b>x <a></b>"],
    ),
    "triggered_tags": (
        {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": [TAG_A, TAG_B]},
        ["", "hi", "hi <a>1</a> and <b>x</B>!", "<a>1</a><a>2</a>"],
        ["hi <a>x</a>", "<a>1</a> <a", "<ab"],
    ),
    "at least one, then nothing": (
        {
            "type": "triggered_tags", "triggers": ["<a>"], "tags": [TAG_A],
            "at_least_one": True, "stop_after_first": True, "excludes": ["xx"],
        },
        ["<a>1</a>", "x <a>1</a>"],
        ["", "hi", "<a>1</a>.", "xx<a>1</a>"],
    ),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [TAG_A, TAG_B], "separator": ","},
        ["", "<a>1</a>", "<a>1</a>,<b>x</b>"],
        ["<a>1</a><b>x</b>", "<a>1</a>,", "x"],
    ),
    "the first of tags_with_separator": (
        {
            "type": "tags_with_separator", "tags": [TAG_A], "separator": ",",
            "at_least_one": True, "stop_after_first": True,
        },
        ["<a>1</a>"],
        ["", "<a>1</a>,<a>1</a>"],
    ),
    "a marker that is a token": (
        {"type": "triggered_tags", "triggers": ["]<]minimax[>["], "tags": [{**TAG_A, "begin": "]<]minimax[>[<a>"}]},
        ["hi ]<]minimax[>[<a>3</a>"],
        ["hi ]<]minimax[>[<b>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_structural_tags(name: str, grammars: Grammars) -> None:
    form, right, wrong = FORMATS[name]
    constraint = Constraint(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": form}))

    def is_allowed(text: str) -> bool:
        matcher, said = grammars.matcher(constraint, [9]), [*TOKENIZER.encode(text), EOS]
        return all(token in (allowed(matcher, said[:i]) or {token}) for i, token in enumerate(said))

    for text in right:
        assert is_allowed(text), text
    for text in wrong:
        assert not is_allowed(text), text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "xml"}, r"format.type must be one of const_string, .*, not 'xml'"),
        ("tag", "format.type must be one of"),
        ({"type": "const_string"}, "format.value must be text"),
        ({"type": "sequence", "elements": []}, "format.elements must not be empty"),
        (
            {"type": "sequence", "elements": [{"type": "regex", "pattern": 3}]},
            r"format.elements\[0\].pattern must be text",
        ),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]},
            r"format.elements\[0\]: any_text must be the last",
        ),
        ({"type": "star", "content": {"type": "any_text"}}, "format.content: any_text must be the last"),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}}, "format must have a begin and an end"),
        ({"type": "tag", "begin": "<", "end": ">"}, "format.content.type must be one of"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [{**TAG_A, "begin": "a"}]},
            r"format.tags\[0\].begin starts",
        ),
        ({"type": "triggered_tags", "triggers": [], "tags": [TAG_A]}, "triggers must be a list of texts"),
        (
            {"type": "tags_with_separator", "tags": [{"type": "any_text"}], "separator": ","},
            r"format.tags\[0\] must be a tag",
        ),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "format.style: only json"),
        ({"type": "any_text", "excludes": [""]}, "format.excludes must be a list of texts"),
    ],
)
def test_formats_that_are_none(form: Any, message: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequestError, match=f"structural_tag: .*{message}"):
        grammars.compile(Constraint(kind="structural_tag", text=json.dumps({"format": form})))
