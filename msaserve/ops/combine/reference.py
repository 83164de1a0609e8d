"""combine as a softmax over the parts' log-sum-exps."""

from __future__ import annotations

import torch


def combine(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(partial_lse.dtype, partial_out.dtype)
    parts = partial_lse.to(dtype)
    highest = parts.amax(2, keepdim=True)
    # Where all is empty, −inf − (−inf) would be NaN.
    weights = (parts - highest.masked_fill(highest == -torch.inf, 0.0)).exp()
    total = weights.sum(2)
    is_part = (parts > -torch.inf)[..., None]
    summed = (partial_out.to(dtype).masked_fill(~is_part, 0.0) * weights[..., None]).sum(2)
    combined = (summed / total.masked_fill(total == 0.0, 1.0)[..., None]).flatten(1, 2)
    lse = (highest.squeeze(2) + total.log()).flatten(1, 2).to(partial_lse.dtype)
    if out is None:
        return combined.to(partial_out.dtype), lse
    return out.copy_(combined), lse
