"""Operator × kernel × small case by msaserve.ops.conformance: in Triton's interpreter, or on a card if there is one.

`benchmarks/ops/conformance.py` runs the same on a card, at M3's shapes too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.conformance import (
    OPERATORS,
    SWAP,
    Conformance,
    MismatchError,
    RefusedError,
    Scales,
    Trial,
    implementations,
    poisoned,
)
from msaserve.ops.select_blocks import reference
from msaserve.ops.testing import CASES_8_BITS, DECODE_CASES, KERNEL_CASES, PREFILL_CASES, m3_spec

HAS_CARD = torch.cuda.is_available()
SPECS = {spec.name: spec for spec in KERNEL_CASES}
READERS = ("select_blocks", "sparse_attend", "dense_attend")
IN_8_BITS = ("decode", "prefill_odd")
"""The interpreter reads 8-bit NaN as 480 and rounds up to powers of two wrongly: ordinary values, and only reads."""


@lru_cache(maxsize=1)
def conformance(name: str, scales: Scales | None) -> Conformance:
    trial = Trial(SPECS[name], torch.bfloat16 if HAS_CARD else torch.float16, "cuda" if HAS_CARD else "cpu", scales)
    return Conformance(trial, is_short=True)


def checks() -> Iterator[Any]:
    """Case after case, so that each is built once."""
    for name in SPECS:
        for scales in (None, "tensor", "head"):
            for operator in OPERATORS if scales is None else READERS:
                for impl in implementations(operator):
                    if (scales is None or name in IN_8_BITS) and (HAS_CARD or "gluon" not in impl):
                        yield pytest.param(name, scales, operator, impl, id=f"{name}-{scales}-{operator}-{impl}")


@pytest.mark.parametrize(("name", "scales", "operator", "impl"), list(checks()))
def test_kernel(name: str, scales: Scales | None, operator: str, impl: str) -> None:
    try:
        conformance(name, scales).check(operator, impl)
    except RefusedError as reason:
        pytest.skip(str(reason))


def break_one(operator: str, spoil: Any) -> Any:
    """The operator, whose results `spoil` changes unless the reference computes them."""
    right = getattr(ops, operator)

    def wrong(*args: Any, impl: str, **options: Any) -> Any:
        result = right(*args, impl="reference", **options)
        if impl != "reference":
            spoil(result, args)
        return result

    return patch.object(ops, operator, wrong)


SPOILS = {
    "one block of one row": ("select_blocks", lambda ids, _: ids[0, 3].copy_(torch.tensor([0, 1, 2, 4]))),
    "an id twice": ("select_blocks", lambda ids, _: ids[0, 0, 1].copy_(ids[0, 0, 0])),
    "blocks in a padding row": ("select_blocks", lambda ids, _: ids[0, -1, 0].fill_(0)),
    "one head of one row": ("sparse_attend", lambda out, _: out[0, 1].mul_(0.9)),
    "a padding row": ("sparse_attend", lambda out, _: out[-1, 0, 0].fill_(1e-6)),
    "NaN from scratch": ("sparse_attend", lambda out, _: out[0, 0].copy_(torch.empty(64))),
    "a neighbour's lengths": ("sparse_attend", lambda out, args: out[0].add_(args[5][4:5, None] * 1e-3)),
    "one entry": ("remap", lambda rows, _: rows.entries[0, :2].copy_(rows.entries[0, :2].flip(0))),
    "one slot": ("store_kv", lambda _, args: args[2][0, 0].fill_(0)),
}


@pytest.mark.skipif(HAS_CARD, reason="needs no card")
@pytest.mark.parametrize("what", SPOILS)
def test_a_wrong_result_is_found(what: str) -> None:
    operator, spoil = SPOILS[what]
    trial = Trial(SPECS["decode"], torch.float16, "cpu")
    with break_one(operator, lambda result, args: None):
        Conformance(trial, is_short=True).check(operator, "ours")
    with break_one(operator, spoil), pytest.raises(MismatchError):
        Conformance(trial, is_short=True).check(operator, "ours")


@pytest.mark.skipif(HAS_CARD, reason="needs no card")
@pytest.mark.parametrize(("scales", "is_allowed"), [(None, False), ("tensor", False), ("head", True)])
def test_scores_of_13_bits_are_found_unless_queries_have_8(scales: Scales | None, is_allowed: bool) -> None:
    """As Hopper sums 8-bit products. Short contexts have no scores so near each other."""
    trial = Trial(m3_spec("long", ((300, 32_048),), group=1), torch.float16, "cpu", scales)
    score, right = reference.index_score, ops.select_blocks

    def rounded(*args: Any, **options: Any) -> torch.Tensor:
        scores = score(*args, **options)
        step = torch.ldexp(torch.ones(()), torch.frexp(scores).exponent - 13)
        return torch.where(scores.isfinite(), (scores / step).trunc() * step, scores)

    def wrong(*args: Any, impl: str, **options: Any) -> torch.Tensor:
        with patch.object(reference, "index_score", score if impl == "reference" else rounded):
            return right(*args, impl="reference", **options)

    with patch.object(ops, "select_blocks", wrong):
        suite = Conformance(trial, is_short=True)
        if is_allowed:
            assert suite.check("select_blocks", "ours") > SWAP
        else:
            with pytest.raises(MismatchError, match="a block left out is better"):
                suite.check("select_blocks", "ours")


def test_poisoned_memory_is_nan_and_left_so_no_longer() -> None:
    with poisoned():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.zeros(3, dtype=torch.int32)).min() > 1 << 30
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(HAS_CARD, reason="a card runs the whole of it")
def test_the_script_prints_a_table_and_says_what_failed(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "ops" / "conformance.py"
    options = ["--device", "cpu", "--dtype", "float16", "--cases", "small", "--only", "m3", "--jobs", "1"]
    # The interpreter rounds 8-bit values wrongly (above): failures to be told.
    command = [sys.executable, str(script), *options, "--operators", "combine,norm_rope_store"]
    record = str(tmp_path / "record.jsonl")
    run = partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    done = run([*command, "--record", record])
    assert done.returncode == 1, done.stderr
    assert "| combine | triton | float16 | 3 | 0 | 0 | " in done.stdout
    assert "FAILED norm_rope_store triton [m3, fp8 per head, float16]: k: no neighbour" in done.stdout
    assert "3 cases, 6 checks, 2 failures" in done.stdout
    Path(record).write_text(Path(record).read_text() + '{"machine": {}, "resul')
    again = run([*command, "--record", record, "--known", record])
    assert "m3, float16" not in again.stdout, "a case without a failure was run again"
    assert "2 cases, 2 checks, 2 failures" in again.stdout
    merged = run([sys.executable, str(script), "--report", record])
    assert merged.returncode == 1
    assert len([line for line in Path(record).read_text().splitlines() if line.endswith("}")]) == 5
    assert "| combine | triton | float16 | 3 | 0 | 0 | " in merged.stdout
    assert "3 cases, 6 checks, 2 failures" in merged.stdout


def test_names_of_cases_are_unique() -> None:
    names = [spec.name for spec in (*KERNEL_CASES, *DECODE_CASES, *PREFILL_CASES)]
    assert len(set(names)) == len(names)
    assert set(CASES_8_BITS) <= set(names)
