"""The vLLM plugin before a fake vLLM of each release: when it steps in, what it computes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import fake_vllm
from fake_vllm import Vllm, install, metadata, minor

from msaserve import ops
from msaserve.integrations import cards
from msaserve.integrations import vllm as plugin
from msaserve.integrations.vllm.decision import Setting
from msaserve.integrations.vllm.releases import RELEASES

EACH = pytest.mark.parametrize("version", list(RELEASES))
E4M3 = torch.float8_e4m3fn
DIM = 128


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSASERVE_VLLM", raising=False)


# ---- when ours step in


def setting(**changes: Any) -> Setting:
    given: dict[str, Any] = {
        "forced": False,
        "capability": (9, 0),
        "triton": "3.6.0",
        "kv_dtype": "auto",
        "index_dtype": "bf16",
        "group": 16,
        "head_dim": 128,
        "sparse": fake_vllm.SPARSE,
    }
    return Setting(**{**given, **changes})


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("index_dtype", ["bf16", "fp8", "fp8_e4m3"])
def test_ours_run_on_hopper(kv_dtype: str, index_dtype: str) -> None:
    assert setting(kv_dtype=kv_dtype, index_dtype=index_dtype).why_stock() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (10, 0)}, "10.0 is not Hopper's; MSASERVE_VLLM=1"),
        ({"capability": (8, 0)}, "8.0 is not Hopper's"),
        ({"capability": (7, 5), "forced": True}, "under 8.0"),
        ({"capability": (8, 6), "forced": True, "kv_dtype": "fp8"}, "8.6 has no 8-bit floats"),
        ({"capability": (8, 6), "forced": True, "index_dtype": "fp8_e4m3"}, "8.6 has no 8-bit floats"),
        ({"group": 128}, "128 query heads to a KV head"),
        ({"head_dim": 64}, "not all 128"),
        ({"triton": None}, "Triton is not installed"),
        ({"triton": "3.5.1"}, "Triton 3.5.1 is older than 3.6"),
        ({"kv_dtype": "fp8_e5m2"}, "the KV cache is fp8_e5m2"),
        ({"kv_dtype": "nvfp4"}, "the KV cache is nvfp4"),
        ({"index_dtype": "mxfp4"}, "the index cache is mxfp4"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_local_block": 0}}, "local_blocks is 0"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_topk_blocks": 65}}, "topk 65"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_local_block": 17}}, "local_blocks is 17 and topk 16"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_init_block": 1}}, "sparse_init_block is 1"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_score_type": "sum"}}, "sparse_score_type is 'sum'"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_block_size": 64}}, "not all 128"),
        ({"sparse": {**fake_vllm.SPARSE, "sparse_index_dim": 64}}, "not all 128"),
    ],
)
def test_stock_runs_and_says_why(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(setting(**changes).why_stock())


@pytest.mark.parametrize("group", [1, 2, 64])
@pytest.mark.parametrize(("topk", "local_blocks"), [(1, 1), (18, 1), (64, 1), (64, 64)])
def test_what_the_operators_serve_is_ours(group: int, topk: int, local_blocks: int) -> None:
    sparse = {**fake_vllm.SPARSE, "sparse_topk_blocks": topk, "sparse_local_block": local_blocks}
    assert setting(group=group, sparse=sparse).why_stock() is None


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_forced_on_other_cards(capability: tuple[int, int]) -> None:
    assert setting(capability=capability, forced=True).why_stock() is None


@pytest.mark.parametrize(("num_cards", "is_ours"), [(1, True), (4, True), (8, True), (32, True), (64, True)])
def test_cards_of_a_tensor_parallel_group(monkeypatch: pytest.MonkeyPatch, num_cards: int, is_ours: bool) -> None:
    """On 64 cards one query head is left to a KV head."""
    fake = install(monkeypatch, "0.33.0", num_cards=num_cards)
    fake.models()
    assert chosen_impls(fake)[0].__name__ == ("MsaIndexer" if is_ours else "IndexerImpl")


@pytest.mark.parametrize("triton", ["3.6", "3.10.0", "4.0.0+git1234"])
def test_newer_tritons(triton: str) -> None:
    assert setting(triton=triton).why_stock() is None


@pytest.mark.parametrize("value", ["", "auto", "2", "maybe", "-1", " "])
def test_a_value_that_says_nothing_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MSASERVE_VLLM", value)
    fake = install(monkeypatch, "0.33.0")
    plugin.register()
    assert len(fake.registry.registered) == 3
    fake.models()
    assert [c.__name__ for c in chosen_impls(fake)] == ["MsaIndexer", "MsaAttend"]


@pytest.mark.parametrize(
    "broken", ["cache_config", "model_config", "sparse_block_size", "sparse_topk_blocks", "triton_version"]
)
def test_a_configuration_that_cannot_be_read_is_vllms_to_judge(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    fake = install(monkeypatch, "0.33.0")
    fake.models()
    if broken.startswith("sparse_"):
        del fake.config.model_config.hf_text_config.sparse_attention_config[broken]
    elif broken == "triton_version":
        monkeypatch.setattr(cards, "triton_version", lambda: "main")
    else:
        delattr(fake.config, broken)
    with caplog.at_level(logging.INFO):
        assert [c.__name__ for c in chosen_impls(fake)] == ["IndexerImpl", "SparseImpl"]
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()


def chosen_impls(fake: Vllm, *, index_dtype: str = "bf16") -> tuple[type, type]:
    """The classes that vLLM's layer would build: (indexer, attention)."""
    index = fake.module("models.minimax_m3.common.indexer").select_indexer_impl_cls(
        topk_blocks=16, indexer_kv_dtype=index_dtype
    )
    name = RELEASES[fake.version].selector
    given: dict[str, Any] = {"topk_blocks": 16, "kv_cache_dtype": "auto"}
    if minor(fake.version) >= 26:
        given["num_kv_heads"] = 4
    both = [
        getattr(fake.module(f"models.minimax_m3.{m}"), name)(**given)
        for m in ("nvidia.model", "common.sparse_attention")
    ]
    assert both[0] == both[1]
    if minor(fake.version) < 27:
        return index, both[0]
    backend, impl = both[0]
    assert backend is fake.module("models.minimax_m3.common.sparse_attention").MiniMaxM3SparseBackend
    return index, impl


