"""How the vision tower's patches are arranged so that pictures of like size share an attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from msaserve.config import VisionConfig
from msaserve.layers.rope import grid_rotation

MIN_LENGTH = 64


@dataclass(frozen=True)
class Grid:
    """Rows of the grid by length, each length padded to a power of two. Made by the processes that make batches."""

    order: torch.Tensor
    """[N] the patch that stands at each place once lengths are sorted."""
    merged_order: torch.Tensor
    """[N / merged] which feature of the sorted ones each place of the unsorted has."""
    cos: torch.Tensor
    """[N, pairs] of the sorted patches, and so sin."""
    sin: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    """Of each length's patches: their places in its rows [n · L]."""
    is_patch: tuple[torch.Tensor, ...]
    """[n, L] of each length."""

    @property
    def sizes(self) -> list[int]:
        """Patches of each length."""
        return [len(slots) for slots in self.slots]

    def map(self, change: Any) -> Grid:
        """With change(tensor) in each tensor's place."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            changed[field.name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
        return replace(self, **changed)


def arrange(grid_thw: Sequence[tuple[int, int, int]], config: VisionConfig) -> Grid:
    """grid_thw: frames, rows and columns of patches of each row of the grid."""
    lengths = [t * h * w for t, h, w in grid_thw]
    starts = np.cumsum([0, *lengths])
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(max(MIN_LENGTH, 1 << (length - 1).bit_length()), []).append(row)
    order, slots, is_patch = [], [], []
    for length, rows in sorted(by_length.items()):
        place = np.arange(length)
        real = place < np.asarray([lengths[row] for row in rows])[:, None]
        order.append((starts[rows][:, None] + place)[real])
        slots.append(torch.from_numpy(np.flatnonzero(real)))
        is_patch.append(torch.from_numpy(real))
    sorted_patches = np.concatenate(order)
    merged = config.spatial_merge_size**2
    rotation = grid_rotation(
        grid_thw,
        head_dim=config.head_dim,
        theta=config.rope_theta,
        merge_size=config.spatial_merge_size,
        device=torch.device("cpu"),
    )
    by_place = torch.from_numpy(sorted_patches)
    return Grid(
        order=by_place,
        merged_order=torch.from_numpy(np.argsort(sorted_patches[::merged] // merged)),
        cos=rotation[0][by_place],
        sin=rotation[1][by_place],
        slots=tuple(slots),
        is_patch=tuple(is_patch),
    )
