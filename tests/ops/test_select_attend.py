"""select_attend is select_blocks, then sparse_attend; on a Hopper card its kernels against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from msaserve import ops
from msaserve.ops.testing import SMALL_CASES, Case, CaseSpec, build, m3_spec, relative_error

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SPECS = {spec.name: spec for spec in SMALL_CASES}


def call(case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    args = {"q": case.q, "k_cache": case.k_cache, "v_cache": case.v_cache}
    args |= {"index_q": case.index_q, "index_k_cache": case.index_k_cache}
    args |= dict(zip(("block_table", "seq_lens", "cu_query_lens"), case.batch, strict=True))
    return ops.select_attend(**{**args, **case.selection_options, **changes})


@pytest.mark.parametrize("name", ["ragged", "padding", "vllm_layout", "special_keys"])
@pytest.mark.parametrize("impl", [None, "two_steps", "reference"])
def test_it_is_one_operator_after_the_other(name: str, impl: str | None) -> None:
    case = build(SPECS[name])
    out, ids = call(case, scale=0.3, v_scale=torch.tensor(2.0), impl=impl)
    want = ops.select_blocks(case.index_q, case.index_k_cache, *case.batch, **case.selection_options)
    assert torch.equal(ids, want)
    attended = ops.sparse_attend(
        case.q,
        case.k_cache,
        case.v_cache,
        want,
        *case.batch,
        scale=0.3,
        v_scale=torch.tensor(2.0),
        max_query_len=case.spec.max_query_len,
    )
    assert relative_error(out, attended) < 1e-6


def test_it_writes_to_out() -> None:
    case = build(SPECS["padding"])
    into = torch.full_like(case.q, torch.nan)
    out, _ = call(case, out=into)
    assert out is into
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": build(SPECS["ragged"]).q[:, :7]}, r"7 query heads are no multiple of 2 KV heads"),
        ({"v_cache": build(SPECS["ragged"]).v_cache.half()}, r"k_cache is torch.float32, v_cache torch.float16"),
        ({"index_k_cache": build(SPECS["ragged"]).index_k_cache[1:]}, r"index_k_cache has shape .* with P ="),
        ({"max_seq_len": 129}, r"max_seq_len = 129 does not fit block_table \[5, 8\]"),
        ({"local_blocks": 5}, r"local_blocks = 5 must be from 1 to topk = 4"),
        ({"k_scale": torch.ones(3)}, r"k_scale has shape \[3\], expected \[\] or \[2\]"),
        ({"out": build(SPECS["ragged"]).q.half()}, r"out is torch.float16, expected torch.float32"),
        ({"impl": "gluon_decode"}, r"impl='gluon_decode' cannot serve these arguments"),
        ({"impl": "none_such"}, r"impl='none_such' is unknown"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^select_attend: .*{message}"):
        call(build(SPECS["ragged"]), **changes)


CARD_SPECS = [
    m3_spec("m3_ragged", ((1, 9000), (1, 1), (0, 0), (1, 128), (1, 129), (1, 2047), (1, 2049))),
    m3_spec("m3_combs", ((1, 140000), (1, 9999)), index_values="integers"),
    m3_spec("m3_ties", ((1, 140000), (1, 9999), (1, 900)), index_values="equal"),
    m3_spec("m3_8_tokens", ((8, 5000), (8, 8), (3, 200)), layout="vllm", index_values="integers", local_blocks=2),
    m3_spec("m3_special", ((4, 9000), (2, 300), (1, 5)), index_values="special", tail_rows=2),
    CaseSpec(
        name="small",
        requests=((2, 9000), (1, 70), (0, 30)),
        num_kv_heads=2,
        group=4,
        head_dim=64,
        index_dim=64,
        block_size=64,
        topk=5,
    ),
]


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper card")
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("spec", CARD_SPECS, ids=lambda spec: spec.name)
def test_decode_on_a_card(spec: CaseSpec, cache_dtype: torch.dtype) -> None:
    """Eager and in a graph whose steps follow each other in the same memory, with other queries every time."""
    case = build(spec, dtype=torch.bfloat16, device="cuda", cache_dtype=cache_dtype)
    queries = [case.q, case.q.flip(0).contiguous(), case.q * 0.5]
    index_queries = [case.index_q, case.index_q.flip(1).contiguous(), -case.index_q]

    def steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            call(case, q=q, index_q=index_q, impl="gluon_decode")
            for q, index_q in zip(queries, index_queries, strict=True)
        ]

    eager = steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = steps()
    for _ in range(3):
        for out, ids in replayed:
            out.fill_(torch.nan)
            ids.fill_(7)
        graph.replay()
        for got, want in zip(replayed, eager, strict=True):
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
    for (out, ids), q, index_q in zip(eager, queries, index_queries, strict=True):
        expected_ids = call(case, q=q, index_q=index_q, impl="reference")[1]
        differ = (ids.sort(-1).values != expected_ids.sort(-1).values).any(-1).float().mean()
        # Normal scores may lie closer together than the rounding of their sums.
        assert differ <= (0.01 if spec.index_values == "normal" else 0.0)
        want = ops.sparse_attend(
            q, case.k_cache, case.v_cache, ids, *case.batch, max_query_len=spec.max_query_len, impl="reference"
        )
        assert relative_error(out, want) < (4e-3 if cache_dtype == torch.bfloat16 else 2e-2)
        assert (out[(want == 0).flatten(1).all(-1)] == 0).all()


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper card")
@pytest.mark.parametrize(
    "requests", [((1, 9000), (3, 8000), (1, 70000)), ((1, 140000), (1, 139000), (1, 138000))], ids=str
)
def test_requests_that_share_pages(requests: tuple[tuple[int, int], ...]) -> None:
    spec = m3_spec("shared", requests, index_values="integers")
    case = build(spec, dtype=torch.bfloat16, device="cuda")
    # The blocks that end with a query's token are each request's own.
    shared = min(seq_len for _, seq_len in requests) // spec.block_size - 1
    case.block_table[1:, :shared] = case.block_table[0, :shared]
    out, ids = call(case, impl="gluon_decode")
    want, want_ids = call(case, impl="reference")
    assert torch.equal(ids.sort(-1).values, want_ids.sort(-1).values)
    assert relative_error(out, want) < 4e-3


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper card")
def test_keys_stored_by_the_launch_before_are_seen() -> None:
    """Old keys are read before the launch before has ended, so store_kv lets its dependents start after its stores."""
    spec = m3_spec("stored", ((1, 30000), (1, 9000)), index_values="integers")
    case = build(spec, dtype=torch.bfloat16, device="cuda")
    slots = torch.cat(
        [
            case.block_table[request, tokens // spec.block_size].long() * spec.block_size + tokens % spec.block_size
            for request, (_, seq_len) in enumerate(spec.requests)
            for tokens in [torch.arange(seq_len, device="cuda")]
        ]
    )
    k, v, index_k = (c.flatten(0, 1)[slots] for c in (case.k_cache, case.v_cache, case.index_k_cache))
    want = call(case, impl="reference")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        case.index_k_cache.zero_()
        index = {"index_k": index_k, "index_k_cache": case.index_k_cache}
        ops.store_kv(k, v, case.k_cache, case.v_cache, slots, **index, impl="triton")
        return call(case, impl="gluon_decode")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, ids = step()
    for _ in range(10):
        ids.fill_(7)
        graph.replay()
        assert torch.equal(ids.sort(-1).values, want[1].sort(-1).values)
        assert relative_error(out, want[0]) < 4e-3


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper card")
@pytest.mark.parametrize("contexts", [(65536,), (30000,) * 8, (300000, 1000)], ids=str)
def test_beside_other_streams(contexts: tuple[int, ...]) -> None:
    """Programs wait for one another: they come to an end, with the same bits, however busy the card is."""
    spec = m3_spec("busy", tuple((1, context) for context in contexts), index_values="integers")
    cases = [build(spec, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    want, want_ids = call(cases[0], impl="gluon_decode")
    torch.cuda.synchronize()
    graphs = []
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call(case, impl="gluon_decode") for _ in range(8)]
        graphs.append((graph, results))
    streams = [torch.cuda.Stream() for _ in range(3)]
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    small = torch.zeros(1 << 16, device="cuda")
    for _ in range(10):
        for stream, (graph, results) in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                for out, ids in results:
                    out.fill_(torch.nan)
                    ids.fill_(7)
                graph.replay()
        with torch.cuda.stream(streams[-1]):
            for _ in range(4):
                matrix @ matrix
                small.add_(1)
        torch.cuda.synchronize()
        for _, results in graphs:
            for out, ids in results:
                assert torch.equal(out, want)
                assert torch.equal(ids, want_ids)
