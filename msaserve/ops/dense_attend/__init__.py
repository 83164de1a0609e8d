"""dense_attend: causal attention over a whole paged sequence, for the layers that select nothing."""

from __future__ import annotations

import torch

from msaserve.ops.checks import (
    check_caches,
    check_dtype,
    check_floats,
    check_groups,
    check_int32,
    check_scale,
    check_shapes,
)
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card_in_8_bits_too

IMPLS = (
    Impl(
        "triton_decode",
        "msaserve.ops.dense_attend.decode_triton:dense_attend",
        ask_later("msaserve.ops.dense_attend.decode_triton:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl(
        "gluon_prefill",
        "msaserve.ops.dense_attend.gluon_prefill:dense_attend",
        ask_later("msaserve.ops.dense_attend.gluon_prefill:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl(
        "triton_prefill",
        "msaserve.ops.dense_attend.triton_prefill:dense_attend",
        ask_later("msaserve.ops.dense_attend.triton_prefill:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl("reference", "msaserve.ops.dense_attend.reference:dense_attend", always),
)


def dense_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float | None = None,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attention of each query over its request's tokens up to its own position.

    Args:
        q: [T, Hq, D]; heads h * G … h * G + G − 1 share KV head h.
        k_cache, v_cache: [P, block, Hkv, D], both of one dtype: of floats or float8_e4m3fn.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        scale: of the scores; None is D ** −0.5.
        max_query_len, max_seq_len: at least the batch's longest query and sequence.
        out: [T, Hq, D] of q's dtype to write to.
        k_scale, v_scale: a scalar or [Hkv] float tensor that the caches' values are multiplied by; None is 1. Keys'
            scale the scores and values' the output, in float32; queries stay in q's dtype.

    Returns:
        [T, Hq, D] in q's dtype; 0 in padding rows. Softmax and sums are in float32 (float64 for float64 queries).
        The reference gives a request the same bits alone and in a batch, and wherever its pages lie.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    sizes = check_shapes(
        "dense_attend",
        ("q", q, ("T", "Hq", "D")),
        ("k_cache", k_cache, ("P", "block", "Hkv", "D")),
        ("v_cache", v_cache, ("P", "block", "Hkv", "D")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
        ("out", out, ("T", "Hq", "D")),
    )
    if max_seq_len > sizes["max_blocks"] * sizes["block"]:
        raise ValueError(
            f"dense_attend: max_seq_len = {max_seq_len} does not fit block_table {list(block_table.shape)} "
            f"of blocks of {sizes['block']}"
        )
    check_groups("dense_attend", sizes["Hq"], sizes["Hkv"])
    check_floats("dense_attend", q=q)
    check_dtype("dense_attend", "out", out, (q.dtype,))
    check_caches("dense_attend", k_cache=k_cache, v_cache=v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"dense_attend: k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}")
    check_int32("dense_attend", block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens)
    check_scale("dense_attend", "k_scale", k_scale, sizes["Hkv"])
    check_scale("dense_attend", "v_scale", v_scale, sizes["Hkv"])
    args = (q, k_cache, v_cache, block_table, seq_lens, cu_query_lens)
    options = {
        "scale": sizes["D"] ** -0.5 if scale is None else scale,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "out": out,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    result: torch.Tensor = choose("dense_attend", IMPLS, impl, *args, **options)(*args, **options)
    return result
