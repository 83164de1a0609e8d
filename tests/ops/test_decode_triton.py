"""The decode kernels against the reference at tiny sizes: in Triton's interpreter, or on a card if there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.dense_attend import decode_triton as dense
from msaserve.ops.select_attend import gluon_decode
from msaserve.ops.select_blocks import decode_triton as select
from msaserve.ops.sparse_attend import decode_triton as attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Batch:
    """A vLLM-like packed cache, shuffled pages, NaN in every slot that holds no token, two rows after the last."""

    q: torch.Tensor
    index_q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    index_k_cache: torch.Tensor
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """block_table, seq_lens, cu_query_lens."""
    lens: dict[str, int]

    def select(self, topk: int, impl: str, **options: Any) -> torch.Tensor:
        return ops.select_blocks(
            self.index_q, self.index_k_cache, *self.where, topk=topk, **self.lens, impl=impl, **options
        )

    def attend(self, block_ids: torch.Tensor, impl: str, **options: Any) -> torch.Tensor:
        caches = (self.k_cache, self.v_cache)
        max_query_len = self.lens["max_query_len"]
        return ops.sparse_attend(
            self.q, *caches, block_ids, *self.where, max_query_len=max_query_len, impl=impl, **options
        )


def batch(requests: list[tuple[int, int]], kv_heads: int = 2, group: int = 3, dim: int = 64, block: int = 64) -> Batch:
    """requests: (query_len, seq_len). Index values are small integers: scores are exact and often equal."""
    generator = torch.Generator().manual_seed(len(requests) * 100 + kv_heads * 10 + group)
    query_lens = torch.tensor([query_len for query_len, _ in requests])
    seq_lens = torch.tensor([seq_len for _, seq_len in requests])
    num_rows = int(query_lens.sum()) + 2
    max_blocks = max(1, -(-int(seq_lens.max()) // block))
    num_pages = len(requests) * max_blocks + 1

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).half()

    packed = torch.randn((num_pages, kv_heads, block, 2 * dim), generator=generator).half()
    index_k_cache = integers(num_pages, block, dim)
    table = (torch.randperm(num_pages - 1, generator=generator) + 1).view(len(requests), max_blocks)
    held = (seq_lens[:, None] - torch.arange(max_blocks) * block).clamp(0, block)
    for page, tokens in zip(table.flatten().tolist(), held.flatten().tolist(), strict=True):
        packed[page, :, tokens:] = float("nan")
        index_k_cache[page, tokens:] = float("nan")
    packed[0] = float("nan")
    index_k_cache[0] = float("nan")
    packed, index_k_cache = packed.to(DEVICE), index_k_cache.to(DEVICE)
    k_cache, v_cache = (packed[..., i * dim : (i + 1) * dim].transpose(1, 2) for i in (0, 1))
    cu_query_lens = torch.cat([torch.zeros(1, dtype=torch.long), query_lens.cumsum(0)])
    return Batch(
        q=torch.randn((num_rows, kv_heads * group, dim), generator=generator).half().to(DEVICE),
        index_q=integers(num_rows, kv_heads, dim).to(DEVICE),
        k_cache=k_cache,
        v_cache=v_cache,
        index_k_cache=index_k_cache,
        where=(table.int().to(DEVICE), seq_lens.int().to(DEVICE), cu_query_lens.int().to(DEVICE)),
        lens={"max_query_len": int(query_lens.max()), "max_seq_len": int(seq_lens.max())},
    )


BATCHES = {
    "ragged": [(1, 700), (1, 1), (0, 0), (1, 64), (1, 65)],
    "verification": [(3, 500), (1, 130), (2, 2)],
    "padding request with a token": [(1, 0), (1, 300)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("topk", [1, 4, 5])
def test_selection(name: str, topk: int) -> None:
    """Exact scores: the sets are equal, ties to the lower block included."""
    case = batch(BATCHES[name])
    got = case.select(topk, "triton_decode")
    want = case.select(topk, "reference")
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)
    is_valid = got >= 0
    assert torch.equal(is_valid, is_valid.sort(-1, descending=True).values), "valid ids come first"
    assert (got[:, -2:] == -1).all(), "rows after the last request"


@pytest.mark.parametrize("direct", [4, 8])
@pytest.mark.parametrize("local_blocks", [1, 3])
def test_selection_through_combs(direct: int, local_blocks: int) -> None:
    """More blocks than one warp chooses from directly: equal keys, NaN keys and infinite ones among 21 blocks."""
    case = batch([(2, 1300), (1, 100), (1, 640)], kv_heads=1)
    table = case.where[0]
    case.index_k_cache[table[0, 3]] = float("nan")
    case.index_k_cache[table[0, 7], 5] = float("inf")
    case.index_k_cache[table[0, 8]] = case.index_k_cache[table[0, 2]]
    case.index_k_cache[table[2, :9]] = case.index_k_cache[table[2, 0]].clone()
    args = (case.index_q, case.index_k_cache, *case.where)
    options = {"topk": 4, "local_blocks": local_blocks, **case.lens}
    got = select.select_blocks(*args, **options, direct=direct)
    want = case.select(4, "reference", local_blocks=local_blocks)
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)


@pytest.mark.parametrize("direct", [4, 512])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("shared", [0, 1])
def test_selection_of_any_grid(name: str, direct: int, shared: int) -> None:
    """Ragged requests, and requests whose first pages are the same: one program for all blocks to one for each."""
    case = batch(BATCHES[name])
    table = case.where[0]
    table[1:, :shared] = table[0, :shared]
    want = case.select(4, "reference").sort(-1).values
    for programs in (1, 7, 4096):
        got = select.select_blocks(
            case.index_q, case.index_k_cache, *case.where, topk=4, **case.lens, direct=direct, programs=programs
        )
        assert torch.equal(got.sort(-1).values, want)


@pytest.mark.parametrize(("requests", "context"), [(1, 65536), (8, 65536), (32, 524288), (300, 1048576)])
def test_programs_of_all_requests_follow_each_other(
    requests: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one run of blocks, since requests may share pages; a grid has 65,535 places in its second dimension."""
    grids = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids[self.name] = grid
            return lambda *args, **options: None

    monkeypatch.setattr(select, "score_kernel", Kernel("triton"))
    monkeypatch.setattr(gluon_decode, "_scan_kernel", Kernel("gluon"))
    monkeypatch.setattr(gluon_decode, "_attend_kernel", Kernel("attention"))
    monkeypatch.setattr(gluon_decode, "_merge_kernel", Kernel("merge"))
    empty = partial(torch.empty, dtype=torch.float16, device="meta")
    lens = empty(requests, dtype=torch.int32)
    where = (empty(requests, context // 128, dtype=torch.int32), lens, lens)
    index = (empty(requests, 4, 128), empty(9, 128, 128))
    options = {"topk": 16, "max_query_len": 1, "max_seq_len": context}
    select.scan(*index, *where, **options)
    caches = [empty(9, 128, 4, 128) for _ in range(2)]
    gluon_decode.select_attend(empty(requests, 64, 128), *caches, *index, *where, **options, local_blocks=1, scale=0.1)
    for name in ("triton", "gluon"):
        assert grids[name][0] == requests
        assert 1 <= grids[name][1] <= min(65535, context // 128)


def test_selection_of_equal_scores_takes_the_lowest_blocks() -> None:
    case = batch([(1, 640)], kv_heads=1)
    case.index_k_cache[:] = 1.0
    got = case.select(4, "triton_decode")
    assert got[0, 0].sort().values.tolist() == [0, 1, 2, 9]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (3, 2), (16, 1)])
def test_attention(name: str, group: int, kv_heads: int) -> None:
    case = batch(BATCHES[name], kv_heads=kv_heads, group=group)
    ids = holes(case, topk=5)
    got, want = case.attend(ids, "triton_decode"), case.attend(ids, "reference")
    assert relative_error(got, want) < 1e-3
    assert (got[-2:] == 0).all(), "rows after the last request"
    assert got.isfinite().all()


@pytest.mark.parametrize(("splits", "tile"), [(1, 64), (2, 64), (4, 32), (8, 32)])
def test_attention_of_any_split(splits: int, tile: int) -> None:
    case = batch(BATCHES["verification"])
    ids = holes(case, topk=4)
    out = torch.full_like(case.q, float("nan"))
    got = attend.sparse_attend(
        case.q,
        case.k_cache,
        case.v_cache,
        ids,
        *case.where,
        scale=0.2,
        max_query_len=3,
        out=out,
        splits=splits,
        tile=tile,
    )
    assert got is out
    assert relative_error(got, case.attend(ids, "reference", scale=0.2)) < 1e-3


def test_attention_scales_keys_and_values() -> None:
    case = batch([(1, 200)])
    ids = holes(case, topk=4)
    scales = {"k_scale": torch.tensor([0.5, 2.0], device=DEVICE), "v_scale": torch.tensor(3.0, device=DEVICE)}
    got = case.attend(ids, "triton_decode", **scales)
    assert relative_error(got, case.attend(ids, "reference", **scales)) < 1e-3


def test_8_bit_caches() -> None:
    """Keys and values of 8 bits are widened; the index keys, small integers, are exact in them."""
    case = batch([(1, 300), (2, 130)])
    wide = {name: getattr(case, name).nan_to_num(0).clamp(-2, 2) for name in ("k_cache", "v_cache", "index_k_cache")}
    narrow = {name: cache.to(torch.float8_e4m3fn) for name, cache in wide.items()}
    rounded = {name: cache.half() for name, cache in narrow.items()}
    small, exact = (Batch(**{**case.__dict__, **caches}) for caches in (narrow, rounded))
    ids = small.select(3, "triton_decode")
    assert torch.equal(ids.sort(-1).values, exact.select(3, "reference").sort(-1).values)
    queries_too = Batch(**{**small.__dict__, "index_q": small.index_q.to(torch.float8_e4m3fn)})
    assert torch.equal(queries_too.select(3, "triton_decode"), ids)
    assert relative_error(small.attend(ids, "triton_decode"), exact.attend(ids, "reference")) < 1e-3


def test_head_dim_and_block_of_128() -> None:
    case = batch([(1, 300), (1, 129)], kv_heads=1, group=2, dim=128, block=128)
    got, want = case.select(2, "triton_decode"), case.select(2, "reference")
    assert torch.equal(got.sort(-1).values, want.sort(-1).values)
    assert relative_error(case.attend(want, "triton_decode"), case.attend(want, "reference")) < 1e-3


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("group", "kv_heads", "block"), [(3, 2, 64), (16, 1, 128)])
def test_dense_attention(name: str, group: int, kv_heads: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "PROGRAMS", 20)
    case = batch(BATCHES[name], kv_heads=kv_heads, group=group, block=block)
    args = (case.q, case.k_cache, case.v_cache, *case.where)
    got = ops.dense_attend(*args, **case.lens, impl="triton_decode")
    assert relative_error(got, ops.dense_attend(*args, **case.lens, impl="reference")) < 1e-3
    assert (got[-2:] == 0).all(), "rows after the last request"
    assert got.isfinite().all()


