"""page_table as a sort of each query's blocks."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import query_rows


def page_table(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads, num_rows, topk = block_ids.shape
    max_blocks = block_table.shape[1]
    if block_table.numel() == 0 or num_rows == 0:
        pages = torch.zeros((num_rows * num_heads, topk), dtype=torch.int32, device=block_ids.device)
        return pages, pages.new_zeros(num_rows * num_heads)
    requests, positions = query_rows(seq_lens, cu_query_lens, num_rows)
    ids = block_ids.transpose(0, 1).long()
    is_valid = (ids >= 0) & (ids < max_blocks) & (ids * block_size <= positions[:, None, None])
    ids = torch.where(is_valid, ids, max_blocks).sort().values
    is_valid = ids < max_blocks
    pages = block_table[requests[:, None, None], ids.clamp(max=max_blocks - 1)].long()
    heads = torch.arange(num_heads, device=ids.device)[:, None]
    pages = torch.where(is_valid, pages * (block_size * num_kv_heads) + heads, 0)
    # A block is wholly visible unless it is the query's own.
    visible = (positions[:, None, None] + 1 - ids * block_size).clamp(max=block_size)
    kv_lens = torch.where(is_valid, visible, 0).sum(-1)
    return pages.flatten(0, 1).int(), kv_lens.flatten().int()
