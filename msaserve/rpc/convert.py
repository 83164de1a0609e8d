"""The protocol's messages to msaserve.types and back. What a message means, and nothing else."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.errors import InvalidRequestError
from msaserve.rpc.errors import Metadata, read_json
from msaserve.rpc.media import Normalize, items_from_proto
from msaserve.rpc.protocol import LOAD_KEY, REQUEST_KEY
from msaserve.types import Constraint, EngineLoad, GenerateRequest, ModelInfo, SamplingParams

_INT32 = range(-(2**31), 2**31)
_UINT32_MAX = 2**32 - 1
_SMALLEST = float(np.finfo(np.float32).tiny)
MAX_SALT_CHARS = 4096

Tokenize = Callable[[str], Sequence[int]]


def sampling_from_proto(message: Any) -> SamplingParams:
    """The fields that proto3 cannot leave unset (top_p, repetition_penalty, n) mean their default when they are 0.

    Raises:
        InvalidRequestError: naming the first field that asks for what is not served.
    """
    _refuse_sampling(message)
    return SamplingParams(
        n=message.n or 1,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        constraint=_constraint_from_proto(message),
    )


def sampling_to_proto(sampling: SamplingParams) -> Any:
    """The message; a seed that is wider than its 32 bits is folded (see `request_metadata` for the whole of it).

    Raises:
        InvalidRequestError: a value that no field can hold.
    """
    top_k, min_tokens, max_tokens = sampling.top_k, sampling.min_tokens, sampling.max_tokens
    with Representable():
        message = pb.SamplingParams(
            n=sampling.n,
            # More than a field can hold is more than any context has.
            max_tokens=None if max_tokens is None else min(max_tokens, _UINT32_MAX),
            min_tokens=min(min_tokens, _UINT32_MAX),
            temperature=sampling.temperature,
            # 0 would mean 1.
            top_p=max(sampling.top_p, _SMALLEST),
            top_k=min(top_k, _UINT32_MAX),
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            seed=None if sampling.seed is None else _folded(sampling.seed),
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=True,
            logprobs=sampling.logprobs,
        )
        if sampling.constraint is not None:
            _constraint_to_proto(message, sampling.constraint)
        return message


def request_from_proto(
    message: Any,
    *,
    normalize: Normalize,
    tokenize: Tokenize | None,
    metadata: Iterable[tuple[str, str | bytes]] | None = None,
) -> GenerateRequest:
    """tokenize: for requests that bring text; None: they are refused. metadata: of the call.

    Raises:
        InvalidRequestError: naming the field that asks for what is not served, or that contradicts another.
    """
    _refuse_request(message)
    extra = read_json(metadata, REQUEST_KEY)
    sampling = sampling_from_proto(message.sampling_params)
    if type(extra.get("seed")) is int:
        sampling = replace(sampling, seed=extra["seed"])
    if sampling.constraint is not None and isinstance(extra.get("constraint_param"), str):
        sampling = replace(sampling, constraint=replace(sampling.constraint, param=extra["constraint_param"]))
    kind = message.WhichOneof("input")
    if kind == "tokenized":
        token_ids = list(message.tokenized.input_ids)
    elif kind == "text" and tokenize is not None:
        token_ids = list(tokenize(message.text))
    elif kind == "text":
        raise InvalidRequestError("this worker has no tokenizer: send token ids", param="text")
    else:
        raise InvalidRequestError("there is no input: send tokenized or text", param="tokenized")
    batches = [message.mm_inputs] if message.HasField("mm_inputs") else []
    return GenerateRequest(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_token_ids=token_ids,
        sampling=sampling,
        media=items_from_proto([*batches, *message.extra_mm_inputs], normalize),
        cache_salt=str(extra.get("cache_salt", "")),
    )


def request_to_proto(request: GenerateRequest) -> Any:
    """The message of a request, without its media (`items_to_proto` adds them).

    Raises:
        InvalidRequestError: a value that no field can hold.
    """
    with Representable():
        message = pb.GenerateRequest(
            request_id=request.request_id,
            sampling_params=sampling_to_proto(request.sampling),
            stream=request.is_streamed,
        )
        # In place: a message that is given to another is copied.
        message.tokenized.SetInParent()
        message.tokenized.input_ids.extend(request.prompt_token_ids)
        return message


def request_metadata(request: GenerateRequest) -> Metadata:
    """What the message cannot say. Workers of other makes ignore it.

    Raises:
        InvalidRequestError: the cache salt is longer than metadata may be.
    """
    extra: dict[str, Any] = {}
    seed = request.sampling.seed
    if seed is not None and seed not in _INT32:
        extra["seed"] = seed
    if request.sampling.constraint is not None and request.sampling.constraint.param:
        extra["constraint_param"] = request.sampling.constraint.param
    if request.cache_salt:
        if len(request.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt has {len(request.cache_salt)} characters; at most {MAX_SALT_CHARS} are taken",
                param="cache_salt",
            )
        extra["cache_salt"] = request.cache_salt
    # json and not msgspec: it also takes the lone surrogates that HTTP clients can send.
    return ((REQUEST_KEY, json.dumps(extra).encode()),) if extra else ()


def info_from_proto(
    message: Any,
    token_ids: dict[str, int | None],
    *,
    takes_pixels: bool = False,
    constrains_first_token: bool = False,
) -> ModelInfo:
    """token_ids: the model's "image" and "video" token. What is not in `message` is given beside it."""
    return ModelInfo(
        model_type=message.model_type,
        vocab_size=message.vocab_size,
        max_model_len=message.max_context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        image_token_id=token_ids.get("image"),
        video_token_id=token_ids.get("video"),
        supports_vision=message.supports_vision,
        takes_pixels=takes_pixels,
        constrains_first_token=constrains_first_token,
    )


