"""Check and time the decode operators on a Hopper card: selection and attention for 1 to 8 query tokens a request.

    python benchmarks/ops/decode.py [--peers DIR] [--no-check | --check-only]

DIR holds vLLM's kernels as `m3ops.vllm_index_topk` and `m3ops.vllm_sparse_attn`; they are timed in the same run.
Ours is `select_attend` as `impl=None` takes it, and beside it "triton_decode" of both operators, one after the other.
Two figures for each shape, both of CUDA-graph replays. "in a row": steps over several sets of inputs that together are
far larger than the L2 cache, as the layers of a model follow each other, divided by their number. "single": one step
after the cache was filled by reading something else, launch of the graph included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msaserve import ops
from msaserve.ops.testing import Case, CaseSpec, build, m3_spec, relative_error, select

HEADS, KV_HEADS, DIM, BLOCK, TOPK = 64, 4, 128, 128, 16
SHAPES = [(1, 65536), (8, 65536), (32, 65536), (8, 131072), (1, 524288), (1, 1048576)]
QUERY_LENS = [1, 4, 8]
"""Query tokens a request of the table of speculative decoding."""
BANDWIDTH = 4.25e12
"""Bytes a second that a large read reaches on an H200."""

PLAIN = {"num_kv_heads": 2, "group": 4, "head_dim": 64, "index_dim": 64, "block_size": 64, "topk": 4}
SPECS = [
    m3_spec("m3_ragged", ((1, 9000), (1, 1), (0, 0), (1, 128), (1, 129), (1, 2047), (1, 2049))),
    m3_spec("m3_17_requests", tuple((1, 1 + 431 * i % 5000) for i in range(17)), layout="vllm"),
    m3_spec("m3_integers", ((1, 70000), (1, 1000), (1, 0)), index_values="integers", tail_rows=3),
    m3_spec("m3_ties", ((1, 140000), (1, 9999)), index_values="equal"),
    m3_spec("m3_special", ((4, 9000), (2, 300), (1, 5)), index_values="special"),
    m3_spec("m3_8_tokens", ((8, 5000), (8, 8), (3, 200)), layout="vllm", index_values="integers"),
    m3_spec("m3_local_2", ((5, 4000), (1, 3000)), local_blocks=2, index_values="integers"),
    CaseSpec(name="group_1_topk_64", requests=((2, 9000), (1, 70)), **{**PLAIN, "group": 1, "topk": 64}),
    CaseSpec(name="group_16_topk_1", requests=((3, 900), (1, 70)), **{**PLAIN, "group": 16, "topk": 1}),
    CaseSpec(name="group_8_block_64", requests=((1, 5000), (2, 64)), **{**PLAIN, "group": 8, "head_dim": 128}),
    CaseSpec(name="group_2_one_head", requests=((1, 5000), (1, 65)), **{**PLAIN, "num_kv_heads": 1, "group": 2}),
    CaseSpec(name="three_heads", requests=((1, 700), (6, 65)), **{**PLAIN, "num_kv_heads": 3, "group": 3}),
    CaseSpec(name="64_requests", requests=tuple((1, 97 * i % 3000) for i in range(64)), **PLAIN, layout="vllm"),
]


def check(spec: CaseSpec, dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """One line of a case's results; raises AssertionError if one is wrong."""
    case = build(spec, dtype=dtype, device="cuda", cache_dtype=cache_dtype)
    bound = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float8_e4m3fn: 2e-2}[cache_dtype]
    options = case.selection_options
    chosen = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **options, impl="triton_decode")
    expected = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **options, impl="reference")
    rows = differing(spec, chosen, expected)
    scales = scales_of(case)
    bounds = {"max_query_len": spec.max_query_len, **scales}
    attend = partial(ops.sparse_attend, case.q, case.k_cache, case.v_cache, **bounds)
    worst = 0.0
    for block_ids in (expected, *(select(case, kind) for kind in ("random", "holes", "out_of_range"))):
        out = attend(block_ids, *case.batch, impl="triton_decode", out=torch.full_like(case.q, float("nan")))
        reference = attend(block_ids, *case.batch, impl="reference")
        worst = max(worst, relative_error(out, reference))
        is_empty = (reference == 0).flatten(1).all(-1)
        assert (out[is_empty] == 0).all(), f"{spec.name}: rows that see nothing"
        tables = {"block_size": spec.block_size, "num_kv_heads": spec.num_kv_heads}
        for got, want in zip(
            ops.page_table(block_ids, *case.batch, **tables, impl="triton"),
            ops.page_table(block_ids, *case.batch, **tables, impl="reference"),
            strict=True,
        ):
            assert torch.equal(got, want), f"{spec.name}: page_table"
    assert worst < bound, f"{spec.name}: attention is off by {worst:.1e}"
    dense = partial(ops.dense_attend, case.q, case.k_cache, case.v_cache, *case.batch, **case.bounds, **scales)
    dense_error = relative_error(dense(impl="triton_decode"), dense(impl="reference"))
    assert dense_error < bound, f"{spec.name}: dense attention is off by {dense_error:.1e}"
    check_replay(case, attend)
    check_alone(case)
    if dtype == cache_dtype == torch.bfloat16:
        check_store(spec)
    both = check_both(case, expected, bound)
    precision = " and ".join(str(x).removeprefix("torch.") for x in (dtype, cache_dtype))
    return f"| {spec.name}, {precision} | {rows.sum()} of {rows.numel()} | {worst:.1e} | {dense_error:.1e} | {both} |"


