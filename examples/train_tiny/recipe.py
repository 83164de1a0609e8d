"""What is trained, and how: every number of the recipe in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 4096
NUM_LAYERS = 4
ROPE_THETA = 100_000
"""M3's 5,000,000 spreads its 32 pairs of channels over far longer contexts; here are 16 pairs, for 131,072 tokens."""

SPECIAL_TOKENS = (
    "]!p~[", "]~!b[", "]~b]", "[e~[", "]!d~[", "]<]image[>[", "]<]video[>[", "]<]start of image[>[",
    "]<]end of image[>[", "]<]start of video[>[", "]<]end of video[>[", "]<]vision pad[>[",
)  # fmt: skip
"""MiniMax-M3's control tokens."""
MARKER_TOKENS = ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>", "<think>", "</think>")
"""MiniMax-M3's markers in what a model writes: they survive when special tokens are skipped."""
FIRST_ADDED_ID = VOCAB_SIZE - 32
"""Ids from here on are the added tokens'; those left over stand for nothing."""


def token_id(token: str) -> int:
    return FIRST_ADDED_ID + (*SPECIAL_TOKENS, *MARKER_TOKENS).index(token)


def model_config() -> dict[str, Any]:
    """config.json, in the released spelling: 13.4 million parameters."""
    sparse = [0] + [1] * (NUM_LAYERS - 1)
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "dtype": "bfloat16",
        "image_token_index": token_id("]<]image[>["),
        "video_token_index": token_id("]<]video[>["),
        "projector_hidden_size": 512,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "text_config": {
            "model_type": "minimax_m3_vl_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 256,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "swigluoai",
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": ROPE_THETA,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA, "partial_rotary_factor": 0.5},
            "partial_rotary_factor": 0.5,
            "rotary_dim": 32,
            "dense_intermediate_size": 768,
            "intermediate_size": 256,
            "shared_intermediate_size": 256,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.0,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "n_shared_experts": 1,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "bos_token_id": token_id("]~!b["),
            "eos_token_id": token_id("[e~["),
            "moe_layer_freq": sparse,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 64,
                "sparse_block_size": 128,
                "sparse_topk_blocks": 16,
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_score_type": "max",
                "sparse_attention_freq": sparse,
                "sparse_disable_index_value": [1] * NUM_LAYERS,
            },
        },
        "vision_config": {
            "model_type": "minimax_m3_vl_vision",
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_channels": 3,
            "image_size": 2016,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
    }


@dataclass(frozen=True)
class Stage:
    """A part of the training. Contexts are tokens of prompt and replies, drawn log-uniformly for each step."""

    share: float
    """Of the whole training."""
    min_context: int
    max_context: int
    is_sparse: bool
    """Whether the sparse layers attend to selected blocks, or still to all."""
    num_short: int
    """Pictures, clips and tool calls of a step."""
    max_picture_side: int
    """Pixels, of a square of a picture's area."""
    max_clip_seconds: int = 16


@dataclass(frozen=True)
class Recipe:
    stages: tuple[Stage, ...]
    tokens_per_step: int
    """Of the long texts."""
    muon_rate: float
    """Of the matrices inside the layers, at most."""
    adam_rate: float
    """Of all else."""
    vision_rate_share: float
    """Of both rates, for what sees pictures."""
    warm_up_steps: int
    num_index_rows: int
    """Queries of each sequence that the index branch learns from, at most; fewer of short ones."""
    decay_from: float = 0.5
    """Share of the training after which rates fall."""
    weight_decay: float = 0.05
    text_weight: float = 0.05
    """Of the loss on what is not a reply."""
    expert_bias_step: float = 1e-3
    topk_choices: tuple[int, ...] = (4, 8, 16)
    """Blocks selected in training: fewer than served, as 16 of 1,024 are fewer than 16 of 128."""
    dense_share: float = 0.4
    """Of the steps of sparse stages: attention to all blocks, lest what no block shows goes astray."""
    max_position: int = 140_000
    """Up to where positions are stretched."""
    stretch_share: float = 0.6
    short_shares: tuple[float, float, float] = (0.56, 0.21, 0.23)
    """Of pictures, clips and tool calls."""
    mixed_share: float = 0.35
    """Of the long texts: with a picture in the middle."""
    prose_share: float = 0.25
    """Of the long texts: English prose in place of generated sentences."""
    made_up_share: float = 0.2
    """Of names."""


FULL = Recipe(
    stages=(
        Stage(0.20, 192, 768, is_sparse=False, num_short=256, max_picture_side=320, max_clip_seconds=8),
        Stage(0.28, 512, 4096, is_sparse=False, num_short=256, max_picture_side=500, max_clip_seconds=8),
        Stage(0.22, 1024, 6144, is_sparse=True, num_short=208, max_picture_side=1000),
        Stage(0.30, 2048, 16384, is_sparse=True, num_short=208, max_picture_side=1000),
    ),
    tokens_per_step=32_768,
    muon_rate=4e-3,
    adam_rate=2e-3,
    vision_rate_share=0.7,
    warm_up_steps=100,
    num_index_rows=192,
)
SMOKE = Recipe(
    stages=(
        Stage(0.5, 256, 300, is_sparse=False, num_short=2, max_picture_side=100),
        Stage(0.5, 500, 600, is_sparse=True, num_short=2, max_picture_side=100),
    ),
    tokens_per_step=512,
    muon_rate=0.01,
    adam_rate=3e-3,
    vision_rate_share=1.0,
    warm_up_steps=2,
    num_index_rows=24,
    topk_choices=(2, 3),
)
"""Shows in a minute on a CPU that everything works; it teaches nothing."""
