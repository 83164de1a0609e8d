"""An engine in another process, reached by gRPC: this project's worker, or another that speaks the same protocol."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import zipfile
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from msgspec.structs import replace
from smg_grpc_proto.generated import common_pb2

from msaserve.config import GenerationDefaults
from msaserve.errors import CheckpointError, EngineError, MsaserveError, OverloadedError
from msaserve.gateway.client import WorkerState
from msaserve.gateway.kv_index import KvEventsUnsupportedError
from msaserve.kv_events import CursorLostError, KvEventBatch
from msaserve.observe.trace import GenerateSpan, Tracer, Value
from msaserve.rpc import convert, shm
from msaserve.rpc.dialects import DIALECTS, Dialect
from msaserve.rpc.errors import from_status
from msaserve.rpc.events import EventReader
from msaserve.rpc.kv_events import batch_from_proto
from msaserve.rpc.protocol import CHANNEL_OPTIONS, LARGE_BYTES, parse_address
from msaserve.types import EngineLoad, FinishReason, GenerateRequest, ModelInfo, TokenEvent

_CALL_SECONDS = 10.0
_FILES_SECONDS = 120.0
_HEALTH_SECONDS = 3.0
_MAX_FILES_BYTES = 2**30
_NOT_SERVING = b"\x08\x02"
"""A HealthCheckResponse of grpc.health.v1."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_THREAD_TOKENS = 8_192
"""Prompts above this are put into messages in a thread."""


@dataclass(frozen=True)
class Worker:
    """What a worker says of itself."""

    info: ModelInfo
    served_model_name: str
    defaults: GenerationDefaults
    """Sampling of requests that say nothing."""
    block_size: int
    encoder_dtype: str
    """Of patches that are normalised here, because it takes no pixels."""
    shares_memory: bool
    """It sees this process's shared memory."""
    protocol: str


class _Spoken:
    """A connection in one of its protocols."""

    def __init__(self, channel: Any, dialect: Dialect) -> None:
        self.dialect = dialect
        self.stub = dialect.stub(channel)
        # Bytes in: large messages are made and serialised in a thread, not on the event loop.
        read: Any = dialect.messages.GenerateResponse.FromString
        self.generate: Any = channel.unary_stream(f"/{dialect.service}/Generate", response_deserializer=read)
        # Of one response, which is the same on the wire: a third less time than a stream that brings one.
        self.generate_whole: Any = channel.unary_unary(f"/{dialect.service}/Generate", response_deserializer=read)
        # grpc.health.v1, whose messages here are bytes: its package is not among what a gateway needs.
        self.health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")