def load_to_proto(load: EngineLoad, *, block_size: int, max_num_seqs: int, tokens_per_second: float) -> Any:
    queried = load.num_prefix_queried_tokens
    return pb.SchedulerLoad(
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=min(load.num_used_pages * block_size, _INT32.stop - 1),
        max_total_num_tokens=min(load.num_pages * block_size, _INT32.stop - 1),
        token_usage=load.num_used_pages / load.num_pages,
        gen_throughput=tokens_per_second,
        cache_hit_rate=load.num_prefix_hit_tokens / queried if queried else 0.0,
        utilization=load.num_running / max_num_seqs,
        max_running_requests=max_num_seqs,
    )


def load_metadata(load: EngineLoad) -> Metadata:
    return ((LOAD_KEY, msgspec.json.encode(load)),)


def load_from_proto(
    response: Any, metadata: Iterable[tuple[str, str | bytes]] | None, *, block_size: int
) -> EngineLoad:
    """The engine's load; the counters of a worker that sends none are 0."""
    for key, value in metadata or ():
        if key == LOAD_KEY:
            try:
                return msgspec.json.decode(value, type=EngineLoad)
            except msgspec.MsgspecError:  # another version's
                break
    loads, size = response.loads, max(block_size, 1)
    return EngineLoad(
        num_running=sum(load.num_running_reqs for load in loads),
        num_waiting=sum(load.num_waiting_reqs for load in loads),
        num_pages=sum(load.max_total_num_tokens for load in loads) // size,
        num_used_pages=sum(load.num_used_tokens for load in loads) // size,
        num_cached_pages=0,
        num_prefix_queried_tokens=0,
        num_prefix_hit_tokens=0,
        num_prompt_tokens=0,
        num_output_tokens=0,
        num_preemptions=0,
    )


def _constraint_from_proto(message: Any) -> Constraint | None:
    """The engine waits for the end of reasoning unless `grammar_from_first_token` says that the sender does not."""
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return None
    return Constraint(
        kind=kind,
        text="" if kind in ("json_object", "choice") else getattr(message, kind),
        choices=tuple(message.choice.choices) if kind == "choice" else (),
        after_reasoning=not message.grammar_from_first_token,
    )


def _constraint_to_proto(message: Any, constraint: Constraint) -> None:
    if constraint.kind == "json_object":
        message.json_object = True
    elif constraint.kind == "choice":
        message.choice.SetInParent()
        message.choice.choices.extend(constraint.choices)
    else:
        setattr(message, constraint.kind, constraint.text)
    message.grammar_from_first_token = not constraint.after_reasoning


def _refuse_sampling(message: Any) -> None:
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if message.HasField(name):
            raise _unsupported(name)
    if message.HasField("logprobs") and message.logprobs < 0:
        raise InvalidRequestError(f"logprobs must be 0 or more, not {message.logprobs}", param="logprobs")


def _refuse_request(message: Any) -> None:
    for name in ("kv_transfer_params", "kv_transfer_params_json", "media_refs"):
        if message.HasField(name):
            raise _unsupported(name)
    if message.HasField("data_parallel_rank") and message.data_parallel_rank != 0:
        raise InvalidRequestError(
            f"data_parallel_rank is {message.data_parallel_rank}; this worker has rank 0 only",
            param="data_parallel_rank",
        )


def _unsupported(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is not supported by this version", param=name, code="unsupported_parameter")


def _folded(seed: int) -> int:
    return seed if seed in _INT32 else (seed ^ (seed >> 32)) & 0x7FFF_FFFF


class Representable:
    """protobuf's own complaints (a negative count, an id of 33 bits) are the sender's fault."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError, OverflowError)) and not isinstance(error, InvalidRequestError):
            raise InvalidRequestError(f"the request cannot be sent to a worker: {error}") from error
