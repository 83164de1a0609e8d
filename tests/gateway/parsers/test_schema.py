from __future__ import annotations

import time
from typing import Any

import pytest

from msaserve.gateway.parsers.schema import MAX_DEPTH, Element, ToolSchema, to_json

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": t} for t in ("string", "integer", "number", "boolean"))
NULLABLE = {"anyOf": [STRING, {"type": "null"}]}
TAGS = {"type": "array", "items": STRING}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}}


def value(parts: Any, schema: Any, root: Any = None) -> Any:
    return ToolSchema(root).value(tree("a", parts), schema)


def tree(key: str, parts: Any) -> Element:
    """A text, or a list of texts and (key, parts)."""
    parts = [parts] if isinstance(parts, str) else parts
    return Element(key, [part if isinstance(part, str) else tree(*part) for part in parts])


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("42", STRING, "42"),
        (" null ", STRING, " null "),
        ("&amp;<b>\n", STRING, "&amp;<b>\n"),
        ("", STRING, ""),
        ("null", NULLABLE, None),
        ("null ", NULLABLE, "null "),
        ("", NULLABLE, ""),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        (" 42\n", INTEGER, 42),
        ("-0", INTEGER, 0),
        ("3.0", INTEGER, 3),
        ("3.5", INTEGER, "3.5"),
        ("1_000", INTEGER, "1_000"),
        ("٣", INTEGER, "٣"),
        ("many", INTEGER, "many"),
        ("", {"type": ["integer", "null"]}, None),
        ("12345678901234567890123", INTEGER, 12345678901234567890123),
        ("9" * 5000, INTEGER, "9" * 5000),
        ("0.5", NUMBER, 0.5),
        ("1e400", NUMBER, "1e400"),
        ("NaN", NUMBER, "NaN"),
        ("7", NUMBER, 7),
        ("true", BOOLEAN, True),
        ("False", BOOLEAN, False),
        ("yes", BOOLEAN, True),
        ("0", BOOLEAN, False),
        ("1", {"type": ["boolean", "integer"]}, 1),
        ("perhaps", BOOLEAN, "perhaps"),
        ("42", {"anyOf": [INTEGER, STRING]}, 42),
        ("42a", {"anyOf": [INTEGER, STRING]}, "42a"),
        ("2", {"enum": [1, 2, "auto"]}, 2),
        ("auto", {"enum": [1, 2, "auto"]}, "auto"),
        ("5", {"const": 5}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ('["a", "b"]', TAGS, ["a", "b"]),
        ("", TAGS, []),
        ("", POINT, {}),
        ('\n{"x": 1}\n', POINT, {"x": 1}),
        ("a", TAGS, ["a"]),
        ("7", {"type": "array", "items": INTEGER}, [7]),
        ('{"x": 1}', TAGS, ['{"x": 1}']),
        ("[1]", POINT, "[1]"),
        ("{", POINT, "{"),
        ('{"x": NaN}', POINT, '{"x": NaN}'),
        ('{"x": 1e999}', POINT, '{"x": 1e999}'),
        ('["a"]', {"anyOf": [STRING, TAGS]}, '["a"]'),
        ("12", None, "12"),
        ("true", None, True),
        ("null", {}, None),
        ("[1]", None, "[1]"),
        ("12", "no schema", "12"),
        ("12", {"type": "decimal"}, "12"),
    ],
)
def test_text(text: str, schema: Any, expected: Any) -> None:
    got = value(text, schema)
    assert got == expected
    assert type(got) is type(expected)


ITEMS = [("item", "1"), "\n ", ("item", "2")]


