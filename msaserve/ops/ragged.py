"""Ragged batches and paged caches, as the reference implementations read them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Where each of T query rows stands."""

    requests: torch.Tensor
    """[T] int64, a valid request number even for rows of none."""
    positions: torch.Tensor
    """[T] int64: position in the request's sequence; −1 for rows of no request and for padding."""


def query_rows(seq_lens: torch.Tensor, cu_query_lens: torch.Tensor, num_rows: int) -> Rows:
    """Request and position of rows 0 … num_rows − 1. No device sync."""
    num_requests = seq_lens.shape[0]
    rows = torch.arange(num_rows, device=seq_lens.device)
    if num_requests == 0:
        return Rows(torch.zeros_like(rows), torch.full_like(rows, -1))
    ends = cu_query_lens[1:].long()
    requests = torch.searchsorted(ends, rows, right=True).clamp_(max=num_requests - 1)
    # The last token of a request stands at seq_len − 1; counting back from it needs no query lengths.
    positions = seq_lens.long()[requests] - (ends[requests] - rows)
    is_real = (rows >= cu_query_lens[0]) & (rows < ends[-1]) & (positions >= 0)
    return Rows(requests, positions.masked_fill(~is_real, -1))


def slice_rows(
    seq_lens: torch.Tensor, cu_query_lens: torch.Tensor, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(seq_lens, cu_query_lens) of the same requests when only rows start … end − 1 are computed."""
    cut = (cu_query_lens[1:] - end).clamp(min=0)
    return (seq_lens - cut).clamp(min=0), cu_query_lens.clamp(start, end) - start


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def raw(cache: torch.Tensor) -> torch.Tensor:
    """The cache as torch can index it: 8-bit floats as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def read_pages(cache: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cache[pages] in another dtype: a copy [*pages.shape, *cache.shape[1:]]. index_select copies whole pages."""
    read = raw(cache).index_select(0, pages.reshape(-1)).view(cache.dtype).to(dtype)
    return read.view(*pages.shape, *cache.shape[1:])


def per_head(scale: torch.Tensor | None, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A scalar or per-head scale as [num_kv_heads]."""
    return None if scale is None else scale.to(dtype).reshape(-1).expand(num_kv_heads)
