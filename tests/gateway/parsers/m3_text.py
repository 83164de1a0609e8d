"""What M3 writes, as its template renders it, and what a parser makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from msaserve.gateway.parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Malformed,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
    merge,
)
from msaserve.gateway.parsers.minimax_m3 import MiniMaxM3Parser

NS = "]<]minimax[>["
MARKERS = (NS, "<mm:think>", "</mm:think>")


def element(key: str, value: Any) -> str:
    return f"{NS}<{key}>{inside(value)}{NS}</{key}>"


def inside(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(element(key, one) for key, one in value.items() if one is not None)
    if isinstance(value, list):
        return "".join(element("item", one) for one in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def invoke(name: str, arguments: dict[str, Any]) -> str:
    return f'{NS}<invoke name="{name}">{inside(arguments)}{NS}</invoke>'


def block(*invokes: str) -> str:
    return f"{NS}<tool_call>\n" + "\n".join(invokes) + f"\n{NS}</tool_call>"


def parse(pieces: str | Iterable[str], tools: dict[str, Any] | None = None, **options: Any) -> list[Event]:
    """Merged events; ids count up."""
    ids = iter(range(10**6))
    parser = MiniMaxM3Parser(tools, new_id=lambda: f"id{next(ids)}", **options)
    events: list[Event] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        events += parser.feed(piece)
    return merge([*events, *parser.finish()])


class Read:
    """Events, put together as a client would."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[list[str]] = []
        """[name, arguments]"""
        self.ended: list[int] = []
        self.malformed: list[Malformed] = []
        for event in events:
            if isinstance(event, ContentDelta):
                self.content += event.text
            elif isinstance(event, ReasoningDelta):
                self.reasoning += event.text
            elif isinstance(event, ToolCallStart):
                assert event.index == len(self.calls)
                self.calls.append([event.name, ""])
            elif isinstance(event, ArgumentsDelta):
                assert event.index == len(self.calls) - 1
                assert event.index not in self.ended
                self.calls[-1][1] += event.text
                assert is_json_beginning(self.calls[-1][1])
            elif isinstance(event, ToolCallEnd):
                assert isinstance(json.loads(self.calls[event.index][1]), dict)
                self.ended.append(event.index)
            else:
                self.malformed.append(event)

    @property
    def arguments(self) -> list[Any]:
        assert self.ended == list(range(len(self.calls)))
        return [json.loads(arguments) for _, arguments in self.calls]

    @property
    def everything(self) -> str:
        calls = (part for call in self.calls for part in call)
        return "\0".join([self.content, self.reasoning, *calls, *(m.text for m in self.malformed)])


def is_json_beginning(text: str) -> bool:
    """Of an object; it ends behind a value or inside a top-level string."""
    for tail in ("", "}", '"}'):
        try:
            return isinstance(json.loads(text + tail), dict)
        except ValueError:
            pass
    return False
