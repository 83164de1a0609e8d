"""The forward pass that training differentiates, over the parameters that msaserve serves.

The modules are msaserve's own, so what is trained is what is exported. Only what serving does without a gradient is
written anew: attention without a cache, experts without sorting, and the index branch's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from msaserve.config import ModelConfig, TextConfig
from msaserve.layers.moe import SparseMoE, swiglu_oai
from msaserve.layers.msa_attention import MsaAttention
from msaserve.layers.norm import GemmaRMSNorm, LayerNorm
from msaserve.layers.rope import CosSin, grid_rotation, rotate, text_rotation
from msaserve.models.minimax_m3 import DecoderLayer, MiniMaxM3
from msaserve.models.minimax_m3_vision import MiniMaxM3Vision, VisionLayer

MAX_MASK_ELEMENTS = 2**29
"""Of one attention call's mask: bounds its memory, a few bytes each."""
MAX_KL_ELEMENTS = 2**28


def build(config: ModelConfig, *, seed: int) -> MiniMaxM3:
    """A model with fresh float32 parameters, on the CPU.

    Weights are normal with variance 1 / fan-in, smaller where a layer writes to the residual stream. The norms of
    queries and keys start at 1.5: attention to one of 100,000 tokens needs logits that norms of 1 do not reach.
    """
    model = MiniMaxM3(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.text.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.zero_()
            elif name == "embed_tokens":
                parameter.normal_(0.0, 0.5, generator=generator)
            else:
                is_output = any(part in name for part in ("o_proj", "down", "out_proj", "fc2"))
                scale = parameter.shape[-1] ** -0.5 * (depth if is_output else 1.0)
                parameter.normal_(0.0, scale, generator=generator)
        for name, module in model.named_modules():
            if isinstance(module, LayerNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, GemmaRMSNorm) and name.endswith(("q_norm", "k_norm")):
                module.weight.fill_(0.5)
    for name, parameter in model.named_parameters():
        # The routing bias is moved by the experts' load, not by a gradient.
        parameter.requires_grad_(not name.endswith("score_bias"))
    return model


@dataclass
class Output:
    hidden: torch.Tensor
    """[B, T, hidden] after the final norm."""
    index_loss: torch.Tensor
    """Mean over sparse layers, index heads and rows."""
    expert_loads: list[torch.Tensor]
    """Of each MoE layer: tokens that chose each expert, [E]."""


def forward(
    model: MiniMaxM3,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int | None,
    index_rows: torch.Tensor,
    media_rows: torch.Tensor | None = None,
    patches: torch.Tensor | None = None,
    grid_thw: Sequence[tuple[int, int, int]] = (),
) -> Output:
    """All tokens of B sequences at once.

    Args:
        token_ids, positions: [B, T], T a multiple of the block size. Padding stands at the end.
        topk: blocks that sparse layers attend to; None: all, as dense layers do.
        index_rows: [B, R] places of the queries that the index branch learns from.
        media_rows: [M] places in the flattened tokens; patches [N, 1176] and grid_thw: what goes there.
    """
    config = model.config.text
    x = F.embedding(token_ids, model.embed_tokens)
    if patches is not None:
        assert media_rows is not None
        assert model.vision is not None
        features = _see(model.vision, patches, grid_thw)
        x = x.flatten(0, 1).index_copy(0, media_rows, features.to(x.dtype)).view(x.shape)
    rotation = text_rotation(positions.flatten(), rotary_dim=config.rotary_dim, theta=config.rope_theta)
    index_losses: list[torch.Tensor] = []
    loads: list[torch.Tensor] = []
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        attended, index_loss = _attention(
            layer.self_attn, layer.input_layernorm(x), rotation, topk=topk, index_rows=index_rows
        )
        x = x + attended
        normed = layer.post_attention_layernorm(x)
        if isinstance(layer.mlp, SparseMoE):
            out, load = _moe(layer.mlp, normed)
            loads.append(load)
        else:
            out = layer.mlp(normed)
        x = x + out
        if index_loss is not None:
            index_losses.append(index_loss)
    return Output(model.norm(x), torch.stack(index_losses).mean(), loads)


def _see(vision: MiniMaxM3Vision, patches: torch.Tensor, grid_thw: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Features of all pictures and clips, as `vision` makes them. Rows of like length share an attention call."""
    config = vision.config
    rotation = grid_rotation(
        grid_thw,
        head_dim=config.head_dim,
        theta=config.rope_theta,
        merge_size=config.spatial_merge_size,
        device=patches.device,
    )
    groups, places = _groups([t * h * w for t, h, w in grid_thw], patches.device)
    x = vision.pre_norm(vision.patch_embedding(patches))
    for layer in vision.layers:
        assert isinstance(layer, VisionLayer)
        attention = layer.self_attn
        qkv = attention.qkv_proj(layer.layer_norm1(x)).view(len(x), 3, attention.num_heads, -1)
        q, k, v = rotate(qkv[:, 0], rotation), rotate(qkv[:, 1], rotation), qkv[:, 2]
        parts = []
        for index, is_patch in groups:
            rows = (part[index].transpose(1, 2) for part in (q, k, v))
            out = F.scaled_dot_product_attention(*rows, attn_mask=is_patch[:, None, None])
            parts.append(out.transpose(1, 2)[is_patch])
        x = x + attention.out_proj(torch.cat(parts)[places].flatten(1))
        x = x + layer.fc2(F.gelu(layer.fc1(layer.layer_norm2(x))))
    x = vision.projector_2(F.gelu(vision.projector_1(x)))
    merged = x.reshape(len(x) // config.num_merged_patches, -1)
    return torch.as_tensor(vision.merge_2(F.gelu(vision.merge_1(merged))))


def _groups(
    row_lens: Sequence[int], device: torch.device
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Rows of the grid by length, padded to a power of two: (patch of each place [n, L], whether it is one [n, L]).

    Also where each patch stands when the groups' patches are put behind one another.
    """
    starts = np.cumsum([0, *row_lens])
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(row_lens):
        by_length.setdefault(max(64, 1 << (length - 1).bit_length()), []).append(row)
    groups, order = [], []
    for length, rows in sorted(by_length.items()):
        place = np.arange(length)
        is_patch = place < np.asarray([row_lens[row] for row in rows])[:, None]
        index = np.where(is_patch, starts[rows][:, None] + place, 0)
        groups.append((torch.from_numpy(index).to(device), torch.from_numpy(is_patch).to(device)))
        order.append(index[is_patch])
    places = np.argsort(np.concatenate(order))
    return groups, torch.from_numpy(places).to(device)


def _moe(moe: SparseMoE, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every expert sees every token and counts with its weight, mostly 0: with small experts two GEMMs are fastest."""
    tokens = x.flatten(0, -2)
    with torch.autocast(x.device.type, enabled=False):
        expert_ids, weights = moe.router(tokens)
    experts = moe.experts
    share = weights.new_zeros(len(tokens), experts.num_experts).scatter(1, expert_ids, weights)
    inner = F.linear(tokens, experts.gate_up.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    inner = swiglu_oai(inner, alpha=experts.alpha, limit=experts.limit) * share[..., None].to(inner.dtype)
    routed = F.linear(inner.flatten(1), experts.down.transpose(0, 1).flatten(1))
    out = routed * moe.routed_scaling_factor + moe.shared_experts(tokens)
    return out.view(x.shape), torch.bincount(expert_ids.flatten(), minlength=experts.num_experts)


def _attention(
    attention: MsaAttention, x: torch.Tensor, rotation: CosSin, *, topk: int | None, index_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [B, T, hidden] → [B, T, hidden], and the index branch's loss on a sparse layer."""
    config, weight = attention.config, attention.in_proj.weight
    sizes = list(attention.projection_sizes.values())
    num_main = sum(sizes[:3])
    q, k, v = F.linear(x, weight[:num_main]).split(sizes[:3], dim=-1)
    q = _rotated(attention.q_norm, q, config.head_dim, rotation)
    k = _rotated(attention.k_norm, k, config.head_dim, rotation)
    v = v.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    index_loss = None
    if attention.is_sparse:
        # Detached: the index branch learns from the main branch and leaves it as it is.
        index_q, index_k = F.linear(x.detach(), weight[num_main:]).split(sizes[3:], dim=-1)
        index_q = _rotated(attention.index_q_norm, index_q, config.index_dim, rotation)
        index_k = _rotated(attention.index_k_norm, index_k, config.index_dim, rotation)[:, 0]
        index_loss = _index_loss(q.detach(), k.detach(), index_q, index_k, index_rows, config)
    if attention.is_sparse and topk is not None and x.shape[1] > topk * config.block_size:
        out = _attend_selected(q, k, v, index_q.detach(), index_k.detach(), topk, config)
    else:
        group = config.num_heads // config.num_kv_heads
        out = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
    return attention.o_proj(out.transpose(1, 2).flatten(2)), index_loss


def _rotated(norm: GemmaRMSNorm, x: torch.Tensor, head_dim: int, rotation: CosSin) -> torch.Tensor:
    """x [B, T, heads · D], normalised per head and rotated → [B, heads, T, D]."""
    heads = norm(x.unflatten(-1, (-1, head_dim)))
    cos, sin = (part.view(*x.shape[:2], 1, -1) for part in rotation)
    first, second, rest = heads.split((cos.shape[-1], cos.shape[-1], head_dim - 2 * cos.shape[-1]), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return torch.cat((turned, rest), dim=-1).transpose(1, 2)


def _attend_selected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    topk: int,
    config: TextConfig,
) -> torch.Tensor:
    """q [B, Hq, T, D] against the selected blocks of k and v [B, Hkv, T, D] → [B, Hq, T, D]. Chunk by chunk."""
    num_sequences, num_heads, num_tokens, _ = q.shape
    step = MAX_MASK_ELEMENTS // (num_sequences * num_heads * num_tokens) // config.block_size * config.block_size
    step = min(max(step, config.block_size), num_tokens)
    chunks = []
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        parts = (q[:, :, start:end], k[:, :, :end], v[:, :, :end], index_q[:, :, start:end], index_k[:, :end])
        chunks.append(checkpoint(_attend_chunk, *parts, start, topk, config, use_reentrant=False))
    return torch.cat(chunks, dim=2)


def _attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    start: int,
    topk: int,
    config: TextConfig,
) -> torch.Tensor:
    """Queries start, start + 1, … against all keys up to the last of them."""
    size, end = config.block_size, k.shape[2]
    with torch.no_grad():
        query = torch.arange(start, start + q.shape[2], device=q.device)
        is_visible = query[:, None] >= torch.arange(end, device=q.device)
        scores = block_scores(index_q, index_k, is_visible, size)
        own = torch.arange(scores.shape[-1], device=q.device)[None] == query[:, None] // size
        chosen = scores.masked_fill(own, torch.inf).topk(min(topk, scores.shape[-1]), dim=-1).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        mask = is_chosen.repeat_interleave(size, dim=-1)[..., :end] & is_visible
        group = q.shape[1] // k.shape[1]
        mask = mask.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=mask
    )


def block_scores(
    index_q: torch.Tensor, index_k: torch.Tensor, is_visible: torch.Tensor, block_size: int
) -> torch.Tensor:
    """index_q [B, H, R, Di], index_k [B, T, Di], is_visible [R, T] or [B, 1, R, T] → the best of each block,
    [B, H, R, T / block]."""
    scores = torch.einsum("bhrd,btd->bhrt", index_q, index_k).float().masked_fill(~is_visible, -torch.inf)
    return scores.unflatten(-1, (-1, block_size)).amax(-1)


def _index_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    rows: torch.Tensor,
    config: TextConfig,
) -> torch.Tensor:
    """KL of the index branch's softmax over blocks from the main branch's attention mass on them.

    The mass is that of dense attention, also while the main branch attends to selected blocks: a block that was
    missed can so be found. It is the mean over the query heads of a KV head. Computed for some rows of each sequence.
    """
    num_sequences, num_heads, num_tokens, _ = q.shape
    step = max(1, MAX_KL_ELEMENTS // (num_heads * rows.shape[1] * num_tokens))
    losses = []
    for start in range(0, num_sequences, step):
        part = slice(start, start + step)
        losses.append(
            checkpoint(
                _index_loss_part, q[part], k[part], index_q[part], index_k[part], rows[part], config,
                use_reentrant=False,
            )
        )  # fmt: skip
    return torch.cat(losses).mean()


def _index_loss_part(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    rows: torch.Tensor,
    config: TextConfig,
) -> torch.Tensor:
    """[b]: one mean for each sequence."""
    size, num_tokens = config.block_size, k.shape[2]
    is_visible = (rows[..., None] >= torch.arange(num_tokens, device=q.device))[:, None]
    target = block_mass(_at(q, rows), k, is_visible, size)
    # Index scores are served without a scale; the softmax's temperature is the loss's own.
    scores = block_scores(_at(index_q, rows), index_k, is_visible, size) * config.index_dim**-0.5
    # A block no token of which is visible has mass 0; its −inf must not meet that 0.
    log_share = scores.log_softmax(-1).masked_fill(scores.isinf(), 0.0)
    loss = (torch.xlogy(target, target) - target * log_share).sum(-1)
    return loss.mean((1, 2))


@torch.no_grad()
def block_mass(q: torch.Tensor, k: torch.Tensor, is_visible: torch.Tensor, block_size: int) -> torch.Tensor:
    """q [B, Hq, R, D], k [B, Hkv, T, D], is_visible [B, 1, R, T] → attention's mass on each block, the mean of a KV
    head's query heads, [B, Hkv, R, T / block]."""
    num_kv_heads = k.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1))
    logits = torch.einsum("bhgrd,bhtd->bhgrt", grouped, k).float() * q.shape[-1] ** -0.5
    shares = logits.masked_fill(~is_visible[:, :, None], -torch.inf).softmax(-1)
    return shares.unflatten(-1, (-1, block_size)).sum(-1).mean(2)


def _at(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] at rows [B, R] → [B, H, R, D]."""
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@torch.no_grad()
def balance_experts(model: nn.Module, loads: Sequence[torch.Tensor], step: float) -> None:
    """Move the routing bias of experts chosen less than the mean up, of the others down. loads: as Output has them."""
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    for moe, load in zip(layers, loads, strict=True):
        load = load.float()
        moe.router.score_bias += step * torch.sign(load.mean() - load)
