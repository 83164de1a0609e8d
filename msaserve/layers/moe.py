"""The feed-forward parts: the gated MLP, and the mixture of experts around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from msaserve.config import TextConfig
from msaserve.layers.linear import Linear, weight


def swiglu_oai(gate_up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """[..., 2·I], gate before up → [..., I]: (clamp(up, ±limit) + 1) · g · sigmoid(alpha · g), g = min(gate, limit)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(alpha * gate)


class GatedMLP(nn.Module):
    """x [T, hidden] → [T, hidden] through one pair of gate and up projections."""

    def __init__(self, config: TextConfig, intermediate_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.gate_up_proj = Linear(config.hidden_size, 2 * intermediate_size, dtype=dtype)
        self.down_proj = Linear(intermediate_size, config.hidden_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(swiglu_oai(self.gate_up_proj(x), alpha=self.alpha, limit=self.limit))
        return out


class Router(nn.Module):
    """Which experts see a token, in float32 throughout: a rounded score would send tokens elsewhere."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = weight(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.score_bias = weight(config.num_experts, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] → expert_ids [T, k] int64 and their weights [T, k] float32, which sum to 1.

        The bias takes part in the choice only, not in the weights.
        """
        scores = F.linear(x.float(), self.weight).sigmoid()
        expert_ids = (scores + self.score_bias).topk(self.top_k, dim=-1).indices
        chosen = scores.gather(1, expert_ids)
        return expert_ids, chosen / chosen.sum(dim=-1, keepdim=True)


class Experts(nn.Module):
    """All experts' weights, stacked: gate_up [E, 2·I, hidden] (gate rows first) and down [E, hidden, I]."""

    def __init__(self, config: TextConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.num_experts = config.num_experts
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up = weight(config.num_experts, 2 * inner, hidden, dtype=dtype)
        self.down = weight(config.num_experts, hidden, inner, dtype=dtype)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], expert_ids [T, k], weights [T, k] → Σ of the weighted experts, float32 [T, hidden]."""
        num_tokens, top_k = expert_ids.shape
        flat_ids = expert_ids.flatten()
        order = flat_ids.argsort(stable=True)
        rows = x[order // top_k]
        counts = flat_ids.new_zeros(self.num_experts)
        counts.scatter_add_(0, flat_ids, torch.ones_like(flat_ids))
        outputs = self.grouped(rows, counts) if rows.is_cuda and self.can_group() else self.looped(rows, counts)
        # Back in token order and summed over k: the sum does not depend on who else is in the batch.
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return torch.einsum("tkh,tk->th", by_token.view(num_tokens, top_k, -1).float(), weights)

    def can_group(self) -> bool:
        """Whether PyTorch's grouped GEMM takes these weights: bfloat16, rows of whole 16 bytes."""
        is_aligned = self.gate_up.shape[2] % 8 == 0 and self.down.shape[2] % 8 == 0
        return hasattr(F, "grouped_mm") and self.gate_up.dtype == torch.bfloat16 and is_aligned

    def grouped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As `looped`, in two GEMMs over all experts and without asking the device how many rows each has."""
        ends = counts.cumsum(0, dtype=torch.int32)
        gate_up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        inner = swiglu_oai(gate_up, alpha=self.alpha, limit=self.limit)
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)

    def looped(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """rows [R, hidden] sorted by expert, counts [E] of each expert's rows → the experts' outputs [R, hidden]."""
        outputs = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                part = slice(start, start + count)
                inner = swiglu_oai(F.linear(rows[part], self.gate_up[expert]), alpha=self.alpha, limit=self.limit)
                outputs[part] = F.linear(inner, self.down[expert])
                start += count
        return outputs


class SparseMoE(nn.Module):
    """x [T, hidden] → routed experts × routed_scaling_factor + the shared expert, [T, hidden]."""

    def __init__(self, config: TextConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.routed_scaling_factor = config.routed_scaling_factor
        self.router = Router(config)
        self.experts = Experts(config, dtype=dtype)
        self.shared_experts = GatedMLP(config, config.shared_intermediate_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert_ids, weights = self.router(x)
        routed: torch.Tensor = self.experts(x, expert_ids, weights)
        shared: torch.Tensor = self.shared_experts(x)
        return (routed * self.routed_scaling_factor + shared).to(x.dtype)
