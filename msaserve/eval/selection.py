"""What if the index branch chose nothing? Engines whose sparse layers take random blocks, or attend to all.

For evaluation only: the model's own layers know nothing of it.
"""

from __future__ import annotations

from typing import Literal

import torch

from msaserve import ops
from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.layers.msa_attention import MsaAttention, Observer
from msaserve.models.minimax_m3 import DecoderLayer, MiniMaxM3

Selection = Literal["index", "random", "dense"]
"""index: the model as it is. random: as many blocks, drawn anew for every token and KV head, its own among them.
dense: all blocks."""


def use_selection(model: MiniMaxM3, selection: Selection, *, seed: int = 0) -> None:
    """Make the model's sparse layers select so from now on."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        if layer.self_attn.is_sparse and selection != "index":
            layer.self_attn = _Random(layer.self_attn, seed) if selection == "random" else _Dense(layer.self_attn)


class _Ablated(MsaAttention):
    """Another layer's attention with its parameters, but for the selection."""

    def __init__(self, original: MsaAttention) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__.update(original.__dict__)


class _Dense(_Ablated):
    def _attend_sparse(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attend_impl: str | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        return self._attend_dense(q, batch, cache)


class _Random(_Ablated):
    def __init__(self, original: MsaAttention, seed: int) -> None:
        super().__init__(original)
        device = original.o_proj.weight.device
        self._generator = torch.Generator(device).manual_seed(seed + self.layer)

    def _attend_sparse(
        self,
        q: torch.Tensor,
        index_q: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        attend_impl: str | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        k_cache, v_cache = cache.k(self.layer), cache.v(self.layer)
        num_blocks = -(-batch.max_seq_len // self.config.block_size)
        scores = torch.rand(self.config.num_kv_heads, len(q), num_blocks, generator=self._generator, device=q.device)
        own = batch.positions.to(torch.int64) // self.config.block_size
        scores.masked_fill_(torch.arange(num_blocks, device=q.device) > own[:, None], -torch.inf)
        block_ids = ops.topk_blocks(
            scores,
            batch.seq_lens,
            batch.cu_query_lens,
            block_size=self.config.block_size,
            topk=self.config.topk_blocks,
            local_blocks=self.config.local_blocks,
            max_query_len=batch.max_query_len,
        )
        return ops.sparse_attend(
            q,
            k_cache,
            v_cache,
            block_ids,
            batch.block_table,
            batch.seq_lens,
            batch.cu_query_lens,
            max_query_len=batch.max_query_len,
            impl=attend_impl,
        )
