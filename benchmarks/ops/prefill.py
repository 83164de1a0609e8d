"""Prefill on a card: checks the operators, times them against vLLM's kernels in the same run, prints the tables.

    python benchmarks/ops/prefill.py [--peers DIR] [--out FILE] [--seconds N]

DIR holds vLLM's Triton kernels for MiniMax-M3 as `m3ops/vllm_index_topk.py` and `m3ops/vllm_sparse_attn.py`, with
stubs of what they import; without it only ours are timed. M3's geometry: 64 query heads, 4 KV heads, dim 128, blocks
of 128, 16 of them. Milliseconds, medians, L2 cleared between repeats. After N seconds what is left is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msaserve import ops
from msaserve.ops.testing import relative_error

HEADS, KV_HEADS, DIM, BLOCK, TOPK, QUERIES = 64, 4, 128, 128, 16, 8192
OVERLAPS = (0.0, 0.5, 0.9, 0.98)


class Chunk(NamedTuple):
    """A chunk of one request's queries after `cached` tokens, and its caches as views of vLLM's allocation."""

    cached: int
    q: torch.Tensor
    index_q: torch.Tensor
    kv: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cached_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    scales: dict[str, torch.Tensor]

    @property
    def k(self) -> torch.Tensor:
        return self.kv[..., :DIM].transpose(1, 2)

    @property
    def v(self) -> torch.Tensor:
        return self.kv[..., DIM:].transpose(1, 2)

    @property
    def seq_len(self) -> int:
        return self.cached + self.q.shape[0]


def make_chunk(cached: int, queries: int = QUERIES) -> Chunk:
    pages = -(-(cached + queries) // BLOCK)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    lens: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    return Chunk(
        cached,
        torch.randn(queries, HEADS, DIM, **options),
        torch.randn(queries, KV_HEADS, DIM, **options),
        torch.randn(pages, KV_HEADS, BLOCK, 2 * DIM, **options),
        torch.randn(pages, BLOCK, DIM, **options),
        torch.randperm(pages, device="cuda").int().view(1, pages),
        torch.tensor([cached + queries], **lens),
        torch.tensor([cached], **lens),
        torch.tensor([0, queries], **lens),
        {},
    )


def with_8_bit_kv(chunk: Chunk) -> Chunk:
    """K and V of 8 bits, whose scales are one of each kind."""
    k_scale, v_scale = torch.tensor(0.8, device="cuda"), torch.linspace(0.5, 2.0, KV_HEADS, device="cuda")
    return chunk._replace(kv=chunk.kv.to(torch.float8_e4m3fn), scales={"k_scale": k_scale, "v_scale": v_scale})


def with_8_bits(chunk: Chunk) -> Chunk:
    """Caches and index queries of 8 bits."""
    narrow = {name: getattr(chunk, name).to(torch.float8_e4m3fn) for name in ("index_q", "index_k")}
    return with_8_bit_kv(chunk)._replace(**narrow)


def with_8_bit_index_keys(chunk: Chunk) -> Chunk:
    """The index cache of 8 bits alone, beside wider queries."""
    return chunk._replace(index_k=chunk.index_k.to(torch.float8_e4m3fn))


def overlapping(chunk: Chunk, overlap: float) -> torch.Tensor:
    """block_ids of which `overlap` is common to runs of 64 queries: the own block, one of each 15th of the others."""
    queries = chunk.q.shape[0]
    own = (chunk.cached + torch.arange(queries, device="cuda")) // BLOCK
    strata = TOPK - 1
    shared = torch.rand(KV_HEADS, -(-queries // 64), strata, device="cuda").repeat_interleave(64, 1)[:, :queries]
    alone = torch.rand(KV_HEADS, queries, strata, device="cuda")
    part = torch.where(torch.rand(KV_HEADS, queries, strata, device="cuda") < overlap, shared, alone)
    edges = own[None, :, None] * torch.arange(strata + 1, device="cuda") // strata
    ids = edges[..., :-1] + (part * edges.diff(dim=-1)).long()
    ids = torch.where(edges.diff(dim=-1) > 0, ids, -1)
    return torch.cat([own[None, :, None].expand(KV_HEADS, -1, -1), ids], -1).int().contiguous()


def select(chunk: Chunk, impl: str | None = None) -> torch.Tensor:
    return ops.select_blocks(
        chunk.index_q,
        chunk.index_k,
        chunk.block_table,
        chunk.seq_lens,
        chunk.cu_query_lens,
        topk=TOPK,
        max_query_len=chunk.q.shape[0],
        max_seq_len=chunk.seq_len,
        impl=impl,
    )


def attend(chunk: Chunk, ids: torch.Tensor, impl: str | None = None) -> torch.Tensor:
    return ops.sparse_attend(
        chunk.q,
        chunk.k,
        chunk.v,
        ids,
        chunk.block_table,
        chunk.seq_lens,
        chunk.cu_query_lens,
        max_query_len=chunk.q.shape[0],
        impl=impl,
        **chunk.scales,
    )


def replay(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a CUDA graph: what it takes without the host's part in it."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def attend_with(chunk: Chunk, ids: torch.Tensor, **tuning: Any) -> torch.Tensor:
    kernel = import_module("msaserve.ops.sparse_attend.gluon_kv_major")
    args = (chunk.q, chunk.k, chunk.v, ids, chunk.block_table, chunk.seq_lens, chunk.cu_query_lens)
    tuning = {"scale": DIM**-0.5, "max_query_len": chunk.q.shape[0], **chunk.scales, **tuning}
    out: torch.Tensor = kernel.sparse_attend(*args, **tuning)
    return out


def check() -> None:
    """Ours against the float32 reference, with NaN in the unused slots; raises on a wrong result."""
    for cached, queries, overlap in ((1000, 600, 0.5), (0, 777, 0.9), (8192, 512, 0.9), (4096, 512, 0.0)):
        chunk = make_chunk(cached, queries)
        used = chunk.seq_len % BLOCK
        if used:
            page = chunk.block_table[0, -1].long()
            chunk.kv[page, :, used:] = float("nan")
            chunk.index_k[page, used:] = float("nan")
        chosen = select(chunk).sort(-1).values
        expected = select(chunk._replace(index_q=chunk.index_q.float(), index_k=chunk.index_k.float()), "reference")
        agree = (chosen == expected.sort(-1).values).all(-1).float().mean().item()
        assert agree > 0.99, agree  # bfloat16 products in another order may swap near-equal scores
        narrow = with_8_bits(chunk)
        expected = select(narrow._replace(index_q=narrow.index_q.float(), index_k=narrow.index_k.float()), "reference")
        narrow_agree = (select(narrow).sort(-1).values == expected.sort(-1).values).all(-1).float().mean().item()
        assert narrow_agree > 0.97, narrow_agree  # 8-bit products are summed to 13 bits or so
        mixed = with_8_bit_index_keys(chunk)
        expected = select(mixed._replace(index_q=mixed.index_q.float(), index_k=mixed.index_k.float()), "reference")
        mixed_agree = (select(mixed).sort(-1).values == expected.sort(-1).values).all(-1).float().mean().item()
        assert mixed_agree > 0.999, mixed_agree  # the keys are widened
        ids = overlapping(chunk, overlap)
        ids[:, ::7, 3] = -1
        wide = chunk._replace(q=chunk.q.float(), kv=chunk.kv.float())
        error = relative_error(attend(chunk, ids), attend(wide, ids, "reference_kv_major"))
        narrow = with_8_bit_kv(chunk)
        wide = narrow._replace(q=chunk.q.float())
        narrow_error = relative_error(attend(narrow, ids), attend(wide, ids, "reference_kv_major"))
        assert max(error, narrow_error) < 4e-3, (error, narrow_error)
        print(
            f"checked {queries} queries after {cached}: selections agree {agree:.5f}, attention error {error:.1e}, "
            f"of 8-bit caches {narrow_error:.1e}",
            flush=True,
        )


class Clock:
    """Times what fits into the given seconds; a variant that fails is reported and left out."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.results: dict[str, float] = {}

    def __call__(self, name: str, run: Callable[[], Any]) -> None:
        if time.monotonic() > self._end:
            print(f"{name:60s} skipped", flush=True)
            return
        try:
            self.results[name] = do_bench(run, warmup=10, rep=40, return_mode="median")
            print(f"{name:60s} {self.results[name]:8.3f} ms", flush=True)
        except Exception as error:
            print(f"{name:60s} failed: {type(error).__name__} {str(error)[:200]}", flush=True)


