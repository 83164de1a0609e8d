"""A run: seeded examples of one skill, asked, judged, counted, drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

from msaserve.errors import InvalidRequestError
from msaserve.eval import mixed, needle, picture, tool, video
from msaserve.eval.example import Example, Reply
from msaserve.eval.filler import Count

Skill = Literal["needle", "picture", "video", "tool", "mixed"]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of needles: example i of a context has depth i mod 5 of these."""
PROMPT_MARGIN = 96
"""Tokens of a prompt that are not its text: the template's, the question's."""


class Answerer(Protocol):
    def answer(self, examples: Sequence[Example]) -> Iterator[tuple[int, Reply]]:
        """Replies to the examples' first questions, as they are ready, each with its example's number."""
        ...


@dataclass(frozen=True)
class Result:
    example: Example
    reply: Reply

    @property
    def is_right(self) -> bool:
        return self.example.turns[0].scorer(self.reply)


@dataclass(frozen=True)
class Row:
    """One line of a report."""

    label: str
    num_right: int
    num_asked: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_asked


def make_examples(
    skill: Skill, *, n: int, contexts: Sequence[int], seed: int, count: Count, first: int = 0
) -> list[Example]:
    """Examples first, first + 1, … of a seed: n, of needle and mixed n for each context.

    The same seed gives the same examples. contexts: tokens of prompt. count: tokens of a text.

    Raises:
        InvalidRequestError: a context too short to hold a fact.
    """
    if min(contexts) < PROMPT_MARGIN + 64:
        raise InvalidRequestError(f"a context of {min(contexts)} tokens is too short", param="context")
    generators: dict[Skill, Callable[[random.Random], Example]] = {
        "picture": picture.generate,
        "video": video.generate,
        "tool": tool.generate,
    }
    if skill in generators:
        return [generators[skill](random.Random(f"{skill} {seed} {i}")) for i in range(first, first + n)]
    examples = []
    for context in contexts:
        for i in range(first, first + n):
            rng = random.Random(f"{skill} {seed} {context} {i}")
            room = context - PROMPT_MARGIN
            if skill == "needle":
                examples.append(needle.generate(rng, context=room, count=count, depth=DEPTHS[i % len(DEPTHS)]))
            else:
                examples.append(mixed.generate(rng, context=room, count=count))
            examples[-1] = _labelled(examples[-1], context)
    return examples


def run(examples: Sequence[Example], answerer: Answerer, *, on_result: Callable[[Result], None]) -> list[Result]:
    """Ask all, in the order of the examples. on_result: called as each is answered."""
    results: dict[int, Result] = {}
    for number, reply in answerer.answer(examples):
        results[number] = Result(examples[number], reply)
        on_result(results[number])
    return [results[number] for number in range(len(examples))]


def rows(results: Sequence[Result]) -> list[Row]:
    """Accuracy by context, or of all where there is none."""
    groups: dict[str, list[bool]] = {}
    for result in results:
        context = result.example.labels.get("context")
        label = result.example.skill + ("" if context is None else f" at {context:,.0f} tokens")
        groups.setdefault(label, []).append(result.is_right)
    return [Row(label, sum(right), len(right)) for label, right in groups.items()]


def plot(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Accuracy against context and depth, or a bar for each group, as a picture file.

    Raises:
        InvalidRequestError: matplotlib is not installed, or the file's kind is unknown to it.
    """
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(8, 4), layout="constrained")
    except ImportError as error:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'msaserve[plot]'") from error
    axes = figure.subplots()
    axes.set_title(title)
    if all("depth" in result.example.labels for result in results):
        grid = depth_grid(results)
        contexts = sorted({context for context, _ in grid})
        image = axes.imshow(
            [[grid[context, depth] for context in contexts] for depth in DEPTHS],
            vmin=0, vmax=1, cmap="RdYlGn", aspect="auto",
        )  # fmt: skip
        axes.set_xticks(range(len(contexts)), [f"{context:,.0f}" for context in contexts])
        axes.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("depth of the fact")
        figure.colorbar(image, label="share right")
    else:
        table = rows(results)
        axes.bar([row.label for row in table], [row.accuracy for row in table])
        axes.set_ylim(0, 1)
        axes.set_ylabel("share right")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} cannot be written: {error}", param="plot") from error


def depth_grid(results: Sequence[Result]) -> dict[tuple[float, float], float]:
    """Accuracy by context and depth; NaN where nothing was asked."""
    asked: dict[tuple[float, float], list[bool]] = {}
    for result in results:
        labels = result.example.labels
        asked.setdefault((labels["context"], labels["depth"]), []).append(result.is_right)
    contexts = {context for context, _ in asked}
    nothing = [float("nan")]
    return {
        (context, depth): sum(asked.get((context, depth), nothing)) / len(asked.get((context, depth), nothing))
        for context in contexts
        for depth in DEPTHS
    }


def _labelled(example: Example, context: int) -> Example:
    return Example(
        example.skill, example.turns, example.tools, example.thinking, {**example.labels, "context": float(context)}
    )
