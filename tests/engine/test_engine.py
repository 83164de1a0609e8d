"""What an engine promises besides the right tokens: seeds, aborts, refusals, and surviving what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driver import check_empty, greedy_prompt, greedy_tokens, make_engine, model, random_prompt, request, run
from golden_data import golden
from planes import page_bytes, poison

from msaserve.config import EngineConfig
from msaserve.engine.engine import Engine
from msaserve.engine.plan import StepPlan, StepResult
from msaserve.errors import InvalidRequestError, OverloadedError
from msaserve.types import GenerateRequest

CURSED = 499
"""A token whose embedding is NaN in `cursed_model`."""


@pytest.fixture
def cursed_model() -> Iterator[None]:
    embedding = model("tiny").embed_tokens
    with torch.no_grad():
        saved = embedding[CURSED].clone()
        embedding[CURSED] = torch.nan
        yield
        embedding[CURSED] = saved


def seeded(i: int, prompt: list[int], **options: Any) -> GenerateRequest:
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + i, "max_tokens": 14, **options}
    built: GenerateRequest = request(str(i), prompt, **options)
    return built


def test_seeds_do_not_feel_batch_chunks_cache_or_preemption() -> None:
    rng = random.Random(9)
    prompts = [random_prompt(rng, length) for length in (15, 30, 16, 47)] * 2
    requests = [seeded(i, prompt, top_k=(0, 20)[i % 2], presence_penalty=0.3) for i, prompt in enumerate(prompts)]
    alone_engine = make_engine(enable_prefix_cache=False)
    alone = [run(alone_engine, [r])[0].token_ids for r in requests]
    assert alone[:4] != alone[4:]  # the same prompts with other seeds
    for config in (
        {},
        {"max_num_batched_tokens": 13},
        {"num_pages": 11, "max_num_batched_tokens": 100},
        {"max_num_seqs": 3, "page_seed": 4, "enable_prefix_cache": False},
    ):
        engine = make_engine(**config)
        assert [output.token_ids for output in run(engine, requests)] == alone
        assert (engine.load().num_preemptions > 0) == ("num_pages" in config)


def test_output_i_has_seed_plus_i() -> None:
    prompt = [5, 6, 7]
    engine = make_engine()
    sequences = engine.add(seeded(3, prompt, n=3))
    assert [sequence.request_id for sequence in sequences] == ["3#0", "3#1", "3#2"]
    while engine.has_work():
        engine.step()
    alone = [run(engine, [seeded(3 + i, prompt)])[0].token_ids for i in range(3)]
    assert [sequence.output_token_ids for sequence in sequences] == alone


def test_seeds_are_drawn_for_requests_without() -> None:
    def tokens() -> list[list[int]]:
        return [o.token_ids for o in run(make_engine(), [seeded(i, [5, 6, 7], seed=None) for i in range(4)])]

    first = tokens()
    assert len({tuple(t) for t in first}) == 4
    assert tokens() == first  # the engine's own seed is fixed


def test_a_repetition_penalty_counts_the_prompt_too() -> None:
    prompt = greedy_prompt("tiny")
    engine = make_engine(num_pages=60)
    free, held = run(engine, [request("a", prompt), request("b", prompt, repetition_penalty=100.0)])
    assert set(free.token_ids) & set(prompt)
    assert not set(held.token_ids) & set(prompt)
    assert len(set(held.token_ids)) == len(held.token_ids)


def test_eos_and_stop_tokens_end_a_request() -> None:
    tokens = greedy_tokens("tiny")
    prompt = greedy_prompt("tiny")
    output = run(make_engine(), [request("a", prompt, stop_token_ids=(tokens[5], 3))])[0]
    assert output.token_ids == tokens[:6]
    assert output.finish_reason == "stop"
    engine = make_engine()
    (sequence,) = engine.add(request("b", [5], ignore_eos=False, logit_bias={2: 100.0}, min_tokens=3))
    while engine.has_work():
        engine.step()
    assert sequence.output_token_ids[-1] == sequence.stop_token_id == 2
    assert len(sequence.output_token_ids) == 4
    assert 2 not in sequence.output_token_ids[:3]


def test_abort_at_any_time_frees_every_page() -> None:
    rng = random.Random(77)
    engine = make_engine(num_pages=40, max_num_batched_tokens=48)
    sequences = []
    for step in range(100):
        if step < 90 and rng.random() < 0.5:
            prompt = random_prompt(rng, rng.randrange(1, 120))
            n = rng.choice([1, 1, 2])
            sequences += engine.add(request(str(step), prompt, max_tokens=rng.randrange(1, 30), n=n))
        alive = [sequence for sequence in sequences if not sequence.is_finished]
        if alive and rng.random() < 0.5:
            engine.abort(rng.choice(alive))
        engine.step()
    assert sum(sequence.finish_reason == "abort" for sequence in sequences) > 20
    for sequence in sequences:
        engine.abort(sequence)
    assert not engine.has_work()
    check_empty(engine)
    assert run(engine, [request("after", greedy_prompt("tiny"))])[0].token_ids == greedy_tokens("tiny")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 600}, r"100 prompt tokens and max_tokens 600 make 700.*304 tokens \(19 pages of 16\)"),
        ({"max_tokens": 10**9}, "context length is 524288 tokens"),
        ({"max_tokens": 0}, "max_tokens must be within 1"),
        ({"temperature": -1.0}, "temperature must be within 0 .* not -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 0}, "n must be"),
        ({"min_tokens": 25}, "min_tokens must be within 0 … 24, not 25"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of token 1 must be finite"),
        ({"logit_bias": {512: 1.0}}, "token id 512 is not within 0 … 511"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids: token id -1"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(options: dict[str, Any], message: str) -> None:
    engine = make_engine(num_pages=20)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(request("a", [5] * 100, **options))
    assert not engine.has_work()


def test_a_refused_request_leaves_none_of_its_outputs_behind() -> None:
    engine = make_engine(max_queue=3)
    with pytest.raises(InvalidRequestError, match="at most 3 outputs may wait"):
        engine.add(request("many", [5, 6], n=4))
    assert not engine.has_work()
    check_empty(engine)
    engine.add(request("one", [5, 6]))
    with pytest.raises(OverloadedError):
        engine.add(request("few", [5, 6], n=3))
    assert engine.load().num_waiting == 1
    engine.add(request("fewer", [5, 6], n=2))


def test_nan_in_a_request_fails_it_alone(cursed_model: None) -> None:
    engine = make_engine(max_num_batched_tokens=64)
    cursed = [*random_prompt(random.Random(1), 40), CURSED, *random_prompt(random.Random(2), 60)]
    outputs = run(engine, [request("cursed", cursed), request("golden", greedy_prompt("tiny"))])
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == "the model's logits are not finite"
    assert outputs[1].token_ids == greedy_tokens("tiny")
    # Its pages are handed out again with NaN in them, and none of its blocks is a prefix for anyone.
    again = run(engine, [request("cursed", cursed, max_tokens=1), request("more", greedy_prompt("tiny"), salt="x")])
    assert again[0].num_cached_tokens == 0
    assert again[1].token_ids == greedy_tokens("tiny")


def test_a_step_that_raises_ends_its_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_num_seqs=2)
    run_step, calls = engine.runner.run, []

    def run_or_raise(plan: StepPlan) -> StepResult:
        calls.append([row.request_id for row in plan.rows])
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return run_step(plan)

    monkeypatch.setattr(engine.runner, "run", run_or_raise)
    outputs = run(engine, [request(name, greedy_prompt("tiny"), salt=name) for name in "abc"])
    assert calls[2] == ["a", "b"]
    for output in outputs[:2]:
        assert output.finish_reason == "error"
        assert output.error == "the engine's step failed: RuntimeError: out of luck"
    assert outputs[2].token_ids == greedy_tokens("tiny")


def test_the_cache_is_as_large_as_its_budget_or_its_use() -> None:
    directory = golden("tiny")[0]
    num_bytes = 16 * 4 * (4 * 2 * 2 * 32 + 3 * 32)
    small = Engine.from_checkpoint(directory, EngineConfig(device="cpu", kv_cache_gib=50.5 * num_bytes / 2**30))
    assert small.runner.cache.num_pages == 50
    assert page_bytes(small.runner.cache) == num_bytes
    assert small.info.max_model_len == 49 * 16
    with pytest.raises(InvalidRequestError, match="holds 1 pages"):
        Engine.from_checkpoint(directory, EngineConfig(device="cpu", kv_cache_gib=1.5 * num_bytes / 2**30))


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 32.0 GiB"), torch.OutOfMemoryError("CUDA out\nof")])
def test_a_cache_beyond_the_memory_is_refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("msaserve.engine.engine.KVCache", fail)
    with pytest.raises(InvalidRequestError, match=r"do not fit into the memory of cpu: (Unable to|CUDA out$)"):
        Engine.from_checkpoint(golden("tiny")[0], EngineConfig(device="cpu", max_model_len=512))


def test_bfloat16_runs() -> None:
    engine = Engine.from_checkpoint(golden("tiny")[0], EngineConfig(device="cpu", dtype="bfloat16", max_model_len=512))
    (output,) = run(engine, [request("a", greedy_prompt("tiny")[:50])])
    assert len(output.token_ids) == 24


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [16, 2048])
def test_golden_on_cuda(chunk: int) -> None:
    config = EngineConfig(device="cuda", dtype="float32", max_model_len=1024, max_num_batched_tokens=chunk)
    engine = Engine.from_checkpoint(golden("tiny")[0], config, page_order=random.Random(1))
    poison(engine.runner.cache)
    outputs = run(engine, [request("a", greedy_prompt("tiny")), seeded(1, greedy_prompt("tiny"))])
    assert outputs[0].token_ids == greedy_tokens("tiny")
