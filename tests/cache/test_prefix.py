"""BlockHashes and PrefixIndex: what tells two blocks apart, and random use against a model that compares tokens."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from msaserve.cache import prefix
from msaserve.cache.prefix import BlockHashes, PrefixIndex
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
    return BlockHashes(array("i", tokens), block_size=BLOCK, media=items, cache_salt=salt)


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
        a._digests[-1] = b._digests[-1]
        assert (a.digest(block) == b.digest(block)) is is_equal


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 10), st.data())
@settings(max_examples=100, deadline=None)
def test_growing_equals_at_once(tokens: list[int], num_first: int, data: st.DataObject) -> None:
    """Digests asked for while the sequence grows are those of the whole sequence."""
    item = media(data.draw(st.integers(0, 20)), data.draw(st.integers(1, 20)))
    grown = array("i", tokens[:num_first])
    chain = BlockHashes(grown, block_size=BLOCK, media=[item])
    for token in tokens[num_first:]:
        grown.append(token)
        if len(grown) % BLOCK == 0 and data.draw(st.booleans()):
            chain.digest(len(grown) // BLOCK - 1)
    assert [chain.digest(block) for block in range(len(grown) // BLOCK)] == digests(list(grown), item)


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
        assert len(self.index) == len(self.model)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
