"""select_attend for decode on Hopper: scan, choice with attention, and merge, three launches.

`_scan_kernel` scores every block, keys coming by TMA. `_attend_kernel` starts beside it and waits for it as a whole;
then each program chooses its row's blocks and attends to its share of them. `_merge_kernel` starts beside that and waits
for its own row's partial outputs.

It looks at the data itself: every word that it will read is first set to UNWRITTEN by the program that will write it
(`gluon_words`). With programmatic dependent launch a kernel starts only after every program of the one before has said
that it may, which they say after this, so what is read is UNWRITTEN or final. No counter has to be kept or zeroed, and
as the programs waited for are running already, none can wait for ever.

What is read before the launch before has ended, and so must not be written by one that lets its dependents start before
it has: block_table, seq_lens, cu_query_lens, and index keys of blocks without a token of this step's queries.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

from functools import partial

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
)

from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.hopper import why_not_wgmma
from msaserve.ops.select_attend.gluon_words import (
    NONE,
    UNWRITTEN,
    choose,
    fetch_descriptor,
    greatest,
    let_next_start,
    look_again,
    make_visible,
    order_key,
    read,
    reinterpret,
    thread_barrier,
    wait_for_launch_before,
    whole,
)
from msaserve.ops.select_blocks import decode_triton as select
from msaserve.ops.sparse_attend import decode_triton as attend
from msaserve.ops.sparse_attend.decode_triton import LOG2_E, head_step, num_splits, partials


@gluon.jit
def _scan_kernel(
    index_q, index_k, block_table, seq_lens, cu_query_lens, scores, comb_scores, comb_blocks,
    max_blocks, stride_qt, stride_qh, stride_b, stride_sh, stride_st,
    H: gl.constexpr, QP: gl.constexpr, R: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, RP: gl.constexpr, TURNS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Scores of the blocks program_id(1), + gridDim.y, … of request program_id(0), and with RP > 0 the best of TURNS
    combs, each of every TURNS-th of them.

    Row r of the R (≥ H · QP) stands for index head r // QP and query token r % QP of the request.
    """
    NARROW: gl.constexpr = index_k.dtype.primitive_bitwidth == 8
    element: gl.constexpr = gl.float16 if NARROW else index_q.dtype.element_ty
    width: gl.constexpr = 4 if NARROW else 2
    page_bytes: gl.constexpr = BLOCK * D * index_k.dtype.primitive_bitwidth // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 8])
    keys: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=width)
    queries: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=width)
    columns: gl.constexpr = gl.SliceLayout(0, mma)
    COMBS: gl.constexpr = RP > 0

    fetch_descriptor("_scan_kernel_param_1")
    k_smem = gl.allocate_shared_memory(index_k.dtype, [STAGES, 1, BLOCK, D], index_k.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for fill in gl.static_range(STAGES):
        mbarrier.init(full.index(fill), count=1)

    # The same blocks of all requests at a time: where pages are shared, their keys are in the L2 cache for the next.
    request = gl.program_id(0)
    first = gl.program_id(1)
    step = gl.num_programs(1)
    # The batch's description is older than the launch before; the first pages are asked for with the lengths.
    table = block_table + request.to(gl.int64) * stride_b
    pages = ()
    for fill in gl.static_range(STAGES):
        pages = pages + (gl.load(table + gl.minimum(first + fill * step, max_blocks - 1)),)
    seq_len = gl.load(seq_lens + request)
    start = gl.load(cu_query_lens + request)
    query_len = gl.load(cu_query_lens + request + 1) - start
    num_blocks = gl.minimum((seq_len + BLOCK - 1) // BLOCK, max_blocks)
    count = gl.where(query_len > 0, (num_blocks - first + step - 1) // step, 0)
    thread_barrier()
    # Blocks without a token of this step are older than the launch before.
    num_old = (seq_len - query_len) // BLOCK
    for fill in gl.static_range(STAGES):
        if (fill < count) & (first + fill * step < num_old):
            mbarrier.expect(full.index(fill), page_bytes)
            tma_load(index_k, [pages[fill], 0, 0], full.index(fill), k_smem.index(fill))
    if PDL:
        wait_for_launch_before()
        # Not before: whoever reads this launch's partial sums and scores of the step before has ended then.
        let_next_start()
    for fill in gl.static_range(STAGES):
        if (fill < count) & (first + fill * step >= num_old):
            mbarrier.expect(full.index(fill), page_bytes)
            tma_load(index_k, [pages[fill], 0, 0], full.index(fill), k_smem.index(fill))

    r = gl.arange(0, R, layout=columns)
    row = (start + r % QP).to(gl.int64)
    real = (r // QP < H) & (r % QP < query_len)
    out = scores + (r // QP) * stride_sh + row * stride_st
    comb_at = (row * H + r // QP) * (step * TURNS) + first
    copy: gl.constexpr = gl.BlockedLayout([8, 1], [D // 8, 256 // D], [1, num_warps], [0, 1])
    d = gl.arange(0, D, layout=gl.SliceLayout(1, copy))
    c = gl.arange(0, R, layout=gl.SliceLayout(0, copy))
    q = gl.load(
        index_q + (start + c % QP).to(gl.int64)[None, :] * stride_qt + (c // QP)[None, :] * stride_qh + d[:, None],
        mask=((c // QP < H) & (c % QP < query_len))[None, :],
        other=0.0,
    )
    q = gl.convert_layout(q.to(element), queries)

    visible = seq_len - query_len + r % QP + 1
    offset = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, mma))
    comb_best = ()
    comb_block = ()
    for turn in gl.static_range(TURNS):
        comb_best = comb_best + (gl.full([R], float("-inf"), gl.float32, layout=columns),)
        comb_block = comb_block + (gl.full([R], 0, gl.int32, layout=columns) + (first + turn * step),)
    for i in range(count):
        n = first + i * step
        stage = i % STAGES
        ahead = gl.load(table + gl.minimum(n + STAGES * step, max_blocks - 1))
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        k = k_smem.index(stage).reshape([BLOCK, D]).load(keys)
        s = mma_v2(k.to(element), q, gl.zeros([BLOCK, R], gl.float32, layout=mma))
        if i + STAGES < count:
            thread_barrier()
            mbarrier.expect(full.index(stage), page_bytes)
            tma_load(index_k, [ahead, 0, 0], full.index(stage), k_smem.index(stage))
        seen = (n * BLOCK + offset)[:, None] < visible[None, :]
        # A NaN key compares false and is left out like an unseen one.
        best = gl.max(gl.where(seen & (s > float("-inf")), s, float("-inf")), 0)
        gl.store(out + ((first + i % TURNS * step) * RP + i // TURNS if COMBS else n), order_key(best), mask=real)
        if COMBS:
            higher_best = ()
            higher_block = ()
            for turn in gl.static_range(TURNS):
                is_higher = (i % TURNS == turn) & (best > comb_best[turn])
                higher_best = higher_best + (gl.where(is_higher, best, comb_best[turn]),)
                higher_block = higher_block + (gl.where(is_higher, n, comb_block[turn]),)
            comb_best = higher_best
            comb_block = higher_block
    if COMBS:
        for turn in gl.static_range(TURNS):
            gl.store(comb_scores + comb_at + turn * step, order_key(comb_best[turn]), mask=real)
            gl.store(comb_blocks + comb_at + turn * step, comb_block[turn], mask=real)


@gluon.jit
def _bring(
    k_cache, v_cache, k_smem, v_smem, full, numbers, pages, ids, places, piece, stage, head, is_asked,
    PARTS: gl.constexpr, TILE: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Ask for the K and V of one piece, if it is asked for. `pages` belong to the blocks of these `numbers`."""
    block = gl.max(gl.where(places == piece // PARTS, ids, 0), 0)
    page = greatest(gl.where(numbers == block, pages, 0))
    mbarrier.expect(full.index(stage), BYTES, pred=is_asked)
    at = (piece % PARTS) * TILE
    tma_load(k_cache, [page, head, at, 0], full.index(stage), k_smem.index(stage), pred=is_asked)
    tma_load(v_cache, [page, head, at, 0], full.index(stage), v_smem.index(stage), pred=is_asked)


@gluon.jit
def _widened(x):
    """Pairs of 8-bit floats [tokens, pairs], as int16: the first and the second of each, as float16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        .reg .b16 first, second;
        prmt.b32 t, $2, 0, 0x3120;
        mov.b32 {first, second}, t;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        }""",
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _attend_kernel(
    q_ptr, k_cache, v_cache, block_table, seq_lens, cu_query_lens, scores, comb_scores, comb_blocks,
    block_ids, out, partial_out, partial_lse, k_scale, v_scale,
    num_requests, max_blocks, local_blocks, scale_log2,
    stride_qt, stride_qh, stride_b, stride_sh, stride_st, stride_ih, stride_it, stride_ot, stride_oh, stride_ks, stride_vs,
    BP: gl.constexpr, QP: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, TILE: gl.constexpr,
    S: gl.constexpr, SP: gl.constexpr, CP: gl.constexpr, RP: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, SCALED_K: gl.constexpr, SCALED_V: gl.constexpr,
    PDL: gl.constexpr, FAST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Split program_id(0) of KV head program_id(1) and query token program_id(2).

    Each warp attends to tokens of its own, all heads of the group, with its own running softmax, so that warps wait
    for one another only where a buffer is filled again and at the end, where their sums are put together.
    """
    NARROW: gl.constexpr = k_cache.dtype.primitive_bitwidth == 8
    element: gl.constexpr = gl.float16 if NARROW else q_ptr.dtype.element_ty
    PARTS: gl.constexpr = BLOCK // TILE
    BYTES: gl.constexpr = 2 * TILE * D * k_cache.dtype.primitive_bitwidth // 8
    # Of a tile the tokens of one warp.
    OWN: gl.constexpr = TILE // num_warps
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_warps, 1, 1], instr_shape=[1, 16, 8]
    )
    rows: gl.constexpr = gl.SliceLayout(2, mma)
    queries: gl.constexpr = gl.DotOperandLayout(0, mma, 4 if NARROW else 2)
    keys: gl.constexpr = gl.DotOperandLayout(1, mma, 4 if NARROW else 2)
    weights: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    values: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    split = gl.program_id(0)
    head = gl.program_id(1)
    t = gl.program_id(2)
    row = t.to(gl.int64)

    fetch_descriptor("_attend_kernel_param_1")
    fetch_descriptor("_attend_kernel_param_10")
    k_smem = gl.allocate_shared_memory(k_cache.dtype, [STAGES, 1, 1, TILE, D], k_cache.layout)
    v_smem = gl.allocate_shared_memory(v_cache.dtype, [STAGES, 1, 1, TILE, D], v_cache.layout)
    q_smem = gl.allocate_shared_memory(element, [16, D], gl.NVMMASharedLayout.get_default_for([16, D], element))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for fill in gl.static_range(STAGES):
        mbarrier.init(full.index(fill), count=1)

    # The launch before has waited for the one before it, so the queries are there. An old line of the first cache may
    # still hold what was at their address: .cg reads past it.
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    gr = gl.arange(0, 16, layout=gl.SliceLayout(1, copy))
    dr = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    q = gl.load(
        q_ptr + row * stride_qt + (head * G + gr)[:, None] * stride_qh + dr[None, :],
        mask=(gr < G)[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    b = gl.arange(0, BP, layout=whole(BP, num_warps))
    end = gl.load(cu_query_lens + 1 + b, mask=b < num_requests, other=NONE)
    lens = gl.load(seq_lens + b, mask=b < num_requests, other=0)
    begin = gl.load(cu_query_lens + b, mask=b < num_requests, other=0)
    mine = (begin <= t) & (t < end) & (t - begin < QP) & (b < num_requests)
    request = gl.max(gl.where(mine, b, 0), 0)
    visible = gl.max(gl.where(mine & (lens > 0), lens - end + t + 1, 0), 0)
    num_blocks = gl.minimum((visible + BLOCK - 1) // BLOCK, max_blocks)
    table = block_table + request.to(gl.int64) * stride_b

    # As the output is written: a thread has the warps' parts of one head.
    final: gl.constexpr = gl.BlockedLayout(
        [num_warps, 1, 4], [1, 16 // num_warps, 2 * num_warps], [1, num_warps, 1], [2, 1, 0]
    )
    plane: gl.constexpr = gl.SliceLayout(0, final)
    g = gl.arange(0, 16, layout=gl.SliceLayout(1, plane))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, plane))
    gs = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, final)))
    part = ((row * gl.num_programs(1) + head) * SPLITS + split) * G
    if PDL:
        if SPLITS > 1:
            unwritten = gl.full([16, D], UNWRITTEN, gl.int32, layout=plane)
            gl.store(partial_out + (part + g)[:, None] * D + d[None, :], unwritten, mask=(g < G)[:, None])
            gl.store(partial_lse + part + gs, gl.full_like(gs, UNWRITTEN), mask=gs < G)
            make_visible()
        let_next_start()
    if SCALED_K:
        scale_log2 *= gl.load(k_scale + head * stride_ks)
    q_smem.store(q.to(element))
    thread_barrier()

    place = gl.arange(0, SP, layout=whole(SP, num_warps))
    token = (
        gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(1, mma)))[:, None] * OWN
        + gl.arange(0, OWN, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, :]
    )[:, None, :]
    # Values, two bytes at a time.
    WORDS: gl.constexpr = D // 2 if NARROW else D
    words: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, WORDS], gl.int16)
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WORDS, WORDS // 8], [num_warps, 1], [1, 0])
    order = gl.arange(0, TILE, layout=gl.SliceLayout(1, tile))
    numbers_in = place
    pages_in = place
    if RP == 0:
        # All of the request's pages are at hand before the scores are.
        numbers_in = gl.arange(0, CP, layout=whole(CP, num_warps))
        pages_in = gl.load(table + numbers_in, mask=numbers_in < num_blocks, other=0)
    at = (row * gl.num_programs(1) + head) * CP

    if PDL:
        wait_for_launch_before()
    ids, places, numbers, pages = choose(
        scores + head.to(gl.int64) * stride_sh + row * stride_st, comb_scores + at, comb_blocks + at, table,
        numbers_in, pages_in, num_blocks, local_blocks, place, S, SP, CP, RP, FAST, num_warps,
    )  # fmt: skip
    pieces = gl.minimum(num_blocks, S) * PARTS
    for ahead in range(STAGES):
        wanted = split + ahead * SPLITS
        _bring(k_cache, v_cache, k_smem, v_smem, full, numbers, pages, ids, places, wanted, ahead, head, wanted < pieces, PARTS, TILE, BYTES)  # fmt: skip
    if split == 0:
        ids_row = block_ids + head * stride_ih + row * stride_it
        gl.store(ids_row + places, ids, mask=(places < S) & (places < num_blocks))
        gl.store(ids_row + place, gl.full_like(place, -1), mask=(place < S) & (place >= num_blocks))

    query = gl.expand_dims(q_smem.load(gl.SliceLayout(0, queries)), 0)
    query, _ = gl.broadcast(query, gl.zeros([num_warps, 16, D], element, layout=queries))
    best = gl.full([num_warps, 16], float("-inf"), gl.float32, layout=rows)
    sums = gl.zeros([num_warps, 16, OWN], gl.float32, layout=mma)
    acc = gl.zeros([num_warps, 16, D // 2 if NARROW else D], gl.float32, layout=mma)
    odd = acc
    done = 0
    for piece in range(split, pieces, SPLITS):
        stage = done % STAGES
        block = gl.max(gl.where(places == piece // PARTS, ids, 0), 0)
        rest = visible - block * BLOCK - (piece % PARTS) * TILE
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        if rest < TILE:
            # A weight of 0 does not silence NaN.
            v_words = reinterpret(v_smem.index(stage).reshape([TILE, D]), gl.int16, [TILE, WORDS], words)
            v_words.store(gl.where((order < rest)[:, None], v_words.load(tile), 0))
            fence_async_shared()
            thread_barrier()
        k = k_smem.index(stage).reshape([num_warps, OWN, D]).permute((0, 2, 1)).load(keys).to(element)
        s = mma_v2(query, k, gl.zeros([num_warps, 16, OWN], gl.float32, layout=mma)) * scale_log2
        s = gl.where(token < rest, s, float("-inf"))
        higher = gl.maximum(best, gl.max(s, 2))
        base = gl.where(higher == float("-inf"), 0.0, higher)
        p = gl.exp2(s - base[:, :, None])
        fade = gl.exp2(best - base)
        sums = sums * fade[:, :, None] + p
        best = higher
        p = gl.convert_layout(p.to(element), weights)
        if NARROW:
            v_words = reinterpret(v_smem.index(stage).reshape([TILE, D]), gl.int16, [TILE, WORDS], words)
            first, second = _widened(v_words.reshape([num_warps, OWN, WORDS]).load(values))
            acc = mma_v2(p, first, acc * fade[:, :, None])
            odd = mma_v2(p, second, odd * fade[:, :, None])
        else:
            acc = mma_v2(p, v_smem.index(stage).reshape([num_warps, OWN, D]).load(values), acc * fade[:, :, None])
        done += 1
        following = piece + STAGES * SPLITS
        if following < pieces:
            thread_barrier()
            _bring(k_cache, v_cache, k_smem, v_smem, full, numbers, pages, ids, places, following, stage, head, True, PARTS, TILE, BYTES)  # fmt: skip

    if NARROW:
        acc = gl.reshape(gl.join(acc, odd), [num_warps, 16, D])
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    together = gl.allocate_shared_memory(gl.float32, [num_warps, 16, D], sums_layout)
    stats = gl.allocate_shared_memory(gl.float32, [2, num_warps, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # They lie where keys and values did, which another warp may still read.
    thread_barrier()
    stats.index(0).store(best)
    stats.index(1).store(gl.sum(sums, 2))
    together.store(acc)
    best = stats.index(0).load(gl.SliceLayout(2, final))
    top = gl.max(best, 0)
    share = gl.exp2(best - gl.where(top == float("-inf"), 0.0, top)[None, :])
    total = gl.sum(stats.index(1).load(gl.SliceLayout(2, final)) * share, 0)
    is_empty = total == 0.0
    share = share / gl.where(is_empty, 1.0, total)[None, :]
    if SCALED_V:
        share *= gl.load(v_scale + head * stride_vs)
    merged = gl.sum(together.load(final) * share[:, :, None], 0)
    if SPLITS == 1:
        to = out + row * stride_ot + (head * G + g)[:, None] * stride_oh + d[None, :]
        gl.store(to, merged.to(out.dtype.element_ty), mask=(g < G)[:, None])
    else:
        lse = gl.where(is_empty, float("-inf"), top + gl.log2(total))
        to = partial_out + (part + g)[:, None] * D + d[None, :]
        gl.store(to, merged.to(gl.int32, bitcast=True), mask=(g < G)[:, None])
        gl.store(partial_lse + part + gs, lse.to(gl.int32, bitcast=True), mask=(gs < G))
    if PDL:
        # Whoever waits for this launch waits for the ones before it too.
        wait_for_launch_before()


@gluon.jit
def _merge_kernel(
    partial_out, partial_lse, out, stride_ot, stride_oh,
    G: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Query head program_id(0) of query token program_id(1): its partials, once they are written, weighed."""
    lanes: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [num_warps, 1], [1, 0])
    query_head = gl.program_id(0)
    t = gl.program_id(1).to(gl.int64)
    num_kv_heads = gl.num_programs(0) // G
    split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, lanes))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, lanes))
    part = ((t * num_kv_heads + query_head // G) * SPLITS + split) * G + query_head % G
    if PDL:
        let_next_start()
    sums = partial_lse + part
    words = partial_out + part[:, None] * D + d[None, :]
    lse = read(sums, 1)
    acc = read(words, 4)
    looks = 0
    while gl.max(gl.max((acc == UNWRITTEN).to(gl.int32), 0), 0) + gl.max((lse == UNWRITTEN).to(gl.int32), 0) != 0:
        lse = read(sums, 1)
        acc = read(words, 4)
        looks = look_again(looks)
    lse = lse.to(gl.float32, bitcast=True)
    best = gl.max(lse, 0)
    weight = gl.exp2(lse - gl.where(best == float("-inf"), 0.0, best))
    total = gl.sum(weight, 0)
    merged = gl.sum(acc.to(gl.float32, bitcast=True) * weight[:, None], 0) / gl.where(total == 0.0, 1.0, total)
    gl.store(out + t * stride_ot + query_head * stride_oh + d, merged.to(out.dtype.element_ty))
    if PDL:
        # Whoever waits for this launch waits for the ones before it too.
        wait_for_launch_before()


def _topk_pad(topk: int) -> int:
    """Places for the chosen: one to each lane of a warp at least, so that a reduction is one instruction."""
    return max(32, 1 << (topk - 1).bit_length())


def _combs(
    num_blocks: int,
    num_requests: int,
    topk: int,
    programs: int = select.SCORE_PROGRAMS,
    direct: int = select.DIRECT_BLOCKS,
) -> tuple[int, int]:
    """(programs of the scan to a request, most blocks of one of them); 0 blocks if their best are not asked for."""
    combs = max(1, min(num_blocks, programs // num_requests))
    if num_blocks <= direct:
        return combs, 0
    # A thread holds 32 of the blocks of the combs that were chosen at most.
    least = max(_topk_pad(topk), triton.next_power_of_2(triton.cdiv(num_blocks * _topk_pad(topk), 1024)))
    combs = max(least, 1 << (min(combs, direct).bit_length() - 1))
    return combs, int(triton.next_power_of_2(triton.cdiv(num_blocks, combs)))


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    max_query_len: int,
    max_seq_len: int,
    **_: object,
) -> str | None:
    """None if `select_attend` serves these arguments, else the reason. Whether Triton runs is asked before."""
    where = (block_table, seq_lens, cu_query_lens)
    block_ids = torch.empty((1, 1, topk), device="meta")
    reason = why_not_wgmma(q) or select.why_not(
        index_q, index_k_cache, *where, topk=topk, max_query_len=max_query_len, max_seq_len=max_seq_len
    )
    reason = reason or attend.why_not(q, k_cache, v_cache, block_ids, *where, max_query_len=max_query_len)
    if reason is not None:
        return reason
    if triton.next_power_of_2(index_q.shape[1]) * triton.next_power_of_2(max_query_len) > 64:
        return f"{index_q.shape[1]} index heads and max_query_len = {max_query_len} need more than 64 rows"
    if _combs(triton.cdiv(max_seq_len, k_cache.shape[1]), seq_lens.shape[0], topk)[0] > 1024:
        return f"max_seq_len = {max_seq_len} with topk = {topk} has too many blocks"
    if index_k_cache.shape[1] != k_cache.shape[1]:
        return f"pages of {index_k_cache.shape[1]} index keys and of {k_cache.shape[1]} keys differ"
    for cache in (k_cache, v_cache, index_k_cache):
        if cache.data_ptr() % 16 or any(stride * cache.itemsize % 16 for stride in cache.stride()[:-1]):
            return "the caches must lie on 16-byte boundaries"
    return None


def select_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    programs: int = select.SCORE_PROGRAMS,
    direct: int = select.DIRECT_BLOCKS,
    scan_stages: int | None = None,
    turns: int | None = None,
    splits: int | None = None,
    stages: int | None = None,
    warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How the work is split depends on shapes only, and was found by timing (docs/kernels.md)."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_requests = seq_lens.shape[0]
    num_blocks = triton.cdiv(max_seq_len, block_size)
    topk_pad = _topk_pad(topk)
    query_pad = triton.next_power_of_2(max_query_len)
    empty = partial(torch.empty, dtype=torch.int32, device=q.device)
    pdl = {"PDL": True, "launch_pdl": True}

    combs, run = _combs(num_blocks, num_requests, topk, programs, direct)
    # Over 8 bits a program's own work takes longer than its keys: more programs, each of one comb.
    turns = (turns or (1 if index_k_cache.itemsize == 1 else 2)) if run else 1
    per_program = triton.cdiv(num_blocks, combs // turns)
    width = combs if run else max(topk_pad, triton.next_power_of_2(num_blocks))
    scores = empty((num_kv_heads, num_rows, width * max(run, 1)))
    comb_scores, comb_blocks = scores, scores
    if run:
        comb_scores = empty((num_rows, num_kv_heads, combs))
        comb_blocks = torch.empty_like(comb_scores)
    index_dim = index_q.shape[2]
    if scan_stages is None:
        scan_stages = min(3 if run else 2, per_program)
    _scan_kernel[(num_requests, combs // turns)](
        index_q,
        descriptor(index_k_cache, (1, block_size, index_dim)),
        block_table,
        seq_lens,
        cu_query_lens,
        scores,
        comb_scores,
        comb_blocks,
        num_blocks,
        index_q.stride(0),
        index_q.stride(1),
        block_table.stride(0),
        scores.stride(0),
        scores.stride(1),
        H=num_kv_heads,
        QP=query_pad,
        R=max(8, triton.next_power_of_2(num_kv_heads) * query_pad),
        D=index_dim,
        BLOCK=block_size,
        STAGES=scan_stages,
        RP=run,
        TURNS=turns,
        num_warps=4,
        **pdl,
    )

    if out is None:
        out = torch.empty_like(q)
    block_ids = empty((num_kv_heads, num_rows, topk))
    splits = splits or min(16, num_splits(num_rows * num_kv_heads, topk * (block_size // 64)))
    if warps is None:
        # Many pieces of 8 bits in a row keep more than four warps busy.
        warps = 8 if k_cache.itemsize == 1 and splits <= 4 and block_size == 128 else 4
    tile = min(block_size, warps * 16)
    pieces = topk * (block_size // tile)
    # 192 KB on the way to a multiprocessor, or 96 where two programs share it.
    is_alone = warps == 8 or (splits == 1 and num_rows * num_kv_heads <= attend.PROGRAMS)
    room = (192 if is_alone else 96) * 1024 // (2 * tile * dim * k_cache.itemsize)
    stages = stages or min(6, room, triton.cdiv(pieces, splits))
    partial_out, partial_lse = (x.view(torch.int32) if splits > 1 else x for x in partials(out, num_kv_heads, splits))
    box = (1, 1, tile, dim)
    _attend_kernel[(splits, num_kv_heads, num_rows)](
        q,
        descriptor(k_cache.permute(0, 2, 1, 3), box),
        descriptor(v_cache.permute(0, 2, 1, 3), box),
        block_table,
        seq_lens,
        cu_query_lens,
        scores,
        comb_scores,
        comb_blocks,
        block_ids,
        out,
        partial_out,
        partial_lse,
        k_scale,
        v_scale,
        num_requests,
        num_blocks,
        local_blocks,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        scores.stride(0),
        scores.stride(1),
        block_ids.stride(0),
        block_ids.stride(1),
        out.stride(0),
        out.stride(1),
        head_step(k_scale),
        head_step(v_scale),
        BP=triton.next_power_of_2(num_requests),
        QP=query_pad,
        G=num_heads // num_kv_heads,
        D=dim,
        BLOCK=block_size,
        TILE=tile,
        S=topk,
        SP=topk_pad,
        CP=width,
        RP=run,
        SPLITS=splits,
        STAGES=stages,
        SCALED_K=k_scale is not None,
        SCALED_V=v_scale is not None,
        FAST=topk_pad == 32,
        num_warps=warps,
        **pdl,
    )
    if splits > 1:
        _merge_kernel[(num_heads, num_rows)](
            partial_out,
            partial_lse,
            out,
            out.stride(0),
            out.stride(1),
            G=num_heads // num_kv_heads,
            D=dim,
            SPLITS=splits,
            num_warps=1,
            **pdl,
        )
    return out, block_ids
