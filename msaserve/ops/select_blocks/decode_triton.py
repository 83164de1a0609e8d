"""select_blocks for decode (1 to 8 query tokens a request): a scan of the index keys at memory speed, then exact top-k.

Two launches. `score_kernel` deals every request's blocks out to many programs; a block's keys are the M side of the
matrix instruction, index heads × query tokens the small N side. `select_kernel` picks the best blocks of one row.
The fused decode step lets its attend programs call `top_blocks` themselves and needs the first launch only.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# ruff: noqa: N803, N806
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

MAX_QUERY_LEN = 8
"""Query tokens a request may bring; more are a prefill."""

SCORE_PROGRAMS = 4096
"""Programs of the scan over all requests together, about: enough to fill the card and to even out ragged batches."""


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
    """[SP]: the n of the S largest keys, largest first, of equal keys the lower n first. Once all are taken, any again."""
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
    """Scores of the blocks program_id(0), + gridDim.x, … of request program_id(1), and with COMBS their best.

    Row r of the R (≥ H · QP) stands for index head r // QP and query token r % QP of the request.
    """
    first = tl.program_id(0)
    step = tl.num_programs(0)
    request = tl.program_id(1)
    # The batch's description is older than the launch before; the first page is asked for with the lengths.
    table = block_table + request * stride_b
    page = tl.load(table + first)
    seq_len = tl.load(seq_lens + request)
    start = tl.load(cu_query_lens + request)
    query_len = tl.load(cu_query_lens + request + 1) - start
    num_blocks = tl.where(query_len > 0, (seq_len + BLOCK - 1) // BLOCK, 0)
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
    visible = seq_len - query_len + token + 1
    out = scores + head * stride_sh + row * stride_st
    offset = tl.arange(0, BLOCK)
    keys = index_k + offset[:, None] * stride_kn + d[None, :]
    comb_best = tl.full((R,), float("-inf"), tl.float32)
    comb_block = tl.full((R,), 0, tl.int32) + first
    for n in tl.range(first, num_blocks, step, num_stages=STAGES):
        k = tl.load(keys + page.to(tl.int64) * stride_kp)
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
    """block_ids of query token program_id(0) and index head program_id(1), by one warp: it needs no barriers.

    With RP > 0, comb c of `combs` is the blocks c, c + combs, … of which the scan kept the best. Only the S combs
    with the best of these are searched: a block of another comb has S better blocks against it.
    """
    t = tl.program_id(0)
    head = tl.program_id(1)
    request, visible = locate(cu_query_lens, seq_lens, t, num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks = (visible + BLOCK - 1) // BLOCK
    first_local = num_blocks - local_blocks
    row = scores + head.to(tl.int64) * stride_sh + t.to(tl.int64) * stride_st
    c = tl.arange(0, CP)
    if RP == 0:
        n = c
        is_in = c < num_blocks
        score = tl.load(row + c, mask=is_in, other=0.0)
        key = order_key(score, n, num_blocks, first_local)
    else:
        at = (t.to(tl.int64) * tl.num_programs(1) + head) * combs + c
        is_in = (c < combs) & (c < num_blocks)
        best = tl.load(comb_scores + at, mask=is_in, other=0.0)
        block = tl.load(comb_blocks + at, mask=is_in, other=0)
        # A forced block stands for its comb, the last of them if it has several.
        last = c + (num_blocks - 1 - c) // combs * combs
        block = tl.where(is_in, tl.where(last >= first_local, last, block), 0x7FFFFFFF)
        top = take_best(order_key(best, block, num_blocks, first_local), block, S, SP)
        start = tl.where(top < num_blocks, top % combs, 0x40000000)
        n = tl.reshape(start[:, None] + (tl.arange(0, RP) * combs)[None, :], (SP * RP,))
        score = tl.load(row + n, mask=n < num_blocks, other=0.0)
        key = order_key(score, n, num_blocks, first_local)
    place = tl.arange(0, SP)
    ids = tl.where(place < num_blocks, take_best(key, n, S, SP), -1)
    tl.store(block_ids + head * stride_ih + t * stride_it + place, ids, mask=place < S)


def why_not(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    topk: int,
    max_query_len: int,
    **_: object,
) -> str | None:
    """None if `select_blocks` serves these arguments, else the reason."""
    if max_query_len > MAX_QUERY_LEN:
        return f"max_query_len = {max_query_len} is over {MAX_QUERY_LEN}"
    if topk > 64:
        return f"topk = {topk} is over 64"
    if index_q.shape[1] > 16:
        return f"{index_q.shape[1]} index heads are more than 16"
    if index_q.shape[2] not in (64, 128) or index_k_cache.shape[1] not in (64, 128):
        return f"index dim {index_q.shape[2]} and block size {index_k_cache.shape[1]} must be 64 or 128"
    if index_q.stride(-1) != 1 or seq_lens.stride(-1) != 1 or cu_query_lens.stride(-1) != 1:
        return "index_q's last dimension, seq_lens and cu_query_lens must be contiguous"
    return why_not_here(index_q)


def why_not_here(q: torch.Tensor) -> str | None:
    """None if the kernels run on q's device and dtype: half precision on a card of compute capability 9."""
    if not q.is_cuda:
        if not knobs.runtime.interpret:
            return "not a CUDA device, and TRITON_INTERPRET is not set"
        # The interpreter multiplies bfloat16 matrices as the integers that hold their bits.
        return "the interpreter cannot multiply bfloat16" if q.dtype == torch.bfloat16 else None
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        return "not a Hopper card"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q.dtype}, not bfloat16 or float16"
    return None


def launch_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Programmatic dependent launch where there is such a thing: a kernel's start overlaps the end of the one before."""
    return {"PDL": True, "launch_pdl": True} if tensor.is_cuda else {"PDL": False}


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
    programs: int = SCORE_PROGRAMS,
    stages: int = 2,
    warps: int = 4,
    direct: int = 1024,
    stop: bool = False,
) -> torch.Tensor:
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
    if out is None:
        out = torch.empty((num_heads, num_rows, topk), dtype=torch.int32, device=index_q.device)
    query_pad = triton.next_power_of_2(max_query_len)
    topk_pad = triton.next_power_of_2(topk)
    options = launch_options(index_q)
    score_kernel[(combs, num_requests)](
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
        num_warps=warps,
        **options,
    )
    if stop:
        return scores
    select_kernel[(num_rows, num_heads)](
        scores,
        comb_scores,
        comb_blocks,
        seq_lens,
        cu_query_lens,
        out,
        num_requests,
        local_blocks,
        combs,
        scores.stride(0),
        scores.stride(1),
        out.stride(0),
        out.stride(1),
        BP=triton.next_power_of_2(num_requests),
        BLOCK=block_size,
        S=topk,
        SP=topk_pad,
        CP=max(topk_pad, triton.next_power_of_2(combs if run else num_blocks)),
        RP=run,
        num_warps=1,
        **options,
    )
    return out
