"""Prometheus metrics of a server: names follow vLLM's, with this project's prefix."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from msaserve.types import EngineLoad

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_TOKENS = (1, 10, 100, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)

# (name, help, field of EngineLoad)
_GAUGES = (
    ("num_requests_running", "Requests that are being computed.", "num_running"),
    ("num_requests_waiting", "Requests that wait for room.", "num_waiting"),
    ("num_pages", "Pages of the cache.", "num_pages"),
    ("num_used_pages", "Pages that requests hold.", "num_used_pages"),
    ("num_cached_pages", "Pages that nobody holds and that keep a reusable prefix.", "num_cached_pages"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_queried_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_hit_tokens"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "num_prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "num_output_tokens"),
    ("num_preemptions", "Requests whose pages were taken and that were computed anew.", "num_preemptions"),
)


class ServerMetrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._load = _LoadCollector(model_name)
        self._registry.register(self._load)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"msaserve:{name}", text, ["model_name"], buckets=buckets, registry=self._registry)
            return metric.labels(model_name)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of one output.", _TOKEN_SECONDS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Per request: mean time of a token after the first.",
            _TOKEN_SECONDS,
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", _SECONDS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request, all its outputs together.", _TOKENS
        )
        self._finished = Counter(
            "msaserve:request_success",
            "Outputs that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._http = Counter(
            "msaserve:http_requests",
            "HTTP requests answered; 499 is a client that went away.",
            ["method", "path", "status"],
            registry=self._registry,
        )
        self._model_name = model_name

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def count_http(self, method: str, path: str, status: int) -> None:
        """path: the route, not what the client sent, so that the number of series stays bounded."""
        self._http.labels(method, path, str(status)).inc()

    def render(self, load: EngineLoad | None) -> bytes:
        """The text format, with the engine's numbers as of `load`; without them if there is none."""
        self._load.load = load
        return generate_latest(self._registry)


class _LoadCollector:
    """The engine keeps these numbers itself; a scrape copies them."""

    def __init__(self, model_name: str) -> None:
        self.load: EngineLoad | None = None
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        load = self.load
        if load is None:
            return
        used = load.num_used_pages / load.num_pages if load.num_pages else 0.0
        usage = GaugeMetricFamily(
            "msaserve:kv_cache_usage_perc", "Share of pages that requests hold, 0 to 1.", labels=["model_name"]
        )
        usage.add_metric([self._model_name], used)
        yield usage
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"msaserve:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], getattr(load, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"msaserve:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(load, field))
            yield counter
