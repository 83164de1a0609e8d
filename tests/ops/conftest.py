"""What the operators' tests share: every implementation of an operator, on every device there is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from msaserve import ops
from msaserve.ops import tape

HAS_CUDA = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "operator(name): the operator whose implementations a test runs on")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `implementation` runs on each of its `operator` mark's, one that takes `device` on each.

    Without a CUDA device only the reference implementations can run.
    """
    if "implementation" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("operator")
        assert mark is not None
        names = [impl.name for impl in importlib.import_module(f"msaserve.ops.{mark.args[0]}").IMPLS]
        metafunc.parametrize("implementation", [n for n in names if HAS_CUDA or n.startswith("reference")])
    if "device" in metafunc.fixturenames:
        cuda = [pytest.param("cuda", marks=pytest.mark.cuda)] if HAS_CUDA else []
        metafunc.parametrize("device", ["cpu", *cuda])


@pytest.fixture(autouse=True)
def forget_tapes() -> Iterator[None]:
    """Tests change constants that launches were noted with."""
    yield
    tape.clear()


@pytest.fixture
def call(request: pytest.FixtureRequest, implementation: str) -> Callable[..., Any]:
    """The marked operator with impl=implementation; the test is skipped where that cannot serve its arguments."""
    mark = request.node.get_closest_marker("operator")
    assert mark is not None
    operator = getattr(ops, mark.args[0])

    def run(*args: Any, **options: Any) -> Any:
        try:
            return operator(*args, **options, impl=implementation)
        except ValueError as error:
            if "cannot serve these arguments" not in str(error):
                raise
            pytest.skip(str(error))

    return run
