"""The KV-block-major attention's work items on Hopper: a persistent kernel of one fetching warp and three warpgroups.

The warp brings each item's K and V, double-buffered, and the queries that chose the block, 64 rows (queries × group) at
a time, through a ring of slots, all by TMA. The warpgroups take the slots in turn, each with a tile of its own, so
that one's exponentials run beside another's products. Results leave as partial outputs, as in triton_kv_major. K and V
of 8 bits come by way of a buffer of their own, from which four fetching warps widen them.

Programs take items from a counter, one or two ahead of the one they are at, so that all end together, even those that
start late: after blocks that neighbours share, a program starts where one of that kernel has ended.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

import math
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

from msaserve.ops.combine.triton import launch as launch_combine
from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.hopper import why_not_wgmma
from msaserve.ops.remap.plan_triton import Plan
from msaserve.ops.select_attend.gluon_words import wait_for_launch_before
from msaserve.ops.sparse_attend import triton_kv_major
from msaserve.ops.sparse_attend.gluon_shared import PARTS, attend_shared, fetch_block, widen
from msaserve.ops.sparse_attend.triton_kv_major import Batch
from msaserve.ops.tape import taped

ROWS = 64
"""Rows of one tile: one warpgroup's share of a wgmma."""
WARPGROUPS = 3


@gluon.jit
def _total(counts, units):
    total = gl.load(counts)
    for unit in range(1, units):
        total += gl.load(counts + unit)
    return total


@gluon.jit
def _advance(counts, it, unit, begin, end, last):
    """The unit of the it-th item, or of the last one, and where its items begin and end."""
    it = gl.minimum(it, last)
    while it >= end:
        unit += 1
        begin = end
        end += gl.load(counts + unit)
    return unit, begin, end, it - begin


@gluon.jit
def _take(counts, units):
    """The next item that no program has taken."""
    return gl.atomic_add(counts + units + 1, 1, sem="relaxed")


@gluon.jit
def _tell(it, turn, taken, taken_full, taken_empty, NUM_WARPS: gl.constexpr):
    """The program's item of a turn to its warpgroups."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    mbarrier.wait(taken_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    taken.index(turn % 2).store(gl.full([1], it, gl.int32, layout=one))
    mbarrier.arrive(taken_full.index(turn % 2), count=1)


@gluon.jit
def _hear(turn, taken, taken_full, taken_empty):
    """What `_tell` said of a turn."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(taken_full.index(turn % 2), (turn // 2) & 1)
    it = gl.max(taken.index(turn % 2).load(one), 0)
    mbarrier.arrive(taken_empty.index(turn % 2), count=1)
    return it


@gluon.jit
def _entries_at(own, at, hi, QT: gl.constexpr):
    entries = ()
    for e in gl.static_range(QT):
        entries = entries + (gl.load(own + gl.minimum(at + e, hi - 1)),)
    return entries


