"""What one example is: a conversation, what it shows, and how each reply is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

Thinking = Literal["adaptive", "enabled", "disabled"]


@dataclass(frozen=True)
class Picture:
    pixels: np.ndarray
    """uint8 [3, height, width]."""


@dataclass(frozen=True)
class Clip:
    frames: np.ndarray
    """uint8 [F, 3, height, width]."""
    fps: int
    """Frames of a second."""


Part: TypeAlias = "str | Picture | Clip"


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a model said, or should."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Scorer(Protocol):
    def __call__(self, reply: Reply) -> bool:
        """Whether a reply is right."""
        ...


@dataclass(frozen=True)
class Turn:
    parts: tuple[Part, ...]
    """The user's message."""
    reply: Reply
    """A right one: what a model is trained on."""
    scorer: Scorer


@dataclass(frozen=True)
class Example:
    skill: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """OpenAI's function tools."""
    thinking: Thinking = "adaptive"
    labels: Mapping[str, float] = field(default_factory=dict)
    """What a report groups by: context in tokens, depth as a share of it."""

    def media(self, num_turns: int | None = None) -> list[Picture | Clip]:
        """Pictures and clips of the first num_turns turns, in order."""
        return [part for turn in self.turns[:num_turns] for part in turn.parts if not isinstance(part, str)]

    @property
    def tool_schemas(self) -> dict[str, Any]:
        """The parameters' JSON schema by tool name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
