"""Tool call: tools are described, the question needs one of them; right is one call of it with the right argument."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msaserve.eval.example import Call, Example, Reply, Thinking, Turn
from msaserve.eval.words import CITIES, NAMES, NOUNS, made_up_name


@dataclass(frozen=True)
class Calls:
    """Right: exactly this call, nothing said beside it, and thoughts before it when asked for."""

    call: Call
    thinks: bool

    def __call__(self, reply: Reply) -> bool:
        return reply.calls == (self.call,) and not reply.content.strip() and (bool(reply.reasoning) or not self.thinks)


@dataclass(frozen=True)
class _Kind:
    topic: str
    """In the tool's name."""
    keys: tuple[str, ...]
    """What its parameter may be called."""
    question: str
    value: Callable[[random.Random], str | int]


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES)


def _person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up_name(rng)


def _number(rng: random.Random) -> int:
    return rng.randint(100, 99999)


def _noun(rng: random.Random) -> str:
    return rng.choice(NOUNS)


_KINDS = (
    _Kind("weather", ("city", "place", "location"), "What is the weather in {}?", _city),
    _Kind("time", ("city", "town", "zone"), "What time is it in {}?", _city),
    _Kind("population", ("city", "place", "name"), "How many people live in {}?", _city),
    _Kind("map", ("city", "area", "target"), "Show me a map of {}.", _city),
    _Kind("phone", ("person", "name", "contact"), "What is the phone number of {}?", _person),
    _Kind("birthday", ("person", "name", "who"), "When is the birthday of {}?", _person),
    _Kind("calendar", ("person", "user", "owner"), "Is {} free today?", _person),
    _Kind("parcel", ("number", "parcel", "tracking_number"), "Where is parcel {}?", _number),
    _Kind("order", ("order", "number", "order_id"), "What is the state of order {}?", _number),
    _Kind("price", ("item", "product", "article"), "What does a {} cost?", _noun),
    _Kind("stock", ("item", "product", "thing"), "How many pieces of {} are there?", _noun),
    _Kind("translation", ("word", "text", "term"), "How do you say {} in French?", _noun),
)
_NAMES = ("get_{}", "find_{}", "show_{}", "read_{}", "{}_lookup", "{}_search", "{}_of", "fetch_{}")


def generate(rng: random.Random, *, thinking: Thinking | None = None) -> Example:
    """One to three tools, one of them needed. thinking None: drawn."""
    modes: tuple[Thinking, ...] = ("adaptive", "enabled", "disabled")
    mode = rng.choice(modes) if thinking is None else thinking
    kinds = rng.sample(_KINDS, rng.randint(1, 3))
    described = [(rng.choice(_NAMES).format(kind.topic), rng.choice(kind.keys), kind) for kind in kinds]
    name, key, kind = rng.choice(described)
    value = kind.value(rng)
    text = kind.question.format(value)
    call = Call(name, {key: value})
    thinks = mode != "disabled"
    reply = Reply(reasoning=f"This needs {name} with {key} {value}." if thinks else "", calls=(call,))
    return Example(
        "tool",
        (Turn((text,), reply, Calls(call, thinks)),),
        tools=tuple(_describe(*each) for each in described),
        thinking=mode,
    )


def _describe(name: str, key: str, kind: _Kind) -> Mapping[str, Any]:
    type_name = "integer" if kind.value is _number else "string"
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Answers questions of {kind.topic}.",
            "parameters": {"type": "object", "properties": {key: {"type": type_name}}, "required": [key]},
        },
    }
