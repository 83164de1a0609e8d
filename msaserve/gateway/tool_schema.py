"""A tool's JSON schema, resolved: each schema as the alternatives of which a value must fit one.

What is asserted is kept, merged or refused, never dropped. Keywords that assert nothing are left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msaserve.gateway.parsers.schema import padded

MAX_ALTERNATIVES = 64
MAX_STEPS = 200_000
"""Of reading the schemas of one request, some microseconds each: schemas that refer to each other can say in a
kilobyte what takes hours to read."""
_STEP_CHARS = 256
"""Of a schema written as JSON: that takes as long as a step."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTHS = ("minLength", "maxLength", "pattern", "format")
MEMBERS = ("properties", "required", "additionalProperties", "minProperties", "maxProperties")
ITEMS = ("items", "prefixItems", "minItems", "maxItems")
# A container with one of these is left to llguidance's JSON, which enforces it or says why not.
OF_OBJECTS = ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies")
OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "unevaluatedItems")
_REFUSED = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "unevaluatedProperties")
_ASSERTIONS = {"type", "enum", *BOUNDS, *LENGTHS, *MEMBERS, *ITEMS, *OF_OBJECTS, *OF_ARRAYS}
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_RANGES = tuple(zip(_LEAST, _MOST, strict=True))

Schema = dict[str, Any]


class SchemaError(ValueError):
    """A schema that cannot be enforced, or that nothing fits; says where and which keyword."""


class NothingFitsError(SchemaError):
    """No fault where the value may be left out."""


