"""combine, one query and KV head to a program: bound by reading the partial outputs once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import why_not_triton
from msaserve.ops.tape import taped
from msaserve.ops.triton_ragged import next_power_of_2


@triton.jit(do_not_specialize=["T"])
def _combine_kernel(
    partial_out,
    partial_lse,
    part_counts,
    out,
    lse,
    T,
    stride_ot,
    stride_oh,
    S: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HKV: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """With part_counts the parts to read are the first ones; else all whose lse is not −inf."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    base = (token.to(tl.int64) * HKV + head) * S
    count = S
    if HAS_COUNTS:
        count = tl.load(part_counts + head.to(tl.int64) * T + token)
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for first in range(0, count, UNROLL):
        for u in tl.static_range(UNROLL):
            read = g < tl.where(first + u < count, G, 0)
            top = tl.maximum(top, tl.load(partial_lse + (base + first + u) * G + g, mask=read, other=float("-inf")))
    floor = tl.where(top == float("-inf"), 0.0, top)
    for first in range(0, count, UNROLL):
        for u in tl.static_range(UNROLL):
            read = g < tl.where(first + u < count, G, 0)
            part_lse = tl.load(partial_lse + (base + first + u) * G + g, mask=read, other=float("-inf"))
            if not HAS_COUNTS:
                read = part_lse > float("-inf")
            weight = tl.exp(part_lse - floor)
            x = tl.load(
                partial_out + ((base + first + u) * G + g)[:, None] * D + d[None, :],
                mask=read[:, None] & (d < D)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            total += weight
            acc += weight[:, None] * x.to(tl.float32)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + token.to(tl.int64) * stride_ot + (head * G + g[:, None]) * stride_oh + d[None, :],
        acc,
        mask=(g < G)[:, None] & (d < D)[None, :],
    )
    if HAS_LSE:
        tl.store(lse + (token.to(tl.int64) * HKV + head) * G + g, top + tl.log(total), mask=g < G)


def launch(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    part_counts: torch.Tensor | None = None,
    *,
    num_warps: int = 4,
    unroll: int = 4,
) -> None:
    """Combine into out [T, Hq, D]. With part_counts [Hkv, T] int32, so many parts of each query are read."""
    num_tokens, num_heads, parts, group, dim = partial_out.shape
    taped(_combine_kernel)[(num_tokens, num_heads)](
        partial_out,
        partial_lse,
        part_counts if part_counts is not None else partial_lse,
        out,
        lse if lse is not None else partial_lse,
        num_tokens,
        out.stride(0),
        out.stride(1),
        S=parts,
        G=group,
        GP=next_power_of_2(group),
        D=dim,
        DP=next_power_of_2(dim),
        HKV=num_heads,
        UNROLL=min(unroll, next_power_of_2(parts)),
        HAS_COUNTS=part_counts is not None,
        HAS_LSE=lse is not None,
        num_warps=num_warps,
    )


def combine(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, parts, group, dim = partial_out.shape
    if out is None:
        out = partial_out.new_empty((num_tokens, num_heads * group, dim))
    lse = partial_lse.new_empty((num_tokens, num_heads * group))
    if parts == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel():
        launch(partial_out.contiguous(), partial_lse.contiguous(), out, lse)
    return out, lse


def why_not(partial_out: torch.Tensor, partial_lse: torch.Tensor, *, out: torch.Tensor | None = None) -> str | None:
    """None if the kernel can serve these arguments of `combine`, else the reason."""
    reason = why_not_triton(partial_lse)
    if reason is not None:
        return reason
    if partial_out.dtype == torch.float64 or partial_lse.dtype != torch.float32:
        return "partial_out must not be float64, partial_lse must be float32"
    if out is not None and out.stride(2) != 1:
        return "out's last dimension must be contiguous"
    return None
