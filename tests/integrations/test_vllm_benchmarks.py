"""What of benchmarks/vllm runs without vLLM: the slice's configuration and the comparison of two results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msaserve.config import ModelConfig

FOLDER = Path(__file__).parents[2] / "benchmarks/vllm"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"vllm_benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_slice_is_minimax_m3_with_fewer_layers(tmp_path: Path) -> None:
    load("slice").write_config(tmp_path, num_layers=5, num_dense=1)
    text = ModelConfig.from_checkpoint(tmp_path).text
    assert (text.num_heads, text.num_kv_heads, text.head_dim, text.num_index_heads, text.index_dim) == (
        64,
        4,
        128,
        4,
        128,
    )
    assert (text.block_size, text.topk_blocks, text.num_experts, text.num_experts_per_tok) == (128, 16, 128, 4)
    assert (text.sparse_layer_ids, text.has_moe) == ((1, 2, 3, 4), (False, True, True, True, True))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_each_says_what_it_takes(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name}.py")


def test_selection_without_a_release(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "selection.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/vllm_facts.py VERSION --keep DIR" in done.stderr


def test_compare(tmp_path: Path) -> None:
    def result(tokens: list[int], gap: float, ttft: float) -> str:
        greedy = [{"context": 200, "tokens": tokens, "best": [[-1.0, -1.0 - gap]] * len(tokens)}]
        alone = [{"context": 8192, "ttft_ms": ttft, "tpot_ms": 2.0}]
        together = [{"concurrency": 1, "output_tokens_per_s": 400.0, "prefill_ms": 70.0, "step_ms": 2.0}]
        return json.dumps({"greedy": greedy, "alone": alone, "together": together})

    paths = [tmp_path / "stock.json", tmp_path / "ours.json"]
    paths[0].write_text(result([1, 2, 3], 0.5, 100.0))
    paths[1].write_text(result([1, 2, 4], 0.25, 50.0))
    command = [sys.executable, str(FOLDER / "compare.py"), *map(str, paths)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 200 | 2 of 3 | 0.5000, 0.2500 |" in said
    assert "| 8,192 | 100.00 → 50.00 (0.50) | 2.00 → 2.00 (1.00) |" in said


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    alone = [{"context": c, "ttft_ms": c / 100, "tpot_ms": 2.0} for c in (8192, 65_536)]
    together = [{"concurrency": c, "output_tokens_per_s": 400.0 * c} for c in (1, 8)]
    result = {"alone": alone, "together": together}
    load("compare").plot(result, result, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('id="axes_') == 3
    assert "with the plugin" in drawn
