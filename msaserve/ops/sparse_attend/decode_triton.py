"""sparse_attend for decode (1 to 8 query tokens a request): the chosen blocks split over programs, then merged.

A program takes some of the pieces (TILE tokens each) that one query token and KV head chose: the heads of the group
are the M side of the matrix instruction, padded to 16. With one program a row it writes the output, else float32
partials that `merge_kernel` joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from msaserve.ops.select_blocks.decode_triton import MAX_QUERY_LEN, launch_options, locate, why_not_dtypes

PROGRAMS = 132
"""Programs aimed at: one on each of a Hopper card's multiprocessors."""


LOG2_E = 1.4426950408889634


@triton.jit
def add_tokens(q, k, v, is_seen, best, total, acc, scale_log2):
    """One step of the online softmax of q [16, D] over k [D, tokens] and v [tokens, D]: (best, total, acc)."""
    s = tl.dot(q, k.to(q.dtype)) * scale_log2
    s = tl.where(is_seen[None, :], s, float("-inf"))
    higher = tl.maximum(best, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None])
    return higher, total, acc


@triton.jit
def normalised(best, total, acc):
    """(out [16, D] divided by its sum, lse [16] in base 2); 0 and −inf where nothing was visible."""
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    return acc, tl.where(is_empty, float("-inf"), best + tl.log2(total))


