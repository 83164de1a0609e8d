"""store_kv as one indexed assignment per cache."""

from __future__ import annotations

import torch

from msaserve.ops.ragged import accumulator, raw


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    index_k: torch.Tensor | None = None,
    index_k_cache: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_scale: torch.Tensor | None = None,
) -> None:
    _store(k, k_cache, slots, k_scale)
    _store(v, v_cache, slots, v_scale)
    if index_k is not None and index_k_cache is not None:
        _store(index_k, index_k_cache, slots, index_scale)


def _store(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    is_stored = slots >= 0
    slots, values = slots[is_stored], values[is_stored]
    if scale is not None:
        values = values.to(accumulator(values.dtype)) / scale.reshape(-1, 1)
    block_size = cache.shape[1]
    raw(cache)[slots // block_size, slots % block_size] = raw(narrowed(values, cache.dtype))


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in another dtype, cut to its range if it has 8 bits."""
    if dtype == torch.float8_e4m3fn:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
