"""What a generation yields, as OpenAI's answers: one JSON object, or the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from msaserve.gateway.apis.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    ObjectName,
    PromptTokensDetails,
    Response,
    TopLogprob,
    Usage,
)
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.ids import new_id
from msaserve.gateway.stream import Delta, Generation, ShownToken
from msaserve.gateway.transport import server_event
from msaserve.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Answer(ABC):
    """How one endpoint writes its answers."""

    id_prefix: str
    whole_object: ObjectName
    chunk_object: ObjectName

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, has_logprobs: bool = False, includes_usage: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.has_logprobs = has_logprobs
        self.includes_usage = includes_usage
        self.id = f"{self.id_prefix}-{new_id()}"
        self.created = int(time.time())

    @abstractmethod
    def opening(self, choice: int) -> Any:
        """The choice object of a choice's first chunk, before any text; None for no such chunk."""

    @abstractmethod
    def chunk(self, choice: int, delta: Delta) -> Any:
        """The choice object of a chunk; None for no chunk."""

    @abstractmethod
    def whole(self, choice: int, text: str, tokens: Sequence[ShownToken], finish_reason: str | None) -> Any:
        """The choice object of a whole answer."""

    async def collect(self, generation: Generation) -> bytes:
        """The whole answer as JSON."""
        num_choices = len(generation.outputs)
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        tokens: list[list[ShownToken]] = [[] for _ in range(num_choices)]
        async with aclosing(generation.deltas()) as deltas:
            async for choice, delta in deltas:
                texts[choice].append(delta.text)
                tokens[choice] += delta.tokens
        return self._encode(
            self.whole_object,
            [
                self.whole(i, "".join(texts[i]), tokens[i], generation.outputs[i].finish_reason)
                for i in range(num_choices)
            ],
            _usage(generation),
        )

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The answer's events, as they are sent."""
        pending_usage = None if self.includes_usage else msgspec.UNSET
        is_open = [False] * len(generation.outputs)
        async with aclosing(generation.deltas()) as deltas:
            async for choice, delta in deltas:
                if not is_open[choice]:
                    is_open[choice] = True
                    opening = self.opening(choice)
                    if opening is not None:
                        yield server_event(self._encode(self.chunk_object, [opening], pending_usage))
                chunk = self.chunk(choice, delta)
                if chunk is not None:
                    yield server_event(self._encode(self.chunk_object, [chunk], pending_usage))
        if self.includes_usage:
            yield server_event(self._encode(self.chunk_object, [], _usage(generation)))
        yield server_event(b"[DONE]")

    def _encode(self, name: ObjectName, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> bytes:
        response = Response(
            id=self.id, object=name, created=self.created, model=self.model, choices=choices, usage=usage
        )
        return msgspec.json.encode(response)


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    whole_object: ObjectName = "chat.completion"
    chunk_object: ObjectName = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, new_output: Callable[[], ChatOutput], **options: Any) -> None:
        """new_output: what reads one choice. options: as Answer's."""
        super().__init__(tokenizer, **options)
        self._outputs: defaultdict[int, ChatOutput] = defaultdict(new_output)

    def opening(self, choice: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=choice, delta=ChatMessage(role="assistant", content=""))

    def chunk(self, choice: int, delta: Delta) -> ChatChunkChoice | None:
        message, finish_reason = self._outputs[choice].push(delta.text, delta.finish_reason)
        if message == ChatMessage() and not delta.tokens and finish_reason is None:
            return None
        return ChatChunkChoice(
            index=choice,
            delta=message,
            logprobs=self._logprobs(delta.tokens) if delta.tokens else None,
            finish_reason=finish_reason,
        )

    def whole(self, choice: int, text: str, tokens: Sequence[ShownToken], finish_reason: str | None) -> ChatChoice:
        assert finish_reason is not None
        message, finish_reason = self._outputs[choice].push(text, finish_reason)
        message.role = "assistant"
        if message.content is msgspec.UNSET:
            message.content = None if message.tool_calls or message.reasoning_content else ""
        for call in message.tool_calls or ():
            call.index = msgspec.UNSET
        return ChatChoice(
            index=choice,
            message=message,
            logprobs=self._logprobs(tokens) if self.has_logprobs else None,
            finish_reason=finish_reason,
        )

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    token=self.tokenizer.token_text(logprobs.token_id),
                    logprob=_finite(logprobs.logprob),
                    bytes=list(self.tokenizer.token_bytes(logprobs.token_id)),
                    top_logprobs=[
                        TopLogprob(
                            token=self.tokenizer.token_text(token_id),
                            logprob=_finite(value),
                            bytes=list(self.tokenizer.token_bytes(token_id)),
                        )
                        for token_id, value in logprobs.top
                    ],
                )
                for logprobs, _ in tokens
            ]
        )


class CompletionAnswer(Answer):
    id_prefix = "cmpl"
    whole_object: ObjectName = "text_completion"
    chunk_object: ObjectName = "text_completion"

    def opening(self, choice: int) -> None:
        return None

    def chunk(self, choice: int, delta: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=choice,
            text=delta.text,
            logprobs=self._logprobs(delta.tokens) if delta.tokens else None,
            finish_reason=delta.finish_reason,
        )

    def whole(
        self, choice: int, text: str, tokens: Sequence[ShownToken], finish_reason: str | None
    ) -> CompletionChoice:
        logprobs = self._logprobs(tokens) if self.has_logprobs else None
        return CompletionChoice(index=choice, text=text, logprobs=logprobs, finish_reason=finish_reason)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs:
        text = self.tokenizer.token_text
        return CompletionLogprobs(
            tokens=[text(logprobs.token_id) for logprobs, _ in tokens],
            token_logprobs=[_finite(logprobs.logprob) for logprobs, _ in tokens],
            top_logprobs=[
                {text(i): _finite(value) for i, value in (*logprobs.top, (logprobs.token_id, logprobs.logprob))}
                for logprobs, _ in tokens
            ],
            text_offset=[offset for _, offset in tokens],
        )


def _usage(generation: Generation) -> Usage:
    prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
    )


def _finite(value: float) -> float:
    return max(value, _LOWEST_LOGPROB)
