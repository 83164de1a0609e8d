"""A worker without an engine, in either protocol: it keeps the requests as they came and answers two tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from golden_data import golden
from grpc_health.v1 import health_pb2_grpc
from smg_grpc_proto import tokenspeed_scheduler_pb2 as ts
from smg_grpc_proto import tokenspeed_scheduler_pb2_grpc as ts_services
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_services
from smg_grpc_proto.generated import common_pb2

from msaserve.rpc import shm
from msaserve.rpc.protocol import SERVER_OPTIONS
from msaserve.worker.archive import pack

TINY, _ = golden("tiny")
ANSWER = [65, 66]
EOS = 2


class _Recording:
    pb: Any

    def __init__(
        self, files: Path, *, encoder_dtype: str, takes_pixels: bool, constrained_decoding_start: str = ""
    ) -> None:
        self.files = files
        self.encoder_dtype = encoder_dtype
        self.takes_pixels = takes_pixels
        self.constrained_decoding_start = constrained_decoding_start
        self.requests: list[Any] = []
        self.aborted: list[str] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        prompt = len(request.tokenized.input_ids)
        for index in range(request.sampling_params.n or 1):
            if request.stream:
                for token in (*ANSWER, EOS):
                    chunk = self.pb.GenerateStreamChunk(token_ids=[token], prompt_tokens=prompt, index=index)
                    yield self.pb.GenerateResponse(chunk=chunk)
            yield self.pb.GenerateResponse(
                complete=self.pb.GenerateComplete(
                    output_ids=[*ANSWER, EOS],
                    finish_reason="stop",
                    prompt_tokens=prompt,
                    completion_tokens=3,
                    matched_token_id=EOS,
                    index=index,
                )
            )

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        config = json.loads((self.files / "config.json").read_text(encoding="utf-8"))
        fields: dict[str, Any] = {}
        if self.pb is ts:
            modalities = [common_pb2.IMAGE, common_pb2.VIDEO]
            fields = {"multimodal_encoder_dtype": self.encoder_dtype, "supports_multimodal": True}
            fields["supported_modalities"] = modalities
        return self.pb.GetModelInfoResponse(
            model_path="/of/another/machine",
            tokenizer_path="/of/another/machine",
            served_model_name="tiny",
            model_type=config["model_type"],
            architectures=config["architectures"],
            max_context_length=4096,
            max_req_input_len=4095,
            vocab_size=512,
            eos_token_ids=[EOS],
            supports_vision=True,
            **fields,
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        data = pack(self.files)
        yield common_pb2.GetTokenizerChunk(data=data, sha256=hashlib.sha256(data).hexdigest())

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        load = self.pb.SchedulerLoad(num_running_reqs=3, max_total_num_tokens=640, num_used_tokens=64)
        return self.pb.GetLoadsResponse(dp_rank_count=1, loads=[load])


class RecordingVllm(_Recording, vllm_services.VllmEngineServicer):  # type: ignore[misc]
    pb = vllm

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        return vllm.GetServerInfoResponse(
            block_size=16,
            mm_device_do_normalize=self.takes_pixels,
            multimodal_encoder_dtype=self.encoder_dtype,
            mm_item_limits="image=200,video=20",
            max_num_seqs=64,
            constrained_decoding_start=self.constrained_decoding_start,
        )

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.aborted += request.request_ids
        return vllm.AbortResponse()


class RecordingTokenSpeed(_Recording, ts_services.TokenSpeedSchedulerServicer):  # type: ignore[misc]
    pb = ts

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = ts.GetServerInfoResponse()
        answer.server_args["page_size"] = 64
        answer.server_args["constrained_decoding_start"] = self.constrained_decoding_start
        answer.scheduler_info["shm_namespace_id"] = shm.namespace_id() if self.takes_pixels else ""
        return answer

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.aborted.append(request.request_id)
        return ts.AbortResponse(success=True)


@asynccontextmanager
async def recording_worker(servicer: Any, *, port: int = 0, health: Any = None) -> AsyncIterator[int]:
    """The port of a server of one of the above. health: a servicer of grpc.health.v1 beside it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    if health is not None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
    if servicer.pb is ts:
        ts_services.add_TokenSpeedSchedulerServicer_to_server(servicer, server)
    else:
        vllm_services.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
