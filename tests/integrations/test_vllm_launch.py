"""The child process of `msaserve serve --engine vllm`, with small servers in vLLM's place."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from waits import SECONDS

from msaserve.errors import EngineError, InvalidRequestError
from msaserve.integrations.vllm import launch

SERVER = """
import signal, socket, sys, time
port, delay = int(sys.argv[1]), float(sys.argv[2])
time.sleep(delay)
server = socket.create_server(("127.0.0.1", port))
print("listens", flush=True)
while True:
    server.accept()[0].close()
"""


def test_command_line() -> None:
    line = launch.command(Path("/models/m3"), 50051, ["--tensor-parallel-size", "8"], name="m3")
    assert line[0] == sys.executable
    assert line[3:] == [
        *("serve", "/models/m3", "--grpc", "--host", "127.0.0.1", "--port", "50051", "--block-size", "128"),
        *("--served-model-name", "m3", "--tensor-parallel-size", "8"),
    ]


def test_what_the_user_sets_is_not_set_twice() -> None:
    for options in (
        ["--block-size=256", "--served-model-name", "other"],
        ["--block_size", "64", "--served_model_name=x"],
    ):
        line = launch.command(Path("m3"), 1, options, name="m3")
        assert line[-len(options) :] == options
        assert "m3" not in line[line.index("--port") :]
        assert "128" not in line


def test_options_are_split_as_a_shell_does() -> None:
    text = """--tensor-parallel-size 8 --attention-config '{"indexer_kv_dtype": "fp8"}'"""
    assert launch.options_of(text) == [
        *("--tensor-parallel-size", "8", "--attention-config", '{"indexer_kv_dtype": "fp8"}')
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--port 1", "--port"),
        ("--host=0.0.0.0", "--host"),
        ("--grpc_port=1", "--grpc-port"),
        ("--grpc", "--grpc"),
        ("'--a", "No closing quotation"),
    ],
)
def test_options_that_cannot_be(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        launch.options_of(text)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("", "msaserve"), ("other", "other,msaserve"), ("msaserve,other", "msaserve,other")],
)
def test_plugin_is_among_those_that_are_loaded(given: str | None, expected: str | None) -> None:
    inherited = {"PATH": "/bin"} if given is None else {"PATH": "/bin", "VLLM_PLUGINS": given}
    made = launch.environment(inherited)
    assert made.get("VLLM_PLUGINS") == expected
    assert made["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("installed", "missing"), [([], r"pip install 'vllm\[grpc\]'"), (["vllm"], r"smg-grpc-servicer\[vllm\]")]
)
def test_what_is_missing_is_named(installed: list[str], missing: str) -> None:
    with pytest.raises(InvalidRequestError, match=missing):
        launch.check_installed(lambda module: module in installed)
    launch.check_installed(lambda module: True)


def start(delay: float = 0.0) -> tuple[launch.VllmProcess, int]:
    port = launch.free_port()
    return launch.VllmProcess([sys.executable, "-c", SERVER, str(port), str(delay)], port), port


def test_ready_once_it_listens_and_gone_after() -> None:
    process, port = start(delay=0.5)
    with process:
        assert process.wait_ready() == f"grpc://127.0.0.1:{port}"
    assert process._popen.returncode == -signal.SIGTERM


def test_death_before_it_is_ready() -> None:
    process = launch.VllmProcess([sys.executable, "-c", "raise SystemExit(3)"], launch.free_port())
    with process, pytest.raises(EngineError, match="ended before it was ready: exit code 3"):
        process.wait_ready()


async def test_death_while_it_serves() -> None:
    process, _ = start()
    with process:
        await asyncio.to_thread(process.wait_ready)
        death = process.death()
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.wait_for(death, SECONDS) == "vLLM ended: signal 9"


async def test_death_of_its_engine_which_the_server_outlives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_HEALTH_SECONDS", 0.05)
    said, states = health.aio.HealthServicer(), health_pb2.HealthCheckResponse
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(said, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with launch.VllmProcess([sys.executable, "-c", "import time; time.sleep(600)"], port) as vllm:
        death = vllm.death()
        for state in (states.NOT_SERVING, states.SERVING):  # it warms up, and serves
            await said.set("", state)
            await asyncio.sleep(0.5)
            assert not death.done()
        await said.set("", states.NOT_SERVING)
        assert "engine has ended" in await asyncio.wait_for(death, SECONDS)
    await server.stop(None)


def test_processes_of_its_own_end_with_it() -> None:
    """vLLM's engine and workers are processes of their own; one that hangs on is killed."""
    code = """
import signal, socket, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(999)"
subprocess.Popen([sys.executable, "-c", stubborn])
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(999)
"""
    port = launch.free_port()
    with launch.VllmProcess([sys.executable, "-c", code, str(port)], port) as process:
        process.wait_ready()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (child,) = (int(pid) for pid in children.read_text().split())
    assert ends(child)


def test_ends_when_its_parent_is_killed() -> None:
    code = f"""
import sys, time
from msaserve.integrations.vllm import launch
port = launch.free_port()
process = launch.VllmProcess([sys.executable, "-c", {SERVER!r}, str(port), "0"], port)
process.wait_ready()
print(process.pid, flush=True)
time.sleep(999)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline() for _ in range(2)]
    (child,) = (int(line) for line in lines if line.strip().isdigit())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ends(child)


def ends(pid: int) -> bool:
    """Whether a process is gone in time. One that nobody has waited for counts as gone."""
    for _ in range(10 * SECONDS):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
