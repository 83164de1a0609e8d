"""The scores' Gluon kernel for Hopper, executed on a CPU, within the whole of prefill's selection."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a card runs the kernel itself", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import gluon_on_cpu

from msaserve import ops
from msaserve.ops.select_blocks import gluon_score, triton_prefill
from msaserve.ops.testing import Case, CaseSpec, build, m3_spec

E4M3 = torch.float8_e4m3fn
DTYPES = [(torch.bfloat16, torch.bfloat16), (E4M3, E4M3), (torch.bfloat16, E4M3), (torch.float16, E4M3)]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gluon_on_cpu.Kernel(gluon_score, "_score_kernel")
    monkeypatch.setattr(gluon_score, "taped", lambda _: kernel)
    monkeypatch.setattr(gluon_score, "descriptor", gluon_on_cpu.Descriptor)
    monkeypatch.setattr(gluon_score, "num_workers", lambda device: 3)


def cast(case: Case, queries: torch.dtype) -> Case:
    return replace(case, index_q=case.index_q.to(queries))


def assert_exact(case: Case) -> None:
    ids = gluon_score.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    wide = case.index_q.double(), case.index_k_cache.double()
    expected = ops.select_blocks(*wide, *case.batch, **case.selection_options, impl="reference")
    assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize(("queries", "keys"), DTYPES)
@pytest.mark.parametrize(
    "spec",
    [
        m3_spec("ragged", ((70, 5000), (1, 1), (0, 0), (9, 2048), (3, 300), (5, 0)), group=1, tail_rows=3),
        m3_spec("heads_3_dim_64", ((20, 1500), (90, 90)), num_kv_heads=3, index_dim=64, block_size=64, topk=4, group=1),
    ],
    ids=lambda spec: spec.name,
)
def test_the_choice_is_that_of_exact_scores(spec: CaseSpec, queries: torch.dtype, keys: torch.dtype) -> None:
    assert_exact(cast(build(spec, dtype=torch.float32, cache_dtype=keys), queries))


@pytest.mark.parametrize("group", [0, 8, 16])
def test_groups_of_blocks_over_8_bit_keys(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(triton_prefill, "group_of", lambda num_blocks, log: group)
    spec = m3_spec("groups", ((10, 9000), (66, 3100)), group=1, index_values="integers")
    assert_exact(cast(build(spec, dtype=torch.float32, cache_dtype=E4M3), torch.bfloat16))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 3e30])
def test_bfloat16_queries_of_any_size_over_8_bit_keys(size: float) -> None:
    """Larger and smaller than float16 holds: a row's scale is a power of two."""
    case = build(m3_spec("sizes", ((40, 4000),), group=1), dtype=torch.float32, cache_dtype=E4M3)
    assert_exact(cast(replace(case, index_q=case.index_q * size), torch.bfloat16))
