"""The plan's bytes are the bytes that loading and serving really take."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from golden_data import NAMES, golden
from paged_driver import make_cache
from planes import page_bytes

from msaserve.config import ModelConfig
from msaserve.models.loader import load_model
from msaserve.models.memory_plan import cache_bytes_per_token, cache_page_bytes, plan_memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_plan_is_what_loading_takes(name: str, dtype: str) -> None:
    directory, _ = golden(name)
    model = load_model(directory, dtype=getattr(torch, dtype))
    plan = plan_memory(model.config, dtype, 64 * 2**20)
    assert plan.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    cache = make_cache(model, 3)
    num_bytes = page_bytes(cache)
    assert num_bytes == cache_page_bytes(model.config.text, dtype)
    # The dummy page is paid for, too.
    assert (plan.num_pages + 1) * num_bytes <= plan.budget_bytes < (plan.num_pages + 2) * num_bytes
    assert plan.max_cached_tokens == plan.num_pages * model.config.text.block_size


def test_longest_request() -> None:
    config = ModelConfig.from_checkpoint(golden("tiny")[0])
    assert plan_memory(config, "float32", 0).max_request_len == 0
    assert (
        plan_memory(config, "float32", 2**24).max_request_len == plan_memory(config, "float32", 2**24).max_cached_tokens
    )
    short = replace(config, text=replace(config.text, max_position_embeddings=100))
    assert plan_memory(short, "float32", 2**24).max_request_len == 100


def test_m3_bytes_per_token() -> None:
    """60 layers of 2,048 B, 57 of them sparse with 256 B of index-K."""
    text = replace(
        ModelConfig.from_checkpoint(golden("tiny")[0]).text,
        num_layers=60,
        num_kv_heads=4,
        head_dim=128,
        index_dim=128,
        has_sparse_attention=(False,) * 3 + (True,) * 57,
    )
    assert cache_bytes_per_token(text, "bfloat16") == (60 * 2048, 57 * 256)


def test_planning_loads_no_torch() -> None:
    code = (
        "import json, sys\n"
        "from msaserve.config import ModelConfig\n"
        "from msaserve.models.memory_plan import plan_memory\n"
        "plan = plan_memory(ModelConfig.from_checkpoint(sys.argv[1]), 'float32', 2**20)\n"
        "print(json.dumps([plan.num_pages, 'torch' in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(golden("tiny")[0])], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == [25, False]
