"""The element-wise parts of the training pass: plain, or each compiled to one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from msaserve.layers.moe import swiglu_oai


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """GemmaRMSNorm of x [tokens, hidden], in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """x [tokens, heads, D], normalised and its first 2 · pairs channels rotated. cos, sin: [tokens, pairs]."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())
    pairs = cos.shape[-1]
    first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def weighted_swiglu(inner: torch.Tensor, share: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """inner [tokens, experts, 2 · I], share [tokens, experts] → [tokens, experts, I]."""
    return (swiglu_oai(inner.float(), alpha=alpha, limit=limit) * share[..., None]).to(inner.dtype)


class Kernels:
    """Which versions run."""

    def __init__(self, *, compiled: bool = False) -> None:
        def made(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return _compiled(function) if compiled else function

        self.norm, self.norm_rotate, self.weighted_swiglu = made(norm), made(norm_rotate), made(weighted_swiglu)


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For any number of tokens at once; all other sizes are constants of the kernel."""
    kernel = torch.compile(function)

    def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
        for tensor in (x, *others):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        out: torch.Tensor = kernel(x, *others)
        return out

    return run


def agree(
    one: Kernels, other: Kernels, device: torch.device, dtype: torch.dtype, *, lengths: Sequence[int] = (384, 128)
) -> bool:
    """Whether two give the same values and gradients.

    dtype: of all but the residual stream. lengths: numbers of tokens. The first is what kernels are compiled for: how
    they split sums follows from it.
    """
    for num_tokens in lengths:
        made = [_results(kernels, num_tokens, device, dtype) for kernels in (one, other)]
        for found, known in zip(*made, strict=True):
            if not (found - known).norm() <= 0.02 * known.norm():
                return False
    return True


def _results(kernels: Kernels, num_tokens: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of all three on the same random inputs: values, then gradients; float32."""
    generator = torch.Generator(device).manual_seed(num_tokens)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).requires_grad_()

    angle = torch.rand(num_tokens, 16, generator=generator, device=device) * 6
    wide, share, weights = random(num_tokens, 256), random(num_tokens, 8), [random(size) for size in (256, 64)]
    inner, heads = random(num_tokens, 8, 512, dtype=dtype), random(num_tokens, 19, 64, dtype=dtype)
    rotation = angle.cos(), angle.sin()
    outputs = [kernels.norm(wide, weights[0], 1e-6), kernels.weighted_swiglu(inner, share, 1.702, 7.0)]
    outputs += [kernels.norm_rotate(part, weights[1], 1e-6, *rotation) for part in heads.split((16, 2, 1), dim=1)]
    torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
    leaves = (wide, inner, heads, share, *weights)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(gradients) == len(leaves)
    return [tensor.detach().float() for tensor in (*outputs, *gradients)]
