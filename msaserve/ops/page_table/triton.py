"""page_table as one launch: a program sorts the blocks of one query token and KV head by counting ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks.decode_triton import launch_options, locate


@triton.jit
def page_table_kernel(
    block_ids,
    block_table,
    seq_lens,
    cu_query_lens,
    pages,
    kv_lens,
    num_requests,
    max_blocks,
    stride_ih,
    stride_it,
    stride_b,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row program_id(0) · Hkv + program_id(1): query token and KV head."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    request, visible = locate(cu_query_lens, seq_lens, t, num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.arange(0, SP)
    ids = tl.load(block_ids + head * stride_ih + t.to(tl.int64) * stride_it + place, mask=place < S, other=-1)
    is_valid = (ids >= 0) & (ids < max_blocks) & (ids * BLOCK < visible)
    table = block_table + request.to(tl.int64) * stride_b
    page = tl.load(table + ids, mask=is_valid, other=0) * (BLOCK * num_heads) + head
    row = t * num_heads + head
    # What is not valid sorts behind and, being distinct, still gets a place of its own.
    order = tl.where(is_valid, ids, 0x40000000 + place)
    rank = tl.sum((order[:, None] < order[None, :]).to(tl.int32), 0)
    to = pages + row.to(tl.int64) * S + rank
    tl.store(to, tl.where(is_valid, page, 0), mask=rank < S)
    seen = tl.where(is_valid, tl.minimum(visible - ids * BLOCK, BLOCK), 0)
    tl.store(kv_lens + row, tl.sum(seen, 0))


def why_not(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    **_: object,
) -> str | None:
    """None if `page_table` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if block_ids.shape[2] > 64:
        return f"{block_ids.shape[2]} blocks a query are more than 64"
    if min(block_ids.numel(), block_table.numel()) == 0:
        return "nothing to look up"
    if any(x.stride(-1) != 1 for x in (block_ids, block_table, seq_lens, cu_query_lens)):
        return "every tensor's last dimension must be contiguous"
    return None


def page_table(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, num_rows, topk = block_ids.shape
    num_requests = seq_lens.shape[0]
    pages = torch.empty((num_rows * num_kv_heads, topk), dtype=torch.int32, device=block_ids.device)
    kv_lens = torch.empty(num_rows * num_kv_heads, dtype=torch.int32, device=block_ids.device)
    page_table_kernel[(num_rows, num_kv_heads)](
        block_ids,
        block_table,
        seq_lens,
        cu_query_lens,
        pages,
        kv_lens,
        num_requests,
        block_table.shape[1],
        block_ids.stride(0),
        block_ids.stride(1),
        block_table.stride(0),
        BP=triton.next_power_of_2(num_requests),
        BLOCK=block_size,
        S=topk,
        SP=triton.next_power_of_2(topk),
        num_warps=1,
        **launch_options(block_ids),
    )
    return pages, kv_lens
