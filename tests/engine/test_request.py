"""Request: what ends a sequence."""

from __future__ import annotations

from array import array

import pytest

from msaserve.cache.prefix import Tokens
from msaserve.engine.request import Request, RequestStatus
from msaserve.engine.seen import SeenTokens
from msaserve.types import SamplingParams


def request(
    *, min_tokens: int = 0, max_output_tokens: int = 100, stop_ids: tuple[int, ...] = (), prompt_len: int = 3
) -> Request:
    made = Request("r", list(range(10, 10 + prompt_len)), SamplingParams(min_tokens=min_tokens))
    made.tokens = Tokens(array("i", made.prompt_token_ids))
    made.max_output_tokens = max_output_tokens
    made.stop_ids = frozenset(stop_ids)
    return made


def feed(made: Request, *tokens: int) -> int:
    """Append tokens until one ends the request; how many were taken."""
    for i, token in enumerate(tokens, start=1):
        made.append(token)
        if made.is_finished:
            return i
    return len(tokens)


def test_tokens_go_to_both_lists() -> None:
    made = request()
    feed(made, 5, 6)
    assert list(made.tokens.between(0, 5)) == [10, 11, 12, 5, 6]
    assert made.output_token_ids == [5, 6]
    assert made.prompt_token_ids == [10, 11, 12]
    assert (made.num_prompt_tokens, made.num_tokens) == (3, 5)
    assert made.status is RequestStatus.WAITING
    assert made.finish_reason is None


def test_a_stop_token_ends_it_and_is_kept() -> None:
    made = request(stop_ids=(7, 8))
    assert feed(made, 5, 8, 7) == 2
    assert (made.finish_reason, made.stop_token_id, made.output_token_ids) == ("stop", 8, [5, 8])


@pytest.mark.parametrize("min_tokens", range(4))
def test_min_tokens_come_before_the_stop_token(min_tokens: int) -> None:
    made = request(min_tokens=min_tokens, stop_ids=(7,))
    assert feed(made, 7, 7, 7, 7, 7) == min_tokens + 1
    assert made.finish_reason == "stop"


def test_length() -> None:
    made = request(max_output_tokens=2)
    assert feed(made, 5, 6, 7) == 2
    assert (made.finish_reason, made.stop_token_id) == ("length", None)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_seen_tokens_are_counted_as_they_come(penalty: str) -> None:
    seen = SeenTokens.of(SamplingParams(**{penalty: 1.5}), [10, 11, 10])
    assert seen is not None
    fork = seen.fork()
    made = request()
    made.seen = seen
    feed(made, 5, 11, 6, 5, 5)
    assert dict(zip(seen.output_ids, seen.output_counts, strict=True)) == {5: 3, 11: 1, 6: 1}
    assert sorted(seen.prompt_ids) == ([10, 11] if penalty == "repetition_penalty" else [])
    assert (list(fork.output_ids), fork.prompt_ids) == ([], seen.prompt_ids)


def test_nothing_is_counted_without_penalties() -> None:
    assert SeenTokens.of(SamplingParams(temperature=0.5), [1, 2]) is None


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    made = request(max_output_tokens=2, stop_ids=(7,))
    feed(made, 5, 7)
    assert made.finish_reason == "stop"


def test_length_ends_it_even_before_min_tokens() -> None:
    made = request(max_output_tokens=2, min_tokens=5, stop_ids=(7,))
    assert feed(made, 7, 7, 7) == 2
    assert made.finish_reason == "length"


def test_finishes_once() -> None:
    made = request()
    made.finish("error")
    assert (made.status, made.finish_reason) == (RequestStatus.FINISHED, "error")
    with pytest.raises(AssertionError, match="twice"):
        made.finish("abort")
