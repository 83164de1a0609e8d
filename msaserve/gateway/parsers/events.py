"""What a parser finds in a text stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call, as soon as a piece of its arguments is known."""

    index: int
    """Counts the calls of one output."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next piece of a call's arguments. The pieces so far always are the beginning of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete: its pieces are one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call or block that breaks the grammar, or that the output ends in.

    index: of the call, when a ToolCallStart went before. Its arguments stay the beginning of an object: nobody can
        take half a call for a whole one. None: its text is in the content.
    text: all of it, as the model wrote it.
    """

    reason: str
    text: str
    index: int | None = None


Event: TypeAlias = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd | Malformed


def merge(events: Iterable[Event]) -> list[Event]:
    """The same with neighbouring deltas of one kind in one."""
    merged: list[Event] = []
    # The pieces of the last one are joined once, when another kind follows.
    pieces: list[str] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, (ContentDelta, ReasoningDelta, ArgumentsDelta)):
            if type(event) is type(last):
                pieces.append(event.text)
                continue
            _close(merged, pieces)
            pieces = [event.text]
        else:
            _close(merged, pieces)
            pieces = []
        merged.append(event)
    _close(merged, pieces)
    return merged


def _close(merged: list[Event], pieces: list[str]) -> None:
    if len(pieces) > 1:
        last = merged[-1]
        text = "".join(pieces)
        if isinstance(last, ArgumentsDelta):
            merged[-1] = ArgumentsDelta(last.index, text)
        else:
            merged[-1] = ContentDelta(text) if isinstance(last, ContentDelta) else ReasoningDelta(text)
