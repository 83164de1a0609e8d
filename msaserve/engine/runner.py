"""A step on the device: tokens and pages in, sampled tokens out. The same code on CPU and CUDA."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from msaserve.cache.kv import AttentionBatch, KVCache
from msaserve.engine.graphs import DecodeGraphs
from msaserve.engine.media import MediaFeatures, media_positions
from msaserve.engine.plan import PlanRow, RowResult, StepPlan, StepResult
from msaserve.engine.sampler import sample
from msaserve.models.minimax_m3 import MiniMaxM3

MEDIA_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _RowMedia:
    """M features of one row and the places among its step's tokens that they go to."""

    index: np.ndarray
    """[M] int64, relative to the row's first token."""
    features: torch.Tensor
    """[M, hidden]."""


class Runner:
    """Runs plans on a model and its cache. Keeps nothing between steps but the features of recent media.

    graphs: of this model and cache, for steps of one token a request.
    """

    def __init__(
        self, model: MiniMaxM3, cache: KVCache, *, attend_impl: str | None = None, graphs: DecodeGraphs | None = None
    ) -> None:
        self.cache = cache
        self._model = model
        self._config = model.config
        self._attend_impl = attend_impl
        self._graphs = graphs
        self._device = model.device
        self._media = MediaFeatures(self._embed_media, max_bytes=MEDIA_CACHE_BYTES)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._model.dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute every row's tokens, store their K, V and index-K, and sample where the plan says so.

        A row whose media cannot be embedded, or whose logits are not finite, has an error and harms no other row.
        """
        results = [RowResult() for _ in plan.rows]
        live: list[int] = []
        media: list[_RowMedia | None] = []
        for i, row in enumerate(plan.rows):
            try:
                media.append(self._row_media(row))
            except Exception as error:  # whatever a broken item makes the vision tower raise is this row's alone
                results[i].error = f"a media item could not be embedded: {error}"
            else:
                live.append(i)
        if not live:
            return StepResult(results)
        rows = [plan.rows[i] for i in live]
        hidden = self._forward(rows, media)
        sampled = [place for place, row in enumerate(rows) if row.is_sampled]
        if sampled:
            ends = np.cumsum([row.query_len for row in rows])
            last = _to_device(ends[sampled] - 1, self._device)
            logits = self._model.logits(hidden[last])
            drawn = sample(logits, [rows[place] for place in sampled], self._config.eos_token_ids)
            for place, result in zip(sampled, drawn, strict=True):
                results[live[place]] = result
        return StepResult(results)

    def _forward(self, rows: Sequence[PlanRow], media: Sequence[_RowMedia | None]) -> torch.Tensor:
        """Hidden states [T, hidden] of all rows' tokens."""
        block_size = self.cache.block_size
        has_media = any(row_media is not None for row_media in media)
        longest = max(row.query_len for row in rows), max(row.seq_len for row in rows)
        if self._graphs is not None and not has_media and self._graphs.takes(len(rows), *longest):
            hidden = self._graphs.forward(*build_batch(rows, block_size=block_size, device="cpu"))
            if hidden is not None:
                return hidden
        token_ids, batch = build_batch(rows, block_size=block_size, device=self._device)
        media_rows, media_features = self._join_media(rows, media)
        return self._model.forward(
            token_ids,
            batch,
            self.cache,
            media_rows=media_rows,
            media_features=media_features,
            attend_impl=self._attend_impl,
        )

    def _embed_media(self, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        return self._model.embed_media(patches.to(self._device), grid_thw)

    def _row_media(self, row: PlanRow) -> _RowMedia | None:
        """The features that fall into this step's part of a row."""
        index: list[np.ndarray] = []
        features: list[torch.Tensor] = []
        token_ids = (self._config.image_token_id, self._config.video_token_id)
        for item in row.media:
            positions = media_positions(item, row.prompt_token_ids, token_ids)
            first, last = np.searchsorted(positions, (row.prefix_len, row.seq_len)).tolist()
            if first == last:
                continue
            item_features = self._media.get(item)
            if len(item_features) != len(positions):
                raise ValueError(f"{len(item_features)} features for {len(positions)} image or video tokens")
            index.append(positions[first:last] - row.prefix_len)
            features.append(item_features[first:last])
        if not index:
            return None
        return _RowMedia(np.concatenate(index), torch.cat(features))

    def _join_media(
        self, rows: Sequence[PlanRow], media: Sequence[_RowMedia | None]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[M] int64 rows among the step's tokens and their features [M, hidden]; None, None without media."""
        index: list[np.ndarray] = []
        features: list[torch.Tensor] = []
        start = 0
        for row, row_media in zip(rows, media, strict=True):
            if row_media is not None:
                index.append(start + row_media.index)
                features.append(row_media.features)
            start += row.query_len
        if not index:
            return None, None
        return _to_device(np.concatenate(index), self._device), torch.cat(features)


def build_batch(
    rows: Sequence[PlanRow], *, block_size: int, device: torch.device | str
) -> tuple[torch.Tensor, AttentionBatch]:
    """The tokens [T] int64 of B ≥ 1 rows, one row after the other, and where they stand."""
    query_lens = np.array([row.query_len for row in rows], dtype=np.int64)
    prefix_lens = np.array([row.prefix_len for row in rows], dtype=np.int64)
    seq_lens = prefix_lens + query_lens
    cu_query_lens = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    joined = array("i")
    for row in rows:
        joined.extend(row.token_ids)
    token_ids = np.frombuffer(joined, dtype=np.int32).astype(np.int64)
    num_blocks = -(-seq_lens // block_size)
    block_table = np.zeros((len(rows), num_blocks.max()), dtype=np.int32)
    for b, row in enumerate(rows):
        block_table[b, : num_blocks[b]] = np.frombuffer(row.pages, dtype=np.int32)[: num_blocks[b]]
    row_of = np.repeat(np.arange(len(rows)), query_lens)
    positions = np.arange(len(token_ids)) + np.repeat(prefix_lens - cu_query_lens[:-1], query_lens)
    slots = block_table[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    batch = AttentionBatch(
        positions=_to_device(positions, device),
        slots=_to_device(slots, device),
        block_table=_to_device(block_table, device),
        seq_lens=_to_device(seq_lens.astype(np.int32), device),
        cu_query_lens=_to_device(cu_query_lens.astype(np.int32), device),
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return _to_device(token_ids, device), batch


def _to_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
