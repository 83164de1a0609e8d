"""msaserve commands as processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paced import HELD
from waits import SECONDS
from worker_driver import TINY

ADDRESS, URL = r"--worker (grpc://\S+)", r"curl (http://[^/]+)"


class Process:
    """One msaserve command."""

    def __init__(self, *arguments: str, holds: bool = False) -> None:
        """holds: its engine holds long requests, as `paced.hold_long_requests` does."""
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "msaserve", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(HELD)} if holds else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, to which a Ctrl-C can be sent
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.errors.extend(iter(self.popen.stderr.readline, ""))

    def line(self, pattern: str) -> str:
        """What the pattern's group matches, once the process prints it."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + SECONDS
        for line in iter(self.popen.stdout.readline, ""):
            match = re.search(pattern, line)
            if match:
                return match.group(1)
            assert time.monotonic() < deadline
        raise AssertionError(f"the process ended with {self.wait()}: {self.log}")

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.popen.wait(SECONDS)
        self._reader.join(SECONDS)
        return code

    @property
    def log(self) -> str:
        return "".join(self.errors)


@contextmanager
def running(*arguments: str, holds: bool = False) -> Iterator[Process]:
    process = Process(*arguments, holds=holds)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(SECONDS)


def worker(address: str = "127.0.0.1:0", *options: str, holds: bool = False) -> Any:
    sizes = ("--kv-cache-gib", "0.02", "--max-model-len", "4096")
    return running("worker", str(TINY), "--grpc", address, *sizes, *options, holds=holds)


def gateway(*addresses: str, **options: str) -> Any:
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return running("gateway", "--worker", *addresses, "--port", "0", *flags)


def serve(*options: str, holds: bool = False) -> Any:
    sizes = ("--kv-cache-gib", "0.02", "--max-model-len", "4096")
    return running("serve", str(TINY), "--port", "0", *sizes, *options, holds=holds)
