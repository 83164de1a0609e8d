"""select_attend: select_blocks and sparse_attend in one, which saves a launch and lets what describes a row be read
beside the scan. What the model calls."""

from __future__ import annotations

import torch

from msaserve.ops import tape
from msaserve.ops.checks import (
    check_caches,
    check_dtype,
    check_floats,
    check_groups,
    check_index_queries,
    check_int32,
    check_scale,
    check_selection,
    check_shapes,
)
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card_in_half


def _pays(q: torch.Tensor, k_cache: torch.Tensor, *args: object, topk: int, **_: object) -> bool:
    """What a card has timed, in every precision: heads and blocks of 128. Over 32 blocks the choice goes in rounds."""
    return on_card_in_half(q) and q.shape[2] == 128 and k_cache.shape[1] == 128 and topk <= 32


IMPLS = (
    Impl(
        "gluon_decode",
        "msaserve.ops.select_attend.gluon_decode:select_attend",
        ask_later("msaserve.ops.select_attend.gluon_decode:why_not"),
        _pays,
    ),
    Impl("two_steps", "msaserve.ops.select_attend.two_steps:select_attend", always),
    Impl("reference", "msaserve.ops.select_attend.reference:select_attend", always),
)


def select_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    scale: float | None = None,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the topk best visible blocks of its KV head: `sparse_attend(…, select_blocks(…))`.

    Args:
        q: [T, Hq, D]; heads h * G … h * G + G − 1 share KV head h.
        k_cache, v_cache: [P, block, Hkv, D], both of one dtype.
        index_q: [T, Hkv, Di]. index_k_cache: [P, block, Di].
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        The others as those two operators take them.

    Returns:
        out [T, Hq, D] in q's dtype and the block_ids [Hkv, T, topk] int32 that were attended to, both as those two
        operators return them.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; not 1 ≤ local_blocks ≤ topk.
    """
    args = (q, k_cache, v_cache, index_q, index_k_cache, block_table, seq_lens, cu_query_lens)
    tensors = (*args, out, k_scale, v_scale)
    key = tape.key("select_attend", tensors, topk, local_blocks, scale, max_query_len, max_seq_len, impl)
    replayed = tape.replay(key, tensors)
    if replayed is not None:
        return replayed[0], replayed[1]
    sizes = check_shapes(
        "select_attend",
        ("q", q, ("T", "Hq", "D")),
        ("k_cache", k_cache, ("P", "block", "Hkv", "D")),
        ("v_cache", v_cache, ("P", "block", "Hkv", "D")),
        ("index_q", index_q, ("T", "Hkv", "Di")),
        ("index_k_cache", index_k_cache, ("P", "block", "Di")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
        ("out", out, ("T", "Hq", "D")),
    )
    if max_seq_len > sizes["max_blocks"] * sizes["block"]:
        raise ValueError(
            f"select_attend: max_seq_len = {max_seq_len} does not fit block_table {list(block_table.shape)} "
            f"of blocks of {sizes['block']}"
        )
    check_groups("select_attend", sizes["Hq"], sizes["Hkv"])
    check_floats("select_attend", q=q)
    check_dtype("select_attend", "out", out, (q.dtype,))
    check_caches("select_attend", k_cache=k_cache, v_cache=v_cache)
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"select_attend: k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}")
    check_index_queries("select_attend", index_q, index_k_cache)
    check_int32("select_attend", block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens)
    check_selection("select_attend", topk, local_blocks)
    check_scale("select_attend", "k_scale", k_scale, sizes["Hkv"])
    check_scale("select_attend", "v_scale", v_scale, sizes["Hkv"])
    options = {
        "topk": topk,
        "local_blocks": local_blocks,
        "scale": sizes["D"] ** -0.5 if scale is None else scale,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "out": out,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    with tape.recording(key, tensors) as recorder:
        result: tuple[torch.Tensor, torch.Tensor] = choose("select_attend", IMPLS, impl, *args, **options)(
            *args, **options
        )
        if recorder is not None:
            recorder.returns(*result)
    return result
