"""The norms of the text backbone and of the vision tower."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from msaserve.layers.linear import weight


class GemmaRMSNorm(nn.Module):
    """x [..., dim] normalised in float32 and scaled by 1 + weight; returned in x's dtype."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight(dim, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1.0 + self.weight.float())).to(x.dtype)


class LayerNorm(nn.Module):
    """x [..., dim] with mean and variance removed, scaled and shifted."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight(dim, dtype=dtype)
        self.bias = weight(dim, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
