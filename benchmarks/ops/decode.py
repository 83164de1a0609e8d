"""Check and time the decode operators on a Hopper card: select_blocks and sparse_attend for 1 to 8 query tokens.

    python benchmarks/ops/decode.py [--peers DIR] [--no-check | --check-only]

DIR holds vLLM's kernels as `m3ops.vllm_index_topk` and `m3ops.vllm_sparse_attn`; they are timed in the same run.
Two figures for each shape, both of CUDA-graph replays. "in a row": steps over several sets of inputs that together
are far larger than the L2 cache, as the layers of a model follow each other, divided by their number. "single": one
step after the cache was filled by reading something else, launch of the graph included.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msaserve import ops
from msaserve.ops.testing import Case, CaseSpec, build, m3_spec, relative_error, select

HEADS, KV_HEADS, DIM, BLOCK, TOPK = 64, 4, 128, 128, 16
SHAPES = [(1, 65536), (8, 65536), (32, 65536), (8, 131072), (1, 524288), (1, 1048576)]
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


def check(spec: CaseSpec) -> str:
    """One line of a case's results; raises AssertionError if one is wrong."""
    case = build(spec, dtype=torch.bfloat16, device="cuda")
    options = case.selection_options
    chosen = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **options, impl="triton_decode")
    expected = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **options, impl="reference")
    rows = (chosen.sort(-1).values != expected.sort(-1).values).any(-1)
    # Normal scores may lie closer together than the rounding of their sums.
    assert rows.float().mean().item() <= (0.01 if spec.index_values == "normal" else 0.0), f"{spec.name}: selection"
    attend = partial(ops.sparse_attend, case.q, case.k_cache, case.v_cache, max_query_len=spec.max_query_len)
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
    assert worst < 4e-3, f"{spec.name}: attention is off by {worst:.1e}"
    check_replay(case, attend)
    check_alone(case)
    check_store(spec)
    return f"| {spec.name} | {int(rows.sum())} of {rows.numel()} | {worst:.1e} |"


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

    @classmethod
    def random(cls, requests: int, context: int, seed: int) -> Step:
        generator = torch.Generator("cuda").manual_seed(seed)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        num_blocks = context // BLOCK
        pages = torch.randperm(requests * num_blocks, generator=generator, device="cuda") + 1
        return cls(
            q=normal(requests, HEADS, DIM),
            index_q=normal(requests, KV_HEADS, DIM),
            kv=normal(requests * num_blocks + 1, KV_HEADS, BLOCK, 2 * DIM),
            index_k=normal(requests * num_blocks + 1, BLOCK, DIM),
            block_table=pages.int().view(requests, num_blocks),
            seq_lens=torch.full((requests,), context, dtype=torch.int32, device="cuda"),
            cu_query_lens=torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            context=context,
        )

    def select(self) -> torch.Tensor:
        where = (self.block_table, self.seq_lens, self.cu_query_lens)
        return ops.select_blocks(
            self.index_q, self.index_k, *where, topk=TOPK, max_query_len=1, max_seq_len=self.context
        )

    def attend(self, block_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        k_cache, v_cache = (self.kv[..., i * DIM : (i + 1) * DIM].transpose(1, 2) for i in (0, 1))
        where = (self.block_table, self.seq_lens, self.cu_query_lens)
        return ops.sparse_attend(self.q, k_cache, v_cache, block_ids, *where, max_query_len=1, **options)

    def ours(self) -> torch.Tensor:
        return self.attend(self.select())

    def vllm(self) -> torch.Tensor:
        from m3ops import vllm_index_topk, vllm_sparse_attn

        where = (self.block_table, self.seq_lens)
        block_ids = vllm_index_topk.minimax_m3_index_decode(
            self.index_q, self.index_k, *where, self.context, TOPK, 0, 1, KV_HEADS, 1, 1
        )
        out = torch.empty_like(self.q)
        vllm_sparse_attn.minimax_m3_sparse_attn_decode(self.q, self.kv, block_ids, *where, KV_HEADS, DIM**-0.5, out, 1)
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


def measure(requests: int, context: int, peers: bool, other: torch.Tensor) -> str:
    """One row of the table."""
    index_bytes = requests * context * DIM * 2
    floor = (index_bytes + requests * KV_HEADS * TOPK * BLOCK * 2 * DIM * 2) / BANDWIDTH * 1e6
    sets = max(2, min(8, round(400e6 / index_bytes)))
    steps = [Step.random(requests, context, seed) for seed in range(sets)]
    ids = [step.select() for step in steps]
    want = steps[0].attend(ids[0], impl="reference")
    assert relative_error(steps[0].ours(), want) < 4e-3
    cells = [f"{requests}, {context // 1024}K", f"{floor:.1f}"]
    times: dict[str, tuple[float, float]] = {}
    for name in ("vllm", "ours") if peers else ("ours",):
        calls = [getattr(step, name) for step in steps]
        times[name] = in_a_row_us(calls), single_us(calls[0], other)
    if peers:
        assert relative_error(steps[0].vllm(), want) < 5e-3
    for i in range(2):
        cells += [f"{time[i]:.1f}" for time in times.values()]
        if peers:
            cells.append(f"{times['ours'][i] / times['vllm'][i]:.2f}")
    cells.append(f"{in_a_row_us([step.select for step in steps]):.1f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels")
    parser.add_argument("--no-check", action="store_true", help="time only")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    import triton

    if not options.no_check:
        print("| case | rows chosen otherwise | worst error of attention |\n|---|---|---|")
        # Compiling is most of it.
        with multiprocessing.get_context("spawn").Pool(min(len(SPECS), os.cpu_count() or 1)) as pool:
            for line in pool.imap(check, SPECS):
                print(line, flush=True)
    if options.check_only:
        return
    if options.peers:
        sys.path.insert(0, str(options.peers.resolve()))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    peers = options.peers is not None
    names = ("vLLM", "ours", "ratio") if peers else ("ours",)
    columns = ["batch, context", "floor", *(f"{name}, {how}" for how in ("in a row", "single") for name in names)]
    columns.append("our select_blocks, in a row")
    print("µs a step\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    other = torch.randn(1 << 27, device="cuda")
    for requests, context in SHAPES:
        print(measure(requests, context, peers, other), flush=True)
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
