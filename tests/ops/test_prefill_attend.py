"""The prefill attention's kernels against the reference at tiny sizes: in Triton's interpreter, or on a card."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.remap import plan_triton
from msaserve.ops.sparse_attend import triton_kv_major
from msaserve.ops.testing import SMALL_CASES, Case, build, m3_spec, relative_error, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {spec.name: spec for spec in SMALL_CASES}


def small(name: str, **options: Any) -> Case:
    return build(SPECS[name], device=DEVICE, **options)


def attend(case: Case, block_ids: torch.Tensor, impl: str, **options: Any) -> torch.Tensor:
    out = torch.full_like(case.q, torch.nan)
    args = (case.q, case.k_cache, case.v_cache, block_ids, *case.batch)
    return ops.sparse_attend(*args, max_query_len=case.spec.max_query_len, out=out, impl=impl, **options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ragged", "random"),
        ("padding", "holes"),
        ("vllm_layout", "out_of_range"),
        ("group_1", "equal"),
        ("block_64", "random"),
    ],
)
def test_attention_equals_the_reference(name: str, kind: str) -> None:
    case = small(name)
    block_ids = select(case, kind)  # type: ignore[arg-type]
    out = attend(case, block_ids, "triton_kv_major")
    assert relative_error(out, attend(case, block_ids, "reference")) < 1e-5


@pytest.mark.parametrize("is_per_head", [False, True])
@pytest.mark.parametrize("name", ["ragged", "vllm_layout"])
def test_scaled_8_bit_caches(name: str, is_per_head: bool) -> None:
    case = small(name, cache_dtype=torch.float8_e4m3fn)
    scale = torch.linspace(0.5, 3.0, case.spec.num_kv_heads, device=DEVICE) if is_per_head else torch.tensor(0.7)
    scales = {"k_scale": scale.to(DEVICE), "v_scale": scale.flip(0).to(DEVICE) * 2 if is_per_head else scale.to(DEVICE)}
    block_ids = select(case)
    out = attend(case, block_ids, "triton_kv_major", **scales)
    assert relative_error(out, attend(case, block_ids, "reference", **scales)) < 1e-5


def test_partial_outputs_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many partial outputs to hold at once: the batch is cut between and inside of requests."""
    case = small("ragged")
    block_ids = select(case)
    expected = attend(case, block_ids, "triton_kv_major")
    per_token = case.q.shape[1] * block_ids.shape[2] * case.q.shape[2] * 4
    monkeypatch.setattr(triton_kv_major, "PARTIAL_BYTES", 4 * per_token)
    assert relative_error(attend(case, block_ids, "triton_kv_major"), expected) < 1e-6


@pytest.mark.parametrize("name", ["ragged", "padding", "topk_64"])
def test_remap_equals_the_reference(name: str) -> None:
    case = small(name)
    block_ids, max_blocks = select(case, "holes"), case.block_table.shape[1]
    ours, expected = (
        ops.remap(block_ids, case.cu_query_lens, max_blocks=max_blocks, impl=impl) for impl in ("triton", "reference")
    )
    assert torch.equal(ours.indptr, expected.indptr)
    assert torch.equal(ours.entries, expected.entries)


def test_combine_skips_empty_parts() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    parts = torch.randn(5, 2, 6, 3, 16, generator=generator, device=DEVICE)
    lse = torch.randn(5, 2, 6, 3, generator=generator, device=DEVICE)
    lse[1], lse[2, :, 1] = -torch.inf, -torch.inf
    parts[1], parts[2, :, 1] = torch.nan, torch.nan
    (out, out_lse), (expected, expected_lse) = (ops.combine(parts, lse, impl=impl) for impl in ("triton", "reference"))
    assert relative_error(out, expected) < 1e-6
    torch.testing.assert_close(out_lse, expected_lse)


