"""Video: an object changes its colour once. Which colour came first, and at what second did it change?"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import numpy as np

from msaserve.eval.example import Clip, Example, Reply, Turn
from msaserve.eval.picture import Drawn, draw, jitter
from msaserve.eval.words import COLOURS, SHAPES

FPS = 4
MAX_SECONDS = 16
TOLERANCE_S = 0.5


@dataclass(frozen=True)
class NamesColour:
    """Right: this colour, and no other."""

    colour: str

    def __call__(self, reply: Reply) -> bool:
        return set(re.findall(r"[a-z]+", reply.content.lower())) & set(COLOURS) == {self.colour}


@dataclass(frozen=True)
class GivesSecond:
    """Right: one number, within half a second of the change."""

    second: float

    def __call__(self, reply: Reply) -> bool:
        numbers = re.findall(r"\d+(?:\.\d+)?", reply.content)
        return len(numbers) == 1 and abs(float(numbers[0]) - self.second) <= TOLERANCE_S


def generate(rng: random.Random, *, num_questions: int = 1, max_seconds: int = MAX_SECONDS) -> Example:
    """A clip of 4 seconds or more. The change falls on a whole second, where the model's sampling has a frame."""
    duration = rng.randint(4, max_seconds)
    second = rng.randint(1, duration - 1)
    first, last = rng.sample(COLOURS, 2)
    clip = _clip(rng, duration, second, first, last)
    turns = [
        Turn(
            ("Which colour came first?",),
            Reply(f"The first colour was {first}."),
            NamesColour(first),
        ),
        Turn(
            ("At what second did the colour change?",),
            Reply(f"The colour changed at {second} seconds."),
            GivesSecond(second),
        ),
    ]
    rng.shuffle(turns)
    turns[0] = Turn((clip, *turns[0].parts), turns[0].reply, turns[0].scorer)
    return Example("video", tuple(turns[:num_questions]))


def _clip(rng: random.Random, duration: int, second: int, first: str, last: str) -> Clip:
    height, width = rng.randrange(56, 226, 2), rng.randrange(56, 226, 2)
    side = rng.uniform(0.3, 0.6) * min(height, width)
    shape = rng.choice(SHAPES)
    half = Drawn(first, shape, side, 0, 0).half
    ground = rng.choice((rng.randint(0, 40), rng.randint(90, 150), rng.randint(215, 255)))
    colours = jitter(rng, first), jitter(rng, last)
    # It drifts along a part of a circle around the middle, as far as it stays inside.
    reach_x, reach_y = rng.random() * (width / 2 - half), rng.random() * (height / 2 - half)
    angle, speed = rng.uniform(0, 2 * math.pi), rng.uniform(-0.4, 0.4)
    frames = np.full((duration * FPS, 3, height, width), ground, np.uint8)
    for i, frame in enumerate(frames):
        turn = angle + speed * i / FPS
        x, y = width / 2 + reach_x * math.cos(turn), height / 2 + reach_y * math.sin(turn)
        draw(frame, Drawn(first, shape, side, x, y), colours[i >= second * FPS])
    return Clip(frames, FPS)
