"""The two implementations that vLLM's MiniMax-M3 layers are given. Imports vLLM's model code.

A layer calls its indexer and then its attention. Ours do both in the second call: then one operator sees all of it, and
the buffer of block ids that vLLM's own two share, and some of its releases misread, is not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common import indexer, sparse_attention

from msaserve import ops
from msaserve.integrations.vllm import tensors


class MsaIndexer(indexer.MiniMaxM3IndexerTritonImpl):  # type: ignore[misc]
    """Keeps the index cache, and the step's index queries until MsaAttend takes them."""

    index_query: torch.Tensor | None = None

    def forward(self, index_query: torch.Tensor, **_: object) -> tuple[None, None]:
        """index_query: [padded T, Hkv · Di]. Returns no selections; the layer asks for none."""
        self.index_query = index_query
        return None, None


class MsaAttend(sparse_attention.MiniMaxM3SparseTritonImpl):  # type: ignore[misc]
    """Selects blocks and attends to them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets = tensors.QueryOffsets()

    def forward(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """query, output: [padded T, Hq · D]. Writes output, whose padding rows it leaves alone, and returns it.

        No scale is applied to 8-bit caches: vLLM's kernel that fills them applies none.
        """
        index = layer.indexer.impl
        index_query, index.index_query = index.index_query, None
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return output  # the run that measures memory has no caches
        metadata, index_metadata = attn_metadata[layer.layer_name], attn_metadata[index.index_cache.prefix]
        num_tokens = metadata.num_actual_tokens
        q = query[:num_tokens].view(-1, self.num_heads, self.head_size)
        out = output[:num_tokens].view(-1, self.num_heads, self.head_size)
        index_q = index_query[:num_tokens].view(-1, index.num_index_heads, index.index_head_dim)
        k_cache, v_cache = tensors.kv_views(tensors.stored(kv_cache, self.kv_cache_fp8_dtype))
        index_k_cache = tensors.stored(index.index_cache.kv_cache, index.index_cache.dtype)
        topk, local_blocks = index.topk_blocks, index.local_blocks
        parts = tensors.parts(metadata, self._offsets, self.block_size)
        index_parts = tensors.parts(index_metadata, self._offsets, self.block_size)
        for part, index_part in zip(parts, index_parts, strict=True):
            rows, max_query_len = part.rows, part.max_query_len
            if part.block_table.data_ptr() == index_part.block_table.data_ptr():
                ops.select_attend(
                    q[rows],
                    k_cache,
                    v_cache,
                    index_q[rows],
                    index_k_cache,
                    *part.batch,
                    topk=topk,
                    local_blocks=local_blocks,
                    scale=self.scale,
                    max_query_len=max_query_len,
                    max_seq_len=part.max_seq_len,
                    out=out[rows],
                )
                continue
            # vLLM may put the two caches in groups of their own, which have pages of their own.
            block_ids = ops.select_blocks(
                index_q[rows],
                index_k_cache,
                *index_part.batch,
                topk=topk,
                local_blocks=local_blocks,
                max_query_len=max_query_len,
                max_seq_len=index_part.max_seq_len,
            )
            ops.sparse_attend(
                q[rows],
                k_cache,
                v_cache,
                block_ids,
                *part.batch,
                scale=self.scale,
                max_query_len=max_query_len,
                out=out[rows],
            )
        return output
