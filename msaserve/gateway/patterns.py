"""Regular expressions of JSON schemas (ECMA 262) and formats of strings, as terminals of llguidance's Lark."""

from __future__ import annotations

import re

_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_NAMED_GROUP = re.compile(r"\(\?<[A-Za-z_$][\w$]*>")
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "D": "^0-9", "W": "^A-Za-z0-9_"}
_DATE = r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}",
}
"""Of others nothing is known: they say what a string is for."""


class PatternError(ValueError):
    """An expression that cannot be enforced, and why."""


def whole(pattern: str) -> str:
    """The expression of the texts in which an ECMA pattern is found.

    Anchors may stand at the ends of the pattern and of its outermost alternatives.

    Raises:
        PatternError: it looks around, refers back, or is none.
    """
    alternatives = [_whole(body, *ends) for body, *ends in _Reader(pattern).alternatives()]
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _whole(body: str, is_start: bool, is_end: bool) -> str:
    before, behind = "" if is_start else "(?s:.*)", "" if is_end else "(?s:.*)"
    return f"{before}{body}{behind}"


class _Reader:
    """One pass over a pattern, rewriting what Rust's syntax has otherwise."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def alternatives(self) -> list[tuple[str, bool, bool]]:
        """(expression without anchors, begins with ^, ends with $) of each outermost alternative."""
        found: list[tuple[str, bool, bool]] = []
        parts: list[str] = []
        is_start = is_end = False
        depth = 0
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if is_end and not (char == "|" and depth == 0):
                raise PatternError("$ may stand at an end only")
            if char == "^":
                if depth or parts or is_start:
                    raise PatternError("^ may stand at a beginning only")
                is_start = True
                self._at += 1
            elif char == "$":
                if depth:
                    raise PatternError("$ may stand at an end only")
                is_end = True
                self._at += 1
            elif char == "|" and depth == 0:
                found.append(("".join(parts), is_start, is_end))
                parts, is_start, is_end = [], False, False
                self._at += 1
            else:
                depth += (char == "(") - (char == ")")
                if depth < 0:
                    raise PatternError("a ) has no (")
                parts.append(self._next(char))
        if depth:
            raise PatternError("a ( has no )")
        return [*found, ("".join(parts), is_start, is_end)]

    def _next(self, char: str) -> str:
        if char == "\\":
            return self._escape(in_class=False)
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        quantifier = _QUANTIFIER.match(self._pattern, self._at)
        text = quantifier.group() if quantifier else char
        self._at += len(text)
        if quantifier or char in "*+?":
            if self._pattern[self._at : self._at + 1] == "?":  # how eagerly it matches is no matter
                self._at += 1
            return text
        return "\\" + char if char in "{}]" else char

    def _group(self) -> str:
        named = _NAMED_GROUP.match(self._pattern, self._at)
        start = self._pattern[self._at : self._at + 3]
        opener = named.group() if named else "(?:" if start == "(?:" else "("
        if opener == "(" and start.startswith("(?"):
            raise PatternError(f"{start} is not supported")
        self._at += len(opener)
        return "(?:"

    def _class(self) -> str:
        self._at += 1
        parts = ["["]
        if self._pattern.startswith("^", self._at):
            parts.append("^")
            self._at += 1
        while True:
            char = self._pattern[self._at : self._at + 1]
            if not char:
                raise PatternError("a [ has no ]")
            if char == "]":
                self._at += 1
                if parts in (["["], ["[", "^"]):
                    raise PatternError("[] is not supported")
                return "".join(parts) + "]"
            if char == "\\":
                parts.append(self._escape(in_class=True))
            else:
                parts.append("\\" + char if char in "[&~" else char)
                self._at += 1

    def _escape(self, *, in_class: bool) -> str:
        code = self._pattern[self._at + 1 : self._at + 2]
        if not code:
            raise PatternError("it ends in a \\")
        self._at += 2
        if code in "dD" or code in "wW":
            is_open = in_class and code.islower()
            return _CLASSES[code] if is_open else f"[{_CLASSES[code]}]"
        if code in "sSnrtfv":
            return "\\" + code
        if code == "0":
            return "\\x00"
        if code == "b" and in_class:
            return "\\x08"
        if code in "xu":
            digits = re.compile(r"[0-9a-fA-F]{2}" if code == "x" else r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]+\}")
            found = digits.match(self._pattern, self._at)
            if found is None:
                raise PatternError(f"\\{code} needs hexadecimal digits")
            self._at = found.end()
            return f"\\{code}{found.group()}"
        if code in "pP":
            found = re.compile(r"\{[\w=]+\}").match(self._pattern, self._at)
            if found is None:
                raise PatternError(f"\\{code} needs a property")
            self._at = found.end()
            return f"\\{code}{found.group()}"
        if code.isalnum():
            raise PatternError(f"\\{code} is not supported")
        return "\\" + code if code.isascii() else code
