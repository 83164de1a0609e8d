"""The work of a KV-block-major attention, listed on the device: work items, and blocks that neighbours share.

Three launches: a tile of neighbouring queries finds what they share and counts the rest by block; the counts become
places and work items; each (query, block) goes to its place. Grids follow from shapes, the host waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.tape import scratch, taped
from msaserve.ops.triton_ragged import next_power_of_2, query_tile

MIN_SHARE = 16
"""32nds of the queries of one running softmax that must have chosen a block for their tile to share it: attending to
it costs the tile as much as so many of them would alone, for one query that chose the block as for all."""
MIN_SHARED = 4
"""Queries of a tile that must have chosen a block for the tile to share it, and"""
MIN_BLOCKS = 3
"""blocks that a tile must share for its own start and end to be worth it."""


@triton.jit
def popcount(x):
    """Set bits of each int32, taken as 32 bits."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _choices(
    block_ids,
    seq_lens,
    cu_query_lens,
    tile,
    head,
    B,
    max_blocks,
    stride_ih,
    stride_it,
    stride_is,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TP: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """TILE queries of one request: which, up to where, their blocks [TP, SP] and which of them the query sees."""
    request, first, _start, stop = query_tile(cu_query_lens, tile, B, TILE, BLOCK_B)
    seq_len = tl.load(seq_lens + request)
    shift = seq_len - stop  # position of token 0 of the batch
    end = tl.minimum(first + TILE, stop)
    token = first + tl.arange(0, TP)
    place = tl.arange(0, SP)
    n = tl.load(
        block_ids + head * stride_ih + token[:, None].to(tl.int64) * stride_it + place[None, :] * stride_is,
        mask=(token < end)[:, None] & (place < S)[None, :],
        other=-1,
    )
    valid = (n >= 0) & (n < max_blocks) & (n * BLOCK <= (shift + token)[:, None])
    return request, first, end, shift, seq_len, n, valid


