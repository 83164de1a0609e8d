"""dense_attend for prefill: a tile of neighbouring queries, all heads of a group, against its request's whole context.

A tile is M rows: queries times the group. Its program passes over the pages with a running maximum and sum; only the
last tiles of tokens, which some query of the tile does not see, are masked. The last queries, which have most to do,
come first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import capability
from msaserve.ops.select_blocks.decode_triton import why_not_dtypes
from msaserve.ops.sparse_attend.decode_triton import LOG2_E, head_step
from msaserve.ops.triton_ragged import next_power_of_2


@triton.jit
def find_tile(cu_query_lens, tile, B, T, BQ: tl.constexpr, BLOCK_B: tl.constexpr):
    """The tile-th run of at most BQ rows of one request: (request, first row, the request's end).

    Rows after the last request's are those of request B; beyond their tiles the run is empty.
    """
    b = tl.arange(0, BLOCK_B)
    lo = tl.load(cu_query_lens + b, mask=b <= B, other=0)
    hi = tl.load(cu_query_lens + b + 1, mask=b < B, other=0)
    hi = tl.where(b == B, T, hi)
    count = (tl.maximum(hi - lo, 0) + BQ - 1) // BQ
    end = tl.cumsum(count, 0)
    here = (tile >= end - count) & (tile < end)
    request = tl.sum(tl.where(here, b, 0), 0)
    first = tl.sum(tl.where(here, lo + (tile - end + count) * BQ, 0), 0)
    return request, first, tl.sum(tl.where(here, hi, 0), 0)


@triton.jit
def _step(q, k, v, token, position, best, total, acc, scale_log2, MASKED: tl.constexpr):
    """The online softmax of rows q [M, D] over some tokens: k [D, N] and v [N, D]."""
    s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if MASKED:
        s = tl.where(token[None, :] <= position[:, None], s, float("-inf"))
    higher = tl.maximum(best, tl.max(s, 1) * scale_log2)
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    p = tl.exp2(s * scale_log2 - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit(do_not_specialize=["B", "T"])
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out,
    block_table,
    seq_lens,
    cu_query_lens,
    k_scale,
    v_scale,
    scale_log2,
    B,
    T,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_b,
    stride_ot,
    stride_oh,
    stride_ks,
    stride_vs,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED_K: tl.constexpr,
    SCALED_V: tl.constexpr,
):
    """Tile num_programs(0) − 1 − program_id(0) of the queries, for KV head program_id(1)."""
    BQ: tl.constexpr = M // GP
    PARTS: tl.constexpr = BLOCK // N
    NARROW: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    head = tl.program_id(1)
    request, first, end = find_tile(cu_query_lens, tl.num_programs(0) - 1 - tl.program_id(0), B, T, BQ, BLOCK_B)
    if first < end:
        # Queries of no request and of padding stand before the sequence's start and see nothing.
        shift = tl.load(seq_lens + request, mask=request < B, other=0) - end
        num_seen = tl.maximum(shift + tl.minimum(first + BQ, end), 0)
        num_tiles = (num_seen + N - 1) // N
        num_whole = tl.maximum(shift + first + 1, 0) // N
        lane = tl.arange(0, M)
        row = first + lane // GP
        position = shift + row
        is_row = (row < end) & (lane % GP < G)
        d = tl.arange(0, D)
        offset = tl.arange(0, N)
        query = row.to(tl.int64) * stride_qt + (head * G + lane % GP) * stride_qh
        q = tl.load(q_ptr + query[:, None] + d[None, :], mask=is_row[:, None], other=0.0)
        if NARROW:
            q = q.to(tl.float16)
        if SCALED_K:
            scale_log2 *= tl.load(k_scale + head * stride_ks).to(tl.float32)
        table = block_table + request.to(tl.int64) * stride_b
        k_base = k_ptr + head * stride_kh
        v_base = v_ptr + head * stride_vh
        k_offset = offset[None, :] * stride_kn + d[:, None]
        v_offset = offset[:, None] * stride_vn + d[None, :]
        best = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, D), tl.float32)
        page = tl.load(table, mask=num_tiles > 0, other=0)
        for n in tl.range(0, num_whole, num_stages=STAGES):
            at = page.to(tl.int64)
            k = tl.load(k_base + at * stride_kp + (n % PARTS) * N * stride_kn + k_offset)
            v = tl.load(v_base + at * stride_vp + (n % PARTS) * N * stride_vn + v_offset)
            page = tl.load(table + (n + 1) // PARTS, mask=n + 1 < num_tiles, other=0)
            best, total, acc = _step(q, k, v, offset, position, best, total, acc, scale_log2, False)
        for n in tl.range(num_whole, num_tiles, num_stages=1):
            at = page.to(tl.int64)
            token = n * N + offset
            # Slots after the sequence may hold NaN, which a weight of 0 would not silence.
            is_token = token < num_seen
            k = tl.load(
                k_base + at * stride_kp + (n % PARTS) * N * stride_kn + k_offset, mask=is_token[None, :], other=0.0
            )
            v = tl.load(
                v_base + at * stride_vp + (n % PARTS) * N * stride_vn + v_offset, mask=is_token[:, None], other=0.0
            )
            page = tl.load(table + (n + 1) // PARTS, mask=n + 1 < num_tiles, other=0)
            best, total, acc = _step(q, k, v, token, position, best, total, acc, scale_log2, True)
        gain = 1.0 / tl.where(total == 0.0, 1.0, total)
        if SCALED_V:
            gain *= tl.load(v_scale + head * stride_vs).to(tl.float32)
        to = row.to(tl.int64) * stride_ot + (head * G + lane % GP) * stride_oh
        tl.store(out + to[:, None] + d[None, :], (acc * gain[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])


LARGE_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of cards with over 160 KB of shared memory to a program."""


class Tile(NamedTuple):
    """Rows of queries and tokens of keys multiplied at a time, warps, and stages of the loads' pipeline."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def _tile(q: torch.Tensor) -> Tile:
    """The fastest of those tried on a Hopper card; a small one where shared memory is small."""
    if q.is_cuda and capability(q.device) not in LARGE_MEMORY:
        return Tile(64, 64, 4, 2)
    return Tile(128, 64, 8, 3) if q.shape[2] > 64 else Tile(64, 128, 4, 2)


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    **_: object,
) -> str | None:
    """None if `dense_attend` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if q.shape[1] // k_cache.shape[2] > 128:
        return f"{q.shape[1] // k_cache.shape[2]} query heads to a KV head are more than 128"
    if q.shape[2] not in (16, 32, 64, 128) or k_cache.shape[1] not in (16, 32, 64, 128):
        return f"head dim {q.shape[2]} and block size {k_cache.shape[1]} must be 16, 32, 64 or 128"
    if min(q.shape[0], block_table.numel()) == 0:
        return "nothing to attend to"
    if any(x.stride(-1) != 1 for x in (q, block_table, seq_lens, cu_query_lens)):
        return "the last dimensions of q, block_table, seq_lens and cu_query_lens must be contiguous"
    if scale <= 0:
        return f"scale = {scale} is not positive"
    return why_not_dtypes(q, k_cache, v_cache)


def dense_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """A request has the same bits alone and in a batch."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_requests = seq_lens.shape[0]
    if out is None:
        out = torch.empty_like(q)
    padded = next_power_of_2(group)
    rows, tokens, num_warps, num_stages = tile or _tile(q)
    rows = max(rows, padded)
    # Each request may begin a tile of its own, and the rows after the last one too.
    grid = -(-num_rows // (rows // padded)) + num_requests, num_kv_heads
    _attend_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        seq_lens,
        cu_query_lens,
        k_scale,
        v_scale,
        scale * LOG2_E,
        num_requests,
        num_rows,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        head_step(k_scale),
        head_step(v_scale),
        G=group,
        GP=padded,
        D=dim,
        BLOCK=block_size,
        BLOCK_B=next_power_of_2(num_requests + 1),
        M=rows,
        N=min(tokens, block_size),
        STAGES=num_stages,
        SCALED_K=k_scale is not None,
        SCALED_V=v_scale is not None,
        num_warps=num_warps,
    )
    return out
