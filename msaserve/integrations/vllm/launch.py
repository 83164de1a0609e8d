"""vLLM's own gRPC server as a child process, with the plugin: what `msaserve serve --engine vllm` has for a worker.

Loads neither vLLM nor torch. The server is `vllm serve --grpc`, which needs the package smg-grpc-servicer.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from msaserve.errors import EngineError, InvalidRequestError

_HOST = "127.0.0.1"
_OURS = ("--grpc", "--host", "--port", "--uds", "--grpc-port", "--headless")
"""Options of `vllm serve` that are set here."""
_END_SECONDS = 30.0
"""For a server that was asked to end, with all its processes; then they are killed."""
_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 5.0
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponses of grpc.health.v1."""


def options_of(text: str) -> list[str]:
    """The options of `vllm serve` that a user wrote as one string.

    Raises:
        InvalidRequestError: an open quote; an option that this module sets itself.
    """
    try:
        options = shlex.split(text)
    except ValueError as error:
        raise InvalidRequestError(f"--vllm-args cannot be read: {error}", param="vllm_args") from error
    for name in _names(options):
        if name in _OURS:
            raise InvalidRequestError(f"--vllm-args cannot set {name}", param="vllm_args")
    return options


def command(checkpoint: Path, port: int, options: Sequence[str], *, name: str | None = None) -> list[str]:
    """The server's command line. MiniMax-M3's caches have pages of one sparse block, which is 128 tokens."""
    line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--grpc"]
    line += ["--host", _HOST, "--port", str(port)]
    given = _names(options)
    if "--block-size" not in given:
        line += ["--block-size", "128"]
    if name is not None and "--served-model-name" not in given:
        line += ["--served-model-name", name]
    return [*line, *options]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: where VLLM_PLUGINS names the plugins that vLLM loads, ours is one of them."""
    made = dict(inherited)
    plugins = made.get("VLLM_PLUGINS")
    if plugins is not None and "msaserve" not in plugins.split(","):
        made["VLLM_PLUGINS"] = ",".join(filter(None, (*plugins.split(","), "msaserve")))
    return made


def check_installed(has: Callable[[str], bool] = lambda module: find_spec(module) is not None) -> None:
    """Raises InvalidRequestError with what to install when vLLM or its gRPC server is missing."""
    for module, package in (("vllm", "vllm[grpc]"), ("smg_grpc_servicer", "smg-grpc-servicer[vllm]")):
        if not has(module):
            raise InvalidRequestError(f"--engine vllm needs {module}: pip install '{package}'", param="engine")


class VllmProcess:
    """vLLM's server, which ends when this process does. Leaving the `with` ends it. Make it in the main thread."""

    def __init__(self, line: Sequence[str], port: int) -> None:
        self._port = port
        self._popen = subprocess.Popen(
            line,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process: it lets requests end first
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self, check: Callable[[], None] = lambda: None) -> str:
        """Wait until it listens, which it does once the model is loaded; returns its address.

        Args:
            check: called meanwhile; what it raises ends the wait.

        Raises:
            EngineError: it died.
        """
        while True:
            check()
            code = self._popen.poll()
            if code is not None:
                raise EngineError(f"vLLM ended before it was ready: {_how(code)}")
            with suppress(OSError):
                socket.create_connection((_HOST, self._port), timeout=1.0).close()
                return f"grpc://{_HOST}:{self._port}"
            time.sleep(_POLL_SECONDS)

    def death(self) -> asyncio.Future[str]:
        """Settled with words for how it ended, when it or its engine ends. Called inside a running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()

        def settle(how: str) -> None:
            if not future.done():
                future.set_result(how)

        def wait() -> None:
            how = f"vLLM ended: {_how(self._popen.wait())}"
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(settle, how)

        async def watch() -> None:
            await self._engine_end()
            settle("vLLM's engine has ended: its server says that it serves no more")

        threading.Thread(target=wait, name="msaserve-vllm-wait", daemon=True).start()
        watching = loop.create_task(watch())
        future.add_done_callback(lambda _: watching.cancel())
        return future

    async def _engine_end(self) -> None:
        """Returns when a server that has served says that it does not, twice: it outlives its engine's death."""
        import grpc

        async with grpc.aio.insecure_channel(f"{_HOST}:{self._port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            has_served, refusals = False, 0
            while refusals < 2:
                await asyncio.sleep(_HEALTH_SECONDS)
                with suppress(grpc.aio.AioRpcError):  # it is busy, gone, or has no such service
                    status = await check(b"", timeout=_HEALTH_SECONDS)
                    has_served |= status == _SERVING
                    refusals = refusals + 1 if has_served and status == _NOT_SERVING else 0

    def close(self) -> None:
        """End it, and whatever processes of its group are left after it."""
        if self._popen.poll() is None:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server((_HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _names(options: Sequence[str]) -> list[str]:
    """The options without their values, as vLLM reads them: it takes --block_size for --block-size."""
    return [option.partition("=")[0].replace("_", "-") for option in options if option.startswith("--")]


def _die_with_parent() -> None:
    """In the child, before vLLM: SIGTERM when the thread that made it ends (prctl's PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
