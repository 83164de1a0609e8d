"""Antialiased bicubic resize of uint8 pictures, bit for bit what PyTorch computes (and torchvision asks of it).

Two passes, along rows and then along columns, each in integers: weights are int16 with as many fractional bits as the
largest weight of the axis leaves room for, sums are rounded to uint8 in between. Pillow keeps 22 fractional bits
instead, so its pictures differ by a level here and there. A pass is a banded matrix product, and a banded matrix is
cut into dense blocks: BLAS multiplies them in float32 while every sum stays below 2^24, in float64 beyond, so the
integers come out exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

_BLOCK = 16
"""Outputs of a dense block: fewer waste less on zeros, more let BLAS run longer."""
_STRIP_BYTES = 2**22
"""Picture rows converted to floats at a time: they stay in the cache."""
_LARGE = 1_000_000
"""Pixels from which threads pay."""
_MAX_PRECISION = 22


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    """The outputs: start ≤ o < stop."""
    low: int
    high: int
    """The inputs they read: low ≤ i < high."""
    weights: np.ndarray
    """[stop − start, high − low], whole numbers."""


class _Axis:
    """How `size_in` samples become `size_out`."""

    def __init__(self, size_in: int, size_out: int) -> None:
        low, taps, weights = _float_weights(size_in, size_out)
        precision = 0
        while precision < _MAX_PRECISION and int(0.5 + weights.max() * (1 << (precision + 1))) < 1 << 15:
            precision += 1
        whole = np.trunc(weights * (1 << precision) + np.where(weights < 0, -0.5, 0.5))
        # Inputs are shifted to −128 … 127: one bit less to carry.
        self.dtype = np.dtype(np.float32 if np.abs(whole).sum(1).max() * 128 < 1 << 24 else np.float64)
        self.bias = (128 * whole.sum(1) + (1 << precision >> 1)).astype(self.dtype)
        self.scale = self.dtype.type(2.0**-precision)
        self.blocks = tuple(self._blocks(low, taps, whole))

    def _blocks(self, low: np.ndarray, taps: np.ndarray, whole: np.ndarray) -> list[_Block]:
        blocks = []
        for start in range(0, len(low), _BLOCK):
            stop = min(start + _BLOCK, len(low))
            first, last = int(low[start]), int((low + taps)[start:stop].max())
            weights = np.zeros((stop - start, last - first), self.dtype)
            for o in range(start, stop):
                weights[o - start, low[o] - first : low[o] - first + taps[o]] = whole[o, : taps[o]]
            blocks.append(_Block(start, stop, first, last, weights))
        return blocks

    def round(self, sums: np.ndarray, bias: np.ndarray) -> np.ndarray:
        """Sums over shifted inputs to pixels. Overwrites `sums`."""
        sums += bias
        sums *= self.scale
        np.clip(sums, 0, 255, out=sums)
        return sums.astype(np.uint8)  # truncation is the arithmetic shift's floor: nothing is negative any more


class Resize:
    """Pictures of one size to another; made once for all frames of a clip.

    Sizes are in pixels, all at least 1.
    """

    def __init__(self, height: int, width: int, *, new_height: int, new_width: int) -> None:
        assert min(height, width, new_height, new_width) >= 1
        self._shape = (height, width)
        self._rows = _Axis(width, new_width) if width != new_width else None
        self._columns = _Axis(height, new_height) if height != new_height else None

    def __call__(self, planes: np.ndarray, threads: Executor | None = None) -> np.ndarray:
        """planes: [C, height, width] uint8. Returns [C, new_height, new_width]; the input itself if sizes agree.

        threads: where the parts of a large picture are computed side by side.
        """
        assert planes.dtype == np.uint8
        assert planes.shape[1:] == self._shape
        if self._rows is None and self._columns is None:
            return planes
        each = threads.map if threads is not None and planes[0].size >= _LARGE else map
        middle = planes if self._rows is None else _resize_rows(planes, self._rows, each)
        if self._columns is None:
            return middle
        axis = self._columns
        return np.stack(list(each(lambda plane: _resize_columns(plane, axis), middle)))


def _resize_rows(planes: np.ndarray, axis: _Axis, each: Callable[..., Iterable[Any]]) -> np.ndarray:
    channels, height, width = planes.shape
    out = np.empty((channels, height, len(axis.bias)), np.uint8)
    size = max(_STRIP_BYTES // (width * axis.dtype.itemsize), 16)

    def resize_strip(place: tuple[int, int]) -> None:
        channel, top = place
        shifted = _shift(planes[channel, top : top + size]).astype(axis.dtype)
        sums = np.empty((len(shifted), len(axis.bias)), axis.dtype)
        for block in axis.blocks:
            np.matmul(shifted[:, block.low : block.high], block.weights.T, out=sums[:, block.start : block.stop])
        out[channel, top : top + size] = axis.round(sums, axis.bias)

    list(each(resize_strip, [(c, top) for c in range(channels) for top in range(0, height, size)]))
    return out


def _resize_columns(plane: np.ndarray, axis: _Axis) -> np.ndarray:
    out = np.empty((len(axis.bias), plane.shape[1]), np.uint8)
    shifted = _shift(plane).astype(axis.dtype)
    for block in axis.blocks:
        sums = block.weights @ shifted[block.low : block.high]
        out[block.start : block.stop] = axis.round(sums, axis.bias[block.start : block.stop, None])
    return out


def _shift(pixels: np.ndarray) -> np.ndarray:
    """uint8 − 128 as int8."""
    return (pixels ^ np.uint8(0x80)).view(np.int8)


def _float_weights(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First input [out], number of taps [out] and normalised weights [out, max taps] of every output, in float64."""
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    center = scale * (np.arange(size_out) + 0.5)
    low = np.maximum((center - support + 0.5).astype(np.int64), 0)
    taps = np.minimum((center + support + 0.5).astype(np.int64), size_in) - low
    taps = np.minimum(taps, int(np.ceil(support)) * 2 + 1)
    tap = np.arange(taps.max())
    weights = _cubic((tap + low[:, None] - center[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= taps[:, None]] = 0.0
    # Summed one after another, as a scalar loop does: pairwise sums could round a weight the other way.
    return low, taps, weights / np.cumsum(weights, axis=1)[:, -1:]


def _cubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