@pytest.mark.parametrize(
    ("parts", "schema", "expected"),
    [
        (ITEMS, TAGS, ["1", "2"]),
        (ITEMS, {"type": "array", "items": INTEGER}, [1, 2]),
        (ITEMS, {"type": "array"}, ["1", "2"]),
        (ITEMS, None, ["1", "2"]),
        ([("tag", "1"), ("b", "2")], TAGS, ["1", "2"]),
        ([("x", "1"), ("y", "2")], POINT, {"x": 1, "y": 2}),
        ([("x", "1"), ("x", "2")], POINT, {"x": [1, 2]}),
        ([("x", "1"), ("x", "2"), ("x", "3")], None, {"x": ["1", "2", "3"]}),
        ([("t", "a"), ("t", "b")], {"properties": {"t": TAGS}}, {"t": ["a", "b"]}),
        ([("t", ITEMS), ("t", ITEMS)], None, {"t": [["1", "2"], ["1", "2"]]}),
        ([("item", "1")], {"type": "object", "properties": {"item": INTEGER}}, {"item": 1}),
        ([("item", "1"), ("x", "2")], None, {"item": "1", "x": "2"}),
        (["see: ", ("x", "1"), " there"], POINT, {"x": 1, "$text": "see:  there"}),
        (["a", ("item", "b"), "c"], TAGS, ["a", "b", "c"]),
        ([("k", "1")], {"type": "object", "additionalProperties": INTEGER}, {"k": 1}),
        ([("x", "1")], {"anyOf": [{"type": "null"}, POINT]}, {"x": 1}),
        ([("y", "1")], {"oneOf": [{"type": "object", "properties": {"z": STRING}}, POINT]}, {"y": 1}),
        (ITEMS, {"anyOf": [POINT, {"type": "array", "items": INTEGER}]}, [1, 2]),
        ([("x", "1")], {"anyOf": [{"type": "array", "items": INTEGER}, POINT]}, {"x": 1}),
        ([("x", "1")], STRING, {"x": "1"}),
        (ITEMS, {"type": "array", "prefixItems": [STRING, INTEGER]}, ["1", 2]),
        ([("p", [("x", "1")])], {"properties": {"p": {"allOf": [POINT, {"title": "P"}]}}}, {"p": {"x": 1}}),
    ],
)
def test_children(parts: Any, schema: Any, expected: Any) -> None:
    assert value(parts, schema) == expected


def test_references() -> None:
    root = {
        "properties": {"n": {"$ref": "#/$defs/Node"}},
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {"v": {"$ref": "#/$defs/V"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}]}},
            },
            "V": INTEGER,
            "a/b": BOOLEAN,
        },
    }
    parts = [("v", "1"), ("next", [("v", "2"), ("next", [("v", "3")])])]
    schema = ToolSchema(root)
    assert schema.value(tree("n", parts), schema.argument("n")) == {"v": 1, "next": {"v": 2, "next": {"v": 3}}}
    assert schema.value(tree("n", "true"), {"$ref": "#/$defs/a~1b"}) is True
    assert schema.value(tree("n", "1"), {"$ref": "https://elsewhere"}) == "1"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#/$defs/b"}]},
        {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]},
        {"anyOf": [7, None]},
        {"type": ["string", 3]},
        {"properties": [], "items": 4},
        [],
        True,
    ],
)
def test_broken_schemas_do_no_harm(schema: Any) -> None:
    loops = {
        "$ref": "#",
        "$defs": {
            "a": {"$ref": "#/$defs/a"},
            "b": {"allOf": [{"$ref": "#/$defs/b"}]},
            "c": {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]},
        },
    }
    assert value("x", schema, loops) == "x"
    assert value(ITEMS, schema, loops)
    ToolSchema(loops).argument("x")


def test_deep_json_stays_text() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert to_json(value(deep, {"type": "array"})) == deep
    for levels in (MAX_DEPTH + 1, 5000, 200_000):
        deep = "[" * levels + "]" * levels
        assert value(deep, {"type": "array", "items": STRING}) == [deep]


def test_half_a_surrogate_pair_is_no_character() -> None:
    r"""JSON text may escape one; no text can hold it. Pairs and what only looks like one stay."""
    assert value(r'["\ud800", "a\uDC00b", "\ud800\ud83d\ude00", "\\ud800", "\\\ud800", "é"]', TAGS) == [
        "�", "a�b", "�😀", r"\ud800", "\\�", "é"
    ]  # fmt: skip
    assert value(r'{"\udfff": "\udfff\ud800"}', {"type": "object"}) == {"�": "��"}
    assert to_json("é") == '"é"'


def test_large_schemas_and_many_elements_take_no_time() -> None:
    large = {
        "enum": [str(i) for i in range(20_000)],
        "anyOf": [{"description": str(i), **{f"x{j}": 0 for j in range(300)}} for i in range(60)],
    }
    schema = {"properties": {"t": large, "r": STRING}}
    many = [*(("t", "1") for _ in range(20_000)), *(("r", "2") for _ in range(20_000))]
    start = time.process_time()
    assert value(many, schema) == {"t": ["1"] * 20_000, "r": ["2"] * 20_000}
    assert value([("item", [("t", "1")])] * 5_000, {"items": schema}) == [{"t": "1"}] * 5_000
    assert time.process_time() - start < 5
