"""combine: partial attention outputs and their log-sum-exps to whole ones."""

from __future__ import annotations

import torch

from msaserve.ops.checks import check_dtype, check_floats, check_shapes
from msaserve.ops.dispatch import Impl, always, choose
from msaserve.ops.hopper import ask_later, on_card

IMPLS = (
    Impl("triton", "msaserve.ops.combine.triton:combine", ask_later("msaserve.ops.combine.triton:why_not"), on_card),
    Impl("reference", "msaserve.ops.combine.reference:combine", always),
)


def combine(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rescale and add S partial softmax outputs over disjoint sets of tokens.

    Args:
        partial_out: [T, Hkv, S, G, D].
        partial_lse: [T, Hkv, S, G] float32 or float64, natural logarithm; −inf: that part is empty and its
            partial_out, which may be anything, is not read.
        out: [T, Hkv * G, D] to write to, of any floating dtype.

    Returns:
        out [T, Hq, D] in partial_out's dtype unless `out` is given, and lse [T, Hq] in partial_lse's.
        Where every part is empty: 0 and −inf. Sums are in float32 (float64 for float64).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    sizes = check_shapes(
        "combine",
        ("partial_out", partial_out, ("T", "Hkv", "S", "G", "D")),
        ("partial_lse", partial_lse, ("T", "Hkv", "S", "G")),
    )
    check_floats("combine", partial_out=partial_out, out=out)
    check_dtype("combine", "partial_lse", partial_lse, (torch.float32, torch.float64))
    expected = (sizes["T"], sizes["Hkv"] * sizes["G"], sizes["D"])
    if out is not None and out.shape != expected:
        raise ValueError(f"combine: out has shape {list(out.shape)}, expected {list(expected)}")
    args = (partial_out, partial_lse)
    result: tuple[torch.Tensor, torch.Tensor] = choose("combine", IMPLS, impl, *args, out=out)(*args, out=out)
    return result
