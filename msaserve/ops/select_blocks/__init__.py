"""select_blocks: index_score and topk_blocks in one, with bounded memory for scores. What the model calls."""

from __future__ import annotations

import torch

from msaserve.ops import tape
from msaserve.ops.checks import check_dtype, check_index_queries, check_int32, check_selection, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card_in_8_bits_too, on_card_in_half


def in_one_width(index_q: torch.Tensor, index_k_cache: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """`pays` of gluon_prefill: 8-bit keys that it widens for wider queries have not been checked on a card yet."""
    return index_q.is_cuda and index_q.itemsize <= index_k_cache.itemsize


IMPLS = (
    Impl(
        "triton_decode",
        "msaserve.ops.select_blocks.decode_triton:select_blocks",
        ask_later("msaserve.ops.select_blocks.decode_triton:why_not"),
        on_card_in_half,
    ),
    Impl(
        "gluon_prefill",
        "msaserve.ops.select_blocks.gluon_score:select_blocks",
        ask_later("msaserve.ops.select_blocks.gluon_score:why_not"),
        in_one_width,
    ),
    Impl(
        "triton_prefill",
        "msaserve.ops.select_blocks.triton_prefill:select_blocks",
        ask_later("msaserve.ops.select_blocks.triton_prefill:why_not"),
        on_card_in_8_bits_too,
    ),
    Impl("reference", "msaserve.ops.select_blocks.reference:select_blocks", always),
)


def select_blocks(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    local_blocks: int = 1,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """The topk best visible blocks of each query and KV head: `topk_blocks(index_score(...))`.

    Args:
        index_q: [T, Hkv, Di]; float8_e4m3fn beside a cache of that dtype only, which doubles the rate of prefill.
            A positive factor of a row changes no choice: scale rows to the range of 8 bits as you like.
        index_k_cache: [P, block, Di]. It needs no scale, as one common to all keys changes no choice either.
        block_table: [B, max_blocks] int32.
        seq_lens: [B] int32. cu_query_lens: [B + 1] int32.
        max_query_len, max_seq_len: at least the batch's longest query and sequence.
        out: [Hkv, T, topk] int32 to write to.

    Returns:
        block_ids [Hkv, T, topk] int32: valid blocks first, in any order, then −1. Padding rows are all −1.
        The reference chooses the same blocks for a request alone and in a batch, and wherever its pages lie;
        a prompt in other chunks may round its scores differently. Scores of 8-bit queries alone are sums that Hopper
        keeps to 13 bits or so: of blocks whose scores are nearer than a thousandth, the other one may be chosen.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; not 1 ≤ local_blocks ≤ topk.
    """
    args = (index_q, index_k_cache, block_table, seq_lens, cu_query_lens)
    tensors = (*args, out)
    key = tape.key("select_blocks", tensors, topk, local_blocks, max_query_len, max_seq_len, impl)
    replayed = tape.replay(key, tensors)
    if replayed is not None:
        return replayed[0]
    sizes = check_shapes(
        "select_blocks",
        ("index_q", index_q, ("T", "Hkv", "Di")),
        ("index_k_cache", index_k_cache, ("P", "block", "Di")),
        ("block_table", block_table, ("B", "max_blocks")),
        ("seq_lens", seq_lens, ("B",)),
        ("cu_query_lens", cu_query_lens, ("B+1",)),
    )
    if max_seq_len > sizes["max_blocks"] * sizes["block"]:
        raise ValueError(
            f"select_blocks: max_seq_len = {max_seq_len} does not fit block_table {list(block_table.shape)} "
            f"of blocks of {sizes['block']}"
        )
    if out is not None and out.shape != (sizes["Hkv"], sizes["T"], topk):
        raise ValueError(f"select_blocks: out has shape {list(out.shape)}, expected {[sizes['Hkv'], sizes['T'], topk]}")
    check_index_queries("select_blocks", index_q, index_k_cache)
    check_int32("select_blocks", block_table=block_table, seq_lens=seq_lens, cu_query_lens=cu_query_lens)
    check_dtype("select_blocks", "out", out, (torch.int32,))
    check_selection("select_blocks", topk, local_blocks)
    options = {
        "topk": topk,
        "local_blocks": local_blocks,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "out": out,
    }
    with tape.recording(key, tensors) as recorder:
        result: torch.Tensor = choose("select_blocks", IMPLS, impl, *args, **options)(*args, **options)
        if recorder is not None:
            recorder.returns(result)
    return result