def try_check(job: tuple[CaseSpec, torch.dtype, torch.dtype]) -> tuple[str, bool]:
    """`check`, and whether it passed."""
    try:
        return check(*job), True
    except Exception as error:  # the others shall run all the same
        return f"FAILED {job[0].name}, {job[1]} and {job[2]}: {type(error).__name__}: {error}", False


def scales_of(case: Case) -> dict[str, torch.Tensor]:
    """Of 8-bit caches: the keys' per head, the values' one for all."""
    if case.k_cache.element_size() > 1:
        return {}
    k_scale = torch.arange(case.spec.num_kv_heads, device="cuda") * 0.25 + 0.5
    return {"k_scale": k_scale, "v_scale": torch.tensor(1.5, device="cuda")}


def differing(spec: CaseSpec, chosen: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which rows chose other blocks."""
    rows = (chosen.sort(-1).values != expected.sort(-1).values).any(-1)
    # Normal scores may lie closer together than the rounding of their sums.
    assert rows.float().mean().item() <= (0.01 if spec.index_values == "normal" else 0.0), f"{spec.name}: selection"
    return rows


def check_both(case: Case, expected: torch.Tensor, bound: float) -> str:
    """select_attend's two columns: against the references, and three steps of a graph in the same memory as eager."""
    args = (case.q, case.k_cache, case.v_cache, case.index_q, case.index_k_cache, *case.batch)
    scales = scales_of(case)
    call = partial(ops.select_attend, *args, **case.selection_options, **scales, impl="gluon_decode")
    try:
        out, ids = call()
    except ValueError as reason:
        return f"{str(reason).partition('arguments: ')[2]} | |"
    rows = differing(case.spec, ids, expected)
    attend = partial(ops.sparse_attend, case.q, case.k_cache, case.v_cache, max_query_len=case.spec.max_query_len)
    error = relative_error(out, attend(ids, *case.batch, **scales, impl="reference"))
    assert error < bound, f"{case.spec.name}: select_attend is off by {error:.1e}"
    graph, steps = capture(lambda: [call() for _ in range(3)])
    for _ in range(5):
        for replayed, chosen in steps:
            replayed.fill_(float("nan"))
            chosen.fill_(-7)
        graph.replay()
        for replayed, chosen in steps:
            assert torch.equal(replayed, out), f"{case.spec.name}: select_attend replayed"
            assert torch.equal(chosen, ids), f"{case.spec.name}: select_attend replayed"
    return f"{rows.sum()} of {rows.numel()} | {error:.1e}"


def check_replay(case: Case, attend: Callable[..., torch.Tensor]) -> None:
    """A replayed graph gives the bits of an eager call."""

    def step() -> torch.Tensor:
        options = case.selection_options
        ids = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **options, impl="triton_decode")
        return attend(ids, *case.batch, impl="triton_decode")

    eager = step()
    graph, out = capture(step)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, eager), f"{case.spec.name}: replay"


def check_alone(case: Case) -> None:
    """A request alone chooses the blocks it chooses in the batch."""
    options = case.selection_options
    call = partial(ops.select_blocks, impl="triton_decode", **options)
    together = call(case.index_q, case.index_k_cache, *case.batch)
    starts = case.cu_query_lens.tolist()
    for request in range(min(3, len(starts) - 1)):
        first, end = starts[request], starts[request + 1]
        table, lens = case.block_table[request : request + 1], case.seq_lens[request : request + 1]
        cu_query_lens = torch.tensor([0, end - first], dtype=torch.int32, device="cuda")
        if end > first:
            alone = call(case.index_q[first:end], case.index_k_cache, table, lens, cu_query_lens)
            assert torch.equal(alone, together[:, first:end]), f"{case.spec.name}: request {request} alone"


