"""A worker on a loopback port and the gateway's client of it: what holds in one process holds over the wire."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import msgspec
import numpy as np
import pytest
from in_process import InProcessClient
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from waits import SECONDS
from worker_driver import (
    GREEDY,
    IMAGE,
    PROMPT,
    TENSORS,
    TINY,
    VIDEO,
    new_engine,
    read,
    request,
    running_worker,
    tokens,
)

from msaserve.config import EngineConfig
from msaserve.errors import BusyError, InvalidRequestError
from msaserve.gateway.client import EngineClient
from msaserve.pixels import normalize
from msaserve.rpc import shm
from msaserve.rpc.media import items_to_proto, segment_rows
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint, MediaItem


def media_prompt() -> tuple[list[int], tuple[MediaItem, ...]]:
    """The golden prompt with a picture and a clip; the clip cut into rows as the wire cuts it."""
    prompt = TENSORS["mm.input_ids"].tolist()
    items = []
    for modality, token, name, grid in (
        ("image", IMAGE, "mm.pixel_values", "mm.image_grid_thw"),
        ("video", VIDEO, "mm.pixel_values_videos", "mm.video_grid_thw"),
    ):
        places = [i for i, t in enumerate(prompt) if t == token]
        rows = TENSORS[grid].tolist()
        whole = (sum(row[0] for row in rows), *rows[0][1:])
        items.append(
            MediaItem(
                modality=modality,  # type: ignore[arg-type]
                patches=TENSORS[name].numpy(),
                grid_thw=segment_rows(whole) if modality == "video" else (whole,),
                offset=places[0],
                length=places[-1] - places[0] + 1,
                content_hash=modality.encode().ljust(32),
            )
        )
    return prompt, tuple(items)


async def test_the_golden_tokens() -> None:
    async with running_worker() as worker:
        worker.step_when_read()
        client: EngineClient = worker.client
        local = InProcessClient(worker.async_engine)
        assert await client.model_info() == msgspec.structs.replace(await local.model_info(), takes_pixels=True)
        assert (await worker.client.worker()).served_model_name == "tiny"
        assert await client.is_ready()
        events = await read(client, request("a", logprobs=2))
        assert tokens(events) == GREEDY
        assert [lp.token_id for event in events for lp in event.logprobs] == GREEDY
        assert [len(e.token_ids) for e in events] == [1] * len(GREEDY) + [0]
        assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["length"]
        again = await read(local, request("a", logprobs=2))
        assert again[0].num_cached_tokens == 288
        for event, other in zip(
            [lp for e in events for lp in e.logprobs], [lp for e in again for lp in e.logprobs], strict=True
        ):
            assert event.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [t for t, _ in event.top] == [t for t, _ in other.top]
        assert (await read(client, request("a")))[0].num_cached_tokens == 288
        assert (await client.load()) == (await local.load())
        assert (await client.load()).num_output_tokens == 72


async def test_n_outputs_seeds_and_stops() -> None:
    async with running_worker() as worker:
        local = InProcessClient(worker.async_engine)
        for seed in (7, 2**40, -3):
            options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 12, "n": 3, "ignore_eos": False}
            options["stop_token_ids"] = tuple(range(100, 140))
            over_wire = await read(worker.client, request("n", [5, 6, 7], **options))
            in_process = await read(local, request("n", [5, 6, 7], **options))
            for index in range(3):
                assert tokens(over_wire, index) == tokens(in_process, index)
                ends = [[e for e in events if e.index == index][-1] for events in (over_wire, in_process)]
                assert ends[0].finish_reason == ends[1].finish_reason
                assert ends[0].stop_token_id == ends[1].stop_token_id
                if ends[0].stop_token_id is not None:
                    assert ends[0].token_ids[-1] == ends[0].stop_token_id


async def test_an_answer_that_nobody_waits_for_comes_in_one_piece() -> None:
    """One event for each output, the same tokens; but with a stop string, which the worker does not see, as ever."""
    async with running_worker() as worker:
        worker.step_when_read()
        for options in ({"n": 3, "seed": 7, "temperature": 1.0, "logprobs": 1}, {"ignore_eos": False, "n": 1}):
            asked = request("w", [5, 6, 7], max_tokens=12, **options)
            streamed = await read(worker.client, asked)
            whole = await read(worker.client, msgspec.structs.replace(asked, request_id="w2", is_streamed=False))
            assert len(whole) == options["n"] < len(streamed)
            for event in whole:
                own = [e for e in streamed if e.index == event.index]
                assert list(event.token_ids) == tokens(streamed, event.index)
                assert [p.token_id for p in event.logprobs] == [p.token_id for e in own for p in e.logprobs]
                assert (event.finish_reason, event.stop_token_id) == (own[-1].finish_reason, own[-1].stop_token_id)
        stops = msgspec.structs.replace(request("s", stop=("never",), max_tokens=12), is_streamed=False)
        assert len(await read(worker.client, stops)) == 12 + 1  # and the end


async def test_a_whole_answer_of_a_caller_who_leaves_is_given_up() -> None:
    async with running_worker() as worker:
        asked = msgspec.structs.replace(request("gone", max_tokens=3000, ignore_eos=True), is_streamed=False)
        reading = asyncio.create_task(read(worker.client, asked))
        await worker.until(3)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await worker.until_empty()
        assert worker.engine.load().num_output_tokens < 3000


async def test_a_salt_parts_the_cache() -> None:
    async with running_worker() as worker:
        cached = []
        for salt in ("a", "b", "a"):
            cached.append((await read(worker.client, request("s", salt=salt, max_tokens=1)))[0].num_cached_tokens)
        assert cached == [0, 0, 288]


@pytest.mark.parametrize("uses_shm", [False, True])
async def test_media(uses_shm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("msaserve.gateway.grpc_client.LARGE_BYTES", 1024)
    write = shm.write
    monkeypatch.setattr(shm, "write", lambda *given: written.append(write(*given)) or written[-1])
    prompt, items = media_prompt()
    async with running_worker(uses_shm=uses_shm) as worker:
        options: dict[str, Any] = {"media": items, "max_tokens": 8, "logprobs": 5}
        over_wire = await read(worker.client, request("m", prompt, **options))
        in_process = await read(InProcessClient(worker.async_engine), request("l", prompt, **options))
        assert tokens(over_wire) == tokens(in_process)
        again = await read(worker.client, request("m2", prompt, **options))
        assert again[0].num_cached_tokens > 0
        other = tuple(msgspec.structs.replace(item, content_hash=b"x" * 32) for item in items)
        assert (await read(worker.client, request("m3", prompt, **{**options, "media": other})))[
            0
        ].num_cached_tokens < again[0].num_cached_tokens
    assert bool(written) == uses_shm
    assert not [handle.name for handle in written if (shm.DIRECTORY / handle.name).exists()]


async def test_pixels_are_normalised_on_the_worker() -> None:
    prompt, (image, _) = media_prompt()
    prompt = prompt[: image.offset + image.length + 2]
    patches = np.random.default_rng(0).integers(0, 256, image.patches.shape).astype(np.uint8)
    async with running_worker() as worker:
        generate = pb.GenerateRequest(
            request_id="p",
            tokenized={"input_ids": prompt},
            sampling_params={"temperature": 0, "max_tokens": 6, "ignore_eos": True},
        )
        raw = msgspec.structs.replace(image, patches=patches)
        items_to_proto(generate, [raw], token_ids={"image": IMAGE}, dtype="float32")
        assert generate.mm_inputs.pixel_values.dtype == "uint8"
        (answer,) = [response async for response in worker.stub.Generate(generate)]
        known = await read(
            worker.client,
            request("k", prompt, max_tokens=6, media=(msgspec.structs.replace(image, patches=normalize(patches)),)),
        )
        assert list(answer.complete.output_ids) == tokens(known)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stop_token_ids": (512,)}, "stop_token_ids"),
    ],
)
async def test_refusals_are_those_of_one_process(options: dict[str, Any], param: str) -> None:
    async with running_worker() as worker:
        caught = []
        for client in (worker.client, InProcessClient(worker.async_engine)):
            with pytest.raises(InvalidRequestError) as error:
                await read(client, request("r", [5, 6], **options))
            caught.append((str(error.value), error.value.param, error.value.code))
        assert caught[0] == caught[1]
        assert caught[0][1] == param


async def test_media_that_does_not_fit_is_refused_and_its_memory_freed() -> None:
    prompt, (image, clip) = media_prompt()
    wrong = msgspec.structs.replace(image, length=image.length - 1)
    async with running_worker() as worker:
        with pytest.raises(InvalidRequestError, match="tokens"):
            await read(worker.client, request("w", prompt, media=(wrong, clip)))
        handle = shm.write(b"\0" * 100)
        generate = pb.GenerateRequest(request_id="s", tokenized={"input_ids": prompt})
        generate.mm_inputs.pixel_values.shm.CopyFrom(handle)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in worker.stub.Generate(generate)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not (shm.DIRECTORY / handle.name).exists()
        generate.mm_inputs.pixel_values.shm.name = "../etc/passwd"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in worker.stub.Generate(generate)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert tokens(await read(worker.client, request("ok"))) == GREEDY


async def test_a_constraint() -> None:
    async with running_worker() as worker:
        events = await read(
            worker.client,
            request("c", max_tokens=40, ignore_eos=False, constraint=Constraint(kind="regex", text="[0-9]{3}x")),
        )
        text = Tokenizer.load(TINY).decode(tokens(events))
        assert re.fullmatch("[0-9]{3}x", text)
        assert events[-1].finish_reason == "stop"
        wrong = Constraint(kind="json_schema", text="{", param="response_format")
        with pytest.raises(InvalidRequestError) as caught:
            await read(worker.client, request("w", ignore_eos=False, constraint=wrong))
        assert caught.value.param == "response_format"


async def test_going_away_frees_the_pages() -> None:
    async with running_worker() as worker:
        endless = request("e", max_tokens=3000)
        async with aclosing(worker.client.generate(endless)) as events:
            async for _ in events:
                break
        await worker.until_empty()
        task = asyncio.create_task(read(worker.client, request("f", max_tokens=3000, n=2)))
        await worker.until(5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.until_empty()
        # A caller of an answer in one piece, which gives up.
        call = worker.stub.Generate(
            pb.GenerateRequest(
                tokenized={"input_ids": PROMPT}, sampling_params={"max_tokens": 3000, "ignore_eos": True}
            )
        )
        await worker.until(5)
        call.cancel()
        await worker.until_empty()
        assert worker.engine.load().num_output_tokens < 3000


async def test_a_full_queue() -> None:
    async with running_worker(new_engine(max_num_seqs=1, max_queue=2)) as worker:
        task = asyncio.create_task(read(worker.client, request("a", max_tokens=3000)))
        await worker.until(2)
        waiting = asyncio.create_task(read(worker.client, request("b", max_tokens=1)))
        while worker.engine.load().num_waiting < 1:
            await asyncio.sleep(0.005)
        with pytest.raises(BusyError, match="queue is full"):
            await read(worker.client, request("c", n=2))  # there is room for one of its outputs
        assert worker.engine.load().num_waiting == 1
        with pytest.raises(InvalidRequestError, match="at most 2 outputs may wait"):
            await read(worker.client, request("e", n=3))
        await worker.client.abort("a")
        await task
        assert len(tokens(await waiting)) == 1
        assert len(tokens(await read(worker.client, request("d", max_tokens=1)))) == 1
    with pytest.raises(InvalidRequestError, match="max_queue must be positive"):
        EngineConfig(max_queue=0)


async def test_abort_by_id() -> None:
    async with running_worker() as worker:
        task = asyncio.create_task(read(worker.client, request("a", max_tokens=3000, n=2)))
        await worker.until(5)
        await worker.client.abort("another")
        await worker.client.abort("a")
        events = await task
        assert [e.finish_reason for e in events if e.finish_reason] == ["abort", "abort"]
        await worker.until_empty()


async def test_answers_in_one_piece() -> None:
    async with running_worker() as worker:
        sampling = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "n": 2, "logprobs": 1}
        generate = pb.GenerateRequest(tokenized={"input_ids": PROMPT}, sampling_params=sampling)
        answers = [r.complete async for r in worker.stub.Generate(generate)]
        assert sorted(a.index for a in answers) == [0, 1]
        for answer in answers:
            assert list(answer.output_ids) == list(answer.output_logprobs.token_ids) == GREEDY
            assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == ("length", 293, 24)


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_stop_strings(is_streaming: bool) -> None:
    """The 5th and 6th greedy token's text ends one output at the 6th; the other, of another seed, goes on."""
    tokenizer = Tokenizer.load(TINY)
    text = tokenizer.decode(GREEDY, skip_special_tokens=False)
    places = [len(tokenizer.decode(GREEDY[:i], skip_special_tokens=False)) for i in range(25)]
    stop = text[places[5] - 1 : places[6]]
    count = next(i for i in range(25) if stop in text[: places[i]])
    assert 1 < count <= 6
    async with running_worker() as worker:
        worker.step_when_read()
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 3000,
            "ignore_eos": True,
            "n": 2,
            "stop": ["zzzzz", stop],
        }
        generate = pb.GenerateRequest(
            request_id="s", tokenized={"input_ids": PROMPT}, sampling_params=sampling, stream=is_streaming
        )
        ids: dict[int, list[int]] = {0: [], 1: []}
        for response in [r async for r in worker.stub.Generate(generate)]:
            if response.WhichOneof("response") == "chunk":
                ids[response.chunk.index] += response.chunk.token_ids
            else:
                complete = response.complete
                ids[complete.index] += complete.output_ids
                assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
                assert complete.completion_tokens == count
        assert ids == {0: GREEDY[:count], 1: GREEDY[:count]}
        await worker.until_empty()
        assert worker.engine.load().num_output_tokens < 200
        # min_tokens: not before.
        sampling |= {"min_tokens": count, "n": 1, "max_tokens": 24}
        (later,) = [
            r.complete
            async for r in worker.stub.Generate(
                pb.GenerateRequest(tokenized={"input_ids": PROMPT}, sampling_params=sampling)
            )
        ]
        assert later.completion_tokens > count


