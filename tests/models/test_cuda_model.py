"""The same code on a GPU."""

from __future__ import annotations

import pytest
import torch
from golden_data import NAMES, golden, relative_error
from paged_driver import Driver

from msaserve.models.loader import load_model
from msaserve.models.minimax_m3 import MiniMaxM3

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CLOSE = 0.06
"""Relative error of a row's logits in bfloat16; a router or an index score that rounds apart changes a row by more."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> MiniMaxM3:
    return load_model(golden(request.param)[0], "cuda", torch.bfloat16, show_progress=False)


def name_of(model: MiniMaxM3) -> str:
    return model.config.directory.name


@pytest.mark.parametrize("name", NAMES)
def test_golden_in_float32(name: str) -> None:
    directory, expected = golden(name)
    model = load_model(directory, "cuda")
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    hidden = Driver(model, [len(tokens)]).run(tokens)
    assert relative_error(model.logits(hidden[rows.cuda()]).cpu(), expected["text.logits"]) < 2e-4
    grid = [tuple(row) for row in expected["mm.video_grid_thw"].tolist()]
    features = model.embed_media(expected["mm.pixel_values_videos"].cuda(), grid)
    assert relative_error(features.cpu(), expected["mm.video_features"]) < 2e-4


def test_bfloat16_is_close_to_the_cpu() -> None:
    directory, expected = golden("tiny")
    tokens = expected["text.input_ids"]
    results = []
    for device in ("cpu", "cuda"):
        model = load_model(directory, device, torch.bfloat16)
        results.append(model.logits(Driver(model, [len(tokens)]).run(tokens, chunk=100)).cpu())
    # Rounding sends some tokens to other experts and blocks; garbage would be near 1.4.
    assert relative_error(results[1], results[0]) < 0.3


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    errors = [relative_error(got.cpu(), want.cpu()) for got, want in zip(logits, expected, strict=True)]
    assert all(error == error for error in errors)
    assert sum(error < CLOSE for error in errors) >= 0.8 * len(errors), errors
    assert relative_error(logits.cpu(), expected.cpu()) < 0.3, errors


@pytest.mark.parametrize("chunk", [None, 100, 33])
def test_logits_are_the_references(model: MiniMaxM3, chunk: int | None) -> None:
    """Whole and in chunks, ours in bfloat16 against transformers' in float32."""
    _, expected = golden(name_of(model))
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    hidden = Driver(model, [len(tokens)]).run(tokens, chunk=chunk)
    logits = model.logits(hidden[rows.cuda()])
    assert_close(logits, expected["text.logits"])
    same = (logits.argmax(-1).cpu() == expected["text.logits"].argmax(-1)).float().mean()
    assert same >= 0.8


def test_a_batch_is_its_requests_alone(model: MiniMaxM3) -> None:
    _, expected = golden(name_of(model))
    tokens = expected["text.input_ids"]
    lengths = [len(tokens), 1, 17, 129, 260]
    together = Driver(model, lengths)
    requests = [together.add(tokens[:length]) for length in lengths]
    hidden = together.step([(one, length) for one, length in zip(requests, lengths, strict=True)])
    start = 0
    for length in lengths:
        alone = Driver(model, [length]).run(tokens[:length])
        last = slice(start + length - min(length, 8), start + length)
        assert_close(model.logits(hidden[last]), model.logits(alone[-min(length, 8) :]))
        start += length
