"""What `msaserve gateway` and `msaserve serve` run. Imports everything the HTTP side has."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msaserve import env
from msaserve.config import GenerationDefaults
from msaserve.errors import MsaserveError, OverloadedError
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.gateway.place import Place
from msaserve.gateway.router import Router
from msaserve.gateway.server import run
from msaserve.observe.trace import make_tracer
from msaserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from msaserve.gateway.client import EngineClient
    from msaserve.gateway.command import Gateway, HttpOptions
    from msaserve.gateway.server import Entrance

_RETRY_SECONDS = 0.5


async def serve(options: Gateway, entrance: Entrance, *, place: Place, on_ready: Callable[[str], None]) -> None:
    """on_ready: gets words for who started it, once requests are accepted."""
    tracer = make_tracer("gateway", options.http.otlp_traces_endpoint)
    clients = [
        GrpcClient(address, uses_shm=options.use_shm, tracer=tracer, shm_owner=place.shm_owner)
        for address in options.worker
    ]
    client: EngineClient = clients[0]
    try:
        first = await _first(clients, options.wait_seconds)
        worker = await first.worker()
        with tempfile.TemporaryDirectory(prefix="msaserve-", dir=place.directory) as name:
            directory = Path(name)
            await first.save_files(directory)
            tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
            media = options.media.pipeline(directory, share=place.count)
        settings = settings_of(options.http, worker.served_model_name, worker.defaults)
        if len(clients) > 1:
            client = Router(
                list(zip(options.worker, clients, strict=True)),
                policy=options.policy,
                in_flight=place.in_flight,
                first_turn=place.number,
            )
        app = create_app(client, tokenizer, template, settings, media, tracer, place)
        await run(
            app,
            entrance,
            drain_seconds=options.http.drain_seconds,
            read_seconds=options.http.read_seconds,
            on_ready=lambda: on_ready(announcement(options.http.host, options.http.port, settings, template)),
            cut=client.close,
        )
    finally:
        await client.close()
        for other in clients:
            await other.close()
        await asyncio.to_thread(tracer.close)


async def check(options: Gateway) -> int:
    """Print what each worker is and how they would be served; 1 if one cannot be used."""
    num_failed = 0
    served: str | None = None
    for address in options.worker:
        client = GrpcClient(address, uses_shm=options.use_shm)
        try:
            worker, load = await client.worker(), await client.load()
            files = await client.files()
            served = served or await _served(options, client)
        except MsaserveError as error:
            num_failed += 1
            print(f"{address}\n  cannot be used: {error}")
        else:
            info = worker.info
            patches = "uint8, normalised by the worker" if info.takes_pixels else worker.encoder_dtype
            print(
                f"{address}\n"
                f"  model           {options.http.served_model_name or worker.served_model_name} ({info.model_type})\n"
                f"  protocol        {worker.protocol}\n"
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
    print(f"http://{options.http.host}:{options.http.port}\n{served or '  nothing: no worker can be used'}")
    return 1 if num_failed else 0


async def _served(options: Gateway, client: GrpcClient) -> str:
    """What the gateway would serve of a worker's model."""
    worker = await client.worker()
    with tempfile.TemporaryDirectory(prefix="msaserve-") as name:
        await client.save_files(Path(name))
        tokenizer, template = Tokenizer.load(Path(name)), ChatTemplate.load(Path(name))
        media = options.media.pipeline(Path(name)) if worker.info.supports_vision else None
    count = len(options.worker)
    pictures = "no"
    if media is not None:
        pictures = f"{type(media.spec).__name__}, from {', '.join(options.media.media_hosts) or 'any public host'}"
        await media.close()
    spans = options.http.otlp_traces_endpoint or ("as the environment says" if env.has_otlp_endpoint() else "no")
    return (
        f"  processes       {options.http.processes}\n"
        f"  key             {'asked for' if options.http.key else 'none: whoever reaches it may use it'}\n"
        f"  routing         {f'{options.policy} over {count} workers' if count > 1 else 'one worker'}\n"
        f"  chat            {'yes' if template else 'no template: only /v1/completions'}\n"
        f"  tokenizer       {tokenizer.vocab_size:,} tokens\n"
        f"  pictures        {pictures}\n"
        f"  spans           {spans}"
    )


async def _first(clients: list[GrpcClient], wait_seconds: float) -> GrpcClient:
    """The first worker that answers. Raises OverloadedError when the time is over."""
    deadline = time.monotonic() + wait_seconds
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


def settings_of(http: HttpOptions, name: str, defaults: GenerationDefaults) -> GatewaySettings:
    """name: what the model is called if the options do not say."""
    return GatewaySettings(
        served_model_name=http.served_model_name or name,
        defaults=defaults,
        api_key=http.key,
        max_body_bytes=http.max_body_mib * 2**20,
        read_seconds=http.read_seconds,
    )


def announcement(host: str, port: int, settings: GatewaySettings, template: ChatTemplate | None) -> str:
    """What is said once requests are accepted. host, port: where."""
    return f"msaserve: {settings.served_model_name} is ready; try\n{curl(host, port, settings, template)}"


_QUESTION = "The harbour was quiet. The code of Winston is 48213. Nobody came.\nWhat is the code of Winston?"
"""Any chat model can answer it, the small one of a clone too."""


def curl(host: str, port: int, settings: GatewaySettings, template: ChatTemplate | None) -> str:
    """A command that asks the server something."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    host = f"[{host}]" if ":" in host else host
    body: dict[str, object] = {"model": settings.served_model_name, "max_tokens": 32, "temperature": 0}
    if template is None:
        path, body["prompt"] = "completions", "Hello"
    else:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": _QUESTION}]
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $MSASERVE_API_KEY"'
    data = shlex.quote(json.dumps(body))
    return f"  curl http://{host}:{port}/v1/{path} -H 'Content-Type: application/json'{key} -d {data}"
