"""Chat messages to a prompt, with the checkpoint's own template in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from msaserve.errors import CheckpointError, InvalidRequestError
from msaserve.fields import read_json
from msaserve.tokenizer import Tokenizer, new_guard

THINKING_MODES = ("adaptive", "enabled", "disabled")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED = ("messages", "tools", "documents")
_HOPELESS_CHARS = 8
"""For a token: a text of more is hardly within the limit."""


class ChatTemplate:
    """A Jinja template, compiled once."""

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None, name: str = "chat template") -> None:
        """variables: what the template finds besides the request, such as bos_token.

        Raises:
            CheckpointError: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"{name}{line}: {error}") from error
        self._template.globals = dict(self._template.globals)  # every rendering copies them; a chain of them is slow
        self._source = source
        self._variables = dict(variables or {})

    @classmethod
    def load(cls, directory: str | Path) -> ChatTemplate | None:
        """The template of a checkpoint: chat_template.jinja, else tokenizer_config.json's; None if it has none.

        Raises:
            CheckpointError: it cannot be read or is not valid Jinja.
        """
        directory = Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        try:
            source: Any = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"{directory / 'tokenizer_config.json'}: chat_template is not text")
        variables = {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[key] = token
        return cls(
            source, variables=variables, name=str(path if path.exists() else directory / "tokenizer_config.json")
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Raises InvalidRequestError when the template refuses the messages or fails on them."""
        arguments: dict[str, Any] = {
            **self._variables,
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            **(kwargs or {}),
        }
        try:
            return self._template.render(arguments)
        except Exception as error:  # a template is a program: it can fail in any way
            raise InvalidRequestError(f"the chat template failed: {error}", param="messages") from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of the rendered messages. Control tokens come from the template alone.

        Text of a message that spells a control token stays plain text, also where the template or a neighbouring part
        completes the spelling; the assistant's own text may spell what it writes itself (added tokens that are not
        special). Without such text the ids are those of the rendered text as a whole.

        Raises:
            InvalidRequestError: the template fails, what it gets is nested too deep, or there are more than max_tokens
                tokens and the text is long.
        """
        try:
            strings = _strings([*messages, *tools])
            longest = max(strings, key=len, default="")
            if max_tokens is not None and len(longest) > _HOPELESS_CHARS * max_tokens:  # no need to copy all of it
                check_length(tokenizer, longest, max_tokens, param="messages")
            guard = new_guard([self._source, *strings, *_strings(kwargs)])
            guarded = [
                {key: _guard(tokenizer, value, guard, message.get("role") == "assistant") if key != "role" else value
                 for key, value in message.items()}
                for message in messages
            ]  # fmt: skip
            guarded_tools = [_guard(tokenizer, tool, guard, False) for tool in tools]
            guarded_kwargs = _guard(tokenizer, dict(kwargs or {}), guard, False)
        except RecursionError as error:
            raise InvalidRequestError(
                "messages, tools or chat_template_kwargs are nested too deep", param="messages"
            ) from error
        text = self.render(
            guarded, add_generation_prompt=add_generation_prompt, tools=guarded_tools, kwargs=guarded_kwargs
        )
        if max_tokens is not None:
            check_length(tokenizer, text, max_tokens, param="messages")
        return tokenizer.encode_guarded(text, guard)


def check_length(tokenizer: Tokenizer, text: str, max_tokens: int, *, param: str) -> None:
    """Refuse a text that is far too long before all of it is tokenised. Raises InvalidRequestError."""
    if len(text) <= 4 * 65_536 or len(text.encode("utf-8", "surrogatepass")) <= max_tokens:
        return  # no token is less than a byte
    count = tokenizer.count_beyond(text, max_tokens)
    if count is not None:
        raise InvalidRequestError(
            f"the prompt of {len(text)} characters has more than {count} tokens; this model takes at most {max_tokens}",
            param=param,
            code="context_length_exceeded",
        )


def thinking_kwargs(thinking: Any, reasoning_effort: Any) -> dict[str, Any]:
    """Template variables for the request fields `thinking` and `reasoning_effort`. Raises InvalidRequestError."""
    kwargs: dict[str, Any] = {}
    if thinking is not None:
        mode = thinking.get("type") if isinstance(thinking, dict) else None
        if mode not in THINKING_MODES:
            raise InvalidRequestError(f"thinking.type must be one of {', '.join(THINKING_MODES)}", param="thinking")
        kwargs["thinking_mode"] = mode
    if reasoning_effort is not None:
        if reasoning_effort not in REASONING_EFFORTS:
            raise InvalidRequestError(
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}", param="reasoning_effort"
            )
        if reasoning_effort in ("none", "minimal"):
            kwargs.setdefault("thinking_mode", "disabled")
        elif kwargs.get("thinking_mode") != "disabled":
            kwargs["reasoning_effort"] = reasoning_effort
    return kwargs


def without_thinking(kwargs: Mapping[str, Any], *, form: str = "") -> dict[str, Any]:
    """Template variables for an answer that begins at once: with a tool call, or with what the field `form` asks for.

    Raises:
        InvalidRequestError: it is to think first.
    """
    if kwargs.get("thinking_mode") != "enabled":
        return {**kwargs, "thinking_mode": "disabled"}
    if form:
        raise InvalidRequestError(
            f"with thinking enabled this worker takes no {form}: it holds from the first token on, so that nothing can "
            "be thought before",
            param=form,
        )
    raise InvalidRequestError(
        "with thinking enabled no tool call can be asked for: thinking comes first; use tool_choice auto",
        param="tool_choice",
    )


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for a variable that would replace the request itself."""
    for name in _RESERVED:
        if name in kwargs:
            raise InvalidRequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [s for k, v in value.items() for s in (*_strings(k), *_strings(v))]
    if isinstance(value, Sequence):
        return [s for v in value for s in _strings(v)]
    return []


def _guard(tokenizer: Tokenizer, value: Any, guard: str, special_only: bool) -> Any:
    if isinstance(value, str):
        return tokenizer.guard(value, guard, special_only=special_only)
    if isinstance(value, Mapping):
        return {k: _guard_member(tokenizer, k, v, guard, special_only) for k, v in value.items()}
    if isinstance(value, list):
        return [_guard(tokenizer, v, guard, special_only) for v in value]
    return value


def _guard_member(tokenizer: Tokenizer, key: str, value: Any, guard: str, special_only: bool) -> Any:
    if key == "type":
        return value
    # Below these a template reads no key: all of it is the user's, or copied from what the user said.
    if key in ("arguments", "parameters"):
        return _guard_all(tokenizer, value, guard)
    return _guard(tokenizer, value, guard, special_only)


def _guard_all(tokenizer: Tokenizer, value: Any, guard: str) -> Any:
    """Keys too."""
    if isinstance(value, Mapping):
        return {tokenizer.guard(k, guard): _guard_all(tokenizer, v, guard) for k, v in value.items()}
    if isinstance(value, list):
        return [_guard_all(tokenizer, v, guard) for v in value]
    return tokenizer.guard(value, guard) if isinstance(value, str) else value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
