"""Token events in, text out: stop strings, finish reasons, log-probabilities and usage of one HTTP request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from msaserve.errors import EngineError
from msaserve.stop import StopMatcher
from msaserve.tokenizer import IncrementalDetokenizer, Tokenizer
from msaserve.types import GenerateRequest, Logprobs, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from msaserve.gateway.client import EngineClient
    from msaserve.observe.metrics import ServerMetrics


class ShownToken(NamedTuple):
    """A token of the text, with its log-probabilities."""

    logprobs: Logprobs
    offset: int
    """Where its text begins in the output, in characters."""


class Delta(NamedTuple):
    """What one output gained."""

    text: str
    tokens: list[ShownToken]
    """The tokens that are shown with this text; empty unless log-probabilities were asked for."""
    finish_reason: str | None


class OutputText:
    """One output of a request: its tokens so far, and the text of them that is sure to be shown."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        skip_special_tokens: bool = True,
        kept_tokens: Collection[str] = (),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, kept_tokens=kept_tokens
        )
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._held = ""
        self._num_shown_chars = 0
        self._tokens: deque[tuple[ShownToken, int]] = deque()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """The one that ended it, if one did."""

    def push(self, event: TokenEvent) -> Delta | None:
        """What can be shown now, or None if nothing can. Events after the output has ended are ignored."""
        if self.finish_reason is not None:
            return None
        # The token that ended it is counted and not shown.
        num_shown = len(event.token_ids) - (event.stop_token_id is not None)
        shown: list[str] = []
        for i, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            if i >= num_shown:
                break
            start = self._num_shown_chars + len(self._held)
            text = self._detokenizer.push(token_id)
            if event.logprobs:
                end = start + len(text) + self._detokenizer.is_pending
                self._tokens.append((ShownToken(event.logprobs[i], start), end))
            if self._take(text, shown):
                return self._end("".join(shown), "stop", is_cut=True)
        if event.finish_reason is not None:
            if self._take(self._detokenizer.flush(), shown):
                return self._end("".join(shown), "stop", is_cut=True)
            self._num_shown_chars += len(self._held)
            return self._end("".join(shown) + self._held, event.finish_reason, is_cut=False)
        tokens: list[ShownToken] = []
        while self._tokens and self._tokens[0][1] <= self._num_shown_chars:
            tokens.append(self._tokens.popleft()[0])
        return Delta("".join(shown), tokens, None) if shown or tokens else None

    def _take(self, text: str, shown: list[str]) -> bool:
        """Move text on to `shown` as far as it cannot be part of a stop string; True if one is complete."""
        if not text:
            return False
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            shown.append(text)
            self._num_shown_chars += len(text)
            return False
        match = self._matcher.push(text)
        if match is None:
            text = self._held + text
            keep = len(text) - self._matcher.num_held
            self._held = text[keep:]
        else:
            end, length = match
            text = self._held + text[:end]
            keep = len(text) - length
            self._held = ""
            self.stop_string = text[keep:]
        if keep:
            shown.append(text[:keep])
            self._num_shown_chars += keep
        return match is not None

    def _end(self, text: str, reason: str, *, is_cut: bool) -> Delta:
        self.finish_reason = reason
        # A token that begins before the cut is shown in part; later ones are not.
        tokens = [token for token, _ in self._tokens if not is_cut or token.offset < self._num_shown_chars]
        self._tokens.clear()
        return Delta(text, tokens, reason)


