"""config.json in both spellings, what is refused, and the defaults for generation."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import released_spelling, tiny_config, write_config
from msaserve.config import EngineConfig, GenerationDefaults, ModelConfig
from msaserve.errors import CheckpointError, InvalidRequestError, UnsupportedError
from msaserve.models.loader import destinations
from msaserve.models.minimax_m3 import MiniMaxM3

M3_TEXT = {
    "vocab_size": 200064,
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57},
}
"""Released fields without which M3's values are not implied."""


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    write_config(directory, config)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_checkpoint(directory)


def test_both_spellings_are_equal(tmp_path: Path) -> None:
    flat = read(tmp_path / "flat", tiny_config())
    released = read(tmp_path / "released", released_spelling(tiny_config()))
    assert flat == released
    assert flat.text.sparse_layer_ids == (1, 2, 3)
    assert flat.text.has_moe == (False, True, True, True)


def test_absent_fields_take_the_released_values(tmp_path: Path) -> None:
    config = read(tmp_path, {"model_type": "minimax_m3_vl", "text_config": M3_TEXT, "vision_config": {}})
    text, vision = config.text, config.vision
    assert (text.head_dim, text.rotary_dim, text.rope_theta) == (128, 64, 5e6)
    assert (text.num_index_heads, text.index_dim, text.block_size, text.topk_blocks) == (4, 128, 128, 16)
    assert (text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size) == (128, 4, 3072)
    assert text.sparse_layer_ids == tuple(range(3, 60))
    assert (config.image_token_id, config.video_token_id, config.max_model_len) == (200025, 200026, 524288)
    assert vision is not None
    assert (vision.patch_dim, vision.head_dim, vision.num_merged_patches) == (1176, 80, 4)


def test_rotated_share_of_the_head(tmp_path: Path) -> None:
    def rotary_dim(**changes: Any) -> int:
        text = {k: v for k, v in (M3_TEXT | changes).items() if v is not None}
        return read(tmp_path, {"model_type": "minimax_m3_vl", "text_config": text}).text.rotary_dim

    assert rotary_dim(partial_rotary_factor=None) == 64
    assert rotary_dim(rotary_dim=None, partial_rotary_factor=0.25) == 32
    # Flat: rope_parameters alone decides, as in the reference.
    assert rotary_dim(partial_rotary_factor=None, rope_parameters={"rope_theta": 1e4}) == 128
    assert rotary_dim(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}) == 32
    with pytest.raises(CheckpointError, match="rotary_dim 64 contradicts"):
        rotary_dim(partial_rotary_factor=0.25)


def test_released_sizes_make_as_many_parameters_as_in_transformers(tmp_path: Path) -> None:
    config = read(tmp_path, {"model_type": "minimax_m3_vl", "text_config": M3_TEXT, "vision_config": {}})
    with torch.device("meta"):
        model = MiniMaxM3(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == 427_040_140_160
    last_expert = "language_model.model.layers.59.block_sparse_moe.experts.127.w2.weight"
    assert dict(destinations(model))[last_expert].shape == (6144, 3072)


def test_use_sparse_attention_false_is_dense(tmp_path: Path) -> None:
    config = released_spelling(tiny_config())
    config["text_config"]["sparse_attention_config"]["use_sparse_attention"] = False
    assert read(tmp_path, config).text.sparse_layer_ids == ()


def in_text(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"].update(fields)


def in_sparse(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"]["sparse_attention_config"].update(fields)


def in_vision(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["vision_config"].update(fields)


UNSUPPORTED = [
    (in_sparse(sparse_init_block=1), "sparse_init_block = 1"),
    (in_sparse(sparse_score_type="mean"), "sparse_score_type = 'mean'"),
    (in_sparse(sparse_disable_index_value=[0, 1, 0, 1]), r"layers \[2\]"),
    (in_sparse(sparse_num_index_heads=4), "4 index heads on 2 KV heads"),
    (in_text(attention_output_gate=True), "attention_output_gate = True"),
    (in_text(use_qk_norm=False), "use_qk_norm = False"),
    (in_text(scoring_func="softmax"), "scoring_func = 'softmax'"),
    (in_text(n_shared_experts=2), "n_shared_experts = 2"),
    (in_text(rope_scaling={"type": "yarn", "factor": 4}), "yarn"),
    (in_text(mlp_layer_types=["dense", "sparse", "sparse", "odd"]), "'odd'"),
    (in_vision(rope_mode="2d"), "rope_mode = '2d'"),
    (in_vision(hidden_act="silu"), "hidden_act = 'silu'"),
]


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED, ids=[message for _, message in UNSUPPORTED])
def test_unsupported_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    config = released_spelling(tiny_config())
    change(config)
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, r"fp8 \(quant_method fp8, fmt e4m3"),
    ],
)
@pytest.mark.parametrize("place", ["config", "text_config", "hf_quant_config.json"])
def test_quantised_is_refused_by_scheme(tmp_path: Path, scheme: dict[str, Any], message: str, place: str) -> None:
    config = tiny_config()
    if place == "hf_quant_config.json":
        (tmp_path / place).write_text(json.dumps({"quantization": scheme}))
    else:
        (config if place == "config" else config["text_config"])["quantization_config"] = scheme
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(model_type="llama"), "model_type is 'llama'"),
        (lambda c: c.pop("text_config"), "text_config must be an object"),
        (in_text(hidden_size="96"), "hidden_size must be a whole number"),
        (in_text(num_hidden_layers=0), "num_hidden_layers"),
        (lambda c: c["text_config"].pop("vocab_size"), "vocab_size"),
        (in_text(num_attention_heads=7), "7 query heads"),
        (in_text(layer_types=["full_attention"]), "layer_types must list 4 layers"),
        (in_text(num_experts_per_tok=9), "9 experts per token of 8"),
        (in_text(rms_norm_eps="small"), "rms_norm_eps must be a number"),
        (in_text(rms_norm_eps=float("nan")), "rms_norm_eps must be a number"),
        (in_text(partial_rotary_factor="half", rope_parameters=None), "partial_rotary_factor must be a number"),
        (in_vision(num_attention_heads=5), "does not split into 5 heads"),
        (in_text(eos_token_id="</s>"), "eos_token_id"),
    ],
)
def test_invalid_config_says_what(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    config = tiny_config()
    change(config)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config)


