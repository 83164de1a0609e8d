"""Ctrl-C outside an event loop. Imports next to nothing: it comes before everything else.

Python's own way is to raise KeyboardInterrupt wherever the program is. While modules are imported that may be a
destructor or a callback, where it is printed and forgotten, or a module in C, which makes another error of it.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
"""The exit code."""


def exit_on_interrupt() -> None:
    """From now on SIGINT ends the process where it is, with nothing said. Children must end when their pipes do."""
    signal.signal(signal.SIGINT, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


class NotedInterrupt:
    """Inside the `with`, SIGINT is noted and raised where `check` is called; a second one ends the process at once."""

    def __init__(self) -> None:
        self._is_noted = False
        self._before: Any = None

    def check(self) -> None:
        """Raises KeyboardInterrupt if SIGINT has come."""
        if self._is_noted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_noted:
            _exit(number, frame)
        self._is_noted = True

    def __enter__(self) -> NotedInterrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python lets nobody handle signals
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
