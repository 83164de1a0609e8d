"""store_kv: write new tokens' keys and values to their slots."""

from __future__ import annotations

import torch

from msaserve.ops.checks import check_caches, check_dtype, check_floats, check_scale, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card_in_8_bits_too

IMPLS = (
    Impl(
        "triton",
        "msaserve.ops.store_kv.triton:store_kv",
        ask_later("msaserve.ops.store_kv.triton:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl("reference", "msaserve.ops.store_kv.reference:store_kv", always),
)


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
    impl: str | None = None,
) -> None:
    """Write k, v and, if given, index_k of T tokens to the caches, in place and in the caches' dtypes.

    Args:
        k, v: [T, Hkv, D].
        k_cache, v_cache: [P, block, Hkv, D].
        slots: [T] int64, page * block + offset, distinct; −1 stores nothing.
        index_k: [T, Di], given together with index_k_cache [P, block, Di].
        k_scale, v_scale: a scalar or [Hkv] float tensor, index_scale a scalar one. What is stored is the value
            divided by it, cut to the range of a float8_e4m3fn cache; readers multiply.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; an index key without its cache.
    """
    if (index_k is None) != (index_k_cache is None):
        raise ValueError("store_kv: index_k and index_k_cache go together")
    cache_dims = ("P", "block", "Hkv", "D")
    sizes = check_shapes(
        "store_kv",
        ("k", k, ("T", "Hkv", "D")),
        ("v", v, ("T", "Hkv", "D")),
        ("k_cache", k_cache, cache_dims),
        ("v_cache", v_cache, cache_dims),
        ("slots", slots, ("T",)),
        ("index_k", index_k, ("T", "Di")),
        ("index_k_cache", index_k_cache, ("P", "block", "Di")),
    )
    check_floats("store_kv", k=k, v=v, index_k=index_k)
    check_caches("store_kv", k_cache=k_cache, v_cache=v_cache, index_k_cache=index_k_cache)
    check_dtype("store_kv", "slots", slots, (torch.int64,))
    check_scale("store_kv", "k_scale", k_scale, sizes["Hkv"])
    check_scale("store_kv", "v_scale", v_scale, sizes["Hkv"])
    check_scale("store_kv", "index_scale", index_scale, 1)
    args = (k, v, k_cache, v_cache, slots)
    options = {
        "index_k": index_k,
        "index_k_cache": index_k_cache,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "index_scale": index_scale,
    }
    choose("store_kv", IMPLS, impl, *args, **options)(*args, **options)
