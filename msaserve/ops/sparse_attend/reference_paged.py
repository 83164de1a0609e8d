"""sparse_attend as an ordinary paged attention: KV heads become batch rows, selected pages their block tables."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from msaserve.ops.page_table import one_head_view
from msaserve.ops.page_table.reference import page_table
from msaserve.ops.ragged import accumulator, per_head, read_pages

TILE_KEYS = 1 << 20
"""Key elements gathered at once: 4 MiB of float32, and as much for values."""


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    topk = block_ids.shape[2]
    dtype = accumulator(q.dtype)
    out = torch.zeros_like(q) if out is None else out.zero_()
    pages, kv_lens = page_table(
        block_ids, block_table, seq_lens, cu_query_lens, block_size=block_size, num_kv_heads=num_kv_heads
    )
    queries = q.to(dtype).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    k_scales, v_scales = per_head(k_scale, num_kv_heads, dtype), per_head(v_scale, num_kv_heads, dtype)
    if k_scales is not None:
        queries = queries * k_scales[:, None, None]
    queries = queries.flatten(0, 1)
    attended = torch.zeros_like(queries)
    k_view, v_view = one_head_view(k_cache), one_head_view(v_cache)
    tokens = torch.arange(topk * block_size, device=q.device)
    rows_per_tile = max(1, TILE_KEYS // max(1, topk * block_size * dim))
    for row in range(0, pages.shape[0] if topk else 0, rows_per_tile):
        tile = slice(row, row + rows_per_tile)
        is_visible = tokens < kv_lens[tile, None]
        keys = read_pages(k_view, pages[tile], dtype).flatten(1, 2)
        values = read_pages(v_view, pages[tile], dtype).flatten(1, 2)
        # Neither a weight of 0 nor a mask that is added silences NaN.
        keys[~is_visible] = 0.0
        values[~is_visible] = 0.0
        # The group's heads take the place of query tokens: one KV head serves them all.
        result = scaled_dot_product_attention(queries[tile], keys, values, attn_mask=is_visible[:, None], scale=scale)
        attended[tile] = result.masked_fill((kv_lens[tile] == 0)[:, None, None], 0.0)
    attended = attended.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    if v_scales is not None:
        attended = attended * v_scales[:, None, None]
    return out.copy_(attended.flatten(1, 2))
