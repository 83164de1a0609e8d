"""What must not change a result: the way it is computed, neighbours in the batch, where pages lie, tiles, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, get_args

import ops_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from msaserve import ops
from msaserve.ops.select_blocks.reference import row_tiles
from msaserve.ops.testing import SMALL_CASES, Case, CaseSpec, Selection, build, m3_spec, relative_error, select

WAYS = ("reference", "reference_kv_major", "reference_paged")
SPECS = {spec.name: spec for spec in SMALL_CASES}
BATCH = CaseSpec(name="batch", requests=((5, 37), (1, 90), (7, 7), (1, 1), (30, 66)), index_values="normal")
M3_BATCH = m3_spec("m3_batch", ((1, 2500), (3, 700)))


def attend(case: Case, ids: torch.Tensor, impl: str) -> torch.Tensor:
    options = {"max_query_len": case.spec.max_query_len}
    return ops.sparse_attend(case.q, case.k_cache, case.v_cache, ids, *case.batch, **options, impl=impl)


@st.composite
def specs(draw: st.DrawFn) -> CaseSpec:
    seq_lens = draw(st.lists(st.integers(0, 100), min_size=1, max_size=4))
    requests = tuple((draw(st.integers(0, min(seq_len, 12))), seq_len) for seq_len in seq_lens)
    return CaseSpec(
        name="drawn",
        requests=requests,
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 5, 16])),
        head_dim=draw(st.sampled_from([8, 24])),
        block_size=draw(st.sampled_from([4, 16])),
        topk=draw(st.integers(1, 9)),
        tail_rows=draw(st.integers(0, 2)),
    )


@settings(max_examples=25, deadline=None)
@given(spec=specs(), selection=st.sampled_from(get_args(Selection)))
def test_three_ways_to_attend_are_one(spec: CaseSpec, selection: Selection) -> None:
    case = build(spec, dtype=torch.float64)
    ids = select(case, selection)
    query_major, kv_major, paged = (attend(case, ids, way) for way in WAYS)
    torch.testing.assert_close(kv_major, query_major, rtol=0, atol=1e-10)
    torch.testing.assert_close(paged, query_major, rtol=0, atol=1e-10)


def test_block_that_nobody_chose() -> None:
    case = build(SPECS["ragged"], dtype=torch.float64)
    ids = select(case).masked_fill_(select(case) == 1, -1)
    indptr, _ = ops.remap(ids, case.cu_query_lens, max_blocks=case.block_table.shape[1])
    assert (indptr[:, 1] == indptr[:, 2]).all()
    assert (indptr[:, 0] < indptr[:, 1]).all()
    expected = ops_oracle.attend(case, ids)
    for way in WAYS:
        assert relative_error(attend(case, ids, way), expected) < 1e-12


def test_dense_is_sparse_with_every_block_chosen() -> None:
    case = build(replace(SPECS["ragged"], topk=8), dtype=torch.float64)
    dense = ops.dense_attend(case.q, case.k_cache, case.v_cache, *case.batch, **case.bounds)
    ids = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    for way in WAYS:
        assert relative_error(attend(case, ids, way), dense) < 1e-12


def results(case: Case, rows: slice = slice(None), request: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Every reference result for some requests of a case, whose rows are `rows`; row first."""
    batch = (case.block_table[request], case.seq_lens[request], case.cu_query_lens)
    if request != slice(None):
        query_len = rows.stop - rows.start
        batch = (*batch[:2], torch.tensor([0, query_len], dtype=torch.int32))
    max_seq_len = int(batch[1].max())
    bounds = {"max_query_len": case.spec.max_query_len, "max_seq_len": max_seq_len}
    scores = ops.index_score(case.index_q[rows], case.index_k_cache, *batch, **bounds, impl="reference")
    ids = ops.select_blocks(
        case.index_q[rows], case.index_k_cache, *batch, topk=case.spec.topk, **bounds, impl="reference"
    )
    found = {"index_score": scores.transpose(0, 1), "select_blocks": ids.transpose(0, 1)}
    args = (case.q[rows], case.k_cache, case.v_cache)
    for way in WAYS:
        found[way] = ops.sparse_attend(*args, ids, *batch, max_query_len=case.spec.max_query_len, impl=way)
    found["dense_attend"] = ops.dense_attend(*args, *batch, **bounds, impl="reference")
    return found


@pytest.mark.parametrize(
    ("spec", "dtype", "num_threads"),
    [
        pytest.param(BATCH, torch.float32, 1, id="float32"),
        pytest.param(M3_BATCH, torch.bfloat16, 1, id="m3-bfloat16"),
        pytest.param(M3_BATCH, torch.float32, 2, id="m3-float32-2_threads"),
    ],
)
def test_alone_is_in_a_batch_to_the_bit(spec: CaseSpec, dtype: torch.dtype, num_threads: int) -> None:
    case = build(spec, dtype=dtype)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = results(case)
        starts = case.cu_query_lens.tolist()
        for request in range(len(spec.requests)):
            rows = slice(starts[request], starts[request + 1])
            for name, alone in results(case, rows, slice(request, request + 1)).items():
                in_batch = together[name][rows]
                if name == "index_score":
                    in_batch = in_batch[..., : alone.shape[-1]]
                assert torch.equal(in_batch, alone), name
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("spec", [BATCH, M3_BATCH], ids=lambda spec: spec.name)
def test_paged_is_flat_to_the_bit(spec: CaseSpec) -> None:
    """Shuffled pages against the same tokens in pages that follow each other."""
    case = build(spec)
    order = case.block_table[case.block_table > 0].long()
    order = torch.cat([torch.zeros(1, dtype=torch.int64), order])
    flat_table = torch.zeros_like(case.block_table)
    flat_table[case.block_table > 0] = torch.arange(1, len(order), dtype=torch.int32)
    assert not torch.equal(flat_table, case.block_table)
    flat = replace(
        case,
        k_cache=case.k_cache[order],
        v_cache=case.v_cache[order],
        index_k_cache=case.index_k_cache[order],
        block_table=flat_table,
    )
    for (name, paged), expected in zip(results(case).items(), results(flat).values(), strict=True):
        assert torch.equal(paged, expected), name


