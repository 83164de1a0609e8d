"""Offline batches: `LLM(checkpoint).generate(prompts)`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from msaserve.config import EngineConfig
from msaserve.engine.engine import Engine
from msaserve.engine.request import Request
from msaserve.engine.scheduler import RequestOutput as StepOutput
from msaserve.errors import CheckpointError, InvalidRequestError, MsaserveError
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.stream import OutputText
from msaserve.tokenizer import Tokenizer
from msaserve.types import FinishReason, GenerateRequest, Logprobs, SamplingParams, TokenEvent

DEFAULT_MAX_TOKENS = 256
"""Of prompts that come without sampling parameters."""

Message = Mapping[str, Any]
"""An OpenAI chat message: {"role": …, "content": …}."""


@dataclass
class CompletionOutput:
    """One of the n outputs of a prompt."""

    index: int
    text: str = ""
    """Without the stop string or special token that ended it."""
    token_ids: list[int] = field(default_factory=list)
    """With the token that ended it."""
    finish_reason: FinishReason | None = None
    logprobs: list[Logprobs] | None = None
    """One per token id when asked for."""
    error: str | None = None
    """Why finish_reason is "error": the prompt was refused, or the engine failed on it."""


@dataclass
class RequestOutput:
    """What became of one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Prompt tokens whose cache came from an earlier request."""


class LLM:
    """A checkpoint in this process. Not thread-safe; `close` it, or use it in a `with`, to free its memory early.

    Args:
        checkpoint: a directory in the released format, with tokenizer.json unless all prompts are token ids.
        options: fields of `EngineConfig`; any number of prompts may wait, whatever max_queue says.

    Raises:
        CheckpointError: the checkpoint cannot be served.
        InvalidRequestError: an option out of range.
        TypeError: an unknown option.
    """

    def __init__(self, checkpoint: str | Path, **options: Any) -> None:
        directory = Path(checkpoint)
        self._engine: Engine | None = Engine.from_checkpoint(
            directory,
            EngineConfig(**{**options, "max_queue": None}),  # whoever waits for a whole batch is not sent away
        )
        self._tokenizer = Tokenizer.load(directory) if (directory / "tokenizer.json").exists() else None
        self._template = ChatTemplate.load(directory)
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """Raises ValueError once closed."""
        if self._engine is None:
            raise ValueError("this LLM is closed")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError if the checkpoint has none."""
        if self._tokenizer is None:
            raise CheckpointError(f"{self.engine.config.directory} has no tokenizer.json: give prompts as token ids")
        return self._tokenizer

    def default_sampling(self) -> SamplingParams:
        """What the checkpoint's generation_config.json says, and at most DEFAULT_MAX_TOKENS tokens."""
        defaults = self.engine.config.generation
        return SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            max_tokens=DEFAULT_MAX_TOKENS,
        )

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch.

        Args:
            prompts: text or token ids, one or several.
            sampling: for all prompts, or one for each. None: `default_sampling()`.

        Returns:
            One result per prompt, in order. A prompt that is refused or fails has outputs with finish_reason "error".

        Raises:
            ValueError: not as many sampling parameters as prompts.
            CheckpointError: a text prompt without a tokenizer.
            InvalidRequestError: a text prompt with a lone surrogate.
        """
        return self._generate([self._encode(prompt) for prompt in _as_list(prompts)], sampling)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several in one batch, through the checkpoint's chat template.

        Raises:
            InvalidRequestError: the template refuses a conversation.
            CheckpointError: the checkpoint has no chat template or tokenizer.
            ValueError: not as many sampling parameters as conversations.
        """
        if self._template is None:
            raise CheckpointError(f"{self.engine.config.directory} has no chat template: use generate")
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        encoded = [
            self._template.encode(self.tokenizer, conversation, kwargs=chat_template_kwargs)
            for conversation in conversations
        ]
        return self._generate(encoded, sampling)

    def close(self) -> None:
        """Free weights and cache. Idempotent."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return [int(token) for token in prompt]

    def _generate(
        self, prompts: list[list[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        sampling = sampling or self.default_sampling()
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(per_prompt) != len(prompts):
            raise ValueError(f"{len(per_prompt)} sampling parameters for {len(prompts)} prompts")
        batch = _Batch(self.engine, self._tokenizer)
        with tqdm(total=len(prompts), desc="Prompts", unit="prompt", disable=not sys.stderr.isatty()) as bar:
            try:
                for prompt, params in zip(prompts, per_prompt, strict=True):
                    bar.update(batch.add(f"offline-{next(self._ids)}", prompt, params))
                while batch.num_open:
                    bar.update(batch.step())
            except Exception:
                batch.abort()
                raise
            except BaseException:  # an interrupt comes anywhere, also where requests and pages are being accounted for
                self.engine.reset()
                raise
        self.engine.check_integrity()
        return batch.results


class _Output:
    """One output on its way: its place in the results, and its text so far."""

    def __init__(self, result: RequestOutput, index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.result = result
        self.completion = result.outputs[index]
        self._text = None if tokenizer is None else OutputText(tokenizer, params)

    def push(self, output: StepOutput) -> None:
        completion, sequence = self.completion, output.request
        completion.token_ids += output.token_ids
        if completion.logprobs is not None:
            completion.logprobs += output.logprobs
        completion.finish_reason, completion.error = output.finish_reason, output.error
        self.result.num_cached_tokens = max(self.result.num_cached_tokens, sequence.num_cached_tokens)
        if self._text is None:
            return
        event = TokenEvent(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            stop_token_id=sequence.stop_token_id,
        )
        delta = self._text.push(event)
        completion.text += delta.text if delta else ""
        if self._text.finish_reason == "stop":
            completion.finish_reason = "stop"


class _Batch:
    """The prompts of one call."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._open: dict[Request, _Output] = {}
        self.results: list[RequestOutput] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, request_id: str, prompt: list[int], params: SamplingParams) -> int:
        """Queue a prompt; 1 if it was refused and so has ended."""
        outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        result = RequestOutput(prompt, outputs)
        self.results.append(result)
        request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params)
        try:
            if params.stop and self._tokenizer is None:
                raise InvalidRequestError("stop strings need a tokenizer, and the checkpoint has none", param="stop")
            sequences = self._engine.add(request)
        except MsaserveError as error:
            for output in outputs:
                output.finish_reason, output.error = "error", str(error)
            return 1
        for index, sequence in enumerate(sequences):
            self._open[sequence] = _Output(result, index, params, self._tokenizer)
        return 0

    def step(self) -> int:
        """Run one step; the number of prompts whose last output ended in it."""
        num_ended = 0
        for step_output in self._engine.step():
            output = self._open[step_output.request]
            output.push(step_output)
            if output.completion.finish_reason is None:
                continue
            self._engine.abort(step_output.request)  # a stop string ends what the engine would go on with
            del self._open[step_output.request]
            num_ended += all(o.finish_reason is not None for o in output.result.outputs)
        return num_ended

    def abort(self) -> None:
        """End what still runs."""
        for sequence in self._open:
            self._engine.abort(sequence)
        self._open.clear()


def _as_list(prompts: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    is_token_ids = len(prompts) > 0 and all(isinstance(token, Integral) for token in prompts)
    several: list[Any] = [prompts] if is_token_ids else list(prompts)
    return several
