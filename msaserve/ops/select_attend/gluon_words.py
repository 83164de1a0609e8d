"""What select_attend's merge waits with, and how a warp chooses a row's blocks.

A word is UNWRITTEN, a NaN that no arithmetic yields, until it is final: whoever will write it sets it to that and makes
it visible before it lets the next kernel start.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Of a program's threads, under its name in the Triton at hand."""

_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
"""(shared memory, dtype, shape, layout): the same bytes, under its name in the Triton at hand."""

UNWRITTEN = gl.constexpr(-1)
"""Bits of a word that is still to be written: as a float32 a NaN other than the one that arithmetic yields."""

NONE = gl.constexpr(0x7FFFFFFF)
LOWEST = gl.constexpr(-0x80000000)

PATIENCE = gl.constexpr(1 << 21)
"""Looks at words that never come before a program gives up, seconds all together: an error, not a hang."""


@gluon.constexpr_function
def bits_of(size: int) -> int:
    return size.bit_length() - 1


@gluon.constexpr_function
def whole(size, num_warps):
    """Layout of [size] that every warp holds whole, so that reductions need no barrier."""
    bits = [[1 << i] for i in range(bits_of(size))]
    return gl.DistributedLinearLayout(
        reg_bases=bits[5:],
        lane_bases=bits[:5] + [[0]] * (5 - len(bits[:5])),
        warp_bases=[[0]] * bits_of(num_warps),
        block_bases=[],
        shape=[size],
    )


