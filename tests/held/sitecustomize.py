"""Python runs this first in a process whose PYTHONPATH has this directory, and in those that it starts.

Their engines take 10 ms and more for every step beside a long request, which so lasts seconds on any machine: time
enough for what a test does to it.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any

LONG = 100
"""Tokens, asked for with ignore_eos."""
STEP_SECONDS = 0.01
_MODULE = "msaserve.engine.engine"


def is_long(request: Any) -> bool:
    return bool(request.sampling.ignore_eos and (request.sampling.max_tokens or 0) >= LONG)


def hold(engine: Any) -> None:
    """engine: an Engine, or the class."""
    step = engine.step

    def slow_step(*self: Any) -> Any:
        if any(map(is_long, (self[0] if self else engine).scheduler._running)):
            time.sleep(STEP_SECONDS)
        return step(*self)

    engine.step = slow_step


class _Finder:
    """Changes the module when it is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_hold(module: Any) -> None:
            run(module)
            hold(module.Engine)

        spec.loader.exec_module = run_and_hold  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
