"""Examples as messages, as prompts, and as what a model's text says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from msaserve.eval.example import Call, Clip, Example, Picture, Reply, Thinking
from msaserve.eval.media import prepare
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.prompt import Expanded, expand
from msaserve.gateway.media.spec import ModelSpec, Prepared
from msaserve.gateway.parsers.events import ArgumentsDelta, ContentDelta, Malformed, ReasoningDelta, ToolCallStart
from msaserve.gateway.parsers.minimax_m3 import MiniMaxM3Parser
from msaserve.tokenizer import Tokenizer

Message = dict[str, Any]


def template_part(item: Picture | Clip) -> Message:
    """How a chat template sees a picture or clip."""
    return {"type": "image" if isinstance(item, Picture) else "video"}


def messages(
    example: Example, num_turns: int = 1, *, part: Callable[[Picture | Clip], Message] = template_part
) -> list[Message]:
    """The first num_turns user messages with the right replies between them.

    part: makes a content part of a picture or clip.
    """
    result: list[Message] = []
    for i, turn in enumerate(example.turns[:num_turns]):
        if i:
            result.append(assistant(example.turns[i - 1].reply))
        if all(isinstance(p, str) for p in turn.parts):
            result.append({"role": "user", "content": "".join(str(p) for p in turn.parts)})
        else:
            content = [{"type": "text", "text": p} if isinstance(p, str) else part(p) for p in turn.parts]
            result.append({"role": "user", "content": content})
    return result


def assistant(reply: Reply) -> Message:
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in reply.calls
        ]
    return message


def prompt(
    example: Example, tokenizer: Tokenizer, template: ChatTemplate, spec: ModelSpec | None
) -> tuple[Expanded, list[Prepared]]:
    """Token ids of the first question, pictures and clips in their places, and what goes there.

    spec: needed by examples with pictures or clips.
    """
    kwargs = {"thinking_mode": example.thinking, "tools": list(example.tools) or None}
    ids = template.encode(tokenizer, messages(example), kwargs=kwargs)
    media = example.media(1)
    if not media:
        return Expanded(ids, []), []
    assert spec is not None
    items = [prepare(item, spec) for item in media]
    return expand(ids, items, spec, tokenizer), items


def parse(text: str, *, tools: dict[str, Any], thinking: Thinking) -> Reply:
    """What a model's text says. tools: parameters' JSON schema by tool name."""
    parser = MiniMaxM3Parser(tools, thinking=thinking)
    content, reasoning = "", ""
    calls: list[list[str]] = []
    for event in [*parser.feed(text), *parser.finish()]:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[-1][1] += event.text
        elif isinstance(event, Malformed) and event.index is not None:
            calls[event.index][1] = "null"
    return Reply(content, reasoning, tuple(Call(name, _arguments(text)) for name, text in calls))


def _arguments(text: str) -> dict[str, Any]:
    """Of a call. Text that is no object, as of half a call, gives arguments that no question needs."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"": text}
