"""Which worker takes a request, and what a request sees of workers that refuse, fail and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from fake_engine import FakeClient
from waits import until_true

from msaserve.errors import BusyError, EngineError, InvalidRequestError, MsaserveError, OverloadedError
from msaserve.gateway.client import Breaker
from msaserve.gateway.kv_index import KvIndex, PromptBlocks, follow
from msaserve.gateway.processes.board import Board
from msaserve.gateway.router import SEGMENT_TOKENS, Router, _NothingCameError
from msaserve.kv_events import BlocksCleared, BlocksStored, KvBlock, KvEventBatch
from msaserve.types import GenerateRequest, SamplingParams, TokenEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    def __init__(self, count: int = 3, **options: Any) -> None:
        self.clock = Clock()
        self.clients = [FakeClient() for _ in range(count)]
        for client in self.clients:
            client.script = [65, 66]
        self.router = Router([(str(i), client) for i, client in enumerate(self.clients)], clock=self.clock, **options)
        self._number = 0

    def request(self, prompt: list[int] | None = None, **sampling: Any) -> GenerateRequest:
        self._number += 1
        return GenerateRequest(
            request_id=str(self._number), prompt_token_ids=prompt or [1], sampling=SamplingParams(**sampling)
        )

    async def ask(self, prompt: list[int] | None = None) -> int:
        """Which worker answered."""
        before = [len(client.requests) for client in self.clients]
        events = [event async for event in self.router.generate(self.request(prompt))]
        assert [t for e in events for t in e.token_ids] == [65, 66, 2]
        asked = [i for i, client in enumerate(self.clients) if len(client.requests) > before[i]]
        return asked[-1] if len(asked) == 1 else self._last(asked)

    def _last(self, asked: list[int]) -> int:
        return next(i for i in asked if self.clients[i].refusal is None)


def prompt(seed: int, segments: int) -> list[int]:
    return [(seed * 7919 + i) % 500 for i in range(segments * SEGMENT_TOKENS + 3)]


async def test_round_robin() -> None:
    fleet = Fleet(policy="round_robin")
    asked = [await fleet.ask() for _ in range(9)]
    assert sorted(asked[:3]) == [0, 1, 2]
    assert asked == asked[:3] * 3
    await fleet.router.close()


async def test_the_idlest() -> None:
    fleet = Fleet(policy="least_load")
    for client in fleet.clients:
        client.delay = 0.02
    streams = [fleet.router.generate(fleet.request()) for _ in range(7)]
    for stream in streams:
        await stream.__anext__()
    assert sorted(len(client.running) for client in fleet.clients) == [2, 2, 3]
    busy = [i for i, client in enumerate(fleet.clients) if len(client.running) == 3]
    assert await fleet.ask() not in busy
    for stream in streams:
        await stream.aclose()
    assert not any(client.running for client in fleet.clients)
    await fleet.router.close()


async def test_a_prefix_goes_where_it_was() -> None:
    fleet = Fleet()
    homes = {seed: await fleet.ask(prompt(seed, 4)) for seed in range(6)}
    for seed in (3, 1, 5, 0, 2, 4):
        assert await fleet.ask(prompt(seed, 3) + [1] * 1000) == homes[seed]
    assert len(set(homes.values())) > 1
    # Another salt is another prefix; a media item of another content too.
    request = GenerateRequest(request_id="s", prompt_token_ids=prompt(0, 4), cache_salt="x")
    async for _ in fleet.router.generate(request):
        pass
    await fleet.router.close()


async def test_of_two_homes_the_idler() -> None:
    fleet = Fleet(3)
    asked = PromptBlocks(fleet.request(prompt(1, 4)))
    for backend in fleet.router._backends[:2]:
        backend.remember(asked)
    fleet.router._count(fleet.router._backends[0], 1)
    for _ in range(3):
        assert fleet.router._choose(asked, []) is fleet.router._backends[1]
    fleet.router._count(fleet.router._backends[1], 2)
    for _ in range(3):
        assert fleet.router._choose(asked, []) is fleet.router._backends[0]
    await fleet.router.close()


@pytest.mark.parametrize("refusal", [InvalidRequestError("no"), OverloadedError("no"), EngineError("no")])
async def test_a_prompt_that_was_not_taken_is_not_remembered(refusal: MsaserveError) -> None:
    fleet = Fleet(2)
    first, second = fleet.router._backends
    taken, refused = fleet.request(prompt(1, 2)), fleet.request(prompt(1, 4))
    for event in [e async for e in fleet.router._events(first, taken, PromptBlocks(taken))]:
        assert event.error is None
    before = dict(first.segments)
    assert len(before) == 2
    fleet.clock.now += 1
    fleet.clients[0].refusal = refusal
    with pytest.raises((type(refusal), _NothingCameError)):
        [e async for e in fleet.router._events(first, refused, PromptBlocks(refused))]
    assert dict(first.segments) == before
    assert not second.segments
    await fleet.router.close()


async def test_what_comes_before_the_answer_follows_its_prompt() -> None:
    fleet = Fleet(3)
    for client in fleet.clients:
        client.delay = 0.05
    asked = prompt(1, 4)
    first, second = (asyncio.ensure_future(fleet.ask(asked)) for _ in range(2))
    assert await first == await second
    await fleet.router.close()


async def test_processes_count_each_others_requests() -> None:
    """Two gateway processes before the same workers: neither sends where the other already has."""
    board = Board.create(2, 3)
    fleets = [Fleet(3, policy="least_load", in_flight=board.in_flight(i), first_turn=i) for i in range(2)]
    for client in (*fleets[0].clients, *fleets[1].clients):
        client.delay = 0.05
    streams = []
    for i in range(12):
        fleet = fleets[i % 3 == 0]  # the one gets twice as many as the other
        streams.append(fleet.router.generate(fleet.request()))
        await streams[-1].__anext__()
        running = [len(a.running) + len(b.running) for a, b in zip(*(f.clients for f in fleets), strict=True)]
        assert max(running) - min(running) <= 1
    own = [sum(backend.num_active for backend in fleet.router._backends) for fleet in fleets]
    assert own == [8, 4]
    board.clear(1)  # the second died
    assert sum(board.in_flight(0).total(i) for i in range(3)) == 8
    for stream in streams[1::3] + streams[2::3]:
        await stream.aclose()
    assert not any(board.in_flight(1).total(i) for i in range(3))
    for fleet in fleets:
        await fleet.router.close()


async def test_of_a_worker_that_sends_events_only_the_last_moments_are_guessed() -> None:
    """What it was just sent is counted before its event comes, and not any more if none did."""
    fleet = Fleet(2)
    asked = PromptBlocks(fleet.request(prompt(1, 4)))
    backend = fleet.router._backends[0]
    backend.remember(asked)
    fleet.clock.now += 100
    assert backend.num_known(asked) == 4 * SEGMENT_TOKENS
    backend.blocks.admit(KvEventBatch(number=1, timestamp=0, events=[], snapshot=(0, 1)))
    assert backend.num_known(asked) == 0
    backend.remember(asked)
    fleet.clock.now += 1
    assert backend.num_known(asked) == 4 * SEGMENT_TOKENS
    backend.blocks.admit(KvEventBatch(number=2, timestamp=0, events=[BlocksCleared()]))
    assert backend.num_known(asked) == 0
    block = KvBlock(7, prompt(1, 4)[:512])
    backend.blocks.admit(KvEventBatch(number=3, timestamp=0, events=[BlocksStored([block], None)]))
    assert backend.num_known(asked) == 512
    await fleet.router.close()


async def test_a_busy_home_is_passed_by() -> None:
    fleet = Fleet()
    home = await fleet.ask(prompt(1, 4))
    fleet.clients[home].delay = 0.05
    streams = [fleet.router.generate(fleet.request(prompt(1, 4))) for _ in range(6)]
    for stream in streams:
        await stream.__anext__()
    assert await fleet.ask(prompt(1, 4)) != home
    for stream in streams:
        await stream.aclose()
    await fleet.router.close()


@pytest.mark.parametrize("refusal", [OverloadedError("drains"), BusyError("full"), EngineError("broke")])
async def test_a_refusal_is_not_seen(refusal: Exception) -> None:
    fleet = Fleet(policy="round_robin")
    fleet.clients[1].refusal = refusal
    assert 1 not in [await fleet.ask() for _ in range(6)]
    if isinstance(refusal, OverloadedError) and not isinstance(refusal, BusyError):
        assert len(fleet.clients[1].requests) == 1  # then it was left alone
        fleet.clients[1].refusal = None
        state = (await fleet.router.workers())[1]
        assert (state.num_requests, state.num_retries, state.num_failures, state.breaker) == (1, 1, 1, Breaker.OPEN)
        fleet.clock.now += 0.4
        assert 1 not in [await fleet.ask() for _ in range(3)]
        fleet.clock.now += 0.2
        assert (await fleet.router.workers())[1].breaker is Breaker.HALF_OPEN
        assert 1 in [await fleet.ask() for _ in range(3)]
    await fleet.router.close()


async def test_pauses_grow_and_success_ends_them() -> None:
    fleet = Fleet(2, policy="round_robin")
    fleet.clients[0].refusal = OverloadedError("down")
    for pause in (0.5, 1, 2, 4):
        for _ in range(3):
            assert await fleet.ask() == 1
        fleet.clock.now += pause
    assert len(fleet.clients[0].requests) == 4
    await fleet.router.close()


async def test_when_all_refuse_the_last_word_is_heard() -> None:
    fleet = Fleet()
    for client in fleet.clients:
        client.refusal = OverloadedError("no")
    for _ in range(2):  # also when all of them are paused: one may be back
        with pytest.raises(OverloadedError, match="no"):
            await fleet.ask()
    assert [len(client.requests) for client in fleet.clients] == [2, 2, 2]
    await fleet.router.close()


async def test_a_request_that_breaks_engines_does_not_visit_all() -> None:
    fleet = Fleet(4)
    for client in fleet.clients:
        client.refusal = EngineError("out of memory")
    with pytest.raises(EngineError):
        await fleet.ask()
    assert sum(len(client.requests) for client in fleet.clients) == 2
    await fleet.router.close()


async def test_a_request_at_fault_is_tried_once() -> None:
    fleet = Fleet()
    for client in fleet.clients:
        client.refusal = InvalidRequestError("bad")
    with pytest.raises(InvalidRequestError):
        await fleet.ask()
    assert sum(len(client.requests) for client in fleet.clients) == 1
    await fleet.router.close()


async def test_what_has_begun_is_not_begun_again() -> None:
    fleet = Fleet()
    for client in fleet.clients:
        client.fail_after = 1
    events = [event async for event in fleet.router.generate(fleet.request())]
    assert [event.finish_reason for event in events] == [None, "error"]
    assert sum(len(client.requests) for client in fleet.clients) == 1

    class Dies(FakeClient):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
            yield TokenEvent(token_ids=(1,))
            raise EngineError("gone")

    router = Router([("a", Dies()), ("b", Dies())])
    with pytest.raises(EngineError, match="gone"):
        [event async for event in router.generate(fleet.request())]
    await router.close()
    await fleet.router.close()


async def test_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msaserve.gateway.router.HEALTH_SECONDS", 0.01)
    fleet = Fleet(2, policy="round_robin")
    first = fleet.router._backends[0]
    fleet.clients[0].is_up = False
    await until_true(lambda: not first.is_ready)
    assert {await fleet.ask() for _ in range(4)} == {1}
    assert await fleet.router.is_ready()
    fleet.clients[1].is_up = False
    assert not await fleet.router.is_ready()
    fleet.clients[0].is_up = True
    await until_true(lambda: first.is_ready and not fleet.router._backends[1].is_ready)
    assert {await fleet.ask() for _ in range(4)} == {0}
    await fleet.router.close()


async def test_a_health_check_that_fails_in_any_way_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msaserve.gateway.router.HEALTH_SECONDS", 0.01)

    async def break_down() -> bool:
        raise RuntimeError("not foreseen")

    fleet = Fleet(2, policy="round_robin")
    is_ready = fleet.clients[0].is_ready
    first = fleet.router._backends[0]
    monkeypatch.setattr(fleet.clients[0], "is_ready", break_down)
    await until_true(lambda: not first.is_ready)
    assert {await fleet.ask() for _ in range(4)} == {1}
    monkeypatch.setattr(fleet.clients[0], "is_ready", is_ready)
    await until_true(lambda: first.is_ready)
    assert {await fleet.ask() for _ in range(4)} == {0, 1}
    await fleet.router.close()


async def test_events_that_are_none_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msaserve.gateway.kv_index._FIRST_RETRY", 0.001)
    asked: list[int] = []

    class Source:
        async def kv_events(self, after: int) -> AsyncGenerator[KvEventBatch, None]:
            asked.append(after)
            token_ids = (2**40,) if len(asked) == 2 else (1, 2)
            stored = BlocksStored([KvBlock(len(asked), token_ids)], parent=None)
            yield KvEventBatch(number=len(asked), timestamp=0.0, events=[stored])
            if len(asked) == 3:
                await asyncio.sleep(60)

    index = KvIndex()
    following = asyncio.create_task(follow(Source(), index, name="w"))
    while len(asked) < 3 or index.number != 3:
        assert not following.done()
        await asyncio.sleep(0.001)
    assert (asked, len(index)) == ([0, 1, 0], 1)
    following.cancel()


async def test_closing_early_closes_the_workers_stream() -> None:
    fleet = Fleet(2)
    async with aclosing(fleet.router.generate(fleet.request())) as events:
        async for _ in events:
            break
    assert sum(len(client.closed_early) for client in fleet.clients) == 1
    assert not fleet.router._running
    await fleet.router.close()


async def test_the_sum_of_the_parts() -> None:
    fleet = Fleet(3)
    workers = await fleet.router.workers()
    assert [(w.name, w.is_ready, w.num_requests, w.breaker) for w in workers] == [
        (name, True, 0, Breaker.CLOSED) for name in "012"
    ]
    assert sum(w.load.num_pages for w in workers if w.load) == 600
    fleet.clients[1].info = FakeClient(max_model_len=100).info
    assert (await fleet.router.model_info()).max_model_len == 100
    fleet.clients[2].info = FakeClient(vocab_size=7).info
    with pytest.raises(EngineError, match="different models"):
        await fleet.router.model_info()
    await fleet.router.close()
