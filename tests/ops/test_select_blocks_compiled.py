"""Which products Triton compiles prefill's scores to for Hopper cards. No card is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

COMPILE = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from msaserve.ops.select_blocks import gluon_score, triton_prefill

found = {}
for module, queries, keys in json.loads(sys.argv[1]):
    is_gluon = module == "gluon_score"
    kernel = (gluon_score if is_gluon else triton_prefill)._score_kernel
    constants = {"HKV": 4, "HP": 4, "DI": 128, "BLOCK": 128, "BLOCK_Q": 64 if is_gluon else 32, "GROUP": 8, "STAGES": 3}
    constants |= {"num_warps": 4} if is_gluon else {"DP": 128}
    types = {"index_q": f"*{queries}", "index_k": f"*{keys}", "scores": "*fp32", "group_scores": "*fp32"}
    if is_gluon:
        box = gl.NVMMASharedLayout.get_default_for([1, 128, 128], getattr(gl, {"bf16": "bfloat16", "fp8e4nv": "float8e4nv"}[keys]))
        types["index_k"] = f"tensordesc<{keys}[1, 128, 128],{box!r}>"
    numbers = {"first_tile", "num_tiles", "split_blocks", "N", *(n for n in kernel.arg_names if n.startswith("stride"))}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32" if name in numbers else "*i32")
        for name in kernel.arg_names
    }
    source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constants, {})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found[f"{module} {queries} {keys}"] = compiled.asm["ptx"]
json.dump(found, open(sys.argv[2], "w"))
"""  # noqa: E501

MIXED = [(module, wide, "fp8e4nv") for module in ("gluon_score", "triton_prefill") for wide in ("bf16", "fp16")]
ALIKE = [("gluon_score", "bf16", "bf16"), ("gluon_score", "fp8e4nv", "fp8e4nv")]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each kernel and dtypes of queries and keys."""
    folder = tmp_path_factory.mktemp("compiled")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-c", COMPILE, json.dumps([*MIXED, *ALIKE]), str(folder / "ptx.json")]
    subprocess.run(command, env=env, check=True, timeout=300, capture_output=True)
    found: dict[str, str] = json.loads((folder / "ptx.json").read_text())
    return found


def products(text: str) -> set[str]:
    """Types of the operands of its matrix products."""
    found = re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\S*?\.f32\.(\w+)\.(\w+)", text)
    return {name for pair in found for name in pair}


@pytest.mark.parametrize(("module", "queries", "keys"), MIXED)
def test_wider_queries_are_never_multiplied_in_8_bits(
    ptx: dict[str, str], module: str, queries: str, keys: str
) -> None:
    """Hopper keeps 13 bits or so of sums of 8-bit products: not even two 8-bit terms that hold a query are exact."""
    found = products(ptx[f"{module} {queries} {keys}"])
    assert found
    assert found <= {"f16", "bf16"}


def test_queries_and_keys_of_one_width_are_multiplied_as_they_are(ptx: dict[str, str]) -> None:
    assert [products(ptx[" ".join(kind)]) for kind in ALIKE] == [{"bf16"}, {"e4m3"}]
