"""Tools in a chat request: what is offered, what is asked for, and earlier calls with their results."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msaserve.errors import InvalidRequestError
from msaserve.gateway.parsers.schema import without_surrogates
from msaserve.gateway.parsers.tags import NS

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")
_NUMBER = (int, float)
_SCHEMA = ("additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_SCHEMAS_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEYWORDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_SCHEMAS_BY_NAME, (dict, "an object")),
    **dict.fromkeys((*_SCHEMAS_IN_LIST, "required", "enum"), (list, "a list")),
    "items": ((dict, list, bool), "a schema"),
    **dict.fromkeys(_SCHEMA, ((dict, bool), "a schema")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf", "minLength", "maxLength"), (_NUMBER, "a number")),
    **dict.fromkeys(("minItems", "maxItems", "minProperties", "maxProperties"), (_NUMBER, "a number")),
    **dict.fromkeys(("pattern", "format", "$ref", "title", "description"), (str, "text")),
}
"""What JSON schema says of keywords' values."""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    offered: list[dict[str, Any]] = field(default_factory=list)
    """As the template takes them."""
    schemas: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the parameters by name."""
    parses_calls: bool = True
    is_parallel: bool = True
    """False: the first call of an answer counts."""
    prefix: str = ""
    """How the answer must begin: the beginning of a call, when one is asked for."""


def tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequestError."""
    offered = _offered(tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, offered = _allowed(choice.get("allowed_tools"), offered)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in offered}
    name = _chosen(choice, schemas)
    is_none = choice == "none"
    return ToolUse(
        offered=[] if is_none else offered,
        schemas=schemas,
        parses_calls=not is_none,
        is_parallel=parallel is not False,
        prefix="" if name is None else _beginning(name),
    )


def called_tools(where: str, calls: Any) -> list[dict[str, Any]]:
    """An assistant message's `tool_calls` as a template takes them: arguments are an object, not its JSON text.

    Arguments that are no JSON object, such as those of a call that broke off, become {"$text": …}.

    Raises:
        InvalidRequestError: naming the place.
    """
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} must be a list", param=where)
    result = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequestError(f"{where}[{i}] must be a call of a function", param=f"{where}[{i}]")
        call_id, name = call.get("id"), function.get("name")
        if not isinstance(call_id, str) or not call_id:
            raise InvalidRequestError(f"{where}[{i}].id must be text", param=f"{where}[{i}].id")
        # Models also call tools that there are not, by any name; what they did can be sent back.
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"{where}[{i}].function.name must be text", param=f"{where}[{i}].function.name")
        arguments = _arguments(f"{where}[{i}].function.arguments", function.get("arguments"))
        result.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return result


