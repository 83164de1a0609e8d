"""What a request says of the form of its answer, as one constraint of the engine's."""

from __future__ import annotations

import json
from typing import Any

from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.openai import ChatRequest, CompletionRequest
from msaserve.gateway.tool_grammar import ToolGrammar
from msaserve.gateway.tools import ToolUse
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint, ConstraintKind

_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
_GUIDED = ("json", "regex", "grammar", "choice")


def asked_constraint(asked: ChatRequest | CompletionRequest) -> Constraint | None:
    """Of response_format, structured_outputs and the guided_* fields the one that is given; in chat behind reasoning.

    Raises:
        InvalidRequestError: two are given, or one that says nothing. Whether a schema is one the engine finds out.
    """
    given: list[tuple[str, ConstraintKind, Any]] = []
    if asked.response_format is not None:
        given += _response_format(asked.response_format)
    if asked.structured_outputs is not None:
        given += _structured_outputs(asked.structured_outputs)
    for key in _GUIDED:
        value = getattr(asked, f"guided_{key}")
        if value is not None:
            given.append((f"guided_{key}", _KINDS[key], value))
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(name for name, _, _ in given)
        raise InvalidRequestError(f"{names} contradict each other: give one of them", param=given[1][0])
    name, kind, value = given[0]
    text = ""
    choices: tuple[str, ...] = ()
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
            raise InvalidRequestError(f"{name} must be a list of texts", param=name)
        choices = tuple(value)
    elif kind in ("json_schema", "structural_tag"):
        text = value if isinstance(value, str) else json.dumps(value)
    elif kind != "json_object":
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be text", param=name)
        text = value
    waits = isinstance(asked, ChatRequest)
    return Constraint(kind=kind, text=text, choices=choices, after_reasoning=waits, param=name)


def takes_long(asked: ChatRequest, tools: ToolUse) -> bool:
    """Whether `chat_constraint` makes a grammar of the tools' schemas, which takes milliseconds even of short ones."""
    names = ("response_format", "structured_outputs", *(f"guided_{key}" for key in _GUIDED))
    return bool(tools.prefix or (tools.offered and any(getattr(asked, name) is not None for name in names)))


def chat_constraint(asked: ChatRequest, tools: ToolUse, tokenizer: Tokenizer) -> Constraint | None:
    """`asked_constraint` together with the calls that the request asks for, or allows beside it.

    Raises:
        InvalidRequestError: see there; or a call and a form of the answer are both asked for.
    """
    constraint = asked_constraint(asked)
    if tools.prefix:
        if constraint is not None:
            raise InvalidRequestError(
                f"{constraint.param} and tool_choice contradict each other: the answer must be a call",
                param=constraint.param,
            )
        grammar = ToolGrammar(tools, tokenizer).rest()
        return None if grammar is None else Constraint(kind="grammar", text=grammar, param="tools")
    if constraint is None or not tools.offered:
        return constraint
    if constraint.kind not in ("json_object", "json_schema"):
        raise InvalidRequestError(
            f"{constraint.param} leaves no room for calls: set tool_choice to none", param=constraint.param
        )
    try:
        schema = {"type": "object"} if constraint.kind == "json_object" else json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{constraint.param} is not JSON: {error}", param=constraint.param) from None
    grammar = ToolGrammar(tools, tokenizer).or_json(schema)
    if grammar is None:
        return constraint
    return Constraint(kind="grammar", text=grammar, after_reasoning=True, param=constraint.param)


def _response_format(value: Any) -> list[tuple[str, ConstraintKind, Any]]:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, "json_object", None)]
    if kind == "structural_tag":
        return [(name, "structural_tag", value)]
    if kind != "json_schema":
        raise InvalidRequestError(
            f"{name}.type must be one of text, json_object, json_schema and structural_tag", param=name
        )
    form = value.get("json_schema")
    schema = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{name}.json_schema.schema must be an object", param=name)
    if form.get("strict") is not True:
        # Keywords that cannot be enforced are left out, not refused.
        options = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {"lenient": True, **(options if isinstance(options, dict) else {})}}
    return [(name, "json_schema", schema)]


def _structured_outputs(value: Any) -> list[tuple[str, ConstraintKind, Any]]:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} must be an object", param=name)
    given: list[tuple[str, ConstraintKind, Any]] = []
    for key, one in value.items():
        if one is None or one is False:
            continue
        if key not in _KINDS:
            known = ", ".join(_KINDS)
            raise InvalidRequestError(f"{name}.{key[:64]} is not supported; known are {known}", param=name)
        given.append((f"{name}.{key}", _KINDS[key], one))
    return given
