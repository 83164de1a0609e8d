"""Pieces of grammars in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msaserve.tokenizer import Tokenizer

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between two elements of JSON. A model that may write any of it can write nothing else for ever."""


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Id by spelling of the tokens that no plain text becomes."""
    return {tokenizer.token_bytes(i).decode(): i for i in sorted(tokenizer.added_ids)}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Any) -> str:
    """JSON of a schema. `x-guidance` in it may say otherwise of whitespace."""
    if isinstance(schema, dict):
        options = schema.get("x-guidance")
        options = options if isinstance(options, dict) else {}
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE, **options}}
    return f"%json {json.dumps({} if schema is True else schema)}"


def literal(text: str, added: Mapping[str, int]) -> str:
    """A text, in which what spells an added token is that token."""
    terms: list[str] = []
    plain = ""
    while text:
        found = max((token for token in added if token and text.startswith(token)), key=len, default=None)
        if found is None:
            plain, text = plain + text[0], text[1:]
            continue
        if plain:
            terms.append(quoted(plain))
        terms.append(f"<[{added[found]}]>")
        plain, text = "", text[len(found) :]
    if plain or not terms:
        terms.append(quoted(plain))
    return " ".join(terms)
