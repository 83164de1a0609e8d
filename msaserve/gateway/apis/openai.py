"""OpenAI's requests and answers, and what of them is accepted. Nothing here talks to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from msaserve.config import GenerationDefaults
from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.pipeline import PART_TYPES, MediaPart, parse_part
from msaserve.gateway.tools import called_tools, in_call_order
from msaserve.types import ModelInfo, SamplingParams

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions endpoint generates when it is not told."""

# Fields that would change the answer and are not served: any value but these is refused, not ignored.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}

_MEDIA_PARTS = (
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "input_video",
    "audio_url",
    "input_audio",
    "file",
)
_ROLES = ("system", "developer", "user", "assistant", "tool", "root")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both endpoints share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    skip_special_tokens: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Any
    """str, list of str, list of token ids, or list of lists of token ids."""
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """Raises InvalidRequestError for anything but a JSON object whose fields fit `kind` and mean what is served."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body must be a JSON object", code="invalid_json")
    return from_fields(data, kind)


def from_fields(data: dict[str, Any], kind: type[RequestT]) -> RequestT:
    """Raises InvalidRequestError for a field that does not fit `kind` or means what is not served."""
    for name, accepted in _REFUSED.items():
        if name in data and name not in kind.__struct_fields__ and data[name] not in accepted:
            raise InvalidRequestError(
                f"{name} is not supported by this version", param=name, code="unsupported_parameter"
            )
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        path = message.rpartition("`$.")[2].rstrip("`") if "`$." in message else None
        if path is None and message.startswith("Object missing required field `"):
            path = message.split("`")[1]
        raise InvalidRequestError(message, param=path) from error


def sampling_params(
    request: CompletionRequest | ChatRequest, defaults: GenerationDefaults, model: ModelInfo
) -> SamplingParams:
    """Raises InvalidRequestError, naming field, value and bounds, for a value that is not allowed."""
    max_tokens, field = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest):
        logprobs = _chat_logprobs(request)
        if request.max_completion_tokens is not None:
            max_tokens, field = request.max_completion_tokens, "max_completion_tokens"
    else:
        logprobs = request.logprobs
        max_tokens = COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens
        if logprobs is not None:
            _check("logprobs", logprobs, 0, MAX_TOP_LOGPROBS)
    if max_tokens is not None:
        _check(field, max_tokens, 1, model.max_model_len)
    min_tokens = _check(
        "min_tokens", request.min_tokens or 0, 0, model.max_model_len if max_tokens is None else max_tokens
    )
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    _check_count("stop", len(stop), MAX_STOP_STRINGS)
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop strings must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}", param="stop"
            )
    stop_token_ids = tuple(request.stop_token_ids or ())
    _check_count("stop_token_ids", len(stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids(stop_token_ids, model, param="stop_token_ids")
    top_k = _check("top_k", _or(request.top_k, defaults.top_k), -1, 2**31 - 1)
    seed = request.seed
    if seed is not None:
        _check("seed", seed, -(2**63), 2**64 - 1)
    return SamplingParams(
        n=_check("n", _or(request.n, 1), 1, MAX_CHOICES),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_check("temperature", _or(request.temperature, defaults.temperature), 0, 2),
        top_p=_check("top_p", _or(request.top_p, defaults.top_p), 0, 1, is_open=True),
        top_k=min(max(top_k, 0), model.vocab_size),
        min_p=_check("min_p", _or(request.min_p, defaults.min_p), 0, 1),
        presence_penalty=_check("presence_penalty", _or(request.presence_penalty, 0.0), -2, 2),
        frequency_penalty=_check("frequency_penalty", _or(request.frequency_penalty, 0.0), -2, 2),
        repetition_penalty=_check(
            "repetition_penalty", _or(request.repetition_penalty, defaults.repetition_penalty), 0, 10, is_open=True
        ),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def check_length(num_prompt_tokens: int, max_tokens: int | None, model: ModelInfo, *, param: str) -> None:
    """Raises InvalidRequestError, with the numbers, when prompt and output cannot fit the model's context."""
    limit = model.max_model_len
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens", param=param)
    if num_prompt_tokens >= limit:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens; this model takes at most {limit - 1} "
            f"(a context of {limit} tokens holds the prompt and at least one token of output)",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
        raise InvalidRequestError(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}; "
            f"this model's context is {limit} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )


