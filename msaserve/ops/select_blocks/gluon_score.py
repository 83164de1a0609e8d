"""Block scores of query tiles on Hopper: one warp fetches index-K pages by TMA, warpgroups multiply and take maxima.

A program scores ROWS = WARPGROUPS × M rows (queries × heads) against a run of pages, so each page comes on chip once
for all of them. The warpgroups wait for pages on their own: while one takes maxima the other multiplies.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

from typing import Any

import torch
import triton
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
def _multiply(
    q_smem,
    k_smem,
    full,
    empty,
    out,
    lo,
    whole,
    hi,
    position,
    WG: gl.constexpr,
    M: gl.constexpr,
    HP: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    DI: gl.constexpr,
    STAGES: gl.constexpr,
):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    row = gl.arange(0, M, layout=gl.SliceLayout(1, mma)) + WG * M
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, mma))
    visible = position + row // HP
    acc = gl.zeros([M, BLOCK], gl.float32, layout=mma)
    q = q_smem.index(WG)
    for n in range(lo, hi):
        stage = (n - lo) % STAGES
        turn = (n - lo) // STAGES
        mbarrier.wait(full.index(stage), turn & 1)
        k = k_smem.index(stage).reshape([BLOCK, DI]).permute((1, 0))
        acc = warpgroup_mma(q, k, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(stage), count=1)
        if n < whole:
            best = gl.max(acc, 1)
        else:
            best = gl.max(gl.where((n * BLOCK + key)[None, :] <= visible[:, None], acc, float("-inf")), 1)
        gl.store(out + n * ROWS + row, best)


@gluon.jit
def _multiply_last(q_smem, k_smem, full, empty, out, lo, whole, hi, position, M: gl.constexpr, HP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, DI: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    _multiply(q_smem, k_smem, full, empty, out, lo, whole, hi, position, 1, M, HP, ROWS, BLOCK, DI, STAGES)


@gluon.jit
def _multiply_first(q_smem, k_smem, full, empty, out, lo, whole, hi, position, M: gl.constexpr, HP: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, DI: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    _multiply(q_smem, k_smem, full, empty, out, lo, whole, hi, position, 0, M, HP, ROWS, BLOCK, DI, STAGES)


@gluon.jit
def _score_kernel(
    index_q,
    index_k,
    block_table,
    tiles,
    scores,
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
    M: gl.constexpr,
    STAGES: gl.constexpr,
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
        element: gl.constexpr = index_q.dtype.element_ty
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, DI], element)
        q_smem = gl.allocate_shared_memory(element, [2, M, DI], q_layout)
        k_smem = gl.allocate_shared_memory(element, [STAGES, 1, BLOCK, DI], index_k.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=1)
            mbarrier.init(empty.index(stage), count=2)
        copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DI, DI // 8], [4, 1], [1, 0])
        row = gl.arange(0, M, layout=gl.SliceLayout(1, copy))
        d = gl.arange(0, DI, layout=gl.SliceLayout(0, copy))
        for i in gl.static_range(2):
            token = first + (row + i * M) // HP
            head = (row + i * M) % HP
            q = gl.load(
                index_q + token[:, None].to(gl.int64) * stride_qt + head[:, None] * stride_qh + d[None, :],
                mask=((token < stop) & (head < HKV))[:, None],
                other=0.0,
            )
            q_smem.index(i).store(q)
        fence_async_shared()
        out = scores + tile.to(gl.int64) * N * ROWS
        pages = block_table + request.to(gl.int64) * stride_bt
        gl.warp_specialize(
            [
                (_multiply_first, (q_smem, k_smem, full, empty, out, lo, whole, hi, position, M, HP, ROWS, BLOCK, DI, STAGES)),
                (_multiply_last, (q_smem, k_smem, full, empty, out, lo, whole, hi, position, M, HP, ROWS, BLOCK, DI, STAGES)),
                (_fetch, (index_k, pages, k_smem, full, empty, lo, hi, STAGES, BLOCK * DI * 2)),
            ],
            [4, 1],
            [232 if M == 128 else 152, 24],
        )  # fmt: skip


def why_not(index_q: torch.Tensor, index_k_cache: torch.Tensor, *args: object, **kwargs: Any) -> str | None:
    """None if the kernels can serve these arguments of `select_blocks`, else the reason."""
    reason = why_not_wgmma(index_q) or triton_prefill.why_not(index_q, index_k_cache, *args, **kwargs)
    if reason is not None:
        return reason
    if index_q.dtype not in (torch.bfloat16, torch.float16):
        return f"index_q is {index_q.dtype}, not bfloat16 or float16"
    _, block_size, dim = index_k_cache.shape
    if dim not in (64, 128) or block_size not in (64, 128):
        return "the index dim and the block size must be 64 or 128"
    if triton.next_power_of_2(index_q.shape[1]) > 128:
        return "there are over 128 index heads"
    if any(stride % 8 for stride in index_k_cache.stride()[:2]) or index_k_cache.data_ptr() % 16:
        return "index_k_cache must lie on 16-byte boundaries"
    return None


def score_tiles(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    scores: torch.Tensor,
    first_tile: int,
    num_tiles: int,
    num_blocks: int,
    block_q: int,
    stages: int = 4,
) -> None:
    """Block scores of `num_tiles` query tiles into scores [tiles, num_blocks, block_q * Hkv padded]."""
    num_heads, dim = index_q.shape[1:]
    block_size = index_k_cache.shape[1]
    heads_padded = triton.next_power_of_2(num_heads)
    pages = descriptor(index_k_cache, (1, block_size, dim))
    split_blocks = split_of(num_tiles, num_blocks, num_workers(index_q.device))
    _score_kernel[(num_tiles, triton.cdiv(num_blocks, split_blocks))](
        index_q,
        pages,
        block_table,
        tiles,
        scores,
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
        M=block_q * heads_padded // 2,
        STAGES=stages,
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
        rows=256,
    )
