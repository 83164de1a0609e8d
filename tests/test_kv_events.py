"""The log of a prefix cache: numbers, what is kept, what a follower who begins late is told, and the wire."""

from __future__ import annotations

import random
import threading
from array import array
from hashlib import blake2b

import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2 as pb

import msaserve.kv_events as kv_events
from msaserve.gateway.kv_index import KvIndex, PromptBlocks
from msaserve.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, CursorLostError, KvEventLog
from msaserve.rpc.kv_events import batch_from_proto, batch_to_proto
from msaserve.types import GenerateRequest, MediaItem

SIZE = 4


def item(offset: int, length: int, name: str) -> MediaItem:
    return MediaItem(
        modality="image",
        patches=np.zeros((4, 1176), np.float32),
        grid_thw=((1, 2, 2),),
        offset=offset,
        length=length,
        content_hash=name.encode(),
        name=name,
    )


class Cache:
    """A prefix cache that holds whatever it is given."""

    def __init__(self) -> None:
        self.log = KvEventLog(block_size=SIZE)

    def digests(self, tokens: list[int], media: tuple[MediaItem, ...] = (), salt: str = "") -> list[bytes]:
        names = [[i.name for i in media if i.offset < e and i.offset + i.length > e - SIZE] for e in self.ends(tokens)]
        return [
            blake2b(repr((salt, tokens[:end], names[: n + 1])).encode(), digest_size=32).digest()
            for n, end in enumerate(self.ends(tokens))
        ]

    def ends(self, tokens: list[int]) -> range:
        return range(SIZE, len(tokens) + 1, SIZE)

    def store(self, tokens: list[int], *, first: int = 0, media: tuple[MediaItem, ...] = (), salt: str = "") -> None:
        digests = self.digests(tokens, media, salt)
        for block in range(first, len(digests)):
            start, end = block * SIZE, (block + 1) * SIZE
            self.log.store(
                digest=digests[block],
                parent=digests[block - 1] if block else None,
                token_ids=array("i", tokens[start:end]),
                start=start,
                media=[i for i in media if i.offset < end and i.offset + i.length > start],
                salt=salt,
            )

    def remove(self, tokens: list[int], block: int) -> None:
        self.log.remove(self.digests(tokens)[block])


def prompt(tokens: list[int], media: tuple[MediaItem, ...] = (), salt: str = "") -> PromptBlocks:
    return PromptBlocks(GenerateRequest(request_id="a", prompt_token_ids=tokens, media=media, cache_salt=salt))


def over_wire(index: KvIndex, log: KvEventLog, *, whole: bool = False) -> None:
    for batch in log.snapshot() if whole else log.after(index.number):
        message = pb.KvEventBatch.FromString(batch_to_proto(batch, block_size=SIZE).SerializeToString())
        received = batch_from_proto(message)
        assert received is not None
        index.admit(received)


