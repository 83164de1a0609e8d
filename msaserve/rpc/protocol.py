"""What both ends of the wire agree on besides the messages: names, options, and the size from which data is large."""

from __future__ import annotations

from msaserve.errors import InvalidRequestError

SERVICE = "vllm.grpc.engine.VllmEngine"

ERROR_KEY = "msaserve-error-bin"
"""Trailing metadata of a failed call: JSON of the exception's kind, param and code."""
REQUEST_KEY = "msaserve-request-bin"
"""Metadata of Generate: JSON of what GenerateRequest has and the message has not (a wide seed, the cache salt)."""
LOAD_KEY = "msaserve-load-bin"
"""Trailing metadata of GetLoads: JSON of EngineLoad, whose counters SchedulerLoad has no fields for."""

LARGE_BYTES = 65_536
"""Messages above this are converted in a thread, tensors from here on travel through shared memory where they can."""

MAX_METADATA_BYTES = 64 * 1024

Options = tuple[tuple[str, int], ...]

_BOTH: Options = (
    # Patches of many pictures are hundreds of MiB; the bound is protobuf's own, 2 GiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: Options = (
    *_BOTH,
    # Gateways ping idle connections every 30 s; the default would take that for abuse and close them.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two workers on one port would silently share its connections.
    ("grpc.so_reuseport", 0),
)
CHANNEL_OPTIONS: Options = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


def parse_address(address: str) -> str:
    """`grpc://host:port` or `unix:///path` as gRPC takes it: host:port, unix:/path.

    Raises:
        InvalidRequestError: it has another form.
    """
    scheme, separator, target = address.partition("://")
    if scheme == "unix" and target.startswith("/"):
        return f"unix:{target}"
    host, _, port = target.rpartition(":")
    if scheme != "grpc" or not separator or not host or not port.isascii() or not port.isdigit() or "/" in host:
        raise InvalidRequestError(
            f"a worker's address is grpc://HOST:PORT or unix:///PATH, not {address!r}", param="worker"
        )
    if not 0 < int(port) < 65_536:
        raise InvalidRequestError(f"{address!r}: ports are 1 to 65535", param="worker")
    return target