async def test_one_output_stops_and_its_sibling_goes_on() -> None:
    tokenizer = Tokenizer.load(TINY)
    async with running_worker() as worker:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 40}
        free = await read(worker.client, request("free", [5, 6, 7], **options))
        first, second = (tokens(free, i) for i in range(2))
        # A whole token of the first output that the second never says.
        stop_id = next(t for t in first[3:] if t not in second and len(tokenizer.token_bytes(t)) > 3)
        stop = tokenizer.token_bytes(stop_id).decode()
        assert stop not in tokenizer.decode(second, skip_special_tokens=False)
        sampling = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 40, "ignore_eos": True, "stop": [stop]}
        generate = pb.GenerateRequest(tokenized={"input_ids": [5, 6, 7]}, sampling_params=sampling)
        ends = {r.complete.index: r.complete async for r in worker.stub.Generate(generate)}
        assert list(ends[0].output_ids) == first[: first.index(stop_id) + 1]
        assert list(ends[1].output_ids) == second
        assert (ends[0].finish_reason, ends[1].finish_reason) == ("stop", "length")


async def test_text_and_tokenizer() -> None:
    async with running_worker() as worker:
        text = pb.GenerateRequest(text="Hello", sampling_params={"temperature": 0, "max_tokens": 5})
        ids = pb.GenerateRequest(
            tokenized={"input_ids": Tokenizer.load(TINY).encode("Hello", add_special_tokens=True)},
            sampling_params={"temperature": 0, "max_tokens": 5},
        )
        (one,) = [r.complete async for r in worker.stub.Generate(text)]
        (other,) = [r.complete async for r in worker.stub.Generate(ids)]
        assert one.output_ids == other.output_ids
        chunks = [c async for c in worker.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [bool(c.sha256) for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()


async def test_the_files_make_a_tokenizer_again(tmp_path: Path) -> None:
    async with running_worker() as worker:
        await worker.client.save_files(tmp_path)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    assert not (tmp_path / "model.safetensors").exists()


async def test_files_that_could_not_be_read_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as worker:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", Mock(side_effect=OSError("stale file handle")))
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="stale file handle") as caught:
                    [c async for c in worker.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [c async for c in worker.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]


async def test_what_it_says_of_itself() -> None:
    async with running_worker(new_engine(max_num_seqs=5)) as worker:
        model = await worker.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.model_type, model.vocab_size) == ("tiny", "minimax_m3_vl", 512)
        assert (model.max_context_length, list(model.eos_token_ids), model.is_generation) == (4096, [2], True)
        assert list(model.architectures) == ["MiniMaxM3SparseForConditionalGeneration"]
        server = await worker.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.block_size, server.max_num_seqs, server.model_dtype) == (16, 5, "torch.float32")
        assert (server.mm_device_do_normalize, server.mm_item_limits) == (True, "image=200,video=20")
        assert server.shm_namespace_id == shm.namespace_id()
        loads = await worker.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
        assert not loads.loads
        assert loads.dp_rank_count == 1


