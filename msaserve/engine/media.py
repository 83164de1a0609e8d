"""Pictures and clips on their way into a step: what is refused on arrival, and the features of recent items."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch

from msaserve.config import ModelConfig
from msaserve.errors import InvalidRequestError
from msaserve.types import MediaItem

Grid = tuple[tuple[int, int, int], ...]
Embed = Callable[[torch.Tensor, Sequence[tuple[int, int, int]]], torch.Tensor]
"""patches [N, patch_dim] float32 on the CPU, grid_thw → features [N / merged patches, hidden]."""


def media_positions(
    item: MediaItem, prompt_token_ids: Sequence[int], media_token_ids: tuple[int | None, int | None]
) -> np.ndarray:
    """[M] int64: the positions of the item's span that its features replace, ascending."""
    span = np.asarray(prompt_token_ids[item.offset : item.offset + item.length])
    image_token_id, video_token_id = media_token_ids  # np.isin takes twenty times as long
    return item.offset + np.flatnonzero((span == image_token_id) | (span == video_token_id))


def check_media(item: MediaItem, prompt_token_ids: Sequence[int], config: ModelConfig) -> None:
    """Whether the vision tower can take the item, and the prompt its features.

    Raises:
        InvalidRequestError: it cannot; the message has the numbers.
    """
    vision = config.vision
    if vision is None:
        raise InvalidRequestError("this checkpoint has no vision tower: it takes text only", param="media")
    patches, merge = item.patches, vision.spatial_merge_size
    if patches.ndim != 2 or patches.shape[1] != vision.patch_dim or patches.dtype != np.float32:
        raise InvalidRequestError(
            f"patches must be float32 [N, {vision.patch_dim}], not {patches.dtype} {list(patches.shape)}", param="media"
        )
    for row in item.grid_thw:
        if len(row) != 3 or min(row) < 1 or row[1] % merge or row[2] % merge:
            raise InvalidRequestError(
                f"grid_thw row {row} must be three positive numbers, height and width multiples of {merge}",
                param="media",
            )
    num_patches = sum(t * h * w for t, h, w in item.grid_thw)
    if num_patches != len(patches) or num_patches == 0:
        raise InvalidRequestError(
            f"grid_thw {list(item.grid_thw)} makes {num_patches} patches, but there are {len(patches)}", param="media"
        )
    num_positions = len(media_positions(item, prompt_token_ids, (config.image_token_id, config.video_token_id)))
    if num_positions * vision.num_merged_patches != num_patches:
        raise InvalidRequestError(
            f"{num_patches} patches make {num_patches // vision.num_merged_patches} tokens, but the prompt has "
            f"{num_positions} image or video tokens between {item.offset} and {item.offset + item.length}",
            param="media",
        )


class MediaFeatures:
    """Features of the items seen last, so that the chunks of a prompt and repeated pictures embed each item once.

    Args:
        embed: computes an item's features.
        max_bytes: features kept; the newest item's are kept whatever their size.
    """

    def __init__(self, embed: Embed, *, max_bytes: int) -> None:
        self._embed = embed
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # By grid, too: the same patches as one row of it or as several are not the same to the tower.
        self._features: OrderedDict[tuple[bytes, Grid], torch.Tensor] = OrderedDict()

    def get(self, item: MediaItem) -> torch.Tensor:
        """[M, hidden], computed on the first call. Raises whatever the vision tower raises."""
        key = item.content_hash, item.grid_thw
        features = self._features.get(key)
        if features is not None:
            self._features.move_to_end(key)
            return features
        features = self._embed(torch.from_numpy(np.ascontiguousarray(item.patches)), item.grid_thw)
        self._features[key] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes and len(self._features) > 1:
            _, evicted = self._features.popitem(last=False)
            self._num_bytes -= evicted.nbytes
        return features
