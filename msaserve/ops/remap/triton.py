"""remap through a bitmap: bit t of row (request, block) says that query t chose the block.

An entry's place in its row is the number of set bits before its own, so the rows come out ascending whatever order
the programs run in. Besides the compressed rows, `plan` lists work items for the KV-block-major attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import why_not_triton
from msaserve.ops.remap import BlockQueries
from msaserve.ops.triton_ragged import query_tile

MIN_SHARED = 4
"""Queries of a tile that must have chosen a block for the tile to share it, and"""
MIN_BLOCKS = 3
"""blocks that a tile must share for its own start and end to be worth it."""


@triton.jit
def _popcount(x):
    """Set bits of each int32, taken as 32 bits."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _entries_of_tile(
    block_ids,
    seq_lens,
    cu_query_lens,
    tile,
    head,
    B,
    max_blocks,
    words_total,
    stride_ih,
    stride_it,
    stride_is,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """32 queries of one request: tokens, which exist, places, which [32, SP] are valid, their rows and words."""
    request, first, start, stop = query_tile(cu_query_lens, tile, B, 32, BLOCK_B)
    token = first + tl.arange(0, 32)
    place = tl.arange(0, SP)
    n = tl.load(
        block_ids + head * stride_ih + token[:, None].to(tl.int64) * stride_it + place[None, :] * stride_is,
        mask=(token < stop)[:, None] & (place < S)[None, :],
        other=-1,
    )
    valid = (n >= 0) & (n < max_blocks)
    if BLOCK > 0:
        # what the attention may use: blocks that begin at or before the query's own position
        position = tl.load(seq_lens + request) - stop + token
        valid = valid & (n * BLOCK <= position[:, None])
    row = request * max_blocks + n
    words = (stop - start + 31) // 32
    first_word = head.to(tl.int64) * words_total + start // 32 + request
    word = first_word * max_blocks + n * words + (first - start) // 32
    return token, token < stop, place, valid, row, word


@triton.jit
def _mark_kernel(
    block_ids,
    seq_lens,
    cu_query_lens,
    bitmap,
    B,
    max_blocks,
    words_total,
    stride_ih,
    stride_it,
    stride_is,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    _token, _live, _place, valid, _row, word = _entries_of_tile(
        block_ids, seq_lens, cu_query_lens, tl.program_id(0), tl.program_id(1), B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, BLOCK_B,
    )  # fmt: skip
    bit = (tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]).to(tl.int32)
    tl.atomic_or(bitmap + word, bit, mask=valid, sem="relaxed")


