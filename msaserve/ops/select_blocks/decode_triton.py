"""select_blocks for decode (1 to 8 query tokens a request): a scan of the index keys at memory speed, then exact top-k.

Two launches. `score_kernel` deals every request's blocks out to many programs; a block's keys are the M side of the
matrix instruction, index heads × query tokens the small N side. `select_kernel` picks the best blocks of one row.

With programmatic dependent launch a kernel starts before the one ahead of it has ended and waits for its data. What
describes the batch (block_table, seq_lens, cu_query_lens) is read before that wait: it must not be written by a
kernel launched directly before that lets its dependents start early.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from msaserve.ops.hopper import capability

MAX_QUERY_LEN = 8
"""Query tokens a request may bring; more are a prefill."""

SCORE_PROGRAMS = 4096
"""Programs of the scan over all requests together, about: enough to fill the card and to even out ragged batches."""

DIRECT_BLOCKS = 512
"""Scores that one warp chooses from directly. Of longer rows it takes the best of each of at most as many combs."""


@triton.jit
def locate(cu_query_lens, seq_lens, t, num_requests, BP: tl.constexpr):
    """The request of query token t and how many tokens it sees: (request, visible); visible ≤ 0 for a padding row."""
    i = tl.arange(0, BP)
    real = i < num_requests
    end = tl.load(cu_query_lens + 1 + i, mask=real, other=0x7FFFFFFF)
    lens = tl.load(seq_lens + i, mask=real, other=0)
    request = tl.sum((end <= t).to(tl.int32), 0)
    mine = (i == request) & real
    own_end = tl.sum(tl.where(mine, end, 0), 0)
    seq_len = tl.sum(tl.where(mine, lens, 0), 0)
    visible = tl.where(seq_len > 0, seq_len - own_end + t + 1, 0)
    return tl.minimum(request, num_requests - 1), visible


@triton.jit
def order_key(score, n, num_blocks, first_local):
    """int32 that sorts like the score: forced blocks above all, blocks beyond the request below all, NaN as −inf."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(n >= first_local, 0x7FFFFFFF, key)
    return tl.where(n < num_blocks, key, -0x80000000)


@triton.jit
def take_best(key, n, S, SP: tl.constexpr):
    """[SP]: the n of the S largest keys, largest first, of equal keys the lower n first; then any again."""
    place = tl.arange(0, SP)
    chosen = tl.full((SP,), 0x7FFFFFFF, tl.int32)
    for i in range(S):
        top = tl.max(key, 0)
        first = tl.min(tl.where(key == top, n, 0x7FFFFFFF), 0)
        chosen = tl.where(place == i, first, chosen)
        key = tl.where(n == first, -0x80000000, key)
    return chosen


