"""The two implementations that vLLM's MiniMax-M3 layers are given. Imports vLLM's model code."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common import indexer, sparse_attention

from msaserve import ops
from msaserve.integrations.vllm import releases, tensors

_found = releases.find(vllm.__version__)
assert _found is not None, "the plugin registers nothing for releases it does not know"
RELEASE = _found


class MsaIndexer(indexer.MiniMaxM3IndexerTritonImpl):  # type: ignore[misc]
    """Scores the visible blocks and writes the best ones' ids to the shared top-k buffer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if kwargs.get("topk_indices_buffer") is None:
            # Prediction (MTP) layers are handed none.
            num_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
            shape = [self.num_kv_heads, num_tokens]
            if RELEASE.token_major:
                shape.reverse()
            self.topk_indices_buffer = torch.empty((*shape, self.topk_blocks), dtype=torch.int32)
        self._offsets = tensors.QueryOffsets()

    def forward(self, index_query: torch.Tensor, **_: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """index_query: [padded T, Hkv · Di]. Returns the decodes' and the prefills' block_ids [Hkv, T, topk]."""
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return None, None  # the run that measures memory has no caches
        metadata = attn_metadata[self.index_cache.prefix]
        cache = tensors.stored(self.index_cache.kv_cache, self.index_cache.dtype)
        index_q = index_query[: metadata.num_actual_tokens].view(-1, self.num_index_heads, self.index_head_dim)
        if index_q.element_size() == 1:
            # Every 8-bit float is a bfloat16.
            index_q = index_q.to(torch.bfloat16)
        block_ids = tensors.heads_first(self.topk_indices_buffer, token_major=RELEASE.token_major)
        for part in tensors.parts(metadata, self._offsets, self.block_size):
            ops.select_blocks(
                index_q[part.rows],
                cache,
                *part.batch,
                topk=self.topk_blocks,
                local_blocks=self.local_blocks,
                max_query_len=part.max_query_len,
                max_seq_len=part.max_seq_len,
                out=block_ids[:, part.rows],
            )
        num_decode_tokens = metadata.num_decode_tokens
        return (
            block_ids[:, :num_decode_tokens] if metadata.num_decodes else None,
            block_ids[:, num_decode_tokens : metadata.num_actual_tokens] if metadata.num_prefills else None,
        )


class MsaAttend(sparse_attention.MiniMaxM3SparseTritonImpl):  # type: ignore[misc]
    """Attends to the blocks whose ids MsaIndexer left in the shared top-k buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._offsets = tensors.QueryOffsets()

    def forward(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """query, output: [padded T, Hq · D]. Writes output, whose padding rows it leaves alone, and returns it.

        No scale is applied to 8-bit caches: vLLM's kernel that fills them applies none.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return output  # the run that measures memory has no caches
        metadata = attn_metadata[layer.layer_name]
        num_tokens = metadata.num_actual_tokens
        q = query[:num_tokens].view(-1, self.num_heads, self.head_size)
        out = output[:num_tokens].view(-1, self.num_heads, self.head_size)
        k_cache, v_cache = tensors.kv_views(tensors.stored(kv_cache, self.kv_cache_fp8_dtype))
        # Not the layer's own attribute, which is None in prediction (MTP) layers.
        block_ids = tensors.heads_first(layer.indexer.impl.topk_indices_buffer, token_major=RELEASE.token_major)
        for part in tensors.parts(metadata, self._offsets, self.block_size):
            ops.sparse_attend(
                q[part.rows],
                k_cache,
                v_cache,
                block_ids[:, part.rows],
                *part.batch,
                scale=self.scale,
                max_query_len=part.max_query_len,
                out=out[part.rows],
            )
        return output
