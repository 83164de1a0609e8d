"""sparse_attend query by query: gather what each query chose, then softmax."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import accumulator, per_head, query_rows, raw

TILE_KEYS = 1 << 22
"""Key elements gathered at once: 16 MiB of float32, and as much for values."""


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
    topk, max_blocks = block_ids.shape[2], block_table.shape[1]
    group = num_heads // num_kv_heads
    dtype = accumulator(q.dtype)
    out = torch.zeros_like(q) if out is None else out.zero_()
    if num_rows == 0 or topk == 0 or block_table.numel() == 0:
        return out
    requests, positions = query_rows(seq_lens, cu_query_lens, num_rows)
    heads = torch.arange(num_kv_heads, device=q.device)[:, None]
    offsets = torch.arange(block_size, device=q.device)
    k_scales, v_scales = per_head(k_scale, num_kv_heads, dtype), per_head(v_scale, num_kv_heads, dtype)
    rows_per_tile = max(1, TILE_KEYS // (num_kv_heads * topk * block_size * dim))
    for row in range(0, num_rows, rows_per_tile):
        tile = slice(row, row + rows_per_tile)
        ids = block_ids[:, tile].transpose(0, 1).long()
        is_valid = (ids >= 0) & (ids < max_blocks)
        pages = block_table[requests[tile, None, None], ids.clamp(0, max_blocks - 1)].long()
        tokens = ids[..., None] * block_size + offsets
        is_visible = is_valid[..., None] & (tokens <= positions[tile, None, None, None])
        keys = raw(k_cache)[pages, :, heads].view(k_cache.dtype).to(dtype).flatten(2, 3)
        values = raw(v_cache)[pages, :, heads].view(v_cache.dtype).to(dtype)
        values.masked_fill_(~is_visible[..., None], 0.0)
        queries = q[tile].to(dtype).reshape(-1, num_kv_heads, group, dim) * scale
        if k_scales is not None:
            queries = queries * k_scales[:, None, None]
        scores = (queries @ keys.transpose(-1, -2)).masked_fill_(~is_visible.flatten(2)[:, :, None], -torch.inf)
        is_empty = ~is_visible.flatten(2).any(-1)[..., None, None]
        weights = scores.softmax(-1).masked_fill_(is_empty, 0.0)
        attended = weights @ values.flatten(2, 3)
        if v_scales is not None:
            attended = attended * v_scales[:, None, None]
        out[tile] = attended.flatten(1, 2)
    return out
