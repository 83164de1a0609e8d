"""sparse_attend query by query: gather what each query chose, then softmax."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import accumulator, per_head, query_rows, read_pages

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
    topk, max_blocks = block_ids.shape[2], block_table.shape[1]
    dtype = accumulator(q.dtype)
    out = torch.zeros_like(q) if out is None else out.zero_()
    if topk == 0 or block_table.numel() == 0:
        return out
    requests, positions = query_rows(seq_lens, cu_query_lens, num_rows)
    offsets = torch.arange(block_size, device=q.device)
    k_scales, v_scales = per_head(k_scale, num_kv_heads, dtype), per_head(v_scale, num_kv_heads, dtype)
    grouped_q = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    grouped_out = out.view(grouped_q.shape)
    rows_per_tile = max(1, TILE_KEYS // (topk * block_size * dim))
    for row in range(0, num_rows, rows_per_tile):
        tile = slice(row, row + rows_per_tile)
        for head in range(num_kv_heads):
            ids = block_ids[head, tile].long()
            pages = block_table[requests[tile, None], ids.clamp(0, max_blocks - 1)]
            tokens = ids[..., None] * block_size + offsets
            # Tokens of an id beyond the request's blocks stand after the query, as those of later blocks do.
            is_visible = ((ids >= 0)[..., None] & (tokens <= positions[tile, None, None])).flatten(1)
            keys = read_pages(k_cache[:, :, head], pages, dtype).flatten(1, 2)
            values = read_pages(v_cache[:, :, head], pages, dtype).flatten(1, 2)
            # A weight of 0 does not silence NaN.
            values[~is_visible] = 0.0
            queries = grouped_q[tile, head].to(dtype) * scale
            if k_scales is not None:
                queries = queries * k_scales[head]
            scores = torch.bmm(queries, keys.transpose(1, 2)).masked_fill_(~is_visible[:, None], -torch.inf)
            weights = scores.softmax(-1).masked_fill_(~is_visible.any(-1)[:, None, None], 0.0)
            attended = torch.bmm(weights, values)
            grouped_out[tile, head] = attended if v_scales is None else attended * v_scales[head]
    return out
