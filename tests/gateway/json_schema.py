"""What JSON schema says of a value, for tests: the keywords that tool schemas are held to."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and v == int(v),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "date-time": lambda v: datetime.fromisoformat(v.replace("Z", "+00:00")),
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
}
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_holds(key, wanted, value, schema, root) for key, wanted in schema.items())


def _holds(key: str, wanted: Any, value: Any, schema: Any, root: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "type":
        kinds = [wanted] if isinstance(wanted, str) else wanted
        return any(_TYPES[kind](value) for kind in kinds) or (schema.get("nullable") is True and value is None)
    if key in ("enum", "const"):
        return any(_same(value, one) for one in (wanted if key == "enum" else [wanted]))
    if key == "$ref":
        target = root
        for step in wanted.split("/")[1:]:
            target = target[int(step)] if isinstance(target, list) else target[step]
        return fits(value, target, root)
    if key in ("allOf", "anyOf", "oneOf"):
        count = sum(fits(value, one, root) for one in wanted)
        return {"allOf": count == len(wanted), "anyOf": count >= 1, "oneOf": count == 1}[key]
    if is_number:
        return {
            "minimum": lambda: value >= wanted,
            "maximum": lambda: value <= wanted,
            "exclusiveMinimum": lambda: value > wanted,
            "exclusiveMaximum": lambda: value < wanted,
            "multipleOf": lambda: abs(value / wanted - round(value / wanted)) < 1e-9,
        }.get(key, lambda: True)()
    if isinstance(value, str):
        return _text_holds(key, wanted, value)
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        return {
            "minItems": lambda: len(value) >= wanted,
            "maxItems": lambda: len(value) <= wanted,
            "items": lambda: all(fits(one, wanted, root) for one in value[len(first) :]),
            "prefixItems": lambda: all(fits(one, part, root) for one, part in zip(value, wanted, strict=False)),
        }.get(key, lambda: True)()
    if isinstance(value, dict):
        named = schema.get("properties", {})
        return {
            "properties": lambda: all(fits(value[name], wanted[name], root) for name in value if name in wanted),
            "required": lambda: all(name in value for name in wanted),
            "additionalProperties": lambda: all(fits(value[n], wanted, root) for n in value if n not in named),
            "minProperties": lambda: len(value) >= wanted,
            "maxProperties": lambda: len(value) <= wanted,
        }.get(key, lambda: True)()
    return True


def _text_holds(key: str, wanted: Any, value: str) -> bool:
    if key == "pattern":
        return re.search(wanted, value) is not None
    if key == "minLength":
        return len(value) >= int(wanted)
    if key == "maxLength":
        return len(value) <= int(wanted)
    if key == "format" and wanted in _FORMATS:
        try:
            _FORMATS[wanted](value)
        except ValueError:
            # A day that a month does not have is beyond an expression.
            return (
                wanted in ("date", "date-time")
                and re.match(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", value) is not None
            )
    return True


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