@triton.jit
def attend_pieces(
    q,
    k_ptr,
    v_ptr,
    ids,
    table,
    visible,
    head,
    split,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    scale_log2,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SP: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Pieces split, split + SPLITS … of the S · BLOCK / TILE that the ids [SP] stand for.

    Returns (out [16, D] divided by its sum, lse [16] in base 2; 0 and −inf where nothing is visible).
    """
    d = tl.arange(0, D)
    offset = tl.arange(0, TILE)
    PARTS: tl.constexpr = BLOCK // TILE
    # An id out of range sees nothing and reads no page but 0.
    place = tl.arange(0, SP)
    is_valid = (ids >= 0) & (ids * BLOCK < visible)
    pages = tl.load(table + tl.where(is_valid, ids, 0), mask=is_valid, other=0)
    rests = tl.where(is_valid, visible - ids * BLOCK, 0)
    best = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for piece in tl.range(split, S * PARTS, SPLITS, num_stages=STAGES):
        mine = place == piece // PARTS
        page = tl.sum(tl.where(mine, pages, 0), 0).to(tl.int64)
        row = (piece % PARTS) * TILE + offset
        is_seen = row < tl.sum(tl.where(mine, rests, 0), 0)
        k = tl.load(
            k_ptr + page * stride_kp + head * stride_kh + row[None, :] * stride_kn + d[:, None],
            mask=is_seen[None, :],
            other=0.0,
        )
        v = tl.load(
            v_ptr + page * stride_vp + head * stride_vh + row[:, None] * stride_vn + d[None, :],
            mask=is_seen[:, None],
            other=0.0,
        )
        best, total, acc = add_tokens(q, k, v, is_seen, best, total, acc, scale_log2)
    return normalised(best, total, acc)


@triton.jit
def load_group(q_ptr, row, head, stride_qt, stride_qh, G: tl.constexpr, D: tl.constexpr, NARROW: tl.constexpr):
    """[16, D]: the query heads of KV head `head`, zeros after the last of them. float16 beside 8-bit caches."""
    g = tl.arange(0, 16)
    at = row * stride_qt + (head * G + g)[:, None] * stride_qh + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + at, mask=(g < G)[:, None], other=0.0)
    return q.to(tl.float16) if NARROW else q


@triton.jit
def store_group(
    acc,
    lse,
    out,
    partial_out,
    partial_lse,
    row,
    head,
    split,
    stride_ot,
    stride_oh,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The output of a row that is not split, else one split's partial output and sum."""
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    if SPLITS == 1:
        to = out + row * stride_ot + (head * G + g)[:, None] * stride_oh + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=(g < G)[:, None])
    else:
        part = ((row * tl.num_programs(1) + head) * SPLITS + split) * G + g
        tl.store(partial_out + part[:, None] * D + d[None, :], acc, mask=(g < G)[:, None])
        tl.store(partial_lse + part, lse, mask=g < G)


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_ids,
    block_table,
    seq_lens,
    cu_query_lens,
    out,
    partial_out,
    partial_lse,
    k_scale,
    v_scale,
    num_requests,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kn,
    stride_kh,
    stride_vp,
    stride_vn,
    stride_vh,
    stride_ih,
    stride_it,
    stride_b,
    stride_ot,
    stride_oh,
    stride_ks,
    stride_vs,
    BP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SP: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED_K: tl.constexpr,
    SCALED_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Split program_id(0) of KV head program_id(1) and query token program_id(2)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    t = tl.program_id(2)
    # The batch's description is older than the launch before.
    request, visible = locate(cu_query_lens, seq_lens, t, num_requests, BP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = t.to(tl.int64)
    place = tl.arange(0, SP)
    ids = tl.load(block_ids + head * stride_ih + row * stride_it + place, mask=place < S, other=-1)
    if SCALED_K:
        scale_log2 *= tl.load(k_scale + head * stride_ks)
    q = load_group(q_ptr, row, head, stride_qt, stride_qh, G, D, k_ptr.dtype.element_ty.primitive_bitwidth == 8)
    acc, lse = attend_pieces(
        q,
        k_ptr,
        v_ptr,
        ids,
        block_table + request * stride_b,
        visible,
        head,
        split,
        stride_kp,
        stride_kn,
        stride_kh,
        stride_vp,
        stride_vn,
        stride_vh,
        scale_log2,
        D,
        BLOCK,
        TILE,
        SP,
        S,
        SPLITS,
        STAGES,
    )
    if SCALED_V:
        acc *= tl.load(v_scale + head * stride_vs)
    store_group(acc, lse, out, partial_out, partial_lse, row, head, split, stride_ot, stride_oh, G, D, SPLITS)


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    stride_ot,
    stride_oh,
    G: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Query head program_id(0) of query token program_id(1): its partials weighed by their sums."""
    query_head = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    num_kv_heads = tl.num_programs(0) // G
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    part = ((t * num_kv_heads + query_head // G) * SPLITS + split) * G + query_head % G
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lse = tl.load(partial_lse + part)
    acc = tl.load(partial_out + part[:, None] * D + d[None, :])
    best = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weight, 0)
    merged = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + t * stride_ot + query_head * stride_oh + d, merged.to(out.dtype.element_ty))


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    max_query_len: int,
    **_: object,
) -> str | None:
    """None if `sparse_attend` serves these arguments, else the reason. Whether Triton runs is asked before."""
    if max_query_len > MAX_QUERY_LEN:
        return f"max_query_len = {max_query_len} is over {MAX_QUERY_LEN}"
    if q.shape[1] // k_cache.shape[2] > 16:
        return f"{q.shape[1] // k_cache.shape[2]} query heads to a KV head are more than 16"
    if q.shape[2] not in (64, 128) or k_cache.shape[1] not in (64, 128):
        return f"head dim {q.shape[2]} and block size {k_cache.shape[1]} must be 64 or 128"
    if block_ids.shape[2] > 64:
        return f"{block_ids.shape[2]} blocks a query are more than 64"
    if min(q.shape[0], block_ids.shape[2], block_table.numel()) == 0:
        return "nothing to attend to"
    if any(x.stride(-1) != 1 for x in (q, block_ids, block_table, seq_lens, cu_query_lens)):
        return "the last dimensions of q, block_ids, block_table, seq_lens and cu_query_lens must be contiguous"
    return why_not_dtypes(q, k_cache, v_cache)


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    splits: int | None = None,
    tile: int | None = None,
    stages: int = 3,
    warps: int | None = None,
) -> torch.Tensor:
    """The splits depend on shapes only: a row has the same bits in every batch that is split alike."""
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    topk = block_ids.shape[2]
    if out is None:
        out = torch.empty_like(q)
    splits = splits or num_splits(num_rows * num_kv_heads, topk * (block_size // 64))
    # A program with a whole row streams it best in large pieces.
    tile = tile or (block_size if splits <= 2 else 64)
    warps = warps or (8 if tile == 128 else 4)
    partial_out, partial_lse = partials(out, num_kv_heads, splits)
    attend_kernel[(splits, num_kv_heads, num_rows)](
        q,
        k_cache,
        v_cache,
        block_ids,
        block_table,
        seq_lens,
        cu_query_lens,
        out,
        partial_out,
        partial_lse,
        k_scale,
        v_scale,
        seq_lens.shape[0],
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_ids.stride(0),
        block_ids.stride(1),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        head_step(k_scale),
        head_step(v_scale),
        BP=triton.next_power_of_2(seq_lens.shape[0]),
        G=group,
        D=dim,
        BLOCK=block_size,
        TILE=tile,
        SP=triton.next_power_of_2(topk),
        S=topk,
        SPLITS=splits,
        STAGES=stages,
        SCALED_K=k_scale is not None,
        SCALED_V=v_scale is not None,
        num_warps=warps,
        **launch_options(q),
    )
    if splits > 1:
        merge(partial_out, partial_lse, out)
    return out


def num_splits(num_rows: int, pieces: int) -> int:
    """Programs to a row of so many pieces, a power of two: by shapes alone, so that a captured graph stays right."""
    splits = max(1, min(pieces, PROGRAMS // num_rows))
    return 1 << (splits.bit_length() - 1)


def partials(out: torch.Tensor, num_kv_heads: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial outputs [T, Hkv, splits, G, D] and sums [T, Hkv, splits, G]; `out` itself if none is needed."""
    if splits == 1:
        return out, out
    num_rows, num_heads, dim = out.shape
    shape = (num_rows, num_kv_heads, splits, num_heads // num_kv_heads)
    partial_out = torch.empty((*shape, dim), dtype=torch.float32, device=out.device)
    return partial_out, torch.empty(shape, dtype=torch.float32, device=out.device)


def merge(partial_out: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, Hq, D] from partial_out [T, Hkv, splits, G, D] and partial_lse [T, Hkv, splits, G] (base 2)."""
    num_rows, num_heads, dim = out.shape
    merge_kernel[(num_heads, num_rows)](
        partial_out,
        partial_lse,
        out,
        out.stride(0),
        out.stride(1),
        G=partial_out.shape[3],
        D=dim,
        SPLITS=partial_out.shape[2],
        num_warps=2,
        **launch_options(out),
    )


def head_step(scale: torch.Tensor | None) -> int:
    """Elements from one KV head's scale to the next: 0 for a scalar."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)
