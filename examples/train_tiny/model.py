"""The forward pass that training differentiates, over the parameters that msaserve serves.

The modules are msaserve's own, so what is trained is what is exported. Only what serving does without a gradient is
written anew: attention without a cache, experts without sorting, and the index branch's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples.train_tiny.grid import Grid
from examples.train_tiny.kernels import Kernels
from msaserve.config import ModelConfig, TextConfig
from msaserve.layers.moe import SparseMoE
from msaserve.layers.msa_attention import MsaAttention
from msaserve.layers.norm import GemmaRMSNorm, LayerNorm
from msaserve.layers.rope import CosSin, rotate, text_rotation
from msaserve.models.minimax_m3 import DecoderLayer, MiniMaxM3
from msaserve.models.minimax_m3_vision import MiniMaxM3Vision, VisionLayer

MAX_MASK_ELEMENTS = 2**28
"""Of one attention call's mask for a KV head: bounds its memory, a few bytes each."""
MAX_KL_ELEMENTS = 2**28
LOOK_BACK = (1, 2, 3, 4, 5, 6, 7, 8)
"""Tokens that the first layer's heads of the first KV head look back at the start, one after another."""
LOOK_BACK_SHARES = (
    0.357, 0.078, 0.069, 0.075, 0.067, 0.051, 0.047, 0.042, 0.038, 0.036, 0.034, 0.024, 0.021, 0.023, 0.024, 0.014,
)  # fmt: skip
"""Of their logit, on the pairs of channels, the fastest first. They were fitted: the most mass at the right distance
among 131,072. The five fastest pairs alone come round again at so many distances that 1 % of the mass is left there."""
LOOK_BACK_NORM = 2.0
"""Of the first layer's queries and keys: their logits reach 32, which 131,072 tokens ask for."""
LOOK_BACK_OUTPUT = 1.0
"""Of what those heads write, against 0.5 of the embeddings."""
MATCHED = (3, 4)
"""Tokens before a key that the second layer's KV heads match with what stands one less before a query."""


