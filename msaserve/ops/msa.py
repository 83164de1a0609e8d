"""Block-sparse attention on one page: store, select, attend."""

from __future__ import annotations

import torch

from msaserve.ops.select_blocks import select_blocks
from msaserve.ops.sparse_attend import sparse_attend
from msaserve.ops.store_kv import store_kv


def msa_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_k_cache: torch.Tensor,
    slots: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    scale: float | None = None,
    max_query_len: int,
    max_seq_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sparse layer's attention for this step's tokens, whose keys and values are written to the caches first.

    Args:
        q: [T, Hq, D]. k, v: [T, Hkv, D]. index_q: [T, Hkv, Di]. index_k: [T, Di].
        k_cache, v_cache: [P, block, Hkv, D]. index_k_cache: [P, block, Di].
        slots: [T] int64. block_table: [B, max_blocks], seq_lens: [B], cu_query_lens: [B + 1], all int32.
        k_scale, v_scale, index_scale: as in `store_kv`, for 8-bit caches above all.

    Returns:
        [T, Hq, D] in q's dtype.

    Raises:
        ValueError: as the operators do.
    """
    # 1. The new tokens' keys, values and index keys go to their slots: a query sees its own token.
    store_kv(
        k,
        v,
        k_cache,
        v_cache,
        slots,
        index_k=index_k,
        index_k_cache=index_k_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        index_scale=index_scale,
    )
    # 2. Every visible block is scored by its best index key; the topk best are kept for each query and KV head.
    block_ids = select_blocks(
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        topk=topk,
        local_blocks=local_blocks,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    # 3. Softmax attention over those blocks' visible tokens: its cost does not depend on the context's length.
    return sparse_attend(
        q,
        k_cache,
        v_cache,
        block_ids,
        block_table,
        seq_lens,
        cu_query_lens,
        scale=scale,
        max_query_len=max_query_len,
        k_scale=k_scale,
        v_scale=v_scale,
    )
