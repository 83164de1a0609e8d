"""Fresh random models against transformers' implementation, which also writes the checkpoint that is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_data import relative_error
from paged_driver import Driver

from msaserve.config import ModelConfig
from msaserve.models.loader import load_model

transformers = pytest.importorskip("transformers", minversion="5.24")

TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 24,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
VISION = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "as in M3": {},
    "group of one, index heads shared by KV heads": {
        "num_key_value_heads": 4,
        "index_n_heads": 2,
        "index_topk_blocks": 2,
        "index_block_size": 4,
    },
    "two local blocks, whole head rotated": {
        "index_local_blocks": 2,
        "index_block_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "one KV head, wide index, tied embeddings, other constants": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "index_n_heads": 1,
        "index_head_dim": 32,
        "tie_word_embeddings": True,
        "swiglu_limit": 0.3,
        "swiglu_alpha": 1.1,
        "routed_scaling_factor": 0.7,
        "rms_norm_eps": 1e-3,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["sparse", "sparse", "dense"],
    },
    "selection larger than the prompt, three axes of vision heads of 22": {"index_topk_blocks": 64, "vision_heads": 22},
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """transformers' model with random weights that matter everywhere, and the checkpoint it wrote."""
    from transformers.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

    changes = dict(request.param)
    vision = dict(VISION, hidden_size=2 * changes.pop("vision_heads", 20))
    config = MiniMaxM3VLConfig(
        text_config=TEXT | changes,
        vision_config=vision,
        image_token_index=90,
        video_token_index=91,
        projector_hidden_size=36,
        tie_word_embeddings=bool(changes.get("tie_word_embeddings", False)),
    )
    config._attn_implementation = "eager"
    model = MiniMaxM3SparseForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                fan_in = tensor[0].numel() if tensor.ndim > 1 else 10
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * fan_in**-0.5)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_text_and_vision(case: tuple[Any, Path]) -> None:
    oracle, directory = case
    model = load_model(directory)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 90, (75,), generator=generator)
    with torch.no_grad():
        expected = oracle(input_ids=tokens[None]).logits[0]
    whole = Driver(model, [75]).run(tokens)
    assert relative_error(model.logits(whole), expected) < 2e-5
    chunked = Driver(model, [75], seed=2).run(tokens, chunk=13)
    assert relative_error(model.logits(chunked), expected) < 2e-5

    grid = [(1, 4, 6), (3, 2, 4), (2, 2, 2)]
    patches = torch.randn(24 + 24 + 8, 3 * 2 * 4 * 4, generator=generator)
    with torch.no_grad():
        features = oracle.model.get_image_features(patches, torch.tensor(grid)).pooler_output
    assert relative_error(model.embed_media(patches, grid), torch.cat(list(features))) < 2e-5


def test_written_config_is_read_whole(case: tuple[Any, Path]) -> None:
    oracle, directory = case
    text, config = oracle.config.text_config, ModelConfig.from_checkpoint(directory)
    assert config.eos_token_ids == (2, 3)
    assert (config.image_token_id, config.video_token_id) == (90, 91)
    assert [config.text.num_heads, config.text.num_kv_heads] == [text.num_attention_heads, text.num_key_value_heads]
    assert config.text.tie_word_embeddings == text.tie_word_embeddings
    assert [config.text.topk_blocks, config.text.local_blocks] == [text.index_topk_blocks, text.index_local_blocks]
