"""A plain driver of the model over the paged cache: pages in shuffled order, every unused slot NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from planes import poison

from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.layers.msa_attention import Observer
from msaserve.models.minimax_m3 import MiniMaxM3


def make_cache(model: MiniMaxM3, num_pages: int, dtype: torch.dtype | None = None) -> KVCache:
    """A cache of which every slot is NaN."""
    text = model.config.text
    cache = KVCache(
        num_layers=text.num_layers,
        sparse_layer_ids=text.sparse_layer_ids,
        num_pages=num_pages,
        block_size=text.block_size,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        index_dim=text.index_dim,
        dtype=dtype or model.dtype,
        device=model.device,
    )
    poison(cache)
    return cache


@dataclass
class Request:
    """One request's tokens, its pages and how many of its tokens are cached."""

    token_ids: torch.Tensor
    pages: list[int]
    num_cached: int = 0


@dataclass
class Driver:
    """Runs requests through the model in steps of one's choosing."""

    model: MiniMaxM3
    lengths: Sequence[int]
    seed: int = 0
    cache_dtype: torch.dtype | None = None
    free: list[int] = field(init=False)
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        block_size = self.model.config.text.block_size
        num_blocks = sum(-(-length // block_size) for length in self.lengths)
        self.cache = make_cache(self.model, num_blocks + 4, self.cache_dtype)
        self.free = list(range(1, num_blocks + 4))
        random.Random(self.seed).shuffle(self.free)

    def add(self, token_ids: torch.Tensor) -> Request:
        num_blocks = -(-len(token_ids) // self.model.config.text.block_size)
        return Request(token_ids.long(), [self.free.pop() for _ in range(num_blocks)])

    def step(
        self,
        rows: Sequence[tuple[Request, int]],
        *,
        media: tuple[torch.Tensor, torch.Tensor] | None = None,
        observer: Observer | None = None,
        attend_impl: str | None = None,
    ) -> torch.Tensor:
        """Compute the next tokens of each request, as many as its row says; hidden states [T, hidden]."""
        block_size = self.model.config.text.block_size
        device = self.model.device
        query_lens = [length for _, length in rows]
        positions = [torch.arange(s.num_cached, s.num_cached + length) for s, length in rows]
        slots = [
            torch.tensor(s.pages)[position // block_size] * block_size + position % block_size
            for (s, _), position in zip(rows, positions, strict=True)
        ]
        max_blocks = max(len(s.pages) for s, _ in rows)
        tables = [s.pages + [0] * (max_blocks - len(s.pages)) for s, _ in rows]
        seq_lens = [s.num_cached + length for s, length in rows]
        batch = AttentionBatch(
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots).to(device),
            block_table=torch.tensor(tables, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            cu_query_lens=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        tokens = torch.cat([s.token_ids[s.num_cached : s.num_cached + length] for s, length in rows])
        hidden: torch.Tensor = self.model(
            tokens.to(device),
            batch,
            self.cache,
            media_rows=None if media is None else media[0],
            media_features=None if media is None else media[1],
            attend_impl=attend_impl,
            observer=observer,
        )
        for sequence, length in rows:
            sequence.num_cached += length
        return hidden

    def run(self, token_ids: torch.Tensor, *, chunk: int | None = None) -> torch.Tensor:
        """One request, whole or in chunks: hidden states of all its tokens [T, hidden]."""
        sequence = self.add(token_ids)
        total = len(token_ids)
        chunk = chunk or total
        return torch.cat([self.step([(sequence, min(chunk, total - start))]) for start in range(0, total, chunk)])
