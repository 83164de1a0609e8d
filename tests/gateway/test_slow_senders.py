"""Clients that send a request slowly, never, or without end, each at a connection of its own."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest
from fake_engine import FakeClient, serve
from waits import SECONDS

from msaserve.tokenizer import Tokenizer

PATH = "/v1/completions"
BODY = b'{"prompt": "a"}'
READ_SECONDS = 1.0
MOST_SECONDS = 30
"""Less than what is sent slowly would take."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(FakeClient(), read_seconds=READ_SECONDS) as url:
        yield url


def connect(url: str) -> closing[socket.socket]:
    host, port = re.fullmatch(r"http://(.+):(\d+)", url).groups()  # type: ignore[union-attr]
    return closing(socket.create_connection((host, int(port)), timeout=SECONDS))


def head(size: int, *more: str) -> bytes:
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: x", f"Content-Length: {size}", *more, "", ""]).encode()


def trickle(connection: socket.socket, data: bytes, seconds: float = 0.02) -> bytes:
    """Byte by byte until the server answers; then all of the answer up to its end."""
    answer = b""
    connection.setblocking(False)
    for i in range(len(data)):
        try:
            connection.send(data[i : i + 1])
            answer = connection.recv(1)
            break
        except BlockingIOError:
            time.sleep(seconds)
    connection.setblocking(True)
    while chunk := connection.recv(65_536):
        answer += chunk
    return answer


def problem(answer: bytes) -> tuple[int, str]:
    start, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in start.lower()
    return int(start.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("has_served", [False, True])
def test_headers_byte_by_byte(url: str, *, has_served: bool) -> None:
    """On a new connection, and on one that has brought an answer before."""
    start = time.monotonic()
    with connect(url) as connection:
        if has_served:
            connection.sendall(head(len(BODY)) + BODY)
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            start = time.monotonic()
        assert problem(trickle(connection, head(len(BODY), "X-Long: " + "x" * 2000))) == (408, "request_timeout")
        assert READ_SECONDS * 0.9 < time.monotonic() - start < MOST_SECONDS


def test_line_breaks_for_ever(url: str) -> None:
    """They may come before a request, and begin none."""
    with connect(url) as connection:
        assert problem(trickle(connection, b"\r\n" * 1000)) == (408, "request_timeout")


def test_a_body_byte_by_byte(url: str) -> None:
    start = time.monotonic()
    with connect(url) as connection:
        connection.sendall(head(2000))
        assert problem(trickle(connection, b" " * 2000)) == (408, "request_timeout")
        assert READ_SECONDS * 0.9 < time.monotonic() - start < MOST_SECONDS


def test_a_body_that_never_comes(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(head(2000))
        assert problem(trickle(connection, b"")) == (408, "request_timeout")
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert f'path="{PATH}",status="408"' in metrics


def test_a_large_body_may_take_longer(url: str) -> None:
    """Hundreds of KiB a second are not slow, though all of it takes twice as long as nothing may."""
    body = b" " * 980_000 + BODY
    with connect(url) as connection:
        connection.sendall(head(len(body)))
        for i in range(0, len(body), 50_000):
            connection.sendall(body[i : i + 50_000])
            time.sleep(0.1)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


def test_headers_without_end(url: str) -> None:
    with connect(url) as connection:
        answer = b""
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        try:
            for _ in range(100_000):
                connection.sendall(b"X-Long: " + b"x" * 1000 + b"\r\n")
        except ConnectionError:
            pass
        else:
            pytest.fail("all of them were taken")
        connection.setblocking(False)
        try:
            answer = connection.recv(65_536)
        except OSError:  # the reset overtook it
            return
        assert problem(answer) == (431, "headers_too_large")


def test_a_connection_that_sends_nothing() -> None:
    """It is closed as an idle one is."""
    with serve(FakeClient(), keep_alive_seconds=1) as other:
        start = time.monotonic()
        with connect(other) as connection:
            assert connection.recv(1) == b""
        assert 0.9 < time.monotonic() - start < SECONDS


def test_a_long_answer_is_not_a_slow_request(url: str, tokenizer: Tokenizer) -> None:
    engine = FakeClient()
    engine.script, engine.delay = tokenizer.encode("abcdefgh"), 0.2
    with serve(engine, read_seconds=1.0) as other, httpx.Client(trust_env=False, timeout=SECONDS) as http:
        for is_stream in (False, True):
            answer = http.post(f"{other}{PATH}", json={"prompt": "a", "max_tokens": 8, "stream": is_stream})
            assert answer.status_code == 200
            assert "h" in answer.text
