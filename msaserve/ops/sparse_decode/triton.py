"""sparse_decode in two launches: the scan of the index keys, then programs that choose, attend and merge.

Each attend program repeats the small top-k of its row instead of waiting for a launch that does it once, and the last
of a row's programs to finish merges the row. The counters that tell it so are zeroed by the scan.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: N803, N806
from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks import decode_triton as select
from msaserve.ops.select_blocks.decode_triton import launch_options, locate, scan, top_blocks
from msaserve.ops.sparse_attend import decode_triton as attend
from msaserve.ops.sparse_attend.decode_triton import attend_pieces


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scores,
    block_ids,
    block_table,
    seq_lens,
    cu_query_lens,
    out,
    partial_out,
    partial_lse,
    arrived,
    num_requests,
    local_blocks,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_sh,
    stride_st,
    stride_ih,
    stride_it,
    stride_b,
    stride_ot,
    stride_oh,
    BP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    NP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split program_id(0) of KV head program_id(1) and query token program_id(2)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    t = tl.program_id(2)
    num_heads = tl.num_programs(1)
    row = t.to(tl.int64)
    # The scan waited for everything before it, so what it did not write may be read before it ends.
    request, visible = locate(cu_query_lens, seq_lens, t, num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    place = tl.arange(0, SP)
    to = out + row * stride_ot + (head * G + g)[:, None] * stride_oh + d[None, :]
    in_group = (g < G)[:, None]
    ids = block_ids + head * stride_ih + row * stride_it
    if visible <= 0:
        if split == 0:
            tl.store(to, tl.zeros((16, D), out.dtype.element_ty), mask=in_group)
            tl.store(ids + place, tl.full((SP,), -1, tl.int32), mask=place < S)
    else:
        chosen = top_blocks(scores + head.to(tl.int64) * stride_sh + row * stride_st, visible, local_blocks, BLOCK, NP, S, SP)
        # Every split writes the same ids, and reads its own back.
        tl.store(ids + place, chosen, mask=place < S)
        tl.debug_barrier()
        acc, lse = attend_pieces(
            q_ptr,
            k_ptr,
            v_ptr,
            ids,
            block_table + request * stride_b,
            visible,
            head,
            split,
            row * stride_qt,
            stride_qh,
            stride_kp,
            stride_kn,
            stride_kh,
            stride_vp,
            stride_vn,
            stride_vh,
            scale_log2,
            G,
            D,
            BLOCK,
            TILE,
            S,
            SPLITS,
            STAGES,
        )
        if SPLITS == 1:
            tl.store(to, acc.to(out.dtype.element_ty), mask=in_group)
        else:
            part = (row * num_heads + head) * SPLITS * G
            tl.store(partial_out + (part + split * G + g)[:, None] * D + d[None, :], acc, mask=in_group)
            tl.store(partial_lse + part + split * G + g, lse, mask=g < G)
            # All threads' stores come before the one thread's release.
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * num_heads + head, 1, sem="acq_rel") == SPLITS - 1:
                every = tl.arange(0, SPLITS)
                lses = tl.load(
                    partial_lse + part + every[:, None] * G + g[None, :],
                    mask=(g < G)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                best = tl.max(lses, 0)
                base = tl.where(best == float("-inf"), 0.0, best)
                total = tl.sum(tl.exp2(lses - base[None, :]), 0)
                merged = tl.zeros((16, D), tl.float32)
                for other in tl.static_range(SPLITS):
                    at = part + other * G + g
                    weight = tl.exp2(tl.load(partial_lse + at, mask=g < G, other=0.0, cache_modifier=".cg") - base)
                    piece = tl.load(
                        partial_out + at[:, None] * D + d[None, :], mask=in_group, other=0.0, cache_modifier=".cg"
                    )
                    merged += piece * weight[:, None]
                merged /= tl.where(total == 0.0, 1.0, total)[:, None]
                tl.store(to, merged.to(out.dtype.element_ty), mask=in_group)


def why_not(
    q: torch.Tensor,
    index_q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    max_query_len: int,
    **_: object,
) -> str | None:
    """None if `sparse_decode` serves these arguments, else the reason."""
    ids = torch.empty((0, 0, topk), dtype=torch.int32, device="meta")
    where = (block_table, seq_lens, cu_query_lens)
    return select.why_not(
        index_q, index_k_cache, *where, topk=topk, max_query_len=max_query_len
    ) or attend.why_not(q, k_cache, v_cache, ids, *where, max_query_len=max_query_len)


def sparse_decode(
    q: torch.Tensor,
    index_q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    block_ids: torch.Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    stages: int = 3,
    warps: int = 4,
    scan_options: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    tile = tile or block_size
    pieces = topk * (block_size // tile)
    if splits is None:
        splits = max(1, min(pieces, attend.PROGRAMS // (num_rows * num_kv_heads)))
    splits = 1 << (splits.bit_length() - 1)
    if out is None:
        out = torch.empty_like(q)
    if block_ids is None:
        block_ids = torch.empty((num_kv_heads, num_rows, topk), dtype=torch.int32, device=q.device)
    shape = (num_rows, num_kv_heads, splits, group)
    partial_out = torch.empty((*shape, dim), dtype=torch.float32, device=q.device) if splits > 1 else out
    partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device) if splits > 1 else out
    arrived = torch.empty((num_rows, num_kv_heads), dtype=torch.int32, device=q.device)
    scores = scan(
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        zeroed=arrived,
        **(scan_options or {}),
    )
    topk_pad = max(4, triton.next_power_of_2(topk))
    decode_kernel[(splits, num_kv_heads, num_rows)](
        q,
        k_cache,
        v_cache,
        scores,
        block_ids,
        block_table,
        seq_lens,
        cu_query_lens,
        out,
        partial_out,
        partial_lse,
        arrived,
        seq_lens.shape[0],
        local_blocks,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        scores.stride(0),
        scores.stride(1),
        block_ids.stride(0),
        block_ids.stride(1),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        BP=triton.next_power_of_2(seq_lens.shape[0]),
        G=group,
        D=dim,
        BLOCK=block_size,
        TILE=tile,
        NP=max(topk_pad, triton.next_power_of_2(scores.shape[2])),
        S=topk,
        SP=topk_pad,
        SPLITS=splits,
        STAGES=stages,
        num_warps=warps,
        **launch_options(q),
    )
    return out, block_ids
