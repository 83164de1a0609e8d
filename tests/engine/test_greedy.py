"""The same greedy tokens however a prompt is cut, cached, batched, preempted or placed: those of the reference."""

from __future__ import annotations

import dataclasses
import random

import pytest
from driver import Output, greedy_prompt, greedy_tokens, make_engine, random_prompt, request, run
from golden_data import golden
from planes import poison

from msaserve.config import EngineConfig
from msaserve.engine.engine import Engine
from msaserve.types import GenerateRequest

CHUNKS = [1, 7, 16, 100, 128, 2048]


def test_from_checkpoint_on_shuffled_poisoned_pages() -> None:
    config = EngineConfig(device="cpu", max_model_len=1024, max_num_seqs=3)
    engine = Engine.from_checkpoint(golden("tiny")[0], config, page_order=random.Random(5))
    assert engine.info.max_model_len == 1024
    assert engine.load().num_pages == 3 * 1024 // 16
    poison(engine.runner.cache)
    (output,) = run(engine, [request("a", greedy_prompt("tiny"))])
    assert output.token_ids == greedy_tokens("tiny")
    assert output.finish_reason == "length"


@pytest.mark.parametrize("chunk", CHUNKS)
def test_in_chunks(chunk: int) -> None:
    engine = make_engine(max_num_batched_tokens=chunk, page_seed=chunk)
    (output,) = run(engine, [request("a", greedy_prompt("tiny"))])
    assert output.token_ids == greedy_tokens("tiny")


@pytest.mark.parametrize("hit", [1, 15, 16, 17, 40, 64, 100, 128, 203, 288, 292, 293])
def test_after_a_prefix_hit(hit: int) -> None:
    """An earlier prompt shared `hit` tokens and then went another way, so that a hit may end inside a block."""
    prompt = greedy_prompt("tiny")
    other = [(token + 1) % 500 for token in prompt[hit:]] + [7] * 20
    engine = make_engine(max_num_batched_tokens=(2048, 33, 7)[hit % 3])
    run(engine, [request("first", prompt[:hit] + other, max_tokens=3)])
    (output,) = run(engine, [request("a", prompt)])
    assert output.token_ids == greedy_tokens("tiny")
    assert output.num_cached_tokens == min(hit, len(prompt) - 1) // 16 * 16


def test_after_its_own_output_was_cached() -> None:
    """A conversation goes on: prompt and output of the first turn are the second turn's prefix."""
    prompt, tokens = greedy_prompt("tiny"), greedy_tokens("tiny")
    engine = make_engine()
    run(engine, [request("turn 1", prompt, max_tokens=20)])
    (output,) = run(engine, [request("turn 2", prompt + tokens[:19], max_tokens=5)])
    assert output.token_ids == tokens[19:]
    assert output.num_cached_tokens == (len(prompt) + 18) // 16 * 16


def test_another_salt_shares_nothing() -> None:
    engine = make_engine()
    run(engine, [request("a", greedy_prompt("tiny"), salt="x")])
    (output,) = run(engine, [request("b", greedy_prompt("tiny"), salt="y")])
    assert output.num_cached_tokens == 0
    assert output.token_ids == greedy_tokens("tiny")


@pytest.fixture(scope="module")
def ragged() -> tuple[list[list[int]], list[list[int]]]:
    """16 prompts, the golden one among them, and the greedy tokens of each, computed alone."""
    rng = random.Random(16)
    lengths = [1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 100, 129, 160, 200, 310]
    prompts = [random_prompt(rng, length) for length in lengths]
    prompts.insert(GOLDEN_PLACE, greedy_prompt("tiny"))
    engine = make_engine(enable_prefix_cache=False)
    alone = [run(engine, [ragged_request(i, prompt)])[0].token_ids for i, prompt in enumerate(prompts)]
    assert alone[GOLDEN_PLACE] == greedy_tokens("tiny")
    return prompts, alone


GOLDEN_PLACE = 6


def ragged_request(i: int, prompt: list[int]) -> GenerateRequest:
    return request(str(i), prompt, max_tokens=24 if i == GOLDEN_PLACE else 5 + i % 7)


