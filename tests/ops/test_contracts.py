"""Arguments that do not fit are refused before anything is computed, with the shapes in the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from msaserve import ops
from msaserve.ops.testing import SMALL_CASES, Case, CaseSpec, build, select

CASE = build(SMALL_CASES[0])
"""Ragged: T = 17, B = 5, Hq = 8, Hkv = 2, D = 32, Di = 16, blocks of 16, S = 4."""


def store_kv(case: Case, **changes: Any) -> Any:
    args = {"k": case.k, "v": case.v, "k_cache": case.k_cache, "v_cache": case.v_cache, "slots": case.slots}
    ops.store_kv(**{**args, "index_k": case.index_k, "index_k_cache": case.index_k_cache, **changes})


def batch(case: Case) -> dict[str, torch.Tensor]:
    return {"block_table": case.block_table, "seq_lens": case.seq_lens, "cu_query_lens": case.cu_query_lens}


def index_score(case: Case, **changes: Any) -> Any:
    args = {"index_q": case.index_q, "index_k_cache": case.index_k_cache, **batch(case), **case.bounds}
    return ops.index_score(**{**args, **changes})


def select_blocks(case: Case, **changes: Any) -> Any:
    args = {"index_q": case.index_q, "index_k_cache": case.index_k_cache, **batch(case), **case.selection_options}
    return ops.select_blocks(**{**args, **changes})


def topk_blocks(case: Case, **changes: Any) -> Any:
    args = {
        "block_scores": torch.zeros((2, 17, 6)),
        "seq_lens": case.seq_lens,
        "cu_query_lens": case.cu_query_lens,
        "block_size": 16,
        "topk": 4,
        "max_query_len": 7,
    }
    return ops.topk_blocks(**{**args, **changes})


def remap(case: Case, **changes: Any) -> Any:
    args = {"block_ids": select(case), "cu_query_lens": case.cu_query_lens, "max_blocks": 8}
    return ops.remap(**{**args, **changes})


def sparse_attend(case: Case, **changes: Any) -> Any:
    args = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, "block_ids": select(case), **batch(case)}
    return ops.sparse_attend(**{**args, "max_query_len": 7, **changes})


def dense_attend(case: Case, **changes: Any) -> Any:
    args = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache, **batch(case), **case.bounds}
    return ops.dense_attend(**{**args, **changes})


def page_table(case: Case, **changes: Any) -> Any:
    args = {"block_ids": select(case), **batch(case), "block_size": 16, "num_kv_heads": 2}
    return ops.page_table(**{**args, **changes})


def combine(case: Case, **changes: Any) -> Any:
    args = {"partial_out": torch.zeros((3, 2, 4, 4, 8)), "partial_lse": torch.zeros((3, 2, 4, 4))}
    return ops.combine(**{**args, **changes})


REFUSED = [
    (store_kv, {"v": CASE.v[:-1]}, r"v has shape \[16, 2, 32\], expected \[T, Hkv, D\] with T = 17"),
    (store_kv, {"v_cache": CASE.v_cache[..., :16]}, r"v_cache has shape .* with D = 32"),
    (store_kv, {"slots": CASE.slots.int()}, r"slots is torch.int32, expected torch.int64"),
    (store_kv, {"index_k": None}, r"index_k and index_k_cache go together"),
    (store_kv, {"index_k": CASE.index_k[:, :8]}, r"index_k_cache has shape .* with Di = 8"),
    (store_kv, {"k_cache": CASE.k_cache.to(torch.float8_e5m2)}, r"k_cache is torch.float8_e5m2"),
    (store_kv, {"k_scale": torch.ones(3)}, r"k_scale has shape \[3\], expected \[\] or \[2\]"),
    (index_score, {"index_q": CASE.index_q[0]}, r"index_q has shape \[2, 16\], expected \[T, Hkv, Di\]"),
    (index_score, {"seq_lens": CASE.seq_lens[1:]}, r"seq_lens has shape \[4\], expected \[B\] with B = 5"),
    (index_score, {"cu_query_lens": CASE.cu_query_lens[1:]}, r"cu_query_lens has shape \[5\].* B\+1 = 6"),
    (index_score, {"block_table": CASE.block_table.long()}, r"block_table is torch.int64, expected torch.int32"),
    (index_score, {"max_seq_len": 129}, r"max_seq_len = 129 needs 9 blocks, block_table \[5, 8\] has 8"),
    (index_score, {"out": torch.zeros((2, 17, 5))}, r"out has shape \[2, 17, 5\], expected \[2, 17, 6\]"),
    (index_score, {"index_k_cache": CASE.index_k_cache.to(torch.int8)}, r"index_k_cache is torch.int8"),
    (index_score, {"index_k_cache": CASE.index_k_cache.repeat(1, 1, 2)[..., ::2]}, r"contiguous last dimension"),
    (index_score, {"index_q": CASE.index_q.to(torch.float8_e4m3fn)}, r"index_q is torch.float8_e4m3fn, index_k_cache"),
    (index_score, {"index_q": CASE.index_q.to(torch.float8_e5m2)}, r"index_q is torch.float8_e5m2"),
    (index_score, {"index_scale": torch.ones(2)}, r"index_scale has shape \[2\]"),
    (index_score, {"seq_lens": CASE.seq_lens.to("meta")}, r"seq_lens is on meta, index_q on cpu"),
    (index_score, {"impl": "none_such"}, r"impl='none_such' is unknown"),
    (select_blocks, {"index_q": CASE.index_q.to(torch.float8_e4m3fn)}, r"index_q is torch.float8_e4m3fn"),
    (select_blocks, {"index_k_cache": CASE.index_k_cache.to(torch.float8_e5m2)}, r"index_k_cache is torch.float8_e5m2"),
    (select_blocks, {"local_blocks": 5}, r"local_blocks = 5 must be from 1 to topk = 4"),
    (select_blocks, {"local_blocks": 0}, r"local_blocks = 0"),
    (select_blocks, {"max_seq_len": 129}, r"max_seq_len = 129 does not fit block_table \[5, 8\]"),
    (select_blocks, {"out": torch.zeros((2, 17, 4))}, r"out is torch.float32, expected torch.int32"),
    (topk_blocks, {"block_scores": torch.zeros((2, 17, 6)).double()}, r"block_scores is torch.float64"),
    (topk_blocks, {"block_scores": torch.zeros((17, 6))}, r"block_scores has shape \[17, 6\]"),
    (topk_blocks, {"topk": 0}, r"topk = 0"),
    (remap, {"block_ids": select(CASE).long()}, r"block_ids is torch.int64"),
    (remap, {"cu_query_lens": CASE.cu_query_lens[:0]}, r"cu_query_lens has shape \[0\]"),
    (sparse_attend, {"q": CASE.q[:, :7]}, r"7 query heads are no multiple of 2 KV heads"),
    (sparse_attend, {"block_ids": select(CASE)[:1]}, r"block_ids has shape \[1, 17, 4\], .* with Hkv = 2"),
    (sparse_attend, {"out": CASE.q[1:].clone()}, r"out has shape \[16, 8, 32\], expected .* T = 17"),
    (sparse_attend, {"out": CASE.q.half()}, r"out is torch.float16, expected torch.float32"),
    (sparse_attend, {"k_cache": CASE.k_cache.to(torch.float8_e5m2)}, r"k_cache is torch.float8_e5m2"),
    (sparse_attend, {"v_cache": CASE.v_cache.to(torch.float8_e4m3fn)}, r"v_cache torch.float8_e4m3fn"),
    (sparse_attend, {"v_scale": torch.ones(2, 1)}, r"v_scale has shape \[2, 1\]"),
    (dense_attend, {"max_seq_len": 129}, r"max_seq_len = 129 does not fit block_table \[5, 8\]"),
    (dense_attend, {"k_scale": torch.ones(3)}, r"k_scale has shape \[3\], expected \[\] or \[2\]"),
    (dense_attend, {"v_cache": CASE.v_cache[1:]}, r"v_cache has shape .* with P ="),
    (page_table, {"num_kv_heads": 4}, r"block_ids has shape \[2, 17, 4\], expected num_kv_heads = 4"),
    (combine, {"partial_lse": torch.zeros((3, 2, 4, 5))}, r"partial_lse has shape \[3, 2, 4, 5\].* G = 4"),
    (combine, {"out": torch.zeros((3, 8, 4))}, r"out has shape \[3, 8, 4\], expected \[3, 8, 8\]"),
]


@pytest.mark.parametrize(("operator", "changes", "message"), REFUSED)
def test_refused(operator: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    operator(CASE)
    with pytest.raises(ValueError, match=f"^{operator.__name__}: .*{message}"):
        operator(CASE, **changes)


def test_paged_attention_refuses_a_layout_it_cannot_view() -> None:
    case = build(replace(SMALL_CASES[0], layout="vllm"))
    with pytest.raises(ValueError, match="token-major"):
        sparse_attend(case, impl="reference_paged")
    with pytest.raises(ValueError, match="not contiguous"):
        ops.one_head_view(case.k_cache)
    sparse_attend(CASE, impl="reference_paged")


def test_one_head_view_shows_each_head_of_each_page() -> None:
    cache = torch.arange(3 * 4 * 2 * 5).reshape(3, 4, 2, 5)
    view = ops.one_head_view(cache)
    assert view.data_ptr() == cache.data_ptr()
    for page in range(3):
        for head in range(2):
            assert torch.equal(view[page * 4 * 2 + head], cache[page, :, head])
    assert view.shape[0] == 2 * 4 * 2 + 2


def test_empty_batches() -> None:
    """No request, no row: shapes hold and nothing fails."""
    none = {
        "block_table": torch.zeros((0, 0), dtype=torch.int32),
        "seq_lens": torch.zeros(0, dtype=torch.int32),
        "cu_query_lens": torch.zeros(1, dtype=torch.int32),
    }
    for num_rows in (0, 3):
        rows = slice(0, num_rows)
        bounds = {"max_query_len": 0, "max_seq_len": 0}
        index = {"index_q": CASE.index_q[rows], **none, **bounds}
        assert index_score(CASE, **index).shape == (2, num_rows, 0)
        ids = select_blocks(CASE, **index)
        assert ids.shape == (2, num_rows, 4)
        assert (ids == -1).all()
        for impl in ("reference", "reference_kv_major", "reference_paged"):
            out = sparse_attend(CASE, q=CASE.q[rows], block_ids=ids, **none, impl=impl)
            assert torch.equal(out, torch.zeros_like(CASE.q[rows]))
        assert torch.equal(dense_attend(CASE, q=CASE.q[rows], **none, **bounds), torch.zeros_like(CASE.q[rows]))
        pages, kv_lens = page_table(CASE, block_ids=ids, **none)
        assert pages.shape == (2 * num_rows, 4)
        assert (kv_lens == 0).all()
        indptr, entries = remap(CASE, block_ids=ids, cu_query_lens=none["cu_query_lens"], max_blocks=0)
        assert indptr.tolist() == [[0], [0]]
        assert (entries == -1).all()


def test_prefill_on_a_cpu_goes_block_by_block_and_decode_query_by_query() -> None:
    """What impl=None takes, told by its bits: the two ways round differently."""
    for query_len, seq_len, way in ((64, 200, "reference_kv_major"), (1, 200, "reference")):
        case = build(CaseSpec(name="default", requests=((query_len, seq_len),), index_values="normal"))
        ids = select(case, "random")
        args = (case.q, case.k_cache, case.v_cache, ids, *case.batch)
        options = {"max_query_len": query_len}
        assert torch.equal(ops.sparse_attend(*args, **options), ops.sparse_attend(*args, **options, impl=way))
        others = {"reference", "reference_kv_major"} - {way}
        assert not torch.equal(
            ops.sparse_attend(*args, **options), ops.sparse_attend(*args, **options, impl=others.pop())
        )
