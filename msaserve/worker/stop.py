"""Stop strings for requests that leave them to the worker. The engine sees tokens only."""

from __future__ import annotations

from msgspec.structs import replace

from msaserve.stop import StopMatcher
from msaserve.tokenizer import IncrementalDetokenizer, Tokenizer
from msaserve.types import SamplingParams, TokenEvent


class StopStrings:
    """Looks for the stop strings in one output's text."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = sampling.stop
        self._matcher = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._tail = ""
        self._max_chars = max(map(len, sampling.stop))

    def cut(self, event: TokenEvent) -> tuple[TokenEvent, str | None]:
        """(the event up to the token that completes a stop string, that string), or the event as it is and None."""
        num_shown = len(event.token_ids) - (event.stop_token_id is not None)
        for i, token_id in enumerate(event.token_ids[:num_shown]):
            self._num_tokens += 1
            text = self._detokenizer.push(token_id)
            if not text or self._num_tokens <= self._min_tokens:
                continue
            match = self._matcher.push(text)
            if match is not None:
                end, length = match
                found = (self._tail + text[:end])[-length:]
                cut = replace(
                    event,
                    token_ids=event.token_ids[: i + 1],
                    logprobs=event.logprobs[: i + 1],
                    finish_reason="stop",
                    stop_token_id=None,
                )
                return cut, found
            self._tail = (self._tail + text)[-self._max_chars :]
        return event, None
