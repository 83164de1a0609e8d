"""How a worker, its engine and its clients end, and what their callers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from waits import SECONDS, free_port
from worker_driver import GREEDY, new_engine, read, request, running_worker, tokens

from msaserve.engine.async_engine import AsyncEngine
from msaserve.errors import EngineError, OverloadedError
from msaserve.gateway import grpc_client
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.rpc.protocol import SERVICE
from msaserve.types import GenerateRequest, TokenEvent
from msaserve.worker.served import ServedModel
from msaserve.worker.server import run


async def begun(client: GrpcClient, asked: GenerateRequest) -> AsyncIterator[TokenEvent]:
    """What follows the first event: what goes wrong before is raised."""
    stream = client.generate(asked)
    await anext(stream)
    return stream


async def test_drain() -> None:
    async with running_worker() as worker:
        health = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}"))
        for service in ("", SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        task = asyncio.create_task(read(worker.client, request("a", max_tokens=100)))
        await worker.until(3)
        draining = asyncio.create_task(worker.server.drain(SECONDS))
        while await worker.client.is_ready():
            await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="shutting down"):
            await read(worker.client, request("late"))
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        events = await task
        assert tokens(events)[:24] == GREEDY
        assert events[-1].finish_reason == "length"
        await asyncio.wait_for(draining, SECONDS)


async def test_a_drain_that_takes_too_long_ends_with_aborts() -> None:
    async with running_worker() as worker:
        stream = await begun(worker.client, request("a", max_tokens=3500))
        await worker.server.drain(0.1)
        await worker.server.close()
        assert [event.finish_reason async for event in stream][-1] == "abort"


async def test_an_engine_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as worker:

        def broken(plan: Any) -> Any:
            raise RuntimeError("out of memory, say")

        stream = await begun(worker.client, request("a", max_tokens=3500, n=2))
        run = worker.engine.runner.run
        monkeypatch.setattr(worker.engine.runner, "run", broken)
        events = [event async for event in stream]
        assert [e.finish_reason for e in events if e.finish_reason] == ["error", "error"]
        assert "out of memory, say" in (events[-1].error or "")
        with pytest.raises(EngineError, match="out of memory, say"):
            await read(worker.client, request("b"))
        monkeypatch.setattr(worker.engine.runner, "run", run)
        assert tokens(await read(worker.client, request("c"))) == GREEDY


async def test_an_engine_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as worker:

        def broken() -> Any:
            raise RuntimeError("a bug")

        stream = await begun(worker.client, request("a", max_tokens=3500))
        monkeypatch.setattr(worker.engine, "step", broken)
        assert "the engine has stopped" in ([event async for event in stream][-1].error or "")
        with pytest.raises(EngineError, match="the engine has stopped"):
            await read(worker.client, request("b"))
        assert not await worker.client.is_ready()
        health = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}"))
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
        watch.cancel()
        flushed = await worker.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not flushed.success


async def test_no_worker_there() -> None:
    client = GrpcClient("grpc://127.0.0.1:9")
    with pytest.raises(OverloadedError):
        await client.model_info()
    assert not await client.is_ready()
    await client.close()


async def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and says nothing: a scrape goes on without its numbers."""
    monkeypatch.setattr(grpc_client, "_HEALTH_SECONDS", 0.3)
    monkeypatch.setattr(grpc_client, "_CALL_SECONDS", 2 * SECONDS)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
    client = GrpcClient(f"grpc://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    (state,) = await asyncio.wait_for(client.workers(), SECONDS)
    assert (state.is_ready, state.load) == (False, None)
    await client.close()
    silent.close()


async def test_behind_a_new_connection_there_may_be_another_worker() -> None:
    async with running_worker(port=free_port()) as worker:
        client = GrpcClient(f"grpc://127.0.0.1:{worker.port}")
        first = await client.worker()
        assert await client.worker() is first
        await worker.server.close()
        async with running_worker(new_engine(max_model_len=64), port=worker.port):
            while not await client.is_ready():
                await asyncio.sleep(0.05)
            assert (first.info.max_model_len, (await client.model_info()).max_model_len) == (4096, 64)
            await client.close()


async def test_the_clients_own_end() -> None:
    async with running_worker() as worker:
        task = asyncio.create_task(read(worker.client, request("a", max_tokens=100)))
        await worker.until(3)
        drained = asyncio.create_task(worker.client.drain())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await read(worker.client, request("b"))
        assert not drained.done()
        assert tokens(await task)[:24] == GREEDY
        await asyncio.wait_for(drained, SECONDS)
        assert await worker.async_engine.is_ready()  # the worker goes on

        other = GrpcClient(f"grpc://127.0.0.1:{worker.port}")
        stream = await begun(other, request("c", max_tokens=3500))
        await other.close()
        assert [event.finish_reason async for event in stream][-1] == "abort"
        await worker.until_empty()


async def test_a_worker_whose_engine_stops_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor starts it anew; first every stream is told."""
    engine = new_engine()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        run(
            AsyncEngine(engine),
            ServedModel.of(engine),
            "127.0.0.1:0",
            stop=asyncio.Event(),
            drain_seconds=60,
            on_ready=port.set_result,
        )
    )
    client = GrpcClient(f"grpc://127.0.0.1:{await port}")
    stream = await begun(client, request("a", max_tokens=3500))

    def broken() -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "step", broken)
    assert "the engine has stopped" in ([event async for event in stream][-1].error or "")
    with pytest.raises(EngineError, match="the engine has stopped"):
        await asyncio.wait_for(running, SECONDS)
    assert not await client.is_ready()
    await client.close()
