"""Patches of pixels to what a vision tower takes. One rule for whoever applies it: the gateway or the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
"""CLIP's, red, green, blue, of values within 0 … 1."""
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)


def normalize(patches: np.ndarray, mean: Sequence[float] = IMAGE_MEAN, std: Sequence[float] = IMAGE_STD) -> np.ndarray:
    """uint8 patches [N, channels · values] to float32: (x − 255·mean) / (255·std), each step rounded as transformers
    rounds it.
    """
    scale = np.float32(1.0 / (1.0 / 255.0))
    per_channel = patches.shape[1] // len(mean)
    out = patches.astype(np.float32)
    out -= np.repeat(np.asarray(mean, np.float32) * scale, per_channel)
    out /= np.repeat(np.asarray(std, np.float32) * scale, per_channel)
    return out
