"""select_blocks for prefill: scores of a bounded number of query tiles, then an exact top-k of each row.

A tile is BLOCK_Q queries of one request times all index heads: the index-K block, which every head shares, is
loaded once for all of them. Scores of one chunk of tiles lie in a scratch [tiles, N, rows] that the next chunk reuses,
beside it the best score of each group of neighbouring blocks. Only blocks of the best groups can be chosen, so the
top-k of a long row first chooses groups and then goes through theirs. Each choice finds the k-th largest score with
registers alone, then walks the scores again to write the ids.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Protocol

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import why_not_triton
from msaserve.ops.select_blocks.torch_topk import rank_blocks
from msaserve.ops.select_blocks.triton_topk import LOWEST, topk_kernel
from msaserve.ops.tape import complete, new, scratch, taped
from msaserve.ops.triton_ragged import next_power_of_2, query_tile

SCRATCH_BYTES = 256 << 20
"""Bound on the score scratch of one call (one tile's scores where even those are larger)."""
MIN_SEGMENT = 64
"""Blocks that one thread of the top-k goes through at least, where a row is cut into segments."""
MAX_DIRECT = 64
"""Blocks of a row beyond which groups are chosen first."""
MIN_GROUPED_BY_16 = 2048
"""Blocks of a row from which on these are groups of 16 blocks, not of 8."""
MAX_LOG = 4
"""Log of the places that are sorted in registers: 32 compile for a minute, 64 for many. More are PyTorch's to rank."""


@triton.jit(do_not_specialize=["num_tokens", "B"])
def _tiles_kernel(
    cu_query_lens,
    seq_lens,
    tiles,
    block_ids,
    num_tokens,
    B,
    stride_oh,
    stride_ot,
    stride_os,
    HKV: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Where each tile of queries stands: request, first and end token, position; −1 in rows of no request."""
    tile = tl.program_id(0)
    request, first, _start, stop = query_tile(cu_query_lens, tile, B, BLOCK_Q, BLOCK_B)
    seq_len = tl.load(seq_lens + request)
    tl.store(tiles + tile * 4, request)
    tl.store(tiles + tile * 4 + 1, first)
    tl.store(tiles + tile * 4 + 2, tl.minimum(first + BLOCK_Q, stop))
    tl.store(tiles + tile * 4 + 3, seq_len - stop + first)
    begin, end = tl.load(cu_query_lens), tl.load(cu_query_lens + B)
    token = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    if (tile * BLOCK_Q < begin) | (tile * BLOCK_Q + BLOCK_Q > end):
        s = tl.arange(0, triton.next_power_of_2(TOPK))
        is_none = (token < num_tokens) & ((token < begin) | (token >= end))
        none = tl.full([BLOCK_Q, triton.next_power_of_2(TOPK)], -1, tl.int32)
        to = block_ids + token[:, None].to(tl.int64) * stride_ot + s[None, :] * stride_os
        for head in tl.static_range(HKV):
            tl.store(to + head * stride_oh, none, mask=is_none[:, None] & (s < TOPK)[None, :])


@triton.jit
def _store_best(out, group_out, group_best, best, n, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Block n's maxima, and its group's behind the group's last block: then the next begins."""
    # A score of −inf or NaN still beats no block.
    best = tl.maximum(best, LOWEST)
    tl.store(out + n // 8 * (8 * ROWS) + n % 8, best)
    if GROUP > 0:
        group_best = tl.maximum(group_best, best)
        is_last = n % GROUP == GROUP - 1
        tl.store(group_out + n // GROUP * ROWS, group_best, mask=is_last)
        group_best = tl.where(is_last, LOWEST, group_best)
    return group_best


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "split_blocks", "N"])
def _score_kernel(
    index_q,
    index_k,
    block_table,
    tiles,
    scores,
    group_scores,
    first_tile,
    num_tiles,
    split_blocks,
    N,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_bt,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    HP: tl.constexpr,
    DI: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    STAGES: tl.constexpr,
):
    # the last tiles see the most blocks: start with them
    tile = num_tiles - 1 - tl.program_id(0)
    split = tl.program_id(1)
    request = tl.load(tiles + (first_tile + tile) * 4)
    first = tl.load(tiles + (first_tile + tile) * 4 + 1)
    stop = tl.load(tiles + (first_tile + tile) * 4 + 2)
    position = tl.load(tiles + (first_tile + tile) * 4 + 3)
    last_position = position + stop - first - 1
    if (stop > first) & (last_position >= 0):
        ROWS: tl.constexpr = BLOCK_Q * HP
        row = tl.arange(0, ROWS)
        token = first + row // HP
        head = row % HP
        d = tl.arange(0, DP)
        live = (token < stop) & (head < HKV)
        q = tl.load(
            index_q + token[:, None].to(tl.int64) * stride_qt + head[:, None] * stride_qh + d[None, :],
            mask=live[:, None] & (d < DI)[None, :],
            other=0.0,
        )
        if q.dtype.primitive_bitwidth == 8:
            # 16 bits hold every 8-bit value.
            q = q.to(tl.float16)
        key = tl.arange(0, BLOCK)
        k_offsets = d[:, None] + key[None, :] * stride_kt
        out = scores + tile.to(tl.int64) * tl.cdiv(N, 8) * (8 * ROWS) + row * 8
        lo = split * split_blocks
        hi = tl.minimum(tl.minimum(lo + split_blocks, last_position // BLOCK + 1), N)
        # blocks that end at or before the tile's first position need no mask
        whole = tl.minimum(tl.maximum((position + 1) // BLOCK, lo), hi)
        group_out = group_scores + tile.to(tl.int64) * tl.cdiv(N, GROUP if GROUP > 0 else 1) * ROWS + row
        group_best = tl.full([ROWS], LOWEST, tl.float32)
        pages = block_table + request.to(tl.int64) * stride_bt
        for n in tl.range(lo, whole, num_stages=STAGES):
            page = tl.load(pages + n).to(tl.int64)
            k = tl.load(index_k + page * stride_kp + k_offsets, mask=(d < DI)[:, None], other=0.0).to(q.dtype)
            best = tl.max(tl.dot(q, k, input_precision="ieee"), 1)
            group_best = _store_best(out, group_out, group_best, best, n, ROWS, GROUP)
        visible = position + row // HP
        for n in tl.range(whole, hi, num_stages=1):
            page = tl.load(pages + n).to(tl.int64)
            k = tl.load(index_k + page * stride_kp + k_offsets, mask=(d < DI)[:, None], other=0.0).to(q.dtype)
            s = tl.dot(q, k, input_precision="ieee")
            best = tl.max(tl.where((n * BLOCK + key)[None, :] <= visible[:, None], s, float("-inf")), 1)
            group_best = _store_best(out, group_out, group_best, best, n, ROWS, GROUP)


@lru_cache(maxsize=4096)
def split_of(num_tiles: int, num_blocks: int, num_workers: int, group: int = 1, spread: int = 0) -> int:
    """Blocks per split of the context, whole groups, so that the splits of all tiles fill the card evenly.

    The last tile sees num_blocks, the first `spread` fewer.
    """
    best, best_cost = num_blocks, float("inf")
    is_even = 4 * spread < num_blocks
    for splits in range(1, max(2, num_blocks // 8 + 1)):
        blocks = -(-num_blocks // (splits * group)) * group
        if is_even:
            cost = -(-num_tiles * -(-num_blocks // blocks) // num_workers) * (blocks + 2.0)
        elif num_tiles * splits <= 8 * num_workers:
            cost = makespan(num_tiles, num_blocks, num_workers, spread, blocks)
        else:
            break
        if cost < best_cost * 0.99:
            best, best_cost = blocks, cost
    return best


def makespan(num_tiles: int, num_blocks: int, num_workers: int, spread: int, blocks: int) -> float:
    """Blocks of time until the last program ends, workers taking them as the grid has them: by split, longest first."""
    ends = [0.0] * num_workers
    for lo in range(0, num_blocks, blocks):
        for tile in range(num_tiles):
            length = min(num_blocks - spread * tile // num_tiles - lo, blocks)
            if length > 0:
                heapq.heapreplace(ends, ends[0] + length + 2.0)
    return max(ends)


def group_of(num_blocks: int, log: int) -> int:
    """Blocks of a group of which the best score is kept, or 0: half as many groups, or half as many blocks in them."""
    if num_blocks <= MAX_DIRECT:
        return 0
    return 16 if num_blocks >= MIN_GROUPED_BY_16 and log >= 4 else 8


def segments_of(num_programs: int, num_blocks: int, num_workers: int) -> int:
    """Segments that a row of the top-k is cut into, a warp each, so that few rows fill the card too."""
    segments = 1
    while segments < 32 and segments * MIN_SEGMENT < num_blocks:
        # Every warp merges all segments' lists: more than 8 pay only where most of the card is empty.
        if num_programs * segments >= num_workers * (24 if segments < 8 else 4):
            break
        segments *= 2
    return segments


def num_workers(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a few for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def score_tiles(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    scores: torch.Tensor,
    group_scores: torch.Tensor,
    first_tile: int,
    num_tiles: int,
    num_blocks: int,
    block_q: int,
    group: int,
) -> None:
    """Block scores of `num_tiles` query tiles into scores [tiles, num_blocks / 8, block_q * Hkv padded, 8].

    With group > 0 the best of each whole group of blocks goes into group_scores [tiles, num_blocks / group, rows].
    """
    num_heads, dim = index_q.shape[1:]
    block_size = index_k_cache.shape[1]
    spread = min(num_blocks, num_tiles * block_q // block_size)
    split_blocks = split_of(num_tiles, num_blocks, 2 * num_workers(index_q.device), max(group, 8), spread)
    taped(_score_kernel)[(num_tiles, -(-num_blocks // split_blocks))](
        index_q,
        index_k_cache,
        block_table,
        tiles,
        scores,
        group_scores,
        first_tile,
        num_tiles,
        split_blocks,
        num_blocks,
        index_q.stride(0),
        index_q.stride(1),
        index_k_cache.stride(0),
        index_k_cache.stride(1),
        block_table.stride(0),
        GROUP=group,
        HKV=num_heads,
        HP=next_power_of_2(num_heads),
        DI=dim,
        DP=next_power_of_2(dim),
        BLOCK=block_size,
        BLOCK_Q=block_q,
        STAGES=3,
        num_warps=8 if block_q * num_heads >= 256 else 4,
    )


class ScoreTiles(Protocol):
    """`score_tiles` of this module or of another kernel."""

    def __call__(
        self,
        index_q: torch.Tensor,
        index_k_cache: torch.Tensor,
        block_table: torch.Tensor,
        tiles: torch.Tensor,
        scores: torch.Tensor,
        group_scores: torch.Tensor,
        first_tile: int,
        num_tiles: int,
        num_blocks: int,
        block_q: int,
        group: int,
    ) -> None: ...


def why_not(
    index_q: torch.Tensor, index_k_cache: torch.Tensor, *args: object, topk: int, **kwargs: object
) -> str | None:
    """None if the kernels can serve these arguments of `select_blocks`, else the reason."""
    reason = why_not_triton(index_q)
    if reason is not None:
        return reason
    narrow = torch.float8_e4m3fn
    if index_q.dtype not in (torch.float32, torch.bfloat16, torch.float16, narrow):
        return f"index_q is {index_q.dtype}"
    if index_k_cache.dtype not in (index_q.dtype, narrow):
        return f"index_q is {index_q.dtype}, index_k_cache {index_k_cache.dtype}: neither the same nor {narrow}"
    if index_q.stride(2) != 1:
        return "index_q's last dimension must be contiguous"
    if index_k_cache.shape[1] not in (16, 32, 64, 128) or not 16 <= index_k_cache.shape[2] <= 256 or topk > 64:
        return "blocks of 16 to 128 tokens, 16 to 256 index dims and a topk of at most 64 are needed"
    return None


def select_blocks(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    score_tiles: ScoreTiles = score_tiles,
    rows: int = 128,
) -> torch.Tensor:
    """block_ids [Hkv, T, topk] int32; see the operator's contract. A tile has about `rows` rows."""
    num_tokens, num_heads, _ = index_q.shape
    block_size = index_k_cache.shape[1]
    batch = block_table.shape[0]
    if out is None:
        out = new((num_heads, num_tokens, topk), torch.int32, index_q.device)
    if num_tokens == 0 or batch == 0 or max_seq_len == 0:
        return out.fill_(-1)
    num_blocks = -(-max_seq_len // block_size)
    heads_padded = next_power_of_2(num_heads)
    block_q = max(1, rows // heads_padded)
    rows = block_q * heads_padded
    total_tiles = -(-num_tokens // block_q) + batch - 1
    log = max(3, (topk - local_blocks - 1).bit_length()) if topk > local_blocks else 3
    is_ranked = log > MAX_LOG
    # PyTorch's ranking holds the scores several times more, as 64-bit keys
    chunk = max(1, min(total_tiles, (SCRATCH_BYTES // 8 if is_ranked else SCRATCH_BYTES) // (num_blocks * rows * 4)))
    chunk = -(-total_tiles // -(-total_tiles // chunk))
    group = group_of(num_blocks, log) if topk > local_blocks and not is_ranked else 0
    r = min(32, rows)
    segments = 1 if is_ranked else segments_of(chunk * (rows // r), num_blocks, num_workers(index_q.device))
    tiles, scores, group_scores, groups, lists = scratch(
        index_q.device,
        ((total_tiles, 4), torch.int32),
        ((chunk, -(-num_blocks // 8), rows, 8), torch.float32),
        ((chunk, -(-num_blocks // group) if group else 1, rows), torch.float32),
        ((chunk * rows * (topk - local_blocks + 1) if group else 1,), torch.int32),
        ((chunk * (rows // r) * segments * (r << log) if segments > 1 else 1,), torch.float32),
    )
    taped(_tiles_kernel)[(total_tiles,)](
        cu_query_lens,
        seq_lens,
        tiles,
        out,
        num_tokens,
        batch,
        *out.stride(),
        HKV=num_heads,
        TOPK=topk,
        BLOCK_Q=block_q,
        BLOCK_B=next_power_of_2(batch),
        num_warps=1,
    )
    for first_tile in range(0, total_tiles, chunk):
        count = min(chunk, total_tiles - first_tile)
        where = (first_tile, count, num_blocks, block_q, group)
        score_tiles(index_q, index_k_cache, block_table, tiles, scores, group_scores, *where)
        if is_ranked:
            lists = rank_blocks(
                scores[:count],
                tiles[first_tile : first_tile + count],
                topk - local_blocks,
                block_q=block_q,
                block_size=block_size,
                local_blocks=local_blocks,
            )
        taped(topk_kernel)[(count, rows // r)](
            scores,
            group_scores,
            tiles,
            lists,
            groups,
            out,
            first_tile,
            num_blocks,
            out.stride(0),
            out.stride(1),
            out.stride(2),
            HKV=num_heads,
            HP=heads_padded,
            BLOCK=block_size,
            BLOCK_Q=block_q,
            TOPK=topk,
            LOCAL=min(local_blocks, topk),
            SEGMENTS=segments,
            R=r,
            LOG=log,
            GROUP=group,
            IS_RANKED=is_ranked,
            WIDE=index_q.is_cuda,
            num_warps=segments,
        )
    if not is_ranked:
        complete()
    return out
