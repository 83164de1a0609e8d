"""dense_attend request by request, in tiles of tokens with a running maximum and sum."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import accumulator, per_head, read_pages

TILE_TOKENS = 1024
"""Keys and values held at once."""
TILE_SCORES = 1 << 22
"""Scores held at once: 16 MiB of float32."""


def dense_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    num_heads = q.shape[1]
    out = torch.zeros_like(q) if out is None else out.zero_()
    rows_per_tile = max(1, TILE_SCORES // (num_heads * TILE_TOKENS))
    starts = cu_query_lens.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        for row in range(start, end, rows_per_tile):
            row_end = min(row + rows_per_tile, end)
            # Tokens that the last of these rows sees.
            num_tokens = seq_len - (end - row_end)
            if num_tokens > 0:
                out[row:row_end] = _attend(
                    q[row:row_end], k_cache, v_cache, block_table[request], num_tokens, scale, k_scale, v_scale
                )
    return out


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    num_tokens: int,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Rows [R, Hq, D] of one request, the last of which stands at num_tokens − 1, over its tokens."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dtype = accumulator(q.dtype)
    queries = q.to(dtype).reshape(num_rows, num_kv_heads, group, dim).transpose(0, 1).flatten(1, 2) * scale
    k_scales, v_scales = per_head(k_scale, num_kv_heads, dtype), per_head(v_scale, num_kv_heads, dtype)
    if k_scales is not None:
        queries = queries * k_scales[:, None, None]
    positions = torch.arange(num_tokens - num_rows, num_tokens, device=q.device).repeat_interleave(group)
    highest = queries.new_full((num_kv_heads, num_rows * group, 1), -torch.inf)
    total, summed = torch.zeros_like(highest), torch.zeros_like(queries)
    blocks_per_tile = max(1, TILE_TOKENS // block_size)
    for first_block in range(0, -(-num_tokens // block_size), blocks_per_tile):
        tile_pages = pages[first_block : min(first_block + blocks_per_tile, -(-num_tokens // block_size))]
        first = first_block * block_size
        size = min(tile_pages.shape[0] * block_size, num_tokens - first)
        keys = read_pages(k_cache, tile_pages, dtype).flatten(0, 1)[:size].permute(1, 2, 0)
        values = read_pages(v_cache, tile_pages, dtype).flatten(0, 1)[:size].transpose(0, 1)
        scores = queries @ keys
        tokens = torch.arange(first, first + size, device=q.device)
        scores.masked_fill_(tokens > positions[:, None], -torch.inf)
        # A row at a negative position sees nothing: its maximum stays −inf, which must not be subtracted.
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shift = new_highest.masked_fill(new_highest == -torch.inf, 0.0)
        weights = (scores - shift).exp_()
        rescale = (highest - shift).exp_()
        total = total * rescale + weights.sum(-1, keepdim=True)
        summed = summed * rescale + weights @ values
        highest = new_highest
    attended = summed / total.masked_fill(total == 0.0, 1.0)
    if v_scales is not None:
        attended = attended * v_scales[:, None, None]
    return attended.view(num_kv_heads, num_rows, group, dim).transpose(0, 1).flatten(1, 2)