@EACH
def test_layers_get_ours(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str) -> None:
    fake = install(monkeypatch, version)
    models = fake.models()
    stock = fake.module("models.minimax_m3")
    assert all(getattr(models, name) is getattr(stock, name) for name in plugin.ARCHITECTURES)
    with caplog.at_level(logging.INFO):
        for _ in range(3):  # layers
            index, attend = chosen_impls(fake)
            assert (index.__name__, attend.__name__) == ("MsaIndexer", "MsaAttend")
    (record,) = caplog.records
    assert f"vLLM {version}, compute capability 9.0" in record.getMessage()


@EACH
def test_layers_get_stock_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    fake = install(monkeypatch, version, capability=(10, 0))
    fake.models()
    with caplog.at_level(logging.INFO):
        index, attend = chosen_impls(fake)
    assert (index.__name__, attend.__name__) == ("IndexerImpl", "SparseImpl")
    (record,) = caplog.records
    is_broken = minor(version) in (25, 26)
    assert record.levelno == (logging.WARNING if is_broken else logging.INFO)
    assert ("vllm#48603" in record.getMessage()) == is_broken
    monkeypatch.setenv("MSASERVE_VLLM", "1")
    assert [c.__name__ for c in chosen_impls(fake)] == ["MsaIndexer", "MsaAttend"]


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "0.33.0", capability=None)
    fake.models()
    assert [c.__name__ for c in chosen_impls(fake)] == ["IndexerImpl", "SparseImpl"]


def test_wrapping_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "0.33.0")
    models = fake.models()
    before = fake.module("models.minimax_m3.common.indexer").select_indexer_impl_cls
    importlib.reload(models)
    assert fake.module("models.minimax_m3.common.indexer").select_indexer_impl_cls is before


