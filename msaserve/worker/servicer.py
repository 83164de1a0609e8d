"""The RPCs of VllmEngine over an AsyncEngine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from datetime import datetime, timezone
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as services
from smg_grpc_proto.generated import common_pb2

from msaserve.engine.async_engine import AsyncEngine
from msaserve.errors import EngineError, InvalidRequestError, MsaserveError
from msaserve.kv_events import CursorLostError
from msaserve.observe.trace import GenerateSpan, Tracer
from msaserve.rpc import convert, shm
from msaserve.rpc.errors import to_status
from msaserve.rpc.events import ResponseWriter
from msaserve.rpc.kv_events import batch_to_proto
from msaserve.rpc.media import shm_names
from msaserve.rpc.protocol import LARGE_BYTES
from msaserve.types import GenerateRequest
from msaserve.worker.archive import pack
from msaserve.worker.served import ServedModel
from msaserve.worker.stop import StopStrings

_log = logging.getLogger(__name__)

SERVER_TYPE = "msaserve-grpc"
MAX_ITEMS = {"image": 200, "video": 20}
"""Of one request, as MiniMax-M3 is served."""
_CHUNK_BYTES = 2**20
_FLUSH_POLL_SECONDS = 0.02
_FLUSH_SECONDS = 0.25
"""The least time to wait for idleness: a request whose end was just seen may still be on its way out."""


class Servicer(services.VllmEngineServicer):  # type: ignore[misc]
    """What it does not define answers UNIMPLEMENTED: Embed, StartProfile, StopProfile."""

    def __init__(
        self,
        engine: AsyncEngine,
        model: ServedModel,
        *,
        tokens_per_second: Callable[[], float] = lambda: 0.0,
        tracer: Tracer | None = None,
    ) -> None:
        """tokens_per_second: the recent rate of output, for GetLoads. tracer: of the spans around requests."""
        self._engine = engine
        self._model = model
        self._tokens_per_second = tokens_per_second
        self._tracer = tracer or Tracer()
        self._shm_namespace = shm.namespace_id()
        self._archive: asyncio.Task[tuple[bytes, str]] | None = None
        self._start = time.monotonic()
        self._last_receive = 0.0

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._last_receive = time.time()
        span = GenerateSpan(self._tracer.start("Generate", "server", parent=context.invocation_metadata() or ()))
        failure: BaseException | None = None
        try:
            async with aclosing(self._responses(request, context, span)) as responses:
                async for response in responses:
                    yield response
        except MsaserveError as error:
            failure = error
            await _abort(context, error)
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end(failure)

    async def _responses(self, request: Any, context: Any, span: GenerateSpan) -> AsyncGenerator[Any, None]:
        generate = await self._generate_request(request, context)
        generate.sampling.validate(vocab_size=self._engine.info.vocab_size)  # before anything is made for n outputs
        stops = self._stop_strings(request, generate)
        writer = ResponseWriter(num_outputs=generate.sampling.n, is_streaming=request.stream)
        open_outputs = set(range(generate.sampling.n))
        span.span.set("gen_ai.request.id", generate.request_id)
        async with aclosing(self._engine.generate(generate)) as events:
            async for event in events:
                if event.index not in open_outputs:
                    continue
                if event.finish_reason == "error":
                    raise EngineError(event.error or "the request failed")
                found = None
                if stops:
                    event, found = stops[event.index].cut(event)
                if found is not None:
                    await self._engine.abort(generate.request_id, event.index)
                span.push(event)
                for response in writer.push(event, stop_string=found):
                    yield response
                if event.finish_reason is not None:
                    open_outputs.discard(event.index)
                if not open_outputs:
                    break

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        for request_id in request.request_ids:
            await self._engine.abort(request_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        is_ready = await self._engine.is_ready()
        return pb.HealthCheckResponse(healthy=is_ready, message="" if is_ready else "takes no new requests")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        model, info = self._model, self._engine.info
        return pb.GetModelInfoResponse(
            model_path=str(model.directory),
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            supports_vision=info.supports_vision,
            served_model_name=model.name,
            tokenizer_path=str(model.directory),
            model_type=info.model_type,
            architectures=model.architectures,
            eos_token_ids=info.eos_token_ids,
            max_req_input_len=info.max_model_len - 1,
            default_sampling_params_json=model.default_sampling_json(),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        model, load = self._model, await self._engine.load()
        has_vision = self._engine.info.supports_vision
        return pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting,
            is_paused=not await self._engine.is_ready(),
            last_receive_timestamp=self._last_receive,
            uptime_seconds=time.monotonic() - self._start,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            shm_namespace_id=self._shm_namespace,
            kv_cache_dtype=model.kv_cache_dtype,
            block_size=model.block_size,
            model_dtype=f"torch.{model.dtype}",
            mm_device_do_normalize=has_vision,
            max_num_seqs=model.max_num_seqs,
            mm_item_limits=",".join(f"{name}={n}" for name, n in MAX_ITEMS.items()) if has_vision else "",
            multimodal_encoder_dtype=model.dtype if has_vision else "",
            constrained_decoding_start="after_reasoning",
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        model, load = self._model, await self._engine.load()
        context.set_trailing_metadata(convert.load_metadata(load))
        scheduler_load = convert.load_to_proto(
            load,
            block_size=model.block_size,
            max_num_seqs=model.max_num_seqs,
            tokens_per_second=self._tokens_per_second(),
        )
        is_asked = not request.HasField("dp_rank") or request.dp_rank == 0
        return pb.GetLoadsResponse(
            timestamp=datetime.now(timezone.utc).isoformat(),
            dp_rank_count=1,
            loads=[scheduler_load] if is_asked else [],
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self._model.tokenizer is None:
            await _abort(context, InvalidRequestError("this checkpoint has no tokenizer"))
        if self._archive is None:
            self._archive = asyncio.create_task(asyncio.to_thread(self._pack))
        archive = self._archive
        try:
            data, digest = await asyncio.shield(archive)
        except OSError as error:
            if self._archive is archive:
                self._archive = None  # what could not be read may be there next time
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the checkpoint's files cannot be read: {error}")
        for start in range(0, len(data), _CHUNK_BYTES):
            is_last = start + _CHUNK_BYTES >= len(data)
            yield common_pb2.GetTokenizerChunk(
                data=data[start : start + _CHUNK_BYTES], sha256=digest if is_last else ""
            )

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Only when nothing runs, or within timeout_s: what runs now would fill the cache again."""
        deadline = time.monotonic() + max(request.timeout_s, _FLUSH_SECONDS)
        while True:
            load = await self._engine.load()
            num_active = load.num_running + load.num_waiting
            if num_active == 0:
                break
            if time.monotonic() >= deadline:
                return common_pb2.FlushCacheResponse(success=False, message=f"{num_active} requests are in flight")
            await asyncio.sleep(_FLUSH_POLL_SECONDS)
        try:
            count = await self._engine.flush_prefix_cache()
        except MsaserveError as error:
            return common_pb2.FlushCacheResponse(success=False, message=str(error))
        return common_pb2.FlushCacheResponse(success=True, message=f"{count} cached blocks forgotten")

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The cache as it is and what happens to it, or from 1 on what came after the batch of that number.

        OUT_OF_RANGE, before or while batches are sent: what should come next is not kept; ask for 0.
        """
        log = self._engine.kv_events
        if log is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker caches no prefixes")
            return
        has_news, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(has_news.set)

        with log.listening(wake):
            number = request.start_sequence_number
            try:
                batches = log.after(number) if number else log.snapshot()
                await context.send_initial_metadata(())
                while True:
                    for batch in batches:
                        yield batch_to_proto(batch, block_size=log.block_size)
                        number = batch.number
                    if log.is_closed:
                        return
                    await has_news.wait()
                    has_news.clear()
                    batches = log.after(number)
            except CursorLostError as error:
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))

    async def _generate_request(self, request: Any, context: Any) -> GenerateRequest:
        metadata = context.invocation_metadata()

        def read() -> GenerateRequest:
            batches = [request.mm_inputs, *request.extra_mm_inputs]
            try:
                return convert.request_from_proto(
                    request,
                    normalize=self._model.normalize,
                    tokenize=None if self._model.tokenizer is None else self._model.tokenize,
                    metadata=metadata,
                )
            finally:
                # What was sent for this request is this request's to remove, also when it is refused.
                for name in shm_names(batches):
                    shm.remove(name)

        is_large = request.ByteSize() > LARGE_BYTES or request.HasField("mm_inputs")
        return await asyncio.to_thread(read) if is_large else read()

    def _stop_strings(self, request: Any, generate: GenerateRequest) -> list[StopStrings]:
        """One for each output; empty if no stop strings are asked for."""
        sampling = generate.sampling
        if not sampling.stop:
            return []
        if self._model.tokenizer is None:
            raise InvalidRequestError("stop: this worker has no tokenizer to find stop strings with", param="stop")
        if not all(sampling.stop):
            raise InvalidRequestError("stop strings must not be empty", param="stop")
        skips = request.sampling_params.skip_special_tokens
        return [StopStrings(self._model.tokenizer, sampling, skip_special_tokens=skips) for _ in range(sampling.n)]

    def _pack(self) -> tuple[bytes, str]:
        data = pack(self._model.directory)
        return data, hashlib.sha256(data).hexdigest()


async def _abort(context: Any, error: MsaserveError) -> None:
    """End the call with the error's status. Does not return."""
    code, message, metadata = to_status(error)
    await context.abort(code, message, metadata)
