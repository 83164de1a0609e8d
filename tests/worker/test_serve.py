"""`msaserve serve` and its worker process: how each of the two ends, and what becomes of the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from process_driver import SECONDS, URL, Process, running, serve
from waits import until
from worker_driver import TINY

TEXT = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "go", "ignore_eos": True, "max_tokens": 3000, "stream": True, **fields}


def descendants(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children(recursive=True)


def worker_of(process: Process) -> psutil.Process:
    """Once it has been started."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [p for p in descendants(process) if "msaserve.worker.child" in " ".join(p.cmdline())]
        return bool(found)

    until(is_there)
    return found[0]


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture(autouse=True)
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the processes keep their socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, as the path of a socket must be
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=SECONDS) as client:
        yield client


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_drain_both(number: signal.Signals, http: httpx.Client, temporary_files: Path) -> None:
    """A terminal's Ctrl-C and some supervisors' SIGTERM come to every process of the group at once."""
    with serve(holds=True) as server:
        url = server.line(URL)
        family = descendants(server)
        assert len(family) >= 2  # the worker, and a media process
        assert len(list(temporary_files.iterdir())) == 1
        asked = body(max_tokens=100, stream_options={"include_usage": True})
        with http.stream("POST", url + TEXT, json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.killpg(server.popen.pid, number)
            if number is signal.SIGTERM:
                worker_of(server).terminate()
            *_, last, usage, done = [line for line in lines if line]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 100
        assert server.wait() == 0, server.log
        assert are_gone(family)
        assert not list(temporary_files.iterdir())
        assert "Traceback" not in server.log


def test_the_worker_dies(http: httpx.Client, temporary_files: Path) -> None:
    with serve(holds=True) as server:
        url = server.line(URL)
        family = descendants(server)
        with http.stream("POST", url + TEXT, json=body()) as answer:
            lines = answer.iter_lines()
            next(lines)
            worker_of(server).kill()
            last = [line for line in lines if line][-1]
        assert "the worker failed" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.wait() == 1
        assert "msaserve: error: the worker died: SIGKILL" in server.log
        assert "Traceback" not in server.log
        assert are_gone(family)
        assert not list(temporary_files.iterdir())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_nothing_outlives_a_server_that_is_killed(*, is_loaded: bool, temporary_files: Path) -> None:
    with serve() as server:
        if is_loaded:
            server.line(URL)
        worker_of(server)
        family = descendants(server)
        server.popen.kill()
        until(lambda: are_gone(family))
        assert not list(temporary_files.iterdir())


@pytest.mark.parametrize("module", ["msaserve.worker.child", "msaserve.gateway.processes.child"])
def test_a_child_whose_parent_dies_before_it_says_what_to_do(module: str, temporary_files: Path) -> None:
    directory = temporary_files / "of the parent"
    directory.mkdir()
    command = [sys.executable, "-m", module, str(directory)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=SECONDS).returncode == 1
    assert not directory.exists()


def test_a_worker_that_dies_while_it_loads() -> None:
    with serve() as server:
        worker_of(server).kill()
        assert server.wait() == 1
        assert "msaserve: error: the worker died before it was ready: SIGKILL" in server.log


def test_weights_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The worker finds out, and what it says is all that is said."""
    for path in TINY.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, tmp_path)
    with running("serve", str(tmp_path), "--port", "0") as server:
        assert server.wait() == 2
        assert server.log.startswith("msaserve: error: ")
        assert len(server.log.splitlines()) == 1, server.log


def test_ctrl_c_while_it_loads() -> None:
    with serve() as server:
        worker = worker_of(server)
        server.popen.send_signal(signal.SIGINT)
        assert server.wait() == 130
        assert are_gone([worker])
        assert "Traceback" not in server.log


def test_a_long_name_of_the_temporary_directory(monkeypatch: pytest.MonkeyPatch, temporary_files: Path) -> None:
    """A socket's path has at most 107 bytes."""
    directory = temporary_files / ("long" * 30)
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    with serve() as server:
        url = server.line(URL)
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 200
        assert server.end(signal.SIGTERM) == 0
