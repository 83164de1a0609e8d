"""The same code on a GPU."""

from __future__ import annotations

import pytest
import torch
from golden_data import NAMES, golden, relative_error
from paged_driver import Driver

from msaserve.models.loader import load_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


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
