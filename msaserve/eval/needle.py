"""Needle: facts "The code of NAME is DIGITS." strewn in filler, then a question for one of them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from msaserve.eval.example import Example, Reply, Turn
from msaserve.eval.filler import Count, paragraphs
from msaserve.eval.words import NAMES, made_up_name

CODE_DIGITS = 5
TOKENS_PER_FACT = 1024
"""Of the default number of facts."""
MAX_FACTS = 64


@dataclass(frozen=True)
class SaysCode:
    """Right: the digits, and no others."""

    code: str

    def __call__(self, reply: Reply) -> bool:
        return re.findall(r"\d+", reply.content) == [self.code]


def fact(name: str, code: str) -> str:
    return f"The code of {name} is {code}."


def question(name: str) -> str:
    return f"What is the code of {name}?"


def turn(parts: Sequence[str], name: str, code: str) -> Turn:
    """A user's message that ends in the question."""
    return Turn((*parts, question(name)), Reply(fact(name, code)), SaysCode(code))


@dataclass(frozen=True)
class Haystack:
    sentences: list[str]
    """Filler and facts, each with the white space behind it."""
    codes: dict[str, str]
    """By name, in the order of the text."""


def haystack(
    rng: random.Random,
    num_tokens: int,
    count: Count,
    *,
    num_facts: int,
    filler: Sequence[str] | None = None,
    made_up: float = 0.0,
    depth: float | None = None,
) -> Haystack:
    """About num_tokens tokens of filler with num_facts facts at random places.

    Args:
        filler: sentences to use instead of the grammar's.
        made_up: share of names that are in no list.
        depth: where the first of `codes` stands, as a share of the text. None: at random.
    """
    codes: dict[str, str] = {}
    while len(codes) < num_facts:
        name = made_up_name(rng) if rng.random() < made_up else rng.choice(NAMES)
        if name not in codes:
            codes[name] = "".join(rng.choice("0123456789") for _ in range(CODE_DIGITS))
    facts = [fact(name, code) + " " for name, code in codes.items()]
    room = max(0, num_tokens - sum(count(f" {text[:-1]}") for text in facts))
    sentences = list(filler) if filler is not None else paragraphs(rng, room, count)
    places = sorted((rng.randint(0, len(sentences)), i) for i in range(num_facts))
    if depth is not None:
        places = sorted([(round(depth * len(sentences)), 0), *((p, i) for p, i in places if i)])
    for place, i in reversed(places):
        sentences.insert(place, facts[i])
    names = list(codes)
    asked = [names[0]] if depth is not None else []
    order = asked + [names[i] for _, i in places if names[i] not in asked]
    return Haystack(sentences, {name: codes[name] for name in order})


def generate(
    rng: random.Random,
    *,
    context: int,
    count: Count,
    num_facts: int | None = None,
    num_questions: int = 1,
    depth: float | None = None,
) -> Example:
    """A conversation of about `context` prompt tokens: the text and a question, then further questions.

    depth: where the first asked fact stands, 0 the beginning, 1 the end.
    """
    num_facts = num_facts or min(MAX_FACTS, max(2, context // TOKENS_PER_FACT))
    hay = haystack(rng, context, count, num_facts=num_facts, depth=depth)
    names = list(hay.codes)
    rest = names[1:]
    rng.shuffle(rest)
    asked = ([names[0]] if depth is not None else []) + rest + ([] if depth is not None else [names[0]])
    turns = [
        turn(["".join(hay.sentences) + "\n"] if i == 0 else [], name, hay.codes[name])
        for i, name in enumerate(asked[:num_questions])
    ]
    labels = {"context": float(context)} | ({} if depth is None else {"depth": depth})
    return Example("needle", tuple(turns), labels=labels)
