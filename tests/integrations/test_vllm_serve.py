"""`msaserve serve --engine vllm`, with this package's own worker in the place of vLLM's gRPC server: same protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import vllm_stand_in

TINY = Path(__file__).parents[1] / "golden/tiny"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `vllm` and `smg_grpc_servicer` can be imported."""
    return {**vllm_stand_in.environment(tmp_path, TINY), "VLLM_PLUGINS": "other"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One that vLLM would run and this package's engine would not: with quantised weights, which are not even there."""
    directory = tmp_path / "m3"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp8"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def served(environment: dict[str, str], checkpoint: Path) -> Iterator[tuple[str, subprocess.Popen[str], int]]:
    """(URL, the server, vLLM's process id)."""
    command = [sys.executable, "-m", "msaserve", "serve", str(checkpoint), "--engine", "vllm", "--port", "0"]
    command += ["--served-model-name", "m3", "--vllm-args=--max-model-len 4096"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = next(line.split()[1] for line in process.stdout if "curl http" in line).partition("/v1/")[0]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (child,) = (int(pid) for pid in children)
        yield url, process, child
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def test_answers_come_from_it(
    served: tuple[str, subprocess.Popen[str], int], environment: dict[str, str], checkpoint: Path
) -> None:
    url, process, child = served
    body = {"model": "m3", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=200).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 4
    seen = json.loads(Path(environment["SEEN"]).read_text())
    assert seen["argv"][:3] == ["serve", str(checkpoint), "--grpc"]
    assert seen["argv"][-2:] == ["--max-model-len", "4096"]
    assert seen["plugins"] == "other,msaserve"
    process.send_signal(signal.SIGINT)
    assert process.wait(200) in (0, 130)
    assert not Path(f"/proc/{child}").exists()


def test_its_death_ends_the_server(served: tuple[str, subprocess.Popen[str], int]) -> None:
    _, process, child = served
    os.kill(child, signal.SIGKILL)
    assert process.wait(200) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--engine", "vllm"], "needs vllm: pip install 'vllm[grpc]'"),
        (["--engine", "vllm", "--dtype", "float32"], "vLLM takes its options from --vllm-args"),
        (["--vllm-args=--x"], "--vllm-args is for --engine vllm"),
        (["--engine", "vllm", "--vllm-args=--port 1"], "cannot set --port"),
    ],
)
def test_what_cannot_be(given: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "msaserve", "serve", str(TINY), "--port", "0", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert reason in done.stderr


def test_no_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "msaserve", "serve", str(tmp_path), "--port", "0", "--engine", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "config.json is missing: not a checkpoint directory" in done.stderr
