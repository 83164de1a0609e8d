"""What enters and leaves a prefix cache, numbered so that whoever follows can tell when it missed something.

Blocks go by 64-bit names. A worker keeps a `KvEventLog` of its cache; a gateway follows those of many workers.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from msaserve.types import MediaItem

MAX_HISTORY_BLOCKS = 16_384
"""Blocks of past batches that are kept for followers who come back."""
_SNAPSHOT_BLOCKS = 2_048
"""Of one batch of a snapshot."""


class KvBlock(msgspec.Struct, frozen=True):
    name: int
    """64 bits, signed: of everything the block's values depend on, all blocks before it included."""
    token_ids: Sequence[int]
    media: tuple[tuple[str, int], ...] = ()
    """(name, where it begins relative to the block) of each media item that overlaps it."""


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks of one sequence, one after another."""

    blocks: list[KvBlock]
    parent: int | None
    """The block before the first; None if that is a sequence's first."""
    salt: str = ""


class BlocksRemoved(msgspec.Struct, frozen=True):
    names: list[int]


class BlocksCleared(msgspec.Struct, frozen=True):
    """Everything is gone."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """One more than the batch's before."""
    timestamp: float
    """Seconds since 1970."""
    events: list[KvEvent]
    snapshot: tuple[int, int] | None = None
    """(index, count) of a batch that is a part of everything there is, instead of something new."""
    num_snapshot_blocks: int = 0
    """In the whole snapshot."""


_Live = tuple[KvBlock, int | None, str]
"""A block, its parent's name, its salt."""


class CursorLostError(Exception):
    """The batches after a number are not there (any more), or that number is of another log."""


class KvEventLog:
    """The events of one cache.

    One thread records and publishes; any thread may read. Numbers begin with the time in milliseconds, so that a number
    of an earlier process's log is never one of this.
    """

    def __init__(self, *, block_size: int) -> None:
        self.block_size = block_size
        self._pending: list[KvEvent] = []
        # Guarded by the lock: what readers see.
        self._lock = threading.Lock()
        self._number = time.time_ns() // 1_000_000
        self._history: deque[KvEventBatch] = deque()
        self._num_history_blocks = 0
        self._live: dict[int, _Live] = {}
        self._listeners: list[Callable[[], None]] = []
        self._is_closed = False

    def store(
        self,
        *,
        digest: bytes,
        parent: bytes | None,
        token_ids: array[int],
        start: int,
        media: Sequence[MediaItem],
        salt: str,
    ) -> None:
        """One block of a sequence is in the cache.

        Args:
            digest, parent: of the block and of the one before it.
            token_ids: the block's. start: the position of the first.
            media: the items that overlap the block.
        """
        names = tuple((item.name or item.content_hash.hex(), item.offset - start) for item in media)
        stored = KvBlock(_name(digest), token_ids, names)
        parent_name = None if parent is None else _name(parent)
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlocksStored) and last.blocks[-1].name == parent_name and last.salt == salt:
            last.blocks.append(stored)
        else:
            self._pending.append(BlocksStored([stored], parent_name, salt))

    def remove(self, digest: bytes) -> None:
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlocksRemoved):
            last.names.append(_name(digest))
        else:
            self._pending.append(BlocksRemoved([_name(digest)]))

    def clear(self) -> None:
        self._pending.append(BlocksCleared())

    def publish(self) -> None:
        """What was recorded since the last call becomes a batch, if it is anything."""
        if not self._pending:
            return
        events, self._pending = self._pending, []
        with self._lock:
            self._number += 1
            batch = KvEventBatch(number=self._number, timestamp=time.time(), events=events)
            self._history.append(batch)
            self._num_history_blocks += _num_blocks(batch)
            while self._num_history_blocks > MAX_HISTORY_BLOCKS and len(self._history) > 1:
                self._num_history_blocks -= _num_blocks(self._history.popleft())
            for event in events:
                self._apply(event)
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def after(self, number: int) -> list[KvEventBatch]:
        """The batches behind a number.

        Raises:
            CursorLostError: some of them are not kept, or this log has not come to that number.
        """
        with self._lock:
            num_new = self._number - number
            if not 0 <= num_new <= len(self._history):
                raise CursorLostError(f"batch {number + 1} is not kept; begin anew, from 0")
            return list(self._history)[len(self._history) - num_new :]

    def snapshot(self) -> list[KvEventBatch]:
        """What is in the cache now, as batches whose last has the number of the last that was published."""
        with self._lock:
            number, live = self._number, dict(self._live)
        groups: list[list[BlocksStored]] = []
        for i, (block, parent, salt) in enumerate(_parents_first(live)):
            if i % _SNAPSHOT_BLOCKS == 0:
                groups.append([])
            group = groups[-1]
            if group and group[-1].blocks[-1].name == parent and group[-1].salt == salt:
                group[-1].blocks.append(block)
            else:
                group.append(BlocksStored([block], parent, salt))
        count = max(len(groups), 1)
        return [
            KvEventBatch(
                number=number - count + 1 + index,
                timestamp=time.time(),
                events=[*([BlocksCleared()] if index == 0 else []), *(groups[index] if groups else [])],
                snapshot=(index, count),
                num_snapshot_blocks=len(live),
            )
            for index in range(count)
        ]

    def check(self, digests: Iterable[bytes]) -> None:
        """AssertionError unless these are the blocks that the published events leave."""
        assert self._live.keys() == {_name(digest) for digest in digests}, "KV events tell of another cache"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Nothing more will come: tell whoever listens."""
        with self._lock:
            self._is_closed = True
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have `listener` called, in the publishing thread, whenever there is something new."""
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def _apply(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            parent = event.parent
            for block in event.blocks:
                self._live[block.name] = (block, parent, event.salt)
                parent = block.name
        elif isinstance(event, BlocksRemoved):
            for name in event.names:
                self._live.pop(name, None)
        else:
            self._live.clear()


def _parents_first(live: Mapping[int, _Live]) -> Iterator[_Live]:
    """A parent that was evicted and came back stands behind its children in the order of arrival."""
    children: defaultdict[int, list[_Live]] = defaultdict(list)
    roots = []
    for entry in live.values():
        parent = entry[1]
        if parent is None or parent not in live:
            roots.append(entry)
        else:
            children[parent].append(entry)
    stack = roots[::-1]
    while stack:
        entry = stack.pop()
        yield entry
        stack += reversed(children[entry[0].name])


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big", signed=True)


def _num_blocks(batch: KvEventBatch) -> int:
    """Counting removals too: they take room as well."""
    return (
        1
        + sum(len(e.blocks) for e in batch.events if isinstance(e, BlocksStored))
        + sum(len(e.names) for e in batch.events if isinstance(e, BlocksRemoved))
    )
