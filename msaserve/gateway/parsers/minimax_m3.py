"""MiniMax-M3's output, read as it comes: reasoning, content and tool calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from msaserve.gateway.parsers.events import Event, merge
from msaserve.gateway.parsers.reasoning import Reasoning, ThinkingMode
from msaserve.gateway.parsers.schema import ToolSchema
from msaserve.gateway.parsers.tags import NS, Step, held_suffix
from msaserve.gateway.parsers.tool_calls import ToolCalls

THINK_OPENER = "<mm:think>"
THINK_CLOSER = "</mm:think>"
MARKER_TOKENS = (THINK_OPENER, THINK_CLOSER, NS, "<tool_call>", "</tool_call>")
"""Tokens that the parser must see, whether a tokenizer calls them special or not."""


def thinking_mode(last_token: str) -> ThinkingMode:
    """How an output begins whose prompt ends with this token."""
    if last_token == THINK_OPENER:
        return "enabled"
    return "disabled" if last_token == THINK_CLOSER else "adaptive"


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class MiniMaxM3Parser:
    """Text of one output in, events out. However the text is cut, the events say the same (see `merge`).

    Only generated text is parsed: whether it begins inside reasoning is known from the request, never looked for in
    the prompt, whose instructions spell the markers too.
    """

    def __init__(
        self,
        tools: Mapping[str, Any] | None = None,
        *,
        thinking: ThinkingMode = "adaptive",
        parses_calls: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """tools: JSON schema of the parameters by tool name; calls of other tools are parsed without one.

        parses_calls: False leaves the markup of calls where it stands.
        """
        self._events: list[Event] = []
        self._reasoning = Reasoning(thinking, self._events)
        schemas = {name: ToolSchema(parameters) for name, parameters in (tools or {}).items()}
        self._calls = ToolCalls(schemas, self._reasoning, self._events, new_id)
        self._markers = (THINK_OPENER, THINK_CLOSER, NS) if parses_calls else (THINK_OPENER, THINK_CLOSER)
        self._marker = re.compile("|".join(map(re.escape, self._markers)))
        self._held = ""

    def feed(self, text: str) -> list[Event]:
        """What the next text of the output makes certain."""
        text = self._held + text
        position, can_go_on = 0, bool(text)
        while can_go_on:
            read = self._calls.read if self._calls.is_reading else self._read_text
            position, can_go_on = read(text, position)
        self._held = text[position:]
        return self._take()

    def finish(self) -> list[Event]:
        """The rest, when the output is over. Nothing may be fed afterwards."""
        if self._calls.is_reading:
            self._calls.finish(self._held)
        else:
            self._reasoning.text(self._held)
        self._held = ""
        self._reasoning.finish()
        return self._take()

    def _read_text(self, text: str, position: int) -> Step:
        found = self._marker.search(text, position)
        if found is None:
            end = len(text) - held_suffix(text, self._markers, position)
            self._reasoning.text(text[position:end])
            return Step(end, False)
        self._reasoning.text(text[position : found.start()])
        marker = found.group()
        if marker == NS:
            self._calls.begin()
        elif not (self._reasoning.opener() if marker == THINK_OPENER else self._reasoning.closer()):
            self._reasoning.text(marker)
        return Step(found.end(), True)

    def _take(self) -> list[Event]:
        events = merge(self._events) if len(self._events) > 1 else list(self._events)
        self._events.clear()
        return events
