"""Training batches: the skills' examples as token ids, labels, positions and patches. Batch i depends on i alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from examples.train_tiny.prose import paragraphs as prose_paragraphs
from examples.train_tiny.recipe import Recipe, Stage, token_id
from msaserve import pixels
from msaserve.eval import mixed, needle, picture, tool, video
from msaserve.eval.conversation import assistant, messages
from msaserve.eval.example import Example, Thinking, Turn
from msaserve.eval.media import prepare
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.prompt import expand
from msaserve.gateway.media.spec import Prepared, find_spec
from msaserve.tokenizer import Tokenizer

BLOCK = 128
SKILLS = ("needle", "picture", "video", "tool", "mixed")
TOKENS_PER_QUESTION = 48
"""Of a further question and its reply, a little more than it takes."""
_TEXT_TURNS = 28


@dataclass
class Batch:
    """B sequences of T tokens, padded at the end."""

    token_ids: torch.Tensor
    """[B, T] int64."""
    positions: torch.Tensor
    """[B, T] int64, stretched."""
    is_reply: torch.Tensor
    """[B, T] bool: tokens that the model must say."""
    is_text: torch.Tensor
    """[B, T] bool: other tokens to be predicted, for what that teaches."""
    reply_number: torch.Tensor
    """[B, T] int64: which of the batch's replies a token belongs to; −1: none."""
    reply_skills: list[str]
    index_rows: torch.Tensor
    """[B, R] int64: queries that the index branch learns from."""
    media_rows: torch.Tensor | None
    """[M] int64: places of pictures' and clips' tokens in the flattened [B · T]."""
    patches: torch.Tensor | None
    """[N, 1176] uint8."""
    grid_thw: list[tuple[int, int, int]]
    topk: int | None

    def pin_memory(self) -> Batch:
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.pin_memory())
        return self

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)

    def normalized_patches(self) -> torch.Tensor | None:
        """As msaserve.pixels normalises them, on the batch's device."""
        if self.patches is None:
            return None
        per_channel = self.patches.shape[1] // 3
        mean, std = (
            torch.tensor(np.repeat(np.asarray(values, np.float32) * 255, per_channel)).to(self.patches.device)
            for values in (pixels.IMAGE_MEAN, pixels.IMAGE_STD)
        )
        return (self.patches.float() - mean) / std


@dataclass(frozen=True)
class _Sequence:
    token_ids: np.ndarray
    replies: list[tuple[int, int]]
    """(start, end) of what the model says."""
    media: list[Prepared]
    skill: str


