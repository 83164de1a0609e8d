"""Spans that are recorded: what of `observe.trace` needs OpenTelemetry's packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from msaserve.observe.trace import CONTEXT_KEYS, Kind, Span, Value

_KINDS = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL}
_PROPAGATOR = TraceContextTextMapPropagator()


class RecordedSpan(Span):
    is_recorded = True

    def __init__(
        self,
        tracer: trace.Tracer,
        name: str,
        kind: Kind,
        parent: Iterable[tuple[str, Any]] | None,
        attributes: Mapping[str, Value],
    ) -> None:
        # A caller who tells of no span has none: an empty context, and not whatever is current here.
        above = None
        if parent is not None:
            carrier = {key: value for key, value in parent if key in CONTEXT_KEYS and isinstance(value, str)}
            above = _PROPAGATOR.extract(carrier, context.Context())
        self._span = tracer.start_span(name, above, _KINDS[kind], dict(attributes))
        self._context = trace.set_span_in_context(self._span)
        self._token: Any = None
        self.trace_id = trace.format_trace_id(self._span.get_span_context().trace_id)

    def set(self, name: str, value: Value) -> None:
        self._span.set_attribute(name, value)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, message: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, message)

    def end(self) -> None:
        self._span.end()

    def headers(self) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return tuple(carrier.items())

    def __enter__(self) -> Span:
        self._token = context.attach(self._context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        context.detach(self._token)
        if isinstance(error, Exception):
            self.fail(str(error))
        self.end()


def otlp_provider(service: str, endpoint: str | None) -> Any:
    """Sends spans in batches, from a thread of its own. endpoint: default: the environment's."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Resource.create lets OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    insecure = None if endpoint is None else not endpoint.startswith("https:")
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure)))
    return provider
