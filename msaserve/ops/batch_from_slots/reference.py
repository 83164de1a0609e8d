"""batch_from_slots as a gather of every block's first slot."""

from __future__ import annotations

import torch


def batch_from_slots(
    token_slots: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device, num_requests = seq_lens.device, seq_lens.shape[0]
    is_held = torch.arange(max_blocks, device=device) * block_size < seq_lens[:, None]
    first_slots = token_slots[:, ::block_size][:, :max_blocks]
    pages = first_slots.index_select(0, torch.where(seq_lens > 0, row_ids, 0)) // block_size
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device)
    return torch.where(is_held, pages, 0).int(), seq_lens.to(torch.int32, copy=True), starts
