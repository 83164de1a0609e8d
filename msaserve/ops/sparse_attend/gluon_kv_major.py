"""The KV-block-major attention's work items on Hopper: a persistent kernel of one fetching warp and three warpgroups.

The warp brings each item's K and V, double-buffered, and the queries that chose the block, 64 rows (queries × group) at
a time, through a ring of slots, all by TMA. The warpgroups take the slots in turn, each with a tile of its own, so
that one's exponentials run beside another's products. Results leave as partial outputs, as in triton_kv_major.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

import math
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.hopper import why_not_wgmma
from msaserve.ops.sparse_attend import triton_kv_major
from msaserve.ops.sparse_attend.gluon_shared import attend_shared

ROWS = 64
"""Rows of one tile: one warpgroup's share of a wgmma."""
WARPGROUPS = 3


@gluon.jit
def _total(counts, PARTS: gl.constexpr):
    total = gl.load(counts)
    for part in gl.static_range(1, PARTS):
        total += gl.load(counts + part)
    return total


@gluon.jit
def _place(counts, it, capacity, PARTS: gl.constexpr):
    """Where the it-th item of all parts lies."""
    place = it
    end = gl.load(counts)
    for part in gl.static_range(1, PARTS):
        place = gl.where(it >= end, part * capacity + it - end, place)
        end += gl.load(counts + part)
    return place * 8


@gluon.jit
def _entries_at(own, at, hi, QT: gl.constexpr):
    entries = ()
    for e in gl.static_range(QT):
        entries = entries + (gl.load(own + gl.minimum(at + e, hi - 1)),)
    return entries


