"""OpenAI's Responses API: its requests as chat requests, a chat output as its answers. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.blocks import Block, BlockAnswer, Step
from msaserve.gateway.apis.openai import ChatRequest, ErrorBody, parse
from msaserve.gateway.apis.translate import Translation, objects, refuse, same_fields, text_of, unsupported
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.stream import Generation
from msaserve.gateway.transport import Dialect, error_of, log_failure, server_event

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((None, False), "responses are not stored"),
    "conversation": ((None,), "nothing is stored; send the whole conversation as input"),
    "previous_response_id": ((None,), "responses are not stored; send the whole conversation as input"),
    "prompt": ((None,), "there are no stored prompts; use instructions and input"),
    "top_logprobs": ((None, 0), "log-probabilities are given by /v1/chat/completions"),
}
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls",
    "cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos", "min_p", "presence_penalty",
    "repetition_penalty", "seed", "stop", "top_k",
)  # fmt: skip
_NAMES = (
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\btool_call_id\b", "call_id"),
    (r"\bmessages\b", "input"),
)
_STEMS = {
    "text": "response.output_text",
    "thinking": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
_ITEM_PREFIXES = {"text": "msg", "thinking": "rs", "call": "fc"}
_ITEMS = "message, reasoning, function_call and function_call_output"


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """What is understood; fields behind `store` are those that chat requests have too."""

    input: Any
    """Text, or a list of items."""
    model: str | None = None
    instructions: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    store: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None


def read(body: bytes) -> tuple[ResponsesRequest, Translation, ChatRequest]:
    """Raises InvalidRequestError for a body that is no request, or one without a counterpart in a chat request."""
    asked = parse(body, ResponsesRequest)
    chat = chat_of(asked)
    return asked, chat, chat.chat_request()


def chat_of(asked: ResponsesRequest) -> Translation:
    """Raises InvalidRequestError for what has no counterpart in a chat request; chat checks the rest."""
    refuse(asked, _REFUSED)
    fields = same_fields(asked, _SAME)
    fields["max_tokens"] = asked.max_output_tokens
    fields["reasoning_effort"] = (asked.reasoning or {}).get("effort")
    fields["response_format"] = _response_format((asked.text or {}).get("format"))
    fields["tools"] = (
        None if asked.tools is None else [_tool(i, t) for i, t in enumerate(objects("tools", asked.tools))]
    )
    fields["tool_choice"] = _tool_choice(asked.tool_choice)
    chat = Translation(fields, _NAMES)
    if asked.instructions is not None:
        chat.add({"role": "system", "content": asked.instructions}, "instructions")
    if isinstance(asked.input, str):
        chat.add({"role": "user", "content": asked.input}, "input")
    else:
        _add_items(objects("input", asked.input, "text or a list of items"), chat)
    return chat


class _Turn:
    """Items of the assistant that follow each other: one message of a chat."""

    def __init__(self) -> None:
        self.where = ""
        self.reasoning: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self.part_places: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def add_to(self, chat: Translation) -> None:
        if not (self.reasoning or self.parts or self.calls):
            return
        is_plain = len(self.parts) == 1 and self.parts[0]["type"] == "text"
        message: dict[str, Any] = {"role": "assistant", "content": self.parts[0]["text"] if is_plain else self.parts}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        chat.add(message, self.where, self.part_places)


def _add_items(items: list[dict[str, Any]], chat: Translation) -> None:
    turn = _Turn()
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type") or "message"
        is_assistant = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if is_assistant:
            turn.where = turn.where or where
            _add_to_turn(where, kind, item, turn)
            continue
        turn.add_to(chat)
        turn = _Turn()
        if kind == "message":
            content, places = _content(f"{where}.content", item.get("content"))
            chat.add({"role": item.get("role"), "content": content}, where, places)
        elif kind == "function_call_output":
            content, places = _content(f"{where}.output", item.get("output"))
            chat.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": content}, where, places)
        else:
            raise unsupported(where, kind, _ITEMS)
    turn.add_to(chat)


def _add_to_turn(where: str, kind: str, item: dict[str, Any], turn: _Turn) -> None:
    if kind == "reasoning":
        # The text is in content; a summary stands in for it where another server gave no more.
        for key in ("content", "summary"):
            texts = [
                text_of(f"{where}.{key}[{i}].text", part.get("text"))
                for i, part in enumerate(objects(f"{where}.{key}", item.get(key) or []))
            ]
            if texts:
                turn.reasoning += texts
                break
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.calls.append({"id": item.get("call_id"), "type": "function", "function": function})
    else:
        content, places = _content(f"{where}.content", item.get("content"))
        is_text = isinstance(content, str)
        turn.parts += [{"type": "text", "text": content}] if is_text else content
        turn.part_places += [f"{where}.content"] if is_text else places


def _content(where: str, content: Any) -> tuple[Any, list[str]]:
    """Content of a chat message, and what its parts are called here."""
    if isinstance(content, str):
        return content, []
    parts = [_part(f"{where}[{i}]", part) for i, part in enumerate(objects(where, content, "text or a list of parts"))]
    return parts, [f"{where}[{i}]" for i in range(len(parts))]


def _part(where: str, part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": text_of(f"{where}.text", part.get("text"))}
    if kind == "refusal":
        return {"type": "text", "text": text_of(f"{where}.refusal", part.get("refusal"))}
    if kind == "input_image" and part.get("image_url") is not None:
        hints = {key: part[key] for key in ("max_long_side_pixel",) if key in part}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **hints}}
    if kind in ("image_url", "video_url"):
        return part
    raise unsupported(where, kind, "input_text, output_text, input_image with an image_url, and video_url")


def _tool(number: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"tools[{number}]", tool.get("type"), "functions")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """In chat's form, in which functions and allowed tools lie one level deeper."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        chosen = [_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": chosen}}
    if choice.get("type") != "function":
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
            '{"type": "allowed_tools", "mode": …, "tools": […]}',
            param="tool_choice",
            code="unsupported_parameter",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


