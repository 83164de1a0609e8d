"""Arguments written as elements and text, to JSON values by a tool's JSON schema.

A schema here says what a text means, it does not judge: a value that does not fit is kept as the model wrote it, and
whoever executes the call sees it. Unknown or broken schemas count as no schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

MAX_DEPTH = 128
"""Of elements, and of JSON inside an element."""
MAX_ALTERNATIVES = 64
"""Of one schema: what lies beyond is not looked at. References may run in circles."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_NUMBER_CHARS = 1000
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<half>u[dD][89a-fA-F][\da-fA-F]{2})|.)", re.DOTALL
)
"""Of JSON text: a surrogate pair, half of one, or any other escape's beginning."""
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(slots=True)
class Element:
    """What stands between the tags of an element: text and elements, in order."""

    key: str
    parts: list[str | Element] = field(default_factory=list)

    @property
    def children(self) -> list[Element]:
        return [part for part in self.parts if isinstance(part, Element)]

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


class _Alternative(NamedTuple):
    schema: Schema
    types: tuple[str, ...]


class _Reading(NamedTuple):
    schema: Any
    alternatives: list[_Alternative]
    types: tuple[str, ...]
    """Of all of them; empty if one does not say."""


class ToolSchema:
    """The parameters of one tool."""

    def __init__(self, parameters: Any) -> None:
        """parameters: a JSON schema; anything else counts as none."""
        self._root: Any = parameters
        self._known: dict[int, _Reading] = {}
        """By the identity of a schema, which its reading keeps: one schema is asked for every element it holds for."""

    def argument(self, key: str) -> Any:
        """The schema of a top-level argument, or None."""
        for schema, types in self._alternatives(self._root):
            found = _property(schema, key) if "object" in types else None
            if found is not None:
                return found
        return None

    def types(self, schema: Any) -> tuple[str, ...]:
        """JSON types that a schema allows, in its order; empty if it does not say."""
        return self._reading(schema).types

    def allows_array(self, schema: Any) -> bool:
        return "array" in self.types(schema)

    def value(self, element: Element, schema: Any) -> Any:
        """What an element means: a JSON value."""
        children = element.children
        if not children:
            return self._text_value(element.text, schema)
        container, is_array = self._container(children, schema)
        return self._array(element, container) if is_array else self._object(element, container)

    def _object(self, element: Element, schema: Schema) -> dict[str, Any]:
        """Children as members; a repeated key gives a list, text between them goes under "$text"."""
        result: dict[str, Any] = {}
        repeated: set[str] = set()
        for child in element.children:
            child_schema = _property(schema, child.key)
            value = self.value(child, child_schema)
            if child.key in result:
                result[child.key] = self.joined(result[child.key], value, child_schema, is_list=child.key in repeated)
                repeated.add(child.key)
            else:
                result[child.key] = value
        text = element.text.strip()
        if text:
            result["$text"] = [result["$text"], text] if "$text" in result else text
        return result

    def joined(self, values: Any, value: Any, schema: Any, *, is_list: bool) -> Any:
        """A value and one more of the same key; `values` may be changed. is_list: it is already several."""
        if self.allows_array(schema) and isinstance(values, list) and isinstance(value, list):
            values += value
            return values
        if not is_list:
            return [values, value]
        values.append(value)
        return values

    def _array(self, element: Element, schema: Schema) -> list[Any]:
        items: list[Any] = []
        for part in element.parts:
            item_schema = _item(schema, len(items))
            if isinstance(part, Element):
                items.append(self.value(part, item_schema))
            elif part.strip():
                items.append(self._text_value(part.strip(), item_schema))
        return items

    def _container(self, children: Sequence[Element], schema: Any) -> tuple[Schema, bool]:
        """The alternative of a schema that children are written for, and whether it is an array's."""
        keys = {child.key for child in children}
        alternatives = self._alternatives(schema)
        objects = [one for one, types in alternatives if "object" in types]
        for one in objects:
            if all(_property(one, key) is not None for key in keys):
                return one, False
        arrays = [one for one, types in alternatives if "array" in types]
        if arrays and (not objects or keys == {"item"}):
            return arrays[0], True
        return (objects[0], False) if objects else ({}, keys == {"item"})

    def _text_value(self, text: str, schema: Any) -> Any:
        types = self.types(schema)
        if not types:
            return {"true": True, "false": False, "null": None}.get(text, text)
        if types == ("string",):
            return text
        stripped = text.strip()
        word = stripped.lower()
        if "null" in types and (text == "null" or (not stripped and "string" not in types)):
            return None
        if "boolean" in types and (word in ("true", "false") or (set(types) <= {"boolean", "null"} and word in _WORDS)):
            return _WORDS[word]
        if "integer" in types or "number" in types:
            number = _number(stripped, needs_integer="number" not in types)
            if number is not None:
                return number
        if "string" in types:
            return text
        if "array" in types or "object" in types:
            return self._json_value(stripped, schema, types)
        return text

    def _json_value(self, text: str, schema: Any, types: tuple[str, ...]) -> Any:
        if not text:
            return [] if next(t for t in types if t in ("array", "object")) == "array" else {}
        value = _json(text)
        if (isinstance(value, list) and "array" in types) or (isinstance(value, dict) and "object" in types):
            return value
        arrays = [one for one, kinds in self._alternatives(schema) if "array" in kinds]
        if arrays and "object" not in types:
            return [self._text_value(text, _item(arrays[0], 0))]
        return text

    def _alternatives(self, schema: Any) -> list[_Alternative]:
        return self._reading(schema).alternatives

    def _reading(self, schema: Any) -> _Reading:
        known = self._known.get(id(schema))
        if known is None:
            alternatives = [_Alternative(one, _types(one)) for one in self._expanded(schema)]
            says_all = all(types for _, types in alternatives)
            types = dict.fromkeys(t for one in alternatives for t in one.types) if says_all else ()
            known = self._known[id(schema)] = _Reading(schema, alternatives, tuple(types))
        return known

    def _expanded(self, schema: Any) -> list[Schema]:
        """The schemas of which one must hold, references followed, in order."""
        found: list[Schema] = []
        waiting: list[Any] = [schema]
        for _ in range(MAX_ALTERNATIVES):
            if not waiting:
                break
            one = waiting.pop(0)
            if not isinstance(one, Mapping):
                continue
            reference = one.get("$ref")
            if isinstance(reference, str):
                rest = {key: value for key, value in one.items() if key != "$ref"}
                target = self._resolve(reference)
                waiting.insert(0, _merged([target, rest]) if isinstance(target, Mapping) else rest)
                continue
            every = one.get("allOf")
            if isinstance(every, list):
                rest = {key: value for key, value in one.items() if key != "allOf"}
                waiting.insert(0, _merged([*(self._one(part) for part in every), rest]))
                continue
            branches = next((one[k] for k in ("anyOf", "oneOf") if isinstance(one.get(k), list)), None)
            if branches:
                shared = {key: value for key, value in one.items() if key not in ("anyOf", "oneOf", "nullable")}
                waiting[:0] = [_merged([shared, b]) if isinstance(b, Mapping) else b for b in branches]
            else:
                found.append(one)
            if one.get("nullable") is True:
                found.append({"type": "null"})
        return found

    def _one(self, schema: Any) -> Schema:
        for _ in range(MAX_ALTERNATIVES):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self._resolve(reference)
        return {}

    def _resolve(self, reference: str) -> Any:
        """A reference inside the tool's own schema, as `#/$defs/Name`; None for any other."""
        if not reference.startswith("#"):
            return None
        at = self._root
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, Mapping) or step not in at:
                return None
            at = at[step]
        return at