def check_token_ids(token_ids: tuple[int, ...] | list[int], model: ModelInfo, *, param: str) -> None:
    """Raises InvalidRequestError naming the first id that is no token of the model."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < model.vocab_size)
        raise InvalidRequestError(f"token id {wrong} is not within 0 … {model.vocab_size - 1}", param=param)


def completion_prompts(prompt: Any, n: int) -> list[str | list[int]]:
    """The prompts of a completions request for n outputs each. Raises InvalidRequestError."""
    if isinstance(prompt, str) or _is_token_ids(prompt):
        prompts: list[str | list[int]] = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(p, str) or _is_token_ids(p) for p in prompt):
        prompts = prompt
    else:
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, none empty",
            param="prompt",
        )
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {n} make {len(prompts) * n} choices; at most {MAX_CHOICES} are allowed",
            param="prompt",
        )
    return prompts


def chat_messages(messages: list[dict[str, Any]], media: list[MediaPart] | None = None) -> list[dict[str, Any]]:
    """The messages as a template takes them: content is text or a list of parts.

    media: gets the pictures and clips, in order; a part {"type": "image"} or {"type": "video"} marks the place of each.
        None: only text is taken.

    Raises:
        InvalidRequestError: naming the message or the part at fault.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    result, media_of = [], {}
    for i, message in enumerate(messages):
        own: list[MediaPart] | None = None if media is None else []
        result.append(_chat_message(i, message, own))
        media_of[id(result[-1])] = own or []
    result = in_call_order(result)
    if media is not None:
        media += [part for message in result for part in media_of[id(message)]]
    return result


def _chat_message(number: int, message: Mapping[str, Any], media: list[MediaPart] | None) -> dict[str, Any]:
    where = f"messages[{number}]"
    role = message.get("role")
    if role == "function" or message.get("function_call"):
        raise InvalidRequestError(
            f"{where}: function calls are not supported; use tools", param=where, code="unsupported_parameter"
        )
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r:.64}", param=f"{where}.role"
        )
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""  # what was said in calls or reasoning alone, and what a tool had nothing to say to
    if isinstance(content, list):
        content = [_part(f"{where}.content[{i}]", part, media) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be text or a list of parts", param=f"{where}.content")
    result = {"role": role, "content": content}
    for key in ("name", "reasoning_content"):
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidRequestError(f"{where}.{key} must be text", param=f"{where}.{key}")
            result[key] = value
    if message.get("tool_calls"):
        if role != "assistant":
            raise InvalidRequestError(f"{where}: only the assistant calls tools", param=f"{where}.tool_calls")
        result["tool_calls"] = called_tools(f"{where}.tool_calls", message["tool_calls"])
    if role == "tool":
        result["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(result["tool_call_id"], str):
            raise InvalidRequestError(f"{where}.tool_call_id must be text", param=f"{where}.tool_call_id")
    return result


def _part(where: str, part: Any, media: list[MediaPart] | None) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) and isinstance(part.get("type"), str) else None
    if kind in PART_TYPES and media is not None:
        media.append(parse_part(part, where))
        return {"type": PART_TYPES[kind]}
    if kind in _MEDIA_PARTS:
        takes = "text only" if media is None else "text, image_url and video_url parts"
        raise InvalidRequestError(
            f"{where}: {kind} parts are not supported; this model takes {takes}",
            param=where,
            code="unsupported_content",
        )
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f'{where} must be {{"type": "text", "text": …}}', param=where)
    return {"type": "text", "text": part["text"]}


def _chat_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if not request.logprobs:
        if top:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return _check("top_logprobs", top or 0, 0, MAX_TOP_LOGPROBS)


def _logit_bias(bias: Mapping[str, float], model: ModelInfo) -> dict[int, float]:
    _check_count("logit_bias", len(bias), MAX_LOGIT_BIAS)
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 20 and int(key) < model.vocab_size):
            raise InvalidRequestError(
                f"logit_bias: {key[:32]!r} is not a token id within 0 … {model.vocab_size - 1}", param="logit_bias"
            )
        result[int(key)] = _check("logit_bias", value, -100, 100)
    return result


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


NumberT = TypeVar("NumberT", int, float)


def _check(name: str, value: NumberT, low: float, high: float, *, is_open: bool = False) -> NumberT:
    """low ≤ value ≤ high, or low < value where the range is open. NaN is never inside."""
    if not ((low < value if is_open else low <= value) and value <= high):
        bounds = f"greater than {low} and at most {high}" if is_open else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, not {value}", param=name)
    return value


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequestError(f"{name} has {count} entries; at most {limit} are allowed", param=name)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionCall(msgspec.Struct):
    arguments: str = ""
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCall(msgspec.Struct):
    """A call, or in a delta what a call gained: then it has an index, and an id, a type and a name at its beginning."""

    function: FunctionCall
    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message, or in a delta what it gained. The content of a message is null if it has none."""

    role: str | None = None
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


ObjectName = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Response(msgspec.Struct, kw_only=True):
    """An answer, or one chunk of a streamed one. usage is left out of chunks whose client did not ask for it."""

    id: str
    object: ObjectName
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


@dataclass(frozen=True)
class ErrorBody:
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode({"error": self})
