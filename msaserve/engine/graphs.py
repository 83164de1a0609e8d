"""CUDA graphs of decode steps: a step of one token a request is launched as a whole, not kernel by kernel."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.models.minimax_m3 import MiniMaxM3

_log = logging.getLogger(__name__)

SHORT_CONTEXT = 1 << 16
"""Tokens. Steps whose sequences are no longer have graphs of their own: operators choose by the bound on lengths."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    """[size, hidden], written by each replay."""


class DecodeGraphs:
    """One graph for each padded number of requests and bound on their lengths, captured when first needed.

    Rows of padding have seq_len 0 and slot −1: they read and store nothing. A model or an operator that waits for the
    device cannot be captured: then `forward` says None ever after, and the log why.

    Args:
        max_num_seqs: requests of the largest step that is captured.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(
        self,
        model: MiniMaxM3,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        attend_impl: str | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attend_impl = attend_impl
        self._sizes = padded_sizes(max_num_seqs)
        longest = -(-max_model_len // cache.block_size)
        self._max_blocks = sorted({min(-(-SHORT_CONTEXT // cache.block_size), longest), longest})
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None
        self._is_on = model.device.type == "cuda"
        if self._is_on:
            size, device = self._sizes[-1], model.device
            self._token_ids = torch.zeros(size, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._token_ids)
            self._slots = torch.full_like(self._token_ids, -1)
            self._block_table = torch.zeros((size, longest), dtype=torch.int32, device=device)
            self._seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
            self._cu_query_lens = torch.arange(size + 1, dtype=torch.int32, device=device)

    def takes(self, num_requests: int, max_query_len: int, max_seq_len: int) -> bool:
        """Whether `forward` may serve such a step, one without media."""
        is_short = max_seq_len <= self._max_blocks[-1] * self._cache.block_size
        return self._is_on and max_query_len == 1 and num_requests <= self._sizes[-1] and is_short

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor | None:
        """As MiniMaxM3.forward for a step that `takes` agreed to; None if it cannot be captured.

        Args:
            token_ids, batch: in the host's memory.

        Returns:
            [T, hidden], to be read before the next call.
        """
        num_requests = len(token_ids)
        size = self._sizes[bisect_left(self._sizes, num_requests)]
        num_blocks = -(-batch.max_seq_len // self._cache.block_size)
        max_blocks = self._max_blocks[bisect_left(self._max_blocks, num_blocks)]
        self._fill(token_ids, batch, size)
        found = self._graphs.get((size, max_blocks))
        if found is None:
            try:
                found = self._graphs[size, max_blocks] = self._capture(size, max_blocks)
            except RuntimeError as error:
                self._is_on = False
                _log.warning("decode steps run without CUDA graphs: %s", str(error).splitlines()[0])
                return None
        found.graph.replay()
        return found.hidden[:num_requests]

    def _fill(self, token_ids: torch.Tensor, batch: AttentionBatch, size: int) -> None:
        num_requests, width = batch.block_table.shape
        for target, values in (
            (self._token_ids, token_ids),
            (self._positions, batch.positions),
            (self._slots, batch.slots),
            (self._seq_lens, batch.seq_lens),
        ):
            target[:num_requests].copy_(values.pin_memory(), non_blocking=True)
        self._block_table[:num_requests, :width].copy_(batch.block_table.pin_memory(), non_blocking=True)
        self._slots[num_requests:size].fill_(-1)
        self._seq_lens[num_requests:size].fill_(0)

    def _capture(self, size: int, max_blocks: int) -> _Graph:
        """Runs the step twice on the way, which stores what the replay will store once more."""
        batch = AttentionBatch(
            positions=self._positions[:size],
            slots=self._slots[:size],
            block_table=self._block_table[:size, :max_blocks],
            seq_lens=self._seq_lens[:size],
            cu_query_lens=self._cu_query_lens[: size + 1],
            max_query_len=1,
            max_seq_len=max_blocks * self._cache.block_size,
        )

        def step() -> torch.Tensor:
            return self._model.forward(self._token_ids[:size], batch, self._cache, attend_impl=self._attend_impl)

        stream: Any = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._model.device))
        before = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            step()  # compiles
            try:
                # What waits for the device is found here: in a capture it would leave a broken stream behind.
                torch.cuda.set_sync_debug_mode("error")
                step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream(self._model.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that copies media to the device, go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = step()
        return _Graph(graph, hidden)


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of requests that have a graph: 1, 2, 4, 8, then two to each doubling, up to max_num_seqs."""
    sizes = [size for step in range(20) for size in (1 << step, 3 << step >> 1) if size in (1, 2, 4) or size >= 8]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})
