"""Which blocks a worker holds, by the events it sends, and how much of a prompt that is."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from msaserve.errors import MsaserveError
from msaserve.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, CursorLostError, KvEvent, KvEventBatch
from msaserve.types import GenerateRequest

_log = logging.getLogger(__name__)

_FIRST_RETRY, _LONGEST_RETRY = 0.2, 5.0
_UNSUPPORTED_RETRY = 60.0
"""Seconds until a worker without KV events is asked again: another may have taken its place."""


class KvEventsUnsupportedError(MsaserveError):
    """A worker that has no KV events."""


@runtime_checkable
class KvEventSource(Protocol):
    def kv_events(self, after: int) -> AsyncIterator[KvEventBatch]:
        """The batches behind a number, without end; 0: what there is now and all that comes.

        Raises:
            CursorLostError: those batches are not kept; ask from 0.
            KvEventsUnsupportedError: there are none.
            MsaserveError: the worker cannot be reached or fails.
        """
        ...


class PromptBlocks:
    """Digests of a prompt's blocks, of any size: equal where two prompts agree up to the block's end, in tokens, media
    and cache salt.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._token_ids = array("i", request.prompt_token_ids)
        self._media = sorted(request.media, key=lambda item: item.offset)
        self._salt = request.cache_salt
        self._digests: dict[int, list[bytes]] = {}

    def digests(self, block_size: int) -> list[bytes]:
        """Of the full blocks; computed once."""
        if block_size not in self._digests:
            self._digests[block_size] = self._compute(block_size)
        return self._digests[block_size]

    def _compute(self, size: int) -> list[bytes]:
        digest = _root(self._salt)
        digests = []
        media, first = self._media, 0  # of those that do not end before the block
        for start in range(0, len(self._token_ids) - size + 1, size):
            end = start + size
            while first < len(media) and media[first].offset + media[first].length <= start:
                first += 1
            behind = first
            while behind < len(media) and media[behind].offset < end:
                behind += 1
            names = [item.name or item.content_hash.hex() for item in media[first:behind]]
            digest = _chain(digest, self._token_ids[start:end], names)
            digests.append(digest)
        return digests


class KvIndex:
    """What one worker says it holds. Blocks whose beginning is unknown are left out: no prompt can use them."""

    def __init__(self, *, on_clear: Callable[[], None] = lambda: None) -> None:
        """on_clear: called when the worker says that it holds nothing any more."""
        self.number = 0
        """Of the last batch; 0: none."""
        self.block_size = 0
        self._on_clear = on_clear
        self._blocks: dict[int, tuple[bytes, int]] = {}
        """Name → digest, copies."""
        self._num_copies: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._num_copies)

    @property
    def is_known(self) -> bool:
        """Whether the worker has said anything."""
        return self.number != 0

    def num_tokens(self, prompt: PromptBlocks) -> int:
        """How many tokens of a prompt's beginning the worker holds."""
        if not self._num_copies:
            return 0
        for count, digest in enumerate(digests := prompt.digests(self.block_size)):
            if digest not in self._num_copies:
                return count * self.block_size
        return len(digests) * self.block_size

    def admit(self, batch: KvEventBatch) -> None:
        """Apply the next batch; one that was applied before is passed over.

        Raises:
            CursorLostError: batches are missing before it. The index is as it was.
        """
        if batch.snapshot is None and self.number:
            if batch.number <= self.number:
                return
            if batch.number != self.number + 1:
                raise CursorLostError(f"batch {batch.number} came after {self.number}")
        if batch.snapshot is not None and batch.snapshot[0] == 0:
            self._forget()
        self.number = batch.number
        for event in batch.events:
            self._apply(event)

    def reset(self) -> None:
        """Forget everything, and that the worker ever said something."""
        self._forget()
        self.number = 0

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._store(event)
        elif isinstance(event, BlocksRemoved):
            for name in event.names:
                self._remove(name)
        elif isinstance(event, BlocksCleared):
            self._forget()
            self._on_clear()

    def _store(self, event: BlocksStored) -> None:
        if event.parent is None:
            digest = _root(event.salt)
        elif event.parent in self._blocks:
            digest, _ = self._blocks[event.parent]
        else:
            return
        for block in event.blocks:
            if not block.token_ids:
                return
            self.block_size = len(block.token_ids)
            digest = _chain(digest, array("i", block.token_ids), [name for name, _ in block.media])
            _, copies = self._blocks.get(block.name, (digest, 0))
            self._blocks[block.name] = digest, copies + 1
            self._num_copies[digest] = self._num_copies.get(digest, 0) + 1

    def _remove(self, name: int) -> None:
        if name not in self._blocks:
            return
        digest, copies = self._blocks.pop(name)
        if copies > 1:
            self._blocks[name] = digest, copies - 1
        self._num_copies[digest] -= 1
        if not self._num_copies[digest]:
            del self._num_copies[digest]

    def _forget(self) -> None:
        self._blocks.clear()
        self._num_copies.clear()


async def follow(source: KvEventSource, index: KvIndex, *, name: str) -> None:
    """Keep an index as its worker is. Does not return. name: of the worker, for the log."""
    delay = _FIRST_RETRY
    while True:
        try:
            async for batch in source.kv_events(index.number):
                index.admit(batch)
                delay = _FIRST_RETRY
        except CursorLostError as error:
            _log.info("worker %s: KV events begin anew: %s", name, error)
            index.reset()
        except KvEventsUnsupportedError:
            index.reset()
            delay = _UNSUPPORTED_RETRY
        except MsaserveError:
            pass  # it cannot be reached: its cache may still be there when it can be again
        except Exception:  # events that are none: what is known cannot be kept up
            _log.exception("worker %s: KV events begin anew", name)
            index.reset()
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LONGEST_RETRY)


def _root(salt: str) -> bytes:
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _chain(parent: bytes, token_ids: array[int], media: Iterable[str]) -> bytes:
    state = blake2b(parent, digest_size=16)
    state.update(token_ids.tobytes())
    for name in sorted(media):
        state.update(name.encode())
    return state.digest()
