"""From a checkpoint directory to a model: released tensor names, single file or sharded, copied one by one."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from msaserve.config import ModelConfig
from msaserve.errors import CheckpointError, UnsupportedError
from msaserve.layers.linear import Linear
from msaserve.layers.moe import GatedMLP, SparseMoE
from msaserve.layers.msa_attention import MsaAttention
from msaserve.models.checkpoint import TensorEntry, read_entries
from msaserve.models.minimax_m3 import DecoderLayer, MiniMaxM3
from msaserve.models.minimax_m3_vision import MiniMaxM3Vision, VisionLayer

_MAX_NAMES = 8
"""Of tensors, in an error message."""

Destinations = Iterator[tuple[str, torch.Tensor]]


def resolve_device(device: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu.

    Raises:
        UnsupportedError: cuda is asked for and not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UnsupportedError(f"device {device!r} was asked for, but PyTorch {torch.__version__} sees no CUDA device")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 is slower."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def load_model(
    directory: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    config: ModelConfig | None = None,
    show_progress: bool = True,
) -> MiniMaxM3:
    """Build the model and fill it. Beyond the parameters themselves one tensor at a time is held.

    Args:
        dtype: of the parameters; the files' own is converted.
        config: the directory's, if it was read before.
        show_progress: a bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: missing, truncated or damaged files; missing, unexpected or wrongly shaped tensors, of each
            kind the first few named.
        UnsupportedError: config or weights ask for what is not implemented.
    """
    config = ModelConfig.from_checkpoint(directory) if config is None else config
    entries = read_entries(config.directory)
    with torch.device("meta"):
        model = MiniMaxM3(config, dtype=dtype)
    _check(config.directory, entries, dict(destinations(model)))
    with torch.device(device):  # built again: to_empty imports sympy first, half a second
        model = MiniMaxM3(config, dtype=dtype)
    _fill(dict(destinations(model)), entries, show_progress=show_progress and sys.stderr.isatty())
    return model.eval()


def destinations(model: MiniMaxM3) -> Destinations:
    """Every tensor of a checkpoint by its released name, and the view of a parameter that it fills.

    Each has the file's shape; together they cover every element of every parameter.
    """
    text = "language_model.model"
    yield f"{text}.embed_tokens.weight", model.embed_tokens
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        yield from _decoder_layer(f"{text}.layers.{i}", layer)
    yield f"{text}.norm.weight", model.norm.weight
    if model.lm_head is not None:
        yield "language_model.lm_head.weight", model.lm_head.weight
    if model.vision is not None:
        yield from _vision(model.vision)


def _decoder_layer(prefix: str, layer: DecoderLayer) -> Destinations:
    yield f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight
    yield f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    yield from _attention(f"{prefix}.self_attn", layer.self_attn)
    if isinstance(layer.mlp, SparseMoE):
        yield from _moe(f"{prefix}.block_sparse_moe", layer.mlp)
    else:
        assert isinstance(layer.mlp, GatedMLP)
        yield from _gated_mlp(f"{prefix}.mlp", layer.mlp)


def _attention(prefix: str, attention: MsaAttention) -> Destinations:
    parts = torch.split(attention.in_proj.weight, list(attention.projection_sizes.values()))
    for name, part in zip(attention.projection_sizes, parts, strict=True):
        yield f"{prefix}.{name}_proj.weight", part
    yield f"{prefix}.o_proj.weight", attention.o_proj.weight
    yield f"{prefix}.q_norm.weight", attention.q_norm.weight
    yield f"{prefix}.k_norm.weight", attention.k_norm.weight
    if attention.is_sparse:
        yield f"{prefix}.index_q_norm.weight", attention.index_q_norm.weight
        yield f"{prefix}.index_k_norm.weight", attention.index_k_norm.weight


def _gated_mlp(prefix: str, mlp: GatedMLP) -> Destinations:
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", mlp.down_proj.weight


def _moe(prefix: str, moe: SparseMoE) -> Destinations:
    yield f"{prefix}.gate.weight", moe.router.weight
    yield f"{prefix}.e_score_correction_bias", moe.router.score_bias
    for expert, (gate_up, down) in enumerate(zip(moe.experts.gate_up, moe.experts.down, strict=True)):
        gate, up = gate_up.chunk(2)
        yield f"{prefix}.experts.{expert}.w1.weight", gate
        yield f"{prefix}.experts.{expert}.w2.weight", down
        yield f"{prefix}.experts.{expert}.w3.weight", up
    yield from _gated_mlp(f"{prefix}.shared_experts", moe.shared_experts)


def _vision(vision: MiniMaxM3Vision) -> Destinations:
    tower, config = "vision_tower.vision_model", vision.config
    # Stored as a convolution's kernel; a patch is flattened in the same order.
    kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    yield f"{tower}.embeddings.patch_embedding.weight", vision.patch_embedding.weight.view(-1, *kernel)
    yield f"{tower}.pre_layrnorm.weight", vision.pre_norm.weight
    yield f"{tower}.pre_layrnorm.bias", vision.pre_norm.bias
    for i, layer in enumerate(vision.layers):
        assert isinstance(layer, VisionLayer)
        yield from _vision_layer(f"{tower}.encoder.layers.{i}", layer)
    yield from _linear("multi_modal_projector.linear_1", vision.projector_1)
    yield from _linear("multi_modal_projector.linear_2", vision.projector_2)
    yield from _linear("patch_merge_mlp.linear_1", vision.merge_1)
    yield from _linear("patch_merge_mlp.linear_2", vision.merge_2)


def _vision_layer(prefix: str, layer: VisionLayer) -> Destinations:
    for name, norm in (("layer_norm1", layer.layer_norm1), ("layer_norm2", layer.layer_norm2)):
        yield f"{prefix}.{name}.weight", norm.weight
        yield f"{prefix}.{name}.bias", norm.bias
    qkv = layer.self_attn.qkv_proj
    assert qkv.bias is not None
    for name, part, bias in zip("qkv", qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True):
        yield f"{prefix}.self_attn.{name}_proj.weight", part
        yield f"{prefix}.self_attn.{name}_proj.bias", bias
    yield from _linear(f"{prefix}.self_attn.out_proj", layer.self_attn.out_proj)
    yield from _linear(f"{prefix}.mlp.fc1", layer.fc1)
    yield from _linear(f"{prefix}.mlp.fc2", layer.fc2)


def _linear(prefix: str, linear: Linear) -> Destinations:
    yield f"{prefix}.weight", linear.weight
    if linear.bias is not None:
        yield f"{prefix}.bias", linear.bias


def _check(directory: Path, entries: dict[str, TensorEntry], targets: dict[str, torch.Tensor]) -> None:
    missing = sorted(targets.keys() - entries.keys())
    unexpected = sorted(entries.keys() - targets.keys())
    misshapen = [
        f"{name} is {list(entries[name].shape)}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in entries and entries[name].shape != tuple(target.shape)
    ]
    faults = [
        f"{len(names)} {what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", misshapen))
        if names
    ]
    if faults:
        raise CheckpointError(f"checkpoint {directory}: tensors do not fit its config.json. {'; '.join(faults)}")


def _listed(names: Sequence[str]) -> str:
    """A wrong count of layers makes thousands: the first few say it."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _fill(targets: dict[str, torch.Tensor], entries: dict[str, TensorEntry], *, show_progress: bool) -> None:
    by_path: defaultdict[Path, list[str]] = defaultdict(list)
    for name in targets:
        by_path[entries[name].path].append(name)
    with tqdm(total=len(targets), desc="Loading weights", unit="tensor", disable=not show_progress) as bar:
        for path, names in sorted(by_path.items()):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in names:
                        targets[name].copy_(file.get_tensor(name))
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
