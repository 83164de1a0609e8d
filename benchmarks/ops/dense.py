"""dense_attend's prefill on a card, timed beside PyTorch's attention over contiguous K and V.

    python benchmarks/ops/dense.py [--variants] [--seconds N] [--out FILE]

A chunk of 8,192 queries of one request after some cached tokens, bf16, shuffled pages in vLLM's layout: M3's dense
layers (64 query and 4 KV heads of 128) and the small checkpoint's (16 and 2 heads of 64). Each result is compared with
PyTorch's flash attention, which is causal as ours is; its cuDNN attention has no such mask for fewer queries than keys,
so it reads without a mask as many keys as our queries see on average. Medians, L2 cleared between repeats.
benchmarks/ops/conformance.py checks the kernels on shapes of all kinds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msaserve import ops
from msaserve.ops.testing import relative_error

KERNELS = ("triton_prefill", "gluon_prefill")
TILES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 128, 8, 2),
    (64, 64, 4, 2),
    (64, 128, 4, 2),
    (256, 64, 16, 2),
)
"""Of triton_prefill, tried with --variants: rows, tokens, warps, stages."""
CHUNKS: dict[str, tuple[int, tuple[int, int, int]]] = {
    "M3 after 61,440": (61_440, (64, 4, 128)),
    "small after 122,880": (122_880, (16, 2, 64)),
    "M3 from 0": (0, (64, 4, 128)),
}
"""Tokens cached before; query heads, KV heads and their dimension."""


class Chunk(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor

    @property
    def num_operations(self) -> float:
        queries, seq_len = self.q.shape[0], int(self.seq_lens[0])
        return 4.0 * self.q.shape[1] * self.q.shape[2] * queries * (seq_len - (queries - 1) / 2)


def make_chunk(cached: int, queries: int, heads: int, kv_heads: int, dim: int, block: int = 128) -> Chunk:
    pages = -(-(cached + queries) // block)
    kv = torch.randn(pages, kv_heads, block, 2 * dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return Chunk(
        torch.randn(queries, heads, dim, device="cuda", dtype=torch.bfloat16),
        kv[..., :dim],
        kv[..., dim:],
        torch.randperm(pages, device="cuda").int().view(1, pages),
        torch.tensor([cached + queries], device="cuda", dtype=torch.int32),
        torch.tensor([0, queries], device="cuda", dtype=torch.int32),
    )


def attend(chunk: Chunk, impl: str | None, **scales: torch.Tensor) -> torch.Tensor:
    bounds = {"max_query_len": chunk.q.shape[0], "max_seq_len": chunk.block_table.shape[1] * chunk.k_cache.shape[1]}
    return ops.dense_attend(*chunk, **bounds, impl=impl, **scales)


def attend_with(chunk: Chunk, impl: str, **tuning: Any) -> torch.Tensor:
    kernel = import_module(f"msaserve.ops.dense_attend.{impl}")
    bounds = {"max_query_len": chunk.q.shape[0], "max_seq_len": int(chunk.block_table.numel()) * 128}
    out: torch.Tensor = kernel.dense_attend(*chunk, scale=chunk.q.shape[2] ** -0.5, **bounds, **tuning)
    return out


class Clock:
    """Times what fits into the given seconds; a variant that fails or is wrong is reported and left out."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.results: dict[str, float] = {}
        self.num_failures = 0

    def __call__(
        self, name: str, run: Callable[[], Any], operations: float, expected: Callable[[], Any] | None = None
    ) -> None:
        if time.monotonic() > self._end:
            print(f"{name:90s} skipped", flush=True)
            return
        try:
            error = 0.0 if expected is None else relative_error(run(), expected())
            if not error < 6e-3:
                self.num_failures += 1
                print(f"{name:90s} WRONG {error:.1e}", flush=True)
                return
            self.results[name] = do_bench(run, warmup=20, rep=100, return_mode="median")
            rate = operations / self.results[name] / 1e9
            print(f"{name:90s} {self.results[name]:8.3f} ms {rate:6.0f} TFLOP/s, error {error:.1e}", flush=True)
        except Exception as failure:
            self.num_failures += 1
            print(f"{name:90s} failed: {type(failure).__name__} {str(failure)[:300]}", flush=True)


def compile_alone(shape: tuple[int, ...], impl: str, tuning: dict[str, Any]) -> None:
    """Leaves the kernel in Triton's cache on disk; what fails will say so when it is timed."""
    with suppress(Exception):
        attend_with(make_chunk(1920, 128, *shape), impl, **tuning)
        if not tuning:
            chunk = make_chunk(1920, 128, *shape)
            narrow = {x: getattr(chunk, x).to(torch.float8_e4m3fn) for x in ("k_cache", "v_cache")}
            attend(chunk._replace(**narrow), impl)


def time_chunk(clock: Clock, name: str, chunk: Chunk, variants: list[tuple[str, dict[str, Any]]]) -> None:
    operations = chunk.num_operations
    queries = chunk.q.shape[0]
    keys, values = (
        cache[chunk.block_table[0].long()].flatten(0, 1)[: int(chunk.seq_lens[0])].transpose(0, 1).contiguous()[None]
        for cache in (chunk.k_cache, chunk.v_cache)
    )
    q = chunk.q.transpose(0, 1).contiguous()[None]

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            bias = causal_lower_right(queries, keys.shape[2])
            return scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=True)

    def cudnn() -> torch.Tensor:
        seen = keys.shape[2] - queries // 2
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, keys[:, :, :seen], values[:, :, :seen], enable_gqa=True)

    for impl, tuning in variants:
        run = partial(attend_with, chunk, impl, **tuning)
        clock(f"{name} {impl} {tuning}", run, operations, lambda: flash()[0].transpose(0, 1))
    narrow = chunk._replace(**{x: getattr(chunk, x).to(torch.float8_e4m3fn) for x in ("k_cache", "v_cache")})
    wide = narrow._replace(**{x: getattr(narrow, x).to(chunk.q.dtype) for x in ("k_cache", "v_cache")})
    for impl in sorted({impl for impl, _ in variants}):
        clock(f"{name} {impl}, 8 bits", partial(attend, narrow, impl), operations, partial(attend, wide, impl))
    clock(f"{name} PyTorch, flash", flash, operations)
    clock(f"{name} PyTorch, cuDNN, no mask, as many keys", cudnn, operations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--variants", action="store_true", help="other tiles, warps and stages too")
    parser.add_argument("--seconds", type=float, default=600.0, help="what is left after so many is skipped")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first")
    parser.add_argument("--out")
    options = parser.parse_args()
    clock = Clock(options.seconds)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    kernels = options.kernels.split(",")
    variants: list[tuple[str, dict[str, Any]]] = [(impl, {}) for impl in kernels]
    if options.variants and "triton_prefill" in kernels:
        kernel = import_module("msaserve.ops.dense_attend.triton_prefill")
        variants += [("triton_prefill", {"tile": kernel.Tile(*tile)}) for tile in TILES]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.starmap(
            compile_alone,
            [(shape, *variant) for shape in {shape for _, shape in CHUNKS.values()} for variant in variants],
        )
    for name, (cached, shape) in CHUNKS.items():
        time_chunk(clock, name, make_chunk(cached, 8192, *shape), variants)
    if options.out:
        Path(options.out).write_text(json.dumps(clock.results, indent=1))
    sys.exit(1 if clock.num_failures else 0)


if __name__ == "__main__":
    main()
