"""The other end of `worker.child`: a worker as a child process. Loads no torch."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec

from msaserve import errors
from msaserve.config import EngineConfig
from msaserve.errors import EngineError, MsaserveError
from msaserve.worker.child import MAX_SOCKET_PATH_BYTES, Answer, Task

_END_SECONDS = 10.0
"""For a worker that was asked to end; then it is killed."""
_CHECK_SECONDS = 0.1


class WorkerProcess:
    """A worker in a process of its own, which ends when this one does, however it ends. Leaving the `with` ends it."""

    def __init__(
        self, checkpoint: Path, engine: EngineConfig, name: str, *, otlp_traces_endpoint: str | None = None
    ) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH")) if p)
        self._directory = _private_directory()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "msaserve.worker.child", str(self._directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process: it lets requests end first
        )
        task = Task(str(checkpoint), asdict(engine), name, os.getpid(), otlp_traces_endpoint)
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it has died; `wait_ready` says so
            self._popen.stdin.write(msgspec.json.encode(task) + b"\n")
            self._popen.stdin.flush()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self, check: Callable[[], None] = lambda: None) -> str:
        """Wait for the weights; returns its address. check: called meanwhile; what it raises ends the wait.

        Raises:
            CheckpointError, InvalidRequestError, AddressError: what it raised.
            ModuleNotFoundError: the worker's part of the package is not installed.
            EngineError: it died.
        """
        assert self._popen.stdout is not None
        while not select.select([self._popen.stdout], [], [], _CHECK_SECONDS)[0]:
            check()
        line = self._popen.stdout.readline()
        if not line:
            raise EngineError(f"the worker died before it was ready: {_how(self._popen.wait())}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.missing_module:
            raise ModuleNotFoundError(answer.error, name=answer.missing_module)
        if answer.error:
            kind = getattr(errors, answer.kind, MsaserveError)
            raise kind(answer.error)
        return answer.address

    def death(self) -> asyncio.Future[str]:
        """Settled with words for how it ended, when it ends. Called inside a running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()

        def settle(how: str) -> None:
            if not future.done():
                future.set_result(how)

        def wait() -> None:
            how = f"the worker died: {_how(self._popen.wait())}"
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(settle, how)

        threading.Thread(target=wait, name="msaserve-worker-wait", daemon=True).start()
        return future

    def close(self) -> None:
        """End it: what it still runs is aborted."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _private_directory() -> Path:
    """That only this user can enter, for a socket."""
    directory = Path(tempfile.mkdtemp(prefix="msaserve-"))
    if len(os.fsencode(directory)) <= MAX_SOCKET_PATH_BYTES - len("/worker.sock"):
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="msaserve-", dir="/tmp"))


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