def test_dense_attention_of_8_bits_and_scales() -> None:
    case = batch([(1, 300), (2, 130)])
    caches = [c.nan_to_num(0).clamp(-2, 2).to(torch.float8_e4m3fn) for c in (case.k_cache, case.v_cache)]
    scales = {"k_scale": torch.tensor([0.5, 2.0], device=DEVICE), "v_scale": torch.tensor(3.0, device=DEVICE)}
    got = ops.dense_attend(case.q, *caches, *case.where, **case.lens, **scales, impl="triton_decode")
    want = ops.dense_attend(case.q, *caches, *case.where, **case.lens, **scales, impl="reference")
    assert relative_error(got, want) < 1e-3


@pytest.mark.parametrize("topk", [1, 5])
def test_page_table(topk: int) -> None:
    case = batch(BATCHES["verification"] + BATCHES["ragged"])
    ids = holes(case, topk)
    options = {"block_size": 64, "num_kv_heads": 2}
    got = ops.page_table(ids, *case.where, **options, impl="triton")
    want = ops.page_table(ids, *case.where, **options, impl="reference")
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_store(with_index: bool, dtype: torch.dtype) -> None:
    caches = {impl: stored(impl, with_index, dtype) for impl in ("triton", "reference")}
    for got, want in zip(caches["triton"], caches["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
    assert 0 < int((~caches["triton"][0].isnan()).sum()) < caches["triton"][0].numel()


def stored(impl: str, with_index: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    packed = torch.full((6, 3, 16, 48), float("nan"), dtype=dtype, device=DEVICE)
    k_cache, v_cache = (packed[..., i * 24 : (i + 1) * 24].transpose(1, 2) for i in (0, 1))
    index_k_cache = torch.full((6, 16, 20), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.randperm(96, generator=generator)[:11].to(DEVICE)
    slots[::4] = -1
    k, v = (torch.randn((11, 3, 24), generator=generator).to(DEVICE) for _ in range(2))
    index: dict[str, Any] = {}
    if with_index:
        index_k = torch.randn((11, 30), generator=generator).to(DEVICE)[:, :20]
        index = {"index_k": index_k, "index_k_cache": index_k_cache, "index_scale": torch.tensor(4.0, device=DEVICE)}
    scales = {"k_scale": torch.tensor([1.0, 2.0, 0.5], device=DEVICE), "v_scale": torch.tensor(2.0, device=DEVICE)}
    ops.store_kv(k, v, k_cache, v_cache, slots, **index, **scales, impl=impl)
    return [k_cache, v_cache, index_k_cache]


@pytest.mark.skipif(DEVICE == "cuda", reason="a card's default is the kernel")
def test_a_cpu_takes_the_reference_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "select_blocks", None)
    case = batch([(1, 200)])
    assert torch.equal(case.select(2, None), case.select(2, "reference"))  # type: ignore[arg-type]


def test_refusals_name_the_reason() -> None:
    case = batch([(1, 200)])
    with pytest.raises(ValueError, match="over 64"):
        case.select(65, "triton_decode")
    long = Batch(**{**case.__dict__, "lens": {"max_query_len": 9, "max_seq_len": 200}})
    with pytest.raises(ValueError, match="max_query_len"):
        long.select(2, "triton_decode")
    with pytest.raises(ValueError, match="max_query_len"):
        long.attend(holes(case, 2), "triton_decode")


def holes(case: Batch, topk: int) -> torch.Tensor:
    """Distinct ids of each row, −1 and ids out of range among them, the first block in every row."""
    generator = torch.Generator().manual_seed(topk)
    max_blocks = case.where[0].shape[1]
    ids = torch.rand((case.index_q.shape[1], case.q.shape[0], max_blocks + 4 + topk), generator=generator).argsort(-1)[
        ..., :topk
    ]
    ids = torch.where(ids >= max_blocks + 2, -1, ids)
    ids[..., topk // 2] = torch.where((ids == 0).any(-1), ids[..., topk // 2], 0)
    return ids.int().to(DEVICE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
