"""M3's tool calls as a grammar, with arguments that fit the tools' schemas when `parsers.schema` has read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msaserve.errors import InvalidRequestError
from msaserve.gateway.parsers.schema import Element, ToolSchema
from msaserve.gateway.parsers.tags import NS
from msaserve.gateway.patterns import FORMATS, PatternError, whole
from msaserve.gateway.tool_schema import (
    BOUNDS,
    ITEMS,
    MEMBERS,
    OF_ARRAYS,
    OF_OBJECTS,
    Effort,
    NothingFitsError,
    Schema,
    SchemaError,
    SchemaReader,
    kind_of,
    same,
    type_of,
)
from msaserve.gateway.tools import ToolUse
from msaserve.lark import JSON_WHITESPACE, Literals, json_value, quoted, regex_terminal
from msaserve.tokenizer import Tokenizer
from msaserve.types import MAX_CONSTRAINT_CHARS, MAX_PATTERN_CHARS

# The marker as plain text would be read as one.
_NO_MARKER = r"~/(.|\n)*\]<\]minimax\[>\[(.|\n)*/"
_SPACE = f"/{JSON_WHITESPACE}/?"
"""Between calls: bounded, or a model could write nothing else for ever."""
_TEXT = rf"/(.|\n)*/ & {_NO_MARKER}"
_INTEGER = "/-?(0|[1-9][0-9]*)/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?/"
_NUMBER_TEXT = r"/\s*-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*/"
# Beside these types a text that reads as one of them is no string.
_READ_OTHERWISE = {
    "integer": _NUMBER_TEXT,
    "number": _NUMBER_TEXT,
    "boolean": r"/\s*(?i:true|false)\s*/",
    "null": "/null/",
}
_MAX_LENGTH = 100_000
_MAX_ITEMS = 100_000
_MAX_LEVELS = 64


class _Rules:
    """The rules of a grammar, which together are no longer than a constraint may be."""

    def __init__(self, *rules: str) -> None:
        self.all = list(rules)
        self._names: dict[str, str] = {}
        """By what they say, so that each is written once."""
        self._num_chars = sum(map(len, rules))

    def reserve(self, kind: str) -> str:
        """The name of a rule that comes later: it may need itself."""
        self.all.append("")
        return f"{kind}_{len(self.all) - 1}"

    def put(self, name: str, body: str) -> None:
        """Of a name that was reserved. Raises InvalidRequestError."""
        self._take(body)
        self.all[int(name.rpartition("_")[2])] = f"{name}: {body}"

    def named(self, kind: str, body: str) -> str:
        """The name of the rule that says this. Raises InvalidRequestError."""
        if body not in self._names:
            name = self._names[body] = self.reserve(kind)
            self.put(name, body)
        return self._names[body]

    def _take(self, body: str) -> None:
        self._num_chars += len(body)
        if self._num_chars > MAX_CONSTRAINT_CHARS:
            raise InvalidRequestError(
                f"the tools' schemas make a grammar of more than {MAX_CONSTRAINT_CHARS} characters, the most that are "
                "taken",
                param="tools",
                code="unsupported_schema",
            )


class ToolGrammar:
    """Each tool's parameters in the order of its schema, those that are not required left out or not.

    Additional properties are not made, unless a schema names no properties. What is written for an array or an object
    whose members cannot be listed is JSON.
    """

    def __init__(self, tools: ToolUse, tokenizer: Tokenizer) -> None:
        self._tools = tools
        self._literal = Literals(tokenizer.added_tokens)
        self._rules = _Rules(
            f"TEXT: {_TEXT}",
            rf"FREE: {_TEXT} & ~/<\/invoke>(.|\n)*/",
            f"free: ({self._literal(NS)} FREE)*",
        )
        self._effort = Effort()

    def rest(self) -> str | None:
        """Of an answer that begins with `ToolUse.prefix`. None where M3's marker is no token of its own.

        Raises:
            InvalidRequestError: a schema cannot be enforced; names the tool, the place in it and the keyword.
        """
        if NS not in self._literal.ids:
            return None
        named = self._named()
        return self._grammar(self._calls() if named is None else f"{self._body(named)} {self._end()}")

    def or_json(self, schema: Any) -> str | None:
        """Calls, or JSON of a schema. None where M3's marker is no token of its own. Raises what `rest` raises."""
        if NS not in self._literal.ids:
            return None
        return self._grammar(
            f"answer | {self._literal(f'{NS}<tool_call>')} {_SPACE} {self._literal(NS)} {self._calls()}",
            f"answer: {json_value(schema)}",
        )

    def _grammar(self, start: str, *more: str) -> str:
        return "\n".join([f"start: {start}", *more, *self._rules.all])

    def _named(self) -> str | None:
        """The tool of which a call has been begun."""
        return next((name for name in self._tools.schemas if f'<invoke name="{name}">' in self._tools.prefix), None)

    def _calls(self) -> str:
        """One call from behind its first marker, more if they may be, and the end of the block."""
        invokes = [
            f"{self._literal(f'<invoke name={quoted(name)}>')} {self._body(name)}" for name in self._tools.schemas
        ]
        call = self._rules.named("call", " | ".join(invokes))
        more = f"({_SPACE} {self._literal(NS)} {call})*" if self._tools.is_parallel else ""
        return f"{call} {more} {self._end()}"

    def _end(self) -> str:
        return f"{_SPACE} {self._literal(f'{NS}</tool_call>')}"

    def _body(self, name: str) -> str:
        """The arguments and the end of one call."""
        number = list(self._tools.schemas).index(name)
        param = f"tools[{number}].function.parameters"
        try:
            arguments = _Arguments(self._tools.schemas[name], self._literal, self._rules, self._effort).members()
        except SchemaError as error:
            raise InvalidRequestError(
                f"{param} of {name!r} cannot be enforced: {error}", param=param, code="unsupported_schema"
            ) from None
        except RecursionError:
            raise InvalidRequestError(f"{param} of {name!r} are nested too deep", param=param) from None
        return f"{arguments} {self._literal(f'{NS}</invoke>')}"


