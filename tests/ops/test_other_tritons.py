"""Kernels whose module this Triton cannot import are passed over; a fault of the module's own is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from msaserve.ops import hopper


@pytest.mark.parametrize(
    ("line", "is_tritons"), [("from triton import nowhere", True), ("import msaserve.nowhere", False)]
)
def test_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, is_tritons: bool) -> None:
    monkeypatch.setattr(hopper, "why_not_triton", lambda x: None)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"kernels_for_other_tritons_{is_tritons}"
    (tmp_path / f"{name}.py").write_text(line)
    why_not = hopper.ask_later(f"{name}:why_not")
    if is_tritons:
        assert "this Triton does not have what it needs" in str(why_not(torch.zeros(1)))
    else:
        with pytest.raises(ImportError, match="nowhere"):
            why_not(torch.zeros(1))
