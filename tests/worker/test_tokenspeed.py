"""A worker that speaks TokenSpeed's protocol, before the same client."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2
from recording_worker import ANSWER, EOS, TINY, RecordingTokenSpeed, RecordingVllm, recording_worker
from waits import free_port

from msaserve.errors import EngineError, InvalidRequestError
from msaserve.gateway.grpc_client import GrpcClient
from msaserve.gateway.kv_index import KvEventsUnsupportedError
from msaserve.rpc import shm, tokenspeed
from msaserve.rpc.media import segment_rows
from msaserve.types import Constraint, GenerateRequest, MediaItem, SamplingParams

IMAGE, VIDEO = 510, 511
TOKEN_IDS = {"image": IMAGE, "video": VIDEO}


def request(**sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id="a", prompt_token_ids=[5, 6, 7], sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def item(modality: str, grid: tuple[int, int, int], offset: int, length: int) -> MediaItem:
    t, h, w = grid
    return MediaItem(
        modality=modality,  # type: ignore[arg-type]
        patches=np.zeros((t * h * w, 1176), np.float32),
        grid_thw=segment_rows(grid) if modality == "video" else (grid,),
        offset=offset,
        length=length,
        content_hash=bytes(range(32)),
    )


@pytest.mark.parametrize("kind", [RecordingTokenSpeed, RecordingVllm])
async def test_the_protocol_is_found_out(kind: type) -> None:
    worker = kind(TINY, encoder_dtype="bfloat16", takes_pixels=False)
    async with recording_worker(worker) as port:
        client = GrpcClient(f"grpc://127.0.0.1:{port}")
        assert await client.is_ready()
        facts = await client.worker()
        assert facts.protocol == ("tokenspeed" if kind is RecordingTokenSpeed else "vllm")
        assert (facts.served_model_name, facts.encoder_dtype) == ("tiny", "bfloat16")
        assert facts.block_size == (64 if kind is RecordingTokenSpeed else 16)
        assert (facts.info.vocab_size, facts.info.image_token_id, facts.info.takes_pixels) == (512, IMAGE, False)
        load = await client.load()
        assert (load.num_running, load.num_used_pages) == (3, 1 if kind is RecordingTokenSpeed else 4)
        events = [event async for event in client.generate(request(n=2))]
        for index in (0, 1):
            own = [event for event in events if event.index == index]
            assert [token for event in own for token in event.token_ids] == [*ANSWER, EOS]
            assert (own[-1].finish_reason, own[-1].stop_token_id) == ("stop", EOS)
        await client.abort("a")
        assert worker.aborted == ["a"]
        with pytest.raises(KvEventsUnsupportedError):
            async with aclosing(client.kv_events(0)) as events_of_cache:
                await anext(events_of_cache)
        await client.close()


@pytest.mark.parametrize("kind", [RecordingTokenSpeed, RecordingVllm])
@pytest.mark.parametrize("start", ["", "after_reasoning", "first_token"])
async def test_where_constraints_start(kind: type, start: str) -> None:
    worker = kind(TINY, encoder_dtype="", takes_pixels=False, constrained_decoding_start=start)
    async with recording_worker(worker) as port:
        client = GrpcClient(f"grpc://127.0.0.1:{port}")
        assert (await client.model_info()).constrains_first_token is (start == "first_token")
        await client.close()


@pytest.mark.parametrize("kind", [RecordingTokenSpeed, RecordingVllm])
async def test_not_ready_while_it_wants_no_requests(kind: type) -> None:
    """As vLLM's server says while it warms up, of which its engine's own health knows nothing."""
    said, states = health.aio.HealthServicer(), health_pb2.HealthCheckResponse
    worker = kind(TINY, encoder_dtype="", takes_pixels=False)
    async with recording_worker(worker, health=said) as port:
        client = GrpcClient(f"grpc://127.0.0.1:{port}")
        for state, is_ready in ((states.NOT_SERVING, False), (states.SERVING, True), (states.NOT_SERVING, False)):
            await said.set("", state)
            assert await client.is_ready() is is_ready
            (worker_state,) = await client.workers()
            assert worker_state.is_ready is is_ready
        assert (await client.model_info()).vocab_size == 512
        await client.close()


async def test_large_tensors_go_through_shared_memory() -> None:
    worker = RecordingTokenSpeed(TINY, encoder_dtype="bfloat16", takes_pixels=True)
    async with recording_worker(worker) as port:
        client = GrpcClient(f"grpc://127.0.0.1:{port}")
        generate = GenerateRequest(
            request_id="a", prompt_token_ids=[5, *[IMAGE] * 100], media=(item("image", (1, 20, 20), 1, 100),)
        )
        async for _ in client.generate(generate):
            pass
        (message,) = worker.requests
        tensor = message.mm_inputs.items[0].encoder_input
        assert tensor.WhichOneof("payload") == "shm"
        assert tensor.shm.nbytes == 400 * 1176 * 2
        assert not (shm.DIRECTORY / tensor.shm.name).exists()  # nobody took it
        await client.close()


async def test_a_worker_of_neither_protocol() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(f"grpc://127.0.0.1:{port}")
    assert not await client.is_ready()
    with pytest.raises(EngineError, match="does not speak"):
        await client.model_info()
    await client.close()
    await server.stop(0)


async def test_another_protocol_behind_the_same_address() -> None:
    first = RecordingVllm(TINY, encoder_dtype="", takes_pixels=False)
    async with recording_worker(first, port=free_port()) as port:
        client = GrpcClient(f"grpc://127.0.0.1:{port}")
        assert (await client.worker()).protocol == "vllm"
    second = RecordingTokenSpeed(TINY, encoder_dtype="", takes_pixels=False)
    async with recording_worker(second, port=port):
        while not await client.is_ready():
            await asyncio.sleep(0.05)
        assert (await client.worker()).protocol == "tokenspeed"
        await client.close()


def test_media_are_runs_of_their_tokens() -> None:
    clip = [1, IMAGE, 2, *[VIDEO] * 4, 3, 4, *[VIDEO] * 4, 3]
    prompt = [9, *clip, 8, 20, *[IMAGE] * 6, 21]
    media = (item("image", (1, 4, 6), 16, 8), item("video", (2, 4, 4), 1, 14))
    message = tokenspeed.request_to_proto(
        GenerateRequest(request_id="a", prompt_token_ids=prompt, media=media), token_ids=TOKEN_IDS, dtype="float32"
    )
    video, image = message.mm_inputs.items  # in the order of the prompt
    assert [(run.offset, run.length) for run in video.placeholders] == [(4, 4), (10, 4)]
    assert [(run.offset, run.length) for run in image.placeholders] == [(17, 6)]
    assert (video.placeholder_token_id, image.placeholder_token_id) == (VIDEO, IMAGE)
    assert video.content_hash == bytes(range(32))
    grid = np.frombuffer(video.model_specific_tensors["video_grid_thw"].inline, "<i8")
    assert grid.tolist() == [2, 4, 4]


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        (Constraint(kind="json_object"), "json_schema", '{"type": "object"}'),
        (Constraint(kind="json_schema", text="{}"), "json_schema", "{}"),
        (Constraint(kind="regex", text="a+"), "regex", "a+"),
        (Constraint(kind="choice", choices=("a.b", "c")), "regex", r"(?:a\.b)|(?:c)"),
        (Constraint(kind="grammar", text='root ::= "x"'), "ebnf_grammar", 'root ::= "x"'),
    ],
)
def test_constraints(constraint: Constraint, field: str, value: str) -> None:
    message = tokenspeed.request_to_proto(request(constraint=constraint), token_ids=TOKEN_IDS, dtype="float32")
    assert message.sampling_params.WhichOneof("constraint") == field
    assert getattr(message.sampling_params, field) == value


def test_what_it_has_no_words_for() -> None:
    lark = Constraint(kind="grammar", text="start: x", param="tools")
    with pytest.raises(InvalidRequestError, match="tools: this worker takes grammars in EBNF only"):
        tokenspeed.request_to_proto(request(constraint=lark), token_ids=TOKEN_IDS, dtype="float32")


def test_sampling_at_its_limits() -> None:
    message = tokenspeed.request_to_proto(
        request(seed=-1, top_k=2**40, max_tokens=2**40, logit_bias={7: -1.5}, logprobs=0),
        token_ids=TOKEN_IDS,
        dtype="float32",
    )
    sampling = message.sampling_params
    assert (sampling.sampling_seed, sampling.top_k, sampling.max_new_tokens) == (2**64 - 1, 2**31 - 1, 2**32 - 1)
    assert dict(sampling.logit_bias) == {"7": -1.5}
    assert (message.return_logprob, message.top_logprobs_num) == (True, 0)
    plain = tokenspeed.request_to_proto(request(), token_ids=TOKEN_IDS, dtype="float32")
    assert plain.sampling_params.top_k == -1
    assert not plain.return_logprob
