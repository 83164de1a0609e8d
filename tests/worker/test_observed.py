"""What a server says of itself: spans over all its processes, metrics, the access log."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from process_driver import ADDRESS, SECONDS, URL, gateway, serve, worker
from prometheus_client.parser import text_string_to_metric_families

from msaserve.eval.example import Picture
from msaserve.eval.media import data_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PICTURE = data_url(Picture(np.full((3, 112, 112), 77, np.uint8)))
PARTS = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
CHAT = {"model": "tiny", "max_tokens": 3, "ignore_eos": True, "messages": [{"role": "user", "content": PARTS}]}


class Collector(services.TraceServiceServicer):  # type: ignore[misc]
    """Takes spans as any OTLP collector does."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """(service, span)."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return collector.ExportTraceServiceResponse()

    def find(self, service: str, name: str) -> Any:
        (span,) = [span for owner, span in self.spans if (owner, span.name) == (service, name)]
        return span


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    server, found = grpc.server(ThreadPoolExecutor(2)), Collector()
    services.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield found, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.parametrize("num_gateways", ["1", "2"])
def test_one_trace_through_all_processes(num_gateways: str) -> None:
    options = ("--access-log", "--processes", num_gateways)
    with collecting() as (found, endpoint), serve("--otlp-traces-endpoint", endpoint, *options) as server:
        url = server.line(URL)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "asked-7"}
        with httpx.Client(trust_env=False, timeout=SECONDS, headers=headers) as http:
            answer = http.post(f"{url}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
            assert http.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": -1}).status_code == 400
            assert http.get(f"{url}/health").status_code == 200
        assert server.end(signal.SIGTERM) == 0
        usage = answer.json()["usage"]

    whole = next(s for _, s in found.spans if s.kind == Span.SPAN_KIND_SERVER and s.name.startswith("POST"))
    assert whole.name == "POST /v1/chat/completions"
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert (
        attributes(whole).items()
        >= {
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "msaserve.request_id": "asked-7",
            "msaserve.prompt_tokens": usage["prompt_tokens"],
            "msaserve.output_tokens": 3,
        }.items()
    )
    for stage in ("fetch", "wait", "prepare"):
        span = found.find("msaserve-gateway", f"media {stage}")
        assert (span.trace_id.hex(), span.parent_span_id) == (TRACE, whole.span_id)
    asked = found.find("msaserve-gateway", "Generate")
    served = found.find("msaserve-worker", "Generate")
    assert (asked.trace_id.hex(), asked.parent_span_id, asked.kind) == (TRACE, whole.span_id, Span.SPAN_KIND_CLIENT)
    assert (served.trace_id.hex(), served.parent_span_id, served.kind) == (TRACE, asked.span_id, Span.SPAN_KIND_SERVER)
    # The answer is sent whole: only the worker sees its first token.
    assert [[event.name for event in span.events] for span in (asked, served)] == [[], ["first token"]]
    assert served.start_time_unix_nano < served.events[0].time_unix_nano < served.end_time_unix_nano
    for span in (asked, served):
        said = attributes(span)
        assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (3, "length")
        assert said["gen_ai.request.id"] == answer.json()["id"]
    refused = [span for _, span in found.spans if attributes(span).get("http.response.status_code") == 400]
    assert len(refused) == 1

    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 400),
        ("GET", "/health", 200),
    ]
    assert (
        lines[0].items()
        >= {
            "request_id": "asked-7",
            "client": "127.0.0.1",
            "id": answer.json()["id"],
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": 0,
            "output_tokens": 3,
            "trace_id": TRACE,
        }.items()
    )
    assert lines[0]["milliseconds"] > 0
    assert "trace_id" not in lines[2]


class Metrics:
    def __init__(self, text: str) -> None:
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())


def test_metrics_of_workers_and_media() -> None:
    with worker() as first, worker() as second:
        addresses = [process.line(ADDRESS) for process in (first, second)]
        with gateway(*addresses, policy="round_robin") as front:
            url = front.line(URL)
            with httpx.Client(trust_env=False, timeout=SECONDS) as http:

                def read() -> Metrics:
                    return Metrics(http.get(f"{url}/metrics").text)

                for _ in range(4):
                    assert http.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
                broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
                body = {**CHAT, "messages": [{"role": "user", "content": broken}]}
                assert http.post(f"{url}/v1/chat/completions", json=body).status_code == 400
                get = read()
                for address in addresses:
                    assert get("smg_worker_health", worker=address) == 1
                    assert get("smg_worker_requests_total", worker=address, model="tiny") == 2
                    assert get("smg_worker_cb_state", worker=address) == 0
                    assert get("smg_engine_token_usage", worker=address) == 0
                assert 0 < get("smg_engine_cache_hit_rate", worker=addresses[0]) < 1
                assert get("msaserve:media_items_total", modality="image", outcome="prepared") == 1
                assert get("msaserve:media_items_total", modality="image", outcome="cached") == 3
                assert get("msaserve:media_items_total", modality="image", outcome="refused") == 1
                assert get("msaserve:media_stage_seconds_count", modality="image", stage="prepare") == 2
                assert get("msaserve:media_stage_seconds_sum", modality="image", stage="prepare") > 0
                assert get("msaserve:media_bytes_in_flight") == 0
                assert get("msaserve:media_cache_bytes") > 0
                assert get("msaserve:media_processes") >= 1
                assert get("smg_http_request_duration_seconds_count", path="/v1/chat/completions") == 5
                assert get("smg_http_connections_active") == 1  # this one

                second.end(signal.SIGKILL)
                for _ in range(2):
                    assert http.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200
                get = read()
                assert get("smg_worker_health", worker=addresses[1]) == 0
                failures = get("smg_worker_cb_consecutive_failures", worker=addresses[1])
                assert get("smg_worker_retries_total", worker=addresses[1]) == failures >= 1
                assert get("smg_worker_cb_state", worker=addresses[1]) in (1, 2)  # open, or due to be tried again
                assert get("msaserve:num_pages") == get("msaserve:num_pages", model_name="tiny") > 0


def test_a_line_for_who_left() -> None:
    """A client that leaves is told apart from one that has its answer."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with serve("--access-log", holds=True) as server, httpx.Client(trust_env=False, timeout=SECONDS) as http:
        url = server.line(URL) + "/v1/completions"
        with http.stream("POST", url, json=body) as answer:
            next(answer.iter_lines())
        http.post(url, json={**body, "max_tokens": 2})
        assert server.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    tokens = {line["status"]: line["output_tokens"] for line in lines}
    assert tokens.keys() == {200, 499}
    assert tokens[200] == 2
    assert 0 < tokens[499] < 3000
