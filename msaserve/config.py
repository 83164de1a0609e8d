"""What a checkpoint's config.json says, and how the engine is told to serve it. No torch here.

Two spellings of the same model are read: the released one (`sparse_attention_config`, `moe_layer_freq`) and the flat
one that transformers writes (`index_*`, `layer_types`, `mlp_layer_types`). A field that is absent takes MiniMax-M3's
own value; what is not implemented is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msaserve.errors import CheckpointError, InvalidRequestError, UnsupportedError
from msaserve.fields import integer, number, optional_section, read_json, section

MODEL_TYPE = "minimax_m3_vl"


@dataclass(frozen=True)
class TextConfig:
    """The text backbone. Sizes are counts of channels, heads, layers or tokens."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    """Channels of a head that are rotated; the others pass."""
    tie_word_embeddings: bool
    has_sparse_attention: tuple[bool, ...]
    """Per layer: block-sparse or dense causal attention."""
    has_moe: tuple[bool, ...]
    """Per layer: mixture of experts or dense MLP."""
    dense_intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    num_index_heads: int
    index_dim: int
    block_size: int
    """Tokens of one block: what is selected, and what one page stores."""
    topk_blocks: int
    local_blocks: int
    """The query's own block and those just before it that are always selected."""

    @property
    def sparse_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, is_sparse in enumerate(self.has_sparse_attention) if is_sparse)


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower and the projector behind it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    layer_norm_eps: float
    rope_theta: float
    projector_hidden_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of one patch: channels × time × height × width."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_merged_patches(self) -> int:
        """Neighbouring patches that become one token."""
        return self.spatial_merge_size**2


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request that names no value is sampled with: generation_config.json, else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> GenerationDefaults:
        """Of a checkpoint that another engine runs: what this one does not implement is not refused.

        Raises:
            CheckpointError: no such directory, no or invalid config.json.
        """
        config = _read_config(Path(directory))
        text = section(config, "text_config") if "text_config" in config else config
        return _generation_defaults(read_json(Path(directory) / "generation_config.json"), text, config)


