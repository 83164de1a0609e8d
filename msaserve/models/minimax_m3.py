"""MiniMax-M3: embeddings, decoder layers, output head, and the vision tower if the checkpoint has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from msaserve.config import ModelConfig, TextConfig
from msaserve.errors import UnsupportedError
from msaserve.layers.linear import Linear, weight
from msaserve.layers.moe import GatedMLP, SparseMoE
from msaserve.layers.msa_attention import MsaAttention, Observer
from msaserve.layers.norm import GemmaRMSNorm
from msaserve.layers.rope import CosSin, text_rotation
from msaserve.models.minimax_m3_vision import MiniMaxM3Vision

if TYPE_CHECKING:
    from msaserve.cache.kv import AttentionBatch, KVCache


class DecoderLayer(nn.Module):
    def __init__(self, config: TextConfig, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = MsaAttention(config, layer, dtype=dtype)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp: nn.Module
        if config.has_moe[layer]:
            self.mlp = SparseMoE(config, dtype=dtype)
        else:
            self.mlp = GatedMLP(config, config.dense_intermediate_size, dtype=dtype)

    def forward(
        self,
        x: torch.Tensor,
        rotation: CosSin,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        attend_impl: str | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        attended = self.self_attn(
            self.input_layernorm(x), rotation, batch, cache, attend_impl=attend_impl, observer=observer
        )
        x = x + attended
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MiniMaxM3(nn.Module):
    """The whole model. Parameters are uninitialised until `models.loader` fills them; none has a gradient.

    Args:
        config: what to build; `config.vision` None leaves the vision tower out.
        dtype: of all parameters but the router's, which stay float32.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        text = config.text
        self.config = config
        self.embed_tokens = weight(text.vocab_size, text.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(text, i, dtype=dtype) for i in range(text.num_layers))
        self.norm = GemmaRMSNorm(text.hidden_size, text.rms_norm_eps, dtype=dtype)
        self.lm_head = None if text.tie_word_embeddings else Linear(text.hidden_size, text.vocab_size, dtype=dtype)
        self.vision = None if config.vision is None else MiniMaxM3Vision(config.vision, text.hidden_size, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        *,
        media_rows: torch.Tensor | None = None,
        media_features: torch.Tensor | None = None,
        attend_impl: str | None = None,
        observer: Observer | None = None,
    ) -> torch.Tensor:
        """One step over T tokens of B requests; stores their K, V and index-K in the cache.

        Args:
            token_ids: [T] int64.
            batch: where the tokens stand; cache: the pages it speaks of.
            media_rows: [M] int64, rows of token_ids whose embedding media_features [M, hidden] replaces.
            attend_impl: `impl=` of ops.sparse_attend.
            observer: called with what passes by: what each layer selects and puts out.

        Returns:
            [T, hidden] after the final norm: what `logits` takes.
        """
        text = self.config.text
        x = F.embedding(token_ids, self.embed_tokens)
        if media_rows is not None:
            assert media_features is not None
            x.index_copy_(0, media_rows, media_features.to(x.dtype))
        rotation = text_rotation(batch.positions, rotary_dim=text.rotary_dim, theta=text.rope_theta)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, batch, cache, attend_impl=attend_impl, observer=observer)
            if observer is not None:
                observer("hidden", i, x)
        out: torch.Tensor = self.norm(x)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden], rows that `forward` returned → float32 [R, vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, head).float()

    def embed_media(self, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Features of one or more pictures or clips: one row per media token, in their order.

        Args:
            patches: [N, 1176] on the model's device, N = Σ t·h·w.
            grid_thw: rows of (t, h, w) in patches.

        Returns:
            [N / 4, hidden] in the model's dtype.

        Raises:
            UnsupportedError: the checkpoint has no vision tower.
            InvalidRequestError: patches and grid do not fit together.
        """
        if self.vision is None:
            raise UnsupportedError("the checkpoint has no vision tower: it takes text only")
        features: torch.Tensor = self.vision(patches, grid_thw)
        return features
