"""remap: from the blocks each query chose to the queries that chose each block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from msaserve.ops.checks import check_int32, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card

IMPLS = (
    Impl("triton", "msaserve.ops.remap.triton:remap", ask_later("msaserve.ops.remap.triton:why_not"), on_card),
    Impl("reference", "msaserve.ops.remap.reference:remap", always),
)


class BlockQueries(NamedTuple):
    """A compressed sparse row matrix per KV head: block → the entries of block_ids that name it."""

    indptr: torch.Tensor
    """[Hkv, B * max_blocks + 1] int32: row b * max_blocks + n is entries[indptr[row] : indptr[row + 1]]."""
    entries: torch.Tensor
    """[Hkv, T * S] int32: e = t * S + s, query t chose the block in place s. Ascending in a row; the tail is −1."""


def remap(
    block_ids: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_blocks: int,
    impl: str | None = None,
) -> BlockQueries:
    """Turn {query → blocks} into {block → queries}. Exact.

    Args:
        block_ids: [Hkv, T, S] int32; −1 and ids of max_blocks or more are left out, and so are rows of no request.
        cu_query_lens: [B + 1] int32.
        max_blocks: block ids per request: block_table's width.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_shapes(
        "remap",
        ("block_ids", block_ids, ("Hkv", "T", "S")),
        ("cu_query_lens", cu_query_lens, ("num_bounds",)),
    )
    if cu_query_lens.shape[0] == 0:
        raise ValueError("remap: cu_query_lens has shape [0], expected [B + 1]")
    check_int32("remap", block_ids=block_ids, cu_query_lens=cu_query_lens)
    args = (block_ids, cu_query_lens)
    result: BlockQueries = choose("remap", IMPLS, impl, *args, max_blocks=max_blocks)(*args, max_blocks=max_blocks)
    return result
