"""Which pages are taken, which are free, and which are free but still worth something. Numbers only: no storage."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

DUMMY_PAGE = 0
"""Padding points here; no request owns it and nobody reads what is written to it."""


class BlockPool:
    """Reference counts of the cache's pages, and the order in which unreferenced ones are handed out again.

    A page is in one of three states: referenced (by as many requests as its count says), cached (unreferenced, but
    marked reusable by `keep`: it still holds a prefix block), or free. `allocate` takes free pages first and then
    evicts cached ones, least recently used first.

    Args:
        num_pages: all pages of the cache, the dummy page 0 included.
        on_evict: called with the number of each cached page that `allocate` is about to hand out.
        rng: hand free pages out in random order, so that tests meet page tables of every shape.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        on_evict: Callable[[int], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page {DUMMY_PAGE} is a dummy), got {num_pages}")
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._rng = rng
        self._ref_counts = [0] * num_pages
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._kept: set[int] = set()
        # The first is the least recently used. In a plain dict the first is found behind all that were deleted there.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable_pages(self) -> int:
        """All pages but the dummy."""
        return self.num_pages - 1

    @property
    def num_available_pages(self) -> int:
        """How many `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_pages(self) -> int:
        return len(self._cached)

    @property
    def num_used_pages(self) -> int:
        """Pages with at least one reference."""
        return self.num_usable_pages - self.num_available_pages

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def ref_counts(self) -> dict[int, int]:
        """Page → references, for every page that has one. O(pages)."""
        return {page: count for page, count in enumerate(self._ref_counts) if count}

    def kept_pages(self) -> set[int]:
        """The pages marked reusable, referenced or cached."""
        return set(self._kept)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages, each with one reference. The caller has checked `num_available_pages`."""
        assert 0 <= num_pages <= self.num_available_pages, f"{num_pages} of {self.num_available_pages} available pages"
        pages = []
        for _ in range(num_pages):
            page = self._pop_free() if self._free else self._pop_cached()
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Add a reference to a page that is referenced or cached."""
        if self._ref_counts[page] == 0:
            del self._cached[page]
        self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page of one sequence, given in block order.

        The last block becomes evictable first: a prefix is of no use without what stands before it.
        """
        for page in reversed(pages):
            count = self._ref_counts[page] - 1
            assert count >= 0, f"page {page} is freed but nobody holds it"
            self._ref_counts[page] = count
            if count == 0:
                if page in self._kept:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Mark a referenced page as reusable: once unreferenced it is cached, not free."""
        assert self._ref_counts[page] > 0, f"page {page} is kept but nobody holds it"
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Undo `keep`; an unreferenced page becomes free."""
        self._kept.remove(page)
        if self._ref_counts[page] == 0:
            del self._cached[page]
            self._free.append(page)

    def check_integrity(self) -> None:
        """AssertionError if a page is lost, in two states, or counted wrongly. O(pages)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        used = self.ref_counts().keys()
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        assert DUMMY_PAGE not in free | used | self._kept, "the dummy page is in use"
        assert not free & self._kept, "a free page is marked reusable"
        assert self._cached.keys() == self._kept - used, "cached pages are not the unreferenced reusable ones"
        assert free | used | self._cached.keys() == set(range(1, self.num_pages)), "a page is lost"
        assert len(free) + len(used) + len(self._cached) == self.num_usable_pages, "a page is in two states"

    def _pop_free(self) -> int:
        if self._rng is not None:
            i = self._rng.randrange(len(self._free))
            self._free[i], self._free[-1] = self._free[-1], self._free[i]
        return self._free.pop()

    def _pop_cached(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._kept.remove(page)
        if self._on_evict is not None:
            self._on_evict(page)
        return page
