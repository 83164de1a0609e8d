"""What `impl=None` takes on a card: only what a card has checked for such arguments (docs/measured.md)."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import by_name

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
READERS = ("triton_decode", "gluon_kv_major", "triton_kv_major")


def paying(operator: str, *args: torch.Tensor, **options: Any) -> list[str]:
    """The kernels that would be taken, best first, if they can serve the arguments."""
    impls = import_module(f"msaserve.ops.{operator}").IMPLS
    return [one.name for one in impls if "reference" not in one.name and one.pays(*args, **options)]


def on_card(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "topk", "local_blocks", "expected"),
    [
        (BF16, BF16, 16, 1, ["triton_decode", "gluon_prefill", "triton_prefill"]),
        (FP16, FP16, 16, 1, ["triton_decode", "gluon_prefill", "triton_prefill"]),
        (FP8, FP8, 17, 1, ["gluon_prefill", "triton_prefill"]),
        (BF16, FP8, 18, 2, ["triton_decode", "triton_prefill"]),
        (FP16, FP8, 16, 1, ["triton_decode", "triton_prefill"]),
        (BF16, BF16, 64, 1, ["triton_decode", "gluon_prefill", "triton_prefill"]),
        (FP32, FP32, 18, 1, ["gluon_prefill", "triton_prefill"]),
    ],
)
def test_select_blocks(
    dtype: torch.dtype, cache_dtype: torch.dtype, topk: int, local_blocks: int, expected: list[str]
) -> None:
    args = on_card(1, 4, 128, dtype=dtype), on_card(9, 128, 128, dtype=cache_dtype)
    assert paying("select_blocks", *args, topk=topk, local_blocks=local_blocks) == expected


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "group", "expected"),
    [
        (BF16, BF16, 16, READERS),
        (BF16, BF16, 1, READERS),
        (FP16, FP16, 16, READERS),
        (BF16, FP8, 16, READERS),
        (FP32, FP32, 16, ("gluon_kv_major", "triton_kv_major")),
    ],
)
def test_sparse_attend(dtype: torch.dtype, cache_dtype: torch.dtype, group: int, expected: tuple[str, ...]) -> None:
    cache = on_card(9, 128, 4, 128, dtype=cache_dtype)
    args = on_card(1, 4 * group, 128, dtype=dtype), cache, cache
    where = on_card(4, 1, 16, dtype=torch.int32), on_card(1, 8, dtype=torch.int32)
    assert paying("sparse_attend", *args, *where, max_query_len=1) == list(expected)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(BF16, BF16), (BF16, FP8), (FP16, FP16)])
def test_dense_attend(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Prefill's kernels come after decode's, so that they take what it does not serve."""
    cache = on_card(9, 128, 4, 64, dtype=cache_dtype)
    found = paying("dense_attend", on_card(1, 64, 64, dtype=dtype), cache, cache)
    assert found == ["triton_decode", "gluon_prefill", "triton_prefill"]


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_dim", "topk", "is_taken"),
    [
        (BF16, BF16, 128, 16, True),
        (BF16, FP8, 128, 16, True),
        (FP16, FP16, 128, 32, True),
        (BF16, BF16, 128, 64, False),
        (BF16, BF16, 64, 16, False),
        (FP32, FP32, 128, 16, False),
    ],
)
def test_select_attend(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, topk: int, is_taken: bool) -> None:
    cache = on_card(9, 128, 4, head_dim, dtype=cache_dtype)
    found = paying("select_attend", on_card(1, 64, head_dim, dtype=dtype), cache, cache, topk=topk)
    assert found == ["gluon_decode"] * is_taken + ["two_steps"]


def test_what_does_not_pay_is_not_asked() -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise AssertionError("asked")

    impls = (Impl("never", "nowhere:nothing", fail, by_name), Impl("sum", "math:fsum", always))
    assert choose("add", impls, None, [1, 2]) is math.fsum
    with pytest.raises(AssertionError, match="asked"):
        choose("add", impls, "never", [1, 2])
