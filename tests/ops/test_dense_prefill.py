"""dense_attend's prefill kernels: tiles of a ragged batch in Triton's interpreter, and what is made for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.dense_attend import triton_prefill
from msaserve.ops.testing import Case, CaseSpec, build, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = CaseSpec(
    name="tiles",
    requests=((33, 70), (0, 0), (16, 16), (1, 50), (5, 0), (17, 200)),
    group=3,
    head_dim=64,
    block_size=64,
    tail_rows=9,
)
"""Requests that end inside a tile, with its last row, and in its first; rows of none that fill more than one."""


def attend(case: Case, impl: str, **options: Any) -> torch.Tensor:
    out = torch.full_like(case.q, torch.nan)
    args = (case.q, case.k_cache, case.v_cache, *case.batch)
    return ops.dense_attend(*args, **case.bounds, impl=impl, out=out, **options)


@pytest.mark.parametrize(("rows", "tokens"), [(16, 16), (32, 64), (128, 32), (64, 128)])
def test_tiles_of_all_sizes_give_the_reference(rows: int, tokens: int) -> None:
    case = build(TILES, dtype=torch.float16, device=DEVICE)
    options: dict[str, Any] = {"scale": 0.2, **case.bounds, "tile": triton_prefill.Tile(rows, tokens, 4, 2)}
    out = triton_prefill.dense_attend(case.q, case.k_cache, case.v_cache, *case.batch, **options)
    assert relative_error(out, attend(replace(case, q=case.q.float()), "reference", scale=0.2)) < 1e-3
    assert (out[-9:] == 0).all()


def test_more_queries_than_tokens() -> None:
    """Queries before a sequence's start see nothing; those after it see what there is."""
    case = build(TILES, dtype=torch.float16, device=DEVICE)
    lens = case.seq_lens.clone()
    lens[0] = 20
    case = replace(case, seq_lens=lens)
    out = attend(case, "triton_prefill")
    assert (out[:13] == 0).all()
    assert relative_error(out, attend(replace(case, q=case.q.float()), "reference")) < 1e-3


@pytest.mark.parametrize("impl", ["triton_prefill", "gluon_prefill"])
def test_a_scale_that_is_not_positive_is_refused(impl: str) -> None:
    case = build(TILES, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="is not positive" if impl == "triton_prefill" else "cannot serve"):
        attend(case, impl, scale=-1.0)


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from msaserve.ops.dense_attend import gluon_prefill

dim, block, group, is_narrow = map(int, sys.argv[1:5])
cache = gl.float8e4nv if is_narrow else gl.bfloat16
names = ("G", "D", "BLOCK", "BLOCK_B", "ROWS", "WGS", "STAGES", "num_warps")
constants = dict(zip(names, (group, dim, block, 4, 64, 3, 2, 4)))
boxes = {"q": (64 // group, group, 64), "k_cache": (1, 1, block, 64), "v_cache": (1, 1, block, dim)}
half = gl.float16 if is_narrow else gl.bfloat16
dtypes = {"q": half, "k_cache": cache, "v_cache": cache}
layout = gl.NVMMASharedLayout.get_default_for
constants |= dict.fromkeys(("SCALED_K", "SCALED_V", "WIDEN"), bool(is_narrow))
types = {"out": "*bf16", "scale_log2": "fp32", "B": "i32", "T": "i32", "k_scale": "*fp32", "v_scale": "*fp32"}
for name, box in boxes.items():
    types[name] = f"tensordesc<{dtypes[name]}{list(box)},{layout(list(box), dtypes[name])!r}>"
kernel = gluon_prefill._attend_kernel
signature = {
    name: "constexpr" if name in constants else types.get(name, "i32" if name.startswith("stride") else "*i32")
    for name in kernel.arg_names
}
source = GluonASTSource(kernel, signature, constants, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
assert "wgmma.mma_async" in compiled.asm["ptx"]
"""


@pytest.mark.parametrize("sizes", [(128, 128, 16, False), (64, 64, 1, False), (128, 128, 8, True)])
def test_it_compiles_for_hopper(sizes: tuple[int, ...], tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", COMPILE, *(str(int(size)) for size in sizes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
