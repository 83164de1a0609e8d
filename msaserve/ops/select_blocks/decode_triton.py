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
def best_of(keys, ids, SP: tl.constexpr):
    """The ids of the SP largest keys, largest first; of equal keys the lower id comes first. Ids are distinct."""
    other, mine = keys[:, None], keys[None, :]
    before = (other > mine) | ((other == mine) & (ids[:, None] < ids[None, :]))
    rank = tl.sum(before.to(tl.int32), 0)
    return tl.sum(tl.where(rank[:, None] == tl.arange(0, SP)[None, :], ids[:, None], 0), 0)


@triton.jit
def best_in_runs(scores, num_blocks, first_local, runs, RUN: tl.constexpr, COUNT: tl.constexpr, SP: tl.constexpr):
    """The SP best of the blocks in COUNT runs of RUN consecutive blocks each, best first.

    The candidates are cut into at most `LIMIT` shorter runs and the SP of these with the best maxima are searched
    in turn. A block outside of them has a better block in each of the SP, so nothing is lost.
    """
    LIMIT: tl.constexpr = 128 if SP <= 32 else 4 * SP
    CUT: tl.constexpr = COUNT * RUN // LIMIT if COUNT * RUN > LIMIT else 1
    PIECES: tl.constexpr = RUN // CUT
    pieces = tl.reshape(runs[:, None] * PIECES + tl.arange(0, PIECES)[None, :], (COUNT * PIECES,))
    if CUT == 1:
        score = tl.load(scores + pieces, mask=pieces < num_blocks, other=0.0)
        return best_of(order_key(score, pieces, num_blocks, first_local), pieces, SP)
    else:
        n = pieces[:, None] * CUT + tl.arange(0, CUT)[None, :]
        score = tl.load(scores + n, mask=n < num_blocks, other=0.0)
        best = best_of(tl.max(order_key(score, n, num_blocks, first_local), 1), pieces, SP)
        return best_in_runs(scores, num_blocks, first_local, best, CUT, SP, SP)


@triton.jit
def top_blocks(scores, visible, local_blocks, BLOCK: tl.constexpr, NP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr):
    """[SP] block ids of the row of at most NP scores, best first, −1 after the last valid one and from S on."""
    num_blocks = (visible + BLOCK - 1) // BLOCK
    best = best_in_runs(scores, num_blocks, num_blocks - local_blocks, tl.arange(0, 1), NP, 1, SP)
    place = tl.arange(0, SP)
    return tl.where((place < num_blocks) & (place < S), best, -1)


@triton.jit
def score_kernel(
    index_q,
    index_k,
    block_table,
    seq_lens,
    cu_query_lens,
    scores,
    zeroed,
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
    ZERO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of every gridDim.x-th block of request program_id(1), from block program_id(0) on.

    Row r of the R (≥ H · QP) stands for index head r // QP and query token r % QP of the request. With ZERO, also
    clears zeroed [T, H] for the next launch.
    """
    first = tl.program_id(0)
    step = tl.num_programs(0)
    request = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seq_len = tl.load(seq_lens + request)
    start = tl.load(cu_query_lens + request)
    query_len = tl.load(cu_query_lens + request + 1) - start
    num_blocks = tl.where(query_len > 0, (seq_len + BLOCK - 1) // BLOCK, 0)

    r = tl.arange(0, R)
    head = r // QP
    token = r % QP
    real = (head < H) & (token < query_len)
    d = tl.arange(0, D)
    row = (start + token).to(tl.int64)
    q = tl.load(
        index_q + row[None, :] * stride_qt + head[None, :] * stride_qh + d[:, None], mask=real[None, :], other=0.0
    )
    if ZERO and first == 0:
        tl.store(zeroed + row * H + head, tl.zeros((R,), tl.int32), mask=real)
    visible = seq_len - query_len + token + 1
    out = scores + head * stride_sh + row * stride_st
    offset = tl.arange(0, BLOCK)
    keys = index_k + offset[:, None] * stride_kn + d[None, :]
    table = block_table + request * stride_b
    for n in tl.range(first, num_blocks, step, num_stages=STAGES):
        page = tl.load(table + n).to(tl.int64)
        k = tl.load(keys + page * stride_kp)
        s = tl.dot(k, q)
        seen = (n * BLOCK + offset)[:, None] < visible[None, :]
        # A NaN key compares false and is left out like an unseen one.
        best = tl.max(tl.where(seen & (s > float("-inf")), s, float("-inf")), 0)
        tl.store(out + n, best, mask=real)


@triton.jit
def select_kernel(
    scores,
    seq_lens,
    cu_query_lens,
    block_ids,
    num_requests,
    local_blocks,
    stride_sh,
    stride_st,
    stride_ih,
    stride_it,
    BP: tl.constexpr,
    BLOCK: tl.constexpr,
    NP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    PDL: tl.constexpr,
):
    """block_ids of query token program_id(0) and index head program_id(1)."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    # The scan waited for everything before it, so what it did not write may be read before it ends.
    request, visible = locate(cu_query_lens, seq_lens, t, num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = scores + head.to(tl.int64) * stride_sh + t.to(tl.int64) * stride_st
    best = top_blocks(row, visible, local_blocks, BLOCK, NP, S, SP)
    place = tl.arange(0, SP)
    tl.store(block_ids + head * stride_ih + t * stride_it + place, best, mask=place < S)


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


def scan(
    index_q: torch.Tensor,
    index_k_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    zeroed: torch.Tensor | None = None,
    programs: int = SCORE_PROGRAMS,
    stages: int = 3,
    warps: int = 4,
) -> torch.Tensor:
    """[Hkv, T, N] float32 block scores, written for real queries and visible blocks only."""
    num_rows, num_heads, dim = index_q.shape
    num_requests = seq_lens.shape[0]
    block_size = index_k_cache.shape[1]
    num_blocks = triton.cdiv(max_seq_len, block_size)
    scores = torch.empty((num_heads, num_rows, num_blocks), dtype=torch.float32, device=index_q.device)
    splits = max(1, min(num_blocks, programs // max(1, num_requests)))
    query_pad = triton.next_power_of_2(max_query_len)
    score_kernel[(splits, num_requests)](
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        scores,
        zeroed,
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
        ZERO=zeroed is not None,
        num_warps=warps,
        **launch_options(index_q),
    )
    return scores


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
    warps: int = 4,
) -> torch.Tensor:
    num_rows, num_heads, _ = index_q.shape
    block_size = index_k_cache.shape[1]
    if out is None:
        out = torch.empty((num_heads, num_rows, topk), dtype=torch.int32, device=index_q.device)
    scores = scan(
        index_q,
        index_k_cache,
        block_table,
        seq_lens,
        cu_query_lens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    topk_pad = max(4, triton.next_power_of_2(topk))
    num_requests = seq_lens.shape[0]
    select_kernel[(num_rows, num_heads)](
        scores,
        seq_lens,
        cu_query_lens,
        out,
        num_requests,
        local_blocks,
        scores.stride(0),
        scores.stride(1),
        out.stride(0),
        out.stride(1),
        BP=triton.next_power_of_2(num_requests),
        BLOCK=block_size,
        NP=max(topk_pad, triton.next_power_of_2(scores.shape[2])),
        S=topk,
        SP=topk_pad,
        num_warps=warps,
        **launch_options(index_q),
    )
    return out
