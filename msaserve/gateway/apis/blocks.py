"""One chat output as a row of blocks - thinking, text, calls -, for APIs whose answers are such rows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal, NamedTuple

from msaserve.gateway.apis.translate import Translation
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Malformed,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from msaserve.gateway.stream import Delta, Generation

BlockKind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    kind: BlockKind
    number: int
    """Its place in the row."""
    call_id: str = ""
    name: str = ""
    """Of the called tool."""
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False
    """Of a call: its text is one JSON object. Of a text: it was not cut off."""
    source: str = ""
    """A call that broke off, as the model wrote it."""

    @property
    def text(self) -> str:
        """Of a call: its arguments, JSON as far as they go."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """What happened to a block. A block is closed before the next is opened."""

    kind: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""
    """What it grew by."""


class Blocks:
    """The blocks of one output, in order."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, events: Iterable[Event]) -> list[Step]:
        steps: list[Step] = []
        for event in events:
            if isinstance(event, ContentDelta):
                self._grow("text", event.text, steps)
            elif isinstance(event, ReasoningDelta):
                self._grow("thinking", event.text, steps)
            elif isinstance(event, ToolCallStart):
                self._begin("call", steps, event.id, event.name)
            elif isinstance(event, ArgumentsDelta):
                self._grow("call", event.text, steps)
            elif isinstance(event, ToolCallEnd):
                self._close(steps, is_complete=True)
            else:
                assert isinstance(event, Malformed)
                if event.index is not None:
                    assert self._open is not None
                    self._open.source = event.text
                    self._close(steps, is_complete=False)
        return steps

    def finish(self, finish_reason: str) -> list[Step]:
        steps: list[Step] = []
        self._close(steps, is_complete=finish_reason != "length")
        return steps

    def _grow(self, kind: BlockKind, text: str, steps: list[Step]) -> None:
        if self._open is None or self._open.kind != kind:
            assert kind != "call"
            self._begin(kind, steps)
        assert self._open is not None
        self._open.pieces.append(text)
        steps.append(Step("grew", self._open, text))

    def _begin(self, kind: BlockKind, steps: list[Step], call_id: str = "", name: str = "") -> None:
        self._close(steps, is_complete=True)
        self._open = Block(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        steps.append(Step("opened", self._open))

    def _close(self, steps: list[Step], *, is_complete: bool) -> None:
        if self._open is not None:
            self._open.is_complete = is_complete
            steps.append(Step("closed", self._open))
            self._open = None


class BlockAnswer(ABC):
    """How one such API writes its answers. One answer has one output."""

    id_prefix: str

    def __init__(self, output: ChatOutput, chat: Translation, *, model: str) -> None:
        """chat: of the request, for what is said of it once its stream is open."""
        self.model = model
        self.id = f"{self.id_prefix}_{token_hex(16)}"
        self.created = int(time.time())
        self.blocks = Blocks()
        self.finish_reason: str | None = None
        self.num_thinking_tokens = 0
        """Tokens that came with pieces of thinking, its opening marker included."""
        self._output = output
        self._chat = chat
        self._num_counted_tokens = 0

    @abstractmethod
    def begin(self, generation: Generation) -> bytes:
        """The events before any of a block."""

    @abstractmethod
    def events(self, step: Step) -> bytes: ...

    @abstractmethod
    def end(self, generation: Generation) -> bytes:
        """The events behind the last block."""

    @abstractmethod
    def whole(self, generation: Generation) -> bytes:
        """The answer as one JSON object, once the output has ended."""

    async def collect(self, generation: Generation) -> bytes:
        async with aclosing(generation.deltas()) as deltas:
            async for _, delta in deltas:
                self._read(delta, generation)
        return self.whole(generation)

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The answer's events, as they are sent."""
        is_begun = False
        with self._chat.own_names():
            async with aclosing(generation.deltas()) as deltas:
                async for _, delta in deltas:
                    if not is_begun:
                        is_begun = True
                        yield self.begin(generation)
                    events = b"".join([self.events(step) for step in self._read(delta, generation)])
                    if events:
                        yield events
        yield self.end(generation)

    def _read(self, delta: Delta, generation: Generation) -> list[Step]:
        events, self.finish_reason = self._output.read(delta.text, delta.finish_reason)
        if events:
            num_tokens = generation.num_output_tokens
            if isinstance(events[0], ReasoningDelta):
                self.num_thinking_tokens += num_tokens - self._num_counted_tokens
            self._num_counted_tokens = num_tokens
        steps = self.blocks.push(events)
        return steps if self.finish_reason is None else steps + self.blocks.finish(self.finish_reason)
