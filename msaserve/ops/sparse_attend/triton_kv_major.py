"""sparse_attend KV-block-major: a work item loads one block's K and V once and attends with many queries that chose it.

Each (query, block) pair leaves a bf16 partial output and its log-sum-exp; `combine` adds them. Items come from
`remap.plan_triton.plan`: those of one part of the queries and one head stand together, so that the gathered queries
stay in L2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.combine.triton import launch as launch_combine
from msaserve.ops.hopper import why_not_triton
from msaserve.ops.ragged import slice_rows
from msaserve.ops.remap.plan_triton import Plan, plan
from msaserve.ops.tape import complete, new, scratch, taped
from msaserve.ops.triton_ragged import next_power_of_2

PARTIAL_BYTES = 2 << 30
"""Bound on the partial outputs held at once."""


@triton.jit(do_not_specialize=["T"])
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    entries,
    items,
    counts,
    partial_out,
    partial_lse,
    scale_log2,
    T,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    S: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
):
    part = tl.program_id(1)
    slot = tl.program_id(0)
    if slot < tl.load(counts + part):
        item = items + (part.to(tl.int64) * tl.num_programs(0) + slot) * 8
        head = tl.load(item)
        page = tl.load(item + 1).to(tl.int64)
        lo = tl.load(item + 2)
        hi = tl.load(item + 3)
        shift = tl.load(item + 4)
        filled = tl.load(item + 5)
        d = tl.arange(0, DP)
        key = tl.arange(0, BLOCK)
        k = tl.load(
            k_cache + page * stride_kp + head * stride_kh + key[None, :] * stride_kt + d[:, None],
            mask=(d < D)[:, None],
            other=0.0,
        )
        # slots past the sequence may hold NaN, which a weight of 0 would not silence
        v = tl.load(
            v_cache + page * stride_vp + head * stride_vh + key[:, None] * stride_vt + d[None, :],
            mask=(key < filled)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        # 8-bit values are exact in the queries' type
        k = k.to(q.dtype.element_ty)
        v = v.to(q.dtype.element_ty)
        if K_SCALES > 0:
            scale_log2 *= tl.load(k_scale + (head if K_SCALES > 1 else 0)).to(tl.float32)
        gain = 1.0
        if V_SCALES > 0:
            gain = tl.load(v_scale + (head if V_SCALES > 1 else 0)).to(tl.float32)
        lane = tl.arange(0, M)
        g = lane % GP
        own = entries + head.to(tl.int64) * T * S
        for i in tl.range(lo, hi, M // GP, num_stages=1):
            at = i + lane // GP
            live = (at < hi) & (g < G)
            entry = tl.load(own + at, mask=live, other=0)
            token = entry // S
            queries = tl.load(
                q + token[:, None].to(tl.int64) * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :],
                mask=live[:, None] & (d < D)[None, :],
                other=0.0,
            )
            s = tl.dot(queries, k, input_precision="ieee")
            last = tl.where(live, shift + token, BLOCK)
            if tl.min(last, 0) < BLOCK - 1:
                s = tl.where(key[None, :] <= last[:, None], s, float("-inf"))
            top = tl.max(s, 1) * scale_log2
            p = tl.exp2(s * scale_log2 - top[:, None])
            total = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (gain / total)[:, None]
            pair = (token.to(tl.int64) * HKV + head) * S + entry % S
            tl.store(
                partial_out + (pair * G + g)[:, None] * D + d[None, :],
                o.to(partial_out.dtype.element_ty),
                mask=live[:, None] & (d < D)[None, :],
            )
            tl.store(partial_lse + pair * G + g, (top + tl.log2(total)) * 0.6931471805599453, mask=live)


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    *args: object,
    scale: float,
    **kwargs: object,
) -> str | None:
    """None if the kernels can serve these arguments of `sparse_attend`, else the reason."""
    reason = why_not_triton(q)
    if reason is not None:
        return reason
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}, not float32, bfloat16 or float16"
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        return "the caches must both be of q's dtype or both float8_e4m3fn"
    if q.stride(2) != 1 or scale <= 0:
        return "q's last dimension must be contiguous and scale positive"
    _, block_size, num_kv_heads, dim = k_cache.shape
    if block_size not in (16, 32, 64, 128) or not 16 <= dim <= 128 or q.shape[1] // num_kv_heads > 128:
        return "blocks of 16 to 128 tokens, a head dim of 16 to 128 and a group of at most 128 are needed"
    if block_ids.shape[2] > 64:
        return "block_ids name over 64 blocks a query"
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rows: int = 128,
    num_warps: int = 8,
    maxnreg: int | None = 128,
) -> None:
    """Partial outputs of the (query, block) pairs of some work items."""
    num_tokens, num_kv_heads, topk, group, dim = partial_out.shape
    taped(_attend_kernel)[(items.shape[-2], items.shape[0] if items.dim() == 3 else 1)](
        q,
        k_cache,
        v_cache,
        k_scale if k_scale is not None else partial_lse,
        v_scale if v_scale is not None else partial_lse,
        entries,
        items,
        counts,
        partial_out,
        partial_lse,
        scale * math.log2(math.e),
        num_tokens,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        S=topk,
        HKV=num_kv_heads,
        G=group,
        GP=next_power_of_2(group),
        D=dim,
        DP=next_power_of_2(dim),
        BLOCK=k_cache.shape[1],
        M=max(rows, next_power_of_2(group)),
        K_SCALES=0 if k_scale is None else k_scale.numel(),
        V_SCALES=0 if v_scale is None else v_scale.numel(),
        num_warps=num_warps,
        maxnreg=maxnreg,
    )


class Batch(NamedTuple):
    """Some queries, their caches and scales, and where their partial results and outputs go."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    out: torch.Tensor
    scale: float


