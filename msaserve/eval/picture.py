"""Picture: colour and shape of the largest object, and which of two is left. Any size, any aspect up to 150 to 1."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import numpy as np

from msaserve.eval.example import Example, Picture, Reply, Turn
from msaserve.eval.words import COLOURS, SHAPES
from msaserve.gateway.media.spec import smart_resize

RGB = {
    "red": (215, 35, 35),
    "green": (30, 150, 55),
    "blue": (40, 75, 215),
    "yellow": (238, 218, 45),
    "orange": (245, 140, 25),
    "purple": (125, 45, 165),
    "pink": (248, 155, 195),
    "cyan": (60, 205, 220),
}
MIN_SIDE = 13
"""Square root of the smallest object's area, in pixels as the model sees them."""
MIN_RATIO = 1.4
"""The largest object's side to the next one's."""
MAX_PLACINGS = 50
"""Of a scene's objects, each with another size of the largest, before another picture is tried."""
_EXTENT = {"circle": 2 / math.sqrt(math.pi), "square": 1.0, "triangle": math.sqrt(2), "cross": 3 / math.sqrt(5)}
"""Width and height of a shape of area 1."""


@dataclass(frozen=True)
class NamesObject:
    """Right: this colour and this shape, and no others."""

    colour: str
    shape: str

    def __call__(self, reply: Reply) -> bool:
        words = set(re.findall(r"[a-z]+", reply.content.lower()))
        return words & set(COLOURS) == {self.colour} and words & set(SHAPES) == {self.shape}


@dataclass(frozen=True)
class Drawn:
    """An object: side is the square root of its area, x and y its centre, all in pixels."""

    colour: str
    shape: str
    side: float
    x: float
    y: float

    @property
    def half(self) -> float:
        return self.side * _EXTENT[self.shape] / 2


@dataclass(frozen=True)
class Scene:
    picture: Picture
    objects: tuple[Drawn, ...]

    @property
    def largest(self) -> Drawn:
        return max(self.objects, key=lambda o: o.side)

    @property
    def left(self) -> Drawn | None:
        """The left one of two, if nothing of it reaches above or under the other."""
        if len(self.objects) != 2:
            return None
        first, second = sorted(self.objects, key=lambda o: o.x)
        return first if first.x + first.half < second.x - second.half else None


def draw(canvas: np.ndarray, item: Drawn, rgb: tuple[int, int, int]) -> None:
    """Paint an object on canvas uint8 [3, H, W], with soft edges."""
    height, width = canvas.shape[1:]
    y0, y1 = max(0, math.floor(item.y - item.half - 1)), min(height, math.ceil(item.y + item.half + 1))
    x0, x1 = max(0, math.floor(item.x - item.half - 1)), min(width, math.ceil(item.x + item.half + 1))
    y = np.arange(y0, y1, dtype=np.float32)[:, None] + 0.5 - item.y
    x = np.arange(x0, x1, dtype=np.float32)[None] + 0.5 - item.x
    alpha = np.clip(0.5 - _distance(item.shape, x, y, item.half), 0.0, 1.0)
    area = canvas[:, y0:y1, x0:x1]
    area[:] = (area + (np.asarray(rgb, np.float32)[:, None, None] - area) * alpha + 0.5).astype(np.uint8)


def scene(rng: random.Random, *, num_objects: int | None = None, max_side: int = 1000) -> Scene:
    """A picture of two or three objects on a plain, slightly noisy ground. max_side: of a square of its area."""
    objects = None
    while objects is None:
        height, width = _size(rng, max_side)
        new_height, new_width = smart_resize(height, width, factor=28, min_pixels=4 * 28 * 28, max_pixels=576 * 28 * 28)
        seen = min(new_height / height, new_width / width)
        objects = _place(rng, height, width, num_objects or rng.choice((2, 2, 3)), MIN_SIDE / seen)
    ground = rng.choice((rng.randint(0, 40), rng.randint(90, 150), rng.randint(215, 255)))
    noise = np.random.default_rng(rng.getrandbits(32))
    canvas = noise.integers(ground - 4, ground + 5, (height, width), np.int16).clip(0, 255).astype(np.uint8)
    canvas = np.ascontiguousarray(np.broadcast_to(canvas, (3, height, width)))
    for item in objects:
        draw(canvas, item, jitter(rng, item.colour))
    return Scene(Picture(canvas), objects)


