"""benchmarks/serve/host_cost.py runs."""

from __future__ import annotations

import pytest

from benchmarks.serve import host_cost


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    host_cost.main(host_cost.Options(repeats=2, max_context=20_000))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 7 + 7
    assert "for each further one" in "\n".join(lines)
