"""Attention over the paged cache, block-sparse (MSA) or dense: the only model code that touches the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msaserve import ops
from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.config import TextConfig
from msaserve.layers.linear import Linear
from msaserve.layers.norm import GemmaRMSNorm
from msaserve.layers.rope import CosSin

Observer = Callable[[str, int, torch.Tensor], None]
"""Called with (what, layer, tensor) as the layers go by: "index_q" [T, Hkv, Di] and "block_ids" [Hkv, T, S] of sparse
layers, "hidden" [T, hidden] after each layer."""


class MsaAttention(nn.Module):
    """One layer's attention: project, normalise per head, rotate, store, select blocks, attend, project back.

    One GEMM projects to [q | k | v | index_q | index_k]; a dense layer has no index part.
    """

    def __init__(self, config: TextConfig, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.is_sparse = config.has_sparse_attention[layer]
        head_dim, index_dim, eps = config.head_dim, config.index_dim, config.rms_norm_eps
        self.projection_sizes = {
            "q": config.num_heads * head_dim,
            "k": config.num_kv_heads * head_dim,
            "v": config.num_kv_heads * head_dim,
        }
        self.q_norm = GemmaRMSNorm(head_dim, eps, dtype=dtype)
        self.k_norm = GemmaRMSNorm(head_dim, eps, dtype=dtype)
        if self.is_sparse:
            self.projection_sizes |= {"index_q": config.num_index_heads * index_dim, "index_k": index_dim}
            self.index_q_norm = GemmaRMSNorm(index_dim, eps, dtype=dtype)
            self.index_k_norm = GemmaRMSNorm(index_dim, eps, dtype=dtype)
        self.in_proj = Linear(config.hidden_size, sum(self.projection_sizes.values()), dtype=dtype)
        self.o_proj = Linear(config.num_heads * head_dim, config.hidden_size, dtype=dtype)

    def forward(
        self,
        x: torch.Tensor,
        rotation: CosSin,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        attend_impl: str | None = None,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]. Stores this step's K, V and index-K in the cache."""
        projected = self.in_proj(x)
        k_cache, v_cache = cache.k(self.layer), cache.v(self.layer)
        index = self._index_arguments(cache.index_k(self.layer)) if self.is_sparse else {}
        queries = ops.norm_rope_store(
            projected,
            k_cache,
            v_cache,
            batch.slots,
            *rotation,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            eps=self.q_norm.eps,
            **index,
        )
        if queries.index_q is not None:
            out = self._attend_sparse(queries.q, queries.index_q, batch, cache, attend_impl, observer)
        else:
            out = self._attend_dense(queries.q, batch, cache)
        result: torch.Tensor = self.o_proj(out.flatten(1))
        return result

    def _index_arguments(self, index_k_cache: torch.Tensor) -> dict[str, Any]:
        """What norm_rope_store takes for the index part. Beside 8-bit keys the queries are of 8 bits too."""
        return {
            "index_k_cache": index_k_cache,
            "index_q_weight": self.index_q_norm.weight,
            "index_k_weight": self.index_k_norm.weight,
            "num_index_heads": self.config.num_index_heads,
            "index_q_dtype": index_k_cache.dtype if index_k_cache.itemsize == 1 else None,
        }

    def _attend_sparse(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attend_impl: str | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        k_cache, v_cache, index_k_cache = cache.k(self.layer), cache.v(self.layer), cache.index_k(self.layer)
        if self.config.num_index_heads < self.config.num_kv_heads:
            index_q = repeat_heads(index_q, self.config.num_kv_heads // self.config.num_index_heads)
        where = (batch.block_table, batch.seq_lens, batch.cu_query_lens)
        selection: dict[str, Any] = {
            "topk": self.config.topk_blocks,
            "local_blocks": self.config.local_blocks,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
        }
        if attend_impl is None:
            out, block_ids = ops.select_attend(q, k_cache, v_cache, index_q, index_k_cache, *where, **selection)
        else:
            block_ids = ops.select_blocks(index_q, index_k_cache, *where, **selection)
            max_query_len = batch.max_query_len
            out = ops.sparse_attend(
                q, k_cache, v_cache, block_ids, *where, max_query_len=max_query_len, impl=attend_impl
            )
        if observer is not None:
            observer("index_q", self.layer, index_q)
            observer("block_ids", self.layer, block_ids)
        return out

    def _attend_dense(self, q: torch.Tensor, batch: AttentionBatch, cache: KVCache) -> torch.Tensor:
        return ops.dense_attend(
            q,
            cache.k(self.layer),
            cache.v(self.layer),
            batch.block_table,
            batch.seq_lens,
            batch.cu_query_lens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )


def repeat_heads(index_q: torch.Tensor, times: int) -> torch.Tensor:
    """[T, Hi, Di] → [T, Hi * times, Di], each head `times` times over; of any dtype."""
    num_rows, num_heads, dim = index_q.shape
    return index_q[:, :, None].expand(num_rows, num_heads, times, dim).reshape(num_rows, num_heads * times, dim)
