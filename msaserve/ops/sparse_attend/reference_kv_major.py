"""sparse_attend block by block: load a block once, attend with every query that chose it, combine the parts."""

from __future__ import annotations

import torch

from msaserve.ops.combine.reference import combine
from msaserve.ops.ragged import accumulator, per_head, query_rows, read_pages, slice_rows
from msaserve.ops.remap.reference import remap

TILE_PARTIALS = 1 << 25
"""Elements of partial outputs held at once: 128 MiB of float32."""


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
    num_kv_heads, topk = block_ids.shape[0], block_ids.shape[2]
    dtype = accumulator(q.dtype)
    out = torch.zeros_like(q) if out is None else out.zero_()
    if topk == 0:
        return out
    k_scales, v_scales = per_head(k_scale, num_kv_heads, dtype), per_head(v_scale, num_kv_heads, dtype)
    rows_per_tile = max(1, TILE_PARTIALS // (num_heads * topk * dim))
    for row in range(0, num_rows, rows_per_tile):
        row_end = min(row + rows_per_tile, num_rows)
        tile_seq_lens, tile_cu_query_lens = slice_rows(seq_lens, cu_query_lens, row, row_end)
        partial_out, partial_lse = partials(
            q[row:row_end].to(dtype).reshape(row_end - row, num_kv_heads, -1, dim) * scale,
            k_cache,
            v_cache,
            block_ids[:, row:row_end],
            block_table,
            tile_seq_lens,
            tile_cu_query_lens,
            k_scales,
            v_scales,
        )
        combine(partial_out, partial_lse, out=out[row:row_end])
    return out


def partials(
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's share of each query that chose it.

    queries: [T, Hkv, G, D], scaled. Returns partial_out [T, Hkv, S, G, D] and partial_lse [T, Hkv, S, G].
    """
    num_rows, num_kv_heads, group, dim = queries.shape
    topk, max_blocks, block_size = block_ids.shape[2], block_table.shape[1], k_cache.shape[1]
    partial_out = queries.new_zeros((num_rows, num_kv_heads, topk, group, dim))
    partial_lse = queries.new_full((num_rows, num_kv_heads, topk, group), -torch.inf)
    positions = query_rows(seq_lens, cu_query_lens, num_rows).positions
    indptr, entries = remap(block_ids, cu_query_lens, max_blocks=max_blocks)
    tokens = torch.arange(block_size, device=queries.device)
    tables = block_table.flatten().tolist()
    for head in range(num_kv_heads):
        bounds = indptr[head].tolist()
        for key in indptr[head].diff().nonzero().flatten().tolist():
            block = key % max_blocks
            page = torch.tensor(tables[key], device=queries.device)
            keys = read_pages(k_cache[:, :, head], page, queries.dtype)
            values = read_pages(v_cache[:, :, head], page, queries.dtype)
            chosen = entries[head, bounds[key] : bounds[key + 1]].long()
            rows, places = chosen // topk, chosen % topk
            last_visible = positions[rows] - block * block_size
            is_visible = (tokens <= last_visible[:, None])[:, None]
            # A slot that none of these queries sees may hold NaN, which a weight of 0 would not silence.
            values = values.masked_fill((tokens > last_visible.max())[:, None], 0.0)
            if k_scales is not None:
                keys = keys * k_scales[head]
            if v_scales is not None:
                values = values * v_scales[head]
            scores = (queries[rows, head] @ keys.T).masked_fill(~is_visible, -torch.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
            partial_out[rows, head, places] = weights @ values
            partial_lse[rows, head, places] = lse
    return partial_out, partial_lse
