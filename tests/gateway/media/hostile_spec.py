"""A model whose rules do to a media process what a hostile file does to a decoder, by the picture's width.

A SLOW one is done once the file SLOW_UNTIL exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msaserve.gateway.media.spec import Hints
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec

CRASH, HANG, FAULT, HOG, SLOW = 66, 67, 68, 69, 70


class HostileSpec(MiniMaxM3Spec):
    def image_size(self, height: int, width: int, hints: Hints) -> tuple[int, int]:
        if width == CRASH:
            os.abort()
        if width == HANG:
            time.sleep(1000)
        if width == FAULT:
            raise RuntimeError("a fault of ours")
        if width == HOG:
            bytearray(2**34)
        if width == SLOW:
            while not Path(os.environ["SLOW_UNTIL"]).exists():
                time.sleep(0.01)
        return super().image_size(height, width, hints)


def from_checkpoint(files: Mapping[str, Any]) -> HostileSpec:
    return HostileSpec()
