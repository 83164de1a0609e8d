from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _check_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSASERVE_CHECK", "1")