def test_a_vllm_that_does_not_fit_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake = install(monkeypatch, "0.33.0")
    monkeypatch.delattr(fake.module("models.minimax_m3.nvidia.model"), RELEASES["0.33.0"].selector)
    fake.models()
    index = fake.module("models.minimax_m3.common.indexer").select_indexer_impl_cls(topk_blocks=16)
    assert index.__name__ == "IndexerImpl"
    assert "does not fit this vLLM" in caplog.text


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.32.0"])
def test_8_bit_index_where_stock_refuses_it(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake = install(monkeypatch, version, index_dtype="fp8")
    fake.models()
    assert [c.__name__ for c in chosen_impls(fake, index_dtype="fp8")] == ["MsaIndexer", "MsaAttend"]


def test_index_dtype_is_resolved_as_newer_releases_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "0.33.0", index_dtype="auto")
    fake.config.attention_config.resolve_indexer_kv_dtype = lambda default: default
    fake.models()
    assert [c.__name__ for c in chosen_impls(fake)] == ["MsaIndexer", "MsaAttend"]


# ---- what they compute


@dataclass
class Layer:
    """One layer of the fake vLLM with our implementations and filled caches, and a step for it."""

    fake: Vllm
    indexer: Any
    attend: Any
    layer: Any
    kv_cache: torch.Tensor
    index_cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    query_lens: list[int]
    query: torch.Tensor
    index_query: torch.Tensor

    def step(self, num_decodes: int, index_table: torch.Tensor | None = None) -> torch.Tensor:
        """Output [padded T, Hq · D] of one call of the layer."""
        given = (self.query_lens, self.seq_lens)
        index_table = self.table if index_table is None else index_table
        self.fake.context.attn_metadata = {
            self.layer.layer_name: metadata(*given, self.table, num_decodes=num_decodes),
            self.indexer.index_cache.prefix: metadata(*given, index_table, num_decodes=num_decodes),
        }
        output = torch.full_like(self.query, 7.0)
        assert self.indexer(self.index_query) == (None, None)
        newer = {"query_fp8": None} if minor(self.fake.version) >= 27 else {}
        assert self.attend.forward(self.layer, self.query, self.kv_cache, output, **newer) is output
        assert self.indexer.index_query is None, "it would keep a step's memory"
        return output

    def expected(self) -> torch.Tensor:
        """Output [T, Hq, D] by the reference operators, from the caches cut up by hand."""
        num_tokens = sum(self.query_lens)
        heads = self.index_query.shape[1] // DIM
        if minor(self.fake.version) <= 25:
            k, v = self.kv_cache[:, 0], self.kv_cache[:, 1]
        else:
            k, v = (x.permute(0, 2, 1, 3) for x in (self.kv_cache[..., :DIM], self.kv_cache[..., DIM:]))
        k, v = (x.contiguous().view(E4M3) if x.element_size() == 1 else x for x in (k, v))
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = (self.table, self.seq_lens, starts)
        lens = {"max_query_len": max(self.query_lens)}
        index_q = self.index_query[:num_tokens].view(-1, heads, DIM).float()
        keys = self.index_cache.float()
        longest = int(self.seq_lens.max())
        block_ids = ops.select_blocks(
            index_q, keys, *batch, topk=self.indexer.topk_blocks, max_seq_len=longest, **lens, impl="reference"
        )
        q = self.query[:num_tokens].view(num_tokens, -1, DIM).float()
        return ops.sparse_attend(q, k.float(), v.float(), block_ids, *batch, **lens, impl="reference")


