"""The words shared by everything a request passes: the HTTP side, the wire and the engine. No torch here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from msaserve.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

Modality = Literal["image", "video"]
FinishReason = Literal["stop", "length", "abort", "error"]
ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "structural_tag", "choice"]

MAX_OUTPUTS = 16_384
"""Of one request."""
MAX_CONSTRAINT_CHARS = 2**20
MAX_REGEX_CHARS = 2**16
"""Less: compiling an expression can take the square of its length."""
MAX_PATTERN_CHARS = 2**13
"""Of one expression of a JSON schema, which may have many."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What an output must be, to its end."""

    kind: ConstraintKind
    text: str = ""
    """json_schema: JSON text. regex: in Rust's syntax, of the whole output. grammar: Lark, or EBNF as llama.cpp writes
    it. structural_tag: JSON text of {"triggers", "structures"}. Empty for the other kinds."""
    choices: tuple[str, ...] = ()
    """choice: the output is one of them."""
    after_reasoning: bool = False
    """An output that begins inside reasoning, or opens it as its first token, is free until the reasoning ends."""
    param: str = ""
    """The request's field that it came from, for errors. Empty: named as the kind."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a request ends. `validate` says what values are allowed.

    temperature 0 is greedy. top_k 0 and top_p 1 switch those filters off. Penalties are OpenAI's:
    frequency and presence count output tokens, repetition counts prompt and output tokens.
    """

    n: int = 1
    max_tokens: int | None = None
    """None: up to the model's context length."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """Output i of a request with n > 1 uses seed + i. None: drawn when the request arrives."""
    stop: tuple[str, ...] = ()
    """Stop strings. The engine never sees text: whoever detokenizes looks for them and aborts."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: the sampled token's and the k most likely ones'."""
    constraint: Constraint | None = None

    def validate(self, *, vocab_size: int) -> None:
        """Refuse values that no sampler can serve. Whoever takes requests from outside may allow less.

        Raises:
            InvalidRequestError: naming the field, its value and its bounds.
        """
        bounds: dict[str, tuple[float, float]] = {
            "n": (1, MAX_OUTPUTS),
            "max_tokens": (1, math.inf),
            "min_tokens": (0, math.inf if self.max_tokens is None else self.max_tokens),
            "temperature": (0, 1e6),
            "top_p": (0, 1),
            "top_k": (0, math.inf),
            "min_p": (0, 1),
            "presence_penalty": (-100, 100),
            "frequency_penalty": (-100, 100),
            "repetition_penalty": (0.01, 100),
            "logprobs": (0, math.inf),
        }
        for name, (lowest, highest) in bounds.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise InvalidRequestError(f"{name} must be within {lowest:g} … {highest:g}, not {value}", param=name)
        if self.top_p == 0:
            raise InvalidRequestError("top_p must be above 0, not 0: it would leave no token", param="top_p")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"{name}: token id {token} is not within 0 … {vocab_size - 1}", param=name
                    )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise InvalidRequestError(f"logit_bias of token {token} must be finite, not {bias}", param="logit_bias")
        if self.constraint is not None:
            self._validate_constraint(self.constraint)

    def _validate_constraint(self, constraint: Constraint) -> None:
        field = constraint.param or constraint.kind
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} contradicts {field}, which says where an output ends", param=name)
        num_chars = len(constraint.text) + sum(map(len, constraint.choices))
        limit = MAX_REGEX_CHARS if constraint.kind == "regex" else MAX_CONSTRAINT_CHARS
        if num_chars > limit:
            raise InvalidRequestError(f"{field}: it has {num_chars} characters; at most {limit} are taken", param=field)
        if constraint.kind == "choice" and not constraint.choices:
            raise InvalidRequestError(f"{field}: there are no choices", param=field)


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One picture or clip, prepared: what the vision tower takes.

    patches: float32 [N, 1176], N = Σ t·h·w over the rows of grid_thw; uint8 pixels where ModelInfo.takes_pixels.
    grid_thw: rows of (t, h, w) in patches; a clip longer than 4 temporal patches is several rows.
    offset, length: the span of prompt tokens that this item's features replace are the positions
        offset ≤ p < offset + length whose token id is the model's image or video token; there are N / 4 of them.
    content_hash: of the patches and the grid; salts the prefix index.
    name: what the sender calls it, for KV events; empty: content_hash in hex.
    """

    modality: Modality
    patches: np.ndarray
    grid_thw: tuple[tuple[int, int, int], ...]
    offset: int
    length: int
    content_hash: bytes
    name: str = ""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine takes it: token ids in, token ids out."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    media: tuple[MediaItem, ...] = ()
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    is_streamed: bool = True
    """False: nobody waits for its first token; its events may come as one for each output, at the end."""


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (of the model's distribution at temperature 1, before filters) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What a generate stream yields. The last event of each index carries finish_reason."""

    index: int = 0
    token_ids: tuple[int, ...] = ()
    """New since the last event of this index. The end-of-sequence or stop token that ended it is included."""
    logprobs: tuple[Logprobs, ...] = ()
    """One per token id when asked for, else empty."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when one did."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose cache came from an earlier request."""
    error: str | None = None
    """Why finish_reason is "error"."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the HTTP side must know of the model it fronts."""

    model_type: str
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together that one request may have."""
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None = None
    video_token_id: int | None = None
    supports_vision: bool = False
    takes_pixels: bool = False
    """MediaItem.patches may be uint8 pixels: whoever takes them normalises them."""
    constrains_first_token: bool = False
    """Constraints hold from the first token on, whatever they say of reasoning: nothing can be thought before."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine, cheap enough to take at every scrape."""

    num_running: int
    num_waiting: int
    num_pages: int
    """Usable pages, the dummy page not counted."""
    num_used_pages: int
    """Pages referenced by requests."""
    num_cached_pages: int
    """Unreferenced pages that still hold a reusable prefix."""
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
