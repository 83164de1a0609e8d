"""Mixed: a picture in the middle of a long text with needles; questions of both kinds."""

from __future__ import annotations

import random

from msaserve.eval import needle, picture
from msaserve.eval.example import Example, Turn
from msaserve.eval.filler import Count


def generate(
    rng: random.Random, *, context: int, count: Count, num_facts: int | None = None, num_questions: int = 1
) -> Example:
    """About `context` tokens of text around a picture. The first question is of either kind."""
    num_facts = num_facts or min(needle.MAX_FACTS, max(2, context // needle.TOKENS_PER_FACT))
    hay = needle.haystack(rng, context, count, num_facts=num_facts)
    shown = picture.scene(rng)
    middle = round(len(hay.sentences) * rng.uniform(0.4, 0.6))
    text = ("".join(hay.sentences[:middle]), shown.picture, "".join(hay.sentences[middle:]) + "\n")
    seen = picture.turns(rng, shown)
    names = rng.sample(list(hay.codes), min(num_facts, max(1, num_questions - len(seen))))
    turns = [*seen, *(needle.turn([], name, hay.codes[name]) for name in names)]
    # Either kind comes first in half of the examples.
    first = seen[0] if rng.random() < 0.5 else turns[-1]
    rest = [t for t in turns if t is not first]
    rng.shuffle(rest)
    opening = Turn((*text, *first.parts), first.reply, first.scorer)
    return Example("mixed", (opening, *rest)[:num_questions], labels={"context": float(context)})
