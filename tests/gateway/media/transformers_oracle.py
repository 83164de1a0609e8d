"""Runs transformers' M3 processors on random pictures and clips without torchvision: transformers_oracle.py OUT.npz

The few functions they call of torchvision are given here, on top of the PyTorch function that torchvision itself calls.
Everything else is transformers' own code: sizes, order, rounding, normalisation, patches.
"""

from __future__ import annotations

import sys
import tempfile
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

NUM_PICTURES, NUM_CLIPS = 24, 6


def picture(number: int) -> np.ndarray:
    """uint8 [height, width, 3]"""
    rng = np.random.default_rng(number)
    height, width = (int(2 ** rng.uniform(3, 10)) for _ in range(2))
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pixels if number % 2 else (pixels > 127).astype(np.uint8) * 255


def clip(number: int) -> np.ndarray:
    """uint8 [frames, height, width, 3]"""
    rng = np.random.default_rng(1000 + number)
    height, width = (int(2 ** rng.uniform(5, 9)) for _ in range(2))
    return rng.integers(0, 256, (int(rng.integers(1, 12)), height, width, 3), dtype=np.uint8)


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(
    image: torch.Tensor, size: Any, interpolation: InterpolationMode, antialias: bool = True, **_: Any
) -> torch.Tensor:
    assert image.dtype == torch.uint8
    batch = image.reshape(-1, *image.shape[-3:]).contiguous(memory_format=torch.channels_last)
    out = torch.nn.functional.interpolate(
        batch, size=tuple(size), mode=interpolation.value, antialias=antialias, align_corners=False
    )
    return out.reshape(*image.shape[:-2], *out.shape[-2:])


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(x, dtype=image.dtype).view(-1, 1, 1) for x in (mean, std))
    return image.sub(mean).div_(std)


def provide_torchvision(directory: Path) -> None:
    functional: dict[str, Any] = {
        "InterpolationMode": InterpolationMode,
        "resize": resize,
        "normalize": normalize,
        "grayscale_to_rgb": lambda image: image,
        "pil_to_tensor": lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1),
    }
    names = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
    # transformers asks for the version that is installed.
    metadata = directory / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    sys.path.insert(0, str(directory))
    for name in names:
        module = ModuleType(f"torchvision{name}")
        module.__dict__.update(functional, __path__=[], __version__="0.28.0")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def main(out: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        provide_torchvision(Path(directory))
        np.savez(out, **results())


def results() -> dict[str, np.ndarray]:
    from PIL import Image
    from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import MiniMaxM3VLImageProcessor
    from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import MiniMaxM3VLVideoProcessor

    images, videos = MiniMaxM3VLImageProcessor(size=[672, 672]), MiniMaxM3VLVideoProcessor()
    arrays: dict[str, np.ndarray] = {}
    for i in range(NUM_PICTURES):
        batch = images(images=[Image.fromarray(picture(i))], return_tensors="pt")
        arrays[f"image{i}"] = batch["pixel_values"].numpy()
        arrays[f"image{i}.grid"] = batch["image_grid_thw"].numpy()
    for i in range(NUM_CLIPS):
        batch = videos(videos=[torch.from_numpy(clip(i)).permute(0, 3, 1, 2)], return_tensors="pt")
        arrays[f"video{i}"] = batch["pixel_values_videos"].numpy()
        arrays[f"video{i}.grid"] = batch["video_grid_thw"].numpy()
    return arrays


if __name__ == "__main__":
    main(sys.argv[1])