ODD_VALUES = [None, "x", "", -1, 0, 1, 1.5, [], [1], [None], {}, {"a": 1}, True, False, 10**30, math.nan, math.inf]


def test_every_field_of_another_type_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of any field, and of none that is optional, brings another error than ours."""
    config: dict[str, Any] = tiny_config()
    read(tmp_path, config)
    # Thousands of files would take seconds.
    monkeypatch.setattr("msaserve.config.read_json", lambda path: config if path.name == "config.json" else {})
    optional = {"rope_parameters": None, "rope_scaling": None, "img_token_compression_config": None}
    num_refused = 0
    for spelled in (tiny_config(), released_spelling(tiny_config())):
        for section in (None, "text_config", "vision_config"):
            fields = {**optional, **(spelled if section is None else spelled[section])}
            for field, value in itertools.product(fields, ODD_VALUES):
                config = copy.deepcopy(spelled)
                (config if section is None else config[section])[field] = value
                try:
                    ModelConfig.from_checkpoint(tmp_path)
                except CheckpointError:
                    num_refused += 1
    assert num_refused > 500


def test_missing_directory_and_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelConfig.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        ModelConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, GenerationDefaults(eos_token_ids=(2,))),
        ({"eos_token_id": [5, 6]}, GenerationDefaults(eos_token_ids=(5, 6))),
        ({"eos_token_id": 0, "do_sample": False, "temperature": 0.7}, GenerationDefaults(0.0, eos_token_ids=(0,))),
        (
            {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1},
            GenerationDefaults(0.9, 0.95, 40, repetition_penalty=1.1, eos_token_ids=(2,)),
        ),
        ({"top_p": 0.5, "top_k": -1, "min_p": 0.1}, GenerationDefaults(1.0, 0.5, 0, 0.1, eos_token_ids=(2,))),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any] | None, expected: GenerationDefaults) -> None:
    assert read(tmp_path, tiny_config(), generation).generation == expected


@pytest.mark.parametrize("field", ["max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_gib"])
def test_engine_config_refuses_what_cannot_run(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} must be positive"):
        EngineConfig(**{field: 0})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "float16", "dtype must be one of auto, float32, bfloat16, not 'float16'"),
        ("device", "tpu", "device must be one of auto, cpu, cuda, not 'tpu'"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype must be one of auto, fp8_e4m3"),
        ("kv_cache_gib", math.inf, "kv_cache_gib must be finite"),
        ("kv_cache_gib", math.nan, "kv_cache_gib must be positive"),
    ],
)
def test_engine_config_names_what_there_is(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        EngineConfig(**{field: value})
    assert EngineConfig(device="cuda:1").device == "cuda:1"  # type: ignore[arg-type]


def test_cache_size_in_bytes() -> None:
    assert EngineConfig().kv_cache_bytes is None
    assert EngineConfig(kv_cache_gib=0.5).kv_cache_bytes == 2**29
