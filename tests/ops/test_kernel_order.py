"""Programs of a launch may run in any order: Triton's interpreter runs them from the last to the first.

The results keep their bits, but for attention whose rows change places in a product: there numpy, unlike a card, sums a
row in another way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a card runs programs in an order of its own", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from msaserve.ops.conformance import OPERATORS, Conformance, RefusedError, Trial, implementations
from msaserve.ops.testing import KERNEL_CASES, relative_error

SPECS = {spec.name: spec for spec in KERNEL_CASES}
NAMES = ("decode_8_tokens", "prefill", "prefill_odd", "prefill_ties")


@contextmanager
def reversed_programs() -> Iterator[None]:
    place = InterpreterBuilder.set_grid_idx

    def mirrored(self: Any, x: int, y: int, z: int) -> None:
        size = self.grid_dim
        place(self, size[0] - 1 - x, size[1] - 1 - y, size[2] - 1 - z)

    with patch.object(InterpreterBuilder, "set_grid_idx", mirrored):
        yield


def checks() -> Iterator[Any]:
    for name in NAMES:
        for operator in OPERATORS:
            for impl in implementations(operator):
                if not any(word in impl for word in ("gluon", "cudnn", "two_steps")):
                    yield pytest.param(name, operator, impl, id=f"{name}-{operator}-{impl}")


def results(name: str, operator: str, impl: str) -> list[torch.Tensor]:
    """What the operator returns, and for those that write to the caches what these hold then."""
    conformance = Conformance(Trial(SPECS[name], torch.float16, "cpu"), is_short=True)
    args, options = conformance._first_call(operator)
    found = conformance._call(operator, impl, *args, **options)
    written = [*args[:4], options["index_k_cache"]] if "store" in operator else []
    returned = found if isinstance(found, tuple) else [found]
    return [x.clone() for x in (*returned, *written) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("name", "operator", "impl"), list(checks()))
def test_same_in_reverse(name: str, operator: str, impl: str) -> None:
    try:
        forwards = results(name, operator, impl)
    except RefusedError as reason:
        pytest.skip(str(reason))
    with reversed_programs():
        backwards = results(name, operator, impl)
    assert len(forwards) > 0
    for one, other in zip(forwards, backwards, strict=True):
        if operator == "sparse_attend":
            assert relative_error(one, other) < 1e-4
        else:
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@triton.jit
def _last_program_kernel(out):
    tl.store(out, tl.program_id(0))


def test_the_order_is_seen() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    _last_program_kernel[(3,)](out)
    assert out.item() == 2
    with reversed_programs():
        _last_program_kernel[(3,)](out)
    assert out.item() == 0
