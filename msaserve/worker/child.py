"""A worker that belongs to another process, `msaserve serve`, and never outlives it. Run as `python -m`.

Standard input brings what to serve, one line of JSON, and then stays open: when it ends, however the other process
ended, so does this one. Standard output says one line: the address, or why there is none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from msaserve.config import EngineConfig
from msaserve.errors import MsaserveError
from msaserve.loop import run_loop
from msaserve.observe.log import configure_logging
from msaserve.observe.trace import make_tracer

MAX_SOCKET_PATH_BYTES = 100
"""The kernel's bound is 108 with the terminator."""
_END_SECONDS = 5.0
"""What is left of requests, and of a step that runs, gets no longer than this once the other process is gone."""


class Task(msgspec.Struct):
    """What to serve."""

    checkpoint: str
    engine: dict[str, Any]
    """Fields of EngineConfig."""
    name: str
    parent: int
    """The other process."""
    otlp_traces_endpoint: str | None = None


class Answer(msgspec.Struct, omit_defaults=True):
    """What became of it."""

    address: str = ""
    """unix:///…"""
    error: str = ""
    kind: str = ""
    """The class of the error, in msaserve.errors."""
    missing_module: str = ""
    """What is not installed, if that is the error."""


def main(directory: str) -> int:
    """directory: for the socket and nothing else; whichever process ends last removes it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they may come to all processes; who started this one decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    configure_logging(access_log=False)
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65_536)
        if not chunk:
            shutil.rmtree(directory, ignore_errors=True)
            return 1  # the other process has gone already
        line += chunk
    try:
        _serve(msgspec.json.decode(line, type=Task), directory, answers)
    except MsaserveError as error:
        _say(answers, Answer(error=str(error), kind=type(error).__name__))
        return 1
    except ModuleNotFoundError as error:
        _say(answers, Answer(error=str(error), missing_module=error.name or ""))
        return 1
    return 0


def _serve(task: Task, directory: str, answers: TextIO) -> None:
    """Raises what loading raises, and EngineError when the engine stops by itself."""
    on_end: list[Callable[[], object]] = []

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock an exit would find taken
            pass
        try:
            for end in on_end:
                end()
                time.sleep(_END_SECONDS)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=watch, name="msaserve-lifeline", daemon=True).start()

    from msaserve.engine.async_engine import AsyncEngine
    from msaserve.engine.engine import Engine
    from msaserve.rpc import shm
    from msaserve.worker.served import ServedModel
    from msaserve.worker.server import run

    tracer = make_tracer("worker", task.otlp_traces_endpoint)
    engine = Engine.from_checkpoint(Path(task.checkpoint), EngineConfig(**task.engine))
    model = ServedModel.of(engine, name=task.name)

    async def run_all() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            shm.remove_all(task.parent)
            loop.call_soon_threadsafe(stop.set)

        on_end.append(end)

        def on_ready(_: int) -> None:
            _say(answers, Answer(address=f"unix://{directory}/worker.sock"))

        address = f"unix:{directory}/worker.sock"
        await run(AsyncEngine(engine), model, address, stop=stop, drain_seconds=0, on_ready=on_ready, tracer=tracer)

    try:
        run_loop(run_all())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        tracer.close()


def _say(answers: TextIO, answer: Answer) -> None:
    with suppress(BrokenPipeError):  # nobody listens any more; the lifeline says so too
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
