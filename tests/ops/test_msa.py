"""The pipeline as a whole, and the document that shows it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import ops_oracle
import pytest
import torch

from msaserve import ops
from msaserve.ops.testing import SMALL_CASES, TOLERANCES, Case, build, relative_error

SPECS = {spec.name: spec for spec in SMALL_CASES}
DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"


def run(case: Case, rows: slice = slice(None), seq_len: int | None = None) -> torch.Tensor:
    """msa_attend on a case, or on some rows of its only request, the last of which is token seq_len − 1."""
    seq_lens, cu_query_lens = case.seq_lens, case.cu_query_lens
    if seq_len is not None:
        seq_lens = torch.tensor([seq_len], dtype=torch.int32, device=seq_lens.device)
        cu_query_lens = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=seq_lens.device)
    return ops.msa_attend(
        *(tensor[rows] for tensor in (case.q, case.k, case.v, case.index_q, case.index_k)),
        *(case.k_cache, case.v_cache, case.index_k_cache, case.slots[rows], case.block_table),
        *(seq_lens, cu_query_lens),
        **case.selection_options,
    )


@pytest.mark.parametrize("name", [name for name in SPECS if name != "normal_scores"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_msa_attend(device: str, name: str, dtype: torch.dtype) -> None:
    """New tokens' slots are NaN before: the step must store them before it reads."""
    case = build(SPECS[name], dtype=dtype, device=device, is_stored=False)
    stored = build(SPECS[name], dtype=dtype, device=device)
    chosen = ops_oracle.block_ids(stored, ops_oracle.block_scores(stored))
    ids = torch.full((case.spec.num_kv_heads, case.q.shape[0], case.spec.topk), -1, dtype=torch.int32)
    for head, rows in enumerate(chosen):
        for row, blocks in enumerate(rows):
            ids[head, row, : len(blocks)] = torch.tensor(sorted(blocks), dtype=torch.int32)
    assert relative_error(run(case).cpu(), ops_oracle.attend(stored, ids)) < TOLERANCES[dtype]


@pytest.mark.parametrize("chunk_len", [1, 7, 16, 40])
def test_chunked_is_whole(device: str, chunk_len: int) -> None:
    """A prompt in chunks that start and end inside blocks; every later token's slot is NaN until its chunk."""
    spec = replace(SPECS["ragged"], requests=((75, 75),), index_values="normal")
    dtype = torch.float64 if device == "cpu" else torch.float32
    whole = run(build(spec, dtype=dtype, device=device, is_stored=False))
    case = build(spec, dtype=dtype, device=device, is_stored=False)
    chunks = []
    for start in range(0, 75, chunk_len):
        end = min(start + chunk_len, 75)
        chunks.append(run(case, slice(start, end), end))
    assert relative_error(torch.cat(chunks), whole) < TOLERANCES[dtype]


def test_fp8_caches_are_written_and_read_with_scales(device: str) -> None:
    """Scales that are powers of two, of values that 8 bits hold: what wide caches give."""
    spec = replace(SPECS["ragged"], index_values="integers")
    dtype = torch.float8_e4m3fn
    case = build(spec, device=device, cache_dtype=dtype, is_stored=False)
    wide = build(spec, device=device, is_stored=False)
    narrow_kv = {name: getattr(case, name).mul(2).round().div(2).clamp(-3, 3) for name in ("k", "v")}
    scales = {"k_scale": torch.tensor([0.5, 4.0]), "v_scale": torch.tensor(2.0), "index_scale": torch.tensor(0.25)}
    held = [cache.float() for cache in (case.k_cache, case.v_cache, case.index_k_cache)]
    for cache, scale, given in zip(
        held, scales.values(), (wide.k_cache, wide.v_cache, wide.index_k_cache), strict=True
    ):
        given.copy_(cache * scale.to(device).reshape(-1, 1))
    args = (narrow_kv["k"], narrow_kv["v"], case.index_q, case.index_k)
    rest = (case.slots, *case.batch)
    caches = (case.k_cache, case.v_cache, case.index_k_cache)
    on_device = {name: scale.to(device) for name, scale in scales.items()}
    out = ops.msa_attend(case.q, *args, *caches, *rest, **case.selection_options, **on_device)
    wide_caches = (wide.k_cache, wide.v_cache, wide.index_k_cache)
    expected = ops.msa_attend(case.q, *args, *wide_caches, *rest, **case.selection_options)
    assert relative_error(out, expected) < TOLERANCES[torch.float32]
    unscaled = ops.msa_attend(case.q, *args, *caches, *rest, **case.selection_options)
    assert relative_error(unscaled, expected) > 0.1


def test_the_document_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    exec(compile("\n".join(blocks), str(DOCUMENT), "exec"), {})
