"""Which page already holds a block's K, V and index-K. One index serves all planes: they share page numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from msaserve.types import MediaItem

DIGEST_BYTES = 32


class BlockHashes:
    """The chained digests of one sequence's full blocks, each computed once.

    A block's digest covers everything its cached values depend on: the digest of the block before it, its token ids,
    and every media item that overlaps it, with where the item begins relative to the block and its length. The chain
    starts from the request's cache_salt.

    Args:
        token_ids: array('i') of prompt and output; it may grow, what is there must not change.
        media: the request's items; their spans do not overlap one another.
    """

    __slots__ = ("_block_size", "_digests", "_media", "_next_media", "_token_ids")

    def __init__(
        self, token_ids: array[int], *, block_size: int, media: Sequence[MediaItem] = (), cache_salt: str = ""
    ) -> None:
        self._token_ids = token_ids
        self._block_size = block_size
        self._media = sorted(media, key=lambda item: item.offset)
        self._next_media = 0
        # JSON may carry lone surrogates; they are as good a salt as any.
        root = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"cache_salt")
        self._digests = [root.digest()]

    def digest(self, block: int) -> bytes:
        """The digest of a full block; those before it are computed on the way if they are not yet there."""
        while len(self._digests) <= block + 1:
            self._append()
        return self._digests[block + 1]

    def _append(self) -> None:
        size = self._block_size
        start = (len(self._digests) - 1) * size
        end = start + size
        assert end <= len(self._token_ids), f"block {start // size} is not full"
        state = blake2b(self._digests[-1], digest_size=DIGEST_BYTES)
        state.update(self._token_ids[start:end].tobytes())
        media = self._media
        while self._next_media < len(media) and media[self._next_media].offset < end:
            item = media[self._next_media]
            if item.offset + item.length > start:
                for number in (item.offset - start, item.length, len(item.content_hash)):
                    state.update(number.to_bytes(8, "little", signed=True))
                state.update(item.content_hash)
            if item.offset + item.length > end:
                break
            self._next_media += 1
        self._digests.append(state.digest())


class PrefixIndex:
    """Digest of a full block → the page that holds it, and back."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def digest_of(self, page: int) -> bytes | None:
        return self._digest_of.get(page)

    def pages(self) -> list[int]:
        return list(self._digest_of)

    def digests(self) -> list[bytes]:
        return list(self._page_of)

    def match(self, hashes: BlockHashes, max_blocks: int) -> list[int]:
        """Pages of the longest indexed prefix of at most max_blocks blocks, which must all be full.

        Nothing beyond the first miss is hashed.
        """
        pages: list[int] = []
        for block in range(max_blocks):
            page = self._page_of.get(hashes.digest(block))
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, digest: bytes, page: int) -> bool:
        """Record that a page holds a block; False if another page already does, which then stays the one."""
        assert page not in self._digest_of, f"page {page} already holds an indexed block"
        if digest in self._page_of:
            return False
        self._page_of[digest] = page
        self._digest_of[page] = digest
        return True

    def evict(self, page: int) -> bytes:
        """Forget the block a page holds, and say which it was. KeyError if it holds none."""
        digest = self._digest_of.pop(page)
        del self._page_of[digest]
        return digest

    def check_integrity(self) -> None:
        """AssertionError unless the two directions are each other's inverse."""
        assert len(self._page_of) == len(self._digest_of), "two blocks on one page"
        for digest, page in self._page_of.items():
            assert self._digest_of.get(page) == digest, f"page {page} is indexed under a digest it does not know"
