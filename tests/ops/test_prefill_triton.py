"""The prefill kernels against the reference at tiny sizes: in Triton's interpreter, or on a card if there is one."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.remap import triton as remap_triton
from msaserve.ops.select_blocks import triton_prefill
from msaserve.ops.testing import SMALL_CASES, Case, build, m3_spec, relative_error, select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {spec.name: spec for spec in SMALL_CASES}


def small(name: str) -> Case:
    return build(SPECS[name], device=DEVICE)


def choose(case: Case, impl: str) -> torch.Tensor:
    """Sorted: compared as sets."""
    ids = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options, impl=impl)
    return ids.sort(-1).values


def attend(case: Case, block_ids: torch.Tensor, impl: str) -> torch.Tensor:
    max_query_len = case.spec.max_query_len
    out = torch.full_like(case.q, torch.nan)
    args = (case.q, case.k_cache, case.v_cache, block_ids, *case.batch)
    return ops.sparse_attend(*args, max_query_len=max_query_len, out=out, impl=impl)


@pytest.mark.parametrize(
    "name",
    [
        "ragged",
        "padding",
        "nothing_but_padding",
        "all_ties",
        "special_keys",
        "local_blocks_2",
        "group_1",
        "topk_1",
        "topk_64",
    ],
)
def test_selection_equals_the_reference(name: str) -> None:
    case = small(name)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


@pytest.mark.parametrize("name", ["all_ties", "special_keys"])
def test_selection_in_segments_and_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cut into segments, ties across their borders; scratch for one tile of queries at a time."""
    monkeypatch.setattr(triton_prefill, "num_workers", lambda device: 1000)
    monkeypatch.setattr(triton_prefill, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(triton_prefill, "MIN_SEGMENT", 2)
    case = small(name)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


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


@pytest.mark.parametrize("tile", [0, 8, 16, 32])
def test_plan_covers_every_visible_choice_once(tile: int) -> None:
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
    plan = remap_triton.plan(
        block_ids.to(DEVICE),
        table.to(DEVICE),
        seq_lens.int().to(DEVICE),
        cu_query_lens.int().to(DEVICE),
        block_size=block_size,
        item=8,
        align=4,
        tile=tile,
    )
    times = torch.zeros(2, num_tokens * topk, dtype=torch.int64)
    for items, count in ((plan.items[0], int(plan.counts[0])), (plan.tail_items, int(plan.counts[1]))):
        for head, page, first, end, shift, filled in items[:count, :6].tolist():
            assert 0 <= end - first <= 8
            entries = plan.entries[head, first:end].long().cpu()
            times[head, entries] += 1
            assert (table[requests[entries // topk], block_ids[head].flatten()[entries].long()] == page).all()
            assert (positions[entries // topk] - entries // topk - page % num_blocks * block_size == shift).all()
            assert (filled < block_size) == (items is plan.tail_items)
    shared = plan.shared
    assert (shared is None) == (tile == 0)
    if shared is not None:
        num_shared = 0
        for head in range(2):
            for index, (request, first, end, count) in enumerate(shared.tiles[head].tolist()):
                blocks = shared.blocks[head, index, :count].tolist()
                num_shared += count
                assert blocks == sorted(blocks)
                assert count == 0 or count >= remap_triton.MIN_BLOCKS
                for block, queries in blocks:
                    assert (block + 1) * block_size <= seq_lens[request]
                    for query in range(tile):
                        if queries >> query & 1:
                            assert first + query < end
                            place = int((block_ids[head, first + query] == block).nonzero())
                            times[head, (first + query) * topk + place] += 1
                            assert 0 <= shared.places[head, first + query] <= place
        assert num_shared > 0
    assert torch.equal(times, is_wanted.long().flatten(1))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("overlap", [False, True])
def test_hopper_kernels_equal_the_reference(overlap: bool) -> None:
    case = build(m3_spec("chunk", ((300, 5000), (1, 1), (77, 77), (200, 2048))), dtype=torch.bfloat16, device=DEVICE)
    chosen, expected = choose(case, "gluon_prefill"), choose(case, "reference")
    assert (chosen == expected).all(-1).float().mean() > 0.99
    block_ids = neighbours(4, case.q.shape[0], 40, 16).to(DEVICE) if overlap else select(case)
    out = attend(case, block_ids, "gluon_kv_major")
    assert relative_error(out, attend(case, block_ids, "reference")) < 4e-3
