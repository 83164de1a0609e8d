"""Text that says nothing: grammatical, varied, without facts that a question could mean."""

from __future__ import annotations

import random
from collections.abc import Callable

from msaserve.eval.words import ADJECTIVES, ADVERBS, CITIES, NAMES, NOUNS, PLACES, VERBS

Count = Callable[[str], int]
"""Tokens of a text."""


def sentence(rng: random.Random) -> str:
    """One sentence. Names and numbers occur in it as they do around facts."""
    return rng.choice(_FORMS)(rng)


def paragraphs(rng: random.Random, num_tokens: int, count: Count) -> list[str]:
    """Sentences, a few to a paragraph; the last sentence of each but the last paragraph ends in a line break.

    Joined they have about num_tokens tokens, at most one sentence more.
    """
    sentences: list[str] = []
    total = 0
    left = rng.randint(3, 9)
    while total < num_tokens:
        left -= 1
        text, ends = sentence(rng), left == 0
        sentences.append(text + ("\n" if ends else " "))
        if ends:
            left = rng.randint(3, 9)
        # A space belongs to the word behind it, a line break stands alone.
        total += count(f" {text}") + ends
    return sentences


def _thing(rng: random.Random) -> str:
    noun = rng.choice(NOUNS)
    return f"{rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.6 else noun


def _someone(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.35 else f"the {_thing(rng)}"


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


_FORMS: tuple[Callable[[random.Random], str], ...] = (
    lambda r: _start(f"{_someone(r)} {r.choice(VERBS)} the {_thing(r)}."),
    lambda r: _start(f"{_someone(r)} {r.choice(ADVERBS)} {r.choice(VERBS)} a {_thing(r)} near {r.choice(PLACES)}."),
    lambda r: f"In {r.randint(1700, 2020)} the {_thing(r)} of {r.choice(PLACES)} was {r.choice(VERBS)} again.",
    lambda r: f"There were {r.randint(2, 990)} {r.choice(NOUNS)}s in the {_thing(r)}.",
    lambda r: f"The {_thing(r)} is {r.choice(ADJECTIVES)}, but the {_thing(r)} is {r.choice(ADJECTIVES)}.",
    lambda r: f"Nobody in {r.choice(CITIES)} {r.choice(VERBS)} the {_thing(r)} {r.choice(ADVERBS)}.",
    lambda r: f"When {_someone(r)} {r.choice(VERBS)} the {_thing(r)}, {_someone(r)} {r.choice(VERBS)} the {_thing(r)}.",
    lambda r: f"The {r.choice(NOUNS)} of {r.choice(NAMES)} is {r.choice(ADJECTIVES)}.",
    lambda r: f"The {r.choice(NOUNS)} of {r.choice(NAMES)} has {r.randint(2, 99)} {r.choice(NOUNS)}s.",
    lambda r: f"It took {r.randint(2, 60)} days to reach {r.choice(PLACES)} from {r.choice(CITIES)}.",
    lambda r: f"{_start(_someone(r))} and {_someone(r)} {r.choice(VERBS)} the {_thing(r)} together.",
    lambda r: f"After the {r.choice(NOUNS)} came the {_thing(r)}, and after it the {_thing(r)}.",
)  # fmt: skip
