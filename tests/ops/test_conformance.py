"""Operator × implementation × case against a token-by-token float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

import ops_oracle
import pytest
import torch

from msaserve import ops
from msaserve.ops.testing import (
    FAR_CASE,
    SMALL_CASES,
    TOLERANCES,
    Case,
    CaseSpec,
    Selection,
    build,
    relative_error,
    select,
)

SPECS = {spec.name: spec for spec in SMALL_CASES}
OTHER_DTYPES = ["ragged", "padding", "vllm_layout", "normal_scores"]
"""Cases that run in every dtype; the others run in float64, where a wrong token cannot hide in the tolerance."""
CASES = [
    *(pytest.param(name, torch.float64, id=name) for name in SPECS),
    *(
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in OTHER_DTYPES
        for dtype in TOLERANCES
        if dtype != torch.float64
    ),
]

Call = Callable[..., Any]


@lru_cache
def expected_scores(name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    return ops_oracle.block_scores(build(SPECS[name], dtype=dtype, device=device))


@lru_cache
def expected_attention(name: str, dtype: torch.dtype, device: str, selection: Selection | None) -> torch.Tensor:
    case = build(SPECS[name], dtype=dtype, device=device)
    return ops_oracle.attend(case, None if selection is None else select(case, selection))


def assert_scores(scores: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal infinities, and finite scores equal up to float32 rounding of sums of some 64 products."""
    assert scores.dtype == torch.float32
    scores = scores.cpu().double()
    assert not scores.isnan().any()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)


