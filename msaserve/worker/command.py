"""`msaserve worker`: an engine behind gRPC. Importing this loads no torch."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from msaserve.config import EngineConfig, ModelConfig
from msaserve.errors import AddressError, InvalidRequestError
from msaserve.loop import run_loop
from msaserve.observe.log import configure_logging
from msaserve.observe.trace import make_tracer
from msaserve.worker.child import MAX_SOCKET_PATH_BYTES


@dataclass(frozen=True)
class Worker:
    """Serve a checkpoint's engine to gateways, over gRPC (docs/wire.md)."""

    needs: ClassVar[str] = "engine"
    """The extra that brings what it imports."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Directory of config.json and weights; tokenizer.json and chat template are for the gateways."""
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = field(default_factory=EngineConfig)
    grpc: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:50051"
    """Where to listen, or unix:///PATH; port 0 takes a free one. There is no key: whoever reaches it may use it."""
    served_model_name: str | None = None
    """What clients call the model. Default: the directory's name."""
    otlp_traces_endpoint: str | None = None
    """Send OpenTelemetry spans there, such as http://127.0.0.1:4317. Default: OTEL_EXPORTER_OTLP_ENDPOINT, if set."""
    drain_seconds: int = 60
    """On SIGTERM or SIGINT: how long requests in flight may go on. A second signal ends the worker at once."""

    def run(self) -> int:
        configure_logging(access_log=False)
        address = self._address()
        # What fails fast comes first: the address, the small files, then the weights.
        ModelConfig.from_checkpoint(self.checkpoint)

        tracer = make_tracer("worker", self.otlp_traces_endpoint)

        from msaserve.engine.async_engine import AsyncEngine
        from msaserve.engine.engine import Engine
        from msaserve.worker.served import ServedModel
        from msaserve.worker.server import run, stop_on_signals

        engine = Engine.from_checkpoint(self.checkpoint, self.engine)
        model = ServedModel.of(engine, name=self.served_model_name)

        def on_ready(port: int) -> None:
            reached = self.grpc if address.startswith("unix:") else f"grpc://{address.rpartition(':')[0]}:{port}"
            print(f"msaserve: {model.name} is ready; try\n  msaserve gateway --worker {reached}", flush=True)

        async def run_all() -> None:
            stop = stop_on_signals()
            await run(
                AsyncEngine(engine),
                model,
                address,
                stop=stop,
                drain_seconds=self.drain_seconds,
                on_ready=on_ready,
                tracer=tracer,
            )

        try:
            run_loop(run_all())
        finally:
            tracer.close()
        return 0

    def _address(self) -> str:
        """As gRPC takes it. Raises InvalidRequestError or AddressError."""
        if self.grpc.startswith("unix:///"):
            path = Path(self.grpc.removeprefix("unix://"))
            if not path.parent.is_dir() or len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise AddressError(f"cannot listen on {path}: no such directory, or the path is too long")
            return f"unix:{path}"
        host, _, port = self.grpc.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise InvalidRequestError(f"--grpc takes HOST:PORT or unix:///PATH, not {self.grpc!r}", param="grpc")
        if not _is_loopback(_host(self.grpc)):
            print(f"msaserve: warning: whoever reaches {self.grpc} may use the worker", file=sys.stderr)
        _check_free(_host(self.grpc), int(port))
        return self.grpc


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _check_free(host: str, port: int) -> None:
    """Raises AddressError when the address cannot be listened on now."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
