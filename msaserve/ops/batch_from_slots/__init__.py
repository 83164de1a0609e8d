"""batch_from_slots: what describes a batch, out of an engine's table of every token's slot."""

from __future__ import annotations

import torch

from msaserve.ops import tape
from msaserve.ops.checks import check_dtype, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, by_name

IMPLS = (
    Impl(
        "triton",
        "msaserve.ops.batch_from_slots.triton:batch_from_slots",
        ask_later("msaserve.ops.batch_from_slots.triton:why_not"),
        by_name,
    ),
    Impl("reference", "msaserve.ops.batch_from_slots.reference:batch_from_slots", always),
)
INTS = (torch.int32, torch.int64)


def batch_from_slots(
    token_slots: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_blocks: int,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch that the other operators take, of requests whose blocks' slots lie one after the other. Exact.

    The engine's pages may be of several blocks. Its lengths are read on the device, so a captured graph stays right.

    Args:
        token_slots: [R, max_tokens] int32 or int64, the slot of each token of each request that the engine knows.
            Read only where a block of the batch begins.
        row_ids: [B] int32 or int64, where the batch's requests stand in it; anything for a request without tokens.
        seq_lens: [B] int32 or int64.
        block_size: tokens of a block, 1 or more.
        max_blocks: columns of the block table; blocks beyond are left out.

    Returns:
        block_table [B, max_blocks] int32, 0 beyond a request's last block; seq_lens [B] int32; cu_query_lens [B + 1]
        int32 of decodes, one query token each.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; no block size; fewer columns than none, or more than
            token_slots has blocks.
    """
    tensors = (token_slots, row_ids, seq_lens)
    key = tape.key("batch_from_slots", tensors, block_size, max_blocks, impl)
    replayed = tape.replay(key, tensors)
    if replayed is not None:
        return replayed[0], replayed[1], replayed[2]
    sizes = check_shapes(
        "batch_from_slots",
        ("token_slots", token_slots, ("R", "max_tokens")),
        ("row_ids", row_ids, ("B",)),
        ("seq_lens", seq_lens, ("B",)),
    )
    for name, tensor in zip(("token_slots", "row_ids", "seq_lens"), tensors, strict=True):
        check_dtype("batch_from_slots", name, tensor, INTS)
    if block_size < 1 or not 0 <= max_blocks <= -(-sizes["max_tokens"] // block_size):
        raise ValueError(
            f"batch_from_slots: max_blocks = {max_blocks} does not fit token_slots {list(token_slots.shape)} "
            f"in blocks of {block_size}"
        )
    options = {"block_size": block_size, "max_blocks": max_blocks}
    with tape.recording(key, tensors) as recorder:
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = choose(
            "batch_from_slots", IMPLS, impl, *tensors, **options
        )(*tensors, **options)
        if recorder is not None:
            recorder.returns(*result)
    return result