def neighbours(num_heads: int, num_tokens: int, num_blocks: int, topk: int) -> torch.Tensor:
    """block_ids of which most are common to runs of 32 queries, no block twice."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_heads, num_tokens, num_blocks, generator=generator).argsort(-1)[..., :topk]
    common = ids[:, ::32].repeat_interleave(32, 1)[:, :num_tokens]
    is_common = torch.rand(num_heads, num_tokens, topk, generator=generator) < 0.8
    ids = torch.where(is_common, common, ids).sort(-1).values
    ids[..., 1:][ids.diff(dim=-1) == 0] = -1
    return ids.int()


@pytest.mark.parametrize(("tile", "tile_parts", "parts"), [(0, 1, 1), (6, 3, 1), (16, 1, 3), (24, 3, 2)])
def test_plan_covers_every_visible_choice_once(tile: int, tile_parts: int, parts: int) -> None:
    """Each (query, block) a query may see is in one work item or in its tile's list, in no other and not twice."""
    block_size, num_blocks, topk = 16, 63, 6
    query_lens, seq_lens = torch.tensor([70, 0, 130]), torch.tensor([500, 0, 995])
    cu_query_lens = torch.cat([query_lens.new_zeros(1), query_lens.cumsum(0)])
    num_tokens = int(cu_query_lens[-1])
    block_ids = neighbours(2, num_tokens, num_blocks, topk)
    requests = torch.searchsorted(cu_query_lens[1:], torch.arange(num_tokens), right=True)
    positions = (seq_lens - cu_query_lens[1:])[requests] + torch.arange(num_tokens)
    is_wanted = (block_ids >= 0) & (block_ids.long() * block_size <= positions[:, None])
    table = torch.arange(3 * num_blocks, dtype=torch.int32).view(3, -1)
    plan = plan_triton.plan(
        block_ids.to(DEVICE),
        table.to(DEVICE),
        seq_lens.int().to(DEVICE),
        cu_query_lens.int().to(DEVICE),
        block_size=block_size,
        item=8,
        align=4,
        parts=parts,
        tile=tile,
        tile_parts=tile_parts,
    )
    wanted = []
    for head in range(2):
        queries = is_wanted[head].nonzero()[:, 0].tolist()
        wanted.append(set(zip(queries, block_ids[head][is_wanted[head]].tolist(), strict=True)))
    pairs: list[list[tuple[int, int]]] = [[], []]
    slots: list[list[tuple[int, int]]] = [[], []]
    part_tokens = -(-num_tokens // parts)
    lists = [*plan.items, plan.tail_items]
    *counts, num_taken = plan.counts.tolist()
    assert num_taken == 0
    for unit, (items, count) in enumerate(zip(lists, counts, strict=True)):
        for head, page, first, end, shift, filled in items[:count, :6].tolist():
            assert 0 < end - first <= 8
            block = page % num_blocks
            assert (filled < block_size) == (unit == len(plan.items))
            for entry in plan.entries[head, first:end].tolist():
                query = entry // topk
                assert page // num_blocks == requests[query]
                assert positions[query] - query - block * block_size == shift
                assert unit == len(plan.items) or (head, query // part_tokens) == (unit % 2, unit // 2)
                pairs[head].append((query, block))
                slots[head].append((query, entry % topk))
    shared = plan.shared
    assert (shared is None) == (tile == 0)
    if shared is not None:
        num_shared = 0
        for head in range(2):
            for index, (request, first, end, count) in enumerate(shared.tiles[head].tolist()):
                num_shared += count
                assert count == 0 or count >= plan_triton.MIN_BLOCKS
                for block, bits in shared.blocks[head, index, :count].tolist():
                    assert (block + 1) * block_size <= seq_lens[request]
                    pairs[head] += [(first + query, block) for query in range(tile) if bits >> query & 1]
                    assert first + (bits & 0xFFFFFFFF).bit_length() <= end
            own = shared.slots[head].tolist()
            slots[head] += [(query, slot) for query, slot in enumerate(own) if slot >= 0]
        assert num_shared > 0
    for head in range(2):
        assert len(pairs[head]) == len(set(pairs[head]))
        assert set(pairs[head]) == wanted[head]
        counts = plan.part_counts[head].tolist()
        assert sorted(slots[head]) == [(query, slot) for query in range(num_tokens) for slot in range(counts[query])]


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper card"
)
RAGGED = ((300, 5000), (1, 1), (77, 77), (0, 0), (200, 2048))


@pytest.mark.cuda
@HOPPER
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("changes", "dtypes"),
    [
        ({}, {}),
        ({"layout": "vllm", "tail_rows": 3}, {"dtype": torch.float16}),
        ({"group": 8, "head_dim": 64, "block_size": 64, "topk": 5}, {}),
        ({"group": 32, "num_kv_heads": 2, "block_size": 64}, {}),
        ({"group": 64, "num_kv_heads": 1, "head_dim": 64, "topk": 64}, {}),
        ({"layout": "vllm"}, {"cache_dtype": torch.float8_e4m3fn}),
        ({"group": 8, "head_dim": 64, "block_size": 64}, {"cache_dtype": torch.float8_e4m3fn}),
    ],
)
def test_hopper_kernels_equal_the_reference(changes: Any, dtypes: Any, is_shared: bool) -> None:
    case = build(m3_spec("chunk", RAGGED, **changes), device=DEVICE, **{"dtype": torch.bfloat16, **dtypes})
    heads, topk = case.spec.num_kv_heads, case.spec.topk
    block_ids = neighbours(heads, case.q.shape[0], 2 * topk + 8, topk).to(DEVICE) if is_shared else select(case)
    scales = {}
    if "cache_dtype" in dtypes:
        scales = {name: torch.linspace(0.5, 2.0, heads, device=DEVICE) for name in ("k_scale", "v_scale")}
    out = attend(case, block_ids, "gluon_kv_major", **scales)
    wide = replace(case, q=case.q.float())
    if "cache_dtype" not in dtypes:
        wide = replace(wide, k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
    assert relative_error(out, attend(wide, block_ids, "reference", **scales)) < 4e-3
    for _ in range(3):
        assert torch.equal(attend(case, block_ids, "gluon_kv_major", **scales), out)


@pytest.mark.cuda
@HOPPER
def test_hopper_kernels_in_a_graph() -> None:
    """A captured call follows what its tensors hold at replay."""
    case = build(m3_spec("chunk", RAGGED), dtype=torch.bfloat16, device=DEVICE)
    block_ids = select(case)
    attend(case, block_ids, "gluon_kv_major")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(case, block_ids, "gluon_kv_major")
    block_ids.copy_(neighbours(case.spec.num_kv_heads, case.q.shape[0], 40, 16))
    graph.replay()
    assert torch.equal(out, attend(case, block_ids, "gluon_kv_major"))
