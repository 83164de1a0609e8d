"""What the launches of select_attend wait with, and how a warp chooses a row's blocks.

A word is UNWRITTEN, a NaN that no arithmetic yields, until it is final: whoever will write it sets it to that and makes
it visible before it lets the next kernel start.
"""

# Argument lists that Triton must see written out are longer than a line.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Of a program's threads, under its name in the Triton at hand."""

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
    # 16 bytes to a load.
    vector = 2 if len(bits) >= 7 else 0
    lanes = bits[vector : vector + 5]
    return gl.DistributedLinearLayout(
        reg_bases=bits[:vector] + bits[vector + 5 :],
        lane_bases=lanes + [[0]] * (5 - len(lanes)),
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
def await_words(words, is_in, PACK: gl.constexpr, OVERLAP: gl.constexpr):
    """The words once those that are in are written; LOWEST for the others. All of them must be readable."""
    x = read(words, PACK)
    if OVERLAP:
        looks = 0
        while greatest((is_in & (x == UNWRITTEN)).to(gl.int32)) != 0:
            x = read(words, PACK)
            looks = look_again(looks)
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
def force(key, is_in, n, first_local, num_blocks):
    """Keys with those of the local blocks above all others, and none equal."""
    return gl.where(is_in & (n >= first_local), NONE - num_blocks + n, key)


@gluon.jit
def choose(
    scores, comb_scores, comb_blocks, num_blocks, local_blocks, place,
    S: gl.constexpr, SP: gl.constexpr, CP: gl.constexpr, RP: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """[SP] block ids of one row of scores, best first. With RP > 0 through CP combs, as `select.choose_blocks` does."""
    first_local = num_blocks - local_blocks
    combs: gl.constexpr = CP
    # As `whole` lays them out.
    PACK: gl.constexpr = 4 if CP >= 128 else 1
    c = gl.arange(0, CP, layout=whole(CP, num_warps))
    is_in = c < num_blocks
    if RP == 0:
        key = await_words(scores + c, is_in, PACK, OVERLAP)
        chosen = take_best(force(key, is_in, c, first_local, num_blocks), c, S, place)
    else:
        best = await_words(comb_scores + c, is_in, PACK, OVERLAP)
        block = await_words(comb_blocks + c, is_in, PACK, OVERLAP)
        # A forced block stands for its comb, the last of them if it has several.
        last = c + (num_blocks - 1 - c) // combs * combs
        block = gl.where(is_in, gl.where(last >= first_local, last, block), NONE)
        top = take_best(force(best, is_in, block, first_local, num_blocks), block, S, place)
        grid: gl.constexpr = whole_2d(SP, RP, num_warps)
        comb = gl.convert_layout(gl.where(top < num_blocks, top % combs, -1), gl.SliceLayout(1, grid))[:, None]
        turn = gl.arange(0, RP, layout=gl.SliceLayout(0, grid))[None, :]
        n = comb + turn * combs
        is_in = (comb >= 0) & (n < num_blocks)
        # A comb's scores lie together.
        key = await_words(scores + (gl.maximum(comb, 0) * RP + turn), is_in, min(RP, 4), OVERLAP)
        n = gl.where(is_in, n, NONE)
        chosen = take_best(force(key, is_in, n, first_local, num_blocks), n, S, place)
    return gl.where((place < num_blocks) & (place < S), chosen, -1)
