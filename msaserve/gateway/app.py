"""The HTTP server: OpenAI's endpoints over an EngineClient."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from msaserve.config import GenerationDefaults
from msaserve.errors import InvalidRequestError, OverloadedError
from msaserve.gateway.apis import messages, responses
from msaserve.gateway.apis.answer import Answer, ChatAnswer, CompletionAnswer
from msaserve.gateway.apis.blocks import BlockAnswer
from msaserve.gateway.apis.envelope import Envelope, dialect_of
from msaserve.gateway.apis.messages import CountTokensRequest, MessagesAnswer
from msaserve.gateway.apis.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_messages,
    check_length,
    check_token_ids,
    completion_prompts,
    parse,
    sampling_params,
)
from msaserve.gateway.apis.responses import ResponsesAnswer
from msaserve.gateway.body import LARGE_BYTES, MAX_TOKEN_VALUES, MAX_VALUES, read_body, read_large
from msaserve.gateway.chat import ChatTemplate, check_template_kwargs, thinking_kwargs, without_thinking
from msaserve.gateway.chat import check_length as check_text_length
from msaserve.gateway.chat_output import ChatOutput
from msaserve.gateway.client import EngineClient
from msaserve.gateway.constraints import asked_constraint, chat_constraint, takes_long
from msaserve.gateway.media.budget import ByteBudget, Lease
from msaserve.gateway.media.pipeline import MediaPart, MediaPipeline
from msaserve.gateway.parsers.minimax_m3 import MARKER_TOKENS, thinking_mode
from msaserve.gateway.place import Place
from msaserve.gateway.stream import Generation
from msaserve.gateway.tools import tool_use
from msaserve.gateway.transport import (
    EventStream,
    JsonBody,
    NoSuchModelError,
    Posts,
    until_disconnect,
)
from msaserve.observe.merge import Family
from msaserve.observe.metrics import CONTENT_TYPE, ServerMetrics
from msaserve.observe.trace import Tracer
from msaserve.tokenizer import Tokenizer
from msaserve.types import Constraint, GenerateRequest, MediaItem, ModelInfo, SamplingParams

_log = logging.getLogger(__name__)

_THREAD_BYTES = 16_384
"""Bodies above this are tokenised in a thread: the event loop serves other streams meanwhile."""
_MAX_BODIES = 64
"""Bodies of the largest size that are held at once; a request for which there is no room waits, then it is refused."""
_BODY_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class GatewaySettings:
    served_model_name: str
    """What clients call the model."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    """Sampling of requests that say nothing."""
    api_key: str | None = None
    """Asked of every request but /health and /ready."""
    max_body_bytes: int = 64 * 2**20
    read_seconds: float = 30.0
    """How long a client may take to send a body, besides a second for every 16 KiB."""


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    settings: GatewaySettings,
    media: MediaPipeline | None = None,
    tracer: Tracer | None = None,
    place: Place | None = None,
) -> Starlette:
    """The ASGI application. It does not own the client: who made it closes it. It closes the media pipeline.

    media: prepares pictures and clips. None, or a model without vision: requests with any are refused.
    tracer: of the spans around requests.
    place: this process among others behind the same port. None: it is the only one.
    `app.state.gateway.is_draining = True` makes /ready and new requests answer 503.
    """
    tracer = tracer or Tracer()
    gateway = Gateway(client, tokenizer, template, settings, media, place or Place())
    if media is not None:
        media.stages.tracer, media.stages.watcher = tracer, gateway.metrics.media
        gateway.metrics.media.follow(media)
    routes = [
        Route("/v1/models", gateway.models, methods=["GET"]),
        Route("/v1/models/{model:path}", gateway.model, methods=["GET"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
        Route("/v1/responses", gateway.responses, methods=["POST"]),
        Route("/v1/messages", gateway.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", gateway.count_tokens, methods=["POST"]),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/health", gateway.health, methods=["GET"]),
        Route("/ready", gateway.ready, methods=["GET"]),
        Route("/metrics", gateway.show_metrics, methods=["GET"]),
    ]
    paths = frozenset(route.path for route in routes)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await gateway.model_info()
        if media is not None:
            await media.warm()
        yield
        if media is not None:
            await media.close()

    app = _Application(routes=routes, lifespan=lifespan)
    app.envelope = Envelope(Posts(routes, app.router), settings.api_key, gateway.metrics, tracer, paths)
    app.state.gateway = gateway
    return app


class _Application(Starlette):
    """Starlette without its middleware: the envelope answers errors, and says where they belong in which words."""

    envelope: Envelope

    def build_middleware_stack(self) -> ASGIApp:
        return self.envelope


class ChatPrompt(NamedTuple):
    token_ids: list[int]
    media: tuple[MediaItem, ...]
    new_output: Callable[[], ChatOutput]
    """Makes the reader of one output."""
    constraint: Constraint | None
    """What the output must be."""


class Gateway:
    """The endpoints, and what they share."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        settings: GatewaySettings,
        media: MediaPipeline | None,
        place: Place,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._template = template
        self._settings = settings
        self._media = media
        self._place = place
        num_bodies = max(_MAX_BODIES // place.count, 1)
        self._bodies = ByteBudget(num_bodies * settings.max_body_bytes, max_wait_s=_BODY_SECONDS)
        self._model_info: ModelInfo | None = None
        self.metrics = ServerMetrics(settings.served_model_name)
        self.is_draining = False
        self.failure: str | None = None
        """Why nothing can be served any more."""

    async def model_info(self) -> ModelInfo:
        if self._model_info is None:
            self._model_info = await self._client.model_info()
        return self._model_info

    async def chat_completions(self, request: Request) -> ASGIApp:
        arrival = time.perf_counter()
        asked, size = await self._asked(request, lambda body: parse(body, ChatRequest))

        def new_answer(new_output: Callable[[], ChatOutput]) -> Answer:
            return ChatAnswer(
                self._tokenizer,
                new_output=new_output,
                model=self._settings.served_model_name,
                has_logprobs=bool(asked.logprobs),
                includes_usage=asked.includes_usage,
            )

        return await self._chat(request, asked, size, new_answer, arrival)

    async def responses(self, request: Request) -> ASGIApp:
        arrival = time.perf_counter()
        (asked, chat, chat_asked), size = await self._asked(request, responses.read)

        def new_answer(new_output: Callable[[], ChatOutput]) -> BlockAnswer:
            return ResponsesAnswer(asked, new_output(), chat, model=self._settings.served_model_name)

        with chat.own_names():
            return await self._chat(request, chat_asked, size, new_answer, arrival)

    async def messages(self, request: Request) -> ASGIApp:
        arrival = time.perf_counter()
        (chat, asked), size = await self._asked(request, messages.read)

        def new_answer(new_output: Callable[[], ChatOutput]) -> BlockAnswer:
            return MessagesAnswer(new_output(), chat, model=self._settings.served_model_name)

        with chat.own_names():
            return await self._chat(request, asked, size, new_answer, arrival)

    async def count_tokens(self, request: Request) -> Response:
        """The prompt of a request to /v1/messages, its pictures and clips included."""
        (chat, asked), size = await self._asked(request, lambda body: messages.read(body, CountTokensRequest))
        with chat.own_names():
            self._check_model(asked.model)
            prompt = await self._chat_prompt(request, asked, await self.model_info(), size)
        return _json({"input_tokens": len(prompt.token_ids)})

    async def _chat(
        self,
        request: Request,
        asked: ChatRequest,
        size: int,
        new_answer: Callable[[Callable[[], ChatOutput]], Answer | BlockAnswer],
        arrival: float,
    ) -> ASGIApp:
        """size: of the body, in bytes. new_answer: gets what makes the reader of one output."""
        self._check_model(asked.model)
        model = await self.model_info()
        sampling = sampling_params(asked, self._settings.defaults, model)
        prompt = await self._chat_prompt(request, asked, model, size)
        sampling = _constrained(sampling, prompt.constraint, model)
        check_length(len(prompt.token_ids), sampling.max_tokens, model, param="messages")
        answer = new_answer(prompt.new_output)
        generate = GenerateRequest(
            request_id=answer.id,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            media=prompt.media,
            cache_salt=asked.cache_salt or "",
            is_streamed=bool(asked.stream),
        )
        return await self._answer(request, asked, answer, [generate], arrival)

    async def _chat_prompt(self, request: Request, asked: ChatRequest, model: ModelInfo, size: int) -> ChatPrompt:
        use = (asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        tools = tool_use(*use) if size <= LARGE_BYTES else await asyncio.to_thread(tool_use, *use)
        grammar_size = size + _THREAD_BYTES * takes_long(asked, tools)
        constraint = await _run(lambda: chat_constraint(asked, tools, self._tokenizer), grammar_size)
        if constraint is not None and not tools.offered and constraint.kind not in ("structural_tag", "grammar"):
            tools = dataclasses.replace(tools, parses_calls=False)  # a text that spells one is data
        kwargs = {**thinking_kwargs(asked.thinking, asked.reasoning_effort), **(asked.chat_template_kwargs or {})}
        if tools.prefix:
            kwargs = without_thinking(kwargs)
            if asked.add_generation_prompt is False:
                raise InvalidRequestError(
                    "a tool call that is asked for needs add_generation_prompt", param="add_generation_prompt"
                )
        if constraint is not None and constraint.after_reasoning and model.constrains_first_token:
            kwargs = without_thinking(kwargs, form=constraint.param)
        token_ids, items = await self._encode_chat(request, asked, kwargs, tools.offered, model, size)
        thinking = thinking_mode(self._tokenizer.token_text(token_ids[-1]) if token_ids else "")
        if tools.prefix:
            token_ids += self._tokenizer.encode(tools.prefix)
        return ChatPrompt(token_ids, items, lambda: ChatOutput(tools, thinking), constraint)

    async def completions(self, request: Request) -> ASGIApp:
        arrival = time.perf_counter()
        asked, size = await self._asked(request, lambda body: parse(body, CompletionRequest), MAX_TOKEN_VALUES)
        self._check_model(asked.model)
        model = await self.model_info()
        sampling = sampling_params(asked, self._settings.defaults, model)
        is_large = size > LARGE_BYTES
        constraint = await asyncio.to_thread(asked_constraint, asked) if is_large else asked_constraint(asked)
        sampling = _constrained(sampling, constraint, model)
        add_special_tokens = asked.add_special_tokens is not False

        def encode() -> list[list[int]]:
            prompts = completion_prompts(asked.prompt, sampling.n)
            return [self._encode_prompt(prompt, model, add_special_tokens=add_special_tokens) for prompt in prompts]

        answer = CompletionAnswer(
            self._tokenizer,
            model=self._settings.served_model_name,
            has_logprobs=sampling.logprobs is not None,
            includes_usage=asked.includes_usage,
        )
        generates = []
        for i, token_ids in enumerate(await _run(encode, size)):
            check_length(len(token_ids), asked.max_tokens, model, param="prompt")
            # OpenAI's default must not refuse a prompt that fits.
            max_tokens = min(sampling.max_tokens or 0, model.max_model_len - len(token_ids))
            generates.append(
                GenerateRequest(
                    request_id=f"{answer.id}-{i}",
                    prompt_token_ids=token_ids,
                    sampling=replace(sampling, max_tokens=max_tokens),
                    cache_salt=asked.cache_salt or "",
                    is_streamed=bool(asked.stream),
                )
            )
        return await self._answer(request, asked, answer, generates, arrival)

    async def tokenize(self, request: Request) -> Response:
        asked, size = await self._asked(request, lambda body: parse(body, TokenizeRequest))
        self._check_model(asked.model)
        model = await self.model_info()
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if asked.messages is not None:
            tools = await _run(lambda: tool_use(asked.tools, None, None), size)
            kwargs = asked.chat_template_kwargs or {}
            token_ids, _ = await self._encode_chat(request, asked, kwargs, tools.offered, model, size)
        else:
            prompt = asked.prompt or ""
            add_special_tokens = asked.add_special_tokens is not False
            token_ids = await _run(
                lambda: self._encode_prompt(prompt, model, add_special_tokens=add_special_tokens), size
            )
        result: dict[str, Any] = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
        if asked.return_token_strs:
            texts = await _run(lambda: [self._tokenizer.token_text(i) for i in token_ids], 8 * len(token_ids))
            result["token_strs"] = texts
        return _json(result)

    async def detokenize(self, request: Request) -> Response:
        asked, size = await self._asked(request, lambda body: parse(body, DetokenizeRequest), MAX_TOKEN_VALUES)
        self._check_model(asked.model)
        model = await self.model_info()

        def decode() -> str:
            check_token_ids(asked.tokens, model, param="tokens")
            return self._tokenizer.decode(asked.tokens, skip_special_tokens=False)

        return _json({"prompt": await _run(decode, size)})

    async def models(self, request: Request) -> Response:
        card = await self._model_card()
        return _json(
            {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
        )

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(await self._model_card())

    async def health(self, request: Request) -> Response:
        """The process is alive, and so is what it cannot do without."""
        if self.failure is not None:
            return _json({"status": self.failure}, 503)
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The engine takes requests."""
        is_ready = not self.is_draining and await self._client.is_ready()
        return _json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        workers, others = await asyncio.gather(self._client.workers(), self._place.others(self.numbers))
        return Response(self.metrics.render(workers, others), headers={"content-type": CONTENT_TYPE})

    def numbers(self) -> list[Family]:
        """What this process counts."""
        return self.metrics.families(self._client.tallies())

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        answer: Answer | BlockAnswer,
        generates: list[GenerateRequest],
        arrival: float,
    ) -> ASGIApp:
        generation = Generation(
            self._client,
            self._tokenizer,
            generates,
            self.metrics,
            arrival=arrival,
            skip_special_tokens=asked.skip_special_tokens is not False,
            kept_tokens=MARKER_TOKENS if isinstance(asked, ChatRequest) else (),
        )
        facts = request.scope["state"]["facts"]
        facts.answer_id, facts.generation = answer.id, generation
        if asked.stream:
            return EventStream(
                answer.stream(generation),
                dialect_of(request.scope["path"]),
                has_begun=lambda: generation.num_output_tokens > 0,
            )
        return JsonBody(await until_disconnect(request.scope, request.receive, answer.collect(generation)))

    async def _asked(self, request: Request, read: Callable[[bytes], T], max_values: int = MAX_VALUES) -> tuple[T, int]:
        """What `read` makes of the body, and how many bytes that has. max_values: see `read_large`."""
        if self.is_draining:
            raise OverloadedError("the server is shutting down and takes no new request")
        settings, lease = self._settings, Lease(self._bodies)
        request.state.facts.leases.append(lease)
        body = await read_body(request, settings.max_body_bytes, lease, read_seconds=settings.read_seconds)
        asked = read(body) if len(body) <= LARGE_BYTES else await read_large(body, read, max_values)
        return asked, len(body)

    async def _encode_chat(
        self,
        request: Request,
        asked: ChatRequest | TokenizeRequest,
        kwargs: dict[str, Any],
        tools: list[dict[str, Any]],
        model: ModelInfo,
        size: int,
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The prompt with its pictures and clips, which live as long as the answer: so does what they take."""
        template = self._template
        if template is None:
            raise InvalidRequestError("this checkpoint has no chat template; use /v1/completions", param="messages")
        parts: list[MediaPart] | None = [] if self._media is not None and model.supports_vision else None
        check_template_kwargs(kwargs)

        def encode() -> list[int]:
            return template.encode(
                self._tokenizer,
                chat_messages(asked.messages or [], parts),
                add_generation_prompt=asked.add_generation_prompt is not False,
                tools=tools,
                kwargs=kwargs,
                max_tokens=model.max_model_len - 1,
            )

        token_ids = await _run(encode, size + 256 * len(asked.messages or ()))  # a message costs more than its text
        if self._media is None or not parts:
            return token_ids, ()
        lease = self._media.lease()
        request.state.facts.leases.append(lease)
        work = self._media.resolve(parts, token_ids, self._tokenizer, lease, as_pixels=model.takes_pixels)
        return await until_disconnect(request.scope, request.receive, work)

    def _encode_prompt(self, prompt: str | list[int], model: ModelInfo, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, list):
            check_token_ids(prompt, model, param="prompt")
            return prompt
        check_text_length(self._tokenizer, prompt, model.max_model_len - 1, param="prompt")
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _check_model(self, name: str | None) -> None:
        served = self._settings.served_model_name
        if name is not None and name != served:
            raise NoSuchModelError(name, served)

    async def _model_card(self) -> dict[str, Any]:
        """As OpenAI and Anthropic describe a model, in one."""
        model, created = await self.model_info(), self._place.created
        return {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "msaserve",
            "max_model_len": model.max_model_len,
            "type": "model",
            "display_name": self._settings.served_model_name,
            "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
            "max_input_tokens": model.max_model_len,
        }


def _constrained(sampling: SamplingParams, constraint: Constraint | None, model: ModelInfo) -> SamplingParams:
    """Raises InvalidRequestError for what contradicts the constraint."""
    if constraint is None:
        return sampling
    sampling = replace(sampling, constraint=constraint)
    sampling.validate(vocab_size=model.vocab_size)
    return sampling


async def _run(function: Callable[[], T], size: int) -> T:
    """Run it here when its input is small, in a thread when it is not."""
    return function() if size <= _THREAD_BYTES else await asyncio.to_thread(function)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
