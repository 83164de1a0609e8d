"""Stop strings over tokens: where the text says so, however tokens and events cut it."""

from __future__ import annotations

import random

from golden_data import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from msaserve.tokenizer import Tokenizer
from msaserve.types import Logprobs, SamplingParams, TokenEvent
from msaserve.worker.stop import StopStrings

TOKENIZER = Tokenizer.load(GOLDEN / "tiny")


def expected(ids: list[int], stop: tuple[str, ...], min_tokens: int, *, skips: bool) -> tuple[int, str] | None:
    """(tokens up to the one that completes the first stop string, that string), by looking at every prefix."""
    start = len(TOKENIZER.decode(ids[:min_tokens], skip_special_tokens=skips))
    for count in range(min_tokens + 1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:count], skip_special_tokens=skips)[start:]
        ends = [(text.index(s) + len(s), -len(s), s) for s in stop if s in text]
        if ends:
            return count, min(ends)[2]
    return None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_cut(seed: int, skips: bool) -> None:
    rng = random.Random(seed)
    # Few letters, so that strings are found, and tokens of many characters and of none that are shown.
    choices = [*TOKENIZER.encode_plain("ab"), 2, 264, 263]
    ids = [rng.choice(choices) for _ in range(20)]
    stop = tuple({"".join(rng.choice("ab<]") for _ in range(rng.randrange(1, 4))) for _ in range(2)})
    min_tokens = rng.choice([0, 0, 5])
    strings = StopStrings(TOKENIZER, SamplingParams(stop=stop, min_tokens=min_tokens), skip_special_tokens=skips)
    seen, found, rest = 0, None, ids
    while rest and found is None:
        size = rng.randrange(1, 4)
        head, rest = rest[:size], rest[size:]
        event = TokenEvent(token_ids=tuple(head), logprobs=tuple(Logprobs(i, 0.0) for i in head))
        cut, found = strings.cut(event)
        seen += len(cut.token_ids)
        assert [p.token_id for p in cut.logprobs] == list(cut.token_ids)
        assert (cut.finish_reason == "stop") == (found is not None)
        assert found is not None or cut == event
    assert (None if found is None else (seen, found)) == expected(ids, stop, min_tokens, skips=skips)


def test_the_token_that_ends_it_is_no_text() -> None:
    (a,) = TOKENIZER.encode_plain("a")
    strings = StopStrings(TOKENIZER, SamplingParams(stop=("a",)), skip_special_tokens=False)
    event = TokenEvent(token_ids=(a,), finish_reason="stop", stop_token_id=a)
    assert strings.cut(event) == (event, None)