class GrpcClient:
    """`gateway.client.EngineClient` of one worker. Made inside a running event loop.

    Args:
        address: grpc://host:port or unix:///path.
        uses_shm: send large tensors through shared memory where the worker sees it.
        files: the checkpoint's small files by name, where they are at hand: at least config.json. None: its worker is
            asked for them.
        tracer: of the spans around requests.
        shm_owner: see `rpc.shm.write`.

    Raises:
        InvalidRequestError: the address has another form.
    """

    def __init__(
        self,
        address: str,
        *,
        uses_shm: bool = True,
        files: dict[str, bytes] | None = None,
        tracer: Tracer | None = None,
        shm_owner: str = "",
    ) -> None:
        self.address = address
        self._shm_owner = shm_owner
        self._channel: Any = grpc.aio.insecure_channel(parse_address(address), options=CHANNEL_OPTIONS)
        self._spoken: _Spoken | None = None
        self._uses_shm = uses_shm
        self._worker: Worker | None = None
        self._files = files
        self._tracer = tracer or Tracer()
        self._num_requests = 0
        self._calls: set[Any] = set()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._is_draining = False
        self._is_closed = False
        self._watching = asyncio.create_task(self._watch())

    async def worker(self) -> Worker:
        """Asked once a connection, then remembered: behind a new connection there may be another process.

        Raises:
            OverloadedError: it cannot be reached.
            EngineError: it fails to answer.
        """
        if self._worker is None:
            spoken = await self._dialect()
            messages, stub = spoken.dialect.messages, spoken.stub
            model = await _answer(stub.GetModelInfo(messages.GetModelInfoRequest(), timeout=_CALL_SECONDS))
            server = await _answer(stub.GetServerInfo(messages.GetServerInfoRequest(), timeout=_CALL_SECONDS))
            facts = spoken.dialect.facts(model, server)
            token_ids = _media_token_ids(await self.files()) if model.supports_vision else {}
            self._worker = Worker(
                info=convert.info_from_proto(
                    model,
                    token_ids,
                    takes_pixels=facts.takes_pixels,
                    constrains_first_token=facts.constrains_first_token,
                ),
                served_model_name=model.served_model_name,
                defaults=_defaults(model.default_sampling_params_json, tuple(model.eos_token_ids)),
                block_size=facts.block_size,
                encoder_dtype=facts.encoder_dtype,
                shares_memory=self._uses_shm and facts.shm_namespace == shm.namespace_id() != "",
                protocol=spoken.dialect.name,
            )
        return self._worker

    async def _dialect(self) -> _Spoken:
        """The first protocol that the worker answers in. Asked once a connection.

        Raises:
            OverloadedError: it cannot be reached.
            EngineError: it speaks none that is known here, or fails to answer.
        """
        for dialect in DIALECTS if self._spoken is None else ():
            spoken = _Spoken(self._channel, dialect)
            try:
                await spoken.stub.HealthCheck(dialect.messages.HealthCheckRequest(), timeout=_HEALTH_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    continue
                raise from_status(error, has_begun=False) from error
            self._spoken = spoken
            break
        if self._spoken is None:
            known = " or ".join(dialect.service for dialect in DIALECTS)
            raise EngineError(f"{self.address} does not speak {known}")
        return self._spoken

    async def model_info(self) -> ModelInfo:
        return (await self.worker()).info

    async def files(self) -> dict[str, bytes]:
        """The checkpoint's small files by name: tokenizer, chat template, configuration. Fetched once.

        Raises:
            OverloadedError: the worker cannot be reached.
            EngineError: what it sends is damaged, or it sends none.
        """
        if self._files is None:
            chunks, digest = [], ""
            call = (await self._dialect()).stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=_FILES_SECONDS)
            try:
                async for chunk in call:
                    chunks.append(chunk.data)
                    digest = chunk.sha256 or digest
                    if sum(map(len, chunks)) > _MAX_FILES_BYTES:
                        raise EngineError(f"the worker's tokenizer files are more than {_MAX_FILES_BYTES} bytes")
            except grpc.aio.AioRpcError as error:
                raise from_status(error, has_begun=bool(chunks)) from error
            finally:
                call.cancel()
            self._files = await asyncio.to_thread(_unpack, b"".join(chunks), digest)
        return self._files

    async def save_files(self, directory: Path) -> None:
        """Write `files` into a directory, for what loads a checkpoint from one."""
        for name, data in (await self.files()).items():
            (directory / name).write_bytes(data)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stop strings stay here: the worker sees none, as an engine in this process sees none.

        Raises:
            InvalidRequestError, OverloadedError, EngineError: before any event. What fails later ends every open
                output with finish_reason "error".
        """
        if self._is_draining or self._is_closed:
            raise OverloadedError("this client is shutting down and takes no new request")
        worker = await self.worker()
        request.sampling.validate(vocab_size=worker.info.vocab_size)
        stop_ids = set(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids.update(worker.info.eos_token_ids)
        if request.sampling.stop:  # looked for here: tokens must come as they are made
            request = replace(request, sampling=replace(request.sampling, stop=()), is_streamed=True)
        is_single = not request.is_streamed and request.sampling.n == 1
        reader = EventReader(num_outputs=request.sampling.n, stop_ids=stop_ids, is_streaming=request.is_streamed)
        self._num_requests += 1
        tracing = self._tracer.start("Generate", "client", attributes=lambda: self._attributes(request))
        span = GenerateSpan(tracing, is_streamed=request.is_streamed)
        metadata = (*convert.request_metadata(request), *tracing.headers())
        names: list[str] = []
        call: Any = None
        failure: BaseException | None = None
        try:
            spoken = await self._dialect()
            data = await self._message(request, spoken.dialect, worker, names)
            call = self._begin((spoken.generate_whole if is_single else spoken.generate)(data, metadata=metadata))
            try:
                while not reader.is_done:
                    event = reader.push(await (call if is_single else call.read()))
                    if event is not None:
                        span.push(event)
                        yield event
            except (grpc.aio.AioRpcError, EngineError, asyncio.CancelledError) as error:
                for event in self._end_events(error, reader):
                    span.push(event)
                    yield event
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(call)
            _remove(names)  # whatever the worker has not taken
            span.end(failure)
            # With its traceback it would hold this frame, and all of the request, until the collector looks.
            failure = None

    async def abort(self, request_id: str) -> None:
        spoken = await self._dialect()
        await _answer(spoken.stub.Abort(spoken.dialect.abort(request_id), timeout=_CALL_SECONDS))

    async def load(self) -> EngineLoad:
        """Raises OverloadedError or EngineError if the worker does not say."""
        worker = await self.worker()
        spoken = await self._dialect()
        call = spoken.stub.GetLoads(spoken.dialect.messages.GetLoadsRequest(include=["core"]), timeout=_CALL_SECONDS)
        response = await _answer(call)
        return convert.load_from_proto(response, await call.trailing_metadata(), block_size=worker.block_size)

    def tallies(self) -> list[WorkerState]:
        return [WorkerState(self.address, num_active=len(self._calls), num_requests=self._num_requests)]

    async def workers(self) -> list[WorkerState]:
        # Who does not answer must not keep the others' numbers from a scrape.
        is_ready, load = await asyncio.gather(
            asyncio.wait_for(self.is_ready(), _HEALTH_SECONDS),
            asyncio.wait_for(self.load(), _HEALTH_SECONDS),
            return_exceptions=True,
        )
        (tally,) = self.tallies()
        return [tally._replace(is_ready=is_ready is True, load=load if isinstance(load, EngineLoad) else None)]

    async def kv_events(self, after: int) -> AsyncGenerator[KvEventBatch, None]:
        """See `gateway.kv_index.KvEventSource`."""
        stub = (await self._dialect()).stub
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=after))
        try:
            async for message in call:
                batch = batch_from_proto(message)
                if batch is not None:
                    yield batch
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise KvEventsUnsupportedError(error.details()) from error
            if error.code() in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DATA_LOSS):
                raise CursorLostError(error.details()) from error
            raise from_status(error, has_begun=False) from error
        finally:
            call.cancel()

    async def is_ready(self) -> bool:
        if self._is_draining or self._is_closed:
            return False
        try:
            spoken = await self._dialect()
            asked = spoken.dialect.messages.HealthCheckRequest()
            answer, is_serving = await asyncio.gather(
                _answer(spoken.stub.HealthCheck(asked, timeout=_HEALTH_SECONDS)), _is_serving(spoken.health)
            )
        except MsaserveError:
            return False
        return bool(answer.healthy) and is_serving

    async def drain(self) -> None:
        """Send no new request and return when every one in flight has ended. The worker serves others meanwhile."""
        self._is_draining = True
        await self._all_ended.wait()

    async def close(self) -> None:
        """End every stream and the connection. The worker goes on."""
        self._is_closed = True
        self._watching.cancel()
        for call in self._calls:
            call.cancel()
        await self._channel.close()

    def _attributes(self, request: GenerateRequest) -> dict[str, Value]:
        sampling = request.sampling
        return {
            "rpc.system": "grpc",
            "rpc.method": "Generate",
            "server.address": self.address,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": sampling.max_tokens or 0,
            "gen_ai.request.n": sampling.n,
            "msaserve.media_items": len(request.media),
        }

    async def _watch(self) -> None:
        """Forget what the worker said of itself whenever the connection is lost."""
        while True:
            state = self._channel.get_state()
            await self._channel.wait_for_state_change(state)
            if state is grpc.ChannelConnectivity.READY:
                self._worker = self._spoken = None

    async def _message(self, request: GenerateRequest, dialect: Dialect, worker: Worker, names: list[str]) -> bytes:
        """names: gets the shared memory that was written."""

        def store(array: np.ndarray) -> Any:
            if array.nbytes < LARGE_BYTES or not worker.shares_memory:
                return None
            with suppress(OSError):  # no room: the message takes it
                handle = shm.write(array, self._shm_owner)
                names.append(handle.name)
                return handle
            return None

        def build() -> bytes:
            message = dialect.request_to_proto(
                request,
                token_ids={"image": worker.info.image_token_id, "video": worker.info.video_token_id},
                dtype=worker.encoder_dtype,
                store=store,
            )
            data: bytes = message.SerializeToString()
            return data

        if not request.media and len(request.prompt_token_ids) <= _THREAD_TOKENS:
            return build()
        building = asyncio.ensure_future(asyncio.to_thread(build))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            # The thread cannot be stopped; what it leaves is removed once it has ended.
            building.add_done_callback(lambda _: _remove(names))
            raise

    def _begin(self, call: Any) -> Any:
        self._calls.add(call)
        self._all_ended.clear()
        return call

    def _end(self, call: Any) -> None:
        if call is not None:
            call.cancel()
            self._calls.discard(call)
            if not self._calls:
                self._all_ended.set()

    def _end_events(self, error: BaseException, reader: EventReader) -> list[TokenEvent]:
        """What ends the outputs of a call that failed or was cancelled. Raises what is the caller's to know."""
        reason: FinishReason = "error"
        failure: str | None = str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            failed = from_status(error, has_begun=reader.has_begun)
            if not reader.has_begun:
                raise failed from error
            failure = str(failed)
        elif isinstance(error, asyncio.CancelledError):
            if not self._is_closed:
                raise error
            reason, failure = "abort", None
        return [TokenEvent(index=index, finish_reason=reason, error=failure) for index in reader.open_outputs]


