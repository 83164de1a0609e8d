"""M3's tool calls as a grammar, with arguments that fit the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

from msaserve.gateway.parsers.tags import NS
from msaserve.gateway.tools import ToolUse
from msaserve.lark import Literals, json_value, quoted
from msaserve.tokenizer import Tokenizer

_SCALARS = {
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
# The marker as plain text would be read as one.
_TEXT = r"/(.|\n)*/ & ~/(.|\n)*\]<\]minimax\[>\[(.|\n)*/"
_MAX_LEVELS = 16
_MAX_ITEMS = 64
"""Numbers of items above it are not enforced: a grammar writes each of them out."""


class ToolGrammar:
    """Each tool's parameters in the order of its schema, those that are not required left out or not.

    Text stands for whatever cannot be told from its schema alone ($ref, patterns); additional properties are not made.
    """

    def __init__(self, tools: ToolUse, tokenizer: Tokenizer) -> None:
        self._tools = tools
        self._literal = Literals(tokenizer.added_tokens)
        self._rules = [
            rf"TEXT: {_TEXT}",
            rf"FREE: {_TEXT} & ~/<\/invoke>(.|\n)*/",
            f"free: ({self._literal(NS)} FREE)*",
        ]

    def rest(self) -> str | None:
        """Of an answer that begins with `ToolUse.prefix`. None where M3's marker is no token of its own."""
        if NS not in self._literal.ids:
            return None
        named = self._named()
        return self._grammar(self._calls() if named is None else f"{self._body(named)} {self._end()}")

    def or_json(self, schema: Any) -> str | None:
        """Calls, or JSON of a schema. None where M3's marker is no token of its own."""
        if NS not in self._literal.ids:
            return None
        return self._grammar(
            f"answer | {self._literal(f'{NS}<tool_call>')} /\\s*/ {self._literal(NS)} {self._calls()}",
            f"answer: {json_value(schema)}",
        )

    def _grammar(self, start: str, *more: str) -> str:
        return "\n".join([f"start: {start}", *more, *self._rules])

    def _named(self) -> str | None:
        """The tool of which a call has been begun."""
        return next((name for name in self._tools.schemas if f'<invoke name="{name}">' in self._tools.prefix), None)

    def _calls(self) -> str:
        """One call from behind its first marker, more if they may be, and the end of the block."""
        invokes = [
            f"{self._literal(f'<invoke name={quoted(name)}>')} {self._body(name)}" for name in self._tools.schemas
        ]
        self._rules.append(f"call: {' | '.join(invokes)}")
        more = f"(/\\s*/ {self._literal(NS)} call)*" if self._tools.is_parallel else ""
        return f"call {more} {self._end()}"

    def _end(self) -> str:
        return f"/\\s*/ {self._literal(f'{NS}</tool_call>')}"

    def _body(self, name: str) -> str:
        """The arguments and the end of one call."""
        return f"{self._arguments(self._tools.schemas[name])} {self._literal(f'{NS}</invoke>')}"

    def _arguments(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return '""'
        return self._members(schema, 0) if schema.get("properties") else "free"

    def _members(self, schema: dict[str, Any], level: int) -> str:
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        terms = []
        for key, inner in schema["properties"].items():
            element = self._element(key, inner, level + 1)
            terms.append(element if key in required else f"({element})?")
        return self._rule(" ".join(terms))

    def _element(self, key: str, schema: Any, level: int) -> str:
        return (
            f"{self._literal(f'{NS}<{key}>')} {self._value(schema, level)} {self._literal(f'{NS}</{key}>')}"
        )  # fmt: skip

    def _value(self, schema: Any, level: int) -> str:
        if not isinstance(schema, dict):
            return "TEXT"
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list) and options:
            if any(isinstance(option, (dict, list)) for option in options):
                return "TEXT"
            texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
            return f"({' | '.join(map(self._literal, texts))})"
        kind = schema.get("type")
        if isinstance(kind, str) and kind in _SCALARS:
            return _SCALARS[kind]
        if kind == "object" or kind == "array":
            return self._container(schema, kind, level)
        return "TEXT"

    def _container(self, schema: dict[str, Any], kind: str, level: int) -> str:
        inner = schema.get("properties" if kind == "object" else "items")
        if not isinstance(inner, dict) or not inner or level > _MAX_LEVELS:
            return json_value({"type": kind})
        if kind == "object":
            return self._members(schema, level)
        item = self._rule(self._element("item", inner, level + 1))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is int and type(most) is int and 0 <= least <= most <= _MAX_ITEMS:
            return f"{item}{{{least},{most}}}"
        return f"{item}+" if least else f"{item}*"

    def _rule(self, body: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name
