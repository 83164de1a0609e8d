"""Every environment variable this package reads. Each function reads its variable when called, never at import."""

from __future__ import annotations

import os
from typing import Literal


def is_check_on() -> bool:
    """MSASERVE_CHECK (default off): the engine checks its pages and queues after every step. Slow; tests turn it on."""
    return _is_true("MSASERVE_CHECK")


def log_level() -> str:
    """MSASERVE_LOG_LEVEL (default INFO): the level of the server's log, as Python's logging names it."""
    return os.environ.get("MSASERVE_LOG_LEVEL", "INFO").upper()


def api_key() -> str | None:
    """MSASERVE_API_KEY (default none): the key the server asks for, when the command line names none."""
    return os.environ.get("MSASERVE_API_KEY") or None


def vllm_plugin() -> Literal["off", "auto", "on"]:
    """MSASERVE_VLLM (default auto): 0 leaves vLLM as it is; 1 takes our kernels on other cards than Hopper's too."""
    return _mode("MSASERVE_VLLM")


def sglang_plugin() -> Literal["off", "auto", "on"]:
    """MSASERVE_SGLANG (default auto): as MSASERVE_VLLM, for SGLang."""
    return _mode("MSASERVE_SGLANG")


def has_otlp_endpoint() -> bool:
    """OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT (default none): where spans go.

    OpenTelemetry's packages read these and its other variables themselves.
    """
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))


def _mode(name: str) -> Literal["off", "auto", "on"]:
    if os.environ.get(name, "").strip().lower() in {"0", "false", "no", "off"}:
        return "off"
    return "on" if _is_true(name) else "auto"


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}
