"""What of a request is checked when it arrives: token ids, where its media stand, how long it may get."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msaserve.errors import InvalidRequestError
from msaserve.types import MediaItem


def checked_ids(prompt: Sequence[int], *, vocab_size: int) -> array[int]:
    """The prompt as array('i').

    Raises:
        InvalidRequestError: it is empty or has ids that are not the vocabulary's.
    """
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt", code="empty_prompt")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        raise InvalidRequestError(
            f"token id {lowest if lowest < 0 else highest} is out of range: "
            f"the vocabulary has ids 0 to {vocab_size - 1}",
            param="prompt",
            code="token_id_out_of_range",
        )
    return array("i", prompt)


def checked_media(media: Sequence[MediaItem], num_prompt_tokens: int) -> tuple[MediaItem, ...]:
    """The items in order of offset.

    Raises:
        InvalidRequestError: one is not within the prompt, or two overlap.
    """
    end = 0
    in_order = tuple(sorted(media, key=lambda item: item.offset))
    for item in in_order:
        if item.length < 1 or item.offset < 0 or item.offset + item.length > num_prompt_tokens:
            raise InvalidRequestError(
                f"a media item spans tokens {item.offset} to {item.offset + item.length}, "
                f"outside the prompt of {num_prompt_tokens} tokens",
                param="media",
            )
        if item.offset < end:
            raise InvalidRequestError(
                f"two media items overlap: one ends at token {end}, the next begins at token {item.offset}",
                param="media",
            )
        end = item.offset + item.length
    return in_order


def max_output_tokens(
    num_prompt_tokens: int, max_tokens: int | None, *, max_model_len: int, num_pages: int, block_size: int
) -> int:
    """max_tokens, or without it what the context length and the cache leave.

    Args:
        num_pages: of the whole cache, the dummy page not counted.

    Raises:
        InvalidRequestError: prompt and output are more than one of them; the message has the numbers.
    """
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    num_cacheable_tokens = num_pages * block_size
    max_len = min(max_model_len, num_cacheable_tokens)
    total = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if total <= max_len:
        return max_len - num_prompt_tokens if max_tokens is None else max_tokens
    if max_tokens is None:
        asked = f"the prompt has {num_prompt_tokens} tokens and needs room for at least 1 more"
    else:
        asked = f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}"
    if total > max_model_len:
        limit = f"the model's context length is {max_model_len} tokens"
    else:
        limit = f"the cache holds {num_cacheable_tokens} tokens ({num_pages} pages of {block_size})"
    raise InvalidRequestError(
        f"{asked}, but {limit}",
        param="prompt" if num_prompt_tokens >= max_len else "max_tokens",
        code="context_length_exceeded",
    )
