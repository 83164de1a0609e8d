"""Responses of one call: what a reader makes of them is what the engine said, however it was cut."""

from __future__ import annotations

import random

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.errors import EngineError
from msaserve.rpc.events import EventReader, ResponseWriter
from msaserve.types import Logprobs, TokenEvent

EOS = 2


def logprobs(token: int) -> Logprobs:
    return Logprobs(token, -0.5, ((token, -0.5), (token + 1, float("-inf"))))


def events(rng: random.Random, n: int, *, has_logprobs: bool) -> list[TokenEvent]:
    """Of n outputs, mixed: some end by a stop token, some by length, one perhaps with nothing at its end."""
    queues = []
    for index in range(n):
        reason = rng.choice(["stop", "length", "abort"])
        ids = [rng.choice([EOS, 5, 6, 7]) for _ in range(rng.randrange(0, 9))]
        if reason == "stop":
            ids.append(EOS)
        queue = []
        while ids:
            size = rng.randrange(1, 4)
            head, ids = ids[:size], ids[size:]
            queue.append(
                TokenEvent(
                    index=index,
                    token_ids=tuple(head),
                    logprobs=tuple(logprobs(i) for i in head) if has_logprobs else (),
                    num_prompt_tokens=9,
                    num_cached_tokens=4,
                )
            )
        tail = {"finish_reason": reason, "stop_token_id": EOS if reason == "stop" else None}
        last = queue.pop() if queue and (reason == "stop" or rng.random() < 0.5) else TokenEvent(index=index)
        queue.append(
            TokenEvent(
                index=index,
                token_ids=last.token_ids,
                logprobs=last.logprobs,
                num_prompt_tokens=9,
                num_cached_tokens=4,
                **tail,
            )
        )
        queues.append(queue)
    mixed = []
    while any(queues):
        mixed.append(rng.choice([q for q in queues if q]).pop(0))
    return mixed


def joined(events: list[TokenEvent], index: int) -> tuple[object, ...]:
    own = [event for event in events if event.index == index]
    assert [event.finish_reason is not None for event in own] == [False] * (len(own) - 1) + [True]
    end = own[-1]
    if end.stop_token_id is not None:
        assert end.token_ids[-1] == end.stop_token_id
    return (
        [token for event in own for token in event.token_ids],
        [position for event in own for position in event.logprobs],
        end.finish_reason,
        end.stop_token_id,
        {(event.num_prompt_tokens, event.num_cached_tokens) for event in own},
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_events_come_back(seed: int, n: int, has_logprobs: bool) -> None:
    said = events(random.Random(seed), n, has_logprobs=has_logprobs)
    writer, reader = ResponseWriter(num_outputs=n, is_streaming=True), EventReader(num_outputs=n, stop_ids={EOS})
    heard = []
    for event in said:
        for response in writer.push(event):
            assert not reader.is_done
            got = reader.push(pb.GenerateResponse.FromString(response.SerializeToString()))
            heard += [] if got is None else [got]
    assert reader.is_done
    for index in range(n):
        assert joined(heard, index) == joined(said, index)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_one_answer_holds_everything(seed: int, n: int) -> None:
    said = events(random.Random(seed), n, has_logprobs=True)
    writer = ResponseWriter(num_outputs=n, is_streaming=False)
    responses = [response for event in said for response in writer.push(event)]
    reader = EventReader(num_outputs=n, stop_ids={EOS}, is_streaming=False)
    heard = [reader.push(pb.GenerateResponse.FromString(response.SerializeToString())) for response in responses]
    assert reader.is_done
    for event in heard:
        assert event is not None
        assert joined([event], event.index) == joined(said, event.index)
    assert sorted(response.complete.index for response in responses) == list(range(n))
    for response in responses:
        complete = response.complete
        ids, positions, reason, stop, _ = joined(said, complete.index)
        assert list(complete.output_ids) == ids
        assert complete.completion_tokens == len(ids)  # type: ignore[arg-type]
        assert list(complete.output_logprobs.token_ids) == [p.token_id for p in positions]  # type: ignore[attr-defined]
        assert complete.finish_reason == reason
        assert (complete.matched_token_id if complete.HasField("matched_token_id") else None) == stop
        assert (complete.prompt_tokens, complete.cached_tokens) == (9, 4)


def test_a_plain_token_is_not_held_back() -> None:
    reader = EventReader(num_outputs=1, stop_ids={EOS})
    chunk = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[5, 6]))
    assert reader.push(chunk) == TokenEvent(token_ids=(5, 6))
    held = pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[EOS]))
    assert reader.push(held) is None
    assert reader.push(held) == TokenEvent(token_ids=(EOS,))
    end = reader.push(pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length")))
    assert end == TokenEvent(token_ids=(EOS,), finish_reason="length")


def test_a_stop_string_is_no_stop_token() -> None:
    (response,) = ResponseWriter(num_outputs=1, is_streaming=False).push(
        TokenEvent(token_ids=(5,), finish_reason="stop"), stop_string="x"
    )
    assert response.complete.matched_stop_str == "x"
    reader = EventReader(num_outputs=1, stop_ids={5})
    reader.push(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[5])))
    end = reader.push(response)
    assert end is not None
    assert (end.token_ids, end.stop_token_id, end.finish_reason) == ((5,), None, "stop")


@pytest.mark.parametrize(
    "response",
    [
        pb.GenerateResponse(),
        pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1], index=1)),
        pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="bored")),
        grpc.aio.EOF,
    ],
)
def test_responses_that_cannot_be(response: object) -> None:
    with pytest.raises(EngineError):
        EventReader(num_outputs=1, stop_ids=()).push(response)


def test_no_part_of_a_whole() -> None:
    with pytest.raises(EngineError, match="a part of"):
        EventReader(num_outputs=1, stop_ids=(), is_streaming=False).push(
            pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1]))
        )
