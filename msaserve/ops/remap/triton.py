"""remap through a bitmap: bit t of row (request, block) says that query t chose the block.

An entry's place in its row is the number of set bits before its own, so the rows come out ascending whatever order
the programs run in. Besides the compressed rows, `plan` lists work items for the KV-block-major attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.remap import BlockQueries
from msaserve.ops.triton_ragged import query_tile


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
    """32 queries of one request: block ids [32, SP], which are valid, their rows, and the places of their words."""
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
    return token, place, valid, row, word


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
    _token, _place, valid, _row, word = _entries_of_tile(
        block_ids, seq_lens, cu_query_lens, tl.program_id(0), tl.program_id(1), B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, BLOCK_B,
    )  # fmt: skip
    bit = (tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]).to(tl.int32)
    tl.atomic_or(bitmap + word, bit, mask=valid, sem="relaxed")


@triton.jit
def _rows_kernel(
    cu_query_lens,
    bitmap,
    before,
    counts,
    cursors,
    items,
    B,
    max_blocks,
    words_total,
    item_capacity,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_WORDS: tl.constexpr,
    ITEM: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Bits before each word of its row, and the row's count; for a plan the row's start and its work items too."""
    groups = (max_blocks + ROWS - 1) // ROWS
    request = tl.program_id(0) // groups
    n = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    start = tl.load(cu_query_lens + request)
    stop = tl.load(cu_query_lens + request + 1)
    words = (stop - start + 31) // 32
    first_word = head.to(tl.int64) * words_total + start // 32 + request
    base = first_word * max_blocks + n[:, None] * words
    total = tl.zeros([ROWS], tl.int32)
    part_end = ()
    for part in tl.static_range(PARTS):
        for w in range(part * PART_WORDS, tl.minimum(words, (part + 1) * PART_WORDS) if part + 1 < PARTS else words, WORDS):
            word = w + tl.arange(0, WORDS)
            live = (n < max_blocks)[:, None] & (word < words)[None, :]
            bits = _popcount(tl.load(bitmap + base + word[None, :], mask=live, other=0))
            tl.store(before + base + word[None, :], tl.cumsum(bits, 1) - bits + total[:, None], mask=live)
            total += tl.sum(bits, 1)
        part_end = part_end + (total,)  # noqa: RUF005 (no unpacking in a kernel)
    row = head * B * max_blocks + request * max_blocks + n
    if PLAN:
        chosen = (n < max_blocks) & (total > 0)
        if tl.max(total, 0) > 0:
            entry = tl.atomic_add(cursors + head + tl.zeros([ROWS], tl.int32), total, mask=chosen, sem="relaxed")
            tl.store(counts + row, entry, mask=chosen)
            at = tl.zeros([ROWS], tl.int32)
            for part in tl.static_range(PARTS):
                size = part_end[part] - at
                needed = (size + ITEM - 1) // ITEM
                heads = tl.num_programs(1)
                region = part * heads + head
                slot = tl.atomic_add(
                    cursors + heads + region + tl.zeros([ROWS], tl.int32), needed, mask=chosen & (needed > 0), sem="relaxed"
                )
                for i in range(tl.max(needed, 0)):
                    at_item = (region.to(tl.int64) * item_capacity + slot + i) * 4
                    live = chosen & (i < needed)
                    tl.store(items + at_item, request + tl.zeros([ROWS], tl.int32), mask=live)
                    tl.store(items + at_item + 1, n, mask=live)
                    tl.store(items + at_item + 2, entry + at + i * ITEM, mask=live)
                    tl.store(items + at_item + 3, entry + tl.minimum(at + (i + 1) * ITEM, at + size), mask=live)
                at += size
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
):
    head = tl.program_id(1)
    token, place, valid, row, word = _entries_of_tile(
        block_ids, seq_lens, cu_query_lens, tl.program_id(0), head, B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK, BLOCK_B,
    )  # fmt: skip
    bits = tl.load(bitmap + word, mask=valid, other=0)
    lower = ((tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]) - 1).to(tl.int32)
    at = tl.load(before + word, mask=valid, other=0) + _popcount(bits & lower)
    at += tl.load(starts + head * stride_rows + row, mask=valid, other=0)
    tl.store(entries + head.to(tl.int64) * T * S + at, token[:, None] * S + place[None, :], mask=valid)


