"""Placeholders of a rendered prompt to the tokens that stand for each item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.spec import ModelSpec, Prepared
from msaserve.tokenizer import Tokenizer
from msaserve.types import Modality


class Expanded(NamedTuple):
    token_ids: list[int]
    spans: list[tuple[int, int]]
    """(offset, length) of each item, in the order of the items."""


def expand(token_ids: Sequence[int], items: Sequence[Prepared], spec: ModelSpec, tokenizer: Tokenizer) -> Expanded:
    """token_ids: a prompt with one placeholder per item, in the items' order.

    Whatever users write was tokenised as plain text, so each placeholder in the ids is the template's.

    Raises:
        InvalidRequestError: the template left a part out, or moved it.
    """
    placeholders = {m: _ids(tokens, tokenizer) for m, tokens in spec.placeholders.items()}
    ids_of: dict[str, list[int]] = {}
    """Of texts: the same markers stand around every frame."""
    result: list[int] = []
    spans: list[tuple[int, int]] = []
    position = 0
    for start, modality in _find(token_ids, placeholders):
        number = len(spans)
        if number >= len(items) or items[number].modality != modality:
            raise _mismatch(token_ids, items, placeholders)
        result += token_ids[position:start]
        offset = len(result)
        for text, repeats in spec.expand(items[number]):
            if text not in ids_of:
                ids_of[text] = tokenizer.encode(text)
            result += ids_of[text] * repeats
        spans.append((offset, len(result) - offset))
        position = start + len(placeholders[modality])
    if len(spans) != len(items):
        raise _mismatch(token_ids, items, placeholders)
    result += token_ids[position:]
    return Expanded(result, spans)


def _ids(tokens: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(i for token in tokens for i in tokenizer.encode(token))
    if len(ids) != len(tokens):
        raise InvalidRequestError(
            f"the tokenizer has no token {' or '.join(tokens)}: this checkpoint takes text only",
            code="unsupported_content",
        )
    return ids


def _find(token_ids: Sequence[int], placeholders: Mapping[Modality, tuple[int, ...]]) -> list[tuple[int, Modality]]:
    found: list[tuple[int, Modality]] = []
    for modality, ids in placeholders.items():
        start = 0
        while True:
            try:
                start = token_ids.index(ids[0], start)
            except ValueError:
                break
            if tuple(token_ids[start : start + len(ids)]) == ids:
                found.append((start, modality))
                start += len(ids)
            else:
                start += 1
    return sorted(found)


def _mismatch(
    token_ids: Sequence[int], items: Sequence[Prepared], placeholders: Mapping[Modality, tuple[int, ...]]
) -> InvalidRequestError:
    rendered = [modality for _, modality in _find(token_ids, placeholders)]
    return InvalidRequestError(
        f"the chat template rendered {rendered.count('image')} pictures and {rendered.count('video')} videos, but the "
        f"messages hold {sum(i.modality == 'image' for i in items)} and {sum(i.modality == 'video' for i in items)}",
        param="messages",
    )
