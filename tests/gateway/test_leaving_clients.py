"""Clients that leave before they have their answer, and those that do not."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, serve
from waits import until

from msaserve.tokenizer import Tokenizer

TEXT = "/v1/completions"


def post(http: httpx.Client, body: dict[str, Any]) -> socket.socket:
    """Send a request at a connection of its own, which is still to be read and closed."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((http.base_url.host, http.base_url.port or 80))
    connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_client_that_goes_away_aborts_its_request(
    http: httpx.Client, engine: FakeClient, tokenizer: Tokenizer, is_stream: bool, prompt: Any
) -> None:
    engine.script = tokenizer.encode("abc")
    engine.delay = 0.1
    body = {"prompt": prompt, "stream": is_stream, "ignore_eos": True, "max_tokens": 3000}
    with post(http, body) as connection:
        until(lambda: bool(engine.running))
        if is_stream:
            assert connection.recv(12) == b"HTTP/1.1 200"
    until(lambda: not engine.running)
    assert len(engine.closed_early) == len(engine.requests) == (1 if prompt == "a" else 2)
    until(lambda: f'path="{TEXT}",status="499"' in http.get("/metrics").text)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_stays_is_not_said_to_have_left(
    engine: FakeClient, tokenizer: Tokenizer, is_stream: bool
) -> None:
    engine.script, engine.delay = tokenizer.encode("abc"), 0.01
    with serve(engine) as url, httpx.Client(base_url=url, timeout=200, trust_env=False) as http:
        for _ in range(20):
            assert http.post(TEXT, json={"prompt": "a", "stream": is_stream}).status_code == 200
        metrics = http.get("/metrics").text
    assert f'path="{TEXT}",status="200"}} 20.0' in metrics
    assert 'status="499"' not in metrics


def test_a_client_that_goes_away_before_the_first_event(http: httpx.Client, engine: FakeClient) -> None:
    engine.delay = 60
    with post(http, {"prompt": "a", "stream": True}):
        until(lambda: bool(engine.running))
    until(lambda: len(engine.closed_early) == 1)
    assert not engine.running
