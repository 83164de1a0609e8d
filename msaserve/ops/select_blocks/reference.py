"""select_blocks as index_score and topk_blocks over tiles of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from msaserve.ops.index_score.reference import index_score
from msaserve.ops.ragged import slice_rows
from msaserve.ops.topk_blocks.reference import topk_blocks

TILE_SCORES = 1 << 22
"""Block scores held at once: 16 MiB of float32."""


def select_blocks(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_heads, _ = index_q.shape
    block_size = index_k_cache.shape[1]
    if out is None:
        out = torch.empty((num_heads, num_rows, topk), dtype=torch.int32, device=index_q.device)
    out.fill_(-1)
    for start, end, tile_seq_len in row_tiles(
        seq_lens.tolist(), cu_query_lens.tolist(), num_heads=num_heads, block_size=block_size
    ):
        tile_seq_lens, tile_cu_query_lens = slice_rows(seq_lens, cu_query_lens, start, end)
        scores = index_score(
            index_q[start:end],
            index_k_cache,
            block_table,
            tile_seq_lens,
            tile_cu_query_lens,
            max_query_len=max_query_len,
            max_seq_len=tile_seq_len,
        )
        out[:, start:end] = topk_blocks(
            scores,
            tile_seq_lens,
            tile_cu_query_lens,
            block_size=block_size,
            topk=topk,
            local_blocks=local_blocks,
            max_query_len=max_query_len,
        )
    return out


def row_tiles(
    seq_lens: list[int], cu_query_lens: list[int], *, num_heads: int, block_size: int
) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, longest sequence) of tiles that hold at most TILE_SCORES block scores, or one row.

    A request is cut by its own lengths only and otherwise never, so that its scores are the same in any batch.
    """
    tile_start, tile_end, tile_seq_len = 0, 0, 0
    for request, seq_len in enumerate(seq_lens):
        num_blocks = -(-seq_len // block_size)
        rows_per_tile = max(1, TILE_SCORES // max(1, num_heads * num_blocks))
        for start in range(cu_query_lens[request], cu_query_lens[request + 1], rows_per_tile):
            end = min(start + rows_per_tile, cu_query_lens[request + 1])
            longest = max(tile_seq_len, seq_len)
            if (end - tile_start) * num_heads * -(-longest // block_size) > TILE_SCORES and tile_end > tile_start:
                yield tile_start, tile_end, tile_seq_len
                tile_start, longest = start, seq_len
            tile_end, tile_seq_len = end, longest
    if tile_end > tile_start:
        yield tile_start, tile_end, tile_seq_len