class _Arguments:
    """One tool's arguments. `where` names a place in its schema, for errors."""

    def __init__(self, schema: Any, literal: Literals, rules: _Rules, effort: Effort) -> None:
        self._schema = schema
        self._reader = SchemaReader(schema, effort)
        self._parser = ToolSchema(schema)
        self._literal = literal
        self._rules = rules
        self._values: dict[str, str] = {}
        """The rules of this tool's schemas, by the schema. One may stand inside itself."""

    def members(self) -> str:
        """Raises SchemaError."""
        if self._schema is None:
            return '""'
        alternatives = self._reader.alternatives(self._schema, "parameters")
        alternatives = [one for one in alternatives if one.get("type", "object") == "object"]
        if not alternatives:
            raise SchemaError("parameters: they must be an object")
        if len(alternatives) > 1:
            self._check_told_apart(alternatives, "parameters", by_key=True)
        form = self._union(self._top_level(one) for one in alternatives)
        if not self._reader.is_finite(self._schema, "parameters"):
            raise SchemaError("parameters: a schema requires itself, so no value would ever end")
        return form

    def _top_level(self, schema: Schema) -> str:
        if schema.get("properties"):
            if not self._is_written_out(schema):
                raise SchemaError(f"parameters: {self._unusual(schema)} cannot be enforced in a call")
            return self._members(schema, "parameters", 0, is_empty_apart=False)
        if schema.get("additionalProperties") is False and not schema.get("required"):
            return '""'
        asserted = [key for key in (*MEMBERS, *OF_OBJECTS) if key not in ("properties",) and schema.get(key)]
        asserted = [key for key in asserted if schema[key] is not True]
        if asserted:
            raise SchemaError(f"parameters: {asserted[0]} without properties cannot be enforced in a call")
        return "free"

    def _members(self, schema: Schema, where: str, level: int, *, is_empty_apart: bool) -> str:
        """is_empty_apart: no member at all would be read as something else."""
        required = set(schema.get("required", ()))
        terms: list[tuple[str, bool]] = []
        for key, inner in schema["properties"].items():
            place = f"{where}.{key}"
            if not key or ">" in key or NS in key:
                raise SchemaError(f"{place}: this name cannot be written in a call")
            try:
                terms.append((self._element(key, inner, place, level + 1), key in required))
            except NothingFitsError:
                if key in required:
                    raise
        if not is_empty_apart or any(is_required for _, is_required in terms):
            return self._rule(" ".join(t if is_required else f"({t})?" for t, is_required in terms))
        # The first member that is there, and any behind it.
        forms = (" ".join([term, *(f"({t})?" for t, _ in terms[i + 1 :])]) for i, (term, _) in enumerate(terms))
        return self._union(map(self._rule, forms))

    def _element(self, key: str, schema: Any, where: str, level: int) -> str:
        return f"{self._literal(f'{NS}<{key}>')} {self._value(schema, where, level)} {self._literal(f'{NS}</{key}>')}"

    def _value(self, schema: Any, where: str, level: int) -> str:
        key = self._reader.name(schema, where)
        if key not in self._values:
            if level > _MAX_LEVELS:
                raise SchemaError(f"{where}: nested more than {_MAX_LEVELS} deep")
            name = self._values[key] = self._rules.reserve("value")
            try:
                self._rules.put(name, self._alternatives(schema, where, level))
            except SchemaError:
                del self._values[key]
                self._rules.put(name, '""')
                raise
        return self._values[key]

    def _alternatives(self, schema: Any, where: str, level: int) -> str:
        alternatives = self._reader.alternatives(schema, where)
        read_as = self._parser.types(schema)
        if not read_as:  # every text stays one, whatever an alternative says
            texts = [one for one in alternatives if "type" not in one and "enum" not in one]
            alternatives = texts or alternatives
        kinds = [type_of(option) for one in alternatives for option in one.get("enum", ())]
        containers = [{"type": kind} for kind in kinds if kind in ("object", "array")]
        containers += [one for one in alternatives if "enum" not in one and kind_of(one) in ("object", "array")]
        if len(containers) > 1:
            self._check_told_apart(containers, where, by_key=False)
        return self._union(self._alternative(one, schema, read_as, where, level) for one in alternatives)

    def _alternative(self, one: Schema, schema: Any, read_as: Sequence[str], where: str, level: int) -> str:
        """schema: the whole of which this is an alternative, as its parser reads it. read_as: the types it may be."""
        if "enum" in one:
            return self._constants(one, schema, where)
        kind = kind_of(one)
        if kind in ("integer", "number"):
            if not any(key in one for key in BOUNDS):
                return _INTEGER if kind == "integer" else _NUMBER
            return json_value({key: one[key] for key in ("type", *BOUNDS) if key in one})
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        if kind in ("object", "array"):
            return self._container(one, kind, read_as, where, level)
        return self._text(one, read_as, where)

    def _constants(self, one: Schema, schema: Any, where: str) -> str:
        more = [key for key in one if key not in ("type", "enum")]
        if more:
            raise SchemaError(f"{where}: {more[0]} beside enum cannot be enforced in a call")
        forms = []
        for option in one["enum"]:
            form = option if isinstance(option, str) else json.dumps(option)
            if not same(self._parser.value(Element("", [form] if form else []), schema), option):
                raise SchemaError(f"{where}: the enum's {json.dumps(option):.60} would be read as something else")
            if NS in form:
                raise SchemaError(f"{where}: an enum's text cannot hold the marker {NS}")
            forms.append(self._literal(form))
        return self._union(forms)

    def _text(self, one: Schema, read_as: Sequence[str], where: str) -> str:
        if "string" not in read_as and read_as:
            raise SchemaError(f"{where}: a text here would be read as {' or '.join(read_as)}")
        forms = []
        for pattern in one.get("pattern", ()):
            if len(pattern) > MAX_PATTERN_CHARS:
                raise SchemaError(f"{where}: patterns of more than {MAX_PATTERN_CHARS} characters cannot be enforced")
            try:
                forms.append(regex_terminal(whole(pattern)))
            except PatternError as error:
                raise SchemaError(f"{where}: pattern {pattern!r:.80} cannot be enforced: {error}") from None
        forms += [regex_terminal(FORMATS[name]) for name in one.get("format", ()) if name in FORMATS]
        least, most = one.get("minLength", 0), one.get("maxLength")
        if least or most is not None:
            if max(least, most or 0) > _MAX_LENGTH:
                raise SchemaError(f"{where}: lengths above {_MAX_LENGTH} cannot be enforced")
            forms.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
        refused = list(dict.fromkeys(_READ_OTHERWISE[kind] for kind in read_as if kind in _READ_OTHERWISE))
        if not forms and not refused:
            return "TEXT"
        return self._terminal(" & ".join([*(forms or [r"/(.|\n)*/"]), _NO_MARKER, *(f"~{form}" for form in refused)]))

    def _container(self, one: Schema, kind: str, read_as: Sequence[str], where: str, level: int) -> str:
        is_empty_apart = len(read_as) > 1
        if self._is_written_out(one):
            if kind == "object":
                return self._members(one, where, level, is_empty_apart=is_empty_apart)
            return self._array(one, where, level, is_empty_apart=is_empty_apart)
        if "string" in read_as:
            raise SchemaError(
                f"{where}: {self._unusual(one)} of an {kind} beside a string cannot be enforced in a call"
            )
        keywords = (*MEMBERS, *OF_OBJECTS) if kind == "object" else (*ITEMS, *OF_ARRAYS)
        asserted = {key: one[key] for key in keywords if key in one}
        return json_value(self._with_definitions({"type": kind, **asserted}))

    def _is_written_out(self, one: Schema) -> bool:
        """Whether a container's members are known one by one, and nothing else is said of them."""
        if kind_of(one) == "array":
            return not any(key in one for key in OF_ARRAYS) and ("items" in one or "prefixItems" in one)
        names = one.get("properties") or {}
        required = one.get("required", [])
        return (
            bool(names)
            and not any(key in one for key in OF_OBJECTS)
            and all(name in names for name in required)
            and one.get("minProperties", 0) <= len(required)
            and one.get("maxProperties", len(names)) >= len(names)
        )

    def _unusual(self, one: Schema) -> str:
        """The keyword that keeps a container from being written out."""
        keys = [key for key in (*OF_OBJECTS, *OF_ARRAYS) if key in one]
        more = [key for key in ("minProperties", "maxProperties", "required", "additionalProperties") if key in one]
        return (keys or more or ["no properties or items"])[0]

    def _array(self, one: Schema, where: str, level: int, *, is_empty_apart: bool) -> str:
        first = one.get("prefixItems", [])
        least, most = max(one.get("minItems", 0), int(is_empty_apart)), one.get("maxItems")
        if max(least, most or 0) > _MAX_ITEMS:
            raise SchemaError(f"{where}: more than {_MAX_ITEMS} items cannot be enforced")
        if most is not None and most < least:
            raise NothingFitsError(f"{where}: nothing fits maxItems {most}")
        try:
            item = self._rule(self._element("item", one.get("items", True), f"{where}.items", level + 1))
        except NothingFitsError:
            item, most = "", min(len(first), len(first) if most is None else most)
            if least > most:
                raise
        form = ""
        if item and (most is None or most > len(first)):
            rest = max(least - len(first), 0)
            form = f"{item}{{{rest},{'' if most is None else most - len(first)}}}"
        for i in reversed(range(min(len(first), len(first) if most is None else most))):
            element = self._element("item", first[i], f"{where}.prefixItems[{i}]", level + 1)
            form = self._rule(f"{element} {form}")  # a rule each: parentheses may not be nested as deep
            form = form if i < least else f"({form})?"
        return self._rule(form or '""')

    def _check_told_apart(self, alternatives: list[Schema], where: str, *, by_key: bool) -> None:
        """Raises SchemaError if the parser could read members by another alternative than they were written for.

        by_key: it looks for each member's name alone, not for the alternative that has all of them.
        """
        objects = [one for one in alternatives if kind_of(one) != "array"]
        arrays = [one for one in alternatives if kind_of(one) == "array"]
        for number, later in enumerate(objects):
            for earlier in objects[:number]:
                names, own = earlier.get("properties", {}), later.get("properties", {})
                is_apart = not by_key and any(name not in names for name in later.get("required", ()))
                if is_apart or (not names and not own):
                    continue
                for name in names.keys() & own.keys():
                    if not self._are_read_alike(names[name], own[name]):
                        raise SchemaError(
                            f"{where}: two alternatives have another {name!r}: a call does not tell which"
                        )
        for later in arrays[1:]:
            count = max(len(one.get("prefixItems", ())) for one in (arrays[0], later))
            if not all(self._are_read_alike(_item(arrays[0], i), _item(later, i)) for i in range(count + 1)):
                raise SchemaError(f"{where}: two alternatives have other items: a call does not tell which")
        if arrays and any("item" in one.get("properties", {}) for one in objects):
            raise SchemaError(f"{where}: an object with a member 'item' and an array look alike in a call")

    def _are_read_alike(self, one: Any, other: Any) -> bool:
        if one == other:
            return True
        kinds = [set(self._parser.types(schema)) for schema in (one, other)]
        return kinds[0] == kinds[1] and not kinds[0] & {"array", "object"}

    def _with_definitions(self, schema: Schema) -> Schema:
        """The schema by itself: references of the tool's lead into a copy of the whole, which comes along."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        return {**_moved(schema), "$defs": {"tool": _moved(self._schema)}}

    def _union(self, forms: Any) -> str:
        distinct = list(dict.fromkeys(forms))
        return distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"

    def _rule(self, body: str) -> str:
        return self._rules.named("part", body or '""')

    def _terminal(self, body: str) -> str:
        return self._rules.named("TEXT", body)


def _item(schema: Schema, number: int) -> Any:
    first = schema.get("prefixItems", [])
    return first[number] if number < len(first) else schema.get("items", True)


def _moved(schema: Any) -> Any:
    """A copy whose references lead from #/… to #/$defs/tool/…."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/tool{value[1:]}" if key == "$ref" and isinstance(value, str) else _moved(value)
        for key, value in schema.items()
    }
