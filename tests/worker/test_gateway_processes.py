"""`--processes`: several gateway processes behind one port, and how each of them ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from process_driver import ADDRESS, SECONDS, URL, Process, gateway, running, serve, worker
from waits import until

TEXT = "/v1/completions"
CHILD = "msaserve.gateway.processes.child"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "go", "ignore_eos": True, "max_tokens": 4, **fields}


def family(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children(recursive=True)


def gateways(process: Process) -> list[psutil.Process]:
    """In the order in which they were started."""

    def is_gateway(p: psutil.Process) -> bool:
        try:
            return CHILD in " ".join(p.cmdline())
        except psutil.NoSuchProcess:  # or a zombie: it has just ended
            return False

    return sorted(filter(is_gateway, family(process)), key=lambda p: p.create_time())


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def num_connections(process: psutil.Process, url: str) -> int:
    port = int(url.rpartition(":")[2])
    return sum(c.laddr.port == port and c.status == "ESTABLISHED" for c in process.net_connections("tcp"))


def client(url: str) -> httpx.Client:
    """Its one connection is one process's."""
    return httpx.Client(base_url=url, trust_env=False, timeout=SECONDS, limits=httpx.Limits(max_connections=1))


def metric(http: httpx.Client, start: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


class Streams:
    """A stream that has begun on each of two processes."""

    def __init__(self, url: str, stack: ExitStack, **fields: Any) -> None:
        clients = [stack.enter_context(client(url)) for _ in range(2)]
        asked = body(stream=True, stream_options={"include_usage": True}, **fields)
        answers = [stack.enter_context(http.stream("POST", TEXT, json=asked)) for http in clients]
        assert [answer.status_code for answer in answers] == [200, 200]
        self._lines = [answer.iter_lines() for answer in answers]
        for lines in self._lines:
            next(lines)

    def rest(self, number: int) -> list[str]:
        return [line for line in self._lines[number] if line]

    def end(self, number: int) -> tuple[str, int]:
        """Why a whole answer ended, and its tokens."""
        *_, last, usage, done = self.rest(number)
        assert done == "data: [DONE]"
        reason = json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]
        return reason, json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a worker that all tests here use which do not end it."""
    with worker(holds=True) as process:
        yield process.line(ADDRESS)


@pytest.fixture
def front(address: str) -> Iterator[Process]:
    with gateway(address, processes="2") as process:
        yield process
        assert "Traceback" not in process.log


def test_connections_and_numbers(front: Process) -> None:
    url = front.line(URL)
    processes = gateways(front)
    assert len(processes) == 2
    with ExitStack() as stack:
        clients = [stack.enter_context(client(url)) for _ in range(10)]
        for http in clients:
            assert http.post(TEXT, json=body()).status_code == 200
        assert [num_connections(process, url) for process in processes] == [5, 5]
        for http in clients[:7]:  # whoever has more free places gets what comes
            http.close()
        until(lambda: sum(num_connections(process, url) for process in processes) == 3)
        clients += [stack.enter_context(client(url)) for _ in range(7)]
        for http in clients[10:]:
            assert http.post(TEXT, json=body(model="none")).status_code == 404
        assert [num_connections(process, url) for process in processes] == [5, 5]
        clients = clients[7:]
        cards = [http.get("/v1/models").json() for http in clients]
        assert all(card == cards[0] for card in cards)
        for http in clients:  # whoever is asked
            assert metric(http, f'msaserve:http_requests_total{{method="POST",path="{TEXT}",status="200"}}') == 10
            assert metric(http, f'msaserve:http_requests_total{{method="POST",path="{TEXT}",status="404"}}') == 7
            assert metric(http, "msaserve:request_prompt_tokens_count") == 10
            assert metric(http, "smg_worker_requests_total") == 10
            assert metric(http, "smg_http_connections_active") == 1
            assert metric(http, "smg_worker_health") == 1
            assert metric(http, "msaserve:media_processes") == 2
        text = clients[0].get("/metrics").text
    names = Counter(line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#"))
    assert not [name for name, count in names.items() if count > 1]
    assert front.end(signal.SIGTERM) == 0
    assert are_gone(processes)


def test_one_that_is_killed(front: Process) -> None:
    """Its requests alone are lost; what it had counted stays, and another takes its place."""
    url = front.line(URL)
    first, second = gateways(front)
    with ExitStack() as stack:
        other = stack.enter_context(client(url))
        assert other.post(TEXT, json=body()).status_code == 200
        http = stack.enter_context(client(url))
        assert http.post(TEXT, json=body()).status_code == 200
        streams = Streams(url, stack, max_tokens=300)
        assert [num_connections(process, url) for process in (first, second)] == [2, 2]
        assert metric(http, "smg_worker_requests_total") == 4
        second.kill()
        with pytest.raises(httpx.HTTPError):
            streams.rest(1)
        assert streams.end(0) == ("length", 300)
        for _ in range(5):  # while it is away, and after
            assert httpx.post(url + TEXT, json=body(), trust_env=False, timeout=SECONDS).status_code == 200
        assert metric(other, "smg_worker_requests_total") == 9
        assert metric(other, "smg_worker_requests_active") == 0
        until(lambda: len(gateways(front)) == 2)
        third = gateways(front)[-1]
        assert third.pid != second.pid
        # It has fewest connections: those that come next are its.
        clients = [stack.enter_context(client(url)) for _ in range(2)]

        def is_served() -> bool:
            return all(c.get("/ready").status_code == 200 for c in clients) and num_connections(third, url) > 0

        def come_again() -> bool:
            for c in clients:
                c.close()
            clients[:] = [stack.enter_context(client(url)) for _ in range(2)]
            return is_served()

        until(come_again)
        assert metric(clients[0], "smg_worker_requests_total") == 9
    assert "gateway process 1 ended: SIGKILL" in front.log
    assert front.end(signal.SIGTERM) == 0


def test_connections_that_nobody_takes_for_now(front: Process) -> None:
    """More than the processes can hold unread: they wait, and none is lost."""
    url = front.line(URL)
    host, port = url.removeprefix("http://").split(":")
    for process in gateways(front):
        process.suspend()
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(700)]
        time.sleep(0.3)
        assert psutil.Process(front.popen.pid).cpu_percent(0.5) < 50  # it does not try all the time
        for process in gateways(front):
            process.resume()
        for sock in sockets:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert {sock.recv(15) for sock in sockets} == {b"HTTP/1.1 200 OK"}
        held = [num_connections(process, url) for process in gateways(front)]
        assert sum(held) == 700
        assert min(held) > 200  # whoever went on first got more
    assert front.end(signal.SIGTERM) == 0


def test_workers_are_loaded_evenly(address: str) -> None:
    """Each process counts what the other has sent, whoever's turn it would be."""
    with worker(holds=True) as second:
        addresses = [address, second.line(ADDRESS)]
        with gateway(*addresses, processes="2", policy="least_load") as front, ExitStack() as stack:
            url = front.line(URL)
            clients = [stack.enter_context(client(url)) for _ in range(2)]
            for http in (*clients, clients[1]):  # one more of the second: its turn is the first's now
                assert http.post(TEXT, json=body()).status_code == 200

            def num_sent() -> list[float]:
                return [
                    metric(clients[0], f'smg_worker_requests_total{{model="tiny",worker="{a}"}}') for a in addresses
                ]

            streams = []
            for _ in range(3):
                before = num_sent()
                streams.append(Streams(url, stack, max_tokens=3000))
                assert [after - then for after, then in zip(num_sent(), before, strict=True)] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_drain_all(front: Process, number: signal.Signals) -> None:
    """A terminal's Ctrl-C and some supervisors' SIGTERM come to every process of the group at once."""
    url = front.line(URL)
    processes = family(front)
    with ExitStack() as stack:
        streams = Streams(url, stack, max_tokens=200)
        os.killpg(front.popen.pid, number)
        for process in gateways(front):
            process.send_signal(number)
        until(lambda: not can_connect(url))
        for i in range(2):
            assert streams.end(i) == ("length", 200)
    assert front.wait() == 0, front.log
    assert are_gone(processes)


