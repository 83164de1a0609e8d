"""Whether a model's sparse layers run on our operators. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msaserve.integrations import cards

KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
INDEX_DTYPES = ("bf16", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class Setting:
    """What the decision depends on."""

    forced: bool
    """MSASERVE_VLLM=1: other cards than Hopper's too."""
    capability: tuple[int, int]
    triton: str | None
    """Its version; None without one."""
    kv_dtype: str
    """As --kv-cache-dtype names it."""
    index_dtype: str
    """As attention_config.indexer_kv_dtype names it."""
    group: int
    """Query heads to a KV head, of one card's."""
    head_dim: int
    sparse: Mapping[str, Any]
    """The model's sparse_attention_config."""

    def why_stock(self) -> str | None:
        """Why vLLM's own kernels run; None if ours do."""
        if self.kv_dtype not in KV_DTYPES:
            return f"the KV cache is {self.kv_dtype}, not one of {', '.join(KV_DTYPES)}"
        if self.index_dtype not in INDEX_DTYPES:
            return f"the index cache is {self.index_dtype}, not one of {', '.join(INDEX_DTYPES)}"
        reason = cards.why_not(
            self.capability,
            triton=self.triton,
            has_8_bits="fp8" in self.kv_dtype + self.index_dtype,
            is_forced=self.forced,
            switch="MSASERVE_VLLM",
        )
        if reason is not None:
            return reason
        topk, local = self.sparse["sparse_topk_blocks"], self.sparse.get("sparse_local_block", 0)
        reason = cards.why_not_shape(topk=topk, local_blocks=local, group=self.group)
        if reason is not None:
            return reason
        if self.sparse.get("sparse_init_block", 0) != 0:
            return f"sparse_init_block is {self.sparse['sparse_init_block']}, not 0"
        if self.sparse.get("sparse_score_type", "max") != "max":
            return f"sparse_score_type is {self.sparse['sparse_score_type']!r}, not 'max'"
        sizes = (self.head_dim, self.sparse["sparse_block_size"], self.sparse["sparse_index_dim"])
        if sizes != (128, 128, 128):
            return f"head_dim, sparse_block_size and sparse_index_dim are {sizes}, not all 128"
        return None
