"""TMA for the Gluon kernels: the load under its name in the Triton at hand, and descriptors made cheaply."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): fetch a box and count its bytes on the barrier."""


@lru_cache(maxsize=64)
def layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a box in shared memory. Working it out takes longer than a launch, so it is kept. For descriptors alone: a
    layout among a kernel's constants is no JSON, which Triton writes of them when a compilation hook is set, as vLLM does.
    """
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(box), element)


def descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A TMA descriptor of a 16-bit or 8-bit tensor on 16-byte boundaries, that moves boxes of this shape."""
    return TensorDescriptor.from_tensor(tensor, list(box), layout(box, tensor.dtype))
