"""What of benchmarks/vllm runs without vLLM: the slice's configuration and the comparison of two results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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


def together(context: int, concurrency: int, speed: float) -> dict[str, Any]:
    figures = {"output_tokens_per_s": speed, "ttft_ms": 70.0, "last_ttft_ms": 90.0, "step_ms": 2.0}
    return {"context": context, "concurrency": concurrency, **figures}


def compare(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "compare.py"), *map(str, paths)], capture_output=True, text=True, check=False
    )


def test_compare(tmp_path: Path) -> None:
    def result(tokens: list[int], gap: float, ttft: float, speed: float) -> str:
        greedy = [{"context": 200, "tokens": tokens, "best": [[-1.0, -1.0 - gap]] * len(tokens)}]
        cold = [{"context": 8192, "cold_ttft_ms": ttft}]
        return json.dumps({"greedy": greedy, "cold": cold, "together": [together(8192, 32, speed)]})

    paths = [tmp_path / "stock.json", tmp_path / "ours.json"]
    paths[0].write_text(result([1, 2, 3], 0.5, 100.0, 400.0))
    paths[1].write_text(result([1, 2, 4], 0.25, 50.0, 600.0))
    said = compare(*paths).stdout
    assert "| 200 | 2 of 3 | 0.5000, 0.2500 |" in said
    assert "| 8,192 | 100.00 → 50.00 (0.50) |" in said
    assert "| 8,192 | 32 | 400.00 → 600.00 (1.50) | 70.00 → 70.00 (1.00) |" in said


def test_compare_refuses_results_of_other_runs(tmp_path: Path) -> None:
    paths = []
    for concurrency in (1, 8):
        cold = [{"context": 8192, "cold_ttft_ms": 1.0}]
        paths.append(tmp_path / f"{concurrency}.json")
        paths[-1].write_text(json.dumps({"greedy": [], "cold": cold, "together": [together(8192, concurrency, 400.0)]}))
    done = compare(*paths)
    assert done.returncode == 1
    assert "not the same runs: [8192, 1] and [8192, 8]" in done.stderr


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [together(context, n, 400.0 * n) for context in (8192, 65_536) for n in (1, 8)]
    cold = [{"context": context, "cold_ttft_ms": context / 100} for context in (8192, 65_536)]
    load("compare").plot({"together": rows, "cold": cold}, {"together": rows, "cold": cold}, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('id="axes_') == 3
    assert "with the plugin, 8 at once" in drawn


class Engine:
    """vLLM's engine as `Slice.timed` drives it: one token of each request a step, the first only after two steps."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.made: dict[str, int] = {}
        self.sent: list[list[int]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert name not in self.made
        self.sent.append(prompt["prompt_token_ids"])
        self.requests[name] = (prompt["prompt_token_ids"], sampling["max_tokens"])
        self.made[name] = -1

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        outputs = []
        for name, (_, most) in list(self.requests.items()):
            self.made[name] += 1
            tokens = list(range(self.made[name]))
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)]))
            if self.made[name] == most:
                del self.requests[name]
        return outputs


def test_requests_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    module, engine = load("slice"), Engine()
    runs = module.Slice(SimpleNamespace(llm_engine=engine))
    monkeypatch.setattr(runs, "generate", lambda prompts, num_tokens: (0.0, []))
    row = runs.together(4096, 3)
    assert (row["context"], row["concurrency"]) == (4096, 3)
    assert [len(prompt) for prompt in engine.sent] == [4096] * 6
    assert len({tuple(prompt[: 4096 - module.NEW]) for prompt in engine.sent}) == 1
    assert len({tuple(prompt) for prompt in engine.sent}) == 6
    assert 0 < row["ttft_ms"] <= row["last_ttft_ms"]
    assert row["output_tokens_per_s"] > 0
    assert set(engine.made.values()) == {module.OUTPUT}
