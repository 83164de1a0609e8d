"""Streams over the engine's thread: many readers, slow readers, readers that go away, and the end of the engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from driver import greedy_prompt, greedy_tokens, make_engine, random_prompt, request, run
from in_process import InProcessClient
from paced import hold_long_requests, step_when_read
from waits import SECONDS, until_true

from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.plan import StepPlan, StepResult
from msaserve.errors import EngineError, InvalidRequestError, OverloadedError
from msaserve.gateway.client import EngineClient
from msaserve.types import GenerateRequest, TokenEvent


class Harness:
    """An engine, its thread, and the client over it."""

    def __init__(self) -> None:
        self.engine = make_engine(num_pages=300, max_num_batched_tokens=256)
        hold_long_requests(self.engine)
        self.threaded = AsyncEngine(self.engine)
        self.client: EngineClient = InProcessClient(self.threaded)

    async def read(self, generate_request: GenerateRequest) -> list[TokenEvent]:
        return [event async for event in self.client.generate(generate_request)]

    async def until_any_output(self) -> None:
        await until_true(lambda: self.engine.load().num_output_tokens)

    async def until_ended(self) -> None:
        while await self.client.is_ready():
            await asyncio.sleep(0.01)

    async def until_empty(self) -> None:
        load = self.engine.load()
        while load.num_running or load.num_waiting:
            await asyncio.sleep(0.01)
            load = self.engine.load()
        assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    yield harness
    await harness.client.close()


def tokens(events: list[TokenEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.token_ids]


async def test_a_stream_is_the_reference(harness: Harness) -> None:
    assert (await harness.client.model_info()).vocab_size == 512
    assert await harness.client.is_ready()
    events = await harness.read(request("a", greedy_prompt("tiny"), logprobs=1))
    assert tokens(events) == greedy_tokens("tiny")
    assert [lp.token_id for event in events for lp in event.logprobs] == greedy_tokens("tiny")
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[0].num_prompt_tokens == 293
    again = await harness.read(request("a", greedy_prompt("tiny")))
    assert again[0].num_cached_tokens == 288
    await harness.until_empty()


async def test_n_outputs_share_one_stream(harness: Harness) -> None:
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    events = await harness.read(request("n", [5, 6, 7], n=4, **options))
    for index in range(4):
        alone = await harness.read(request("one", [5, 6, 7], **{**options, "seed": 7 + index}))
        assert tokens(events, index) == tokens(alone)
        assert [e.finish_reason for e in events if e.index == index][-1] == "length"
    assert sum(event.finish_reason is not None for event in events) == 4


async def test_64_streams_some_closed_early(harness: Harness) -> None:
    rng = random.Random(64)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(64)]

    async def client(i: int) -> list[int] | None:
        await asyncio.sleep(rng.random() * 0.2)
        goes_early = i % 4 < 2
        generate_request = request(str(i), prompts[i], max_tokens=3000 if goes_early else 12)
        if i % 4 == 0:
            async with aclosing(harness.client.generate(generate_request)) as events:  # type: ignore[type-var]
                async for _ in events:
                    return None
        if i % 4 == 1:
            task = asyncio.create_task(harness.read(generate_request))
            await asyncio.sleep(rng.random() * 0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return tokens(await harness.read(generate_request))

    streamed = await asyncio.gather(*(client(i) for i in range(64)))
    await harness.until_empty()
    await harness.client.close()
    harness.engine.check_integrity()
    kept = [i for i in range(64) if streamed[i] is not None]
    assert len(kept) == 32
    alone = run(make_engine(), [request(str(i), prompts[i], max_tokens=12) for i in kept])
    assert [streamed[i] for i in kept] == [output.token_ids for output in alone]


async def test_a_slow_reader_holds_nobody_up_and_loses_nothing(harness: Harness) -> None:
    read_on = step_when_read(harness.engine, harness.threaded)
    slow = harness.client.generate(request("slow", greedy_prompt("tiny")))
    first = await slow.__anext__()
    read_on()
    other = await harness.read(request("other", greedy_prompt("tiny")))
    assert tokens(other) == greedy_tokens("tiny")
    await harness.until_empty()  # the slow one has ended too, unread
    rest = [event async for event in slow]
    assert len(rest) == 1
    assert tokens([first, *rest]) == greedy_tokens("tiny")
    assert rest[0].finish_reason == "length"


async def test_abort_by_id(harness: Harness) -> None:
    task = asyncio.create_task(harness.read(request("a", [5, 6], max_tokens=100_000 // 32, n=2)))
    await harness.until_any_output()
    await harness.client.abort("nobody")
    await harness.client.abort("a")
    events = await task
    assert sorted(e.index for e in events if e.finish_reason == "abort") == [0, 1]
    await harness.until_empty()


async def test_abort_of_one_output(harness: Harness) -> None:
    step_when_read(harness.engine, harness.threaded)
    stream = harness.client.generate(request("a", [5, 6], max_tokens=60, n=3))
    events = [await stream.__anext__()]
    await harness.threaded.abort("a", index=1)
    events += [event async for event in stream]
    ends = {event.index: event.finish_reason for event in events if event.finish_reason}
    assert ends == {0: "length", 1: "abort", 2: "length"}
    assert len(tokens(events, 0)) == 60 > len(tokens(events, 1))
    await harness.until_empty()


async def test_an_abort_is_told_before_the_next_step(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    step, permits, is_idle = harness.engine.step, threading.Semaphore(1), threading.Event()
    monkeypatch.setattr(harness.engine, "step", lambda: (permits.acquire(), [] if is_idle.is_set() else step())[1])
    stream = harness.client.generate(request("a", [5, 6], n=2))
    for _ in range(2):
        await stream.__anext__()
    await harness.threaded.abort("a", index=0)
    is_idle.set()
    permits.release()  # the step that has begun brings nothing that would wake the reader

    async def until_told() -> None:
        async for event in stream:
            if event.finish_reason == "abort":
                return

    try:
        await asyncio.wait_for(until_told(), 30)
    finally:
        is_idle.clear()
        permits.release(1000)
    await stream.aclose()
    await harness.until_empty()


async def test_flushed_prefixes_are_computed_anew(harness: Harness) -> None:
    for _ in range(2):
        events = await harness.read(request("a", greedy_prompt("tiny")))
        assert events[0].num_cached_tokens == 0
        assert await harness.threaded.flush_prefix_cache() == 19
        assert await harness.threaded.flush_prefix_cache() == 0
    await harness.client.close()
    with pytest.raises(EngineError):
        await harness.threaded.flush_prefix_cache()


async def test_refusals_come_before_any_event(harness: Harness) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        await harness.read(request("a", []))
    with pytest.raises(InvalidRequestError, match="n must be"):
        await harness.read(request("a", [5], n=0))
    long = harness.client.generate(request("same", [5, 6], max_tokens=2000))
    await long.__anext__()
    with pytest.raises(InvalidRequestError, match="'same' is already in use"):
        await harness.read(request("same", [5, 6]))
    await long.aclose()  # type: ignore[attr-defined]
    await harness.until_empty()
    assert tokens(await harness.read(request("same", greedy_prompt("tiny")))) == greedy_tokens("tiny")


async def test_drain_ends_what_runs_and_takes_nothing_new(harness: Harness) -> None:
    stream = harness.client.generate(request("a", greedy_prompt("tiny")))
    first = await stream.__anext__()
    drain = asyncio.create_task(harness.client.drain())
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await harness.read(request("b", [5]))
    assert not await harness.client.is_ready()
    await asyncio.wait_for(drain, SECONDS)
    rest = [event async for event in stream]
    assert tokens([first, *rest]) == greedy_tokens("tiny")


async def test_close_aborts_what_runs(harness: Harness) -> None:
    task = asyncio.create_task(harness.read(request("a", [5, 6], max_tokens=2000)))
    waiting = asyncio.create_task(harness.read(request("b", [5, 6], max_tokens=2000)))
    await harness.until_any_output()
    await harness.client.close()
    assert (await task)[-1].finish_reason == "abort"
    assert (await waiting)[-1].finish_reason == "abort"
    assert (await harness.client.load()).num_used_pages == 0
    with pytest.raises((OverloadedError, EngineError)):
        await harness.read(request("c", [5]))
    await asyncio.wait_for(harness.client.drain(), SECONDS)
    await harness.client.abort("a")
    await harness.client.close()


async def test_a_failed_step_is_an_error_event(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: StepPlan) -> StepResult:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(harness.engine.runner, "run", fail)
        (event,) = await harness.read(request("a", [5]))
    assert event.finish_reason == "error"
    assert event.error == "the engine's step failed: RuntimeError: out of luck"
    assert tokens(await harness.read(request("a", greedy_prompt("tiny")))) == greedy_tokens("tiny")


async def test_a_dead_engine_answers_everyone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken invariant ends the engine; its readers hear of it, and so does whoever comes later."""
    stream = harness.client.generate(request("a", [5, 6], max_tokens=2000))
    await stream.__anext__()

    def broken() -> None:
        raise AssertionError("a page is lost")

    monkeypatch.setattr(harness.engine, "check_integrity", broken)
    last = [event async for event in stream][-1]
    assert last.finish_reason == "error"
    assert last.error == "the engine has stopped: AssertionError: a page is lost"
    await harness.until_ended()
    with pytest.raises(EngineError, match="a page is lost"):
        await harness.read(request("b", [5]))


