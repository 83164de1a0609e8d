"""Engines over the golden checkpoints, as unkind as they can be made: pages in shuffled order, every slot NaN, pages
and queues checked after every step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from golden_data import golden
from planes import poison

from msaserve.cache.kv import KVCache
from msaserve.engine.engine import Engine
from msaserve.engine.runner import Runner
from msaserve.engine.scheduler import Scheduler, SchedulerConfig
from msaserve.models.loader import load_model
from msaserve.models.minimax_m3 import MiniMaxM3
from msaserve.types import GenerateRequest, Logprobs, SamplingParams


@lru_cache(maxsize=2)
def model(name: str) -> MiniMaxM3:
    """On the CPU, unless MSASERVE_TEST_DEVICE says otherwise: everything here must hold on a GPU too."""
    return load_model(golden(name)[0], os.environ.get("MSASERVE_TEST_DEVICE", "cpu"), show_progress=False)


@lru_cache(maxsize=2)
def expected(name: str) -> dict[str, torch.Tensor]:
    return golden(name)[1]


def greedy_prompt(name: str) -> list[int]:
    tensors = expected(name)
    return tensors["text.input_ids"][: int(tensors["text.greedy_prompt_len"])].tolist()


def greedy_tokens(name: str) -> list[int]:
    return expected(name)["text.greedy"].tolist()


def make_engine(
    name: str = "tiny", *, num_pages: int = 200, page_seed: int = 0, attend_impl: str | None = None, **config: Any
) -> Engine:
    """num_pages: the dummy page included. config: fields of SchedulerConfig."""
    m3 = model(name)
    text = m3.config.text
    cache = KVCache(
        num_layers=text.num_layers,
        sparse_layer_ids=text.sparse_layer_ids,
        num_pages=num_pages,
        block_size=text.block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        index_dim=text.index_dim,
        dtype=m3.dtype,
        device=m3.device,
    )
    poison(cache)
    fields = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": m3.config.max_model_len, **config}
    scheduler_config = SchedulerConfig(
        block_size=text.block_size,
        num_pages=num_pages,
        vocab_size=text.vocab_size,
        eos_token_ids=m3.config.eos_token_ids,
        **fields,
    )
    scheduler = Scheduler(scheduler_config, rng=random.Random(page_seed))
    return Engine(scheduler, Runner(m3, cache, attend_impl=attend_impl), m3.config)


def request(request_id: str, prompt: Sequence[int], *, media: Any = (), salt: str = "", **sampling: Any) -> Any:
    """Greedy, 24 tokens, end-of-sequence ignored, unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling=params, media=media, cache_salt=salt
    )


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0


def run(engine: Engine, requests: Iterable[GenerateRequest], *, arrivals: Sequence[int] | None = None) -> list[Output]:
    """All outputs (n = 1), in the order of the requests. arrivals: the step before which each arrives."""
    todo = list(requests)
    when = dict(enumerate(arrivals or [0] * len(todo)))
    outputs = [Output() for _ in todo]
    place: dict[str, int] = {}
    step = 0
    while when or engine.has_work():
        for i in [i for i, arrival in when.items() if arrival <= step]:
            del when[i]
            (sequence,) = engine.add(todo[i])
            place[sequence.request_id] = i
        for out in engine.step():
            output = outputs[place[out.request.request_id]]
            output.token_ids += out.token_ids
            output.logprobs += out.logprobs
            output.finish_reason, output.error = out.finish_reason, out.error
            output.num_cached_tokens = out.request.num_cached_tokens
        step += 1
        assert step < 20_000
    check_empty(engine)
    return outputs


def check_empty(engine: Engine) -> None:
    """Nothing runs, waits or holds a page."""
    engine.check_integrity()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_used_pages) == (0, 0, 0)


def random_prompt(rng: random.Random, length: int, vocab_size: int = 500) -> list[int]:
    """No media tokens."""
    return [rng.randrange(3, vocab_size) for _ in range(length)]
