"""remap through a bitmap: bit t of row (request, block) says that query t chose the block.

An entry's place in its row is the number of set bits before its own, so the rows come out ascending whatever order
the programs run in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import why_not_triton
from msaserve.ops.remap import BlockQueries
from msaserve.ops.remap.plan_triton import popcount
from msaserve.ops.triton_ragged import next_power_of_2, query_tile


@triton.jit
def _entries_of_tile(
    block_ids,
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
    BLOCK_B: tl.constexpr,
):
    """32 queries of one request: tokens, places, which [32, SP] are valid, their rows and words."""
    request, first, start, stop = query_tile(cu_query_lens, tile, B, 32, BLOCK_B)
    token = first + tl.arange(0, 32)
    place = tl.arange(0, SP)
    n = tl.load(
        block_ids + head * stride_ih + token[:, None].to(tl.int64) * stride_it + place[None, :] * stride_is,
        mask=(token < stop)[:, None] & (place < S)[None, :],
        other=-1,
    )
    valid = (n >= 0) & (n < max_blocks)
    row = request * max_blocks + n
    words = (stop - start + 31) // 32
    first_word = head.to(tl.int64) * words_total + start // 32 + request
    word = first_word * max_blocks + n * words + (first - start) // 32
    return token, place, valid, row, word


@triton.jit
def _mark_kernel(
    block_ids,
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
    BLOCK_B: tl.constexpr,
):
    _token, _place, valid, _row, word = _entries_of_tile(
        block_ids, cu_query_lens, tl.program_id(0), tl.program_id(1), B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK_B,
    )  # fmt: skip
    bit = (tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]).to(tl.int32)
    tl.atomic_or(bitmap + word, bit, mask=valid, sem="relaxed")


@triton.jit
def _rows_kernel(
    cu_query_lens,
    bitmap,
    before,
    counts,
    B,
    max_blocks,
    words_total,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Bits before each word of its row, and the row's count."""
    groups = (max_blocks + ROWS - 1) // ROWS
    request = tl.program_id(0) // groups
    n = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    start = tl.load(cu_query_lens + request)
    words = (tl.load(cu_query_lens + request + 1) - start + 31) // 32
    first_word = head.to(tl.int64) * words_total + start // 32 + request
    base = first_word * max_blocks + n[:, None] * words
    total = tl.zeros([ROWS], tl.int32)
    for w in range(0, words, WORDS):
        word = w + tl.arange(0, WORDS)
        live = (n < max_blocks)[:, None] & (word < words)[None, :]
        chosen_by = tl.load(bitmap + base + word[None, :], mask=live, other=0)
        bits = popcount(chosen_by)
        # only words with a bit are ever looked up
        place = tl.cumsum(bits, 1) - bits + total[:, None]
        tl.store(before + base + word[None, :], place, mask=live & (chosen_by != 0))
        total += tl.sum(bits, 1)
    tl.store(counts + head * (B * max_blocks + 1) + request * max_blocks + n, total, mask=n < max_blocks)


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
    S: tl.constexpr,
    SP: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    token, place, valid, row, word = _entries_of_tile(
        block_ids, cu_query_lens, tl.program_id(0), head, B, max_blocks, words_total,
        stride_ih, stride_it, stride_is, S, SP, BLOCK_B,
    )  # fmt: skip
    bits = tl.load(bitmap + word, mask=valid, other=0)
    lower = ((tl.full([32, SP], 1, tl.int32) << tl.arange(0, 32)[:, None]) - 1).to(tl.int32)
    at = tl.load(before + word, mask=valid, other=0) + popcount(bits & lower)
    at += tl.load(starts + head * (B * max_blocks + 1) + row, mask=valid, other=0)
    tl.store(entries + head.to(tl.int64) * T * S + at, token[:, None] * S + place[None, :], mask=valid)


def why_not(block_ids: torch.Tensor, *args: object, **kwargs: object) -> str | None:
    """None if the kernels can serve these arguments of `remap`, else the reason."""
    return why_not_triton(block_ids)


def remap(block_ids: torch.Tensor, cu_query_lens: torch.Tensor, *, max_blocks: int) -> BlockQueries:
    num_heads, num_tokens, topk = block_ids.shape
    batch = cu_query_lens.shape[0] - 1
    num_rows = batch * max_blocks
    if min(num_heads, num_tokens, topk, num_rows) == 0:
        return BlockQueries(
            block_ids.new_zeros((num_heads, num_rows + 1)), block_ids.new_full((num_heads, num_tokens * topk), -1)
        )
    words_total = num_tokens // 32 + batch
    bitmap = block_ids.new_zeros(num_heads * words_total * max_blocks)
    before = torch.empty_like(bitmap)
    starts = block_ids.new_empty((num_heads, num_rows + 1))
    entries = block_ids.new_full((num_heads, num_tokens * topk), -1)
    tiles = -(-num_tokens // 32) + batch - 1
    sizes = (batch, max_blocks, words_total)
    options = {
        "S": topk,
        "SP": next_power_of_2(topk),
        "BLOCK_B": next_power_of_2(batch),
        "num_warps": 4,
    }
    strides = block_ids.stride()
    _mark_kernel[(tiles, num_heads)](block_ids, cu_query_lens, bitmap, *sizes, *strides, **options)
    words = min(256, max(4, next_power_of_2(-(-num_tokens // 32))))
    rows = 1024 // words
    _rows_kernel[(batch * -(-max_blocks // rows), num_heads)](
        cu_query_lens, bitmap, before, starts, *sizes, WORDS=words, ROWS=rows, num_warps=4
    )
    _starts_kernel[(num_heads,)](starts, num_rows, STEP=4096, num_warps=8)
    _scatter_kernel[(tiles, num_heads)](
        block_ids, cu_query_lens, bitmap, before, starts, entries, *sizes, num_tokens, *strides, **options
    )
    return BlockQueries(starts, entries)
