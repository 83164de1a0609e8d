"""dense_attend for prefill on Hopper: one fetching warp, three warpgroups of 64 rows each.

A program has a tile of neighbouring queries, all heads of a group, and its request's pages up to the last query. The
warp brings the queries and then K and V of block after block by TMA; each warpgroup keeps a running softmax of 64 rows
in registers, at its own pace, so that one's exponentials run beside another's products. Where a sequence ends inside a
block, the warp clears the values after the end, which no weight of 0 would silence if they are NaN. K and V of 8 bits
come by way of buffers of their own, from which four fetching warps widen them to float16, for two values an instruction;
queries become float16 too.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from msaserve.ops.dense_attend import triton_prefill
from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.hopper import why_not_wgmma
from msaserve.ops.sparse_attend.decode_triton import LOG2_E, head_step
from msaserve.ops.sparse_attend.gluon_shared import fetch_block
from msaserve.ops.triton_ragged import next_power_of_2

ROWS = 64
"""Rows of one warpgroup: its share of a wgmma."""
WARPGROUPS = 3


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find_tile(cu_query_lens, tile, B, T, BQ: gl.constexpr, BLOCK_B: gl.constexpr):
    """What triton_prefill.find_tile does."""
    b = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [4], [0]))
    lo = gl.load(cu_query_lens + b, mask=b <= B, other=0)
    hi = gl.load(cu_query_lens + b + 1, mask=b < B, other=0)
    hi = gl.where(b == B, T, hi)
    count = (gl.maximum(hi - lo, 0) + BQ - 1) // BQ
    end = gl.associative_scan(count, 0, _add)
    here = (tile >= end - count) & (tile < end)
    request = gl.sum(gl.where(here, b, 0), 0)
    first = gl.sum(gl.where(here, lo + (tile - end + count) * BQ, 0), 0)
    return request, first, gl.sum(gl.where(here, hi, 0), 0)


@gluon.jit
def _clear(v_smem, stage, filled, D: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Zeros for the values after the first `filled`, 8 rows at a time."""
    own: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [WARPS, 1], [1, 0])
    values = v_smem.index(stage).reshape([BLOCK, D])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, own))
    for part in gl.static_range(BLOCK // 8):
        if part * 8 + 8 > filled:
            rows = values.slice(part * 8, 8, dim=0)
            v = rows.load(own)
            rows.store(gl.where((part * 8 + row < filled)[:, None], v, gl.zeros([8, D], v.dtype, layout=own)))


@gluon.jit
def _fetch_queries(q, first, head, q_smem, q_full, G: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, WGS: gl.constexpr):  # fmt: skip
    for wg in gl.static_range(WGS):
        mbarrier.expect(q_full.index(wg), 2 * ROWS * D)
        for half in gl.static_range(D // 64):
            tma_load(
                q,
                [first + wg * (ROWS // G), head * G, half * 64],
                q_full.index(wg),
                q_smem.index(wg * (D // 64) + half),
            )


@gluon.jit
def _fetch(
    q, k_cache, v_cache, table, first, head, num_blocks, filled, k_smem, v_smem, q_smem, raw_full, kv_full, kv_empty, q_full,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if num_blocks > 0:
        _fetch_queries(q, first, head, q_smem, q_full, G, D, ROWS, WGS)
        page = gl.load(table)
        for n in range(num_blocks - 1):
            fetch_block(k_cache, v_cache, page, head, n, k_smem, v_smem, kv_full, kv_empty, D, BLOCK, STAGES, 2)
            page = gl.load(table + n + 1)
        n = num_blocks - 1
        stage = n % STAGES
        if filled == BLOCK:
            fetch_block(k_cache, v_cache, page, head, n, k_smem, v_smem, kv_full, kv_empty, D, BLOCK, STAGES, 2)
        else:
            fetch_block(k_cache, v_cache, page, head, n, k_smem, v_smem, raw_full, kv_empty, D, BLOCK, STAGES, 2)
            mbarrier.wait(raw_full.index(stage), 0)
            _clear(v_smem, stage, filled, D, BLOCK, 1)
            fence_async_shared()
            mbarrier.arrive(kv_full.index(stage), count=1)


@gluon.jit
def _fetch_raw(cache, page, head, at, raw, raw_full, raw_empty, D: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """A block's K in pieces of 64 columns, or its V as one, into a buffer of 8 bits."""
    mbarrier.wait(raw_empty, (at & 1) ^ 1)
    mbarrier.expect(raw_full, BLOCK * D)
    for piece in gl.static_range(PIECES):
        tma_load(cache, [page, head, 0, piece * 64], raw_full, raw.index(piece))


@gluon.jit
def _widen(raw, to, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):
    """From 8 bits to 16, 32 rows at a time, by four warps."""
    own: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0])
    for part in gl.static_range(BLOCK // 32):
        values = raw.reshape([BLOCK, COLUMNS]).slice(part * 32, 32, dim=0).load(own)
        to.reshape([BLOCK, COLUMNS]).slice(part * 32, 32, dim=0).store(values.to(to.dtype))


@gluon.jit
def _fetch_and_widen(
    q, k_cache, v_cache, table, first, head, num_blocks, filled, k_raw, v_raw, k_smem, v_smem, q_smem,
    k_raw_full, k_raw_empty, v_raw_full, v_raw_empty, q_raw_full, kv_full, kv_empty, q_full,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr,
    CONVERT: gl.constexpr,
):  # fmt: skip
    """What `_fetch` does, by four warps that bring K and V by way of a buffer of 8 bits each; all become float16."""
    HALVES: gl.constexpr = D // 64
    if num_blocks > 0:
        page = gl.load(table)
        _fetch_raw(k_cache, page, head, 0, k_raw, k_raw_full, k_raw_empty, D, BLOCK, HALVES)
        _fetch_raw(v_cache, page, head, 0, v_raw, v_raw_full, v_raw_empty, D, BLOCK, 1)
        if CONVERT:
            # The bits of bfloat16 come as if they were float16.
            _fetch_queries(q, first, head, q_smem, q_raw_full, G, D, ROWS, WGS)
            own: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            for wg in gl.static_range(WGS):
                mbarrier.wait(q_raw_full.index(wg), 0)
                for half in gl.static_range(HALVES):
                    queries = q_smem.index(wg * HALVES + half).reshape([ROWS, 64])
                    queries.store(queries.load(own).to(gl.bfloat16, bitcast=True).to(gl.float16))
                fence_async_shared()
                mbarrier.arrive(q_full.index(wg), count=1)
        else:
            _fetch_queries(q, first, head, q_smem, q_full, G, D, ROWS, WGS)
        for n in range(num_blocks):
            page = gl.load(table + gl.minimum(n + 1, num_blocks - 1))
            stage = n % STAGES
            mbarrier.wait(k_raw_full, n & 1)
            mbarrier.wait(kv_empty.index(stage), ((n // STAGES) & 1) ^ 1)
            for half in gl.static_range(HALVES):
                _widen(k_raw.index(half), k_smem.index(stage * HALVES + half), 64, BLOCK)
            mbarrier.arrive(k_raw_empty, count=1)
            if n + 1 < num_blocks:
                _fetch_raw(k_cache, page, head, n + 1, k_raw, k_raw_full, k_raw_empty, D, BLOCK, HALVES)
            mbarrier.wait(v_raw_full, n & 1)
            _widen(v_raw.index(0), v_smem.index(stage), D, BLOCK)
            if (filled < BLOCK) & (n == num_blocks - 1):
                _clear(v_smem, stage, filled, D, BLOCK, 4)
            mbarrier.arrive(v_raw_empty, count=1)
            fence_async_shared()
            mbarrier.arrive(kv_full.index(stage), count=1)
            if n + 1 < num_blocks:
                _fetch_raw(v_cache, page, head, n + 1, v_raw, v_raw_full, v_raw_empty, D, BLOCK, 1)


@gluon.jit
def _attend(
    out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain,
    stride_ot, stride_oh,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = D // 64
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma_o, k_width=2)
    # 8 bytes to a thread, a whole sector to four, one exchange between neighbours away from mma_o
    out_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
        if D == 128
        else [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS, D],
    )
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, mma_s))
    o = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
    mine = first + WG * (ROWS // G)
    if num_blocks > 0:
        mbarrier.wait(q_full.index(WG), 0)
    for n in range(num_blocks):
        stage = n % STAGES
        mbarrier.wait(kv_full.index(stage), (n // STAGES) & 1)
        s = gl.zeros([ROWS, BLOCK], gl.float32, layout=mma_s)
        for half in gl.static_range(HALVES):
            s = warpgroup_mma(
                q_smem.index(WG * HALVES + half).reshape([ROWS, 64]),
                k_smem.index(stage * HALVES + half).reshape([BLOCK, 64]).permute((1, 0)),
                s,
                use_acc=half > 0,
                is_async=True,
            )
        s = warpgroup_mma_wait(0, deps=(s,))
        ahead = shift + mine - n * BLOCK
        if ahead < BLOCK - 1:
            query = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s)) // G
            key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma_s))
            s = gl.where(key[None, :] <= (ahead + query)[:, None], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 1) * scale_log2)
        floor = gl.where(higher == float("-inf"), 0.0, higher)
        p = gl.exp2(s * scale_log2 - floor[:, None])
        fade = gl.exp2(top - floor)
        top = higher
        total = total * fade + gl.sum(p, 1)
        o = o * gl.convert_layout(fade, gl.SliceLayout(1, mma_o))[:, None]
        o = warpgroup_mma(
            gl.convert_layout(p.to(q_smem.dtype), weights), v_smem.index(stage).reshape([BLOCK, D]), o, is_async=True
        )
        o = warpgroup_mma_wait(0, deps=(o,))
        mbarrier.arrive(kv_empty.index(stage), count=1)
    o = o * gl.convert_layout(gain / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, mma_o))[:, None]
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
    row = mine + lane // G
    to = row.to(gl.int64) * stride_ot + (head * G + lane % G) * stride_oh
    value = gl.convert_layout(o.to(out.dtype.element_ty), out_layout)
    gl.store(out + to[:, None] + column[None, :], value, mask=(row < end)[:, None])


@gluon.jit
def _attend_0(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    _attend(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES, 0)  # fmt: skip


@gluon.jit
def _attend_1(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    _attend(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES, 1)  # fmt: skip


@gluon.jit
def _attend_2(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    _attend(out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES, 2)  # fmt: skip


@gluon.jit(do_not_specialize=["B", "T"])
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    seq_lens,
    cu_query_lens,
    k_scale,
    v_scale,
    scale_log2,
    B,
    T,
    stride_b,
    stride_ot,
    stride_oh,
    stride_ks,
    stride_vs,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    BLOCK_B: gl.constexpr,
    ROWS: gl.constexpr,
    WGS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED_K: gl.constexpr,
    SCALED_V: gl.constexpr,
    WIDEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Tile num_programs(0) − 1 − program_id(0) of the queries, for KV head program_id(1)."""
    HALVES: gl.constexpr = D // 64
    CONVERT: gl.constexpr = WIDEN and out.dtype.element_ty == gl.bfloat16
    BQ: gl.constexpr = WGS * ROWS // G
    element: gl.constexpr = gl.float16 if WIDEN else out.dtype.element_ty
    head = gl.program_id(1)
    request, first, end = _find_tile(cu_query_lens, gl.num_programs(0) - 1 - gl.program_id(0), B, T, BQ, BLOCK_B)
    seq_len = gl.load(seq_lens + request, mask=request < B, other=0)
    # Queries of no request and of padding stand before the sequence's start and see nothing.
    shift = seq_len - end
    num_seen = gl.maximum(shift + gl.minimum(first + BQ, end), 0)
    num_blocks = (num_seen + BLOCK - 1) // BLOCK
    filled = gl.minimum(seq_len - (num_blocks - 1) * BLOCK, BLOCK)
    table = block_table + request.to(gl.int64) * stride_b
    if SCALED_K:
        scale_log2 *= gl.load(k_scale + head * stride_ks).to(gl.float32)
    gain = 1.0
    if SCALED_V:
        gain = gl.load(v_scale + head * stride_vs).to(gl.float32)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, 64], element)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, D], element)
    k_smem = gl.allocate_shared_memory(element, [STAGES * HALVES, 1, 1, BLOCK, 64], k_layout)
    v_smem = gl.allocate_shared_memory(element, [STAGES, 1, 1, BLOCK, D], v_layout)
    q_smem = gl.allocate_shared_memory(element, [WGS * HALVES, ROWS // G, G, 64], q.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    raw_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=WGS)
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(WGS):
        mbarrier.init(q_full.index(i), count=1)
    if WIDEN:
        k_raw = gl.allocate_shared_memory(k_cache.dtype, [HALVES, 1, 1, BLOCK, 64], k_cache.layout)
        v_raw = gl.allocate_shared_memory(v_cache.dtype, [1, 1, 1, BLOCK, D], v_cache.layout)
        more = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
        q_raw_full = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(3):
            mbarrier.init(more.index(i), count=1)
        for i in gl.static_range(WGS):
            mbarrier.init(q_raw_full.index(i), count=1)
        gl.warp_specialize(
            [
                (_attend_0, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_attend_1, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_attend_2, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_fetch_and_widen, (q, k_cache, v_cache, table, first, head, num_blocks, filled, k_raw, v_raw, k_smem, v_smem, q_smem, raw_full.index(0), more.index(0), more.index(1), more.index(2), q_raw_full, kv_full, kv_empty, q_full, G, D, BLOCK, ROWS, WGS, STAGES, CONVERT)),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_0, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_attend_1, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_attend_2, (out, first, end, shift, head, num_blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, scale_log2, gain, stride_ot, stride_oh, G, D, BLOCK, ROWS, STAGES)),
                (_fetch, (q, k_cache, v_cache, table, first, head, num_blocks, filled, k_smem, v_smem, q_smem, raw_full, kv_full, kv_empty, q_full, G, D, BLOCK, ROWS, WGS, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *args: torch.Tensor,
    **options: Any,
) -> str | None:
    """None if `dense_attend` serves these arguments, else the reason."""
    reason = why_not_wgmma(q) or triton_prefill.why_not(q, k_cache, v_cache, *args, **options)
    if reason is not None:
        return reason
    if q.itemsize != 2:
        return f"q is {q.dtype}, not bfloat16 or float16"
    group, dim = q.shape[1] // k_cache.shape[2], q.shape[2]
    if ROWS % group or dim not in (64, 128) or k_cache.shape[1] not in (64, 128):
        return "a group that divides 64, and heads and blocks of 64 or 128 are needed"
    if any(x.data_ptr() % 16 or any(n * x.itemsize % 16 for n in x.stride()[:-1]) for x in (q, k_cache, v_cache)):
        return "q and the caches must lie on 16-byte boundaries"
    return None


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
) -> torch.Tensor:
    """A request has the same bits alone and in a batch."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_requests = seq_lens.shape[0]
    if out is None:
        out = torch.empty_like(q)
    element = torch.float16 if k_cache.itemsize == 1 else q.dtype
    # Each request may begin a tile of its own, and the rows after the last one too.
    grid = -(-num_rows * group // (WARPGROUPS * ROWS)) + num_requests, num_kv_heads
    _attend_kernel[grid](
        descriptor(q.view(element), (ROWS // group, group, 64)),
        descriptor(k_cache.permute(0, 2, 1, 3), (1, 1, block_size, 64)),
        descriptor(v_cache.permute(0, 2, 1, 3), (1, 1, block_size, dim)),
        out,
        block_table,
        seq_lens,
        cu_query_lens,
        k_scale,
        v_scale,
        scale * LOG2_E,
        num_requests,
        num_rows,
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        head_step(k_scale),
        head_step(v_scale),
        G=group,
        D=dim,
        BLOCK=block_size,
        BLOCK_B=next_power_of_2(num_requests + 1),
        ROWS=ROWS,
        WGS=WARPGROUPS,
        STAGES=2 if dim * block_size > 128 * 64 else 4,
        SCALED_K=k_scale is not None,
        SCALED_V=v_scale is not None,
        WIDEN=k_cache.itemsize == 1,
        num_warps=4,
    )
    return out
