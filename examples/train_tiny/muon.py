"""The optimizer: Muon for the matrices inside the layers, AdamW for the rest.

Muon (Jordan et al. 2024; its scale after Liu et al., arXiv 2502.16982) replaces a matrix's averaged gradient by the
nearest matrix whose singular values are all about 1, so that rare directions are learned as fast as common ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton–Schulz iteration: singular values from 0.01 up end between 0.7 and 1.2."""


def orthogonalized(matrices: torch.Tensor, *, steps: int = 5) -> torch.Tensor:
    """[N, rows, columns] → each with its singular vectors and singular values near 1; bfloat16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape share the iteration's batched products, whatever parameters they are parts of."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, momentum: float = 0.95, weight_decay: float) -> None:
        """groups: with "rows" beside "params", of each: it is viewed as matrices [N, rows, columns]."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rows = [r for p, r in zip(group["params"], group["rows"], strict=True) if p.grad is not None]
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["average"] = torch.zeros_like(p)
            gradients, averages = [p.grad for p in parameters], [self.state[p]["average"] for p in parameters]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            directions = torch._foreach_lerp(gradients, averages, group["momentum"])
            by_shape: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for parameter, direction, height in zip(parameters, directions, rows, strict=True):
                shape = height, parameter.shape[-1]
                by_shape[shape].append((parameter.view(-1, *shape), direction.view(-1, *shape)))
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for shape, parts in by_shape.items():
                updates = orthogonalized(torch.cat([direction for _, direction in parts])).float()
                targets = [target for target, _ in parts]
                split = updates.split([len(target) for target in targets])
                # The root mean square of an update is that of AdamW's, 0.2 of the learning rate, whatever the shape.
                torch._foreach_add_(targets, split, alpha=-0.2 * max(shape) ** 0.5 * group["lr"])
