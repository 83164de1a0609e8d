"""index_score: how well each block of a request answers each query."""

from __future__ import annotations

import torch

from msaserve.ops.checks import check_dtype, check_index_queries, check_int32, check_scale, check_shapes
from msaserve.ops.dispatch import Impl, always, choose

IMPLS = (Impl("reference", "msaserve.ops.index_score.reference:index_score", always),)


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
    impl: str | None = None,
) -> torch.Tensor:
    """block_scores[h, t, n] = max over the tokens s of block n with s ≤ position(t) of index_q[t, h] · index_k[s].

    Products are summed in float32 (float64 for float64 queries). A product that is NaN counts as −inf.

    Args:
        index_q: [T, Hkv, Di]; float8_e4m3fn beside a cache of that dtype only.
        index_k_cache: [P, block, Di].
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        max_query_len, max_seq_len: at least the batch's longest query and sequence.
        index_scale: a scalar float tensor that the cache's values are multiplied by, as `store_kv` divided them.
        out: [Hkv, T, N] float32 to write to.

    Returns:
        [Hkv, T, N] float32 with N = ceil(max_seq_len / block); −inf where no token is visible and in padding rows.
        The reference gives a request the same bits alone and in a batch, and wherever its pages lie.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    sizes = check_shapes(
        "index_score",
        ("index_q", index_q, ("T", "Hkv", "Di")),
        ("index_k_cache", index_k_cache, ("P", "block", "Di")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
    )
    num_blocks = -(-max_seq_len // sizes["block"])
    if num_blocks > sizes["max_blocks"]:
        raise ValueError(
            f"index_score: max_seq_len = {max_seq_len} needs {num_blocks} blocks, "
            f"block_table {list(block_table.shape)} has {sizes['max_blocks']}"
        )
    if out is not None and out.shape != (sizes["Hkv"], sizes["T"], num_blocks):
        raise ValueError(
            f"index_score: out has shape {list(out.shape)}, expected {[sizes['Hkv'], sizes['T'], num_blocks]}"
        )
    check_index_queries("index_score", index_q, index_k_cache)
    check_scale("index_score", "index_scale", index_scale, 1)
    check_int32("index_score", block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens)
    check_dtype("index_score", "out", out, (torch.float32,))
    args = (index_q, index_k_cache, block_table, seq_lens, cu_query_lens)
    options = {"max_query_len": max_query_len, "max_seq_len": max_seq_len, "index_scale": index_scale, "out": out}
    result: torch.Tensor = choose("index_score", IMPLS, impl, *args, **options)(*args, **options)
    return result
