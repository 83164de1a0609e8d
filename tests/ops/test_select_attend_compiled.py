"""What ptxas makes of select_attend's kernels for Hopper cards. No card is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from msaserve.ops.select_attend import gluon_decode

constants = {"G": 16, "D": 128, "SPLITS": 16, "PDL": True, "num_warps": 1}
if sys.argv[1] == "_attend_kernel":
    constants |= {"BP": 1, "QP": 1, "BLOCK": 128, "TILE": 64, "S": 16, "SP": 32, "CP": 512, "RP": int(sys.argv[2])}
    constants |= {"STAGES": 1, "SCALED_K": False, "SCALED_V": False, "FAST": True, "num_warps": 4}
    constants |= {"k_scale": None, "v_scale": None}
box = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 128], gl.bfloat16)
types = {"q_ptr": "*bf16", "out": "*bf16", "scale_log2": "fp32"}
types |= {name: f"tensordesc<bf16[1, 1, 64, 128],{box!r}>" for name in ("k_cache", "v_cache")}
types |= {name: "i32" for name in ("num_requests", "max_blocks", "local_blocks")}
kernel = getattr(gluon_decode, sys.argv[1])
signature = {
    name: "constexpr" if name in constants else types.get(name, "i32" if name.startswith("stride") else "*i32")
    for name in kernel.arg_names
}
source = GluonASTSource(kernel, signature, constants, {})
options = {"num_warps": constants["num_warps"]}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
open(sys.argv[3], "wb").write(compiled.asm["cubin"])
"""


def compiled(kernel: str, run: int, tmp_path: Path) -> str:
    """SASS for Hopper cards."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    cubin = tmp_path / "kernel.cubin"
    command = [sys.executable, "-c", COMPILE, kernel, str(run), str(cubin)]
    subprocess.run(command, env=env, check=True, timeout=300, capture_output=True)
    return subprocess.run([TOOLS / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout


pytestmark = pytest.mark.skipif(
    not (TOOLS / "nvdisasm").exists(), reason="Triton's tools for NVIDIA cards are not installed"
)


def test_loops_that_wait_look_again(tmp_path: Path) -> None:
    """A plain load of a word was taken out of the loop that waits for it, and the program never ended."""
    assert any("STRONG.GPU" in body for body in loops(compiled("_merge_kernel", 0, tmp_path)))


@pytest.mark.parametrize("run", [0, 16])
def test_attention_stays_in_registers(run: int, tmp_path: Path) -> None:
    """Weights of one product are the operand of the next, and nothing is spilled."""
    sass = compiled("_attend_kernel", run, tmp_path)
    assert "STL" not in sass
    products = min((body for body in loops(sass) if "HMMA" in body), key=len)
    unmasked = products[products.index("HMMA") : products.rindex("HMMA")]
    assert "LDSM" in unmasked
    assert not re.search(r"\b(STS|LDS)\b", unmasked)
    assert unmasked.count("BAR.SYNC") <= 1


def loops(sass: str) -> list[str]:
    """The text from each label to the last branch back to it."""
    lines = sass.splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"^\s*(\.L_\w+):", line))}
    ends: dict[str, int] = {}
    for at, line in enumerate(lines):
        match = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if match and labels.get(match[1], at) < at:
            ends[match[1]] = at
    return ["\n".join(lines[labels[label] : end]) for label, end in ends.items()]
