"""The tags of M3's tool calls: NS, `<`, anything but `>`, `>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

NS = "]<]minimax[>["
"""Before every tag. Nothing else makes one: `<`, `>` and `&` alone are text."""
_SPACE = re.compile(r"\s*")
_INVOKE = re.compile(r"""\s*invoke\s+name\s*=\s*(?:"\s*([^"]*[^"\s])\s*"|'\s*([^']*[^'\s])\s*'|([^\s"']+))\s*""")
_MAX_INVOKE_CHARS = 512
"""Of a tag that names a tool: the pattern takes the square of its spaces."""
_HEAD = NS[:-2]
"""Of an NS up to its `>`."""


class Step(NamedTuple):
    """How far a text has been read, and whether it can be read on before more of it comes."""

    position: int
    can_go_on: bool


@dataclass(frozen=True, slots=True)
class Tag:
    raw: str
    body: str
    """What stands between `<` and `>`."""

    @property
    def name(self) -> str:
        """Of a tag that is none of the arguments'."""
        return self.body.strip()

    @property
    def tool(self) -> str | None:
        """The tool that it invokes. Quotes are optional."""
        match = _INVOKE.fullmatch(self.body) if len(self.body) <= _MAX_INVOKE_CHARS else None
        return next(group for group in match.groups() if group) if match else None

    @property
    def closes(self) -> str | None:
        """The key of what it closes."""
        return self.body[1:] if self.body.startswith("/") else None


class TagReader:
    """Reads what follows an NS. Every character is looked at once, however the text is cut."""

    def __init__(self, prefix: str) -> None:
        """prefix: what has been read, an NS, or nothing where a tag may stand without one."""
        self._pieces = [prefix]
        self._has_bracket = False
        self.tag: Tag | None = None
        self.text: str | None = None
        """What has been read, if it is no tag."""
        self.has_next = False
        """It is no tag because another NS begins inside, and has been read."""

    @property
    def raw(self) -> str:
        return "".join(self._pieces)

    def read(self, text: str, position: int) -> Step:
        """Read on until `tag` or `text` is there. Whitespace may stand between NS and `<`."""
        if not self._has_bracket:
            end = end_of_space(text, position)
            self._pieces.append(text[position:end])
            position = end
            if position == len(text):
                return Step(position, False)
            if text[position] != "<":
                self.text = self.raw
                return Step(position, True)
            self._has_bracket = True
        end = text.find(">", position)
        self._pieces.append(text[position : end if end >= 0 else len(text)])
        if end < 0:
            return Step(len(text), False)
        raw = self.raw
        if raw.endswith(_HEAD):
            # A key may end like this, unless the NS becomes whole.
            if end + 1 == len(text):
                return Step(end, False)
            if text[end + 1] == NS[-1]:
                self.text, self.has_next = raw[: -len(_HEAD)], True
                return Step(end + 2, True)
        body = raw[len(NS) :].lstrip() if raw.startswith(NS) else raw
        self.tag = Tag(raw + ">", body[1:])
        return Step(end + 1, True)


def end_of_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def held_suffix(text: str, markers: tuple[str, ...], start: int = 0) -> int:
    """How many characters at the end of text[start:] may begin one of the markers and are less than all of it."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
