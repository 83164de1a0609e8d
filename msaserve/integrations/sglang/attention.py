"""SGLang's calls as ours. Its arguments are read by name, so that a release may add some and move them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from msaserve import env, ops
from msaserve.integrations import cards

logger = logging.getLogger("msaserve.sglang")

PAGE = 128
"""Tokens of a page and of a sparse block."""

READ = {
    *("q", "k_cache", "v_cache", "idx_q", "idx_k_cache", "req_to_token", "slot_ids", "seq_lens", "sm_scale"),
    *("topk", "init_blocks", "local_blocks", "block_size_k", "score_type", "disable_index_value"),
}
"""Arguments that every call must have. Prefill's lengths, decode's and page_size are read too."""
SCALES = ("q_scale", "k_scale", "v_scale", "idx_q_scale", "idx_k_scale", "idx_v_scale")
READ_IF_GIVEN = {"cu_seqlens", "max_seqlen_q", "max_seqlen_k", "max_seqlen", "page_size", "packed_queries", *SCALES}
IGNORED = {
    *("idx_v_cache", "idx_sm_scale", "prefix_lens", "seqlens_cpu", "seq_lens_cpu", "block_size_q"),
    *("cu_seqblocks_q", "max_seqblock_q", "all_seqblock_q", "msa_kv_indices", "msa_plan"),
}
"""Arguments that say what ours know already, or that only other kernels want."""
KNOWN = READ | READ_IF_GIVEN | IGNORED
"""Any other one may mean something: it must be None or False."""
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Batch(NamedTuple):
    """How a batch lies in SGLang's slots."""

    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


def around(
    stock: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_of: Callable[[Mapping[str, Any]], Batch],
) -> Any:
    """(None, output [T, Hq, D]) by our operators where they serve the call, else what `stock` returns."""
    try:
        bound = _signature(stock).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reason = why_stock(given)
        batch = batch_of(given) if reason is None else None
    except Exception as error:  # a release that calls in another way
        reason, batch = f"its arguments cannot be read: {error!r}", None
    if batch is not None:
        _say(logging.INFO, "msaserve: MiniMax-M3 selects blocks and attends to them with msaserve's kernels")
        return None, run(given, batch)
    _say(logging.WARNING, f"msaserve: a call of MiniMax-M3's attention runs on SGLang's own kernels: {reason}")
    return stock(*args, **kwargs)


def why_stock(given: Mapping[str, Any]) -> str | None:
    """Why SGLang's own kernels take a call with these arguments; None if ours do."""
    if missing := READ - given.keys():
        return f"it has no {', '.join(sorted(missing))}"
    for name, value in given.items():
        if name not in KNOWN and value is not None and value is not False:
            return f"{name} is given"
    for name in SCALES:
        scale = given.get(name)
        # A tensor's value would have to be waited for.
        if scale is not None and (isinstance(scale, torch.Tensor) or scale != 1.0):
            return f"{name} is {'a tensor' if isinstance(scale, torch.Tensor) else scale}"
    q, index_q, caches = given["q"], given["idx_q"], [given[n] for n in ("k_cache", "v_cache", "idx_k_cache")]
    if not given["disable_index_value"]:
        return "the index heads have values"
    if given.get("packed_queries", 1) != 1:
        return "a request has several query tokens to verify"
    if any(cache.ndim != 3 or cache.dtype not in CACHE_DTYPES for cache in caches):
        kinds = ", ".join(f"{cache.ndim}-dimensional {cache.dtype}" for cache in caches)
        return f"the caches are {kinds}, not [slots, heads, dim] of bfloat16, float16 or float8_e4m3fn"
    reason = cards.why_not(
        _capability(q.device),
        triton=cards.triton_version(),
        has_8_bits=any(cache.dtype == torch.float8_e4m3fn for cache in caches),
        is_forced=env.sglang_plugin() == "on",
        switch="MSASERVE_SGLANG",
    )
    if reason is not None:
        return reason
    num_kv_heads = caches[0].shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16) or index_q.shape[1] != num_kv_heads:
        return f"queries are {q.dtype}, with {index_q.shape[1]} index heads to {num_kv_heads} KV heads"
    page_size = given["page_size"] if "page_size" in given else _page_size()
    if page_size % PAGE or given["block_size_k"] != PAGE:
        return (
            f"pages of {page_size} tokens are no whole blocks of {given['block_size_k']}; --page-size 128 makes them so"
        )
    if given["init_blocks"] != 0 or given["score_type"] != "max":
        return f"init_blocks is {given['init_blocks']} and score_type {given['score_type']!r}, not 0 and 'max'"
    group = q.shape[1] // num_kv_heads
    return cards.why_not_shape(topk=given["topk"], local_blocks=given["local_blocks"], group=group)


def prefill_batch(given: Mapping[str, Any]) -> Batch:
    return Batch(given["seq_lens"].int(), given["cu_seqlens"].int(), given["max_seqlen_q"], given["max_seqlen_k"])


def decode_batch(given: Mapping[str, Any]) -> Batch:
    seq_lens = given["seq_lens"].int()
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    return Batch(seq_lens, starts, 1, given["max_seqlen"])


def run(given: Mapping[str, Any], batch: Batch) -> torch.Tensor:
    """Output [T, Hq, D]. SGLang's caches are [slots, heads, D]; a page's slots lie in a row."""
    num_blocks = -(-batch.max_seq_len // PAGE)
    # ops.batch_from_slots makes all of this in one launch; it takes its place when a card has checked it.
    first_slots = given["req_to_token"][:, ::PAGE][:, :num_blocks]
    block_table = first_slots.index_select(0, given["slot_ids"]).div(PAGE, rounding_mode="floor").int()
    output, _ = ops.select_attend(
        given["q"],
        pages(given["k_cache"]),
        pages(given["v_cache"]),
        given["idx_q"],
        pages(given["idx_k_cache"])[:, :, 0],
        block_table,
        batch.seq_lens,
        batch.cu_query_lens,
        topk=given["topk"],
        local_blocks=given["local_blocks"],
        scale=given["sm_scale"],
        max_query_len=batch.max_query_len,
        max_seq_len=min(batch.max_seq_len, block_table.shape[1] * PAGE),
    )
    return output


def pages(slots: torch.Tensor) -> torch.Tensor:
    """[P, 128, heads, D]: a view of a cache [slots, heads, D], without a last part of a page."""
    whole = slots.shape[0] // PAGE * PAGE
    return slots[:whole].view(-1, PAGE, *slots.shape[1:])


def _capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) of what is no card of NVIDIA's: AMD's count 9.x too."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)


def _page_size() -> int:
    """Of the server, in releases whose prefill is not told."""
    from sglang.srt.runtime_context import get_server_args

    return int(get_server_args().page_size)


@cache
def _signature(stock: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(stock)


@cache
def _say(level: int, text: str) -> None:
    """Once a process for each text."""
    logger.log(level, text)
