"""The prefill kernels against the reference at tiny sizes: in Triton's interpreter, or on a card if there is one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops.select_blocks import triton_prefill
from msaserve.ops.testing import SMALL_CASES, Case, CaseSpec, build, m3_spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {spec.name: spec for spec in SMALL_CASES}


def small(name: str) -> Case:
    return build(SPECS[name], device=DEVICE)


def choose(case: Case, impl: str) -> torch.Tensor:
    """Sorted: compared as sets."""
    out = torch.full((case.spec.num_kv_heads, len(case.index_q), case.spec.topk), 7, dtype=torch.int32, device=DEVICE)
    args = (case.index_q, case.index_k_cache, *case.batch)
    return ops.select_blocks(*args, **case.selection_options, out=out, impl=impl).sort(-1).values


@pytest.mark.parametrize(
    "name",
    [
        "ragged",
        "padding",
        "nothing_but_padding",
        "all_ties",
        "special_keys",
        "local_blocks_2",
        "group_1",
        "topk_1",
        "topk_64",
    ],
)
def test_selection_equals_the_reference(name: str) -> None:
    case = small(name)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


@pytest.mark.parametrize("name", ["all_ties", "special_keys", "local_blocks_2", "padding"])
def test_selection_of_many_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is sorted in registers PyTorch ranks the blocks, by the same rules."""
    monkeypatch.setattr(triton_prefill, "MAX_LOG", 0)
    case = small(name)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))
    monkeypatch.setattr(triton_prefill, "SCRATCH_BYTES", 1)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


@pytest.mark.parametrize("name", ["all_ties", "special_keys"])
def test_selection_in_segments_and_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cut into segments, ties across their borders; scratch for one tile of queries at a time."""
    monkeypatch.setattr(triton_prefill, "num_workers", lambda device: 1000)
    monkeypatch.setattr(triton_prefill, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(triton_prefill, "MIN_SEGMENT", 2)
    case = small(name)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


LONG = {"num_kv_heads": 3, "group": 1, "head_dim": 16}
LONG_REQUESTS = ((20, 3100), (3, 5), (0, 0), (9, 1289), (2, 128), (1, 2000))


@pytest.mark.parametrize(("group", "segments"), [(0, False), (8, True), (16, False), (16, True)])
@pytest.mark.parametrize(
    "spec",
    [
        CaseSpec(name="normal", requests=LONG_REQUESTS, index_values="integers", **LONG),
        CaseSpec(name="ties", requests=LONG_REQUESTS, index_values="equal", **LONG),
        CaseSpec(name="special", requests=LONG_REQUESTS, index_values="special", local_blocks=2, topk=12, **LONG),
        CaseSpec(name="only_local", requests=((5, 600), (2, 3)), local_blocks=2, topk=2, **LONG),
    ],
    ids=lambda spec: spec.name,
)
def test_selection_by_groups(spec: CaseSpec, group: int, segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of blocks first, then the blocks of the best groups and those after the last whole group."""
    monkeypatch.setattr(triton_prefill, "group_of", lambda num_blocks, log: min(group, 1 << log))
    monkeypatch.setattr(triton_prefill, "num_workers", lambda device: 1000 if segments else 1)
    monkeypatch.setattr(triton_prefill, "MIN_SEGMENT", 48)
    monkeypatch.setattr(triton_prefill, "SCRATCH_BYTES", 1 << 18)
    case = build(spec, device=DEVICE)
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


