"""Installations without all extras: packages that an extra does not bring cannot be imported, in no process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from process_driver import ADDRESS, SECONDS, URL, gateway, worker
from worker_driver import TINY

from msaserve.eval.example import Picture
from msaserve.eval.media import data_url

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

BLOCKER = """
import os, sys

class Blocker:
    blocked = frozenset(os.environ["BLOCKED_MODULES"].split(","))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def declared(extra: str | None) -> list[str]:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"] + (project["optional-dependencies"][extra] if extra else []))


def installed_by(requirements: list[str]) -> set[str]:
    """Names of the packages that come with requirements, those of their own requirements included."""
    found: set[str] = set()
    queue = [(Requirement(text), "") for text in requirements]
    while queue:
        requirement, extra = queue.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # what another platform or version needs
            continue
        queue += [(Requirement(text), extra) for text in needed for extra in requirement.extras or {""}]
    return found


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def block(extra: str | None, *more: str) -> None:
        there = {"msaserve", *installed_by([*declared(extra), *more])}
        blocked = [
            module
            for module, owners in packages_distributions().items()
            if not there & {canonicalize_name(owner) for owner in owners}
        ]
        (tmp_path / "sitecustomize.py").write_text(BLOCKER)
        monkeypatch.setenv("BLOCKED_MODULES", ",".join(blocked))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return block


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=SECONDS, env=environ)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "msaserve", *arguments)


def last_error(result: subprocess.CompletedProcess[str]) -> str:
    """Of a command that failed with one clear line."""
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_gateway_without_the_engine(only: Any) -> None:
    picture = Picture(np.full((3, 112, 112), 77, np.uint8))
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": data_url(picture)}}]
    with worker() as back:
        address = back.line(ADDRESS)
        only("gateway")
        assert run("-c", "import torch").returncode == 1
        with gateway(address) as front:
            asked = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
            answer = httpx.post(front.line(URL) + "/v1/chat/completions", json=asked, timeout=SECONDS, trust_env=False)
            assert answer.status_code == 200, (answer.text, front.log)
            assert answer.json()["usage"]["prompt_tokens"] > 16
    error = last_error(cli("gateway", "--worker", address, "--otlp-traces-endpoint", "http://127.0.0.1:4317"))
    assert "this needs opentelemetry, which is not installed: pip install 'msaserve[otel]'" in error
    for command, extra in (("worker", "engine"), ("generate", "engine"), ("serve", "all")):
        options = ["--prompt", "x"] if command == "generate" else []
        error = last_error(cli(command, str(TINY), *options, *(["--port", "0"] if command == "serve" else [])))
        assert re.search(rf"this needs \w+, which is not installed: pip install 'msaserve\[{extra}\]'", error), error


def test_an_engine_without_the_gateway(only: Any) -> None:
    only("engine")
    assert run("-c", "import starlette").returncode == 1
    result = cli("generate", str(TINY), "--prompt", "x", "--max-tokens", "2", "--kv-cache-gib", "0.01", "--chat")
    assert result.returncode == 0, result.stderr
    with worker() as back:
        back.line(ADDRESS)
    error = last_error(cli("gateway", "--worker", "grpc://127.0.0.1:9", "--check"))
    assert "pip install 'msaserve[gateway]'" in error


def test_neither(only: Any) -> None:
    only(None)
    assert cli("serve", "--help").returncode == 0
    assert "msaserve[all]" in last_error(cli("serve", str(TINY), "--port", "0"))
    result = run("-c", "import msaserve; print(msaserve.SamplingParams()); msaserve.LLM")
    assert result.stdout.startswith("SamplingParams")
    assert "ImportError: msaserve.LLM needs" in result.stderr


def test_the_operators_in_another_engines_environment(only: Any) -> None:
    """Of this package only what the core brings; torch and triton are the environment's."""
    only(None, "torch", "triton")
    result = run("-c", "from msaserve import ops; print(ops.select_blocks)")
    assert result.returncode == 0, result.stderr
