"""A worker over the tiny golden checkpoint on a loopback port, and its engine to look into."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from golden_data import golden
from paced import hold_long_requests, step_when_read
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from waits import until_true

from msaserve.config import EngineConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.rpc.protocol import CHANNEL_OPTIONS
from msaserve.types import GenerateRequest, SamplingParams, TokenEvent
from msaserve.worker.served import ServedModel
from msaserve.worker.server import WorkerServer

TINY, TENSORS = golden("tiny")
PROMPT: list[int] = TENSORS["text.input_ids"][: int(TENSORS["text.greedy_prompt_len"])].tolist()
GREEDY: list[int] = TENSORS["text.greedy"].tolist()
IMAGE, VIDEO = 510, 511


@dataclass
class Worker:
    engine: Engine
    async_engine: AsyncEngine
    server: WorkerServer
    port: int
    client: GrpcClient
    stub: Any

    def step_when_read(self) -> None:
        """From now on no two steps' tokens come in one event."""
        step_when_read(self.engine, self.async_engine)

    async def until_empty(self) -> None:
        def is_empty() -> bool:
            load = self.engine.load()
            return not (load.num_running or load.num_waiting or load.num_used_pages)

        await until_true(is_empty)

    async def until(self, num_output_tokens: int) -> None:
        """Until the engine has made so many tokens more than now."""
        goal = self.engine.load().num_output_tokens + num_output_tokens
        await until_true(lambda: self.engine.load().num_output_tokens >= goal)


def new_engine(**config: Any) -> Engine:
    fields = {"kv_cache_gib": 0.02, "max_num_batched_tokens": 256, "max_model_len": 4096, **config}
    return Engine.from_checkpoint(TINY, EngineConfig(**fields), show_progress=False, page_order=random.Random(0))


@asynccontextmanager
async def running_worker(
    engine: Engine | None = None, *, port: int = 0, **client_options: Any
) -> AsyncIterator[Worker]:
    """Long requests are held: see `paced`."""
    engine = engine or new_engine()
    hold_long_requests(engine)
    async_engine = AsyncEngine(engine)
    server = WorkerServer(async_engine, ServedModel.of(engine))
    port = await server.start(f"127.0.0.1:{port}")
    client = GrpcClient(f"grpc://127.0.0.1:{port}", **client_options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        try:
            yield Worker(engine, async_engine, server, port, client, services.VllmEngineStub(channel))
        finally:
            await client.close()
            await server.close()
    engine.check_integrity()


def request(request_id: str, prompt: list[int] = PROMPT, *, media: Any = (), salt: str = "", **sampling: Any) -> Any:
    """Greedy, 24 tokens, end-of-sequence ignored, unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling=params, media=media, cache_salt=salt
    )


async def read(client: Any, generate_request: GenerateRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(generate_request)]


def tokens(events: list[TokenEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.token_ids]
