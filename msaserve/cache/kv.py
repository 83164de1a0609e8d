"""The paged cache's planes: K and V of every layer, index-K of the sparse ones. cache.blocks hands out the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Where this step's tokens stand: T query tokens of B requests. Every tensor is on the cache's device."""

    positions: torch.Tensor
    """[T] int64: position of each token in its own sequence."""
    slots: torch.Tensor
    """[T] int64: page * block_size + offset, where the token's K, V and index-K go; −1 stores nothing."""
    block_table: torch.Tensor
    """[B, max_blocks] int32: block → page, 0 beyond a request's last block."""
    seq_lens: torch.Tensor
    """[B] int32: cached tokens plus this step's; 0 for padding rows."""
    cu_query_lens: torch.Tensor
    """[B + 1] int32: request b's tokens are cu_query_lens[b] … cu_query_lens[b+1] − 1 of T."""
    max_query_len: int
    max_seq_len: int


class KVCache:
    """K and V [num_layers, num_pages, block_size, Hkv, D] and index-K [sparse layers, num_pages, block_size, Di].

    Token-major pages: `ops.page_table` relies on it. Page 0 is a dummy that no request owns.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        sparse_layer_ids: Sequence[int],
        num_pages: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        index_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_pages = num_pages
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_layers, num_pages, block_size, num_kv_heads, head_dim)
        self._k = _zeros(shape, dtype, device)
        self._v = _zeros(shape, dtype, device)
        self._index_k = _zeros((len(sparse_layer_ids), num_pages, block_size, index_dim), dtype, device)
        self._index_plane = {layer: i for i, layer in enumerate(sparse_layer_ids)}

    def k(self, layer: int) -> torch.Tensor:
        """[num_pages, block_size, Hkv, D]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """[num_pages, block_size, Hkv, D]."""
        return self._v[layer]

    def index_k(self, layer: int) -> torch.Tensor:
        """[num_pages, block_size, Di]. KeyError for a dense layer."""
        return self._index_k[self._index_plane[layer]]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """On a CPU memory that the system gives only as it is written: torch.zeros would write all of it now."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
