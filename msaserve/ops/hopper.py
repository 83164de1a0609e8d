"""Whether the Triton kernels run where a tensor lies. Imports no Triton, so that asking costs nothing without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; asking PyTorch each time costs as much as a check of all shapes."""
    return torch.cuda.get_device_capability(device)


def why_not_triton(x: torch.Tensor) -> str | None:
    """None if plain Triton kernels run there: on a card of compute capability 8 or more, or in the interpreter."""
    if not has_triton():
        return "Triton is not installed"
    if x.is_cuda:
        found = capability(x.device)
        return None if found[0] >= 8 else f"compute capability {found} is under 8.0"
    if x.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"{x.device} is no CUDA device"
    if x.dtype == torch.bfloat16:
        return "Triton's interpreter cannot multiply bfloat16"
    return None


def why_not_wgmma(x: torch.Tensor) -> str | None:
    """None if kernels of Hopper's own instructions run there."""
    if not x.is_cuda:
        return f"{x.device} is no CUDA device"
    if capability(x.device)[0] != 9:
        return "not a Hopper card"
    return why_not_triton(x)


def on_card(x: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """`pays` of kernels that the interpreter runs too, for tests alone.

    8-bit caches are served by name alone: these have not been checked with them on a card yet.
    """
    return x.is_cuda and not any(isinstance(arg, torch.Tensor) and arg.element_size() == 1 for arg in args)


def on_card_in_half(x: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """`pays` of kernels that a card has checked with queries of half precision, over caches of 8 bits too."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def on_card_in_8_bits_too(x: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """`pays` of kernels that a card has checked with 8-bit caches too."""
    return x.is_cuda


def by_name(*args: object, **kwargs: object) -> bool:
    """`pays` of kernels that have not been checked on a card yet."""
    return False


def ask_later(target: str) -> Callable[..., str | None]:
    """The `why_not` at "module:function", whose module is imported only where Triton runs."""

    def why_not(x: torch.Tensor, *args: object, **kwargs: object) -> str | None:
        reason = why_not_triton(x)
        if reason is not None:
            return reason
        module, _, function = target.partition(":")
        try:
            asked = getattr(import_module(module), function)
        except ImportError as error:  # Gluon has moved names between releases
            if not str(error.name).startswith("triton"):
                raise
            return f"this Triton does not have what it needs: {error}"
        answer: str | None = asked(x, *args, **kwargs)
        return answer

    return why_not
