"""An EngineClient without an engine: scripted tokens, delays and failures. And a real HTTP server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from waits import SECONDS

from msaserve.config import GenerationDefaults
from msaserve.gateway.app import GatewaySettings, create_app
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.client import EngineClient, WorkerState
from msaserve.gateway.connection import Connection
from msaserve.gateway.media.pipeline import MediaPipeline
from msaserve.tokenizer import Tokenizer
from msaserve.types import EngineLoad, GenerateRequest, Logprobs, ModelInfo, TokenEvent

TINY = Path(__file__).parents[1] / "golden" / "tiny"
EOS = 2


class FakeClient:
    """Answers every request with `script` and an end-of-sequence token, `burst` tokens an event."""

    def __init__(self, *, max_model_len: int = 4096, vocab_size: int = 512) -> None:
        self.info = ModelInfo(
            model_type="fake", vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=(EOS,)
        )
        self.script: list[int] = []
        self.scripts: list[list[int]] = []
        """If not empty, output i says scripts[i]."""
        self.by_seed: dict[int, list[int]] = {}
        """If not empty, a request of seed s says by_seed[s]."""
        self.burst = 1
        self.delay = 0.0
        """Seconds before each event."""
        self.refusal: Exception | None = None
        self.fail_after: int | None = None
        """Events after which the request fails."""
        self.is_up = True
        self.num_cached_tokens = 0
        self.requests: list[GenerateRequest] = []
        self.running: set[str] = set()
        self.closed_early: list[str] = []

    async def model_info(self) -> ModelInfo:
        return self.info

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.running.add(request.request_id)
        is_whole = False
        try:
            outputs = [self._events(request, i) for i in range(request.sampling.n)]
            number = 0
            while any(outputs):
                for index, events in enumerate(outputs):
                    if not events:
                        continue
                    if self.delay:
                        await asyncio.sleep(self.delay)
                    if self.fail_after == number:
                        yield TokenEvent(index=index, finish_reason="error", error="the fake engine fails")
                        return
                    number += 1
                    yield events.pop(0)
            is_whole = True
        finally:
            self.running.discard(request.request_id)
            if not is_whole:
                self.closed_early.append(request.request_id)

    def _events(self, request: GenerateRequest, index: int) -> list[TokenEvent]:
        sampling = request.sampling
        script = list(self.scripts[index] if self.scripts else self.script)
        if self.by_seed:
            script = list(self.by_seed[sampling.seed or 0])
        ids, reason, stop_token_id = [*script, EOS], "stop", EOS
        if sampling.ignore_eos:
            ids = (script * 10_000)[: sampling.max_tokens]
        stops = [i for i, token in enumerate(ids) if token in sampling.stop_token_ids]
        if stops:
            ids, stop_token_id = ids[: stops[0] + 1], ids[stops[0]]
        limit = sampling.max_tokens or self.info.max_model_len
        if len(ids) > limit or sampling.ignore_eos:
            ids, reason, stop_token_id = ids[:limit], "length", None
        groups = [ids[i : i + self.burst] for i in range(0, len(ids), self.burst)]
        return [
            TokenEvent(
                index=index,
                token_ids=tuple(group),
                logprobs=tuple(self._logprobs(i, sampling.logprobs) for i in group if sampling.logprobs is not None),
                finish_reason=reason if number == len(groups) - 1 else None,
                stop_token_id=stop_token_id if number == len(groups) - 1 else None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=self.num_cached_tokens,
            )
            for number, group in enumerate(groups)
        ]

    def _logprobs(self, token_id: int, k: int | None) -> Logprobs:
        top = [(token_id, -0.5), (100, -1.5), (101, float("-inf"))]
        return Logprobs(token_id, -0.5, tuple(top[: k or 0]))

    async def abort(self, request_id: str) -> None:
        raise AssertionError("the gateway closes its streams")

    def tallies(self) -> list[WorkerState]:
        return [WorkerState("fake", num_active=len(self.running))]

    async def workers(self) -> list[WorkerState]:
        return [WorkerState("fake", self.is_up, num_active=len(self.running), load=await self.load())]

    async def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self.running),
            num_waiting=3,
            num_pages=200,
            num_used_pages=50,
            num_cached_pages=20,
            num_prefix_queried_tokens=1000,
            num_prefix_hit_tokens=250,
            num_prompt_tokens=2000,
            num_output_tokens=777,
            num_preemptions=5,
        )

    async def is_ready(self) -> bool:
        return self.is_up

    async def drain(self) -> None:
        while self.running:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        pass


@contextmanager
def serve(
    client: EngineClient,
    *,
    media: MediaPipeline | None = None,
    template: ChatTemplate | None = None,
    api_key: str | None = None,
    max_body_bytes: int = 2**20,
    defaults: GenerationDefaults | None = None,
    read_seconds: float = 30.0,
    keep_alive_seconds: int = 5,
) -> Iterator[str]:
    """The address of a server in a thread: real HTTP over a real socket."""
    settings = GatewaySettings(
        "tiny",
        defaults=defaults or GenerationDefaults(),
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        read_seconds=read_seconds,
    )
    app = create_app(client, Tokenizer.load(TINY), template or ChatTemplate.load(TINY), settings, media)
    listener = socket.create_server(("127.0.0.1", 0))
    connection: Any = partial(Connection, read_seconds=read_seconds)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=connection,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=keep_alive_seconds,
        )
    )
    thread = threading.Thread(target=server.run, name="http-server", kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listener.close()
        assert not thread.is_alive()