def test_splits_even_out_a_prompt_from_its_start() -> None:
    """128 tiles that see 1 to 64 blocks: whole, the longest decide; in splits, all workers are busy to the end."""
    work = sum(64 - tile // 2 for tile in range(128)) / 132
    blocks = triton_prefill.split_of(128, 64, 132, 1, 64)
    assert triton_prefill.makespan(128, 64, 132, 64, 64) > 1.8 * work
    assert triton_prefill.makespan(128, 64, 132, 64, blocks) < 1.3 * work
    assert triton_prefill.split_of(128, 544, 132, 16, 64) == 544
    assert triton_prefill.split_of(64, 4096, 132, 16, 32) % 16 == 0


def test_groups_are_of_8_then_of_16() -> None:
    assert [triton_prefill.group_of(n, 4) for n in (64, 65, 544, 2047, 2048, 8192)] == [0, 8, 8, 8, 16, 16]
    assert triton_prefill.group_of(8192, 3) == 8  # a group is no longer than what is sorted at once


@pytest.mark.parametrize(
    ("num_programs", "num_blocks", "segments"),
    [(1024, 64, 1), (1024, 298, 4), (1024, 544, 4), (512, 4096, 8), (256, 8192, 8), (8, 8192, 32), (8, 40, 1)],
)
def test_segments_are_those_that_were_fastest(num_programs: int, num_blocks: int, segments: int) -> None:
    """docs/kernels.md has the times; the last two are tiles that leave most of a card of 132 empty."""
    assert triton_prefill.segments_of(num_programs, num_blocks, 132) == segments


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("name", ["ragged", "local_blocks_2", "special_keys"])
def test_selection_of_8_bits_equals_the_reference(name: str, is_narrow: bool) -> None:
    if name == "special_keys" and DEVICE == "cpu":
        pytest.skip("Triton's interpreter reads an 8-bit NaN as 480")
    case = build(SPECS[name], device=DEVICE, cache_dtype=torch.float8_e4m3fn)
    if is_narrow:
        case = replace(case, index_q=case.index_q.to(torch.float8_e4m3fn))
    assert torch.equal(choose(case, "triton_prefill"), choose(case, "reference"))


@pytest.mark.parametrize(
    "impl",
    [
        "triton_prefill",
        pytest.param(
            "gluon_prefill", marks=[pytest.mark.cuda, pytest.mark.skipif(DEVICE == "cpu", reason="needs a card")]
        ),
    ],
)
def test_wider_queries_choose_by_exact_scores_of_8_bit_keys(impl: str) -> None:
    """Of 250 blocks some 35 % of the rows choose another one if queries are rounded, 0.6 % if sums are kept to 13 bits.

    Scores in float64; near-ties may go to the other block as far as float32 sums differ.
    """
    dtype = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    spec = m3_spec("long", ((64 if DEVICE == "cpu" else 400, 32_048), (1 if DEVICE == "cpu" else 200, 13_045)))
    case = build(spec, dtype=dtype, device=DEVICE, cache_dtype=torch.float8_e4m3fn)
    exact = replace(case, index_q=case.index_q.double(), index_k_cache=case.index_k_cache.double())
    scores = ops.index_score(exact.index_q, exact.index_k_cache, *case.batch, **case.bounds, impl="reference")
    chosen, expected = choose(case, impl).long(), choose(exact, "reference").long()
    differing = (chosen != expected).any(-1)
    assert differing.float().mean() < 1e-3
    taken, best = (scores.gather(2, ids.clamp(min=0)).masked_fill(ids < 0, 0).sum(-1) for ids in (chosen, expected))
    assert ((best - taken) <= 1e-5 * scores.amax(-1)).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_hopper_selection_equals_the_reference() -> None:
    case = build(m3_spec("chunk", ((300, 5000), (1, 1), (77, 77), (200, 2048))), dtype=torch.bfloat16, device=DEVICE)
    chosen, expected = choose(case, "gluon_prefill"), choose(case, "reference")
    assert (chosen == expected).all(-1).float().mean() > 0.99


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("lengths", [((300, 5000), (77, 77)), ((130, 40_000),)])
def test_another_call_of_the_same_shapes_follows_its_own_inputs(lengths: tuple[tuple[int, int], ...]) -> None:
    """The second call launches what was noted of the first, on tensors that lie elsewhere."""
    for seed in range(3):
        spec = m3_spec("again", lengths, index_values="integers")
        case = build(spec, dtype=torch.bfloat16, device=DEVICE)
        torch.manual_seed(seed)
        case = replace(case, index_q=torch.randint_like(case.index_q, -3, 4))
        assert torch.equal(choose(case, "gluon_prefill"), choose(case, "reference"))
