"""The tokenizer: byte-level BPE over the examples' own text, with MiniMax-M3's marker tokens at the end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from examples.train_tiny import recipe
from examples.train_tiny.prose import paragraphs as prose_paragraphs
from msaserve.eval import needle, picture, tool, video, words
from msaserve.eval.example import Example
from msaserve.eval.filler import paragraphs
from msaserve.gateway.chat import ChatTemplate


def build(template: ChatTemplate, *, seed: int = 0) -> tokenizers.Tokenizer:
    """Digits stand alone; every listed word is one token where the vocabulary has room for it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.FIRST_ADDED_ID,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(template, random.Random(seed)), trainer)
    assert tokenizer.get_vocab_size() == recipe.FIRST_ADDED_ID
    spare = recipe.VOCAB_SIZE - recipe.FIRST_ADDED_ID - len(recipe.SPECIAL_TOKENS) - len(recipe.MARKER_TOKENS)
    for content in recipe.SPECIAL_TOKENS:
        tokenizer.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
    for content in (*recipe.MARKER_TOKENS, *(f"<unused{i}>" for i in range(spare))):
        tokenizer.add_tokens([tokenizers.AddedToken(content, special=False, normalized=False)])
    assert tokenizer.token_to_id("]<]image[>[") == recipe.token_id("]<]image[>[")
    return tokenizer


def corpus(template: ChatTemplate, rng: random.Random) -> Iterator[str]:
    """Filler, conversations, every listed word many times over, and English prose."""
    from msaserve.eval.conversation import assistant, messages

    for _ in range(300):
        yield "".join(paragraphs(rng, 400, lambda text: len(text) // 4))
    closed = (words.NAMES, words.CITIES, words.NOUNS, words.ADJECTIVES, words.VERBS, words.ADVERBS, words.PLACES,
              words.COLOURS, words.SHAPES)  # fmt: skip
    for group in closed:
        for word in group:
            yield f" {word}" * 60
    examples: list[Example] = [tool.generate(rng) for _ in range(800)]
    examples += [needle.generate(rng, context=100, count=lambda text: len(text) // 4) for _ in range(200)]
    for example in examples:
        yield template.render(
            [*messages(example), assistant(example.turns[0].reply)],
            add_generation_prompt=False,
            kwargs={"tools": list(example.tools) or None, "thinking_mode": example.thinking},
        )
    small = picture.scene(rng, max_side=80)
    for turn in [*picture.turns(rng, small), *video.generate(rng, num_questions=2).turns]:
        yield f"{turn.parts[-1]} {turn.reply.content}" * 50
    yield from prose_paragraphs()
