"""A vLLM of any release the plugin knows, as far as the plugin can see it: names, layouts and metadata, no kernels.

That the real releases have these names and signatures is test_vllm_contract.py's business.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from msaserve.integrations import cards

TEXT = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
SPARSE = {
    "sparse_num_index_heads": 4,
    "sparse_topk_blocks": 16,
    "sparse_block_size": 128,
    "sparse_index_dim": 128,
    "sparse_local_block": 1,
    "sparse_init_block": 0,
    "sparse_score_type": "max",
}


def minor(version: str) -> int:
    return int(version.split(".")[1])


class Registry:
    def __init__(self) -> None:
        self.registered: list[tuple[str, str]] = []

    def register_model(self, model_arch: str, model_cls: str) -> None:
        self.registered.append((model_arch, model_cls))


class Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """vLLM's loggers say some things once."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})
        self._said: set[tuple[object, ...]] = set()

    def _once(self, say: Any, *args: object) -> None:
        if args not in self._said:
            self._said.add(args)
            say(*args)

    def info_once(self, *args: object) -> None:
        self._once(self.info, *args)

    def warning_once(self, *args: object) -> None:
        self._once(self.warning, *args)


@dataclass
class Vllm:
    """One installed fake: what a test sets, and what it reads."""

    version: str
    config: SimpleNamespace
    registry: Registry
    context: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(attn_metadata=None))

    def module(self, name: str) -> Any:
        return sys.modules[f"vllm.{name}"]

    def models(self) -> Any:
        """Imports our model module, as vLLM does when it builds the model."""
        return importlib.import_module("msaserve.integrations.vllm.msa_models")


def config(*, kv_dtype: str = "auto", index_dtype: str = "bf16", num_cards: int = 1, **sparse: Any) -> SimpleNamespace:
    """What `get_current_vllm_config` gives, as far as it is read."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(indexer_kv_dtype=index_dtype),
        cache_config=SimpleNamespace(cache_dtype=kv_dtype),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**TEXT, sparse_attention_config={**SPARSE, **sparse})
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=num_cards),
    )


def install(monkeypatch: Any, version: str, *, capability: tuple[int, int] | None = (9, 0), **settings: Any) -> Vllm:
    """Puts the fake in place of vllm; the plugin's own modules that import it are loaded afresh."""
    for name in [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(cards, "triton_version", lambda: "3.6.0")
    for name in ("msa_models", "attention"):
        monkeypatch.delitem(sys.modules, f"msaserve.integrations.vllm.{name}", raising=False)
    fake = Vllm(version, config(**settings), Registry())

    def module(name: str, **names: Any) -> Any:
        made = ModuleType(name)
        for key, value in names.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
        return made

    class IndexerImpl(torch.nn.Module):
        def __init__(
            self,
            *,
            num_kv_heads: int,
            scale: float,
            topk_blocks: int,
            sparse_block_size: int,
            num_index_heads: int,
            index_head_dim: int,
            prefix: str,
            init_blocks: int = 0,
            local_blocks: int = 0,
            score_type: str = "max",
            cache_config: Any = None,
            indexer_kv_dtype: str = "bf16",
            topk_indices_buffer: torch.Tensor | None = None,
        ) -> None:
            super().__init__()
            self.topk_blocks = topk_blocks
            self.local_blocks = local_blocks
            self.num_index_heads = num_index_heads
            self.index_head_dim = index_head_dim
            dtype = torch.bfloat16 if indexer_kv_dtype == "bf16" else torch.float8_e4m3fn
            self.index_cache = SimpleNamespace(prefix=f"{prefix}.index_cache", dtype=dtype, kv_cache=torch.empty(0))

    class SparseImpl:
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            kv_cache_dtype: str = "auto",
            *,
            topk_blocks: int,
            sparse_block_size: int,
            **_: Any,
        ) -> None:
            self.num_heads = num_heads
            self.head_size = head_size
            self.scale = scale
            self.kv_cache_fp8_dtype = torch.float8_e4m3fn
            self.block_size = sparse_block_size

    class Backend:
        pass

    def select_indexer_impl_cls(*, topk_blocks: int, indexer_kv_dtype: str = "bf16") -> type:
        if indexer_kv_dtype != "bf16" and minor(version) < 32:
            raise NotImplementedError(indexer_kv_dtype)
        return IndexerImpl

    def select_main_impl_cls(**_: Any) -> type:
        return SparseImpl

    def select_main_backend_and_impl_cls(**_: Any) -> tuple[type, type]:
        return Backend, SparseImpl

    selector = select_main_impl_cls if minor(version) < 27 else select_main_backend_and_impl_cls
    platform = SimpleNamespace(
        is_cuda=lambda: capability is not None,
        get_device_capability=lambda: capability and SimpleNamespace(major=capability[0], minor=capability[1]),
    )
    classes = {
        name: type(name, (), {})
        for name in ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3MTP")
    }
    module("vllm", __version__=version, ModelRegistry=fake.registry)
    module("vllm.config", get_current_vllm_config=lambda: fake.config)
    module("vllm.forward_context", get_forward_context=lambda: fake.context)
    module("vllm.logger", init_logger=Logger)
    module("vllm.platforms", current_platform=platform)
    module("vllm.models")
    module("vllm.models.minimax_m3", **classes)
    module("vllm.models.minimax_m3.common")
    module(
        "vllm.models.minimax_m3.common.indexer",
        MiniMaxM3IndexerTritonImpl=IndexerImpl,
        select_indexer_impl_cls=select_indexer_impl_cls,
    )
    module(
        "vllm.models.minimax_m3.common.sparse_attention",
        MiniMaxM3SparseTritonImpl=SparseImpl,
        MiniMaxM3SparseBackend=Backend,
        **{selector.__name__: selector},
    )
    module("vllm.models.minimax_m3.nvidia")
    module("vllm.models.minimax_m3.nvidia.model", **{selector.__name__: selector})
    return fake


def metadata(query_lens: list[int], seq_lens: torch.Tensor, table: torch.Tensor, *, num_decodes: int) -> Any:
    """A step's metadata: the first `num_decodes` requests decode, all with the first one's query length."""
    num_decode_tokens = sum(query_lens[:num_decodes])
    num_tokens = sum(query_lens)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    decode = prefill = None
    if num_decodes:
        decode = SimpleNamespace(
            seq_lens=seq_lens[:num_decodes], block_table=table[:num_decodes], decode_query_len=query_lens[0]
        )
    if num_decodes < len(query_lens):
        prefill = SimpleNamespace(
            cu_seqlens_q=starts[num_decodes:] - num_decode_tokens,
            seq_lens=seq_lens[num_decodes:],
            context_lens=(seq_lens - torch.tensor(query_lens, dtype=torch.int32))[num_decodes:],
            block_table=table[num_decodes:],
            max_query_len=max(query_lens),
            max_seq_len=int(seq_lens.max()),
        )
    return SimpleNamespace(
        max_seq_len=int(seq_lens.max()),
        num_actual_tokens=num_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        num_prefills=len(query_lens) - num_decodes,
        num_prefill_tokens=num_tokens - num_decode_tokens,
        decode=decode,
        prefill=prefill,
    )