def build(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    kv_heads: int = 2,
    group: int = 4,
    is_heads_first: bool = False,
    kv_dtype: str = "auto",
    index_dtype: str = "bf16",
    topk: int = 16,
    num_padding: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> Layer:
    """Pages lie shuffled; every slot that holds no token is NaN. Index values are small integers: scores are exact."""
    fake = install(monkeypatch, version, kv_dtype=kv_dtype, index_dtype=index_dtype)
    fake.models()
    index_class, attend_class = chosen_impls(fake, index_dtype=index_dtype)
    generator = torch.Generator().manual_seed(len(query_lens) * 100 + kv_heads * 10 + group)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    num_blocks = max(2, -(-max(seq_lens) // 128))
    num_pages = len(seq_lens) * num_blocks + 1
    table = (torch.randperm(num_pages - 1, generator=generator)[: len(seq_lens) * num_blocks] + 1).int()
    table = table.view(len(seq_lens), num_blocks)
    k, v = randn(num_pages, 128, kv_heads, DIM), randn(num_pages, 128, kv_heads, DIM)
    index_k = integers(num_pages, 128, DIM)
    held = torch.zeros(num_pages, 128, dtype=torch.bool)
    for request, length in enumerate(seq_lens):
        for position in range(length):
            held[table[request, position // 128], position % 128] = True
    for cache in (k, v, index_k):
        cache[~held] = float("nan")
    if minor(version) <= 25:
        kv = torch.stack([k, v], dim=1)
        kv = kv.transpose(2, 3).contiguous().transpose(2, 3) if is_heads_first else kv
    else:
        kv = torch.cat([k, v], dim=-1).transpose(1, 2)
        kv = kv.contiguous() if is_heads_first else kv
    kv = kv.to(dtype) if kv_dtype == "auto" else kv.to(E4M3).view(torch.uint8)
    cache_dtype = dtype if index_dtype == "bf16" else E4M3
    indexer = index_class(
        num_kv_heads=kv_heads,
        scale=DIM**-0.5,
        topk_blocks=topk,
        sparse_block_size=128,
        num_index_heads=kv_heads,
        index_head_dim=DIM,
        prefix="layers.3.attn",
        local_blocks=1,
        indexer_kv_dtype=index_dtype,
    )
    indexer.index_cache.kv_cache = index_k.to(cache_dtype)
    attend = attend_class(
        kv_heads * group, DIM, DIM**-0.5, kv_heads, kv_cache_dtype=kv_dtype, topk_blocks=topk, sparse_block_size=128
    )
    layer = SimpleNamespace(layer_name="layers.3.attn", indexer=SimpleNamespace(impl=indexer))
    rows = sum(query_lens) + num_padding
    return Layer(
        fake,
        indexer,
        attend,
        layer,
        kv,
        index_k.to(cache_dtype),
        table,
        torch.tensor(seq_lens, dtype=torch.int32),
        query_lens,
        randn(rows, kv_heads * group * DIM).to(dtype),
        integers(rows, kv_heads * DIM).to(cache_dtype),
    )


def check(layer: Layer, num_decodes: int, **given: Any) -> None:
    output, expected = layer.step(num_decodes, **given), layer.expected()
    num_tokens = sum(layer.query_lens)
    # The reference took the 8-bit or 16-bit values as they are; what differs is where products are rounded.
    torch.testing.assert_close(output[:num_tokens].view_as(expected).float(), expected, rtol=2e-2, atol=2e-2)
    assert (output[num_tokens:] == 7).all(), "padding rows are not ours"


MIXED = ([1, 1, 40, 9], [2300, 129, 2400, 9])


@EACH
@pytest.mark.parametrize("is_heads_first", [False, True])
def test_decodes_and_prefills_together(monkeypatch: pytest.MonkeyPatch, version: str, is_heads_first: bool) -> None:
    check(build(monkeypatch, version, *MIXED, is_heads_first=is_heads_first), num_decodes=2)


@EACH
@pytest.mark.parametrize(("kv_dtype", "index_dtype"), [("fp8", "bf16"), ("auto", "fp8"), ("fp8_e4m3", "fp8_e4m3")])
def test_8_bit_caches(monkeypatch: pytest.MonkeyPatch, version: str, kv_dtype: str, index_dtype: str) -> None:
    check(build(monkeypatch, version, *MIXED, kv_dtype=kv_dtype, index_dtype=index_dtype), num_decodes=2)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "0.33.0"])
@pytest.mark.parametrize(("kv_heads", "group"), [(4, 16), (2, 16), (1, 16), (1, 8)])
def test_shapes_of_tensor_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, version: str, kv_heads: int, group: int
) -> None:
    """Of 64 query and 4 KV heads on 1, 2, 4 and 8 cards."""
    check(build(monkeypatch, version, [1, 1, 20], [300, 2200, 20], kv_heads=kv_heads, group=group), num_decodes=2)


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize(("group", "topk"), [(1, 16), (2, 64), (64, 20)])
def test_other_shapes_than_minimax_m3s(monkeypatch: pytest.MonkeyPatch, version: str, group: int, topk: int) -> None:
    shapes = {"kv_heads": 1, "group": group, "topk": topk}
    check(build(monkeypatch, version, [1, 1, 20], [300, 2900, 20], **shapes), num_decodes=2)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "0.33.0"])
