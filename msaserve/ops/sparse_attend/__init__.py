"""sparse_attend: softmax attention of each query over the visible tokens of the blocks it chose."""

from __future__ import annotations

import torch

from msaserve.ops import tape
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
from msaserve.ops.hopper import ask_later, by_name, on_card_in_8_bits_too, on_card_in_half


def _why_not_paged(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: object, **__: object
) -> str | None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "the caches must be contiguous, token-major [P, block, Hkv, D]"
    return None


def _kv_major_pays(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    *_: object,
    max_query_len: int,
    **__: object,
) -> bool:
    """Whether a block is chosen by 16 queries or more on average: from there on it was faster on a CPU."""
    num_entries = block_ids.shape[1] * block_ids.shape[2]
    return max_query_len >= 16 and num_entries >= 16 * block_table.numel()


IMPLS = (
    Impl(
        "triton_decode",
        "msaserve.ops.sparse_attend.decode_triton:sparse_attend",
        ask_later("msaserve.ops.sparse_attend.decode_triton:why_not"),
        on_card_in_half,
    ),
    Impl(
        "gluon_kv_major",
        "msaserve.ops.sparse_attend.gluon_kv_major:sparse_attend",
        ask_later("msaserve.ops.sparse_attend.gluon_kv_major:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl(
        "triton_kv_major",
        "msaserve.ops.sparse_attend.triton_kv_major:sparse_attend",
        ask_later("msaserve.ops.sparse_attend.triton_kv_major:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl("reference_kv_major", "msaserve.ops.sparse_attend.reference_kv_major:sparse_attend", always, _kv_major_pays),
    Impl("reference", "msaserve.ops.sparse_attend.reference:sparse_attend", always),
    Impl(
        "cudnn_paged",
        "msaserve.ops.sparse_attend.cudnn_paged:sparse_attend",
        ask_later("msaserve.ops.sparse_attend.cudnn_paged:why_not"),
        by_name,
    ),
    Impl("reference_paged", "msaserve.ops.sparse_attend.reference_paged:sparse_attend", _why_not_paged),
)


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float | None = None,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attention of each query head over the blocks its KV head chose for it, up to the query's own position.

    Args:
        q: [T, Hq, D]; heads h * G … h * G + G − 1 share KV head h.
        k_cache, v_cache: [P, block, Hkv, D], both of one dtype: of floats or float8_e4m3fn.
        block_ids: [Hkv, T, S] int32, distinct in a row; −1 anywhere and ids beyond what the query sees are skipped.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        scale: of the scores; None is D ** −0.5.
        max_query_len: at least the batch's longest query.
        out: [T, Hq, D] of q's dtype to write to.
        k_scale, v_scale: a scalar or [Hkv] float tensor that the caches' values are multiplied by; None is 1. Keys'
            scale the scores and values' the output, in float32; queries stay in q's dtype.

    Returns:
        [T, Hq, D] in q's dtype; 0 where nothing is visible and in padding rows. Softmax and sums are in float32
        (float64 for float64 queries). Slots that no query may see are never part of a sum, whatever they hold.

    Implementations: "reference" goes query by query, "reference_kv_major" loads each block once for all the queries
    that chose it, "reference_paged" and "cudnn_paged" turn KV heads into batch rows of an ordinary paged attention.
    They agree up to rounding. Of each, a request has the same bits alone and in a batch, and wherever its pages lie.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    tensors = (q, k_cache, v_cache, block_ids, block_table, seq_lens, cu_query_lens, out, k_scale, v_scale)
    key = tape.key("sparse_attend", tensors, scale, max_query_len, impl)
    replayed = tape.replay(key, tensors)
    if replayed is not None:
        return replayed[0]
    sizes = check_shapes(
        "sparse_attend",
        ("q", q, ("T", "Hq", "D")),
        ("k_cache", k_cache, ("P", "block", "Hkv", "D")),
        ("v_cache", v_cache, ("P", "block", "Hkv", "D")),
        ("block_ids", block_ids, ("Hkv", "T", "S")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
        ("out", out, ("T", "Hq", "D")),
    )
    check_groups("sparse_attend", sizes["Hq"], sizes["Hkv"])
    check_floats("sparse_attend", q=q)
    check_dtype("sparse_attend", "out", out, (q.dtype,))
    check_caches("sparse_attend", k_cache=k_cache, v_cache=v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"sparse_attend: k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}")
    check_int32(
        "sparse_attend", block_ids=block_ids, block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens
    )
    check_scale("sparse_attend", "k_scale", k_scale, sizes["Hkv"])
    check_scale("sparse_attend", "v_scale", v_scale, sizes["Hkv"])
    args = (q, k_cache, v_cache, block_ids, block_table, seq_lens, cu_query_lens)
    options = {
        "scale": sizes["D"] ** -0.5 if scale is None else scale,
        "max_query_len": max_query_len,
        "out": out,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    with tape.recording(key, tensors) as recorder:
        result: torch.Tensor = choose("sparse_attend", IMPLS, impl, *args, **options)(*args, **options)
        if recorder is not None:
            recorder.returns(result)
    return result