async def test_a_device_error_ends_the_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later step on that device would fail too: whoever starts workers must see this one end."""

    def fail(plan: StepPlan) -> StepResult:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(harness.engine.runner, "run", fail)
    (event,) = await harness.read(request("a", [5]))
    assert event.finish_reason == "error"
    assert event.error is not None
    assert "an illegal memory access" in event.error
    await harness.until_ended()
    with pytest.raises(EngineError, match="an illegal memory access"):
        await harness.read(request("b", [5]))


async def test_a_command_that_fails_leaves_none_behind_it_unanswered(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both reach the engine between the same two steps; the first ends it."""
    step, entered, go_on = harness.engine.step, threading.Event(), threading.Event()

    def held_step() -> Any:
        entered.set()
        go_on.wait()
        return step()

    monkeypatch.setattr(harness.engine, "step", held_step)
    running = asyncio.create_task(harness.read(request("a", [5, 6], max_tokens=2000)))
    await asyncio.to_thread(entered.wait)

    def broken() -> int:
        raise AssertionError("a page is lost")

    monkeypatch.setattr(harness.engine, "flush_prefix_cache", broken)
    flushed = asyncio.create_task(harness.threaded.flush_prefix_cache())
    later = asyncio.create_task(harness.read(request("b", [5])))
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(EngineError, match="a page is lost"):
        await asyncio.wait_for(later, SECONDS)
    assert (await asyncio.wait_for(running, SECONDS))[-1].finish_reason == "error"
    with pytest.raises(EngineError, match="a page is lost"):
        await asyncio.wait_for(flushed, SECONDS)


async def test_pages_are_checked_when_idle(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.delenv("MSASERVE_CHECK")
    monkeypatch.setattr("msaserve.engine.async_engine.IDLE_CHECK_SECONDS", 2 * SECONDS)
    await harness.read(request("a", [5]))  # from here on it rests for so long
    monkeypatch.setattr("msaserve.engine.async_engine.IDLE_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(harness.engine, "check_integrity", lambda: calls.append(None))
    await harness.read(request("a", [5]))
    await until_true(lambda: calls)
    await asyncio.sleep(0.3)
    assert len(calls) == 1


def test_a_loop_that_is_gone_aborts_its_requests() -> None:
    harness = Harness()

    async def leave() -> None:
        stream = harness.client.generate(request("a", [5, 6], max_tokens=4000))
        await stream.__anext__()
        keep.append(stream)

    keep: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    asyncio.run(harness.until_empty())
    asyncio.run(harness.client.close())
