"""vLLM's MiniMax-M3 models, whose sparse layers are built with our implementations. vLLM imports this by name.

Importing it puts our choice in front of vLLM's two functions that choose a layer's implementations; the classes are
vLLM's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import vllm
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.models.minimax_m3 import (
    MiniMaxM3MTP,
    MiniMaxM3SparseForCausalLM,
    MiniMaxM3SparseForConditionalGeneration,
)
from vllm.models.minimax_m3.common import indexer, sparse_attention
from vllm.platforms import current_platform

import msaserve
from msaserve import env
from msaserve.integrations import cards
from msaserve.integrations.vllm import releases
from msaserve.integrations.vllm.decision import Setting

__all__ = ["MiniMaxM3MTP", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"]

logger = init_logger("vllm.msaserve")


def _release() -> releases.Release:
    found = releases.find(vllm.__version__)
    assert found is not None, "the plugin registers nothing for releases it does not know"
    return found


def _setting() -> Setting:
    """What vLLM's configuration says of the layer that is being built."""
    config = get_current_vllm_config()
    attention = config.attention_config
    resolve = getattr(attention, "resolve_indexer_kv_dtype", None)
    capability = current_platform.get_device_capability()
    text = config.model_config.hf_text_config
    num_cards = getattr(getattr(config, "parallel_config", None), "tensor_parallel_size", 1)
    return Setting(
        forced=env.vllm_plugin() == "on",
        capability=(0, 0) if capability is None else (capability.major, capability.minor),
        triton=cards.triton_version(),
        kv_dtype=str(config.cache_config.cache_dtype),
        index_dtype=str(attention.indexer_kv_dtype if resolve is None else resolve("bf16")),
        group=text.num_attention_heads // num_cards // max(1, text.num_key_value_heads // num_cards),
        head_dim=text.head_dim,
        sparse=text.sparse_attention_config,
    )


def _why_stock() -> str | None:
    """Why the layer that is being built gets vLLM's own kernels; None if it gets ours. Says so once."""
    try:
        setting = _setting()
        reason = setting.why_stock()
    except Exception as error:  # a configuration of another form: vLLM's to judge
        reason = f"its configuration cannot be read: {error!r}"
    if reason is None:
        logger.info_once(
            "msaserve %s: MiniMax-M3 selects blocks and attends to them with msaserve's kernels (vLLM %s, compute "
            "capability %d.%d, KV cache %s, index cache %s)",
            msaserve.__version__,
            vllm.__version__,
            *setting.capability,
            setting.kv_dtype,
            setting.index_dtype,
        )
        return None
    is_right = _release().is_stock_right
    say = logger.info_once if is_right else logger.warning_once
    fault = "" if is_right else ". Those of this release misread the selected blocks (vllm#48603)"
    say("msaserve: MiniMax-M3 runs on vLLM's own kernels: %s%s", reason, fault)
    return reason


def _ours_first(choose: Callable[..., Any], ours: object) -> Callable[..., Any]:
    """`choose`, asked only when ours do not take the layer; else it gives `ours`."""

    @functools.wraps(choose)
    def chosen(**kwargs: Any) -> Any:
        return ours if _why_stock() is None else choose(**kwargs)

    chosen.__msaserve__ = True  # type: ignore[attr-defined]
    return chosen


def _install() -> None:
    from vllm.models.minimax_m3.nvidia import model

    from msaserve.integrations.vllm.attention import MsaAttend, MsaIndexer

    if getattr(indexer.select_indexer_impl_cls, "__msaserve__", False):
        return
    release = _release()
    attend = (sparse_attention.MiniMaxM3SparseBackend, MsaAttend) if release.names_backend else MsaAttend
    choose_attend = _ours_first(getattr(model, release.selector), attend)
    # Both or neither: each of ours needs the other.
    indexer.select_indexer_impl_cls = _ours_first(indexer.select_indexer_impl_cls, MsaIndexer)
    # The model has bound the function under its own name; the other binding is what else would be asked.
    setattr(model, release.selector, choose_attend)
    setattr(sparse_attention, release.selector, choose_attend)


if current_platform.is_cuda():
    try:
        _install()
    except Exception:
        logger.warning("msaserve: the plugin does not fit this vLLM; it runs its own kernels", exc_info=True)