def test_numbers_follow_one_another_and_what_is_new_comes_once() -> None:
    cache = Cache()
    start = cache.log.snapshot()[-1].number
    cache.log.publish()
    assert cache.log.after(start) == []
    cache.store(list(range(8)))
    cache.log.publish()
    cache.remove(list(range(8)), 1)
    cache.log.clear()
    cache.log.publish()
    first, second = cache.log.after(start)
    assert (first.number, second.number) == (start + 1, start + 2)
    (stored,) = first.events
    assert isinstance(stored, BlocksStored)
    assert [list(block.token_ids) for block in stored.blocks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    removed, cleared = second.events
    assert removed == BlocksRemoved([stored.blocks[1].name])
    assert cleared == BlocksCleared()
    assert cache.log.after(start + 1) == [second]
    for number in (start - 1, start + 3, 1):
        with pytest.raises(CursorLostError):
            cache.log.after(number)


def test_a_later_log_knows_no_earlier_number() -> None:
    earlier = KvEventLog(block_size=SIZE).snapshot()[-1].number
    cache = Cache()
    cache.log._number = earlier + 5  # 5 ms later
    with pytest.raises(CursorLostError):
        cache.log.after(earlier)


def test_history_is_bounded_by_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_HISTORY_BLOCKS", 10)
    cache = Cache()
    start = cache.log.snapshot()[-1].number
    for seed in range(6):
        cache.store([seed] * 8)
        cache.log.publish()
    assert len(cache.log.after(start + 3)) == 3
    with pytest.raises(CursorLostError):
        cache.log.after(start + 2)
    index = KvIndex()
    over_wire(index, cache.log, whole=True)
    assert len(index) == 12


def test_on_the_wire_a_block_has_what_other_gateways_read() -> None:
    cache = Cache()
    cache.store(list(range(8)), media=(item(3, 2, "aa"),), salt="s")
    cache.remove([1] * 4, 0)
    cache.log.publish()
    start = cache.log.snapshot()[-1].number - 1
    message = batch_to_proto(cache.log.after(start)[0], block_size=SIZE)
    stored, removed = message.events
    assert (message.sequence_number, message.dp_rank) == (start + 1, 0)
    assert not message.HasField("snapshot")
    assert stored.event_id != removed.event_id
    assert not stored.stored.HasField("parent_block_hash")
    assert (stored.stored.cache_salt, stored.stored.tier) == ("s", pb.KV_CACHE_TIER_DEVICE)
    first, second = stored.stored.blocks
    assert (list(first.token_ids), first.block_size) == ([0, 1, 2, 3], 4)
    assert [(k.multimodal.identifier, k.multimodal.offset) for k in first.extra_keys] == [("aa", 3)]
    assert [(k.multimodal.identifier, k.multimodal.offset) for k in second.extra_keys] == [("aa", -1)]
    assert len(removed.removed.block_hashes) == 1
    whole = batch_to_proto(cache.log.snapshot()[0], block_size=SIZE)
    assert (whole.snapshot.index, whole.snapshot.count, whole.snapshot.blocks) == (0, 1, 2)
    assert whole.events[0].WhichOneof("data") == "cleared"
    assert {event.event_id for event in whole.events} == {0}


def test_what_is_not_the_workers_own_memory_is_passed_over() -> None:
    message = pb.KvEventBatch(sequence_number=7)
    for change in (
        {"tier": pb.KV_CACHE_TIER_DISK},
        {"locality": pb.KV_CACHE_LOCALITY_REMOTE},
        {"kv_cache_spec_kind": "sliding_window"},
    ):
        block = pb.KvBlock(block_hash=1, token_ids=[1, 2, 3, 4], block_size=4)
        message.events.add(stored=pb.KvBlocksStored(blocks=[block], **change))
    batch = batch_from_proto(message)
    assert batch is not None
    assert batch.events == []
    message.load.load_only = True
    assert batch_from_proto(message) is None
    assert batch_from_proto(pb.KvEventBatch(sequence_number=7, dp_rank=1)) is None


def test_an_index_says_how_much_of_a_prompt_is_there() -> None:
    cache, index = Cache(), KvIndex()
    over_wire(index, cache.log, whole=True)
    assert index.is_known
    tokens = list(range(20))
    pictures = (item(6, 3, "aa"),)
    cache.store(tokens, media=pictures)
    cache.store([9] * 8, salt="s")
    cache.log.publish()
    over_wire(index, cache.log)
    assert index.num_tokens(prompt(tokens, pictures)) == 20
    assert index.num_tokens(prompt([*tokens[:10], *[0] * 10], pictures)) == 8
    assert index.num_tokens(prompt(tokens, (item(6, 3, "bb"),))) == 4
    assert index.num_tokens(prompt(tokens)) == 4
    assert index.num_tokens(prompt(tokens[:7])) == 4
    assert index.num_tokens(prompt([9] * 8)) == 0
    assert index.num_tokens(prompt([9] * 8, salt="s")) == 8
    cache.log.remove(cache.digests(tokens, pictures)[2])
    cache.log.publish()
    over_wire(index, cache.log)
    assert index.num_tokens(prompt(tokens, pictures)) == 8
    cache.log.clear()
    cache.log.publish()
    over_wire(index, cache.log)
    assert (len(index), index.num_tokens(prompt(tokens, pictures))) == (0, 0)


def test_an_index_admits_no_gap_and_nothing_twice() -> None:
    cache, index = Cache(), KvIndex()
    over_wire(index, cache.log, whole=True)
    for seed in range(3):
        cache.store([seed] * 4)
        cache.log.publish()
    first, second, third = cache.log.after(index.number)
    index.admit(first)
    index.admit(first)
    with pytest.raises(CursorLostError):
        index.admit(third)
    assert len(index) == 1
    index.admit(second)
    index.admit(third)
    assert len(index) == 3
    # Two copies of a block, as some engines keep them: it is there until both have gone.
    cache.store([0] * 4)
    cache.remove([0] * 4, 0)
    cache.log.publish()
    over_wire(index, cache.log)
    assert index.num_tokens(prompt([0] * 4)) == 4
    # A block whose beginning is unknown is of no use.
    cache.store([5] * 12, first=1)
    cache.log.publish()
    over_wire(index, cache.log)
    assert index.num_tokens(prompt([5] * 12)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_whoever_follows_and_whoever_begins_late_know_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sequences over a common trunk; parents may go and come back before their children."""
    monkeypatch.setattr(kv_events, "_SNAPSHOT_BLOCKS", 3)
    rng = random.Random(seed)
    cache, follower = Cache(), KvIndex()
    over_wire(follower, cache.log, whole=True)
    live: dict[tuple[int, ...], None] = {}
    for turn in range(60):
        tokens = [token for _ in range(rng.randrange(1, 5)) for token in [rng.randrange(2)] * SIZE]
        for end in cache.ends(tokens):
            if tuple(tokens[:end]) not in live:
                live[tuple(tokens[:end])] = None
                cache.store(tokens[:end], first=end // SIZE - 1)
        for gone in rng.sample(list(live), min(len(live), rng.randrange(3))):
            del live[gone]
            cache.remove(list(gone), len(gone) // SIZE - 1)
        if turn in (10, 40):
            live.clear()
            cache.log.clear()
        cache.log.publish()
        if rng.random() < 0.5:
            over_wire(follower, cache.log)
    over_wire(follower, cache.log)
    late = KvIndex()
    over_wire(late, cache.log, whole=True)
    assert late.number == follower.number
    whole = {tokens for tokens in live if all(tokens[:end] in live for end in cache.ends(list(tokens)))}
    assert whole
    for tokens in whole:
        assert follower.num_tokens(prompt(list(tokens))) == late.num_tokens(prompt(list(tokens))) == len(tokens)
    for _ in range(50):
        tokens = [token for _ in range(4) for token in [rng.randrange(2)] * SIZE]
        assert follower.num_tokens(prompt(tokens)) == late.num_tokens(prompt(tokens))


def test_listeners_hear_of_batches_and_of_the_end() -> None:
    log = KvEventLog(block_size=SIZE)
    heard = threading.Semaphore(0)
    with log.listening(heard.release):
        log.publish()
        assert not heard.acquire(blocking=False)
        log.clear()
        log.publish()
        log.close()
        assert log.is_closed
        assert heard.acquire(blocking=False)
        assert heard.acquire(blocking=False)
    log.close()
    assert not heard.acquire(blocking=False)
