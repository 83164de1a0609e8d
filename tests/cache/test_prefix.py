"""BlockHashes and PrefixIndex: what tells two blocks apart, and random use against a model that compares tokens."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from msaserve.cache import prefix
from msaserve.cache.prefix import BlockHashes, PrefixIndex, Tokens, media_between
from msaserve.types import MediaItem

BLOCK = 4


def media(offset: int, length: int, content: bytes = b"cat") -> MediaItem:
    return MediaItem(
        modality="image",
        patches=np.zeros((4, 1176), np.float32),
        grid_thw=((1, 2, 2),),
        offset=offset,
        length=length,
        content_hash=content,
    )


def hashes(tokens: list[int], *items: MediaItem, salt: str = "") -> BlockHashes:
    return BlockHashes(Tokens(array("i", tokens)), block_size=BLOCK, media=items, cache_salt=salt)


def digests(tokens: list[int], *items: MediaItem, salt: str = "") -> list[bytes]:
    chain = hashes(tokens, *items, salt=salt)
    return [chain.digest(block) for block in range(len(tokens) // BLOCK)]


TOKENS = list(range(100, 116))


def num_shared(a: list[bytes], b: list[bytes]) -> int:
    """Length of the common prefix; beyond it nothing may agree, or the chain is broken."""
    same = [x == y for x, y in zip(a, b, strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_digests_are_long_and_equal_for_equal_blocks() -> None:
    assert digests(TOKENS) == digests(TOKENS)
    assert len(set(digests([7] * 16))) == 4  # equal blocks at other positions differ
    assert min(map(len, digests(TOKENS))) >= 16


@pytest.mark.parametrize("position", range(16))
def test_a_token_changes_its_block_and_all_after_it(position: int) -> None:
    changed = [*TOKENS[:position], 9, *TOKENS[position + 1 :]]
    assert num_shared(digests(TOKENS), digests(changed)) == position // BLOCK


def test_salts_share_nothing() -> None:
    assert num_shared(digests(TOKENS, salt="a"), digests(TOKENS, salt="b")) == 0
    assert num_shared(digests(TOKENS, salt="a"), digests(TOKENS)) == 0
    assert num_shared(digests(TOKENS, salt="\ud800"), digests(TOKENS, salt="?")) == 0


@pytest.mark.parametrize(
    ("items", "others", "shared"),
    [
        ([media(5, 2)], [media(5, 2)], 4),
        ([media(5, 2)], [], 1),
        ([media(5, 2)], [media(5, 2, b"dog")], 1),
        ([media(5, 2)], [media(6, 2)], 1),
        ([media(3, 10)], [media(3, 10, b"dog")], 0),
        ([media(7, 2)], [media(8, 1)], 1),  # the span reaches one token into block 1
        ([media(0, 4), media(8, 4)], [media(0, 4), media(8, 4, b"dog")], 2),
        ([media(0, 4), media(12, 4)], [media(0, 4)], 3),
        ([media(1, 1, b"a"), media(2, 1, b"b")], [media(1, 1, b"b"), media(2, 1, b"a")], 0),
        ([media(2, 1), media(9, 1)], [media(9, 1), media(2, 1)], 4),  # order of listing does not matter
        ([media(1, 1, b"ab")], [media(1, 1, b"a")], 0),
        ([media(2, 12)], [media(2, 13)], 0),  # a span of another length is another request from its first block on
    ],
)
def test_media(items: list[MediaItem], others: list[MediaItem], shared: int) -> None:
    assert num_shared(digests(TOKENS, *items), digests(TOKENS, *others)) == shared


def test_a_long_item_salts_every_block_it_overlaps() -> None:
    # The chain alone would separate the later blocks, so the digest it starts from is made equal.
    a, b = hashes(TOKENS, media(5, 8, b"a")), hashes(TOKENS, media(5, 8, b"b"))
    for block, is_equal in enumerate([True, False, False, False]):
        a._of_prompt[-1] = b._of_prompt[-1]
        assert (a.digest(block) == b.digest(block)) is is_equal


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 10), st.data())
@settings(max_examples=100, deadline=None)
def test_growing_equals_at_once(tokens: list[int], num_first: int, data: st.DataObject) -> None:
    """Digests asked for while a sequence and its forks grow are those of the whole sequences."""
    item = media(data.draw(st.integers(0, 20)), data.draw(st.integers(1, 20)))
    prompt = tokens[:num_first]
    grown = Tokens(array("i", prompt))
    chain = BlockHashes(grown, block_size=BLOCK, media=[item])
    sequences = [(tokens[num_first:], grown, chain)]
    for _ in range(data.draw(st.integers(0, 2))):
        fork = grown.fork()
        output = data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
        sequences.append((output, fork, chain.fork(fork)))
    for place in range(max(len(output) for output, _, _ in sequences)):
        for output, own, hashes_of in sequences:
            if place < len(output):
                own.append(output[place])
                if len(own) % BLOCK == 0 and data.draw(st.booleans()):
                    hashes_of.digest(len(own) // BLOCK - 1)
    for output, own, hashes_of in sequences:
        whole = [*prompt, *output]
        assert list(own.between(0, len(own))) == whole
        assert [hashes_of.digest(block) for block in range(len(whole) // BLOCK)] == digests(whole, item)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 25), st.integers(0, 25))
@settings(max_examples=100, deadline=None)
def test_tokens_between(num_prompt: int, num_output: int, start: int, end: int) -> None:
    numbers = list(range(num_prompt + num_output))
    tokens = Tokens(array("i", numbers[:num_prompt]))
    for number in numbers[num_prompt:]:
        tokens.append(number)
    assert (len(tokens), list(tokens.prompt)) == (len(numbers), numbers[:num_prompt])
    assert tokens.between(start, end) == array("i", numbers[start:end])


def test_few_items_are_looked_at_however_many_there_are() -> None:
    looks = 0

    class Counted:
        length = 3

        def __init__(self, place: int) -> None:
            self.place = place

        @property
        def offset(self) -> int:
            nonlocal looks
            looks += 1
            return 5 * self.place

    items: Any = [Counted(place) for place in range(10_000)]
    assert [item.place for item in media_between(items, 25_000, 25_008)] == [5000, 5001]
    assert looks < 50


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=8), st.integers(0, 40), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_media_between(spans: list[tuple[int, int]], start: int, length: int) -> None:
    """spans: (gap before the item, its length)."""
    items, end = [], 0
    for gap, size in spans:
        items.append(media(end + gap, size))
        end += gap + size
    found = list(media_between(items, start, start + length))
    assert found == [i for i in items if i.offset < start + length and i.offset + i.length > start]


def test_a_block_must_be_full() -> None:
    with pytest.raises(AssertionError, match="not full"):
        hashes(TOKENS[:7]).digest(1)


def test_each_block_is_hashed_once_and_none_beyond_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    real = prefix.blake2b

    def counting(*args: bytes, **kwargs: int) -> object:
        nonlocal count
        count += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    index = PrefixIndex()
    index.insert(digests(TOKENS)[0], 1)
    monkeypatch.setattr(prefix, "blake2b", counting)
    chain = hashes(TOKENS)
    assert count == 1  # the root
    for _ in range(3):
        assert index.match(chain, 4) == [1]
    assert count == 3  # the hit and the first miss
    for _ in range(3):
        chain.digest(3)
    assert count == 5


def test_match_ends_at_the_first_gap() -> None:
    index = PrefixIndex()
    first, second, third, fourth = digests(TOKENS)
    for page, digest in ((5, first), (3, second), (9, fourth)):
        assert index.insert(digest, page)
    assert index.match(hashes(TOKENS), 4) == [5, 3]
    assert index.match(hashes(TOKENS), 1) == [5]
    assert index.match(hashes(TOKENS), 0) == []
    assert index.insert(third, 2)
    assert index.match(hashes(TOKENS), 4) == [5, 3, 2, 9]
    index.evict(5)
    assert index.match(hashes(TOKENS), 4) == []
    assert 5 not in index
    assert index.digest_of(9) == fourth


def test_a_block_stays_with_its_first_page() -> None:
    index = PrefixIndex()
    digest = digests(TOKENS)[0]
    assert index.insert(digest, 1)
    assert not index.insert(digest, 2)
    assert 2 not in index
    assert index.match(hashes(TOKENS), 4) == [1]
    with pytest.raises(AssertionError, match="already holds"):
        index.insert(digests(TOKENS)[1], 1)
    with pytest.raises(KeyError):
        index.evict(2)


def test_check_integrity_finds_faults() -> None:
    index = PrefixIndex()
    first, second, *_ = digests(TOKENS)
    index.insert(first, 1)
    index.check_integrity()
    index._page_of[first] = 2
    with pytest.raises(AssertionError):
        index.check_integrity()
    index._page_of = {first: 1, second: 1}
    with pytest.raises(AssertionError):
        index.check_integrity()


class IndexMachine(RuleBasedStateMachine):
    """The model keys blocks by (salt, all tokens so far) instead of digests."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next_page = 1

    def draw(self, seed: int) -> tuple[str, list[int]]:
        rng = random.Random(seed)
        return rng.choice(["", "s"]), [rng.randrange(2) for _ in range(rng.randrange(1, 4)) for _ in range(BLOCK)]

    @rule(seed=st.integers(0, 10**6))
    def insert(self, seed: int) -> None:
        salt, tokens = self.draw(seed)
        chain = hashes(tokens, salt=salt)
        for block in range(len(tokens) // BLOCK):
            key = (salt, tuple(tokens[: (block + 1) * BLOCK]))
            assert self.index.insert(chain.digest(block), self.next_page) == (key not in self.model)
            self.model.setdefault(key, self.next_page)
            self.next_page += 1

    @rule(seed=st.integers(0, 10**6))
    def match(self, seed: int) -> None:
        salt, tokens = self.draw(seed)
        expected = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            page = self.model.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            expected.append(page)
        assert self.index.match(hashes(tokens, salt=salt), len(tokens) // BLOCK) == expected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.index.evict(self.model.pop(key))

    @invariant()
    def agrees_with_model(self) -> None:
        self.index.check_integrity()
        assert sorted(self.index.pages()) == sorted(self.model.values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