class ResponsesAnswer(BlockAnswer):
    id_prefix = "resp"

    def __init__(self, asked: ResponsesRequest, output: ChatOutput, chat: Translation, *, model: str) -> None:
        super().__init__(output, chat, model=model)
        self._asked = asked
        self._num_events = 0

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(super().stream(generation)) as events:
                async for event in events:
                    yield event
        except Exception as error:
            if not self._num_events:
                raise
            status, body = error_of(error)
            log_failure(error, status)
            failure = {"code": "server_error", "message": body.message}
            response = self._response("failed", generation, error=failure)
            yield self._event("response.failed", response=response)

    def begin(self, generation: Generation) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, step: Step) -> bytes:
        block = step.block
        if step.kind == "opened":
            item = self._item(block, "in_progress")
            added = self._event("response.output_item.added", output_index=block.number, item=item)
            return added if block.kind == "call" else added + self._inner("response.content_part.added", block)
        stem = _STEMS[block.kind]
        if step.kind == "grew":
            return self._inner(f"{stem}.delta", block, delta=step.text)
        if block.kind == "call":
            done = self._inner(f"{stem}.done", block, name=block.name, arguments=block.text)
        else:
            done = self._inner(f"{stem}.done", block, text=block.text)
            done += self._inner("response.content_part.done", block)
        return done + self._event("response.output_item.done", output_index=block.number, item=self._item(block))

    def end(self, generation: Generation) -> bytes:
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status, generation))

    def whole(self, generation: Generation) -> bytes:
        return msgspec.json.encode(self._response(self._status(), generation))

    def _status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return server_event(msgspec.json.encode(event), kind)

    def _inner(self, event: str, block: Block, **fields: Any) -> bytes:
        """An event of what is inside an item."""
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.number}
        if block.kind != "call":
            place["content_index"] = 0
        if event.startswith("response.content_part"):
            fields["part"] = _content_part(block)
        elif block.kind == "text":
            fields["logprobs"] = []
        return self._event(event, **place, **fields)

    def _item_id(self, block: Block) -> str:
        return f"{_ITEM_PREFIXES[block.kind]}_{self.id.removeprefix('resp_')}{block.number:02x}"

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": self._item_id(block),
            "status": status or ("completed" if block.is_complete else "incomplete"),
        }
        content = [] if status == "in_progress" else [_content_part(block)]
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **item, **call}
        if block.kind == "text":
            return {"type": "message", **item, "role": "assistant", "content": content}
        return {"type": "reasoning", **item, "summary": [], "content": content}

    def _response(
        self, status: str, generation: Generation | None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """generation: None before there is any output."""
        asked = self._asked
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [] if generation is None else [self._item(block) for block in self.blocks.all],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}, **(asked.text or {})},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else self._usage(generation),
        }

    def _usage(self, generation: Generation) -> dict[str, Any]:
        num_input, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_thinking_tokens},
            "total_tokens": num_input + num_output,
        }


def _content_part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _error_event(status: int, body: ErrorBody) -> bytes:
    event = {"type": "error", "sequence_number": 0, "code": body.code, "message": body.message, "param": body.param}
    return server_event(msgspec.json.encode(event), "error")


RESPONSES = Dialect(lambda status, body: body.encode(), _error_event)
