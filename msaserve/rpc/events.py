"""TokenEvents to the responses of one Generate call and back."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb

from msaserve.errors import EngineError
from msaserve.types import FinishReason, Logprobs, TokenEvent

_FINISH_REASONS = get_args(FinishReason)


@dataclass
class _Sent:
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


class ResponseWriter:
    """One call's events as responses: chunks and an end for each output, or an end that holds everything."""

    def __init__(self, *, num_outputs: int, is_streaming: bool) -> None:
        self._is_streaming = is_streaming
        self._sent = [_Sent() for _ in range(num_outputs)]

    def push(self, event: TokenEvent, *, stop_string: str | None = None) -> list[Any]:
        """stop_string: the one that ended the output, when one did."""
        sent = self._sent[event.index]
        sent.num_tokens += len(event.token_ids)
        responses = []
        if not self._is_streaming:
            sent.token_ids += event.token_ids
            sent.logprobs += event.logprobs
        elif event.token_ids:
            chunk = pb.GenerateStreamChunk(
                token_ids=event.token_ids,
                prompt_tokens=event.num_prompt_tokens,
                completion_tokens=len(event.token_ids),
                cached_tokens=event.num_cached_tokens,
                output_logprobs=_logprobs_to_proto(event.logprobs),
                index=event.index,
            )
            responses.append(pb.GenerateResponse(chunk=chunk))
        if event.finish_reason is not None:
            complete = pb.GenerateComplete(
                output_ids=sent.token_ids,
                finish_reason=event.finish_reason,
                prompt_tokens=event.num_prompt_tokens,
                completion_tokens=sent.num_tokens,
                cached_tokens=event.num_cached_tokens,
                output_logprobs=_logprobs_to_proto(sent.logprobs),
                index=event.index,
                matched_token_id=event.stop_token_id,
                matched_stop_str=stop_string,
            )
            responses.append(pb.GenerateResponse(complete=complete))
        return responses


class EventReader:
    """A call's responses as events.

    In a stream a token that may have ended its output waits for the next response, which says whether it did: an event
    names its stop token together with it.
    """

    def __init__(self, *, num_outputs: int, stop_ids: Container[int], is_streaming: bool = True) -> None:
        """is_streaming: as it was asked for. False: what ends an output brings all of it."""
        self._is_streaming = is_streaming
        self._stop_ids = stop_ids
        self._held: list[tuple[tuple[int, ...], tuple[Logprobs, ...]]] = [((), ())] * num_outputs
        self._has_ended = [False] * num_outputs
        self.has_begun = False
        """Something has come."""

    @property
    def is_done(self) -> bool:
        return all(self._has_ended)

    @property
    def open_outputs(self) -> list[int]:
        return [index for index, has_ended in enumerate(self._has_ended) if not has_ended]

    def push(self, response: Any) -> TokenEvent | None:
        """response: the next one, or grpc.aio.EOF. Raises EngineError for one that cannot be, or if there is none."""
        if response is grpc.aio.EOF:
            raise EngineError("the worker ended the stream before its outputs")
        self.has_begun = True
        kind = response.WhichOneof("response")
        if kind not in ("chunk", "complete"):
            raise EngineError("the worker sent an empty response")
        message = getattr(response, kind)
        index = message.index
        if not index < len(self._held) or self._has_ended[index]:
            raise EngineError(f"the worker sent more of output {index}, which there is not or which has ended")
        token_ids, logprobs = self._held[index]
        self._held[index] = ((), ())
        if not self._is_streaming:
            if kind == "chunk":
                raise EngineError("the worker sent a part of an answer that it was asked for as a whole")
            token_ids, logprobs = tuple(message.output_ids), _logprobs_from_proto(message.output_logprobs)
        if kind == "complete":
            self._has_ended[index] = True
            return self._end(message, token_ids, logprobs)
        token_ids += tuple(message.token_ids)
        logprobs += _logprobs_from_proto(message.output_logprobs)
        if token_ids and token_ids[-1] in self._stop_ids:
            self._held[index] = (token_ids[-1:], logprobs[-1:])
            token_ids, logprobs = token_ids[:-1], logprobs[:-1]
        if not token_ids:
            return None
        return TokenEvent(
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=message.prompt_tokens,
            num_cached_tokens=message.cached_tokens,
        )

    def _end(self, message: Any, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> TokenEvent:
        reason = message.finish_reason
        if reason not in _FINISH_REASONS:
            raise EngineError(f"the worker ended an output with the reason {reason!r}")
        stop = message.WhichOneof("matched_stop")
        stop_token_id = None
        if reason == "stop" and token_ids and token_ids[-1] in self._stop_ids and stop != "matched_stop_str":
            stop_token_id = token_ids[-1]
        return TokenEvent(
            index=message.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_prompt_tokens=message.prompt_tokens,
            num_cached_tokens=message.cached_tokens,
            error="the worker says no more than that it failed" if reason == "error" else None,
        )


def _logprobs_to_proto(logprobs: Sequence[Logprobs]) -> Any:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.logprob for position in logprobs],
        token_ids=[position.token_id for position in logprobs],
        top_logprobs=[
            pb.TopLogProbs(values=[value for _, value in position.top], token_ids=[token for token, _ in position.top])
            for position in logprobs
        ],
    )


def _logprobs_from_proto(message: Any) -> tuple[Logprobs, ...]:
    top = message.top_logprobs
    return tuple(
        Logprobs(token_id, value, tuple(zip(top[i].token_ids, top[i].values, strict=True)) if i < len(top) else ())
        for i, (token_id, value) in enumerate(zip(message.token_ids, message.token_logprobs, strict=True))
    )