def assert_attention(out: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    assert out.dtype == case.q.dtype
    assert out.shape == case.q.shape
    assert relative_error(out.cpu(), expected) < TOLERANCES[case.q.dtype]
    real_rows = {row for row, _, _ in ops_oracle.rows(case)}
    padding = [row for row in range(out.shape[0]) if row not in real_rows]
    assert (out[padding] == 0).all()


@pytest.mark.operator("index_score")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_index_score(call: Call, device: str, name: str, dtype: torch.dtype) -> None:
    case = build(SPECS[name], dtype=dtype, device=device)
    scores = call(case.index_q, case.index_k_cache, *case.batch, **case.bounds)
    assert_scores(scores, expected_scores(name, dtype, device))


@pytest.mark.operator("index_score")
def test_index_score_writes_to_out(call: Call, device: str) -> None:
    case = build(SPECS["padding"], device=device)
    expected = call(case.index_q, case.index_k_cache, *case.batch, **case.bounds)
    out = torch.full_like(expected, torch.nan)
    assert call(case.index_q, case.index_k_cache, *case.batch, **case.bounds, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.operator("topk_blocks")
@pytest.mark.parametrize("name", SPECS)
def test_topk_blocks(call: Call, device: str, name: str) -> None:
    case = build(SPECS[name], device=device)
    scores = expected_scores(name, torch.float32, device)
    ids = call(
        scores.float().to(device),
        *case.batch[1:],
        block_size=case.spec.block_size,
        topk=case.spec.topk,
        local_blocks=case.spec.local_blocks,
        max_query_len=case.spec.max_query_len,
    )
    assert ids.dtype == torch.int32
    assert ids.shape == (case.spec.num_kv_heads, case.q.shape[0], case.spec.topk)
    assert ops_oracle.sets(ids) == ops_oracle.block_ids(case, scores.float())


@pytest.mark.operator("select_blocks")
@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case.values[0] != "normal_scores"])
def test_select_blocks(call: Call, device: str, name: str, dtype: torch.dtype) -> None:
    case = build(SPECS[name], dtype=dtype, device=device)
    ids = call(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    assert ids.dtype == torch.int32
    assert ids.shape == (case.spec.num_kv_heads, case.q.shape[0], case.spec.topk)
    assert ops_oracle.sets(ids) == ops_oracle.block_ids(case, expected_scores(name, dtype, device))


@pytest.mark.operator("select_blocks")
def test_select_blocks_by_rounded_scores(call: Call, device: str) -> None:
    """Scores that are no integers may round apart: a chosen block is never worse than one left out by more."""
    case = build(SPECS["normal_scores"], device=device)
    scores = expected_scores("normal_scores", torch.float32, device)
    ids = call(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    for head, rows in enumerate(ops_oracle.sets(ids)):
        for row, _, position in ops_oracle.rows(case):
            own = position // case.spec.block_size
            chosen = rows[row]
            assert own in chosen
            assert len(chosen) == min(own + 1, case.spec.topk)
            left_out = set(range(own)) - chosen
            if left_out and chosen != {own}:
                worst = min(float(scores[head, row, block]) for block in chosen - {own})
                assert worst >= max(float(scores[head, row, block]) for block in left_out) - 1e-4


@pytest.mark.operator("select_blocks")
def test_select_blocks_writes_to_out(call: Call, device: str) -> None:
    case = build(SPECS["padding"], device=device)
    expected = call(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    out = torch.full_like(expected, 7)
    assert call(case.index_q, case.index_k_cache, *case.batch, **case.selection_options, out=out) is out
    assert ops_oracle.sets(out) == ops_oracle.sets(expected)


@pytest.mark.operator("sparse_attend")
@pytest.mark.parametrize("selection", get_args(Selection))
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_sparse_attend(call: Call, device: str, name: str, dtype: torch.dtype, selection: Selection) -> None:
    case = build(SPECS[name], dtype=dtype, device=device)
    options = {"max_query_len": case.spec.max_query_len}
    out = call(case.q, case.k_cache, case.v_cache, select(case, selection), *case.batch, **options)
    assert_attention(out, expected_attention(name, dtype, device, selection), case)


@pytest.mark.operator("sparse_attend")
def test_sparse_attend_scales_and_writes_to_out(call: Call, device: str) -> None:
    case = build(SPECS["padding"], device=device)
    args = (case.k_cache, case.v_cache, select(case), *case.batch)
    out = torch.full_like(case.q, torch.nan)
    result = call(case.q, *args, scale=0.5, max_query_len=case.spec.max_query_len, out=out)
    assert result is out
    expected = call(case.q * 0.5 * case.spec.head_dim**0.5, *args, max_query_len=case.spec.max_query_len)
    assert relative_error(out, expected) < TOLERANCES[torch.float32]


@pytest.mark.operator("sparse_attend")
def test_sparse_attend_of_rows_that_chose_nothing(call: Call, device: str) -> None:
    case = build(SPECS["ragged"], device=device)
    ids = select(case)
    ids[:, 1] = -1
    ids[1, 3] = -1
    out = call(case.q, case.k_cache, case.v_cache, ids, *case.batch, max_query_len=case.spec.max_query_len)
    assert_attention(out, ops_oracle.attend(case, ids), case)
    assert (out[1] == 0).all()
    assert (out[3, case.spec.group :] == 0).all()
    assert out[3, : case.spec.group].abs().sum() > 0


def select_in_padding(case: Case) -> torch.Tensor:
    """A selection in which padding rows name blocks too."""
    ids = select(case)
    padding = sorted(set(range(ids.shape[1])) - {row for row, _, _ in ops_oracle.rows(case)})
    ids[:, padding] = torch.arange(case.spec.topk, dtype=torch.int32, device=ids.device)
    return ids


@pytest.mark.operator("sparse_attend")
@pytest.mark.parametrize("name", ["padding", "nothing_but_padding"])
def test_sparse_attend_of_blocks_chosen_in_padding_rows(call: Call, device: str, name: str) -> None:
    case = build(SPECS[name], device=device)
    ids = select_in_padding(case)
    out = call(case.q, case.k_cache, case.v_cache, ids, *case.batch, max_query_len=case.spec.max_query_len)
    assert_attention(out, expected_attention(name, torch.float32, device, "random"), case)


@pytest.mark.operator("page_table")
def test_page_table_of_blocks_chosen_in_padding_rows(call: Call, device: str) -> None:
    case = build(SPECS["padding"], device=device)
    options = {"block_size": case.spec.block_size, "num_kv_heads": case.spec.num_kv_heads}
    expected = call(select(case), *case.batch, **options)
    found = call(select_in_padding(case), *case.batch, **options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.operator("remap")
def test_remap_leaves_out_rows_of_no_request(call: Call, device: str) -> None:
    case = build(SPECS["padding"], device=device)
    ids = select(case)
    expected = call(ids, case.cu_query_lens, max_blocks=case.block_table.shape[1])
    ids[:, -case.spec.tail_rows :] = torch.arange(case.spec.topk, dtype=torch.int32, device=device)
    indptr, entries = call(ids, case.cu_query_lens, max_blocks=case.block_table.shape[1])
    assert torch.equal(indptr, expected.indptr)
    assert torch.equal(entries, expected.entries)


@pytest.mark.operator("sparse_attend")
@pytest.mark.parametrize("is_per_head", [False, True])
def test_sparse_attend_reads_fp8_with_scales(call: Call, device: str, is_per_head: bool) -> None:
    case = build(SPECS["ragged"], device=device, cache_dtype=torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 3.0], device=device), torch.tensor([2.0, 0.25], device=device)
    if not is_per_head:
        k_scale, v_scale = k_scale[0], v_scale[0]
    ids = select(case)
    options = {"max_query_len": case.spec.max_query_len}
    out = call(case.q, case.k_cache, case.v_cache, ids, *case.batch, **options, k_scale=k_scale, v_scale=v_scale)
    k_scaled = case.k_cache.float() * k_scale.reshape(-1, 1)
    v_scaled = case.v_cache.float() * v_scale.reshape(-1, 1)
    expected = ops.sparse_attend(case.q, k_scaled, v_scaled, ids, *case.batch, **options, impl="reference")
    assert relative_error(out, expected) < TOLERANCES[torch.float32]


@pytest.mark.operator("dense_attend")
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_dense_attend(call: Call, device: str, name: str, dtype: torch.dtype) -> None:
    case = build(SPECS[name], dtype=dtype, device=device)
    out = call(case.q, case.k_cache, case.v_cache, *case.batch, **case.bounds)
    assert_attention(out, expected_attention(name, dtype, device, None), case)


@pytest.mark.operator("combine")
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_combine(call: Call, device: str, dtype: torch.dtype) -> None:
    """Softmax over 5 parts of a row equals the softmax of the parts combined; empty parts hold NaN."""
    num_rows, num_heads, num_parts, group, dim = 6, 2, 5, 4, 16
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn((num_rows, num_heads, group, num_parts, 7), generator=generator, dtype=torch.float64) * 30
    values = torch.randn((num_rows, num_heads, num_parts, 7, dim), generator=generator, dtype=torch.float64)
    is_empty = torch.rand((num_rows, num_heads, 1, num_parts, 1), generator=generator) < 0.4
    is_empty[0] = True
    scores.masked_fill_(is_empty, -torch.inf)
    weights = scores.flatten(-2).softmax(-1).nan_to_num(0.0)
    expected = (weights @ values.flatten(2, 3)).flatten(1, 2)
    expected_lse = scores.flatten(-2).logsumexp(-1).flatten(1, 2)

    lse = scores.logsumexp(-1).transpose(2, 3)
    parts = torch.einsum("thgsn,thsnd->thsgd", scores.softmax(-1), values).to(dtype)
    assert parts.isnan().any()
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out, out_lse = call(parts.to(device), lse.to(lse_dtype).to(device))
    assert out.dtype == dtype
    assert relative_error(out.cpu(), expected) < TOLERANCES[dtype]
    torch.testing.assert_close(out_lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert (out[0] == 0).all()
    assert (out_lse[0] == -torch.inf).all()

    given = torch.full_like(out, torch.nan)
    result, _ = call(parts.to(device), lse.to(lse_dtype).to(device), out=given)
    assert result is given
    assert torch.equal(given, out)


@pytest.mark.operator("remap")
@pytest.mark.parametrize("selection", get_args(Selection))
@pytest.mark.parametrize("name", SPECS)
def test_remap(call: Call, device: str, name: str, selection: Selection) -> None:
    case = build(SPECS[name], device=device)
    ids = select(case, selection)
    max_blocks = case.block_table.shape[1]
    indptr, entries = call(ids, case.cu_query_lens, max_blocks=max_blocks)
    num_heads, num_rows, topk = ids.shape
    assert indptr.shape == (num_heads, len(case.spec.requests) * max_blocks + 1)
    assert entries.shape == (num_heads, num_rows * topk)
    assert indptr.dtype == entries.dtype == torch.int32
    starts = case.cu_query_lens.tolist()
    for head in range(num_heads):
        bounds, found = indptr[head].tolist(), entries[head].tolist()
        assert bounds[0] == 0
        for request in range(len(case.spec.requests)):
            for block in range(max_blocks):
                key = request * max_blocks + block
                expected = [
                    row * topk + place
                    for row in range(starts[request], starts[request + 1])
                    for place in range(topk)
                    if int(ids[head, row, place]) == block
                ]
                assert found[bounds[key] : bounds[key + 1]] == expected
        assert set(found[bounds[-1] :]) <= {-1}


@pytest.mark.operator("page_table")
@pytest.mark.parametrize("selection", get_args(Selection))
@pytest.mark.parametrize("name", SPECS)
def test_page_table(call: Call, device: str, name: str, selection: Selection) -> None:
    case = build(SPECS[name], device=device)
    ids = select(case, selection)
    spec = case.spec
    pages, kv_lens = call(ids, *case.batch, block_size=spec.block_size, num_kv_heads=spec.num_kv_heads)
    num_heads, num_rows, topk = ids.shape
    assert pages.dtype == kv_lens.dtype == torch.int32
    assert pages.shape == (num_rows * num_heads, topk)
    expected_pages = torch.zeros_like(pages)
    expected_lens = torch.zeros_like(kv_lens)
    for row, request, position in ops_oracle.rows(case):
        for head in range(num_heads):
            own = position // spec.block_size
            blocks = sorted(block for block in ids[head, row].tolist() if 0 <= block <= own)
            for place, block in enumerate(blocks):
                page = int(case.block_table[request, block])
                expected_pages[row * num_heads + head, place] = page * spec.block_size * num_heads + head
                visible = min(spec.block_size, position + 1 - block * spec.block_size)
                expected_lens[row * num_heads + head] += visible
    assert torch.equal(kv_lens, expected_lens)
    # Only the last page's place is part of the contract.
    assert torch.equal(pages.sort(-1).values, expected_pages.sort(-1).values)
    last = ((kv_lens + spec.block_size - 1) // spec.block_size - 1).clamp(min=0).long()[:, None]
    assert torch.equal(pages.gather(1, last), expected_pages.gather(1, last))


@pytest.mark.operator("store_kv")
@pytest.mark.parametrize("cache_dtype", [None, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["ragged", "padding", "vllm_layout", "nothing_but_padding"])
def test_store_kv(call: Call, device: str, name: str, cache_dtype: torch.dtype | None) -> None:
    """A store into a cache without the new tokens makes it the cache that has them; nothing else changes."""
    stored = build(SPECS[name], device=device, cache_dtype=cache_dtype)
    empty = build(SPECS[name], device=device, cache_dtype=cache_dtype, is_stored=False)
    call(
        *(stored.k, stored.v, empty.k_cache, empty.v_cache, stored.slots),
        index_k=stored.index_k,
        index_k_cache=empty.index_k_cache,
    )
    for cache, expected in (
        (empty.k_cache, stored.k_cache),
        (empty.v_cache, stored.v_cache),
        (empty.index_k_cache, stored.index_k_cache),
    ):
        torch.testing.assert_close(cache.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.operator("store_kv")
def test_store_kv_scales_fp8(call: Call, device: str) -> None:
    case = build(SPECS["ragged"], device=device, cache_dtype=torch.float8_e4m3fn, is_stored=False)
    k_scale, index_scale = torch.tensor([0.25, 4.0], device=device), torch.tensor(0.5, device=device)
    v = case.v.clone()
    v[0, 0, 0], v[0, 0, 1] = 1e6, -1e6
    call(
        *(case.k, v, case.k_cache, case.v_cache, case.slots),
        index_k=case.index_k,
        index_k_cache=case.index_k_cache,
        k_scale=k_scale,
        index_scale=index_scale,
    )
    pages, offsets = case.slots // case.spec.block_size, case.slots % case.spec.block_size
    scaled = case.k / k_scale[:, None]
    assert torch.equal(case.k_cache.float()[pages, offsets], scaled.to(torch.float8_e4m3fn).float())
    assert torch.equal(case.index_k_cache.float()[pages, offsets], case.index_k / 0.5)
    assert case.v_cache.float()[pages[0], offsets[0], 0, :2].tolist() == [448.0, -448.0]


def test_caches_past_2_31_elements(device: str) -> None:
    """The second page begins past 2^31 elements: an offset kept in 32 bits reads or writes elsewhere."""
    case = build(FAR_CASE, device=device, cache_dtype=torch.float8_e4m3fn, is_stored=False)
    assert case.k_cache.stride(0) * 2 > 1 << 31
    ops.store_kv(
        *(case.k, case.v, case.k_cache, case.v_cache, case.slots),
        index_k=case.index_k,
        index_k_cache=case.index_k_cache,
    )
    scores = ops.index_score(case.index_q, case.index_k_cache, *case.batch, **case.bounds)
    assert_scores(scores, ops_oracle.block_scores(case))
    ids = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    options = {"max_query_len": case.spec.max_query_len}
    for impl in ("reference", "reference_kv_major"):
        out = ops.sparse_attend(case.q, case.k_cache, case.v_cache, ids, *case.batch, **options, impl=impl)
        assert_attention(out, ops_oracle.attend(case, ids), case)
    out = ops.dense_attend(case.q, case.k_cache, case.v_cache, *case.batch, **case.bounds)
    assert_attention(out, ops_oracle.attend(case), case)


@pytest.mark.operator("topk_blocks")
@pytest.mark.parametrize("local_blocks", [1, 3])
@pytest.mark.parametrize("topk", [3, 5, 20])
def test_topk_blocks_of_few_values(call: Call, device: str, topk: int, local_blocks: int) -> None:
    """Scores of seven values, both zeros among them: equal ones go to the lower block, NaN to −inf."""
    spec = CaseSpec(name="few", requests=((40, 300), (9, 60)), num_kv_heads=3, topk=topk, local_blocks=local_blocks)
    case = build(spec, device=device)
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 1.5, torch.inf, torch.nan])
    kinds = torch.randint(0, 7, (3, 49, 19), generator=torch.Generator().manual_seed(0))
    scores = values[kinds]
    ids = call(
        scores.to(device),
        *case.batch[1:],
        block_size=spec.block_size,
        topk=topk,
        local_blocks=local_blocks,
        max_query_len=spec.max_query_len,
    )
    assert ops_oracle.sets(ids) == ops_oracle.block_ids(case, scores.masked_fill(scores.isnan(), -torch.inf))


@pytest.mark.operator("dense_attend")
@pytest.mark.parametrize("is_per_head", [False, True])
def test_dense_attend_reads_fp8_with_scales(call: Call, device: str, is_per_head: bool) -> None:
    case = build(SPECS["ragged"], device=device, cache_dtype=torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 3.0], device=device), torch.tensor([2.0, 0.25], device=device)
    if not is_per_head:
        k_scale, v_scale = k_scale[0], v_scale[0]
    out = call(case.q, case.k_cache, case.v_cache, *case.batch, **case.bounds, k_scale=k_scale, v_scale=v_scale)
    k_scaled = case.k_cache.float() * k_scale.reshape(-1, 1)
    v_scaled = case.v_cache.float() * v_scale.reshape(-1, 1)
    expected = ops.dense_attend(case.q, k_scaled, v_scaled, *case.batch, **case.bounds, impl="reference")
    assert relative_error(out, expected) < TOLERANCES[torch.float32]


@pytest.mark.operator("index_score")
def test_index_score_reads_fp8_with_a_scale(call: Call, device: str) -> None:
    case = build(SPECS["special_keys"], device=device, cache_dtype=torch.float8_e4m3fn)
    scale = torch.tensor(0.5, device=device)
    for index_q in (case.index_q, case.index_q.to(torch.float8_e4m3fn)):
        scores = call(index_q, case.index_k_cache, *case.batch, **case.bounds, index_scale=scale)
        wide = case.index_k_cache.float() * 0.5
        expected = ops.index_score(index_q.float(), wide, *case.batch, **case.bounds, impl="reference")
        torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.operator("select_blocks")
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("name", ["ragged", "padding", "special_keys", "local_blocks_2", "block_128"])
def test_select_blocks_of_fp8(call: Call, device: str, name: str, is_narrow: bool) -> None:
    """8-bit keys, and 8-bit queries too: the choice of their values in float64."""
    case = build(SPECS[name], device=device, cache_dtype=torch.float8_e4m3fn)
    index_q = case.index_q.to(torch.float8_e4m3fn) if is_narrow else case.index_q
    ids = call(index_q, case.index_k_cache, *case.batch, **case.selection_options)
    assert ops_oracle.sets(ids) == ops_oracle.block_ids(case, ops_oracle.block_scores(case))
