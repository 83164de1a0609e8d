"""The model against what the reference implementation computed (tests/golden), over a shuffled, poisoned cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from golden_data import NAMES, golden, relative_error
from paged_driver import Driver, Request

from msaserve.models.minimax_m3 import MiniMaxM3

TOLERANCE = 2e-4
NEAR_TIE = 1e-4


@dataclass
class TextRun:
    """One whole-prompt run, observed."""

    expected: dict[str, torch.Tensor]
    rows: torch.Tensor
    driver: Driver
    request: Request
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    index_q: dict[int, torch.Tensor] = field(default_factory=dict)
    block_ids: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@pytest.fixture(scope="module", params=NAMES)
def text_run(request: pytest.FixtureRequest) -> TextRun:
    model: MiniMaxM3 = request.getfixturevalue(request.param)
    _, expected = golden(request.param)
    tokens = expected["text.input_ids"]
    driver = Driver(model, [len(tokens)], seed=1)
    run = TextRun(expected, expected["text.rows"].long(), driver, driver.add(tokens))

    def observe(what: str, layer: int, tensor: torch.Tensor) -> None:
        if what == "hidden":
            run.hidden[layer] = tensor[run.rows]
        elif what == "index_q":
            run.index_q[layer] = tensor[run.rows]
        else:
            run.block_ids[layer] = tensor[:, run.rows]

    # The KV-block-major order suits a whole prompt; tests/ops holds it equal to the others.
    hidden = driver.step([(run.request, len(tokens))], observer=observe, attend_impl="reference_kv_major")
    run.logits = model.logits(hidden[run.rows])
    return run


def test_hidden_states_of_every_layer(text_run: TextRun) -> None:
    names = [name for name in text_run.expected if name.startswith("text.hidden.")]
    assert len(names) == len(text_run.hidden)
    errors = {
        layer: relative_error(x, text_run.expected[f"text.hidden.{layer}"]) for layer, x in text_run.hidden.items()
    }
    assert max(errors.values()) < TOLERANCE, errors


def test_logits(text_run: TextRun) -> None:
    assert relative_error(text_run.logits, text_run.expected["text.logits"]) < TOLERANCE


def block_scores(run: TextRun, layer: int, head: int, row: int, blocks: list[int]) -> torch.Tensor:
    """Scores of some blocks for one golden row, from the index keys that the run left in the cache."""
    index_k = run.driver.cache.index_k(layer)[torch.tensor(run.request.pages)[blocks]]
    scores = index_k @ run.index_q[layer][row, head]
    positions = torch.tensor(blocks)[:, None] * index_k.shape[1] + torch.arange(index_k.shape[1])
    return scores.masked_fill(positions > run.rows[row], -torch.inf).amax(-1)


def test_selected_blocks_of_every_sparse_layer(text_run: TextRun) -> None:
    names = [name for name in text_run.expected if name.startswith("text.block_indices.")]
    assert len(names) == len(text_run.block_ids) > 0
    for layer, block_ids in text_run.block_ids.items():
        expected = text_run.expected[f"text.block_indices.{layer}"]
        assert block_ids.shape == expected.shape
        differing = (block_ids.sort(-1).values != expected.sort(-1).values).any(-1).nonzero().tolist()
        for head, i in differing:
            swapped = set(block_ids[head, i].tolist()) ^ set(expected[head, i].tolist())
            assert -1 not in swapped
            scores = block_scores(text_run, layer, head, i, sorted(swapped))
            assert scores.max() - scores.min() < NEAR_TIE, f"layer {layer}, head {head}, row {int(text_run.rows[i])}"
        # Valid ids first, then −1.
        assert (block_ids.ge(0).int().diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 100, 128])
def test_chunked_is_whole(tiny: MiniMaxM3, chunk: int) -> None:
    _, expected = golden("tiny")
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    hidden = Driver(tiny, [len(tokens)], seed=chunk).run(tokens, chunk=chunk)
    assert relative_error(tiny.logits(hidden[rows]), expected["text.logits"]) < TOLERANCE


def test_ragged_batch_is_alone(tiny: MiniMaxM3) -> None:
    """Prompts, chunks and decode steps of several requests in one step, among them one of every token so far."""
    tokens = golden("tiny")[1]["text.input_ids"]
    lengths = [333, 1, 15, 16, 17, 100]
    prompts = [tokens[:length] for length in lengths]
    alone = [Driver(tiny, [length]).run(prompt) for prompt, length in zip(prompts, lengths, strict=True)]
    driver = Driver(tiny, lengths, seed=3)
    requests = [driver.add(prompt) for prompt in prompts]
    seen: list[list[torch.Tensor]] = [[] for _ in requests]
    generator = torch.Generator().manual_seed(0)
    while any(request.num_cached < length for request, length in zip(requests, lengths, strict=True)):
        chosen = []
        for i, request in enumerate(requests):
            left = lengths[i] - request.num_cached
            if left:
                chosen.append((i, min(left, int(torch.randint(1, 70, (1,), generator=generator)))))
        hidden = driver.step([(requests[i], count) for i, count in chosen])
        for (i, _), part in zip(chosen, hidden.split([count for _, count in chosen]), strict=True):
            seen[i].append(part)
    for parts, whole in zip(seen, alone, strict=True):
        assert relative_error(torch.cat(parts), whole) < 1e-5


def test_greedy_tokens(tiny: MiniMaxM3) -> None:
    _, expected = golden("tiny")
    prompt = expected["text.input_ids"][: int(expected["text.greedy_prompt_len"])].long()
    greedy = expected["text.greedy"]
    driver = Driver(tiny, [len(prompt) + len(greedy)])
    request = driver.add(torch.cat([prompt, torch.zeros(len(greedy), dtype=torch.long)]))
    hidden = driver.step([(request, len(prompt))])
    for i in range(len(greedy)):
        request.token_ids[len(prompt) + i] = tiny.logits(hidden[-1:]).argmax()
        hidden = driver.step([(request, 1)])
    assert request.token_ids[len(prompt) :].tolist() == greedy.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_media_features_and_mixed_prompt(name: str, request: pytest.FixtureRequest) -> None:
    model: MiniMaxM3 = request.getfixturevalue(name)
    _, expected = golden(name)
    assert model.vision is not None
    image_grid = [tuple(row) for row in expected["mm.image_grid_thw"].tolist()]
    video_grid = [tuple(row) for row in expected["mm.video_grid_thw"].tolist()]
    images, videos = expected["mm.pixel_values"], expected["mm.pixel_values_videos"]
    assert relative_error(model.vision.encode(images, image_grid), expected["mm.vision_hidden"]) < TOLERANCE
    image_features, video_features = model.embed_media(images, image_grid), model.embed_media(videos, video_grid)
    assert relative_error(image_features, expected["mm.image_features"]) < TOLERANCE
    assert relative_error(video_features, expected["mm.video_features"]) < TOLERANCE

    tokens = expected["mm.input_ids"]
    rows = torch.cat(
        [(tokens == t).nonzero()[:, 0] for t in (model.config.image_token_id, model.config.video_token_id)]
    )
    driver = Driver(model, [len(tokens)])
    media = (rows, torch.cat([image_features, video_features]))
    hidden = driver.step([(driver.add(tokens), len(tokens))], media=media)
    assert relative_error(model.logits(hidden), expected["mm.logits"]) < TOLERANCE


FP8_TOLERANCE = 0.25
"""Of logits over a cache of 8 bits. Random weights make much of a block or an expert that rounding exchanged."""


def test_over_a_cache_of_8_bits(tiny: MiniMaxM3) -> None:
    """Near the reference, and the same whole as in chunks."""
    expected = golden("tiny")[1]
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    whole, chunked = (
        Driver(tiny, [len(tokens)], seed=1, cache_dtype=torch.float8_e4m3fn).run(tokens, chunk=chunk)
        for chunk in (None, 50)
    )
    error = relative_error(tiny.logits(whole[rows]), expected["text.logits"])
    assert 1e-2 < error < FP8_TOLERANCE
    assert relative_error(chunked, whole) < TOLERANCE
