"""select_attend as one operator after the other, each the best that works."""

from __future__ import annotations

import torch

from msaserve.ops.select_blocks import select_blocks
from msaserve.ops.sparse_attend import sparse_attend
from msaserve.ops.tape import complete


def select_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`impl`: of both operators."""
    where = (block_table, seq_lens, cu_query_lens)
    block_ids = select_blocks(
        index_q,
        index_k_cache,
        *where,
        topk=topk,
        local_blocks=local_blocks,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        impl=impl,
    )
    attended = sparse_attend(
        q,
        k_cache,
        v_cache,
        block_ids,
        *where,
        scale=scale,
        max_query_len=max_query_len,
        out=out,
        k_scale=k_scale,
        v_scale=v_scale,
        impl=impl,
    )
    complete()
    return attended, block_ids