def test_strides_do_not_change_a_bit() -> None:
    token_major = build(BATCH)
    vllm = build(replace(BATCH, layout="vllm"))
    assert vllm.k_cache.stride() != token_major.k_cache.stride()
    ids = select(token_major)
    for way in ("reference", "reference_kv_major"):
        assert torch.equal(attend(vllm, ids, way), attend(token_major, ids, way))


@pytest.mark.parametrize("spec", [BATCH, M3_BATCH], ids=lambda spec: spec.name)
@pytest.mark.parametrize("way", ["reference", "reference_paged"])
def test_a_query_alone_is_in_its_chunk_to_the_bit(spec: CaseSpec, way: str) -> None:
    case = build(spec)
    ids = select(case)
    whole = attend(case, ids, way)
    for row, request, position in ops_oracle.rows(case):
        alone = ops.sparse_attend(
            case.q[row : row + 1],
            case.k_cache,
            case.v_cache,
            ids[:, row : row + 1],
            case.block_table[request : request + 1],
            torch.tensor([position + 1], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            max_query_len=1,
            impl=way,
        )
        assert torch.equal(alone[0], whole[row])


TILES = {
    "index_score.reference": {"TILE_SCORES": 200, "TILE_KEYS": 300},
    "topk_blocks.reference": {"TILE_SCORES": 30},
    "select_blocks.reference": {"TILE_SCORES": 60},
    "sparse_attend.reference": {"TILE_KEYS": 5000},
    "sparse_attend.reference_kv_major": {"TILE_PARTIALS": 5000},
    "sparse_attend.reference_paged": {"TILE_KEYS": 5000},
    "dense_attend.reference": {"TILE_TOKENS": 32, "TILE_SCORES": 600},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constants in TILES.items():
        for name, value in constants.items():
            monkeypatch.setattr(import_module(f"msaserve.ops.{module}"), name, value)


@pytest.mark.parametrize("name", ["ragged", "padding", "special_keys", "local_blocks_2", "chunk_inside_a_block"])
def test_tiles_do_not_change_a_result(name: str, request: pytest.FixtureRequest) -> None:
    case = build(SPECS[name], dtype=torch.float64)
    expected = results(case)
    request.getfixturevalue("small_tiles")
    for found, whole in zip(results(case).values(), expected.values(), strict=True):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-10)


class Outputs(TorchDispatchMode):
    """Counts the elements of every tensor that an operation makes or hands on; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.sizes.append(tensor.numel())
        return result


@contextmanager
def recorded_sizes() -> Iterator[list[int]]:
    with Outputs() as outputs:
        yield outputs.sizes


@pytest.mark.usefixtures("small_tiles")
def test_select_blocks_holds_a_tile_of_scores() -> None:
    """With all scores at once the largest tensor would be 2 heads × 24 rows × 8 blocks of 16 tokens."""
    case = build(CaseSpec(name="long", requests=((24, 128),), topk=2))
    with recorded_sizes() as sizes:
        ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options, impl="reference")
    largest_tile = max(*TILES["index_score.reference"].values(), *TILES["select_blocks.reference"].values())
    num_ids = 2 * 24 * 2
    assert max(sizes) <= max(largest_tile, num_ids)


@given(
    requests=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 1_000_000)), max_size=6),
    num_heads=st.integers(1, 8),
)
@settings(deadline=None)
def test_row_tiles_are_bounded_and_cover_every_row(requests: list[tuple[int, int]], num_heads: int) -> None:
    tile_scores = 1 << 22
    cu_query_lens = [0]
    for query_len, _ in requests:
        cu_query_lens.append(cu_query_lens[-1] + query_len)
    seq_lens = [seq_len for _, seq_len in requests]
    covered = 0
    for start, end, longest in row_tiles(seq_lens, cu_query_lens, num_heads=num_heads, block_size=128):
        assert start == covered < end
        assert end - start == 1 or (end - start) * num_heads * -(-longest // 128) <= tile_scores
        in_tile = [
            seq_len
            for request, seq_len in enumerate(seq_lens)
            if max(start, cu_query_lens[request]) < min(end, cu_query_lens[request + 1])
        ]
        assert longest >= max(in_tile)
        covered = end
    assert covered == cu_query_lens[-1]


@pytest.mark.parametrize("way", WAYS)
def test_decode_attend_does_not_grow_with_the_context(way: str) -> None:
    totals = []
    for seq_len in (640, 6400):
        spec = CaseSpec(name="decode", requests=((1, seq_len),), num_kv_heads=1, head_dim=64, block_size=64)
        case = build(spec)
        ids = torch.tensor([[[2, 5, 7, 9]]], dtype=torch.int32)
        with recorded_sizes() as sizes:
            attend(case, ids, way)
        totals.append(sum(sizes))
    # Integers per block, such as remap's row pointers, are allowed to grow.
    assert totals[1] - totals[0] < 20 * (6400 - 640) // 64
    assert totals[0] > 2 * 4 * 64 * 64
