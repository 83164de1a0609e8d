"""Pieces of grammars in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between two elements of JSON. A model that may write any of it can write nothing else for ever."""


class Literals:
    """Texts as Lark, in which what spells an added token is that token."""

    def __init__(self, added: Iterable[tuple[str, int]]) -> None:
        """added: spelling and id of the tokens that no plain text becomes (`Tokenizer.added_tokens`)."""
        self.ids = {text: token for text, token in added if text}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, text: str) -> str:
        terms: list[str] = []
        end = 0
        for found in self._pattern.finditer(text):
            if found.start() > end:
                terms.append(quoted(text[end : found.start()]))
            terms.append(f"<[{self.ids[found.group()]}]>")
            end = found.end()
        if end < len(text) or not terms:
            terms.append(quoted(text[end:]))
        return " ".join(terms)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex_terminal(expression: str) -> str:
    """An expression of whole texts, in Rust's syntax, as a terminal."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression or "(?:)", flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n").replace("\r", r"\r") + "/"


def json_value(schema: Any) -> str:
    """JSON of a schema. `x-guidance` in it may say otherwise of whitespace."""
    if isinstance(schema, dict):
        options = schema.get("x-guidance")
        options = options if isinstance(options, dict) else {}
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **options}}
    return f"%json {json.dumps({} if schema is True else schema)}"
