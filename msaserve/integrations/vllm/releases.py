"""What differs between the vLLM releases that the plugin knows. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """How one vLLM release lays out what its MiniMax-M3 layers share."""

    token_major: bool
    """Whether the shared top-k buffer is [T, Hkv, topk]; else it is [Hkv, T, topk]."""
    selector: str
    """The function that picks the attention implementation of a layer, as `nvidia.model` binds it."""
    is_stock_right: bool = True
    """Whether vLLM's own kernels for this card read that buffer as it is laid out (vllm#48603, #49147)."""


_IMPL_ONLY = "select_main_impl_cls"
_WITH_BACKEND = "select_main_backend_and_impl_cls"
_BROKEN = Release(token_major=True, selector=_IMPL_ONLY, is_stock_right=False)
_CURRENT = Release(token_major=True, selector=_WITH_BACKEND)

RELEASES: dict[str, Release] = {
    "0.24.0": Release(token_major=False, selector=_IMPL_ONLY),
    "0.25.0": _BROKEN,
    "0.25.1": _BROKEN,
    "0.26.0": _BROKEN,
    "0.27.0": _CURRENT,
    "0.27.1": _CURRENT,
    "0.28.0": _CURRENT,
    "0.29.0": _CURRENT,
    "0.30.0": _CURRENT,
    "0.31.0": _CURRENT,
    "0.32.0": _CURRENT,
    "0.33.0": _CURRENT,
}


def find(version: str) -> Release | None:
    """The release of that version, whose local part ("+cu129") says nothing here; None if it is unknown."""
    return RELEASES.get(version.partition("+")[0])
