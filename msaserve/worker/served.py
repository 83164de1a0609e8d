"""What a worker says of itself: the checkpoint it serves and the engine's bounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msaserve import pixels
from msaserve.config import GenerationDefaults, ModelConfig
from msaserve.engine.engine import Engine
from msaserve.errors import CheckpointError
from msaserve.fields import read_json
from msaserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    name: str
    """What clients call it."""
    config: ModelConfig
    tokenizer: Tokenizer | None
    """For prompts and stop strings that come as text; None if the checkpoint has none."""
    architectures: tuple[str, ...]
    dtype: str
    kv_cache_dtype: str
    """auto if the cache has the weights' dtype."""
    block_size: int
    max_num_seqs: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @classmethod
    def of(cls, engine: Engine, *, name: str | None = None) -> ServedModel:
        """name: default: the checkpoint directory's.

        Raises:
            CheckpointError: the tokenizer or preprocessor_config.json cannot be read.
        """
        directory = engine.config.directory
        dtype, cache_dtype = (str(x).removeprefix("torch.") for x in (engine.runner.dtype, engine.runner.cache.dtype))
        preprocessor = read_json(directory / "preprocessor_config.json")
        return cls(
            name=name or directory.resolve().name,
            config=engine.config,
            tokenizer=Tokenizer.load(directory) if (directory / "tokenizer.json").exists() else None,
            architectures=tuple(read_json(directory / "config.json").get("architectures") or ()),
            dtype=dtype,
            kv_cache_dtype="auto" if cache_dtype == dtype else {"float8_e4m3fn": "fp8_e4m3"}[cache_dtype],
            block_size=engine.scheduler.config.block_size,
            max_num_seqs=engine.scheduler.config.max_num_seqs,
            image_mean=_statistics(preprocessor, "image_mean", pixels.IMAGE_MEAN),
            image_std=_statistics(preprocessor, "image_std", pixels.IMAGE_STD),
        )

    @property
    def directory(self) -> Path:
        return self.config.directory

    def normalize(self, patches: np.ndarray) -> np.ndarray:
        """uint8 patches to float32."""
        return pixels.normalize(patches, self.image_mean, self.image_std)

    def tokenize(self, text: str) -> Sequence[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=True)

    def default_sampling_json(self) -> str:
        """What the checkpoint wants where it differs from OpenAI's defaults, by the names of the API."""
        given, neutral = self.config.generation, GenerationDefaults()
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        values = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(neutral, name)}
        return json.dumps(values) if values else ""


def _statistics(preprocessor: dict[str, Any], name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = preprocessor.get(name, default)
    if len(values) != len(default) or not all(isinstance(value, (int, float)) for value in values):
        raise CheckpointError(f"preprocessor_config.json: {name} must have three numbers, not {values!r}")
    return tuple(float(value) for value in values)
