"""The protocols that a worker may speak, as far as they differ for a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from smg_grpc_proto import (
    tokenspeed_scheduler_pb2,
    tokenspeed_scheduler_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from msaserve.rpc import convert, tokenspeed
from msaserve.rpc.media import items_to_proto
from msaserve.rpc.protocol import SERVICE
from msaserve.types import GenerateRequest

_FIRST_TOKEN = "first_token"
"""Of `constrained_decoding_start`: no reasoning parser of the worker's holds a constraint back."""


class ServerFacts(NamedTuple):
    """What a worker says of itself besides its model."""

    takes_pixels: bool
    block_size: int
    """0: it does not say."""
    encoder_dtype: str
    """Of normalised patches: "bfloat16" or "float32"."""
    shm_namespace: str
    constrains_first_token: bool
    """See ModelInfo."""


@dataclass(frozen=True)
class Dialect:
    """A service whose messages have the same names and, but for what stands here, the same fields."""

    name: str
    service: str
    messages: Any
    """The module of its messages."""
    stub: Callable[[Any], Any]
    """Of a channel."""
    request_to_proto: Callable[..., Any]
    """(GenerateRequest, token_ids, dtype, store) → message with media."""
    abort: Callable[[str], Any]
    """Request id → message."""
    facts: Callable[[Any, Any], ServerFacts]
    """Answers of GetModelInfo and GetServerInfo."""


def _vllm_request(request: GenerateRequest, *, token_ids: Mapping[Any, int | None], dtype: str, store: Any) -> Any:
    message = convert.request_to_proto(request)
    items_to_proto(message, request.media, token_ids=token_ids, dtype=dtype, store=store)
    return message


def _vllm_facts(model: Any, server: Any) -> ServerFacts:
    return ServerFacts(
        takes_pixels=server.mm_device_do_normalize,
        block_size=server.block_size,
        encoder_dtype=_encoder_dtype(server.multimodal_encoder_dtype),
        shm_namespace=server.shm_namespace_id,
        constrains_first_token=server.constrained_decoding_start == _FIRST_TOKEN,
    )


def _tokenspeed_facts(model: Any, server: Any) -> ServerFacts:
    arguments, scheduler = dict(server.server_args), dict(server.scheduler_info)
    block_size = arguments.get("block_size") or arguments.get("page_size")
    return ServerFacts(
        takes_pixels=False,
        block_size=int(block_size) if isinstance(block_size, float) else 0,
        encoder_dtype=_encoder_dtype(model.multimodal_encoder_dtype),
        shm_namespace=str(scheduler.get("shm_namespace_id", "")),
        constrains_first_token=arguments.get("constrained_decoding_start") == _FIRST_TOKEN,
    )


def _encoder_dtype(name: str) -> str:
    return "bfloat16" if name == "bfloat16" else "float32"


VLLM = Dialect(
    name="vllm",
    service=SERVICE,
    messages=vllm_engine_pb2,
    stub=vllm_engine_pb2_grpc.VllmEngineStub,
    request_to_proto=_vllm_request,
    abort=lambda request_id: vllm_engine_pb2.AbortRequest(request_ids=[request_id]),
    facts=_vllm_facts,
)
TOKENSPEED = Dialect(
    name="tokenspeed",
    service=tokenspeed.SERVICE,
    messages=tokenspeed_scheduler_pb2,
    stub=tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub,
    request_to_proto=tokenspeed.request_to_proto,
    abort=lambda request_id: tokenspeed_scheduler_pb2.AbortRequest(request_id=request_id),
    facts=_tokenspeed_facts,
)
DIALECTS = (VLLM, TOKENSPEED)
"""In the order in which a worker is asked for them."""
