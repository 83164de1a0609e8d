"""Prometheus metrics of a server.

What an engine would count too is named as vLLM names it, with this project's prefix; what only a gateway knows is named
and labelled as smg does it, so that boards made for it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from msaserve.observe.counts import Counts, Distribution
from msaserve.observe.merge import Family, merged
from msaserve.types import EngineLoad, Modality

if TYPE_CHECKING:
    from msaserve.gateway.client import WorkerState
    from msaserve.gateway.media.pipeline import MediaPipeline

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
        self._counts = Counts(self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Distribution:
            return self._counts.histogram(f"msaserve:{name}", text, ["model_name"], buckets).labels(model_name)

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
        self._finished = self._counts.counter(
            "msaserve:request_success", "Outputs that ended, by how.", ["model_name", "finished_reason"]
        )
        self._http = self._counts.counter(
            "msaserve:http_requests",
            "HTTP requests answered; 499 is a client that went away.",
            ["method", "path", "status"],
        )
        self._http_seconds = self._counts.histogram(
            "smg_http_request_duration_seconds",
            "From a request's first byte to the last of its answer.",
            ["method", "path"],
            _SECONDS,
        )
        self.num_http_active = 0
        active = Gauge("smg_http_connections_active", "Requests being answered.", registry=self._registry)
        active.set_function(lambda: self.num_http_active)
        self.media = MediaMetrics(self._registry)
        self._model_name = model_name

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).value += 1

    def count_http(self, method: str, path: str, status: int, seconds: float) -> None:
        """path: the route, not what the client sent, so that the number of series stays bounded."""
        self._http.labels(method, path, str(status)).value += 1
        self._http_seconds.labels(method, path).observe(seconds)

    def families(self, workers: Sequence[WorkerState]) -> list[Family]:
        """All numbers, with those of the workers that say theirs."""
        self._load.workers = workers
        return [
            Family(
                metric.name, metric.documentation, metric.type, [(s.name, s.labels, s.value) for s in metric.samples]
            )
            for metric in self._registry.collect()
        ]

    def render(self, workers: Sequence[WorkerState], others: Sequence[Sequence[Family]] = ()) -> bytes:
        """The text format. others: the numbers of other gateway processes, without what workers say of themselves."""
        registry: Any = _Families(merged(self.families(workers), others))
        return generate_latest(registry)


class _Families:
    """What of a registry its text needs."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric


class MediaMetrics:
    """What preparing pictures and clips takes. `gateway.media.stages.Watcher`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._jobs = Counter(
            "msaserve:media_items",
            "Pictures and clips, by how they came to be: prepared anew, by another request at the same time (joined), "
            "from the cache of recent ones (cached), or not at all (refused).",
            ["modality", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "msaserve:media_stage_seconds",
            "Of one picture or clip: fetching it, waiting for a process, preparing it there.",
            ["modality", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._registry = registry

    def follow(self, media: MediaPipeline) -> None:
        """Show its gauges too."""
        for name, text, value in (
            ("bytes_in_flight", "Files and patches that requests hold.", lambda: media.bytes_in_flight),
            ("cache_bytes", "Patches of recent files.", lambda: media.cache_bytes),
            ("processes", "Media processes that run.", lambda: media.num_processes),
        ):
            Gauge(f"msaserve:media_{name}", text, registry=self._registry).set_function(value)

    def count(self, modality: Modality, outcome: str) -> None:
        self._jobs.labels(modality, outcome).inc()

    def took(self, modality: Modality, stage: str, seconds: float) -> None:
        self._seconds.labels(modality, stage).observe(seconds)


def _used(load: EngineLoad) -> float:
    return load.num_used_pages / load.num_pages if load.num_pages else 0.0


# (name, help, value) per worker, as smg names them
_WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerState], float]], ...] = (
    ("smg_worker_requests_active", "Outputs in flight there, of this gateway.", lambda w: w.num_active),
    ("smg_worker_cb_state", "Circuit breaker: 0 closed, 1 open, 2 half open.", lambda w: w.breaker),
    ("smg_worker_cb_consecutive_failures", "Failures in a row.", lambda w: w.num_failures),
    ("smg_kv_index_blocks", "Blocks that it holds by its KV events.", lambda w: w.num_indexed_blocks),
)
_WORKER_COUNTERS: tuple[tuple[str, str, Callable[[WorkerState], float]], ...] = (
    ("smg_worker_requests", "Requests sent there.", lambda w: w.num_requests),
    ("smg_worker_retries", "Requests that brought nothing there and were sent elsewhere.", lambda w: w.num_retries),
)
_HEALTH = ("smg_worker_health", "1: its health check passes.")
_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineLoad], float]], ...] = (
    ("smg_engine_running_requests", "Requests that are being computed there.", lambda e: e.num_running),
    ("smg_engine_waiting_requests", "Requests that wait for room there.", lambda e: e.num_waiting),
    ("smg_engine_token_usage", "Share of its pages that requests hold, 0 to 1.", _used),
    (
        "smg_engine_cache_hit_rate",
        "Share of prompt tokens found in its prefix cache, 0 to 1.",
        lambda e: e.num_prefix_hit_tokens / max(e.num_prefix_queried_tokens, 1),
    ),
)


class _LoadCollector:
    """Workers keep these numbers themselves; a scrape copies them."""

    def __init__(self, model_name: str) -> None:
        self.workers: Sequence[WorkerState] = ()
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loads = [worker.load for worker in self.workers if worker.load is not None]
        if loads:
            yield from self._engines(loads)
        metric: Metric
        asked = [worker for worker in self.workers if worker.is_ready is not None]
        if asked:
            metric = GaugeMetricFamily(*_HEALTH, labels=["worker"])
            for worker in asked:
                metric.add_metric([worker.name], float(bool(worker.is_ready)))
            yield metric
        for name, text, worker_value in _WORKER_GAUGES:
            metric = GaugeMetricFamily(name, text, labels=["worker"])
            for worker in self.workers:
                metric.add_metric([worker.name], worker_value(worker))
            yield metric
        for name, text, worker_value in _WORKER_COUNTERS:
            metric = CounterMetricFamily(name, text, labels=["worker", "model"])
            for worker in self.workers:
                metric.add_metric([worker.name, self._model_name], worker_value(worker))
            yield metric
        for name, text, load_value in _ENGINE_GAUGES:
            metric = GaugeMetricFamily(name, text, labels=["worker", "model"])
            for worker in self.workers:
                if worker.load is not None:
                    metric.add_metric([worker.name, self._model_name], load_value(worker.load))
            yield metric

    def _engines(self, loads: Sequence[EngineLoad]) -> Iterator[Metric]:
        """Of all workers together."""
        total = EngineLoad(
            **{name: sum(getattr(load, name) for load in loads) for name in EngineLoad.__struct_fields__}
        )
        usage = GaugeMetricFamily(
            "msaserve:kv_cache_usage_perc", "Share of pages that requests hold, 0 to 1.", labels=["model_name"]
        )
        usage.add_metric([self._model_name], _used(total))
        yield usage
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"msaserve:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], getattr(total, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"msaserve:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(total, field))
            yield counter
