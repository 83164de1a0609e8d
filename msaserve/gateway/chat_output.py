"""The text of one chat choice as what its message gains: reasoning, content and calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msaserve.gateway.openai import ChatMessage, FunctionCall, ToolCall
from msaserve.gateway.parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Malformed,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from msaserve.gateway.parsers.minimax_m3 import MiniMaxM3Parser
from msaserve.gateway.parsers.reasoning import ThinkingMode
from msaserve.gateway.tools import ToolUse

_log = logging.getLogger(__name__)


class ChatOutput:
    """One choice of a chat answer."""

    def __init__(self, tools: ToolUse, thinking: ThinkingMode) -> None:
        """thinking: whether the output begins inside reasoning."""
        self._parser = MiniMaxM3Parser(tools.schemas, thinking=thinking, parses_calls=tools.parses_calls)
        self._keeps_one_call = not tools.is_parallel
        self._has_call = False
        """A complete one."""
        self._prefix = tools.prefix

    def push(self, text: str, finish_reason: str | None) -> tuple[ChatMessage, str | None]:
        """What the message gains by more text, and the reason why the output ends, if it does."""
        events = self._parser.feed(self._prefix + text)
        self._prefix = ""
        if finish_reason is not None:
            events += self._parser.finish()
        message = self._message(events)
        if finish_reason == "stop" and self._has_call:
            finish_reason = "tool_calls"
        return message, finish_reason

    def _message(self, events: Iterable[Event]) -> ChatMessage:
        content, reasoning = "", ""
        calls: dict[int, ToolCall] = {}
        for event in events:
            if isinstance(event, ContentDelta):
                content += event.text
            elif isinstance(event, ReasoningDelta):
                reasoning += event.text
            elif isinstance(event, Malformed):
                _log.warning("malformed tool call: %s", event.reason)
            elif event.index > 0 and self._keeps_one_call:
                continue
            elif isinstance(event, ToolCallStart):
                calls[event.index] = ToolCall(
                    index=event.index, id=event.id, type="function", function=FunctionCall(name=event.name)
                )
            elif isinstance(event, ArgumentsDelta):
                call = calls.setdefault(event.index, ToolCall(index=event.index, function=FunctionCall()))
                call.function.arguments += event.text
            else:
                assert isinstance(event, ToolCallEnd)
                self._has_call = True
        message = ChatMessage(reasoning_content=reasoning or None, tool_calls=list(calls.values()) or None)
        if content:
            message.content = content
        return message
