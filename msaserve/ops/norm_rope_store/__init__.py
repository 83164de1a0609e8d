"""norm_rope_store: from the fused projection's output to rotated queries and a filled cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from msaserve.ops.checks import check_caches, check_dtype, check_floats, check_scale, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card_in_8_bits_too


class Queries(NamedTuple):
    """Normalised and rotated queries, contiguous, in the projection's dtype if no other was asked for."""

    q: torch.Tensor
    """[T, Hq, D]."""
    index_q: torch.Tensor | None
    """[T, Hi, Di]; None without an index part."""


IMPLS = (
    Impl(
        "triton",
        "msaserve.ops.norm_rope_store.triton:norm_rope_store",
        ask_later("msaserve.ops.norm_rope_store.triton:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl("reference", "msaserve.ops.norm_rope_store.reference:norm_rope_store", always),
)


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
    impl: str | None = None,
) -> Queries:
    """Per-head RMS norm and partial rotation of q, k, index_q and index_k; k, v and index_k go to the cache.

    Args:
        projected: [T, Hq·D + 2·Hkv·D + Hi·Di + Di], the columns q | k | v | index_q | index_k, heads one after the
            other. Without index_k_cache it ends after v. Hq follows from the width.
        k_cache, v_cache: [P, block, Hkv, D]. index_k_cache: [P, block, Di].
        slots: [T] int64, page * block + offset, distinct; −1 stores nothing.
        cos, sin: [T, pairs] float32. Channel i < pairs of a head turns with channel i + pairs; the rest passes.
        q_weight, k_weight: [D]; index_q_weight, index_k_weight: [Di], given together with index_k_cache. A head is
            normalised in float32 (mean square plus eps), times 1 + weight, and rounded to projected's dtype.
        num_index_heads: Hi.
        k_scale, v_scale, index_scale: as in `store_kv`.
        index_q_dtype: of the index queries returned; None is projected's. float8_e4m3fn cuts to its range.

    Returns:
        Queries, rows of every slot, −1 too. v is stored as it is; k and index_k as `store_kv` would after norm and
        rotation. Implementations agree up to the rounding of sums.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; index arguments of which some are missing.
    """
    index_args = (index_k_cache, index_q_weight, index_k_weight)
    if any(x is None for x in index_args) != all(x is None for x in index_args) or (
        (index_k_cache is None) != (num_index_heads == 0)
    ):
        raise ValueError(
            "norm_rope_store: index_k_cache, index_q_weight, index_k_weight and num_index_heads go together"
        )
    sizes = check_shapes(
        "norm_rope_store",
        ("projected", projected, ("T", "columns")),
        ("k_cache", k_cache, ("P", "block", "Hkv", "D")),
        ("v_cache", v_cache, ("P", "block", "Hkv", "D")),
        ("slots", slots, ("T",)),
        ("cos", cos, ("T", "pairs")),
        ("sin", sin, ("T", "pairs")),
        ("q_weight", q_weight, ("D",)),
        ("k_weight", k_weight, ("D",)),
        ("index_k_cache", index_k_cache, ("P", "block", "Di")),
        ("index_q_weight", index_q_weight, ("Di",)),
        ("index_k_weight", index_k_weight, ("Di",)),
    )
    dim, index_dim = sizes["D"], sizes.get("Di", 0)
    rest = sizes["columns"] - 2 * sizes["Hkv"] * dim - (num_index_heads + 1 if index_dim else 0) * index_dim
    if rest <= 0 or rest % (sizes["Hkv"] * dim):
        raise ValueError(
            f"norm_rope_store: projected has {sizes['columns']} columns, which leaves {rest} for queries of "
            f"{sizes['Hkv']} groups of heads of {dim}"
        )
    if 2 * sizes["pairs"] > min(dim, index_dim or dim):
        raise ValueError(f"norm_rope_store: {sizes['pairs']} rotated pairs do not fit into heads of {dim}")
    check_floats("norm_rope_store", projected=projected, q_weight=q_weight, k_weight=k_weight)
    check_floats("norm_rope_store", index_q_weight=index_q_weight, index_k_weight=index_k_weight)
    if index_q_dtype not in (None, projected.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"norm_rope_store: index_q_dtype is {index_q_dtype}, expected {projected.dtype} or {torch.float8_e4m3fn}"
        )
    check_caches("norm_rope_store", k_cache=k_cache, v_cache=v_cache, index_k_cache=index_k_cache)
    check_dtype("norm_rope_store", "slots", slots, (torch.int64,))
    check_dtype("norm_rope_store", "cos", cos, (torch.float32,))
    check_dtype("norm_rope_store", "sin", sin, (torch.float32,))
    check_scale("norm_rope_store", "k_scale", k_scale, sizes["Hkv"])
    check_scale("norm_rope_store", "v_scale", v_scale, sizes["Hkv"])
    check_scale("norm_rope_store", "index_scale", index_scale, 1)
    args = (projected, k_cache, v_cache, slots, cos, sin)
    options = {
        "q_weight": q_weight,
        "k_weight": k_weight,
        "eps": eps,
        "index_k_cache": index_k_cache,
        "index_q_weight": index_q_weight,
        "index_k_weight": index_k_weight,
        "num_index_heads": num_index_heads,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "index_scale": index_scale,
        "index_q_dtype": index_q_dtype,
    }
    result: Queries = choose("norm_rope_store", IMPLS, impl, *args, **options)(*args, **options)
    return result
