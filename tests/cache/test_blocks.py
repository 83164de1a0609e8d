"""BlockPool: its rules one by one, then random use against a model."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from msaserve.cache.blocks import DUMMY_PAGE, BlockPool


def cache_pages(pool: BlockPool, pages: list[int]) -> None:
    """Pages that were just allocated become cached, the last evictable first."""
    for page in pages:
        pool.keep(page)
    pool.free(pages)


def test_needs_a_page_besides_the_dummy() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_every_page_but_the_dummy_is_handed_out_once() -> None:
    pool = BlockPool(9)
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert DUMMY_PAGE not in pages
    assert pool.num_available_pages == 0
    assert pool.num_used_pages == 8
    with pytest.raises(AssertionError, match="1 of 0 available"):
        pool.allocate(1)


def test_a_page_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4)
    (page,) = pool.allocate(1)
    pool.share(page)
    pool.free([page])
    assert pool.ref_count(page) == 1
    assert pool.num_used_pages == 1
    pool.free([page])
    assert pool.num_used_pages == 0
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free([page])


def test_free_pages_go_before_cached_ones() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    cached = pool.allocate(2)
    cache_pages(pool, cached)
    pages = pool.allocate(2)
    assert not set(pages) & set(cached)
    assert evicted == []
    assert pool.num_cached_pages == 2
    assert sorted(pool.allocate(2)) == sorted(cached)
    assert sorted(evicted) == sorted(cached)
    assert pool.num_cached_pages == 0


def test_an_eviction_costs_the_same_however_many_there_were() -> None:
    pool = BlockPool(40_001)
    pages = pool.allocate(40_000)
    cache_pages(pool, pages)
    seconds = []
    for _ in range(20):
        start = time.thread_time()
        pool.allocate(2_000)
        seconds.append(time.thread_time() - start)
    assert min(seconds[-5:]) < 5 * min(seconds[:5])


def test_eviction_is_least_recently_used_first_and_deepest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(7, on_evict=evicted.append)
    first, second = pool.allocate(3), pool.allocate(3)
    cache_pages(pool, first)
    cache_pages(pool, second)
    # A hit on the first block of the older sequence makes it the most recently used.
    pool.share(first[0])
    pool.free([first[0]])
    pool.allocate(6)
    assert evicted == [first[2], first[1], second[2], second[1], second[0], first[0]]


def test_a_shared_cached_page_is_not_evicted() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    pages = pool.allocate(3)
    cache_pages(pool, pages)
    pool.share(pages[1])
    assert pool.num_available_pages == 2
    assert set(pool.allocate(2)) == {pages[0], pages[2]}
    assert evicted == [pages[2], pages[0]]


def test_dropped_pages_are_free_again() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, on_evict=evicted.append)
    held, cached = pool.allocate(2)
    pool.keep(held)
    cache_pages(pool, [cached])
    pool.drop(cached)
    pool.drop(held)
    assert pool.num_cached_pages == 0
    pool.free([held])
    assert pool.num_cached_pages == 0
    assert len(pool.allocate(3)) == 3
    assert evicted == []


def test_keep_needs_a_reference() -> None:
    with pytest.raises(AssertionError, match="nobody holds it"):
        BlockPool(2).keep(1)


def test_rng_shuffles_and_repeats() -> None:
    orders = [BlockPool(65, rng=random.Random(seed)).allocate(64) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(1, 65))


@pytest.mark.parametrize("fault", ["lost", "twice", "count", "dummy", "kept"])
def test_check_integrity_finds_faults(fault: str) -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    pool.check_integrity()
    if fault == "lost":
        pool._free.pop()
    elif fault == "twice":
        pool._free.append(pool._free[0])
    elif fault == "count":
        pool._ref_counts[pool._free[0]] = 1
    elif fault == "dummy":
        pool._free.append(DUMMY_PAGE)
    else:
        pool._kept.add(pool._free[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Sequences allocate, share, keep and free; the model holds the reference counts and the order of eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(12, on_evict=self.evicted.append, rng=random.Random(0))
        self.sequences: list[list[int]] = []
        self.kept: set[int] = set()
        self.lru: list[int] = []

    def counts(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for pages in self.sequences:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        return counts

    @rule(num_pages=st.integers(0, 4))
    def allocate(self, num_pages: int) -> None:
        num_free = 11 - len(self.counts()) - len(self.lru)
        if num_pages > num_free + len(self.lru):
            return
        expected = self.lru[: max(0, num_pages - num_free)]
        before = self.counts()
        pages = self.pool.allocate(num_pages)
        assert not set(pages) & before.keys()
        assert self.evicted == expected
        self.evicted.clear()
        del self.lru[: len(expected)]
        self.kept -= set(expected)
        self.sequences.append(pages)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.share(page)
        if page in self.lru:
            self.lru.remove(page)
        self.sequences.append([page])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.free(pages)
        counts = self.counts()
        self.lru += [page for page in reversed(pages) if page not in counts and page in self.kept]

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.counts())))
        self.pool.keep(page)
        self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.drop(page)
        self.kept.remove(page)
        if page in self.lru:
            self.lru.remove(page)

    @invariant()
    def agrees_with_model(self) -> None:
        self.pool.check_integrity()
        counts = self.counts()
        assert self.pool.ref_counts() == counts
        assert self.pool.kept_pages() == self.kept
        assert self.pool.num_used_pages == len(counts)
        assert self.pool.num_cached_pages == len(self.lru)
        assert self.pool.num_available_pages == 11 - len(counts)
        assert set(self.pool._free) == set(range(1, 12)) - counts.keys() - set(self.lru)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