def check_store(spec: CaseSpec) -> None:
    """store_kv and norm_rope_store leave what their references leave."""
    caches = []
    for impl in ("triton", "reference"):
        case = build(spec, dtype=torch.bfloat16, device="cuda", is_stored=False)
        index = {"index_k": case.index_k, "index_k_cache": case.index_k_cache}
        ops.store_kv(case.k, case.v, case.k_cache, case.v_cache, case.slots, **index, impl=impl)
        caches.append([case.k_cache.clone(), case.v_cache.clone(), case.index_k_cache.clone()])
        args, options = projection(case)
        queries = ops.norm_rope_store(*args, **options, impl=impl)
        caches[-1] += [case.k_cache, case.v_cache, case.index_k_cache, queries.q, queries.index_q]
    for i, (got, want) in enumerate(zip(*caches, strict=True)):
        if i < 3:
            assert torch.equal(got.nan_to_num(99), want.nan_to_num(99)), f"{spec.name}: store_kv"
        else:
            assert torch.equal(got.isnan(), want.isnan()), f"{spec.name}: norm_rope_store"
            assert relative_error(got.nan_to_num(0), want.nan_to_num(0)) < 1e-3, f"{spec.name}: norm_rope_store"


def projection(case: Case) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """norm_rope_store's arguments for a case's rows."""
    spec, num_rows = case.spec, case.q.shape[0]
    index_columns = (spec.num_kv_heads + 1) * spec.index_dim
    columns = (spec.group + 2) * spec.num_kv_heads * spec.head_dim + index_columns
    generator = torch.Generator("cuda").manual_seed(7)
    normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand((num_rows, min(spec.head_dim, spec.index_dim) // 4), generator=generator, device="cuda") * 6
    weights = {name: normal(spec.head_dim) for name in ("q_weight", "k_weight")}
    weights |= {name: normal(spec.index_dim) for name in ("index_q_weight", "index_k_weight")}
    options = {"eps": 1e-6, "num_index_heads": spec.num_kv_heads, "index_k_cache": case.index_k_cache, **weights}
    args = (normal(num_rows, columns), case.k_cache, case.v_cache, case.slots, angles.cos(), angles.sin())
    return args, options


class Step(NamedTuple):
    """One decode step's inputs; the cache is laid out as vLLM's, K and V of a head side by side."""

    q: torch.Tensor
    index_q: torch.Tensor
    kv: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    context: int
    query_len: int

    @classmethod
    def random(
        cls,
        requests: int,
        context: int,
        seed: int,
        query_len: int = 1,
        cache_dtype: torch.dtype = torch.bfloat16,
        max_pages: int = 1 << 30,
        shared: int = 0,
    ) -> Step:
        """Every block has a page of its own, unless they are more than max_pages; the requests' first `shared` blocks
        are the same."""
        generator = torch.Generator("cuda").manual_seed(seed)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        num_blocks = context // BLOCK
        num_pages = min(shared + requests * (num_blocks - shared), max_pages)
        pages = torch.randperm(shared + requests * (num_blocks - shared), generator=generator, device="cuda")
        pages = pages.int() % num_pages + 1
        common, own = pages[:shared].expand(requests, shared), pages[shared:].view(requests, -1)
        return cls(
            q=normal(requests * query_len, HEADS, DIM),
            index_q=normal(requests * query_len, KV_HEADS, DIM),
            kv=normal(num_pages + 1, KV_HEADS, BLOCK, 2 * DIM).to(cache_dtype),
            index_k=normal(num_pages + 1, BLOCK, DIM).to(cache_dtype),
            block_table=torch.cat([common, own], 1),
            seq_lens=torch.full((requests,), context, dtype=torch.int32, device="cuda"),
            cu_query_lens=torch.arange(requests + 1, dtype=torch.int32, device="cuda") * query_len,
            context=context,
            query_len=query_len,
        )

    @property
    def where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.block_table, self.seq_lens, self.cu_query_lens

    @property
    def caches(self) -> list[torch.Tensor]:
        return [self.kv[..., i * DIM : (i + 1) * DIM].transpose(1, 2) for i in (0, 1)]

    @property
    def selection(self) -> dict[str, int]:
        return {"topk": TOPK, "max_query_len": self.query_len, "max_seq_len": self.context}

    def select(self) -> torch.Tensor:
        return ops.select_blocks(self.index_q, self.index_k, *self.where, **self.selection)

    def attend(self, block_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return ops.sparse_attend(self.q, *self.caches, block_ids, *self.where, max_query_len=self.query_len, **options)

    def ours(self, **options: Any) -> torch.Tensor:
        args = (self.q, *self.caches, self.index_q, self.index_k, *self.where)
        return ops.select_attend(*args, **self.selection, **options)[0]

    def in_two(self) -> torch.Tensor:
        block_ids = ops.select_blocks(self.index_q, self.index_k, *self.where, **self.selection, impl="triton_decode")
        return self.attend(block_ids, impl="triton_decode")

    def dense(self, **options: Any) -> torch.Tensor:
        lens = {"max_query_len": self.query_len, "max_seq_len": self.context}
        return ops.dense_attend(self.q, *self.caches, *self.where, **lens, **options)

    def vllm(self) -> torch.Tensor:
        from m3ops import vllm_index_topk, vllm_sparse_attn

        where = (self.block_table, self.seq_lens)
        # Beside 8-bit keys its index queries have 8 bits too.
        index_q, query_len = self.index_q.to(self.index_k.dtype), self.query_len
        block_ids = vllm_index_topk.minimax_m3_index_decode(
            index_q, self.index_k, *where, self.context, TOPK, 0, 1, KV_HEADS, query_len, query_len
        )
        out = torch.empty_like(self.q)
        vllm_sparse_attn.minimax_m3_sparse_attn_decode(
            self.q, self.kv, block_ids, *where, KV_HEADS, DIM**-0.5, out, query_len
        )
        return out


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replay_us(graph: torch.cuda.CUDAGraph, before: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of a replay."""
    times = []
    for _ in range(repeats):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def in_a_row_us(calls: list[Callable[[], Any]]) -> float:
    graph, _results = capture(lambda: [call() for call in calls])
    return replay_us(graph, lambda: None, 11) / len(calls)


def single_us(call: Callable[[], Any], other: torch.Tensor) -> float:
    graph, _result = capture(call)
    return replay_us(graph, other.sum, 31)


def measure(
    requests: int,
    context: int,
    peers: bool,
    other: torch.Tensor,
    query_len: int = 1,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> str:
    """One row of the table."""
    index_bytes = requests * context * DIM * cache_dtype.itemsize
    rows = requests * query_len
    floor = (index_bytes + rows * KV_HEADS * TOPK * BLOCK * 2 * DIM * cache_dtype.itemsize) / BANDWIDTH * 1e6
    sets = max(2, min(8, round(400e6 / index_bytes)))
    steps = [Step.random(requests, context, seed, query_len, cache_dtype) for seed in range(sets)]
    bound = 4e-3 if cache_dtype == torch.bfloat16 else 2e-2
    want = steps[0].attend(steps[0].select(), impl="reference")
    assert relative_error(steps[0].ours(), want) < bound
    assert relative_error(steps[0].in_two(), want) < bound
    cells = [f"{requests}, {context // 1024}K" + (f", {query_len}" if query_len > 1 else ""), f"{floor:.1f}"]
    times: dict[str, tuple[float, float]] = {}
    for name in ("vllm", "ours", "in_two") if peers else ("ours", "in_two"):
        calls = [getattr(step, name) for step in steps]
        if name == "vllm" and cache_dtype != torch.bfloat16:
            calls = [partial(step._replace(index_q=step.index_q.to(cache_dtype)).vllm) for step in steps]
        times[name] = in_a_row_us(calls), single_us(calls[0], other)
    # It takes other blocks where its index queries are rounded to 8 bits.
    if peers and cache_dtype == torch.bfloat16:
        assert relative_error(steps[0].vllm(), want) < 5e-3
    for i in range(2):
        cells += [f"{time[i]:.1f}" for name, time in times.items() if name != "in_two"]
        if peers:
            cells.append(f"{times['ours'][i] / times['vllm'][i]:.2f}")
    cells += [f"{times['in_two'][i]:.1f}" for i in range(2)]
    return "| " + " | ".join(cells) + " |"


def compile_step(requests: int, context: int, query_len: int, cache_dtype: torch.dtype, peers: bool) -> None:
    """Compile what a row of a table runs, into Triton's cache."""
    step = Step.random(requests, context, 0, query_len, cache_dtype, max_pages=64)
    step.ours()
    step.in_two()
    if peers:
        step.vllm()
    torch.cuda.synchronize()


def measure_dense(context: int, other: torch.Tensor) -> str:
    """One row: dense attention over a whole context against ours over what it selects."""
    step = Step.random(1, context, 0)
    want = step.dense(impl="reference")
    assert relative_error(step.dense(impl="triton_decode"), want) < 4e-3
    floor = 2 * context * KV_HEADS * DIM * 2 / BANDWIDTH * 1e6
    dense = single_us(partial(step.dense, impl="triton_decode"), other)
    keys, values = (cache[1:].flatten(0, 1).transpose(0, 1).contiguous()[None] for cache in step.caches)
    # The group's heads take the place of query tokens: one KV head serves them all.
    queries = step.q.view(1, KV_HEADS, HEADS // KV_HEADS, DIM)
    flash = single_us(partial(scaled_dot_product_attention, queries, keys, values), other)
    ours = single_us(step.ours, other)
    ratio = min(dense, flash) / ours
    return f"| 1, {context // 1024}K | {floor:.0f} | {dense:.0f} | {flash:.0f} | {ours:.1f} | {ratio:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels")
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    import triton

    if not options.no_check:
        columns = ["case", "rows chosen otherwise", "worst error of attention", "of dense attention"]
        columns += ["select_attend: rows chosen otherwise", "error"]
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        half, wide = torch.float16, torch.bfloat16
        pairs = ((wide, wide), (wide, torch.float8_e4m3fn), (half, half), (half, torch.float8_e4m3fn))
        jobs = [(spec, *pair) for pair in pairs for spec in SPECS]
        # Compiling is most of it.
        with multiprocessing.get_context("spawn").Pool(min(len(SPECS), os.cpu_count() or 1)) as pool:
            failed = 0
            for line, is_right in pool.imap_unordered(try_check, jobs):
                print(line, flush=True)
                failed += not is_right
        if failed:
            sys.exit(f"{failed} of {len(jobs)} failed")
    if options.check_only:
        return
    if options.peers:
        sys.path.insert(0, str(options.peers.resolve()))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    peers = options.peers is not None
    names = ("vLLM", "ours", "ratio") if peers else ("ours",)
    columns = ["batch, context", "floor", *(f"{name}, {how}" for how in ("in a row", "single") for name in names)]
    columns += [f"triton_decode, {how}" for how in ("in a row", "single")]
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    other = torch.randn(1 << 27, device="cuda")
    dtypes = (torch.bfloat16, torch.float8_e4m3fn)
    rows = [(*shape, 1, dtype, peers) for dtype in dtypes for shape in SHAPES]
    rows += [(requests, 65536, n, torch.bfloat16, peers) for requests in (1, 8) for n in QUERY_LENS if n > 1]
    with multiprocessing.get_context("spawn").Pool(min(len(rows), os.cpu_count() or 1)) as pool:
        pool.starmap(compile_step, rows, chunksize=1)
    for cache_dtype in dtypes:
        print(f"\n{cache_dtype}, µs a step\n{head}")
        for requests, context in SHAPES:
            print(measure(requests, context, peers, other, cache_dtype=cache_dtype), flush=True)
            torch.cuda.empty_cache()
    print(f"\nspeculative: batch, context, query tokens a request\n{head}")
    for requests in (1, 8):
        for query_len in QUERY_LENS:
            print(measure(requests, 65536, peers, other, query_len), flush=True)
            torch.cuda.empty_cache()
    print("\n| batch, context | floor of dense | dense_attend | PyTorch's attention | select_attend | ratio |")
    print("|---|---|---|---|---|---|")
    for context in (65536, 524288, 1048576):
        print(measure_dense(context, other), flush=True)
        torch.cuda.empty_cache()
    tiny = torch.zeros(16, device="cuda")
    print(f"\nA graph of one tiny kernel takes {single_us(lambda: tiny.add_(1), other):.1f} µs when single.")
    for rows in (1, 8, 32):
        case = build(m3_spec("rows", ((1, 4096),) * rows), dtype=torch.bfloat16, device="cuda")
        args, weights = projection(case)
        time = in_a_row_us([partial(ops.norm_rope_store, *args, **weights)] * 20)
        print(f"norm_rope_store of {rows} tokens: {time:.1f} µs in a row")


if __name__ == "__main__":
    main()