def time_chunk(clock: Clock, cached: int, overlaps: tuple[float, ...], peers: str | None) -> None:
    """Eager calls, but for what is said to be replayed. 8 bits: caches and index queries, or K and V alone."""
    chunk = make_chunk(cached)
    narrow, narrow_kv = with_8_bits(chunk), with_8_bit_kv(chunk)
    ids = select(chunk)
    selections = {"indexer": ids, **{f"{overlap:.2f}": overlapping(chunk, overlap) for overlap in overlaps}}
    for kind, some in (("bf16", chunk), ("8 bits", narrow)):
        clock(f"{cached} {kind} select", lambda some=some: select(some))
        clock(f"{cached} {kind} whole", lambda some=some: attend(some, select(some)))
        clock(f"{cached} {kind} whole, replayed", replay(lambda some=some: attend(some, select(some))))
    for kind, some in (("bf16", chunk), ("8-bit K and V", narrow_kv)):
        for name, chosen in selections.items():
            clock(f"{cached} {kind} attend {name}", lambda some=some, chosen=chosen: attend(some, chosen))
            clock(
                f"{cached} {kind} attend {name}, share={kind != 'bf16'}",
                lambda some=some, chosen=chosen, share=kind != "bf16": attend_with(some, chosen, share=share),
            )
    if peers is not None:
        time_vllm(clock, chunk, selections)
    for kind, some in (("bf16", chunk), ("8 bits", narrow)):
        profile(f"{cached} {kind} whole", lambda some=some: attend(some, select(some)))
    for name, chosen in list(selections.items())[1:]:
        profile(f"{cached} bf16 attend {name}", lambda chosen=chosen: attend(chunk, chosen))


