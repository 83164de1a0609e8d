"""No kernel touches memory beyond the tensors it was given: every address that Triton's interpreter reads or writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("on a card compute-sanitizer does this: benchmarks/ops/sanitize.sh", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

from msaserve.ops.conformance import OPERATORS, Conformance, RefusedError, Trial, implementations
from msaserve.ops.testing import KERNEL_CASES

SPECS = {spec.name: spec for spec in KERNEL_CASES}
NAMES = ("decode", "decode_8_tokens", "decode_odd", "prefill", "prefill_odd", "prefill_special", "m3")


class Memory:
    """The storages of the launch that runs, as first and end addresses."""

    def __init__(self) -> None:
        self.first = self.end = np.zeros(0, dtype=np.uint64)
        self.num_checked = 0

    def take(self, arguments: tuple[Any, dict[str, Any]]) -> None:
        tensors = [x for x in (*arguments[0], *arguments[1].values()) if isinstance(x, torch.Tensor)]
        spans = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self.first = np.array(sorted(spans), dtype=np.uint64)
        self.end = self.first + np.array([spans[int(first)] for first in self.first], dtype=np.uint64)

    def check(self, pointers: Any, mask: Any) -> None:
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.uint64)
        if addresses.size == 0:
            return
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        place = np.searchsorted(self.first, addresses, side="right").astype(np.int64) - 1
        is_inside = (place >= 0) & (addresses + size <= self.end[np.maximum(place, 0)])
        assert is_inside.all(), f"{int((~is_inside).sum())} of {addresses.size} addresses are in no tensor"
        self.num_checked += addresses.size


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    start, load = GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load
    store, atomic = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw

    def checked_start(self: Any, *args: Any) -> Any:
        arguments = start(self, *args)
        memory.take(arguments)
        return arguments

    def checked_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        memory.check(pointers, mask)
        return load(self, pointers, mask, *args)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        memory.check(pointers, mask)
        return store(self, pointers, value, mask, *args)

    def checked_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        memory.check(pointers, mask)
        return atomic(self, operation, pointers, value, mask, *args)

    with (
        patch.object(GridExecutor, "_init_args_hst", checked_start),
        patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        patch.object(InterpreterBuilder, "create_masked_store", checked_store),
        patch.object(InterpreterBuilder, "create_atomic_rmw", checked_atomic),
    ):
        yield memory


def checks() -> Iterator[Any]:
    for name in NAMES:
        for operator in OPERATORS:
            for impl in implementations(operator):
                if not any(word in impl for word in ("gluon", "cudnn", "two_steps")):
                    yield pytest.param(name, operator, impl, id=f"{name}-{operator}-{impl}")


@pytest.mark.parametrize(("name", "operator", "impl"), list(checks()))
def test_every_address_is_in_a_tensor(memory: Memory, name: str, operator: str, impl: str) -> None:
    """block_table is as narrow as the longest sequence allows."""
    conformance = Conformance(Trial(SPECS[name], torch.float16, "cpu"), is_short=True)
    case, spec = conformance.case, SPECS[name]
    table = case.block_table[:, : -(-spec.max_seq_len // spec.block_size)].contiguous()
    conformance.case = replace(case, block_table=table)
    args, options = conformance._first_call(operator)
    try:
        conformance._call(operator, impl, *args, **options)
    except RefusedError as reason:
        pytest.skip(str(reason))
    assert memory.num_checked > 0


@triton.jit
def _copy_kernel(x, out, size: tl.constexpr, is_masked: tl.constexpr):
    i = tl.arange(0, size)
    if is_masked:
        tl.store(out + i, tl.load(x + i, mask=i < 10), mask=i < 10)
    else:
        tl.store(out + i, tl.load(x + i))


def test_a_step_over_the_end_is_seen(memory: Memory) -> None:
    x, out = torch.zeros(10), torch.zeros(16)
    _copy_kernel[(1,)](x, out, size=16, is_masked=True)
    assert memory.num_checked == 20
    with pytest.raises(Exception, match="6 of 16 addresses are in no tensor"):
        _copy_kernel[(1,)](x, out, size=16, is_masked=False)