class Effort:
    """What reading the schemas of one request may still cost."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps

    def spend(self, where: str, steps: int = 1) -> None:
        """Raises SchemaError."""
        self._left -= steps
        if self._left < 0:
            raise SchemaError(f"{where:.200}: the tools' schemas take more than {MAX_STEPS} steps to read")


class SchemaReader:
    """The schemas inside one tool's parameters."""

    def __init__(self, root: Any, effort: Effort) -> None:
        self.root = root
        self._effort = effort

    def name(self, schema: Any, where: str) -> str:
        """The same for equal schemas. Raises SchemaError."""
        text = json.dumps(schema, sort_keys=True)
        self._effort.spend(where, 1 + len(text) // _STEP_CHARS)
        return text

    def alternatives(self, schema: Any, where: str) -> list[Schema]:
        """Schemas without $ref, allOf, anyOf, oneOf, const and lists of types; at least one.

        Raises:
            SchemaError: nothing fits, or a keyword cannot be enforced. where: the place, for its message.
        """
        found = self._expand(schema, where, ())
        if not found:
            raise NothingFitsError(f"{where}: nothing fits this schema")
        return found

    def is_finite(self, schema: Any, where: str) -> bool:
        """Whether some value that fits comes to an end. Raises SchemaError."""
        forms: dict[str, list[list[str]]] = {}
        """By the name of a schema: of each alternative the names of what its values must have inside."""
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            name = self.name(one, where)
            if name in forms:
                continue
            try:
                needed = [_needed(alternative) for alternative in self.alternatives(one, where)]
            except NothingFitsError:
                needed = []
            forms[name] = [[self.name(part, where) for part in parts] for parts in needed]
            waiting += [part for parts in needed for part in parts]
        ending: set[str] = set()
        while more := [name for name in forms.keys() - ending if any(map(ending.issuperset, forms[name]))]:
            ending.update(more)
            self._effort.spend(where, len(forms))
        return self.name(schema, where) in ending

    def resolve(self, reference: Any, where: str) -> Any:
        """What a reference within the schema names."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"{where}: $ref must be a place in this schema, as #/$defs/name, not {reference!r:.80}")
        at = self.root
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and step.isdecimal() and int(step) < len(at):
                at = at[int(step)]
            elif isinstance(at, Mapping) and step in at:
                at = at[step]
            else:
                raise SchemaError(f"{where}: $ref {reference!r:.80} leads nowhere")
        return at

    def _expand(self, schema: Any, where: str, references: tuple[str, ...]) -> list[Schema]:
        self._effort.spend(where)
        if schema is False:
            return []
        if schema is True:
            return [{}]
        if not isinstance(schema, Mapping):
            raise SchemaError(f"{where}: a schema is an object, not {json.dumps(schema)[:40]}")
        for keyword in _REFUSED:
            if keyword in schema:
                raise SchemaError(f"{where}: {keyword} cannot be enforced in a call")
        groups: list[list[Schema]] = [self._plain(schema, where)]
        if "$ref" in schema:
            reference = schema["$ref"]
            target = self.resolve(reference, where)
            if reference in references:
                raise SchemaError(f"{where}: $ref {reference!r:.80} leads to itself")
            groups.append(self._expand(target, where, (*references, reference)))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            parts = schema[keyword]
            if not isinstance(parts, list) or not parts:
                raise SchemaError(f"{where}: {keyword} must be a list of schemas")
            expanded = [self._expand(part, f"{where}.{keyword}[{i}]", references) for i, part in enumerate(parts)]
            if keyword == "allOf":
                groups += expanded
                continue
            group = [one for part in expanded for one in part]
            if len(group) > MAX_ALTERNATIVES:
                raise SchemaError(f"{where}: there are more than {MAX_ALTERNATIVES} alternatives")
            if keyword == "oneOf":
                self._effort.spend(where, len(group) ** 2 // 2)
                _check_apart(expanded, where)
            groups.append(group)
        found: list[Schema] = [{}]
        for group in groups:
            self._effort.spend(where, len(found) * len(group))
            merged = (_merge(one, other, where) for one, other in itertools.product(found, group))
            found = [one for one in merged if one is not None]
            if len(found) > MAX_ALTERNATIVES:
                raise SchemaError(f"{where}: there are more than {MAX_ALTERNATIVES} alternatives")
        if schema.get("nullable") is True:
            found.append({"type": "null"})
        return found

    def _plain(self, schema: Mapping[str, Any], where: str) -> list[Schema]:
        """What the schema asserts by itself: one for each of its types."""
        own = {key: value for key, value in schema.items() if key in _ASSERTIONS}
        if "const" in schema:
            own["enum"] = [schema["const"]]
            if isinstance(schema.get("enum"), list):
                own["enum"] = _in_both(own["enum"], schema["enum"])
        _check(own, where)
        kinds = own.pop("type", None)
        if kinds is None:
            return [own]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or any(kind not in TYPES for kind in kinds):
            raise SchemaError(f"{where}: type must be of {', '.join(TYPES)}, not {json.dumps(kinds)[:60]}")
        return [{**own, "type": kind} for kind in kinds if not (kind == "integer" and "number" in kinds)]


def kind_of(schema: Schema) -> str | None:
    """The type that an alternative has or that its keywords speak of, as `parsers.schema` takes it."""
    if "type" in schema:
        return str(schema["type"])
    if "properties" in schema or isinstance(schema.get("additionalProperties"), dict):
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


def _needed(one: Schema) -> list[Any]:
    """The schemas of the parts that every value of an alternative has."""
    if "enum" in one:
        return []
    if kind_of(one) == "object":
        properties, more = one.get("properties", {}), one.get("additionalProperties", True)
        return [properties.get(name, more) for name in one.get("required", ())]
    if kind_of(one) == "array":
        first = one.get("prefixItems", [])
        count = one.get("minItems", 0)
        return [*first[:count], *([one.get("items", True)] if count > len(first) else [])]
    return []


def identity(value: Any) -> Any:
    """Equal where two JSON values are, 1 and 1.0 but not true; can be hashed."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, tuple(map(identity, value))
    if isinstance(value, dict):
        return dict, frozenset((key, identity(inner)) for key, inner in value.items())
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal."""
    return bool(identity(one) == identity(other))


def _in_both(left: list[Any], right: list[Any]) -> list[Any]:
    known = set(map(identity, right))
    return [value for value in left if identity(value) in known]


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def has_type(value: Any, kind: str | None) -> bool:
    return kind in (None, type_of(value)) or (kind == "number" and type_of(value) == "integer")


def _check(own: Schema, where: str) -> None:
    """Raises SchemaError for values that keywords do not have, and for bounds that leave nothing."""
    for keyword in (*_LEAST, *_MOST, "multipleOf"):
        if keyword not in own:
            continue
        value, counts = own[keyword], keyword not in BOUNDS
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (counts and (value < 0 or value != int(value))):
            kind = "a count" if counts else "a number"
            raise SchemaError(f"{where}: {keyword} must be {kind}, not {json.dumps(value)[:40]}")
        if counts:
            own[keyword] = int(value)
    kinds: dict[str, type | tuple[type, ...]] = {
        "enum": list,
        "pattern": str,
        "format": str,
        "properties": dict,
        "required": list,
        "prefixItems": list,
        "items": (dict, bool),
        "additionalProperties": (dict, bool),
    }
    for keyword, expected in kinds.items():
        if keyword in own and not isinstance(own[keyword], expected):
            hint = ": use prefixItems" if keyword == "items" and isinstance(own[keyword], list) else ""
            raise SchemaError(f"{where}: {keyword} cannot be {json.dumps(own[keyword])[:40]}{hint}")
    if not all(isinstance(name, str) for name in own.get("required", ())):
        raise SchemaError(f"{where}: required must be a list of names")
    for least, most in _RANGES:
        if least in own and most in own and own[least] > own[most]:
            raise SchemaError(f"{where}: {least} {own[least]} and {most} {own[most]} contradict each other")
    for key in ("pattern", "format"):
        if key in own:
            own[key] = [own[key]]


def _merge(one: Schema, other: Schema, where: str) -> Schema | None:
    """What fits both; None if nothing does."""
    merged = {**one, **other}
    if "prefixItems" in one or "prefixItems" in other:
        one, other = padded(one, other), padded(other, one)
    for key in one.keys() & other.keys():
        left, right = one[key], other[key]
        if key in _LEAST:
            merged[key] = max(left, right)
        elif key in _MOST:
            merged[key] = min(left, right)
        elif key == "type":
            if left != right:
                if {left, right} != {"integer", "number"}:
                    return None
                merged[key] = "integer"
        elif key == "enum":
            merged[key] = _in_both(left, right)
        elif key in ("pattern", "format") or key == "required":
            merged[key] = list(dict.fromkeys([*left, *right]))
        elif key == "properties":
            both = {name: {"allOf": [left[name], right[name]]} for name in left if name in right}
            merged[key] = {**left, **right, **both}
        elif key in ("items", "additionalProperties"):
            merged[key] = {"allOf": [left, right]}
        elif key == "prefixItems":
            merged[key] = [{"allOf": list(pair)} for pair in zip(left, right, strict=True)]
        elif not same(left, right):
            raise SchemaError(f"{where}: two different {key} at once cannot be enforced")
    _close(merged, one, other)
    _close(merged, other, one)
    kind = merged.get("type")
    if "enum" in merged:
        merged["enum"] = [value for value in merged["enum"] if has_type(value, kind)]
        if not merged["enum"]:
            return None
    if any(least in merged and most in merged and merged[least] > merged[most] for least, most in _RANGES):
        return None
    return merged


def _close(merged: Schema, one: Schema, other: Schema) -> None:
    """Members that only the other names are additional ones of the first."""
    if "additionalProperties" in one and "properties" in other:
        more, members = one["additionalProperties"], merged["properties"]
        names = other["properties"].keys() - one.get("properties", {}).keys()
        merged["properties"] = {**members, **{name: {"allOf": [members[name], more]} for name in names}}


def _check_apart(parts: Sequence[list[Schema]], where: str) -> None:
    """Raises SchemaError unless no value can fit two of the parts of a oneOf, as far as types and constants tell."""
    for left, right in itertools.combinations(parts, 2):
        for one, other in itertools.product(left, right):
            if not _are_apart(one, other):
                raise SchemaError(
                    f"{where}: oneOf cannot be enforced where a value may fit two of its schemas: use anyOf"
                )


def _are_apart(one: Schema, other: Schema) -> bool:
    if (
        _merge(
            {k: one[k] for k in ("type", "enum") if k in one}, {k: other[k] for k in ("type", "enum") if k in other}, ""
        )
        is None
    ):
        return True
    for name in {*one.get("required", ())} & {*other.get("required", ())}:
        left, right = (list(_constants(schema.get("properties", {}).get(name))) for schema in (one, other))
        if left and right and not _in_both(left, right):
            return True
    return False


def _constants(schema: Any) -> Iterator[Any]:
    if isinstance(schema, Mapping):
        yield from [schema["const"]] if "const" in schema else schema.get("enum", ())
