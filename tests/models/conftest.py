"""Models loaded once for all tests."""

from __future__ import annotations

import pytest
from golden_data import golden

from msaserve.models.loader import load_model
from msaserve.models.minimax_m3 import MiniMaxM3


@pytest.fixture(scope="session")
def tiny() -> MiniMaxM3:
    return load_model(golden("tiny")[0])


@pytest.fixture(scope="session")
def geometry() -> MiniMaxM3:
    return load_model(golden("geometry")[0])
