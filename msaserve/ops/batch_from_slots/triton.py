"""batch_from_slots as one launch, which an engine's adapter makes in every layer.

It lets no launch after it start before it has ended: select_attend's kernels read what it writes before they wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks.decode_triton import launch_options
from msaserve.ops.tape import complete, new, taped

COLUMNS = 256
"""Blocks of a program: 32 requests of 524,288 tokens are 512 programs, most of which write zeros."""


@triton.jit(do_not_specialize=["max_blocks"])
def batch_kernel(
    token_slots,
    row_ids,
    seq_lens,
    block_table,
    out_lens,
    cu_query_lens,
    max_blocks,
    stride_r,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks COLUMNS · program_id(1) … of request program_id(0)."""
    request = tl.program_id(0)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    seq_len = tl.load(seq_lens + request)
    row = tl.load(row_ids + request).to(tl.int64)
    is_column = n < max_blocks
    first = n.to(tl.int64) * BLOCK
    slot = tl.load(token_slots + row * stride_r + first, mask=is_column & (first < seq_len), other=0)
    to = block_table + request.to(tl.int64) * max_blocks + n
    tl.store(to, (slot // BLOCK).to(tl.int32), mask=is_column)
    if tl.program_id(1) == 0:
        tl.store(out_lens + request, seq_len.to(tl.int32))
        # Each writes what its neighbour does too: no program is a last one.
        tl.store(cu_query_lens + request, request)
        tl.store(cu_query_lens + request + 1, request + 1)


def why_not(
    token_slots: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_blocks: int,
    **_: object,
) -> str | None:
    """None if `batch_from_slots` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if min(seq_lens.shape[0], max_blocks) == 0:
        return "nothing to describe"
    if any(x.stride(-1) != 1 for x in (token_slots, row_ids, seq_lens)):
        return "every tensor's last dimension must be contiguous"
    return None


def batch_from_slots(
    token_slots: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_requests, device = seq_lens.shape[0], seq_lens.device
    block_table = new((num_requests, max_blocks), torch.int32, device)
    out_lens = new((num_requests,), torch.int32, device)
    cu_query_lens = new((num_requests + 1,), torch.int32, device)
    taped(batch_kernel)[num_requests, triton.cdiv(max_blocks, COLUMNS)](
        token_slots,
        row_ids,
        seq_lens,
        block_table,
        out_lens,
        cu_query_lens,
        max_blocks,
        token_slots.stride(0),
        BLOCK=block_size,
        COLUMNS=COLUMNS,
        num_warps=2,
        **launch_options(token_slots),
    )
    complete()
    return block_table, out_lens, cu_query_lens
