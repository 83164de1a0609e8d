"""`msaserve gateway`: OpenAI's endpoints before workers that run elsewhere. Importing this loads nothing of it."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar

import tyro

from msaserve import env
from msaserve.errors import InvalidRequestError
from msaserve.gateway.listen import bind, is_loopback
from msaserve.gateway.media.options import MediaOptions
from msaserve.gateway.router import Policy
from msaserve.loop import run_loop
from msaserve.observe.log import configure_logging


@dataclass(frozen=True)
class HttpOptions:
    """What every HTTP server is told."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0 takes a free one."""
    processes: int = 1
    """Processes that serve HTTP, which share the port: one keeps a core busy at some two thousand short requests a
    second (docs/operating.md)."""
    api_key: str | None = None
    """Ask clients for this key. Default: the environment variable MSASERVE_API_KEY, if it is set."""
    served_model_name: str | None = None
    """What clients call the model. Default: the checkpoint directory's name, or what the worker calls it."""
    drain_seconds: int = 60
    """On SIGTERM or SIGINT: how long requests in flight may go on. A second signal ends the server at once."""
    max_body_mib: int = 64
    """Largest request body."""
    read_seconds: int = 30
    """A client may take so long to send the headers of a request, and its body: that a second more for every 16 KiB."""
    stall_seconds: int = 300
    """A client that takes nothing of its answer for so long is cut off, and its request ends."""
    hung_seconds: int = 60
    """Of several processes: one that answers its supervisor nothing for so long is killed, and another takes its
    place."""
    access_log: bool = False
    """One line of JSON on standard error for every request."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry spans there, such as http://127.0.0.1:4317. Default: OTEL_EXPORTER_OTLP_ENDPOINT, if set."""

    def __post_init__(self) -> None:
        for name in ("processes", "drain_seconds", "max_body_mib", "read_seconds", "stall_seconds", "hung_seconds"):
            least = 0 if name == "drain_seconds" else 1
            if getattr(self, name) < least:
                raise InvalidRequestError(f"{name} must be at least {least}", param=name)

    def listen(self) -> socket.socket:
        """Set logging up and bind the address. Raises BindError."""
        configure_logging(access_log=self.access_log)
        if not is_loopback(self.host) and self.key is None:
            print(
                f"msaserve: warning: {self.host} is reachable from elsewhere and there is no --api-key", file=sys.stderr
            )
        return bind(self.host, self.port, stall_seconds=self.stall_seconds)

    def at(self, listener: socket.socket) -> HttpOptions:
        """The same, with the address that was bound."""
        host, port = listener.getsockname()[:2]
        return replace(self, host=host, port=port)

    @property
    def key(self) -> str | None:
        """What clients are asked for."""
        return self.api_key or env.api_key()


@dataclass(frozen=True)
class Gateway:
    """Serve OpenAI's API before one worker or several (`msaserve worker`, or others that speak its protocol)."""

    needs: ClassVar[str] = "gateway"
    """The extra that brings what it imports."""

    worker: Annotated[tuple[str, ...], tyro.conf.arg(metavar="grpc://HOST:PORT|unix:///PATH [...]")]
    """Workers, all of one model."""
    http: Annotated[HttpOptions, tyro.conf.arg(name="")] = field(default_factory=HttpOptions)
    media: Annotated[MediaOptions, tyro.conf.arg(name="")] = field(default_factory=MediaOptions)
    policy: Policy = "prefix"
    """Which of several workers takes a request: the one that knows most of its prompt, unless it is busy; the one with
    the fewest requests; or the next in turn."""
    wait_seconds: int = 600
    """How long to wait for the first worker."""
    use_shm: bool = True
    """Hand large tensors to workers on this machine through shared memory."""
    check: bool = False
    """Say what the workers are and how they would be served, and end."""

    def run(self) -> int:
        from msaserve.rpc.protocol import parse_address

        for address in self.worker:
            parse_address(address)
        if not self.worker or len(set(self.worker)) < len(self.worker):
            raise InvalidRequestError("--worker takes one address or several different ones", param="worker")
        if self.check:
            from msaserve.gateway.launch import check

            return run_loop(check(self))
        listener = self.http.listen()
        options = replace(self, http=self.http.at(listener))
        if self.http.processes > 1:
            from msaserve.gateway.processes.supervisor import Supervisor

            run_loop(Supervisor(options, self.http.processes, listener).run())
        else:
            from msaserve.gateway.launch import serve
            from msaserve.gateway.place import Place
            from msaserve.gateway.server import Listening

            run_loop(serve(options, Listening(listener), place=Place(), on_ready=partial(print, flush=True)))
        return 0
