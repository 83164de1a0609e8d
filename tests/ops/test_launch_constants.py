"""What kernels are launched with must be JSON: with a compilation hook set, as vLLM sets one, Triton writes it down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import msaserve.ops

FILES = sorted(Path(msaserve.ops.__file__).parent.rglob("*.py"))


def launches(source: str) -> Iterator[ast.Call]:
    """Calls of the form kernel[grid](…)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield node


def layouts(source: str) -> list[str]:
    """Arguments of launches that make or name a layout themselves; a descriptor carries its own."""
    found = []
    for call in launches(source):
        for given in (*call.args, *(keyword.value for keyword in call.keywords)):
            names = [node.id for node in ast.walk(given) if isinstance(node, ast.Name)]
            names += [node.attr for node in ast.walk(given) if isinstance(node, ast.Attribute)]
            found += [ast.unparse(given) for name in names if "layout" in name.lower() or name == "get_default_for"]
    return found


def test_a_layout_is_found() -> None:
    assert layouts("kernel[grid](x, K=layout((1, 2), q.dtype))") == ["layout((1, 2), q.dtype)"]
    assert layouts("kernel[(1,)](x, gl.NVMMASharedLayout.get_default_for(box, t))") != []
    assert layouts("kernel[grid](descriptor(q, (64, 64)), S=topk)") == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_no_launch_passes_a_layout(path: Path) -> None:
    assert layouts(path.read_text()) == []


def test_launches_are_seen() -> None:
    assert sum(len(list(launches(path.read_text()))) for path in FILES) > 20
