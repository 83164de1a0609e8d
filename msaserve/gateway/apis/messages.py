"""Anthropic's Messages API: its requests as chat requests, a chat output as its answers."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import msgspec

from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.blocks import Block, BlockAnswer, Step
from msaserve.gateway.apis.openai import ChatRequest, ErrorBody, parse
from msaserve.gateway.apis.translate import Translation, objects, refuse, same_fields, text_of, unsupported
from msaserve.gateway.stream import Generation
from msaserve.gateway.transport import Dialect, server_event

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((None,), "tools run where the client is"),
    "mcp_servers": ((None, []), "tools run where the client is"),
}
_SAME = ("model", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "seed")
_NAMES = (
    # In Anthropic's words, by which agents know that they must shorten the conversation, or the answer.
    (r"^the prompt .*?(\d+) tokens; this model takes at most (\d+).*", r"prompt is too long: \1 tokens > \2 maximum"),
    (
        r"^(\d+) prompt tokens and max_tokens (\d+) make \d+; this model's context is (\d+) tokens$",
        r"input length and `max_tokens` exceed context limit: \1 + \2 > \3, decrease input length or `max_tokens` and "
        r"try again",
    ),
    (r"(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"^stop(?= has |$)", "stop_sequences"),
    (r"\breasoning_effort\b", "output_config.effort"),
    (r"\bresponse_format(\.json_schema)?\b", "output_config.format"),
    (r"\btool_call_id\b", "tool_use_id"),
)
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_SIGNATURE = "unsigned"
"""Clients keep thinking that has a signature, and send it back; nobody checks this one."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes a prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: Any = None
    tools: Any = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def read(body: bytes, kind: type[CountTokensRequest] = MessagesRequest) -> tuple[Translation, ChatRequest]:
    """Raises InvalidRequestError for a body that is no request of the kind, or has no counterpart in a chat request."""
    chat = chat_of(parse(body, kind))
    return chat, chat.chat_request()


def chat_of(asked: CountTokensRequest) -> Translation:
    """Raises InvalidRequestError for what has no counterpart in a chat request; chat checks the rest."""
    refuse(asked, _REFUSED)
    fields = same_fields(asked, _SAME)
    if isinstance(asked, MessagesRequest):
        fields.update(max_tokens=asked.max_tokens, stop=asked.stop_sequences, stream=asked.stream)
    config = asked.output_config or {}
    fields["thinking"] = None if asked.thinking is None else {"type": asked.thinking.get("type")}
    fields["reasoning_effort"] = config.get("effort")
    fields["response_format"] = _response_format(config.get("format") or asked.output_format)
    fields["tools"] = (
        None if asked.tools is None else [_tool(i, t) for i, t in enumerate(objects("tools", asked.tools))]
    )
    choice = asked.tool_choice or {}
    fields["tool_choice"] = _tool_choice(choice)
    fields["parallel_tool_calls"] = False if choice.get("disable_parallel_tool_use") else None
    chat = Translation(fields, _NAMES)
    if asked.system:
        content, places = _content("system", asked.system)
        chat.add({"role": "system", "content": content}, "system", places)
    if asked.messages and asked.messages[-1].get("role") == "assistant":
        raise InvalidRequestError(
            "the last message is the assistant's: an answer cannot be begun for it",
            param="messages",
            code="unsupported_parameter",
        )
    for role, group in groupby(enumerate(asked.messages), key=lambda numbered: numbered[1].get("role")):
        turn = list(group)
        where = f"messages[{turn[0][0]}]"
        if role not in ("user", "assistant", "system"):
            raise InvalidRequestError(
                f"{where}.role must be user or assistant, not {role!r:.64}", param=f"{where}.role"
            )
        blocks: list[tuple[str, dict[str, Any]]] = []
        for number, message in turn:
            place = f"messages[{number}].content"
            content = message.get("content")
            if isinstance(content, str):
                blocks.append((place, {"type": "text", "text": content}))
            else:
                blocks += [
                    (f"{place}[{i}]", block)
                    for i, block in enumerate(objects(place, content, "text or a list of blocks"))
                ]
        if role == "assistant":
            _add_assistant(where, blocks, chat)
        else:
            _add_user(where, role, blocks, chat)
    return chat


def _add_user(where: str, role: str, blocks: list[tuple[str, dict[str, Any]]], chat: Translation) -> None:
    parts, places = [], []
    for place, block in blocks:
        if block.get("type") == "tool_result":
            # Results come right behind the calls, whatever else the user says with them.
            content, inner = _content(f"{place}.content", block.get("content") or "")
            chat.add({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}, place, inner)
        else:
            parts.append(_part(place, block))
            places.append(place)
    if parts or not blocks:
        chat.add({"role": role, "content": _plain(parts)}, where, places)