def in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the results of each message's calls right behind it, in the order of the calls.

    Templates show results without their ids, so the order says which belongs to which.

    Raises:
        InvalidRequestError: a call without a result or with two, or a result without a call.
    """
    result: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any] | None] = {}
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            _take_result(f"messages[{i}]", message, waiting)
            continue
        result += _results(f"messages[{i}]", waiting)
        result.append(message)
        waiting = {}
        for call in message.get("tool_calls", ()):
            if call["id"] in waiting:
                raise InvalidRequestError(
                    f"messages[{i}].tool_calls: two calls have the id {call['id']!r}", param=f"messages[{i}].tool_calls"
                )
            waiting[call["id"]] = None
    return result + _results("the end of the messages", waiting)


def _take_result(where: str, message: dict[str, Any], waiting: dict[str, dict[str, Any] | None]) -> None:
    call_id = message["tool_call_id"]
    param = f"{where}.tool_call_id"
    if call_id not in waiting:
        raise InvalidRequestError(f"{param}: the assistant's message before it has no call {call_id!r}", param=param)
    if waiting[call_id] is not None:
        raise InvalidRequestError(f"{param}: the call {call_id!r} has been answered already", param=param)
    waiting[call_id] = message


def _results(where: str, waiting: Mapping[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
    unanswered = [call_id for call_id, message in waiting.items() if message is None]
    if unanswered:
        calls = ", ".join(map(repr, unanswered))
        raise InvalidRequestError(
            f"before {where} each of the tool calls {calls} must be answered by a tool message", param="messages"
        )
    return [message for message in waiting.values() if message is not None]


def _offered(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequestError("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param="tools")
    offered = []
    names = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise InvalidRequestError(f'{where} must be {{"type": "function", "function": …}}', param=where)
        _check_name(f"{where}.function.name", function.get("name"))
        if function["name"] in names:
            raise InvalidRequestError(f"{where}: there are two tools {function['name']!r}", param=where)
        names.add(function["name"])
        if not isinstance(function.get("description"), (str, type(None))):
            raise InvalidRequestError(
                f"{where}.function.description must be text", param=f"{where}.function.description"
            )
        _check_parameters(f"{where}.function.parameters", function.get("parameters"))
        # Only what is known: the rest would be read by the model.
        known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        offered.append({"type": "function", "function": known})
    return offered


def _check_parameters(where: str, schema: Any) -> None:
    if schema is None:
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequestError(f'{where} must be a JSON schema of type "object"', param=where)
    _check_schema(where, schema, levels=64)


def _check_schema(where: str, schema: Any, levels: int) -> None:
    """What would make a schema meaningless: a type that is none, a keyword of the wrong kind."""
    if levels == 0:
        raise InvalidRequestError(f"{where} is nested too deep", param=where)
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{where} is not a JSON schema", param=where)
    types = schema.get("type", [])
    for kind in types if isinstance(types, list) else [types]:
        if kind not in _TYPES:
            raise InvalidRequestError(f"{where}.type: {str(kind)[:64]!r} is no type of JSON schema", param=where)
    for key, inner in schema.items():
        if inner is None:
            continue
        kinds, words = _KEYWORDS.get(key, (object, ""))
        if not isinstance(inner, kinds) or (kinds is _NUMBER and isinstance(inner, bool)):
            raise InvalidRequestError(f"{where}.{key} must be {words}", param=where)
        if key == "required" and not all(isinstance(name, str) for name in inner):
            raise InvalidRequestError(f"{where}.required must be a list of names", param=where)
        if key in _SCHEMA or (key in _SCHEMAS_IN_LIST and isinstance(inner, (dict, bool))):
            _check_schema(f"{where}.{key}", inner, levels - 1)
        elif key in _SCHEMAS_BY_NAME or key in _SCHEMAS_IN_LIST:
            for name, one in inner.items() if isinstance(inner, dict) else enumerate(inner):
                _check_schema(f"{where}.{key}.{name}", one, levels - 1)


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where} must be 1 to 128 letters, digits, or _ . : / -, not {str(name)[:64]!r}", param=where
        )


def _allowed(allowed: Any, offered: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The choice, and the tools it leaves: the others are as if they had not been sent."""
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequestError(
            'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": […]}', param="tool_choice"
        )
    by_name = {tool["function"]["name"]: tool for tool in offered}
    names = {_function_named(tool, "an entry of tool_choice.allowed_tools.tools", by_name) for tool in tools}
    return allowed["mode"], [tool for name, tool in by_name.items() if name in names]


def _function_named(choice: Any, what: str, names: Container[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            f'{what} must be {{"type": "function", "function": {{"name": …}}}}', param="tool_choice"
        )
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {name[:64]!r}, which is not in tools", param="tool_choice")
    return name


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> str | None:
    """The tool that must be called; "" for any; None if none must be."""
    if choice is None or choice in ("none", "auto"):
        return None
    if choice != "required" and not isinstance(choice, dict):
        raise InvalidRequestError(
            f"tool_choice must be one of {', '.join(_CHOICES)} or name a function, not {str(choice)[:64]!r}",
            param="tool_choice",
        )
    if not schemas:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice == "required":
        return ""
    return _function_named(choice, "tool_choice", schemas)


def _beginning(name: str) -> str:
    """Of a block of calls: as far as the tool's name, or up to it."""
    return f"{NS}<tool_call>\n{NS}" + (f'<invoke name="{name}">' if name else "")


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        raise InvalidRequestError(f"{where} must be JSON text", param=where)
    try:
        value = json.loads(without_surrogates(arguments))
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"$text": arguments}