def finish(batch: Batch, work: Plan) -> None:
    """Attention over the blocks that are full of tokens, and the sum of the parts."""
    attend_items(
        *batch[:3],
        work.entries,
        work.items,
        work.counts,
        batch.partial_out,
        batch.partial_lse,
        scale=batch.scale,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
    )
    launch_combine(batch.partial_out, batch.partial_lse, batch.out, None, work.part_counts)


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
    tile: int = 0,
    tile_parts: int = 1,
    finish: Callable[[Batch, Plan], None] = finish,
) -> torch.Tensor:
    """`item`, `parts`, `tile`, `tile_parts`: as in `remap.plan_triton.plan`; `finish` attends with what it lists."""
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, _, topk = block_ids.shape
    block_size = k_cache.shape[1]
    group = num_heads // num_kv_heads
    if out is None:
        out = new(tuple(q.shape), q.dtype, q.device)
    if min(num_tokens, topk, block_table.numel()) == 0:
        return out.zero_()
    per_token = num_heads * topk * dim * q.element_size()
    chunk = max(1, min(num_tokens, PARTIAL_BYTES // per_token))
    chunk = -(-num_tokens // -(-num_tokens // chunk))
    parts_shape = (chunk, num_kv_heads, topk, group)
    partial_out, partial_lse = scratch(q.device, ((*parts_shape, dim), q.dtype), (parts_shape, torch.float32))
    for first in range(0, num_tokens, chunk):
        end = min(first + chunk, num_tokens)
        lens, cu = (seq_lens, cu_query_lens)
        if end - first < num_tokens:
            lens, cu = slice_rows(seq_lens, cu_query_lens, first, end)
        work = plan(
            block_ids[:, first:end],
            block_table,
            lens,
            cu,
            block_size=block_size,
            item=item,
            align=max(1, 64 // group),
            parts=parts,
            tile=tile,
            tile_parts=tile_parts,
        )
        some_out, some_lse = partial_out[: end - first], partial_lse[: end - first]
        batch = Batch(
            q[first:end],
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            block_table,
            lens,
            cu,
            some_out,
            some_lse,
            out[first:end],
            scale,
        )
        attend_items(
            *batch[:3],
            work.entries,
            work.tail_items,
            work.counts[-2:],
            some_out,
            some_lse,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        finish(batch, work)
    complete()
    return out
