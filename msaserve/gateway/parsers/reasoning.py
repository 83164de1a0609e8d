"""Which part of an output is reasoning and which is content. Knows no spelling: the caller finds the markers."""

from __future__ import annotations

from typing import Literal

from msaserve.gateway.parsers.events import ContentDelta, Event, ReasoningDelta

ThinkingMode = Literal["adaptive", "enabled", "disabled"]
"""enabled: the prompt ends with the opening marker, the output begins inside reasoning. disabled: it ends with the
closing one. adaptive: the model decides."""


class Reasoning:
    """Sorts the text between markers.

    - Text before the opener is content. Only the first opener opens; with thinking disabled only one that nothing but
      whitespace precedes.
    - The first closer ends reasoning, and so does a tool call. Closers at the very start, or with only whitespace
      between them and another marker, are dropped, also a stray one of a block of calls, and so is the one that a tool
      call came before. Any other is text.
    - Whitespace that stands alone between markers, or between one and the end, belongs to neither.
    """

    def __init__(self, mode: ThinkingMode, events: list[Event]) -> None:
        """events: where what is found goes."""
        self._events = events
        self._mode = mode
        self._is_open = mode == "enabled"
        self._was_open = self._is_open
        self._owes_closer = False
        self._has_marker = False
        self._has_content = False
        self._is_edge = True
        """Nothing but whitespace since the start or the last marker."""
        self._space: list[str] = []

    def text(self, text: str) -> None:
        """Text where the output is now."""
        if not text:
            return
        if self._is_edge:
            self._space.append(text)
            if text.isspace():
                return
            text = "".join(self._space)
            self._space.clear()
            self._is_edge = False
        if self._is_open:
            self._events.append(ReasoningDelta(text))
        else:
            self._has_content = True
            self._events.append(ContentDelta(text))

    def content(self, text: str) -> None:
        """Text that ends reasoning."""
        if self._is_open:
            self._is_open = False
            self._owes_closer = True
        self.text(text)

    def opener(self) -> bool:
        """The opening marker stands here. False if it is text."""
        if self._is_open:
            is_marker = self._is_edge
        else:
            is_marker = not self._was_open and (self._mode != "disabled" or not self._has_content)
        if is_marker:
            self._is_open = self._was_open = True
            self._mark()
        return is_marker

    def closer(self) -> bool:
        """The closing marker stands here. False if it is text."""
        if not (self._is_open or self._is_edge or self._owes_closer):
            return False
        if self._is_open or self._is_edge:
            self._mark()
        self._is_open = self._owes_closer = False
        return True

    def call(self) -> None:
        """A tool call begins or ends here."""
        self._owes_closer |= self._is_open
        self._is_open = False
        self._mark()

    def stray(self) -> bool:
        """The end of a block of calls that never began stands here. False if it is text."""
        if self._is_edge:
            self._mark()
        return self._is_edge

    def finish(self) -> None:
        """No text follows."""
        if self._space and not self._has_marker:
            self._is_edge = False
            text = "".join(self._space)
            self._space.clear()
            self.text(text)

    def _mark(self) -> None:
        self._has_marker = True
        self._is_edge = True
        self._space.clear()
