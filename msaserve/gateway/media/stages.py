"""What is done for a picture or clip, told to whoever watches: as spans, seconds and counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from msaserve.observe.trace import Tracer
from msaserve.types import Modality

Stage = Literal["fetch", "wait", "prepare"]
Outcome = Literal["prepared", "joined", "cached", "refused"]


class Watcher(Protocol):
    """`observe.metrics.MediaMetrics`, say."""

    def count(self, modality: Modality, outcome: str) -> None: ...

    def took(self, modality: Modality, stage: str, seconds: float) -> None: ...


class Stages:
    def __init__(self) -> None:
        self.tracer = Tracer()
        self.watcher: Watcher | None = None

    @contextmanager
    def stage(self, modality: Modality, name: Stage) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self.tracer.start(f"media {name}", attributes=lambda: {"msaserve.modality": modality}):
                yield
        finally:
            if self.watcher is not None:
                self.watcher.took(modality, name, time.perf_counter() - start)

    def count(self, modality: Modality, outcome: Outcome) -> None:
        if self.watcher is not None:
            self.watcher.count(modality, outcome)
