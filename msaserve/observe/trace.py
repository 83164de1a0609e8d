"""OpenTelemetry spans, where the extra `otel` is installed and an endpoint is named; without one nothing is imported.

A span's context travels as W3C `traceparent`: in from HTTP headers, on to the worker in gRPC metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from msaserve import env
from msaserve.types import TokenEvent

Kind = Literal["server", "client", "internal"]
Value = str | int | float | bool

CONTEXT_KEYS = ("traceparent", "tracestate")


class Span:
    """One that nobody records. As a context manager it is the parent of what starts within, and ends there."""

    is_recorded = False
    trace_id = ""

    def set(self, name: str, value: Value) -> None:
        """Attribute, named as OpenTelemetry's semantic conventions do where they have a name."""

    def event(self, name: str) -> None:
        """Something that happened now."""

    def fail(self, message: str) -> None:
        """Its work failed."""

    def end(self) -> None: ...

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What tells another process of it."""
        return ()

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None: ...


NO_SPAN = Span()


class Tracer:
    """Makes the spans of one process. `Tracer()` makes none."""

    def __init__(self, provider: Any = None) -> None:
        """provider: an opentelemetry.sdk.trace.TracerProvider, which it owns."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("msaserve")

    def start(
        self,
        name: str,
        kind: Kind = "internal",
        *,
        parent: Iterable[tuple[str, Any]] | None = None,
        attributes: Callable[[], Mapping[str, Value]] = dict,
    ) -> Span:
        """A span whose parent is what `parent` (headers, metadata) tells of, or the one that is current.

        attributes: asked for only if the span is recorded.
        """
        if self._tracer is None:
            return NO_SPAN
        from msaserve.observe.otel import RecordedSpan

        return RecordedSpan(self._tracer, name, kind, parent, attributes())

    def close(self) -> None:
        """Send what has not been sent."""
        if self._provider is not None:
            self._provider.shutdown()


def make_tracer(part: Literal["gateway", "worker"], endpoint: str | None) -> Tracer:
    """A tracer that sends spans to an OTLP endpoint over gRPC, such as http://127.0.0.1:4317; without one, none.

    endpoint: default: what the environment variables of OpenTelemetry name.

    Raises:
        ModuleNotFoundError: the extra `otel` is not installed.
    """
    if endpoint is None and not env.has_otlp_endpoint():
        return Tracer()
    from msaserve.observe.otel import otlp_provider

    return Tracer(otlp_provider(f"msaserve-{part}", endpoint))


class GenerateSpan:
    """The span of one Generate call: what it asked for, when its first token came, what it used."""

    def __init__(self, span: Span, *, is_streamed: bool = True) -> None:
        """is_streamed: False: what comes first comes last too, and says nothing of the first token."""
        self.span = span
        self._is_streamed = is_streamed
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._reasons: set[str] = set()

    def push(self, event: TokenEvent) -> None:
        if not self.span.is_recorded:
            return
        if self._is_streamed and event.token_ids and not self._num_tokens:
            self.span.event("first token")
        self._num_tokens += len(event.token_ids)
        self._num_prompt_tokens = max(self._num_prompt_tokens, event.num_prompt_tokens)
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        if event.finish_reason is not None:
            self._reasons.add(event.finish_reason)
        if event.error is not None:
            self.span.fail(event.error)

    def end(self, error: BaseException | None = None) -> None:
        """error: what ended it before its outputs were whole; a caller who went away is no failure."""
        if not self.span.is_recorded:
            return
        self.span.set("gen_ai.usage.input_tokens", self._num_prompt_tokens)
        self.span.set("gen_ai.usage.output_tokens", self._num_tokens)
        self.span.set("msaserve.cached_tokens", self._num_cached_tokens)
        self.span.set("gen_ai.response.finish_reasons", ",".join(sorted(self._reasons)) or "abort")
        if isinstance(error, Exception):
            self.span.fail(str(error))
        self.span.end()
