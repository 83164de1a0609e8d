"""The golden checkpoints and what the reference implementation computes on them (tests/golden)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("tiny", "geometry")


def golden(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint directory, and the expected tensors by name.

    `text.input_ids`; at the positions `text.rows`: `text.logits`, `text.hidden.N` (output of layer N),
    `text.block_indices.N` [index heads, rows, top-k]; `text.greedy`: 24 greedy tokens after the first
    `text.greedy_prompt_len` tokens; `mm.*`: a prompt with one picture and one clip.
    """
    directory = GOLDEN / name
    return directory, load_file(directory / "expected.safetensors")


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """‖value − expected‖ / ‖expected‖."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())
