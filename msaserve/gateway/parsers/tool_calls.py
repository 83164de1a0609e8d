"""M3's tool calls in a text stream.

    NS<tool_call> (NS<invoke name="NAME"> (NS<KEY> text or elements NS</KEY>)* NS</invoke>)+ NS</tool_call>

What models get wrong and is understood all the same is listed in docs/chat.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msaserve.gateway.parsers.arguments import ArgumentWriter, MalformedCallError
from msaserve.gateway.parsers.events import ArgumentsDelta, Event, Malformed, ToolCallEnd, ToolCallStart
from msaserve.gateway.parsers.reasoning import Reasoning
from msaserve.gateway.parsers.schema import ToolSchema
from msaserve.gateway.parsers.tags import NS, Step, Tag, TagReader, end_of_space, held_suffix

_BLOCK_END = "</tool_call>"
_BARE_TAGS = ("<invoke", _BLOCK_END)
"""Understood without an NS where only they can stand."""
_MAX_BARE_KEY_CHARS = 128
_MAX_REASON_CHARS = 200
_NO_SCHEMA = ToolSchema(None)


class _Call:
    """An invocation whose end has not come."""

    def __init__(self, name: str, schema: ToolSchema) -> None:
        self.name = name
        self.arguments = ArgumentWriter(schema)
        self.index: int | None = None
        """Once it has been announced."""
        self.error: str | None = None


class ToolCalls:
    """Reads from the first NS of a block to its end.

    A call is announced with the first piece of its arguments. What comes to nothing before is given back as text.
    """

    def __init__(
        self,
        schemas: Mapping[str, ToolSchema],
        reasoning: Reasoning,
        events: list[Event],
        new_id: Callable[[], str],
    ) -> None:
        """schemas: by tool name. reasoning: takes what is text after all. events: take the calls."""
        self._schemas = schemas
        self._reasoning = reasoning
        self._events = events
        self._new_id = new_id
        self._num_calls = 0
        self._state: Literal["outside", "between", "element", "bare", "broken"] = "outside"
        self._tag: TagReader | None = None
        self._in_block = False
        self._call: _Call | None = None
        self._raw: list[str] = []
        """Of the open call with what stands before it in its block, or of a block that has no call yet."""
        self._bare: list[str] = []
        """A closer without its NS and the whitespace after it: a closer if a tag follows, else text."""
        self._next_ns = ("", 0)
        """The text that is read and where its next NS begins, or its end: looked for once, not for every element."""

    @property
    def is_reading(self) -> bool:
        return self._tag is not None or self._state != "outside"

    def begin(self) -> None:
        """An NS has been read."""
        self._tag = TagReader(NS)

    def read(self, text: str, position: int) -> Step:
        """Read on from a position. What is not consumed must come again, with more behind it."""
        if self._tag is not None:
            step = self._read_tag(self._tag, text, position)
        elif self._state == "between":
            step = self._read_between(text, position)
        elif self._state == "bare":
            step = self._read_bare(text, position)
        else:
            step = self._read_element(text, position)
        if self._call is not None:
            self._send(self._call)
        return step

    def finish(self, rest: str) -> None:
        """The output ends with `rest`, which was not consumed."""
        tail = (self._tag.raw if self._tag is not None else "") + rest
        call = self._call
        if call is None:
            if self._raw:
                self._reasoning.content("".join(self._raw) + tail)
                self._report("the output ends in a block of tool calls", "".join(self._raw) + tail)
            elif not (self._in_block and ((NS + _BLOCK_END).startswith(tail) or _BLOCK_END.startswith(tail))):
                self._reasoning.text(tail)
                self._report("the output ends in a tag of tool calls", tail)
        else:
            bare = "".join(self._bare)
            if call.index is not None and call.error is None and self._tag is None:
                call.arguments.text(bare + rest)
                self._send(call)
            self._raw += (bare, tail)
            self._drop(call, call.error or "the output ends in a tool call")
        self._tag, self._state, self._raw, self._bare = None, "outside", [], []

    def _read_tag(self, reader: TagReader, text: str, position: int) -> Step:
        step = reader.read(text, position)
        if reader.tag is not None:
            self._tag = None
            self._take_tag(reader.tag)
        elif reader.text is not None:
            self._tag = TagReader(NS) if reader.has_next else None
            self._take_no_tag(reader.text)
        return step

    def _read_between(self, text: str, position: int) -> Step:
        """Outside of calls: whitespace, then a tag, or the end of the block."""
        end = end_of_space(text, position)
        if self._raw:
            self._raw.append(text[position:end])
        else:
            self._reasoning.text(text[position:end])
        rest = text[end : end + len(NS)]
        if rest == NS:
            self._tag = TagReader(NS)
            return Step(end + len(NS), True)
        if not rest or NS.startswith(rest):
            return Step(end, False)
        for tag in _BARE_TAGS:
            if rest.startswith(tag):
                self._tag = TagReader("")
                return Step(end, True)
            if tag.startswith(rest):
                return Step(end, False)
        self._state = "outside"
        if self._raw:
            self._give_back("")
        return Step(end, True)

    def _read_element(self, text: str, position: int) -> Step:
        """Text up to the next NS, in an element or in what is left of a broken call."""
        call = self._call
        assert call is not None
        markers: tuple[str, ...] = (NS,)
        if call.error is None and len(call.arguments.key) <= _MAX_BARE_KEY_CHARS:
            markers = (NS, f"</{call.arguments.key}>")
        end, marker = self._find_ns(text, position), NS
        if len(markers) > 1 and (bare := text.find(markers[1], position, end)) >= 0:
            end, marker = bare, markers[1]
        elif end == len(text):
            end -= held_suffix(text, markers, position)
            self._add_text(text[position:end])
            return Step(end, False)
        self._add_text(text[position:end])
        if marker == NS:
            self._tag = TagReader(NS)
        else:
            self._bare = [marker]
            self._state = "bare"
        return Step(end + len(marker), True)

    def _find_ns(self, text: str, position: int) -> int:
        known, at = self._next_ns
        if known is not text or at < position:
            at = text.find(NS, position)
            self._next_ns = (text, len(text) if at < 0 else at)
        return self._next_ns[1]

    def _read_bare(self, text: str, position: int) -> Step:
        end = end_of_space(text, position)
        self._bare.append(text[position:end])
        rest = text[end : end + len(NS)]
        if rest == NS:
            self._tag = TagReader(NS)
            return Step(end + len(NS), True)
        if NS.startswith(rest):
            return Step(end, False)
        self._add_text(self._take_bare())
        self._state = "element"
        return Step(end, True)

    def _take_tag(self, tag: Tag) -> None:
        if self._call is not None and not self._ends_call(self._call, tag):
            return
        tool = tag.tool
        if tool is not None:
            self._raw.append(tag.raw)
            self._call = _Call(tool, self._schemas.get(tool, _NO_SCHEMA))
            self._in_block = True
            self._state = "element"
        elif tag.name == "tool_call":
            self._raw.append(tag.raw)
            self._in_block = True
            self._state = "between"
        elif tag.name == "/tool_call" and self._in_block and not self._raw:
            self._in_block = False
            self._state = "outside"
            self._reasoning.call()
        elif tag.name == "/tool_call" and not self._raw and self._reasoning.stray():
            self._state = "outside"
        else:
            self._state = "outside"
            self._give_back(tag.raw)

    def _take_no_tag(self, text: str) -> None:
        """An NS without a tag is text."""
        if self._call is not None:
            self._add_text(self._take_bare() + text)
            self._state = "broken" if self._call.error is not None else "element"
        elif self._raw:
            self._state = "outside"
            self._give_back(text)
        else:
            self._state = "outside"
            self._reasoning.text(text)

    def _ends_call(self, call: _Call, tag: Tag) -> bool:
        """Apply a tag to the open call. True if the call is over and the tag stands behind it."""
        if call.error is not None:
            return self._ends_broken_call(call, tag)
        arguments = call.arguments
        closes = tag.closes
        if self._bare:
            bare = self._take_bare()
            if closes == arguments.key and arguments.depth:
                self._add_text(bare)
            else:
                self._raw.append(bare)
                if arguments.depth:
                    arguments.close_one()
        self._state = "element"
        if closes is not None and arguments.is_open(closes):
            arguments.close(closes)
        elif tag.name == "/invoke":
            self._complete(call)
            self._state = "between"
            return False
        elif tag.tool is not None or tag.name == "/tool_call":
            if arguments.depth == 0:
                self._complete(call)
            else:
                self._send(call)
                self._drop(call, f"the argument {arguments.key!r} has no end")
            return True
        elif closes is not None:
            self._break(call, f"{tag.raw!r} closes nothing")
        elif not tag.body:
            self._add_text(tag.raw)
            return False
        else:
            try:
                arguments.open(tag.body)
            except MalformedCallError as error:
                self._break(call, str(error))
        self._raw.append(tag.raw)
        return False

    def _ends_broken_call(self, call: _Call, tag: Tag) -> bool:
        assert call.error is not None
        if tag.tool is not None or tag.name == "/tool_call":
            self._drop(call, call.error)
            return True
        self._raw.append(tag.raw)
        if tag.name == "/invoke":
            self._drop(call, call.error)
            self._state = "between"
        return False

    def _add_text(self, text: str) -> None:
        call = self._call
        assert call is not None
        if text:
            self._raw.append(text)
            if call.error is None:
                call.arguments.text(text)

    def _take_bare(self) -> str:
        text = "".join(self._bare)
        self._bare = []
        return text

    def _send(self, call: _Call) -> None:
        text = call.arguments.take()
        if not text:
            return
        if call.index is None:
            self._reasoning.call()
            call.index = self._num_calls
            self._num_calls += 1
            self._events.append(ToolCallStart(call.index, self._new_id(), call.name))
        self._events.append(ArgumentsDelta(call.index, text))

    def _complete(self, call: _Call) -> None:
        call.arguments.finish()
        self._send(call)
        assert call.index is not None
        self._events.append(ToolCallEnd(call.index))
        self._reasoning.call()
        self._call, self._raw = None, []

    def _break(self, call: _Call, reason: str) -> None:
        """Nothing more of this call can be understood; its rest is passed over."""
        self._send(call)
        call.error = reason
        self._state = "broken"

    def _drop(self, call: _Call, reason: str) -> None:
        """A broken call is over."""
        raw = "".join(self._raw)
        self._call, self._raw, self._bare = None, [], []
        if call.index is None:
            self._reasoning.content(raw)
        else:
            self._reasoning.call()
        self._report(reason, raw, call.index)

    def _give_back(self, text: str) -> None:
        """What was read is no call: text, where it stands."""
        if self._raw:
            self._in_block = False
        raw = "".join(self._raw) + text
        self._raw = []
        self._reasoning.text(raw)
        self._report("a tag of tool calls that begins no call", raw)

    def _report(self, reason: str, raw: str, index: int | None = None) -> None:
        if raw:
            self._events.append(Malformed(reason[:_MAX_REASON_CHARS], raw, index))