@triton.jit
def score_kernel(
    index_q,
    index_k,
    block_table,
    seq_lens,
    cu_query_lens,
    scores,
    comb_scores,
    comb_blocks,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_b,
    stride_sh,
    stride_st,
    H: tl.constexpr,
    QP: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    COMBS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of the blocks program_id(1), + gridDim.y, … of request program_id(0), and with COMBS their best.

    Row r of the R (≥ H · QP) stands for index head r // QP and query token r % QP of the request.
    """
    # The same blocks of all requests at a time: where pages are shared, their keys are in the L2 cache for the next.
    request = tl.program_id(0)
    first = tl.program_id(1)
    step = tl.num_programs(1)
    # The batch's description is older than the launch before; the first page is asked for with the lengths.
    table = block_table + request * stride_b
    page = tl.load(table + first)
    seq_len = tl.load(seq_lens + request)
    start = tl.load(cu_query_lens + request)
    query_len = tl.load(cu_query_lens + request + 1) - start
    num_blocks = tl.where(query_len > 0, (seq_len + BLOCK - 1) // BLOCK, 0)
    offset = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    r = tl.arange(0, R)
    head = r // QP
    token = r % QP
    real = (head < H) & (token < query_len)
    d = tl.arange(0, D)
    row = (start + token).to(tl.int64)
    q = tl.load(
        index_q + row[None, :] * stride_qt + head[None, :] * stride_qh + d[:, None], mask=real[None, :], other=0.0
    )
    if index_k.dtype.element_ty.primitive_bitwidth == 8:
        # Widening 8 bits to these is one instruction for two.
        q = q.to(tl.float16)
    visible = seq_len - query_len + token + 1
    out = scores + head * stride_sh + row * stride_st
    keys = index_k + offset[:, None] * stride_kn + d[None, :]
    comb_best = tl.full((R,), float("-inf"), tl.float32)
    comb_block = tl.full((R,), 0, tl.int32) + first
    for n in tl.range(first, num_blocks, step, num_stages=STAGES):
        k = tl.load(keys + page.to(tl.int64) * stride_kp).to(q.dtype)
        page = tl.load(table + n + step, mask=n + step < num_blocks, other=0)
        s = tl.dot(k, q)
        seen = (n * BLOCK + offset)[:, None] < visible[None, :]
        # A NaN key compares false and is left out like an unseen one.
        best = tl.max(tl.where(seen & (s > float("-inf")), s, float("-inf")), 0)
        tl.store(out + n, best, mask=real)
        if COMBS:
            comb_block = tl.where(best > comb_best, n, comb_block)
            comb_best = tl.maximum(best, comb_best)
    if COMBS:
        at = (row * H + head) * step + first
        tl.store(comb_scores + at, comb_best, mask=real)
        tl.store(comb_blocks + at, comb_block, mask=real)


@triton.jit
def choose_blocks(
    scores,
    comb_scores,
    comb_blocks,
    visible,
    local_blocks,
    combs,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    CP: tl.constexpr,
    RP: tl.constexpr,
):
    """[SP] block ids of one row of scores, best first, −1 after the last valid one. Made for one warp: no barriers.

    With RP > 0, comb c of `combs` is the blocks c, c + combs, … of which the scan kept the best. Only the S combs
    with the best of these are searched: a block of another comb has S better blocks against it.
    """
    num_blocks = (visible + BLOCK - 1) // BLOCK
    first_local = num_blocks - local_blocks
    c = tl.arange(0, CP)
    if RP == 0:
        n = c
        score = tl.load(scores + n, mask=n < num_blocks, other=0.0)
        key = order_key(score, n, num_blocks, first_local)
    else:
        is_in = (c < combs) & (c < num_blocks)
        best = tl.load(comb_scores + c, mask=is_in, other=0.0)
        block = tl.load(comb_blocks + c, mask=is_in, other=0)
        # A forced block stands for its comb, the last of them if it has several.
        last = c + (num_blocks - 1 - c) // combs * combs
        block = tl.where(is_in, tl.where(last >= first_local, last, block), 0x7FFFFFFF)
        top = take_best(order_key(best, block, num_blocks, first_local), block, S, SP)
        start = tl.where(top < num_blocks, top % combs, 0x40000000)
        n = tl.reshape(start[:, None] + (tl.arange(0, RP) * combs)[None, :], (SP * RP,))
        score = tl.load(scores + n, mask=n < num_blocks, other=0.0)
        key = order_key(score, n, num_blocks, first_local)
    place = tl.arange(0, SP)
    return tl.where((place < num_blocks) & (place < S), take_best(key, n, S, SP), -1)


@triton.jit
def select_kernel(
    scores,
    comb_scores,
    comb_blocks,
    seq_lens,
    cu_query_lens,
    block_ids,
    num_requests,
    local_blocks,
    combs,
    stride_sh,
    stride_st,
    stride_ih,
    stride_it,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    CP: tl.constexpr,
    RP: tl.constexpr,
    PDL: tl.constexpr,
):
    """block_ids of query token program_id(0) and index head program_id(1)."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, visible = locate(cu_query_lens, seq_lens, tl.program_id(0), num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (t * tl.num_programs(1) + head) * combs
    row = scores + head.to(tl.int64) * stride_sh + t * stride_st
    ids = choose_blocks(row, comb_scores + at, comb_blocks + at, visible, local_blocks, combs, BLOCK, S, SP, CP, RP)
    place = tl.arange(0, SP)
    tl.store(block_ids + head * stride_ih + t * stride_it + place, ids, mask=place < S)


class Scan(NamedTuple):
    """What the scan leaves for the choice."""

    scores: torch.Tensor
    """[Hkv, T, N] float32, written for real queries and visible blocks only."""
    comb_scores: torch.Tensor
    comb_blocks: torch.Tensor
    """[T, Hkv, combs] float32 and int32: the best score of each comb and its block, if `choice` has RP > 0."""
    combs: int
    choice: dict[str, int]
    """The constants of `choose_blocks`."""


def scan(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    max_query_len: int,
    max_seq_len: int,
    programs: int = SCORE_PROGRAMS,
    direct: int = DIRECT_BLOCKS,
    stages: int | None = None,
) -> Scan:
    """One launch over every block of every request. The split depends on shapes only."""
    num_rows, num_heads, dim = index_q.shape
    num_requests = seq_lens.shape[0]
    block_size = index_k_cache.shape[1]
    num_blocks = triton.cdiv(max_seq_len, block_size)
    combs = max(1, min(num_blocks, programs // num_requests))
    run = 0
    if num_blocks > direct:
        combs = min(combs, direct)
        run = triton.next_power_of_2(triton.cdiv(num_blocks, combs))
    scores = torch.empty((num_heads, num_rows, num_blocks), dtype=torch.float32, device=index_q.device)
    comb_scores, comb_blocks = scores, scores
    if run:
        comb_scores = torch.empty((num_rows, num_heads, combs), dtype=torch.float32, device=index_q.device)
        comb_blocks = torch.empty((num_rows, num_heads, combs), dtype=torch.int32, device=index_q.device)
    query_pad = triton.next_power_of_2(max_query_len)
    topk_pad = triton.next_power_of_2(topk)
    if stages is None:
        # Registers take one block soonest if all programs run at once; shared memory keeps more of them in flight.
        stages = 1 if combs * num_requests <= 528 and combs == num_blocks else 2
    options: dict[str, bool | int] = dict(launch_options(index_q))
    if stages == 1 and index_q.is_cuda:
        # Four programs on a multiprocessor.
        options["maxnreg"] = 128
    score_kernel[(num_requests, combs)](
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        scores,
        comb_scores,
        comb_blocks,
        index_q.stride(0),
        index_q.stride(1),
        index_k_cache.stride(0),
        index_k_cache.stride(1),
        block_table.stride(0),
        scores.stride(0),
        scores.stride(1),
        H=num_heads,
        QP=query_pad,
        R=max(8, triton.next_power_of_2(num_heads) * query_pad),
        D=dim,
        BLOCK=block_size,
        STAGES=stages,
        COMBS=run > 0,
        num_warps=4,
        **options,
    )
    width = max(topk_pad, triton.next_power_of_2(combs if run else num_blocks))
    choice = {"BLOCK": block_size, "S": topk, "SP": topk_pad, "CP": width, "RP": run}
    return Scan(scores, comb_scores, comb_blocks, combs, choice)


def why_not(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    max_query_len: int,
    max_seq_len: int,
    **_: object,
) -> str | None:
    """None if `select_blocks` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if max_query_len > MAX_QUERY_LEN:
        return f"max_query_len = {max_query_len} is over {MAX_QUERY_LEN}"
    if topk > 64:
        return f"topk = {topk} is over 64"
    if index_q.shape[1] > 16:
        return f"{index_q.shape[1]} index heads are more than 16"
    if index_q.shape[2] not in (64, 128) or index_k_cache.shape[1] not in (64, 128):
        return f"index dim {index_q.shape[2]} and block size {index_k_cache.shape[1]} must be 64 or 128"
    if min(index_q.shape[0], block_table.numel(), max_query_len, max_seq_len) == 0:
        return "nothing to select from"
    if any(x.stride(-1) != 1 for x in (index_q, block_table, seq_lens, cu_query_lens)):
        return "the last dimensions of index_q, block_table, seq_lens and cu_query_lens must be contiguous"
    return why_not_dtypes(index_q, index_k_cache)


def why_not_dtypes(q: torch.Tensor, *caches: torch.Tensor) -> str | None:
    """None if q can be multiplied with what the caches hold; beside 8-bit values both are multiplied as float16."""
    if q.dtype == torch.float8_e4m3fn and all(cache.dtype == q.dtype for cache in caches):
        return None
    if (q.dtype not in (torch.bfloat16, torch.float16) and q.is_cuda) or q.dtype == torch.float64:
        return f"queries are {q.dtype}, not of half precision"
    for cache in caches:
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            return f"queries are {q.dtype}, a cache is {cache.dtype}"
    return None


def launch_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Programmatic dependent launch where the card has it: a kernel's start overlaps the end of the one before."""
    if tensor.is_cuda and capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


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
    **tuning: Any,
) -> torch.Tensor:
    num_rows, num_heads, _ = index_q.shape
    num_requests = seq_lens.shape[0]
    if out is None:
        out = torch.empty((num_heads, num_rows, topk), dtype=torch.int32, device=index_q.device)
    found = scan(
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        topk=topk,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        **tuning,
    )
    select_kernel[(num_rows, num_heads)](
        found.scores,
        found.comb_scores,
        found.comb_blocks,
        seq_lens,
        cu_query_lens,
        out,
        num_requests,
        local_blocks,
        found.combs,
        *found.scores.stride()[:2],
        *out.stride()[:2],
        BP=triton.next_power_of_2(num_requests),
        **found.choice,
        num_warps=1,
        **launch_options(index_q),
    )
    return out
