"""Attention with the blocks that neighbouring queries share, on Hopper: no partial output for each block.

A tile is 192 rows: neighbouring queries times the group. A fetching warp brings the tile's queries and, block after
block, K and V; three warpgroups keep a running softmax of 64 rows each in registers. A block that none of 64 rows
chose costs them nothing, one that only some chose is masked for the others. Each query's result leaves once, as the
partial output of the first of its shared places (`remap.plan_triton.SharedBlocks`). Caches of 8 bits pass through a
warpgroup that widens them.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.remap.plan_triton import SharedBlocks
from msaserve.ops.select_attend.gluon_words import let_next_start
from msaserve.ops.sparse_attend.triton_kv_major import Batch
from msaserve.ops.tape import taped

ROWS = 64
"""Rows of one running softmax."""
PARTS = 3
"""Running softmaxes of a tile, each a warpgroup's."""


@gluon.jit
def fetch_block(
    k_cache, v_cache, page, head, at, k_to, v_to, kv_full, kv_empty,
    D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, CACHE_BYTES: gl.constexpr,
):  # fmt: skip
    stage = at % STAGES
    mbarrier.wait(kv_empty.index(stage), ((at // STAGES) & 1) ^ 1)
    mbarrier.expect(kv_full.index(stage), 2 * BLOCK * D * CACHE_BYTES)
    for half in gl.static_range(D // 64):
        tma_load(k_cache, [page, head, 0, half * 64], kv_full.index(stage), k_to.index(stage * (D // 64) + half))
    tma_load(v_cache, [page, head, 0, 0], kv_full.index(stage), v_to.index(stage))


@gluon.jit
def _fetch_queries(q, token, head, turn, q_smem, q_full, q_empty, G: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr):  # fmt: skip
    for part in gl.static_range(PARTS):
        at = turn % Q_STAGES * PARTS + part
        mbarrier.wait(q_empty.index(at), ((turn // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(at), 2 * ROWS * D)
        for half in gl.static_range(D // 64):
            tma_load(
                q,
                [token + part * (ROWS // G), head * G, half * 64],
                q_full.index(at),
                q_smem.index(at * (D // 64) + half),
            )


@gluon.jit
def _fetch(
    q, k_cache, v_cache, block_table, tiles, blocks, k_to, v_to, q_smem, kv_full, kv_empty, q_full, q_empty,
    num_tiles, total, stride_bt,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr, STAGES: gl.constexpr, CACHE_BYTES: gl.constexpr,
):  # fmt: skip
    done = 0
    turn = 0
    for it in range(gl.program_id(0), total, gl.num_programs(0)):
        count = gl.load(tiles + it * 4 + 3)
        if count > 0:
            head = it // num_tiles
            pages = block_table + gl.load(tiles + it * 4).to(gl.int64) * stride_bt
            token = gl.load(tiles + it * 4 + 1)
            own = blocks + it.to(gl.int64) * (CAPACITY * 2)
            page = gl.load(pages + gl.load(own))
            # K and V first: their buffers are free before the last tile's queries are
            fetch_block(k_cache, v_cache, page, head, done, k_to, v_to, kv_full, kv_empty, D, BLOCK, STAGES, CACHE_BYTES)  # fmt: skip
            page = gl.load(pages + gl.load(own + gl.minimum(1, count - 1) * 2))
            _fetch_queries(q, token, head, turn, q_smem, q_full, q_empty, G, D, ROWS, PARTS, Q_STAGES)
            for i in range(1, count):
                fetch_block(k_cache, v_cache, page, head, done + i, k_to, v_to, kv_full, kv_empty, D, BLOCK, STAGES, CACHE_BYTES)  # fmt: skip
                page = gl.load(pages + gl.load(own + gl.minimum(i + 1, count - 1) * 2))
            done += count
            turn += 1


@gluon.jit
def widen(k_raw, v_raw, k_smem, v_smem, stage, D: gl.constexpr, BLOCK: gl.constexpr):
    """A block's K and V from 8 bits to the queries' type, 32 rows at a time, by four warps."""
    k_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    v_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    for part in gl.static_range(BLOCK // 32):
        for half in gl.static_range(D // 64):
            k = k_raw.index(half).reshape([BLOCK, 64]).slice(part * 32, 32, dim=0).load(k_layout)
            to = k_smem.index(stage * (D // 64) + half).reshape([BLOCK, 64]).slice(part * 32, 32, dim=0)
            to.store(k.to(k_smem.dtype))
        v = v_raw.index(0).reshape([BLOCK, D]).slice(part * 32, 32, dim=0).load(v_layout)
        v_smem.index(stage).reshape([BLOCK, D]).slice(part * 32, 32, dim=0).store(v.to(v_smem.dtype))


@gluon.jit
def _fetch_and_widen(
    q, k_cache, v_cache, block_table, tiles, blocks, k_raw, v_raw, k_smem, v_smem, q_smem,
    raw_full, raw_empty, kv_full, kv_empty, q_full, q_empty, num_tiles, total, stride_bt,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr,
):  # fmt: skip
    """What `_fetch` does, by four warps that bring K and V by way of a buffer of 8 bits."""
    done = 0
    turn = 0
    for it in range(gl.program_id(0), total, gl.num_programs(0)):
        count = gl.load(tiles + it * 4 + 3)
        if count > 0:
            head = it // num_tiles
            pages = block_table + gl.load(tiles + it * 4).to(gl.int64) * stride_bt
            token = gl.load(tiles + it * 4 + 1)
            own = blocks + it.to(gl.int64) * (CAPACITY * 2)
            page = gl.load(pages + gl.load(own))
            fetch_block(k_cache, v_cache, page, head, done, k_raw, v_raw, raw_full, raw_empty, D, BLOCK, 1, 1)
            _fetch_queries(q, token, head, turn, q_smem, q_full, q_empty, G, D, ROWS, PARTS, Q_STAGES)
            for i in range(count):
                page = gl.load(pages + gl.load(own + gl.minimum(i + 1, count - 1) * 2))
                stage = (done + i) % 2
                mbarrier.wait(raw_full.index(0), (done + i) & 1)
                mbarrier.wait(kv_empty.index(stage), (((done + i) // 2) & 1) ^ 1)
                widen(k_raw, v_raw, k_smem, v_smem, stage, D, BLOCK)
                fence_async_shared()
                mbarrier.arrive(raw_empty.index(0), count=1)
                mbarrier.arrive(kv_full.index(stage), count=1)
                if i + 1 < count:
                    fetch_block(k_cache, v_cache, page, head, done + i + 1, k_raw, v_raw, raw_full, raw_empty, D, BLOCK, 1, 1)  # fmt: skip
            done += count
            turn += 1


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, stage, at, bits, first, o, top, total, scale_log2,
    G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """One block for 64 rows. `first`: position of their first query, counted from the block's first slot."""
    HALVES: gl.constexpr = D // 64
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma_o, k_width=2)
    s = gl.zeros([ROWS, BLOCK], gl.float32, layout=mma_s)
    for half in gl.static_range(HALVES):
        s = warpgroup_mma(
            q_smem.index(at * HALVES + half).reshape([ROWS, 64]),
            k_smem.index(stage * HALVES + half).reshape([BLOCK, 64]).permute((1, 0)),
            s,
            use_acc=half > 0,
            is_async=True,
        )
    s = warpgroup_mma_wait(0, deps=(s,))
    if (bits != (1 << (ROWS // G)) - 1) | (first < BLOCK - 1):
        query = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s)) // G
        key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma_s))
        last = gl.where(((bits >> query) & 1) != 0, first + query, -1)
        s = gl.where(key[None, :] <= last[:, None], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * scale_log2)
    floor = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * scale_log2 - floor[:, None])
    fade = gl.exp2(top - floor)
    total = total * fade + gl.sum(p, 1)
    o = o * gl.convert_layout(fade, gl.SliceLayout(1, mma_o))[:, None]
    o = warpgroup_mma(
        gl.convert_layout(p.to(q_smem.dtype), weights), v_smem.index(stage).reshape([BLOCK, D]), o, is_async=True
    )
    o = warpgroup_mma_wait(0, deps=(o,))
    return o, new_top, total


@gluon.jit
def _store(
    o, top, total, gain, slots, partial_out, partial_lse, head, token, end, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    out_layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]] if D == 128 else [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[ROWS, D],
    )  # fmt: skip
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))
    t = token + row // G
    slot = gl.load(slots + head.to(gl.int64) * T + t, mask=t < end, other=-1)
    pair = t.to(gl.int64) * (HKV * S) + head * S + slot
    gl.store(partial_lse + pair * G + row % G, (top + gl.log2(total)) * 0.6931471805599453, mask=slot >= 0)
    scaled = o * gl.convert_layout(gain / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, mma_o))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
    t = token + row // G
    slot = gl.load(slots + head.to(gl.int64) * T + t, mask=t < end, other=-1)
    pair = t.to(gl.int64) * (HKV * S) + head * S + slot
    gl.store(
        partial_out + (pair * G + row % G)[:, None] * D + column[None, :],
        gl.convert_layout(scaled.to(partial_out.dtype.element_ty), out_layout),
        mask=(slot >= 0)[:, None],
    )


@gluon.jit
def _attend(
    seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale,
    k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr,
    K_SCALES: gl.constexpr, V_SCALES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    QT: gl.constexpr = ROWS // G
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    FULL: gl.constexpr = (1 << QT) - 1
    done = 0
    turn = 0
    for it in range(gl.program_id(0), total, gl.num_programs(0)):
        count = gl.load(tiles + it * 4 + 3)
        if count > 0:
            request = gl.load(tiles + it * 4)
            token = gl.load(tiles + it * 4 + 1) + PART * QT
            end = gl.load(tiles + it * 4 + 2)
            head = it // num_tiles
            position = gl.load(seq_lens + request) - gl.load(cu_query_lens + request + 1) + token
            top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, mma_s))
            sums = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, mma_s))
            o = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
            own = blocks + it.to(gl.int64) * (CAPACITY * 2)
            scale_log2_k = scale_log2
            if K_SCALES > 0:
                scale_log2_k *= gl.load(k_scale + (head if K_SCALES > 1 else 0))
            at = turn % Q_STAGES * PARTS + PART
            mbarrier.wait(q_full.index(at), (turn // Q_STAGES) & 1)
            n = gl.load(own)
            queries = gl.load(own + 1)
            for i in range(count):
                ahead = own + gl.minimum(i + 1, count - 1) * 2
                next_n = gl.load(ahead)
                next_queries = gl.load(ahead + 1)
                stage = (done + i) % 2
                bits = (queries >> (PART * QT)) & FULL
                mbarrier.wait(kv_full.index(stage), ((done + i) // 2) & 1)
                if bits != 0:
                    o, top, sums = _step(
                        q_smem, k_smem, v_smem, stage, at, bits, position - n * BLOCK,
                        o, top, sums, scale_log2_k, G, D, BLOCK, ROWS,
                    )  # fmt: skip
                mbarrier.arrive(kv_empty.index(stage), count=1)
                n = next_n
                queries = next_queries
            mbarrier.arrive(q_empty.index(at), count=1)
            gain = 1.0
            if V_SCALES > 0:
                gain = gl.load(v_scale + (head if V_SCALES > 1 else 0))
            _store(o, top, sums, gain, slots, partial_out, partial_lse, head, token, end, T, S, HKV, G, D, BLOCK, ROWS)
            done += count
            turn += 1


@gluon.jit
def _attend_0(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES, 0)  # fmt: skip


@gluon.jit
def _attend_1(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES, 1)  # fmt: skip


@gluon.jit
def _attend_2(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, CAPACITY: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES, 2)  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles", "total", "T"])
def _shared_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    cu_query_lens,
    tiles,
    blocks,
    slots,
    partial_out,
    partial_lse,
    k_scale,
    v_scale,
    scale_log2,
    num_tiles,
    total,
    T,
    stride_bt,
    S: gl.constexpr,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CAPACITY: gl.constexpr,
    K_SCALES: gl.constexpr,
    V_SCALES: gl.constexpr,
    WIDEN: gl.constexpr,
    num_warps: gl.constexpr,
):
    # the work items' programs start where these end: they read nothing that these write
    let_next_start()
    HALVES: gl.constexpr = D // 64
    element: gl.constexpr = partial_out.dtype.element_ty
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, 64], element)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, D], element)
    k_smem = gl.allocate_shared_memory(element, [2 * HALVES, 1, 1, BLOCK, 64], k_layout)
    v_smem = gl.allocate_shared_memory(element, [2, 1, 1, BLOCK, D], v_layout)
    q_smem = gl.allocate_shared_memory(element, [Q_STAGES * PARTS * HALVES, ROWS // G, G, 64], q.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=PARTS)
    for i in gl.static_range(Q_STAGES * PARTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    if WIDEN:
        k_raw = gl.allocate_shared_memory(k_cache.dtype, [HALVES, 1, 1, BLOCK, 64], k_cache.layout)
        v_raw = gl.allocate_shared_memory(v_cache.dtype, [1, 1, 1, BLOCK, D], v_cache.layout)
        raw_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        raw_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(raw_full.index(0), count=1)
        mbarrier.init(raw_empty.index(0), count=1)
        gl.warp_specialize(
            [
                (_attend_0, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_attend_1, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_attend_2, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_fetch_and_widen, (q, k_cache, v_cache, block_table, tiles, blocks, k_raw, v_raw, k_smem, v_smem, q_smem, raw_full, raw_empty, kv_full, kv_empty, q_full, q_empty, num_tiles, total, stride_bt, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY)),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_0, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_attend_1, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_attend_2, (seq_lens, cu_query_lens, tiles, blocks, slots, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, num_tiles, total, T, S, HKV, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, K_SCALES, V_SCALES)),
                (_fetch, (q, k_cache, v_cache, block_table, tiles, blocks, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, num_tiles, total, stride_bt, G, D, BLOCK, ROWS, PARTS, Q_STAGES, CAPACITY, 2, 2)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def attend_shared(batch: Batch, shared: SharedBlocks) -> None:
    """Partial outputs of what tiles of PARTS * 64 / G queries share. What `gluon_kv_major.why_not` asks for is met."""
    num_tokens, num_kv_heads, topk, group, dim = batch.partial_out.shape
    block_size = batch.k_cache.shape[1]
    num_tiles, capacity = shared.blocks.shape[1:3]
    total = num_kv_heads * num_tiles
    is_narrow = batch.k_cache.itemsize == 1
    workers = torch.cuda.get_device_properties(batch.q.device).multi_processor_count
    taped(_shared_kernel)[(min(total, workers),)](
        descriptor(batch.q, (ROWS // group, group, 64)),
        descriptor(batch.k_cache.permute(0, 2, 1, 3), (1, 1, block_size, 64)),
        descriptor(batch.v_cache.permute(0, 2, 1, 3), (1, 1, block_size, dim)),
        batch.block_table,
        batch.seq_lens,
        batch.cu_query_lens,
        shared.tiles,
        shared.blocks,
        shared.slots,
        batch.partial_out,
        batch.partial_lse,
        batch.k_scale if batch.k_scale is not None else batch.partial_lse,
        batch.v_scale if batch.v_scale is not None else batch.partial_lse,
        batch.scale * math.log2(math.e),
        num_tiles,
        total,
        num_tokens,
        batch.block_table.stride(0),
        S=topk,
        HKV=num_kv_heads,
        G=group,
        D=dim,
        BLOCK=block_size,
        ROWS=ROWS,
        PARTS=PARTS,
        Q_STAGES=1 if is_narrow else 2,
        CAPACITY=capacity,
        K_SCALES=0 if batch.k_scale is None else batch.k_scale.numel(),
        V_SCALES=0 if batch.v_scale is None else batch.v_scale.numel(),
        WIDEN=is_narrow,
        num_warps=4,
    )