@dataclass(frozen=True)
class ModelConfig:
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    generation: GenerationDefaults
    directory: Path = field(compare=False)
    """Where the checkpoint lies."""
    model_type: str = MODEL_TYPE

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that the checkpoint was made for."""
        return self.text.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.generation.eos_token_ids

    @classmethod
    def from_checkpoint(cls, directory: str | Path) -> ModelConfig:
        """Read config.json and, if it is there, generation_config.json.

        Raises:
            CheckpointError: no such directory, no or invalid config.json, or another model_type.
            UnsupportedError: a well-formed config that asks for what is not implemented.
        """
        directory = Path(directory)
        config = _read_config(directory)
        model_type = config.get("model_type")
        if model_type != MODEL_TYPE:
            raise CheckpointError(f"model_type is {model_type!r}; this program serves {MODEL_TYPE!r} only")
        text = section(config, "text_config")
        _refuse_quantization(config, text, read_json(directory / "hf_quant_config.json"))
        vision = config.get("vision_config")
        return cls(
            text=_text_config(text, is_tied=bool(config.get("tie_word_embeddings", False))),
            vision=None if vision is None else _vision_config(config, section(config, "vision_config")),
            image_token_id=_token_id(config, "image", 200025),
            video_token_id=_token_id(config, "video", 200026),
            generation=_generation_defaults(read_json(directory / "generation_config.json"), text, config),
            directory=directory,
        )


Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16"]
KVCacheDtype = Literal["auto", "fp8_e4m3"]


@dataclass(frozen=True)
class EngineConfig:
    """How the engine serves a model."""

    device: Device = "auto"
    """auto: cuda where there is one."""
    dtype: DType = "auto"
    """Of weights, and of the cache unless kv_cache_dtype says otherwise. auto: float32 on a CPU, bfloat16 on a GPU."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: dtype. fp8_e4m3: half of bfloat16's bytes; keys, values, index keys and index queries get 8 bits."""
    max_model_len: int | None = None
    """Tokens of prompt and output one request may have. None: what the checkpoint was made for or the cache holds."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step; longer prompts are processed in chunks."""
    max_num_seqs: int = 64
    """Requests computed in one step."""
    max_queue: int | None = 1024
    """Outputs that may wait for their first step; further requests are refused (HTTP 429). None: any number."""
    kv_cache_gib: float | None = None
    """Memory of the paged cache. None: on a CPU 4 GiB or a quarter of the free memory, whichever is smaller; on a GPU
    0.9 of what is free once the weights are loaded."""
    enable_prefix_cache: bool = True
    """Reuse cached prefixes of earlier requests."""
    attend_impl: str | None = None
    """The implementation of ops.sparse_attend to use. None: the best that works."""
    enable_decode_graphs: bool = True
    """Launch decode steps on a GPU as CUDA graphs."""
    seed: int = 0
    """Seeds the requests that name no seed of their own."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_queue", "kv_cache_gib"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequestError(f"{name} must be positive, not {value}", param=name)
        if self.kv_cache_gib == math.inf:
            raise InvalidRequestError("kv_cache_gib must be finite, not inf", param="kv_cache_gib")
        for name, known in (("device", Device), ("dtype", DType), ("kv_cache_dtype", KVCacheDtype)):
            value = getattr(self, name)
            kind = str(value).partition(":")[0] if name == "device" else value  # Python may say "cuda:1"
            if kind not in get_args(known):
                raise InvalidRequestError(
                    f"{name} must be one of {', '.join(get_args(known))}, not {value!r}", param=name
                )

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)


def _text_config(text: Mapping[str, Any], *, is_tied: bool) -> TextConfig:
    _refuse_text_options(text)
    num_layers = integer(text, "num_hidden_layers")
    sparse = _sparse_fields(text, num_layers)
    head_dim = integer(text, "head_dim", 128)
    config = TextConfig(
        vocab_size=integer(text, "vocab_size"),
        hidden_size=integer(text, "hidden_size"),
        num_layers=num_layers,
        num_heads=integer(text, "num_attention_heads"),
        num_kv_heads=integer(text, "num_key_value_heads"),
        head_dim=head_dim,
        max_position_embeddings=integer(text, "max_position_embeddings", 524288),
        rms_norm_eps=number(text, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(text, 5_000_000.0),
        rotary_dim=_rotary_dim(text, head_dim),
        tie_word_embeddings=is_tied or bool(text.get("tie_word_embeddings", False)),
        has_moe=_moe_layers(text, num_layers),
        dense_intermediate_size=integer(text, "dense_intermediate_size", 12288),
        moe_intermediate_size=integer(text, "intermediate_size", 3072),
        shared_intermediate_size=integer(text, "shared_intermediate_size", 3072),
        num_experts=integer(text, "num_local_experts", 128),
        num_experts_per_tok=integer(text, "num_experts_per_tok", 4),
        routed_scaling_factor=number(text, "routed_scaling_factor", 2.0),
        swiglu_alpha=number(text, "swiglu_alpha", 1.702),
        swiglu_limit=number(text, "swiglu_limit", 7.0),
        **sparse,
    )
    _check_text(config)
    return config


def _sparse_fields(text: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    released = text.get("sparse_attention_config")
    if released is None:
        names = _layer_names(text, "layer_types", num_layers, {"full_attention": False, "minimax_m3_sparse": True})
        return {
            "has_sparse_attention": names or (False,) * num_layers,
            "num_index_heads": integer(text, "index_n_heads", 4),
            "index_dim": integer(text, "index_head_dim", 128),
            "block_size": integer(text, "index_block_size", 128),
            "topk_blocks": integer(text, "index_topk_blocks", 16),
            "local_blocks": integer(text, "index_local_blocks", 1),
        }
    sparse = section(text, "sparse_attention_config")
    layers = _layer_flags(sparse, "sparse_attention_freq", num_layers) or (False,) * num_layers
    if not sparse.get("use_sparse_attention", True):
        layers = (False,) * num_layers
    _refuse_sparse_options(sparse, layers, num_layers)
    return {
        "has_sparse_attention": layers,
        "num_index_heads": integer(sparse, "sparse_num_index_heads", 4),
        "index_dim": integer(sparse, "sparse_index_dim", 128),
        "block_size": integer(sparse, "sparse_block_size", 128),
        "topk_blocks": integer(sparse, "sparse_topk_blocks", 16),
        "local_blocks": integer(sparse, "sparse_local_block", 1),
    }


def _moe_layers(text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    named = _layer_names(text, "mlp_layer_types", num_layers, {"dense": False, "sparse": True})
    return named or _layer_flags(text, "moe_layer_freq", num_layers) or (True,) * num_layers


def _rotary_dim(text: Mapping[str, Any], head_dim: int) -> int:
    rope = optional_section(text, "rope_parameters")
    source = rope if "partial_rotary_factor" in rope else text
    if source.get("partial_rotary_factor") is not None:
        factor = number(source, "partial_rotary_factor", 1.0)
        rotary_dim = int(head_dim * factor)
        if not rope and integer(text, "rotary_dim", rotary_dim) != rotary_dim:
            raise CheckpointError(
                f"text_config: rotary_dim {text['rotary_dim']} contradicts partial_rotary_factor {factor} "
                f"of head_dim {head_dim}"
            )
        return rotary_dim
    # The flat spelling's rotary_dim is a remnant: the reference rotates rope_parameters' share of the head, else all.
    return head_dim if rope else integer(text, "rotary_dim", 64)


def _rope_theta(section: Mapping[str, Any], default: float) -> float:
    rope = optional_section(section, "rope_parameters")
    return number(rope, "rope_theta", number(section, "rope_theta", default))


def _vision_config(config: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionConfig:
    _refuse(vision, "vision_config", "hidden_act", ("gelu",))
    _refuse(vision, "vision_config", "position_embedding_type", ("rope",))
    _refuse(vision, "vision_config", "rope_mode", ("3d",))
    _refuse(
        optional_section(vision, "rope_parameters"), "vision_config.rope_parameters", "rope_type", ("axial", "default")
    )
    _refuse(config, "config", "projector_hidden_act", ("gelu",))
    _refuse(config, "config", "multimodal_projector_bias", (True,))
    # Either place: the released files carry it in both, transformers flattens it.
    key = "img_token_compression_config"
    merge = optional_section(vision, key) or optional_section(config, key)
    _refuse(merge, "img_token_compression_config", "image_token_compression_method", ("patch_merge",))
    result = VisionConfig(
        hidden_size=integer(vision, "hidden_size", 1280),
        intermediate_size=integer(vision, "intermediate_size", 5120),
        num_layers=integer(vision, "num_hidden_layers", 32),
        num_heads=integer(vision, "num_attention_heads", 16),
        num_channels=integer(vision, "num_channels", 3),
        patch_size=integer(vision, "patch_size", 14),
        temporal_patch_size=integer(vision, "temporal_patch_size", integer(merge, "temporal_patch_size", 2)),
        spatial_merge_size=integer(vision, "spatial_merge_size", integer(merge, "spatial_merge_size", 2)),
        layer_norm_eps=number(vision, "layer_norm_eps", 1e-5),
        rope_theta=_rope_theta(vision, 10_000.0),
        projector_hidden_size=integer(config, "projector_hidden_size", 6144),
    )
    if result.hidden_size % result.num_heads or result.head_dim < 6:
        raise CheckpointError(
            f"vision_config: hidden_size {result.hidden_size} does not split into {result.num_heads} heads of at least "
            "6 channels"
        )
    return result


def _read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises CheckpointError."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint directory {str(directory)!r} does not exist or is not a directory")
    config = read_json(directory / "config.json")
    if not config and not (directory / "config.json").exists():
        raise CheckpointError(f"{directory / 'config.json'} is missing: not a checkpoint directory")
    return config


def _generation_defaults(
    generation: Mapping[str, Any], text: Mapping[str, Any], config: Mapping[str, Any]
) -> GenerationDefaults:
    sources = (generation, text, config)
    eos: Any = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), [])
    eos_ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) for token_id in eos_ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
    return GenerationDefaults(
        # do_sample absent means nothing: the file then only sets filters. An explicit false means greedy.
        temperature=0.0 if generation.get("do_sample") is False else number(generation, "temperature", 1.0),
        top_p=number(generation, "top_p", 1.0),
        top_k=max(integer(generation, "top_k", 0, minimum=-1), 0),
        min_p=number(generation, "min_p", 0.0),
        repetition_penalty=number(generation, "repetition_penalty", 1.0),
        eos_token_ids=tuple(eos_ids),
    )


def _refuse_text_options(text: Mapping[str, Any]) -> None:
    for key, implemented in (
        ("hidden_act", ("swigluoai", "silu")),
        ("scoring_func", ("sigmoid",)),
        ("use_routing_bias", (True,)),
        ("n_shared_experts", (1,)),
        ("use_qk_norm", (True,)),
        ("qk_norm_type", ("per_head",)),
        ("use_gemma_norm", (True,)),
        ("attention_output_gate", (False,)),
    ):
        _refuse(text, "text_config", key, implemented)
    rope = optional_section(text, "rope_parameters")
    _refuse(rope, "text_config.rope_parameters", "rope_type", ("default",))
    scaling = optional_section(text, "rope_scaling")
    for key in ("rope_type", "type"):
        _refuse(scaling, "text_config.rope_scaling", key, ("default",))


def _refuse_sparse_options(sparse: Mapping[str, Any], layers: Sequence[bool], num_layers: int) -> None:
    _refuse(sparse, "sparse_attention_config", "sparse_init_block", (0,))
    _refuse(sparse, "sparse_attention_config", "sparse_score_type", ("max",))
    disabled = _layer_flags(sparse, "sparse_disable_index_value", num_layers)
    if disabled is not None:
        enabled = [i for i in range(num_layers) if layers[i] and not disabled[i]]
        if enabled:
            raise UnsupportedError(
                "sparse_attention_config.sparse_disable_index_value: the index branch's own value output is not "
                f"implemented, but layers {enabled} enable it"
            )


def _refuse(section: Mapping[str, Any], where: str, key: str, implemented: Sequence[Any]) -> None:
    value = section.get(key)
    if value is not None and value not in implemented:
        raise UnsupportedError(f"{where}.{key} = {value!r} is not implemented; {_listed(implemented)} is")


def _refuse_quantization(config: Mapping[str, Any], text: Mapping[str, Any], modelopt: Mapping[str, Any]) -> None:
    scheme = config.get("quantization_config") or text.get("quantization_config") or modelopt.get("quantization")
    if not scheme:
        return
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"quantization_config must be an object, not {scheme!r}")
    name = scheme.get("quant_algo") or scheme.get("format") or scheme.get("quant_method") or "an unnamed scheme"
    details = ", ".join(
        f"{key} {scheme[key]}" for key in ("quant_method", "fmt", "scale_fmt", "weight_block_size") if key in scheme
    )
    raise UnsupportedError(
        f"the checkpoint's weights are quantised with {str(name).lower()}{f' ({details})' if details else ''}; "
        "only bfloat16, float16 and float32 weights are implemented"
    )


def _check_text(text: TextConfig) -> None:
    if text.num_heads % text.num_kv_heads:
        raise CheckpointError(f"{text.num_heads} query heads do not split over {text.num_kv_heads} KV heads")
    if text.rotary_dim % 2 or not 0 < text.rotary_dim <= text.head_dim:
        raise CheckpointError(f"rotary_dim {text.rotary_dim} must be even and at most head_dim {text.head_dim}")
    if any(text.has_moe) and text.num_experts_per_tok > text.num_experts:
        raise CheckpointError(f"{text.num_experts_per_tok} experts per token of {text.num_experts} experts")
    if not text.sparse_layer_ids:
        return
    if text.num_index_heads > text.num_kv_heads or text.num_kv_heads % text.num_index_heads:
        raise UnsupportedError(
            f"{text.num_index_heads} index heads on {text.num_kv_heads} KV heads: a KV head must follow one index head"
        )
    if text.rotary_dim > text.index_dim:
        raise UnsupportedError(
            f"rotary_dim {text.rotary_dim} is larger than the index head's {text.index_dim} channels"
        )
    if text.local_blocks > text.topk_blocks:
        raise UnsupportedError(f"{text.local_blocks} local blocks do not fit into {text.topk_blocks} selected blocks")


def _layer_flags(section: Mapping[str, Any], key: str, num_layers: int) -> tuple[bool, ...] | None:
    flags = section.get(key)
    return None if flags is None else tuple(bool(flag) for flag in _layer_list(flags, key, num_layers))


def _layer_names(
    section: Mapping[str, Any], key: str, num_layers: int, meanings: Mapping[str, bool]
) -> tuple[bool, ...] | None:
    names = section.get(key)
    if names is None:
        return None
    unknown = sorted({str(name) for name in _layer_list(names, key, num_layers) if name not in meanings})
    if unknown:
        raise UnsupportedError(f"{key}: {_listed(unknown)} not implemented; {_listed(tuple(meanings))} are")
    return tuple(meanings[name] for name in names)


def _layer_list(value: Any, key: str, num_layers: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != num_layers:
        length = len(value) if isinstance(value, list) else repr(value)
        raise CheckpointError(f"{key} must list {num_layers} layers, one entry each, not {length}")
    return value


def _token_id(config: Mapping[str, Any], modality: str, default: int) -> int:
    key = f"{modality}_token_index"
    return integer(config, key if key in config else f"{modality}_token_id", default, minimum=0)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(repr(value) for value in values)
