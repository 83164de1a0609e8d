"""Requests of other APIs as chat requests. What chat refuses is said in the words of the request that was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from msaserve.errors import InvalidRequestError
from msaserve.gateway.apis.openai import ChatRequest, from_fields

_PLACE = re.compile(r"messages\[\d+\](?:\.content\[\d+\])?")


class Translation:
    """A chat request in the making, and what its parts are called in the request it is made from."""

    def __init__(self, fields: Mapping[str, Any], names: Sequence[tuple[str, str]]) -> None:
        """fields: of the chat request, all but its messages; None is left out.

        names: patterns of what chat's errors say, and what takes their place.
        """
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self._names = names
        self._messages: list[dict[str, Any]] = []
        self._places: dict[str, str] = {}

    def add(self, message: dict[str, Any], where: str, part_places: Sequence[str] = ()) -> None:
        """The next message. where, part_places: what it and the parts of its content are called."""
        place = f"messages[{len(self._messages)}]"
        self._messages.append(message)
        self._places[place] = where
        for i, part_place in enumerate(part_places):
            self._places[f"{place}.content[{i}]"] = part_place

    def chat_request(self) -> ChatRequest:
        """Raises InvalidRequestError."""
        with self.own_names():
            return from_fields({**self.fields, "messages": self._messages}, ChatRequest)

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors that come out of the block name what was sent."""
        try:
            yield
        except InvalidRequestError as error:
            param = None if error.param is None else self._own(error.param)
            raise type(error)(self._own(str(error)), param=param, code=error.code) from error

    def _own(self, text: str) -> str:
        text = _PLACE.sub(self._place, text)
        for pattern, name in self._names:
            text = re.sub(pattern, name, text)
        return text

    def _place(self, found: re.Match[str]) -> str:
        place = found.group()
        if place in self._places:
            return self._places[place]
        message, dot, part = place.partition(".")
        return self._places.get(message, message) + dot + part


def same_fields(asked: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    """The fields of a request that a chat request has too."""
    return {name: getattr(asked, name) for name in names}


def refuse(asked: msgspec.Struct, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """refused: (accepted values, why not others) by name of the field. Raises InvalidRequestError."""
    for name, (accepted, why) in refused.items():
        if getattr(asked, name) not in accepted:
            raise InvalidRequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def objects(where: str, value: Any, taken: str = "a list") -> list[dict[str, Any]]:
    """A list of JSON objects. taken: what could stand there. Raises InvalidRequestError."""
    if not isinstance(value, list):
        raise InvalidRequestError(f"{where} must be {taken}", param=where)
    for i, one in enumerate(value):
        if not isinstance(one, dict):
            raise InvalidRequestError(f"{where}[{i}] must be an object", param=f"{where}[{i}]")
    return value


def text_of(where: str, value: Any) -> str:
    """Raises InvalidRequestError."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where} must be text", param=where)
    return value


def unsupported(where: str, kind: Any, taken: str) -> InvalidRequestError:
    """For a part, item or tool of a kind that is not taken."""
    return InvalidRequestError(
        f"{where}: type {str(kind)[:64]!r} is not supported; taken are {taken}", param=where, code="unsupported_content"
    )