async def test_flush_cache() -> None:
    async with running_worker() as worker:
        await read(worker.client, request("a", max_tokens=1))
        task = asyncio.create_task(read(worker.client, request("b", max_tokens=3000)))
        await worker.until(3)
        busy = await worker.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not busy.success
        assert "1 requests" in busy.message
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        done = await worker.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=SECONDS))
        assert done.success
        assert (await worker.client.load()).num_cached_pages == 0
        assert (await read(worker.client, request("a", max_tokens=1)))[0].num_cached_tokens == 0


async def test_what_is_not_there_says_so() -> None:
    async with running_worker() as worker:
        for call in (
            worker.stub.Embed(pb.EmbedRequest()),
            worker.stub.StartProfile(common_pb2.StartProfileRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_of_65_mib() -> None:
    """Far beyond gRPC's default of 4 MiB: refused for what it says, not for its size."""
    generate = pb.GenerateRequest(request_id="h", tokenized={"input_ids": PROMPT}, data_parallel_rank=1)
    generate.mm_inputs.pixel_values.inline = bytes(65 * 2**20)
    async with running_worker() as worker:
        with pytest.raises(grpc.aio.AioRpcError, match="rank 0 only") as caught:
            [r async for r in worker.stub.Generate(generate)]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert tokens(await read(worker.client, request("ok"))) == GREEDY


async def test_many_streams_some_closed_early() -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    async with running_worker() as worker:

        async def one(i: int) -> list[int] | None:
            if i % 4:
                return tokens(await read(worker.client, request(str(i), prompts[i], max_tokens=8)))
            async with aclosing(worker.client.generate(request(str(i), prompts[i], max_tokens=3000))) as events:
                async for _ in events:
                    return None
            return None

        streamed = await asyncio.gather(*(one(i) for i in range(16)))
        await worker.until_empty()
        local = InProcessClient(worker.async_engine)
        for i, ids in enumerate(streamed):
            if ids is not None:
                assert ids == tokens(await read(local, request("x", prompts[i], max_tokens=8)))
