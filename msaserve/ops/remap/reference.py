"""remap as one stable sort per KV head."""

from __future__ import annotations

import torch

from msaserve.ops.remap import BlockQueries


def remap(block_ids: torch.Tensor, cu_query_lens: torch.Tensor, *, max_blocks: int) -> BlockQueries:
    num_heads, num_rows, topk = block_ids.shape
    num_requests = cu_query_lens.shape[0] - 1
    num_keys = num_requests * max_blocks
    ids = block_ids.long()
    rows = torch.arange(num_rows, device=ids.device)
    requests = torch.searchsorted(cu_query_lens[1:].long(), rows, right=True)
    has_request = (requests < num_requests) & (rows >= cu_query_lens[0])
    is_valid = (ids >= 0) & (ids < max_blocks) & has_request[:, None]
    # Entries of no block get a key past the last one and sort to the tail.
    keys = torch.where(is_valid, requests[:, None] * max_blocks + ids, num_keys).reshape(num_heads, num_rows * topk)
    keys, entries = keys.sort(stable=True)
    bounds = torch.arange(num_keys + 1, device=ids.device).expand(num_heads, -1).contiguous()
    indptr = torch.searchsorted(keys, bounds)
    entries = entries.masked_fill(keys == num_keys, -1)
    return BlockQueries(indptr.int(), entries.int())
