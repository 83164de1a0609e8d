"""Blocks of scored query tiles in order of their scores, by PyTorch's top-k: where a sorting network of that many
places in registers would compile for minutes. Nothing here waits for the device."""

from __future__ import annotations

import torch

LOWEST = torch.finfo(torch.float32).min


def rank_blocks(
    scores: torch.Tensor, tiles: torch.Tensor, count: int, *, block_q: int, block_size: int, local_blocks: int
) -> torch.Tensor:
    """The `count` best blocks of each row, best first, of equal ones the lowest: [tiles, count, rows] int32.

    A row's later ids mean nothing where fewer than `count` blocks are before its `local_blocks` own.

    Args:
        scores: [tiles, N / 8, rows, 8] float32; rows = block_q * heads padded, heads innermost.
        tiles: [tiles, 4] int32: request, first and end token, position of the first.
    """
    scores = scores.transpose(2, 3).flatten(1, 2)
    num_tiles, num_blocks, rows = scores.shape
    query = torch.arange(rows, device=scores.device) // (rows // block_q)
    candidates = (tiles[:, 3, None] + query) // block_size + 1 - local_blocks
    block = torch.arange(num_blocks, device=scores.device)[:, None]
    # An integer that sorts like the score, then the lower block; a score of −inf or NaN still beats no block.
    bits = scores.nan_to_num_(nan=LOWEST, neginf=LOWEST, posinf=torch.inf).view(torch.int32)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (num_blocks - 1 - block)
    key.masked_fill_(block >= candidates[:, None, :], torch.iinfo(torch.int64).min)
    best = key.topk(min(count, num_blocks), dim=1).values
    ids = scores.new_zeros((num_tiles, count, rows), dtype=torch.int32)
    ids[:, : best.shape[1]] = num_blocks - 1 - (best & 0xFFFFFFFF)
    return ids