def build(config: ModelConfig, *, seed: int) -> MiniMaxM3:
    """A model with fresh float32 parameters, on the CPU.

    Weights are normal with variance 1 / fan-in, smaller where a layer writes to the residual stream. The norms of
    queries and keys start at 1.5: attention to one of 100,000 tokens needs logits that norms of 1 do not reach. Half of
    the first layer's heads look a fixed number of tokens back, and half of the second's match what those saw: see
    `_look_back` and `_match`. Everything is trained from there.
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
        _look_back(model)
        _match(model)
    for name, parameter in model.named_parameters():
        # The routing bias is moved by the experts' load, not by a gradient.
        parameter.requires_grad_(not name.endswith("score_bias"))
    return model


def _look_back(model: MiniMaxM3) -> None:
    """Let the first KV head's queries look 1 to 8 tokens back, whatever the tokens are, and write to channels of
    their own what they see there.

    Which name a number belongs to is a matter of tokens up to eight places before it ("NAME| is| |4|8|2|1|3|.").
    Without biases such heads form late: in a run without this, retrieval chose among the text's numbers at random for
    1,500 steps. One channel of all embeddings is made the same; keys read it into their pairs of channels, and queries
    do, turned by the distance, so that they meet where the rotations differ by just that.
    """
    config, attention = model.config.text, model.layers[0].self_attn
    assert isinstance(attention, MsaAttention)
    dim, pairs = config.head_dim, config.rotary_dim // 2
    num_pairs = min(len(LOOK_BACK_SHARES), pairs)
    group, width = _seen_width(config)
    weight, out, num_queries = attention.in_proj.weight, attention.o_proj.weight, config.num_heads * dim
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(LOOK_BACK_NORM - 1)
    model.embed_tokens[:, 0] = 1.5
    # What that channel is once normalised; the constant part of a query or key shall have six times the content's norm.
    constant = 1.5 / float(model.embed_tokens.square().mean(-1).sqrt().mean())
    amplitude = 8.5 / constant * torch.tensor(LOOK_BACK_SHARES[:num_pairs]).sqrt()
    frequency = 1.0 / config.rope_theta ** (torch.arange(num_pairs) / pairs)
    for head in range(group):
        angle = frequency * LOOK_BACK[head % len(LOOK_BACK)]
        query = weight[head * dim : (head + 1) * dim]
        query *= 0.2
        query[:num_pairs, 0] = amplitude * angle.cos()
        query[pairs : pairs + num_pairs, 0] = -amplitude * angle.sin()
        seen = out[:, head * dim : (head + 1) * dim]
        seen.zero_()
        seen[head * width : (head + 1) * width, :width].fill_diagonal_(LOOK_BACK_OUTPUT)
    key = weight[num_queries : num_queries + dim]
    key *= 0.2
    key[:num_pairs, 0] = amplitude


def _seen_width(config: TextConfig) -> tuple[int, int]:
    """(heads that look back, channels that each writes to)."""
    group = config.num_heads // config.num_kv_heads
    return group, min(config.hidden_size // group, config.head_dim - config.rotary_dim)


def _match(model: MiniMaxM3) -> None:
    """Let half of the second layer's queries look for tokens that have the same behind them.

    The token before a number's first digit has the name two tokens back, and the digit to be copied has it three back:
    queries read what the first layer's head for one distance wrote, keys what the head for the next wrote, both into
    the channels that carry no position. The index branch begins alike: its one key finds the first digit's block.
    """
    config, attention = model.config.text, model.layers[1].self_attn
    assert isinstance(attention, MsaAttention)
    group, width = _seen_width(config)
    assert config.index_dim == config.head_dim
    heads, rotated = attention.in_proj.weight.unflatten(0, (-1, config.head_dim)), config.rotary_dim

    def read(head: int, distance: int) -> None:
        heads[head].mul_(0.3)[rotated:].zero_()
        seen = slice((distance - 1) * width, distance * width)
        heads[head, rotated : rotated + width, seen].fill_diagonal_(1.0)

    for kv_head, distance in zip(range(config.num_kv_heads), MATCHED, strict=False):
        read(config.num_heads + kv_head, distance)
        for member in range(group // 2):
            read(kv_head * group + member, distance - 1)
        read(config.num_heads + 2 * config.num_kv_heads + kv_head, distance - 1)
    read(len(heads) - 1, MATCHED[0])


@dataclass
class Output:
    hidden: torch.Tensor
    """[B, T, hidden] after the final norm."""
    index_loss: torch.Tensor
    """Mean over sparse layers, index heads and rows; 0 without rows."""
    expert_loads: list[torch.Tensor]
    """Of each MoE layer: tokens that chose each expert, [E]."""


def forward(
    model: MiniMaxM3,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int | None,
    index_rows: torch.Tensor | None,
    documents: torch.Tensor | None = None,
    media_rows: torch.Tensor | None = None,
    patches: torch.Tensor | None = None,
    grid: Grid | None = None,
    kernels: Kernels | None = None,
) -> Output:
    """All tokens of B sequences at once.

    Args:
        token_ids, positions: [B, T], T a multiple of the block size. Padding stands at the end.
        topk: blocks that sparse layers attend to; None: all, as dense layers do.
        index_rows: [B, R] places of the queries that the index branch learns from. None: it learns nothing.
        documents: [B, T] which of a sequence's texts a token belongs to: it attends to its own alone. For topk None.
        media_rows: [M] places in the flattened tokens; patches [N, 1176] and grid: what goes there.
        kernels: the element-wise parts. None: as PyTorch runs them one by one.
    """
    config, kernels = model.config.text, kernels or Kernels()

    def normed(norm: GemmaRMSNorm) -> torch.Tensor:
        return kernels.norm(x.flatten(0, 1), norm.weight, norm.eps).view(x.shape)

    x = F.embedding(token_ids, model.embed_tokens)
    if patches is not None:
        assert media_rows is not None
        assert model.vision is not None
        assert grid is not None
        features = see(model.vision, patches, grid)
        x = x.flatten(0, 1).index_copy(0, media_rows, features.to(x.dtype)).view(x.shape)
    rotation = text_rotation(positions.flatten(), rotary_dim=config.rotary_dim, theta=config.rope_theta)
    mask = None if documents is None else _document_mask(documents)
    index_losses: list[torch.Tensor] = []
    loads: list[torch.Tensor] = []
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        attended, index_loss = _attention(
            layer.self_attn, normed(layer.input_layernorm), rotation, kernels,
            topk=topk, mask=mask, index_rows=index_rows,
        )  # fmt: skip
        x = x + attended
        inner = normed(layer.post_attention_layernorm)
        if isinstance(layer.mlp, SparseMoE):
            out, load = _moe(layer.mlp, inner, kernels)
            loads.append(load)
        else:
            out = layer.mlp(inner)
        x = x + out
        if index_loss is not None:
            index_losses.append(index_loss)
    index_loss = torch.stack(index_losses).mean() if index_losses else x.new_zeros(())
    return Output(normed(model.norm), index_loss, loads)


def see(vision: MiniMaxM3Vision, patches: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Features of all pictures and clips, as `vision` makes them. Rows of like length share an attention call."""
    config = vision.config
    rotation = grid.cos, grid.sin
    x = vision.pre_norm(vision.patch_embedding(patches).index_select(0, grid.order))
    for layer in vision.layers:
        assert isinstance(layer, VisionLayer)
        attention = layer.self_attn
        qkv = attention.qkv_proj(layer.layer_norm1(x)).view(len(x), 3, attention.num_heads, -1)
        qkv = torch.stack((rotate(qkv[:, 0], rotation), rotate(qkv[:, 1], rotation), qkv[:, 2]), dim=1)
        parts = []
        for part, slots, is_patch in zip(qkv.split(grid.sizes), grid.slots, grid.is_patch, strict=True):
            # Every patch has a slot of its own: an index with repeats would make the backward pass serial.
            padded = part.new_zeros(is_patch.numel(), *part.shape[1:]).index_copy(0, slots, part)
            rows = padded.view(*is_patch.shape, *part.shape[1:]).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(*rows, attn_mask=is_patch[:, None, None])
            parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, slots))
        x = x + attention.out_proj(torch.cat(parts).flatten(1))
        x = x + layer.fc2(F.gelu(layer.fc1(layer.layer_norm2(x))))
    x = vision.projector_2(F.gelu(vision.projector_1(x)))
    merged = x.reshape(len(x) // config.num_merged_patches, -1)
    return torch.as_tensor(vision.merge_2(F.gelu(vision.merge_1(merged)))).index_select(0, grid.merged_order)


def _document_mask(documents: torch.Tensor) -> torch.Tensor:
    """[B, T] → [B, 1, T, T] bool: whether a token sees another."""
    place = torch.arange(documents.shape[1], device=documents.device)
    return ((documents[:, :, None] == documents[:, None]) & (place[:, None] >= place))[:, None]


def _moe(moe: SparseMoE, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """Every expert sees every token and counts with its weight, mostly 0: with small experts two GEMMs are fastest."""
    tokens = x.flatten(0, -2)
    with torch.autocast(x.device.type, enabled=False):
        expert_ids, weights = moe.router(tokens)
    experts = moe.experts
    share = weights.new_zeros(len(tokens), experts.num_experts).scatter(1, expert_ids, weights)
    inner = F.linear(tokens, experts.gate_up.flatten(0, 1)).unflatten(-1, (experts.num_experts, -1))
    inner = kernels.weighted_swiglu(inner, share, experts.alpha, experts.limit)
    routed = F.linear(inner.flatten(1), experts.down.transpose(0, 1).flatten(1))
    out = routed * moe.routed_scaling_factor + moe.shared_experts(tokens)
    return out.view(x.shape), (share.detach() > 0).sum(0)


def _attention(
    attention: MsaAttention,
    x: torch.Tensor,
    rotation: CosSin,
    kernels: Kernels,
    *,
    topk: int | None,
    mask: torch.Tensor | None,
    index_rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [B, T, hidden] → [B, T, hidden], and the index branch's loss on a sparse layer."""
    config, weight = attention.config, attention.in_proj.weight
    sizes = list(attention.projection_sizes.values())
    num_main = sum(sizes[:3])

    def rotated(norm: GemmaRMSNorm, part: torch.Tensor) -> torch.Tensor:
        """[B, T, heads · D], normalised per head and rotated → [B, heads, T, D]."""
        heads = part.flatten(0, 1).unflatten(-1, (-1, norm.weight.shape[0]))
        out = kernels.norm_rotate(heads, norm.weight, norm.eps, *rotation)
        return out.unflatten(0, x.shape[:2]).transpose(1, 2)

    q, k, v = F.linear(x, weight[:num_main]).split(sizes[:3], dim=-1)
    q, k = rotated(attention.q_norm, q), rotated(attention.k_norm, k)
    v = v.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    is_selecting = attention.is_sparse and topk is not None and x.shape[1] > topk * config.block_size
    index_loss = None
    if attention.is_sparse and (is_selecting or index_rows is not None):
        # Detached: the index branch learns from the main branch and leaves it as it is.
        index_q, index_k = F.linear(x.detach(), weight[num_main:]).split(sizes[3:], dim=-1)
        index_q, index_k = rotated(attention.index_q_norm, index_q), rotated(attention.index_k_norm, index_k)[:, 0]
        if index_rows is not None:
            index_loss = _index_loss(q.detach(), k.detach(), index_q, index_k, index_rows, config)
    if is_selecting:
        assert topk is not None
        assert mask is None
        is_chosen = select(index_q.detach(), index_k.detach(), topk, config.block_size)
        out = _attend_selected(q, k, v, is_chosen, config)
    else:
        group = config.num_heads // config.num_kv_heads
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
    return attention.o_proj(out.transpose(1, 2).flatten(2)), index_loss


@torch.no_grad()
def select(index_q: torch.Tensor, index_k: torch.Tensor, topk: int, block_size: int) -> torch.Tensor:
    """index_q [B, Hkv, T, Di], index_k [B, T, Di] → [B, Hkv, T, T / block] bool: the best blocks and a token's own."""
    num_sequences, num_heads, num_tokens, _ = index_q.shape
    num_blocks = num_tokens // block_size
    step = max(1, MAX_MASK_ELEMENTS // (num_sequences * num_heads * num_tokens * block_size)) * block_size
    chunks = []
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        query = torch.arange(start, end, device=index_q.device)[:, None]
        is_visible = query >= torch.arange(end, device=index_q.device)
        scores = block_scores(index_q[:, :, start:end], index_k[:, :end], is_visible, block_size)
        own = torch.arange(scores.shape[-1], device=index_q.device) == query // block_size
        chosen = scores.masked_fill(own, torch.inf).topk(min(topk, scores.shape[-1]), dim=-1).indices
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        chunks.append(F.pad(is_chosen, (0, num_blocks - scores.shape[-1])))
    return torch.cat(chunks, dim=2)


def _attend_selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_chosen: torch.Tensor, config: TextConfig
) -> torch.Tensor:
    """q [B, Hq, T, D] against the chosen blocks of k and v [B, Hkv, T, D] → [B, Hq, T, D]. Chunk by chunk."""
    num_sequences, _, num_tokens, _ = q.shape
    size = config.block_size
    step = max(1, MAX_MASK_ELEMENTS // (num_sequences * k.shape[1] * num_tokens * size)) * size
    chunks = []
    for start in range(0, num_tokens, step):
        end = min(start + step, num_tokens)
        parts = (q[:, :, start:end], k[:, :, :end], v[:, :, :end], is_chosen[:, :, start:end, : end // size])
        chunks.append(checkpoint(_attend_chunk, *parts, start, size, use_reentrant=False))
    return torch.cat(chunks, dim=2)


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_chosen: torch.Tensor, start: int, block_size: int
) -> torch.Tensor:
    """Queries start, start + 1, … against all keys up to the last of them."""
    num_kv_heads, end = k.shape[1], k.shape[2]
    query = torch.arange(start, start + q.shape[2], device=q.device)
    is_visible = (query[:, None] >= torch.arange(end, device=q.device)).unflatten(-1, (-1, block_size))
    mask = (is_chosen[..., None] & is_visible).flatten(-2)
    # A KV head's queries share its mask: here they are the heads of one sequence, which the mask is broadcast to.
    q = q.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)
    k, v = (part.flatten(0, 1)[:, None].repeat(1, q.shape[1], 1, 1) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.flatten(0, 1)[:, None])
    return out.unflatten(0, (-1, num_kv_heads)).flatten(1, 2)


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
        is_visible = (rows[part, :, None] >= torch.arange(num_tokens, device=q.device))[:, None]
        target = block_mass(_at(q[part], rows[part]), k[part], is_visible, config.block_size)
        parts = (_at(index_q[part], rows[part]), index_k[part], is_visible, target, config)
        losses.append(checkpoint(_divergence, *parts, use_reentrant=False))
    return torch.cat(losses).mean()


def _divergence(
    index_q: torch.Tensor, index_k: torch.Tensor, is_visible: torch.Tensor, target: torch.Tensor, config: TextConfig
) -> torch.Tensor:
    """[b]: one mean for each sequence."""
    # Index scores are served without a scale; the softmax's temperature is the loss's own.
    scores = block_scores(index_q, index_k, is_visible, config.block_size) * config.index_dim**-0.5
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
    logits = torch.einsum("bhgrd,bhtd->bhgrt", grouped, k).float().mul_(q.shape[-1] ** -0.5)
    shares = logits.masked_fill_(~is_visible[:, :, None], -torch.inf).softmax(-1)
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
