"""Changed copies of the tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from golden_data import GOLDEN
from safetensors.torch import load_file, save_file

Config = dict[str, Any]


def tiny_config() -> Config:
    config: Config = json.loads((GOLDEN / "tiny" / "config.json").read_text())
    return config


def released_spelling(config: Config) -> Config:
    """The same model in the released spelling of config.json."""
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    sparse = [int(kind == "minimax_m3_sparse") for kind in text.pop("layer_types")]
    text |= {
        "model_type": "minimax_m3",
        "hidden_act": "swigluoai",
        "rope_theta": rope["rope_theta"],
        "rotary_dim": text["head_dim"],
        "partial_rotary_factor": 1.0,
        "moe_layer_freq": [int(kind == "sparse") for kind in text.pop("mlp_layer_types")],
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "num_mtp_modules": 0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": text.pop("index_n_heads"),
            "sparse_index_dim": text.pop("index_head_dim"),
            "sparse_block_size": text.pop("index_block_size"),
            "sparse_topk_blocks": text.pop("index_topk_blocks"),
            "sparse_local_block": text.pop("index_local_blocks"),
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        },
    }
    vision = dict(config["vision_config"])
    vision |= {
        "model_type": "clip_vision_model",
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": vision.pop("rope_parameters")["rope_theta"],
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": vision.pop("spatial_merge_size"),
            "temporal_patch_size": vision.pop("temporal_patch_size"),
        },
    }
    return config | {"text_config": text, "vision_config": vision}


def write_config(directory: Path, config: Config) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def changed_tiny(
    directory: Path,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    change_config: Callable[[Config], None] = lambda config: None,
) -> Path:
    """Tiny's config and weights after `change_config` and `change`, written to `directory`."""
    config = tiny_config()
    change_config(config)
    write_config(directory, config)
    shutil.copy(GOLDEN / "tiny" / "generation_config.json", directory)
    tensors = load_file(GOLDEN / "tiny" / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def shard(directory: Path, num_shards: int) -> None:
    """Split model.safetensors over several files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
