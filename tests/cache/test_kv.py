"""The cache's planes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planes import page_bytes

from msaserve.cache.kv import KVCache


def cache(num_pages: int, dtype: torch.dtype, sparse_layer_ids: tuple[int, ...] = (1,)) -> KVCache:
    sizes = {"num_layers": 2, "block_size": 16, "num_kv_heads": 2, "head_dim": 64, "index_dim": 64}
    return KVCache(sparse_layer_ids=sparse_layer_ids, num_pages=num_pages, dtype=dtype, device="cpu", **sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sparse_layer_ids", [(), (1,)])
def test_planes_begin_at_zero(dtype: torch.dtype, sparse_layer_ids: tuple[int, ...]) -> None:
    made = cache(3, dtype, sparse_layer_ids)
    planes = [made.k(0), made.v(1), *(made.index_k(i) for i in sparse_layer_ids)]
    assert [tuple(p.shape) for p in planes] == [(3, 16, 2, 64)] * 2 + [(3, 16, 64)] * len(sparse_layer_ids)
    assert all(p.dtype == dtype and p.is_contiguous() and not p.float().any() for p in planes)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size as Linux tells it")
def test_a_large_cache_takes_memory_only_as_it_is_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    cache(3, torch.float32)  # what the first one loads is not the cache's
    before = resident_bytes()
    made = cache(20_000, torch.float32)
    num_bytes = page_bytes(made) * made.num_pages
    assert num_bytes > 2**30 // 2
    assert resident_bytes() - before < num_bytes // 2
