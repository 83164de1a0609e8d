"""norm_rope_store: the reference and the kernel, in Triton's interpreter, against float64 arithmetic."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve.ops.norm_rope_store import norm_rope_store
from msaserve.ops.norm_rope_store.reference import norm_rope_store as reference

BLOCK, PAGES = 16, 5
IMPLS = ["reference"] if torch.cuda.is_available() else ["reference", "triton"]


def arguments(
    num_rows: int, heads: int, kv_heads: int, index_heads: int, dim: int, index_dim: int, pairs: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """A packed vLLM-like cache, a projection with a row step of its own, every third token without a slot."""
    generator = torch.Generator().manual_seed(num_rows * heads + dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    columns = (heads + 2 * kv_heads) * dim + ((index_heads + 1) * index_dim if index_heads else 0)
    packed = torch.full((PAGES, kv_heads, BLOCK, 2 * dim), float("nan"), dtype=dtype)
    k_cache, v_cache = (packed[..., i * dim : (i + 1) * dim].transpose(1, 2) for i in (0, 1))
    slots = torch.randperm(PAGES * BLOCK, generator=generator)[:num_rows]
    slots[::3] = -1
    angles = torch.rand((num_rows, pairs), generator=generator) * 6.3
    options: dict[str, Any] = {"q_weight": normal(dim), "k_weight": normal(dim), "eps": 1e-6}
    if index_heads:
        options |= {
            "index_k_cache": torch.full((PAGES, BLOCK, index_dim), float("nan"), dtype=dtype),
            "index_q_weight": normal(index_dim),
            "index_k_weight": normal(index_dim),
            "num_index_heads": index_heads,
        }
    return (normal(num_rows, columns + 3)[:, :columns], k_cache, v_cache, slots, angles.cos(), angles.sin()), options


SHAPES = [(7, 8, 2, 2, 32, 32, 8), (1, 3, 1, 1, 64, 16, 8), (4, 20, 4, 0, 16, 0, 8), (5, 6, 3, 3, 24, 48, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_against_float64(shape: tuple[int, ...], impl: str) -> None:
    args, options = arguments(*shape, torch.float32)
    wide_args, wide_options = arguments(*shape, torch.float32)
    wide_args = tuple(x.double() if x.dtype == torch.float32 else x for x in wide_args)
    wide_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in wide_options.items()}
    queries = norm_rope_store(*args, **options, impl=impl)
    expected = reference(*wide_args, **wide_options)
    caches, wide_caches = [args[1], args[2]], [wide_args[1], wide_args[2]]
    if shape[3]:
        caches.append(options["index_k_cache"])
        wide_caches.append(wide_options["index_k_cache"])
    for got, want in zip([*queries, *caches], [*expected, *wide_caches], strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    stored = (args[3] >= 0).sum().item()
    assert int((~args[2].isnan().all(-1)).sum()) == stored * args[2].shape[2]


def test_rotation_turns_pairs_and_passes_the_rest() -> None:
    """One head of ones, weight 0: a quarter turn takes channel i + pairs to −channel i, and back; the rest stays 1."""
    (_, k_cache, v_cache, slots, cos, sin), options = arguments(2, 1, 1, 0, 16, 0, 4, torch.float32)
    projected = torch.ones(2, 3 * 16)
    options |= {"q_weight": torch.zeros(16), "k_weight": torch.zeros(16)}
    queries = norm_rope_store(
        projected, k_cache, v_cache, slots, torch.zeros_like(cos), torch.ones_like(sin), **options, impl="reference"
    )
    expected = torch.tensor([-1.0] * 4 + [1.0] * 12)
    torch.testing.assert_close(queries.q[0, 0], expected, rtol=1e-5, atol=1e-5)
    assert queries.index_q is None


@pytest.mark.parametrize("impl", IMPLS)
def test_half_precision_rounds_where_the_plain_steps_do(impl: str) -> None:
    args, options = arguments(6, 4, 2, 2, 32, 32, 8, torch.float16)
    expected = reference(*(x.clone() for x in args), **{k: _clone(v) for k, v in options.items()})
    queries = norm_rope_store(*args, **options, impl=impl)
    assert queries.index_q is not None
    assert expected.index_q is not None
    for got, want in ((queries.q, expected.q), (queries.index_q, expected.index_q)):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < 5e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_scales_divide_what_is_stored(impl: str) -> None:
    args, options = arguments(5, 4, 2, 2, 32, 32, 8, torch.float32)
    scaled_args, scaled_options = arguments(5, 4, 2, 2, 32, 32, 8, torch.float32)
    norm_rope_store(*args, **options, impl=impl)
    scales = {"k_scale": torch.tensor([2.0, 4.0]), "v_scale": torch.tensor(8.0), "index_scale": torch.tensor(0.5)}
    norm_rope_store(*scaled_args, **scaled_options, **scales, impl=impl)
    torch.testing.assert_close(
        scaled_args[1] * scales["k_scale"][:, None], args[1], equal_nan=True, rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(scaled_args[2] * 8.0, args[2], equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        scaled_options["index_k_cache"] * 0.5, options["index_k_cache"], equal_nan=True, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_index_queries_in_8_bits(impl: str) -> None:
    """Cut to the range, else the wide ones rounded; the caches are as without."""
    args, options = arguments(6, 4, 2, 2, 32, 32, 8, torch.float32)
    options["index_q_weight"][3] = 1e4
    wide = norm_rope_store(*args, **options, impl=impl)
    narrow = norm_rope_store(*args, **options, index_q_dtype=torch.float8_e4m3fn, impl=impl)
    assert wide.index_q is not None
    assert narrow.index_q is not None
    assert narrow.index_q.dtype == torch.float8_e4m3fn
    assert wide.index_q.abs().max() > 448.0
    expected = wide.index_q.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    is_sure = torch.ones_like(wide.index_q, dtype=torch.bool)
    if impl == "triton":
        # Triton's interpreter rounds ties away from zero and loses the carry of what becomes a power of two.
        is_sure = torch.frexp(expected.float()).mantissa.abs() > 0.5
    torch.testing.assert_close(
        narrow.index_q.float()[is_sure], expected.float()[is_sure], rtol=0.0 if impl == "reference" else 0.07, atol=2e-3
    )
    assert is_sure.float().mean() > 0.6
    assert torch.equal(narrow.q, wide.q)


def test_refusals() -> None:
    args, options = arguments(3, 4, 2, 2, 32, 32, 8, torch.float32)
    with pytest.raises(ValueError, match="go together"):
        norm_rope_store(*args, **{**options, "index_k_weight": None})
    with pytest.raises(ValueError, match="columns"):
        norm_rope_store(args[0][:, :-1], *args[1:], **options)
    with pytest.raises(ValueError, match="pairs"):
        norm_rope_store(*args[:4], args[4].repeat(1, 4), args[5].repeat(1, 4), **options)
    with pytest.raises(ValueError, match=r"index_q_dtype is torch\.float16"):
        norm_rope_store(*args, **options, index_q_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"v_cache is torch\.float8_e5m2"):
        norm_rope_store(*args[:2], args[2].to(torch.float8_e5m2), *args[3:], **options)
    with pytest.raises(ValueError, match=r"k_scale has shape \[3\]"):
        norm_rope_store(*args, **options, k_scale=torch.ones(3))
    with pytest.raises(ValueError, match="int64"):
        norm_rope_store(*args[:3], args[3].int(), *args[4:], **options)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
