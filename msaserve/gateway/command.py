"""`msaserve gateway`: OpenAI's endpoints before workers that run elsewhere. Importing this loads no torch."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import shlex
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from msaserve import env
from msaserve.config import GenerationDefaults
from msaserve.errors import InvalidRequestError, MsaserveError, OverloadedError
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.options import MediaOptions
from msaserve.gateway.router import Policy, Router
from msaserve.gateway.server import bind, run
from msaserve.loop import run_loop
from msaserve.observe.log import configure_logging
from msaserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from msaserve.gateway.client import EngineClient
    from msaserve.gateway.grpc_client import GrpcClient

_RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class HttpOptions:
    """What every HTTP server is told."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0 takes a free one."""
    api_key: str | None = None
    """Ask clients for this key. Default: the environment variable MSASERVE_API_KEY, if it is set."""
    served_model_name: str | None = None
    """What clients call the model. Default: the checkpoint directory's name, or what the worker calls it."""
    drain_seconds: int = 60
    """On SIGTERM or SIGINT: how long requests in flight may go on. A second signal ends the server at once."""
    max_body_mib: int = 64
    """Largest request body."""
    access_log: bool = False
    """One line on standard error for every request."""

    def listen(self) -> socket.socket:
        """Set logging up and bind the address. Raises BindError."""
        configure_logging(access_log=self.access_log)
        if not is_loopback(self.host) and self._key is None:
            print(
                f"msaserve: warning: {self.host} is reachable from elsewhere and there is no --api-key", file=sys.stderr
            )
        return bind(self.host, self.port)

    def settings(self, name: str, defaults: GenerationDefaults) -> GatewaySettings:
        """name: what the model is called if the options do not say."""
        return GatewaySettings(
            served_model_name=self.served_model_name or name,
            defaults=defaults,
            api_key=self._key,
            max_body_bytes=self.max_body_mib * 2**20,
        )

    @property
    def _key(self) -> str | None:
        return self.api_key or env.api_key()


@dataclass(frozen=True)
class Gateway:
    """Serve OpenAI's API before one worker or several (`msaserve worker`, or others that speak its protocol)."""

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
            return asyncio.run(self._check())
        listener = self.http.listen()
        run_loop(self._serve(listener))
        return 0

    async def _serve(self, listener: socket.socket) -> None:
        from msaserve.gateway.grpc_client import GrpcClient

        clients = [GrpcClient(address, uses_shm=self.use_shm) for address in self.worker]
        client: EngineClient = clients[0]
        try:
            first = await self._first(clients)
            worker = await first.worker()
            with tempfile.TemporaryDirectory(prefix="msaserve-") as name:
                directory = Path(name)
                await first.save_files(directory)
                tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
                media = self.media.pipeline(directory)
            settings = self.http.settings(worker.served_model_name, worker.defaults)
            if len(clients) > 1:
                client = Router(list(zip(self.worker, clients, strict=True)), policy=self.policy)
            app = create_app(client, tokenizer, template, settings, media)
            await run(
                app,
                listener,
                drain_seconds=self.http.drain_seconds,
                on_ready=lambda: announce(listener, settings, template),
                cut=client.close,
            )
        finally:
            await client.close()
            for other in clients:
                await other.close()

    async def _first(self, clients: list[GrpcClient]) -> GrpcClient:
        """The first worker that answers. Raises OverloadedError when the time is over."""
        deadline = time.monotonic() + self.wait_seconds
        while True:
            for client in clients:
                try:
                    await client.worker()
                except OverloadedError as error:
                    failure = error
                else:
                    return client
            if time.monotonic() >= deadline:
                raise OverloadedError(f"no worker answers: {failure}")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _check(self) -> int:
        from msaserve.gateway.grpc_client import GrpcClient

        num_failed = 0
        for address in self.worker:
            client = GrpcClient(address, uses_shm=self.use_shm)
            try:
                worker, load = await client.worker(), await client.load()
                files = await client.files()
            except MsaserveError as error:
                num_failed += 1
                print(f"{address}\n  cannot be used: {error}")
            else:
                info = worker.info
                patches = "uint8, normalised by the worker" if info.takes_pixels else worker.encoder_dtype
                print(
                    f"{address}\n"
                    f"  model           {self.http.served_model_name or worker.served_model_name} ({info.model_type})\n"
                    f"  ready           {'yes' if await client.is_ready() else 'no'}\n"
                    f"  context         {info.max_model_len:,} tokens\n"
                    f"  cache           {load.num_pages:,} pages of {worker.block_size} tokens\n"
                    f"  running         {load.num_running} requests, {load.num_waiting} wait\n"
                    f"  pictures        {'patches as ' + patches if info.supports_vision else 'no'}\n"
                    f"  shared memory   {'yes' if worker.shares_memory else 'no'}\n"
                    f"  files           {', '.join(sorted(files))}"
                )
            finally:
                with suppress(MsaserveError):
                    await client.close()
        if len(self.worker) > 1:
            print(f"routing by {self.policy} over {len(self.worker)} workers")
        return 1 if num_failed else 0


def announce(listener: socket.socket, settings: GatewaySettings, template: ChatTemplate | None) -> None:
    """Say on standard output that requests are accepted."""
    host, port = listener.getsockname()[:2]
    print(f"msaserve: {settings.served_model_name} is ready; try\n{curl(host, port, settings, template)}", flush=True)


def curl(host: str, port: int, settings: GatewaySettings, template: ChatTemplate | None) -> str:
    """A command that asks the server something."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{host}]" if ":" in host else host
    body: dict[str, object] = {"model": settings.served_model_name, "max_tokens": 32}
    if template is None:
        path, body["prompt"] = "completions", "Hello"
    else:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello"}]
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $MSASERVE_API_KEY"'
    data = shlex.quote(json.dumps(body))
    return f"  curl http://{host}:{port}/v1/{path} -H 'Content-Type: application/json'{key} -d {data}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
