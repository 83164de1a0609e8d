"""Which page already holds a block's K, V and index-K. One index serves all planes: they share page numbers."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b

from msaserve.types import MediaItem

DIGEST_BYTES = 32


def media_between(media: Sequence[MediaItem], start: int, end: int) -> Sequence[MediaItem]:
    """The items that overlap positions start ≤ p < end, of items in order whose spans do not overlap one another."""
    if not media:
        return media
    first = bisect_right(media, start, key=lambda item: item.offset + item.length)
    return media[first : bisect_left(media, end, lo=first, key=lambda item: item.offset)]


class Tokens:
    """A sequence's token ids, prompt and output. Sequences of one prompt share the prompt's part."""

    __slots__ = ("_output", "prompt")

    def __init__(self, prompt: array[int]) -> None:
        """prompt: array('i'), which must not change any more."""
        self.prompt = prompt
        self._output = array("i")

    def __len__(self) -> int:
        return len(self.prompt) + len(self._output)

    def between(self, start: int, end: int) -> array[int]:
        """Those at positions start ≤ p < end, as array('i')."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        if start >= split:
            return self._output[start - split : end - split]
        return self.prompt[start:] + self._output[: end - split]

    def append(self, token_id: int) -> None:
        self._output.append(token_id)

    def fork(self) -> Tokens:
        """Another sequence of the same prompt, without output."""
        return Tokens(self.prompt)


class BlockHashes:
    """The chained digests of one sequence's full blocks, each computed once, those of the prompt for all of its forks.

    A block's digest covers everything its cached values depend on: the digest of the block before it, its token ids,
    and every media item that overlaps it, with where the item begins relative to the block and its length. The chain
    starts from the request's cache_salt.

    Args:
        tokens: of the sequence; more may be appended.
        media: the request's items, within the prompt; their spans do not overlap one another.
    """

    __slots__ = ("_block_size", "_media", "_num_prompt_blocks", "_of_output", "_of_prompt", "_tokens")

    def __init__(
        self, tokens: Tokens, *, block_size: int, media: Sequence[MediaItem] = (), cache_salt: str = ""
    ) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._media = sorted(media, key=lambda item: item.offset)
        self._num_prompt_blocks = len(tokens.prompt) // block_size
        # JSON may carry lone surrogates; they are as good a salt as any.
        root = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"cache_salt")
        self._of_prompt = [root.digest()]
        self._of_output: list[bytes] = []

    def fork(self, tokens: Tokens) -> BlockHashes:
        """For another sequence of the same prompt, media and salt."""
        forked = copy(self)
        forked._tokens = tokens
        forked._of_output = []
        return forked

    def digest(self, block: int) -> bytes:
        """The digest of a full block; those before it are computed on the way if they are not yet there."""
        of_prompt, of_output = self._of_prompt, self._of_output
        while len(of_prompt) <= min(block + 1, self._num_prompt_blocks):
            of_prompt.append(self._compute(len(of_prompt) - 1, of_prompt[-1]))
        if block < self._num_prompt_blocks:
            return of_prompt[block + 1]
        place = block - self._num_prompt_blocks
        while len(of_output) <= place:
            parent = of_output[-1] if of_output else of_prompt[-1]
            of_output.append(self._compute(self._num_prompt_blocks + len(of_output), parent))
        return of_output[place]

    def _compute(self, block: int, parent: bytes) -> bytes:
        start, end = block * self._block_size, (block + 1) * self._block_size
        assert end <= len(self._tokens), f"block {block} is not full"
        state = blake2b(parent, digest_size=DIGEST_BYTES)
        state.update(self._tokens.between(start, end))
        for item in media_between(self._media, start, end):
            for number in (item.offset - start, item.length, len(item.content_hash)):
                state.update(number.to_bytes(8, "little", signed=True))
            state.update(item.content_hash)
        return state.digest()


class PrefixIndex:
    """Digest of a full block → the page that holds it, and back."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

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