@pytest.mark.parametrize(
    ("chunk", "num_pages", "has_prefix_cache"),
    [(2048, 200, True), (100, 200, True), (16, 200, False), (2048, 44, True), (128, 42, False)],
)
def test_in_a_ragged_batch(
    ragged: tuple[list[list[int]], list[list[int]]], chunk: int, num_pages: int, has_prefix_cache: bool
) -> None:
    prompts, alone = ragged
    engine = make_engine(
        max_num_batched_tokens=chunk, num_pages=num_pages, enable_prefix_cache=has_prefix_cache, page_seed=chunk
    )
    arrivals = [0] * 8 + [i // 2 for i in range(8)]
    requests = [ragged_request(i, prompt) for i, prompt in enumerate(prompts)]
    outputs = run(engine, requests, arrivals=arrivals)
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [2048, 300])
def test_preempted(chunk: int, has_prefix_cache: bool) -> None:
    """Four prompts of 19 pages fit, but only three of them can grow into a twentieth."""
    engine = make_engine(num_pages=1 + 4 * 19 + 3, max_num_batched_tokens=chunk, enable_prefix_cache=has_prefix_cache)
    outputs = run(engine, [request(salt, greedy_prompt("tiny"), salt=salt, max_tokens=50) for salt in "abcd"])
    assert engine.load().num_preemptions > 0
    assert all(output.token_ids[:24] == greedy_tokens("tiny") for output in outputs)


def test_many_short_requests_preempt_one_another() -> None:
    rng = random.Random(2)
    prompts = [random_prompt(rng, rng.randrange(1, 30)) for _ in range(10)]
    requests = [request(str(i), prompt, max_tokens=36) for i, prompt in enumerate(prompts)]
    roomy = run(make_engine(), requests)
    tight = make_engine(num_pages=15, max_num_batched_tokens=64)
    assert [o.token_ids for o in run(tight, requests)] == [o.token_ids for o in roomy]
    assert tight.load().num_preemptions > 1


@pytest.fixture(scope="module")
def geometry() -> tuple[Engine, Output]:
    """M3's own attention geometry: the prompt's blocks are cached in three requests, the last of which is golden's.

    The first two end inside a block, so the prompt is computed once in all, across two prefix hits.
    """
    prompt = greedy_prompt("geometry")
    engine = make_engine("geometry", num_pages=50, max_num_batched_tokens=1000)
    for length in (1500, 3001):
        run(engine, [request(str(length), prompt[:length], max_tokens=1)])
    (output,) = run(engine, [request("whole", prompt)])
    return engine, output


def test_geometry(geometry: tuple[Engine, Output]) -> None:
    _, output = geometry
    assert output.num_cached_tokens == 3001 // 128 * 128
    assert output.token_ids == greedy_tokens("geometry")


@pytest.mark.parametrize("chunk", [7, 16, 100, 128])
def test_geometry_in_chunks_after_a_hit(geometry: tuple[Engine, Output], chunk: int) -> None:
    """Only what the hit leaves is computed, in chunks, together with another request's decoding."""
    engine, _ = geometry
    scheduler = engine.scheduler
    roomy = scheduler.config
    scheduler.config = dataclasses.replace(roomy, max_num_batched_tokens=chunk)
    try:
        prompt = greedy_prompt("geometry")
        requests = [request("short", prompt[:40], salt="s", max_tokens=20), request("whole", prompt)]
        output = run(engine, requests)[1]
    finally:
        scheduler.config = roomy
    assert output.num_cached_tokens == 4476 // 128 * 128
    assert output.token_ids == greedy_tokens("geometry")


def test_geometry_in_chunks_cold() -> None:
    """In chunks of 100, and of 16 from before the seventeenth block, where selection begins, to behind it."""
    engine = make_engine("geometry", num_pages=50)
    scheduler = engine.scheduler
    (sequence,) = engine.add(request("whole", greedy_prompt("geometry")))
    while engine.has_work():
        chunk = 16 if 1900 <= sequence.num_computed_tokens < 2400 else 100
        scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=chunk)
        engine.step()
    assert sequence.num_cached_tokens == 0
    assert sequence.output_token_ids == greedy_tokens("geometry")
