"""The SGLang plugin: MiniMax-M3's sparse prefill and decode on our operators, by SGLang's own hooks (docs/vllm.md).

SGLang runs `register` in every process it starts and then puts the hooks in place. A call that ours do not serve goes
to SGLang's own kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msaserve import env

logger = logging.getLogger("msaserve.sglang")

TARGETS = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"


def register() -> None:
    """The entry point."""
    if env.sglang_plugin() == "off":
        logger.info("msaserve: SGLang runs its own kernels: MSASERVE_SGLANG=0")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{TARGETS}.minimax_sparse_prefill", prefill, HookType.AROUND)
    HookRegistry.register(f"{TARGETS}.minimax_sparse_decode", decode, HookType.AROUND)


def prefill(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's minimax_sparse_prefill."""
    from msaserve.integrations.sglang import attention

    return attention.around(stock, args, kwargs, attention.prefill_batch)


def decode(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's minimax_sparse_decode."""
    from msaserve.integrations.sglang import attention

    return attention.around(stock, args, kwargs, attention.decode_batch)
