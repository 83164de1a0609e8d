"""sparse_attend through cuDNN's paged attention: what it refuses, and on a card with cuDNN's package what it gives."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from msaserve import ops
from msaserve.ops.testing import build, m3_spec, relative_error, select

SPEC = m3_spec("cudnn", ((1, 3000), (0, 0), (1, 1), (3, 2049), (1, 0)), tail_rows=1)


def test_it_says_what_is_missing() -> None:
    case = build(m3_spec("tiny", ((1, 130),), num_kv_heads=1, group=1, topk=2))
    with pytest.raises(ValueError, match=r"'cudnn_paged' cannot serve these arguments: .*(CUDA|Triton)"):
        ops.sparse_attend(
            case.q, case.k_cache, case.v_cache, select(case), *case.batch, max_query_len=1, impl="cudnn_paged"
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("cudnn") is None, reason="needs a card and cuDNN")
@pytest.mark.parametrize("kind", ["random", "holes", "out_of_range"])
def test_it_agrees_with_the_reference(kind: str) -> None:
    case = build(SPEC, dtype=torch.bfloat16, device="cuda")
    # cuDNN multiplies what lies beyond the visible tokens by 0, so it must be finite.
    caches = [cache.nan_to_num(0).contiguous() for cache in (case.k_cache, case.v_cache)]
    args = (case.q, *caches, select(case, kind), *case.batch)  # type: ignore[arg-type]
    got, want = (ops.sparse_attend(*args, max_query_len=3, impl=impl) for impl in ("cudnn_paged", "reference"))
    assert relative_error(got, want) < 4e-3
    assert (got[(want == 0).flatten(1).all(-1)] == 0).all()
