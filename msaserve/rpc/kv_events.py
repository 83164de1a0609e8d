"""KV event batches to messages and back."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

from msaserve.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvBlock, KvEvent, KvEventBatch

_MAIN_ATTENTION = ("", "full_attention", "mla_attention", "sink_full_attention")
_INDEXED_TIERS = (pb.KV_CACHE_TIER_UNSPECIFIED, pb.KV_CACHE_TIER_DEVICE, pb.KV_CACHE_TIER_HOST)


def batch_to_proto(batch: KvEventBatch, *, block_size: int) -> Any:
    """Of rank 0, which is all there is. Events have numbers of their own only where they are new."""
    message = pb.KvEventBatch(sequence_number=batch.number, timestamp=batch.timestamp, dp_rank=0)
    if batch.snapshot is not None:
        index, count = batch.snapshot
        message.snapshot.index, message.snapshot.count = index, count
        message.snapshot.blocks = batch.num_snapshot_blocks
    for position, event in enumerate(batch.events):
        into = message.events.add(event_id=0 if batch.snapshot else (batch.number << 16) + position)
        if isinstance(event, BlocksStored):
            _stored_to_proto(event, into.stored, block_size)
        elif isinstance(event, BlocksRemoved):
            into.removed.block_hashes.extend(event.names)
            into.removed.tier = pb.KV_CACHE_TIER_DEVICE
            into.removed.locality = pb.KV_CACHE_LOCALITY_LOCAL
        else:
            into.cleared.SetInParent()
    return message


def batch_from_proto(message: Any) -> KvEventBatch | None:
    """None if the batch tells of the worker's load only, or of a further rank.

    Blocks of other places than the worker's own memory, and of other kinds of attention than the main one, are left
    out.
    """
    if message.load.load_only or message.dp_rank != 0:
        return None
    events = [event for event in map(_event_from_proto, message.events) if event is not None]
    has_snapshot = message.HasField("snapshot")
    return KvEventBatch(
        number=message.sequence_number,
        timestamp=message.timestamp,
        events=events,
        snapshot=(message.snapshot.index, message.snapshot.count) if has_snapshot else None,
        num_snapshot_blocks=message.snapshot.blocks,
    )


def _stored_to_proto(event: BlocksStored, into: Any, block_size: int) -> None:
    into.tier = pb.KV_CACHE_TIER_DEVICE
    into.locality = pb.KV_CACHE_LOCALITY_LOCAL
    if event.parent is not None:
        into.parent_block_hash = event.parent
    if event.salt:
        into.cache_salt = event.salt
    for block in event.blocks:
        message = into.blocks.add(block_hash=block.name, block_size=block_size)
        message.token_ids.extend(block.token_ids)
        for name, offset in block.media:
            key = message.extra_keys.add().multimodal
            key.identifier, key.offset = name, offset


def _event_from_proto(message: Any) -> KvEvent | None:
    kind = message.WhichOneof("data")
    if kind == "cleared":
        return BlocksCleared()
    if kind is None:
        return None
    data = getattr(message, kind)
    if data.tier not in _INDEXED_TIERS or data.locality == pb.KV_CACHE_LOCALITY_REMOTE:
        return None
    if kind == "removed":
        return BlocksRemoved(list(data.block_hashes))
    if data.kv_cache_spec_kind not in _MAIN_ATTENTION or not data.blocks:
        return None
    return BlocksStored(
        blocks=[KvBlock(b.block_hash, b.token_ids, tuple(_media_keys(b))) for b in data.blocks],
        parent=data.parent_block_hash if data.HasField("parent_block_hash") else None,
        salt=data.cache_salt,
    )


def _media_keys(block: Any) -> list[tuple[str, int]]:
    keys = (key.multimodal for key in block.extra_keys if key.WhichOneof("key") == "multimodal")
    return [(key.identifier, key.offset) for key in keys]
