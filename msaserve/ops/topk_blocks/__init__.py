"""topk_blocks: the blocks each query attends to, from block scores."""

from __future__ import annotations

import torch

from msaserve.ops.checks import check_dtype, check_int32, check_selection, check_shapes
from msaserve.ops.dispatch import Impl, always, choose

IMPLS = (Impl("reference", "msaserve.ops.topk_blocks.reference:topk_blocks", always),)


def topk_blocks(
    block_scores: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    topk: int,
    local_blocks: int = 1,
    max_query_len: int,
    impl: str | None = None,
) -> torch.Tensor:
    """The topk best visible blocks of each query and KV head.

    The query's own block and the local_blocks − 1 before it are always chosen, the others by score; of equal scores
    the lower block wins; NaN counts as −inf. A visible block of score −inf is chosen after all others, so that a
    query that sees at most topk blocks has them all. Exact: every implementation returns the same sets.

    Args:
        block_scores: [Hkv, T, N] float32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        max_query_len: at least the batch's longest query.

    Returns:
        block_ids [Hkv, T, topk] int32: valid blocks first, in any order, then −1. Padding rows are all −1.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; not 1 ≤ local_blocks ≤ topk.
    """
    check_shapes(
        "topk_blocks",
        ("block_scores", block_scores, ("Hkv", "T", "N")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
    )
    check_dtype("topk_blocks", "block_scores", block_scores, (torch.float32,))
    check_int32("topk_blocks", seq_lens=seq_lens, cu_query_lens=cu_query_lens)
    check_selection("topk_blocks", topk, local_blocks)
    args = (block_scores, seq_lens, cu_query_lens)
    options = {
        "block_size": block_size,
        "topk": topk,
        "local_blocks": local_blocks,
        "max_query_len": max_query_len,
    }
    result: torch.Tensor = choose("topk_blocks", IMPLS, impl, *args, **options)(*args, **options)
    return result