class Generation:
    """The run of one HTTP request: one or more prompts, n outputs each. Output i of prompt p is choice p · n + i."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        requests: Sequence[GenerateRequest],
        metrics: ServerMetrics,
        *,
        arrival: float,
        skip_special_tokens: bool = True,
        kept_tokens: Collection[str] = (),
    ) -> None:
        """requests: one per prompt, all with the same sampling. arrival: on time.perf_counter's clock, in seconds.

        kept_tokens: special tokens that are shown all the same.
        """
        sampling = requests[0].sampling
        self._client = client
        self._metrics = metrics
        self._arrival = arrival
        self._n = sampling.n
        self.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._num_cached_tokens = [0] * len(requests)
        # A stop string ends one output and not its siblings: each needs a stream that can be closed.
        self._requests = [one for request in requests for one in _split(request)] if sampling.stop else requests
        self._readers: list[asyncio.Task[None]] = []
        self.outputs = [
            OutputText(tokenizer, sampling, skip_special_tokens=skip_special_tokens, kept_tokens=kept_tokens)
            for _ in range(len(requests) * sampling.n)
        ]

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(choice, what it gained) until every choice has ended. Closing it aborts what still runs.

        Raises:
            InvalidRequestError, OverloadedError: refused by the engine; before any delta, if there is one prompt.
            EngineError: a request failed in the engine, or was aborted by someone else than this generator.
        """
        num_open = len(self.outputs)
        first_time = last_time = 0.0
        last_times = [0.0] * num_open
        n = self._requests[0].sampling.n
        is_streamed = self._requests[0].is_streamed  # else all comes at the end, and says nothing of single tokens
        source: AsyncGenerator[TokenEvent | tuple[int, TokenEvent], None]
        source = self._client.generate(self._requests[0]) if len(self._requests) == 1 else self._all_events()
        async with aclosing(source):
            async for item in source:
                number, event = (0, item) if isinstance(item, TokenEvent) else item
                if event.finish_reason in ("error", "abort"):
                    self._metrics.count_finished(event.finish_reason)
                    raise EngineError(event.error or "the request was aborted")
                choice = number * n + event.index
                output = self.outputs[choice]
                if output.finish_reason is not None:
                    continue
                prompt = choice // self._n
                self._num_cached_tokens[prompt] = max(self._num_cached_tokens[prompt], event.num_cached_tokens)
                if is_streamed and event.token_ids:
                    last_time = time.perf_counter()
                    if not first_time:
                        first_time = last_time
                        self._metrics.time_to_first_token.observe(last_time - self._arrival)
                    if last_times[choice]:
                        seconds = (last_time - last_times[choice]) / len(event.token_ids)
                        self._metrics.inter_token_latency.observe(seconds, len(event.token_ids))
                    last_times[choice] = last_time
                delta = output.push(event)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    num_open -= 1
                    self._metrics.count_finished(delta.finish_reason)
                    if self._readers and n == 1:
                        self._readers[number].cancel()
                yield choice, delta
                if not num_open:
                    break
        self._observe_end(first_time, last_time)

    def _observe_end(self, first_time: float, last_time: float) -> None:
        metrics = self._metrics
        metrics.e2e_request_latency.observe(time.perf_counter() - self._arrival)
        metrics.request_prompt_tokens.observe(self.num_prompt_tokens)
        metrics.request_generation_tokens.observe(self.num_output_tokens)
        num_later = self.num_output_tokens / len(self.outputs) - 1
        if first_time and num_later > 0:
            metrics.time_per_output_token.observe((last_time - first_time) / num_later)

    async def _all_events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        queue: asyncio.Queue[tuple[int, TokenEvent] | BaseException | None] = asyncio.Queue()

        async def read(number: int, request: GenerateRequest) -> None:
            try:
                async with aclosing(self._client.generate(request)) as events:
                    async for event in events:
                        queue.put_nowait((number, event))
            except Exception as error:
                queue.put_nowait(error)
            finally:
                queue.put_nowait(None)

        self._readers = [asyncio.create_task(read(i, request)) for i, request in enumerate(self._requests)]
        try:
            num_open = len(self._readers)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)


def _split(request: GenerateRequest) -> list[GenerateRequest]:
    """The n outputs of a request as requests of their own; each keeps its seed."""
    sampling = request.sampling
    if sampling.n == 1:
        return [request]
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(sampling.n)]
    return [
        replace(request, request_id=f"{request.request_id}-{i}", sampling=replace(sampling, n=1, seed=seed))
        for i, seed in enumerate(seeds)
    ]
