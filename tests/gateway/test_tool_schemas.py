"""Calls that are asked for: whatever the grammar of a tool's schema lets through, once parsed, fits the schema."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from fake_engine import EOS, TINY
from json_schema import fits

from msaserve.engine.grammar import Grammars
from msaserve.errors import InvalidRequestError
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.tool_grammar import ToolGrammar
from msaserve.gateway.tools import ToolUse, tool_use
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint

NS = "]<]minimax[>["
MARKER = 263


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TINY, vocab_size=512, eos_token_ids=(EOS,))


def asked(parameters: Any) -> ToolUse:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return tool_use([tool], {"type": "function", "function": {"name": "f"}}, None)


def grammar_of(parameters: Any, tokenizer: Tokenizer) -> str:
    grammar = ToolGrammar(asked(parameters), tokenizer).rest()
    assert grammar is not None
    return grammar


def walk(grammars: Grammars, grammar: str, tokenizer: Tokenizer, rng: random.Random) -> str:
    """A random text that the grammar allows, to its end: as a model without any sense would write it."""
    matcher = grammars.matcher(Constraint(kind="grammar", text=grammar), [9])
    mask = np.zeros(16, np.int32)
    tokens: list[int] = []
    enders = [tokenizer.encode(char)[0] for char in '"}]']
    while len(tokens) < 3000:
        assert matcher.fill(tokens, mask), matcher.error
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        preferred = [token for token in allowed if token in (MARKER, EOS) or token in enders]
        token = rng.choice(preferred if preferred and rng.random() < 0.4 else allowed)
        if token == EOS:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
    raise AssertionError(tokenizer.decode(tokens, skip_special_tokens=False)[:500])


def arguments(parameters: Any, text: str) -> Any:
    message, reason = ChatOutput(asked(parameters), "disabled").push(text, "stop")
    assert reason == "tool_calls", text
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    return json.loads(call.function.arguments)


def one(schema: Any, **more: Any) -> dict[str, Any]:
    """Parameters with one required member."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def members(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


