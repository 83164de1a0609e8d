"""Rotary positions: partial and half-split, along one axis for text and along three for pictures and clips."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, both float32 [tokens, pairs]."""


def text_rotation(positions: torch.Tensor, *, rotary_dim: int, theta: float) -> CosSin:
    """Angles of text tokens: positions [T] → cos, sin [T, rotary_dim / 2]."""
    return _cos_sin(positions.float()[:, None] * _frequencies(rotary_dim, theta, positions.device))


def grid_rotation(
    grid_thw: Sequence[tuple[int, int, int]],
    *,
    head_dim: int,
    theta: float,
    merge_size: int,
    device: torch.device,
) -> CosSin:
    """Angles of patches: cos, sin [N, 3 · band / 2], N = Σ t·h·w.

    Equal bands of 2·((head_dim // 3) // 2) channels for time, height and width, in that order. Patches stand in the
    order of the wire: frame by frame, and in a frame by merge windows of merge_size².
    """
    frequencies = _frequencies(2 * ((head_dim // 3) // 2), theta, device)
    positions = torch.cat([_grid_positions(t, h, w, merge_size, device) for t, h, w in grid_thw])
    return _cos_sin((positions.float()[:, :, None] * frequencies).flatten(1))


def rotate(x: torch.Tensor, rotation: CosSin) -> torch.Tensor:
    """x [tokens, heads, D] with its first 2·pairs channels rotated in float32, channel i with i + pairs; same dtype."""
    cos, sin = (part[:, None] for part in rotation)
    pairs = cos.shape[-1]
    first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :pairs] = first * cos - second * sin
    out[..., pairs : 2 * pairs] = second * cos + first * sin
    out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


def _frequencies(dim: int, theta: float, device: torch.device) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))


def _cos_sin(angles: torch.Tensor) -> CosSin:
    return angles.cos(), angles.sin()


def _grid_positions(t: int, h: int, w: int, merge_size: int, device: torch.device) -> torch.Tensor:
    """(time, row, column) of each patch of one grid, [t·h·w, 3]."""
    windows = (t, h // merge_size, w // merge_size, merge_size, merge_size)
    frames = torch.arange(t, device=device).view(-1, 1, 1, 1, 1)
    rows = torch.arange(h, device=device).view(1, -1, 1, merge_size, 1)
    columns = torch.arange(w, device=device).view(1, 1, -1, 1, merge_size)
    return torch.stack([axis.expand(windows).flatten() for axis in (frames, rows, columns)], dim=1)
