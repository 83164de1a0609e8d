"""What every operator checks before it computes: shapes, dtypes, devices. Reads no device memory."""

from __future__ import annotations

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CACHE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)

Spec = tuple[str, torch.Tensor | None, tuple[str, ...]]


def check_shapes(op: str, *specs: Spec) -> dict[str, int]:
    """The named sizes of (name, tensor, dimension names) specs; a tensor that is None is left out.

    "B+1" is one more than B, which an earlier spec must have named.

    Raises:
        ValueError: a tensor has another number of dimensions, or a size that contradicts an earlier one;
            tensors are on different devices.
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    for name, tensor, dims in specs:
        if tensor is None:
            continue
        shape = tensor.shape
        if len(shape) != len(dims):
            raise ValueError(f"{op}: {name} has shape {list(shape)}, expected [{', '.join(dims)}]")
        for dim, size in zip(dims, shape, strict=True):
            expected = sizes[dim[:-2]] + 1 if dim.endswith("+1") else sizes.setdefault(dim, size)
            if size != expected:
                raise ValueError(
                    f"{op}: {name} has shape {list(shape)}, expected [{', '.join(dims)}] with {dim} = {expected}"
                )
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device}, {specs[0][0]} on {device}")
    return sizes


def check_dtype(op: str, name: str, tensor: torch.Tensor | None, allowed: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError unless the tensor is None or of an allowed dtype."""
    if tensor is not None and tensor.dtype not in allowed:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, expected {' or '.join(str(dtype) for dtype in allowed)}")


def check_int32(op: str, **tensors: torch.Tensor) -> None:
    """Raises ValueError unless every tensor is int32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{op}: {name} is {tensor.dtype}, expected torch.int32")


def check_floats(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless every tensor given is of a floating dtype that the operators compute in."""
    for name, tensor in tensors.items():
        check_dtype(op, name, tensor, FLOAT_DTYPES)


def check_caches(op: str, **caches: torch.Tensor | None) -> None:
    """Raises ValueError unless every cache given has a known dtype and a contiguous last dimension."""
    for name, cache in caches.items():
        if cache is None:
            continue
        check_dtype(op, name, cache, CACHE_DTYPES)
        if cache.stride(-1) != 1 and cache.shape[-1] != 1:
            raise ValueError(f"{op}: {name} has strides {cache.stride()}, expected a contiguous last dimension")


def check_index_queries(op: str, index_q: torch.Tensor, index_k_cache: torch.Tensor) -> None:
    """Raises ValueError unless index queries and keys are of known dtypes, 8-bit queries beside 8-bit keys only."""
    check_dtype(op, "index_q", index_q, CACHE_DTYPES)
    check_caches(op, index_k_cache=index_k_cache)
    if index_q.itemsize == 1 and index_k_cache.dtype != index_q.dtype:
        raise ValueError(f"{op}: index_q is {index_q.dtype}, index_k_cache {index_k_cache.dtype}")


def check_groups(op: str, num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head.

    Raises:
        ValueError: the heads do not divide.
    """
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: {num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    return num_heads // num_kv_heads


def check_scale(op: str, name: str, scale: torch.Tensor | None, num_kv_heads: int) -> None:
    """Raises ValueError unless the scale is None, a scalar tensor or [num_kv_heads]."""
    if scale is None:
        return
    check_dtype(op, name, scale, (torch.float32, torch.float64))
    if tuple(scale.shape) not in ((), (1,), (num_kv_heads,)):
        raise ValueError(f"{op}: {name} has shape {list(scale.shape)}, expected [] or [{num_kv_heads}]")


def check_selection(op: str, topk: int, local_blocks: int) -> None:
    """Raises ValueError unless 1 ≤ local_blocks ≤ topk."""
    if not 1 <= local_blocks <= topk:
        raise ValueError(f"{op}: local_blocks = {local_blocks} must be from 1 to topk = {topk}")
