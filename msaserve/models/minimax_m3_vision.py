"""MiniMax-M3's eyes: vision tower, projector and patch merge. Patches go in, text-sized embeddings come out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from msaserve.config import VisionConfig
from msaserve.errors import InvalidRequestError
from msaserve.layers.linear import Linear
from msaserve.layers.norm import LayerNorm
from msaserve.layers.rope import CosSin, grid_rotation, rotate


class VisionAttention(nn.Module):
    """Full attention inside each row of the grid."""

    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv_proj = Linear(config.hidden_size, 3 * config.hidden_size, dtype=dtype, has_bias=True)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, dtype=dtype, has_bias=True)

    def forward(self, x: torch.Tensor, rotation: CosSin, row_lens: list[int]) -> torch.Tensor:
        """x [N, hidden], row_lens: patches of each grid row, Σ = N → [N, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, -1)
        q, k, v = rotate(qkv[:, 0], rotation), rotate(qkv[:, 1], rotation), qkv[:, 2]
        rows = [
            F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in row))[0].transpose(0, 1)
            for row in zip(*(part.split(row_lens) for part in (q, k, v)), strict=True)
        ]
        out: torch.Tensor = self.out_proj(torch.cat(rows).flatten(1))
        return out


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype=dtype)
        self.self_attn = VisionAttention(config, dtype=dtype)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype=dtype)
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, dtype=dtype, has_bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, dtype=dtype, has_bias=True)

    def forward(self, x: torch.Tensor, rotation: CosSin, row_lens: list[int]) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x), rotation, row_lens)
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.layer_norm2(x))))
        return out


class MiniMaxM3Vision(nn.Module):
    """The tower (patch embedding, pre-norm, encoder without a final norm), the projector and the patch merge."""

    def __init__(self, config: VisionConfig, text_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        inner = config.projector_hidden_size
        self.patch_embedding = Linear(config.patch_dim, config.hidden_size, dtype=dtype)
        self.pre_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, dtype=dtype)
        self.layers = nn.ModuleList(VisionLayer(config, dtype=dtype) for _ in range(config.num_layers))
        self.projector_1 = Linear(config.hidden_size, inner, dtype=dtype, has_bias=True)
        self.projector_2 = Linear(inner, text_hidden_size, dtype=dtype, has_bias=True)
        self.merge_1 = Linear(config.num_merged_patches * text_hidden_size, inner, dtype=dtype, has_bias=True)
        self.merge_2 = Linear(inner, text_hidden_size, dtype=dtype, has_bias=True)

    def encode(self, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """The tower alone: patches [N, patch_dim] → [N, vision hidden].

        Raises:
            InvalidRequestError: patches and grid do not fit together.
        """
        self._check(patches, grid_thw)
        config = self.config
        rotation = grid_rotation(
            grid_thw,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            merge_size=config.spatial_merge_size,
            device=patches.device,
        )
        row_lens = [t * h * w for t, h, w in grid_thw]
        x: torch.Tensor = self.pre_norm(self.patch_embedding(patches.to(self.patch_embedding.weight.dtype)))
        for layer in self.layers:
            x = layer(x, rotation, row_lens)
        return x

    def forward(self, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """patches [N, patch_dim] of the rows of grid_thw → one embedding per merge window, [N / merge², text hidden].

        Raises:
            InvalidRequestError: patches and grid do not fit together.
        """
        x = self.projector_2(F.gelu(self.projector_1(self.encode(patches, grid_thw))))
        merged = x.reshape(x.shape[0] // self.config.num_merged_patches, -1)
        out: torch.Tensor = self.merge_2(F.gelu(self.merge_1(merged)))
        return out

    def _check(self, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> None:
        merge = self.config.spatial_merge_size
        for t, h, w in grid_thw:
            if min(t, h, w) < 1 or h % merge or w % merge:
                raise InvalidRequestError(f"grid row {(t, h, w)}: height and width must be multiples of {merge}")
        num_patches = sum(t * h * w for t, h, w in grid_thw)
        if num_patches == 0 or patches.shape != (num_patches, self.config.patch_dim):
            raise InvalidRequestError(
                f"patches of shape {tuple(patches.shape)} do not fit the grid {list(grid_thw)}: "
                f"expected ({num_patches}, {self.config.patch_dim})"
            )