@gluon.jit
def _fetch_queries(
    q, own, lo, hi, first, tiles, done, ahead, q_smem, q_full, q_empty, head,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """An item's tiles from `first` on, which has the entries `ahead`; returns those of the tile after the last."""
    HALVES: gl.constexpr = D // 64
    QT: gl.constexpr = ROWS // G
    for tile in range(first, tiles):
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
    return ahead


@gluon.jit
def _fetch(
    q, k_cache, v_cache, entries, items, counts, capacity, units, k_to, v_to, q_smem,
    taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    NUM_WARPS: gl.constexpr = 1
    QT: gl.constexpr = ROWS // G
    done = 0
    turn = 0
    unit = 0
    begin = 0
    total = _total(counts, units)
    it = _take(counts, units)
    _tell(it, turn, taken, taken_full, taken_empty, NUM_WARPS)
    if it < total:
        # everything about an item is loaded one item ahead, everything about a tile one tile ahead
        unit, begin, end, index = _advance(counts, it, unit, begin, gl.load(counts), total - 1)
        item = items + (unit * capacity + index) * 8
        head, page, lo, hi = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        while it < total:
            fetch_block(k_cache, v_cache, page, head, turn, k_to, v_to, kv_full, kv_empty, D, BLOCK, 2, 2)
            it = _take(counts, units)
            _tell(it, turn + 1, taken, taken_full, taken_empty, NUM_WARPS)
            unit, begin, end, index = _advance(counts, it, unit, begin, end, total - 1)
            item = items + (unit * capacity + index) * 8
            next_head, next_page = gl.load(item), gl.load(item + 1)
            next_lo, next_hi = gl.load(item + 2), gl.load(item + 3)
            own = entries + head.to(gl.int64) * T * S
            tiles = (hi - lo + QT - 1) // QT
            ahead = _entries_at(own, lo, hi, QT)
            _fetch_queries(
                q, own, lo, hi, 0, tiles, done, ahead, q_smem, q_full, q_empty, head, S, HKV, G, D, ROWS, SLOTS
            )
            done += tiles
            turn += 1
            head, page, lo, hi = next_head, next_page, next_lo, next_hi


@gluon.jit
def _entries_of(own, at, hi, S: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """The entry of each row of a tile, and the token of its earliest query."""
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))
    entry = gl.load(own + gl.minimum(at + row // G, hi - 1))
    earliest = gl.load(own + at)
    for e in gl.static_range(1, ROWS // G):
        earliest = gl.minimum(earliest, gl.load(own + gl.minimum(at + e, hi - 1)))
    return entry, earliest // S


@gluon.jit
def _weigh(s, entry, earliest, at, hi, shift, partial_lse, scale_log2, head, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, ELEMENT: gl.constexpr):  # fmt: skip
    """Weights of a tile's scores as the left side of the product with V, and what their sum must be divided by."""
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma_o, k_width=2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_s))
    if shift + earliest < BLOCK - 1:
        key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma_s))
        s = gl.where(key[None, :] <= (shift + entry // S)[:, None], s, float("-inf"))
    top = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - top[:, None])
    total = gl.sum(p, 1)
    pair = (entry // S * HKV + head) * S + entry % S
    gl.store(partial_lse + pair * G + row % G, (top + gl.log2(total)) * 0.6931471805599453, mask=at + row // G < hi)
    return gl.convert_layout(p.to(ELEMENT), weights), gl.convert_layout(1.0 / total, gl.SliceLayout(1, mma_o))


@gluon.jit
def _places_of(own, at, hi, head, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, out_layout: gl.constexpr):  # fmt: skip
    """Row of partial_out of each row of a tile, or −1."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out_layout))
    entry = gl.load(own + gl.minimum(at + row // G, hi - 1))
    pair = (entry // S * HKV + head) * S + entry % S
    return gl.where(at + row // G < hi, pair * G + row % G, -1)


@gluon.jit
def _store(o, gain, place, partial_out, D: gl.constexpr, out_layout: gl.constexpr):
    column = gl.arange(0, D, layout=gl.SliceLayout(0, out_layout))
    scaled = (o * gain[:, None]).to(partial_out.dtype.element_ty)
    gl.store(
        partial_out + (place * D)[:, None] + column[None, :],
        gl.convert_layout(scaled, out_layout),
        mask=(place >= 0)[:, None],
    )


@gluon.jit
def _attend(
    entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale,
    k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
    SLOTS: gl.constexpr, WGS: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = D // 64
    QT: gl.constexpr = ROWS // G
    ELEMENT: gl.constexpr = partial_out.dtype.element_ty
    mma_s: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
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
    s = gl.zeros([ROWS, BLOCK], gl.float32, layout=mma_s)
    o = gl.zeros([ROWS, D], gl.float32, layout=mma_o)
    done = 0
    turn = 0
    unit = 0
    begin = 0
    count = _total(counts, units)
    it = _hear(turn, taken, taken_full, taken_empty)
    if it < count:
        unit, begin, end, index = _advance(counts, it, unit, begin, gl.load(counts), count - 1)
        item = items + (unit * capacity + index) * 8
        head, lo, hi, shift = gl.load(item), gl.load(item + 2), gl.load(item + 3), gl.load(item + 4)
        while it < count:
            it = _hear(turn + 1, taken, taken_full, taken_empty)
            unit, begin, end, index = _advance(counts, it, unit, begin, end, count - 1)
            item = items + (unit * capacity + index) * 8
            next_head, next_lo = gl.load(item), gl.load(item + 2)
            next_hi, next_shift = gl.load(item + 3), gl.load(item + 4)
            own = entries + head.to(gl.int64) * T * S
            k_scale_log2 = scale_log2
            if K_SCALES > 0:
                k_scale_log2 *= gl.load(k_scale + (head if K_SCALES > 1 else 0))
            v_gain = 1.0
            if V_SCALES > 0:
                v_gain = gl.load(v_scale + (head if V_SCALES > 1 else 0))
            tiles = (hi - lo + QT - 1) // QT
            stage = turn % 2
            mbarrier.wait(kv_full.index(stage), (turn // 2) & 1)
            for tile in range((WG + WGS - done % WGS) % WGS, tiles, WGS):
                at = lo + tile * QT
                entry, earliest = _entries_of(own, at, hi, S, G, D, BLOCK, ROWS)
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
                # each arrival waits for the whole warpgroup: late, beside the other waits, where slots are plenty
                if SLOTS == WGS:
                    mbarrier.arrive(q_empty.index(slot), count=1)
                p, gain = _weigh(s, entry, earliest, at, hi, shift, partial_lse, k_scale_log2, head, S, HKV, G, D, BLOCK, ROWS, ELEMENT)  # fmt: skip
                o = warpgroup_mma(p, v_smem.index(stage).reshape([BLOCK, D]), o, use_acc=False, is_async=True)
                place = _places_of(own, at, hi, head, S, HKV, G, ROWS, out_layout)
                o = warpgroup_mma_wait(0, deps=(o,))
                if SLOTS > WGS:
                    mbarrier.arrive(q_empty.index(slot), count=1)
                _store(o, gain * v_gain if V_SCALES > 0 else gain, place, partial_out, D, out_layout)
            mbarrier.arrive(kv_empty.index(stage), count=1)
            done += tiles
            turn += 1
            head, lo, hi, shift = next_head, next_lo, next_hi, next_shift


@gluon.jit
def _attend_0(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, WGS: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES, 0)  # fmt: skip


@gluon.jit
def _attend_1(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, WGS: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES, 1)  # fmt: skip


@gluon.jit
def _attend_2(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, WGS: gl.constexpr, K_SCALES: gl.constexpr, V_SCALES: gl.constexpr):  # fmt: skip
    _attend(entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES, 2)  # fmt: skip


@gluon.jit
def _fetch_and_widen(
    q, k_cache, v_cache, entries, items, counts, capacity, units, k_raw, v_raw, k_smem, v_smem, q_smem,
    raw_full, raw_empty, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, T,
    S: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """What `_fetch` does, by four warps that bring K and V by way of a buffer of 8 bits."""
    QT: gl.constexpr = ROWS // G
    NUM_WARPS: gl.constexpr = 4
    done = 0
    turn = 0
    unit = 0
    begin = 0
    total = _total(counts, units)
    it = _take(counts, units)
    _tell(it, turn, taken, taken_full, taken_empty, NUM_WARPS)
    if it < total:
        unit, begin, end, index = _advance(counts, it, unit, begin, gl.load(counts), total - 1)
        item = items + (unit * capacity + index) * 8
        head, page, lo, hi = gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        fetch_block(k_cache, v_cache, page, head, turn, k_raw, v_raw, raw_full, raw_empty, D, BLOCK, 1, 1)
        after = _take(counts, units)
        _tell(after, turn + 1, taken, taken_full, taken_empty, NUM_WARPS)
        unit, begin, end, index = _advance(counts, after, unit, begin, end, total - 1)
        item = items + (unit * capacity + index) * 8
        next_head, next_page = gl.load(item), gl.load(item + 1)
        next_lo, next_hi = gl.load(item + 2), gl.load(item + 3)
        while it < total:
            own = entries + head.to(gl.int64) * T * S
            tiles = (hi - lo + QT - 1) // QT
            ahead = _entries_at(own, lo, hi, QT)
            stage = turn % 2
            mbarrier.wait(raw_full.index(0), turn & 1)
            mbarrier.wait(kv_empty.index(stage), ((turn // 2) & 1) ^ 1)
            widen(k_raw, v_raw, k_smem, v_smem, stage, D, BLOCK)
            fence_async_shared()
            mbarrier.arrive(raw_empty.index(0), count=1)
            mbarrier.arrive(kv_full.index(stage), count=1)
            if after < total:
                fetch_block(k_cache, v_cache, next_page, next_head, turn + 1, k_raw, v_raw, raw_full, raw_empty, D, BLOCK, 1, 1)  # fmt: skip
            early = gl.minimum(tiles, SLOTS)
            ahead = _fetch_queries(q, own, lo, hi, 0, early, done, ahead, q_smem, q_full, q_empty, head, S, HKV, G, D, ROWS, SLOTS)  # fmt: skip
            # the slots are full: there is time to take an item
            now_head, now_lo, now_hi = head, lo, hi
            head, lo, hi = next_head, next_lo, next_hi
            it = after
            after = _take(counts, units)
            _tell(after, turn + 2, taken, taken_full, taken_empty, NUM_WARPS)
            unit, begin, end, index = _advance(counts, after, unit, begin, end, total - 1)
            item = items + (unit * capacity + index) * 8
            next_head, next_page = gl.load(item), gl.load(item + 1)
            next_lo, next_hi = gl.load(item + 2), gl.load(item + 3)
            _fetch_queries(q, own, now_lo, now_hi, early, tiles, done, ahead, q_smem, q_full, q_empty, now_head, S, HKV, G, D, ROWS, SLOTS)  # fmt: skip
            done += tiles
            turn += 1


@gluon.jit(do_not_specialize=["capacity", "units", "T"])
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    entries,
    items,
    counts,
    capacity,
    units,
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
    WGS: gl.constexpr,
    K_SCALES: gl.constexpr,
    V_SCALES: gl.constexpr,
    WIDEN: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    HALVES: gl.constexpr = D // 64
    element: gl.constexpr = partial_out.dtype.element_ty
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, 64], element)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK, D], element)
    k_smem = gl.allocate_shared_memory(element, [2 * HALVES, 1, 1, BLOCK, 64], k_layout)
    v_smem = gl.allocate_shared_memory(element, [2, 1, 1, BLOCK, D], v_layout)
    q_smem = gl.allocate_shared_memory(element, [SLOTS * HALVES, ROWS, 64], q.layout)
    taken = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    taken_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(taken_full.index(i), count=1)
        mbarrier.init(taken_empty.index(i), count=WGS)
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=WGS)
    for i in gl.static_range(SLOTS):
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
                (_attend_0, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_attend_1, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_attend_2, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_fetch_and_widen, (q, k_cache, v_cache, entries, items, counts, capacity, units, k_raw, v_raw, k_smem, v_smem, q_smem, raw_full, raw_empty, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, T, S, HKV, G, D, BLOCK, ROWS, SLOTS)),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_0, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_attend_1, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_attend_2, (entries, items, counts, capacity, units, partial_out, partial_lse, k_scale, v_scale, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, scale_log2, T, S, HKV, G, D, BLOCK, ROWS, SLOTS, WGS, K_SCALES, V_SCALES)),
                (_fetch, (q, k_cache, v_cache, entries, items, counts, capacity, units, k_smem, v_smem, q_smem, taken, taken_full, taken_empty, kv_full, kv_empty, q_full, q_empty, T, S, HKV, G, D, BLOCK, ROWS, SLOTS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip
    if PDL:
        # whoever waits for this launch has waited for the one before
        wait_for_launch_before()


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
    if any(x.data_ptr() % 16 or any(n * x.itemsize % 16 for n in x.stride()[:-1]) for x in (q, k_cache, v_cache)):
        return "q and the caches must lie on 16-byte boundaries"
    return None


def finish(batch: Batch, work: Plan) -> None:
    """Attention over the blocks that are full of tokens, and the sum of the parts."""
    if work.shared is not None:
        attend_shared(batch, work.shared)
    num_tokens, num_kv_heads, topk, group, dim = batch.partial_out.shape
    q, block_size = batch.q, batch.k_cache.shape[1]
    rows = q.as_strided((num_tokens * num_kv_heads * group, dim), (q.stride(1), 1))
    units, capacity = work.items.shape[:2]
    is_narrow = batch.k_cache.itemsize == 1
    workers = torch.cuda.get_device_properties(q.device).multi_processor_count
    taped(_attend_kernel)[(min(units * capacity, workers),)](
        descriptor(rows, (group, 64)),
        descriptor(batch.k_cache.permute(0, 2, 1, 3), (1, 1, block_size, 64)),
        descriptor(batch.v_cache.permute(0, 2, 1, 3), (1, 1, block_size, dim)),
        batch.k_scale if batch.k_scale is not None else batch.partial_lse,
        batch.v_scale if batch.v_scale is not None else batch.partial_lse,
        work.entries,
        work.items,
        work.counts,
        capacity,
        units,
        batch.partial_out,
        batch.partial_lse,
        batch.scale * math.log2(math.e),
        num_tokens,
        S=topk,
        HKV=num_kv_heads,
        G=group,
        D=dim,
        BLOCK=block_size,
        ROWS=ROWS,
        # a multiple of the warpgroups, as many as fit
        SLOTS=WARPGROUPS if is_narrow else 2 * WARPGROUPS,
        WGS=WARPGROUPS,
        K_SCALES=0 if batch.k_scale is None else batch.k_scale.numel(),
        V_SCALES=0 if batch.v_scale is None else batch.v_scale.numel(),
        WIDEN=is_narrow,
        PDL=work.shared is not None,
        num_warps=4,
        launch_pdl=work.shared is not None,
    )
    launch_combine(batch.partial_out, batch.partial_lse, batch.out, None, work.part_counts)


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *args: torch.Tensor,
    share: bool | None = None,
    **options: Any,
) -> torch.Tensor:
    """`share`: whether blocks that neighbours share are attended to apart; None: not with 8-bit caches."""
    if share is None:
        share = k_cache.itemsize > 1
    return triton_kv_major.sparse_attend(
        q,
        k_cache,
        v_cache,
        *args,
        tile=PARTS * ROWS * k_cache.shape[2] // q.shape[1] if share else 0,
        tile_parts=PARTS,
        finish=finish,
        **options,
    )
