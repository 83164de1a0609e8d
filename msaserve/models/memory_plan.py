"""What serving a checkpoint takes and gives: bytes of weights and cache, tokens that fit. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msaserve.config import KVCacheDtype, ModelConfig, TextConfig
from msaserve.models.checkpoint import read_entries

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# The router is kept in float32 whatever the dtype (layers.moe.Router).
_FLOAT32_SUFFIXES = ("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias")


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes unless the name says otherwise."""

    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    """K and V of all layers."""
    index_bytes_per_token: int
    """Index-K of the sparse layers."""
    block_size: int
    budget_bytes: int
    """What the cache may take."""
    num_pages: int
    """Pages that the budget holds, the dummy page not counted."""
    max_model_len: int
    """Tokens of one request that the checkpoint was made for."""

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that fit, over all requests."""
        return self.num_pages * self.block_size

    @property
    def max_request_len(self) -> int:
        """Tokens, prompt and output, of the longest single request."""
        return min(self.max_cached_tokens, self.max_model_len)


def plan_memory(
    config: ModelConfig,
    dtype: Literal["float32", "bfloat16"],
    budget_bytes: int,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> MemoryPlan:
    """The plan for serving `config.directory` in `dtype` with `budget_bytes` for the cache.

    Raises:
        CheckpointError: the weight files cannot be read.
    """
    kv, index = cache_bytes_per_token(config.text, dtype, kv_cache_dtype)
    return MemoryPlan(
        dtype=dtype,
        weight_bytes=weight_bytes(config, dtype),
        kv_bytes_per_token=kv,
        index_bytes_per_token=index,
        block_size=config.text.block_size,
        budget_bytes=budget_bytes,
        num_pages=max(budget_bytes // cache_page_bytes(config.text, dtype, kv_cache_dtype) - 1, 0),
        max_model_len=config.max_model_len,
    )


def weight_bytes(config: ModelConfig, dtype: Literal["float32", "bfloat16"]) -> int:
    """Bytes of all weights in `dtype`, from the headers of the checkpoint's files.

    Raises:
        CheckpointError: they cannot be read.
    """
    size = _DTYPE_BYTES[dtype]
    return sum(
        entry.numel * (4 if name.endswith(_FLOAT32_SUFFIXES) else size)
        for name, entry in read_entries(config.directory).items()
    )


def cache_bytes_per_token(
    text: TextConfig, dtype: Literal["float32", "bfloat16"], kv_cache_dtype: KVCacheDtype = "auto"
) -> tuple[int, int]:
    """Bytes of K and V over all layers, and of index-K over the sparse layers, that one token takes."""
    size = _DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else 1
    kv = text.num_layers * 2 * text.num_kv_heads * text.head_dim * size
    return kv, len(text.sparse_layer_ids) * text.index_dim * size


def cache_page_bytes(
    text: TextConfig, dtype: Literal["float32", "bfloat16"], kv_cache_dtype: KVCacheDtype = "auto"
) -> int:
    """Bytes of one page over all planes."""
    return sum(cache_bytes_per_token(text, dtype, kv_cache_dtype)) * text.block_size