@triton.jit
def _shared_by_tile(chosen_by, i, live, TILE: tl.constexpr, MIN_SHARED: tl.constexpr):
    """The bits of the i-th tile of each word, and whether its queries share the block well enough.

    A quarter of a tile is one running softmax: it costs the same for one query that chose the block as for all.
    """
    TILE_MASK: tl.constexpr = (1 << TILE) - 1 if TILE < 32 else -1
    QUARTER_MASK: tl.constexpr = (1 << (TILE // 4)) - 1
    queries = (chosen_by >> (i * TILE)) & TILE_MASK
    quarters = tl.zeros_like(queries)
    for j in tl.static_range(4):
        quarters += (((queries >> (j * (TILE // 4))) & QUARTER_MASK) != 0).to(tl.int32)
    return queries, live & (_popcount(queries) >= tl.maximum(2 * quarters, MIN_SHARED))


@triton.jit
def _share_kernel(
    seq_lens,
    cu_query_lens,
    bitmap,
    tile_totals,
    max_blocks,
    words_total,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SHARED: tl.constexpr,
):
    """How many blocks each tile of neighbours would share."""
    groups = (max_blocks + ROWS - 1) // ROWS
    request = tl.program_id(0) // groups
    n = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    start = tl.load(cu_query_lens + request)
    words = (tl.load(cu_query_lens + request + 1) - start + 31) // 32
    first_word = tl.program_id(1).to(tl.int64) * words_total + start // 32 + request
    is_whole = ((n < max_blocks) & ((n + 1) * BLOCK <= tl.load(seq_lens + request)))[:, None]
    for w in range(0, words, WORDS):
        word = w + tl.arange(0, WORDS)
        live = is_whole & (word < words)[None, :]
        at = bitmap + first_word * max_blocks + n[:, None] * words + word[None, :]
        chosen_by = tl.load(at, mask=live, other=0)
        for i in tl.static_range(32 // TILE):
            _queries, shared = _shared_by_tile(chosen_by, i, live, TILE, MIN_SHARED)
            tile = (first_word + word[None, :]) * (32 // TILE) + i + n[:, None] * 0
            tl.atomic_add(tile_totals + tile, 1, mask=shared, sem="relaxed")


@triton.jit
def _rows_kernel(
    block_table,
    seq_lens,
    cu_query_lens,
    bitmap,
    before,
    counts,
    cursors,
    items,
    tile_totals,
    tile_counts,
    tile_blocks,
    B,
    max_blocks,
    words_total,
    part_items,
    stride_bt,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_WORDS: tl.constexpr,
    ITEM: tl.constexpr,
    ALIGN: tl.constexpr,
    PLAN: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    MIN_SHARED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """Bits before each word of its row, and the row's count; for a plan the row's start and its work items too."""
    groups = (max_blocks + ROWS - 1) // ROWS
    request = tl.program_id(0) // groups
    n = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    start = tl.load(cu_query_lens + request)
    stop = tl.load(cu_query_lens + request + 1)
    seq_len = tl.load(seq_lens + request)
    words = (stop - start + 31) // 32
    first_word = head.to(tl.int64) * words_total + start // 32 + request
    base = first_word * max_blocks + n[:, None] * words
    is_whole = ((n + 1) * BLOCK <= seq_len)[:, None]
    total = tl.zeros([ROWS], tl.int32)
    ends = ()
    for part in tl.static_range(PARTS):
        last = words if part == PARTS - 1 else tl.minimum(words, (part + 1) * PART_WORDS)
        for w in range(part * PART_WORDS, last, WORDS):
            word = w + tl.arange(0, WORDS)
            live = (n < max_blocks)[:, None] & (word < words)[None, :]
            chosen_by = tl.load(bitmap + base + word[None, :], mask=live, other=0)
            if TILE > 0:
                rest = chosen_by
                for i in tl.static_range(32 // TILE):
                    queries, shared = _shared_by_tile(chosen_by, i, live & is_whole, TILE, MIN_SHARED)
                    tile = (first_word + word[None, :]) * (32 // TILE) + i + n[:, None] * 0
                    shared = shared & (tl.load(tile_totals + tile, mask=shared, other=0) >= MIN_BLOCKS)
                    slot = tl.atomic_add(tile_counts + tile, 1, mask=shared, sem="relaxed")
                    at = tile_blocks + (tile * TILE_BLOCKS + slot) * 2
                    tl.store(at, n[:, None] + word[None, :] * 0, mask=shared)
                    tl.store(at + 1, queries, mask=shared)
                    rest = tl.where(shared, rest ^ (queries << (i * TILE)), rest)
                tl.store(bitmap + base + word[None, :], rest, mask=live & (rest != chosen_by))
                chosen_by = rest
            bits = _popcount(chosen_by)
            # only words with a bit are ever looked up
            place = tl.cumsum(bits, 1) - bits + total[:, None]
            tl.store(before + base + word[None, :], place, mask=live & (chosen_by != 0))
            total += tl.sum(bits, 1)
        ends = ends + (total,)
    row = head * B * max_blocks + request * max_blocks + n
    if PLAN:
        if tl.max(total, 0) > 0:
            chosen = (n < max_blocks) & (total > 0)
            entry = tl.atomic_add(cursors + head + tl.zeros([ROWS], tl.int32), total, mask=chosen, sem="relaxed")
            tl.store(counts + row, entry, mask=chosen)
            # a request's last, partly filled block is listed apart: its unused slots must be masked
            is_tail = (n + 1) * BLOCK > seq_len
            page = tl.load(block_table + request.to(tl.int64) * stride_bt + n, mask=chosen, other=0)
            begin = tl.zeros([ROWS], tl.int32)
            for part in tl.static_range(PARTS):
                size = ends[part] - begin
                needed = (size + ITEM - 1) // ITEM
                step = (size + tl.maximum(needed, 1) - 1) // tl.maximum(needed, 1)
                step = (step + ALIGN - 1) // ALIGN * ALIGN
                region = tl.where(is_tail, PARTS, part)
                slot = tl.atomic_add(cursors + heads + region, needed, mask=chosen & (needed > 0), sem="relaxed")
                for i in range(tl.max(needed, 0)):
                    item = items + (region * part_items + slot + i).to(tl.int64) * 8
                    live = chosen & (i < needed)
                    tl.store(item, head + tl.zeros([ROWS], tl.int32), mask=live)
                    tl.store(item + 1, page, mask=live)
                    tl.store(item + 2, entry + begin + tl.minimum(i * step, size), mask=live)
                    tl.store(item + 3, entry + begin + tl.minimum((i + 1) * step, size), mask=live)
                    tl.store(item + 4, seq_len - stop - n * BLOCK, mask=live)
                    tl.store(item + 5, seq_len - n * BLOCK, mask=live)
                begin += size
    else:
        tl.store(counts + row + head, total, mask=n < max_blocks)


@triton.jit
def _starts_kernel(counts, num_rows, STEP: tl.constexpr):
    """counts [num_rows + 1] of each head to their exclusive prefix sum, in place."""
    base = counts + tl.program_id(0).to(tl.int64) * (num_rows + 1)
    total = tl.zeros([], tl.int32)
    for i in range(0, num_rows, STEP):
        row = i + tl.arange(0, STEP)
        count = tl.load(base + row, mask=row < num_rows, other=0)
        tl.store(base + row, total + tl.cumsum(count, 0) - count, mask=row < num_rows)
        total += tl.sum(count, 0)
    tl.store(base + num_rows, total)


@triton.jit
def _scatter_kernel(
    block_ids,
    seq_lens,
    cu_query_lens,
    bitmap,
    before,
    starts,
    entries,
    part_ids,
    tile_places,
    B,
    max_blocks,
    words_total,
    T,
    stride_ih,
    stride_it,
    stride_is,
    stride_rows,
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(1)
    token, live, place, valid, row, word = _entries_of_tile(
        block_ids, seq_lens, cu_query_lens, tl.program_id(0), head, B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, BLOCK_B,
    )  # fmt: skip
    bits = tl.load(bitmap + word, mask=valid, other=0)
    if TILE > 0:
        # what the tile's list took over shares one partial result, in the first of its places
        taken = valid & (((bits >> tl.arange(0, 32)[:, None]) & 1) == 0)
        valid = valid & ~taken
        shared_place = tl.min(tl.where(taken, place[None, :], SP), 1)
        own = head.to(tl.int64) * T + token
        tl.store(tile_places + own, tl.where(shared_place < SP, shared_place, -1), mask=live)
        is_part = valid | (place[None, :] == shared_place[:, None])
        ids = tl.where(is_part, 0, -1)
        tl.store(part_ids + own[:, None] * S + place[None, :], ids, mask=live[:, None] & (place < S)[None, :])
    lower = ((tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]) - 1).to(tl.int32)
    at = tl.load(before + word, mask=valid, other=0) + _popcount(bits & lower)
    at += tl.load(starts + head * stride_rows + row, mask=valid, other=0)
    tl.store(entries + head.to(tl.int64) * T * S + at, token[:, None] * S + place[None, :], mask=valid)


@triton.jit
def _tiles_kernel(
    cu_query_lens,
    tile_counts,
    tile_blocks,
    tiles,
    B,
    words_total,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Each tile's request, first token and end, and its list in ascending order of blocks: the same bits every time."""
    tile = tl.program_id(0)
    word = tile // (32 // TILE)
    b = tl.arange(0, BLOCK_B)
    start = tl.load(cu_query_lens + b, mask=b < B, other=0)
    stop = tl.load(cu_query_lens + b + 1, mask=b < B, other=0)
    first_word = start // 32 + b
    first = start + (word - first_word) * 32 + tile % (32 // TILE) * TILE
    here = (b < B) & (word >= first_word) & (first < stop) & (first >= start)
    request = tl.sum(tl.where(here, b, 0), 0)
    token = tl.sum(tl.where(here, first, 0), 0)
    end = tl.minimum(token + TILE, tl.sum(tl.where(here, stop, 0), 0))
    at = tl.program_id(1).to(tl.int64) * words_total * (32 // TILE) + tile
    count = tl.load(tile_counts + at)
    tl.store(tiles + at * 4, request)
    tl.store(tiles + at * 4 + 1, token)
    tl.store(tiles + at * 4 + 2, end)
    tl.store(tiles + at * 4 + 3, count)
    if count > 1:
        slot = tl.arange(0, TILE_BLOCKS)
        n = tl.load(tile_blocks + (at * TILE_BLOCKS + slot) * 2, mask=slot < count, other=2147483647)
        queries = tl.load(tile_blocks + (at * TILE_BLOCKS + slot) * 2 + 1, mask=slot < count, other=0)
        rank = tl.sum((n[None, :] < n[:, None]).to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(tile_blocks + (at * TILE_BLOCKS + rank) * 2, n, mask=slot < count)
        tl.store(tile_blocks + (at * TILE_BLOCKS + rank) * 2 + 1, queries, mask=slot < count)


class SharedBlocks(NamedTuple):
    """Blocks that many of a tile of neighbouring queries chose. Tiles are [Hkv, tiles], some of them empty."""

    tiles: torch.Tensor
    """[Hkv, tiles, 4] int32: request, first token, end token, number of blocks."""
    blocks: torch.Tensor
    """[Hkv, tiles, capacity, 2] int32: block, ascending, and the bits of the tile's queries that chose it."""
    places: torch.Tensor
    """[Hkv, T] int32: the place among a query's blocks that its tile's partial result takes, or −1."""
    part_ids: torch.Tensor
    """[Hkv, T, S] int32: 0 where a partial result is, else −1."""


class Plan(NamedTuple):
    """Work of a KV-block-major attention: entries as in BlockQueries, the order of rows free, and work items.

    An item is eight int32: KV head, page, first and end place in the head's entries (equal: no work), position of the
    batch's token 0 counted from the block's first slot, tokens of the request from that slot on, and two of padding.
    """

    entries: torch.Tensor
    """[Hkv, T * S] int32."""
    items: torch.Tensor
    """[parts, capacity, 8] int32: blocks full of tokens, for one stretch of the queries after another."""
    tail_items: torch.Tensor
    """[capacity, 8] int32: the last, partly filled blocks of their requests."""
    counts: torch.Tensor
    """[parts + 1] int32: items of each part and tail_items that exist."""
    shared: SharedBlocks | None = None
    """What neighbours share, if asked for: it is in no item."""


def _launch(
    block_ids: torch.Tensor,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    cu_query_lens: torch.Tensor,
    max_blocks: int,
    block_size: int,
    item: int,
    align: int,
    parts: int,
    tile: int,
) -> tuple[torch.Tensor, Plan]:
    num_heads, num_tokens, topk = block_ids.shape
    batch = cu_query_lens.shape[0] - 1
    device = block_ids.device
    is_plan = block_table is not None
    words_total = num_tokens // 32 + batch
    num_words = num_heads * words_total * max_blocks
    num_tiles = words_total * (32 // tile) if tile else 0
    zeros = torch.zeros(num_words + num_heads * (1 + 2 * num_tiles) + parts + 1, dtype=torch.int32, device=device)
    bitmap, cursors, tile_totals, tile_counts = zeros.split(
        [num_words, num_heads + parts + 1, num_heads * num_tiles, num_heads * num_tiles]
    )
    before = torch.empty_like(bitmap)
    num_rows = batch * max_blocks
    starts = torch.empty((num_heads, num_rows + (not is_plan)), dtype=torch.int32, device=device)
    entries = torch.empty((num_heads, num_tokens * topk), dtype=torch.int32, device=device)
    if not is_plan:
        entries.fill_(-1)
    part_words = -(-num_tokens // (32 * parts))
    words = min(256, max(4, triton.next_power_of_2(part_words)))
    part_words = -(-part_words // words) * words
    full, tail = 0, 0
    if is_plan:
        part_entries = min(num_tokens, part_words * 32) * topk
        full = num_heads * (part_entries // item + min(num_rows, part_entries))
        tail = num_heads * (num_tokens // item + min(batch, num_tokens) * parts)
    items = torch.empty((parts * full + tail, 8), dtype=torch.int32, device=device)
    tile_blocks = triton.next_power_of_2(max(1, tile * topk // MIN_SHARED))
    blocks = torch.empty((num_heads, num_tiles, tile_blocks, 2), dtype=torch.int32, device=device)
    places = torch.empty((num_heads, num_tokens if tile else 0), dtype=torch.int32, device=device)
    part_ids = torch.full((num_heads, num_tokens if tile else 0, topk), -1, dtype=torch.int32, device=device)
    tiles = -(-num_tokens // 32) + batch - 1
    shared = {
        "S": topk,
        "SP": triton.next_power_of_2(topk),
        "BLOCK": block_size,
        "BLOCK_B": triton.next_power_of_2(batch),
        "num_warps": 4,
    }
    where = (seq_lens if is_plan else cu_query_lens, cu_query_lens)
    strides = block_ids.stride()
    _mark_kernel[(tiles, num_heads)](
        block_ids, *where, bitmap, batch, max_blocks, words_total, *strides, **shared
    )  # fmt: skip
    rows = 1024 // words
    if tile:
        _share_kernel[(batch * -(-max_blocks // rows), num_heads)](
            *where,
            bitmap,
            tile_totals,
            max_blocks,
            words_total,
            BLOCK=block_size,
            WORDS=words,
            ROWS=rows,
            TILE=tile,
            MIN_SHARED=MIN_SHARED,
            num_warps=4,
        )
    _rows_kernel[(batch * -(-max_blocks // rows), num_heads)](
        block_table if block_table is not None else cu_query_lens,
        *where,
        bitmap,
        before,
        starts,
        cursors,
        items,
        tile_totals,
        tile_counts,
        blocks,
        batch,
        max_blocks,
        words_total,
        full,
        block_table.stride(0) if block_table is not None else 0,
        BLOCK=block_size,
        WORDS=words,
        ROWS=rows,
        PARTS=parts,
        PART_WORDS=part_words,
        ITEM=item,
        ALIGN=align,
        PLAN=is_plan,
        TILE=tile,
        TILE_BLOCKS=tile_blocks,
        MIN_SHARED=MIN_SHARED,
        MIN_BLOCKS=MIN_BLOCKS,
        num_warps=4,
    )
    if not is_plan:
        _starts_kernel[(num_heads,)](starts, num_rows, STEP=4096, num_warps=8)
    _scatter_kernel[(tiles, num_heads)](
        block_ids, *where, bitmap, before, starts, entries, part_ids, places, batch, max_blocks, words_total,
        num_tokens, *strides, starts.stride(0), TILE=tile, **shared,
    )  # fmt: skip
    neighbours = None
    if tile:
        spans = torch.empty((num_heads, num_tiles, 4), dtype=torch.int32, device=device)
        _tiles_kernel[(num_tiles, num_heads)](
            cu_query_lens,
            tile_counts,
            blocks,
            spans,
            batch,
            words_total,
            TILE=tile,
            TILE_BLOCKS=tile_blocks,
            BLOCK_B=triton.next_power_of_2(batch),
            num_warps=1,
        )
        neighbours = SharedBlocks(spans, blocks, places, part_ids)
    return starts, Plan(
        entries, items[: parts * full].view(parts, full, 8), items[parts * full :], cursors[num_heads:], neighbours
    )


def why_not(block_ids: torch.Tensor, *args: object, **kwargs: object) -> str | None:
    """None if the kernels can serve these arguments of `remap`, else the reason."""
    return why_not_triton(block_ids)


def remap(block_ids: torch.Tensor, cu_query_lens: torch.Tensor, *, max_blocks: int) -> BlockQueries:
    num_heads, num_tokens, topk = block_ids.shape
    batch = cu_query_lens.shape[0] - 1
    if min(num_heads, num_tokens, topk, batch, max_blocks) == 0:
        return BlockQueries(
            block_ids.new_zeros((num_heads, batch * max_blocks + 1)),
            block_ids.new_full((num_heads, num_tokens * topk), -1),
        )
    starts, work = _launch(block_ids, None, None, cu_query_lens, max_blocks, 0, 1, 1, 1, 0)
    return BlockQueries(starts, work.entries)


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
) -> Plan:
    """Work items of at most about `item` entries of one block, multiples of `align` where a block has more than one.

    Only blocks that their query sees are planned. The items of one part of the queries stand together, in them
    those of one head, roughly block by block. `parts` > 1 needs a batch of one request. `tile`, a divisor of 32 and a
    multiple of 4, takes out the blocks that many of so many neighbouring queries share, a partly filled one never.
    """
    assert parts == 1 or cu_query_lens.shape[0] == 2
    max_blocks = block_table.shape[1]
    return _launch(block_ids, block_table, seq_lens, cu_query_lens, max_blocks, block_size, item, align, parts, tile)[1]
