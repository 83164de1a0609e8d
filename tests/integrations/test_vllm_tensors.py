"""vLLM's tensors as views, and its metadata as batches of our operators."""

from __future__ import annotations

import torch
from fake_vllm import metadata

from msaserve.integrations.vllm import tensors


def test_query_offsets_stay_where_they_are() -> None:
    offsets = tensors.QueryOffsets(capacity=4)
    cpu = torch.device("cpu")
    first = offsets.get(3, 2, cpu)
    assert first.tolist() == [0, 2, 4, 6]
    assert first.dtype == torch.int32
    more = offsets.get(9, 2, cpu)
    assert more.tolist() == list(range(0, 20, 2))
    assert offsets.get(4, 2, cpu).data_ptr() == first.data_ptr()
    assert offsets.get(16, 2, cpu).data_ptr() == more.data_ptr()
    assert offsets.get(3, 1, cpu).tolist() == [0, 1, 2, 3]


def test_longest_context_is_cut_to_the_block_table() -> None:
    """A captured graph is described by max_model_len, which need not be a multiple of the block size."""
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    given = metadata([1, 1], torch.tensor([300, 256], dtype=torch.int32), table, num_decodes=2)
    given.max_seq_len = 10_000
    (part,) = tensors.parts(given, tensors.QueryOffsets(), 128)
    assert part.max_seq_len == 3 * 128


def test_views_copy_nothing() -> None:
    old, new = torch.zeros(3, 2, 128, 4, 128), torch.zeros(3, 4, 128, 2 * 128)
    for cache in (old, new, new.transpose(1, 2).contiguous().transpose(1, 2)):
        for view in tensors.kv_views(cache):
            assert view.shape == (3, 128, 4, 128)
            assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