class Plan(NamedTuple):
    """Work of a KV-block-major attention: entries as in BlockQueries, the order of rows free, and work items."""

    entries: torch.Tensor
    """[Hkv, T * S] int32."""
    items: torch.Tensor
    """[parts * Hkv, capacity, 4] int32: request, block, first and end place in the head's entries."""
    counts: torch.Tensor
    """[parts * Hkv] int32: items that exist."""


def _launch(
    block_ids: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cu_query_lens: torch.Tensor,
    max_blocks: int,
    block_size: int,
    parts: int,
    item: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    num_heads, num_tokens, topk = block_ids.shape
    batch = cu_query_lens.shape[0] - 1
    device = block_ids.device
    plan = seq_lens is not None
    words_total = num_tokens // 32 + batch
    num_words = num_heads * words_total * max_blocks
    zeros = torch.zeros(num_words + num_heads * (1 + parts), dtype=torch.int32, device=device)
    bitmap, cursors = zeros[:num_words], zeros[num_words:]
    before = torch.empty_like(bitmap)
    num_rows = batch * max_blocks
    starts = torch.empty((num_heads, num_rows + (not plan)), dtype=torch.int32, device=device)
    entries = torch.empty((num_heads, num_tokens * topk), dtype=torch.int32, device=device)
    if not plan:
        entries.fill_(-1)
    part_words = -(-num_tokens // (32 * parts))
    words = min(256, max(16, triton.next_power_of_2(part_words)))
    part_words = -(-part_words // words) * words
    capacity = -(-min(num_tokens, part_words * 32) * topk // item) + min(num_rows, num_tokens * topk)
    items = torch.empty((parts * num_heads, capacity, 4) if plan else (1,), dtype=torch.int32, device=device)
    tiles = -(-num_tokens // 32) + batch - 1
    shared = dict(S=topk, SP=triton.next_power_of_2(topk), BLOCK=block_size, BLOCK_B=triton.next_power_of_2(batch))
    where = (seq_lens if plan else cu_query_lens, cu_query_lens)
    strides = block_ids.stride()
    _mark_kernel[(tiles, num_heads)](
        block_ids, *where, bitmap, batch, max_blocks, words_total, *strides, **shared, num_warps=4
    )
    rows = 1024 // words
    _rows_kernel[(batch * -(-max_blocks // rows), num_heads)](
        cu_query_lens,
        bitmap,
        before,
        starts,
        cursors,
        items,
        batch,
        max_blocks,
        words_total,
        capacity,
        WORDS=words,
        ROWS=rows,
        PARTS=parts,
        PART_WORDS=part_words,
        ITEM=item,
        PLAN=plan,
        num_warps=4,
    )
    if not plan:
        _starts_kernel[(num_heads,)](starts, num_rows, STEP=4096, num_warps=8)
    _scatter_kernel[(tiles, num_heads)](
        block_ids, *where, bitmap, before, starts, entries, batch, max_blocks, words_total, num_tokens,
        *strides, starts.stride(0), **shared, num_warps=4,
    )  # fmt: skip
    return starts, entries, items, cursors[num_heads:]


def remap(block_ids: torch.Tensor, cu_query_lens: torch.Tensor, *, max_blocks: int) -> BlockQueries:
    num_heads, num_tokens, topk = block_ids.shape
    batch = cu_query_lens.shape[0] - 1
    if min(num_heads, num_tokens, topk, batch, max_blocks) == 0:
        return BlockQueries(
            block_ids.new_zeros((num_heads, batch * max_blocks + 1)), block_ids.new_full((num_heads, num_tokens * topk), -1)
        )
    starts, entries, _, _ = _launch(block_ids, None, cu_query_lens, max_blocks, 0, 1, 64)
    return BlockQueries(starts, entries)


def plan(
    block_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_blocks: int,
    block_size: int,
    parts: int,
    item: int,
) -> Plan:
    """Work items of at most `item` entries of one block; those of one part of the queries and one head together.

    Only blocks that their query sees are planned. `parts` > 1 needs a batch of one request.
    """
    assert parts == 1 or cu_query_lens.shape[0] == 2
    _, entries, items, counts = _launch(block_ids, seq_lens, cu_query_lens, max_blocks, block_size, parts, item)
    return Plan(entries, items, counts)
