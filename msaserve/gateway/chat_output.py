"""The text of one chat choice as events, or as what its message gains: reasoning, content and calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msaserve.gateway.apis.openai import ChatMessage, FunctionCall, ToolCall
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
        events, finish_reason = self.read(text, finish_reason)
        return _message(events), finish_reason

    def read(self, text: str, finish_reason: str | None) -> tuple[list[Event], str | None]:
        """The same as events, in order."""
        found = self._parser.feed(self._prefix + text)
        self._prefix = ""
        if finish_reason is not None:
            found += self._parser.finish()
        events = [event for event in found if self._counts(event)]
        if finish_reason == "stop" and self._has_call:
            finish_reason = "tool_calls"
        return events, finish_reason

    def _counts(self, event: Event) -> bool:
        if isinstance(event, (ContentDelta, ReasoningDelta)):
            return True
        if isinstance(event, Malformed):
            _log.warning("malformed tool call: %s", event.reason)
        if self._keeps_one_call and event.index:
            return False
        if isinstance(event, ToolCallEnd):
            self._has_call = True
        return True


def _message(events: Iterable[Event]) -> ChatMessage:
    content, reasoning = "", ""
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            content += event.text
        elif isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            calls[event.index] = ToolCall(
                index=event.index, id=event.id, type="function", function=FunctionCall(name=event.name)
            )
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.index, ToolCall(index=event.index, function=FunctionCall()))
            call.function.arguments += event.text
    message = ChatMessage(reasoning_content=reasoning or None, tool_calls=list(calls.values()) or None)
    if content:
        message.content = content
    return message
