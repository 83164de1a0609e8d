"""What one of several gateway processes may hold, and what their numbers together are."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import Any

import pytest
from fake_engine import TINY, FakeClient

from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.client import Breaker, WorkerState
from msaserve.gateway.command import Gateway
from msaserve.gateway.media.options import MediaOptions
from msaserve.gateway.media.pool import num_cores
from msaserve.gateway.place import Place
from msaserve.gateway.processes import supervisor
from msaserve.observe.merge import Family, lasting, merged
from msaserve.observe.metrics import ServerMetrics
from msaserve.tokenizer import Tokenizer


def metrics(num_requests: int, **worker: object) -> tuple[ServerMetrics, list[Family]]:
    metrics = ServerMetrics("m")
    for _ in range(num_requests):
        metrics.count_http("POST", "/v1/completions", 200, 0.02)
        metrics.num_http_active += 1
    tally = WorkerState("w", num_active=num_requests, num_requests=num_requests, **worker)  # type: ignore[arg-type]
    return metrics, metrics.families([tally])


def value(families: list[Family], sample: str, **labels: str) -> float:
    found = [v for f in families for name, given, v in f.samples if name == sample and labels.items() <= given.items()]
    assert len(found) == 1
    return found[0]


def test_numbers_of_several() -> None:
    own, first = metrics(2, num_failures=3, breaker=Breaker.OPEN, num_indexed_blocks=7)
    _, second = metrics(5, num_failures=1, num_indexed_blocks=9)
    _, nothing = metrics(0)
    own.count_http("GET", "/health", 200, 0.1)  # a series that no other has
    first = own.families([WorkerState("w", num_active=2, num_requests=2, num_failures=3, breaker=Breaker.OPEN)])
    for together in (merged(first, [second, nothing]), merged(nothing, [second, first])):
        assert value(together, "msaserve:http_requests_total", path="/v1/completions") == 7
        assert value(together, "msaserve:http_requests_total", path="/health") == 1
        assert value(together, "smg_http_request_duration_seconds_count", path="/v1/completions") == 7
        assert value(together, "smg_http_request_duration_seconds_bucket", path="/v1/completions", le="0.01") == 0
        assert value(together, "smg_http_request_duration_seconds_bucket", path="/v1/completions", le="0.025") == 7
        assert value(together, "smg_http_connections_active") == 7
        assert value(together, "smg_worker_requests_total", worker="w") == 7
        assert value(together, "smg_worker_requests_active", worker="w") == 7
        assert value(together, "smg_worker_cb_consecutive_failures", worker="w") == 3
        assert value(together, "smg_worker_cb_state", worker="w") == Breaker.OPEN
        assert value(together, "smg_kv_index_blocks", worker="w") == 9
    created = [value(f, "msaserve:http_requests_created", path="/v1/completions") for f in (first, second)]
    both = merged(first, [second])
    assert value(both, "msaserve:http_requests_created", path="/v1/completions") == min(created)


def test_what_lasts() -> None:
    _, families = metrics(4)
    gone = lasting(families)
    assert {family.kind for family in gone} == {"counter", "histogram"}
    _, own = metrics(1)
    together = merged(own, [gone])
    assert value(together, "smg_worker_requests_total", worker="w") == 5
    assert value(together, "smg_worker_requests_active", worker="w") == 1


def test_one_process_shows_what_it_counts() -> None:
    own, _ = metrics(3)
    state = WorkerState("w", is_ready=True, num_active=3, num_requests=3)
    text = own.render([state]).decode()
    assert 'smg_worker_health{worker="w"} 1.0' in text
    assert text.count("# TYPE smg_worker_requests_total counter") == 1
    assert text == own.render([state], [[]]).decode()


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_shares(count: int) -> None:
    options = MediaOptions(media_processes=5)
    whole, part = options.pipeline(TINY), options.pipeline(TINY, share=count)
    assert whole is not None
    assert part is not None
    assert part.limits.max_inflight_bytes == whole.limits.max_inflight_bytes // count
    assert part.limits.max_cache_bytes == whole.limits.max_cache_bytes // count
    assert part._pool._threads._max_workers == {1: 5, 2: 3, 1000: 1}[count]
    of_cores = MediaOptions().pipeline(TINY)
    assert of_cores is not None
    assert of_cores._pool._threads._max_workers == num_cores()
    settings = GatewaySettings("tiny", max_body_bytes=100)
    app = create_app(FakeClient(), Tokenizer.load(TINY), None, settings, place=Place(count=count))
    assert app.state.gateway._bodies.limit == {1: 6400, 2: 3200, 1000: 100}[count]


async def test_a_process_that_cannot_be_started_again_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[tuple[int, ...]] = []

    def no_room(*arguments: Any, pass_fds: list[int], **options: Any) -> None:
        tries.append(tuple(pass_fds))
        raise OSError("cannot fork")

    monkeypatch.setattr(subprocess, "Popen", no_room)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.001)
    with socket.socket() as listener:
        several = supervisor.Supervisor(Gateway(worker=("unix:///w",)), 2, listener)
        gone, other = several._slots
        gone.was_ready = True
        other.is_ready.set()
        keeping = asyncio.create_task(several._keep(gone))
        while len(tries) < 6 and not keeping.done():
            await asyncio.sleep(0.001)
        several._is_stopping.set()
        await keeping
    assert "gateway process 0 ended: it could not be started: cannot fork" in caplog.text
    assert tries[0] == tries[-1], "descriptors are left open"
