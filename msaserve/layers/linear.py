"""Weights for inference: no gradient, uninitialised until the loader fills them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient, on the current default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x [..., in_features] → [..., out_features]."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype)
        self.bias = weight(out_features, dtype=dtype) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