def _add_assistant(where: str, blocks: list[tuple[str, dict[str, Any]]], chat: Translation) -> None:
    parts, places, calls, reasoning = [], [], [], ""
    for place, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            reasoning += text_of(f"{place}.thinking", block.get("thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "text":
            parts.append(_part(place, block))
            places.append(place)
        elif kind != "redacted_thinking":
            raise unsupported(place, kind, "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": _plain(parts)}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    chat.add(message, where, places)


def _plain(parts: list[dict[str, Any]]) -> Any:
    """One text alone is content by itself."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _content(where: str, content: Any) -> tuple[Any, list[str]]:
    """Content of a chat message, and what its parts are called here."""
    if isinstance(content, str):
        return content, []
    parts = [
        _part(f"{where}[{i}]", block) for i, block in enumerate(objects(where, content, "text or a list of blocks"))
    ]
    return _plain(parts), [f"{where}[{i}]" for i in range(len(parts))]


def _part(where: str, block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": text_of(f"{where}.text", block.get("text"))}
    if kind == "document":
        return {"type": "text", "text": _document(where, block)}
    if kind in ("image", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": _url(f"{where}.source", block.get("source"))}}
    taken = "text, image, video, document, and in their places tool_use, tool_result and thinking"
    raise unsupported(where, kind, taken)


def _document(where: str, block: dict[str, Any]) -> str:
    """A document that comes as text, below its title and context."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise InvalidRequestError(
            f"{where}.citations are not supported", param=f"{where}.citations", code="unsupported_parameter"
        )
    source, place = block.get("source"), f"{where}.source"
    source = source if isinstance(source, dict) else {}
    kind = source.get("type")
    if kind not in ("text", "content"):
        raise unsupported(place, kind, "text and content, not files")
    heads = [text_of(f"{where}.{key}", block[key]) for key in ("title", "context") if block.get(key) is not None]
    if kind == "text":
        return "\n".join([*heads, text_of(f"{place}.data", source.get("data"))])
    content = source.get("content")
    if not isinstance(content, str):
        parts = objects(f"{place}.content", content, "text or a list of blocks")
        content = "\n".join(text_of(f"{place}.content[{i}].text", part.get("text")) for i, part in enumerate(parts))
    return "\n".join([*heads, content])


def _url(where: str, source: Any) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return text_of(f"{where}.url", source.get("url"))
    if kind == "base64":
        media_type = text_of(f"{where}.media_type", source.get("media_type"))
        return f"data:{media_type};base64,{text_of(f'{where}.data', source.get('data'))}"
    raise unsupported(where, kind, "base64 and url")


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported(f"tools[{number}]", tool["type"], "tools of the client's own, with an input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice and kind not in ("auto", "any", "none"):
        raise InvalidRequestError("tool_choice.type must be one of auto, any, tool, none", param="tool_choice")
    return "required" if kind == "any" else kind


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema"), "strict": True}}


class MessagesAnswer(BlockAnswer):
    id_prefix = "msg"

    def begin(self, generation: Generation) -> bytes:
        return _event("message_start", message=self._message(generation, [], None, None))

    def events(self, step: Step) -> bytes:
        block = step.block
        if step.kind == "opened":
            return _event("content_block_start", index=block.number, content_block=_content_block(block))
        if step.kind == "grew":
            return _delta(block, step.text)
        stop = _event("content_block_stop", index=block.number)
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            return _event("content_block_delta", index=block.number, delta=signature) + stop
        return stop

    def end(self, generation: Generation) -> bytes:
        reason, stop = self._stop(generation)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", delta=delta, usage=self._usage(generation)) + _event("message_stop")

    def whole(self, generation: Generation) -> bytes:
        content = []
        for block in self.blocks.all:
            if block.kind == "call" and block.is_complete:
                content.append({**_content_block(block), "input": json.loads(block.text)})
            elif block.kind == "call":
                # An input is an object or nothing: a call that broke off is shown as it was written.
                content.append({"type": "text", "text": block.source})
            elif block.kind == "text":
                content.append({"type": "text", "text": block.text})
            else:
                content.append({"type": "thinking", "thinking": block.text, "signature": _SIGNATURE})
        return msgspec.json.encode(self._message(generation, content, *self._stop(generation)))

    def _stop(self, generation: Generation) -> tuple[str, str | None]:
        stop = generation.outputs[0].stop_string
        if self.finish_reason == "stop" and stop is not None:
            return "stop_sequence", stop
        return {"tool_calls": "tool_use", "length": "max_tokens"}.get(self.finish_reason or "", "end_turn"), None

    def _message(
        self, generation: Generation, content: list[Any], stop_reason: str | None, stop_sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage(generation),
        }

    def _usage(self, generation: Generation) -> dict[str, int]:
        cached = generation.num_cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_output_tokens,
        }


def _content_block(block: Block) -> dict[str, Any]:
    """As it begins."""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _delta(block: Block, text: str) -> bytes:
    if block.kind == "call":
        delta = {"type": "input_json_delta", "partial_json": text}
    elif block.kind == "text":
        delta = {"type": "text_delta", "text": text}
    else:
        delta = {"type": "thinking_delta", "thinking": text}
    return _event("content_block_delta", index=block.number, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return server_event(msgspec.json.encode({"type": kind, **fields}), kind)


def _error(status: int, body: ErrorBody) -> bytes:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": body.message}})


MESSAGES = Dialect(
    _error,
    lambda status, body: server_event(_error(status, body), "error"),
    keep_alive=_event("ping"),
)