@gluon.jit
def _fetch(
    q, k_cache, v_cache, entries, items, counts, capacity, k_smem, v_smem, q_smem,
    kv_full, kv_empty, q_full, q_empty, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = D // 64
    QT: gl.constexpr = ROWS // G
    done = 0
    turn = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    total = _total(counts, PARTS)
    # everything about an item is loaded one item ahead, everything about a tile one tile ahead
    item = items + _place(counts, gl.minimum(first, gl.maximum(total - 1, 0)), capacity, PARTS)
    head, page, lo, hi = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
    for it in range(first, total, step):
        stage = turn % 2
        mbarrier.wait(kv_empty.index(stage), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(kv_full.index(stage), 4 * BLOCK * D)
        for half in gl.static_range(HALVES):
            tma_load(k_cache, [page, head, 0, half * 64], kv_full.index(stage), k_smem.index(stage * HALVES + half))
        tma_load(v_cache, [page, head, 0, 0], kv_full.index(stage), v_smem.index(stage))
        item = items + _place(counts, gl.minimum(it + step, total - 1), capacity, PARTS)
        next_head, next_page = gl.load(item), gl.load(item + 1)
        next_lo, next_hi = gl.load(item + 2), gl.load(item + 3)
        own = entries + head.to(gl.int64) * T * S
        tiles = (hi - lo + QT - 1) // QT
        ahead = _entries_at(own, lo, hi, QT)
        for tile in range(tiles):
            now = ahead
            ahead = _entries_at(own, lo + (tile + 1) * QT, hi, QT)
            slot = (done + tile) % SLOTS
            mbarrier.wait(q_empty.index(slot), (((done + tile) // SLOTS) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 2 * ROWS * D)
            for e in gl.static_range(QT):
                row = (now[e] // S * HKV + head) * G
                for half in gl.static_range(HALVES):
                    tma_load(
                        q,
                        [row, half * 64],
                        q_full.index(slot),
                        q_smem.index(slot * HALVES + half).slice(e * G, G, dim=0),
                    )
        done += tiles
        turn += 1
        head, page, lo, hi = next_head, next_page, next_lo, next_hi


@gluon.jit
def _attend(
    entries, items, counts, capacity, partial_out, partial_lse,
    k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, WGS: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = D // 64
    QT: gl.constexpr = ROWS // G
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
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma_s))
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
    s = gl.zeros([ROWS, BLOCK], gl.float32, layout=mma_s)
    o = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
    done = 0
    turn = 0
    first = gl.program_id(0)
    step = gl.num_programs(0)
    count = _total(counts, PARTS)
    item = items + _place(counts, gl.minimum(first, gl.maximum(count - 1, 0)), capacity, PARTS)
    head, lo, hi, shift = gl.load(item), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
    for it in range(first, count, step):
        item = items + _place(counts, gl.minimum(it + step, count - 1), capacity, PARTS)
        next_head, next_lo, next_hi, next_shift = gl.load(item), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
        own = entries + head.to(gl.int64) * T * S
        tiles = (hi - lo + QT - 1) // QT
        stage = turn % 2
        mbarrier.wait(kv_full.index(stage), (turn // 2) & 1)
        for tile in range((WG + WGS - done % WGS) % WGS, tiles, WGS):
            at = lo + tile * QT + row // G
            entry = gl.load(own + gl.minimum(at, hi - 1))
            # entries ascend: the first is the earliest query
            is_masked = shift + gl.load(own + lo + tile * QT) // S < BLOCK - 1
            out_at = lo + tile * QT + out_row // G
            out_entry = gl.load(own + gl.minimum(out_at, hi - 1))
            slot = (done + tile) % SLOTS
            mbarrier.wait(q_full.index(slot), ((done + tile) // SLOTS) & 1)
            for half in gl.static_range(HALVES):
                s = warpgroup_mma(
                    q_smem.index(slot * HALVES + half),
                    k_smem.index(stage * HALVES + half).reshape([BLOCK, 64]).permute((1, 0)),
                    s,
                    use_acc=half > 0,
                    is_async=True,
                )
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(q_empty.index(slot), count=1)
            if is_masked:
                s = gl.where(key[None, :] <= (shift + entry // S)[:, None], s, float("-inf"))
            top = gl.max(s, 1) * scale_log2
            p = gl.exp2(s * scale_log2 - top[:, None])
            total = gl.sum(p, 1)
            p = gl.convert_layout(p.to(q_smem.dtype), weights)
            o = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK, D]), o, use_acc=False, is_async=True)
            part = (entry // S).to(gl.int64) * (HKV * S) + (head * S + entry % S)
            gl.store(partial_lse + part * G + row % G, (top + gl.log2(total)) * 0.6931471805599453, mask=at < hi)
            o = warpgroup_mma_wait(0, deps=(o,))
            scaled = o * gl.convert_layout(1.0 / total, gl.SliceLayout(1, mma_o))[:, None]
            part = (out_entry // S).to(gl.int64) * (HKV * S) + (head * S + out_entry % S)
            gl.store(
                partial_out + (part * G + out_row % G)[:, None] * D + column[None, :],
                gl.convert_layout(scaled.to(partial_out.dtype.element_ty), out_layout),
                mask=(out_at < hi)[:, None],
            )
        mbarrier.arrive(kv_empty.index(stage), count=1)
        done += tiles
        turn += 1
        head, lo, hi, shift = next_head, next_lo, next_hi, next_shift


@gluon.jit
def _attend_0(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, WGS: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS, 0)  # fmt: skip


@gluon.jit
def _attend_1(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, WGS: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS, 1)  # fmt: skip


@gluon.jit
def _attend_2(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr, WGS: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS, 2)  # fmt: skip


@gluon.jit
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    entries,
    items,
    counts,
    capacity,
    partial_out,
    partial_lse,
    scale_log2,
    T,
    S: gl.constexpr,
    HKV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    WGS: gl.constexpr,
    num_warps: gl.constexpr,
):
    HALVES: gl.constexpr = D // 64
    element: gl.constexpr = partial_out.dtype.element_ty
    k_smem = gl.allocate_shared_memory(element, [2 * HALVES, 1, 1, BLOCK, 64], k_cache.layout)
    v_smem = gl.allocate_shared_memory(element, [2, 1, 1, BLOCK, D], v_cache.layout)
    q_smem = gl.allocate_shared_memory(element, [SLOTS * HALVES, ROWS, 64], q.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=WGS)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    if WGS == 3:
        gl.warp_specialize(
            [
                (_attend_0, (entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS)),
                (_attend_1, (entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS)),
                (_attend_2, (entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS)),
                (_fetch, (q, k_cache, v_cache, entries, items, counts, capacity, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_0, (entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS)),
                (_attend_1, (entries, items, counts, capacity, partial_out, partial_lse, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS, WGS)),
                (_fetch, (q, k_cache, v_cache, entries, items, counts, capacity, k_smem, v_smem, q_smem, kv_full, kv_empty, q_full, q_empty, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, PARTS)),
            ],
            [4, 1],
            [232, 24],
        )  # fmt: skip


def why_not(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_ids: torch.Tensor, *args: object, **kwargs: Any
) -> str | None:
    """None if the kernels can serve these arguments of `sparse_attend`, else the reason."""
    reason = why_not_wgmma(q) or triton_kv_major.why_not(q, k_cache, v_cache, block_ids, *args, **kwargs)
    if reason is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}, not bfloat16 or float16"
    _, block_size, num_kv_heads, dim = k_cache.shape
    if q.shape[1] // num_kv_heads not in (8, 16, 32, 64):
        return "8, 16, 32 or 64 query heads to a KV head are needed"
    if dim not in (64, 128) or block_size not in (64, 128):
        return "the head dim and the block size must be 64 or 128"
    if q.stride(0) != q.shape[1] * q.stride(1):
        return "q's heads must lie at even distances"
    tensors = (q, k_cache, v_cache)
    if any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1]) for x in tensors):
        return "q and the caches must lie on 16-byte boundaries"
    return None


def attend_items(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    entries: torch.Tensor,
    items: torch.Tensor,
    counts: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    scale: float,
    slots: int = 6,
    warpgroups: int = 3,
) -> None:
    """Partial outputs of the (query, block) pairs of some work items, whose blocks are full of tokens."""
    num_tokens, num_kv_heads, topk, group, dim = partial_out.shape
    block_size = k_cache.shape[1]
    rows = q.as_strided((num_tokens * num_kv_heads * group, dim), (q.stride(1), 1))
    workers = torch.cuda.get_device_properties(q.device).multi_processor_count
    _attend_kernel[(min(items.shape[0] * items.shape[1], workers),)](
        descriptor(rows, (group, 64)),
        descriptor(k_cache.permute(0, 2, 1, 3), (1, 1, block_size, 64)),
        descriptor(v_cache.permute(0, 2, 1, 3), (1, 1, block_size, dim)),
        entries,
        items,
        counts,
        items.shape[-2],
        partial_out,
        partial_lse,
        scale * math.log2(math.e),
        num_tokens,
        S=topk,
        HKV=num_kv_heads,
        G=group,
        D=dim,
        BLOCK=block_size,
        ROWS=ROWS,
        SLOTS=slots,
        PARTS=items.shape[0],
        WGS=warpgroups,
        num_warps=4,
    )


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    item: int = 128,
    parts: int = 1,
    share: bool = True,
) -> torch.Tensor:
    return triton_kv_major.sparse_attend(
        q,
        k_cache,
        v_cache,
        block_ids,
        block_table,
        seq_lens,
        cu_query_lens,
        scale=scale,
        max_query_len=max_query_len,
        out=out,
        item=item,
        parts=parts,
        full_blocks=attend_items,
        shared_blocks=attend_shared if share else None,
    )
