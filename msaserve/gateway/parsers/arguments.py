"""The arguments of one call, written as JSON while the model writes them as elements."""

from __future__ import annotations

from typing import Any

from msaserve.gateway.parsers.schema import MAX_DEPTH, Element, ToolSchema, json_object, to_json


class MalformedCallError(Exception):
    """The call breaks the grammar; the message says how."""


class ArgumentWriter:
    """Elements in, pieces of one JSON object out.

    A top-level argument whose schema says string (or string and null) is written as its text comes. Any other is
    written when the next begins or the call ends: its type is only known at its end, and the same key may follow
    again and make it a list.
    """

    def __init__(self, schema: ToolSchema) -> None:
        self._schema = schema
        self._root = Element("invoke")
        self._open: list[Element] = [self._root]
        self._pieces: list[str] = []
        self._written: set[str] = set()
        self._pending: tuple[str, Any, bool] | None = None
        """Key, value, and whether the value is several."""
        self._argument_schema: Any = None
        self._is_string = False
        self._is_nullable = False
        self._is_streaming = False
        """The opening quote of the string has been written."""
        self._head: list[str] = []
        """Of a string that is not streaming yet."""

    @property
    def key(self) -> str:
        """Of the innermost open element; "invoke" outside of all."""
        return self._open[-1].key

    @property
    def depth(self) -> int:
        return len(self._open) - 1

    def is_open(self, key: str) -> bool:
        return any(element.key == key for element in self._open[1:])

    def take(self) -> str:
        """What has been written since the last time."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def open(self, key: str) -> None:
        """Raises MalformedCallError."""
        if self.depth >= MAX_DEPTH:
            raise MalformedCallError(f"elements are nested more than {MAX_DEPTH} deep")
        element = Element(key)
        if self.depth == 0:
            self._begin(key)
        else:
            if self._is_string:
                if self._is_streaming or self._head:
                    raise MalformedCallError(f"an element {key!r} inside the text of {self.key!r}")
                self._is_string = False
            self._open[-1].parts.append(element)
        self._open.append(element)

    def text(self, text: str) -> None:
        if not self._is_string:
            self._open[-1].parts.append(text)
        elif self._is_streaming:
            self._pieces.append(_escaped(text))
        else:
            self._head.append(text)
            head = "".join(self._head)
            # A text that may still become null waits: at most four characters.
            if not (self._is_nullable and "null".startswith(head)):
                self._head.clear()
                self._write_key(self.key)
                self._pieces += ('"', _escaped(head))
                self._is_streaming = True

    def close(self, key: str) -> None:
        """Close the innermost open element of that key, and with it what is open inside."""
        while self.close_one() != key:
            pass

    def close_one(self) -> str:
        """Close the innermost open element; its key."""
        element = self._open.pop()
        if self.depth == 0:
            self._end(element)
        return element.key

    def finish(self) -> None:
        """The call is complete."""
        while self.depth:
            self.close_one()
        self._flush()
        text = self._root.text
        if text.strip():
            whole = None if self._written else json_object(text)
            if whole is not None:
                self._pieces.append(to_json(whole))
                return
            key = "$text"
            while key in self._written:
                key = "$" + key
            self._write(key, text.strip())
        self._pieces.append("}" if self._written else "{}")

    def _begin(self, key: str) -> None:
        is_repeated = self._pending is not None and self._pending[0] == key
        if not is_repeated:
            self._flush()
        if key in self._written:
            raise MalformedCallError(f"the argument {key!r} comes again after it was sent")
        self._argument_schema = self._schema.argument(key)
        types = self._schema.types(self._argument_schema)
        self._is_string = not is_repeated and "string" in types and set(types) <= {"string", "null"}
        self._is_nullable = "null" in types
        self._is_streaming = False
        self._head.clear()

    def _end(self, element: Element) -> None:
        if self._is_streaming:
            self._pieces.append('"')
            self._is_string = self._is_streaming = False
            return
        if self._is_string:
            head = "".join(self._head)
            self._is_string = False
            self._write(element.key, None if head == "null" else head)
            return
        value = self._schema.value(element, self._argument_schema)
        if self._pending is None:
            self._pending = (element.key, value, False)
        else:
            key, values, is_list = self._pending
            self._pending = (
                key,
                self._schema.joined(values, value, self._argument_schema, is_list=is_list),
                True,
            )

    def _flush(self) -> None:
        if self._pending is not None:
            key, value, _ = self._pending
            self._pending = None
            self._write(key, value)

    def _write(self, key: str, value: Any) -> None:
        self._write_key(key)
        self._pieces.append(to_json(value))

    def _write_key(self, key: str) -> None:
        self._pieces += ("{" if not self._written else ", ", to_json(key), ": ")
        self._written.add(key)


def _escaped(text: str) -> str:
    return to_json(text)[1:-1]