@pytest.mark.parametrize("query_len", range(1, 9))
def test_speculative_query_lengths(monkeypatch: pytest.MonkeyPatch, version: str, query_len: int) -> None:
    check(build(monkeypatch, version, [query_len] * 3, [2200, 8, 128], num_padding=0), num_decodes=3)


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
@pytest.mark.parametrize("query_len", [1, 4])
def test_requests_that_pad_a_captured_batch(monkeypatch: pytest.MonkeyPatch, version: str, query_len: int) -> None:
    """They have query tokens and no context: nothing is selected, and what comes out is 0, not NaN."""
    layer = build(monkeypatch, version, [query_len] * 4, [300, 2200, 0, 0], num_padding=0)
    check(layer, num_decodes=4)
    assert (layer.step(4)[2 * query_len :] == 0).all()


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_prefills_alone(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    check(build(monkeypatch, version, [130, 1, 64], [2200, 130, 64]), num_decodes=0)


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_caches_with_pages_of_their_own(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """vLLM may give the index cache another group, and so another block table, than the main one."""
    layer = build(monkeypatch, version, *MIXED)
    order = torch.randperm(len(layer.index_cache), generator=torch.Generator().manual_seed(1))
    moved = torch.empty_like(layer.index_cache)
    moved[order] = layer.index_cache
    layer.indexer.index_cache.kv_cache = moved
    check(layer, num_decodes=2, index_table=order.int()[layer.table.long()])


@pytest.mark.parametrize("context", [None, [{}]])
def test_without_metadata_nothing_is_touched(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    """The run that measures memory comes before there are caches."""
    layer = build(monkeypatch, "0.33.0", [1], [10])
    layer.fake.context.attn_metadata = context
    output = torch.full_like(layer.query, 7.0)
    assert layer.indexer(layer.index_query) == (None, None)
    assert layer.attend.forward(layer.layer, layer.query, torch.empty(0), output) is output
    assert layer.indexer.index_query is None
    assert (output == 7).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the interpreter runs; on a card ops' own tests do")
@pytest.mark.parametrize("version", ["0.24.0", "0.26.0"])
@pytest.mark.parametrize("is_heads_first", [False, True])
@pytest.mark.parametrize(("group", "topk"), [(8, 16), (1, 64), (2, 20)])
def test_kernels_read_both_layouts(
    monkeypatch: pytest.MonkeyPatch, version: str, is_heads_first: bool, group: int, topk: int
) -> None:
    """Triton's kernels, by strides alone: decodes by one pair, prefills by the other."""
    pytest.importorskip("triton")
    shapes = {"kv_heads": 2, "group": group, "topk": topk, "dtype": torch.float16}
    layer = build(monkeypatch, version, [4, 4, 20], [300, 2900, 150], **shapes, is_heads_first=is_heads_first)
    used = []

    def by_kernels(*args: Any, topk: int, local_blocks: int, max_seq_len: int, **options: Any) -> None:
        q, k_cache, v_cache, index_q, index_k_cache, *where = args
        names = ("triton_decode",) * 2 if options["max_query_len"] <= 8 else ("triton_prefill", "triton_kv_major")
        used.extend(names)
        lens = {"max_query_len": options["max_query_len"], "max_seq_len": max_seq_len}
        ids = ops.select_blocks(
            index_q, index_k_cache, *where, topk=topk, local_blocks=local_blocks, **lens, impl=names[0]
        )
        ops.sparse_attend(q, k_cache, v_cache, ids, *where, **options, impl=names[1])

    attention = sys.modules["msaserve.integrations.vllm.attention"]
    monkeypatch.setattr(attention, "ops", SimpleNamespace(select_attend=by_kernels))
    check(layer, num_decodes=2)
    assert used == ["triton_decode", "triton_decode", "triton_prefill", "triton_kv_major"]
