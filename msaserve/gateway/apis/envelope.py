"""Around every request: its id, the API key, errors in the words of the API it spoke, counts and the access log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from msaserve.gateway.apis.messages import MESSAGES
from msaserve.gateway.apis.responses import RESPONSES
from msaserve.gateway.ids import new_id
from msaserve.gateway.media.budget import Lease
from msaserve.gateway.stream import Generation
from msaserve.gateway.transport import OPENAI, ClientGoneError, Dialect, NoSuchModelError, error_response
from msaserve.observe.log import ACCESS_LOGGER
from msaserve.observe.metrics import ServerMetrics
from msaserve.observe.trace import NO_SPAN, Span, Tracer, Value

_access_log = logging.getLogger(ACCESS_LOGGER)

_OPEN_PATHS = ("/health", "/ready")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Facts:
    """What an endpoint tells of its request, in `request.state.facts`, for the log and the span."""

    answer_id: str = ""
    generation: Generation | None = None
    leases: list[Lease] = field(default_factory=list)
    """What its body and its media take of the bytes in flight, until it is answered."""

    def items(self) -> dict[str, str | int]:
        if self.generation is None:
            return {}
        return {
            "id": self.answer_id,
            "prompt_tokens": self.generation.num_prompt_tokens,
            "cached_tokens": self.generation.num_cached_tokens,
            "output_tokens": self.generation.num_output_tokens,
        }


class Envelope:
    """Around every request: its id, the API key, errors nobody else answered, its span, what is counted and logged."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, metrics: ServerMetrics, tracer: Tracer, paths: frozenset[str]
    ) -> None:
        """paths: the routes; others are counted together."""
        self._app = app
        self._api_key = api_key
        self._metrics = metrics
        self._tracer = tracer
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = Headers(scope=scope)
        method, path = scope["method"], scope["path"] if scope["path"] in self._paths else "other"
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = new_id()
        facts = scope.setdefault("state", {})["facts"] = Facts()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode()))
                if path.startswith("/v1/messages"):  # Anthropic's clients look for it by this name
                    message["headers"].append((b"request-id", request_id.encode()))
            await send(message)

        told = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        span = self._tracer.start(f"{method} {path}", "server", parent=told) if method == "POST" else NO_SPAN
        self._metrics.num_http_active += 1
        try:
            with span:
                try:
                    if self._api_key is not None and scope["path"] not in _OPEN_PATHS:
                        self._check_key(headers)
                    await self._app(scope, receive, send_with_id)
                except (ClientGoneError, ClientDisconnect):
                    status = 499
                except Exception as error:
                    if status:
                        raise
                    response = error_response(_located(error, scope), dialect_of(scope["path"]))
                    await response(scope, receive, send_with_id)
                finally:
                    if span.is_recorded:
                        _describe(span, {"http.request.method": method, "http.route": path}, status, request_id, facts)
        finally:
            seconds = time.perf_counter() - start
            for lease in facts.leases:
                lease.close()
            self._metrics.num_http_active -= 1
            self._metrics.count_http(method, path, status, seconds)
            if _access_log.isEnabledFor(logging.INFO):
                line = {
                    "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                    "method": method,
                    "path": path,
                    "status": status,
                    "milliseconds": round(seconds * 1000, 1),
                    "request_id": request_id,
                    "client": (scope.get("client") or ("",))[0],
                    **facts.items(),
                    **({"trace_id": span.trace_id} if span.is_recorded else {}),
                }
                _access_log.info(json.dumps(line))

    def _check_key(self, headers: Headers) -> None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        assert self._api_key is not None
        if not any(key and hmac.compare_digest(key.encode(), self._api_key.encode()) for key in keys):
            raise HTTPException(401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")


def _describe(span: Span, http: dict[str, str], status: int, request_id: str, facts: Facts) -> None:
    known: dict[str, Value] = {**http, "http.response.status_code": status, "msaserve.request_id": request_id}
    known |= {f"msaserve.{name}": value for name, value in facts.items().items()}
    for name, value in known.items():
        span.set(name, value)
    if status >= 500:
        span.fail(f"HTTP {status}")


def _located(error: Exception, scope: Scope) -> Exception:
    """The error; of a path or a method that there is not, with both."""
    if (
        not isinstance(error, HTTPException)
        or error.status_code not in (404, 405)
        or isinstance(error, NoSuchModelError)
    ):
        return error
    detail = f"{scope['method']} {scope['path']}: {error.detail.lower()}"
    return HTTPException(error.status_code, detail, dict(error.headers or {}))


def dialect_of(path: str) -> Dialect:
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return MESSAGES
    return RESPONSES if path == "/v1/responses" else OPENAI
