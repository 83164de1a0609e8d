"""dense_attend for decode (1 to 8 query tokens a request): the context split over programs, then merged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks.decode_triton import MAX_QUERY_LEN, launch_options, locate, why_not_dtypes
from msaserve.ops.sparse_attend.decode_triton import (
    LOG2_E,
    add_tokens,
    head_step,
    load_group,
    merge,
    normalised,
    partials,
    store_group,
)

PROGRAMS = 528
"""Programs aimed at: a Hopper card runs two on each multiprocessor at once, so two rounds even out ragged batches."""

MAX_SPLITS = 64
"""One program merges a row's partials."""

TILE = 64
"""Tokens loaded at once."""


@triton.jit
def dense_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_table,
    seq_lens,
    cu_query_lens,
    out,
    partial_out,
    partial_lse,
    k_scale,
    v_scale,
    num_requests,
    scale_log2,
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
    BP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED_K: tl.constexpr,
    SCALED_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pieces program_id(0), + SPLITS, … of TILE tokens, for KV head program_id(1) and query token program_id(2)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    # The batch's description is older than the launch before.
    request, visible = locate(cu_query_lens, seq_lens, tl.program_id(2), num_requests, BP)
    PARTS: tl.constexpr = BLOCK // TILE
    pieces = tl.where(visible > 0, (visible + TILE - 1) // TILE, 0)
    table = block_table + request.to(tl.int64) * stride_b
    page = tl.load(table + split // PARTS, mask=split < pieces, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q = load_group(q_ptr, row, head, stride_qt, stride_qh, G, D, k_ptr.dtype.element_ty.primitive_bitwidth == 8)
    if SCALED_K:
        scale_log2 *= tl.load(k_scale + head * stride_ks)
    d = tl.arange(0, D)
    offset = tl.arange(0, TILE)
    best = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for piece in tl.range(split, pieces, SPLITS, num_stages=STAGES):
        at = page.to(tl.int64)
        part = (piece % PARTS) * TILE + offset
        is_seen = piece * TILE + offset < visible
        k = tl.load(
            k_ptr + at * stride_kp + head * stride_kh + part[None, :] * stride_kn + d[:, None],
            mask=is_seen[None, :],
            other=0.0,
        )
        v = tl.load(
            v_ptr + at * stride_vp + head * stride_vh + part[:, None] * stride_vn + d[None, :],
            mask=is_seen[:, None],
            other=0.0,
        )
        page = tl.load(table + (piece + SPLITS) // PARTS, mask=piece + SPLITS < pieces, other=0)
        best, total, acc = add_tokens(q, k, v, is_seen, best, total, acc, scale_log2)
    acc, lse = normalised(best, total, acc)
    if SCALED_V:
        acc *= tl.load(v_scale + head * stride_vs)
    store_group(acc, lse, out, partial_out, partial_lse, row, head, split, stride_ot, stride_oh, G, D, SPLITS)


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    **_: object,
) -> str | None:
    """None if `dense_attend` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if max_query_len > MAX_QUERY_LEN:
        return f"max_query_len = {max_query_len} is over {MAX_QUERY_LEN}"
    if q.shape[1] // k_cache.shape[2] > 16:
        return f"{q.shape[1] // k_cache.shape[2]} query heads to a KV head are more than 16"
    if q.shape[2] not in (64, 128) or k_cache.shape[1] not in (64, 128):
        return f"head dim {q.shape[2]} and block size {k_cache.shape[1]} must be 64 or 128"
    if min(q.shape[0], block_table.numel(), max_seq_len) == 0:
        return "nothing to attend to"
    if any(x.stride(-1) != 1 for x in (q, block_table, seq_lens, cu_query_lens)):
        return "the last dimensions of q, block_table, seq_lens and cu_query_lens must be contiguous"
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
) -> torch.Tensor:
    """The splits depend on shapes and max_seq_len only: a row has the same bits in every batch that is split alike."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    if out is None:
        out = torch.empty_like(q)
    wanted = min(MAX_SPLITS, triton.cdiv(max_seq_len, TILE), PROGRAMS // (num_rows * num_kv_heads))
    splits = 1 << (max(1, wanted).bit_length() - 1)
    partial_out, partial_lse = partials(out, num_kv_heads, splits)
    dense_kernel[(splits, num_kv_heads, num_rows)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        out,
        partial_out,
        partial_lse,
        k_scale,
        v_scale,
        seq_lens.shape[0],
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        head_step(k_scale),
        head_step(v_scale),
        BP=triton.next_power_of_2(seq_lens.shape[0]),
        G=num_heads // num_kv_heads,
        D=dim,
        BLOCK=block_size,
        TILE=TILE,
        SPLITS=splits,
        STAGES=3,
        SCALED_K=k_scale is not None,
        SCALED_V=v_scale is not None,
        num_warps=4,
        **launch_options(q),
    )
    if splits > 1:
        merge(partial_out, partial_lse, out)
    return out
