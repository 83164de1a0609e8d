"""benchmarks/sglang/step.py: its processes and tables without SGLang, and small steps of real releases where some are.

SGLANG_RELEASES names a folder of unpacked wheels, each in a folder named as its version.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/sglang"
SCRIPT = FOLDER / "step.py"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; the one it imports lies beside it."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    for name in ("step", "release"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("step")


def test_says_what_it_takes() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: step.py")


def test_without_a_release(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "unzip sglang's wheel there" in done.stderr


def child(step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Any:
    script = tmp_path / "child.py"
    script.write_text(text)
    monkeypatch.setattr(step, "__file__", str(script))
    return step.Process(tmp_path, "decode, 1 KV head", True)


def test_a_process_waits_for_its_turn(step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "print('a word'); print('ready', flush=True); print('{\"took\": %d}' % (input() == 'go'))"
    process = child(step, monkeypatch, tmp_path, text)
    assert process.read(60) is None
    assert process.is_ready
    process.go()
    assert process.read(60) == {"took": 1}
    process.end()


def test_a_process_that_dies(step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = child(step, monkeypatch, tmp_path, "raise RuntimeError('an illegal memory access')")
    assert process.read(60) is None
    assert not process.is_ready
    process.end()
    assert process.failure() == "RuntimeError: an illegal memory access"


def test_a_process_that_hangs(step: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = child(step, monkeypatch, tmp_path, "import time; time.sleep(600)")
    assert process.read(0.2) is None
    process.end()
    assert process.failure() == "exit code -9"


def test_rows(step: Any) -> None:
    times = {"stock": 3000.4, "ours": 1500.0}
    found = {"error": {"stock": 0.002, "ours": 0.001}, "eager": times, "replayed": {"ours": 9.0}, "failed": {}}
    found["preparation"] = 3.21
    told = step.row("0.5.16", "a step", {**found, "took": True, "fell_back": []})
    assert told == "| 0.5.16 | a step | 0.00200 → 0.00100 | 3,000 → 1,500 (2.00×) | – → 9 | 3.2 | yes |"
    assert step.is_right({**found, "took": True, "fell_back": []})
    failed = {"failed": {"stock": "not captured: why"}, "took": True, "fell_back": ["sink is given"]}
    assert step.row("0.5.16", "a step", {**found, **failed}).endswith("| NO: sink is given; stock not captured: why |")
    assert not step.is_right({**found, **failed})


@pytest.mark.parametrize("error", [0.0253, float("nan")])
def test_other_blocks_in_a_few_rows_are_a_failure(step: Any, error: float) -> None:
    found = {"error": {"stock": 0.0022, "ours": error}, "failed": {}, "took": True, "fell_back": []}
    assert not step.is_right(found)


RELEASES = sorted(Path(os.environ["SGLANG_RELEASES"]).iterdir()) if "SGLANG_RELEASES" in os.environ else []


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("release", RELEASES or [None], ids=lambda release: release.name if release else "none")
def test_steps_of_a_release(release: Path | None, kind: str) -> None:
    """SGLang's own backend, loader and kernels, in Triton's interpreter, and ours in their place."""
    if release is None:
        pytest.skip("SGLANG_RELEASES names no folder of unpacked releases")
    command = [sys.executable, str(SCRIPT), str(release), "--only", f"{kind}, 4 KV heads, fp8", "--no-times"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "names that are not kernel arguments" in done.stderr:
        pytest.skip(f"the kernels of {release.name} do not load with this Triton")
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = (line for line in done.stdout.splitlines() if line.startswith(f"| {release.name} |"))
    cells = [cell.strip() for cell in told.strip("|").split("|")]
    assert cells[6] == "yes"
    assert all(float(error) < 1e-3 for error in cells[2].split(" → "))
