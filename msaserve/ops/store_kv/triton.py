"""store_kv as one launch: a program writes one token's keys, values and index key, all heads, to its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks.decode_triton import launch_options
from msaserve.ops.triton_ragged import next_power_of_2


@triton.jit
def stored(value, scale, cache):
    """The value as the cache holds it: divided by its scale, cut to the range of an 8-bit cache."""
    value = value.to(tl.float32) / scale
    if cache.dtype.element_ty == tl.float8e4nv:
        # Comparisons, not a clamp: a NaN must stay one.
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    return value.to(cache.dtype.element_ty)


@triton.jit
def store_kernel(
    k_ptr,
    v_ptr,
    k_cache,
    v_cache,
    slots,
    index_k,
    index_k_cache,
    k_scale,
    v_scale,
    index_scale,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcp,
    stride_kcn,
    stride_kch,
    stride_vcp,
    stride_vcn,
    stride_vch,
    stride_it,
    stride_icp,
    stride_icn,
    stride_ks,
    stride_vs,
    H: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DI: tl.constexpr,
    DIP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + t)
    if slot >= 0:
        page = slot // BLOCK
        offset = slot % BLOCK
        h = tl.arange(0, HP)[:, None]
        d = tl.arange(0, DP)[None, :]
        mask = (h < H) & (d < D)
        k = tl.load(k_ptr + t * stride_kt + h * stride_kh + d, mask=mask)
        v = tl.load(v_ptr + t * stride_vt + h * stride_vh + d, mask=mask)
        ks = 1.0
        if k_scale is not None:
            ks = tl.load(k_scale + h * stride_ks, mask=h < H, other=1.0).to(tl.float32)
        vs = 1.0
        if v_scale is not None:
            vs = tl.load(v_scale + h * stride_vs, mask=h < H, other=1.0).to(tl.float32)
        tl.store(k_cache + page * stride_kcp + offset * stride_kcn + h * stride_kch + d, stored(k, ks, k_cache), mask)
        tl.store(v_cache + page * stride_vcp + offset * stride_vcn + h * stride_vch + d, stored(v, vs, v_cache), mask)
        if index_k is not None:
            i = tl.arange(0, DIP)
            ik = tl.load(index_k + t * stride_it + i, mask=i < DI)
            xs = 1.0
            if index_scale is not None:
                xs = tl.load(index_scale).to(tl.float32)
            to = index_k_cache + page * stride_icp + offset * stride_icn + i
            tl.store(to, stored(ik, xs, index_k_cache), mask=i < DI)
    if PDL:
        # select_attend reads index keys older than its own step before it waits for the launch before it.
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        tl.extra.cuda.gdc_launch_dependents()


def why_not(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    index_k: torch.Tensor | None = None,
    **_: object,
) -> str | None:
    """None if `store_kv` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if k.numel() == 0:
        return "nothing to store"
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, slots, index_k)):
        return "the last dimensions of k, v, slots and index_k must be contiguous"
    if torch.float64 in (k.dtype, k_cache.dtype):
        return "values pass through float32"
    return None


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    index_k: torch.Tensor | None = None,
    index_k_cache: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_scale: torch.Tensor | None = None,
) -> None:
    num_rows, num_heads, dim = k.shape
    index_dim = 1 if index_k is None else index_k.shape[1]
    store_kernel[(num_rows,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        index_k,
        index_k_cache,
        k_scale,
        v_scale,
        index_scale,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        0 if index_k is None else index_k.stride(0),
        *((0, 0) if index_k_cache is None else index_k_cache.stride()[:2]),
        0 if k_scale is None or k_scale.numel() == 1 else k_scale.stride(0),
        0 if v_scale is None or v_scale.numel() == 1 else v_scale.stride(0),
        H=num_heads,
        HP=next_power_of_2(num_heads),
        D=dim,
        DP=next_power_of_2(dim),
        DI=index_dim,
        DIP=next_power_of_2(index_dim),
        BLOCK=k_cache.shape[1],
        num_warps=2,
        **launch_options(k),
    )
