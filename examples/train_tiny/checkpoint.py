"""A checkpoint directory in the released format: small files, and weights under their released names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.train_tiny import recipe
from msaserve.models.loader import destinations
from msaserve.models.minimax_m3 import MiniMaxM3

HERE = Path(__file__).parent
MAX_SHARD_BYTES = 15 * 10**6


def write_small_files(directory: Path) -> None:
    """Everything but the weights. The tokenizer is the one beside this file."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(HERE / name, directory / name)
    _write(directory / "config.json", recipe.model_config())
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "]~!b[",
            "eos_token": "[e~[",
            "pad_token": "]!p~[",
            "unk_token": "]!d~[",
            "model_max_length": 262144,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(
        directory / "generation_config.json",
        {
            "bos_token_id": recipe.token_id("]~!b["),
            "eos_token_id": recipe.token_id("[e~["),
            "pad_token_id": recipe.token_id("]!p~["),
            "do_sample": False,
        },
    )
    _write(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": [672, 672],
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )


def export(model: MiniMaxM3, directory: Path) -> None:
    """Write the whole checkpoint, weights in bfloat16, in files of at most 15 MB."""
    write_small_files(directory)
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in destinations(model)}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
