"""Training batches: the skills' examples as token ids, labels, positions and patches. Batch i depends on i alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from examples.train_tiny.grid import Grid, arrange
from examples.train_tiny.prose import paragraphs as prose_paragraphs
from examples.train_tiny.recipe import Recipe, Stage, token_id
from msaserve import pixels
from msaserve.config import ModelConfig, VisionConfig
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
TOKENS_PER_QUESTION = 32
"""Of a further question and its reply, a little more than it takes."""
TOKENS_AROUND = 64
"""Of the template, before the text."""
MAX_QUESTIONS = 32
PACKED_LENGTH = 1024
"""Of the sequences that pictures, clips and tool calls are packed into."""
TEXT_SHARE = 0.25
"""Of the tokens that are no reply: those whose loss is computed."""


@dataclass
class Batch:
    """B sequences of T tokens, padded at the end. What is to be predicted is given by its place in the flattened
    [B · T]: the token before it."""

    token_ids: torch.Tensor
    """[B, T] int64."""
    positions: torch.Tensor
    """[B, T] int64, stretched."""
    documents: torch.Tensor | None
    """[B, T] int64: which of a sequence's texts a token belongs to. None: all are of one text."""
    reply_rows: torch.Tensor
    """[R] int64: before the tokens that the model must say."""
    reply_labels: torch.Tensor
    """[R] int64: these tokens."""
    reply_numbers: torch.Tensor
    """[R] int64: which of the batch's replies each belongs to."""
    reply_skills: list[str]
    text_rows: torch.Tensor
    """[X] int64: before some of the other tokens, predicted for what that teaches."""
    text_labels: torch.Tensor
    index_rows: torch.Tensor | None
    """[B, R] int64: queries that the index branch learns from."""
    media_rows: torch.Tensor | None
    """[M] int64: places of pictures' and clips' tokens in the flattened [B · T]."""
    patches: torch.Tensor | None
    """[N, 1176] uint8."""
    grid: Grid | None
    topk: int | None

    def pin_memory(self) -> Batch:
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        changed: dict[str, Any] = {
            name: change(value) if isinstance(value, torch.Tensor) else value.map(change)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor | Grid)
        }
        return replace(self, **changed)

    def normalized_patches(self) -> torch.Tensor | None:
        """As msaserve.pixels normalises them, on the batch's device."""
        if self.patches is None:
            return None
        mean, std = _statistics(self.patches.shape[1] // 3, self.patches.device)
        return (self.patches.float() - mean) / std


@cache
def _statistics(per_channel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of a patch's values, each [3 · per_channel]."""
    mean, std = (
        torch.from_numpy(np.repeat(np.asarray(values, np.float32) * 255, per_channel)).to(device)
        for values in (pixels.IMAGE_MEAN, pixels.IMAGE_STD)
    )
    return mean, std


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

    @cached_property
    def vision_config(self) -> VisionConfig:
        vision = ModelConfig.from_checkpoint(self.checkpoint).vision
        assert vision is not None
        return vision

    def __getitem__(self, item: tuple[int, int]) -> list[Batch]:  # type: ignore[override]
        step, stage_number = item
        rng = random.Random(f"{self.seed} {step}")
        stage = self.recipe.stages[stage_number]
        return [self._long(rng, stage), self._short(rng, stage)]

    def _long(self, rng: random.Random, stage: Stage) -> Batch:
        recipe, writer = self.recipe, self.writer
        context = round(math.exp(rng.uniform(math.log(stage.min_context), math.log(stage.max_context))))
        texts = [writer.write(self._text(rng, context)) for _ in range(max(1, recipe.tokens_per_step // context))]
        topk = rng.choice(recipe.topk_choices) if stage.is_sparse and rng.random() >= recipe.dense_share else None
        num_index_rows = min(recipe.num_index_rows, max(16, context // 12))
        return self._batch(rng, [[text] for text in texts], topk=topk, num_index_rows=num_index_rows)

    def _text(self, rng: random.Random, context: int) -> Example:
        recipe, writer = self.recipe, self.writer
        room = context - TOKENS_AROUND
        # At least six facts where there is room: with two, a guess is right as often as not.
        tokens_per_fact = math.exp(rng.uniform(math.log(15), math.log(max(20, min(1024, room / 6)))))
        num_facts = max(2, min(needle.MAX_FACTS, round(room / tokens_per_fact)))
        # Half of the facts at most: were all asked, the last ones could be told by those that are left.
        num_questions = max(1, min(MAX_QUESTIONS, num_facts // 2, room // (2 * TOKENS_PER_QUESTION)))
        room = max(48, room - TOKENS_PER_QUESTION * num_questions)
        if rng.random() < recipe.mixed_share and context >= 1024:
            example = mixed.generate(
                rng, context=max(64, room - 256), count=writer.count, num_facts=num_facts, num_questions=num_questions
            )
        else:
            filler = writer.prose(rng, room - 16 * num_facts) if rng.random() < recipe.prose_share else None
            hay = needle.haystack(
                rng, room, writer.count, num_facts=num_facts, filler=filler, made_up=recipe.made_up_share
            )
            names = rng.sample(list(hay.codes), num_questions)
            turns = [
                needle.turn(["".join(hay.sentences) + "\n"] if i == 0 else [], name, hay.codes[name])
                for i, name in enumerate(names)
            ]
            example = Example("needle", tuple(turns))
        return _with_thinking(rng, example)

    def _short(self, rng: random.Random, stage: Stage) -> Batch:
        sequences = []
        for _ in range(stage.num_short):
            skill = rng.choices(("picture", "video", "tool"), self.recipe.short_shares)[0]
            if skill == "picture":
                shown = picture.scene(rng, max_side=stage.max_picture_side)
                first, *others = picture.turns(rng, shown)
                example = Example("picture", (Turn((shown.picture, *first.parts), first.reply, first.scorer), *others))
            elif skill == "video":
                example = video.generate(rng, num_questions=2, max_seconds=stage.max_clip_seconds)
            else:
                example = tool.generate(rng)
            sequences.append(self.writer.write(example if skill == "tool" else _with_thinking(rng, example)))
        return self._batch(rng, _pack(sequences, PACKED_LENGTH), topk=None, num_index_rows=None)

    def _batch(
        self,
        rng: random.Random,
        sequences: Sequence[Sequence[_Sequence]],
        *,
        topk: int | None,
        num_index_rows: int | None,
    ) -> Batch:
        """sequences: the texts of each. With an index loss each has one."""
        longest = max(sum(len(text.token_ids) for text in texts) for texts in sequences)
        num_tokens = -(-longest // BLOCK) * BLOCK
        shape = (len(sequences), num_tokens)
        token_ids = np.full(shape, token_id("]!p~["), np.int64)
        positions, documents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        is_reply, is_text = np.zeros(shape, bool), np.zeros(shape, bool)
        reply_number = np.zeros(shape, np.int64)
        index_rows = None if num_index_rows is None else np.zeros((len(sequences), num_index_rows), np.int64)
        skills: list[str] = []
        media: list[Prepared] = []
        for i, texts in enumerate(sequences):
            start = 0
            for number, text in enumerate(texts):
                end = start + len(text.token_ids)
                token_ids[i, start:end] = text.token_ids
                positions[i, start:] = self._positions(rng, text, num_tokens - start)
                documents[i, start:end] = number
                is_text[i, start + 1 : end] = ~self.writer.is_media(text.token_ids[1:])
                for first, last in text.replies:
                    is_reply[i, start + first : start + last] = True
                    reply_number[i, start + first : start + last] = len(skills)
                    skills.append(text.skill)
                media += text.media
                start = end
            if index_rows is not None:
                # The query before a token is the one that predicts it.
                asked = (np.flatnonzero(is_reply[i]) - 1).tolist()
                asked = rng.sample(asked, min(len(asked), index_rows.shape[1] // 2))
                index_rows[i] = asked + [rng.randrange(end) for _ in range(index_rows.shape[1] - len(asked))]
        is_text &= ~is_reply
        reply_places, text_places = np.flatnonzero(is_reply), np.flatnonzero(is_text)
        text_places = text_places[np.random.default_rng(rng.getrandbits(32)).random(len(text_places)) < TEXT_SHARE]
        flat, tensor = token_ids.ravel(), torch.from_numpy
        grid_rows = [row for item in media for row in self.writer.spec.grid_rows(item.grid_thw)]
        return Batch(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            documents=tensor(documents) if any(len(texts) > 1 for texts in sequences) else None,
            reply_rows=tensor(reply_places - 1),
            reply_labels=tensor(flat[reply_places]),
            reply_numbers=tensor(reply_number.ravel()[reply_places]),
            reply_skills=skills,
            text_rows=tensor(text_places - 1),
            text_labels=tensor(flat[text_places]),
            index_rows=None if index_rows is None else tensor(index_rows),
            media_rows=tensor(np.flatnonzero(self.writer.is_media(flat))) if media else None,
            patches=tensor(np.concatenate([item.patches for item in media])) if media else None,
            grid=arrange(grid_rows, self.vision_config) if media else None,
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
        """Paragraphs in random order; of the last one as many words as there is room for."""
        found: list[str] = []
        while num_tokens > 0:
            words = rng.choice(self._prose).split(" ")
            ends = np.cumsum([self.count(word) for word in words])
            found.append(" ".join(words[: int(np.searchsorted(ends, num_tokens)) + 1]).rstrip() + "\n")
            num_tokens -= int(ends[-1])
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


def _pack(texts: Sequence[_Sequence], length: int) -> list[list[_Sequence]]:
    """Texts into sequences of at most `length` tokens where that is possible; long ones first."""
    packed: list[list[_Sequence]] = []
    room: list[int] = []
    for text in sorted(texts, key=lambda text: -len(text.token_ids)):
        size = len(text.token_ids)
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            packed.append([])
            room.append(length)
            place = len(room) - 1
        packed[place].append(text)
        room[place] -= size
    return packed


def _with_thinking(rng: random.Random, example: Example) -> Example:
    """Text and pictures are answered at once, whether thinking is off or up to the model."""
    thinking: Thinking = rng.choice(("adaptive", "disabled"))
    return Example(example.skill, example.turns, example.tools, thinking, example.labels)
