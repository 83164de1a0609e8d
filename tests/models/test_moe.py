"""The experts' ways of computing agree, on skewed loads too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from golden_data import golden, relative_error

from msaserve.config import ModelConfig
from msaserve.layers.moe import Experts, swiglu_oai


def experts(dtype: torch.dtype) -> Experts:
    layer = Experts(ModelConfig.from_checkpoint(golden("tiny")[0]).text, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return layer


def test_each_token_is_the_weighted_sum_of_its_experts() -> None:
    layer = experts(torch.float32)
    x, weights = torch.randn(9, 96), torch.rand(9, 2)
    expert_ids = torch.tensor([[0, 7], [7, 0], [3, 7], [7, 1], [7, 5], [5, 7], [7, 6], [1, 0], [0, 7]])
    expected = torch.zeros(9, 96)
    for token in range(9):
        for place in range(2):
            expert = int(expert_ids[token, place])
            inner = swiglu_oai(layer.gate_up[expert] @ x[token], alpha=layer.alpha, limit=layer.limit)
            expected[token] += weights[token, place] * (layer.down[expert] @ inner)
    assert relative_error(layer(x, expert_ids, weights), expected) < 1e-6


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_grouped_is_looped() -> None:
    layer = experts(torch.bfloat16)
    counts = torch.tensor([0, 5, 0, 0, 17, 1, 0, 9])
    rows = torch.randn(int(counts.sum()), 96).bfloat16()
    assert layer.can_group()
    assert relative_error(layer.grouped(rows, counts), layer.looped(rows, counts)) < 1e-2


def test_swiglu_oai_clamps() -> None:
    gate_up = torch.tensor([[9.0, -9.0, 1.0, 20.0, -20.0, 0.5]])
    gate, up = torch.tensor([[7.0, -9.0, 1.0]]), torch.tensor([[7.0, -7.0, 0.5]])
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    assert torch.allclose(swiglu_oai(gate_up, alpha=1.702, limit=7.0), expected)
