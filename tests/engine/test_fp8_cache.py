"""A cache of 8 bits: fewer bytes, near the reference, and exact in itself however a prompt is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from driver import Output, greedy_prompt, random_prompt, request, run
from golden_data import golden
from planes import page_bytes, poison

from msaserve.config import EngineConfig, ModelConfig
from msaserve.engine.engine import Engine
from msaserve.errors import InvalidRequestError
from msaserve.models.memory_plan import cache_page_bytes
from msaserve.worker.served import ServedModel


def engine(**config: Any) -> Engine:
    """Of `tiny` over a cache of 8 bits, shuffled and NaN."""
    fields = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 3, "kv_cache_dtype": "fp8_e4m3", **config}
    made = Engine.from_checkpoint(golden("tiny")[0], EngineConfig(**fields), page_order=random.Random(2))
    poison(made.runner.cache)
    return made


@pytest.fixture(scope="module")
def whole() -> Output:
    (output,) = run(engine(), [request("a", greedy_prompt("tiny"))])
    return output


def test_cache_and_plan_are_of_8_bits() -> None:
    made = engine()
    assert made.runner.cache.dtype == torch.float8_e4m3fn
    assert made.runner.dtype == torch.float32
    config = ModelConfig.from_checkpoint(golden("tiny")[0])
    num_bytes = cache_page_bytes(config.text, "float32", "fp8_e4m3")
    assert num_bytes == page_bytes(made.runner.cache)
    assert 4 * num_bytes == cache_page_bytes(config.text, "float32")
    served = ServedModel.of(made)
    assert (served.dtype, served.kv_cache_dtype) == ("float32", "fp8_e4m3")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype must be one of auto, fp8_e4m3, not 'fp8_e5m2'"):
        engine(kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("chunk", [1, 16, 100])
def test_in_chunks(whole: Output, chunk: int) -> None:
    (output,) = run(engine(max_num_batched_tokens=chunk), [request("a", greedy_prompt("tiny"))])
    assert output.token_ids == whole.token_ids


@pytest.mark.parametrize("hit", [16, 100, 288])
def test_after_a_prefix_hit(whole: Output, hit: int) -> None:
    """Cached keys and values are those that the prompt itself would have stored."""
    prompt = greedy_prompt("tiny")
    made = engine()
    other = [(token + 1) % 500 for token in prompt[hit:]]
    run(made, [request("first", prompt[:hit] + other, max_tokens=3)])
    (output,) = run(made, [request("a", prompt)])
    assert output.num_cached_tokens == hit // 16 * 16
    assert output.token_ids == whole.token_ids


def test_in_a_batch(whole: Output) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, 90), greedy_prompt("tiny"), random_prompt(rng, 33)]
    made = engine(max_num_batched_tokens=120)
    outputs = run(made, [request(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert outputs[1].token_ids == whole.token_ids
