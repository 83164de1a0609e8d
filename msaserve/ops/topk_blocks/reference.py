"""topk_blocks as a top-k of integers that hold score and block number and hence have no ties."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import query_rows

TILE_SCORES = 1 << 22
"""Block scores ranked at once."""
BLOCK_BITS = 24
BLOCK_MASK = (1 << BLOCK_BITS) - 1
FORCED = 1 << 60
INVISIBLE = -(1 << 60)


def topk_blocks(
    block_scores: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    topk: int,
    local_blocks: int = 1,
    max_query_len: int,
) -> torch.Tensor:
    num_heads, num_rows, num_blocks = block_scores.shape
    assert num_blocks <= BLOCK_MASK
    positions = query_rows(seq_lens, cu_query_lens, num_rows).positions
    own_blocks = torch.where(positions >= 0, positions // block_size, -1)[:, None]
    blocks = torch.arange(num_blocks, device=block_scores.device)
    block_ids = torch.full((num_heads, num_rows, topk), -1, dtype=torch.int32, device=block_scores.device)
    rows_per_tile = max(1, TILE_SCORES // max(1, num_heads * num_blocks))
    for row in range(0, num_rows, rows_per_tile):
        own = own_blocks[row : row + rows_per_tile]
        ranks = (_ordered(block_scores[:, row : row + rows_per_tile]) << BLOCK_BITS) + (BLOCK_MASK - blocks)
        is_visible = blocks <= own
        ranks = torch.where(is_visible & (blocks > own - local_blocks), FORCED + BLOCK_MASK - blocks, ranks)
        ranks = torch.where(is_visible, ranks, INVISIBLE)
        best = ranks.topk(min(topk, num_blocks), sorted=False).values
        ids = torch.where(best > INVISIBLE, BLOCK_MASK - (best & BLOCK_MASK), BLOCK_MASK)
        # Ascending, so that equal sets give equal bits wherever the order of blocks decides the order of a sum.
        ids = ids.sort().values
        block_ids[:, row : row + rows_per_tile, : ids.shape[-1]] = ids.masked_fill(ids == BLOCK_MASK, -1)
    return block_ids


def _ordered(scores: torch.Tensor) -> torch.Tensor:
    """int64 that compare as the float32 scores do; NaN as −inf, −0.0 as 0.0."""
    scores = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0
    bits = scores.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
