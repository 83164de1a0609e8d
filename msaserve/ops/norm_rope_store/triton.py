"""norm_rope_store as one launch: a program takes up to 16 heads of one token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.norm_rope_store import Queries
from msaserve.ops.select_blocks.decode_triton import launch_options
from msaserve.ops.store_kv.triton import stored
from msaserve.ops.triton_ragged import next_power_of_2

HEADS = 16
"""Query heads of one program."""


@triton.jit
def norm_rotate(row, h, weight, cos, sin, eps, H, D: tl.constexpr, DP: tl.constexpr, PAIRS: tl.constexpr):
    """[heads, DP] float32, rounded as row's dtype: heads h [heads] of the row at `row`, normalised and rotated."""
    c = tl.arange(0, DP)
    # The channel that this one turns with, or itself.
    other = tl.where(c < PAIRS, c + PAIRS, tl.where(c < 2 * PAIRS, c - PAIRS, c))
    mask = (h < H)[:, None] & (c < D)[None, :]
    at = row + h[:, None] * D
    x = tl.load(at + c[None, :], mask=mask, other=0.0)
    y = tl.load(at + other[None, :], mask=mask, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    w = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    w_other = tl.load(weight + other, mask=c < D, other=0.0).to(tl.float32)[None, :]
    wide = (wide * scale * (1.0 + w)).to(x.dtype).to(tl.float32)
    y = (y * scale * (1.0 + w_other)).to(x.dtype).to(tl.float32)
    is_turned = c < 2 * PAIRS
    angle = c % PAIRS
    cosine = tl.load(cos + angle, mask=is_turned, other=1.0)[None, :]
    sine = tl.load(sin + angle, mask=is_turned, other=0.0)
    sine = tl.where(c < PAIRS, -sine, sine)[None, :]
    turned = tl.where(is_turned[None, :], wide * cosine + y * sine, wide)
    return turned.to(x.dtype).to(tl.float32)


@triton.jit
def norm_rope_store_kernel(
    projected,
    q_out,
    index_q_out,
    k_cache,
    v_cache,
    index_k_cache,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    index_q_weight,
    index_k_weight,
    k_scale,
    v_scale,
    index_scale,
    eps,
    stride_pt,
    stride_cos,
    stride_sin,
    stride_kcp,
    stride_kcn,
    stride_kch,
    stride_vcp,
    stride_vcn,
    stride_vch,
    stride_icp,
    stride_icn,
    stride_ks,
    stride_vs,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HI: tl.constexpr,
    HKVP: tl.constexpr,
    HIP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DI: tl.constexpr,
    DIP: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Token program_id(0); program_id(1) is a chunk of query heads, then K and V, then the index part."""
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = projected + t * stride_pt
    cos += t * stride_cos
    sin += t * stride_sin
    c = tl.arange(0, DP)
    if part < QUERY_PARTS:
        h = part * HEADS + tl.arange(0, HEADS)
        q = norm_rotate(row, h, q_weight, cos, sin, eps, HQ, D, DP, PAIRS)
        to = q_out + (t * HQ + h)[:, None] * D + c[None, :]
        tl.store(to, q.to(q_out.dtype.element_ty), mask=(h < HQ)[:, None] & (c < D)[None, :])
    else:
        slot = tl.load(slots + t)
        page = slot // BLOCK
        offset = slot % BLOCK
        if part == QUERY_PARTS and slot >= 0:
            h = tl.arange(0, HKVP)
            mask = (h < HKV)[:, None] & (c < D)[None, :]
            k = norm_rotate(row + HQ * D, h, k_weight, cos, sin, eps, HKV, D, DP, PAIRS)
            v = tl.load(row + (HQ + HKV) * D + h[:, None] * D + c[None, :], mask=mask)
            ks = 1.0
            if k_scale is not None:
                ks = tl.load(k_scale + h * stride_ks, mask=h < HKV, other=1.0).to(tl.float32)[:, None]
            vs = 1.0
            if v_scale is not None:
                vs = tl.load(v_scale + h * stride_vs, mask=h < HKV, other=1.0).to(tl.float32)[:, None]
            k_to = k_cache + page * stride_kcp + offset * stride_kcn + h[:, None] * stride_kch + c[None, :]
            v_to = v_cache + page * stride_vcp + offset * stride_vcn + h[:, None] * stride_vch + c[None, :]
            tl.store(k_to, stored(k, ks, k_cache), mask)
            tl.store(v_to, stored(v, vs, v_cache), mask)
        if HI > 0 and part > QUERY_PARTS:
            i = tl.arange(0, DIP)
            h = tl.arange(0, HIP)
            index_row = row + (HQ + 2 * HKV) * D
            index_q = norm_rotate(index_row, h, index_q_weight, cos, sin, eps, HI, DI, DIP, PAIRS)
            to = index_q_out + (t * HI + h)[:, None] * DI + i[None, :]
            tl.store(to, stored(index_q, 1.0, index_q_out), mask=(h < HI)[:, None] & (i < DI)[None, :])
            if slot >= 0:
                one = tl.arange(0, 1)
                index_k = norm_rotate(index_row + HI * DI, one, index_k_weight, cos, sin, eps, 1, DI, DIP, PAIRS)
                xs = 1.0
                if index_scale is not None:
                    xs = tl.load(index_scale).to(tl.float32)
                at = index_k_cache + page * stride_icp + offset * stride_icn + one[:, None] + i[None, :]
                tl.store(at, stored(index_k, xs, index_k_cache), mask=(i < DI)[None, :])


def why_not(
    projected: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **_: object,
) -> str | None:
    """None if `norm_rope_store` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if projected.shape[0] == 0 or cos.shape[1] == 0:
        return "no rows, or no rotated channels"
    if any(x.stride(-1) != 1 for x in (projected, slots, cos, sin)):
        return "the last dimensions of projected, slots, cos and sin must be contiguous"
    if torch.float64 in (projected.dtype, k_cache.dtype):
        return "values pass through float32"
    return None


def norm_rope_store(
    projected: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    index_k_cache: torch.Tensor | None = None,
    index_q_weight: torch.Tensor | None = None,
    index_k_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_scale: torch.Tensor | None = None,
    index_q_dtype: torch.dtype | None = None,
) -> Queries:
    num_rows, columns = projected.shape
    block_size, num_kv_heads, dim = k_cache.shape[1:]
    index_dim = index_k_cache.shape[2] if index_k_cache is not None else dim
    index_columns = (num_index_heads + 1) * index_dim if index_k_cache is not None else 0
    num_heads = (columns - index_columns) // dim - 2 * num_kv_heads
    q = torch.empty((num_rows, num_heads, dim), dtype=projected.dtype, device=projected.device)
    index_q = None
    if num_index_heads:
        index_q = q.new_empty((num_rows, num_index_heads, index_dim), dtype=index_q_dtype or q.dtype)
    parts = -(-num_heads // HEADS) + 1 + (num_index_heads > 0)
    norm_rope_store_kernel[(num_rows, parts)](
        projected,
        q,
        index_q,
        k_cache,
        v_cache,
        index_k_cache,
        slots,
        cos,
        sin,
        q_weight,
        k_weight,
        index_q_weight,
        index_k_weight,
        k_scale,
        v_scale,
        index_scale,
        eps,
        projected.stride(0),
        cos.stride(0),
        sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *((0, 0) if index_k_cache is None else index_k_cache.stride()[:2]),
        0 if k_scale is None or k_scale.numel() == 1 else k_scale.stride(0),
        0 if v_scale is None or v_scale.numel() == 1 else v_scale.stride(0),
        HQ=num_heads,
        HKV=num_kv_heads,
        HI=num_index_heads,
        HKVP=next_power_of_2(num_kv_heads),
        HIP=next_power_of_2(max(1, num_index_heads)),
        HEADS=HEADS,
        D=dim,
        DP=next_power_of_2(dim),
        DI=index_dim,
        DIP=next_power_of_2(index_dim),
        PAIRS=cos.shape[1],
        BLOCK=block_size,
        num_warps=4,
        **launch_options(projected),
    )
    return Queries(q, index_q)
