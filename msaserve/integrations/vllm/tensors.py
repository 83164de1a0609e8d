"""vLLM's tensors and metadata as our operators take them: views, no copies. Nothing here imports vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


def kv_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache) [P, block, Hkv, D] of a layer's main cache, whatever its strides.

    Args:
        kv_cache: [P, 2, block, Hkv, D] (vLLM 0.24, 0.25) or [P, Hkv, block, 2 · D] with each token's key before its
            value (from 0.26 on).
    """
    if kv_cache.ndim == 5:
        return kv_cache[:, 0], kv_cache[:, 1]
    k, v = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k, v


def stored(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cache as what it holds: some releases hand 8-bit floats over as bytes."""
    return cache.view(dtype) if cache.element_size() == 1 and cache.dtype != dtype else cache


class Part(NamedTuple):
    """The decodes or the prefills of a step: one batch of our operators."""

    rows: slice
    """Its query tokens among the step's."""
    block_table: torch.Tensor
    """[B, max_blocks] int32."""
    seq_lens: torch.Tensor
    """[B] int32; 0 for requests that only pad a captured graph's batch."""
    cu_query_lens: torch.Tensor
    """[B + 1] int32, from 0."""
    max_query_len: int
    max_seq_len: int

    @property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.block_table, self.seq_lens, self.cu_query_lens


class QueryOffsets:
    """cu_query_lens of decode batches, all of whose requests bring equally many query tokens.

    The tensors stay where they are for good, since captured graphs read them.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._made: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def get(self, num_requests: int, query_len: int, device: torch.device) -> torch.Tensor:
        """[num_requests + 1] int32: 0, query_len, 2 · query_len, …"""
        capacity = self._capacity
        while capacity < num_requests:
            capacity *= 2
        key = (capacity, query_len, device)
        made = self._made.get(key)
        if made is None:
            made = torch.arange(0, (capacity + 1) * query_len, query_len, dtype=torch.int32, device=device)
            # What is computed during a capture has no values yet and lies in that graph's memory.
            if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._made[key] = made
        return made[: num_requests + 1]


def parts(metadata: Any, offsets: QueryOffsets, block_size: int) -> list[Part]:
    """The step's decodes, then its prefills.

    Args:
        metadata: of a layer's main cache or of its index cache. vLLM orders a batch so that decodes come first, and
            counts every prefill's query tokens from the first prefill's.
    """
    found = []
    num_decode_tokens = metadata.num_decode_tokens

    def longest(block_table: torch.Tensor) -> int:
        # Captured graphs are described by the longest context there may be, rounded up.
        return min(int(metadata.max_seq_len), block_table.shape[1] * block_size)

    if metadata.num_decodes > 0:
        decode = metadata.decode
        query_len = decode.decode_query_len
        found.append(
            Part(
                slice(0, num_decode_tokens),
                decode.block_table,
                decode.seq_lens,
                offsets.get(metadata.num_decodes, query_len, decode.seq_lens.device),
                query_len,
                longest(decode.block_table),
            )
        )
    if metadata.num_prefills > 0:
        prefill = metadata.prefill
        found.append(
            Part(
                slice(num_decode_tokens, metadata.num_actual_tokens),
                prefill.block_table,
                prefill.seq_lens,
                prefill.cu_seqlens_q,
                prefill.max_query_len,
                longest(prefill.block_table),
            )
        )
    return found
