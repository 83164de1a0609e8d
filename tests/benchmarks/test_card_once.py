"""The plugin of pytest that leaves out what has passed and ends in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.card.run import ROOT

TESTS = """
import pytest

@pytest.mark.slow
def test_slow(): pass
@pytest.mark.parametrize("i", range(20))
def test_many(i): pass
def test_good(): pass
def test_bad():
    import os
    assert os.path.exists("repaired")
def test_skipped(): pytest.skip("no")
@pytest.fixture
def breaks():
    yield
    raise ValueError
def test_teardown(breaks): pass
"""


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_once(tmp_path: Path, processes: tuple[str, ...]) -> None:
    """What passed is not run again; the slow come last; in time it ends by itself, and says that it did."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")

    def tests(*options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "benchmarks.card.once",
            "--once",
            "passed",
            *processes,
            *options,
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)

    def passed() -> list[str]:
        return [line.partition("::")[2] for line in (tmp_path / "passed").read_text().splitlines()]

    stopped = tests("--once-seconds", "0")
    assert (stopped.returncode, "out of time" in stopped.stdout) == (0, True), stopped.stdout + stopped.stderr
    first = passed()
    assert first
    assert "test_slow" not in first
    whole = tests()
    assert whole.returncode == 1
    assert first[0] not in whole.stdout
    assert sorted(passed()) == sorted(
        ["test_good", "test_skipped", "test_slow", *(f"test_many[{i}]" for i in range(20))]
    )
    assert processes or passed()[-1] == "test_slow"
    failed = tests("--once-seconds", "0")
    assert failed.returncode == 1, "out of time, but something is wrong"
    (tmp_path / "repaired").touch()
    (tmp_path / "test_it.py").write_text(TESTS.replace("raise ValueError", "pass"))
    assert tests().returncode == 0
    assert tests().returncode == 0, "nothing is left"
