"""The other protocol that gateways speak with engines: `tokenspeed.grpc.scheduler.TokenSpeedScheduler`.

A client's side only. Its answers have the fields of VllmEngine's; its requests differ: media item by item, and for each
the runs of media tokens alone, without markers and timestamps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from smg_grpc_proto import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from msaserve.errors import InvalidRequestError
from msaserve.rpc.convert import Representable
from msaserve.rpc.media import whole_grid
from msaserve.rpc.tensors import Store, encode
from msaserve.types import Constraint, GenerateRequest, MediaItem, Modality, SamplingParams

SERVICE = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"

_INT32_MAX = 2**31 - 1
_UINT32_MAX = 2**32 - 1
_MODALITIES = {"image": common_pb2.IMAGE, "video": common_pb2.VIDEO}


def request_to_proto(
    request: GenerateRequest, *, token_ids: Mapping[Modality, int | None], dtype: str, store: Store | None = None
) -> Any:
    """The message of a request.

    token_ids, dtype, store: see `rpc.media.items_to_proto`.

    Raises:
        InvalidRequestError: a value that no field can hold, or a constraint that this protocol has no word for.
    """
    logprobs = request.sampling.logprobs
    with Representable():
        message = pb.GenerateRequest(
            request_id=request.request_id,
            tokenized=pb.TokenizedInput(input_ids=request.prompt_token_ids),
            sampling_params=_sampling_to_proto(request.sampling),
            return_logprob=logprobs is not None,
            logprob_start_len=-1,  # none of the prompt
            top_logprobs_num=logprobs or 0,
            stream=request.is_streamed,
        )
    for item in sorted(request.media, key=lambda item: item.offset):
        into = message.mm_inputs.items.add()
        _item_to_proto(into, item, request.prompt_token_ids, token_ids[item.modality], dtype, store)
    return message


def _sampling_to_proto(sampling: SamplingParams) -> Any:
    message = pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, _INT32_MAX) or -1,  # -1: all tokens count
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        # More than a field can hold is more than any context has.
        max_new_tokens=None if sampling.max_tokens is None else min(sampling.max_tokens, _UINT32_MAX),
        min_new_tokens=min(sampling.min_tokens, _UINT32_MAX),
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=True,
        n=sampling.n,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
        no_stop_trim=True,
        sampling_seed=None if sampling.seed is None else sampling.seed % 2**64,
    )
    if sampling.constraint is not None:
        _constraint_to_proto(message, sampling.constraint)
    return message


def _constraint_to_proto(message: Any, constraint: Constraint) -> None:
    if constraint.kind == "json_object":
        message.json_schema = '{"type": "object"}'
    elif constraint.kind == "choice":
        message.regex = "|".join(f"(?:{re.escape(choice)})" for choice in constraint.choices)
    elif constraint.kind == "grammar":
        if "::=" not in constraint.text:
            field = constraint.param or constraint.kind
            raise InvalidRequestError(f"{field}: this worker takes grammars in EBNF only", param=field)
        message.ebnf_grammar = constraint.text
    else:
        setattr(message, constraint.kind, constraint.text)


def _item_to_proto(
    into: Any, item: MediaItem, prompt: Sequence[int], token_id: int | None, dtype: str, store: Store | None
) -> None:
    grid = whole_grid(item)
    tensors = into.model_specific_tensors
    into.modality = _MODALITIES[item.modality]
    into.content_hash = item.content_hash
    # TensorData has the fields of VllmEngine's, under other numbers.
    encode(item.patches, dtype=dtype, store=store, into=into.encoder_input)
    encode(np.asarray([grid], np.int64), into=tensors[f"{item.modality}_grid_thw"])
    encode(np.asarray([math.prod(grid)], np.int64), into=tensors[f"patches_per_{item.modality}"])
    if token_id is not None:
        into.placeholder_token_id = token_id
    for start, end in _runs(prompt, item, token_id):
        into.placeholders.add(offset=start, length=end - start)


def _runs(prompt: Sequence[int], item: MediaItem, token_id: int | None) -> list[tuple[int, int]]:
    """Where an item's tokens stand one behind another."""
    runs: list[tuple[int, int]] = []
    for i in range(item.offset, item.offset + item.length):
        if prompt[i] != token_id:
            continue
        if runs and runs[-1][1] == i:
            runs[-1] = runs[-1][0], i + 1
        else:
            runs.append((i, i + 1))
    return runs
