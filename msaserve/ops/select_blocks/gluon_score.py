"""Block scores of query tiles on Hopper: one warp fetches index-K pages by TMA, warpgroups multiply and take maxima.

A program scores ROWS = 256 rows (queries × heads) against a run of pages, so each page comes on chip once for all of
them. Each of two warpgroups has two pieces of 64 rows: while it takes the maxima of one, the other's product runs.

8-bit queries and keys are multiplied at the rate of 8 bits, whose sums Hopper keeps to 13 bits or so. Beside 16-bit
queries four fetching warps widen 8-bit keys to float16 by way of a buffer of their own, which is exact.
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

from msaserve.ops.gluon_tma import descriptor, tma_load
from msaserve.ops.hopper import why_not_wgmma
from msaserve.ops.select_blocks import triton_prefill
from msaserve.ops.select_blocks.triton_prefill import num_workers, split_of
from msaserve.ops.select_blocks.triton_topk import LOWEST
from msaserve.ops.tape import taped
from msaserve.ops.triton_ragged import next_power_of_2

ROWS = 256
"""Of a tile: two warpgroups of two pieces of 64 rows."""


@gluon.jit
def _fetch(index_k, pages, k_smem, full, empty, lo, hi, STAGES: gl.constexpr, PAGE_BYTES: gl.constexpr):
    for n in range(lo, hi):
        stage = (n - lo) % STAGES
        turn = (n - lo) // STAGES
        page = gl.load(pages + n)
        mbarrier.wait(empty.index(stage), (turn & 1) ^ 1)
        mbarrier.expect(full.index(stage), PAGE_BYTES)
        tma_load(index_k, [page, 0, 0], full.index(stage), k_smem.index(stage))


@gluon.jit
def _ask(index_k, page, at, raw, raw_full, raw_empty, RAW: gl.constexpr, PAGE_BYTES: gl.constexpr):
    """Ask for the page of the program's at-th block, once what was in its 8-bit buffer has been read."""
    stage = at % RAW
    mbarrier.wait(raw_empty.index(stage), (at // RAW & 1) ^ 1)
    mbarrier.expect(raw_full.index(stage), PAGE_BYTES)
    tma_load(index_k, [page, 0, 0], raw_full.index(stage), raw.index(stage))


@gluon.jit
def _fetch_and_widen(
    index_k, pages, raw, raw_full, raw_empty, k_smem, full, empty, lo, hi,
    STAGES: gl.constexpr, RAW: gl.constexpr, BLOCK: gl.constexpr, DI: gl.constexpr,
):  # fmt: skip
    """What `_fetch` does, by four warps that widen keys of 8 bits."""
    own: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DI, DI // 8], [4, 1], [1, 0])
    for n in range(lo, gl.minimum(lo + RAW, hi)):
        _ask(index_k, gl.load(pages + n), n - lo, raw, raw_full, raw_empty, RAW, BLOCK * DI)
    for n in range(lo, hi):
        at = n - lo
        stage = at % STAGES
        later = gl.load(pages + gl.minimum(n + RAW, hi - 1))
        mbarrier.wait(raw_full.index(at % RAW), at // RAW & 1)
        mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
        for part in gl.static_range(BLOCK // 32):
            keys = raw.index(at % RAW).reshape([BLOCK, DI]).slice(part * 32, 32, dim=0).load(own)
            k_smem.index(stage).reshape([BLOCK, DI]).slice(part * 32, 32, dim=0).store(keys.to(k_smem.dtype))
        fence_async_shared()
        mbarrier.arrive(raw_empty.index(at % RAW), count=1)
        mbarrier.arrive(full.index(stage), count=1)
        if n + RAW < hi:
            _ask(index_k, later, at + RAW, raw, raw_full, raw_empty, RAW, BLOCK * DI)


@gluon.jit
def _queries(q_smem, piece, mma: gl.constexpr):
    """A piece's queries in registers, as the product takes them."""
    element: gl.constexpr = q_smem.dtype
    return q_smem.index(piece).load(gl.DotOperandLayout(0, mma, 32 // element.primitive_bitwidth))


@gluon.jit
def _best(acc, n, whole, visible, key, BLOCK: gl.constexpr):
    """Block n's maxima."""
    if n < whole:
        best = gl.max(acc, 1)
    else:
        best = gl.max(gl.where((n * BLOCK + key)[None, :] <= visible[:, None], acc, float("-inf")), 1)
    return best


@gluon.jit
def _multiply(
    q_smem,
    k_smem,
    full,
    empty,
    out,
    group_out,
    lo,
    whole,
    hi,
    position,
    WG: gl.constexpr,
    HP: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    DI: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    element: gl.constexpr = k_smem.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 256 // element.primitive_bitwidth]
    )
    # Eight blocks' maxima of a row, two in each of the four lanes that share its accumulators.
    eight: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 8],
    )
    PIECES: gl.constexpr = ROWS // 128
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma)) + WG * 64 * PIECES
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma))
    place = gl.arange(0, 8, layout=gl.SliceLayout(0, eight))[None, :]
    row_of_eight = gl.arange(0, 64, layout=gl.SliceLayout(1, eight)) + WG * 64 * PIECES
    q = ()
    acc = ()
    kept = ()
    group_best = ()
    for i in gl.static_range(PIECES):
        q = q + (_queries(q_smem, PIECES * WG + i, mma),)
        acc = acc + (gl.zeros([64, BLOCK], gl.float32, layout=mma),)
        kept = kept + (gl.full([64, 8], LOWEST, gl.float32, layout=eight),)
        group_best = group_best + (gl.full([64], LOWEST, gl.float32, layout=gl.SliceLayout(1, eight)),)
    for n in range(lo, hi):
        stage = (n - lo) % STAGES
        mbarrier.wait(full.index(stage), (n - lo) // STAGES & 1)
        k = k_smem.index(stage).reshape([BLOCK, DI]).permute((1, 0))
        issued = ()
        for i in gl.static_range(PIECES):
            issued = issued + (warpgroup_mma(q[i], k, acc[i], use_acc=False, is_async=True),)
        acc = ()
        kept_now = ()
        for i in gl.static_range(PIECES):
            acc = acc + (warpgroup_mma_wait(PIECES - 1 - i, deps=(issued[i],)),)
            if i == PIECES - 1:
                mbarrier.arrive(empty.index(stage), count=1)
            best = _best(acc[i], n, whole, position + (row + 64 * i) // HP, key, BLOCK)
            best = gl.convert_layout(best, gl.SliceLayout(1, eight))
            kept_now = kept_now + (gl.where(place == n % 8, best[:, None], kept[i]),)
        kept = kept_now
        if (n % 8 == 7) | (n == hi - 1):
            best_now = ()
            for i in gl.static_range(PIECES):
                at = row_of_eight + 64 * i
                # A score of −inf or NaN still beats no block.
                scores = gl.maximum(kept[i], LOWEST)
                gl.store(out + n // 8 * (8 * ROWS) + at[:, None] * 8 + place, scores)
                best = group_best[i]
                if GROUP > 0:
                    best = gl.maximum(best, gl.max(scores, 1))
                    if GROUP == 8 or n % GROUP == GROUP - 1:
                        gl.store(group_out + n // GROUP * ROWS + at, best)
                        best = gl.full([64], LOWEST, gl.float32, layout=gl.SliceLayout(1, eight))
                best_now = best_now + (best,)
            group_best = best_now


@gluon.jit
def _multiply_last(q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, DI: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    _multiply(q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, 1, HP, ROWS, BLOCK, DI, STAGES, GROUP)  # fmt: skip


@gluon.jit
def _multiply_first(q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, DI: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    _multiply(q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, 0, HP, ROWS, BLOCK, DI, STAGES, GROUP)  # fmt: skip


@gluon.jit
def _power_of_two(x):
    """A power of two that takes |x| to 64 … 256; 1 for 0, infinite and NaN."""
    exponent = (x.to(gl.int32, bitcast=True) >> 23) & 0xFF
    # 2^(7 − exponent); 2^126 at most, as float32 has no more.
    shift = gl.minimum(261 - exponent, 253)
    scale = (shift << 23).to(gl.float32, bitcast=True)
    return gl.where((exponent == 0) | (exponent == 255), 1.0, scale)


@gluon.jit(do_not_specialize=["first_tile", "num_tiles", "split_blocks", "N"])
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
    stride_bt,
    HKV: gl.constexpr,
    HP: gl.constexpr,
    DI: gl.constexpr,
    BLOCK: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    num_warps: gl.constexpr,
):
    tile = num_tiles - 1 - gl.program_id(0)
    split = gl.program_id(1)
    request = gl.load(tiles + (first_tile + tile) * 4)
    first = gl.load(tiles + (first_tile + tile) * 4 + 1)
    stop = gl.load(tiles + (first_tile + tile) * 4 + 2)
    position = gl.load(tiles + (first_tile + tile) * 4 + 3)
    last_position = position + stop - first - 1
    ROWS: gl.constexpr = BLOCK_Q * HP
    lo = split * split_blocks
    hi = gl.minimum(gl.minimum(lo + split_blocks, last_position // BLOCK + 1), N)
    if (stop > first) & (last_position >= 0) & (hi > lo):
        whole = gl.minimum(gl.maximum((position + 1) // BLOCK, lo), hi)
        given: gl.constexpr = index_q.dtype.element_ty
        WIDEN: gl.constexpr = given.primitive_bitwidth > index_k.dtype.primitive_bitwidth
        element: gl.constexpr = gl.float16 if WIDEN else index_k.dtype
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DI], element)
        k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, BLOCK, DI], element)
        q_smem = gl.allocate_shared_memory(element, [4, 64, DI], q_layout)
        k_smem = gl.allocate_shared_memory(element, [STAGES, 1, BLOCK, DI], k_layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=2)
        copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DI, DI // 8], [4, 1], [1, 0])
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
        d = gl.arange(0, DI, layout=gl.SliceLayout(0, copy))
        for i in gl.static_range(4):
            token = first + (row + i * 64) // HP
            head = (row + i * 64) % HP
            q = gl.load(
                index_q + token[:, None].to(gl.int64) * stride_qt + head[:, None] * stride_qh + d[None, :],
                mask=((token < stop) & (head < HKV))[:, None],
                other=0.0,
            )
            if WIDEN and given == gl.bfloat16:
                q = q.to(gl.float32)
                # A factor of a row changes no choice; with a power of two float16 holds every bit of what counts.
                q = q * _power_of_two(gl.max(gl.abs(q), 1))[:, None]
            q_smem.index(i).store(q.to(element))
        fence_async_shared()
        out = scores + tile.to(gl.int64) * gl.cdiv(N, 8) * (8 * ROWS)
        group_out = group_scores + tile.to(gl.int64) * gl.cdiv(N, GROUP if GROUP > 0 else 1) * ROWS
        pages = block_table + request.to(gl.int64) * stride_bt
        if WIDEN:
            raw = gl.allocate_shared_memory(index_k.dtype, [STAGES, 1, BLOCK, DI], index_k.layout)
            raw_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            raw_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for stage in gl.static_range(STAGES):
                mbarrier.init(raw_full.index(stage), count=1)
                mbarrier.init(raw_empty.index(stage), count=1)
            gl.warp_specialize(
                [
                    (_multiply_first, (q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP, ROWS, BLOCK, DI, STAGES, GROUP)),
                    (_multiply_last, (q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP, ROWS, BLOCK, DI, STAGES, GROUP)),
                    (_fetch_and_widen, (index_k, pages, raw, raw_full, raw_empty, k_smem, full, empty, lo, hi, STAGES, STAGES, BLOCK, DI)),
                ],
                [4, 4],
                [232, 40],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_multiply_first, (q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP, ROWS, BLOCK, DI, STAGES, GROUP)),
                    (_multiply_last, (q_smem, k_smem, full, empty, out, group_out, lo, whole, hi, position, HP, ROWS, BLOCK, DI, STAGES, GROUP)),
                    (_fetch, (index_k, pages, k_smem, full, empty, lo, hi, STAGES, BLOCK * DI * element.primitive_bitwidth // 8)),
                ],
                [4, 1],
                [232, 24],
            )  # fmt: skip


def why_not(index_q: torch.Tensor, index_k_cache: torch.Tensor, *args: object, **kwargs: Any) -> str | None:
    """None if the kernels can serve these arguments of `select_blocks`, else the reason."""
    reason = why_not_wgmma(index_q) or triton_prefill.why_not(index_q, index_k_cache, *args, **kwargs)
    if reason is not None:
        return reason
    if index_q.dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return f"index_q is {index_q.dtype}, not of 16 or 8 bits"
    _, block_size, dim = index_k_cache.shape
    if dim not in (64, 128) or block_size not in (64, 128):
        return "the index dim and the block size must be 64 or 128"
    if next_power_of_2(index_q.shape[1]) > 128:
        return "there are over 128 index heads"
    aligned = 16 // index_k_cache.itemsize
    if any(stride % aligned for stride in index_k_cache.stride()[:2]) or index_k_cache.data_ptr() % 16:
        return "index_k_cache must lie on 16-byte boundaries"
    return None


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
    stages: int | None = None,
) -> None:
    """As `triton_prefill.score_tiles`, for tiles of 256 rows.

    stages: buffers for blocks of keys; where these are widened, of each width.
    """
    num_heads, dim = index_q.shape[1:]
    block_size = index_k_cache.shape[1]
    heads_padded = next_power_of_2(num_heads)
    assert block_q * heads_padded == ROWS
    pages = descriptor(index_k_cache, (1, block_size, dim))
    spread = min(num_blocks, num_tiles * block_q // block_size)
    split_blocks = split_of(num_tiles, num_blocks, num_workers(index_q.device), max(group, 8), spread)
    taped(_score_kernel)[(num_tiles, -(-num_blocks // split_blocks))](
        index_q,
        pages,
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
        block_table.stride(0),
        HKV=num_heads,
        HP=heads_padded,
        DI=dim,
        BLOCK=block_size,
        BLOCK_Q=block_q,
        STAGES=stages or (3 if index_q.itemsize > index_k_cache.itemsize else 4),
        GROUP=group,
        num_warps=4,
    )


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
) -> torch.Tensor:
    return triton_prefill.select_blocks(
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        topk=topk,
        local_blocks=local_blocks,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        out=out,
        score_tiles=score_tiles,
        rows=ROWS,
    )
