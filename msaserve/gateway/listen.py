"""The address of an HTTP server."""

from __future__ import annotations

import ipaddress
import os
import socket

from msaserve.errors import MsaserveError


class BindError(MsaserveError):
    """The address cannot be listened on."""


def bind(host: str, port: int, *, stall_seconds: float | None = None) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, while a model loads.

    stall_seconds: a connection ends when its client has taken nothing of what was sent for so long. None: never.

    Raises:
        BindError: the port is in use, or the address is not this machine's.
    """
    if not 0 <= port < 65_536:  # getaddrinfo would take it modulo 65536
        raise BindError(f"cannot listen on {host} port {port}: ports are 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BindError(f"cannot listen on {host} port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if stall_seconds is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it. The kernel's own: what waits in its buffers is nobody else's to take back.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000))
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BindError(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