WORD = {"type": "string", "maxLength": 3}
INTEGER, BOOLEAN = {"type": "integer"}, {"type": "boolean"}
TREE = members(["name"], name=WORD, kids=array({"$ref": "#/$defs/tree"}, maxItems=2))
ENFORCED: dict[str, Any] = {
    "text": one({"type": "string"}),
    "lengths": one({"type": "string", "minLength": 2, "maxLength": 4}),
    "pattern": one({"type": "string", "pattern": "^[a-c]{2}-\\d+$"}),
    "pattern found anywhere": one({"type": "string", "pattern": "b/[xy]", "maxLength": 9}),
    "patterns of alternatives": one({"type": "string", "pattern": "^ab|cd$", "maxLength": 6}),
    "no text at all": one({"type": "string", "pattern": "^$"}),
    "date": one({"type": "string", "format": "date"}),
    "date-time": one({"type": "string", "format": "date-time"}),
    "uuid": one({"type": "string", "format": "uuid"}),
    "ipv4": one({"type": "string", "format": "ipv4"}),
    "integer bounds": one({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}),
    "number bounds": one({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}),
    "multiples": one({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100}),
    "number": one({"type": "number"}),
    "boolean": one({"type": "boolean"}),
    "null": one({"type": "null"}),
    "const": one({"const": "x y"}),
    "number of const": one({"const": 2.5}),
    "enum of mixed types": one({"enum": ["a", 7, 1.5, True, None, "zwei"]}),
    "enum with lists": one({"enum": [[1, 2], {"x": 1}]}),
    "enum of a type": one({"type": ["string", "null"], "enum": ["a", None, 3]}),
    "nullable": one({"type": "integer", "minimum": 5, "maximum": 20, "nullable": True}),
    "list of types": one({"type": ["integer", "null", "boolean"]}),
    "text or number": one({"type": ["string", "integer"]}),
    "text or anything": one({"type": ["string", "null", "boolean", "number"], "maxLength": 6}),
    "anyOf": one({"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "pattern": "^[a-z]{2,3}$"}]}),
    "anyOf with text that reads as a number": one(
        {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string", "pattern": "^[0-9a]{1,2}$"}]}
    ),
    "oneOf": one({"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]}),
    "allOf": one({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"type": "number", "minimum": 5}]}),
    "array": one(array({"enum": ["p", "q"]}, minItems=1, maxItems=3)),
    "nested arrays": one(array(array(INTEGER, maxItems=2), minItems=1, maxItems=2)),
    "large bound": one(array(BOOLEAN, minItems=2, maxItems=200)),
    "tuple": one(array(False, prefixItems=[INTEGER, BOOLEAN], minItems=1)),
    "tuple and items": one(
        {"allOf": [array({"type": "integer"}, maxItems=3), array(True, prefixItems=[{"maximum": 3}])]}
    ),
    "tuple and more": one(array(WORD, prefixItems=[{"const": 1}], minItems=2, maxItems=3)),
    "array of nothing known": one({"type": "array", "maxItems": 2}),
    "object": one(members(["x"], x=INTEGER, y={"type": "null"})),
    "free object": one({"type": "object"}),
    "dictionary": one({"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}}),
    "dictionary of $ref": {
        **one({"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}, "maxProperties": 2}),
        "$defs": {"n": {"enum": [4, 5]}},
    },
    "null or object": one({"anyOf": [{"type": "null"}, members([], x=INTEGER, y=BOOLEAN)]}),
    "text or array": one({"anyOf": [WORD, array(INTEGER)]}),
    "objects of a kind": one(
        {
            "oneOf": [
                members(["kind", "r"], kind={"const": "c"}, r={"type": "number"}),
                members(["kind", "w"], kind={"const": "s"}, w=INTEGER),
            ]
        }
    ),
    "members in common": one({**members([], n=INTEGER, s=WORD), "anyOf": [{"required": ["n"]}, {"required": ["s"]}]}),
    "a part that nothing fits": one(
        {"anyOf": [{"allOf": [WORD, array({"type": "null"})]}, array(INTEGER, minItems=1, maxItems=2)]}
    ),
    "members of both": one(
        {**members(["n"], n=INTEGER), "anyOf": [members(["m"], m=INTEGER), members(["k"], k=BOOLEAN)]}
    ),
    "$ref and members": {
        **one({"$ref": "#/$defs/o", "properties": {"m": INTEGER}, "required": ["m"]}),
        "$defs": {"o": members(["n"], n=INTEGER)},
    },
    "$ref": one({"$ref": "#/$defs/small"}, **{"$defs": {"small": {"type": "integer", "minimum": 1, "maximum": 3}}}),
    "$ref with more": one(
        {"$ref": "#/definitions/n", "maximum": 2}, definitions={"n": {"type": "integer", "minimum": 1, "maximum": 30}}
    ),
    "recursion": {**one({"$ref": "#/$defs/tree"}), "$defs": {"tree": TREE}},
    "a member that nothing fits": members([], a={"type": "integer", "enum": ["x"]}, b=BOOLEAN),
    "closed": one({"type": "boolean"}, additionalProperties=False),
    "alternatives of parameters": {
        "type": "object",
        "anyOf": [
            {"properties": {"city": WORD}, "required": ["city"]},
            {"properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat", "lon"]},
        ],
    },
}


@pytest.mark.parametrize("parameters", ENFORCED.values(), ids=ENFORCED)
def test_what_is_written_fits(parameters: Any, grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = grammar_of(parameters, tokenizer)
    seen = set()
    for seed in range(12):
        text = walk(grammars, grammar, tokenizer, random.Random(seed))
        value = arguments(parameters, text)
        assert fits(value, parameters), (text, value)
        seen.add(json.dumps(value))
    if not any(word in json.dumps(parameters) for word in ("const", "^$", "null")):
        assert len(seen) > 1


def call(inner: str) -> str:
    return f"{inner}{NS}</invoke>\n{NS}</tool_call>"


def element(key: str, inner: Any) -> str:
    return f"{NS}<{key}>{inner}{NS}</{key}>"


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 20}, ["5", "17", "20"], ["4", "21", "x", "-6"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.5", "17"], ["0", "-1"]),
        ({"type": "string", "pattern": "^[A-Z]{3}$"}, ["ABC"], ["ABCD", "abc", "AB"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["é1", "a\nb"], ["a", "abcd"]),
        ({"enum": ["a", 7, None]}, ["a", "7", "null"], ["b", "77", ""]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ["x", ""]),
        ({"$ref": "#/$defs/d"}, ["yes"], ["no"]),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "minItems": 1},
            [element("item", element("item", 1) + element("item", 2)), element("item", "") * 2],
            [element("item", 1), "", "[[1]]"],
        ),
    ],
)
def test_what_may_stand_there(
    schema: Any, allowed: list[str], refused: list[str], grammars: Grammars, tokenizer: Tokenizer
) -> None:
    parameters = {**one(schema), "$defs": {"d": {"const": "yes"}}}
    grammar = grammar_of(parameters, tokenizer)
    for text in allowed:
        assert follows(grammars, grammar, call(element("a", text)), tokenizer), text
        assert fits(arguments(parameters, call(element("a", text))), parameters), text
    for text in refused:
        assert not follows(grammars, grammar, call(element("a", text)), tokenizer), text
    assert not follows(grammars, grammar, call(""), tokenizer)


def follows(grammars: Grammars, grammar: str, text: str, tokenizer: Tokenizer) -> bool:
    tokens = [*tokenizer.encode(text), EOS]
    matcher = grammars.matcher(Constraint(kind="grammar", text=grammar), [9])
    mask = np.zeros(16, dtype=np.int32)
    for i, token in enumerate(tokens):
        assert matcher.fill(tokens[:i], mask), matcher.error
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[token]:
            return False
    return True


OBJECTS = [members([], v=INTEGER), members([], v={"type": "string"})]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (one({"not": {"type": "string"}}), "parameters.a: not cannot be enforced"),
        (one({"type": "object", "if": {}}), "parameters.a: if cannot be enforced"),
        (one({"type": "string", "pattern": "(?=a)"}), "parameters.a: pattern .* cannot be enforced"),
        (one({"type": "string", "pattern": "a\\b"}), r"\\b is not supported"),
        (one({"type": "string", "maxLength": 10**9}), "lengths above"),
        (one({"type": "array", "items": {}, "maxItems": 10**9}), "items cannot be enforced"),
        (one({"type": "array", "items": [{}, {}]}), "use prefixItems"),
        (one({"$ref": "https://example.com/x"}), r"\$ref must be a place in this schema"),
        (one({"$ref": "#/$defs/x"}), "leads nowhere"),
        (one({"$ref": "#/properties/a"}), "leads to itself"),
        (one({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf cannot be enforced"),
        (one({"anyOf": OBJECTS}), "two alternatives have another 'v'"),
        (one({"anyOf": [{"enum": [None, [1]]}, array(INTEGER)]}), "two alternatives have other items"),
        (one({"anyOf": [array(INTEGER), array(True, prefixItems=[BOOLEAN])]}), "two alternatives have other items"),
        (one({"anyOf": []}), "anyOf must be a list"),
        (one({"enum": ["7", 7]}), "would be read as something else"),
        (one({"enum": []}), "nothing fits"),
        (one({"type": "integer", "minimum": 5, "maximum": 3}), "contradict"),
        (one({"type": "string", "minLength": 5, "maxLength": 3}), "minLength 5 and maxLength 3 contradict"),
        (one({"allOf": [{"type": "integer"}, {"type": "string"}]}), "nothing fits"),
        (one({"type": "integer", "enum": [1], "minimum": 0}), "minimum beside enum"),
        (one({"type": "string"}, minProperties=2), "minProperties cannot be enforced"),
        (one({"type": "string"}, required=["a", "b"]), "required cannot be enforced"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "additionalProperties without properties"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties without properties"),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "they must be an object"),
        (one({"$ref": "#"}), "requires itself"),
        (one({"type": ["string", "object"], "additionalProperties": {"type": "integer"}}), "beside a string"),
        ({"type": "object", "properties": {"a>b": {}}}, "this name cannot be written"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(parameters: Any, message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        grammar_of(parameters, tokenizer)
    assert "'f'" in str(caught.value)
    assert caught.value.param == "tools[0].function.parameters"


def chain(form: Any) -> dict[str, Any]:
    """Definitions each of which names the next twice, so that sixty mean 2^60 schemas. form: of one, by its next."""
    definitions = {f"d{i}": form({"$ref": f"#/$defs/d{i + 1}"}) for i in range(60)}
    return {**one({"$ref": "#/$defs/d0"}), "$defs": {**definitions, "d60": {"type": "string"}}}


MANY = range(3000)


@pytest.mark.parametrize(
    ("parameters", "refusal"),
    [
        (chain(lambda after: members(["a", "b"], a=after, b=after)), None),
        (chain(lambda after: {"allOf": [after, after]}), "steps to read"),
        (chain(lambda after: {"anyOf": [after, after]}), "more than 64 alternatives"),
        (chain(lambda after: {"anyOf": [members(["a"], a=after), members(["b"], b=after)]}), None),
        ({**one({"$ref": "#/$defs/a"}), "$defs": {"a": {"allOf": [members(["x"], x={"$ref": "#/$defs/a"})] * 2}}},
         "steps to read"),
        (one({"oneOf": [{"const": i} for i in MANY]}), "more than 64 alternatives"),
        (one({"anyOf": [members([f"k{i}"], **{f"k{i}": {}}) for i in MANY]}), "more than 64 alternatives"),
        (one({"allOf": [{"enum": list(MANY)}, {"enum": list(MANY)}]}), None),
        (one({"enum": list(MANY), "const": 2999}), None),
        (members([f"k{i}" for i in MANY], **{f"k{i}": {"type": "integer"} for i in MANY}), None),
        (one({"allOf": [{"properties": {f"k{i}": {} for i in MANY}}, {"additionalProperties": True}]}), None),
        (one({"type": ["object", "null"], "properties": {f"k{i}": {} for i in MANY}}), "characters"),
        (members([], **{f"k{i}": {"minProperties": i, "additionalProperties": {"$ref": "#"}} for i in MANY}),
         "characters"),
        (one({"type": "string", "pattern": "(" * 8_000}), "has no )"),
        (one({"type": "string", "pattern": "(" * 10_000_000}), "8192 characters"),
        (one({"type": "array", "prefixItems": [{"type": "string"}] * 3000}), None),
        (one({"type": "array", "prefixItems": [{}] * 300_000}), "characters"),
    ],
)  # fmt: skip
def test_no_schema_takes_long(parameters: Any, refusal: str | None, grammars: Grammars, tokenizer: Tokenizer) -> None:
    start = time.process_time()
    if refusal is None:
        grammars.compile(Constraint(kind="grammar", text=grammar_of(parameters, tokenizer)))
    else:
        with pytest.raises(InvalidRequestError, match=re.escape(refusal)):
            grammar_of(parameters, tokenizer)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "pattern": "^abcd$", "maxLength": 3}, "no text is in all of /abcd/"),
    ],
)
def test_what_llguidance_does_not_know_is_refused_by_name(
    schema: Any, keyword: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = Constraint(kind="grammar", text=grammar_of(one(schema), tokenizer), param="tools")
    with pytest.raises(InvalidRequestError, match=f"tools: .*{keyword}"):
        grammars.compile(constraint)


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Of the keywords that are enforced, in any combination."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "pattern", "ref"]
    kinds += ["array", "object", "anyOf", "allOf", "types", "tuple"] * (depth < 3)
    kind = rng.choice(kinds)
    inner = lambda: random_schema(rng, depth + 1)  # noqa: E731
    if kind in ("integer", "number"):
        low = rng.randrange(-20, 20)
        return {
            "type": kind,
            **rng.choice([{}, {"minimum": low, "maximum": low + rng.randrange(30)}, {"maximum": low}]),
        }
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + rng.randrange(3)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-f]+$", "x", "^-?[0-9]", "e$", "^(?:true|nul?l)$"]),
            "maxLength": 5,
        }
    if kind == "enum":
        return {"enum": rng.sample(["a", "b", "true", 1, 2.5, False, None, [1], {"k": "v"}], 3)}
    if kind == "ref":
        return {"$ref": rng.choice(["#/$defs/leaf", "#/$defs/tree"])}
    if kind == "array":
        return {"type": "array", "items": inner(), "minItems": rng.randrange(2), "maxItems": 1 + rng.randrange(3)}
    if kind == "tuple":
        return {
            "type": "array",
            "prefixItems": [inner(), inner()],
            "items": rng.choice([False, inner()]),
            "maxItems": 3,
        }
    if kind == "object":
        names = rng.sample(["x", "y", "z", "item", "a b"], 1 + rng.randrange(3))
        required = [name for name in names if rng.random() < 0.5]
        return {"type": "object", "properties": {name: inner() for name in names}, "required": required}
    if kind == "types":
        return {
            "type": rng.sample(["integer", "string", "boolean", "null", "array", "object"], 2),
            "maxLength": 4,
            "maxItems": 2,
        }
    return {kind: [inner(), inner()]}


@pytest.mark.parametrize("start", range(0, 160, 20))
def test_random_schemas_are_kept_to_or_refused(start: int, grammars: Grammars, tokenizer: Tokenizer) -> None:
    num_kept = 0
    for seed in range(start, start + 20):
        rng = random.Random(seed)
        parameters = {
            "type": "object",
            "properties": {name: random_schema(rng) for name in ("p", "q")},
            "required": ["p"],
            "$defs": {"tree": TREE, "leaf": {"type": ["boolean", "null"]}},
        }
        try:
            grammar = grammar_of(parameters, tokenizer)
            grammars.compile(Constraint(kind="grammar", text=grammar))
        except InvalidRequestError:
            continue
        num_kept += 1
        for number in range(3):
            text = walk(grammars, grammar, tokenizer, random.Random(number))
            value = arguments(parameters, text)
            assert fits(value, parameters), (parameters, text, value)
    assert num_kept >= 5
