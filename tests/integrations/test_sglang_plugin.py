"""The SGLang plugin: what it hooks, which calls it takes, what it computes; signatures are those of the releases."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from msaserve import ops
from msaserve.integrations import cards
from msaserve.integrations import sglang as plugin
from msaserve.integrations.sglang import attention

STOCK = object()
"""What the functions below return: SGLang's own kernels were called."""


def prefill_0516(
    q, k_cache, v_cache, sink, idx_q, idx_k_cache, idx_v_cache, idx_sink, req_to_token, slot_ids, cu_seqlens, seq_lens,
    prefix_lens, max_seqlen_q, max_seqlen_k, block_size_q, block_size_k, topk, init_blocks, local_blocks, sm_scale=None,
    idx_sm_scale=None, score_type="max", disable_index_value=False, use_msa=False, cu_seqblocks_q=None,
    max_seqblock_q=None, all_seqblock_q=None, seqlens_cpu=None,
):  # fmt: skip
    return STOCK


def prefill_0523(
    q, k_cache, v_cache, sink, idx_q, idx_k_cache, idx_v_cache, idx_sink, req_to_token, slot_ids, cu_seqlens, seq_lens,
    prefix_lens, max_seqlen_q, max_seqlen_k, block_size_q, block_size_k, topk, init_blocks, local_blocks, sm_scale=None,
    idx_sm_scale=None, score_type="max", disable_index_value=False, use_msa=False, cu_seqblocks_q=None,
    max_seqblock_q=None, all_seqblock_q=None, seqlens_cpu=None, q_scale=None, k_scale=None, v_scale=None,
    idx_q_scale=None, idx_k_scale=None, idx_v_scale=None, cached_topk_idx=None, return_topk_idx=False, loc_mapping=None,
    page_size=1, seq_lens_cpu=None,
):  # fmt: skip
    return STOCK


def decode_0516(
    q, sink, k_cache, v_cache, idx_q, idx_sink, idx_k_cache, idx_v_cache, req_to_token, slot_ids, seq_lens, max_seqlen,
    block_size_q, block_size_k, topk, init_blocks, local_blocks, sm_scale=None, idx_sm_scale=None, score_type="max",
    disable_index_value=False, dense_main_attn_fn=None, page_size=1, use_msa=False, msa_kv_indices=None, msa_plan=None,
):  # fmt: skip
    return STOCK


def decode_0523(
    q, sink, k_cache, v_cache, idx_q, idx_sink, idx_k_cache, idx_v_cache, req_to_token, slot_ids, seq_lens, max_seqlen,
    block_size_q, block_size_k, topk, init_blocks, local_blocks, sm_scale=None, idx_sm_scale=None, score_type="max",
    disable_index_value=False, dense_main_attn_fn=None, page_size=1, use_msa=False, msa_kv_indices=None, msa_plan=None,
    q_scale=None, k_scale=None, v_scale=None, idx_q_scale=None, idx_k_scale=None, idx_v_scale=None,
    cached_topk_idx=None, topk_out=None, hisparse_swap_in_fn=None, indexer_cp=None, packed_queries=1,
):  # fmt: skip
    return STOCK


