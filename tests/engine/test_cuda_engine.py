"""The engine in bfloat16 on a card, with the kernels it takes by itself."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import driver
import numpy as np
import pytest
import torch
from driver import greedy_prompt, make_engine, request, run
from golden_data import NAMES, golden

from msaserve.cache.kv import AttentionBatch
from msaserve.engine.engine import Engine
from msaserve.engine.graphs import DecodeGraphs, padded_sizes
from msaserve.engine.plan import PlanRow
from msaserve.engine.sampler import sample
from msaserve.models.loader import load_model
from msaserve.models.minimax_m3 import MiniMaxM3
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint, SamplingParams

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_padded_sizes() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(20) == [1, 2, 4, 8, 12, 16, 20]
    sizes = padded_sizes(256)
    assert sizes[-1] == 256
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))


def test_a_cpu_takes_no_graphs() -> None:
    engine = make_engine()
    graphs = DecodeGraphs(driver.model("tiny"), engine.runner.cache, max_num_seqs=4, max_model_len=512)
    assert graphs.takes(1, 1, 10) == (driver.model("tiny").device.type == "cuda")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> MiniMaxM3:
    return load_model(golden(request.param)[0], "cuda", torch.bfloat16, show_progress=False)


def name_of(model: MiniMaxM3) -> str:
    return model.config.directory.name


def engine_of(model: MiniMaxM3, monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool = False, **config: Any) -> Engine:
    monkeypatch.setattr(driver, "model", lambda name: model)
    engine = make_engine(name_of(model), num_pages=120, **config)
    if has_graphs:
        limits = {"max_num_seqs": 8, "max_model_len": 8192}
        engine.runner._graphs = DecodeGraphs(model, engine.runner.cache, **limits)
    return engine


def first_logprobs(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    requests = [request(str(i), prompt, max_tokens=1, logprobs=20) for i, prompt in enumerate(prompts)]
    return [dict(output.logprobs[0].top) for output in run(engine, requests)]


@needs_card
@pytest.mark.cuda
def test_chunks_and_prefix_hits_change_little(model: MiniMaxM3, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = greedy_prompt(name_of(model))
    (whole,) = first_logprobs(engine_of(model, monkeypatch, max_num_batched_tokens=8192), [prompt])
    (chunked,) = first_logprobs(engine_of(model, monkeypatch, max_num_batched_tokens=100), [prompt])
    cached = engine_of(model, monkeypatch, max_num_batched_tokens=100)
    first_logprobs(cached, [prompt[: len(prompt) * 2 // 3] + [7] * 5])
    (hit,) = first_logprobs(cached, [prompt])
    for other in (chunked, hit):
        shared = whole.keys() & other.keys()
        assert len(shared) >= 14
        assert sorted(abs(whole[token] - other[token]) for token in shared)[len(shared) // 2] < 0.1


@needs_card
@pytest.mark.cuda
def test_graphs_give_the_bits_of_their_step(model: MiniMaxM3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay against the same padded step run eagerly, as requests come, go and grow; padding stores nothing."""
    if name_of(model) == "tiny":
        pytest.skip("heads of 32 have no kernels that can be captured")
    engine = engine_of(model, monkeypatch, has_graphs=True)
    graphs, cache = engine.runner._graphs, engine.runner.cache
    assert graphs is not None
    steps = 0
    replay = graphs.forward

    def forward(token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor | None:
        nonlocal steps
        hidden = replay(token_ids, batch)
        assert hidden is not None
        size = next(size for size in padded_sizes(8) if size >= len(token_ids))
        padded = AttentionBatch(
            positions=graphs._positions[:size],
            slots=graphs._slots[:size],
            block_table=graphs._block_table[:size],
            seq_lens=graphs._seq_lens[:size],
            cu_query_lens=graphs._cu_query_lens[: size + 1],
            max_query_len=1,
            max_seq_len=graphs._block_table.shape[1] * cache.block_size,
        )
        eager = model.forward(graphs._token_ids[:size], padded, cache)
        assert torch.equal(hidden, eager[: len(token_ids)])
        steps += 1
        return hidden

    monkeypatch.setattr(graphs, "forward", forward)
    prompt = greedy_prompt(name_of(model))
    requests = [request(str(i), prompt[: 40 + 300 * i], max_tokens=4 + 3 * i) for i in range(6)]
    outputs = run(engine, requests, arrivals=[0, 0, 1, 3, 5, 9])
    assert all(output.error is None for output in outputs)
    assert [len(output.token_ids) for output in outputs] == [4 + 3 * i for i in range(6)]
    assert steps > 10
    assert cache.k(0)[0].isnan().all(), "padding wrote to the dummy page"


@needs_card
@pytest.mark.cuda
def test_graphs_and_eager_agree(model: MiniMaxM3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing can be captured: then a step runs eagerly."""
    prompt = greedy_prompt(name_of(model))
    prompts = [prompt[:length] for length in (50, 129, 290)]
    results = []
    for has_graphs in (True, False):
        engine = engine_of(model, monkeypatch, has_graphs=has_graphs)
        requests = [request(str(i), one, max_tokens=6, logprobs=1) for i, one in enumerate(prompts)]
        results.append(run(engine, requests))
    for with_graphs, eager in zip(*results, strict=True):
        assert with_graphs.error is None
        same = [a == b for a, b in zip(with_graphs.token_ids, eager.token_ids, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        assert agreed >= 2
        for a, b in zip(with_graphs.logprobs[:agreed], eager.logprobs[:agreed], strict=True):
            assert abs(a.logprob - b.logprob) < 0.3


@needs_card
@pytest.mark.cuda
def test_what_cannot_be_captured_is_logged_once(
    model: MiniMaxM3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(model, monkeypatch, has_graphs=True)
    step = model.forward

    def waits(*args: Any, **options: Any) -> torch.Tensor:
        hidden = step(*args, **options)
        hidden.sum().item()
        return hidden

    monkeypatch.setattr(model, "forward", waits)
    with caplog.at_level(logging.WARNING):
        (output,) = run(engine, [request("a", greedy_prompt(name_of(model))[:40], max_tokens=5)])
    assert output.error is None
    assert len(output.token_ids) == 5
    assert sum("without CUDA graphs" in record.message for record in caplog.records) == 1


def constrained_rows(vocab_size: int) -> list[PlanRow]:
    """A third of the rows without a constraint; each other allows its own tokens, one of them a single one."""
    rows = []
    for i in range(12):

        def fill(_: Any, mask: np.ndarray, i: int = i) -> bool:
            allowed = range(i, vocab_size, 7 * i) if i != 4 else [vocab_size - 1]
            bits = np.zeros(mask.size * 32, dtype=np.uint8)
            bits[list(allowed)] = 1
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
            return True

        matcher: Any = SimpleNamespace(fill=fill, error=None) if i % 3 else None
        params = SamplingParams(temperature=float(i % 2), top_p=0.9)
        rows.append(PlanRow(str(i), [1], 0, array("i", [1]), params, i, True, [1], [], (), matcher))
    return rows


@needs_card
@pytest.mark.cuda
@pytest.mark.parametrize("vocab_size", [500, 4096, 200_064])
def test_constraints_mask_on_the_card_as_on_the_host(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((12, vocab_size), generator=generator)
    rows = constrained_rows(vocab_size)
    results = [sample(logits.to(device), rows, (0,)) for device in ("cpu", "cuda")]
    assert [result.token_id for result in results[0]] == [result.token_id for result in results[1]]
    assert results[1][4].token_id == vocab_size - 1


@needs_card
@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_output_on_the_card(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = golden("tiny")[0]
    model = load_model(directory, "cuda", torch.bfloat16, show_progress=False)
    constraint = Constraint(kind="regex", text=r"[a-f]{2,5}/\d{3}é?")
    engine = engine_of(model, monkeypatch)
    options = {"ignore_eos": False, "temperature": temperature, "seed": 3, "max_tokens": 60}
    requests = [request("a", [5, 6, 7], constraint=constraint, **options), request("b", [5, 6, 7], **options)]
    output = run(engine, requests)[0]
    assert output.error is None
    assert output.finish_reason == "stop"
    tokenizer = Tokenizer.load(directory)
    text = b"".join(tokenizer.token_bytes(token) for token in output.token_ids[:-1]).decode()
    assert re.fullmatch(r"[a-f]{2,5}/\d{3}é?", text)
