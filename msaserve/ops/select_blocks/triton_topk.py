"""The exact top-k of scored query tiles, a thread a row or several segments of one.

Scores lie as [tiles, blocks / 8, rows, 8], so that eight blocks of a row are one memory sector: rows go through blocks
of their own choice at the cost of going through all. Beside them may lie the best score of each group of 8 or 16
blocks, [tiles, groups, rows]. Only blocks of the best groups can be chosen, so groups are chosen first and then the
blocks of theirs. Each choice finds the k-th largest score with registers alone, then walks the scores again to write
the ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""What a score of −inf or NaN is stored as: it still beats no block."""


@triton.jit
def _bitonic_stage(x, K: tl.constexpr, J: tl.constexpr):
    """Compare elements J apart; runs of K are put in alternating order, the first descending."""
    y = ()
    for i in tl.static_range(len(x)):
        if ((i & J) == 0) == ((i & K) == 0):
            y = y + (tl.maximum(x[i], x[i ^ J]),)
        else:
            y = y + (tl.minimum(x[i], x[i ^ J]),)
    return y


@triton.jit
def _merge(top, x, LOG: tl.constexpr, IS_SORTED: tl.constexpr):
    """The largest 2^LOG of `top`, descending, and x, descending too or in any order, both of 2^LOG elements."""
    if not IS_SORTED:
        for k in tl.static_range(LOG):
            for j in tl.static_range(k + 1):
                x = _bitonic_stage(x, 2 << k, 1 << (k - j))
    kept = ()
    for i in tl.static_range(len(x)):
        kept = kept + (tl.maximum(top[i], x[(1 << LOG) - 1 - i]),)
    for j in tl.static_range(LOG):
        kept = _bitonic_stage(kept, 2 << LOG, 1 << (LOG - 1 - j))
    return kept