def _remove(names: Sequence[str]) -> None:
    for name in names:
        shm.remove(name)


async def _is_serving(health: Any) -> bool:
    """False: it wants no requests yet. vLLM's server says so while it warms up, and calls its engine healthy."""
    try:
        status: bytes = await health(b"", timeout=_HEALTH_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)  # it does not say
    return status != _NOT_SERVING


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_status(error, has_begun=False) from error


def _unpack(data: bytes, digest: str) -> dict[str, bytes]:
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise EngineError("the worker's tokenizer files arrived damaged: their SHA-256 differs")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > _MAX_FILES_BYTES:
                raise EngineError(f"the worker's tokenizer files are more than {_MAX_FILES_BYTES} bytes")
            for entry in entries:
                if not _PLAIN_NAME.fullmatch(entry.filename):
                    raise EngineError(
                        f"the worker's tokenizer files include {entry.filename!r}, which is no plain name"
                    )
            return {entry.filename: archive.read(entry) for entry in entries}
    except zipfile.BadZipFile as error:
        raise EngineError(f"the worker's tokenizer files are no ZIP: {error}") from error


def _defaults(text: str, eos_token_ids: tuple[int, ...]) -> GenerationDefaults:
    """Numbers under the names of GenerationDefaults; what else a worker names there is for others."""
    try:
        values = json.loads(text or "{}")
    except ValueError:
        values = {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    numbers = {name: values[name] for name in names if isinstance(values.get(name), (int, float))}
    return GenerationDefaults(**numbers, eos_token_ids=eos_token_ids)


def _media_token_ids(files: dict[str, bytes]) -> dict[str, int | None]:
    try:
        config = json.loads(files.get("config.json", b"{}"))
    except ValueError as error:
        raise CheckpointError(f"the worker's config.json cannot be read: {error}") from error
    return {name: config.get(f"{name}_token_index", config.get(f"{name}_token_id")) for name in ("image", "video")}
