"""The engine's thread under random crowds: readers who stay, leave or abort, rows and steps that fail, flushes.

Nothing is computed: a token is a function of the request's seed and its place. What is looked at is who hears what:
every output of every reader who stays ends once, with the tokens it would have had alone up to there, and in the end
the engine holds nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from golden_data import golden

from msaserve.config import ModelConfig
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.engine.plan import RowResult, StepPlan, StepResult
from msaserve.engine.scheduler import Scheduler, SchedulerConfig
from msaserve.errors import OverloadedError
from msaserve.types import GenerateRequest, SamplingParams

BLOCK = 4


def token_at(seed: int, place: int) -> int:
    return hash((seed, place)) % 400 + 3


class Runner:
    """Of a model that needs no device; some of its rows and steps fail."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def run(self, plan: StepPlan) -> StepResult:
        if self.rng.random() < 0.01:
            raise RuntimeError("a step failed on purpose")
        return StepResult([self.row(row) for row in plan.rows])

    def row(self, row: Any) -> RowResult:
        if self.rng.random() < 0.005:
            return RowResult(error="a row failed on purpose")
        return RowResult(token_id=token_at(row.seed, len(row.output_token_ids)) if row.is_sampled else None)


class Crowd:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        config = SchedulerConfig(
            block_size=BLOCK,
            num_pages=self.rng.randrange(12, 40),
            max_num_batched_tokens=self.rng.choice([1, 7, 64]),
            max_num_seqs=self.rng.randrange(1, 9),
            max_model_len=40,
            vocab_size=512,
            enable_prefix_cache=self.rng.random() < 0.8,
            max_queue=self.rng.choice([None, 8]),
        )
        scheduler = Scheduler(config, rng=random.Random(seed))
        runner: Any = Runner(random.Random(seed))
        self.engine = Engine(scheduler, runner, ModelConfig.from_checkpoint(golden("tiny")[0]))
        self.threaded = AsyncEngine(self.engine)
        self.seen: Counter[str] = Counter()

    async def client(self, number: int) -> None:
        rng = random.Random(self.rng.getrandbits(40))
        await asyncio.sleep(rng.random() * 0.02)
        n, max_tokens, seed = rng.choice([1, 1, 2, 4]), rng.randrange(1, 20), rng.randrange(1000)
        sampling = SamplingParams(n=n, max_tokens=max_tokens, seed=seed)
        prompt = [rng.randrange(2)] * rng.randrange(1, 20)
        salt = rng.choice(["", "s"])
        request = GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, cache_salt=salt)
        how = rng.choice(["stays", "stays", "leaves", "is cancelled", "aborts", "aborts one"])
        patience = rng.randrange(6)
        tokens: list[list[int]] = [[] for _ in range(n)]
        reasons: list[str | None] = [None] * n
        num_events = 0
        try:
            async with aclosing(self.threaded.generate(request)) as events:
                async for event in events:
                    assert reasons[event.index] is None, "an output goes on after its end"
                    tokens[event.index] += event.token_ids
                    reasons[event.index] = event.finish_reason
                    num_events += 1
                    if num_events == patience and how == "leaves":
                        break
                    if num_events == patience and how == "is cancelled":
                        raise asyncio.CancelledError
                    if num_events == patience and how.startswith("aborts"):
                        await self.threaded.abort(request.request_id, n - 1 if how == "aborts one" else None)
        except OverloadedError:
            self.seen["overloaded"] += 1
            assert num_events == 0
            return
        except asyncio.CancelledError:
            how = "leaves"
        for i, (got, reason) in enumerate(zip(tokens, reasons, strict=True)):
            assert got == [token_at(seed + i, place) for place in range(len(got))]
            assert reason is not None or how == "leaves"
            assert reason != "abort" or how == "aborts" or (how == "aborts one" and i == n - 1)
            assert (len(got) == max_tokens) == (reason == "length") or reason is None
            self.seen[str(reason)] += 1

    async def run(self) -> None:
        clients = [asyncio.create_task(self.client(number)) for number in range(40)]
        for _ in range(5):
            await asyncio.sleep(0.005)
            await self.threaded.flush_prefix_cache()
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        await asyncio.wait_for(self.threaded.drain(), 60)
        load = await self.threaded.load()
        assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)
        assert not self.threaded._streams
        assert not self.threaded._outputs
        await self.threaded.close()
        self.engine.check_integrity()


@pytest.mark.parametrize("part", range(2))
async def test_crowds(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(15 * part, 15 * (part + 1)):
        crowd = Crowd(seed)
        try:
            await crowd.run()
        except AssertionError as error:
            raise AssertionError(f"crowd {seed}") from error
        seen += crowd.seen
    assert min(seen[what] for what in ("length", "abort", "error", "None", "overloaded")) > 5, seen
