"""Ctrl-C while a command loads: it ends with 130 and says nothing, wherever it was, and leaves no process or file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_driver import SECONDS
from test_serve import are_gone, temporary_files  # noqa: F401 (a fixture)
from waits import until
from worker_driver import TINY

NUM_RANDOM = int(os.environ.get("MSASERVE_TEST_INTERRUPTS", "3"))
"""A hundred and more when something of this has changed."""
CACHE = ("--kv-cache-gib", "0.02", "--max-model-len", "4096")
COMMANDS = {
    "serve": ("serve", str(TINY), "--port", "0", *CACHE),
    "processes": ("serve", str(TINY), "--port", "0", "--processes", "2", *CACHE),
    "worker": ("worker", str(TINY), "--grpc", "127.0.0.1:0", *CACHE),
    "gateway": ("gateway", "--worker", "grpc://127.0.0.1:9", "--port", "0"),
    "generate": ("generate", str(TINY), "--prompt", "go", "--max-tokens", "20", *CACHE),
    "eval": ("eval", "needle", "--checkpoint", str(TINY), "--context", "300", "--n", "1", *CACHE),
}
SENDS_TO_ITSELF = """
import os, signal, sys

class Dying:
    def __del__(self):  # what is raised here is printed and forgotten
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

module = sys.argv.pop(1)

def hook(event, arguments):
    if event == "import" and arguments[0] == module:
        Dying()

sys.addaudithook(hook)
from msaserve.__main__ import main
sys.exit(main())
"""
SAYS_WHEN_IT_BEGINS = """
import sys
from msaserve import interrupt
exit_on_interrupt = interrupt.exit_on_interrupt

def begin():
    exit_on_interrupt()
    print("!", file=sys.stderr, flush=True)

interrupt.exit_on_interrupt = begin
from msaserve.__main__ import main
sys.exit(main())
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("serve", "tyro"),
        ("serve", "msaserve.worker.process"),
        ("serve", "grpc._cython.cygrpc"),
        ("serve", "uvicorn"),
        ("serve", "uvloop.loop"),
        ("processes", "msaserve.gateway.processes.supervisor"),
        ("gateway", "tokenizers"),
        ("worker", "torch._C"),
        ("generate", "torch._C"),
        ("eval", "numpy"),
    ],
)
def test_where_it_would_be_swallowed(command: str, module: str, temporary_files: Path) -> None:  # noqa: F811
    with running(SENDS_TO_ITSELF, module, *COMMANDS[command]) as process:
        out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, errors) == (130, "", "")
    until(lambda: not list(temporary_files.iterdir()))


@pytest.mark.parametrize("_", range(NUM_RANDOM))
@pytest.mark.parametrize("command", ["serve"] if NUM_RANDOM < 10 else COMMANDS)
def test_at_a_random_moment(command: str, _: int, temporary_files: Path) -> None:  # noqa: F811
    seconds = random.random() * 4
    with running(SAYS_WHEN_IT_BEGINS, *COMMANDS[command]) as process:
        assert process.stderr.readline() == "!\n"
        time.sleep(seconds)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=SECONDS)
    assert "Traceback" not in errors, seconds
    if command in ("generate", "eval"):  # may be done before, and killed as Python ends
        assert process.returncode in (130, 0, -signal.SIGINT), (seconds, errors)
    else:  # once it serves, it ends as servers do
        assert process.returncode == (0 if "is ready" in out else 130), (seconds, errors)
        assert errors == "", seconds
    until(lambda: are_gone(family))
    assert not list(temporary_files.iterdir())