def time_mixed(clock: Clock, cached: int) -> None:
    """bf16 queries over 8-bit index keys by both kernels, and how many rows choose the same."""
    chunk = with_8_bit_index_keys(make_chunk(cached))
    for impl in ("triton_prefill", "gluon_prefill"):
        clock(f"{cached} bf16 queries over 8-bit index keys, select {impl}", lambda impl=impl: select(chunk, impl))
    plain, hopper = (select(chunk, impl).sort(-1).values for impl in ("triton_prefill", "gluon_prefill"))
    print(f"the same choice in {(plain == hopper).all(-1).float().mean().item():.5f} of the rows", flush=True)


def time_vllm(clock: Clock, chunk: Chunk, selections: dict[str, torch.Tensor]) -> None:
    index, attention = import_module("m3ops.vllm_index_topk"), import_module("m3ops.vllm_sparse_attn")
    cached, queries, out = chunk.cached, chunk.q.shape[0], torch.empty_like(chunk.q)
    where = (chunk.block_table, chunk.cu_query_lens, chunk.seq_lens, chunk.cached_lens, queries)

    def score() -> Any:
        return index.minimax_m3_index_score(chunk.index_q, chunk.index_k, *where, chunk.seq_len, KV_HEADS)

    def topk(scores: torch.Tensor) -> Any:
        return index.minimax_m3_index_topk(scores, chunk.cu_query_lens, chunk.cached_lens, queries, TOPK, 0, 1)

    def attend(ids: torch.Tensor) -> Any:
        return attention.minimax_m3_sparse_attn(chunk.q, chunk.kv, ids, *where, KV_HEADS, DIM**-0.5, out)

    scores = score()
    clock(f"{cached} vLLM score", score)
    clock(f"{cached} vLLM topk", lambda: topk(scores))
    for name, ids in selections.items():
        clock(f"{cached} vLLM attend {name}", lambda ids=ids: attend(ids))
    clock(f"{cached} vLLM whole", lambda: attend(topk(score())))


def profile(name: str, run: Callable[[], Any], calls: int = 3) -> None:
    """Device time of each launch of one call, in their order, µs: the median of some calls."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    launches = len(events) // calls
    print(name, flush=True)
    for i in range(launches):
        times = sorted(event.time_range.elapsed_us() for event in events[i::launches])
        print(f"    {events[i].name[:60]:60s} {times[len(times) // 2]:8.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers")
    parser.add_argument("--out")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    args = parser.parse_args()
    if args.peers:
        sys.path.insert(0, args.peers)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    clock = Clock(args.seconds)
    if args.check:
        check()
    for cached, overlaps in ((61_440, OVERLAPS), (0, ()), (516_096, ()), (1_040_384, ())):
        time_chunk(clock, cached, overlaps, args.peers)
        torch.cuda.empty_cache()

    def save() -> None:
        if args.out:
            Path(args.out).write_text(json.dumps(clock.results, indent=1))

    save()
    # Last, as a card has not run that kernel of Hopper's yet.
    for cached in (61_440, 0, 516_096):
        time_mixed(clock, cached)
        torch.cuda.empty_cache()
    save()


if __name__ == "__main__":
    main()