@triton.jit(do_not_specialize=["B", "max_blocks", "T", "part_tokens"])
def _share_kernel(
    block_ids,
    seq_lens,
    cu_query_lens,
    row_counts,
    ranks,
    part_counts,
    tiles,
    blocks,
    slots,
    B,
    max_blocks,
    T,
    part_tokens,
    stride_ih,
    stride_it,
    stride_is,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
    TP: tl.constexpr,
    PART: tl.constexpr,
    CAPACITY: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    MIN_SHARED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """A tile's list of shared blocks; of every other choice its rank among those of its block."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request, first, end, shift, seq_len, n, valid = _choices(
        block_ids, seq_lens, cu_query_lens, tile, head, B, max_blocks,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, TILE, TP, BLOCK_B,
    )  # fmt: skip
    query = tl.arange(0, TP)
    place = tl.arange(0, SP)
    token = first + query
    live = token < end
    own = head.to(tl.int64) * T + token
    is_part = valid
    if PART > 0:
        chosen_by = tl.zeros([TP, SP], tl.int32)
        for j in range(TILE):
            sees = n * BLOCK <= tl.where(first + j < end, shift + first + j, -1)
            theirs = block_ids + head * stride_ih + (first + j).to(tl.int64) * stride_it
            hit = n < 0
            for s in tl.static_range(S):
                hit = hit | (n == tl.load(theirs + s * stride_is, mask=first + j < end, other=-1))
            chosen_by |= (hit & sees).to(tl.int32) << j
        parts = tl.zeros([TP, SP], tl.int32)
        for j in tl.static_range(TILE // PART):
            parts += (((chosen_by >> (j * PART)) & ((1 << PART) - 1)) != 0).to(tl.int32)
        # a partly filled block is never shared: its unused slots must be masked
        shared = valid & ((n + 1) * BLOCK <= seq_len)
        shared = shared & (popcount(chosen_by) >= tl.maximum((MIN_SHARE * PART * parts + 31) // 32, MIN_SHARED))
        lower = ((tl.full([TP], 1, tl.int32) << query) - 1)[:, None]
        listed = shared & ((chosen_by & lower) == 0)
        count = tl.sum(tl.sum(listed.to(tl.int32), 1), 0)
        count = tl.where(count >= MIN_BLOCKS, count, 0)
        shared = shared & (n < tl.where(count > 0, max_blocks, 0))
        listed = listed & shared
        flat = tl.reshape(listed.to(tl.int32), [TP * SP])
        listed_at = tl.reshape(tl.cumsum(flat, 0) - flat, [TP, SP])
        at = head.to(tl.int64) * tl.num_programs(0) + tile
        tl.store(blocks + (at * CAPACITY + listed_at) * 2, n, mask=listed)
        tl.store(blocks + (at * CAPACITY + listed_at) * 2 + 1, chosen_by, mask=listed)
        tl.store(tiles + at * 4, request)
        tl.store(tiles + at * 4 + 1, first)
        tl.store(tiles + at * 4 + 2, end)
        tl.store(tiles + at * 4 + 3, count)
        # what the tile's list took over shares one partial result, in the slot of the first of its places
        shared_place = tl.min(tl.where(shared, place[None, :], SP), 1)
        valid = valid & ~shared
        is_shared = place[None, :] == shared_place[:, None]
        is_part = valid | is_shared
        slot = tl.cumsum(is_part.to(tl.int32), 1) - 1
        tl.store(slots + own, tl.where(shared_place < SP, tl.sum(tl.where(is_shared, slot, 0), 1), -1), mask=live)
    else:
        slot = tl.cumsum(is_part.to(tl.int32), 1) - 1
    tl.store(part_counts + own, tl.sum(is_part.to(tl.int32), 1), mask=live)
    unit = token // part_tokens * tl.num_programs(1) + head
    row = (unit * B + request)[:, None].to(tl.int64) * max_blocks + n
    rank = tl.atomic_add(row_counts + row, 1, mask=valid, sem="relaxed")
    tl.store(
        ranks + own[:, None] * S + place[None, :],
        tl.where(valid, rank * 64 + slot, -1),
        mask=live[:, None] & (place < S)[None, :],
    )


@triton.jit(do_not_specialize=["B", "max_blocks", "heads", "part_entries", "capacity"])
def _rows_kernel(
    block_table,
    seq_lens,
    cu_query_lens,
    row_counts,
    cursors,
    items,
    B,
    max_blocks,
    heads,
    part_entries,
    capacity,
    stride_bt,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Counts of a unit's rows, in place, to where their entries begin; and the rows' work items."""
    groups = (max_blocks + ROWS - 1) // ROWS
    request = tl.program_id(0) // groups
    n = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(1)
    units = tl.num_programs(1)
    own = row_counts + (unit * B + request).to(tl.int64) * max_blocks + n
    count = tl.load(own, mask=n < max_blocks, other=0)
    total = tl.sum(count, 0)
    if total > 0:
        begin = unit // heads * part_entries + tl.atomic_add(cursors + unit, total, sem="relaxed")
        begin += tl.cumsum(count, 0) - count
        tl.store(own, begin, mask=count > 0)
        seq_len = tl.load(seq_lens + request)
        shift = seq_len - tl.load(cu_query_lens + request + 1)
        page = tl.load(block_table + request.to(tl.int64) * stride_bt + n, mask=count > 0, other=0)
        # a request's last, partly filled block is listed apart: its unused slots must be masked
        is_tail = (n + 1) * BLOCK > seq_len
        needed = (count + ITEM - 1) // ITEM
        step = (count + tl.maximum(needed, 1) - 1) // tl.maximum(needed, 1)
        step = (step + ALIGN - 1) // ALIGN * ALIGN
        full = tl.where(is_tail, 0, needed)
        tail = needed - full
        slot = unit * capacity + tl.atomic_add(cursors + units + unit, tl.sum(full, 0), sem="relaxed")
        slot += tl.cumsum(full, 0) - full
        if tl.sum(tail, 0) > 0:
            tail_slot = units * capacity + tl.atomic_add(cursors + 2 * units, tl.sum(tail, 0), sem="relaxed")
            slot = tl.where(is_tail, tail_slot, slot)
        for i in range(tl.max(needed, 0)):
            item = items + (slot + i).to(tl.int64) * 8
            live = i < needed
            tl.store(item, unit % heads + n * 0, mask=live)
            tl.store(item + 1, page, mask=live)
            tl.store(item + 2, begin + tl.minimum(i * step, count), mask=live)
            tl.store(item + 3, begin + tl.minimum((i + 1) * step, count), mask=live)
            tl.store(item + 4, shift - n * BLOCK, mask=live)
            tl.store(item + 5, seq_len - n * BLOCK, mask=live)


@triton.jit(do_not_specialize=["B", "max_blocks", "T", "part_tokens"])
def _scatter_kernel(
    block_ids,
    seq_lens,
    cu_query_lens,
    starts,
    ranks,
    entries,
    B,
    max_blocks,
    T,
    part_tokens,
    stride_ih,
    stride_it,
    stride_is,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    request, first, end, _shift, _seq_len, n, _valid = _choices(
        block_ids, seq_lens, cu_query_lens, tl.program_id(0), head, B, max_blocks,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, TILE, TILE, BLOCK_B,
    )  # fmt: skip
    token = first + tl.arange(0, TILE)
    entry = token[:, None] * S + tl.arange(0, SP)[None, :]
    live = (token < end)[:, None] & (tl.arange(0, SP) < S)[None, :]
    own = head.to(tl.int64) * T * S
    rank = tl.load(ranks + own + entry, mask=live, other=-1)
    unit = token // part_tokens * tl.num_programs(1) + head
    row = (unit * B + request)[:, None].to(tl.int64) * max_blocks + n
    start = tl.load(starts + row, mask=rank >= 0, other=0)
    tl.store(entries + own + start + rank // 64, token[:, None] * S + rank % 64, mask=rank >= 0)


class SharedBlocks(NamedTuple):
    """Blocks that many of a tile of neighbouring queries chose. Tiles are [Hkv, tiles], some of them empty."""

    tiles: torch.Tensor
    """[Hkv, tiles, 4] int32: request, first token, end token, number of blocks."""
    blocks: torch.Tensor
    """[Hkv, tiles, capacity, 2] int32: block, and the bits of the tile's queries that chose it. In the order in which
    the queries name them."""
    slots: torch.Tensor
    """[Hkv, T] int32: which of a query's partial results is its tile's, or −1."""


class Plan(NamedTuple):
    """Work of a KV-block-major attention: places of (query, block) pairs, and work items.

    Units are parts of the queries × KV heads, heads fastest. An item is eight int32: KV head, page, first and end
    place in the head's entries (equal: no work), position of the batch's token 0 counted from the block's first slot,
    tokens of the request from that slot on, and two of padding.
    """

    entries: torch.Tensor
    """[Hkv, T * S] int32: e = t * S + s, the s-th partial result of query t."""
    items: torch.Tensor
    """[units, capacity, 8] int32: blocks full of tokens."""
    tail_items: torch.Tensor
    """[capacity, 8] int32: the last, partly filled blocks of their requests."""
    counts: torch.Tensor
    """[units + 2] int32: items of each unit and tail_items that exist; 0, to count how many items are taken."""
    part_counts: torch.Tensor
    """[Hkv, T] int32: partial results of each query."""
    shared: SharedBlocks | None = None
    """What neighbours share, if asked for: it is in no item."""


def plan(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    item: int,
    align: int,
    parts: int = 1,
    tile: int = 0,
    tile_parts: int = 1,
    warps: int = 0,
) -> Plan:
    """Work items of at most about `item` entries of one block, multiples of `align` where a block has more than one.

    Only blocks that their query sees are planned. The items of one unit stand together, roughly block by block; which
    stands where is not determined, what a unit's items hold together is. `tile`, at most 31, takes out the blocks that
    many of so many neighbouring queries share, a partly filled one never; it is worked on in `tile_parts` parts.
    """
    num_heads, num_tokens, topk = block_ids.shape
    batch, max_blocks = block_table.shape
    device = block_ids.device
    part_tokens = -(-num_tokens // parts)
    units = parts * num_heads
    num_rows = batch * max_blocks
    full = part_tokens * topk // item + min(num_rows, part_tokens * topk)
    tail = num_heads * (num_tokens // item + min(batch, num_tokens) * parts)
    share_tile = tile or 16
    padded_tile = next_power_of_2(share_tile)
    min_shared = min(MIN_SHARED, share_tile)
    num_tiles = -(-num_tokens // share_tile) + batch - 1
    capacity = share_tile * topk // min_shared
    num_units = units * full + tail
    part_counts, row_counts, cursors, ranks, entries, items, *shared_parts = scratch(
        device,
        *[((num_heads, num_tokens * topk), torch.int32)] * 2,
        ((num_units, 8), torch.int32),
        *[
            ((num_heads, num_tiles, 4), torch.int32),
            ((num_heads, num_tiles, capacity, 2), torch.int32),
            ((num_heads, num_tokens), torch.int32),
        ][: 3 if tile else 0],
        zeros=[
            ((num_heads, num_tokens), torch.int32),
            ((units * num_rows,), torch.int32),
            ((2 * units + 2,), torch.int32),
        ],
    )
    shared = SharedBlocks(*shared_parts) if tile else None
    padded = next_power_of_2(topk)
    options = {
        "S": topk,
        "SP": padded,
        "BLOCK": block_size,
        "BLOCK_B": next_power_of_2(batch),
    }
    where = (seq_lens, cu_query_lens)
    strides = block_ids.stride()
    taped(_share_kernel)[(num_tiles, num_heads)](
        block_ids,
        *where,
        row_counts,
        ranks,
        part_counts,
        *(shared if shared is not None else (ranks, ranks, ranks)),
        batch,
        max_blocks,
        num_tokens,
        part_tokens,
        *strides,
        **options,
        TILE=share_tile,
        TP=padded_tile,
        PART=tile // tile_parts,
        CAPACITY=capacity,
        MIN_SHARE=MIN_SHARE,
        MIN_SHARED=min_shared,
        MIN_BLOCKS=MIN_BLOCKS,
        num_warps=warps or max(1, min(4, padded_tile * padded // 256)),
    )
    rows = 256
    taped(_rows_kernel)[(batch * -(-max_blocks // rows), units)](
        block_table,
        *where,
        row_counts,
        cursors,
        items,
        batch,
        max_blocks,
        num_heads,
        part_tokens * topk,
        full,
        block_table.stride(0),
        BLOCK=block_size,
        ROWS=rows,
        ITEM=item,
        ALIGN=align,
        num_warps=4,
    )
    scatter_tile = max(1, 1024 // padded)
    taped(_scatter_kernel)[(-(-num_tokens // scatter_tile) + batch - 1, num_heads)](
        block_ids,
        *where,
        row_counts,
        ranks,
        entries,
        batch,
        max_blocks,
        num_tokens,
        part_tokens,
        *strides,
        **options,
        TILE=scatter_tile,
        num_warps=4,
    )
    return Plan(
        entries,
        items[: units * full].view(units, full, 8),
        items[units * full :],
        cursors[units:],
        part_counts,
        shared,
    )