@gluon.constexpr_function
def whole_2d(rows, columns, num_warps):
    """Layout of [rows, columns] that every warp holds whole: columns in registers, rows in lanes while there are any."""
    bits = [[1 << i, 0] for i in range(bits_of(rows))]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << i] for i in range(bits_of(columns))] + bits[5:],
        lane_bases=bits[:5] + [[0, 0]] * (5 - len(bits[:5])),
        warp_bases=[[0, 0]] * bits_of(num_warps),
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def wait_for_launch_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_descriptor(NAME: gl.constexpr):
    """Bring a kernel's parameter, a TMA descriptor, into the descriptor cache."""
    PTX: gl.constexpr = "prefetch.param.tensormap [" + NAME + "]; // $0"
    gl.inline_asm_elementwise(PTX, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def make_visible():
    """What this program has stored is where every other program would see it."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    thread_barrier()


@gluon.jit
def let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def order_key(score):
    """int32 that sorts like the score, which is no NaN; neither LOWEST nor UNWRITTEN, and below 0x7F800001."""
    bits = gl.where(score == 0.0, 0.0, score).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def greatest(x):
    # The columns of `whole_2d` lie in registers, so they go first.
    for _ in gl.static_range(len(x.shape)):
        x = gl.max(x, len(x.shape) - 1)
    return x


@gluon.jit
def least(x):
    if len(x.shape) == 1 and x.shape[0] >= 256:
        # A thread's values in several chains of comparisons, not in one.
        x = gl.min(gl.reshape(x, [x.shape[0] // 128, 128]), 0)
    elif len(x.shape) == 2 and x.shape[1] >= 8:
        x = gl.min(gl.reshape(x, [x.shape[0], 4, x.shape[1] // 4]), 2)
    for _ in gl.static_range(len(x.shape)):
        x = gl.min(x, len(x.shape) - 1)
    return x


@gluon.jit
def read(words, PACK: gl.constexpr):
    """The words as they are now: a plain load could be taken out of the loop that waits. PACK of them lie together."""
    if PACK == 4:
        x = gl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l,l,l,l", [words.to(gl.int64)],
            dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    elif PACK == 2:
        x = gl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l,l", [words.to(gl.int64)],
            dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [words.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
        )
    return x


@gluon.jit
def look_again(looks):
    if looks == PATIENCE:
        gl.inline_asm_elementwise("trap; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return looks + 1


@gluon.jit
def written(words, is_in, PACK: gl.constexpr):
    """The words that are in, written before the launch that this one has waited for; LOWEST for the others. All of them
    must be readable."""
    # An old line of the first cache may still hold what was at their address: neither reads that.
    if PACK == 1:
        x = gl.load(words, cache_modifier=".cg")
    else:
        x = read(words, PACK)
    return gl.where(is_in, x, LOWEST)


@gluon.jit
def count_of(is_one):
    x = is_one.to(gl.int32)
    for _ in gl.static_range(len(x.shape)):
        x = gl.sum(x, len(x.shape) - 1)
    return x


@gluon.jit
def take_best(key, n, S, place):
    """The n of the S largest keys, largest first, of equal keys the lower n first, at places 0 … S − 1."""
    rest = key
    rounds = 0
    chosen = gl.full_like(place, NONE)
    UNROLL: gl.constexpr = 2 - S % 2
    for step in range(S // UNROLL):
        for half in gl.static_range(UNROLL):
            i = step * UNROLL + half
            # Whatever equals the largest goes, so that the next round need not wait for the number of this one's.
            top = greatest(rest)
            rounds += (top != LOWEST).to(gl.int32)
            is_top = rest == top
            chosen = gl.where(place == i, least(gl.where(is_top, n, NONE)), chosen)
            rest = gl.where(is_top, LOWEST, rest)
    total = count_of(key != LOWEST)
    wanted = gl.minimum(total, S)
    if (rounds != wanted) | (total - count_of(rest != LOWEST) != wanted):
        # Some were equal: again, one number at a time.
        rest = key
        for i in range(S):
            first = least(gl.where(rest == greatest(rest), n, NONE))
            chosen = gl.where(place == i, first, chosen)
            rest = gl.where(n == first, LOWEST, rest)
    return chosen


@gluon.jit
def from_lane(x, lane):
    """x of another lane of the warp; elements must lie one to a lane or have the same lane in every register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def ones(x):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def rank_in_warp(x, room, num_warps: gl.constexpr):
    """How many lanes hold more, of x [32], the same in every warp. Through shared memory, as ptxas may have each of 32
    shuffles wait for the one before."""
    grid: gl.constexpr = whole_2d(32, 32, num_warps)
    room.store(x)
    others = room.load(gl.SliceLayout(0, grid))
    mine = gl.convert_layout(x, gl.SliceLayout(1, grid))
    more = gl.sum((others[None, :] > mine[:, None]).to(gl.int32), 1)
    return gl.convert_layout(more, x.type.layout)


@gluon.jit
def find_best(key, S: gl.constexpr, num_warps: gl.constexpr):
    """The S largest of key [A, 32, B], whose middle is the lanes of a warp, in a few steps instead of S rounds.

    Returns for each lane, [32]: (lane, register a * B + b, rank) of one key, which is among the best if its rank is
    under S, and whether that can be relied on: not if keys are equal or if a lane holds too many of the best.

    At least S keys are as large as the S-th largest of the lanes' maxima. Those that are, some 21 of 512 if they are
    spread, are dealt out to the lanes, one each, and ranked.
    """
    A: gl.constexpr = key.shape[0]
    B: gl.constexpr = key.shape[2]
    MOST: gl.constexpr = min(A * B, 8)
    grid: gl.constexpr = key.type.layout
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, grid)))
    register = (
        gl.arange(0, A, layout=gl.SliceLayout(1, gl.SliceLayout(2, grid)))[:, None] * B
        + gl.zeros([A, 32], gl.int32, layout=gl.SliceLayout(2, grid))
    )[:, :, None] + gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(1, grid)))[None, :][:, None, :]
    room = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    highest = gl.max(gl.max(key, 2), 0)
    # With equal maxima the bound may be a lower one, which is right too.
    bound = gl.max(gl.where(rank_in_warp(highest, room, num_warps) >= S - 1, highest, LOWEST), 0)
    mask = gl.sum(gl.sum(gl.where((key >= bound) & (key != LOWEST), 1 << register, 0), 2), 0)
    count = ones(mask)
    end = count
    for bit in gl.static_range(5):
        before = from_lane(end, gl.maximum(lane - (1 << bit), 0))
        end += gl.where(lane >= (1 << bit), before, 0)
    total = gl.max(end, 0)
    # Candidate `lane` belongs to the lane whose end is the first beyond it.
    source = gl.zeros_like(lane)
    for bit in gl.static_range(5):
        source += gl.where(from_lane(end, source + ((16 >> bit) - 1)) <= lane, 16 >> bit, 0)
    rest = lane - from_lane(end - count, source)
    mask = from_lane(mask, source)
    for _ in gl.static_range(MOST - 1):
        mask = gl.where(rest > 0, mask & (mask - 1), mask)
        rest -= 1
    at = ones((mask & -mask) - 1)
    spread = gl.zeros_like(key) + gl.expand_dims(gl.expand_dims(source, 0), 2)
    candidate = gl.where(register == gl.expand_dims(gl.expand_dims(at, 0), 2), from_lane(key, spread), LOWEST)
    is_one = lane < total
    candidate = gl.where(is_one, gl.max(gl.max(candidate, 2), 0), LOWEST)
    rank = rank_in_warp(candidate, room, num_warps)
    # Ranks of keys of which some are equal add up to less.
    sums = gl.sum(gl.where(is_one, rank, 0), 0)
    is_sure = (total <= 32) & (gl.max(count, 0) <= MOST) & (2 * sums == total * (total - 1))
    return source, at, gl.where(is_one, rank, NONE), is_sure


