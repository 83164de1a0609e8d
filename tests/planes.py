"""A cache's planes, all together."""

from __future__ import annotations

import torch

from msaserve.cache.kv import KVCache


def planes(cache: KVCache) -> tuple[torch.Tensor, ...]:
    return cache._k, cache._v, cache._index_k


def poison(cache: KVCache) -> None:
    """Every slot is NaN: whoever reads what was not written is found out."""
    for plane in planes(cache):
        plane.fill_(float("nan"))


def page_bytes(cache: KVCache) -> int:
    """Bytes of one page over all planes."""
    return sum(plane.nbytes for plane in planes(cache)) // cache.num_pages