@triton.jit
def _load_eight(at, WIDE: tl.constexpr):
    """Eight neighbouring floats at each address, with loads of 16 bytes if WIDE (not in the interpreter)."""
    x = ()
    if WIDE:
        for i in tl.static_range(2):
            x = x + tl.inline_asm_elementwise(
                "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
                "=f,=f,=f,=f,l",
                [(at + 4 * i).to(tl.int64)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
    else:
        for i in tl.static_range(8):
            x = x + (tl.load(at + i),)
    return x


@triton.jit
def _eight(
    scores,
    groups,
    listed,
    run,
    o: tl.constexpr,
    count,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    LOG: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MAXIMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Eighth o of a run of 2^LOG: the n it begins with, [R, SEGMENTS] or [1, SEGMENTS], and each row's eight scores,
    which mean nothing from `count` on. A run is of all n in turn, or of the listed groups'."""
    if groups is None:
        n = run * (1 << LOG) + o * 8
    else:
        entry = run * ((1 << LOG) // GROUP) + o * 8 // GROUP
        group = tl.load(groups + entry * R + tl.arange(0, R)[:, None], mask=entry < listed, other=1 << 24)
        n = group * GROUP + o * 8 % GROUP
    x = ()
    if IS_MAXIMA:
        for i in tl.static_range(8):
            x = x + (tl.load(scores + (n + i) * ROWS, mask=n + i < count, other=LOWEST),)
    else:
        x = _load_eight(scores + tl.where(n < count, n, 0) * ROWS, WIDE)
    return n, x


@triton.jit
def _choose(
    scores,
    groups,
    listed,
    runs,
    count,
    lists,
    out,
    stride_out,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    R: tl.constexpr,
    LOG: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MAXIMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The n < count of the K largest scores, ascending, to out [R]; of equal ones the lowest. All n if fewer.

    Goes through `runs` runs of 2^LOG: of all n, or with `groups` [listed, R] of those groups, which ascend.
    """
    UNROLL: tl.constexpr = 1 << LOG  # at least K
    # Rows come first: Triton lays a warp's threads along the first dimension where addresses tell it nothing.
    segment = tl.arange(0, SEGMENTS)[None, :]
    per_segment = (runs + SEGMENTS - 1) // SEGMENTS
    neg = tl.full([R, SEGMENTS], float("-inf"), tl.float32)
    top = (neg,) * UNROLL
    for i in range(per_segment):
        run = segment * per_segment + i
        xs = ()
        for o in tl.static_range(UNROLL // 8):
            n, x = _eight(scores, groups, listed, run, o, count, ROWS, R, LOG, GROUP, IS_MAXIMA, WIDE)
            for u in tl.static_range(8):
                xs = xs + (tl.where(n + u < count, x[u], neg),)
        top = _merge(top, xs, LOG, False)
    if SEGMENTS > 1:
        # each segment's list through scratch, then every row's largest of all lists
        at = segment * (UNROLL * R) + tl.arange(0, R)[:, None]
        tl.debug_barrier()
        for i in tl.static_range(UNROLL):
            tl.store(lists + at + i * R, top[i])
        tl.debug_barrier()
        merged = (tl.full([R, 1], float("-inf"), tl.float32),) * UNROLL
        for i in range(SEGMENTS):
            xs = ()
            for u in tl.static_range(UNROLL):
                xs = xs + (tl.load(lists + (i * UNROLL + u) * R + tl.arange(0, R)[:, None]),)
            merged = _merge(merged, xs, LOG, True)
    else:
        merged = top
    threshold = merged[K - 1]
    has_ties = True
    if K < UNROLL:
        has_ties = tl.max(((merged[K] == threshold) & (threshold > float("-inf"))).to(tl.int32)) > 0
    if has_ties:
        above = tl.zeros([R, SEGMENTS], tl.int32)
        equal = tl.zeros([R, SEGMENTS], tl.int32)
        for i in tl.static_range(K):
            above += (top[i] > threshold).to(tl.int32)
            equal += ((top[i] == threshold) & (top[i] > float("-inf"))).to(tl.int32)
        if SEGMENTS > 1:
            ties = K - tl.sum(above, 1)[:, None]
            equal_before = tl.minimum(tl.cumsum(equal, 1) - equal, ties)
            place = tl.cumsum(above, 1) - above + equal_before
            ties_left = ties - equal_before
        else:
            place = tl.zeros([R, SEGMENTS], tl.int32)
            ties_left = K - above
        for i in range(per_segment):
            run = segment * per_segment + i
            for o in tl.static_range(UNROLL // 8):
                n, x = _eight(scores, groups, listed, run, o, count, ROWS, R, LOG, GROUP, IS_MAXIMA, WIDE)
                for u in tl.static_range(8):
                    is_in = n + u < count
                    tie = is_in & (x[u] == threshold) & (ties_left > 0)
                    chosen = (is_in & (x[u] > threshold)) | tie
                    tl.store(out + place * stride_out, n + u + tl.zeros([R, SEGMENTS], tl.int32), mask=chosen)
                    place += chosen.to(tl.int32)
                    ties_left -= tie.to(tl.int32)
    else:
        # nobody's K-th largest is its next one too
        above = tl.zeros([R, SEGMENTS], tl.int32)
        for i in tl.static_range(K):
            above += ((top[i] >= threshold) & (top[i] > float("-inf"))).to(tl.int32)
        if SEGMENTS > 1:
            place = tl.cumsum(above, 1) - above
        else:
            place = tl.zeros([R, SEGMENTS], tl.int32)
        for i in range(per_segment):
            run = segment * per_segment + i
            for o in tl.static_range(UNROLL // 8):
                n, x = _eight(scores, groups, listed, run, o, count, ROWS, R, LOG, GROUP, IS_MAXIMA, WIDE)
                for u in tl.static_range(8):
                    chosen = (n + u < count) & (x[u] >= threshold)
                    tl.store(out + place * stride_out, n + u + tl.zeros([R, SEGMENTS], tl.int32), mask=chosen)
                    place += chosen.to(tl.int32)


@triton.jit(do_not_specialize=["first_tile", "N"])
def topk_kernel(
    scores,
    group_scores,
    tiles,
    lists,
    groups,
    block_ids,
    first_tile,
    N,
    stride_oh,
    stride_ot,
    stride_os,
    HKV: tl.constexpr,
    HP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TOPK: tl.constexpr,
    LOCAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    R: tl.constexpr,
    LOG: tl.constexpr,
    GROUP: tl.constexpr,
    IS_RANKED: tl.constexpr,
    WIDE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    ROWS: tl.constexpr = BLOCK_Q * HP
    K: tl.constexpr = TOPK - LOCAL  # places that scores decide
    UNROLL: tl.constexpr = 1 << LOG
    first = tl.load(tiles + (first_tile + tile) * 4 + 1)
    stop = tl.load(tiles + (first_tile + tile) * 4 + 2)
    position = tl.load(tiles + (first_tile + tile) * 4 + 3)
    r = tl.arange(0, R)
    row = tl.program_id(1) * R + r
    token = first + row // HP
    head = row % HP
    live = (token < stop) & (head < HKV)
    row_position = position + row // HP
    visible = tl.where(live & (row_position >= 0), row_position // BLOCK + 1, 0)
    candidates = tl.maximum(visible - LOCAL, 0)
    most = tl.max(candidates, 0)
    out = block_ids + head * stride_oh + token.to(tl.int64) * stride_ot
    picked = tl.minimum(candidates, K)
    if most > 0:
        if K > 0:
            program = tile * tl.num_programs(1) + tl.program_id(1)
            own = lists + program * SEGMENTS * UNROLL * R
            base = scores + tile * tl.cdiv(N, 8) * (8 * ROWS) + row[:, None] * 8
            to = out[:, None]
            count = candidates[:, None]
            if IS_RANKED:
                for i in range(K):
                    ranked = tl.load(lists + (tile * K + i) * ROWS + row)
                    tl.store(out + i * stride_os, ranked, mask=i < candidates)
            elif GROUP == 0:
                runs = (most + UNROLL - 1) // UNROLL
                _choose(base, None, 0, runs, count, own, to, stride_os, K, ROWS, SEGMENTS, R, LOG, GROUP, False, WIDE)
            else:
                # whole groups only: beyond them the maxima hold blocks that are forced or unseen
                num_whole = candidates // GROUP
                listed = groups + program * (K + 1) * R
                for i in tl.static_range(K + 1):
                    tl.store(listed + i * R + r, 1 << 24)
                tl.debug_barrier()
                maxima = group_scores + tile * tl.cdiv(N, GROUP) * ROWS + row[:, None]
                most_whole = most // GROUP
                runs = (most_whole + UNROLL - 1) // UNROLL
                to_listed = (listed + r)[:, None]
                whole = num_whole[:, None]
                _choose(maxima, None, 0, runs, whole, own, to_listed, R, K, ROWS, SEGMENTS, R, LOG, GROUP, True, WIDE)
                tl.debug_barrier()
                tl.store(listed + tl.minimum(num_whole, K) * R + r, num_whole)
                tl.debug_barrier()
                most_listed = tl.minimum(most_whole, K) + 1
                runs = (most_listed * GROUP + UNROLL - 1) // UNROLL
                _choose(
                    base, listed, most_listed, runs, count, own, to, stride_os,
                    K, ROWS, SEGMENTS, R, LOG, GROUP, False, WIDE,
                )  # fmt: skip
    s = tl.arange(0, triton.next_power_of_2(TOPK))
    forced = candidates[:, None] + s[None, :] - picked[:, None]
    ids = tl.where(forced < visible[:, None], forced, -1)
    tl.store(
        out[:, None] + s[None, :] * stride_os,
        ids,
        mask=live[:, None] & (s[None, :] >= picked[:, None]) & (s[None, :] < TOPK),
    )