def can_connect(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_drain_that_takes_too_long_is_cut(address: str) -> None:
    with gateway(address, processes="2", drain_seconds="1") as front, ExitStack() as stack:
        streams = Streams(front.line(URL), stack, max_tokens=4000)
        front.popen.send_signal(signal.SIGTERM)
        for i in range(2):
            last = json.loads(streams.rest(i)[-1].removeprefix("data: "))
            assert last["error"]["message"] == "the request was aborted"
        assert front.wait() == 0


def test_a_second_signal_ends_at_once(front: Process) -> None:
    with ExitStack() as stack:
        url = front.line(URL)
        streams = Streams(url, stack, max_tokens=4000)
        processes = family(front)
        front.popen.send_signal(signal.SIGINT)
        until(lambda: not can_connect(url))
        assert front.popen.poll() is None
        front.popen.send_signal(signal.SIGINT)
        assert front.wait() == 128 + signal.SIGINT
        for i in range(2):
            with pytest.raises(httpx.HTTPError):
                streams.rest(i)
        until(lambda: are_gone(processes))


@pytest.mark.parametrize("is_ready", [False, True])
def test_nothing_outlives_a_supervisor_that_is_killed(front: Process, *, is_ready: bool) -> None:
    if is_ready:
        front.line(URL)
    else:
        until(lambda: len(gateways(front)) == 2)
    processes = family(front)
    for process in gateways(front):
        left = Path(f"/dev/shm/msaserve-{front.popen.pid}-{process.pid}-left")
        left.touch()
    front.popen.kill()
    until(lambda: are_gone(processes))
    if is_ready:  # what none has had time to make, none removes
        assert not list(Path("/dev/shm").glob(f"msaserve-{front.popen.pid}-*"))
    for left in Path("/dev/shm").glob(f"msaserve-{front.popen.pid}-*"):
        left.unlink()


@pytest.mark.parametrize("shares_port", [False, True])
def test_a_port_that_is_taken(address: str, *, shares_port: bool) -> None:
    """Also one whose owner would share it: requests must not go to two servers by turns."""
    with socket.socket() as taken:
        if shares_port:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with running("gateway", "--worker", address, "--port", port, "--processes", "2") as front:
            assert front.wait() == 1
    assert front.log == f"msaserve: error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_two_servers_of_several_processes(front: Process, address: str) -> None:
    port = front.line(URL).rpartition(":")[2]
    with running("gateway", "--worker", address, "--port", port, "--processes", "2") as second:
        assert second.wait() == 1
    assert "Address already in use" in second.log


def test_what_cannot_be_served_is_said_once() -> None:
    with gateway("grpc://127.0.0.1:9", wait_seconds="1", processes="3") as front:
        processes: list[psutil.Process] = []
        until(lambda: bool(processes.extend(gateways(front)) or processes))
        assert front.wait() == 1
    assert front.log.startswith("msaserve: error: no worker answers"), front.log
    assert len(front.log.splitlines()) == 1
    assert are_gone(processes)


def test_when_none_can_be_started_any_more() -> None:
    with worker() as engine, gateway(engine.line(ADDRESS), wait_seconds="1", processes="2") as front:
        front.line(URL)
        engine.popen.kill()
        for process in gateways(front):
            process.kill()
        assert front.wait() == 1
    assert "msaserve: error: no worker answers" in front.log
    assert "Traceback" not in front.log


def test_refused_counts() -> None:
    command = [sys.executable, "-m", "msaserve", "gateway", "--worker", "grpc://a:1", "--processes", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert result.returncode == 2
    assert "processes must be at least 1" in result.stderr


def test_the_key_is_asked_for_by_all(address: str) -> None:
    with gateway(address, processes="2", api_key="k") as front, ExitStack() as stack:
        url = front.line(URL)
        for http in [stack.enter_context(client(url)) for _ in range(4)]:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 200


@pytest.fixture
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the processes keep their socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # short, as the path of a socket must be
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_serve_drains(temporary_files: Path) -> None:
    with serve("--processes", "2", holds=True) as server, ExitStack() as stack:
        url = server.line(URL)
        processes = family(server)
        assert len(gateways(server)) == 2
        streams = Streams(url, stack, max_tokens=100)
        server.popen.send_signal(signal.SIGTERM)
        assert [streams.end(i) for i in range(2)] == [("length", 100)] * 2
        assert server.wait() == 0, server.log
        assert are_gone(processes)
        assert not list(temporary_files.iterdir())
        assert "Traceback" not in server.log


def test_serve_whose_worker_dies(temporary_files: Path) -> None:
    with serve("--processes", "2", holds=True) as server, ExitStack() as stack:
        url = server.line(URL)
        processes = family(server)
        streams = Streams(url, stack, max_tokens=3000)
        next(p for p in processes if "msaserve.worker.child" in " ".join(p.cmdline())).kill()
        for i in range(2):
            last = json.loads(streams.rest(i)[-1].removeprefix("data: "))
            assert "the worker failed" in last["error"]["message"]
        assert server.wait() == 1
        assert "msaserve: error: the worker died: SIGKILL" in server.log
        assert "Traceback" not in server.log
        assert are_gone(processes)
        assert not list(temporary_files.iterdir())


def test_serve_that_is_killed(temporary_files: Path) -> None:
    with serve("--processes", "2") as server:
        server.line(URL)
        processes = family(server)
        assert len(processes) >= 5  # a worker, and two gateways with a media process each
        server.popen.kill()
        until(lambda: are_gone(processes))
        assert not list(temporary_files.iterdir())


def test_a_hung_process_is_replaced(address: str) -> None:
    """And what it counted stays."""
    with gateway(address, processes="2", hung_seconds="2") as front, ExitStack() as stack:
        url = front.line(URL)
        first = gateways(front)[0]
        clients = [stack.enter_context(client(url)) for _ in range(2)]
        for http in clients:
            assert http.post(TEXT, json=body()).status_code == 200
        time.sleep(2)  # as long as from one beat to the next
        first.suspend()
        until(lambda: are_gone([first]))
        until(lambda: "answers nothing for 2 s and is killed" in front.log)
        until(lambda: len(gateways(front)) == 2)
        for http in clients:  # one of them finds its connection closed and makes another
            assert http.post(TEXT, json=body()).status_code == 200
        until(lambda: metric(clients[0], "smg_worker_requests_total") == 4)
        assert front.end(signal.SIGTERM) == 0
