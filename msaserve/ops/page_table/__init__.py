"""page_table: a query's selected blocks as the block table of an ordinary paged attention kernel."""

from __future__ import annotations

import torch

from msaserve.ops.checks import check_int32, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card

IMPLS = (
    Impl(
        "triton",
        "msaserve.ops.page_table.triton:page_table",
        ask_later("msaserve.ops.page_table.triton:why_not"),
        on_card,
    ),
    Impl("reference", "msaserve.ops.page_table.reference:page_table", always),
)


def page_table(
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    block_size: int,
    num_kv_heads: int,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selected pages of each (query, KV head), numbered in the one-head view of a token-major cache. Exact.

    In a contiguous cache [P, block, Hkv, D], head h of page p is page v = p * block * Hkv + h of the view with page
    step D and token step Hkv * D (`one_head_view`). So KV heads become batch rows with a block table of their own.

    Args:
        block_ids: [Hkv, T, S] int32; −1 and ids beyond what the query sees are left out.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.

    Returns:
        pages [T * Hkv, S] int32: row t * Hkv + h lists its valid pages, lower blocks first and so the query's own,
        partly visible one last; 0 beyond.
        kv_lens [T * Hkv] int32: visible tokens in those pages; 0 in padding rows.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    sizes = check_shapes(
        "page_table",
        ("block_ids", block_ids, ("Hkv", "T", "S")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
    )
    if sizes["Hkv"] != num_kv_heads:
        raise ValueError(
            f"page_table: block_ids has shape {list(block_ids.shape)}, expected num_kv_heads = {num_kv_heads} first"
        )
    check_int32(
        "page_table", block_ids=block_ids, block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens
    )
    args = (block_ids, block_table, seq_lens, cu_query_lens)
    options = {"block_size": block_size, "num_kv_heads": num_kv_heads}
    result: tuple[torch.Tensor, torch.Tensor] = choose("page_table", IMPLS, impl, *args, **options)(*args, **options)
    return result


def one_head_view(cache: torch.Tensor) -> torch.Tensor:
    """A token-major cache [P, block, Hkv, D] as the one-head cache [(P − 1) * block * Hkv + Hkv, block, D].

    A view whose pages overlap: only pages p * block * Hkv + h with h < Hkv are pages of the cache.

    Raises:
        ValueError: the cache is not contiguous.
    """
    if not cache.is_contiguous():
        raise ValueError(
            f"one_head_view: a cache of shape {list(cache.shape)}, strides {cache.stride()} is not contiguous"
        )
    num_pages, block_size, num_kv_heads, dim = cache.shape
    num_views = max(0, num_pages - 1) * block_size * num_kv_heads + num_kv_heads
    return cache.as_strided((num_views, block_size, dim), (dim, num_kv_heads * dim, 1))
