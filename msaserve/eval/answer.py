"""Where answers come from: a checkpoint in this process, or a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msaserve.config import EngineConfig
from msaserve.errors import EngineError, InvalidRequestError
from msaserve.eval.conversation import Message, messages, parse, prompt
from msaserve.eval.example import Call, Clip, Example, Picture, Reply
from msaserve.eval.media import data_url
from msaserve.eval.selection import Selection, use_selection
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.spec import find_spec, normalize
from msaserve.tokenizer import Tokenizer
from msaserve.types import GenerateRequest, MediaItem, SamplingParams

MAX_TOKENS = 96
"""Of a reply: several times what the longest right one has."""
REQUEST_TIMEOUT_S = 600.0


class InProcess:
    """An engine in this process; greedy."""

    def __init__(
        self,
        checkpoint: Path,
        config: EngineConfig,
        *,
        selection: Selection = "index",
        seed: int = 0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """Raises CheckpointError for a checkpoint that cannot be served or has no chat template."""
        from msaserve.engine.engine import Engine

        self.tokenizer = Tokenizer.load(checkpoint)
        template = ChatTemplate.load(checkpoint)
        if template is None:
            raise InvalidRequestError(f"{checkpoint} has no chat template: it cannot be asked")
        self._template = template
        self._max_tokens = max_tokens
        source = find_spec(checkpoint)
        self._spec = None if source is None else source.load()
        self._engine = Engine.from_checkpoint(checkpoint, config)
        # Nothing but an ablation has business with a running engine's model.
        use_selection(self._engine.runner._model, selection, seed=seed)

    def answer(self, examples: Sequence[Example]) -> Iterator[tuple[int, Reply]]:
        open_: dict[Any, tuple[int, list[int]]] = {}
        for number, example in enumerate(examples):
            (request,) = self._engine.add(self._request(str(number), example))
            open_[request] = (number, [])
        while open_:
            for output in self._engine.step():
                number, token_ids = open_[output.request]
                token_ids += output.token_ids
                if output.finish_reason is None:
                    continue
                if output.finish_reason == "error":
                    raise EngineError(f"example {number}: {output.error}")
                del open_[output.request]
                example = examples[number]
                text = self.tokenizer.decode(token_ids)
                yield number, parse(text, tools=example.tool_schemas, thinking=example.thinking)

    def _request(self, name: str, example: Example) -> GenerateRequest:
        (token_ids, spans), items = prompt(example, self.tokenizer, self._template, self._spec)
        spec = self._spec
        media = []
        for item, (offset, length) in zip(items, spans, strict=True):
            assert spec is not None
            media.append(
                MediaItem(
                    modality=item.modality,
                    patches=normalize(item.patches, spec),
                    grid_thw=spec.grid_rows(item.grid_thw),
                    offset=offset,
                    length=length,
                    content_hash=item.content_hash,
                )
            )
        sampling = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        return GenerateRequest(request_id=name, prompt_token_ids=token_ids, sampling=sampling, media=tuple(media))


class Http:
    """A server that speaks OpenAI's API."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        concurrency: int = 4,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """url: up to and without /v1."""
        self._max_tokens = max_tokens
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        self._model, self._api_key, self._concurrency = model, api_key, concurrency

    def answer(self, examples: Sequence[Example]) -> Iterator[tuple[int, Reply]]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            yield from enumerate(pool.map(self._ask, examples))

    def _ask(self, example: Example) -> Reply:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages(example, part=_part),
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "thinking": {"type": example.thinking},
        }
        if example.tools:
            body["tools"] = list(example.tools)
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                message = json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise InvalidRequestError(f"{self._url} answered {error.code}: {said}") from error
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise EngineError(f"{self._url} gave no answer: {error!r}") from error
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return Reply(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            calls=tuple(Call(call["name"], json.loads(call["arguments"])) for call in calls),
        )


def _part(item: Picture | Clip) -> Message:
    kind = "image_url" if isinstance(item, Picture) else "video_url"
    return {"type": kind, kind: {"url": data_url(item)}}