def jitter(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + rng.randint(-9, 9))) for value in RGB[colour])
    return red, green, blue


def turns(rng: random.Random, shown: Scene) -> list[Turn]:
    """The questions a scene allows, in random order; the picture is not among their parts."""
    largest, left = shown.largest, shown.left
    result = [
        Turn(
            ("What is the largest object?",),
            Reply(f"The largest object is a {largest.colour} {largest.shape}."),
            NamesObject(largest.colour, largest.shape),
        )
    ]
    if left is not None:
        result.append(
            Turn(
                ("Which object is on the left?",),
                Reply(f"The {left.colour} {left.shape} is on the left."),
                NamesObject(left.colour, left.shape),
            )
        )
    rng.shuffle(result)
    return result


def generate(rng: random.Random, *, num_questions: int = 1) -> Example:
    shown = scene(rng)
    first, *others = turns(rng, shown)
    first = Turn((shown.picture, *first.parts), first.reply, first.scorer)
    return Example("picture", (first, *others)[:num_questions])


def _size(rng: random.Random, max_side: int) -> tuple[int, int]:
    """Height and width: mostly near square, sometimes a strip, whose short side keeps room for an object."""
    limit = rng.choices((2.0, 8.0, 150.0), (0.7, 0.22, 0.08))[0]
    aspect = math.exp(rng.uniform(0, math.log(limit)))
    low = max(64.0, 28 * math.sqrt(aspect))
    side = math.exp(rng.uniform(math.log(low), math.log(max(low, max_side))))
    long, short = round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))
    return (long, short) if rng.random() < 0.5 else (short, long)


def _place(rng: random.Random, height: int, width: int, count: int, min_side: float) -> tuple[Drawn, ...] | None:
    """None: there is no room for two objects, as in a low strip of few pixels."""
    short, long = sorted((height, width))
    colours, shapes = rng.sample(COLOURS, count), [rng.choice(SHAPES) for _ in range(count)]
    highest = max(min(0.62 * short, 0.38 * long), MIN_RATIO * min_side)
    for _ in range(MAX_PLACINGS):
        largest = rng.uniform(MIN_RATIO * min_side, highest)
        sides = [largest] + [rng.uniform(min_side, largest / MIN_RATIO) for _ in range(count - 1)]
        for _ in range(20):
            objects: list[Drawn] = []
            for colour, shape, side in zip(colours, shapes, sides, strict=True):
                half = side * _EXTENT[shape] / 2
                if 2 * half > short:
                    break
                x, y = rng.uniform(half, width - half), rng.uniform(half, height - half)
                item = Drawn(colour, shape, side, x, y)
                if any(abs(o.x - x) < o.half + half + 2 and abs(o.y - y) < o.half + half + 2 for o in objects):
                    break
                objects.append(item)
            if len(objects) == count:
                # The largest is drawn first of all; its place in the list must not tell.
                rng.shuffle(objects)
                return tuple(objects)
        highest = max(highest * 0.85, MIN_RATIO * min_side)
        if highest == MIN_RATIO * min_side and count > 2:
            count -= 1
            colours, shapes = colours[:count], shapes[:count]
    return None


def _distance(shape: str, x: np.ndarray, y: np.ndarray, half: float) -> np.ndarray:
    """About the signed distance to the outline, negative inside; `half` of the extent."""
    if shape == "circle":
        return np.asarray(np.hypot(x, y) - half)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - half)
    if shape == "triangle":
        # Base below, apex above: both of length 2·half.
        slope = (2 * np.abs(x) - y - half) / math.sqrt(5)
        return np.asarray(np.maximum(slope, y - half))
    arm = half / 3
    across = np.maximum(np.abs(x) - half, np.abs(y) - arm)
    return np.asarray(np.minimum(across, np.maximum(np.abs(x) - arm, np.abs(y) - half)))
