"""KV events of live workers, and a router that goes by them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from waits import SECONDS, free_port, until_true
from worker_driver import PROMPT, Worker, new_engine, read, request, running_worker, tokens

from msaserve.cache.prefix import BlockHashes, Tokens
from msaserve.errors import MsaserveError
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.gateway.kv_index import KvEventsUnsupportedError, KvIndex, PromptBlocks, follow
from msaserve.gateway.router import Router
from msaserve.kv_events import BlocksStored, CursorLostError, KvEventBatch


async def first_batches(client: GrpcClient, after: int, count: int) -> list[KvEventBatch]:
    batches: list[KvEventBatch] = []
    async with aclosing(client.kv_events(after)) as events:
        async for batch in events:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


@asynccontextmanager
async def fleet() -> AsyncIterator[tuple[Router, list[Worker]]]:
    async with running_worker() as one, running_worker() as other:
        clients = [GrpcClient(f"grpc://127.0.0.1:{worker.port}") for worker in (one, other)]
        router = Router([(str(i), client) for i, client in enumerate(clients)])
        await until_true(lambda: all(backend.blocks.is_known for backend in router._backends))
        try:
            yield router, [one, other]
        finally:
            await router.close()


async def test_events_of_a_request_name_its_blocks() -> None:
    async with running_worker() as worker:
        (empty,) = await first_batches(worker.client, 0, 1)
        assert empty.snapshot == (0, 1)
        output = tokens(await read(worker.client, request("a")))
        size = worker.engine.scheduler.config.block_size
        whole = (PROMPT + output)[: (len(PROMPT) + len(output) - 1) // size * size]
        batches = await first_batches(worker.client, empty.number, 2)
        assert [batch.number for batch in batches] == [empty.number + 1, empty.number + 2]
        (snapshot,) = await first_batches(worker.client, 0, 1)
        (stored,) = [event for event in snapshot.events if isinstance(event, BlocksStored)]
        assert stored.parent is None
        assert [token for block in stored.blocks for token in block.token_ids] == whole
        index = KvIndex()
        index.admit(snapshot)
        asked = PromptBlocks(request("b", whole))
        assert index.num_tokens(asked) == len(whole)
        # What the index says is what the engine then finds.
        (end,) = [e for e in await read(worker.client, request("c", [*whole, 5], max_tokens=1)) if e.finish_reason]
        assert end.num_cached_tokens == len(whole)


async def test_cursors_that_cannot_be_served() -> None:
    async with running_worker() as worker:
        (empty,) = await first_batches(worker.client, 0, 1)
        for number in (1, empty.number - 1, empty.number + 1):
            call = worker.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=number))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [batch async for batch in call]
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
            with pytest.raises(CursorLostError):
                await first_batches(worker.client, number, 1)


async def test_a_worker_without_prefix_cache_has_no_events() -> None:
    async with running_worker(new_engine(enable_prefix_cache=False)) as worker:
        with pytest.raises(KvEventsUnsupportedError):
            await first_batches(worker.client, 0, 1)


async def test_subscriptions_end_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msaserve.worker.server._END_SECONDS", 2 * SECONDS)
    async with running_worker() as worker:
        index = KvIndex()
        following = asyncio.create_task(follow(worker.client, index, name="w"))
        await until_true(lambda: index.is_known)
        await asyncio.wait_for(worker.server.close(), SECONDS)  # it does not wait for the subscriber to leave
        with pytest.raises(MsaserveError):
            await first_batches(worker.client, 0, 1)
        following.cancel()


async def test_the_second_turn_goes_where_the_first_turns_blocks_are() -> None:
    async with fleet() as (router, workers):
        answers = {}
        for seed in (1, 2):
            first = [(seed * 31 + i) % 400 + 3 for i in range(100)]
            answer = tokens(await read(router, request(f"first-{seed}", first)))
            answers[seed] = [*first, *answer, 7, 8, 9]
        await until_true(lambda: sum(len(backend.blocks) for backend in router._backends) >= 14)
        for backend in router._backends:
            backend.segments.clear()  # from here on only what the workers say counts
        for turn, prompt in answers.items():
            asked = PromptBlocks(request("x", prompt))
            homes = [i for i in (0, 1) if router._backends[i].blocks.num_tokens(asked)]
            assert len(homes) == 1
            before = [worker.engine.load().num_output_tokens for worker in workers]
            events = await read(router, request(f"second-{turn}", prompt))
            after = [worker.engine.load().num_output_tokens for worker in workers]
            assert [i for i in (0, 1) if after[i] > before[i]] == homes
            assert events[0].num_cached_tokens >= 112


async def test_after_a_flush_nobody_is_home() -> None:
    async with fleet() as (router, workers):
        prompt = [i % 400 + 3 for i in range(600)]  # two segments of the router's own estimate too
        await read(router, request("first", prompt, max_tokens=4))
        (home,) = [i for i in (0, 1) if workers[i].engine.load().num_output_tokens]
        await until_true(lambda: len(router._backends[home].blocks) > 30)
        asked = PromptBlocks(request("x", prompt))
        assert router._backends[home].num_known(asked) >= 592
        assert [state.num_indexed_blocks > 30 for state in await router.workers()] == [i == home for i in (0, 1)]
        for _ in range(3):
            assert router._choose(asked, []) is router._backends[home]
        flushed = await workers[home].stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=SECONDS))
        assert flushed.success
        await until_true(lambda: not len(router._backends[home].blocks))
        assert router._backends[home].num_known(asked) == 0
        assert {router._choose(asked, []) for _ in range(4)} == set(router._backends)


async def test_evicted_blocks_are_not_counted() -> None:
    async with running_worker(new_engine(kv_cache_gib=0.002, max_model_len=512)) as worker:
        index = KvIndex()
        following = asyncio.create_task(follow(worker.client, index, name="w"))
        num_pages = worker.engine.scheduler.pool.num_usable_pages
        prompts = [[(seed * 97 + i) % 400 + 3 for i in range(400)] for seed in range(4)]
        for i, prompt in enumerate(prompts):
            await read(worker.client, request(str(i), prompt, max_tokens=2))
        assert num_pages < 4 * 25
        await until_true(lambda: index.num_tokens(PromptBlocks(request("x", prompts[-1]))) == 400)
        assert len(index) == len(worker.engine.scheduler.index.pages()) <= num_pages
        for prompt in prompts:
            found = worker.engine.scheduler.index.match(_hashes(worker, prompt), 25)
            assert index.num_tokens(PromptBlocks(request("x", prompt))) == 16 * len(found)
        following.cancel()


def _hashes(worker: Worker, prompt: list[int]) -> BlockHashes:
    return BlockHashes(Tokens(array("i", prompt)), block_size=worker.engine.scheduler.config.block_size)


async def test_another_worker_behind_the_address_begins_anew() -> None:
    prompt = [i % 400 + 3 for i in range(100)]
    asked = PromptBlocks(request("x", prompt))
    index = KvIndex()
    async with running_worker(port=free_port()) as first:
        client = GrpcClient(f"grpc://127.0.0.1:{first.port}")
        following = asyncio.create_task(follow(client, index, name="w"))
        await read(client, request("a", prompt, max_tokens=2))
        await until_true(lambda: index.num_tokens(asked) == 96)
        number = index.number
    async with running_worker(port=first.port) as second:
        await until_true(lambda: index.number > number)
        assert index.num_tokens(asked) == 0
        await read(second.client, request("b", prompt, max_tokens=2))
        await until_true(lambda: index.num_tokens(asked) == 96)
        following.cancel()
        await client.close()
