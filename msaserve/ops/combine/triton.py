"""combine, one query and KV head to a program: bound by reading the partial outputs once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import why_not_triton
from msaserve.ops.triton_ragged import request_of


@triton.jit
def _combine_kernel(
    partial_out,
    partial_lse,
    block_ids,
    seq_lens,
    cu_query_lens,
    out,
    lse,
    B,
    max_blocks,
    stride_ih,
    stride_it,
    stride_is,
    stride_ot,
    stride_oh,
    S: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """With block_ids the parts to read are those whose block the query sees; else those whose lse is not −inf."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    base = (token.to(tl.int64) * HKV + head) * S
    own_ids = block_ids
    position = token
    if HAS_IDS:
        request = request_of(cu_query_lens, token, B, BLOCK_B)
        inside = (request < B) & (token >= tl.load(cu_query_lens))
        at = tl.where(inside, request, 0)
        position = tl.where(inside, tl.load(seq_lens + at) - tl.load(cu_query_lens + at + 1) + token, -1)
        own_ids = block_ids + head * stride_ih + token.to(tl.int64) * stride_it
    top = tl.full([GP], float("-inf"), tl.float32)
    for s in range(S):
        read = g < G
        if HAS_IDS:
            n = tl.load(own_ids + s * stride_is + g * 0)
            read = read & (n >= 0) & (n < max_blocks) & (n * BLOCK <= position)
        top = tl.maximum(top, tl.load(partial_lse + (base + s) * G + g, mask=read, other=float("-inf")))
    floor = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for first in range(0, S, UNROLL):
        for u in tl.static_range(UNROLL):
            part = tl.zeros([GP], tl.int32) + first + u
            read = (g < G) & (part < S)
            if HAS_IDS:
                n = tl.load(own_ids + tl.minimum(part, S - 1) * stride_is + g * 0)
                read = read & (n >= 0) & (n < max_blocks) & (n * BLOCK <= position)
            part_lse = tl.load(partial_lse + (base + part) * G + g, mask=read, other=float("-inf"))
            read = read & (part_lse > float("-inf"))
            weight = tl.exp(part_lse - floor)
            x = tl.load(
                partial_out + ((base + part) * G + g)[:, None] * D + d[None, :],
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
    block_ids: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cu_query_lens: torch.Tensor | None = None,
    *,
    max_blocks: int = 0,
    block_size: int = 0,
    num_warps: int = 4,
    unroll: int = 8,
) -> None:
    """Combine into out [T, Hq, D]. With block_ids, parts of blocks that no query sees need not be initialised."""
    num_tokens, num_heads, parts, group, dim = partial_out.shape
    has_ids = block_ids is not None
    batch = cu_query_lens.shape[0] - 1 if cu_query_lens is not None else 1
    _combine_kernel[(num_tokens, num_heads)](
        partial_out,
        partial_lse,
        block_ids if has_ids else partial_lse,
        seq_lens if has_ids else partial_lse,
        cu_query_lens if has_ids else partial_lse,
        out,
        lse if lse is not None else partial_lse,
        batch,
        max_blocks,
        *(block_ids.stride() if block_ids is not None else (0, 0, 0)),
        out.stride(0),
        out.stride(1),
        S=parts,
        G=group,
        GP=triton.next_power_of_2(group),
        D=dim,
        DP=triton.next_power_of_2(dim),
        HKV=num_heads,
        BLOCK=block_size,
        BLOCK_B=triton.next_power_of_2(batch),
        UNROLL=min(unroll, triton.next_power_of_2(parts)),
        HAS_IDS=has_ids,
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
