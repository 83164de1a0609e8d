"""`msaserve worker`: an engine behind gRPC. Importing this loads no torch."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from msaserve.config import EngineConfig, ModelConfig
from msaserve.errors import AddressError, InvalidRequestError
from msaserve.observe.log import configure_logging


@dataclass(frozen=True)
class Worker:
    """Serve a checkpoint's engine to gateways, over gRPC (docs/wire.md)."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """Directory of config.json and weights; tokenizer.json and chat template are for the gateways."""
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = field(default_factory=EngineConfig)
    grpc: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:50051"
    """Address to listen on; port 0 takes a free one. There is no key: whoever reaches it may use it."""
    served_model_name: str | None = None
    """What clients call the model. Default: the directory's name."""
    drain_seconds: int = 60
    """On SIGTERM or SIGINT: how long requests in flight may go on. A second signal ends the worker at once."""

    def run(self) -> int:
        configure_logging(access_log=False)
        host, _, port = self.grpc.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise InvalidRequestError(f"--grpc takes HOST:PORT, not {self.grpc!r}", param="grpc")
        if not _is_loopback(host.strip("[]")):
            print(f"msaserve: warning: whoever reaches {self.grpc} may use the worker", file=sys.stderr)
        # What fails fast comes first: the address, the small files, then the weights.
        _check_free(host.strip("[]"), int(port))
        ModelConfig.from_checkpoint(self.checkpoint)

        from msaserve.engine.async_engine import AsyncEngine
        from msaserve.engine.engine import Engine
        from msaserve.worker.served import ServedModel
        from msaserve.worker.server import run

        engine = Engine.from_checkpoint(self.checkpoint, self.engine)
        model = ServedModel.of(engine, name=self.served_model_name)

        def on_ready(bound: int) -> None:
            address = f"grpc://{host}:{bound}"
            print(f"msaserve: {model.name} is ready; try\n  msaserve gateway --worker {address}", flush=True)

        async def run_all() -> None:
            await run(AsyncEngine(engine), model, f"{host}:{port}", drain_seconds=self.drain_seconds, on_ready=on_ready)

        try:
            import uvloop
        except ImportError:  # there is none for Windows
            asyncio.run(run_all())
        else:
            uvloop.run(run_all())
        return 0


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