class Batches(Dataset[list[Batch]]):
    """Item (step, stage) is the step's batches: long texts, then pictures, clips and tool calls."""

    def __init__(self, recipe: Recipe, checkpoint: Path, *, seed: int) -> None:
        """checkpoint: for the tokenizer, the template and the picture sizes."""
        self.recipe, self.checkpoint, self.seed = recipe, checkpoint, seed

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.checkpoint)

    def __getitem__(self, item: tuple[int, int]) -> list[Batch]:  # type: ignore[override]
        step, stage_number = item
        rng = random.Random(f"{self.seed} {step}")
        stage = self.recipe.stages[stage_number]
        return [self._long(rng, stage), self._short(rng)]

    def _long(self, rng: random.Random, stage: Stage) -> Batch:
        recipe, writer = self.recipe, self.writer
        context = round(math.exp(rng.uniform(math.log(stage.min_context), math.log(stage.max_context))))
        sequences = []
        for _ in range(max(1, recipe.tokens_per_step // context)):
            example = self._text(rng, context)
            sequences.append(writer.write(example))
        topk = rng.choice(recipe.topk_choices) if stage.is_sparse else None
        return self._batch(rng, sequences, topk=topk)

    def _text(self, rng: random.Random, context: int) -> Example:
        recipe, writer = self.recipe, self.writer
        num_questions = max(1, min(_TEXT_TURNS, context // (3 * TOKENS_PER_QUESTION)))
        room = max(64, context - TOKENS_PER_QUESTION * num_questions - 128)
        num_facts = max(2, min(needle.MAX_FACTS, round(room / math.exp(rng.uniform(math.log(48), math.log(1024))))))
        if rng.random() < recipe.mixed_share and context >= 1024:
            example = mixed.generate(
                rng, context=room - 256, count=writer.count, num_facts=num_facts, num_questions=num_questions
            )
        else:
            filler = writer.prose(rng, room - 16 * num_facts) if rng.random() < recipe.prose_share else None
            hay = needle.haystack(
                rng, room, writer.count, num_facts=num_facts, filler=filler, made_up=recipe.made_up_share
            )
            names = rng.sample(list(hay.codes), min(num_facts, num_questions))
            turns = [
                needle.turn(["".join(hay.sentences) + "\n"] if i == 0 else [], name, hay.codes[name])
                for i, name in enumerate(names)
            ]
            example = Example("needle", tuple(turns))
        return _with_thinking(rng, example)

    def _short(self, rng: random.Random) -> Batch:
        sequences = []
        for _ in range(self.recipe.short_per_step):
            skill = rng.choices(("picture", "video", "tool"), (0.5, 0.25, 0.25))[0]
            if skill == "picture":
                shown = picture.scene(rng, max_side=self.recipe.max_picture_side)
                first, *others = picture.turns(rng, shown)
                example = Example("picture", (Turn((shown.picture, *first.parts), first.reply, first.scorer), *others))
            elif skill == "video":
                example = video.generate(rng, num_questions=2)
            else:
                example = tool.generate(rng)
            sequences.append(self.writer.write(example if skill == "tool" else _with_thinking(rng, example)))
        return self._batch(rng, sequences, topk=None)

    def _batch(self, rng: random.Random, sequences: Sequence[_Sequence], *, topk: int | None) -> Batch:
        recipe = self.recipe
        num_tokens = -(-max(len(s.token_ids) for s in sequences) // BLOCK) * BLOCK
        shape = (len(sequences), num_tokens)
        token_ids = np.full(shape, token_id("]!p~["), np.int64)
        positions = np.zeros(shape, np.int64)
        is_reply, is_text = np.zeros(shape, bool), np.zeros(shape, bool)
        reply_number = np.full(shape, -1, np.int64)
        index_rows = np.zeros((len(sequences), recipe.num_index_rows), np.int64)
        skills: list[str] = []
        media: list[Prepared] = []
        for i, sequence in enumerate(sequences):
            length = len(sequence.token_ids)
            token_ids[i, :length] = sequence.token_ids
            positions[i] = self._positions(rng, sequence, num_tokens)
            is_text[i, 1:length] = ~self.writer.is_media(sequence.token_ids[1:])
            asked: list[int] = []
            for start, end in sequence.replies:
                is_reply[i, start:end] = True
                reply_number[i, start:end] = len(skills)
                skills.append(sequence.skill)
                # The query before a token is the one that predicts it.
                asked += range(start - 1, end - 1)
            half = min(len(asked), recipe.num_index_rows // 2)
            rows = rng.sample(asked, half) + [rng.randrange(length) for _ in range(recipe.num_index_rows - half)]
            index_rows[i] = rows
            media += sequence.media
        is_text &= ~is_reply
        flat = np.flatnonzero(self.writer.is_media(token_ids.ravel()))
        spec = self.writer.spec
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            is_reply=torch.from_numpy(is_reply),
            is_text=torch.from_numpy(is_text),
            reply_number=torch.from_numpy(reply_number),
            reply_skills=skills,
            index_rows=torch.from_numpy(index_rows),
            media_rows=torch.from_numpy(flat) if media else None,
            patches=torch.from_numpy(np.concatenate([item.patches for item in media])) if media else None,
            grid_thw=[row for item in media for row in spec.grid_rows(item.grid_thw)],
            topk=topk,
        )

    def _positions(self, rng: random.Random, sequence: _Sequence, num_tokens: int) -> np.ndarray:
        """0, 1, 2, … with a few leaps at line breaks, as if text had been left out there: the model so sees the
        distances of contexts far longer than it is trained on. A leap is never inside a sentence."""
        steps = np.ones(num_tokens, np.int64)
        steps[0] = 0
        breaks = np.flatnonzero(sequence.token_ids == self.writer.line_break)
        if len(breaks) and rng.random() < self.recipe.stretch_share:
            longest = max(num_tokens + 1, self.recipe.max_position)
            extra = math.exp(rng.uniform(math.log(num_tokens + 1), math.log(longest))) - num_tokens
            places = [int(rng.choice(breaks)) + 1 for _ in range(rng.randint(1, 6))]
            for place in places:
                if place < num_tokens:
                    steps[place] += int(extra / len(places))
        return np.cumsum(steps)


class Writer:
    """Examples to token ids, by the checkpoint's own tokenizer and template."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = Tokenizer.load(checkpoint)
        template, source = ChatTemplate.load(checkpoint), find_spec(checkpoint)
        assert template is not None
        assert source is not None
        self.template, self.spec = template, source.load()
        self._media_ids = [token_id("]<]image[>["), token_id("]<]video[>[")]
        self._turn, self._end = token_id("]~b]"), token_id("[e~[")
        self._speaker = self.tokenizer.encode("ai\n")
        (self.line_break,) = self.tokenizer.encode("\n")
        self._prefixes = {token_id("<mm:think>"), token_id("</mm:think>")}
        self._counts: dict[str, int] = {}

    def count(self, text: str) -> int:
        """Close enough to the tokens of a text, and fast: words are counted one by one."""
        total = 0
        for word in text.split(" "):
            if word not in self._counts:
                self._counts[word] = len(self.tokenizer.encode_plain(f" {word}")) if word else 0
            total += self._counts[word]
        return total

    @cached_property
    def _prose(self) -> list[str]:
        return prose_paragraphs()

    def prose(self, rng: random.Random, num_tokens: int) -> list[str]:
        """Paragraphs in random order."""
        found: list[str] = []
        while num_tokens > 0:
            found.append(rng.choice(self._prose))
            num_tokens -= self.count(found[-1])
        return found

    def is_media(self, token_ids: np.ndarray) -> np.ndarray:
        return np.isin(token_ids, self._media_ids)

    def write(self, example: Example) -> _Sequence:
        """The whole conversation. What the template itself puts before a reply is no part of it."""
        last = assistant(example.turns[-1].reply)
        text = self.template.render(
            [*messages(example, len(example.turns)), last],
            add_generation_prompt=False,
            kwargs={"thinking_mode": example.thinking, "tools": list(example.tools) or None},
        )
        media = [prepare(item, self.spec) for item in example.media()]
        ids = self.tokenizer.encode(text)
        if media:
            ids = expand(ids, media, self.spec, self.tokenizer).token_ids
        token_ids = np.asarray(ids, np.int64)
        replies = []
        for turn in np.flatnonzero(token_ids == self._turn).tolist():
            start = turn + 1 + len(self._speaker)
            if ids[turn + 1 : start] == self._speaker:
                if example.thinking != "adaptive":
                    assert ids[start] in self._prefixes
                    start += 1
                replies.append((start, ids.index(self._end, start) + 1))
        assert len(replies) == len(example.turns)
        return _Sequence(token_ids, replies, media, example.skill)


def _with_thinking(rng: random.Random, example: Example) -> Example:
    """Text and pictures are answered at once, whether thinking is off or up to the model."""
    thinking: Thinking = rng.choice(("adaptive", "disabled"))
    return Example(example.skill, example.turns, example.tools, thinking, example.labels)
