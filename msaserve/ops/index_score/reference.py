"""index_score request by request, in tiles of blocks and of queries."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import accumulator, read_pages

TILE_SCORES = 1 << 22
"""Token scores held at once: 16 MiB of float32."""
TILE_KEYS = 1 << 20
"""Index-key elements held at once: 4 MiB of float32, which stay in a CPU's cache while queries pass over them."""


def index_score(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    index_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_heads, dim = index_q.shape
    block_size = index_k_cache.shape[1]
    dtype = accumulator(index_q.dtype)
    if out is None:
        shape = (num_heads, num_rows, -(-max_seq_len // block_size))
        out = torch.empty(shape, dtype=torch.float32, device=index_q.device)
    out.fill_(-torch.inf)
    blocks_per_tile = max(1, TILE_KEYS // (block_size * dim))
    # Tile sizes come from the model's shapes only, so that a request's bits do not depend on its neighbours.
    rows_per_tile = max(1, TILE_SCORES // (num_heads * blocks_per_tile * block_size))
    starts = cu_query_lens.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        prefix_len = seq_len - (end - start)
        for first_block in range(0, -(-seq_len // block_size), blocks_per_tile):
            if start == end:
                break
            last_block = min(first_block + blocks_per_tile, -(-seq_len // block_size))
            keys = read_pages(index_k_cache, block_table[request, first_block:last_block], dtype)
            keys = keys.reshape(-1, dim)
            tokens = torch.arange(first_block * block_size, last_block * block_size, device=index_q.device)
            for row in range(start, end, rows_per_tile):
                row_end = min(row + rows_per_tile, end)
                queries = index_q[row:row_end].to(dtype).transpose(0, 1)
                scores = queries @ keys.T
                if index_scale is not None:
                    scores *= index_scale.to(dtype)
                positions = torch.arange(row, row_end, device=index_q.device) - start + prefix_len
                scores.masked_fill_((tokens > positions[:, None]) | scores.isnan(), -torch.inf)
                out[:, row:row_end, first_block:last_block] = scores.view(*scores.shape[:2], -1, block_size).amax(-1)
    return out
