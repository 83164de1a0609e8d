"""Where a tile of queries stands in a ragged batch: shared by the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


def next_power_of_2(n: int) -> int:
    """The least power of two of at least n. Triton's own function takes longer than a launch."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def query_tile(cu_query_lens, tile, B, BQ: tl.constexpr, BLOCK_B: tl.constexpr):
    """The tile-th run of at most BQ tokens of one request: (request, first token, the request's first and end token).

    Tiles are numbered request after request; beyond the last one the run is empty (first token = end = 0).
    """
    b = tl.arange(0, BLOCK_B)
    lo = tl.load(cu_query_lens + b, mask=b < B, other=0)
    hi = tl.load(cu_query_lens + b + 1, mask=b < B, other=0)
    count = (tl.maximum(hi - lo, 0) + BQ - 1) // BQ
    end = tl.cumsum(count, 0)
    here = (tile >= end - count) & (tile < end)
    request = tl.sum(tl.where(here, b, 0), 0)
    start = tl.sum(tl.where(here, lo, 0), 0)
    stop = tl.sum(tl.where(here, hi, 0), 0)
    first = tl.sum(tl.where(here, lo + (tile - end + count) * BQ, 0), 0)
    return request, first, start, stop