@gluon.jit
def force(key, is_in, n, first_local, num_blocks):
    """Keys with those of the local blocks above all others, and none equal."""
    return gl.where(is_in & (n >= first_local), NONE - num_blocks + n, key)


@gluon.jit
def zero():
    """0, of which the compiler does not know it: what is worked out from it again need not be kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def best_combs(comb_scores, comb_blocks, c, num_blocks, first_local, S, combs, place):
    """The S best combs, of equal ones those whose best block is the lower, best first; −1 after the last."""
    is_in = c < num_blocks
    # A forced block stands for its comb, the last of them if it has several.
    last = c + (num_blocks - 1 - c) // combs * combs
    block = written(comb_blocks + c, is_in, 1)
    block = gl.where(is_in, gl.where(last >= first_local, last, block), NONE)
    key = force(written(comb_scores + c, is_in, 1), is_in, block, first_local, num_blocks)
    top = take_best(key, block, S, place)
    return gl.where(top < num_blocks, top % combs, -1)


@gluon.jit
def choose(
    scores, comb_scores, comb_blocks, table, numbers, pages, num_blocks, local_blocks, place,
    S: gl.constexpr, SP: gl.constexpr, CP: gl.constexpr, RP: gl.constexpr, FAST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The S best blocks of one row of scores: ([SP] block ids, −1 after the last, [SP] their places, each once).

    With RP > 0 through CP combs, as `select.choose_blocks` does. Returned too are numbers of blocks, those that may be
    chosen among them, and their pages: those given, or if RP > 0 such that are looked up here.
    """
    first_local = num_blocks - local_blocks
    combs: gl.constexpr = CP
    line: gl.constexpr = whole(SP, num_warps)
    # Neighbours, of which many are often good at once, belong to several lanes.
    c = gl.arange(0, CP, layout=whole(CP, num_warps))
    is_in = c < num_blocks
    # What the quick choice does not need is read once more where it does not hold: kept, it would leave too few
    # registers.
    if RP == 0:
        key = force(written(scores + c, is_in, 1), is_in, c, first_local, num_blocks)
        if FAST:
            lane, at, rank, is_sure = find_best(gl.reshape(key, [CP // 32, 32, 1]), S, num_warps)
            chosen = gl.convert_layout(at * 32 + lane, line)
            rank = gl.convert_layout(rank, line)
            if not is_sure:
                key = force(written(scores + c, is_in, 1), is_in, c, first_local, num_blocks)
                chosen = take_best(key, c, S, place)
                rank = place
        else:
            chosen = take_best(key, c, S, place)
            rank = place
    else:
        grid: gl.constexpr = whole_2d(SP, RP, num_warps)
        if FAST:
            # A forced block stands for its comb, the last of them if it has several.
            last = c + (num_blocks - 1 - c) // combs * combs
            key = force(written(comb_scores + c, is_in, 1), is_in, last, first_local, num_blocks)
            lane, at, rank, is_sure = find_best(gl.reshape(key, [CP // 32, 32, 1]), S, num_warps)
            comb = gl.convert_layout(gl.where(rank < S, at * 32 + lane, -1), line)
            if not is_sure:
                comb = best_combs(comb_scores, comb_blocks, c + zero(), num_blocks, first_local, S, combs, place)
        else:
            comb = best_combs(comb_scores, comb_blocks, c, num_blocks, first_local, S, combs, place)
        row = gl.convert_layout(comb, gl.SliceLayout(1, grid))[:, None]
        turn = gl.arange(0, RP, layout=gl.SliceLayout(0, grid))[None, :]
        n = row + turn * combs
        is_in = (row >= 0) & (n < num_blocks)
        pages = gl.load(table + n, mask=is_in, other=0)
        # A comb's scores lie together.
        words = scores + (gl.maximum(row, 0) * RP + turn)
        key = written(words, is_in, min(RP, 4))
        n = gl.where(is_in, n, NONE)
        numbers = n
        key = force(key, is_in, n, first_local, num_blocks)
        if FAST:
            lane, at, rank, is_sure = find_best(gl.reshape(key, [1, 32, RP]), S, num_warps)
            lane = gl.convert_layout(lane, line)
            chosen = from_lane(comb, lane) + gl.convert_layout(at, line) * combs
            rank = gl.convert_layout(rank, line)
            if not is_sure:
                turn += zero()
                n = row + turn * combs
                is_in = (row >= 0) & (n < num_blocks)
                n = gl.where(is_in, n, NONE)
                words = scores + (gl.maximum(row, 0) * RP + turn)
                key = force(written(words, is_in, min(RP, 4)), is_in, n, first_local, num_blocks)
                chosen = take_best(key, n, S, place)
                rank = place
        else:
            chosen = take_best(key, n, S, place)
            rank = place
    return gl.where((rank < num_blocks) & (rank < S), chosen, -1), rank, numbers, pages