PREFILLS = pytest.mark.parametrize("stock", [prefill_0516, prefill_0523])
DECODES = pytest.mark.parametrize("stock", [decode_0516, decode_0523])


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a Hopper card; a server with pages of 128 tokens."""
    monkeypatch.delenv("MSASERVE_SGLANG", raising=False)
    monkeypatch.setattr(attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cards, "triton_version", lambda: "3.6.0")
    attention._say.cache_clear()
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: SimpleNamespace(page_size=128)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, context.__name__, context)


def hooks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(register=lambda *given: found.append(given))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    return found


def test_entry_point_names_the_function() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."sglang.srt.plugins"]\n')[2]
    module, _, name = section.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hooks(monkeypatch)
    plugin.register()
    base = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
    assert found == [
        (f"{base}.minimax_sparse_prefill", plugin.prefill, "around"),
        (f"{base}.minimax_sparse_decode", plugin.decode, "around"),
    ]


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hooks(monkeypatch)
    monkeypatch.setenv("MSASERVE_SGLANG", "0")
    plugin.register()
    assert found == []


class Call:
    """A batch in SGLang's slots: shuffled pages, NaN in every slot that holds no token."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        kv_heads: int = 2,
        group: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        index_dtype: torch.dtype = torch.bfloat16,
        page_size: int = 128,
    ) -> None:
        generator = torch.Generator().manual_seed(len(query_lens))
        num_pages, num_requests, longest = 60, len(seq_lens), 4000
        slots = torch.full((num_requests + 3, longest), -1, dtype=torch.int32)
        self.rows = torch.randperm(num_requests + 3, generator=generator)[:num_requests]
        free = (torch.randperm(num_pages * 128 // page_size - 1, generator=generator) + 1).tolist()
        held = torch.zeros(num_pages * 128, dtype=torch.bool)
        for row, length in zip(self.rows.tolist(), seq_lens, strict=True):
            for start in range(0, length, page_size):
                at = free.pop() * page_size + torch.arange(page_size)
                slots[row, start : start + page_size] = at[: longest - start]
                held[at[: length - start]] = True
        self.req_to_token, self.page_size = slots, page_size
        self.seq_lens = torch.tensor(seq_lens)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.query_lens = query_lens

        def cache(heads: int) -> torch.Tensor:
            made = torch.randint(-2, 3, (num_pages * 128, heads, 128), generator=generator).float()
            made[~held] = float("nan")
            # The pool has room for some slots more, which make no page.
            return torch.cat([made, torch.full((7, heads, 128), float("nan"))])

        self.k, self.v, self.index_k = cache(kv_heads).to(dtype), cache(kv_heads).to(dtype), cache(1).to(index_dtype)
        rows = sum(query_lens)
        self.q = torch.randn((rows, kv_heads * group, 128), generator=generator).bfloat16()
        self.index_q = torch.randint(-2, 3, (rows, kv_heads, 128), generator=generator).bfloat16()

    def prefill(self, stock: Any, **changes: Any) -> Any:
        args = (self.q, self.k, self.v, None, self.index_q, self.index_k, None, None, self.req_to_token, self.rows)
        prefix = self.seq_lens - torch.tensor(self.query_lens)
        lens = (self.starts, self.seq_lens.int(), prefix.int(), max(self.query_lens), int(self.seq_lens.max()))
        given = {"score_type": "max", "disable_index_value": True}
        if "page_size" in attention._signature(stock).parameters:
            given["page_size"] = self.page_size
        return plugin.prefill(stock, *args, *lens, 1, 128, 16, 0, 1, **{**given, **changes})

    def decode(self, stock: Any, **changes: Any) -> Any:
        args = (self.q, None, self.k, self.v, self.index_q, None, self.index_k, None, self.req_to_token, self.rows)
        # A captured graph is described by the longest context there may be.
        lens = (self.seq_lens, 4000)
        given = {"score_type": "max", "disable_index_value": True, "page_size": self.page_size}
        return plugin.decode(stock, *args, *lens, 1, 128, 16, 0, 1, **{**given, **changes})

    def expected(self) -> torch.Tensor:
        table = torch.stack([self.req_to_token[row, ::128] // 128 for row in self.rows.tolist()]).int().clamp(min=0)
        k, v, index_k = (x[:-7].view(60, 128, -1, 128).float() for x in (self.k, self.v, self.index_k))
        batch = (table, self.seq_lens.int(), self.starts)
        lens = {"max_query_len": max(self.query_lens)}
        ids = ops.select_blocks(
            self.index_q.float(), index_k[:, :, 0], *batch, topk=16, max_seq_len=4000, **lens, impl="reference"
        )
        return ops.sparse_attend(self.q.float(), k, v, ids, *batch, **lens, impl="reference")


def check(call: Call, result: Any) -> None:
    assert result is not STOCK
    index_output, output = result
    assert index_output is None
    torch.testing.assert_close(output.float(), call.expected(), rtol=2e-2, atol=2e-2)


E4M3 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize(
    ("dtype", "index_dtype"), [(torch.bfloat16, torch.bfloat16), (E4M3, torch.bfloat16), (E4M3, E4M3)]
)


@PREFILLS
@DTYPES
def test_prefill(stock: Any, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    call = Call([40, 1, 9], [2400, 130, 9], dtype=dtype, index_dtype=index_dtype)
    check(call, call.prefill(stock))


@DECODES
@DTYPES
def test_decode(stock: Any, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    call = Call([1, 1, 1], [2400, 128, 1], dtype=dtype, index_dtype=index_dtype)
    check(call, call.decode(stock))


@pytest.mark.parametrize("page_size", [256, 640])
def test_pages_of_several_blocks(page_size: int) -> None:
    check(call := Call([40, 1], [2400, 1300], page_size=page_size), call.prefill(prefill_0523))
    check(call := Call([1, 1], [2400, 1300], page_size=page_size), call.decode(decode_0523))


@pytest.mark.parametrize("name", ["req_to_token", "rows", "seq_lens"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_either_width(name: str, dtype: torch.dtype) -> None:
    call = Call([1, 1], [2400, 128])
    setattr(call, name, getattr(call, name).to(dtype))
    check(call, call.decode(decode_0523))


def test_decodes_that_pad_a_graph() -> None:
    """Rows of one token, or of none, in slot 0 as SGLang fills them up: whatever they give, the others stay right."""
    call = Call([1] * 5, [2400, 300, 1, 1, 1])
    call.rows[2:], call.seq_lens[4] = 0, 0
    call.req_to_token[0, 0] = 0
    index_output, output = call.decode(decode_0523)
    assert index_output is None
    torch.testing.assert_close(output[:2].float(), call.expected()[:2], rtol=2e-2, atol=2e-2)
    assert (output[4] == 0).all()


@pytest.mark.parametrize(("kv_heads", "group"), [(4, 16), (1, 16), (1, 8)])
def test_shapes_of_tensor_parallel_ranks(kv_heads: int, group: int) -> None:
    call = Call([20, 3], [2200, 300], kv_heads=kv_heads, group=group)
    check(call, call.prefill(prefill_0523))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sink": torch.zeros(8, 128)}, "sink is given"),
        ({"cached_topk_idx": torch.zeros(1)}, "cached_topk_idx"),
        ({"return_topk_idx": True}, "return_topk_idx"),
        ({"loc_mapping": torch.zeros(1)}, "loc_mapping"),
        ({"use_msa": True}, "use_msa"),
        ({"k_scale": 0.5}, "k_scale is 0.5"),
        ({"disable_index_value": False}, "have values"),
        ({"page_size": 64}, "--page-size 128"),
        ({"init_blocks": 1}, "init_blocks is 1"),
        ({"local_blocks": 0}, "local_blocks is 0"),
        ({"topk": 65}, "topk 65"),
        ({"score_type": "lse"}, "lse"),
    ],
)
def test_what_ours_do_not_know_goes_to_stock(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    call = Call([5], [300])
    named = attention._signature(prefill_0523)
    args = (call.q, call.k, call.v, None, call.index_q, call.index_k, None, None, call.req_to_token, call.rows)
    bound = named.bind(*args, call.starts, call.seq_lens, call.seq_lens, 5, 300, 1, 128, 16, 0, 1)
    given = {**bound.arguments, "disable_index_value": True, "page_size": 128}
    check(call, plugin.prefill(prefill_0523, **given))
    for _ in range(2):
        assert plugin.prefill(prefill_0523, **{**given, **changes}) is STOCK
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    "changes", [{"dense_main_attn_fn": print}, {"topk_out": torch.zeros(1)}, {"packed_queries": 4}, {"indexer_cp": 1}]
)
def test_decodes_that_go_to_stock(changes: dict[str, Any]) -> None:
    assert Call([1], [300]).decode(decode_0523, **changes) is STOCK


def test_scales_of_one_are_none() -> None:
    call = Call([5], [300])
    check(call, call.prefill(prefill_0523, q_scale=1.0, k_scale=1.0, v_scale=1.0))


def test_large_groups_go_to_stock() -> None:
    assert Call([5], [300], kv_heads=1, group=128).prefill(prefill_0523) is STOCK


def test_queries_that_ours_do_not_read_go_to_stock() -> None:
    call = Call([5], [300])
    call.q = call.q.to(E4M3)
    assert call.prefill(prefill_0523) is STOCK


def test_scales_in_tensors_go_to_stock() -> None:
    """Reading one would wait for the card, which a captured graph must not."""
    call = Call([5], [300])
    assert call.prefill(prefill_0523, k_scale=torch.ones(1)) is STOCK


def test_calls_of_other_releases_go_to_stock(caplog: pytest.LogCaptureFixture) -> None:
    def with_soft_cap(*, soft_cap: Any = None, **given: Any) -> Any:
        return STOCK

    call = Call([5], [300])
    named = attention._signature(prefill_0516)
    args = (call.q, call.k, call.v, None, call.index_q, call.index_k, None, None, call.req_to_token, call.rows)
    given = named.bind(*args, call.starts, call.seq_lens, call.seq_lens, 5, 300, 1, 128, 16, 0, 1).arguments
    given = {**given, "sm_scale": None, "score_type": "max", "disable_index_value": True}
    newer = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in (*given, "soft_cap")])
    with_soft_cap.__signature__ = newer  # type: ignore[attr-defined]
    check(call, plugin.prefill(with_soft_cap, **given, soft_cap=None))
    for changes, reason in (
        ({"soft_cap": 30.0}, "soft_cap is given"),
        ({"idx_q": None}, "cannot be read: AttributeError"),
        ({"k_cache": call.k[:-7].view(60, 128, -1, 128)}, "4-dimensional"),
        ({"k_cache": call.k.view(torch.int16)}, "int16"),
    ):
        assert plugin.prefill(with_soft_cap, **{**given, "soft_cap": None, **changes}) is STOCK
        assert reason in caplog.records[-1].getMessage()
    without = newer.replace(parameters=[p for n, p in newer.parameters.items() if n != "slot_ids"])
    with_soft_cap.__signature__ = without  # type: ignore[attr-defined]
    attention._signature.cache_clear()
    del given["slot_ids"]
    assert plugin.prefill(with_soft_cap, **given, soft_cap=None) is STOCK
    assert "has no slot_ids" in caplog.records[-1].getMessage()


CAPABILITY = attention._capability


@pytest.mark.parametrize(("hip", "expected"), [(None, (9, 4)), ("6.4", (0, 0))])
def test_amds_cards_are_not_taken_for_hopper(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert CAPABILITY(torch.device("cuda")) == expected
    assert CAPABILITY(torch.device("cpu")) == (0, 0)


def test_other_cards_go_to_stock_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call([5], [300])
    monkeypatch.setattr(attention, "_capability", lambda device: (8, 0))
    assert call.prefill(prefill_0523) is STOCK
    monkeypatch.setenv("MSASERVE_SGLANG", "1")
    check(call, call.prefill(prefill_0523))
    assert Call([5], [300], dtype=E4M3).prefill(prefill_0523) is STOCK


def test_views_copy_nothing() -> None:
    slots = torch.zeros(3 * 128 + 5, 2, 128)
    seen = attention.pages(slots)
    assert seen.shape == (3, 128, 2, 128)
    assert seen.data_ptr() == slots.data_ptr()
