"""The resize against the function that torchvision calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from msaserve.gateway.media.resample import Resize


def expected(planes: np.ndarray, height: int, width: int) -> np.ndarray:
    # Channels last: the other layout's kernel fails on outputs of one pixel.
    out = interpolate(
        torch.from_numpy(planes)[None].contiguous(memory_format=torch.channels_last),
        size=(height, width),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    return out[0].numpy()


def random_picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    planes = rng.integers(0, 256, (3, height, width), dtype=np.uint8)
    # Black and white overshoots most, flat areas show rounding.
    return [planes, (planes > 127).astype(np.uint8) * 255, planes // 4][rng.integers(3)]


@pytest.mark.parametrize("seed", range(8))
def test_random_sizes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        height, width, new_height, new_width = (int(2 ** rng.uniform(0, 9)) for _ in range(4))
        new_height = height if rng.random() < 0.1 else new_height
        new_width = width if rng.random() < 0.1 else new_width
        planes = random_picture(rng, height, width)
        out = Resize(height, width, new_height=new_height, new_width=new_width)(planes)
        np.testing.assert_array_equal(
            out, expected(planes, new_height, new_width), err_msg=f"{height}×{width} to {new_height}×{new_width}"
        )


@pytest.mark.parametrize(
    ("height", "width", "new_height", "new_width"),
    [(1080, 1920, 504, 896), (1500, 2000, 560, 756), (90, 5000, 28, 1036), (3000, 20, 812, 28), (2400, 40, 28, 28)],
)
def test_served_sizes(height: int, width: int, new_height: int, new_width: int) -> None:
    planes = random_picture(np.random.default_rng(height), height, width)
    resize = Resize(height, width, new_height=new_height, new_width=new_width)
    with ThreadPoolExecutor(2) as threads:
        np.testing.assert_array_equal(resize(planes, threads), expected(planes, new_height, new_width))


def test_extreme_shrink_switches_to_float64() -> None:
    planes = random_picture(np.random.default_rng(1), 40, 20_000)
    resize = Resize(40, 20_000, new_height=40, new_width=28)
    assert resize._rows is not None
    assert resize._rows.dtype == np.float64
    np.testing.assert_array_equal(resize(planes), expected(planes, 40, 28))


def test_same_size_is_the_input() -> None:
    planes = random_picture(np.random.default_rng(2), 28, 56)
    assert Resize(28, 56, new_height=28, new_width=56)(planes) is planes