def to_json(value: Any) -> str:
    """Compact enough and readable."""
    return _ENCODER.encode(value)


def without_surrogates(text: str) -> str:
    r"""JSON text with U+FFFD in place of each escape of half a character (`\ud83d` alone), which is no text."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found.group(), text)


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is as JSON, or None."""
    value = _json(text)
    return value if isinstance(value, dict) else None


def _json(text: str) -> Any:
    try:
        value = json.loads(without_surrogates(text), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if _is_shallow(value, MAX_DEPTH) else None


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    return depth > 0 and all(_is_shallow(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _number(text: str, *, needs_integer: bool) -> int | float | None:
    if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        return None
    if not any(c in text for c in ".eE"):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        return None
    if not needs_integer:
        return value
    return int(value) if value.is_integer() else None


def _types(schema: Schema) -> tuple[str, ...]:
    """What one alternative says of its type, straight or by its keywords."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return (kind,) if kind in _ALL_TYPES else ()
    if isinstance(kind, list):
        return tuple(t for t in kind if t in _ALL_TYPES)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return tuple(dict.fromkeys(_type_of(value) for value in values))
    if "properties" in schema or isinstance(schema.get("additionalProperties"), Mapping):
        return ("object",)
    return ("array",) if "items" in schema or "prefixItems" in schema else ()


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _property(schema: Schema, key: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    more = schema.get("additionalProperties")
    return more if isinstance(more, Mapping) else None


def _item(schema: Schema, number: int) -> Any:
    first = schema.get("prefixItems")
    if isinstance(first, list) and number < len(first):
        return first[number]
    return schema.get("items")


def _merged(schemas: Sequence[Schema]) -> Schema | None:
    """allOf: of types, members and items both hold, of other keywords the later. None: no type is left."""
    merged: dict[str, Any] = {}
    for schema in schemas:
        both: dict[str, Any] = {}
        if "type" in merged and "type" in schema:
            ours, theirs = _listed(merged["type"]), _listed(schema["type"])
            kinds = [kind for kind in ours if kind in theirs or (kind == "integer" and "number" in theirs)]
            kinds += [kind for kind in theirs if kind == "integer" and "number" in ours and kind not in kinds]
            if not kinds:
                return None
            both["type"] = kinds
        if "prefixItems" in merged or "prefixItems" in schema:
            merged, schema = padded(merged, schema), padded(schema, merged)
            both["prefixItems"] = [
                _all(*pair) for pair in zip(merged["prefixItems"], schema["prefixItems"], strict=True)
            ]
        for key in ("items", "additionalProperties"):
            if key in merged and key in schema:
                both[key] = _all(merged[key], schema[key])
        left, right = merged.get("properties"), schema.get("properties")
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            both["properties"] = {**left, **right, **{key: _all(left[key], right[key]) for key in left if key in right}}
        merged = {**merged, **schema, **both}
    return merged


def padded(schema: Schema, other: Schema) -> dict[str, Any]:
    """A schema with as many prefixItems as another, of which those that it lacks are its items."""
    first, length = schema.get("prefixItems"), other.get("prefixItems")
    first = first if isinstance(first, list) else []
    missing = len(length) - len(first) if isinstance(length, list) else 0
    rest = schema.get("items", True)
    return {**schema, "prefixItems": [*first, *[rest] * missing], "items": rest}


def _listed(kinds: Any) -> list[Any]:
    return kinds if isinstance(kinds, list) else [kinds]


def _all(one: Any, other: Any) -> Any:
    if one is True or one == other:
        return other
    return one if other is True else {"allOf": [one, other]}
