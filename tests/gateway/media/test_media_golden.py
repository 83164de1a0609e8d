"""Patches against what transformers' processor computed (tests/golden_processor), and computes on random sizes."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers_oracle
from PIL import Image
from samples import GOLDEN_PROCESSOR

from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.resample import Resize
from msaserve.gateway.media.spec import Hints, normalize, to_patches
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec

SPEC = MiniMaxM3Spec()
PICTURES = sorted(p for p in GOLDEN_PROCESSOR.glob("*.npz") if p.with_suffix(".png").exists())
CLIPS = sorted(p for p in GOLDEN_PROCESSOR.glob("video_*.npz"))


def test_all_files_are_there() -> None:
    assert len(PICTURES) == 10
    assert len(CLIPS) == 3


@pytest.mark.parametrize("path", PICTURES, ids=lambda p: p.stem)
def test_picture(path: Path) -> None:
    item = prepare("image", path.with_suffix(".png").read_bytes(), Hints(), SPEC, MediaLimits())
    check(path, item.patches, item.grid_thw)
    digest = hashlib.sha256(np.asarray(item.grid_thw, np.int64).tobytes() + item.patches.tobytes())
    assert item.content_hash == digest.digest()


@pytest.mark.parametrize("path", CLIPS, ids=lambda p: p.stem)
def test_clip(path: Path) -> None:
    frames = np.load(path)["frames"].transpose(0, 3, 1, 2)
    count, _, height, width = frames.shape
    new_height, new_width = SPEC.video_size(count, height, width, Hints())
    resize = Resize(height, width, new_height=new_height, new_width=new_width)
    patches, grid = to_patches(np.stack([resize(np.ascontiguousarray(frame)) for frame in frames]), SPEC)
    check(path, patches, grid)


def check(path: Path, patches: np.ndarray, grid: tuple[int, int, int]) -> None:
    golden = np.load(path)
    assert [list(row) for row in SPEC.grid_rows(grid)] == golden["grid_thw"].tolist()
    assert len(patches) == golden["n_patches"]
    values = normalize(patches, SPEC)
    rows = values[golden["rows"]]
    # Undo the normalisation of the golden rows: the pixels must be the same whole numbers.
    mean, std = (np.repeat(np.float64(x), patches.shape[1] // 3) * 255 for x in (SPEC.image_mean, SPEC.image_std))
    pixels = golden["patches"] * std + mean
    assert np.abs(pixels - np.round(pixels)).max() < 1e-3
    np.testing.assert_array_equal(patches[golden["rows"]], np.round(pixels))
    np.testing.assert_array_max_ulp(rows, golden["patches"], maxulp=1)
    np.testing.assert_allclose(values.mean(1), golden["row_mean"], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What the installed transformers computes, in a process of its own: it is given a torchvision that is none."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    out = tmp_path_factory.mktemp("oracle") / "out.npz"
    subprocess.run([sys.executable, transformers_oracle.__file__, str(out)], check=True)
    return dict(np.load(out))


@pytest.mark.parametrize("number", range(transformers_oracle.NUM_PICTURES))
def test_random_picture_against_transformers(oracle: dict[str, np.ndarray], number: int) -> None:
    buffer = io.BytesIO()
    Image.fromarray(transformers_oracle.picture(number)).save(buffer, "PNG", compress_level=1)
    item = prepare("image", buffer.getvalue(), Hints(), SPEC, MediaLimits())
    assert [list(item.grid_thw)] == oracle[f"image{number}.grid"].tolist()
    np.testing.assert_array_equal(normalize(item.patches, SPEC), oracle[f"image{number}"])


@pytest.mark.parametrize("number", range(transformers_oracle.NUM_CLIPS))
def test_random_clip_against_transformers(oracle: dict[str, np.ndarray], number: int) -> None:
    frames = transformers_oracle.clip(number).transpose(0, 3, 1, 2)
    count, _, height, width = frames.shape
    new_height, new_width = SPEC.video_size(count, height, width, Hints())
    resize = Resize(height, width, new_height=new_height, new_width=new_width)
    patches, grid = to_patches(np.stack([resize(np.ascontiguousarray(frame)) for frame in frames]), SPEC)
    assert [list(row) for row in SPEC.grid_rows(grid)] == oracle[f"video{number}.grid"].tolist()
    np.testing.assert_array_equal(normalize(patches, SPEC), oracle[f"video{number}"])
