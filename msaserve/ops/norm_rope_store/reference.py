"""norm_rope_store as the plain steps: split, norm, rotate, store."""

from __future__ import annotations

import torch

from msaserve.ops.norm_rope_store import Queries
from msaserve.ops.ragged import accumulator
from msaserve.ops.store_kv.reference import narrowed, store_kv


def norm_rope_store(
    projected: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    index_k_cache: torch.Tensor | None = None,
    index_q_weight: torch.Tensor | None = None,
    index_k_weight: torch.Tensor | None = None,
    num_index_heads: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_scale: torch.Tensor | None = None,
    index_q_dtype: torch.dtype | None = None,
) -> Queries:
    num_kv_heads, dim = k_cache.shape[2:]
    index_dim = 0 if index_k_cache is None else index_k_cache.shape[2]
    sizes = [num_kv_heads * dim, num_kv_heads * dim, num_index_heads * index_dim, index_dim]
    parts = torch.split(projected, [projected.shape[1] - sum(sizes), *sizes], dim=1)
    q, k, v = (part.reshape(part.shape[0], -1, dim) for part in parts[:3])
    q = _rotate(_norm(q, q_weight, eps), cos, sin)
    k = _rotate(_norm(k, k_weight, eps), cos, sin)
    index_q, index_k = None, None
    if index_q_weight is not None and index_k_weight is not None:
        index_q = _rotate(_norm(parts[3].reshape(q.shape[0], -1, index_dim), index_q_weight, eps), cos, sin)
        index_q = narrowed(index_q, index_q_dtype or index_q.dtype)
        index_k = _rotate(_norm(parts[4][:, None], index_k_weight, eps), cos, sin)[:, 0]
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
    return Queries(q, index_q)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., i * pairs : (i + 1) * pairs].to(accumulator(x.dtype)) for i in (0, 1))
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * pairs :]], -1)
